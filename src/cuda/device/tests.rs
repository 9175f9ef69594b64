//! The device table over the fake driver.
