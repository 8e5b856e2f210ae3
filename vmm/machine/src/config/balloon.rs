//! A balloon in a configuration and on the command line.

use std::str::FromStr;

use driftline_dirty_tracker::PAGE_SIZE;
use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::spec::{SpecError, Syntax};
use crate::size::{SIZE_FORMS, parse_size};

/// A memory balloon. Its command line form is
/// `[size=SIZE][,deflate-on-oom=on|off][,reporting=on|off][,hinting=on|off]`, which gives it no
/// statistics.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BalloonConfig {
    /// Initial target size in bytes: whole frames, at most the guest's memory.
    pub bytes: u64,
    /// Whether the guest may take memory back from the balloon rather than kill a program.
    pub deflate_on_oom: bool,
    /// Whether the guest reports freed memory, which the host gets back until it is used again.
    pub reporting: bool,
    /// Whether the guest is asked for free-page hints when all memory is to be copied.
    pub hinting: bool,
    /// Interval at which the guest is asked for statistics of its memory, in seconds. With 0 there
    /// are none.
    pub statistics_interval_s: u16,
}

impl Default for BalloonConfig {
    fn default() -> Self {
        Self {
            bytes: 0,
            deflate_on_oom: true,
            reporting: true,
            hinting: true,
            statistics_interval_s: 0,
        }
    }
}

static BALLOON: Syntax = Syntax {
    device: "a balloon",
    options: &["size=SIZE", "deflate-on-oom=on|off", "reporting=on|off", "hinting=on|off"],
};

impl FromStr for BalloonConfig {
    type Err = SpecError;

    fn from_str(s: &str) -> Result<Self, SpecError> {
        let (options, default) = (BALLOON.read(s)?, Self::default());
        Ok(Self {
            bytes: options.get("size").map_or(Ok(default.bytes), read_size)?,
            deflate_on_oom: options.on_off("deflate-on-oom", default.deflate_on_oom)?,
            reporting: options.on_off("reporting", default.reporting)?,
            hinting: options.on_off("hinting", default.hinting)?,
            statistics_interval_s: default.statistics_interval_s,
        })
    }
}

fn read_size(text: &str) -> Result<u64, ConfigError> {
    let bytes = parse_size(text).filter(|bytes| bytes.is_multiple_of(PAGE_SIZE));
    bytes.ok_or_else(|| {
        let form = format!("{SIZE_FORMS}; whole pages of 4K");
        ConfigError::malformed("size of a balloon", text, form)
    })
}

/// Checks that a guest with `mem_bytes` of memory can have the balloon.
pub(super) fn check(balloon: &BalloonConfig, mem_bytes: u64) -> Result<(), ConfigError> {
    let value = balloon.bytes;
    if value <= mem_bytes && value.is_multiple_of(PAGE_SIZE) {
        return Ok(());
    }
    let wanted = format!("whole pages within the {mem_bytes} bytes of memory");
    Err(ConfigError::Size { part: "the balloon".to_owned(), value, unit: "bytes", wanted })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balloon_options_are_parsed() {
        let parsed = |s: &str| s.parse::<BalloonConfig>();
        assert_eq!(parsed(""), Ok(BalloonConfig::default()));
        let balloon = parsed("size=64M,reporting=off,deflate-on-oom=off").unwrap();
        assert!(balloon.bytes == 64 << 20 && balloon.hinting);
        assert!(!balloon.reporting && !balloon.deflate_on_oom);
        for wrong in [
            "size=1",
            "size=",
            "64M",
            "reporting",
            "hinting=yes",
            ",",
            "size=1M,",
            "size=1M,size=2M",
        ] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
        assert!(check(&balloon, 64 << 20).is_ok());
        assert!(check(&balloon, 32 << 20).unwrap_err().to_string().contains("67108864 bytes"));
    }
}
