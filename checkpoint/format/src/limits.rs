//! Sizes of header and record, and limits of a guest's state. The limits hold for store and wire:
//! what can be stored can be sent.

/// Length of a header, in bytes.
pub const HEADER_LEN: usize = 64;
/// Length of a record's head, in bytes.
pub const RECORD_HEAD_LEN: usize = 24;

/// Maximum number of memory slots of a guest.
pub const MAX_SLOTS: u32 = 1024;
/// Maximum length of a guest's configuration, in bytes.
pub const MAX_CONFIG: u32 = 64 << 10;
/// Maximum length of one state section, in bytes.
pub const MAX_SECTION: u32 = 4 << 20;
/// Maximum number of state sections of a guest.
pub const MAX_SECTIONS: u32 = 4096;
/// Maximum length of all state sections of a guest, in bytes.
pub const MAX_STATE: u64 = 64 << 20;
