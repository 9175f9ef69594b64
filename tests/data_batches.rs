//! Batches in the learner's hands: held in any number, dropped in any order on any thread, shared by column, cut into
//! minibatches, partial at the end, and longer-lived than everything else.

mod common;
#[path = "common/data.rs"]
mod data;

use common::Watchdog;
use data::{Rng, mix};
use ndarray::Axis;
use pinring::*;
use std::thread;
use std::time::Duration;

/// Everything that a learner holds goes where it likes.
#[test]
fn handles_cross_threads() {
    fn send<T: Send + 'static>() {}
    fn sync<T: Sync>() {}
    fn owned_bytes<T: AsRef<[u8]> + Send + Sync + 'static>() {}
    send::<Batch>();
    sync::<Batch>();
    send::<SharedBatch>();
    sync::<SharedBatch>();
    owned_bytes::<ColumnBytes>();
    send::<Writer>();
    send::<Learner>();
    sync::<Learner>();
    send::<Feed>();
    sync::<Feed>();
    send::<Intake>();
    send::<Weights<Vec<f32>>>();
    send::<Column<f32>>();
    send::<Leaf<f32>>();
    sync::<Leaf<f32>>();
}

struct Setup {
    feed: Feed,
    learner: Learner,
    obs: Leaf<u32>,
    act: Leaf<u16>,
    obs_c: Column<u32>,
    act_c: Column<u16>,
}

/// Unrolls of three steps, or single steps.
fn start(steps: usize, time_major: bool, batch: usize, buffers: usize) -> Setup {
    let mut step = Step::new();
    let obs = step.observation::<u32>("obs", &[2]);
    let act = step.leaf::<u16>("act", &[]);
    let mut sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
    if time_major {
        sample.time_major();
    }
    let (obs_c, act_c) = (sample.all(obs), sample.all(act));
    let feed = Feed::builder(sample).batch(batch).buffers(buffers).start().unwrap();
    let learner = feed.learner().unwrap();
    Setup { feed, learner, obs, act, obs_c, act_c }
}

fn value(lane: usize, t: u64) -> u32 {
    mix((lane as u64) << 32 | t) as u32
}

fn write(writer: &mut Writer, setup: &Setup, t: u64) {
    let lanes = writer.lanes();
    let mut step = writer.step().unwrap();
    let obs: Vec<u32> = lanes.clone().flat_map(|lane| [value(lane, t), !value(lane, t)]).collect();
    let act: Vec<u16> = lanes.map(|lane| value(lane, t) as u16).collect();
    step.put(setup.obs, &obs).unwrap();
    step.put(setup.act, &act).unwrap();
    step.commit().unwrap();
}

/// Every value of a batch, by the lane and step that its row says.
fn check(batch: &Batch, setup: &Setup, steps: usize, time_major: bool) {
    let (obs, act) = (batch.view(setup.obs_c), batch.view(setup.act_c));
    let rows = batch.rows();
    let shape = |t: usize| match (steps, time_major) {
        (0, _) => vec![rows],
        (_, false) => vec![rows, t],
        (_, true) => vec![t, rows],
    };
    assert_eq!(obs.shape(), [shape(steps + 1), vec![2]].concat());
    assert_eq!(act.shape(), shape(steps));
    assert!(obs.is_standard_layout() && act.is_standard_layout());
    assert_eq!(batch.slice(setup.obs_c), obs.as_slice().unwrap());
    for (row, (lane, first)) in batch.lanes().zip(batch.first_steps()).enumerate() {
        for t in 0..=steps {
            let expected = value(lane, first + t as u64);
            let got = match (steps, time_major) {
                (0, _) => [obs[[row, 0]], obs[[row, 1]]],
                (_, false) => [obs[[row, t, 0]], obs[[row, t, 1]]],
                (_, true) => [obs[[t, row, 0]], obs[[t, row, 1]]],
            };
            assert_eq!(got, [expected, !expected]);
            if t < steps.max(1) {
                let got = match (steps, time_major) {
                    (0, _) => act[[row]],
                    (_, false) => act[[row, t]],
                    (_, true) => act[[t, row]],
                };
                assert_eq!(got, expected as u16);
            }
        }
    }
}

