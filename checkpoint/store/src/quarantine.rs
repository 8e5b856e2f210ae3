//! Files that a repair replaces on a file system without hard links.
//!
//! Such a file gets its second name only once the new manifest is in place. A list of these files,
//! `damaged-N.names`, is durable before that. The repair renames what is listed, and removes the
//! list. If the repair was killed, the next writer or repair does both.

use std::io;

use crate::backend::is_media_error;
use crate::error::StoreError;
use crate::manifest::{Manifest, is_leftover};
use crate::names::{Named, list_name, parse_name, quarantine_name};
use crate::store::Store;

/// Upper bound on the length of a list, in bytes.
const MAX_LIST_BYTES: u64 = 1 << 20;

/// A file that a repair has replaced, under its second name.
#[derive(Debug)]
pub(crate) struct RenamedFile {
    pub(crate) from: String,
    pub(crate) to: String,
}

impl Store {
    /// Writes list `number` of `names`. Its content is durable, but its own name is not yet.
    pub(crate) fn write_list(&self, number: u64, names: &[&str]) -> Result<(), StoreError> {
        let list = list_name(number);
        let file = self.create_new(&list)?;
        file.write_all_at(names.join("\n").as_bytes(), 0)
            .map_err(|e| self.io("writing", &list, e))?;
        file.sync().map_err(|e| self.io("syncing", &list, e))
    }

    /// Renames, durably, those of `names` that are in a list and that `manifest` does not name.
    /// Adds the renamed files to `renamed`, also before an error. The lists stay.
    pub(crate) fn quarantine(
        &self,
        names: &[String],
        manifest: &Manifest,
        renamed: &mut Vec<RenamedFile>,
    ) -> Result<(), StoreError> {
        let before = renamed.len();
        for name in names {
            let Named::QuarantineList(number) = parse_name(name) else { continue };
            let listed = self.read_list(number)?;
            let is_replaced = |name: &&String| {
                matches!(parse_name(name), Named::Log(_) | Named::Pages(_))
                    && is_leftover(name, Some(manifest))
                    && listed.as_ref().is_none_or(|listed| listed.contains(name))
            };
            for name in names.iter().filter(is_replaced) {
                let quarantined = quarantine_name(number, name);
                match self.backend().rename(name, &quarantined) {
                    // Another list has named the file, too.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    other => {
                        other.map_err(|e| self.io("keeping a copy of", name, e))?;
                        renamed.push(RenamedFile { from: name.clone(), to: quarantined });
                    }
                }
            }
        }
        match renamed.len() > before {
            true => self.sync_dir(),
            false => Ok(()),
        }
    }

    /// Returns the names in list `number`; `None` if they cannot be read, so that any name may be
    /// in it.
    fn read_list(&self, number: u64) -> Result<Option<Vec<String>>, StoreError> {
        let list = list_name(number);
        let read = || {
            let file = self.backend().open(&list)?;
            let len = file.len()?;
            let mut bytes = vec![0; len.min(MAX_LIST_BYTES) as usize];
            file.read_exact_at(&mut bytes, 0)?;
            let text = String::from_utf8(bytes).ok().filter(|_| len <= MAX_LIST_BYTES);
            Ok(text.map(|text| text.lines().map(str::to_owned).collect()))
        };
        match read() {
            Err(e) if is_media_error(&e) => Ok(None),
            read => read.map_err(|e| self.io("reading", &list, e)),
        }
    }
}
