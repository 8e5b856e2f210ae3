//! Tells the service manager that started this process, if one did, when the guest runs and when
//! the process ends (`Type=notify` of systemd).

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::OnceLock;
use std::time::Duration;

/// The environment variable with the socket's address.
const VARIABLE: &str = "NOTIFY_SOCKET";
/// Time limit for one message. The service manager reads messages immediately.
const LIMIT: Duration = Duration::from_secs(2);

/// The socket, connected before the process enters its sandbox.
static SOCKET: OnceLock<UnixDatagram> = OnceLock::new();

/// Connects to the service manager. A failure is only a warning: the guest can run without it.
pub(super) fn connect() {
    let Some(address) = std::env::var_os(VARIABLE) else { return };
    match socket(&address) {
        Ok(socket) => {
            let _ = SOCKET.set(socket);
        }
        Err(e) => tracing::warn!("{VARIABLE} is {}: {e}", address.display()),
    }
}

/// `address` is a path, or a name in the abstract namespace after `@`.
fn socket(address: &OsString) -> io::Result<UnixDatagram> {
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(address)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    socket.set_write_timeout(Some(LIMIT))?;
    Ok(socket)
}

/// Says that the service has started, and in what state it is.
pub(super) fn ready(status: impl std::fmt::Display) {
    send(&format!("READY=1\nSTATUS={status}\n"));
}

/// Says that this process is the service's main process from now on, and in what state it is.
pub(super) fn continued(status: impl std::fmt::Display) {
    send(&format!("MAINPID={}\nREADY=1\nSTATUS={status}\n", std::process::id()));
}

/// Says that the process ends.
pub(super) fn stopping() {
    send("STOPPING=1\n");
}

fn send(message: &str) {
    let Some(socket) = SOCKET.get() else { return };
    if let Err(e) = socket.send(message.as_bytes()) {
        tracing::warn!("cannot send \"{}\" to the service manager: {e}", message.trim_end());
    }
}
