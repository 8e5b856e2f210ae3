//! Owns the options of the commands whose process has a guest.
#![allow(rustdoc::broken_intra_doc_links, reason = "help texts: brackets mark optional parts")]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, ArgGroup, Args, ValueEnum};
use driftline_control::jobs::ShadowMode;
use driftline_guest::VmId;
use driftline_machine::config::{
    BackendKind, BalloonConfig, CpuConfig, DiskSpec, GuestName, NetSpec, RateLimits, SerialSink,
    VsockSpec,
};
use driftline_machine::memory::{Backing, HugePages};
use driftline_machine::tracking::TrackingMode;
use driftline_migrate::{Address, PeerName};

use super::headings;
use crate::values;

/// How a process that has a guest behaves on its host.
#[derive(Args)]
pub(crate) struct HostArgs {
    /// First serial port: stdio, null or file:PATH
    ///
    /// With stdio, the guest has the terminal until it ends (Ctrl-A x ends it). Input from a pipe
    /// or a file goes to the guest.
    #[arg(long, value_name = "SINK", default_value = "stdio", help_heading = headings::DEVICES)]
    pub(crate) serial: SerialSink,
    /// Backing of guest memory: anon or memfd
    #[arg(long, value_name = "KIND", default_value_t = Backing::Anon,
          help_heading = headings::MEMORY)]
    pub(crate) memory_backing: Backing,
    /// Huge pages for guest memory: thp, hugetlbfs or none
    ///
    /// hugetlbfs takes 2 MiB pages from the host's pool. Without this option the host's setting for
    /// transparent huge pages applies.
    #[arg(long, value_name = "KIND", help_heading = headings::MEMORY)]
    pub(crate) hugepages: Option<HugePages>,
    /// Prefault all guest memory before the guest starts
    #[arg(long, help_heading = headings::MEMORY)]
    pub(crate) prefault: bool,
    /// Listen for API requests on this Unix socket
    #[arg(long, value_name = "FILE", help_heading = headings::API)]
    pub(crate) api_sock: Option<PathBuf>,
    /// Answer GET /metrics on this address, such as 127.0.0.1:9464
    ///
    /// The address serves nothing else and needs no authentication: every client that reaches it
    /// can read the guest's figures, but none of its data. The API socket serves /metrics, too.
    #[arg(long, value_name = "IP:PORT", value_parser = values::listen_address,
          help_heading = headings::API)]
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Directory of this host's hand-over records
    ///
    /// All VMMs of a host share one directory. The default is /var/lib/driftline for root, and
    /// $XDG_STATE_HOME/driftline or ~/.local/state/driftline for other users.
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
    /// End immediately when the process that started this one ends
    #[arg(long, hide = true, help_heading = headings::SANDBOX)]
    pub(crate) die_with_parent: bool,
}

#[derive(Args)]
#[command(group(ArgGroup::new("boot").required(true).multiple(true)
    .args(["kernel", "guest", "config_file"])))]
