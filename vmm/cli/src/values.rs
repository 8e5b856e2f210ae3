//! Parses values on the command line: sizes, durations, addresses.

use std::env;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_machine::config::DEFAULT_RING_ENTRIES;
use driftline_machine::size::{SIZE_FORMS, parse_size};
use driftline_migrate::Address;

/// Parses a size in bytes, in the forms of [`SIZE_FORMS`].
pub(super) fn size(text: &str) -> Result<u64, String> {
    parse_size(text).ok_or_else(|| format!("a size is {SIZE_FORMS}"))
}

/// Parses the size of guest memory, which must be one that a machine can have.
pub(super) fn memory(text: &str) -> Result<u64, String> {
    use driftline_machine::limits::{MAX_MEM_BYTES, MIN_MEM_BYTES};
    match size(text)? {
        bytes if !bytes.is_multiple_of(PAGE_SIZE) => {
            let unit = if bytes == 1 { "byte" } else { "bytes" };
            Err(format!("{bytes} {unit} is not a multiple of 4K{}", unit_hint(text)))
        }
        bytes if !(MIN_MEM_BYTES..=MAX_MEM_BYTES).contains(&bytes) => Err(format!(
            "a guest has from {}M to {}G of memory{}",
            MIN_MEM_BYTES >> 20,
            MAX_MEM_BYTES >> 30,
            unit_hint(text)
        )),
        bytes => Ok(bytes),
    }
}

/// Suggests the size that a small number without a unit probably meant.
fn unit_hint(text: &str) -> String {
    match text.parse() {
        Ok(1..16) => format!("; did you mean {text}G?"),
        Ok(16..65_536) => format!("; did you mean {text}M?"),
        _ => String::new(),
    }
}

/// The id of an instance that has no other.
pub(super) const DEFAULT_ID: &str = "anonymous-instance";

/// Parses the id of an instance.
pub(super) fn instance_id(text: &str) -> Result<String, String> {
    let is_valid = (1..=64).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    match is_valid {
        true => Ok(text.to_owned()),
        false => Err("an id has 1 to 64 letters, digits and '-'".to_owned()),
    }
}

/// Parses the number of vCPUs.
pub(super) fn vcpus(text: &str) -> Result<u8, String> {
    let most = driftline_machine::limits::MAX_VCPUS;
    let number: u64 = text.parse().map_err(|_| format!("--vcpus takes a number, 1 to {most}"))?;
    let vcpus = u8::try_from(number).ok().filter(|n| (1..=most).contains(n));
    vcpus.ok_or_else(|| format!("a guest has 1 to {most} vCPUs"))
}

/// Parses the number of a checkpoint.
pub(super) fn checkpoint(text: &str) -> Result<u64, String> {
    let parsed = text.parse().ok();
    parsed.ok_or_else(|| "a checkpoint has a number; `driftline store ls` lists them".to_owned())
}

/// Parses a number of checkpoints.
pub(super) fn at_least_one(text: &str) -> Result<NonZeroU64, String> {
    text.parse().map_err(|_| "it must be a number of at least 1".to_owned())
}

/// Parses an address to listen on.
pub(super) fn listen_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "an address to listen on is IP:PORT, such as 127.0.0.1:9464, 0.0.0.0:9464 or [::1]:9464"
            .to_owned()
    })
}

/// Nanoseconds in a millisecond, the finest unit of durations in requests to a VMM.
const NS_PER_MS: u32 = 1_000_000;

/// The longest duration that a command accepts. A longer one is a mistake, and overflows a clock.
const MAX_DAYS: u64 = 365;
const MAX_DURATION: Duration = Duration::from_hours(24 * MAX_DAYS);

/// The units of durations. `humantime` knows others, such as `M`, a month.
const DURATION_UNITS: [&str; 5] = ["ms", "s", "m", "h", "d"];

