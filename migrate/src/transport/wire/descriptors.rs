//! Messages whose last byte carries descriptors: MEMORY and FILES.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Wire, head};
use crate::protocol::error::{WireError, same};
use crate::protocol::limits::DESCRIPTOR_BYTE;
use crate::protocol::message::WireMessage;
use crate::protocol::tag::Tag;
use crate::transport::link::Link;
use driftline_format::RECORD_HEAD_LEN;

impl Wire<Link> {
    /// Sends `message`, which is MEMORY or FILES, with its descriptors.
    pub(crate) fn send_with_descriptors(
        &mut self,
        message: &WireMessage<'_>,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), WireError> {
        let payload = message.to_bytes();
        let length = payload.len() + DESCRIPTOR_BYTE as usize;
        let mut record = head(self.next_out, message.tag(), length, &[&payload]).to_vec();
        record.extend_from_slice(&payload);
        self.stream.write_all_more(&record, &mut self.torn)?;
        self.stream.send_descriptors(descriptors)?;
        self.torn = false;
        self.next_out = self.next_out.wrapping_add(1);
        self.sent_bytes += (RECORD_HEAD_LEN + length) as u64;
        Ok(())
    }

    /// Receives the descriptors of the message that [`recv`](Self::recv) has just returned, which
    /// has this tag. They must be `announced` in number.
    pub(crate) fn receive_descriptors(
        &mut self,
        message: Tag,
        announced: usize,
    ) -> Result<Vec<OwnedFd>, WireError> {
        let length = std::mem::take(&mut self.content);
        debug_assert_eq!(length, DESCRIPTOR_BYTE as usize);
        self.out_of_step = true;
        let received = self.stream.receive_descriptors()?;
        self.out_of_step = false;
        self.received_bytes += length as u64;
        if received.truncated {
            let why = "not all its descriptors could be opened here (see `ulimit -n`)";
            return Err(WireError::Malformed { message, why });
        }
        same("the number of descriptors", announced as u64, received.all.len() as u64)?;
        Ok(received.all)
    }
}
