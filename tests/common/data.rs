//! What the tests of the data plane share: a small random generator, a schema whose every value tells who wrote it, and
//! a model of what becomes of a lane's steps.
//!
//! A step's values are functions of one number, its *id*, which names the writer, the lane and the attempt. So a row
//! that mixes two steps, or two laps of the ring, cannot pass for a good one.
#![allow(dead_code)]

use ndarray::{Array2, Array3, s};
use pinring::*;
use std::collections::HashMap;

/// SplitMix64: the same numbers for the same seed, on every machine.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
    pub fn fork(&mut self) -> Rng {
        Rng(self.next())
    }
}

pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The id of a writer's step of one lane; `attempt` counts begun steps, committed or not. Never 0.
pub fn id(writer: u64, lane: usize, attempt: u64) -> u64 {
    (writer + 1) << 40 | (lane as u64) << 30 | attempt
}
pub fn writer_of(id: u64) -> u64 {
    (id >> 40) - 1
}
pub fn lane_of(id: u64) -> usize {
    (id >> 30 & 0x1FF) as usize
}
/// The id of the final observation of the episode that ends with step `id`.
pub fn final_of(id: u64) -> u64 {
    id | 1 << 39
}

pub fn obs_of(id: u64) -> [u64; 2] {
    [id, mix(id)]
}
pub fn small_of(id: u64) -> [u8; 3] {
    let bits = mix(id ^ 1).to_le_bytes();
    [bits[0], bits[1], bits[2]]
}
pub fn action_of(id: u64) -> i64 {
    mix(id ^ 2) as i64
}
pub fn logits_of(id: u64) -> [f32; 6] {
    std::array::from_fn(|i| (mix(id ^ (3 + i as u64)) % 1_000_000) as f32 / 64.0)
}
/// A small whole number, so that sums are exact.
pub fn reward_of(id: u64) -> f32 {
    (mix(id ^ 77) % 19) as f32 - 9.0
}

/// The handles of the model's schema.
#[derive(Clone, Copy, Debug)]
pub struct Leaves {
    pub obs: Leaf<u64>,
    pub small: Leaf<u8>,
    pub action: Leaf<i64>,
    pub logits: Leaf<f32>,
    pub reward: Leaf<f32>,
}

#[derive(Clone, Copy, Debug)]
pub struct Columns {
    pub obs: Column<u64>,
    pub small: Column<u8>,
    pub action: Column<i64>,
    pub logits: Column<f32>,
    pub reward: Column<f32>,
    pub terminated: Column<bool>,
    pub truncated: Column<bool>,
    pub is_first: Column<bool>,
    pub mask: Column<bool>,
    pub version: Column<i64>,
}

pub fn schema() -> (Step, Leaves) {
    let mut step = Step::new();
    let leaves = Leaves {
        obs: step.observation("obs.ids", &[2]),
        action: step.leaf("action", &[]),
        small: step.observation("obs.small", &[3]),
        logits: step.leaf("logits", &[2, 3]),
        reward: step.leaf("reward", &[]),
    };
    step.reward(leaves.reward);
    (step, leaves)
}

/// What a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// 0 for single steps.
    pub steps: usize,
    pub time_major: bool,
    pub within_episode: bool,
}

impl Shape {
    pub const STEP: Shape = Shape { steps: 0, time_major: false, within_episode: false };
    pub fn unroll(steps: usize) -> Shape {
        Shape { steps, ..Shape::STEP }
    }
    /// Steps a row.
    pub fn len(&self) -> usize {
        self.steps.max(1)
    }
    pub fn sample(&self) -> (Sample, Leaves, Columns) {
        let (step, leaves) = schema();
        let mut sample = if self.steps == 0 { Sample::step(step) } else { Sample::unroll(step, self.steps) };
        if self.time_major {
            sample.time_major();
        }
        sample.within_episode(self.within_episode);
        let columns = Columns {
            obs: sample.all(leaves.obs),
            small: sample.all(leaves.small),
            action: sample.all(leaves.action),
            logits: sample.all(leaves.logits),
            reward: sample.all(leaves.reward),
            terminated: sample.terminated(),
            truncated: sample.truncated(),
            is_first: sample.is_first(),
            mask: sample.mask(),
            version: sample.policy_version(),
        };
        (sample, leaves, columns)
    }
}

