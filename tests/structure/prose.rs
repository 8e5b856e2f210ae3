//! Prose wraps at 100 columns: comments of Rust files, and Markdown outside tables, code and lines
//! that are one link.

use std::fs;
use std::path::Path;

use super::files::{files, relative, root};

const COLUMNS: usize = 100;

/// Returns the lines of prose in a file with their numbers, without tables and code.
fn prose(path: &Path) -> Vec<(usize, String)> {
    let rust = path.extension().is_some_and(|e| e == "rs");
    let mut in_code = false;
    let mut found = Vec::new();
    for (i, line) in fs::read_to_string(path).unwrap().lines().enumerate() {
        let mut text = line.trim_start();
        if rust {
            let Some(comment) = text.strip_prefix("//") else {
                in_code = false;
                continue;
            };
            text = comment.trim_start_matches(['/', '!']).trim_start();
        }
        if text.starts_with("```") {
            in_code = !in_code;
        } else if !in_code && !text.starts_with('|') && (rust || !line.starts_with("    ")) {
            found.push((i + 1, line.to_owned()));
        }
    }
    found
}

/// Returns whether a line cannot be wrapped: it has one word after its marks, such as an address.
fn is_one_word(line: &str) -> bool {
    let words = line.trim_start().trim_start_matches(['/', '!', '-', '*', '#', '>', ' ']);
    words.split_whitespace().count() <= 1
}

#[test]
fn prose_fits_into_the_columns() {
    let found = files(&root(), &["rs", "md"]);
    assert!(found.len() > 100, "only {} files were found", found.len());
    let mut long = Vec::new();
    for path in found {
        for (number, line) in prose(&path) {
            if line.chars().count() > COLUMNS && !is_one_word(&line) {
                let path = relative(&path);
                long.push(format!("{path}:{number}: {} columns", line.chars().count()));
            }
        }
    }
    assert!(long.is_empty(), "lines of prose over {COLUMNS} columns:\n{}", long.join("\n"));
}
