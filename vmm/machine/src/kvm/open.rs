//! Opens `/dev/kvm` and checks that machines can be built with it.

use std::error::Error;

use kvm_bindings::KVM_API_VERSION;
use kvm_ioctls::Kvm;

use super::Capabilities;

/// Reason why no machine can be built on this host.
#[derive(Debug, thiserror::Error)]
#[error("this host lacks {what}: {cause}")]
pub struct Unusable {
    /// Missing capability or device.
    pub what: String,
    /// The system's error, or the consequence.
    #[source]
    pub cause: Box<dyn Error + Send + Sync>,
}

/// Opens KVM without checking its capabilities.
///
/// # Errors
///
/// Fails if `/dev/kvm` cannot be opened or has another API version.
pub fn open_device() -> Result<Kvm, Unusable> {
    let lacks = |why: String| Unusable { what: "a usable /dev/kvm".to_owned(), cause: why.into() };
    let kvm = Kvm::new().map_err(|e| lacks(format!("{e}{}", advice(e.errno()))))?;
    let version = kvm.get_api_version();
    if version != KVM_API_VERSION as i32 {
        return Err(lacks(format!("its API version is {version}, not {KVM_API_VERSION}")));
    }
    Ok(kvm)
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
        return Err(Unusable {
            what: format!("KVM_CAP_{}", missing.name),
            cause: "no machine can be built without it".into(),
        });
    }
    Ok((kvm, capabilities))
}
