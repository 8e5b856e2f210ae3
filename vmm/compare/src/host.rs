//! Describes the machine on which a comparison was made, for readers elsewhere.

use std::fs;

use serde::Serialize;

use driftline_machine::HostMemory;
use driftline_machine::doctor::diagnose;

/// Description of this host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct HostDescription {
    /// The processor's name.
    pub processor: String,
    /// Number of processors that the process may use.
    pub processors: usize,
    /// Total memory, in bytes.
    pub mem_bytes: u64,
    /// Operating system and release.
    pub kernel: String,
    /// KVM's access to the processor: `yes`, `nested`, or `missing` where guest kernels may be
    /// emulated.
    pub hardware_virtualization: String,
    /// Setting of transparent huge pages.
    pub transparent_huge_pages: String,
}

impl HostDescription {
    /// Reads a few files of `/proc` and `/sys`. Must be called before the process is sandboxed.
    pub fn describe() -> Self {
        // The first time that rustix reads a clock, it asks the kernel for the vDSO's address. No
        // seccomp filter allows that call, so it is made here.
        let _ = super::cpu::this_thread();
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = cpuinfo.lines().find(|l| l.starts_with("model name"));
        let name = name.and_then(|l| l.split_once(':')).map(|(_, name)| name.trim().to_owned());
        let uname = rustix::system::uname();
        let words = |s: &std::ffi::CStr| s.to_string_lossy().into_owned();
        let findings = diagnose().findings;
        let found = |name: &str| {
            let finding = findings.iter().find(|f| f.name == name);
            finding.map_or_else(|| "unknown".to_owned(), |f| f.value.clone())
        };
        Self {
            processor: name.unwrap_or_else(|| "unknown".to_owned()),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            mem_bytes: HostMemory::read().map_or(0, |host| host.total),
            kernel: format!("{} {}", words(uname.sysname()), words(uname.release())),
            hardware_virtualization: found("hardware virtualization"),
            transparent_huge_pages: found("transparent huge pages"),
        }
    }

    /// Returns a caveat for comparing this host's figures with those of other hosts; `None` for a
    /// host with hardware virtualization.
    pub(super) fn caveat(&self) -> Option<&'static str> {
        match self.hardware_virtualization.as_str() {
            "missing" => Some(
                "This host's KVM has no hardware virtualization (no VMX or SVM): it works with \
                    shadow page tables. Write faults, exits and every reprotect cost more than \
                    with EPT or NPT, so slow-downs and epochs are larger here than on such \
                    hosts. Compare the ways with each other; the absolute figures are this \
                    host's, not KVM's.",
            ),
            "nested" => Some(
                "This host is a guest itself: exits and first writes to pages cost more than on \
                    hardware. Compare the ways with each other; the absolute figures are this \
                    host's, not KVM's.",
            ),
            _ => None,
        }
    }
}

/// Returns the current UTC date and time, such as 2026-11-23 02:30.
pub(super) fn utc_date() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    date(now.map_or(0, |since| since.as_secs()))
}

/// Formats seconds since 1970 as a date of the Gregorian calendar.
fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    let (mut year, mut left) = (1970, days);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02} {:02}:{:02}", left + 1, rest / 3600, rest / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00");
        assert_eq!(date(951_827_696), "2000-02-29 12:34");
        assert_eq!(date(1_735_689_599), "2024-12-31 23:59");
        assert_eq!(date(1_795_400_940), "2026-11-23 02:29");
    }

    #[test]
    fn caveat_follows_hardware_virtualization() {
        let mut host = HostDescription::describe();
        let found = host.hardware_virtualization.clone();
        assert!(["yes", "nested", "missing"].contains(&found.as_str()), "{found}");
        let mut caveat = |value: &str| {
            host.hardware_virtualization = value.to_owned();
            host.caveat().unwrap_or_default()
        };
        assert!(caveat("missing").contains("shadow page tables"));
        assert!(caveat("nested").contains("a guest itself"));
        assert_eq!(caveat("yes"), "");
    }

    #[test]
    fn this_host_has_processors_memory_and_a_kernel() {
        let host = HostDescription::describe();
        assert!(host.processors > 0 && host.mem_bytes > 0);
        assert!(host.kernel.starts_with("Linux "), "{}", host.kernel);
    }
}
