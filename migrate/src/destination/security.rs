//! The TLS session of an accepted connection, and what its refusal tells the peer.

use std::io::{self, Write};

use driftline_format::HEADER_LEN;

use super::admission::Admitted;
use crate::protocol::error::WireError;
use crate::protocol::tag::Tag;
use crate::transport::link::Link;
use crate::transport::protection::ReceiveTls;
use crate::transport::tls::TlsError;
use crate::transport::wire::Wire;

/// The TLS alert `internal_error`, which tells a peer that this side has no session to offer. A
/// peer without TLS reads a whole header before it looks at it.
const INTERNAL_ERROR: [u8; HEADER_LEN] = {
    let mut bytes = [0; HEADER_LEN];
    let (alert, _) = bytes.split_at_mut(7);
    alert.copy_from_slice(&[21, 3, 3, 0, 2, 2, 80]);
    bytes
};

/// Begins the session of a connection, if the receiver uses TLS. The link's deadline bounds the
/// handshake. A refused peer without TLS gets REFUSED, and one with TLS an alert.
pub(super) fn secure(
    mut link: Link,
    tls: Option<&ReceiveTls>,
    place: &Admitted,
) -> Result<Link, WireError> {
    let Some(tls) = tls else { return Ok(link) };
    let session = match tls.session() {
        Ok(session) => session,
        Err(e) => {
            link.begin_closing();
            let _ = link.write_all(&INTERNAL_ERROR);
            link.hang_up();
            return Err(io::Error::from(e).into());
        }
    };
    let Err(e) = link.secure(session) else { return Ok(link) };
    if is(&e, |e| matches!(e, TlsError::PlainPeer)) {
        link.drop_session();
        let mut wire = Wire::new(link);
        refuse(&mut wire, "this receiver uses TLS, and the source does not: give --tls-dir");
    } else if !place.is_displaced() {
        // Writes the alert of the failure, and waits until the peer has read it.
        link.begin_closing();
        link.hang_up();
    }
    Err(e.into())
}

/// Fails, and tells the peer, unless its certificate has one of the allowed names.
pub(super) fn check_peer(wire: &mut Wire<Link>, tls: Option<&ReceiveTls>) -> Result<(), WireError> {
    let Some(tls) = tls else { return Ok(()) };
    wire.stream().check_peer(&tls.allow).map_err(|e| {
        refuse(wire, &e.to_string());
        io::Error::from(e).into()
    })
}

/// Tells a peer that uses TLS that this receiver does not, if `e` says so.
pub(super) fn refuse_tls(wire: &mut Wire<Link>, e: &WireError) {
    if let WireError::Format(driftline_format::FormatError::Io(e)) = e
        && is(e, |e| matches!(e, TlsError::TlsPeer))
    {
        refuse(wire, "this receiver does not use TLS");
    }
}

/// Sends a header and the reason, and closes the connection.
fn refuse(wire: &mut Wire<Link>, reason: &str) {
    if wire.send_header(None).is_ok() {
        wire.abort(Tag::Refused, reason);
    }
}

/// Whether an error is this failure of TLS.
fn is(e: &io::Error, which: impl FnOnce(&TlsError) -> bool) -> bool {
    e.get_ref().and_then(|e| e.downcast_ref()).is_some_and(which)
}
