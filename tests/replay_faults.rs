//! Faults that people met with other replay buffers, each with its numbers: wrap-around, items that are never drawn,
//! priorities that are none or come too late, sequences over seams, and settings that can never be met. Uniform and
//! prioritized alike.

mod common;

use common::Watchdog;
use pinring::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(100);

/// Observations that are ids, and what a sample shows of them.
struct Ids {
    obs: Leaf<i64>,
    reward: Leaf<f32>,
    column: Column<i64>,
    sample: Sample,
    /// Values of a row of `column`.
    len: usize,
    next: Option<Column<i64>>,
    weight: Column<f32>,
}

impl Ids {
    /// Single steps: a sequence of 1, which needs no step behind it.
    fn steps() -> Ids {
        Ids::sequence(1, 1)
    }

    fn sequence(len: usize, stride: usize) -> Ids {
        let (step, obs, reward) = Ids::schema();
        let mut sample = Sample::sequence(step, len, stride);
        let (column, weight) = (sample.window(obs, 0..len as i32, Pad::Zeros), sample.weight());
        Ids { obs, reward, column, sample, len, next: None, weight }
    }

    fn transitions(n: usize) -> Ids {
        let (step, obs, reward) = Ids::schema();
        let mut sample = Sample::transition(step, n, 0.9);
        let (column, next, weight) = (sample.at(obs, 0), Some(sample.next(obs)), sample.weight());
        Ids { obs, reward, column, sample, len: 1, next, weight }
    }

    fn schema() -> (Step, Leaf<i64>, Leaf<f32>) {
        let mut step = Step::new();
        let obs = step.observation::<i64>("id", &[]);
        let reward = step.leaf::<f32>("reward", &[]);
        step.reject_non_finite(reward);
        (step, obs, reward)
    }

    /// One lane, one batch at a time, drawn from however few there are.
    fn builder(&self, capacity: usize, rows: usize, prioritized: bool) -> FeedBuilder {
        let builder = Feed::builder(self.sample.clone()).batch(rows).buffers(1).lanes(1).seed(3);
        match prioritized {
            true => builder.replay(capacity, Prioritized::new(1.0, 1.0)),
            false => builder.replay(capacity, Uniform::new()),
        }
    }

    fn start(&self, capacity: usize, rows: usize, prioritized: bool) -> Feed {
        self.builder(capacity, rows, prioritized).pace(Pace::min_size(1)).start().unwrap()
    }

    fn write(&self, writer: &mut Writer, ids: impl IntoIterator<Item = i64>) {
        for id in ids {
            self.write_one(writer, id, None, None).unwrap();
        }
    }

    fn write_one(&self, writer: &mut Writer, id: i64, end: Option<End>, priority: Option<f32>) -> Result<()> {
        let mut s = writer.step()?;
        s.put(self.obs, &[id])?;
        s.put(self.reward, &[0.0])?;
        if let Some(priority) = priority {
            s.priority(0, priority)?;
        }
        if let Some(end) = end {
            s.end(0, end).put(self.obs, &[-id])?;
        }
        Ok(s.commit()?)
    }

    /// An episode of steps `ids`, truncated behind the last.
    fn episode(&self, writer: &mut Writer, ids: std::ops::Range<i64>) {
        for id in ids.clone() {
            self.write_one(writer, id, (id + 1 == ids.end).then_some(End::Truncated), None).unwrap();
        }
    }

    /// How often each row was drawn, of at least `rows`, behind the batch that was selected before.
    fn draw(&self, learner: &Learner, rows: usize) -> BTreeMap<Vec<i64>, usize> {
        drop(learner.next_batch().unwrap());
        let (mut drawn, mut count) = (BTreeMap::new(), 0);
        while count < rows {
            let batch = learner.next_batch().unwrap();
            for row in batch.slice(self.column).chunks(self.len) {
                *drawn.entry(row.to_vec()).or_insert(0) += 1;
            }
            count += batch.rows();
        }
        drawn
    }

    fn drawn(&self, learner: &Learner, rows: usize) -> BTreeSet<Vec<i64>> {
        self.draw(learner, rows).into_keys().collect()
    }
}

fn rows(of: impl IntoIterator<Item = i64>) -> BTreeSet<Vec<i64>> {
    of.into_iter().map(|id| vec![id]).collect()
}

fn each(test: impl Fn(bool)) {
    let _watchdog = Watchdog::new("a replay fault", PATIENCE);
    [false, true].into_iter().for_each(test);
}

