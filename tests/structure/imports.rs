//! Imports between the modules of each crate contain no circle. No two top-level modules import
//! each other, not even through different children.
//!
//! A module imports another if a `use` or a path in it names an item of the other module. A
//! re-exported item counts where it is defined, through any number of re-exports, so a parent may
//! re-export items of its children. It imports them only if it uses them itself. A path that begins
//! with an imported name continues there.
//! A private glob counts as an import of the module that it names, whatever it brings into scope.
//! A type's method that calls another one of the same type on `self` or `Self` imports the module
//! that defines it. A call on any other value does not count: its type is not known without the
//! compiler.
//! Code for tests may import anything: `#[cfg(test)]`, and modules of the features `testing` and
//! `fuzzing`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Item, Meta, Token, UseTree, Visibility};

pub(crate) type Module = Vec<String>;

/// The items of a module, and the paths that it names.
#[derive(Default)]
struct ModuleContents {
    items: BTreeSet<String>,
    /// Re-exports: public names and the paths for which they stand, without globs.
    exports: BTreeMap<String, Vec<String>>,
    /// Paths that are re-exported as a whole (`pub use path::*`).
    globs: Vec<Vec<String>>,
    /// Private imports: names and the paths for which they stand, without globs. Only the module
    /// and its children can use them.
    imported: BTreeMap<String, Vec<String>>,
    /// Paths that the module names.
    named: Vec<Vec<String>>,
    /// Inherent methods that the module defines, each with the name of its type.
    methods: BTreeSet<(String, String)>,
    /// Methods that a type's own methods call on `self` or `Self`.
    own_calls: BTreeSet<(String, String)>,
}

/// The modules of one crate.
pub(crate) struct Crate(BTreeMap<Module, ModuleContents>);

impl Crate {
    /// Reads the crate whose root file is `root`.
    pub(crate) fn read(root: &Path) -> Self {
        let mut modules = Self(BTreeMap::new());
        modules.read_file(root, root.parent().unwrap(), Vec::new());
        modules
    }

    /// Reads the file of `module`, whose children's files lie in `dir`.
    fn read_file(&mut self, file: &Path, dir: &Path, module: Module) {
        let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let parsed = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        self.read_items(&parsed.items, dir, module);
    }

    fn read_items(&mut self, items: &[Item], dir: &Path, module: Module) {
        let mut contents = ModuleContents::default();
        for item in items.iter().filter(|item| !is_for_tests(attributes(item))) {
            match item {
                Item::Use(item) => {
                    let public = !matches!(item.vis, Visibility::Inherited);
                    contents.read_use(&item.tree, &mut Vec::new(), public);
                }
                Item::Mod(item) => {
                    let name = item.ident.to_string();
                    let child = [&module[..], std::slice::from_ref(&name)].concat();
                    let children = dir.join(&name);
                    if let Some((_, items)) = &item.content {
                        self.read_items(items, &children, child);
                    } else {
                        let file = file_of(item, dir, &name);
                        self.read_file(&file, &children, child);
                    }
                }
                item => {
                    contents.items.extend(name_of(item));
                    contents.read_methods(item);
                    PathCollector(&mut contents.named).visit_item(item);
                }
            }
        }
        self.0.insert(module, contents);
    }

    /// Returns the module of the item that `path` names in `from`; `None` for another crate's item.
    fn resolve(&self, from: &[String], path: &[String], depth: u32) -> Option<Module> {
        let depth = depth.checked_sub(1)?;
        let (at, rest) = match path.first()?.as_str() {
            "crate" => (Vec::new(), &path[1..]),
            "self" => (from.to_owned(), &path[1..]),
            "super" => {
                let up = path.iter().take_while(|segment| *segment == "super").count();
                (from[..from.len().checked_sub(up)?].to_owned(), &path[up..])
            }
            first if self.has_child(from, first) => (from.to_owned(), path),
            first => {
                let contents = self.0.get(from)?;
                let stands_for = contents.imported.get(first).or(contents.exports.get(first))?;
                return self.resolve(from, &[stands_for, &path[1..]].concat(), depth);
            }
        };
        self.resolve_in(at, rest, from, depth)
    }

