//! The device table over the fake driver.

mod gpu;
mod rules;

use super::super::common::fake::Fake;
use super::super::common::scratch;
use rules::Raw;

#[test]
fn the_fake_keeps_the_rules_of_the_real_driver() {
    for devices in [1, 2] {
        let fake = Fake::new(&scratch("rules"), "libcuda.so.1");
        fake.devices(devices);
        rules::assert_kept(&rules::answers(&Raw::open(fake.path())));
    }
}

#[test]
fn the_fake_fails_after_an_illegal_address_as_the_real_driver_does() {
    let fake = Fake::new(&scratch("rules-700"), "libcuda.so.1");
    let answers = rules::answers_after_700(&Raw::open(fake.path()), |_| fake.poison(0, 700));
    rules::assert_kept_after_700(&answers);
}
