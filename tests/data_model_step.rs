//! Single steps: whatever writers and learner do, every committed row is delivered once, as it was written.

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
    #![proptest_config(cases(48))]

    #[test]
    fn every_row_once_as_it_was_written(
        batch in 1usize..14,
        buffers in 1usize..5,
        writers in prop::collection::vec(1usize..9, 1..5),
        attempts in 1u64..60,
        ends in 0u64..30,
        trouble in 0u64..20,
        seed: u64,
    ) {
        let _watchdog = Watchdog::new("single steps against the model", Duration::from_secs(180));
        let (shape, when_full) = (Shape::STEP, WhenFull::Block);
        run(Setup { shape, batch, buffers, writers, attempts, when_full, lag: None, lockstep: false, ends, trouble, seed });
    }
}