    /// Returns the module of an item that `module` re-exports and names itself. Other names need no
    /// answer: they are the module's own, or a private import has counted already.
    fn resolve_name(&self, module: &[String], name: &str) -> Option<Module> {
        let contents = self.0.get(module)?;
        if contents.items.contains(name) || contents.imported.contains_key(name) {
            return None;
        }
        if let Some(path) = contents.exports.get(name) {
            return self.resolve(module, path, 16);
        }
        contents.globs.iter().find_map(|glob| {
            let of_glob = self.resolve(module, glob, 16)?;
            let has = self.has_name(&of_glob, name);
            has.then(|| self.resolve_in(of_glob, &[name.to_owned()], module, 16))?
        })
    }

    /// Like [`Self::resolve`], for a path within the module `at`.
    fn resolve_in(
        &self,
        mut at: Module,
        mut rest: &[String],
        from: &[String],
        depth: u32,
    ) -> Option<Module> {
        while let Some(name) = rest.first() {
            if self.has_child(&at, name) {
                at.push(name.clone());
                rest = &rest[1..];
                continue;
            }
            let contents = self.0.get(&at)?;
            if contents.items.contains(name) {
                break;
            }
            let private = contents.imported.get(name).filter(|_| from.starts_with(&at));
            if let Some(path) = contents.exports.get(name).or(private) {
                // The path may stand for a module, which has the rest.
                let whole = [path, &rest[1..]].concat();
                return self.resolve(&at, &whole, depth);
            }
            let of_globs = contents.globs.iter().find_map(|glob| {
                let module = self.resolve(&at, glob, depth)?;
                let has = self.has_name(&module, name);
                has.then(|| self.resolve_in(module, rest, from, depth.checked_sub(1)?))?
            });
            return of_globs.or(Some(at));
        }
        Some(at)
    }

    /// Returns whether `module` defines or re-exports `name`, not counting its own globs.
    fn has_name(&self, module: &[String], name: &str) -> bool {
        let contents = self.0.get(module);
        contents.is_some_and(|c| c.items.contains(name) || c.exports.contains_key(name))
            || self.has_child(module, name)
    }

    fn has_child(&self, module: &[String], name: &str) -> bool {
        self.0.contains_key(&[module, &[name.to_owned()]].concat())
    }

    /// Returns the modules that each module imports.
    pub(crate) fn imports(&self) -> BTreeMap<Module, BTreeSet<Module>> {
        let mut imports = BTreeMap::new();
        for (module, contents) in &self.0 {
            let named = contents.named.iter().filter_map(|path| match &path[..] {
                [name] => self.resolve_name(module, name),
                path => self.resolve(module, path, 16),
            });
            let called = self.0.iter().filter(|(_, other)| {
                contents.own_calls.difference(&contents.methods).any(|m| other.methods.contains(m))
            });
            let named = named.chain(called.map(|(other, _)| other.clone()));
            let others = named.filter(|other| other != module).collect();
            imports.insert(module.clone(), others);
        }
        imports
    }
}

impl ModuleContents {
    /// Reads the methods of an `impl` block, and which methods of the same type they call.
    fn read_methods(&mut self, item: &Item) {
        let Item::Impl(item) = item else { return };
        let syn::Type::Path(of) = &*item.self_ty else { return };
        let Some(of) = of.path.segments.last().map(|segment| segment.ident.to_string()) else {
            return;
        };
        let mut calls = OwnCalls::default();
        for method in &item.items {
            let syn::ImplItem::Fn(method) = method else { continue };
            if is_for_tests(&method.attrs) {
                continue;
            }
            if item.trait_.is_none() {
                self.methods.insert((of.clone(), method.sig.ident.to_string()));
            }
            calls.visit_impl_item_fn(method);
        }
        self.own_calls.extend(calls.0.into_iter().map(|method| (of.clone(), method)));
    }

