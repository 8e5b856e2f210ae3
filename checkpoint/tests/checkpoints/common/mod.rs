//! Guests and stores that several modules of these tests share.

pub mod scripted;
pub mod small;
pub mod stored;
