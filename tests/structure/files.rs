//! The files of the repository.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the repository's root.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Returns the files under `dir` with one of `extensions`, without those that are built or fetched.
pub(crate) fn files(dir: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    collect(dir, extensions, &mut found);
    found.sort();
    found
}

fn collect(dir: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !name.starts_with('.') && !["target", "corpus", "artifacts"].contains(&&*name) {
                collect(&path, extensions, found);
            }
        } else if path.extension().is_some_and(|e| extensions.iter().any(|one| e == *one)) {
            found.push(path);
        }
    }
}

/// Returns `path` relative to the root, for messages.
pub(crate) fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}
