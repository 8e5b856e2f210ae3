//! Which names a client may give to a device.

use driftline_machine::config::MAX_ID_BYTES;

use super::fault::ApiFault;

/// Prefix of an interface's name in its machine if that name is taken.
pub(super) const NET_PREFIX: &str = "net-";
/// Longest name that a client may give, in bytes: a machine has no longer ones, and a prefix may
/// precede it.
const MAX_NAME_BYTES: usize = MAX_ID_BYTES - NET_PREFIX.len();

/// Checks that a machine can have a device of this name.
pub(super) fn check_name(id: &str) -> Result<(), ApiFault> {
    match id.len() <= MAX_NAME_BYTES && id.is_ascii() {
        true => Ok(()),
        false => Err(ApiFault::Name(MAX_NAME_BYTES)),
    }
}
