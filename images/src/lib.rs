//! The guests that Driftline brings along.
