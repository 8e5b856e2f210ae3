//! Owns the options of every command.
#![allow(rustdoc::broken_intra_doc_links, reason = "help texts: brackets are what can be left out")]

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use checkpoint::VmId;
use clap::{ArgAction, ArgGroup, Args, Parser, Subcommand, ValueEnum};
use dirty_tracker::TrackingMode;
use migrate::{Compression, CopyDrives, TimeoutStrategy};
use vmm::api::model::DisksPolicy;
use vmm::config::{
    Backend, BalloonConfig, CpuConfig, DEFAULT_RING_ENTRIES, DiskSpec, GuestName, NetSpec,
    SerialSink, VsockSpec,
};
use vmm::jobs::ShadowMode;
use vmm::memory::{Backing, HugePages};

use super::compare::CompareArgs;
use super::values;

/// A small KVM virtual machine monitor that knows which guest frames changed.
///
/// Exit codes: 0 done, 1 error, 2 usage, 3 the host lacks something, 4 a migration or checkpoint
/// failed and the guest is still running where it was.
#[derive(Parser)]
#[command(name = "driftline", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// What is logged, how, and where to.
#[derive(Args)]
pub(crate) struct LogArgs {
    /// Log more: -v what happens, -vv details, -vvv everything
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Log by this filter, such as debug or vmm=trace,info; RUST_LOG is the default
    #[arg(long, global = true, value_name = "FILTER")]
    pub(crate) log: Option<String>,
    /// How the log is written; json is one object a line
    #[arg(long, global = true, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
    /// Append the log to this file instead of writing it to stderr
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) log_file: Option<PathBuf>,
}

/// How the log is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// For programs
    Json,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// See it work: launch, checkpoint, kill, restore, live-migrate, verify
    Demo(DemoArgs),
    /// Start a guest and run it to its end
    Run(RunArgs),
    /// Show a guest's state and figures
    Info(QueryArgs),
    /// Show a guest's balloon, or change its size
    Balloon(BalloonArgs),
    /// Stop a guest's vCPUs
    Pause(ApiArgs),
    /// Let a paused guest run
    Resume(ApiArgs),
    /// End a guest and its VMM
    Stop(StopArgs),
    /// Take checkpoints of a running guest into a store
    Checkpoint(CheckpointArgs),
    /// Build a guest from a checkpoint and run it to its end
    Restore(RestoreArgs),
    /// Wait for a guest from another host, then run it to its end
    ReceiveMigration(ReceiveArgs),
    /// Send a running guest to another host
    SendMigration(SendArgs),
    /// Say what a migration of a running guest, and checkpoints of it, would come to
    ///
    /// Watches the guest for about four seconds, in which following its writes costs it what it does in a migration. Nothing is begun.
    Plan(super::plan::PlanArgs),
    /// Watch live what a guest writes: where in its memory, how fast, by which vCPU; and how its migration or checkpoints go
    ///
    /// A heat map of guest memory by the rate at which it is written, the figures of each vCPU and of its dirty ring, and what is under way. Keys: q quits, p
    /// pauses the view, + and - change the interval. Watching costs the guest what following its writes does in a migration, however seldom you
    /// look, and ends with this command. A migration and checkpoints may be under way meanwhile; they miss nothing. NO_COLOR has signs instead of colours.
    Top(super::top::TopArgs),
    /// Give up a migration; the guest stays where it is
    CancelMigration(ApiArgs),
    /// Settle a migration in doubt: say where the guest shall be
    Resolve(ResolveArgs),
    /// Measure the ways of tracking a guest's writes side by side, on this host
    Compare(CompareArgs),
    /// Show what this host offers, and what each missing thing costs
    Doctor(DoctorArgs),
    /// Look at a store of checkpoints
    #[command(subcommand)]
    Store(StoreCommand),
}

/// Where a running driftline listens.
#[derive(Args)]
pub(crate) struct ApiArgs {
    /// The API socket of the driftline that has the guest
    #[arg(long, value_name = "FILE")]
    pub(crate) api_sock: PathBuf,
    /// How long to wait for an answer: digits and ms or s
    ///
    /// For each request. What a command waits for on purpose (the end of a migration, checkpoints, the next look of top) has no limit.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = values::duration)]
    pub(crate) timeout: Duration,
}

impl ApiArgs {
    /// A client of that driftline.
    pub(crate) fn client(&self) -> vmm::api::Client {
        vmm::api::Client::new(&self.api_sock).with_timeout(self.timeout)
    }
}