    fn read_use(&mut self, tree: &UseTree, path: &mut Vec<String>, public: bool) {
        let mut add = |name: String, path: Vec<String>| {
            // A re-export from elsewhere is an import. A re-export of a child's item is not.
            if !public || matches!(path[0].as_str(), "crate" | "super") {
                self.named.push(path.clone());
            }
            match (public, name.as_str()) {
                (true, "*") => self.globs.push(path),
                (true, _) => drop(self.exports.insert(name, path)),
                (false, "*") => {}
                (false, _) => drop(self.imported.insert(name, path)),
            }
        };
        match tree {
            UseTree::Path(tree) => {
                path.push(tree.ident.to_string());
                self.read_use(&tree.tree, path, public);
                path.pop();
            }
            UseTree::Name(tree) if tree.ident == "self" => {
                add(path.last().cloned().unwrap_or_default(), path.clone());
            }
            UseTree::Name(tree) => {
                let name = tree.ident.to_string();
                add(name.clone(), [&path[..], &[name]].concat());
            }
            UseTree::Rename(tree) if tree.ident == "self" => {
                add(tree.rename.to_string(), path.clone());
            }
            UseTree::Rename(tree) => {
                add(tree.rename.to_string(), [&path[..], &[tree.ident.to_string()]].concat());
            }
            UseTree::Glob(_) => add("*".to_owned(), path.clone()),
            UseTree::Group(tree) => {
                tree.items.iter().for_each(|tree| self.read_use(tree, path, public));
            }
        }
    }
}

/// Collects the paths of this crate that an item names.
struct PathCollector<'a>(&'a mut Vec<Vec<String>>);

impl<'ast> Visit<'ast> for PathCollector<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.0.push(path.segments.iter().map(|s| s.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        // Most macros take expressions. Of the others, paths are found in their text.
        let expressions = Punctuated::<Expr, Token![,]>::parse_terminated;
        if let Ok(parsed) = called.parse_body_with(expressions) {
            return parsed.iter().for_each(|expression| self.visit_expr(expression));
        }
        let tokens = called.tokens.to_string().replace(' ', "");
        for start in ["crate::", "super::"] {
            for (at, _) in tokens.match_indices(start) {
                let is_path = |c: char| c.is_alphanumeric() || "_:".contains(c);
                let path = tokens[at..].split(|c| !is_path(c)).next().unwrap_or_default();
                let names = path.split("::").filter(|name| !name.is_empty());
                self.0.push(names.map(str::to_owned).collect());
            }
        }
        visit::visit_macro(self, called);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let mut contents = ModuleContents::default();
        contents.read_use(&item.tree, &mut Vec::new(), false);
        self.0.append(&mut contents.named);
    }
}

/// Collects the methods that are called on `self` or `Self`.
#[derive(Default)]
struct OwnCalls(BTreeSet<String>);

impl<'ast> Visit<'ast> for OwnCalls {
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if matches!(&*call.receiver, Expr::Path(on) if on.path.is_ident("self")) {
            self.0.insert(call.method.to_string());
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<_> = path.segments.iter().map(|s| &s.ident).collect();
        if let [first, method] = segments[..]
            && first == "Self"
        {
            self.0.insert(method.to_string());
        }
        visit::visit_path(self, path);
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Mod(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Const(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        _ => &[],
    }
}

fn name_of(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Fn(item) => &item.sig.ident,
        Item::Struct(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Const(item) => &item.ident,
        Item::Static(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        _ => return None,
    };
    Some(ident.to_string())
}

/// Returns whether an item is built only for tests or fuzzing.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::List(list) = &attribute.meta else { return false };
        let words = list.tokens.to_string();
        list.path.is_ident("cfg")
            && !words.contains("not")
            && ["test", "fuzzing", "\"testing\"", "\"fuzzing\""].iter().any(|word| {
                words
                    .split(|c: char| !(c.is_alphanumeric() || "\"_".contains(c)))
                    .any(|w| w == *word)
            })
    })
}

