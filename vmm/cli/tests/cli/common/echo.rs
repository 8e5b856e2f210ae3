//! A guest that echoes what it receives over its serial port, which is on pipes.

use std::process::{ChildStdin, ChildStdout, Stdio};

use driftline_machine::testing::Elf;

use super::{TestDir, Vmm, driftline};

/// Enables interrupts of COM1, which it never handles, and echoes each received byte.
#[rustfmt::skip]
const ECHO: &[u8] = &[
    0x66, 0xba, 0xf9, 0x03, 0xb0, 0x01, 0xee, // mov dx, 0x3f9; mov al, 1; out dx, al
    0x66, 0xba, 0xfd, 0x03, 0xec, // next: mov dx, 0x3fd; in al, dx
    0xa8, 0x01, 0x74, 0xf7, // test al, 1; jz next
    0x66, 0xba, 0xf8, 0x03, 0xec, 0xee, // mov dx, 0x3f8; in al, dx; out dx, al
    0xeb, 0xef, // jmp next
];

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
