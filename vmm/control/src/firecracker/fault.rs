//! Refusals: every text that Firecracker answers, and those for what Driftline does not have.
//!
//! The texts are Firecracker's to the letter, because clients compare and show them.

use std::io;

use driftline_machine::config::{ConfigError, MAX_DEVICES};
use driftline_machine::metadata::MetadataError;

/// Why a request is refused.
#[derive(Debug, thiserror::Error)]
pub enum ApiFault {
    /// There is no such operation.
    #[error("Invalid request method and/or path: {method} {path}.")]
    UnknownOperation {
        /// The request's method.
        method: String,
        /// The first part of its path.
        path: String,
    },
    /// A GET has a body.
    #[error("GET request cannot have a body.")]
    BodyOfGet,
    /// A PUT has no body.
    #[error("Empty PUT request.")]
    EmptyPut,
    /// A PATCH has no body, or changes nothing.
    #[error("Empty PATCH request.")]
    EmptyPatch,
    /// A DELETE has a body. The text is Firecracker's.
    #[error("Empty Delete request.")]
    BodyOfDelete,
    /// The path names no device.
    #[error("The ID cannot be empty.")]
    EmptyId,
    /// A device's name has a character that is neither alphanumeric nor an underscore.
    #[error("API Resource IDs can only contain alphanumeric characters and underscores.")]
    InvalidId,
    /// The names of a drive in path and body differ.
    #[error("The id from the path does not match the id from the body!")]
    OtherId,
    /// The names of a network interface in path and body differ.
    #[error("The id from the path [{path}] does not match the id from the body [{body}]!")]
    OtherInterface {
        /// The name in the path.
        path: String,
        /// The name in the body.
        body: String,
    },
    /// The body is not JSON, or not the JSON of this request.
    #[error("An error occurred when deserializing the json body of a request: {0}.")]
    Json(#[from] serde_json::Error),
    /// The path ends after `/snapshot`.
    #[error("Missing snapshot operation type.")]
    NoSnapshotOperation,
    /// The end of a path is unknown.
    #[error("Unrecognized {method} request path `{path}`.")]
    UnknownEnd {
        /// The request's method.
        method: &'static str,
        /// The unknown end.
        path: String,
    },
    /// The guest has not been started.
    #[error("The requested operation is not supported before starting the microVM.")]
    BeforeStart,
    /// The guest has been started.
    #[error("The requested operation is not supported after starting the microVM.")]
    AfterStart,
    /// A device is to be plugged or unplugged.
    #[error("PCI is not enabled")]
    NoPci,
    /// A device's name is too long, or has letters that a machine's names do not have. Firecracker
    /// has no such limit.
    #[error("API Resource IDs have at most {0} ASCII letters, digits and underscores.")]
    Name(usize),
    /// A guest cannot have more devices. Firecracker refuses them when the guest starts.
    #[error("{0} config error: a guest has at most {MAX_DEVICES} devices.")]
    TooManyDevices(&'static str),
    /// The vsock cannot be configured. Firecracker does not check.
    #[error("Vsock config error: {0}")]
    VsockConfig(#[source] ConfigError),
    /// Driftline does not do this.
    #[error("The requested operation is not supported: Driftline has no {0}.")]
    NotInDriftline(&'static str),
    /// Driftline does not do this yet.
    #[error("The requested operation is not supported: {0} is not built into Driftline yet.")]
    NotBuilt(&'static str),
    /// The process ends.
    #[error("The requested operation is not supported: this process ends.")]
    Ending,
    /// The balloon cannot be configured.
    #[error("Balloon config error: {0}")]
    Balloon(#[from] BalloonFault),
    /// A started guest's balloon cannot be changed, or has no hinting to show.
    #[error("Balloon update error: {0}")]
    BalloonUpdate(#[from] BalloonUpdateFault),
    /// A started guest's balloon cannot be shown.
    #[error("Internal VMM error: {0}")]
    BalloonQuery(#[from] BalloonQueryFault),
    /// The guest's boot cannot be configured.
    #[error("Boot source error: {0}")]
    Boot(#[from] BootFault),
    /// A drive cannot be configured.
    #[error("Drive config error: {0}")]
    Drive(#[from] DriveFault),
    /// The snapshot cannot be taken.
    #[error("Create snapshot error: {0}")]
    CreateSnapshot(#[from] CreateFault),
    /// The started guest refuses.
    #[error("Internal VMM error: {0}")]
    Guest(String),
    /// The snapshot cannot be loaded.
    #[error("Load snapshot error: {0}")]
    Load(#[from] LoadFault),
    /// The log's file cannot be opened.
    #[error("Logger error: Failed to open target file: {0}")]
    Logger(#[source] io::Error),
    /// The machine cannot be configured.
    #[error("Machine config error: {0}")]
    Machine(#[from] MachineFault),
    /// The metrics cannot be configured.
    #[error("Metrics error: Cannot initialize the metrics system due to bad user input: {0}")]
    Metrics(#[from] MetricsFault),
    /// The metadata has never been set.
    #[error("MMDS error: The MMDS data store is not initialized.")]
    NoMetadata,
    /// The metadata exceeds its limit. Firecracker says "patch" for a PUT, too.
    #[error("MMDS limit exceeded error: The MMDS patch request doesn't fit.")]
    MetadataLimit,
    /// The metadata service cannot be configured. The three M are Firecracker's.
    #[error("MMMDS config error: {0}")]
    Mmds(#[from] MmdsFault),
    /// A network interface cannot be configured.
    #[error("Network config error: {0}")]
    Net(#[from] NetFault),
    /// The guest cannot be started.
    #[error("Start microvm error: {0}")]
    Start(#[from] StartFault),
    /// The vsock's socket cannot be bound.
    #[error(
        "Vsock config error: Cannot create backend for vsock device: Error binding to the \
         host-side Unix socket: {0}"
    )]
    Vsock(#[source] io::Error),
}

impl From<MetadataError> for ApiFault {
    fn from(error: MetadataError) -> Self {
        match error {
            MetadataError::Unset => Self::NoMetadata,
            MetadataError::Encode(cause) => Self::Json(cause),
            MetadataError::TooLong { .. } => Self::MetadataLimit,
        }
    }
}

impl ApiFault {
    /// Returns the HTTP status: 413 for the metadata's limit, 400 for everything else.
    pub(crate) fn status(&self) -> u16 {
        match self {
            Self::MetadataLimit => 413,
            _ => 400,
        }
    }

    /// Returns whether the request was refused without being tried.
    pub(crate) fn is_untried(&self) -> bool {
        matches!(self, Self::NotBuilt(_) | Self::NotInDriftline(_))
    }
}

/// Why the balloon is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BalloonFault {
    /// The guest has no balloon.
    #[error("No balloon device found.")]
    None,
    /// The balloon is larger than the memory.
    #[error("Amount of pages requested is too large.")]
    TooLarge,
}

/// Why a started guest's balloon is not changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BalloonUpdateFault {
    /// The guest has no balloon.
    #[error("Failed perform action on device: Device not found")]
    None,
    /// The new size in MiB exceeds the guest's memory.
    #[error("Balloon: Requested memory should be less than {0}MiB")]
    TooLarge(u32),
    /// The request would enable or disable statistics.
    #[error("Balloon: Statistics cannot be enabled/disabled after activation.")]
    Statistics,
    /// The balloon was configured without hinting.
    #[error("Balloon: Attempting to use hinting when not enabled")]
    NoHinting,
    /// The guest has no driver for it yet.
    #[error("Balloon: Device not activated yet.")]
    NotActive,
}

/// Why a started guest's balloon is not shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BalloonQueryFault {
    /// The guest has no balloon.
    #[error("Failed perform action on device: Device not found")]
    None,
    /// The balloon was configured without statistics.
    #[error("Balloon: Received stats query when stats are disabled.")]
    NoStatistics,
}

/// Why the guest's boot source is refused.
#[derive(Debug, thiserror::Error)]
pub enum BootFault {
    /// The kernel cannot be opened.
    #[error("The kernel file cannot be opened: {0}")]
    Kernel(#[source] io::Error),
    /// The initial RAM disk cannot be opened.
    #[error("The initrd file cannot be opened due to invalid path or invalid permissions. {0}")]
    Initrd(#[source] io::Error),
    /// The command line is too long. The text is that of the crate that Firecracker uses.
    #[error("The kernel command line is invalid: Invalid cmdline capacity provided.")]
    TooLong,
}

/// Why a drive is refused.
#[derive(Debug, thiserror::Error)]
pub enum DriveFault {
    /// Another drive is the root device.
    #[error("A root block device already exists!")]
    SecondRoot,
    /// It has neither a file nor a socket, or both, or settings that a socket's backend decides.
    #[error("Unable to create the virtio block device: Invalid block config.")]
    NoBackend,
    /// A guest cannot have more devices. Firecracker refuses them when the guest starts.
    #[error("Unable to create the virtio block device: a guest has at most {MAX_DEVICES} devices.")]
    TooMany,
    /// A started guest has no such drive.
    #[error(
        "Unable to patch the block device: Failed perform action on device: Device not found \
         Please verify the request arguments."
    )]
    Unknown,
    /// The request changes nothing of a started guest's drive. Firecracker accepts that only for a
    /// vhost-user drive.
    #[error(
        "Unable to patch the block device: Block: Running method expected different backend. \
         Please verify the request arguments."
    )]
    NothingChanged,
    /// The new file of a started guest's drive cannot be opened.
    #[error(
        "Unable to patch the block device: Block: Virtio backend error: Error manipulating the \
         backing file: {cause} {path} Please verify the request arguments."
    )]
    NewFile {
        /// The system's error.
        #[source]
        cause: io::Error,
        /// The file.
        path: String,
    },
    /// A started guest's drive does not change. The text says why.
    #[error("Unable to patch the block device: {0} Please verify the request arguments.")]
    Unchanged(String),
    /// Its file cannot be opened.
    #[error(
        "Unable to create the virtio block device: Virtio backend error: Error manipulating the \
         backing file: {cause} {path}"
    )]
    File {
        /// The system's error.
        #[source]
        cause: io::Error,
        /// The file.
        path: String,
    },
}

/// Why a snapshot is not taken.
#[derive(Debug, thiserror::Error)]
pub enum CreateFault {
    /// The guest runs.
    #[error(
        "Cannot save the microVM state: Operation not allowed: save/restore unavailable while \
         running"
    )]
    Running,
    /// The memory file cannot be written.
    #[error("Cannot perform {what} on the memory backing file: {cause}")]
    Memory {
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The state file cannot be written.
    #[error("Cannot perform {what} on the snapshot backing file: {cause}")]
    State {
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// Anything else. The text says why.
    #[error("{0}")]
    Other(String),
}

/// Why a snapshot is not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadFault {
    /// A part of a guest that boots has been configured.
    #[error("Loading a microVM snapshot not allowed after configuring boot-specific resources.")]
    Configured,
    /// Its state cannot be read.
    #[error(
        "Failed to restore from snapshot: Failed to get snapshot state from file: Failed to open \
         snapshot file: {0}"
    )]
    State(#[source] io::Error),
    /// Its state is damaged, or not that of a guest of this API. The text says why.
    #[error(
        "Failed to restore from snapshot: Failed to get snapshot state from file: Failed to load \
         snapshot state from file: {0}"
    )]
    Damaged(String),
    /// Another tap is given for an interface that its guest does not have.
    #[error(
        "Failed to restore from snapshot: Failed to get snapshot state from file: Unknown Network \
         Device."
    )]
    UnknownInterface,
    /// Another socket is given for a vsock that its guest does not have.
    #[error(
        "Failed to restore from snapshot: Failed to get snapshot state from file: Unknown Vsock \
         Device."
    )]
    UnknownVsock,
    /// Its memory file cannot be opened.
    #[error(
        "Failed to restore from snapshot: Failed to load guest memory: Error creating guest memory \
         from file: Failed to load guest memory: {0}"
    )]
    Memory(#[source] io::Error),
    /// Its memory file is not its guest's. The text says why.
    #[error(
        "Failed to restore from snapshot: Failed to load guest memory: Error creating guest memory \
         from file: Failed to restore guest memory: {0}"
    )]
    OtherMemory(String),
    /// Its memory is to have pages of the host's pool, which a private mapping of a file cannot
    /// have.
    #[error(
        "Failed to restore from snapshot: Failed to load guest memory: Error creating guest memory \
         from file: Cannot restore hugetlbfs backed snapshot by mapping the memory file. Please \
         use uffd."
    )]
    HugePages,
    /// Its memory cannot be handed over to its page handler.
    #[error(
        "Failed to restore from snapshot: Failed to load guest memory: Error creating guest memory \
         from uffd: {what}: {cause}"
    )]
    PageHandler {
        /// The step that failed, in Firecracker's words.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// Its machine cannot be built. The text says why.
    #[error("Failed to restore from snapshot: Failed to build microVM from snapshot: {0}")]
    Machine(String),
    /// Its guest does not run. The text says why.
    #[error("Failed to resume microVM: {0}")]
    Resume(String),
}

