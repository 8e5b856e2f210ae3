//! Owns the options of the commands whose process has a guest.
#![allow(rustdoc::broken_intra_doc_links, reason = "help texts: brackets are what can be left out")]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, ArgGroup, Args, ValueEnum};
use driftline_control::jobs::ShadowMode;
use driftline_guest::VmId;
use driftline_machine::config::{
    BackendKind, BalloonConfig, CpuConfig, DiskSpec, GuestName, NetSpec, SerialSink, VsockSpec,
};
use driftline_machine::memory::{Backing, HugePages};
use driftline_machine::tracking::TrackingMode;

use super::headings;
use crate::values;

/// How a process that has a guest behaves on its host.
#[derive(Args)]
pub(crate) struct HostArgs {
    /// First serial port: stdio, null or file:PATH
    ///
    /// With stdio, a terminal belongs to the guest until it ends (Ctrl-A x ends it). What comes
    /// from a pipe or a file is typed to the guest.
    #[arg(long, value_name = "SINK", default_value = "stdio", help_heading = headings::DEVICES)]
    pub(crate) serial: SerialSink,
    /// What holds guest memory: anon or memfd
    #[arg(long, value_name = "KIND", default_value_t = Backing::Anon,
          help_heading = headings::MEMORY)]
    pub(crate) memory_backing: Backing,
    /// Huge pages for guest memory: thp, hugetlbfs or none
    ///
    /// With hugetlbfs, 2 MiB pages are taken from the host's pool. Without this option the host's
    /// setting for transparent huge pages applies.
    #[arg(long, value_name = "KIND", help_heading = headings::MEMORY)]
    pub(crate) hugepages: Option<HugePages>,
    /// Take all guest memory from the host before the guest starts
    #[arg(long, help_heading = headings::MEMORY)]
    pub(crate) prefault: bool,
    /// Listen for API requests on this Unix socket
    #[arg(long, value_name = "FILE", help_heading = headings::API)]
    pub(crate) api_sock: Option<PathBuf>,
    /// Answer GET /metrics on this address, such as 127.0.0.1:9464
    ///
    /// It answers nothing else, and needs no authentication: who reaches the address can read the
    /// guest's figures, but none of its data. The API socket has /metrics too.
    #[arg(long, value_name = "IP:PORT", value_parser = values::listen_address,
          help_heading = headings::API)]
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Directory for this host's records of hand-overs
    ///
    /// All VMMs of a host share one. By default it is /var/lib/driftline for root, else
    /// $XDG_STATE_HOME/driftline or ~/.local/state/driftline.
    #[arg(long, value_name = "DIR", default_value_os_t = values::state_dir(),
          hide_default_value = true, help_heading = headings::MIGRATION)]
    pub(crate) state_dir: PathBuf,
    /// Allow access to this directory only; may be repeated
    ///
    /// The process may use files in these directories and the files that its command line names.
    /// Without this option it may use all directories except the system's own.
    #[arg(long, value_name = "DIR", help_heading = headings::SANDBOX)]
    pub(crate) allow_path: Vec<PathBuf>,
    /// Do not filter system calls
    ///
    /// A guest that escapes into the VMM can then make any system call.
    #[arg(long, help_heading = headings::SANDBOX)]
    pub(crate) no_seccomp: bool,
    /// Do not restrict access to files
    ///
    /// A guest that escapes into the VMM can then reach all files of the VMM's user.
    #[arg(long, conflicts_with = "allow_path", help_heading = headings::SANDBOX)]
    pub(crate) no_landlock: bool,
    /// End at once when the process that started this one ends
    #[arg(long, hide = true, help_heading = headings::SANDBOX)]
    pub(crate) die_with_parent: bool,
}

#[derive(Args)]
#[command(group(ArgGroup::new("boot").required(true).multiple(true)
    .args(["kernel", "guest", "config_file"])))]
