//! The host's memory.

/// The host's memory in bytes, as `/proc/meminfo` reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostMemory {
    /// All memory.
    pub total: u64,
    /// Memory that the host can provide without swapping.
    pub available: u64,
    /// All swap space.
    pub swap: u64,
}

impl HostMemory {
    /// Reads the current numbers. `None` if the host does not report them.
    pub fn read() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
    }

    fn parse(meminfo: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        Some(Self {
            total: field("MemTotal:")?,
            available: field("MemAvailable:")?,
            swap: field("SwapTotal:").unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_name() {
        let text = "MemTotal:  8 kB\nMemFree: 1 kB\nMemAvailable: 4 kB\nSwapTotal: 2 kB\n";
        let memory = HostMemory { total: 8192, available: 4096, swap: 2048 };
        assert_eq!(HostMemory::parse(text), Some(memory));
        let text = text.replace("SwapTotal: 2 kB\n", "");
        assert_eq!(HostMemory::parse(&text), Some(HostMemory { swap: 0, ..memory }));
        assert_eq!(HostMemory::parse(&text.replace('8', "many")), None);
        assert!(HostMemory::read().is_some_and(|now| now.available <= now.total));
    }
}
