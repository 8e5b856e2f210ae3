//! The state of a test guest: the progress of its writers.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use super::MemoryGuest;
use crate::error::GuestError;
use crate::section::{Section, SectionHead, SectionTag};
use crate::stateful::{Clock, Stateful};
use crate::testing::faults::Op;
use crate::testing::writers::PageWriter;

/// Tag of the section of extra state, which no reader must understand.
const EXTRA_STATE: SectionTag = SectionTag(0x7000);
/// Each byte of that section.
const EXTRA_BYTE: u8 = 0xb5;

impl Stateful for MemoryGuest {
    fn save_state(&self) -> Result<Vec<Section>, GuestError> {
        self.must_be_paused("save")?;
        self.faults.check(Op::Save, "saving the state")?;
        let section = |w: &Arc<PageWriter>| {
            let mut bytes = w.steps.load(SeqCst).to_le_bytes().to_vec();
            bytes.extend_from_slice(&w.errors.load(SeqCst).to_le_bytes());
            Section::new(SectionTag::THREAD_WORKER, w.index as u16, bytes)
        };
        let mut sections: Vec<Section> = self.writers.iter().map(section).collect();
        let more = self.extra_state_bytes.load(SeqCst) as usize;
        if more > 0 {
            let (tag, bytes) = (EXTRA_STATE, vec![EXTRA_BYTE; more]);
            sections.push(Section { tag, instance: 0, must_understand: false, bytes });
        }
        Ok(sections)
    }

    fn restore_state(&self, sections: &[Section], _clock: Clock) -> Result<(), GuestError> {
        assert!(!self.filling.load(SeqCst), "its memory is still being filled");
        self.must_be_paused("restore")?;
        self.faults.check(Op::Restore, "restoring the state")?;
        let malformed = |why: String| GuestError::malformed("the state", why);
        let mut states = vec![None; self.writers.len()];
        for s in sections {
            if s.tag == EXTRA_STATE && s.bytes.iter().any(|byte| *byte != EXTRA_BYTE) {
                return Err(malformed("a section has changed".into()));
            }
            if s.tag != SectionTag::THREAD_WORKER {
                if s.must_understand {
                    return Err(GuestError::unsupported(s.tag, "this guest has no such thing"));
                }
                continue;
            }
            let bytes: &[u8; 16] = s.bytes.as_slice().try_into().map_err(|_| {
                malformed(format!("writer {} has {} bytes, not 16", s.instance, s.bytes.len()))
            })?;
            let place = states
                .get_mut(usize::from(s.instance))
                .ok_or_else(|| malformed(format!("there is no writer {}", s.instance)))?;
            let word = |at| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
            if place.replace((word(0), word(8))).is_some() {
                return Err(malformed(format!("writer {} is present twice", s.instance)));
            }
        }
        if let Some(missing) = states.iter().position(Option::is_none) {
            return Err(malformed(format!("writer {missing} is missing")));
        }
        for (writer, (steps, errors)) in self.writers.iter().zip(states.into_iter().flatten()) {
            // Far above what a test writes, far below an overflow.
            writer.steps.store(steps.min(u64::MAX >> 2), SeqCst);
            writer.errors.store(errors, SeqCst);
        }
        Ok(())
    }

    fn state_heads(&self) -> Vec<SectionHead> {
        // Known only in a pause.
        Vec::new()
    }

    fn check_state_heads(&self, _: &[SectionHead]) -> Result<(), GuestError> {
        // `restore_state` refuses what it does not know.
        Ok(())
    }
}
