//! Names of devices.

use super::error::ConfigError;

/// Maximum length of a device's name, in bytes.
pub const MAX_ID_BYTES: usize = 64;

/// Returns `id` if it is a valid name.
pub(super) fn check_id(id: &str) -> Result<String, ConfigError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if id.is_empty() || id.len() > MAX_ID_BYTES || !id.chars().all(allowed) {
        let form = format!("it has 1 to {MAX_ID_BYTES} letters, digits, - and _");
        return Err(ConfigError::malformed("name of a device", id, form));
    }
    Ok(id.to_owned())
}