/// Why a machine cannot be configured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MachineFault {
    /// The memory is smaller than the balloon.
    #[error("The memory size (MiB) is smaller than the previously set balloon device target size.")]
    SmallerThanBalloon,
    /// The memory is empty, or does not consist of whole pages.
    #[error("The memory size (MiB) is either 0, or not a multiple of the configured page size.")]
    Memory,
    /// There are more vCPUs than [`MAX_VCPUS`](driftline_machine::limits::MAX_VCPUS), none, or an
    /// odd number of threads. The text is Firecracker's.
    #[error(
        "The number of vCPUs must be greater than 0, less than 32 and must be 1 or an even number \
         if SMT is enabled."
    )]
    Vcpus,
}

/// Why the metrics are refused.
#[derive(Debug, thiserror::Error)]
pub enum MetricsFault {
    /// They have been configured already.
    #[error("Reinitialization of metrics not allowed.")]
    Again,
    /// Their file cannot be opened.
    #[error("{0}")]
    File(#[source] io::Error),
}

/// Why the metadata service is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MmdsFault {
    /// No interface is named.
    #[error("The list of network interface IDs that allow forwarding MMDS requests is empty.")]
    NoInterface,
    /// Its address is not link-local.
    #[error("The MMDS IPv4 address is not link local.")]
    Address,
    /// A named interface does not exist.
    #[error(
        "The list of network interface IDs provided contains at least one ID that does not \
         correspond to any existing network interface."
    )]
    UnknownInterface,
}

