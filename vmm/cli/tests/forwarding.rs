//! Wrappers of guests and factories forward every method. A default method would silently do less
//! than the wrapped guest can.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{
    Attribute, ExprMethodCall, ImplItem, ItemImpl, ItemMod, Meta, TraitItem, Type, UseRename,
};

/// The traits that wrappers implement around another guest or factory.
const TRAITS: [&str; 2] = ["Guest", "GuestFactory"];

/// Implementations that are not wrappers. They use defaults where these are correct for them.
const REAL: [(&str, &str); 4] = [
    ("Guest", "Machine"),
    ("Guest", "ThreadMachine"),
    ("GuestFactory", "Factory"),
    ("GuestFactory", "MachineFactory"),
];

/// An implementation that forwards calls.
struct Wrapper {
    of: &'static str,
    name: &'static str,
    /// Methods that it does not forward unchanged.
    own: &'static [&'static str],
}

const WRAPPERS: [Wrapper; 2] = [
    // Counts the jobs that pause the guest.
    Wrapper { of: "Guest", name: "View", own: &["pause", "pause_and_save", "resume"] },
    Wrapper { of: "GuestFactory", name: "Settled", own: &[] },
];

/// An implementation of one of [`TRAITS`].
struct Found {
    of: String,
    name: String,
    file: PathBuf,
    /// Names of all methods that it defines.
    methods: BTreeSet<String>,
    /// Names of the methods whose bodies call a method of the same name.
    forwarded: BTreeSet<String>,
}

/// Collects the implementations in a file, except those in its tests.
struct Finder {
    file: PathBuf,
    found: Vec<Found>,
}

impl<'ast> Visit<'ast> for Finder {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !module.attrs.iter().any(is_for_tests) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        visit::visit_item_impl(self, item);
        let of = item.trait_.as_ref().and_then(|(_, path, _)| path.segments.last());
        let Some(of) = of.map(|last| last.ident.to_string()) else { return };
        if !TRAITS.contains(&of.as_str()) || item.attrs.iter().any(is_for_tests) {
            return;
        }
        let (mut methods, mut forwarded) = (BTreeSet::new(), BTreeSet::new());
        for item in &item.items {
            let ImplItem::Fn(f) = item else { continue };
            let name = f.sig.ident.to_string();
            let mut calls = Calls::default();
            calls.visit_block(&f.block);
            if calls.0.contains(&name) {
                forwarded.insert(name.clone());
            }
            methods.insert(name);
        }
        let (name, file) = (name_of(&item.self_ty), self.file.clone());
        self.found.push(Found { of, name, file, methods, forwarded });
    }

    /// The finder would miss an implementation under another name.
    fn visit_use_rename(&mut self, rename: &'ast UseRename) {
        let (from, to) = (rename.ident.to_string(), rename.rename.to_string());
        let hidden = TRAITS.contains(&from.as_str()) && to != "_";
        assert!(!hidden, "{} calls {from} {to}", self.file.display());
    }
}

/// The names of the methods that a body calls.
#[derive(Default)]
struct Calls(BTreeSet<String>);

impl<'ast> Visit<'ast> for Calls {
    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        self.0.insert(call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }
}

fn is_for_tests(attribute: &Attribute) -> bool {
    let Meta::List(list) = &attribute.meta else { return false };
    list.path.is_ident("cfg") && list.tokens.to_string() == "test"
}

fn name_of(ty: &Type) -> String {
    match ty {
        Type::Path(path) => path.path.segments.last().unwrap().ident.to_string(),
        Type::Reference(reference) => format!("&{}", name_of(&reference.elem)),
        _ => "a type without a name".to_owned(),
    }
}

/// Returns the implementations in the text of a file.
fn implementations(file: &Path, text: &str) -> Vec<Found> {
    let parsed = syn::parse_file(text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let mut finder = Finder { file: file.to_owned(), found: Vec::new() };
    finder.visit_file(&parsed);
    finder.found
}

/// Returns whether a file or folder of that name contains only tests and their shared parts, or no
/// code of this project.
fn is_passed_over(name: &str) -> bool {
    let stem = name.strip_suffix(".rs").unwrap_or(name);
    let tests = ["tests", "testing", "benches", "fuzz", "fuzzing", "target"];
    name.starts_with('.') || tests.contains(&stem) || stem.ends_with("_tests")
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        match path.file_name().unwrap().to_str() {
            Some(name) if is_passed_over(name) => {}
            _ if kind.is_dir() => sources(&path, found),
            _ if path.extension().is_some_and(|extension| extension == "rs") => found.push(path),
            _ => {}
        }
    }
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns the names of a trait's methods, including those with a default.
fn methods_of(name: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(workspace().join("checkpoint/guest/src/guest.rs")).unwrap();
    let found = syn::parse_file(&text).unwrap().items.into_iter().find_map(|item| match item {
        syn::Item::Trait(item) if item.ident == name => Some(item.items),
        _ => None,
    });
    let method = |item| match item {
        TraitItem::Fn(f) => Some(f.sig.ident.to_string()),
        _ => None,
    };
    found.unwrap().into_iter().filter_map(method).collect()
}

#[test]
fn wrappers_forward_every_method() {
    let mut files = Vec::new();
    sources(&workspace(), &mut files);
    let mut found = Vec::new();
    for file in files {
        found.extend(implementations(&file, &fs::read_to_string(&file).unwrap()));
    }
    let mut left: BTreeSet<(&str, &str)> = REAL.into_iter().collect();
    left.extend(WRAPPERS.iter().map(|wrapper| (wrapper.of, wrapper.name)));
    for Found { of, name, file, methods, forwarded } in &found {
        let file = file.display();
        let is_listed = left.remove(&(of.as_str(), name.as_str()));
        assert!(is_listed, "{file}: {name} is another {of}: is it a wrapper, or real?");
        let wrapper = WRAPPERS
            .iter()
            .find(|wrapper| (wrapper.of, wrapper.name) == (of.as_str(), name.as_str()));
        let Some(Wrapper { own, .. }) = wrapper else { continue };
        let mut all = methods_of(of);
        assert!(all.len() > 2, "{of}: {all:?}");
        for method in *own {
            assert!(all.remove(*method) && methods.contains(*method), "{file}: {method}");
        }
        let missing: Vec<_> = all.difference(forwarded).collect();
        assert!(missing.is_empty(), "{file}: {name} does not forward {missing:?} of {of}");
    }
    assert!(left.is_empty(), "not found: {left:?}");
}

#[test]
fn implementations_outside_tests_are_found() {
    let text = "
        impl Guest for A { fn pause(&self) { self.0.pause() } fn stop(&self) {} }
        mod inner { impl<G: driftline_guest::Guest> driftline_guest::Guest for &B<G> {} }
        fn body() { impl GuestFactory for C {} }
        impl Drop for Guest {}
        #[cfg(test)] mod tests { impl Guest for D {} }
        #[cfg(test)] impl Guest for E {}
    ";
    let found = implementations(Path::new("text"), text);
    let names: Vec<_> = found.iter().map(|f| (f.of.as_str(), f.name.as_str())).collect();
    assert_eq!(names, [("Guest", "A"), ("Guest", "&B"), ("GuestFactory", "C")]);
    assert_eq!(found[0].methods, ["pause", "stop"].map(str::to_owned).into());
    assert_eq!(found[0].forwarded, ["pause".to_owned()].into());
}
