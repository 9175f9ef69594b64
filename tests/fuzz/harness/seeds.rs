//! Inputs from fixed seeds, for a compiler without a fuzzer.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Runs `run` on so many inputs of at most so many bytes. `PINRING_FUZZ_INPUTS` gives another number of them;
/// `PINRING_FUZZ_INPUT` names a file that is the only one.
pub fn each(inputs: u64, most: usize, run: impl Fn(&[u8])) {
    if let Some(path) = std::env::var_os("PINRING_FUZZ_INPUT") {
        let input = std::fs::read(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()));
        return run(&input);
    }
    let inputs = std::env::var("PINRING_FUZZ_INPUTS").map_or(inputs, |text| text.parse().expect("a number of inputs"));
    for seed in 0..inputs {
        let mut state = seed;
        let mut next = || {
            // Splitmix64.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            mixed ^ (mixed >> 31)
        };
        let length = next() as usize % (most + 1);
        let input: Vec<u8> = (0..length).map(|_| (next() >> 32) as u8).collect();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&input))) {
            eprintln!("seed {seed}, the input: {input:?}");
            resume_unwind(panic);
        }
    }
}
