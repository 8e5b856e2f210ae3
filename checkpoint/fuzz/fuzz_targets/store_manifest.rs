//! Fuzzes a store whose manifest is arbitrary bytes, as they are and with corrected checksums.
#![no_main]

mod common;

use driftline_store::testing::correct_manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    common::check(common::store_with("manifest", bytes));
    let mut corrected = bytes.to_vec();
    correct_manifest(&mut corrected);
    common::check(common::store_with("manifest", &corrected));
});
