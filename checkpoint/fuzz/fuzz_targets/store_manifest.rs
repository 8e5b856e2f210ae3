//! Fuzzes a store whose manifest is arbitrary bytes, as they are and with corrected checksums.
#![no_main]

mod common;

use libfuzzer_sys::fuzz_target;
use driftline_store::testing::reseal_manifest;

fuzz_target!(|bytes: &[u8]| {
    common::check(common::store_with("manifest", bytes));
    let mut sealed = bytes.to_vec();
    reseal_manifest(&mut sealed);
    common::check(common::store_with("manifest", &sealed));
});
