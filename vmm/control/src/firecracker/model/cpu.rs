//! Custom CPU templates.

use driftline_machine::config::{ChangedBits, CpuTemplate, CpuidChange, MsrChange};
use serde::de::Error;
use serde::{Deserialize, Deserializer};

/// Body of `PUT /cpu-config`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CustomCpuTemplate {
    /// KVM capabilities to require, or not to require.
    #[serde(default)]
    pub kvm_capabilities: Vec<KvmCapability>,
    /// Changes of CPUID.
    #[serde(default)]
    pub cpuid_modifiers: Vec<CpuidLeafModifier>,
    /// Changes of model-specific registers.
    #[serde(default)]
    pub msr_modifiers: Vec<RegisterModifier>,
}

impl From<&CustomCpuTemplate> for CpuTemplate {
    fn from(custom: &CustomCpuTemplate) -> Self {
        let mut template = Self::default();
        for capability in &custom.kvm_capabilities {
            match *capability {
                KvmCapability::Add(number) => template.require(number),
                // Removes only what the template requires: every machine still checks the
                // capabilities that it needs.
                KvmCapability::Remove(number) => template.stop_requiring(number),
            }
        }
        for CpuidLeafModifier { leaf, subleaf, flags, modifiers } in &custom.cpuid_modifiers {
            let (function, index, flags) = (*leaf, *subleaf, *flags);
            let unchanged =
                CpuidChange { function, index, flags, registers: [ChangedBits::default(); 4] };
            template.change_leaf(unchanged);
            for CpuidRegisterModifier { register, bitmap } in modifiers {
                let mut change = unchanged;
                change.registers[*register as usize] = *bitmap;
                template.change_leaf(change);
            }
        }
        for RegisterModifier { addr, bitmap } in &custom.msr_modifiers {
            template.change_msr(MsrChange { index: *addr, bits: *bitmap });
        }
        template
    }
}

/// A change of the KVM capabilities that a guest needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvmCapability {
    /// The guest needs this one, too.
    Add(u32),
    /// The guest does not need this one.
    Remove(u32),
}

impl<'de> Deserialize<'de> for KvmCapability {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let number = |digits: &str| {
            digits.parse().map_err(|e| {
                D::Error::custom(format_args!(
                    "Failed to parse string [{text}] as a kvm capability - can not convert to \
                     numeric: {e}"
                ))
            })
        };
        match text.strip_prefix('!') {
            Some(digits) => number(digits).map(Self::Remove),
            None => number(&text).map(Self::Add),
        }
    }
}

/// Changes of one CPUID leaf.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct CpuidLeafModifier {
    /// The leaf.
    #[serde(deserialize_with = "number")]
    pub leaf: u32,
    /// The subleaf.
    #[serde(deserialize_with = "number")]
    pub subleaf: u32,
    /// KVM's flags of the entry.
    pub flags: u32,
    /// Changes of its registers.
    pub modifiers: Vec<CpuidRegisterModifier>,
}

/// A register of a CPUID leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CpuidRegister {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

impl<'de> Deserialize<'de> for CpuidRegister {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)?.as_str() {
            "eax" => Ok(Self::Eax),
            "ebx" => Ok(Self::Ebx),
            "ecx" => Ok(Self::Ecx),
            "edx" => Ok(Self::Edx),
            _ => {
                Err(D::Error::custom("Invalid CPUID register. Must be one of [eax, ebx, ecx, edx]"))
            }
        }
    }
}

/// A change of a CPUID leaf's register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub struct CpuidRegisterModifier {
    /// The register.
    pub register: CpuidRegister,
    /// The changed bits.
    #[serde(deserialize_with = "bits_of_32")]
    pub bitmap: ChangedBits<u32>,
}

/// A change of a model-specific register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub struct RegisterModifier {
    /// The register's number.
    #[serde(deserialize_with = "number")]
    pub addr: u32,
    /// The changed bits.
    #[serde(deserialize_with = "bits_of_64")]
    pub bitmap: ChangedBits<u64>,
}

fn bits_of_32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ChangedBits<u32>, D::Error> {
    let ChangedBits { mask, value } = bits(deserializer, u32::BITS)?;
    // No bit is above the width.
    Ok(ChangedBits { mask: mask as u32, value: value as u32 })
}

fn bits_of_64<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ChangedBits<u64>, D::Error> {
    bits(deserializer, u64::BITS)
}

/// Parses a bitmap of 0, 1, x (unchanged) and `_` (ignored), the lowest bit last.
fn bits<'de, D>(deserializer: D, width: u32) -> Result<ChangedBits<u64>, D::Error>
where
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    let refuse = |why: &dyn std::fmt::Display| {
        D::Error::custom(format_args!("Failed to parse string [{text}] as a bitmap - {why}"))
    };
    let digits = text.strip_prefix("0b").unwrap_or(&text);
    let mut changes = ChangedBits::default();
    let mut at = 0;
    for digit in digits.bytes().rev() {
        if at == width {
            return Err(refuse(&"string is too long"));
        }
        let bit = 1 << at;
        match digit {
            b'_' => continue,
            b'x' => {}
            b'0' => changes.mask |= bit,
            b'1' => {
                changes.mask |= bit;
                changes.value |= bit;
            }
            // Firecracker shows the byte's number, not the character.
            other => return Err(refuse(&format_args!("unknown character: {other}"))),
        }
        at += 1;
    }
    Ok(changes)
}