/// Writes the observations of every lane, by one of the ways there are.
pub fn write_observation(step: &mut StepMut<'_>, leaves: &Leaves, ids: &[u64], way: u64) {
    let obs: Vec<u64> = ids.iter().flat_map(|&id| obs_of(id)).collect();
    let small: Vec<u8> = ids.iter().flat_map(|&id| small_of(id)).collect();
    match way % 4 {
        0 => {
            step.put(leaves.obs, &obs).unwrap();
            step.put(leaves.small, &small).unwrap();
        }
        1 => {
            let mut view = step.view_mut(leaves.obs);
            obs.iter().enumerate().for_each(|(i, &value)| view[[i / 2, i % 2]] = value);
            let mut view = step.view_mut(leaves.small);
            small.iter().enumerate().for_each(|(i, &value)| view[[i / 3, i % 3]] = value);
        }
        2 => {
            for lane in (0..ids.len()).rev() {
                step.put_lane(leaves.obs, lane, &obs[lane * 2..][..2]).unwrap();
                step.put_padded(leaves.small, lane, &small[lane * 3..][..3]).unwrap();
            }
        }
        _ => {
            let wide = Array2::from_shape_fn((ids.len(), 4), |(lane, i)| obs[lane * 2 + i / 2]);
            step.put_array(leaves.obs, &wide.slice(s![.., ..;2])).unwrap();
            let turned = Array2::from_shape_fn((3, ids.len()), |(i, lane)| small[lane * 3 + i]);
            step.put_array(leaves.small, &turned.t()).unwrap();
        }
    }
    assert_eq!(step.view(leaves.obs).iter().copied().collect::<Vec<_>>(), obs, "readable where it was written");
}

/// Writes the leaves that are no observations.
pub fn write_rest(step: &mut StepMut<'_>, leaves: &Leaves, ids: &[u64], way: u64) {
    let actions: Vec<i64> = ids.iter().map(|&id| action_of(id)).collect();
    let logits: Vec<f32> = ids.iter().flat_map(|&id| logits_of(id)).collect();
    let rewards: Vec<f32> = ids.iter().map(|&id| reward_of(id)).collect();
    if way.is_multiple_of(2) {
        step.put(leaves.action, &actions).unwrap();
        step.put(leaves.logits, &logits).unwrap();
        step.put(leaves.reward, &rewards).unwrap();
    } else {
        let turned = Array3::from_shape_fn((ids.len(), 3, 2), |(lane, j, i)| logits[lane * 6 + i * 3 + j]);
        step.put_array(leaves.logits, &turned.permuted_axes([0, 2, 1])).unwrap();
        for lane in 0..ids.len() {
            step.put_lane(leaves.action, lane, &actions[lane..=lane]).unwrap();
        }
        let mut view = step.view_mut(leaves.reward);
        rewards.iter().enumerate().for_each(|(lane, &reward)| view[[lane]] = reward);
    }
}

/// One committed step, as the model knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRecord {
    pub id: u64,
    pub end: Option<End>,
    pub masked: bool,
    pub first: bool,
    pub version: u64,
}

/// One row that was handed over, as the model knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub writer: u64,
    pub local_lane: usize,
    pub lane: usize,
    pub first_step: u64,
    pub steps: Vec<StepRecord>,
    /// Unrolls: the id behind the observation after the last step; `None` is zeros.
    pub next: Option<u64>,
    pub next_first: bool,
}

#[derive(Clone, Debug, Default)]
struct LaneModel {
    steps: u64,
    episode_steps: u64,
    ret: f64,
    first_step: u64,
    unroll: Vec<StepRecord>,
}

/// What a writer's committed steps become.
#[derive(Debug)]
pub struct WriterModel {
    pub writer: u64,
    shape: Shape,
    lanes: std::ops::Range<usize>,
    states: Vec<LaneModel>,
    pub rows: Vec<Row>,
    pub episodes: Vec<Episode3>,
    pub committed: u64,
    /// Steps given up by `abandon` or the writer's end.
    pub unfinished: u64,
}

/// Lane, length, return, end, version: an episode as the stream gives it.
pub type Episode3 = (usize, u64, i64, End, u64);

impl WriterModel {
    pub fn new(writer: u64, shape: Shape, lanes: std::ops::Range<usize>) -> WriterModel {
        let states = vec![LaneModel::default(); lanes.len()];
        WriterModel {
            writer,
            shape,
            lanes,
            states,
            rows: Vec::new(),
            episodes: Vec::new(),
            committed: 0,
            unfinished: 0,
        }
    }

    /// Whether the lane's next observation is the first of its episode.
    pub fn first(&self, lane: usize, masked: bool) -> bool {
        self.states[lane].episode_steps == 0 && !masked
    }

