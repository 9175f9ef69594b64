//! The real CUDA runtimes of the wheels, on a host without a GPU: they load, and say that there is no driver.
//!
//! `PINRING_CUDART12` and `PINRING_CUDART13` name the two files: `libcudart.so.12` out of the wheel
//! `nvidia-cuda-runtime-cu12` 12.x, `libcudart.so.13` out of `nvidia-cuda-runtime` 13.x. Without them, and on a host
//! with a driver, the tests say that they are skipped.
#![cfg(target_os = "linux")]

mod common;

use common::{alone, is_child, scratch};
use pinring::{CudaFindError, CudaSearch, Outcome, Rung, probe_cuda};
use std::path::PathBuf;

/// What such a host answers to everything.
const ANSWER: &str = "returned 35 cudaErrorInsufficientDriver \
                      (CUDA driver version is insufficient for CUDA runtime version)";

/// The two real files, or `None` and a word about why not.
fn runtimes(test: &str) -> Option<[PathBuf; 2]> {
    let skip = |why: &str| println!("skipped: {test}: {why}");
    let files = ["PINRING_CUDART13", "PINRING_CUDART12"].map(std::env::var_os);
    let [Some(cu13), Some(cu12)] = files else {
        skip("PINRING_CUDART12 and PINRING_CUDART13 do not name the runtimes of the wheels");
        return None;
    };
    if std::path::Path::new("/dev/nvidiactl").exists() {
        skip("this host has a GPU's driver");
        return None;
    }
    Some([cu13.into(), cu12.into()])
}

#[test]
fn each_real_runtime_says_that_the_driver_is_missing() {
    const TEST: &str = "each_real_runtime_says_that_the_driver_is_missing";
    let Some(files) = runtimes(TEST) else { return };
    for (file, major) in files.iter().zip([13, 12]) {
        let failure = probe_cuda(&CudaSearch::new().library_only(file)).unwrap_err();
        let CudaFindError::Init { error, library, runtime_version, driver_version, candidates } = &failure else {
            panic!("{failure}");
        };
        assert!(error.to_string().starts_with(&format!("cudaFree(0) {ANSWER}; ")), "{error}");
        assert_eq!((runtime_version / 1000, *driver_version), (major, 0));
        assert_eq!((library, candidates.len()), (file, 1));
        assert!(failure.to_string().contains("no driver"), "{failure}");
    }
}

#[test]
fn real_wheels_in_an_environment_are_both_tried() {
    const TEST: &str = "real_wheels_in_an_environment_are_both_tried";
    let Some([cu13, cu12]) = runtimes(TEST) else { return };
    if !is_child(TEST) {
        let dir = scratch(TEST);
        let site = dir.join("lib/python3.12/site-packages/nvidia");
        for (file, folder) in [(&cu13, "cu13/lib"), (&cu12, "cuda_runtime/lib")] {
            let folder = site.join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::copy(file, folder.join(file.file_name().unwrap())).unwrap();
        }
        alone(TEST, |child| {
            child.env("VIRTUAL_ENV", &dir);
        });
        return;
    }
    let failure = probe_cuda(&CudaSearch::new()).unwrap_err();
    let asked: Vec<_> = failure
        .candidates()
        .iter()
        .filter(|c| matches!(c.outcome(), Outcome::Refused(error) if error.code() == 35))
        .map(|c| (c.rung(), c.path().unwrap().file_name().unwrap().to_str().unwrap()))
        .collect();
    assert_eq!(asked, [(Rung::InstalledWheels, "libcudart.so.13"), (Rung::InstalledWheels, "libcudart.so.12")]);
    // The loader knows both by name now: they are not asked again.
    let again = failure.candidates().iter().filter(|c| c.to_string().contains("it is the same library as")).count();
    assert_eq!(again, 2, "{failure}");
    assert_eq!(failure.to_string().matches(ANSWER).count(), 3, "{failure}");
    println!("{failure}");
}
