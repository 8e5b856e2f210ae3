//! The ioctls of `/dev/net/tun`. This is the only unsafe code of the network device.

use std::ffi::CStr;
use std::fs::File;
use std::io;

use libc::{c_int, c_short, c_uint, c_ulong};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};

/// `struct ifreq`, with the fields that taps use.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; libc::IFNAMSIZ],
    flags: c_short,
    rest: [u8; 22],
}

const _: () = assert!(size_of::<InterfaceRequest>() == size_of::<libc::ifreq>());

impl InterfaceRequest {
    /// Returns a request. A name that is too long is truncated.
    fn new(name: &str, flags: c_int) -> Self {
        let mut request =
            Self { name: [0; libc::IFNAMSIZ], flags: flags as c_short, rest: [0; 22] };
        let len = name.len().min(libc::IFNAMSIZ - 1);
        request.name[..len].copy_from_slice(&name.as_bytes()[..len]);
        request
    }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns a request with the type that the ioctl wrappers take. C libraries differ in its type.
fn request_of(request: libc::Ioctl) -> c_ulong {
    c_ulong::from(request as u32)
}

/// Attaches `file`, an open `/dev/net/tun`, to the tap `name` as one of its queues.
pub(super) fn attach(file: &File, name: &str, flags: c_int) -> io::Result<()> {
    let mut request = InterfaceRequest::new(name, flags);
    // SAFETY: the kernel reads and writes one `ifreq`, whose size `request` has, and keeps no
    // reference to it.
    check(unsafe { ioctl_with_mut_ref(file, request_of(libc::TUNSETIFF), &mut request) })
}

/// Returns the name and the flags of the interface of which `file` is a queue.
///
/// # Errors
///
/// `file` is not a queue of an interface.
pub(super) fn attached_to(file: &File) -> io::Result<(String, c_int)> {
    let mut request = InterfaceRequest::new("", 0);
    // SAFETY: the kernel writes one `ifreq`, whose size `request` has, and keeps no reference to
    // it.
    check(unsafe { ioctl_with_mut_ref(file, request_of(libc::TUNGETIFF), &mut request) })?;
    let name = CStr::from_bytes_until_nul(&request.name).map_err(io::Error::other)?;
    // The kernel's type of the flags has no sign.
    Ok((name.to_string_lossy().into_owned(), c_int::from(request.flags.cast_unsigned())))
}

/// Returns the number of header bytes before each frame.
pub(super) fn header_size(file: &File) -> io::Result<c_int> {
    let mut bytes: c_int = 0;
    // SAFETY: the kernel writes one int.
    check(unsafe { ioctl_with_mut_ref(file, request_of(libc::TUNGETVNETHDRSZ), &mut bytes) })?;
    Ok(bytes)
}

/// Enables or disables an attached queue in the kernel.
pub(super) fn enable_queue(file: &File, enable: bool) -> io::Result<()> {
    let flags = if enable { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
    let request = InterfaceRequest::new("", flags);
    // SAFETY: the kernel reads one `ifreq`, whose size `request` has.
    check(unsafe { ioctl_with_ref(file, request_of(libc::TUNSETQUEUE), &request) })
}

/// Sets the number of header bytes before each frame.
pub(super) fn set_header_size(file: &File, bytes: c_int) -> io::Result<()> {
    // SAFETY: the kernel reads one int.
    check(unsafe { ioctl_with_ref(file, request_of(libc::TUNSETVNETHDRSZ), &bytes) })
}

/// Sets the offloads (bits `TUN_F_*`) that the reader of the tap supports.
pub(super) fn set_offloads(file: &File, offloads: c_uint) -> io::Result<()> {
    // SAFETY: the argument is a number; no memory is involved.
    check(unsafe { ioctl_with_val(file, request_of(libc::TUNSETOFFLOAD), offloads.into()) })
}
