//! Feature bits of HELLO: what an end offers beyond the messages that every end understands.

/// A migration may have more than one connection.
pub(crate) const SEVERAL_CONNECTIONS: u64 = 1;
/// Contents may be PACKED.
pub(crate) const PACKED_CONTENTS: u64 = 2;
/// This end answers VERIFY.
pub(crate) const MEMORY_DIGEST: u64 = 4;
/// Long runs may be sent as FRAMES.
pub(crate) const DIRECT_FRAMES: u64 = 8;
/// Disks can be copied (DRIVES and its messages).
pub(crate) const COPIES_DRIVES: u64 = 16;
/// The state may precede the last pass.
pub(crate) const EARLY_STATE: u64 = 32;
/// This end understands STATE_WHOLE.
pub(crate) const WHOLE_STATE: u64 = 64;
/// Guest memory is taken over by descriptors (MEMORY). Offered only over a unix socket without TLS,
/// which can carry descriptors.
pub(crate) const LOCAL: u64 = 128;
/// The guest's devices are taken over with their open files (FILES). Offered where [`LOCAL`] is.
pub(crate) const DEVICE_FILES: u64 = 256;
/// This end understands STATE_HEADS.
pub(crate) const STATE_HEADS: u64 = 512;
/// All features that this program offers over any connection.
pub(crate) const FEATURES: u64 = SEVERAL_CONNECTIONS
    | PACKED_CONTENTS
    | MEMORY_DIGEST
    | DIRECT_FRAMES
    | COPIES_DRIVES
    | EARLY_STATE
    | WHOLE_STATE
    | STATE_HEADS;
