//! The machine, and the `driftline` binary.