#[command(group(ArgGroup::new("kernel_source").multiple(true).args(["kernel", "config_file"])))]
pub(crate) struct RunArgs {
    /// Take what other options do not say from this file
    ///
    /// The file is the JSON of GET /vm/config, whose fields can be left out. An option replaces
    /// what the file says, --disk and --net all of its disks and interfaces.
    #[arg(long, value_name = "FILE", help_heading = headings::BOOT)]
    pub(crate) config_file: Option<PathBuf>,
    /// Kernel to boot: a static ELF file or a bzImage
    ///
    /// An ELF file with a PVH note is entered by PVH, all others by the 64-bit Linux boot protocol.
    #[arg(long, value_name = "FILE", conflicts_with = "guest", help_heading = headings::BOOT)]
    pub(crate) kernel: Option<PathBuf>,
    /// Initial RAM disk for the kernel
    #[arg(long, value_name = "FILE", requires = "kernel_source", conflicts_with = "guest",
          help_heading = headings::BOOT)]
    pub(crate) initrd: Option<PathBuf>,
    /// Kernel command line
    ///
    /// console=ttyS0, panic=-1 and reboot=k are added unless it sets them, and so are the virtio
    /// devices.
    #[arg(long, value_name = "TEXT", requires = "kernel_source", conflicts_with = "guest",
          help_heading = headings::BOOT)]
    pub(crate) cmdline: Option<String>,
    /// Add nothing to the kernel command line
    #[arg(long, requires = "kernel_source", conflicts_with = "guest", help_heading = headings::BOOT)]
    pub(crate) bare_cmdline: bool,
    /// Boot the embedded guest, such as payload,ws=64M,rate=320M
    ///
    /// ws is the size of its working set. rate is in bytes a second, or max. pattern is seq,
    /// random, zipf, stride or once; seed is a number.
    #[arg(long, value_name = "SPEC", value_parser = values::guest_spec,
          help_heading = headings::BOOT)]
    pub(crate) guest: Option<String>,
    /// Size of guest memory, such as 512M or 4G [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = values::memory,
          help_heading = headings::MEMORY)]
    pub(crate) mem: Option<u64>,
    /// Number of vCPUs [default: 1]
    #[arg(long, value_name = "N", value_parser = values::vcpus,
          help_heading = headings::PROCESSORS)]
    pub(crate) vcpus: Option<u8>,
    /// CPU model: host or baseline, minus features: host,-cx16 [default: host]
    ///
    /// With baseline (x86-64-v2) a guest can migrate between different processors of one vendor.
    #[arg(long, value_name = "MODEL", help_heading = headings::PROCESSORS)]
    pub(crate) cpu: Option<CpuConfig>,
    /// What runs the vCPUs: kvm or threads [default: kvm]
    ///
    /// threads is for hosts without KVM. It runs the embedded guest only.
    #[arg(long, value_name = "NAME", help_heading = headings::PROCESSORS)]
    pub(crate) backend: Option<BackendKind>,
    /// Disk: path=FILE[,readonly][,id=NAME][,serial=TEXT]; may be repeated
    ///
    /// FILE is a raw image or a block device.
    #[arg(long = "disk", value_name = "SPEC", help_heading = headings::DEVICES)]
    pub(crate) disks: Vec<DiskSpec>,
    /// Network: tap=NAME[,mac=ADDRESS][,id=NAME][,queues=N]; may be repeated
    ///
    /// The tap must exist.
    #[arg(long = "net", value_name = "SPEC", help_heading = headings::DEVICES)]
    pub(crate) nets: Vec<NetSpec>,
    /// Socket device: cid=N,uds=PATH
    ///
    /// A host program that connects to PATH sends "CONNECT port". A host program to which the guest
    /// connects listens on PATH_port.
    #[arg(long, value_name = "SPEC", help_heading = headings::DEVICES)]
    pub(crate) vsock: Option<VsockSpec>,
    /// Host randomness for a kernel: on or off [default: on]
    ///
    /// With --config-file the default is what the file says.
    #[arg(long, value_name = "WHETHER", value_enum, hide_possible_values = true,
          help_heading = headings::DEVICES)]
    pub(crate) rng: Option<OnOff>,
    /// Memory balloon for a --kernel guest, with settings or without
    ///
    /// Settings are [size=SIZE][,deflate-on-oom=on|off][,reporting=on|off][,hinting=on|off]; all
    /// are on by default. With reporting, the host gets back memory that the guest has freed. With
    /// hinting, a migration's first pass and a full checkpoint skip free memory.
    #[arg(long, value_name = "SPEC", num_args = 0..=1, default_missing_value = "",
          requires = "kernel_source", conflicts_with = "guest", help_heading = headings::DEVICES)]
    pub(crate) balloon: Option<BalloonConfig>,
    /// How guest writes are tracked [default: dirty-ring]
    ///
    /// Modes are dirty-ring, dirty-bitmap, dirty-bitmap-manual, userfault-wp and none.
    #[arg(long, value_name = "MODE", help_heading = headings::TRACKING)]
    pub(crate) tracking: Option<TrackingMode>,
    /// Entries of each vCPU's dirty ring, a power of two [default: 16384]
    #[arg(long, value_name = "N", value_parser = values::ring_entries,
          help_heading = headings::TRACKING)]
    pub(crate) ring_entries: Option<u32>,
    /// Check that tracking misses no page: compare or userfault-wp
    ///
    /// For tests of a host or a kernel. compare reads all memory; userfault-wp asks the host's page
    /// tables. At most ten times a second the guest is paused, and what changed is compared with
    /// what was reported. A missed page is named on stderr, and the exit code is 1.
    #[arg(long, value_name = "MODE", help_heading = headings::TRACKING)]
    pub(crate) shadow: Option<ShadowMode>,
    /// The guest's id, a UUID; random by default
    #[arg(long, value_name = "UUID", help_heading = headings::IDENTITY)]
    pub(crate) id: Option<VmId>,
    /// The guest's name: 1 to 64 letters, digits, '-', '_' and '.'
    #[arg(long, value_name = "NAME", help_heading = headings::IDENTITY)]
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
    /// File for a disk: path=FILE[,readonly][,id=NAME][,identity=any][,copy]
    ///
    /// With id=NAME it is for the disk of that name, else for the next in the guest's order. A disk
    /// without a file here has the path that it had at the source. The file or block device must
    /// not be known to be another disk than the source's (by a file's inode and birth time, a
    /// device's WWID or serial number). identity=any accepts it all the same: for a copy, or for
    /// storage whose hosts number files differently. With copy the disk's content is received, too
    /// (send-migration --copy-disks): FILE is created, or holds no data, and is removed if the
    /// guest does not arrive.
    #[arg(long = "disk", value_name = "SPEC", help_heading = headings::DEVICES)]
    pub(crate) disks: Vec<DiskSpec>,
    /// Tap for a network interface: tap=NAME[,id=NAME]
    ///
    /// With id=NAME it is for the interface of that name, else for the next in the guest's order.
    /// An interface without a tap here has the tap of the name that it had before.
    #[arg(long = "net", value_name = "SPEC", help_heading = headings::DEVICES)]
    pub(crate) nets: Vec<NetSpec>,
    /// Unix socket for the guest's socket device: uds=PATH
    #[arg(long, value_name = "SPEC", help_heading = headings::DEVICES)]
    pub(crate) vsock: Option<VsockSpec>,
}