#[derive(Args)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Wait until the process of the VMM has ended, in the time of --timeout
    #[arg(long)]
    pub(crate) wait: bool,
}

/// A question to a running driftline.
#[derive(Args)]
pub(crate) struct QueryArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct BalloonArgs {
    #[command(flatten)]
    pub(crate) query: QueryArgs,
    /// Want this much of the guest's memory back: whole MiB
    #[arg(long, value_name = "SIZE", value_parser = values::size)]
    pub(crate) size: Option<u64>,
}

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
pub(crate) struct CheckpointArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// The store's directory, created if need be
    #[arg(long, value_name = "DIR", required_unless_present_any = ["stop", "status"])]
    pub(crate) store: Option<PathBuf>,
    /// End the checkpoint run that is active, after the checkpoint under way
    #[arg(long, conflicts_with_all = ["store", "status", "every", "count", "detach"])]
    pub(crate) stop: bool,
    /// Show the checkpoint run that is active, or was last
    #[arg(long, conflicts_with_all = ["store", "every", "count", "detach"])]
    pub(crate) status: bool,
    /// Leave the run to itself: it goes on until --count, --stop or the guest's end. Without it a run ends with this command
    #[arg(long, requires = "every")]
    pub(crate) detach: bool,
    /// Make the store: its directory does not exist yet, or is empty. A clone needs one of its own, beside its parent's
    #[arg(long)]
    pub(crate) new_store: bool,
    /// Take one at this interval until --count or Ctrl-C; without it, take one
    #[arg(long, value_name = "TIME", value_parser = values::interval)]
    pub(crate) every: Option<Duration>,
    /// How long the guest may stand still for one: when so much has changed that the next would take longer, or would not
    /// fit into the memory kept for copies, it is taken early
    #[arg(long, value_name = "TIME", requires = "every", value_parser = values::duration)]
    pub(crate) max_pause: Option<Duration>,
    /// Keep so many, and drop older ones: the store stays as large as it is with them. Without it all are kept
    ///
    /// One that is being restored or read in another way is dropped later.
    #[arg(long, value_name = "N", value_parser = values::at_least_one)]
    pub(crate) keep: Option<NonZeroU64>,
    /// Write memory past the host's page cache (O_DIRECT): less of the processor's time, and what others have in that cache stays
    #[arg(long)]
    pub(crate) direct_io: bool,
    /// What becomes of disks that the guest can write to: epoch or external
    ///
    /// With epoch, what changed of them is in each checkpoint, as it was in that pause, and restore writes it back. With external
    /// checkpoints have memory and devices, and you keep, for each, copies of the disks as they were in its pause: made while the guest
    /// is paused, or by a snapshot of the storage at that moment.
    #[arg(long, value_name = "POLICY", default_value = "epoch")]
    pub(crate) disks: DisksPolicy,
    /// Stop after so many
    #[arg(long, value_name = "N", requires = "every", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// Print one JSON object a line for each checkpoint; with --every, a last one says what was achieved
    #[arg(long)]
    pub(crate) json: bool,
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

#[derive(Subcommand)]
pub(crate) enum StoreCommand {
    /// List the checkpoints
    Ls(StoreArgs),
    /// Read everything and check it
    Verify(StoreArgs),
    /// Make a damaged store usable again: sound checkpoints stay, what is replaced is kept in files named damaged-N.*
    Repair(RepairArgs),
    /// Write the store anew, without the room that dropped checkpoints have left; nobody may be writing to it
    Compact(StoreArgs),
    /// Write a checkpoint to a file
    Export(ExportArgs),
}

#[derive(Args)]
pub(crate) struct ExportArgs {
    /// The store's directory
    #[arg(value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// raw: each byte at its guest physical address; elf-core: that as a core, with the registers of every vCPU; both with holes where memory
    /// is zero. driftline-zstd: an archive of memory, state and disks, packed, for restore --store FILE
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = ExportFormat::Raw)]
    pub(crate) format: ExportFormat,
    /// The checkpoint's number; the latest by default
    #[arg(long, value_name = "N", value_parser = values::checkpoint)]
    pub(crate) epoch: Option<u64>,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Write over a file that is there
    #[arg(long)]
    pub(crate) force: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// What an exported checkpoint is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ExportFormat {
    /// A flat memory file
    Raw,
    /// An ELF core with the registers of every vCPU, for gdb and crash
    ElfCore,
    /// Memory and state in a packed file of Driftline's own, which `restore` takes
    DriftlineZstd,
}

