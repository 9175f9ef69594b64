//! Random sequences of calls, from fixed seeds: the stable form of the fuzz target `allocator` (`tests/fuzz`).
#![cfg(target_os = "linux")]

#[path = "../../../tests/fuzz/harness/allocator.rs"]
mod allocator;
#[path = "../../../tests/fuzz/harness/bytes.rs"]
mod bytes;
#[path = "../../../tests/common/mod.rs"]
mod common;
#[path = "../../../tests/fuzz/harness/seeds.rs"]
mod seeds;

use common::Watchdog;
use std::time::Duration;

#[test]
fn any_sequence_of_calls_keeps_the_counts_and_leaves_nothing() {
    let _watchdog = Watchdog::new("random calls", Duration::from_secs(500));
    seeds::each(400, 400, allocator::run);
}