#[command(group(ArgGroup::new("kernel_source").multiple(true).args(["kernel", "config_file"])))]
pub(crate) struct RunArgs {
    /// Read the guest's configuration from this file
    ///
    /// The file is the JSON of GET /vm/config; all fields are optional. Options override the file.
    /// --disk replaces all disks of the file, --net all of its interfaces.
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
    /// Driftline adds the virtio devices. It also adds console=ttyS0, panic=-1 and reboot=k, each
    /// unless the text sets it.
    #[arg(long, value_name = "TEXT", requires = "kernel_source", conflicts_with = "guest",
          help_heading = headings::BOOT)]
    pub(crate) cmdline: Option<String>,
    /// Add nothing to the kernel command line
    #[arg(long, requires = "kernel_source", conflicts_with = "guest",
          help_heading = headings::BOOT)]
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
    /// `driftline doctor -v` lists the features of this host.
    #[arg(long, value_name = "MODEL", help_heading = headings::PROCESSORS)]
    pub(crate) cpu: Option<CpuConfig>,
    /// Backend of the vCPUs: kvm or threads [default: kvm]
    ///
    /// threads is for hosts without KVM. It runs the embedded guest only.
    #[arg(long, value_name = "NAME", help_heading = headings::PROCESSORS)]
    pub(crate) backend: Option<BackendKind>,
    /// Disk: path=FILE[,readonly][,id=NAME][,serial=TEXT]; may be repeated
    ///
    /// FILE is a raw image or a block device. bandwidth=SIZE limits the bytes that the guest reads
    /// and writes in a second, iops=N its requests.
    #[arg(long = "disk", value_name = "SPEC", help_heading = headings::DEVICES)]
    pub(crate) disks: Vec<DiskSpec>,
    /// Network: tap=NAME[,mac=ADDRESS][,id=NAME][,queues=N]; may be repeated
    ///
    /// The tap must exist. rx-bandwidth=SIZE limits the bytes that the guest receives in a second,
    /// tx-bandwidth=SIZE those that it sends.
    #[arg(long = "net", value_name = "SPEC", help_heading = headings::DEVICES)]
    pub(crate) nets: Vec<NetSpec>,
    /// Socket device: cid=N,uds=PATH
    ///
    /// To reach a port of the guest, a host program connects to PATH and sends "CONNECT port". To
    /// accept connections from the guest, a host program listens on PATH_port.
    #[arg(long, value_name = "SPEC", help_heading = headings::DEVICES)]
    pub(crate) vsock: Option<VsockSpec>,
    /// Entropy device for a --kernel guest: on or off [default: on]
    ///
    /// With --config-file, the file's setting is the default.
    #[arg(long, value_name = "STATE", value_enum, hide_possible_values = true,
          help_heading = headings::DEVICES)]
    pub(crate) rng: Option<OnOff>,
    /// Limits of the entropy device, which only a file gives.
    #[arg(skip)]
    pub(crate) rng_limits: RateLimits,
    /// Memory balloon for a --kernel guest; settings are optional
    ///
    /// Settings are [size=SIZE][,deflate-on-oom=on|off][,reporting=on|off][,hinting=on|off]; the
    /// last three are on by default. With reporting, the host gets back memory that the guest has
    /// freed. With hinting, a migration's first pass and a full checkpoint skip free memory.
    #[arg(long, value_name = "SPEC", num_args = 0..=1, default_missing_value = "",
          requires = "kernel_source", conflicts_with = "guest", help_heading = headings::DEVICES)]
    pub(crate) balloon: Option<BalloonConfig>,
    /// Tracking mode of guest writes [default: dirty-ring]
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
    /// For tests of a host or a kernel. At most ten times a second, the check pauses the guest and
    /// compares the changed pages with the reported ones. compare finds changed pages by reading
    /// all memory, userfault-wp by the host's page tables. stderr names a missed page, and the exit
    /// code is 1.
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

/// A switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum OnOff {
    /// Enabled
    On,
    /// Disabled
    Off,
}

