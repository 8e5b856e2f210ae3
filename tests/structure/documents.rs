//! The front documents stay short: a detail has its place in the book.

use std::fs;

use super::files::root;

/// The documents, each with its maximum number of words.
const LIMITS: [(&str, usize); 2] = [("README.md", 1200), ("ARCHITECTURE.md", 2000)];

fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

#[test]
fn front_documents_are_short() {
    for (name, limit) in LIMITS {
        let found = words(&fs::read_to_string(root().join(name)).unwrap());
        assert!(found > limit / 4, "{name} has only {found} words");
        assert!(found <= limit, "{name} has {found} words, more than {limit}: move some to docs/");
    }
}

#[test]
fn words_are_counted_across_lines_and_tables() {
    assert_eq!(words("a b\n\n| c | d |\n"), 7, "the marks of a table count");
}
