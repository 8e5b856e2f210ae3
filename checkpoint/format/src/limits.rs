//! Sizes of header and record, and limits of a guest's state: what can be stored can be sent.

/// Bytes in a header.
pub const HEADER_LEN: usize = 64;
/// Bytes in a record's head.
pub const RECORD_HEAD_LEN: usize = 24;

/// Most memory slots of a guest.
pub const MAX_SLOTS: u32 = 1024;
/// Most bytes of a guest's configuration.
pub const MAX_CONFIG: u32 = 64 << 10;
/// Most bytes of one state section.
pub const MAX_SECTION: u32 = 4 << 20;
/// Most state sections of a guest.
pub const MAX_SECTIONS: u32 = 4096;
/// Most bytes of all state sections of a guest.
pub const MAX_STATE: u64 = 64 << 20;