/// Why a network interface is refused.
#[derive(Debug, thiserror::Error)]
pub enum NetFault {
    /// Another interface has its address.
    #[error("The MAC address is already in use: {0}")]
    MacInUse(String),
    /// Its address is not one of an interface. Firecracker does not check.
    #[error("Could not create the network device: {0}")]
    Mac(#[source] ConfigError),
    /// Its largest frame is out of range.
    #[error("Could not create the network device: MTU {0} is out of range [68, 65535]")]
    Mtu(u16),
    /// The tap's name is too long.
    #[error("Could not create the network device: Open tap device failed: Invalid interface name")]
    TapName,
    /// The host has no taps.
    #[error(
        "Could not create the network device: Open tap device failed: Couldn't open /dev/net/tun: \
         {0}"
    )]
    NoTun(#[source] io::Error),
    /// A guest cannot have more devices. Firecracker refuses them when the guest starts.
    #[error("Could not create the network device: a guest has at most {MAX_DEVICES} devices.")]
    TooMany,
    /// A started guest has no such interface.
    #[error("Unable to update the net device: Failed perform action on device: Device not found")]
    Unknown,
    /// A started guest's interface does not change. The text says why.
    #[error("Unable to update the net device: {0}")]
    Unchanged(String),
    /// Its tap cannot be opened.
    #[error(
        "Could not create the network device: Open tap device failed: Error while creating ifreq \
         structure: {cause}. Invalid TUN/TAP Backend provided by {tap}. Check our documentation on \
         setting up the network devices."
    )]
    Tap {
        /// The system's error.
        #[source]
        cause: io::Error,
        /// The tap.
        tap: String,
    },
}

