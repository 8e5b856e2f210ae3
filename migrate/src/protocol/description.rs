//! The messages by which a source describes its guest, between HELLO and CONFIG.

use driftline_dirty_tracker::Layout;
use driftline_guest::DriveHead;

use super::error::WireError;
use super::ids::Token;
use super::message::{DeviceFileNames, DriveMessage, MemoryPlaces, WireMessage};

/// Checks the order of the messages up to CONFIG.
#[derive(Debug, Default)]
pub(crate) struct DescriptionState {
    drives: Vec<DriveHead>,
    shares_memory: bool,
    has_files: bool,
}

/// What a message of the description requires.
#[derive(Debug)]
pub(crate) enum DescriptionStep<'a> {
    /// None; the message has changed the state.
    Noted,
    /// Receive the descriptors of memory.
    Memory(MemoryPlaces),
    /// Receive the descriptors of the devices' files. Memory was received before.
    Files(DeviceFileNames),
    /// The description is complete.
    Complete { token: Token, layout: Layout, config: &'a [u8] },
}

impl DescriptionState {
    /// Returns what `message` requires, or refuses it. No disk is copied within a host, so DRIVES
    /// and MEMORY exclude each other.
    pub(crate) fn on<'a>(
        &mut self,
        message: WireMessage<'a>,
    ) -> Result<DescriptionStep<'a>, WireError> {
        let is_begun = !self.drives.is_empty() || self.shares_memory;
        match message {
            WireMessage::Drive(DriveMessage::Drives(heads)) if !is_begun => {
                self.drives = heads;
                Ok(DescriptionStep::Noted)
            }
            WireMessage::Memory(places) if !is_begun => {
                self.shares_memory = true;
                Ok(DescriptionStep::Memory(places))
            }
            WireMessage::Files(names) if self.shares_memory && !self.has_files => {
                self.has_files = true;
                Ok(DescriptionStep::Files(names))
            }
            WireMessage::Config { token, layout, config } => {
                Ok(DescriptionStep::Complete { token, layout, config })
            }
            other => Err(other.unexpected("CONFIG")),
        }
    }

    /// Whether MEMORY has arrived.
    pub(crate) fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    /// Returns the disks that are copied.
    pub(crate) fn into_drives(self) -> Vec<DriveHead> {
        self.drives
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drives() -> WireMessage<'static> {
        let head = DriveHead { id: "disk0".to_owned(), bytes: 512, readonly: false };
        WireMessage::Drive(DriveMessage::Drives(vec![head]))
    }

    fn memory() -> WireMessage<'static> {
        WireMessage::Memory(MemoryPlaces { descriptors: 3, slots: Vec::new() })
    }

    fn files() -> WireMessage<'static> {
        WireMessage::Files(DeviceFileNames(vec!["net0".to_owned()]))
    }

    #[test]
    fn drives_memory_and_files_come_once_in_order() {
        let refused = |messages: Vec<WireMessage<'static>>| {
            let mut state = DescriptionState::default();
            messages.into_iter().find_map(|message| state.on(message).err().map(|e| e.to_string()))
        };
        assert_eq!(refused(vec![drives()]), None);
        assert_eq!(refused(vec![memory(), files()]), None);
        for (messages, found) in [
            (vec![drives(), memory()], "MEMORY"),
            (vec![memory(), drives()], "DRIVES"),
            (vec![drives(), drives()], "DRIVES"),
            (vec![memory(), memory()], "MEMORY"),
            (vec![files()], "FILES"),
            (vec![drives(), files()], "FILES"),
            (vec![memory(), files(), files()], "FILES"),
        ] {
            let expected = format!("{found} came where CONFIG was expected");
            assert_eq!(refused(messages), Some(expected));
        }
    }
}
