//! The end of a handshake, at which the session is offloaded to the kernel if that is possible.

use std::sync::LazyLock;

use driftline_format::kernel_tls;
use rustls::{CipherSuite, CommonState};

use super::super::error::TlsError;
use super::super::kernel::{KernelSession, has_refused, note_refusal};
use super::{Socket, TlsConnection, TlsSession};

/// Variable of the environment that keeps sessions in this process if it is `0`.
const VARIABLE: &str = "DRIFTLINE_KERNEL_TLS";

/// Where a session is from the end of its handshake on.
#[derive(Debug)]
pub(in super::super::super) enum Offload {
    /// In the kernel.
    Done(Box<KernelSession>),
    /// In this process, as during the handshake.
    Impossible(Box<TlsSession>),
}

impl TlsSession {
    /// Offloads the session to the kernel, if that is possible. After an error nothing of the
    /// session is left, and a later one stays in this process.
    pub(in super::super::super) fn offload(
        self: Box<Self>,
        socket: &Socket,
    ) -> Result<Offload, TlsError> {
        if !self.fits_the_kernel(socket) || kernel_tls::attach(socket).is_err() {
            return Ok(Offload::Impossible(self));
        }
        let chain = self.state().peer_certificates();
        let certificate = chain.and_then(|chain| chain.first()).map(|c| c.clone().into_owned());
        // What rustls keeps would only be needed to change keys.
        let secrets = match self.connection {
            TlsConnection::Client(connection) => {
                connection.dangerous_into_kernel_connection().map(|(secrets, _)| secrets)
            }
            TlsConnection::Server(connection) => {
                connection.dangerous_into_kernel_connection().map(|(secrets, _)| secrets)
            }
        };
        let secrets = secrets.map_err(TlsError::Session).inspect_err(|_| note_refusal())?;
        let session = KernelSession::begin(socket, secrets, certificate)?;
        Ok(Offload::Done(Box::new(session)))
    }

    /// Whether the kernel can have the session of this socket.
    fn fits_the_kernel(&self, socket: &Socket) -> bool {
        static WANTED: LazyLock<bool> =
            LazyLock::new(|| std::env::var_os(VARIABLE).is_none_or(|value| value != "0"));
        *WANTED && !has_refused() && socket.is_tcp() && self.can_leave()
    }

    /// Whether a kernel with TLS can have the session: nothing of it is left here, such kernels
    /// have its cipher, and its keys need not change.
    pub(super) fn can_leave(&self) -> bool {
        self.unprocessed.is_empty()
            && self.plain.is_empty()
            && self.outgoing.is_empty()
            && !self.peer_has_ended
            && has_kernel_cipher(self.state())
            && !self.expects_new_keys()
    }
}

/// Whether each kernel with TLS has the session's cipher. ChaCha20-Poly1305 is another option of
/// its configuration, and two hosts with Driftline never choose it.
fn has_kernel_cipher(state: &CommonState) -> bool {
    use CipherSuite::{TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384};
    let suite = state.negotiated_cipher_suite().map(|suite| suite.suite());
    matches!(suite, Some(TLS13_AES_128_GCM_SHA256 | TLS13_AES_256_GCM_SHA384))
}
