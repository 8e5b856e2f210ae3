//! A guest that echoes what it receives over its serial port, which is on pipes.

use std::process::{ChildStdin, ChildStdout, Stdio};

use driftline_machine::testing::{ECHO, Elf};

use super::{TestDir, Vmm, driftline};

/// Starts the guest with further arguments. Returns the guest's process and the other ends of its
/// pipes.
pub fn start<'p>(tmp: &'p TestDir, args: &[&str]) -> (Vmm<'p>, ChildStdin, ChildStdout) {
    let name = "echo";
    let kernel = tmp.text("echo.elf");
    std::fs::write(&kernel, Elf::new(ECHO).bytes()).unwrap();
    let mut child = driftline(&["run", "--kernel", &kernel, "--mem", "64M", "--cmdline", ""])
        .args(["--api-sock", &tmp.text("echo.sock"), "--state-dir", &tmp.text("state")])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(tmp.path("echo.err")).unwrap())
        .spawn()
        .unwrap();
    let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut vmm = Vmm { tmp, name, child };
    vmm.await_api();
    (vmm, input, output)
}
