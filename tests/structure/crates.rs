//! Dependencies between the workspace's crates: each crate of the product depends only on crates to
//! its left. Only one crate uses KVM.

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

/// The crate that opens `/dev/kvm`.
const KVM_CRATE: &str = "driftline-machine";

/// A crate of the workspace.
pub(crate) struct WorkspaceMember {
    pub(crate) name: String,
    pub(crate) dir: std::path::PathBuf,
    /// Crates of the workspace on which it depends, without those that only its tests need.
    depends_on: BTreeSet<String>,
    /// Crates of the workspace that only its tests, benches and examples need, without itself.
    tested_with: BTreeSet<String>,
    /// Other crates on which it depends, without those that only its tests need.
    external: BTreeSet<String>,
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
        let name = package["name"].as_str().unwrap();
        let all = package["dependencies"].as_array().unwrap().iter();
        let all = all.map(|d| (d["kind"] == "dev", d["name"].as_str().unwrap().to_owned()));
        let (tests, product): (Vec<_>, Vec<_>) = all.partition(|(is_dev, _)| *is_dev);
        let product = product.into_iter().map(|(_, dependency)| dependency);
        let (depends_on, external) = product.partition(|d| names.contains(d.as_str()));
        let tests = tests.into_iter().map(|(_, dependency)| dependency);
        let tested_with = tests.filter(|d| names.contains(d.as_str()) && d != name).collect();
        let manifest = std::path::Path::new(package["manifest_path"].as_str().unwrap());
        WorkspaceMember {
            name: name.to_owned(),
            dir: manifest.parent().unwrap().to_owned(),
            depends_on,
            tested_with,
            external,
        }
    };
    packages.iter().map(member).collect()
}

/// Returns a sentence for each way in which `members` and `allowed` differ, and for each dependency
/// in `allowed` that is not on a crate to the left.
fn wrong_arrows(allowed: &[(&str, &[&str])], members: &[WorkspaceMember]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut left = BTreeSet::new();
    for (name, depends_on) in allowed {
        let right = depends_on.iter().filter(|dependency| !left.contains(*dependency));
        wrong.extend(right.map(|dependency| format!("{dependency} is not left of {name}")));
        left.insert(*name);
    }
    let allowed: BTreeMap<_, _> = allowed.iter().copied().collect();
    for WorkspaceMember { name, depends_on, .. } in members.iter().filter(|m| m.name != "tests") {
        let Some(allowed) = allowed.get(name.as_str()) else {
            wrong.push(format!("{name} has no line in {}", file!()));
            continue;
        };
        let allowed: BTreeSet<_> = allowed.iter().map(|name| (*name).to_owned()).collect();
        if *depends_on != allowed {
            wrong.push(format!("{name} depends on {depends_on:?}, not on {allowed:?}"));
        }
    }
    wrong
}

/// Returns a sentence for each crate whose tests need a crate that depends on it: neither is built
/// without the other.
fn test_circles(members: &[WorkspaceMember]) -> Vec<String> {
    let find = |name: &str| members.iter().find(|m| m.name == name);
    let reaches = |from: &str, to: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(name) = next.pop() {
            if name == to {
                return true;
            }
            if seen.insert(name.clone()) {
                next.extend(find(&name).into_iter().flat_map(|m| m.depends_on.iter().cloned()));
            }
        }
        false
    };
    let pairs = members.iter().flat_map(|m| m.tested_with.iter().map(|with| (&m.name, with)));
    let circles = pairs.filter(|(name, with)| reaches(with, name));
    circles
        .map(|(name, with)| format!("the tests of {name} need {with}, which needs {name}"))
        .collect()
}

/// Returns the crates that use KVM and are not [`KVM_CRATE`].
fn kvm_users(members: &[WorkspaceMember]) -> Vec<&str> {
    let uses_kvm = |m: &&WorkspaceMember| m.external.iter().any(|d| d.starts_with("kvm-"));
    let users = members.iter().filter(uses_kvm).map(|m| m.name.as_str());
    users.filter(|name| *name != KVM_CRATE).collect()
}

#[test]
fn crates_depend_only_on_those_left_of_them() {
    let wrong = wrong_arrows(DEPENDS_ON, &members());
    assert!(wrong.is_empty(), "see ARCHITECTURE.md: {wrong:#?}");
    assert_eq!(test_circles(&members()), [""; 0]);
}

#[test]
fn one_crate_uses_kvm() {
    let members = members();
    assert!(members.iter().any(|m| m.name == KVM_CRATE && m.external.contains("kvm-ioctls")));
    assert_eq!(kvm_users(&members), [""; 0]);
}

fn member(name: &str, depends_on: &[&str], external: &[&str]) -> WorkspaceMember {
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let (depends_on, external) = (set(depends_on), set(external));
    let tested_with = BTreeSet::new();
    WorkspaceMember { name: name.to_owned(), dir: "".into(), depends_on, tested_with, external }
}

#[test]
fn circles_through_tests_are_found() {
    let mut a = member("a", &[], &[]);
    a.tested_with.insert("c".to_owned());
    let [b, c] = [member("b", &["a"], &[]), member("c", &["b"], &[])];
    assert_eq!(test_circles(&[a, b, c]), ["the tests of a need c, which needs a"]);
}

#[test]
fn wrong_arrows_are_found() {
    let allowed: &[(&str, &[&str])] = &[("a", &[]), ("b", &["a"])];
    let [a, b] = [member("a", &[], &["serde"]), member("b", &["a"], &[])];
    assert_eq!(wrong_arrows(allowed, &[a, b, member("tests", &["b"], &[])]), [""; 0]);
    for (allowed, found, expected) in [
        (allowed, member("a", &["b"], &[]), r#"a depends on {"b"}, not on {}"#),
        (allowed, member("b", &[], &[]), r#"b depends on {}, not on {"a"}"#),
        (allowed, member("c", &[], &[]), "c has no line in"),
        (&[("a", &["b"]), ("b", &[])], member("b", &[], &[]), "b is not left of a"),
    ] {
        let wrong = wrong_arrows(allowed, &[found]);
        assert!(wrong.len() == 1 && wrong[0].starts_with(expected), "{expected}: {wrong:?}");
    }
}

#[test]
fn users_of_kvm_are_found() {
    let found = [member(KVM_CRATE, &[], &["kvm-ioctls"]), member("a", &[], &["kvm-bindings"])];
    assert_eq!(kvm_users(&found), ["a"]);
}
