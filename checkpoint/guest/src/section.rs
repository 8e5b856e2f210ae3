//! State sections: the pieces of a guest's state besides memory, each with a tag.

use std::fmt;

/// Kind of a section's content. Tags are never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SectionTag(pub u16);

impl SectionTag {
    /// The machine's configuration, as [`GuestIdentity::config`](crate::GuestIdentity::config)
    /// returns it.
    pub const CONFIG: Self = Self(1);
    /// VM-wide state of the KVM machine: interrupt controllers, timer, clock.
    pub const KVM_VM: Self = Self(2);
    /// One vCPU of the KVM machine; the instance is its index.
    pub const KVM_VCPU: Self = Self(3);
    /// The serial port.
    pub const SERIAL: Self = Self(4);
    /// One worker of the threads backend; the instance is its index.
    pub const THREAD_WORKER: Self = Self(5);
    /// One virtio device; the instance is its index.
    pub const VIRTIO: Self = Self(6);
    /// Platform devices besides the serial port and the keyboard controller: ACPI's PM1 registers.
    pub const PLATFORM: Self = Self(7);
    /// The keyboard controller, if the machine has one.
    pub const KEYBOARD: Self = Self(8);
    /// The configuration of the API over which the guest was configured. No machine needs it.
    pub const API: Self = Self(9);

    /// Returns the name of a tag that this version of the program knows.
    pub fn name(self) -> Option<&'static str> {
        let name = match self {
            Self::CONFIG => "configuration",
            Self::KVM_VM => "VM state",
            Self::KVM_VCPU => "vCPU state",
            Self::SERIAL => "serial port",
            Self::THREAD_WORKER => "worker state",
            Self::VIRTIO => "virtio device",
            Self::PLATFORM => "platform state",
            Self::KEYBOARD => "keyboard controller",
            Self::API => "API's configuration",
            _ => return None,
        };
        Some(name)
    }
}

impl fmt::Display for SectionTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "unknown section {}", self.0),
        }
    }
}

/// One piece of state. Only its writer knows its meaning.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Section {
    /// Kind of its content.
    pub tag: SectionTag,
    /// Which of several similar pieces: a vCPU's index, a device's number.
    pub instance: u16,
    /// Whether a reader that does not know the tag must refuse the whole state.
    pub must_understand: bool,
    /// The content, in the writer's encoding.
    pub bytes: Vec<u8>,
}

/// Maximum length of [`SectionHead::name`], in bytes.
pub const MAX_SECTION_NAME: usize = 24;

/// What a reader learns of a section before its content.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SectionHead {
    /// Kind of its content.
    pub tag: SectionTag,
    /// The writer's name of the tag, for the errors of a reader that does not know the tag:
    /// printable ASCII.
    pub name: String,
    /// Which of several similar pieces.
    pub instance: u16,
    /// Whether a reader that does not know the tag must refuse the whole state.
    pub must_understand: bool,
    /// Version of the writer's encoding.
    pub version: u16,
}

impl Section {
    /// Creates a section that a reader must understand.
    pub fn new(tag: SectionTag, instance: u16, bytes: Vec<u8>) -> Self {
        Self { tag, instance, must_understand: true, bytes }
    }
}