/// All buffers are held and dropped in every order, here and on other threads; each drop gives one slot back.
#[test]
fn held_in_any_number_and_dropped_in_any_order() {
    let setup = start(0, false, 2, 4);
    let mut writer = setup.feed.writer(2).unwrap();
    let mut rng = Rng(1);
    let mut t = 0;
    for round in 0..60 {
        let mut held = Vec::new();
        for _ in 0..4 {
            write(&mut writer, &setup, t);
            t += 1;
            held.push(setup.learner.next_batch().unwrap());
        }
        let metrics = setup.feed.metrics();
        assert_eq!((metrics.batches_held, metrics.free_slots), (4, 0));
        while !held.is_empty() {
            held.iter().for_each(|batch| check(batch, &setup, 0, false));
            let batch = held.swap_remove(rng.below(held.len() as u64) as usize);
            if round % 2 == 0 {
                drop(batch);
            } else {
                thread::spawn(move || drop(batch)).join().unwrap();
            }
            let metrics = setup.feed.metrics();
            assert_eq!((metrics.batches_held, metrics.free_slots), (held.len(), 4 - held.len()));
        }
    }
}

/// A batch outlives the learner, the writers and the feed, and is read on another thread.
#[test]
fn a_batch_outlives_everything() {
    let setup = start(3, true, 2, 2);
    let mut writer = setup.feed.writer(2).unwrap();
    (0..7).for_each(|t| write(&mut writer, &setup, t));
    let (first, second) = (setup.learner.next_batch().unwrap(), setup.learner.next_batch().unwrap());
    let Setup { feed, learner, obs, act, obs_c, act_c } = setup;
    drop((writer, learner));
    drop(feed);
    // Other rings come and go meanwhile.
    for _ in 0..3 {
        let other = start(3, true, 2, 2);
        let mut writer = other.feed.writer(2).unwrap();
        (0..7).for_each(|t| write(&mut writer, &other, t + 100));
    }
    let other = start(3, true, 2, 2);
    thread::spawn(move || {
        let setup = Setup { obs, act, obs_c, act_c, ..other };
        check(&first, &setup, 3, true);
        drop(first);
        check(&second, &setup, 3, true);
    })
    .join()
    .unwrap();
}

/// The slot of a shared batch comes home with its last owner, whichever that is.
#[test]
fn a_shared_batch_comes_home_with_its_last_owner() {
    for last in 0..4 {
        let setup = start(0, false, 2, 2);
        let mut writer = setup.feed.writer(2).unwrap();
        write(&mut writer, &setup, 5);
        let shared = setup.learner.next_batch().unwrap().share();
        let clone = shared.clone();
        let (obs, shape) = shared.column(setup.obs_c);
        let (act, act_shape) = clone.column(setup.act_c);
        assert_eq!((shape, act_shape), (vec![2, 2], vec![2]));
        let expected: Vec<u8> =
            [value(0, 5), !value(0, 5), value(1, 5), !value(1, 5)].iter().flat_map(|v| v.to_ne_bytes()).collect();
        assert_eq!(obs.as_ref(), expected);
        assert_eq!(obs.as_ref().as_ptr().align_offset(COLUMN_ALIGN), 0);
        assert_eq!(shared.slice(setup.act_c), [value(0, 5) as u16, value(1, 5) as u16]);
        assert_eq!(shared.minibatch(1..2).slice(setup.act_c), Some(&[value(1, 5) as u16][..]));
        let mut owners: Vec<Option<Box<dyn Send>>> =
            vec![Some(Box::new(shared)), Some(Box::new(clone)), Some(Box::new(obs)), Some(Box::new(act))];
        let kept = owners[last].take().unwrap();
        for owner in owners.into_iter().flatten() {
            drop(owner);
            assert_eq!(setup.feed.metrics().free_slots, 1);
        }
        assert_eq!(setup.feed.metrics().batches_held, 1);
        thread::spawn(move || drop(kept)).join().unwrap();
        let metrics = setup.feed.metrics();
        assert_eq!((metrics.free_slots, metrics.batches_held), (2, 0));
    }
}