#[test]
fn only_written_steps_are_drawn_and_the_oldest_leave_first() {
    each(|prioritized| {
        let ids = Ids::steps();
        let feed = ids.start(4, 50, prioritized);
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        ids.write(&mut writer, 0..3);
        assert_eq!((feed.metrics().stored_samples, feed.metrics().stored_records), (3, 3));
        assert_eq!(ids.drawn(&learner, 10_000), rows(0..3));
        ids.write(&mut writer, 3..6);
        assert_eq!(ids.drawn(&learner, 10_000), rows(2..6));
        for id in 6..40 {
            ids.write(&mut writer, [id]);
            assert_eq!(ids.drawn(&learner, 200), rows(id - 3..=id), "at every place of the wrap");
        }
    });
}

#[test]
fn a_step_is_never_paired_with_one_from_another_lap() {
    each(|prioritized| {
        let ids = Ids::transitions(1);
        let feed = ids.start(4, 50, prioritized);
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        let next = ids.next.unwrap();
        for id in 0..30 {
            ids.write(&mut writer, [id]);
            if id == 0 {
                continue;
            }
            drop(learner.next_batch().unwrap());
            let batch = learner.next_batch().unwrap();
            for (&now, &then) in batch.slice(ids.column).iter().zip(batch.slice(next)) {
                assert!(then == now + 1 && now >= id - 3 && then <= id, "({now}, {then}) when {id} is the newest");
            }
        }
        assert_eq!(ids.drawn(&learner, 1000), rows(26..29), "29 has no step behind it yet");
    });
}

#[test]
fn a_store_of_one_step() {
    each(|prioritized| {
        let ids = Ids::steps();
        let feed = ids.start(1, 3, prioritized);
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        for id in 7..20 {
            ids.write(&mut writer, [id]);
            assert_eq!(ids.drawn(&learner, 10), rows([id]));
        }
        ids.write_one(&mut writer, 20, Some(End::Terminated), None).unwrap();
        ids.write(&mut writer, [21]);
        assert_eq!(ids.drawn(&learner, 10), rows([21]), "behind an end");
        let error = Ids::transitions(1).builder(1, 3, prioritized).start().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("reach over 2 steps of one lane"), "{error}");
    });
}

#[test]
fn every_item_is_drawn_the_newest_too() {
    each(|prioritized| {
        let ids = Ids::steps();
        let feed = ids.start(100, 50, prioritized);
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        ids.write(&mut writer, 0..1);
        assert_eq!(ids.drawn(&learner, 100), rows(0..1));
        ids.write(&mut writer, 1..4);
        let drawn = ids.draw(&learner, 4000);
        assert_eq!(drawn.len(), 4);
        assert!(drawn.values().all(|count| (850..=1150).contains(count)), "{drawn:?}");
    });
}

#[test]
fn an_episode_has_as_many_starts_as_fit() {
    each(|prioritized| {
        for (length, len, starts) in [(2, 1, 2), (5, 5, 1), (6, 5, 2), (4, 5, 0)] {
            let ids = Ids::sequence(len, 1);
            let feed = ids.start(100, 10, prioritized);
            let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
            ids.episode(&mut writer, 1..length + 1);
            assert_eq!(feed.metrics().stored_samples, starts as usize);
            if starts > 0 {
                let expected: BTreeSet<Vec<i64>> =
                    (0..starts).map(|start| (1 + start..1 + start + len as i64).collect()).collect();
                assert_eq!(ids.drawn(&learner, 1000), expected);
            }
        }
    });
}

#[test]
fn a_short_episode_is_padded_if_asked() {
    each(|prioritized| {
        let mut ids = Ids::sequence(4, 2);
        ids.sample.pad_short(true);
        let mask = ids.sample.mask();
        let feed = ids.start(100, 10, prioritized);
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        ids.episode(&mut writer, 1..4);
        drop(learner.next_batch().unwrap());
        let batch = learner.next_batch().unwrap();
        for (row, first) in batch.first_steps().enumerate() {
            let (seen, mask) = (&batch.slice(ids.column)[row * 4..][..4], &batch.slice(mask)[row * 4..][..4]);
            match first {
                0 => assert_eq!((seen, mask), (&[1, 2, 3, -3][..], &[true, true, true, false][..])),
                2 => assert_eq!((seen, mask), (&[3, -3, 0, 0][..], &[true, false, false, false][..])),
                other => panic!("a sequence begins at {other}"),
            }
        }
    });
}

