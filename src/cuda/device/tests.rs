//! The device table over the fake driver and over tables of Rust functions; on real hardware in `gpu`.

mod attach;
mod calls;
mod capture;
mod ends;
mod gpu;
mod rules;
mod table;

use super::super::common::fake::{Fake, Hazards};
use super::super::common::scratch;
use super::Device;
use crate::cuda::types::CudaSearch;

/// A fake with so many devices, and the search that finds its driver.
fn fake(test: &str, devices: i32) -> (Fake, CudaSearch) {
    let fake = Fake::new(&scratch(test), "libcuda.so.1");
    fake.devices(devices);
    let search = CudaSearch::new().driver(fake.path());
    (fake, search)
}

/// The same with device 0 attached.
fn attached(test: &str) -> (Fake, Device) {
    let (fake, search) = fake(test, 1);
    let device = Device::attach(&search, 0).unwrap();
    (fake, device)
}

/// Everything was given back, and nothing happened that should not.
fn assert_nothing_is_left(fake: &Fake) {
    assert_eq!(fake.live_streams(), []);
    assert_eq!(fake.live_events(), []);
    assert_eq!(fake.live_allocations(), []);
    assert_eq!(fake.retained(0), 0);
    assert_eq!((fake.contexts(), fake.capture_mode()), (0, 0), "the calling thread is as it was");
    assert_eq!(fake.hazards(), Hazards::default());
}

/// Page-locked memory of a test, which outlives what is queued.
struct Locked<'a> {
    fake: &'a Fake,
    bytes: Vec<u8>,
}

impl<'a> Locked<'a> {
    fn new(fake: &'a Fake, bytes: Vec<u8>) -> Locked<'a> {
        let mut locked = Locked { fake, bytes };
        let code = locked.elsewhere(|fake, bytes| fake.foreign_register(bytes.as_mut_ptr(), bytes.len()));
        assert_eq!(code, 0);
        locked
    }

    /// On a thread of its own, since a runtime makes a context current on the thread that calls it.
    fn elsewhere(&mut self, call: impl FnOnce(&Fake, &mut [u8]) -> i32 + Send) -> i32 {
        let (fake, bytes) = (self.fake, &mut self.bytes[..]);
        std::thread::scope(|s| s.spawn(move || call(fake, bytes)).join().unwrap())
    }

    fn at(&mut self, offset: usize) -> *mut u8 {
        self.bytes[offset..].as_mut_ptr()
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.elsewhere(|fake, bytes| fake.foreign_unregister(bytes.as_mut_ptr()));
    }
}

#[test]
fn the_fake_keeps_the_rules_of_the_real_driver() {
    for devices in [1, 2] {
        let (fake, _) = fake("rules", devices);
        rules::assert_kept(&rules::answers(&rules::Raw::open(fake.path())));
    }
}

#[test]
fn the_fake_fails_after_an_illegal_address_as_the_real_driver_does() {
    let (fake, _) = fake("rules-700", 1);
    let answers = rules::answers_after_700(&rules::Raw::open(fake.path()), |_| fake.poison(0, 700));
    rules::assert_kept_after_700(&answers);
}
