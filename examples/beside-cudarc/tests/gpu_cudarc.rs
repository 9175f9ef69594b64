//! On a host with a GPU: a learner that is written with cudarc, beside a feed. Without one the test prints
//! `skipped: no CUDA device` and why; with `PINRING_GPU_REQUIRED` set that is a failure.

use pinring::{CudaSearch, probe_cuda};

#[test]
fn kernels_of_cudarc_run_on_batches() {
    if let Err(error) = probe_cuda(&CudaSearch::new()) {
        assert!(std::env::var_os("PINRING_GPU_REQUIRED").is_none(), "PINRING_GPU_REQUIRED is set, and {error}");
        println!("skipped: no CUDA device: {}", error.to_string().lines().next().unwrap_or_default());
        return;
    }
    // cudarc first, then the feed; and again in the same process, when both have been there.
    for batches in [1, 300] {
        let (found, expected) = beside_cudarc::run(batches).unwrap();
        assert_eq!(found, expected, "{batches} batches");
        assert_eq!(found.len(), batches);
    }
}
