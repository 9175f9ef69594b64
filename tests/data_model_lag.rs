//! The lag gate before random writers: nothing waits for what it holds up itself, whatever is dropped and whoever
//! leaves, and every row is delivered.

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
    fn the_gate_holds_nobody_for_ever(
        steps in 0usize..4,
        within_episode: bool,
        batch in 1usize..10,
        buffers in 1usize..4,
        writers in prop::collection::vec(1usize..5, 1..5),
        attempts in 1u64..60,
        lag in 0u64..3,
        when_full in prop::sample::select(vec![
            WhenFull::Block,
            WhenFull::Block,
            WhenFull::DropNewest,
            WhenFull::Fail,
            WhenFull::Timeout(Duration::from_micros(300)),
        ]),
        seed: u64,
    ) {
        let _watchdog = Watchdog::new("the lag gate against the model", Duration::from_secs(180));
        let shape = Shape { steps, time_major: false, within_episode: within_episode && steps > 0 };
        let (ends, trouble) = (15, 10);
        let lag = Some(lag);
        run(Setup { shape, batch, buffers, writers, attempts, when_full, lag, lockstep: false, ends, trouble, seed });
    }
}
