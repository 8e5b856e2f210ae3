//! Frames of zeros, which are neither stored nor sent.

use driftline_dirty_tracker::PAGE_SIZE;

/// A frame of zeros.
static ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

/// Returns whether `bytes`, one frame or a part of it, are all zeros. Returns `false` for more
/// bytes than a frame has.
///
/// ```
/// let mut frame = [0; 4096];
/// assert!(driftline_format::is_zero(&frame));
/// frame[4095] = 1;
/// assert!(!driftline_format::is_zero(&frame));
/// assert!(driftline_format::is_zero(&frame[..512]));
/// ```
pub fn is_zero(bytes: &[u8]) -> bool {
    ZEROS.get(..bytes.len()) == Some(bytes)
}
