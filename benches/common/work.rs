//! What environments write: schemas, and the buffers in which an environment would have its values.

use super::as_bytes;
use pinring::{Batch, Column, Element, Leaf, Learner, NextError, PutError, Sample, Step, StepMut};

/// Numbers of values in the small leaves of a structured observation, over and over: scalars, lists, tables.
const PARTS: [usize; 5] = [4, 32, 128, 256, 704];

/// The leaves of a step: an observation, more observations of `f32`, action, reward and done.
#[derive(Clone)]
pub struct Leaves<O> {
    obs: Leaf<O>,
    obs_elements: usize,
    more: Vec<Leaf<f32>>,
    action: Leaf<i64>,
    reward: Leaf<f32>,
    done: Leaf<bool>,
}

/// Where a batch has them.
pub struct Columns<O> {
    obs: Column<O>,
    more: Vec<Column<f32>>,
    action: Column<i64>,
    reward: Column<f32>,
    done: Column<bool>,
}

/// How values reach the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// `put`: from a slice.
    Put,
    /// `overwrite`: the environment writes every value where the batch will be.
    InPlace,
    /// `view_mut`: the same, into zeros.
    Zeroed,
}

impl<O: Element + From<u8> + PartialEq> Leaves<O> {
    /// An observation of `elements` values, `more` further ones, action, reward and done.
    pub fn declare(elements: usize, more: usize) -> (Leaves<O>, Step) {
        let mut step = Step::new();
        let obs = step.observation::<O>("obs", &[elements]);
        let more = (0..more).map(|i| step.observation::<f32>(&format!("part.{i}"), &[PARTS[i % PARTS.len()]]));
        let more = more.collect();
        let action = step.leaf::<i64>("action", &[]);
        let reward = step.leaf::<f32>("reward", &[]);
        step.reward(reward);
        let done = step.leaf::<bool>("done", &[]);
        (Leaves { obs, obs_elements: elements, more, action, reward, done }, step)
    }

    pub fn columns(&self, sample: &mut Sample) -> Columns<O> {
        Columns {
            obs: sample.all(self.obs),
            more: self.more.iter().map(|&leaf| sample.all(leaf)).collect(),
            action: sample.all(self.action),
            reward: sample.all(self.reward),
            done: sample.all(self.done),
        }
    }

    /// Writes one step of every lane.
    #[inline]
    pub fn write(&self, step: &mut StepMut<'_>, from: &Source<O>, how: How) -> Result<(), PutError> {
        match how {
            How::Put => {
                step.put(self.obs, &from.obs)?;
                for (&leaf, values) in self.more.iter().zip(&from.more) {
                    step.put(leaf, values)?;
                }
                step.put(self.action, &from.action)?;
                step.put(self.reward, &from.reward)?;
                step.put(self.done, &from.done)
            }
            How::InPlace | How::Zeroed => {
                let lanes = from.lanes;
                in_place(step, self.obs, &from.obs, lanes, how);
                for (&leaf, values) in self.more.iter().zip(&from.more) {
                    in_place(step, leaf, values, lanes, how);
                }
                in_place(step, self.action, &from.action, lanes, how);
                in_place(step, self.reward, &from.reward, lanes, how);
                in_place(step, self.done, &from.done, lanes, how);
                Ok(())
            }
        }
    }
}

/// What an environment does that writes its values itself: here it has them in a slice.
#[inline(always)] // as an environment would have the call in its own step
fn in_place<T: Element>(step: &mut StepMut<'_>, leaf: Leaf<T>, values: &[T], lanes: usize, how: How) {
    if how == How::InPlace && lanes == 1 {
        match (step.overwrite_lane(leaf, 0), values) {
            ([to], [value]) => *to = *value, // as it sets an action or a reward
            (to, values) => to.copy_from_slice(values),
        }
        return;
    }
    let mut view = if how == How::InPlace { step.overwrite(leaf) } else { step.view_mut(leaf) };
    view.as_slice_mut().expect("the rows of a single step follow each other").copy_from_slice(values);
}

/// One writer's values, lane after lane, as a vector of environments has them.
#[derive(Clone, Debug, PartialEq)]
pub struct Source<O> {
    lanes: usize,
    obs: Vec<O>,
    more: Vec<Vec<f32>>,
    action: Vec<i64>,
    reward: Vec<f32>,
    done: Vec<bool>,
}

impl<O: Element + From<u8> + PartialEq> Source<O> {
    /// `first` is the number of the first lane: no two lanes look alike.
    pub fn new(leaves: &Leaves<O>, first: usize, lanes: usize) -> Source<O> {
        let elements = leaves.obs_elements;
        let byte = |i: usize| (i % elements * 31 + (first + i / elements) * 7) as u8;
        let part = |(i, _)| {
            let length = PARTS[i % PARTS.len()];
            (0..length * lanes).map(|at| (i + at % length * 3 + (first + at / length) * 5) as f32).collect()
        };
        Source {
            lanes,
            obs: (0..elements * lanes).map(|i| O::from(byte(i))).collect(),
            more: leaves.more.iter().enumerate().map(part).collect(),
            action: vec![0; lanes],
            reward: vec![0.0; lanes],
            done: vec![false; lanes],
        }
    }

    /// Makes it the values of step `step`, for lanes from `first` on.
    pub fn stamp(&mut self, first: usize, step: u64) {
        let elements = self.obs.len() / self.lanes;
        for lane in 0..self.lanes {
            let obs = &mut self.obs[lane * elements..][..elements];
            let stamp = step.to_le_bytes();
            obs.iter_mut().zip(stamp).take(4).for_each(|(value, byte)| *value = O::from(byte));
            if elements >= 8 {
                obs[elements - 1] = O::from(stamp[0]);
            }
            self.more.iter_mut().for_each(|part| {
                let length = part.len() / self.lanes;
                part[lane * length] = step as f32;
            });
            self.action[lane] = ((first + lane) as i64) << 32 | step as i64;
            self.reward[lane] = step as f32;
            self.done[lane] = step.is_multiple_of(7);
        }
    }

    /// Whether row `row` of the batch is lane `lane` (counted within this source).
    pub fn is_row(&self, columns: &Columns<O>, batch: &Batch, row: usize, lane: usize) -> bool {
        fn same<T: Element + PartialEq>(batch: &Batch, column: Column<T>, row: usize, from: &[T], lane: usize) -> bool {
            let got = batch.minibatch(row..row + 1).slice(column);
            got.is_some_and(|got| got == &from[lane * got.len()..(lane + 1) * got.len()])
        }
        same(batch, columns.obs, row, &self.obs, lane)
            && columns.more.iter().zip(&self.more).all(|(&column, part)| same(batch, column, row, part, lane))
            && same(batch, columns.action, row, &self.action, lane)
            && same(batch, columns.reward, row, &self.reward, lane)
            && same(batch, columns.done, row, &self.done, lane)
    }

    /// Each leaf's bytes, in the order of declaration: what the floor copies.
    pub fn bytes(&self) -> Vec<&[u8]> {
        let mut bytes = vec![as_bytes(&self.obs)];
        bytes.extend(self.more.iter().map(|part| as_bytes(part)));
        bytes.extend([as_bytes(&self.action), as_bytes(&self.reward), as_bytes(&self.done)]);
        bytes
    }
}

/// Takes batches and drops them at once, until the writers are gone.
pub fn drain(learner: &Learner) -> Result<(), NextError> {
    learner.iter().try_for_each(|batch| batch.map(drop))
}
