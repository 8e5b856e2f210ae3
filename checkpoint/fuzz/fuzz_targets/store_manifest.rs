//! A store whose manifest is arbitrary bytes: as they are, and with checksums made right.
#![no_main]

mod common;

use driftline_checkpoint::testing::reseal_manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    common::check(common::store_with("manifest", bytes));
    let mut sealed = bytes.to_vec();
    reseal_manifest(&mut sealed);
    common::check(common::store_with("manifest", &sealed));
});
