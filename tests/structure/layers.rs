//! The layers of `migrate`: protocol <- transport <- policy <- source, destination.

use std::collections::{BTreeMap, BTreeSet};

use super::files::root;
use super::imports::{Crate, Module};

/// The folders of `migrate`, each with the modules at the crate's root that it may import.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("protocol", &[]),
    ("transport", &["protocol"]),
    ("policy", &["report"]),
    ("journal", &["protocol"]),
    (
        "source",
        &["protocol", "transport", "policy", "journal", "control", "error", "heap", "report"],
    ),
    ("destination", &["protocol", "transport", "journal", "control", "error", "heap", "report"]),
];

/// Returns a sentence for each import that its layer may not have.
fn wrong_imports(
    allowed: &[(&str, &[&str])],
    imports: &BTreeMap<Module, BTreeSet<Module>>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    for (layer, may_import) in allowed {
        let of_layer =
            imports.iter().filter(|(module, _)| module.first().is_some_and(|m| m == layer));
        for (module, imported) in of_layer {
            // The crate's root has no name.
            let others = imported.iter().filter(|m| m.first().is_none_or(|m| m != layer));
            let refused = others.filter(|m| m.first().is_none_or(|m| !may_import.contains(&&**m)));
            wrong
                .extend(refused.map(|m| format!("{} imports {}", module.join("::"), m.join("::"))));
        }
    }
    wrong
}

#[test]
fn migrate_imports_point_one_way() {
    let imports = Crate::read(&root().join("migrate/src/lib.rs")).imports();
    for (layer, may_import) in MAY_IMPORT {
        let of_layer = imports.iter().filter(|(m, _)| m.first().is_some_and(|m| m == layer));
        let imported: BTreeSet<&str> = of_layer
            .flat_map(|(_, all)| all.iter().filter_map(|m| m.first()).map(|m| &**m))
            .collect();
        let unused: Vec<_> = may_import.iter().filter(|m| !imported.contains(*m)).collect();
        assert!(unused.is_empty(), "{layer} does not import {unused:?}");
    }
    let wrong = wrong_imports(MAY_IMPORT, &imports);
    assert!(wrong.is_empty(), "see migrate/src/lib.rs: {wrong:#?}");
}

#[test]
fn imports_of_a_later_layer_are_found() {
    let module = |path: &str| path.split("::").map(str::to_owned).collect::<Module>();
    let imports = |from: &str, to: &str| BTreeMap::from([(module(from), [module(to)].into())]);
    let allowed: &[(&str, &[&str])] = &[("a", &[]), ("b", &["a"])];
    assert!(wrong_imports(allowed, &imports("b::x", "a::y")).is_empty());
    assert!(wrong_imports(allowed, &imports("a::x", "a::y")).is_empty());
    assert_eq!(wrong_imports(allowed, &imports("a::x", "b::y")), ["a::x imports b::y"]);
}
