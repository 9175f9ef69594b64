//! Random declarations, from fixed seeds: the stable form of the fuzz target `declare` (`tests/fuzz`).

#[path = "fuzz/harness/bytes.rs"]
mod bytes;
mod common;
#[path = "fuzz/harness/declare.rs"]
mod declare;
#[path = "fuzz/harness/seeds.rs"]
mod seeds;

use common::Watchdog;
use pinring::*;
use std::time::Duration;

#[test]
fn any_declaration_is_refused_or_lies_as_the_formula_says() {
    let _watchdog = Watchdog::new("random declarations", Duration::from_secs(500));
    seeds::each(2000, 120, declare::run);
}

/// A mistake is told when the feed is built; until then everything that asks about the declarations answers.
#[test]
fn what_will_be_refused_can_still_be_asked_about() {
    let mut step = Step::new();
    let huge = step.leaf::<f32>("huge", &[usize::MAX, 3]);
    step.reward(huge);
    let info = &step.leaves()[0];
    assert_eq!((info.elements(), info.bytes()), (usize::MAX, usize::MAX));
    let mut sample = Sample::sequence(step, 4, 1);
    sample.window(huge, i32::MIN..i32::MAX, Pad::Zeros);
    assert!(matches!(sample.find::<f32>("huge"), Err(SchemaError::Missing { .. })));
    assert!(matches!(sample.check(), Err(SchemaError::Overflow { .. })));
}

/// Sums of counts do not overflow, whatever each of them is.
#[test]
fn more_batches_ahead_than_can_be_counted_are_refused() {
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[]);
    let mut sample = Sample::transition(step, 1, 0.5);
    sample.at(obs, 0);
    // The second is a count; there is no such device.
    for ahead in [usize::MAX, u32::MAX as usize] {
        let feed = Feed::builder(sample.clone()).batch(1).lanes(1).replay(8, Uniform::new()).device(0).prefetch(ahead);
        let error = feed.cuda(CudaSearch::new().driver("/no/such/driver")).start().expect_err("too many");
        assert!(ahead == u32::MAX as usize || error.to_string().contains("`prefetch("), "{error}");
    }
}

/// The longest sequence that may be declared, and the widest window: laid out in a time that follows their length.
#[test]
fn the_longest_sequence_is_laid_out() {
    let _watchdog = Watchdog::new("the longest sequence", Duration::from_secs(100));
    const MOST: usize = 1 << 20;
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[]);
    let mut sample = Sample::sequence(step, MOST, 1);
    sample.all(obs);
    sample.window(obs, -(MOST as i32)..1, Pad::Repeat);
    let feed = Feed::builder(sample).batch(1).buffers(1).lanes(1).replay(4 * MOST, Uniform::new());
    let columns = 2 * (MOST + 1).next_multiple_of(COLUMN_ALIGN);
    assert_eq!(feed.footprint().unwrap().slot_bytes, columns.next_multiple_of(SLOT_ALIGN));
}

/// Lengths within a record are counted in 32 bits, also of leaves that are kept on some steps only.
#[cfg(target_pointer_width = "64")]
#[test]
fn a_kept_value_of_four_gibibytes_is_refused() {
    let footprint = |bytes: usize, every: usize| {
        let mut step = Step::new();
        let obs = step.observation::<u8>("obs", &[]);
        let state = step.leaf::<u8>("state", &[bytes]);
        step.every(state, every);
        let mut sample = Sample::sequence(step, 2, 2);
        sample.all(obs);
        sample.at(state, 0);
        Feed::builder(sample).batch(1).lanes(1).replay(8, Uniform::new()).footprint()
    };
    for every in [1, 2] {
        assert!(footprint((1 << 32) - 64, every).is_ok());
        for bytes in [(1 << 32) - 1, 1 << 32, (1 << 32) + 16, 5 << 32] {
            let error = footprint(bytes, every).expect_err("too large");
            assert!(error.to_string().contains("a stored step up to leaf `state`"), "{error}");
        }
    }
}