/// Parses a duration in whole milliseconds: numbers with [`DURATION_UNITS`].
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let mut units = text.split(|c: char| !c.is_alphabetic()).filter(|unit| !unit.is_empty());
    // `humantime` reads "1 30m" as 130 minutes.
    let have_units = text.split_whitespace().all(|part| part.ends_with(char::is_alphabetic));
    let are_known = have_units && units.all(|unit| DURATION_UNITS.contains(&unit));
    match humantime::parse_duration(text).ok().filter(|_| are_known) {
        None => {
            Err("a duration is a number and ms, s, m, h or d, such as 100ms or 1h 30m".to_owned())
        }
        Some(long) if long > MAX_DURATION => Err(format!("a duration is at most {MAX_DAYS}d")),
        Some(fine) if !fine.subsec_nanos().is_multiple_of(NS_PER_MS) => {
            Err("a duration is in whole milliseconds, such as 100ms".to_owned())
        }
        Some(duration) => Ok(duration),
    }
}

/// Parses the time from one checkpoint to the next.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("an interval is at least 1ms".to_owned()),
        every => Ok(every),
    }
}

/// Parses a downtime target in milliseconds.
pub(super) fn downtime_ms(text: &str) -> Result<u64, String> {
    at_most(text, driftline_control::model::MAX_DOWNTIME_MS, "a downtime target", "milliseconds")
}

/// Parses the time limit of pre-copy, in seconds.
pub(super) fn timeout_s(text: &str) -> Result<u64, String> {
    at_most(text, driftline_control::model::MAX_TIMEOUT_S, "a timeout", "seconds")
}

/// Parses a bandwidth in bytes per second.
pub(super) fn bandwidth(text: &str) -> Result<u64, String> {
    let least = driftline_migrate::MIN_BANDWIDTH;
    match size(text)? {
        rate if rate < least => Err(format!("a bandwidth is at least {}M a second", least >> 20)),
        rate => Ok(rate),
    }
}

/// Parses the number of a migration's connections.
pub(super) fn connections(text: &str) -> Result<u32, String> {
    let most = driftline_migrate::MAX_CONNECTIONS;
    let parsed = text.parse().ok().filter(|n| (1..=most).contains(n));
    parsed.ok_or_else(|| format!("a migration has 1 to {most} connections"))
}

fn at_most(text: &str, limit: u64, what: &str, unit: &str) -> Result<u64, String> {
    let parsed = text.parse().ok().filter(|n| *n <= limit);
    parsed.ok_or_else(|| format!("{what} is from 0 to {limit} {unit}"))
}

/// Parses the number of entries of a dirty ring.
pub(super) fn ring_entries(text: &str) -> Result<u32, String> {
    let parsed = text.parse().ok();
    parsed.filter(|n: &u32| n.is_power_of_two()).ok_or_else(|| {
        let near = parsed.filter(|n| (1..1 << 20).contains(n)).map(u32::next_power_of_two);
        let most = most_ring_entries();
        let most = most.map_or(String::new(), |most| format!("; this host takes up to {most}"));
        format!("it must be a power of two, such as {}{most}", near.unwrap_or(DEFAULT_RING_ENTRIES))
    })
}

/// Returns the maximum number of entries of a dirty ring on this host, if it has rings.
pub(super) fn most_ring_entries() -> Option<u32> {
    let capabilities = driftline_machine::doctor::usable_kvm().ok()?;
    capabilities.dirty_ring().map(|(_, most)| most)
}

/// Parses the address of a migration: `tcp:HOST:PORT`, `unix:PATH` or `fd:N`.
pub(super) fn address(text: &str) -> Result<Address, String> {
    let has_kind = ["tcp:", "unix:", "fd:"].iter().any(|kind| text.starts_with(kind));
    let address = text.parse().ok().filter(|_| has_kind);
    match address {
        // The VMM that connects there may have another working directory.
        Some(Address::Unix(path)) => {
            std::path::absolute(path).map(Address::Unix).map_err(|e| e.to_string())
        }
        Some(address) => Ok(address),
        None => {
            Err("an address is tcp:HOST:PORT, such as tcp:10.0.0.2:7001, unix:PATH or fd:N"
                .to_owned())
        }
    }
}

