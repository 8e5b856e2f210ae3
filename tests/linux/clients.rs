//! Unmodified clients of Firecracker's API, from the registry: the programs in `tests/clients`
//! drive a Linux guest and ten clones of it through each. They can drive Firecracker itself:
//!
//! `cargo run --manifest-path tests/clients/fctools/Cargo.toml FIRECRACKER IMAGE_DIRECTORY SCRATCH`

use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tests::{LinuxImage, Namespace, PEER, ScratchDir, driftline, wait_for};

use super::text;

/// Time limit of a client's program.
const PROGRAM: Duration = Duration::from_secs(600);

/// What cargo and curl say where the registry does not answer. Whatever else stops cargo is a
/// defect of the client's workspace.
const NO_REGISTRY: [&str; 6] = [
    "network error",
    "network failure",
    "Could not resolve",
    "Could not connect",
    "Timeout was reached",
    "--offline was specified",
];

/// Runs a command of cargo in the workspace of a client. Fails with its messages.
fn cargo(client: &str, args: &[&str]) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients").join(client);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo).args(args).current_dir(folder).output().expect("cargo runs");
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(messages) }
}

/// Builds the program of a client, in a workspace of its own, and returns its path. Returns `None`
/// if the registry, which has what it depends on, does not answer.
fn build(client: &str) -> Option<PathBuf> {
    if let Err(why) = cargo(client, &["fetch", "--locked"]) {
        // Warnings of attempts that were repeated come first.
        let error = why.find("error:").map_or("", |at| &why[at..]);
        assert!(NO_REGISTRY.iter().any(|sign| error.contains(sign)), "{client}: {why}");
        return None;
    }
    let target = driftline().with_file_name("clients");
    let build = ["build", "--locked", "--quiet", "--target-dir", text(&target)];
    cargo(client, &build).unwrap_or_else(|why| panic!("{client} does not build: {why}"));
    Some(target.join("debug").join(format!("driftline-client-{}", client.replace('_', "-"))))
}

/// A client's program, in a process group of its own. Dropping it kills the group.
struct ClientProgram(Child);

impl Drop for ClientProgram {
    fn drop(&mut self) {
        if let Some(group) = Pid::from_raw(self.0.id().cast_signed()) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

/// Runs the program of a client, which succeeds only if it has seen the effect of each step.
fn drive(test: &str, client: &str) {
    let Some(linux) = LinuxImage::or_skip(test) else { return };
    if let Err(why) = Namespace::new(PEER).and_then(|host| host.add_tap("tap0")) {
        return driftline_machine::testing::skip(test, &why);
    }
    let Some(program) = build(client) else {
        return driftline_machine::testing::skip(test, "the registry cannot be reached");
    };
    let _alone = tests::one_at_a_time();
    let scratch = ScratchDir::new();
    let (firecracker, folder) = (scratch.path("firecracker"), scratch.path(""));
    symlink(driftline(), &firecracker).expect("a link");
    let image = linux.file("");
    let child = Command::new(program)
        .args([&firecracker, &image, &folder])
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .expect("the program starts");
    let mut program = ClientProgram(child);
    let ended = wait_for(client, PROGRAM, || program.0.try_wait().expect("a child of ours"));
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