fn file_of(item: &syn::ItemMod, dir: &Path, name: &str) -> PathBuf {
    let path = item.attrs.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(meta) if meta.path.is_ident("path") => match &meta.value {
            Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) => Some(path.value()),
            _ => None,
        },
        _ => None,
    });
    let alone = dir.join(path.unwrap_or_else(|| format!("{name}.rs")));
    if alone.exists() { alone } else { dir.join(name).join("mod.rs") }
}

/// Returns the sets of modules that import one another.
fn circles(imports: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<BTreeSet<Module>> {
    let reached: BTreeMap<_, _> =
        imports.keys().map(|module| (module, reachable(imports, module))).collect();
    let mut circles = BTreeSet::new();
    for (module, from_here) in &reached {
        if from_here.contains(*module) {
            let back = |other: &&Module| reached.get(other).is_some_and(|r| r.contains(*module));
            circles.insert(from_here.iter().filter(back).cloned().collect());
        }
    }
    circles
}

/// Returns the pairs of top-level modules that import each other, each with all its children.
fn pairs(imports: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<[&str; 2]> {
    let mut tops = BTreeSet::new();
    for (module, others) in imports {
        let pairs = others.iter().filter_map(|other| Some([module.first()?, other.first()?]));
        tops.extend(pairs.map(|pair| pair.map(String::as_str)));
    }
    tops.iter().copied().filter(|[a, b]| a < b && tops.contains(&[*b, *a])).collect()
}

fn reachable(imports: &BTreeMap<Module, BTreeSet<Module>>, from: &Module) -> BTreeSet<Module> {
    let mut reached = BTreeSet::new();
    let mut left: Vec<_> = imports[from].iter().collect();
    while let Some(module) = left.pop() {
        if reached.insert(module.clone()) {
            left.extend(imports.get(module).into_iter().flatten());
        }
    }
    reached
}

#[test]
fn no_two_modules_import_each_other() {
    let mut found = Vec::new();
    let mut modules = 0;
    for member in super::crates::members().iter().filter(|m| m.name != "tests") {
        for root in ["src/lib.rs", "src/main.rs"] {
            let root = member.dir.join(root);
            if !root.exists() {
                continue;
            }
            let read = Crate::read(&root);
            modules += read.0.len();
            let imports = read.imports();
            for circle in circles(&imports) {
                let names: Vec<_> = circle.iter().map(|module| module.join("::")).collect();
                found.push(format!("{}: {}", member.name, names.join(", ")));
            }
            let pairs = pairs(&imports);
            found.extend(pairs.iter().map(|pair| format!("{}: {}", member.name, pair.join(", "))));
        }
    }
    assert!(modules > 100, "only {modules} modules were found");
    assert!(found.is_empty(), "modules that import one another: {found:#?}");
}

/// Returns the imports of a crate with these files.
fn imports_of(files: &[(&str, &str)]) -> BTreeMap<Module, BTreeSet<Module>> {
    let dir = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, text)| fs::write(dir.path().join(name), text).unwrap());
    Crate::read(&dir.path().join("lib.rs")).imports()
}

/// Returns the circles of a crate with these files.
fn circles_of(files: &[(&str, &str)]) -> Vec<BTreeSet<Module>> {
    circles(&imports_of(files)).into_iter().collect()
}

/// Two children of different parents import an item of the other parent.
#[test]
fn a_pair_of_top_level_modules_is_found() {
    let a = "pub struct A; mod child { fn f(b: crate::b::B) {} }";
    for (b, found) in [
        ("pub struct B; mod child { use crate::a::A; }", &[["a", "b"]][..]),
        ("pub struct B; mod child { use super::B; }", &[]),
    ] {
        let imports = imports_of(&[("lib.rs", "mod a; mod b;"), ("a.rs", a), ("b.rs", b)]);
        assert!(circles(&imports).is_empty(), "{b}");
        assert_eq!(pairs(&imports), found, "{b}");
    }
}

