//! Builds the payload guest: runs cargo's compiler on `payload/` with flags of its own.
//!
//! The result depends neither on the profile nor on the flags of the surrounding build.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// KVM's instruction emulator has no SSE arithmetic, so the guest has no SSE at all.
const NO_SSE: &str = "-Ctarget-feature=-sse,-sse2";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=payload");
    println!("cargo::rerun-if-changed=src/workload");
    println!("cargo::rerun-if-env-changed=RUSTC_LINKER");
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo did not set OUT_DIR")?);
    // If the compiler no longer accepts that SSE is disabled, it is asked not to vectorize. Other
    // failures, such as a full disk, may be transient; falling back would keep a guest with SSE.
    let first = compile(&out, &[NO_SSE]);
    if let Err(refused) = first {
        if !refused.lines().any(is_about_sse) {
            return Err(refused);
        }
        compile(&out, &["-Cno-vectorize-loops", "-Cno-vectorize-slp"]).map_err(|_| refused)?;
    }
    let assembly = out.join("payload.s");
    let text = std::fs::read_to_string(&assembly)
        .map_err(|error| format!("{}: {error}", assembly.display()))?;
    if let Some(line) = text.lines().find(|line| uses_sse(line)) {
        println!(
            "cargo::warning=the payload guest uses SSE ({}), so it may not run where ring 0 is \
             emulated",
            line.trim()
        );
    }
    Ok(())
}

/// Returns whether a line of the compiler's output is an error about SSE.
fn is_about_sse(line: &str) -> bool {
    let is_error = line.starts_with("error") || line.contains("LLVM ERROR");
    let mut words = line.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_ascii_lowercase);
    is_error && words.any(|word| word == "sse" || word == "sse2")
}

/// Returns whether a line of assembly names a vector register.
fn uses_sse(line: &str) -> bool {
    let code = line.split('#').next().unwrap_or("");
    !code.trim_start().starts_with('.')
        && ["%xmm", "%ymm", "%zmm", "%mm"].iter().any(|register| code.contains(register))
}

fn compile(out: &Path, flags: &[&str]) -> Result<(), String> {
    let rustc = env::var_os("RUSTC").ok_or("cargo did not set RUSTC")?;
    let script = Path::new("payload/link.ld")
        .canonicalize()
        .map_err(|error| format!("payload/link.ld: {error}"))?;
    let mut command = Command::new(rustc);
    command.args(["payload/main.rs", "--crate-name=payload", "--crate-type=bin", "--edition=2024"]);
    command.args(["--target", TARGET, "--check-cfg=cfg(feature,values(\"serde\"))"]);
    command.args([
        "-Copt-level=3",
        "-Ccodegen-units=1",
        "-Cpanic=abort",
        "-Cforce-unwind-tables=no",
    ]);
    command.args([
        "-Cdebug-assertions=no",
        "-Coverflow-checks=no",
        "-Cdebuginfo=0",
        "-Cstrip=debuginfo",
    ]);
    command.args(["-Crelocation-model=static", "-Cno-redzone=yes", "-Crelro-level=off"]);
    command.args(flags);
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut option = std::ffi::OsString::from("-Clinker=");
        option.push(linker);
        command.arg(option);
    }
    for argument in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,--build-id=none",
        "-Wl,-z,norelro",
    ] {
        command.arg(format!("-Clink-arg={argument}"));
    }
    command.arg(format!("-Clink-arg=-Wl,-T,{}", script.display()));
    command.arg(format!(
        "--emit=link={},asm={}",
        out.join("payload.elf").display(),
        out.join("payload.s").display()
    ));
    // Warnings about the flags do not concern the user of the workspace. On a failure everything is
    // shown.
    let output = command.output().map_err(|error| format!("running {command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "building the payload guest failed, {}:\n{command:?}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    ))
}
