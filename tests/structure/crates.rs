//! Dependencies between the workspace's crates: every arrow of a product points to its left.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// The crates of the product, from left to right, each with every crate of the workspace on which
/// it depends.
const DEPENDS_ON: &[(&str, &[&str])] = &[
    ("driftline-dirty-tracker", &[]),
    ("driftline-images", &[]),
    ("driftline-guest", &["driftline-dirty-tracker"]),
    ("driftline-format", &["driftline-dirty-tracker", "driftline-guest"]),
    ("driftline-store", &["driftline-dirty-tracker", "driftline-guest", "driftline-format"]),
    (
        "driftline-checkpoint",
        &["driftline-dirty-tracker", "driftline-guest", "driftline-format", "driftline-store"],
    ),
    ("driftline-migrate", &["driftline-dirty-tracker", "driftline-guest", "driftline-format"]),
    (
        "driftline-machine",
        &["driftline-dirty-tracker", "driftline-guest", "driftline-format", "driftline-store"],
    ),
    (
        "driftline-backends",
        &["driftline-dirty-tracker", "driftline-images", "driftline-guest", "driftline-machine"],
    ),
    (
        "driftline-control",
        &[
            "driftline-dirty-tracker",
            "driftline-guest",
            "driftline-format",
            "driftline-store",
            "driftline-checkpoint",
            "driftline-migrate",
            "driftline-machine",
        ],
    ),
    (
        "driftline-compare",
        &[
            "driftline-dirty-tracker",
            "driftline-images",
            "driftline-guest",
            "driftline-machine",
            "driftline-backends",
        ],
    ),
    (
        "driftline-cli",
        &[
            "driftline-dirty-tracker",
            "driftline-images",
            "driftline-guest",
            "driftline-format",
            "driftline-store",
            "driftline-checkpoint",
            "driftline-migrate",
            "driftline-machine",
            "driftline-backends",
            "driftline-control",
            "driftline-compare",
        ],
    ),
];

/// A crate of the workspace.
pub(crate) struct WorkspaceMember {
    pub(crate) name: String,
    pub(crate) dir: std::path::PathBuf,
    /// Crates of the workspace on which it depends, without those that only its tests need.
    depends_on: BTreeSet<String>,
}

/// Returns the members of the workspace, as `cargo metadata` reports them.
pub(crate) fn members() -> Vec<WorkspaceMember> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let args = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let output = Command::new(cargo).args(args).current_dir(super::files::root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let names: BTreeSet<&str> = packages.iter().map(|p| p["name"].as_str().unwrap()).collect();
    let member = |package: &Value| {
        let depends_on = package["dependencies"].as_array().unwrap().iter();
        let depends_on = depends_on.filter(|d| d["kind"] != "dev");
        let depends_on = depends_on.map(|d| d["name"].as_str().unwrap().to_owned());
        let manifest = std::path::Path::new(package["manifest_path"].as_str().unwrap());
        WorkspaceMember {
            name: package["name"].as_str().unwrap().to_owned(),
            dir: manifest.parent().unwrap().to_owned(),
            depends_on: depends_on.filter(|d| names.contains(d.as_str())).collect(),
        }
    };
    packages.iter().map(member).collect()
}

#[test]
fn crates_depend_only_on_those_left_of_them() {
    let mut left = BTreeSet::new();
    for (name, depends_on) in DEPENDS_ON {
        for dependency in *depends_on {
            assert!(left.contains(dependency), "{dependency} is not left of {name}");
        }
        left.insert(*name);
    }
    let listed: BTreeMap<_, _> = DEPENDS_ON.iter().copied().collect();
    for member in members().iter().filter(|m| m.name != "tests") {
        let Some(listed) = listed.get(member.name.as_str()) else {
            panic!("{} has no line in {}", member.name, file!());
        };
        let found: BTreeSet<_> = member.depends_on.iter().map(String::as_str).collect();
        let listed: BTreeSet<_> = listed.iter().copied().collect();
        assert_eq!(found, listed, "{}: see ARCHITECTURE.md", member.name);
    }
}
