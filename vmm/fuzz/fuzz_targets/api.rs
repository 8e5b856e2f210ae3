#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| driftline_control::firecracker::fuzz_api(bytes));
