//! Firecracker's API, call by call: what Firecracker answers is recorded in `tests/firecracker`,
//! and Driftline must answer the same unless the record says where it differs and why.
//!
//! Each file has sequences of calls. A call has the status, the fields with their types and, for a
//! fault, the text of Firecracker's answer. A difference that the record does not explain fails the
//! test, and so does an explained one that no longer occurs.
//!
//! If the environment variable `FIRECRACKER` is the path of Firecracker's binary, the test plays
//! the same sequences against that, too.
#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by saying what it expected")]

#[path = "firecracker_api/compare.rs"]
mod compare;
#[path = "firecracker_api/operations.rs"]
mod operations;
#[path = "firecracker_api/player.rs"]
mod player;
#[path = "firecracker_api/record.rs"]
mod record;

/// Makes a test of each file.
macro_rules! played {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                player::play(stringify!($name));
            }
        )*

        #[test]
        fn every_file_is_played() {
            assert_eq!(record::names(), [$(stringify!($name)),*]);
        }
    };
}

played! {
    balloon
    bodies
    changes
    devices
    drives
    failed_loads
    http
    interfaces
    machine
    metadata
    paths
    process
    running
    snapshots
    starts
}
