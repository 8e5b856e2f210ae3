//! The harness of the whole-system tests.
