//! Unrolls of free-running lanes, in both orders of axes, through episode ends or within them: every complete unroll is
//! delivered once, with the observation after it, its flags and versions.

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
    fn every_unroll_once_as_it_was_written(
        steps in 1usize..7,
        time_major: bool,
        within_episode: bool,
        batch in 1usize..10,
        buffers in 1usize..5,
        writers in prop::collection::vec(1usize..6, 1..5),
        attempts in 1u64..80,
        ends in 0u64..30,
        trouble in 0u64..20,
        seed: u64,
    ) {
        let _watchdog = Watchdog::new("free-running unrolls against the model", Duration::from_secs(180));
        let (shape, when_full) = (Shape { steps, time_major, within_episode }, WhenFull::Block);
        run(Setup { shape, batch, buffers, writers, attempts, when_full, lag: None, lockstep: false, ends, trouble, seed });
    }
}