#[test]
fn a_circle_is_found_however_it_is_written() {
    let lib = "mod a; mod b; pub use b::B; #[cfg(test)] mod tests { use crate::a::A; }";
    let b = "pub struct B; impl B { fn f() { use super::a; } }";
    for a in [
        "pub struct A; fn f() -> crate::B { crate::B }",
        "pub(crate) use super::b::B;",
        "fn f() { assert!(crate::b::is_ok()); }",
        "#[cfg(all(not(test), unix))] fn f(b: crate::b::B) {}",
    ] {
        let found = circles_of(&[("lib.rs", lib), ("a.rs", a), ("b.rs", b)]);
        let names: Vec<_> = found.into_iter().flatten().flatten().collect();
        assert_eq!(names, ["a", "b"], "{a}");
    }
    let none = circles_of(&[("lib.rs", lib), ("a.rs", "pub struct A;"), ("b.rs", b)]);
    assert!(none.is_empty(), "{none:?}");
}

/// A child imports its parent, which uses an item of the child by the name that it re-exports.
#[test]
fn a_parents_re_export_makes_a_circle() {
    let child = "pub struct A; fn f(p: super::P) {}";
    let names = |lib: &str| -> Vec<_> {
        let found = circles_of(&[("lib.rs", lib), ("child.rs", child)]);
        found.into_iter().flatten().map(|module| module.join("::")).collect()
    };
    for parent in [
        "pub use child::A; pub struct P(A);",
        "pub(crate) use child::A as B; pub struct P(Option<B>);",
        "pub use self::child::*; pub struct P(A);",
        "pub use child::A; pub struct P; fn f() { assert!(matches(A)); }",
        "pub use child::A; pub struct P; fn f() { vec![A]; }",
    ] {
        assert_eq!(names(&format!("mod child; {parent}")), ["", "child"], "{parent}");
    }
    for parent in ["pub use child::A; pub struct P;", "pub use child::*; pub struct P(u8);"] {
        assert_eq!(names(&format!("mod child; {parent}")), [""; 0], "{parent}");
    }
}

/// A type's methods are in two modules, and each calls one of the other.
#[test]
fn a_circle_is_found_through_inherent_methods() {
    let lib = "mod a; pub struct T; impl T { pub fn f(&self) {} CALL }";
    let a = "use super::T; impl T { pub(super) fn g(&self) {} #[cfg(test)] fn h(&self) {} }";
    for (call, circle) in [
        ("fn k(&self) { self.g(); }", &["", "a"][..]),
        ("fn k() { [T].iter().for_each(Self::g); }", &["", "a"]),
        ("fn k(&self) { self.f(); }", &[]),
        ("fn k(&self) { self.h(); }", &[]),
        ("} struct U; impl U { fn g(&self) {} fn k(&self) { self.g(); }", &[]),
    ] {
        let found = circles_of(&[("lib.rs", &lib.replace("CALL", call)), ("a.rs", a)]);
        let names: Vec<_> = found.into_iter().flatten().map(|module| module.join("::")).collect();
        assert_eq!(names, circle, "{call}");
    }
}

/// The child of a facade imports a module that imports the child by the facade's name.
#[test]
fn a_circle_is_found_through_any_re_export() {
    let facade = "pub use child::A; mod child { pub struct A; fn f() -> crate::b::B { todo!() } }";
    for (lib, b) in [
        ("", "fn f(a: crate::facade::A) {}"),
        ("", "use crate::facade; fn f(a: facade::A) {}"),
        ("", "use super::facade::{self as f}; fn f(a: f::A) {}"),
        ("pub use facade::A;", "fn f(a: crate::A) {}"),
        ("pub use facade::*;", "fn f(a: crate::A) {}"),
        ("pub use crate::facade::*;", "fn f(a: crate::A) {}"),
        ("pub use facade as f;", "fn f(a: crate::f::A) {}"),
        ("use facade::A;", "fn f(a: super::A) {}"),
    ] {
        let lib = format!("mod b; mod facade; {lib}");
        let b = format!("pub struct B; {b}");
        let found = circles_of(&[("lib.rs", &lib), ("b.rs", &b), ("facade.rs", facade)]);
        let names: Vec<_> = found.into_iter().flatten().map(|module| module.join("::")).collect();
        assert_eq!(names, ["b", "facade::child"], "{lib} {b}");
    }
}
