//! Opens `/dev/kvm` and checks that machines can be built with it.

use kvm_bindings::KVM_API_VERSION;
use kvm_ioctls::Kvm;

use super::Capabilities;

/// Reason why `/dev/kvm` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceUnusable {
    /// The device cannot be opened.
    #[error("{cause}{}", advice(cause.errno()))]
    Closed {
        /// The system's error.
        #[source]
        cause: kvm_ioctls::Error,
    },
    /// The device has another API version, or none.
    #[error("its API version is {0}, not {KVM_API_VERSION}")]
    Version(i32),
}

/// Reason why no machine can be built on this host.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// KVM cannot be opened.
    #[error("this host lacks a usable /dev/kvm: {0}")]
    Device(#[from] DeviceUnusable),
    /// A capability is missing that every machine needs.
    #[error("this host lacks KVM_CAP_{0}: no machine can be built without it")]
    Capability(&'static str),
}

/// Opens KVM without checking its capabilities.
///
/// # Errors
///
/// Fails if `/dev/kvm` cannot be opened or has another API version.
pub fn open_device() -> Result<Kvm, DeviceUnusable> {
    let kvm = Kvm::new().map_err(|cause| DeviceUnusable::Closed { cause })?;
    match kvm.get_api_version() {
        version if version == KVM_API_VERSION as i32 => Ok(kvm),
        version => Err(DeviceUnusable::Version(version)),
    }
}

/// Returns advice on a `/dev/kvm` that cannot be opened.
fn advice(errno: i32) -> &'static str {
    match errno {
        libc::EACCES => ": add your user to group kvm, or use --backend threads",
        libc::ENOENT => {
            ": load the module kvm_intel or kvm_amd, turn virtualization on in the firmware, or \
             use --backend threads"
        }
        _ => "",
    }
}

/// Opens KVM and probes its capabilities.
///
/// # Errors
///
/// Fails as [`open_device`] does, or if a capability is missing that every machine needs.
pub fn open() -> Result<(Kvm, Capabilities), Unusable> {
    let kvm = open_device()?;
    let capabilities = Capabilities::probe(&kvm);
    if let Some(missing) = capabilities.missing().next() {
        return Err(Unusable::Capability(missing.name));
    }
    Ok((kvm, capabilities))
}
