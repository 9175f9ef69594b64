//! Any calls of the mapped allocator's C functions: see `harness/allocator.rs`.
#![no_main]

#[path = "../harness/allocator.rs"]
mod allocator;
#[path = "../harness/bytes.rs"]
mod bytes;
#[path = "../../common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|data: &[u8]| allocator::run(data));
