//! The pace against whole-number arithmetic, and what it promises under any schedule.

use super::*;
use proptest::prelude::*;

const ROOMY: Setting = Setting { capacity: 1 << 40, batch: 1, ahead: 1, lanes: 1, times: None };

/// Fractions, so that everything can be reckoned in whole numbers: rate and tolerance.
#[derive(Clone, Copy, Debug)]
struct Naive {
    min_size: u64,
    rate: (u64, u64),
    tolerance: (u64, u64),
    setting: Setting,
    inserted: u64,
    sampled: u64,
    reserved: u64,
}

impl Naive {
    /// Rows due, times the denominators of rate and tolerance.
    fn due(&self) -> i128 {
        i128::from(self.rate.0 * self.inserted.saturating_sub(self.min_size) * self.tolerance.1)
    }
    fn scaled(&self, rows: u64) -> i128 {
        i128::from(rows * self.rate.1 * self.tolerance.1)
    }
    fn room(&self) -> i128 {
        i128::from(self.tolerance.0 * self.rate.0 * self.min_size.max(1))
    }
    fn may_insert(&self) -> bool {
        let Setting { batch, lanes, .. } = self.setting;
        if self.inserted < self.min_size {
            true
        } else if self.tolerance.0 == 0 {
            self.due() < self.scaled(self.sampled + self.reserved + batch)
        } else {
            let of_a_step = i128::from(self.rate.0 * lanes * self.tolerance.1);
            self.due() + of_a_step <= self.scaled(self.sampled) + self.room()
        }
    }
    fn may_select(&self) -> bool {
        self.inserted >= self.min_size
            && self.scaled(self.sampled + self.reserved + self.setting.batch) <= self.due() + self.room()
    }
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Insert,
    Select,
    HandOver,
    GiveBack,
}

fn naive() -> impl Strategy<Value = Naive> {
    let rate = (1u64..20, prop::sample::select(vec![1u64, 2, 3, 4, 7, 10]));
    let tolerance = (0u64..8, prop::sample::select(vec![1u64, 2, 10]));
    (0u64..40, rate, tolerance, 1u64..20, 0u64..4, 1u64..9).prop_map(
        |(min_size, rate, tolerance, batch, ahead, lanes)| {
            let setting = Setting { batch, ahead, lanes, ..ROOMY };
            Naive { min_size, rate, tolerance, setting, inserted: 0, sampled: 0, reserved: 0 }
        },
    )
}

