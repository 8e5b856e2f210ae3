//! State sections: the pieces of a guest's state besides memory, each with a tag.

use std::fmt;

/// What a section holds. Tags are never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SectionTag(pub u16);

/// The tags in use.
pub mod section_tags {
    use super::SectionTag;

    /// The machine's configuration, as `Guest::config` returns it.
    pub const CONFIG: SectionTag = SectionTag(1);
    /// VM-wide state of the KVM machine: interrupt controllers, timer, clock.
    pub const KVM_VM: SectionTag = SectionTag(2);
    /// One vCPU of the KVM machine; the instance is its index.
    pub const KVM_VCPU: SectionTag = SectionTag(3);
    /// The serial port.
    pub const SERIAL: SectionTag = SectionTag(4);
    /// One worker of the threads backend; the instance is its index.
    pub const THREAD_WORKER: SectionTag = SectionTag(5);
    /// One virtio device; the instance is its index.
    pub const VIRTIO: SectionTag = SectionTag(6);
    /// What the VMM emulates beside the serial port: ACPI's registers, the generation ID.
    pub const PLATFORM: SectionTag = SectionTag(7);
}

impl fmt::Display for SectionTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            section_tags::CONFIG => "configuration",
            section_tags::KVM_VM => "VM state",
            section_tags::KVM_VCPU => "vCPU state",
            section_tags::SERIAL => "serial port",
            section_tags::THREAD_WORKER => "worker state",
            section_tags::VIRTIO => "virtio device",
            section_tags::PLATFORM => "platform state",
            SectionTag(n) => return write!(f, "unknown section {n}"),
        };
        f.write_str(name)
    }
}

/// One piece of state. Only its writer knows its meaning.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Section {
    /// What it holds.
    pub tag: SectionTag,
    /// Which of several similar pieces: a vCPU's index, a device's number.
    pub instance: u16,
    /// Whether a reader that does not know the tag must refuse the whole state.
    pub must_understand: bool,
    /// The content, in the writer's encoding.
    pub bytes: Vec<u8>,
}

impl Section {
    /// Creates a section that a reader must understand.
    pub fn new(tag: SectionTag, instance: u16, bytes: Vec<u8>) -> Self {
        Self { tag, instance, must_understand: true, bytes }
    }
}
