//! Arbitrary passes, for the tests of the policies.

use std::time::Duration;

use proptest::prelude::*;

use super::convergence::PassMeasurement;

/// Returns fewer than `most` passes.
pub(super) fn passes(most: usize) -> impl Strategy<Value = Vec<PassMeasurement>> {
    let pass = (0u64..1 << 22, 0u64..1 << 34, 0u64..10_000_000, 0u64..1 << 22).prop_map(
        |(frames, bytes, us, dirtied)| PassMeasurement {
            frames,
            bytes,
            time: Duration::from_micros(us),
            dirtied,
        },
    );
    prop::collection::vec(pass, 0..most)
}
