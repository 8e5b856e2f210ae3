//! The digest of a guest's state.

use driftline_guest::Section;

use super::raw::section_head;

/// CRC32C over the sections in order: for each its head as in STATE, its length (u32) and its
/// bytes.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct StateDigest(u32);

impl StateDigest {
    pub(crate) fn of(sections: &[Section]) -> u32 {
        let mut digest = Self::default();
        sections.iter().for_each(|s| digest.add(s));
        digest.0
    }

    fn add(&mut self, s: &Section) {
        self.0 = crc32c::crc32c_append(self.0, &section_head(s));
        self.0 = crc32c::crc32c_append(self.0, &(s.bytes.len() as u32).to_le_bytes());
        self.0 = crc32c::crc32c_append(self.0, &s.bytes);
    }
}
