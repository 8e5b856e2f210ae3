//! Owns the options of every command.
//!
//! The first sentence of an option is its line in `-h`, and so fits into one; the rest is for
//! `--help`.

mod api;
mod command;
mod compare;
mod examples;
mod guest;
mod headings;
mod hints;
mod log;
mod migration;
mod plan;
mod serve;
mod store;
#[cfg(test)]
mod tests;
mod top;
mod upgrade;

pub(crate) use api::{ApiArgs, BalloonArgs, QueryArgs, StopArgs};
pub(crate) use command::{Cli, Command, DemoArgs, DoctorArgs, StartCommand};
pub(crate) use compare::CompareArgs;
pub(crate) use guest::{DeviceArgs, HostArgs, OnOff, ReceiveArgs, RestoreArgs, RunArgs};
pub(crate) use hints::with_hint;
pub(crate) use log::{LogArgs, LogFormat};
pub(crate) use migration::{ResolveArgs, SendArgs};
pub(crate) use plan::PlanArgs;
pub(crate) use serve::ServeArgs;
pub(crate) use store::{
    CheckpointArgs, ExportArgs, ExportFormat, RepairArgs, StoreArgs, StoreCommand,
};
pub(crate) use top::{LONGEST_INTERVAL, SHORTEST_INTERVAL, TopArgs};
pub(crate) use upgrade::{TakeOverArgs, UpgradeArgs};
