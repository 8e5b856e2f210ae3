//! Tests of the repository's structure.
//!
//! | module | law |
//! | --- | --- |
//! | `crates` | a crate depends only on crates to its left, and its tests on none that needs it |
//! | `imports` | no two modules import each other |
//! | `layers` | the folders of `migrate` import one way |
//! | `knowledge` | only the machine opens `/dev/kvm`; only the demo and `--guest` know the payload |
//! | `errors` | errors have types and keep their sources |
//! | `names` | a type's name is defined once, and a test's name has at most eight words |
//! | `prose` | comments, Markdown and scripts fit into 100 columns |
//! | `documents` | README.md and ARCHITECTURE.md are short |
//! | `example` | the worked example in CONTRIBUTING.md matches the code |
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "structure/crates.rs"]
mod crates;
#[path = "structure/documents.rs"]
mod documents;
#[path = "structure/errors.rs"]
mod errors;
#[path = "structure/example.rs"]
mod example;
#[path = "structure/files.rs"]
mod files;
#[path = "structure/imports.rs"]
mod imports;
#[path = "structure/knowledge.rs"]
mod knowledge;
#[path = "structure/layers.rs"]
mod layers;
#[path = "structure/names.rs"]
mod names;
#[path = "structure/prose.rs"]
mod prose;
