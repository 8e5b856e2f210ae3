//! Tests of the codec: the bytes of requests and replies, and connections to a real socket.

mod decoding;
mod exchanges;
mod replies;

use super::decode::{HttpDecoder, HttpEvent};
use super::dialect::HttpDialect;

const FIRECRACKER: HttpDialect = HttpDialect::Firecracker { payload_limit: 51200 };

/// Returns the events of bytes that arrive in `pieces`, until the first fault.
fn events<'a>(dialect: HttpDialect, pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<HttpEvent> {
    let mut decoder = HttpDecoder::new(dialect);
    let mut events = Vec::new();
    for piece in pieces {
        decoder.push(piece);
        loop {
            match decoder.next() {
                HttpEvent::Incomplete => break,
                fault @ HttpEvent::Fault(_) => {
                    events.push(fault);
                    return events;
                }
                event => events.push(event),
            }
        }
    }
    events
}
