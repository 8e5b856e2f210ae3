//! The text form of a payload's specification, as users type it and as the guest reads it.

use std::fmt;
use std::str::FromStr;

use crate::workload::{LineBuffer, PayloadSpec};

/// The reason why a specification is invalid: a sentence that names the bad value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PayloadSpecError(String);

impl fmt::Display for PayloadSpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PayloadSpecError {}

impl FromStr for PayloadSpec {
    type Err = PayloadSpecError;

    /// Parses
    /// `payload[,ws=64M][,rate=320M|max][,pattern=seq|random|zipf|stride[:K]|once][,seed=N]`
    /// `[,ring=0|3][,fill=zero|random][,seconds=N][,passes=N][,writers=N][,idle=halt|spin]`
    /// `[,burst=N][,check=always|end][,report=MS][,io=MS]`.
    fn from_str(text: &str) -> Result<Self, PayloadSpecError> {
        let mut items = text.split(',');
        if items.next() != Some("payload") {
            return Err(PayloadSpecError(format!(
                "guest \"{text}\" is unknown: the built-in guest is called \"payload\""
            )));
        }
        let mut spec = PayloadSpec::default();
        let mut keys: Vec<&str> = Vec::new();
        for item in items {
            let Some((key, value)) = item.split_once('=') else {
                return Err(PayloadSpecError(format!(
                    "\"{item}\" in \"{text}\" is not of the form key=value"
                )));
            };
            if keys.contains(&key) {
                return Err(PayloadSpecError(format!("\"{key}\" is given twice in \"{text}\"")));
            }
            keys.push(key);
            spec.set(key.as_bytes(), value.as_bytes()).map_err(|reason| {
                let hint = unit_hint(key, value);
                PayloadSpecError(format!("\"{item}\" in \"{text}\" {}{hint}", reason.0))
            })?;
        }
        Ok(spec)
    }
}

/// Returns a hint with the unit that a small number without a unit probably lacks.
fn unit_hint(key: &str, value: &str) -> String {
    match (key, value.parse()) {
        ("ws" | "rate", Ok(1..65_536)) => format!("; did you mean {key}={value}M?"),
        _ => String::new(),
    }
}

impl fmt::Display for PayloadSpec {
    /// Writes all settings, in the form that [`FromStr`] reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = LineBuffer::new();
        line.text("payload");
        self.write(&mut line, b',');
        f.write_str(&String::from_utf8_lossy(line.as_bytes()))
    }
}

