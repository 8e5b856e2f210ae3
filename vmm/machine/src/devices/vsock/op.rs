//! Packet operations.

pub(super) const REQUEST: u16 = 1;
pub(super) const RESPONSE: u16 = 2;
pub(super) const RST: u16 = 3;
pub(super) const SHUTDOWN: u16 = 4;
pub(super) const RW: u16 = 5;
pub(super) const CREDIT_UPDATE: u16 = 6;
pub(super) const CREDIT_REQUEST: u16 = 7;
