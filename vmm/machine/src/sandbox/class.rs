//! The classes of threads that serve a guest.

/// Kinds of threads that serve the guest. Each kind has its own system call filter.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Class {
    /// Runs a vCPU.
    Vcpu,
    /// Runs a vCPU's share of the work in the threads backend, or keeps the host's processors
    /// awake.
    Worker,
    /// Owns the dirty source.
    Collector,
    /// Owns the dirty source that follows writes by userfaultfd.
    Watcher,
    /// Decides when the machine runs and when it pauses.
    Supervisor,
    /// Copies serial output.
    Serial,
    /// Writes the log, or does the last work before a fatal signal ends the process.
    Log,
    /// Copies serial input, and raises the port's interrupt for it.
    SerialInput,
    /// Serves a virtio entropy device.
    Rng,
    /// Serves a balloon.
    Balloon,
    /// Serves a disk, or makes it durable.
    Block,
    /// Serves a network interface.
    Net,
    /// Serves a socket device.
    Vsock,
}

impl Class {
    /// All classes.
    pub const ALL: [Class; 13] = [
        Self::Vcpu,
        Self::Worker,
        Self::Collector,
        Self::Watcher,
        Self::Supervisor,
        Self::Serial,
        Self::Log,
        Self::SerialInput,
        Self::Rng,
        Self::Balloon,
        Self::Block,
        Self::Net,
        Self::Vsock,
    ];
}
