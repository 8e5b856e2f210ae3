//! TLS records of a TCP connection that the kernel encrypts and decrypts.
//!
//! This module makes the system calls itself, because `rustix` has neither these options nor this
//! control data. Linux describes them in `Documentation/networking/tls.rst`.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use zeroize::Zeroizing;

/// Offsets in a control message: its kind, and its data. Its length and level come before.
const LEVEL_AT: usize = size_of::<usize>();
const KIND_AT: usize = LEVEL_AT + 4;
const DATA_AT: usize = KIND_AT + 4;
/// Bytes of a control message with one byte of data, and with the padding behind it.
const CONTROL_LEN: usize = DATA_AT + 1;
const CONTROL_SPACE: usize = CONTROL_LEN.next_multiple_of(size_of::<usize>());

/// A direction of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecordDirection {
    /// Records that this side sends.
    Send,
    /// Records that the peer sends.
    Receive,
}

/// Keys of one direction of a TLS 1.3 session with AES-GCM.
#[derive(Clone, Copy)]
pub struct RecordKeys<'k> {
    /// The key, of 16 or 32 bytes.
    pub key: &'k [u8],
    /// The initialization vector.
    pub iv: &'k [u8; 12],
    /// Number of the next record.
    pub sequence: u64,
}

/// One control message in the kernel's layout, with the alignment that it must have.
#[repr(C, align(8))]
struct Control([u8; CONTROL_SPACE]);

/// Prepares a connection for [`set_keys`]. Bytes travel as before until then. Loads the kernel's
/// module `tls` if this process may do so.
///
/// # Errors
///
/// The kernel offers no TLS, or the connection is not established.
pub fn attach(socket: impl AsFd) -> io::Result<()> {
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_ULP, b"tls")
}

/// Sets the keys of one direction. From then on, the kernel encrypts what is written, or decrypts
/// what is read.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidInput`] for a key of another length, or the system's error.
pub fn set_keys(
    socket: impl AsFd,
    direction: RecordDirection,
    keys: &RecordKeys<'_>,
) -> io::Result<()> {
    let option = match direction {
        RecordDirection::Send => libc::TLS_TX,
        RecordDirection::Receive => libc::TLS_RX,
    };
    set_option(socket, libc::SOL_TLS, option, &crypto_info(keys)?)
}

/// Lets the kernel decrypt records directly into the reader's memory. The kernel decrypts a record
/// a second time if it turns out to be padded, or not of data.
///
/// # Errors
///
/// The system's error. The kernel has this option since Linux 6.0.
pub fn expect_no_padding(socket: impl AsFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    set_option(socket, libc::SOL_TLS, libc::TLS_RX_EXPECT_NO_PAD, &on.to_ne_bytes())
}

/// Sends `bytes` as a record of type `kind`, at once.
///
/// # Errors
///
/// The system's error. For [`io::ErrorKind::WouldBlock`], nothing of `bytes` was sent.
#[allow(unsafe_code)]
pub fn send_record(socket: impl AsFd, kind: u8, bytes: &[u8]) -> io::Result<()> {
    let mut control = Control::of_type(kind);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let message = message(&mut part, &mut control);
    // SAFETY: the message refers to `bytes` and `control`, which outlive the call, and the kernel
    // only reads them.
    let sent = unsafe {
        libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    match usize::try_from(sent) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Receives records of one type: data that have arrived and fit into `buf`, or one record of
/// another type. Returns the type and the number of bytes, which is 0 at the end of the connection.
///
/// # Errors
///
/// The system's error.
#[allow(unsafe_code)]
pub fn receive_record(socket: impl AsFd, buf: &mut [u8]) -> io::Result<(u8, usize)> {
    let mut control = Control([0; CONTROL_SPACE]);
    let mut part = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    let mut message = message(&mut part, &mut control);
    // SAFETY: the message refers to `buf` and `control`, which outlive the call. The kernel writes
    // to them alone, and at most their lengths.
    let received = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, 0) };
    match usize::try_from(received) {
        Ok(0) => Ok((0, 0)),
        Ok(received) => {
            let kind = control.record_type().ok_or(io::ErrorKind::InvalidData)?;
            Ok((kind, received))
        }
        Err(_) => Err(io::Error::last_os_error()),
    }
}

impl Control {
    /// Returns the message that sets the type of a record.
    fn of_type(kind: u8) -> Self {
        let mut bytes = [0; CONTROL_SPACE];
        bytes[..LEVEL_AT].copy_from_slice(&CONTROL_LEN.to_ne_bytes());
        bytes[LEVEL_AT..KIND_AT].copy_from_slice(&libc::SOL_TLS.to_ne_bytes());
        bytes[KIND_AT..DATA_AT].copy_from_slice(&libc::TLS_SET_RECORD_TYPE.to_ne_bytes());
        bytes[DATA_AT] = kind;
        Self(bytes)
    }