#[derive(Args)]
pub(crate) struct RepairArgs {
    /// The store's directory; nobody may be writing to it
    #[arg(value_name = "DIR")]
    pub(crate) store: PathBuf,
    /// Only say what is sound and what is not; change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct StoreArgs {
    /// The store's directory; to list and to verify, an archive too
    #[arg(value_name = "PATH")]
    pub(crate) store: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
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

#[derive(Args)]
pub(crate) struct SendArgs {
    /// Where a driftline waits: tcp:HOST:PORT
    #[arg(value_name = "ADDRESS", value_parser = values::tcp)]
    pub(crate) address: String,
    #[command(flatten)]
    pub(crate) query: QueryArgs,
    /// The pause that the guest may notice, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 300,
          value_parser = values::downtime_ms)]
    pub(crate) downtime_ms: u64,
    /// Time for copying while the guest runs, in seconds
    #[arg(long, value_name = "S", default_value_t = 3600,
          value_parser = values::timeout_s)]
    pub(crate) timeout_s: u64,
    /// What to do when that has passed: cancel or switchover
    #[arg(long, value_name = "NAME", default_value_t = TimeoutStrategy::Cancel)]
    pub(crate) timeout_strategy: TimeoutStrategy,
    /// Bytes a second to copy at most while the guest runs, such as 100M
    ///
    /// In the pause the link is used as it is; what that will take is judged by this bandwidth.
    #[arg(long, value_name = "SIZE", value_parser = values::bandwidth)]
    pub(crate) max_bandwidth: Option<u64>,
    /// Connections that share in the sending of memory, for links that one does not fill
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = values::connections)]
    pub(crate) connections: u32,
    /// How contents are made smaller, message by message, where that wins: none, lz4 or zstd
    #[arg(long, value_name = "NAME", default_value_t = Compression::None)]
    pub(crate) compress: Compression,
    /// Compare a digest of all memory on both sides, in the pause: it takes the time to read memory
    #[arg(long)]
    pub(crate) verify: bool,
    /// Copy the guest's disks along, all or those with these names, into files that the receiver names
    /// (--disk path=FILE,id=NAME,copy)
    ///
    /// Without, both hosts need the same disks. The files here stay, as the guest has left them, and are
    /// out of date from then on.
    #[arg(long, value_name = "NAME,NAME", num_args = 0..=1, require_equals = true,
          default_missing_value = "")]
    pub(crate) copy_disks: Option<CopyDrives>,
    /// Hold no vCPU back, also if the guest outruns the link
    ///
    /// Otherwise vCPUs that write are slowed down, in holds of 20 ms at most, when passes over memory do not get shorter.
    #[arg(long)]
    pub(crate) no_throttle: bool,
}

#[derive(Args)]
pub(crate) struct ResolveArgs {
    #[command(flatten)]
    pub(crate) action: ResolveAction,
    /// The API socket of the driftline that has the guest
    #[arg(long, value_name = "FILE", required_unless_present = "state_dir")]
    pub(crate) api_sock: Option<PathBuf>,
    /// How long to wait for an answer of that driftline: digits and ms or s
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = values::duration)]
    pub(crate) timeout: Duration,
    /// Without a driftline that has the guest: settle the record that its crash left in this directory
    #[arg(long, value_name = "DIR", conflicts_with = "api_sock")]
    pub(crate) state_dir: Option<PathBuf>,
    /// The guest, where several have records there
    #[arg(long, value_name = "ID", requires = "state_dir")]
    pub(crate) vm: Option<String>,
}

/// Exactly one of the two.
#[derive(Args)]
#[group(required = true, multiple = false)]
pub(crate) struct ResolveAction {
    /// The guest goes on here: you assert that the destination does not run it and never will
    #[arg(long)]
    pub(crate) run: bool,
    /// The guest here ends: it runs at the destination, or is lost
    #[arg(long)]
    pub(crate) discard: bool,
}

#[derive(Args)]
pub(crate) struct DemoArgs {
    /// What runs the vCPUs: kvm where it can be used, else threads
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Option<Backend>,
    /// Print the figures as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// Exit with 3 if something is missing that every KVM guest needs
    #[arg(long)]
    pub(crate) check: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