    /// The observations of an open step were handed in, by `policy` or by a commit.
    pub fn hand_in(&mut self, ids: &[u64], masked: &[bool]) {
        for lane in 0..ids.len() {
            if self.shape.steps > 0 && self.states[lane].unroll.len() == self.shape.steps {
                let first = self.first(lane, masked[lane]);
                self.push(lane, Some(ids[lane]), first);
            }
        }
    }

    fn push(&mut self, lane: usize, next: Option<u64>, next_first: bool) {
        let state = &mut self.states[lane];
        let steps = std::mem::take(&mut state.unroll);
        let first_step = std::mem::replace(&mut state.first_step, state.steps);
        self.rows.push(Row {
            writer: self.writer,
            local_lane: lane,
            lane: self.lanes.start + lane,
            first_step,
            steps,
            next,
            next_first,
        });
    }

    /// A step was committed. `finals` tells which lanes put a final observation.
    pub fn commit(&mut self, records: &[(u64, Option<End>, bool)], finals: &[bool], version: u64) {
        let ids: Vec<u64> = records.iter().map(|r| r.0).collect();
        let masked: Vec<bool> = records.iter().map(|r| r.2).collect();
        self.hand_in(&ids, &masked);
        for (lane, &(id, end, masked)) in records.iter().enumerate() {
            let first = self.first(lane, masked);
            let state = &mut self.states[lane];
            state.unroll.push(StepRecord { id, end, masked, first, version });
            state.steps += 1;
            self.committed += 1;
            if !(masked && state.episode_steps == 0) {
                state.episode_steps += 1;
                state.ret += f64::from(reward_of(id));
                if let Some(end) = end {
                    let (length, ret) = (state.episode_steps, state.ret as i64);
                    self.episodes.push((self.lanes.start + lane, length, ret, end, version));
                    (state.episode_steps, state.ret) = (0, 0.0);
                }
            }
            if self.shape.steps == 0 {
                self.push(lane, None, false);
            } else if self.shape.within_episode && end.is_some() {
                self.push(lane, finals[lane].then_some(final_of(id)), false);
            }
        }
    }

    /// The lane's episode was given up.
    pub fn abandon(&mut self, lane: usize) {
        let state = &mut self.states[lane];
        self.unfinished += state.unroll.len() as u64;
        state.unroll.clear();
        state.first_step = state.steps;
        (state.episode_steps, state.ret) = (0, 0.0);
    }

    /// The writer is gone: what its lanes had begun is lost.
    pub fn gone(&mut self) {
        for lane in 0..self.states.len() {
            self.unfinished += self.states[lane].unroll.len() as u64;
            self.states[lane].unroll.clear();
        }
    }
}

/// The rows that a learner may get, each once.
#[derive(Debug, Default)]
pub struct Expected(pub HashMap<(u64, usize, u64), Row>);

impl Expected {
    pub fn add(&mut self, model: &WriterModel) {
        for row in &model.rows {
            let old = self.0.insert((row.writer, row.local_lane, row.first_step), row.clone());
            assert_eq!(old, None, "the model made a row twice");
        }
    }

    /// Takes the row that `seen` must be, and compares every value.
    pub fn take(&mut self, seen: &SeenRow) {
        let first = seen.obs[0][0];
        assert!(first > 0, "a row of zeros: {seen:?}");
        let key = (writer_of(first), lane_of(first), seen.first_step);
        let row = self.0.remove(&key).unwrap_or_else(|| panic!("no such row, or delivered twice: {key:?} {seen:?}"));
        seen.check(&row);
    }
}

/// One delivered row, copied out of its batch.
#[derive(Clone, Debug, PartialEq)]
pub struct SeenRow {
    pub shape: Shape,
    pub lane: usize,
    pub first_step: u64,
    pub length: usize,
    pub record_version: u64,
    pub obs: Vec<[u64; 2]>,
    pub small: Vec<[u8; 3]>,
    pub action: Vec<i64>,
    pub logits: Vec<[f32; 6]>,
    pub reward: Vec<f32>,
    pub terminated: Vec<bool>,
    pub truncated: Vec<bool>,
    pub is_first: Vec<bool>,
    pub mask: Vec<bool>,
    pub version: Vec<i64>,
}

