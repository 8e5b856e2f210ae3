//! Checkpoints of a guest without a hypervisor, on disks that fail and lose power. One binary,
//! because many of its tests use one processor or wait.
//!
//! | module | shows |
//! | --- | --- |
//! | `store`, `line`, `retention`, `archive`, `appended` | the content of a store and of an archive |
//! | `background_copy`, `handed_over`, `flight`, `drives` | an epoch has the content of its pause, however it is copied |
//! | `crash` | everything that was reported durable is there after a loss of power |
//! | `damage`, `repair`, `salvage` | damage is named, refused and repaired |
//! | `memory_load` | restores that fail |
//! | `golden` | recorded stores are read |
#![allow(clippy::panic, clippy::unwrap_used)]

mod appended;
mod archive;
mod background_copy;
mod common;
mod crash;
mod damage;
mod drives;
mod flight;
mod golden;
mod handed_over;
mod line;
mod memory_load;
mod repair;
mod retention;
mod salvage;
mod store;
