//! Unmodified clients of Firecracker's API, from the registry: the programs in `tests/clients`
//! drive a Linux guest and ten clones of it through each. They can drive Firecracker itself:
//!
//! `cargo run --manifest-path tests/clients/fctools/Cargo.toml FIRECRACKER IMAGE_DIRECTORY SCRATCH`

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tests::{LinuxImage, Namespace, PEER, ScratchDir, driftline, wait_for};

use super::text;

/// Time limit of a client's program. Each of its steps has a limit, too.
const PROGRAM: Duration = Duration::from_secs(600);

/// Builds the program of a client, in a workspace of its own, and returns its path.
fn build(client: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients").join(client);
    let target = driftline().with_file_name("clients");
    let built = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--locked", "--quiet", "--target-dir", text(&target)])
        .current_dir(folder)
        .status();
    assert!(built.expect("cargo runs").success(), "{client} does not build");
    target.join("debug").join(format!("driftline-client-{}", client.replace('_', "-")))
}

/// Runs the program of a client, which succeeds only if it has seen the effect of each step.
fn drive(test: &str, client: &str) {
    let _alone = tests::one_at_a_time();
    let Some(linux) = LinuxImage::or_skip(test) else { return };
    if let Err(why) = Namespace::new(PEER).and_then(|host| host.add_tap("tap0")) {
        return driftline_machine::testing::skip(test, &why);
    }
    let program = build(client);
    let scratch = ScratchDir::new();
    let (firecracker, folder) = (scratch.path("firecracker"), scratch.path(""));
    symlink(driftline(), &firecracker).expect("a link");
    let image = linux.file("");
    let mut child = Command::new(program)
        .args([&firecracker, &image, &folder])
        .stdin(Stdio::null())
        .spawn()
        .expect("the program starts");
    let ended = wait_for(client, PROGRAM, || child.try_wait().expect("a child of ours"));
    if !ended.success() {
        let logs = std::fs::read_dir(&folder).expect("a folder").flatten();
        let logs = logs.filter_map(|entry| std::fs::read_to_string(entry.path().join("log")).ok());
        panic!("{ended}: {}", logs.collect::<Vec<_>>().join("\n"));
    }
}

#[test]
fn guest_and_clones_obey_firecracker_rs_sdk() {
    drive("guest_and_clones_obey_firecracker_rs_sdk", "rs_sdk");
}

#[test]
fn guest_and_clones_obey_fctools() {
    drive("guest_and_clones_obey_fctools", "fctools");
}
