//! On a host with a GPU: batches that it gathers from the mapped store. Without one the test prints
//! `skipped: no CUDA device` and why.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/gathered.rs"]
mod gathered;

use common::Watchdog;
use pinring::*;

#[test]
fn a_gpu_gathers_what_the_cpu_gathers_bit_by_bit() {
    match probe_cuda(&CudaSearch::new()) {
        Ok(_) => {
            let _watchdog = Watchdog::new("a_gpu_gathers_what_the_cpu_gathers_bit_by_bit", feeding::DEADLINE * 4);
            gathered::same_bit_by_bit(&CudaSearch::new(), 200);
        }
        Err(error) => {
            assert!(std::env::var_os("PINRING_GPU_REQUIRED").is_none(), "PINRING_GPU_REQUIRED is set, and {error}");
            println!("skipped: no CUDA device: {}", error.to_string().lines().next().unwrap_or_default());
        }
    }
}
