//! Names: a type's name is defined once in the repository, and a test's name has at most eight
//! words.

use std::collections::BTreeMap;
use std::fs;

use syn::Ident;
use syn::visit::{self, Visit};

use super::files::{files, relative, root};

const MAX_WORDS: usize = 8;

/// Collects the types that a file defines, each with its keyword. Associated types are not items,
/// so they do not count.
#[derive(Default)]
struct TypeNames(Vec<(&'static str, String)>);

impl TypeNames {
    fn add(&mut self, keyword: &'static str, name: &Ident) {
        self.0.push((keyword, name.to_string()));
    }
}

impl<'ast> Visit<'ast> for TypeNames {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add("struct", &item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add("enum", &item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add("trait", &item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.add("union", &item.ident);
        visit::visit_item_union(self, item);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add("type", &item.ident);
        visit::visit_item_type(self, item);
    }
}

/// Returns a sentence for each type name that `sources`, pairs of path and text, define more than
/// once.
fn duplicate_types(sources: &[(String, String)]) -> Vec<String> {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, text) in sources {
        let mut names = TypeNames::default();
        names.visit_file(&syn::parse_file(text).unwrap_or_else(|e| panic!("{path}: {e}")));
        for (keyword, name) in names.0 {
            places.entry(name).or_default().push(format!("{path} ({keyword})"));
        }
    }
    let twice = places.into_iter().filter(|(_, places)| places.len() > 1);
    twice
        .map(|(name, places)| {
            format!("{name} is defined in {}: give one a specific name", places.join(" and in "))
        })
        .collect()
}

/// Returns a sentence for each test of `text` whose name has too many words. Reads lines, because
/// many tests are arguments of macros.
fn long_test_names(path: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_test = false;
    for (number, line) in (1..).zip(text.lines().map(str::trim_start)) {
        // Other libraries have an attribute of their own, such as `#[tokio::test]`.
        if line.starts_with("#[test]") || line.starts_with("#[") && line.contains("::test") {
            is_test = true;
        }
        if let (true, Some((_, rest))) = (is_test, line.split_once("fn ")) {
            let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
            let name = &rest[..end.unwrap_or(rest.len())];
            let words = name.split('_').filter(|word| !word.is_empty()).count();
            if words > MAX_WORDS {
                found.push(format!("{path}:{number}: {name} has {words} words"));
            }
            is_test = false;
        }
    }
    found
}

/// The Rust files of the repository, as pairs of path and text.
fn sources() -> Vec<(String, String)> {
    let files = files(&root(), &["rs"]);
    assert!(files.len() > 100, "only {} files were found", files.len());
    files.iter().map(|path| (relative(path), fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn each_type_name_is_defined_once() {
    let twice = duplicate_types(&sources());
    assert!(twice.is_empty(), "types with the same name:\n{}", twice.join("\n"));
}

#[test]
fn test_names_have_at_most_eight_words() {
    let sources = sources();
    let long: Vec<_> =
        sources.iter().flat_map(|(path, text)| long_test_names(path, text)).collect();
    assert!(long.is_empty(), "test names of more than {MAX_WORDS} words:\n{}", long.join("\n"));
}

#[test]
fn duplicate_types_are_found_with_both_files() {
    let source = |path: &str, text: &str| (path.to_owned(), text.to_owned());
    let a = "struct A; impl Iterator for A { type Item = B; }";
    for (keyword, b) in [
        ("enum", "enum A {}"),
        ("trait", "mod m { trait A {} }"),
        ("type", "fn f() { type A = u8; }"),
        ("union", "union A { a: u8 }"),
    ] {
        let found = duplicate_types(&[source("a.rs", a), source("b.rs", b)]);
        let places = format!("a.rs (struct) and in b.rs ({keyword})");
        assert_eq!(found, [format!("A is defined in {places}: give one a specific name")]);
    }
    let associated = "struct B; impl Iterator for B { type Item = A; }";
    assert!(duplicate_types(&[source("a.rs", a), source("b.rs", associated)]).is_empty());
}

#[test]
fn long_test_names_are_found() {
    let name = |words: usize| vec!["word"; words].join("_");
    for attribute in ["test", "tokio::test"] {
        let test = |words: usize| {
            format!("    #[{attribute}]\n    #[ignore]\n    fn {}(a: u8) {{}}", name(words))
        };
        assert!(long_test_names("a.rs", &test(MAX_WORDS)).is_empty());
        let found = long_test_names("a.rs", &test(MAX_WORDS + 1));
        assert_eq!(found, [format!("a.rs:3: {} has 9 words", name(9))]);
    }
    assert!(long_test_names("a.rs", &format!("fn {}() {{}}", name(9))).is_empty(), "no test");
}
