//! Fuzzes a store whose log is arbitrary bytes, as they are and with corrected checksums.
#![no_main]

mod common;

use libfuzzer_sys::fuzz_target;
use driftline_store::testing::reseal_log;

fuzz_target!(|bytes: &[u8]| {
    common::check(common::store_with("log-2", bytes));
    let mut sealed = bytes.to_vec();
    reseal_log(&mut sealed);
    common::check(common::store_with("log-2", &sealed));
});
