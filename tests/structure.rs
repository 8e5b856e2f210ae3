//! The structure of the repository: which crate depends on which, that no two modules import each
//! other, that errors have types, that prose fits into 100 columns, and that the worked example of
//! a request is true.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "structure/crates.rs"]
mod crates;
#[path = "structure/errors.rs"]
mod errors;
#[path = "structure/example.rs"]
mod example;
#[path = "structure/imports.rs"]
mod imports;
#[path = "structure/prose.rs"]
mod prose;

use std::path::PathBuf;

/// The repository's root.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}
