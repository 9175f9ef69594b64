//! When the ring is full and the feed does not wait: rows are dropped whole, each drop is counted once, and what is
//! delivered is right.

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
    fn drops_are_whole_and_counted(
        steps in 0usize..5,
        within_episode: bool,
        batch in 1usize..10,
        buffers in 1usize..4,
        writers in prop::collection::vec(1usize..6, 1..4),
        attempts in 1u64..120,
        when_full in prop::sample::select(vec![
            WhenFull::Fail,
            WhenFull::DropNewest,
            WhenFull::Timeout(Duration::from_micros(300)),
        ]),
        seed: u64,
    ) {
        let _watchdog = Watchdog::new("full rings against the model", Duration::from_secs(180));
        let shape = Shape { steps, time_major: false, within_episode: within_episode && steps > 0 };
        let (ends, trouble, lag) = (15, 8, None);
        run(Setup { shape, batch, buffers, writers, attempts, when_full, lag, lockstep: false, ends, trouble, seed });
    }
}
