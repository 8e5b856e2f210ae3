//! Feature bits of HELLO: what an end offers beyond the first version of the protocol.

/// A feature bit of HELLO: a migration may have more than one connection.
pub(crate) const SEVERAL_CONNECTIONS: u64 = 1;
/// A feature bit of HELLO: contents may be PACKED.
pub(crate) const PACKED_CONTENTS: u64 = 2;
/// A feature bit of HELLO: this end answers VERIFY.
pub(crate) const MEMORY_DIGEST: u64 = 4;
/// A feature bit of HELLO: long runs may be sent as FRAMES.
pub(crate) const DIRECT_FRAMES: u64 = 8;
/// A feature bit of HELLO: disks can be copied (DRIVES and its messages).
pub(crate) const COPIES_DRIVES: u64 = 16;
/// A feature bit of HELLO: the state may precede the last pass.
pub(crate) const EARLY_STATE: u64 = 32;
/// A feature bit of HELLO: this end understands STATE_WHOLE.
pub(crate) const WHOLE_STATE: u64 = 64;
/// Feature bits of HELLO that this program offers.
pub(crate) const FEATURES: u64 = SEVERAL_CONNECTIONS
    | PACKED_CONTENTS
    | MEMORY_DIGEST
    | DIRECT_FRAMES
    | COPIES_DRIVES
    | EARLY_STATE
    | WHOLE_STATE;
