//! Views and wrappers of guests and factories forward every method: a default would quietly do less
//! than the guest can.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{ExprMethodCall, ImplItem, Item, TraitItem, Type};

fn parse(path: &str) -> syn::File {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    syn::parse_file(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The methods of a trait, those with a default among them.
fn methods_of(name: &str) -> BTreeSet<String> {
    let file = parse("../../checkpoint/guest/src/guest.rs");
    let found = file.items.into_iter().find_map(|item| match item {
        Item::Trait(item) if item.ident == name => Some(item.items),
        _ => None,
    });
    let method = |item| match item {
        TraitItem::Fn(f) => Some(f.sig.ident.to_string()),
        _ => None,
    };
    found.unwrap().into_iter().filter_map(method).collect()
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

/// The methods of that trait which `wrapper` in the file at `path` has, and whose bodies call a method
/// of the same name.
fn forwarded(path: &str, name: &str, wrapper: &str) -> BTreeSet<String> {
    let found = parse(path).items.into_iter().find_map(|item| {
        let Item::Impl(item) = item else { return None };
        let of = item.trait_.as_ref()?.1.segments.last()?.ident == name;
        let Type::Path(path) = &*item.self_ty else { return None };
        (of && path.path.segments.last()?.ident == wrapper).then_some(item.items)
    });
    let found = found.unwrap_or_else(|| panic!("{path} has no {name} for {wrapper}"));
    let method = |item| match item {
        ImplItem::Fn(f) => {
            let mut calls = Calls::default();
            calls.visit_block(&f.block);
            let name = f.sig.ident.to_string();
            calls.0.contains(&name).then_some(name)
        }
        _ => None,
    };
    found.into_iter().filter_map(method).collect()
}

#[test]
fn wrappers_forward_every_method() {
    // Those of `View` count the jobs that pause the guest.
    let counted: &[&str] = &["pause", "pause_and_save", "resume"];
    for (path, name, wrapper, own) in [
        ("../control/src/jobs/holds.rs", "Guest", "View", counted),
        ("src/pending.rs", "GuestFactory", "Settled", &[]),
    ] {
        let mut all = methods_of(name);
        assert!(all.len() > 2, "{name}: {all:?}");
        own.iter().for_each(|method| assert!(all.remove(*method), "{method}"));
        let missing: Vec<_> = all.difference(&forwarded(path, name, wrapper)).cloned().collect();
        assert!(missing.is_empty(), "{wrapper} in {path} does not forward {missing:?} of {name}");
    }
}
