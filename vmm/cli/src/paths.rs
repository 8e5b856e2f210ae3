//! Directories of files that a command names.

use std::path::Path;

/// Returns the directory that contains a file: the working directory for a bare name.
pub(super) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_name_is_in_the_working_directory() {
        for (path, directory) in [("a", "."), ("a/b", "a"), ("/a", "/"), ("/a/b", "/a")] {
            assert_eq!(directory_of(Path::new(path)), Path::new(directory), "{path}");
        }
    }
}