/// Two episodes, then a third that is cut by the wrap: a sequence is of one episode, in order, over the seam too.
#[test]
fn sequences_stay_in_their_episode_and_cross_the_seam() {
    each(|prioritized| {
        let ids = Ids::sequence(4, 1);
        let feed = ids.start(1000, 100, prioritized);
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        (0..3).for_each(|episode| ids.episode(&mut writer, episode * 10_000 + 1..episode * 10_000 + 1000));
        let drawn = ids.draw(&learner, 10_000);
        for row in drawn.keys() {
            assert!(row.windows(2).all(|pair| pair[1] == pair[0] + 1), "{row:?}");
        }
        assert_eq!(drawn.keys().map(|row| row[0] / 10_000).collect::<BTreeSet<_>>(), BTreeSet::from([1, 2]));
        assert!(drawn.keys().any(|row| row[0] == 29_999 - 9000 - 3), "the last that fits: {:?}", drawn.keys().last());
    });
}

/// A full store of short episodes, the newest over the seam: the starts are exactly the first steps that have three.
#[test]
fn the_starts_of_a_full_store_are_exactly_those_that_fit() {
    each(|prioritized| {
        let ids = Ids::sequence(3, 1);
        // Four records an episode: three steps and the final observation. Eleven live, one to a chunk: two whole episodes,
        // and all but the first step of an older one.
        let builder = ids.builder(11, 100, prioritized).lanes(3);
        let feed = builder.pace(Pace::min_size(1)).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        for lap in 0..12 {
            (1..4).for_each(|episode| ids.episode(&mut writer, lap * 100 + episode * 10..lap * 100 + episode * 10 + 3));
            let expected: BTreeSet<Vec<i64>> =
                (2..4).map(|episode| (0..3).map(|t| lap * 100 + episode * 10 + t).collect()).collect();
            assert_eq!(ids.drawn(&learner, 2000), expected, "lap {lap}");
        }
    });
}

#[test]
fn priorities_that_are_none_change_nothing() {
    let _watchdog = Watchdog::new("bad priorities", PATIENCE);
    let ids = Ids::steps();
    let feed = ids.start(10, 3, true);
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    ids.write(&mut writer, 0..3);
    drop(learner.next_batch().unwrap());
    let keys = learner.next_batch().unwrap().keys();
    let before = feed.peek(&keys).unwrap();
    for bad in [f32::NAN, f32::INFINITY, -1.0] {
        let error = learner.update_priorities(&keys, &[1.0, bad, 2.0]).unwrap_err();
        assert!(matches!(error, UpdateError::Priority(PriorityError { index: 1, .. })), "{error:?}");
        assert_eq!(feed.peek(&keys).unwrap(), before, "all or nothing");
        let mut s = writer.step().unwrap();
        assert!(matches!(s.priority(0, bad), Err(PutError::Priority { .. })));
    }
    assert_eq!(learner.update_priorities(&keys, &[1.0]).unwrap_err(), UpdateError::Length { keys: 3, priorities: 1 });
    learner.update_priorities(&keys, &[-0.0; 3]).unwrap();
    assert_eq!(feed.peek(&keys).unwrap(), [Some(0.0); 3], "minus zero is zero");
    (0..2).for_each(|_| drop(learner.next_batch().unwrap()));
    let batch = learner.next_batch().unwrap();
    assert!(batch.slice(ids.weight).iter().all(|&weight| weight > 0.0 && weight <= 1.0), "0 counts as the floor");
}

#[test]
fn a_reward_that_is_no_number_is_refused_and_counted() {
    let _watchdog = Watchdog::new("bad rewards", PATIENCE);
    let ids = Ids::steps();
    let feed = ids.start(10, 3, false);
    let mut writer = feed.writer(1).unwrap();
    let mut s = writer.step().unwrap();
    s.put(ids.obs, &[1]).unwrap();
    s.put(ids.reward, &[f32::NAN]).unwrap();
    assert!(matches!(s.commit(), Err(CommitError::NonFinite { .. })));
    let metrics = feed.metrics();
    assert_eq!((metrics.rejected_steps, metrics.stored_records, metrics.steps), (1, 0, 0));
    ids.write(&mut writer, [1]);
    assert_eq!(feed.metrics().stored_records, 1);
}

