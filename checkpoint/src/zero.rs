//! Frames of zeros, which are neither stored nor sent.

use dirty_tracker::PAGE_SIZE;

/// A frame of zeros.
pub(crate) static ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

/// Whether `frame`, the bytes of one frame, is all zeros.
///
/// ```
/// let mut frame = [0; 4096];
/// assert!(checkpoint::is_zero(&frame));
/// frame[4095] = 1;
/// assert!(!checkpoint::is_zero(&frame));
/// ```
pub fn is_zero(frame: &[u8]) -> bool {
    frame == ZEROS
}
