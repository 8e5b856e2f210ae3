//! Fuzzes a store whose page file is arbitrary bytes, as they are and with corrected checksums.
#![no_main]

mod common;

use driftline_store::testing::correct_pages;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    common::check(common::store_with("pages-2", bytes));
    let mut corrected = bytes.to_vec();
    correct_pages(&mut corrected);
    common::check(common::store_with("pages-2", &corrected));
});
