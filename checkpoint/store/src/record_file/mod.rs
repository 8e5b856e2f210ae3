//! Files of a header and records, without sectors: archives, and the states of snapshots. Both have
//! a guest's layout, configuration and state in the same records, and end with totals that detect a
//! truncated file.

pub(crate) mod contents;
#[cfg(feature = "testing")]
pub(crate) mod correct;
pub(crate) mod front;
pub(crate) mod output;
pub(crate) mod records;
pub(crate) mod state;
pub(crate) mod walk;
