//! Any file of a saved store: see `harness/checkpoint.rs`.
#![no_main]

#[path = "../harness/bytes.rs"]
mod bytes;
#[path = "../harness/checkpoint.rs"]
mod checkpoint;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checkpoint::run(data));