/// α = 1, β = 1, priorities 1 and 3: drawn as 1 : 3, weighted as 1 : 1/3, whether they came with the step or later.
#[test]
fn priorities_and_weights_are_proportional() {
    let _watchdog = Watchdog::new("proportional", PATIENCE);
    let ids = Ids::steps();
    for by_update in [false, true] {
        let feed = ids.start(10, 400, true);
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        for (id, priority) in [(0, 1.0), (1, 3.0)] {
            ids.write_one(&mut writer, id, None, (!by_update).then_some(priority)).unwrap();
        }
        drop(learner.next_batch().unwrap());
        if by_update {
            let batch = learner.next_batch().unwrap();
            let priorities: Vec<f32> = batch.slice(ids.column).iter().map(|&id| [1.0, 3.0][id as usize]).collect();
            learner.update_priorities(&batch.keys(), &priorities).unwrap();
            drop(batch);
            drop(learner.next_batch().unwrap()); // perhaps selected before the update
        }
        let (mut threes, mut all) = (0, 0);
        for _ in 0..50 {
            let batch = learner.next_batch().unwrap();
            for (&id, &weight) in batch.slice(ids.column).iter().zip(batch.slice(ids.weight)) {
                assert_eq!(weight, [1.0, 1.0 / 3.0][id as usize]);
                (threes, all) = (threes + id, all + 1);
            }
        }
        let share = threes as f64 / f64::from(all);
        assert!((share - 0.75).abs() < 0.02, "{share}");
        feed.set_beta(0.0).unwrap();
        (0..2).for_each(|_| drop(learner.next_batch().unwrap()));
        assert!(learner.next_batch().unwrap().slice(ids.weight).iter().all(|&weight| weight == 1.0));
        assert_eq!(feed.set_beta(2.0).unwrap_err().kind(), ErrorKind::Config);
    }
}

/// A new step without a priority of its own gets the largest so far.
#[test]
fn new_steps_get_the_largest_priority_so_far() {
    let _watchdog = Watchdog::new("largest", PATIENCE);
    let ids = Ids::steps();
    let feed = ids.start(10, 20, true);
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    ids.write_one(&mut writer, 0, None, Some(5.0)).unwrap();
    ids.write(&mut writer, [1]);
    (0..2).for_each(|_| drop(learner.next_batch().unwrap()));
    let keys = learner.next_batch().unwrap().keys();
    assert_eq!(feed.peek(&keys).unwrap(), [Some(5.0); 20]);
}

#[test]
fn a_key_of_an_overwritten_step_is_stale_for_ever() {
    let _watchdog = Watchdog::new("stale", PATIENCE);
    let ids = Ids::steps();
    let feed = ids.start(4, 1, true);
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    ids.write(&mut writer, [0]);
    let keys = learner.next_batch().unwrap().keys();
    assert_eq!(keys.iter().collect::<Vec<_>>(), [(0, 0)]);
    ids.write(&mut writer, 1..4);
    assert_eq!(learner.update_priorities(&keys, &[1.0]).unwrap().stale, 0);
    for lap in 0..40 {
        ids.write(&mut writer, [4 + lap]); // overwrites; each lap is at another place
        let updated = learner.update_priorities(&keys, &[100.0]).unwrap();
        assert_eq!((updated.applied, updated.stale), (0, 1), "{lap} steps later");
        assert_eq!(feed.peek(&keys).unwrap(), [None]);
    }
    assert_eq!(feed.metrics().stale_keys, 40);
    (0..2).for_each(|_| drop(learner.next_batch().unwrap()));
    for _ in 0..50 {
        let keys = learner.next_batch().unwrap().keys();
        assert_eq!(feed.peek(&keys).unwrap(), [Some(1.0)], "no other step was given it");
    }
}

#[test]
fn settings_that_can_never_be_met_are_refused() {
    let ids = Ids::steps();
    let refused = |builder: FeedBuilder, text: &str| {
        let error = builder.start().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains(text), "{error}");
    };
    let builder = || ids.builder(8, 4, false);
    refused(builder().pace(Pace::min_size(10)), "sampling begins with 10 samples, but the store holds 8 at most");
    refused(builder().pace(Pace::min_size(1).samples_per_insert(1.0, 0.1)), "tolerance of at least");
    refused(builder().lockstep(1).lanes(1), "`.lockstep` and `.max_policy_lag`");
    refused(builder().when_full(WhenFull::DropNewest), "`DropNewest` has no meaning");
    refused(builder().lanes(9), "is too small");
    refused(builder().gather_threads(0), "0 threads fill nothing");
    refused(ids.builder(0, 4, false), "a store of 0 steps holds nothing");
    refused(Feed::builder(ids.sample.clone()).replay(8, Uniform::new()), "give `.lanes(most)`");
    refused(Feed::builder(ids.sample.clone()), "give `.replay(steps, sampler)`");
    refused(builder().replay(8, MaxTimes::new(Uniform::new(), 0)), "max-times-sampled is 0");
    refused(builder().replay(8, Prioritized::new(9.0, 0.0)), "alpha is 9");
    let mut step = Step::new();
    step.leaf::<u8>("x", &[]);
    refused(
        Feed::builder(Sample::step(step.clone())).lanes(1).replay(8, Uniform::new()),
        "stored steps are sampled as transitions or sequences",
    );
    refused(Feed::builder(Sample::step(step)).pace(Pace::min_size(1)), "give `.replay(steps, sampler)`");
}

