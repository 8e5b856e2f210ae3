//! The processor that a guest sees: a model, minus unwanted features, changed by a template.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::cpu_template::CpuTemplate;
use super::error::{ConfigError, in_range};
use crate::cpu_model;

/// Limit of removed features. No command line needs more; it bounds hostile configurations.
const MAX_REMOVED: usize = 64;
/// Limit of recorded words. CPUID has about thirty feature leaves, and one per XSAVE component.
const MAX_WORDS: usize = 64;

/// The base of a guest's processor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuModel {
    /// All features that the host's KVM can offer.
    #[default]
    Host,
    /// x86-64-v2 and no more, so that the guest can move between different hosts of one vendor. At
    /// most 1 TiB of guest addresses.
    Baseline,
}

/// The processor of a guest.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CpuConfig {
    /// The model that the processor starts from.
    pub model: CpuModel,
    /// Names of the features that are removed.
    pub without: Vec<String>,
    /// Whether two vCPUs with successive ids are the threads of one core. Otherwise each vCPU is a
    /// core.
    pub smt: bool,
    /// Changes of the rest, bit by bit.
    pub template: CpuTemplate,
    /// The CPUID words that the guest has seen since its first start, recorded when the machine is
    /// built. Hosts to which the guest moves are checked against them. Features that only the
    /// template promises are not among them: no host needs to have those.
    pub exposed: Vec<CpuidWord>,
    /// The feature MSRs that the guest has seen, likewise.
    pub exposed_msrs: Vec<MsrWord>,
    /// Rate of the time stamp counter in kHz, if CPUID promised that it never changes.
    pub tsc_khz: Option<u32>,
}

/// A model-specific register that describes features.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MsrWord {
    /// The register's number.
    pub index: u32,
    /// The value that the guest reads.
    pub value: u64,
}

/// The four registers of one CPUID leaf, reduced to features (in leaf 0, to the vendor).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CpuidWord {
    /// Input EAX: the leaf.
    pub function: u32,
    /// Input ECX: the subleaf.
    pub index: u32,
    /// Output EAX, EBX, ECX, EDX.
    pub registers: [u32; 4],
}

impl CpuConfig {
    /// Checks that this version knows all features, and that the lists are not too long.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let counts = [
            ("features that the processor lacks", self.without.len(), MAX_REMOVED),
            ("CPUID leaves of the processor", self.exposed.len(), MAX_WORDS),
            ("registers of features", self.exposed_msrs.len(), MAX_WORDS),
        ];
        for (what, count, most) in counts {
            in_range(what, count as u64, 0, most as u64)?;
        }
        self.template.check()?;
        if let Some(khz) = self.tsc_khz {
            in_range("kHz of the time stamp counter", khz.into(), 1, u32::MAX.into())?;
        }
        match self.without.iter().find(|name| cpu_model::find(name).is_none()) {
            None => Ok(()),
            Some(name) => Err(ConfigError::UnknownFeature { name: name.clone() }),
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
    type Err = ConfigError;

    fn from_str(s: &str) -> Result<Self, ConfigError> {
        let mut parts = s.split(',');
        let model = match parts.next() {
            Some("host") => CpuModel::Host,
            Some("baseline") => CpuModel::Baseline,
            other => {
                let name = other.unwrap_or_default();
                return Err(ConfigError::unknown("processor", name, "host or baseline"));
            }
        };
        let mut without = Vec::new();
        for part in parts {
            let Some(name) = part.strip_prefix('-') else {
                let form = "write -NAME, such as -cx16";
                return Err(ConfigError::malformed("feature to remove", part, form));
            };
            without.push(name.to_owned());
        }
        let config = Self { model, without, ..Self::default() };
        config.check().map_err(with_nearest)?;
        Ok(config)
    }
}

/// Adds a suggestion to the refusal of a user's text. Configurations of a peer or a store have
/// none.
fn with_nearest(refusal: ConfigError) -> ConfigError {
    match refusal {
        ConfigError::UnknownFeature { name } => {
            let nearest = cpu_model::nearest(&name);
            ConfigError::MisspelledFeature { name, nearest }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_text_round_trips() {
        for text in ["host", "baseline", "host,-cx16", "baseline,-popcnt,-sse4_2"] {
            assert_eq!(text.parse::<CpuConfig>().unwrap().to_string(), text);
        }
        let refused = |s: &str| s.parse::<CpuConfig>().unwrap_err().to_string();
        assert_eq!(refused("max"), "unknown processor \"max\": use host or baseline");
        assert_eq!(
            refused("host,cx16"),
            "\"cx16\" is not a valid feature to remove: write -NAME, such as -cx16"
        );
        let list = "`driftline doctor -v` lists the features of this host";
        assert_eq!(refused("host,-warp"), format!("unknown processor feature \"warp\"; {list}"));
        assert_eq!(
            refused("host,-avx521f"),
            format!("unknown processor feature \"avx521f\": did you mean avx512f? {list}")
        );
        let many = format!("host{}", ",-cx16".repeat(65));
        assert!(refused(&many).contains("65 features"));
    }

    #[test]
    fn long_feature_name_is_quoted_in_part() {
        let name = "x".repeat(64 << 10);
        let long = CpuConfig { without: vec![name.clone()], ..CpuConfig::default() };
        let refusal = long.check().unwrap_err();
        assert_eq!(refusal, ConfigError::UnknownFeature { name: name.clone() });
        assert!(refusal.to_string().ends_with("x\"... of 65536 bytes"));
        let refusal = format!("host,-{name}").parse::<CpuConfig>().unwrap_err();
        assert!(refusal.to_string().len() < 200, "{refusal}");
        assert_eq!(refusal, ConfigError::MisspelledFeature { name, nearest: None });
    }
}
