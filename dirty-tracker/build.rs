//! Sets `driftline_avx512` for compilers that have the instructions of `tree/simd/avx512.rs`: from
//! Rust 1.89 on, for x86-64.

use std::env;
use std::process::Command;

/// First minor version of Rust 1 with the AVX-512 intrinsics and `as_chunks`.
const AVX512_FROM: u32 = 89;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(driftline_avx512)");
    println!("cargo::rerun-if-changed=build.rs");
    let is_x86 = env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64");
    if is_x86 && minor_version().is_some_and(|minor| minor >= AVX512_FROM) {
        println!("cargo::rustc-cfg=driftline_avx512");
    }
}

/// Returns the `89` of `rustc 1.89.0 (..)`.
fn minor_version() -> Option<u32> {
    let output = Command::new(env::var_os("RUSTC")?).arg("--version").output().ok()?;
    let version = String::from_utf8(output.stdout).ok()?;
    version.strip_prefix("rustc 1.")?.split('.').next()?.parse().ok()
}