/// The last batch holds what was left: its views are as contiguous as any, in both orders of axes, also where several
/// writers left gaps between their parts.
#[test]
fn the_last_batch_is_partial_and_right() {
    for (steps, time_major) in [(0, false), (3, false), (3, true), (1, true)] {
        for writers in [1, 3] {
            for left in 1..8 {
                let setup = start(steps, time_major, 8, 2);
                let mut all: Vec<Writer> = (0..writers).map(|_| setup.feed.writer(1).unwrap()).collect();
                // `left` rows, dealt out among the writers.
                let mut dealt = vec![0; writers];
                (0..left).for_each(|row| dealt[row % writers] += 1);
                for (writer, &rows) in all.iter_mut().zip(&dealt) {
                    let ticks = if steps == 0 || rows == 0 { rows } else { rows * steps + 1 };
                    (0..ticks as u64).for_each(|t| write(writer, &setup, t));
                }
                assert!(setup.learner.try_next().unwrap().is_none());
                drop(all);
                let batch = setup.learner.next_batch().unwrap();
                assert_eq!(batch.rows(), left);
                check(&batch, &setup, steps, time_major);
                let mut keys: Vec<_> = batch.lanes().zip(batch.first_steps()).collect();
                keys.sort_unstable();
                keys.dedup();
                assert_eq!(keys.len(), left, "each row once");
                assert_eq!(setup.learner.next_batch().err(), Some(NextError::Ended));
            }
        }
    }
}

/// A minibatch is the batch's own rows: the same as slicing its view.
#[test]
fn minibatches_are_slices_of_the_batch() {
    for (steps, time_major) in [(0, false), (3, false), (3, true)] {
        let setup = start(steps, time_major, 6, 2);
        let mut writer = setup.feed.writer(6).unwrap();
        (0..=steps.max(1) as u64).for_each(|t| write(&mut writer, &setup, t));
        let batch = setup.learner.next_batch().unwrap();
        let axis = Axis(usize::from(time_major));
        for start in 0..=6 {
            for end in start..=6 {
                let part = batch.minibatch(start..end);
                assert_eq!(part.rows(), end - start);
                let mut expected = batch.view(setup.obs_c);
                expected.slice_axis_inplace(axis, (start..end).into());
                assert_eq!(part.view(setup.obs_c), expected);
                let mut expected = batch.view(setup.act_c);
                expected.slice_axis_inplace(axis, (start..end).into());
                assert_eq!(part.view(setup.act_c), expected);
                match part.slice(setup.act_c) {
                    Some(slice) => assert!(slice.iter().eq(expected.iter())),
                    None => assert!(time_major && end - start < 6 && end > start, "{start}..{end}"),
                }
            }
        }
        // Views live as long as the batch, not as long as the minibatch.
        let view = batch.minibatch(2..4).view(setup.act_c);
        assert_eq!(view.len(), 2 * steps.max(1));
    }
}

/// After the stop, and after everything else is gone, the bytes of what is still out are readable and unchanged, whoever
/// maps and writes memory meanwhile.
#[test]
fn bytes_stay_behind_the_stop() {
    let _watchdog = Watchdog::new("bytes behind the stop", Duration::from_secs(180));
    let setup = start(0, false, 64, 3);
    let mut writer = setup.feed.writer(64).unwrap();
    (0..3).for_each(|t| write(&mut writer, &setup, t));
    let batch = setup.learner.next_batch().unwrap();
    let shared = setup.learner.next_batch().unwrap().share();
    let (bytes, _) = shared.column(setup.obs_c);
    let untaken = setup.feed.metrics().batches_waiting;
    assert_eq!(untaken, 1);
    let before = (batch.slice(setup.obs_c).to_vec(), bytes.as_ref().to_vec());
    let report = setup.feed.stop(Duration::from_secs(10)).unwrap();
    assert_eq!((report.untaken_rows, report.still_out), (64, 2));
    assert!(writer.step().is_err());
    let after = |batch: &Batch, bytes: &ColumnBytes| (batch.slice(setup.obs_c).to_vec(), bytes.as_ref().to_vec());
    assert_eq!(after(&batch, &bytes), before);
    let (obs_c, act_c) = (setup.obs_c, setup.act_c);
    drop((writer, shared, setup.learner, setup.feed));
    for _ in 0..10 {
        // New rings of the same size, filled with other bytes, and ordinary memory.
        let other = start(0, false, 64, 3);
        let mut writer = other.feed.writer(64).unwrap();
        (0..3).for_each(|t| write(&mut writer, &other, t + 1000));
        std::hint::black_box(vec![0xEEu8; 1 << 16]);
    }
    assert_eq!((batch.slice(obs_c).to_vec(), bytes.as_ref().to_vec()), before);
    assert_eq!(batch.slice(act_c).len(), 64);
    thread::spawn(move || drop(batch)).join().unwrap();
    assert_eq!(bytes.as_ref(), before.1, "the other one's bytes are none the worse");
}
