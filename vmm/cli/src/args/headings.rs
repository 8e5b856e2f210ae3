//! Names the sections of a command's help.

/// What the guest boots.
pub(crate) const BOOT: &str = "Boot";
/// Guest memory.
pub(crate) const MEMORY: &str = "Memory";
/// vCPUs and their backend.
pub(crate) const PROCESSORS: &str = "Processors";
/// Devices of the guest.
pub(crate) const DEVICES: &str = "Devices";
/// Tracking of the guest's writes.
pub(crate) const TRACKING: &str = "Tracking";
/// Identity of the guest.
pub(crate) const IDENTITY: &str = "Identity";
/// The API socket of a VMM.
pub(crate) const API: &str = "API";
/// Limits of a command's waits.
pub(crate) const WAITING: &str = "Waiting";
/// Hand-overs from host to host.
pub(crate) const MIGRATION: &str = "Migration";
/// Protection of the connections of a migration.
pub(crate) const PROTECTION: &str = "Protection";
/// Transfer of the guest's memory.
pub(crate) const TRANSFER: &str = "Transfer";
/// Convergence of a migration.
pub(crate) const CONVERGENCE: &str = "Convergence";
/// The decision about a migration in doubt.
pub(crate) const DECISION: &str = "Decision";
/// The store and its content.
pub(crate) const STORE: &str = "Store";
/// When checkpoints are taken.
pub(crate) const SCHEDULE: &str = "Schedule";
/// A checkpoint run that another command has started.
pub(crate) const RUN: &str = "Active run";
/// The checkpoint that is read.
pub(crate) const CHECKPOINT: &str = "Checkpoint";
/// The file that is written.
pub(crate) const FILE: &str = "File";
/// Times and durations of a measurement.
pub(crate) const TIMING: &str = "Timing";
/// Permissions of the process on its host.
pub(crate) const SANDBOX: &str = "Sandbox";
/// The output and where it goes.
pub(crate) const OUTPUT: &str = "Output";