    /// Returns the type of a record, if the message says it.
    fn record_type(&self) -> Option<u8> {
        let is = self.0[..LEVEL_AT] == CONTROL_LEN.to_ne_bytes()
            && self.0[LEVEL_AT..KIND_AT] == libc::SOL_TLS.to_ne_bytes()
            && self.0[KIND_AT..DATA_AT] == libc::TLS_GET_RECORD_TYPE.to_ne_bytes();
        is.then_some(self.0[DATA_AT])
    }
}

/// Returns a message with one part and one control message.
fn message(part: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: all fields are integers and pointers, for which zeroes are values.
    #[allow(unsafe_code)]
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control.0).cast();
    message.msg_controllen = CONTROL_SPACE as _;
    message
}

#[allow(unsafe_code)]
fn set_option(
    socket: impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: &[u8],
) -> io::Result<()> {
    let (socket, length) = (socket.as_fd().as_raw_fd(), value.len() as libc::socklen_t);
    // SAFETY: the kernel reads `length` bytes of `value` during the call, and nothing else.
    let result = unsafe { libc::setsockopt(socket, level, option, value.as_ptr().cast(), length) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns `tls12_crypto_info_aes_gcm_128` or `_256`: version, cipher, the last 8 bytes of the
/// initialization vector, key, the first 4 bytes of the vector (salt), and number of the next
/// record.
fn crypto_info(keys: &RecordKeys<'_>) -> io::Result<Zeroizing<Vec<u8>>> {
    let cipher = match keys.key.len() {
        libc::TLS_CIPHER_AES_GCM_128_KEY_SIZE => libc::TLS_CIPHER_AES_GCM_128,
        libc::TLS_CIPHER_AES_GCM_256_KEY_SIZE => libc::TLS_CIPHER_AES_GCM_256,
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let (salt, iv) = keys.iv.split_at(libc::TLS_CIPHER_AES_GCM_128_SALT_SIZE);
    let version = libc::TLS_1_3_VERSION.to_ne_bytes();
    let sequence = keys.sequence.to_be_bytes();
    let info = [&version, &cipher.to_ne_bytes()[..], iv, keys.key, salt, &sequence].concat();
    // Overwritten when it is freed.
    Ok(Zeroizing::new(info))
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn keys_have_the_layout_of_linux() {
        type Short = libc::tls12_crypto_info_aes_gcm_128;
        type Long = libc::tls12_crypto_info_aes_gcm_256;
        let (key, iv) = ([0xaa; 32], *b"salt12345678");
        let keys = |length| RecordKeys { key: &key[..length], iv: &iv, sequence: 0x0102 };
        let short = crypto_info(&keys(16)).unwrap();
        assert_eq!(short.len(), size_of::<Short>());
        assert_eq!(short[..2], 0x304u16.to_ne_bytes());
        assert_eq!(short[2..4], 51u16.to_ne_bytes());
        assert_eq!(short[offset_of!(Short, iv)..][..8], *b"12345678");
        assert_eq!(short[offset_of!(Short, key)..][..16], [0xaa; 16]);
        assert_eq!(short[offset_of!(Short, salt)..][..4], *b"salt");
        assert_eq!(short[offset_of!(Short, rec_seq)..], [0, 0, 0, 0, 0, 0, 1, 2]);
        let long = crypto_info(&keys(32)).unwrap();
        assert_eq!(long.len(), size_of::<Long>());
        assert_eq!(long[2..4], 52u16.to_ne_bytes());
        assert_eq!(long[offset_of!(Long, key)..][..32], [0xaa; 32]);
        assert_eq!(long[offset_of!(Long, salt)..][..4], *b"salt");
        assert!(crypto_info(&keys(24)).is_err());
    }

    #[test]
    fn control_messages_have_the_layout_of_linux() {
        // SAFETY: this function only calculates.
        #[allow(unsafe_code)]
        let length = unsafe { libc::CMSG_LEN(1) };
        // SAFETY: this function only calculates.
        #[allow(unsafe_code)]
        let space = unsafe { libc::CMSG_SPACE(1) };
        assert_eq!((length as usize, space as usize), (CONTROL_LEN, CONTROL_SPACE));
        assert_eq!(offset_of!(libc::cmsghdr, cmsg_level), LEVEL_AT);
        assert_eq!(offset_of!(libc::cmsghdr, cmsg_type), KIND_AT);
        let mut control = Control::of_type(21);
        assert_eq!(control.record_type(), None, "set is not get");
        control.0[KIND_AT..DATA_AT].copy_from_slice(&2i32.to_ne_bytes());
        assert_eq!(control.record_type(), Some(21));
        control.0[LEVEL_AT] ^= 1;
        assert_eq!(control.record_type(), None);
    }

    #[test]
    fn refused_calls_are_errors() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(attach(&listener).is_err(), "not connected");
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let keys = RecordKeys { key: &[0; 16], iv: &[0; 12], sequence: 0 };
        assert!(set_keys(&socket, RecordDirection::Send, &keys).is_err(), "not attached");
        assert!(expect_no_padding(&socket).is_err());
    }
}
