//! Owns the options of the commands whose process has a guest.
#![allow(rustdoc::broken_intra_doc_links, reason = "help texts: brackets are what can be left out")]

use std::path::PathBuf;
use std::time::Duration;

use checkpoint::VmId;
use clap::{ArgGroup, Args, ValueEnum};
use dirty_tracker::TrackingMode;
use vmm::config::{
    Backend, BalloonConfig, CpuConfig, DEFAULT_RING_ENTRIES, DiskSpec, GuestName, NetSpec,
    SerialSink, VsockSpec,
};
use vmm::jobs::ShadowMode;
use vmm::memory::{Backing, HugePages};

use super::values;

/// How a process that has a guest behaves on its host.
#[derive(Args)]
pub(crate) struct HostArgs {
    /// Where the guest's first serial port goes: stdio, null or file:PATH
    ///
    /// With stdio, a terminal is the guest's until it ends (Ctrl-A x ends it), and what comes from a
    /// pipe or a file is typed to it.
    #[arg(long, value_name = "SINK", default_value = "stdio")]
    pub(crate) serial: SerialSink,
    /// Listen for API requests on this unix socket
    #[arg(long, value_name = "FILE")]
    pub(crate) api_sock: Option<PathBuf>,
    /// What holds guest memory: anon, or memfd
    #[arg(long, value_name = "KIND", default_value_t = Backing::Anon)]
    pub(crate) memory_backing: Backing,
    /// Host pages larger than 4K: thp, hugetlbfs (2M, from the pool) or none; by default as the host is set
    #[arg(long, value_name = "KIND")]
    pub(crate) hugepages: Option<HugePages>,
    /// Take all guest memory from the host before the guest starts
    #[arg(long)]
    pub(crate) prefault: bool,
    /// Keep this host's records of hand-overs in this directory; all driftlines of a host share one
    #[arg(long, value_name = "DIR", default_value_os_t = values::state_dir())]
    pub(crate) state_dir: PathBuf,
    /// Let this process use files of this directory, and of others given so, but no more than those and what
    /// else was named at its start; without, all but the system's own directories
    #[arg(long, value_name = "DIR")]
    pub(crate) allow_path: Vec<PathBuf>,
    /// Do not filter system calls: a guest that breaks out may make any
    #[arg(long)]
    pub(crate) no_seccomp: bool,
    /// Do not restrict files: a guest that breaks out may reach all of the user's
    #[arg(long, conflicts_with = "allow_path")]
    pub(crate) no_landlock: bool,
    /// End at once when the process that started this one ends
    #[arg(long, hide = true)]
    pub(crate) die_with_parent: bool,
}

#[derive(Args)]
#[command(group(ArgGroup::new("boot").required(true).args(["kernel", "guest"])))]
pub(crate) struct RunArgs {
    /// Boot this kernel: a static ELF file, by PVH where it has the note, or a bzImage
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// Give the kernel this initial RAM disk
    #[arg(long, value_name = "FILE", requires = "kernel", conflicts_with = "guest")]
    pub(crate) initrd: Option<PathBuf>,
    /// The kernel's command line, to which console=ttyS0 panic=-1 reboot=k are added unless it has
    /// them, and the virtio devices
    #[arg(long, value_name = "TEXT", requires = "kernel", conflicts_with = "guest")]
    pub(crate) cmdline: Option<String>,
    /// Add nothing to the command line
    #[arg(long, requires = "kernel", conflicts_with = "guest")]
    pub(crate) bare_cmdline: bool,
    /// Boot the embedded guest, such as payload,ws=64M,rate=320M,pattern=seq,seed=1
    ///
    /// Rates are bytes a second or max; patterns are seq, random, zipf, stride and once.
    #[arg(long, value_name = "SPEC", value_parser = values::guest_spec)]
    pub(crate) guest: Option<String>,
    /// Guest memory
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = values::memory)]
    pub(crate) mem: u64,
    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::vcpus)]
    pub(crate) vcpus: u8,
    /// The guest's processor: host, or baseline, with which it can move to unlike hosts of one
    /// vendor; less features by name, such as host,-cx16
    #[arg(long, value_name = "MODEL", default_value_t)]
    pub(crate) cpu: CpuConfig,
    /// Give the guest a disk: path=FILE[,readonly][,id=NAME][,serial=TEXT], a raw image or a block
    /// device; one option for each
    #[arg(long = "disk", value_name = "SPEC")]
    pub(crate) disks: Vec<DiskSpec>,
    /// Give the guest a network interface: tap=NAME[,mac=ADDRESS][,id=NAME][,queues=N], over a tap
    /// that exists; one option for each
    #[arg(long = "net", value_name = "SPEC")]
    pub(crate) nets: Vec<NetSpec>,
    /// Give the guest a socket device: cid=N,uds=PATH
    ///
    /// Programs of the host connect to PATH and say "CONNECT port"; those that the guest connects to
    /// listen at PATH_port.
    #[arg(long, value_name = "SPEC")]
    pub(crate) vsock: Option<VsockSpec>,
    /// Give a --kernel guest the host's randomness (virtio-rng)
    #[arg(long, value_name = "WHETHER", value_enum, default_value_t = OnOff::On)]
    pub(crate) rng: OnOff,
    /// Give a --kernel guest a memory balloon (virtio-balloon):
    /// [size=SIZE][,deflate-on-oom=on|off][,reporting=on|off][,hinting=on|off], where all is on by default
    ///
    /// With reporting the host gets memory back that the guest has freed; with hinting, a migration's
    /// first pass and a full checkpoint leave out what is free.
    #[arg(long, value_name = "SPEC", num_args = 0..=1, default_missing_value = "", requires = "kernel",
          conflicts_with = "guest")]
    pub(crate) balloon: Option<BalloonConfig>,
    /// How writes are tracked: dirty-ring, dirty-bitmap, dirty-bitmap-manual, userfault-wp or none
    #[arg(long, value_name = "MODE", default_value_t = TrackingMode::DirtyRing)]
    pub(crate) tracking: TrackingMode,
    /// Look whether tracking misses a frame: compare (with all of memory) or userfault-wp (with the host's page tables)
    ///
    /// For tests of a host or a kernel. Ten times a second at most the guest stands and what changed is compared with what was
    /// reported; a frame that was missed is said, with its number, and the exit code is 1.
    #[arg(long, value_name = "MODE")]
    pub(crate) shadow: Option<ShadowMode>,
    /// Entries of each vCPU's dirty ring, a power of two
    #[arg(long, value_name = "N", default_value_t = DEFAULT_RING_ENTRIES,
          value_parser = values::ring_entries)]
    pub(crate) ring_entries: u32,
    /// What runs the vCPUs: kvm, or threads for hosts without it (payload only)
    #[arg(long, value_name = "NAME", default_value_t = Backend::Kvm)]
    pub(crate) backend: Backend,
    /// The guest's id, a UUID; by default a random one
    #[arg(long, value_name = "UUID")]
    pub(crate) id: Option<VmId>,
    /// The guest's name: 1 to 64 letters, digits, '-', '_' and '.'
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<GuestName>,
    #[command(flatten)]
    pub(crate) host: HostArgs,
}