impl PayloadSpec {
    /// Returns the kernel command line that makes a guest with `vcpus` vCPUs follow this
    /// specification.
    ///
    /// ```
    /// let spec: driftline_images::PayloadSpec = "payload,rate=max,seconds=5".parse().unwrap();
    /// let expected = "vcpus=2 ws=64M rate=max pattern=seq seed=1 ring=3 fill=zero seconds=5";
    /// assert_eq!(spec.cmdline(2), expected);
    /// ```
    pub fn cmdline(&self, vcpus: u32) -> String {
        let mut line = LineBuffer::new();
        line.text("vcpus=").number(u64::from(vcpus));
        self.write(&mut line, b' ');
        String::from_utf8_lossy(line.as_bytes()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use proptest::option;
    use proptest::prelude::*;

    use super::*;
    use crate::workload::{BodyFill, CheckMode, IdleMode, Pattern, PayloadRing, WriteRate};

    fn any_spec() -> impl Strategy<Value = PayloadSpec> {
        let rate = prop_oneof![
            Just(WriteRate::Max),
            (4096u64..=64 << 30).prop_map(WriteRate::BytesPerSecond)
        ];
        let pattern = prop_oneof![
            Just(Pattern::Seq),
            Just(Pattern::Random),
            Just(Pattern::Zipf),
            Just(Pattern::Once),
            (1u32..).prop_map(Pattern::Stride),
        ];
        let ring = prop_oneof![Just(PayloadRing::Zero), Just(PayloadRing::Three)];
        let fill = prop_oneof![Just(BodyFill::Zero), Just(BodyFill::Random)];
        let end = || option::of(1u64..=0xffff_ffff);
        let idle = prop_oneof![Just(IdleMode::Halt), Just(IdleMode::Spin)];
        let check = prop_oneof![Just(CheckMode::Always), Just(CheckMode::AtEnd)];
        let report = prop_oneof![Just(1000), 10u64..=60_000];
        let io = option::of(1u64..=60_000);
        let loops = (end(), end(), end(), idle, 1u64..=65_536, check, report, io);
        (1u64..1 << 26, rate, pattern, any::<u64>(), ring, fill, loops).prop_map(
            |(pages, rate, pattern, seed, ring, fill, loops)| {
                let (seconds, passes, writers, idle, burst, check, report_ms, io_ms) = loops;
                PayloadSpec {
                    ws_bytes: pages * 4096,
                    rate,
                    pattern,
                    seed,
                    ring,
                    fill,
                    seconds,
                    passes,
                    writers,
                    idle,
                    burst,
                    check,
                    report_ms,
                    io_ms,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn a_spec_survives_being_printed_and_parsed(spec in any_spec()) {
            prop_assert_eq!(spec.to_string().parse::<PayloadSpec>(), Ok(spec));
        }

        #[test]
        fn the_guest_reads_its_command_line_back(spec in any_spec(), vcpus in 1u32..=32) {
            let cmdline = spec.cmdline(vcpus);
            let mut read = PayloadSpec::default();
            for item in cmdline.split(' ') {
                let (key, value) = item.split_once('=').unwrap();
                if key == "vcpus" {
                    prop_assert_eq!(value, vcpus.to_string());
                } else {
                    read.set(key.as_bytes(), value.as_bytes()).unwrap();
                }
            }
            prop_assert_eq!(read, spec);
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "(payload)?[,=a-z0-9KMG:]{0,40}") {
            let _ = text.parse::<PayloadSpec>();
        }
    }

    #[test]
    fn payload_alone_has_every_default() {
        let spec: PayloadSpec = "payload".parse().unwrap();
        assert_eq!(spec, PayloadSpec::default());
        assert_eq!(
            spec.to_string(),
            "payload,ws=64M,rate=320M,pattern=seq,seed=1,ring=3,fill=zero"
        );
    }

    #[test]
    fn suffixes_are_powers_of_two() {
        let spec: PayloadSpec = "payload,ws=2G,rate=5K".parse().unwrap();
        assert_eq!(spec.ws_bytes, 2 << 30);
        assert_eq!(spec.rate, WriteRate::BytesPerSecond(5 << 10));
        let long: PayloadSpec = "payload,ws=2GiB,rate=5KiB".parse().unwrap();
        assert_eq!(long, spec);
    }

    #[test]
    fn refusal_names_the_bad_value() {
        for (text, part) in [
            ("linux", "guest \"linux\" is unknown"),
            ("payload,ws", "\"ws\" in \"payload,ws\" is not of the form key=value"),
            ("payload,ws=12Q", "\"ws=12Q\" in \"payload,ws=12Q\" is not a size such as 64M"),
            ("payload,ws=12MB", "is not a size such as 64M"),
            ("payload,ws=12iB", "is not a size such as 64M"),
            ("payload,ws=1.5G", "is not a size such as 64M (a whole number, then nothing, K,"),
            ("payload,ws=0", "is an empty working set"),
            ("payload,ws=5000", "is not a multiple of the page size"),
            ("payload,ws=64", "; did you mean ws=64M?"),
            ("payload,rate=320", "; did you mean rate=320M?"),
            ("payload,ws=1024G", "is more than the payload can map"),
            ("payload,ws=99999999999999999999", "is not a size"),
            ("payload,ws=18014398509481984K", "is not a size"),
            ("payload,rate=fast", "is neither `max` nor a size a second"),
            ("payload,rate=1", "is out of range"),
            ("payload,pattern=spiral", "is not a known pattern"),
            ("payload,pattern=stride:0", "has a step that is not a number"),
            ("payload,seed=-1", "is not a number below 2^64"),
            ("payload,ring=1", "is not a ring"),
            ("payload,fill=ones", "is not a known fill"),
            ("payload,seconds=0", "is not a number from 1"),
            ("payload,passes=x", "is not a number from 1"),
            ("payload,writers=0", "is not a number from 1"),
            ("payload,idle=sleep", "is not an idle mode (halt or spin)"),
            ("payload,burst=0", "is not a number of pages from 1 to 65536"),
            ("payload,check=never", "is not a check mode (always or end)"),
            ("payload,report=1", "is not an interval from 10 to 60000 ms"),
            ("payload,io=0", "is not an interval from 1 to 60000 ms"),
            (
                "payload,colour=red",
                "\"colour=red\" in \"payload,colour=red\" is not a setting of the payload",
            ),
            ("payload,seed=1,seed=2", "\"seed\" is given twice"),
        ] {
            let error = text.parse::<PayloadSpec>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