fn pacer(naive: &Naive) -> Result<Pacer, PaceError> {
    let fraction = |(above, below): (u64, u64)| above as f64 / below as f64;
    let pace = Pace::min_size(naive.min_size).samples_per_insert(fraction(naive.rate), fraction(naive.tolerance));
    pace.pacer(naive.setting)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every answer is that of whole numbers; the promised range is kept; and someone can always go on.
    #[test]
    fn the_pace_answers_like_whole_numbers_keeps_its_range_and_never_stalls(
        naive in naive(),
        acts in prop::collection::vec(prop::sample::select(vec![Act::Insert, Act::Insert, Act::Select, Act::Select,
            Act::HandOver, Act::HandOver, Act::GiveBack]), 1..300),
        wide in prop::collection::vec(any::<u64>(), 300),
    ) {
        let mut naive = naive;
        let setting = naive.setting;
        let Ok(mut pacer) = pacer(&naive) else {
            // Refused: half the room on both sides together is too small for what has to fit.
            let of_a_step = i128::from(naive.rate.0 * setting.lanes * naive.tolerance.1);
            let ready = naive.scaled(setting.ahead.max(1) * setting.batch);
            prop_assert!(naive.tolerance.0 > 0);
            prop_assert!(naive.room() < of_a_step || 2 * naive.room() < of_a_step + ready);
            return Ok(());
        };
        for (act, wide) in acts.into_iter().zip(wide) {
            let (may_insert, may_select) = (naive.may_insert(), naive.may_select());
            prop_assert_eq!(pacer.insert_waits(u64::MAX).is_none(), may_insert, "{:?}", naive);
            prop_assert_eq!(pacer.select_waits(setting.batch, naive.inserted).is_none(), may_select, "{:?}", naive);
            prop_assert!(may_insert || may_select || naive.reserved > 0, "everybody waits: {:?}", naive);
            match act {
                Act::Insert if may_insert => {
                    let steps = 1 + wide % setting.lanes;
                    pacer.insert(steps);
                    naive.inserted += steps;
                }
                Act::Select if may_select && naive.reserved < setting.ahead.max(1) * setting.batch => {
                    pacer.reserve(setting.batch);
                    naive.reserved += setting.batch;
                }
                Act::HandOver if naive.reserved > 0 => {
                    pacer.hand_over(setting.batch);
                    naive.reserved -= setting.batch;
                    naive.sampled += setting.batch;
                }
                Act::GiveBack if naive.reserved > 0 => {
                    pacer.give_back(setting.batch);
                    naive.reserved -= setting.batch;
                }
                _ => {}
            }
            let behind = naive.due() - naive.scaled(naive.sampled);
            if naive.tolerance.0 > 0 {
                prop_assert!(behind.abs() <= naive.room() || naive.inserted < naive.min_size + setting.lanes);
            } else {
                let step = i128::from(naive.rate.0 * setting.lanes);
                prop_assert!(behind >= 0 || naive.inserted <= naive.min_size, "ahead of what was due");
                prop_assert!(behind <= naive.scaled((setting.ahead.max(1) + 1) * setting.batch) + step * i128::from(naive.tolerance.1));
            }
        }
    }

    /// What waiting says is what ends the wait: so many steps more, and not one less.
    #[test]
    fn the_steps_that_a_batch_waits_for_are_exact(naive in naive(), inserted in 0u64..200) {
        let Ok(mut pacer) = pacer(&naive) else { return Ok(()) };
        pacer.insert(inserted.max(naive.min_size));
        while pacer.select_waits(naive.setting.batch, u64::MAX).is_none() {
            pacer.reserve(naive.setting.batch);
            pacer.hand_over(naive.setting.batch);
        }
        let wait = pacer.select_waits(naive.setting.batch, u64::MAX);
        let Some(PaceWait::ForWriters { steps, .. }) = wait else { panic!("{wait:?}") };
        pacer.insert(steps - 1);
        prop_assert!(pacer.select_waits(naive.setting.batch, u64::MAX).is_some());
        pacer.insert(1);
        prop_assert!(pacer.select_waits(naive.setting.batch, u64::MAX).is_none());
    }

    /// Saved and restored under the same pace nothing changes; under any other somebody can go on at once.
    #[test]
    fn a_restored_pace_goes_on_and_never_blocks_both_sides(naive in naive(), other in self::naive(), rounds in 0usize..60) {
        let (Ok(mut before), Ok(mut after)) = (pacer(&naive), pacer(&other)) else { return Ok(()) };
        for _ in 0..rounds {
            if before.select_waits(naive.setting.batch, before.inserted).is_none() {
                before.reserve(naive.setting.batch);
                before.hand_over(naive.setting.batch);
            } else if before.insert_waits(u64::MAX).is_none() {
                before.insert(1);
            }
        }
        let (inserted, behind) = before.saved();
        let mut same = pacer(&naive).unwrap();
        same.restore(inserted, behind);
        prop_assert_eq!(&same, &before);
        after.restore(inserted, behind);
        let waits = (after.insert_waits(u64::MAX), after.select_waits(other.setting.batch, u64::MAX));
        prop_assert!(waits.0.is_none() || waits.1.is_none(), "{:?} {:?}", after, waits);
    }
}