/// Describes `--disk` of `restore`, which takes fewer settings than that of `receive-migration`.
fn describe_restored_disk(arg: Arg) -> Arg {
    arg.help("File for a disk: path=FILE[,readonly][,id=NAME][,identity=any]").long_help(
        "File for a disk: path=FILE[,readonly][,id=NAME][,identity=any]\n\n\
         With id=NAME it is for the disk of that name, else for the next in the guest's order. A disk \
         without a file here has the path that it had when the checkpoint was taken, and that path \
         must lead to the same disk. A checkpoint that has the disk's content overwrites FILE with it. \
         A new guest cannot have its parent's disk; identity=any says that a file with the inode and \
         birth time of that disk is a copy in a snapshot of its file system. \
         With --disks external, give copies of the disks from the moment of the checkpoint.",
    )
}

#[derive(Args)]
#[command(mut_arg("disks", describe_restored_disk))]
pub(crate) struct RestoreArgs {
    /// The store's directory, or an archive
    ///
    /// An archive is a file that `store export --format driftline-zstd` has written.
    #[arg(long, value_name = "PATH", help_heading = headings::CHECKPOINT)]
    pub(crate) store: PathBuf,
    /// The checkpoint's number; the latest by default
    #[arg(long, visible_alias = "checkpoint", value_name = "N", value_parser = values::checkpoint,
          help_heading = headings::CHECKPOINT)]
    pub(crate) epoch: Option<u64>,
    /// Let the guest run at once, and read its memory on demand
    ///
    /// The rest of its memory is read in the background. An archive cannot be read so.
    #[arg(long, help_heading = headings::CHECKPOINT)]
    pub(crate) lazy: bool,
    /// Recovery: the restored guest is the one in the checkpoint
    ///
    /// No other host or process may have that guest. It keeps its id and name. From the latest
    /// checkpoint of a store it may continue with checkpoints there. Without this option the guest
    /// is a new one with an id of its own, whose checkpoints go into another store (checkpoint
    /// --new-store).
    #[arg(long, help_heading = headings::IDENTITY)]
    pub(crate) same_id: bool,
    /// Clone: also while a hand-over of the guest in the checkpoint is in doubt
    ///
    /// A restored guest is a new one by default, but refused while the original may be running on
    /// another host. With this option it must have other disks (--disk) than the original.
    #[arg(long, conflicts_with = "same_id", help_heading = headings::IDENTITY)]
    pub(crate) new_id: bool,
    /// The guest's name: 1 to 64 letters, digits, '-', '_' and '.'
    ///
    /// With --same-id it is by default the name in the checkpoint.
    #[arg(long, value_name = "NAME", help_heading = headings::IDENTITY)]
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
    /// How long to stay to tell the source of a discarded guest
    ///
    /// A complete guest is discarded if its source does not commit, or it cannot be taken over.
    /// `driftline stop` and signals shorten this to 2 s. Digits and ms or s.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = values::duration,
          help_heading = headings::WAITING)]
    pub(crate) linger: Duration,
    /// End with the first migration that fails, instead of waiting for another
    #[arg(long, help_heading = headings::WAITING)]
    pub(crate) once: bool,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Print one JSON object once the guest has arrived
    ///
    /// It goes to standard output, as the guest's serial port does by default.
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}