/// Devices of a guest on the host that restores or receives it.
#[derive(Args, Default)]
pub(crate) struct DeviceArgs {
    /// File for a disk: path=FILE[,readonly][,id=NAME][,identity=any][,copy]
    ///
    /// id=NAME selects the guest's disk; without it FILE is for the next disk in the guest's order.
    /// A disk without this option has the path that it had at the source. FILE is refused if it is
    /// known to be another disk than the source's (by a file's inode and birth time, or a device's
    /// WWID or serial number). identity=any accepts it: for a copy, or for storage whose hosts
    /// number files differently. With copy, the disk's content is received, too (send-migration
    /// --copy-disks): FILE must not exist, or must have no data. If the guest does not arrive, a
    /// new FILE is removed, and an old one is emptied.
    #[arg(long = "disk", value_name = "SPEC", help_heading = headings::DEVICES)]
    pub(crate) disks: Vec<DiskSpec>,
    /// Tap for a network interface: tap=NAME[,id=NAME]
    ///
    /// id=NAME selects the guest's interface; without it the tap is for the next interface in the
    /// guest's order. An interface without this option uses a tap of the same name as before.
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
         id=NAME selects the guest's disk; without it FILE is for the next disk in the guest's \
         order. A disk without this option has the path that it had when the checkpoint was taken, \
         and that path must lead to the same disk. A checkpoint that has the disk's content \
         overwrites FILE with it. A new guest cannot have its parent's disk; identity=any states \
         that a file with the inode and birth time of that disk is a copy in a snapshot of its \
         file system. For a checkpoint of --disks external, give a copy of the disk from the \
         checkpoint's pause.",
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
    #[arg(long, value_name = "N", value_parser = values::checkpoint,
          help_heading = headings::CHECKPOINT)]
    pub(crate) checkpoint: Option<u64>,
    /// Run the guest immediately and read its memory on demand
    ///
    /// A background copy reads the rest of the memory. An archive does not support this option.
    #[arg(long, help_heading = headings::CHECKPOINT)]
    pub(crate) lazy: bool,
    /// Recovery: the restored guest is the one in the checkpoint
    ///
    /// No other host or process may have that guest. It keeps its id and name. A guest restored
    /// from a store's latest checkpoint can add checkpoints to that store. Without this option the
    /// guest is new and has an id of its own; its checkpoints need another store (checkpoint
    /// --new-store).
    #[arg(long, help_heading = headings::IDENTITY)]
    pub(crate) same_id: bool,
    /// Clone even while a hand-over of the guest in the checkpoint is in doubt
    ///
    /// A restored guest is new by default. Without this option the restore is refused while the
    /// original may be running on another host. With this option the clone must have other disks
    /// (--disk) than the original.
    #[arg(long, conflicts_with = "same_id", help_heading = headings::IDENTITY)]
    pub(crate) new_id: bool,
    /// The guest's name: 1 to 64 letters, digits, '-', '_' and '.'
    ///
    /// With --same-id, the default is the name in the checkpoint.
    #[arg(long, value_name = "NAME", help_heading = headings::IDENTITY)]
    pub(crate) name: Option<GuestName>,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) host: HostArgs,
}

#[derive(Args)]
pub(crate) struct ReceiveArgs {
    /// Address to listen on: tcp:HOST:PORT, unix:PATH or fd:N
    ///
    /// Port 0 selects a free port. The socket of unix:PATH is for this user only; the socket of a
    /// receiver that has ended is replaced. fd:N is a descriptor that this process was started
    /// with: a stream socket that listens, such as that of socket activation, or one connection.
    #[arg(value_name = "ADDRESS", value_parser = values::address)]
    pub(crate) address: Address,
    /// Use mutual TLS with the files in this directory
    ///
    /// ca-cert.pem, server-cert.pem and server-key.pem are read for each connection, so they can be
    /// replaced while the receiver waits.
    #[arg(long, value_name = "DIR", help_heading = headings::PROTECTION)]
    pub(crate) tls_dir: Option<PathBuf>,
    /// Accept only a source whose certificate has this name; repeatable
    ///
    /// A DNS name, an IP address or a SPIFFE id (spiffe://DOMAIN/PATH). Without this option every
    /// certificate that the CA has signed is accepted.
    #[arg(long, value_name = "NAME", requires = "tls_dir", help_heading = headings::PROTECTION)]
    pub(crate) allow_peer: Vec<PeerName>,
    /// Listen for other hosts without encryption and authentication
    ///
    /// Every host that reaches the address can then send a guest, and every host on the way can
    /// read and change one. Loopback, unix sockets and descriptors need no such option.
    #[arg(long, conflicts_with = "tls_dir", help_heading = headings::PROTECTION)]
    pub(crate) insecure: bool,
    /// Time for a source to ask about a discarded guest
    ///
    /// The receiver discards a complete guest if the source does not commit, or if it cannot take
    /// the guest over. It then waits to answer the source. `driftline stop` and signals shorten
    /// this wait to 2 s. For example, 500ms, 30s or 5m.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = values::duration,
          help_heading = headings::WAITING)]
    pub(crate) answer_timeout: Duration,
    /// End after the first failed migration instead of waiting for another
    #[arg(long, help_heading = headings::WAITING)]
    pub(crate) once: bool,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Print one JSON object once the guest has arrived
    ///
    /// The object goes to standard output, as the guest's serial output does by default.
    #[arg(long, help_heading = headings::OUTPUT)]
    pub(crate) json: bool,
}
