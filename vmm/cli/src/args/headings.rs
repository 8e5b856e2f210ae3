//! Names the sections of a command's help.

/// What the guest boots.
pub(crate) const BOOT: &str = "Boot";
/// Guest memory.
pub(crate) const MEMORY: &str = "Memory";
/// vCPUs, and what runs them.
pub(crate) const PROCESSORS: &str = "Processors";
/// Devices of the guest.
pub(crate) const DEVICES: &str = "Devices";
/// How the guest's writes are tracked.
pub(crate) const TRACKING: &str = "Tracking";
/// Who the guest is.
pub(crate) const IDENTITY: &str = "Identity";
/// The API socket of a VMM.
pub(crate) const API: &str = "API";
/// How long a command waits.
pub(crate) const WAITING: &str = "Waiting";
/// Hand-overs from host to host.
pub(crate) const MIGRATION: &str = "Migration";
/// How the guest's memory is sent.
pub(crate) const TRANSFER: &str = "Transfer";
/// How a migration gets ahead of the guest.
pub(crate) const CONVERGENCE: &str = "Convergence";
/// What is decided of a migration in doubt.
pub(crate) const DECISION: &str = "Decision";
/// The store, and what goes into it.
pub(crate) const STORE: &str = "Store";
/// When checkpoints are taken.
pub(crate) const SCHEDULE: &str = "Schedule";
/// A checkpoint run that another command has begun.
pub(crate) const RUN: &str = "Active run";
/// The checkpoint that is read.
pub(crate) const CHECKPOINT: &str = "Checkpoint";
/// The file that is written.
pub(crate) const FILE: &str = "File";
/// When, and for how long, is measured.
pub(crate) const TIMING: &str = "Timing";
/// What the process may do on its host.
pub(crate) const SANDBOX: &str = "Sandbox";
/// What is written, and where to.
pub(crate) const OUTPUT: &str = "Output";