/// Parses a number with the prefix `0x` or `0b`.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let text = String::deserialize(deserializer)?;
    let parsed = match (text.strip_prefix("0b"), text.strip_prefix("0x")) {
        (Some(digits), _) => u32::from_str_radix(digits, 2),
        (None, Some(digits)) => u32::from_str_radix(digits, 16),
        (None, None) => {
            return Err(D::Error::custom(format_args!(
                "No supported number system prefix found in value [{text}]. Make sure to prefix \
                 the number with '0x' for hexadecimal numbers or '0b' for binary numbers."
            )));
        }
    };
    parsed.map_err(|e| {
        D::Error::custom(format_args!(
            "Failed to parse string [{text}] as a number for CPU template - {e:?}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(text: &str) -> Result<CustomCpuTemplate, serde_json::Error> {
        serde_json::from_str(text)
    }

    fn refusal(text: &str) -> String {
        template(text).unwrap_err().to_string()
    }

    #[test]
    fn bitmap_sets_clears_and_keeps_bits() {
        let text = r#"{"msr_modifiers": [{"addr": "0x10a", "bitmap": "0b1_0x1"}]}"#;
        let bitmap = ChangedBits { mask: 0b1101, value: 0b1001 };
        let expected = RegisterModifier { addr: 0x10a, bitmap };
        assert_eq!(template(text).unwrap().msr_modifiers, [expected]);
    }

    #[test]
    fn bitmap_is_no_wider_than_its_register() {
        let leaf = |bitmap: String| {
            format!(
                r#"{{"cpuid_modifiers": [{{"leaf": "0x1", "subleaf": "0b0", "flags": 0,
                "modifiers": [{{"register": "eax", "bitmap": "{bitmap}"}}]}}]}}"#
            )
        };
        let widest = template(&leaf("1".repeat(32))).unwrap();
        assert_eq!(widest.cpuid_modifiers[0].modifiers[0].bitmap.value, u32::MAX);
        assert!(refusal(&leaf("1".repeat(33))).contains("as a bitmap - string is too long"));
        assert!(refusal(&leaf("2".into())).contains("[2] as a bitmap - unknown character: 50"));
    }

    #[test]
    fn numbers_need_a_prefix() {
        let msr = |addr| format!(r#"{{"msr_modifiers": [{{"addr": "{addr}", "bitmap": "1"}}]}}"#);
        assert!(refusal(&msr("10")).starts_with("No supported number system prefix found"));
        assert!(refusal(&msr("0xg")).contains("as a number for CPU template - ParseIntError"));
    }

    #[test]
    fn capabilities_are_added_and_removed() {
        let template = template(r#"{"kvm_capabilities": ["171", "!172"]}"#).unwrap();
        let expected = [KvmCapability::Add(171), KvmCapability::Remove(172)];
        assert_eq!(template.kvm_capabilities, expected);
        assert!(refusal(r#"{"kvm_capabilities": ["x"]}"#).contains("can not convert to numeric"));
    }

    #[test]
    fn later_changes_follow_earlier_ones() {
        let custom = template(
            r#"{"kvm_capabilities": ["1", "2", "!1", "!9"],
                "cpuid_modifiers": [
                    {"leaf": "0x7", "subleaf": "0x1", "flags": 1,
                     "modifiers": [{"register": "edx", "bitmap": "0b11"}]},
                    {"leaf": "0x1", "subleaf": "0x0", "flags": 0, "modifiers": []},
                    {"leaf": "0x7", "subleaf": "0x1", "flags": 3, "modifiers": [
                        {"register": "ebx", "bitmap": "0b1"},
                        {"register": "edx", "bitmap": "0b00x"}]}],
                "msr_modifiers": [{"addr": "0x10a", "bitmap": "0b11"},
                                  {"addr": "0x10a", "bitmap": "0b0x"}]}"#,
        )
        .unwrap();
        let template = CpuTemplate::from(&custom);
        assert_eq!(template.capabilities, [2]);
        let none = ChangedBits::default();
        let registers =
            [none, ChangedBits { mask: 1, value: 1 }, none, ChangedBits { mask: 7, value: 1 }];
        let leaf = CpuidChange { function: 7, index: 1, flags: 3, registers };
        let other = CpuidChange { function: 1, index: 0, flags: 0, registers: [none; 4] };
        assert_eq!(template.leaves, [leaf, other]);
        let bits = ChangedBits { mask: 3, value: 1 };
        assert_eq!(template.msrs, [MsrChange { index: 0x10a, bits }]);
    }
}