/// Whether to have something.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum OnOff {
    /// Have it
    On,
    /// Do without
    Off,
}

/// What a guest's devices are on the host that it comes to.
#[derive(Args, Default)]
pub(crate) struct DeviceArgs {
    /// Use this file for one of the guest's disks: path=FILE[,readonly][,id=NAME][,identity=any][,copy]
    ///
    /// With id=NAME for the disk of that name, else for the next in the guest's order. Without any,
    /// disks are where they were on the host that the guest comes from. A migration refuses a file (by
    /// its number and the time at which it was made) or block device (by its maker's name for it) that is
    /// known to be another disk than there; identity=any says that it may be: a copy, or storage whose
    /// hosts number files differently. With copy the disk comes along (send-migration --copy-disks): the
    /// file is made, or is one without data in it, and is removed if the guest does not arrive.
    #[arg(long = "disk", value_name = "SPEC")]
    pub(crate) disks: Vec<DiskSpec>,
    /// Use this tap for one of the guest's network interfaces: tap=NAME[,id=NAME]
    ///
    /// With id=NAME for the interface of that name, else for the next in the guest's order. Without
    /// any, taps have the names that they had on the host that the guest comes from.
    #[arg(long = "net", value_name = "SPEC")]
    pub(crate) nets: Vec<NetSpec>,
    /// Use this unix socket for the guest's socket device: uds=PATH
    #[arg(long, value_name = "SPEC")]
    pub(crate) vsock: Option<VsockSpec>,
}

#[derive(Args)]
pub(crate) struct RestoreArgs {
    /// The store's directory, or an archive: a file that `store export --format driftline-zstd` has written
    #[arg(long, value_name = "PATH")]
    pub(crate) store: PathBuf,
    /// The checkpoint's number; the latest by default
    #[arg(long, value_name = "N", value_parser = values::checkpoint)]
    pub(crate) epoch: Option<u64>,
    /// Let the guest run at once: its memory comes as it is touched, and behind that. Not with an archive
    #[arg(long)]
    pub(crate) lazy: bool,
    /// The guest is the one that the checkpoint is of, and goes on as that: for recovery, when no other host or process has it
    ///
    /// It keeps its id and name. From the latest checkpoint of a store it may go on with checkpoints there. Without this option the guest is a new one
    /// with an id of its own, which has its checkpoints elsewhere (checkpoint --new-store).
    #[arg(long)]
    pub(crate) same_id: bool,
    /// The guest is a new one, with an id of its own, also while a hand-over of the one that the checkpoint is of is in doubt
    ///
    /// It is a new one by default, but refused then. Give it other disks (--disk) than that guest's.
    #[arg(long, conflicts_with = "same_id")]
    pub(crate) new_id: bool,
    /// The guest's name: 1 to 64 letters, digits, '-', '_' and '.'; with --same-id by default the one that it had
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<GuestName>,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) host: HostArgs,
}

#[derive(Args)]
pub(crate) struct ReceiveArgs {
    /// Where to listen: tcp:HOST:PORT; port 0 takes any
    #[arg(value_name = "ADDRESS", value_parser = values::tcp)]
    pub(crate) address: String,
    /// How long to stay, after a complete guest was thrown away for want of COMMIT, to tell its source
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = values::duration)]
    pub(crate) linger: Duration,
    /// End with the first migration that fails, instead of waiting for another
    #[arg(long)]
    pub(crate) once: bool,
    /// Once the guest has arrived, say what that took as JSON on standard output, beside what the guest says there
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) host: HostArgs,
}
