//! Fuzzes a store whose page file is arbitrary bytes, as they are and with corrected checksums.
#![no_main]

mod common;

use libfuzzer_sys::fuzz_target;
use driftline_store::testing::reseal_pages;

fuzz_target!(|bytes: &[u8]| {
    common::check(common::store_with("pages-2", bytes));
    let mut sealed = bytes.to_vec();
    reseal_pages(&mut sealed);
    common::check(common::store_with("pages-2", &sealed));
});
