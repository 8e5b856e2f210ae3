//! The processor that a guest is to see: a model, less what is not wanted.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::cpu_model;

/// No command line asks for more; a bound for hostile configurations.
const MOST_WITHOUT: usize = 64;
/// CPUID has about thirty leaves of features, and one a component of XSAVE.
const MOST_WORDS: usize = 64;

/// What a guest's processor is made from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuModel {
    /// All that the host's KVM can show.
    #[default]
    Host,
    /// x86-64-v2 and no more, so that the guest can move between unlike hosts of one vendor. At
    /// most 1 TiB of guest addresses.
    Baseline,
}

/// The processor of a guest.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CpuConfig {
    /// What it is made from.
    pub model: CpuModel,
    /// Features that it does not have, by name.
    pub without: Vec<String>,
    /// What it has shown to the guest since its first start, for hosts to which it may move: filled
    /// in when the machine is built.
    pub shown: Vec<CpuidWord>,
    /// What it has shown by registers that tell of features.
    pub shown_msrs: Vec<MsrWord>,
    /// The rate of its time stamp counter in kHz, if CPUID promised that it never changes.
    pub tsc_khz: Option<u32>,
}

/// A model-specific register that tells of features.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MsrWord {
    /// Its number.
    pub index: u32,
    /// What it reads as.
    pub value: u64,
}

/// The four registers of one CPUID leaf, as far as they are features (or, of leaf 0, the vendor).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CpuidWord {
    /// EAX of the question.
    pub function: u32,
    /// ECX of the question.
    pub index: u32,
    /// EAX, EBX, ECX, EDX of the answer.
    pub registers: [u32; 4],
}

impl CpuConfig {
    /// Whether all of it is known here; if not, why.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.without.len() > MOST_WITHOUT {
            let count = self.without.len();
            return Err(format!("its processor lacks {count} features, more than {MOST_WITHOUT}"));
        }
        if self.shown.len() > MOST_WORDS {
            let count = self.shown.len();
            return Err(format!("its processor has {count} CPUID leaves, more than {MOST_WORDS}"));
        }
        if self.shown_msrs.len() > MOST_WORDS {
            let count = self.shown_msrs.len();
            return Err(format!(
                "its processor has {count} registers of features, more than {MOST_WORDS}"
            ));
        }
        if self.tsc_khz == Some(0) {
            return Err("its time stamp counter runs at 0 kHz".to_owned());
        }
        match self.without.iter().find(|name| cpu_model::find(name).is_none()) {
            None => Ok(()),
            Some(name) => Err(format!("there is no processor feature \"{name}\"")),
        }
    }
}

impl fmt::Display for CpuConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.model {
            CpuModel::Host => "host",
            CpuModel::Baseline => "baseline",
        })?;
        self.without.iter().try_for_each(|name| write!(f, ",-{name}"))
    }
}

impl FromStr for CpuConfig {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let mut parts = s.split(',');
        let model = match parts.next() {
            Some("host") => CpuModel::Host,
            Some("baseline") => CpuModel::Baseline,
            other => {
                let name = other.unwrap_or_default();
                return Err(format!(
                    "there is no processor \"{name}\"; there are host and baseline"
                ));
            }
        };
        let mut without = Vec::new();
        for part in parts {
            let Some(name) = part.strip_prefix('-') else {
                return Err(format!(
                    "\"{part}\" takes no feature away: write -NAME, such as -cx16"
                ));
            };
            without.push(name.to_owned());
        }
        let config = Self { model, without, ..Self::default() };
        config.check()?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_read() {
        for text in ["host", "baseline", "host,-cx16", "baseline,-popcnt,-sse4_2"] {
            assert_eq!(text.parse::<CpuConfig>().unwrap().to_string(), text);
        }
        let refused = |s: &str| s.parse::<CpuConfig>().unwrap_err();
        assert_eq!(refused("max"), "there is no processor \"max\"; there are host and baseline");
        assert_eq!(
            refused("host,cx16"),
            "\"cx16\" takes no feature away: write -NAME, such as -cx16"
        );
        assert_eq!(refused("host,-warp"), "there is no processor feature \"warp\"");
        let many = format!("host{}", ",-cx16".repeat(65));
        assert!(refused(&many).contains("lacks 65 features"));
    }
}
