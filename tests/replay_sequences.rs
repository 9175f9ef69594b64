//! Sequences as recurrent learners draw them: overlapping, time first, padded behind short episodes, with a recurrent
//! state that is kept where they begin and nowhere else.

mod common;

use common::Watchdog;
use pinring::*;
use std::collections::BTreeSet;
use std::time::Duration;

const LEN: usize = 6;
const EVERY: u64 = 3;

struct Recurrent {
    obs: Leaf<u32>,
    state: Leaf<f32>,
    action: Leaf<u8>,
    frames: Column<u32>,
    first: Column<f32>,
    later: Column<f32>,
    actions: Column<u8>,
    mask: Column<bool>,
    sample: Sample,
    within: bool,
}

impl Recurrent {
    fn new(within: bool) -> Recurrent {
        let mut step = Step::new();
        let obs = step.observation::<u32>("obs", &[2]);
        let state = step.observation::<f32>("state", &[2, 50]);
        let action = step.leaf::<u8>("action", &[]);
        step.every(state, EVERY as usize);
        let mut sample = Sample::sequence(step, LEN, EVERY as usize);
        sample.time_major().within_episode(within);
        if within {
            sample.pad_short(true);
        }
        let frames = sample.window(obs, -2..LEN as i32 + 1, Pad::Zeros);
        let (first, later) = (sample.at(state, 0), sample.at(state, EVERY as i32));
        let actions = sample.window(action, -1..LEN as i32, Pad::Zeros);
        let mask = sample.mask();
        Recurrent { obs, state, action, frames, first, later, actions, mask, sample, within }
    }

    fn write(&self, writer: &mut Writer, t: u32, end: bool) {
        let mut s = writer.step().unwrap();
        s.view_mut(self.obs).fill(t + 1);
        s.view_mut(self.state).fill(t as f32 + 0.5);
        s.view_mut(self.action).fill(t as u8);
        if end {
            let mut last = s.end(0, End::Truncated);
            let put = last.put(self.obs, &[1_000_000 + t; 2]).map(drop);
            assert_eq!(put.is_ok(), self.within, "not kept where sequences run through ends");
        }
        s.commit().unwrap();
    }
}

/// Within episodes and through their ends, which are the steps of `ends`.
#[test]
fn states_are_kept_where_sequences_begin() {
    let _watchdog = Watchdog::new("sparse", Duration::from_secs(60));
    for within in [true, false] {
        let this = Recurrent::new(within);
        let ends: BTreeSet<u32> = [4, 5, 13, 30, 31, 32, 50].into();
        let rows = 8;
        let builder = Feed::builder(this.sample.clone()).batch(rows).buffers(1).lanes(1).seed(4);
        let builder = builder.replay(64, WithoutReplacement::new()).pace(Pace::min_size(1));
        let footprint = builder.footprint().unwrap();
        // A record is 16 + 16 bytes, a cell 400: 13 records. Chunks of 16 have 6 cells.
        assert_eq!((footprint.record_bytes_each, footprint.store_records), (32, 7 * (16 + 6 * 13)));
        let feed = builder.start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        for t in 0..60 {
            this.write(&mut writer, t, ends.contains(&t));
        }
        let episode_of = |t: u32| ends.iter().filter(|&&end| end < t).count();
        let mut passes = Vec::new();
        let mut pass = BTreeSet::new();
        while passes.len() < 4 {
            let b = learner.next_batch().unwrap();
            for (row, first) in b.first_steps().enumerate() {
                let n = b.rows();
                let t = first as u32;
                assert_eq!(first % EVERY, 0, "it begins where the state is kept");
                assert!(b.slice(this.first)[row * 100..][..100].iter().all(|&v| v == t as f32 + 0.5), "state of {t}");
                let together = |other: u32| !within || episode_of(other) == episode_of(t);
                let last = (t..60).take_while(|&other| together(other)).last().unwrap();
                let later = if t + 3 <= last { t as f32 + 3.5 } else { 0.0 };
                assert!(b.slice(this.later)[row * 100..][..100].iter().all(|&v| v == later), "state behind {t}");
                for place in 0..LEN + 3 {
                    let at = t as i64 + place as i64 - 2;
                    let expected = match at {
                        at if at < 0 || !together((at as u32).min(last)) => 0,
                        at if at <= i64::from(last) => at as u32 + 1,
                        at if within && at == i64::from(last) + 1 => 1_000_000 + last,
                        _ => 0,
                    };
                    assert_eq!(b.slice(this.frames)[(place * n + row) * 2], expected, "frame {place} of {t}");
                }
                for place in 0..=LEN {
                    let at = t as i64 + place as i64 - 1;
                    let real = at >= 0 && at <= i64::from(last) && together(at as u32);
                    assert_eq!(b.slice(this.actions)[place * n + row], if real { at as u8 } else { 0 });
                }
                for step in 0..LEN {
                    assert_eq!(b.slice(this.mask)[step * n + row], t + step as u32 <= last);
                }
                pass.insert(first);
            }
            if b.ends_pass() {
                passes.push(std::mem::take(&mut pass));
            }
        }
        let newest = passes.pop().unwrap();
        assert!(newest.len() > 5 && newest.contains(&51), "{newest:?}");
        assert_eq!(newest.len(), feed.metrics().stored_samples);
    }
}

#[test]
fn states_that_are_not_kept_cannot_be_read() {
    let refused = |declare: &dyn Fn(&mut Step, Leaf<f32>) -> Sample| {
        let mut step = Step::new();
        let state = step.leaf::<f32>("state", &[4]);
        step.observation::<u8>("obs", &[]);
        step.every(state, 4);
        let sample = declare(&mut step, state);
        let error = sample.check().unwrap_err();
        assert!(matches!(error, SchemaError::Sparse { every: 4, .. }), "{error}");
    };
    fn with<C>(sample: Sample, declare: impl FnOnce(&mut Sample) -> C) -> Sample {
        let mut sample = sample;
        declare(&mut sample);
        sample
    }
    refused(&|step, leaf| with(Sample::sequence(step.clone(), 8, 4), |s| s.all(leaf)));
    refused(&|step, leaf| with(Sample::sequence(step.clone(), 8, 6), |s| s.at(leaf, 0)));
    refused(&|step, leaf| with(Sample::sequence(step.clone(), 8, 4), |s| s.at(leaf, 2)));
    refused(&|step, leaf| with(Sample::sequence(step.clone(), 8, 4), |s| s.next(leaf)));
    refused(&|step, leaf| with(Sample::transition(step.clone(), 1, 0.9), |s| s.at(leaf, 0)));
    refused(&|step, _| Sample::unroll(step.clone(), 8));
    let mut step = Step::new();
    let state = step.leaf::<f32>("state", &[4]);
    step.every(state, 4);
    let mut sample = Sample::sequence(step, 8, 8);
    sample.at(state, -4);
    assert_eq!(sample.check(), Ok(()));
}
