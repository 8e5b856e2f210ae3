//! Reads the guest's layout, configuration and state.

use driftline_dirty_tracker::Layout;
use driftline_format::{HEADER_LEN, Header, RecordHead};
use driftline_guest::{Section, SectionTag};

use crate::damage::Damage;
use crate::error::StoreError;
use crate::record_file::records::End;
use crate::record_file::walk::{RecordPosition, RecordWalk};
use crate::records::{Digest, TAG_LAYOUT, TAG_STORE, check_sections, decode_layout};

/// The first record after the state.
pub(crate) struct BehindState {
    /// Its position.
    pub(crate) at: RecordPosition,
    pub(crate) head: RecordHead,
    /// The totals, if it is the end.
    pub(crate) end: Option<End>,
}

impl<'f> RecordWalk<'f> {
    /// Returns the header of a file that begins with `magic`, and a walk from its first record on.
    pub(crate) fn header(self, magic: [u8; 8]) -> Result<(Header, Self), StoreError> {
        let mut bytes = [0; HEADER_LEN];
        self.read(0, &mut bytes)?;
        let header = Header::read_from(&bytes[..], magic).map_err(|e| self.damaged(e))?;
        let digest = Digest(header.checksum());
        let first = RecordPosition { at: HEADER_LEN as u64, records: 0, digest };
        Ok((header, self.from(first)))
    }

    /// Returns the payload of the next record, which must be of `tag`.
    pub(crate) fn expect(&mut self, tag: u16) -> Result<Vec<u8>, StoreError> {
        let mut payload = Vec::new();
        let (head, _) = self.head(&mut payload)?;
        if head.tag != tag {
            return Err(self.damaged(Damage::Misplaced { tag: head.tag }));
        }
        self.payload(&head, &mut payload)?;
        Ok(payload)
    }

    /// Reads the layout, whose hash is `layout`, and the configuration.
    pub(crate) fn machine(&mut self, layout: u32) -> Result<(Layout, Vec<u8>), StoreError> {
        let layout = decode_layout(&self.expect(TAG_LAYOUT)?, layout);
        let layout = layout.map_err(|e| self.damaged(e))?;
        Ok((layout, self.expect(SectionTag::CONFIG.0)?))
    }

    /// Reads state sections up to the first record that is none. Takes as much memory as they have
    /// bytes, which with those of the configuration are 64 MiB at most.
    pub(crate) fn sections(
        &mut self,
        config: &[u8],
    ) -> Result<(Vec<Section>, BehindState), StoreError> {
        let (mut payload, mut sections) = (Vec::new(), Vec::new());
        // The configuration counts as a section.
        let (mut count, mut bytes) = (1, config.len() as u64);
        loop {
            let at = self.next();
            let (head, end) = self.head(&mut payload)?;
            if head.tag <= SectionTag::CONFIG.0 || head.tag >= TAG_STORE {
                return Ok((sections, BehindState { at, head, end }));
            }
            (count, bytes) = (count + 1, bytes + u64::from(head.length));
            check_sections(count, bytes).map_err(|e| self.damaged(e))?;
            self.payload(&head, &mut payload)?;
            sections.push(section(&head, payload.clone()));
        }
    }
}

fn section(head: &RecordHead, bytes: Vec<u8>) -> Section {
    let RecordHead { instance, must_understand, .. } = *head;
    Section { tag: SectionTag(head.tag), instance, must_understand, bytes }
}