/// Returns the default directory of a host's records: the system's for root, otherwise the user's.
pub(super) fn state_dir() -> PathBuf {
    let of = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if rustix::process::geteuid().is_root() {
        return "/var/lib/driftline".into();
    }
    let state = of("XDG_STATE_HOME").or_else(|| Some(of("HOME")?.join(".local/state")));
    state.unwrap_or_else(env::temp_dir).join("driftline")
}

/// Checks the spec of the embedded guest. The result is text, because a configuration contains
/// text.
pub(super) fn guest_spec(text: &str) -> Result<String, String> {
    let spec: Result<driftline_images::PayloadSpec, _> = text.parse();
    spec.map(|_| text.to_owned()).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations_have_units() {
        assert_eq!(size("64M"), Ok(64 << 20));
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("64MiB"), Ok(64 << 20));
        assert!(size("64MB").unwrap_err().contains("not KB, MB or GB"));
        assert!(size("").is_err() && size("-1").is_err());
        assert_eq!(memory("1G"), Ok(1 << 30));
        assert!(memory("1M").unwrap_err().contains("from 16M"));
        assert!(memory("16777217").unwrap_err().contains("not a multiple of 4K"));
        assert!(memory("1").unwrap_err().ends_with("did you mean 1G?"));
        assert!(memory("512").unwrap_err().ends_with("did you mean 512M?"));
        assert!(ring_entries("1000").unwrap_err().contains("such as 1024"));
        assert_eq!((vcpus("32"), at_least_one("0").is_err()), (Ok(32), true));
        assert!(vcpus("33").is_err() && vcpus("0").is_err() && checkpoint("foo").is_err());
        assert_eq!(duration("100ms"), Ok(Duration::from_millis(100)));
        assert_eq!(duration("3s"), Ok(Duration::from_secs(3)));
        assert_eq!(duration("5m"), Ok(Duration::from_mins(5)));
        assert_eq!(duration("1h 30m"), Ok(Duration::from_mins(90)));
        assert_eq!(duration("365d"), Ok(MAX_DURATION));
        for wrong in [
            "",
            "3",
            "ms",
            "-1s",
            "5M",
            "1Q",
            "99999999999999999999s",
            "1us",
            "1w",
            "1month",
            "1y",
            "0.5y",
            "1h 2weeks",
            "1min",
            "1H",
            "1 30m",
            "1 m",
        ] {
            assert!(duration(wrong).unwrap_err().contains("such as 100ms or 1h 30m"), "{wrong}");
        }
        for fine in ["0.5ms", "0.0001s", "1s 1.5ms"] {
            assert!(duration(fine).unwrap_err().contains("whole milliseconds"), "{fine}");
        }
        assert!(duration("366d").unwrap_err().ends_with("at most 365d"));
        assert!(interval("0ms").is_err() && interval("0s").is_err());
        assert_eq!(interval("1ms"), Ok(Duration::from_millis(1)));
        assert_eq!(timeout_s("3600"), Ok(3600));
        assert!(timeout_s("18446744073709551615").unwrap_err().contains("from 0 to 2592000"));
        assert!(downtime_ms("3600001").is_err());
        assert_eq!(ring_entries("4096"), Ok(4096));
        assert!(ring_entries("1000").is_err() && ring_entries("0").is_err());
        assert!(listen_address("[::1]:9464").is_ok() && listen_address("127.0.0.1:0").is_ok());
        for bad in ["localhost:9464", "9464", ":9464", "127.0.0.1", "127.0.0.1:65536"] {
            assert!(listen_address(bad).unwrap_err().contains("IP:PORT"), "{bad}");
        }
        assert_eq!(address("tcp:[::1]:7001"), Ok(Address::Tcp("[::1]:7001".into())));
        let here = std::env::current_dir().unwrap();
        assert_eq!(address("unix:a"), Ok(Address::Unix(here.join("a"))));
        for bad in ["host:7001", "tcp:host", "tcp::1", "unix:", "fd:1"] {
            assert!(address(bad).is_err(), "{bad}");
        }
        assert!(guest_spec("payload,ws=1M").is_ok() && guest_spec("paperload").is_err());
    }
}