#[test]
fn strict_order_selects_each_batch_at_one_count_of_steps_however_many_lie_ready() {
    for ahead in [1, 4] {
        let setting = Setting { batch: 32, ahead, ..ROOMY };
        let mut pacer = Pace::min_size(10).samples_per_insert(8.0, 0.0).pacer(setting).unwrap();
        let mut selected = Vec::new();
        for _ in 0..100 {
            if pacer.select_waits(32, pacer.inserted).is_none() {
                assert!(pacer.insert_waits(u64::MAX).is_some(), "a batch is due: no step before it");
                pacer.reserve(32);
                selected.push(pacer.inserted);
            } else {
                pacer.insert(1);
            }
            if pacer.reserved == 32 * ahead {
                pacer.hand_over(32); // a learner that takes what lies ready late
            }
        }
        assert_eq!(selected, (0..selected.len() as u64).map(|n| 14 + 4 * n).collect::<Vec<_>>());
    }
}

#[test]
fn a_batch_that_is_never_handed_over_can_be_selected_again() {
    let mut pacer = Pace::min_size(0).updates_per_step(1.0, 0.0).pacer(Setting { batch: 4, ..ROOMY }).unwrap();
    pacer.insert(1);
    assert_eq!(pacer.select_waits(4, 1), None);
    pacer.reserve(4);
    let wait = pacer.select_waits(4, 1).unwrap();
    assert_eq!(wait, PaceWait::ForWriters { inserted: 1, sampled: 0, ready: 4, steps: 1 });
    pacer.give_back(4);
    assert_eq!(pacer.select_waits(4, 1), None);
}

#[test]
fn a_pace_that_can_never_be_met_is_refused_with_numbers() {
    let pacer = |pace: Pace, setting| pace.pacer(setting).unwrap_err();
    let small = Setting { capacity: 8, ..ROOMY };
    assert_eq!(pacer(Pace::min_size(10), small), PaceError::MinSize { min_size: 10, capacity: 8 });
    assert_eq!(pacer(Pace::min_size(0).samples_per_insert(0.0, 0.1), ROOMY), PaceError::Rate { rate: 0.0 });
    let tolerance = pacer(Pace::min_size(0).updates_per_step(1.0, -0.1), ROOMY);
    assert_eq!(tolerance, PaceError::Tolerance { tolerance: -0.1 });
    let once = Setting { times: Some(1), ..ROOMY };
    assert_eq!(pacer(Pace::min_size(0).samples_per_insert(2.0, 0.0), once), PaceError::Times { rate: 2.0, times: 1 });

    let setting = Setting { batch: 512, ahead: 3, lanes: 16, ..ROOMY };
    let tight = Pace::min_size(1000).samples_per_insert(8.0, 0.05);
    let PaceError::TooTight { rows, needs, least, .. } = pacer(tight, setting) else { panic!() };
    assert_eq!((rows, needs, least), (400.0, 832.0, 0.104));
    assert!(Pace::min_size(1000).samples_per_insert(8.0, 0.104).pacer(setting).is_ok());
    assert!(Pace::min_size(1000).samples_per_insert(8.0, 0.0).pacer(setting).is_ok());
    let text = pacer(tight, setting).to_string();
    for number in ["0.05", "400", "3 batches of 512", "16 lanes", "832", "0.104"] {
        assert!(text.contains(number), "{number}: {text}");
    }
}

#[test]
fn with_one_row_a_step_and_no_learner_writers_stop_and_say_why() {
    let mut pacer = Pace::min_size(2).samples_per_insert(1.0, 1.0).pacer(ROOMY).unwrap();
    while pacer.insert_waits(u64::MAX).is_none() {
        pacer.insert(1);
    }
    assert_eq!(pacer.inserted, 4);
    let text = pacer.insert_waits(u64::MAX).unwrap().to_string();
    assert_eq!(text, "the pace waits for the learner: by 4 steps inserted 2 rows are due; it took 0, and 0 lie ready");
    pacer.clear();
    assert_eq!(pacer.insert_waits(u64::MAX), None);
    assert_eq!(pacer.select_waits(1, 1), Some(PaceWait::ForMinSize { have: 1, need: 2 }));
}