/// Copies every row of a batch out.
pub fn read(batch: &Batch, columns: &Columns, shape: Shape) -> Vec<SeenRow> {
    let rows = batch.rows();
    let lanes: Vec<usize> = batch.lanes().collect();
    let first_steps: Vec<u64> = batch.first_steps().collect();
    let lengths: Vec<usize> = batch.lengths().collect();
    let versions: Vec<u64> = batch.policy_versions().collect();
    fn column<T: Element, const N: usize>(
        batch: &Batch,
        column: Column<T>,
        shape: Shape,
        steps: usize,
        row: usize,
    ) -> Vec<[T; N]> {
        let (slice, rows) = (batch.slice(column), batch.rows());
        assert_eq!(slice.len(), rows * steps * N, "exactly the column");
        let at = |step: usize| if shape.time_major { step * rows + row } else { row * steps + step };
        (0..steps).map(|step| slice[at(step) * N..][..N].try_into().unwrap()).collect()
    }
    fn scalars<T: Element>(batch: &Batch, c: Column<T>, shape: Shape, steps: usize, row: usize) -> Vec<T> {
        column::<T, 1>(batch, c, shape, steps, row).into_iter().map(|[value]| value).collect()
    }
    let (t, o) = (shape.len(), if shape.steps == 0 { 1 } else { shape.steps + 1 });
    (0..rows)
        .map(|row| SeenRow {
            shape,
            lane: lanes[row],
            first_step: first_steps[row],
            length: lengths[row],
            record_version: versions[row],
            obs: column(batch, columns.obs, shape, o, row),
            small: column(batch, columns.small, shape, o, row),
            action: scalars(batch, columns.action, shape, t, row),
            logits: column(batch, columns.logits, shape, t, row),
            reward: scalars(batch, columns.reward, shape, t, row),
            terminated: scalars(batch, columns.terminated, shape, t, row),
            truncated: scalars(batch, columns.truncated, shape, t, row),
            is_first: scalars(batch, columns.is_first, shape, o, row),
            mask: scalars(batch, columns.mask, shape, t, row),
            version: scalars(batch, columns.version, shape, t, row),
        })
        .collect()
}

impl SeenRow {
    pub fn check(&self, row: &Row) {
        let length = row.steps.len();
        assert_eq!((self.lane, self.length), (row.lane, length), "lane and length of {row:?}");
        assert_eq!(self.record_version, row.steps[0].version, "version of {row:?}");
        for step in 0..self.shape.len() {
            let Some(known) = row.steps.get(step) else {
                // Padding: zero, masked, and no flag.
                assert_eq!((self.action[step], self.reward[step]), (0, 0.0), "padding of {row:?}: {self:?}");
                assert_eq!(self.logits[step], [0.0; 6], "padding of {row:?}");
                let flags = [self.terminated[step], self.truncated[step], self.mask[step], self.is_first[step]];
                assert_eq!(flags, [false; 4], "flags of the padding of {row:?}");
                assert_eq!(self.version[step], 0, "version of the padding of {row:?}");
                if step > length {
                    assert_eq!((self.obs[step], self.small[step]), ([0; 2], [0; 3]), "padding of {row:?}");
                }
                continue;
            };
            let id = known.id;
            assert_eq!((self.obs[step], self.small[step]), (obs_of(id), small_of(id)), "observation {step} of {row:?}");
            assert_eq!(
                (self.action[step], self.logits[step], self.reward[step]),
                (action_of(id), logits_of(id), reward_of(id)),
                "values of step {step} of {row:?}"
            );
            let ended = |end| known.end == Some(end);
            assert_eq!(self.terminated[step], ended(End::Terminated), "terminated {step} of {row:?}");
            assert_eq!(self.truncated[step], ended(End::Truncated), "truncated {step} of {row:?}");
            assert_eq!(self.mask[step], !known.masked, "mask {step} of {row:?}");
            assert_eq!(self.is_first[step], known.first, "is_first {step} of {row:?}");
            assert_eq!(self.version[step], known.version as i64, "version {step} of {row:?}");
        }
        if self.shape.steps > 0 {
            let (obs, small) = row.next.map_or(([0; 2], [0; 3]), |id| (obs_of(id), small_of(id)));
            assert_eq!((self.obs[length], self.small[length]), (obs, small), "observation after {row:?}");
            assert_eq!(self.is_first[length], row.next_first, "is_first after {row:?}");
        }
    }
}

/// The stream's episodes, in a form that can be compared and sorted.
pub fn episodes_of(episodes: &Episodes) -> Vec<Episode3> {
    let mut all: Vec<Episode3> =
        episodes.try_iter().map(|e| (e.lane, e.length, e.ret as i64, e.end, e.version)).collect();
    sort_episodes(&mut all);
    all
}

pub fn sort_episodes(episodes: &mut [Episode3]) {
    episodes.sort_by_key(|e| (e.0, e.1, e.2, e.3 == End::Terminated, e.4));
}