/// A batch of 32 waits until there are 32 samples, and says so.
#[test]
fn a_learner_waits_for_enough_samples_and_says_so() {
    each(|prioritized| {
        let ids = Ids::steps();
        let feed = ids.builder(1000, 32, prioritized).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        ids.write(&mut writer, 0..10);
        let waited = learner.next_timeout(Duration::from_millis(20)).unwrap_err();
        assert_eq!(waited, NextError::Pace(PaceWait::ForMinSize { have: 10, need: 32 }));
        assert!(learner.try_next().unwrap().is_none());
        ids.write(&mut writer, 10..31);
        let waited = learner.next_timeout(Duration::from_millis(20)).unwrap_err();
        assert_eq!(waited, NextError::Pace(PaceWait::ForMinSize { have: 31, need: 32 }));
        ids.write(&mut writer, 31..32);
        assert_eq!(learner.next_batch().unwrap().rows(), 32);
    });
}

/// One producer, no consumer: a step within 200 ms is an error that says who waits for whom, not a hang.
#[test]
fn a_writer_waits_for_the_learner_and_says_so() {
    each(|prioritized| {
        let ids = Ids::steps();
        let pace = Pace::min_size(4).samples_per_insert(1.0, 2.0);
        let feed = ids.builder(100, 4, prioritized).pace(pace).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        let mut written = 0;
        let error = loop {
            match writer.step_timeout(Duration::from_millis(if written < 12 { 10_000 } else { 200 })) {
                Ok(mut s) => {
                    s.put(ids.obs, &[written]).unwrap();
                    s.put(ids.reward, &[0.0]).unwrap();
                    s.commit().unwrap();
                    written += 1;
                }
                Err(error) => break error,
            }
        };
        assert!(matches!(error, StepError::Pace(PaceWait::ForLearner { inserted: 12, sampled: 0, .. })), "{error:?}");
        assert_eq!(Error::from(error).kind(), ErrorKind::Full);
        assert!(matches!(writer.try_step(), Err(StepError::Pace(_))));
        assert_eq!(learner.next_batch().unwrap().rows(), 4);
        ids.write(&mut writer, [written]);
    });
}

/// The newest steps of each lane are no samples yet, so the store has the steps that make a batch due before it has the
/// samples to select one from. Writers go on until it has.
#[test]
fn no_writer_waits_for_a_batch_that_there_are_too_few_samples_for() {
    each(|prioritized| {
        let ids = Ids::transitions(3);
        for tolerance in [0.0, 0.1] {
            let pace = Pace::min_size(20).samples_per_insert(1.0, tolerance);
            let feed = ids.builder(100, 2, prioritized).pace(pace).start().unwrap();
            let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
            ids.write(&mut writer, 0..23); // 20 samples: 2 rows were due from the 22nd step on
            assert_eq!(feed.metrics().stored_samples, 20);
            assert_eq!(learner.next_batch().unwrap().rows(), 2);
        }
    });
}

/// A writer that waits for the pace goes on when the learner takes a batch, and hears of a stop.
#[test]
fn waiting_writers_hear_of_batches_taken_and_of_the_stop() {
    each(|prioritized| {
        let ids = Ids::steps();
        let pace = Pace::min_size(4).samples_per_insert(1.0, 2.0);
        let feed = ids.builder(100, 4, prioritized).pace(pace).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        let writing = std::thread::spawn(move || {
            for id in 0.. {
                if let Err(error) = ids.write_one(&mut writer, id, None, None) {
                    return (id, error.kind());
                }
            }
            unreachable!("a hundred years")
        });
        (0..20).for_each(|_| assert_eq!(learner.next_batch().unwrap().rows(), 4));
        let begun = Instant::now();
        while feed.metrics().steps < 80 && begun.elapsed() < PATIENCE / 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        feed.stop(PATIENCE).unwrap();
        let (written, kind) = writing.join().unwrap();
        assert!(written >= 80, "{written}");
        assert_eq!(kind, ErrorKind::Stopped);
    });
}
