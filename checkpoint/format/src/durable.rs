//! Durable names: names of files that survive a crash of the host. The store and the hand-over
//! records rely on them, besides synced files.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::io::Errno;

/// Makes all changes of names in the directory `dir` durable: creations, renames and removals.
///
/// ```
/// let dir = tempfile::tempdir()?;
/// std::fs::write(dir.path().join("new"), "")?;
/// driftline_format::durable::sync_dir(dir.path())?;
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
///
/// The directory cannot be opened or synced.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Creates the directory `dir` and its missing parents, each durably. Costs a sync for each level
/// created.
///
/// ```
/// let dir = tempfile::tempdir()?;
/// let deep = dir.path().join("a/b");
/// driftline_format::durable::create_dir(&deep)?;
/// driftline_format::durable::create_dir(&deep)?;
/// assert!(deep.is_dir());
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
///
/// A directory cannot be created, another kind of file has its name, or a directory above it cannot
/// be synced. Some levels may exist by then.
pub fn create_dir(dir: &Path) -> io::Result<()> {
    let missing: Vec<&Path> =
        dir.ancestors().take_while(|d| !d.as_os_str().is_empty() && !d.is_dir()).collect();
    for level in missing.into_iter().rev() {
        match fs::create_dir(level) {
            Ok(()) => {}
            // Another thread or process has created it.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && level.is_dir() => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Err(Errno::NOTDIR.into()),
            Err(e) => return Err(e),
        }
        let parent = level.parent().filter(|p| !p.as_os_str().is_empty());
        sync_dir(parent.unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_not_taken_for_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        for path in [file.clone(), file.join("below")] {
            let error = create_dir(&path).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotADirectory, "{}", path.display());
        }
    }
}