/// Why a guest is not started.
#[derive(Debug, thiserror::Error)]
pub enum StartFault {
    /// No kernel is configured.
    #[error("Cannot start microvm without kernel configuration.")]
    NoKernel,
    /// The command line with its additions is too long. The text is that of the crate that
    /// Firecracker uses.
    #[error("Kernel cmdline error: Inserting string would make command line too long.")]
    CommandLine,
    /// KVM lacks a capability that the CPU template requires.
    #[error("Kvm error: Missing KVM capabilities: {0:#x}")]
    Capability(u32),
    /// KVM lacks a CPUID leaf that the CPU template changes.
    #[error(
        "System configuration error: Failed to create guest config: Template changes a CPUID entry \
         not supported by KVM: Leaf: {leaf:x}, Subleaf: {subleaf:x}"
    )]
    CpuidLeaf {
        /// The leaf.
        leaf: u32,
        /// The subleaf.
        subleaf: u32,
    },
    /// KVM lacks a register that the CPU template changes.
    #[error(
        "System configuration error: Failed to create guest config: KVM vcpu ioctl failed: Failed \
         to get KVM vcpu msr: {0:#x}"
    )]
    Msr(u32),
    /// The machine cannot be built. The text says why.
    #[error("{0}")]
    Machine(String),
    /// The guest's memory cannot be mapped.
    #[error("Invalid Memory Configuration: Cannot create mmap region: {0}")]
    Memory(#[source] io::Error),
}
