//! Prose wraps at 100 columns: comments of Rust files, and Markdown outside tables, code and lines
//! that are one link. Code wraps there, too: rustfmt does not wrap the messages in it.

use std::fs;

use super::files::{files, relative, root};

const COLUMNS: usize = 100;

/// Returns the lines of prose in `text` with their numbers, without tables and code. `rust` says
/// whether it is a Rust file, of which only the comments count.
fn prose(text: &str, rust: bool) -> Vec<(usize, &str)> {
    let mut in_code = false;
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate() {
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
            found.push((i + 1, line));
        }
    }
    found
}

/// Returns whether a line cannot be wrapped: it has one word after its marks, such as an address.
fn is_one_word(line: &str) -> bool {
    let words = line.trim_start().trim_start_matches(['/', '!', '-', '*', '#', '>', ' ']);
    words.split_whitespace().count() <= 1
}

/// Returns the lines of prose that are too long, each with its number and its columns.
fn long_lines(text: &str, rust: bool) -> Vec<(usize, usize)> {
    let lines = prose(text, rust).into_iter().filter(|(_, line)| !is_one_word(line));
    let columns = lines.map(|(number, line)| (number, line.chars().count()));
    columns.filter(|(_, columns)| *columns > COLUMNS).collect()
}

#[test]
fn prose_fits_into_the_columns() {
    let found = files(&root(), &["rs", "md"]);
    assert!(found.len() > 100, "only {} files were found", found.len());
    let mut long = Vec::new();
    for path in found {
        let rust = path.extension().is_some_and(|e| e == "rs");
        let text = fs::read_to_string(&path).unwrap();
        for (number, columns) in long_lines(&text, rust) {
            long.push(format!("{}:{number}: {columns} columns", relative(&path)));
        }
    }
    assert!(long.is_empty(), "lines of prose over {COLUMNS} columns:\n{}", long.join("\n"));
}

/// Returns the lines that are too long in another language: all lines of a script, else those of
/// comments.
fn long_in(text: &str, is_script: bool) -> Vec<(usize, usize)> {
    let is_comment = |line: &str| line.trim_start().starts_with(['#', '*', '/']);
    let lines = (1..).zip(text.lines());
    let lines = lines.filter(|(_, line)| (is_script || is_comment(line)) && !is_one_word(line));
    let columns = lines.map(|(number, line)| (number, line.chars().count()));
    columns.filter(|(_, columns)| *columns > COLUMNS).collect()
}

#[test]
fn other_languages_fit_into_the_columns() {
    let mut found = files(&root(), &["sh", "toml", "yaml", "yml", "c", "h", "ld"]);
    assert!(found.len() > 20, "only {} files were found", found.len());
    let unnamed = [".ci/run", ".cargo/config.toml", "vmm/cli/packaging/debian/postinst"];
    found.extend(unnamed.map(|file| root().join(file)));
    let mut long = Vec::new();
    for path in found {
        let is_script = path.extension().is_none_or(|e| e == "sh");
        let text = fs::read_to_string(&path).unwrap();
        for (number, columns) in long_in(&text, is_script) {
            long.push(format!("{}:{number}: {columns} columns", relative(&path)));
        }
    }
    assert!(long.is_empty(), "lines over {COLUMNS} columns:\n{}", long.join("\n"));
}

#[test]
fn long_lines_of_other_languages_are_found() {
    let words = "word ".repeat(30);
    let text = format!("# {words}\nkey: {words}\n# {}\n", "word".repeat(30));
    let columns = |line: usize| text.lines().nth(line).unwrap().len();
    assert_eq!(long_in(&text, false), [(1, columns(0))]);
    assert_eq!(long_in(&text, true), [(1, columns(0)), (2, columns(1))]);
}

/// Returns the numbers and columns of long lines of code. Raw strings, in other languages, are
/// exempt.
fn long_code(text: &str) -> Vec<(usize, usize)> {
    let mut raw = false;
    let mut found = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let was_raw = raw;
        raw = if raw {
            !line.contains("\"#")
        } else {
            line.contains("r#\"") && !line.contains("\"#")
        };
        let columns = line.chars().count();
        if columns > COLUMNS && !was_raw && !raw && !line.trim_start().starts_with("//") {
            found.push((i + 1, columns));
        }
    }
    found
}

#[test]
fn code_fits_into_the_columns() {
    let mut long = Vec::new();
    for path in files(&root(), &["rs"]) {
        for (number, columns) in long_code(&fs::read_to_string(&path).unwrap()) {
            long.push(format!("{}:{number}: {columns} columns", relative(&path)));
        }
    }
    assert!(long.is_empty(), "lines of code over {COLUMNS} columns:\n{}", long.join("\n"));
}

#[test]
fn long_messages_are_found_outside_raw_strings() {
    let long = "b".repeat(COLUMNS);
    let text = format!("\"{long}\"\n// {long}\nlet script = r#\"\n{long}b\n\"#;\n{long}b\n");
    assert_eq!(long_code(&text), [(1, COLUMNS + 2), (6, COLUMNS + 1)]);
}

#[test]
fn long_prose_is_found_outside_tables_and_code() {
    let words = |columns: usize| format!("é {}", "b".repeat(columns - 2));
    let (fits, long) = (words(COLUMNS), words(COLUMNS + 1));
    let text = format!("{fits}\n{long}\n| {long} |\n    {long}\n```\n{long}\n```\n{long}\n");
    assert_eq!(long_lines(&text, false), [(2, COLUMNS + 1), (8, COLUMNS + 1)]);
    let text = format!("    /// {long}\n{long}\n// ```\n// {long}\ncode\n//! {long}\n");
    assert_eq!(long_lines(&text, true), [(1, COLUMNS + 9), (6, COLUMNS + 5)]);
    assert_eq!(long_lines(&format!("- {}", "b".repeat(2 * COLUMNS)), false), [], "one word");
}
