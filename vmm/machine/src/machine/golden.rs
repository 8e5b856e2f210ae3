//! Golden bytes of every section of a machine's state. Later versions of this program read the
//! states in stores, even if its structures or those of kvm-bindings change.
//!
//! There is one file per section, in hexadecimal, 32 bytes a line. The file of a released version
//! never changes: a change of format gets a new version and a new file.

use std::fmt::Write;
use std::path::Path;

use driftline_guest::{Section, SectionTag};

use super::state::{SavedMachine, SavedPlatform, SavedVm, decode, encode};
use crate::devices::{Keyboard, PowerState, SerialPortState, VirtioState};
use crate::vcpu::SavedVcpu;

fn example() -> SavedMachine {
    SavedMachine {
        vm: SavedVm::example(),
        vcpus: vec![SavedVcpu::example()],
        com1: SerialPortState::example(),
        platform: SavedPlatform { power: PowerState::example() },
        virtio: vec![VirtioState::example()],
        keyboard: Some(Keyboard::example()),
    }
}

const FILES: [(&str, u8); 6] = [
    ("kvm-vm", 0),
    ("kvm-vcpu", 1),
    ("serial", 2),
    ("platform", 3),
    ("virtio", 4),
    ("keyboard", 5),
];

fn hex(bytes: &[u8]) -> String {
    bytes.chunks(32).fold(String::new(), |mut out, line| {
        line.iter().for_each(|b| write!(out, "{b:02x}").unwrap());
        out + "\n"
    })
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn golden(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/machine/golden");
    std::fs::read_to_string(folder.join(format!("{name}-1.hex"))).unwrap_or_default()
}

#[test]
fn section_bytes_match_the_golden_files() {
    let written = encode(&example()).unwrap();
    assert_eq!(written.len(), FILES.len());
    for (name, i) in FILES {
        let (now, then) = (hex(&written[usize::from(i)].bytes), golden(name));
        assert_eq!(now, then, "{name}: the file of a new format would be\n{now}");
    }
}

#[test]
fn states_of_version_1_are_read() {
    let encoded = encode(&example()).unwrap();
    let sections: Vec<Section> = encoded
        .into_iter()
        .zip(FILES)
        .map(|(section, (name, _))| Section { bytes: bytes(&golden(name)), ..section })
        .collect();
    let read = decode(&sections, 1, 1).unwrap();
    assert_eq!(format!("{read:?}"), format!("{:?}", example()));
}

#[test]
fn bytes_behind_a_section_are_counted_and_refused() {
    for i in 0..FILES.len() {
        let mut sections = encode(&example()).unwrap();
        sections[i].bytes.extend([0; 3]);
        let name = format!("{} (instance 0)", sections[i].tag);
        let error = decode(&sections, 1, 1).unwrap_err().to_string();
        assert_eq!(error, format!("{name} is malformed: 3 bytes follow its end"));
    }
    let mut sections = encode(&example()).unwrap();
    sections.iter_mut().filter(|s| s.tag == SectionTag::KVM_VM).for_each(|s| s.bytes[0] = 2);
    assert!(decode(&sections, 1, 1).unwrap_err().to_string().contains("version 2"));
}
