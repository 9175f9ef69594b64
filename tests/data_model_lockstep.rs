//! Lockstep: row i is lane i, every batch holds every lane, and the versions are functions of the batch alone.

mod common;
#[path = "common/data.rs"]
mod data;
#[path = "common/drive.rs"]
mod drive;

use common::Watchdog;
use data::Shape;
use drive::{Setup, cases, run};
use pinring::WhenFull;
use proptest::prelude::*;
use std::time::Duration;

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn every_row_in_its_place(
        steps in 0usize..6,
        time_major: bool,
        layers in 1usize..4,
        buffers in 1usize..5,
        writers in prop::collection::vec(1usize..5, 1..5),
        attempts in 1u64..70,
        lag in prop::option::of(0u64..3),
        ends in 0u64..30,
        trouble in 0u64..20,
        seed: u64,
    ) {
        let _watchdog = Watchdog::new("lockstep against the model", Duration::from_secs(180));
        let shape = Shape { steps, time_major: time_major && steps > 0, within_episode: false };
        let batch = layers * writers.iter().sum::<usize>();
        let when_full = WhenFull::Block;
        run(Setup { shape, batch, buffers, writers, attempts, when_full, lag, lockstep: true, ends, trouble, seed });
    }
}
