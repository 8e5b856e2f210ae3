//! Fuzzes the sections of a machine's state, and configurations. Each input is either refused with
//! a message, or read and written again as bytes that read the same.
#![allow(clippy::unwrap_used, reason = "a failure is the finding")]

use driftline_guest::{Section, SectionTag};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::state::{self, SavedPlatform, SavedVm};
use crate::config::MachineConfig;
use crate::devices::{Keyboard, SerialPortState, VirtioState, fuzz_serial};
use crate::vcpu::SavedVcpu;

/// Reads the bytes after the first as the section kind that the first selects, or as a
/// configuration.
pub fn sections(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    match kind % 6 {
        0 => drop(section::<SavedVm>(SectionTag::KVM_VM, bytes)),
        1 => drop(section::<SavedVcpu>(SectionTag::KVM_VCPU, bytes)),
        2 => {
            if let Some(state) = section::<SerialPortState>(SectionTag::SERIAL, bytes) {
                fuzz_serial(state);
            }
        }
        3 => {
            _ = section::<SavedPlatform>(SectionTag::PLATFORM, bytes);
            if let Some(keyboard) = section::<Keyboard>(SectionTag::KEYBOARD, bytes) {
                // Either outcome is fine.
                let _ = keyboard.check();
            }
        }
        4 => match VirtioState::decode("a section", bytes) {
            Ok(device) => {
                let written = device.encode().unwrap();
                let again = VirtioState::decode("a section", &written).unwrap();
                assert_eq!(again.encode().unwrap(), written);
            }
            Err(e) => assert!(!e.to_string().is_empty()),
        },
        _ => match MachineConfig::decode(bytes) {
            Ok(config) => assert_eq!(MachineConfig::decode(&config.encode()).unwrap(), config),
            Err(e) => assert!(!e.to_string().is_empty()),
        },
    }
}

fn section<T: Serialize + DeserializeOwned>(tag: SectionTag, bytes: &[u8]) -> Option<T> {
    let read = |bytes: &[u8]| state::read::<T>(&[Section::new(tag, 0, bytes.to_vec())], tag, 0);
    match read(bytes) {
        Ok(value) => {
            let written = state::section(tag, 0, &value).unwrap();
            let again = state::section(tag, 0, &read(&written.bytes).unwrap()).unwrap();
            assert!(written == again, "{tag} is not what was written");
            Some(value)
        }
        Err(e) => {
            assert!(!e.to_string().is_empty());
            None
        }
    }
}
