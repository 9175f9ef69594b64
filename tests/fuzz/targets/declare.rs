//! Any declarations: see `harness/declare.rs`.
#![no_main]

#[path = "../harness/bytes.rs"]
mod bytes;
#[path = "../harness/declare.rs"]
mod declare;

libfuzzer_sys::fuzz_target!(|data: &[u8]| declare::run(data));
