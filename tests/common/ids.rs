//! Stored steps that are told apart: each holds its id, and a row is a step and its successor.
#![allow(dead_code)]

use pinring::{Batch, Column, Leaf, Sample, Step};

pub struct Ids {
    pub obs: Leaf<i64>,
    now: Column<i64>,
    next: Column<i64>,
    pub sample: Sample,
}

impl Ids {
    pub fn new() -> Ids {
        let mut step = Step::new();
        let obs = step.observation::<i64>("id", &[]);
        let mut sample = Sample::transition(step, 1, 0.9);
        let (now, next) = (sample.at(obs, 0), sample.next(obs));
        Ids { obs, now, next, sample }
    }

    /// The ids of a batch, each of which has its successor beside it.
    pub fn of(&self, batch: &Batch) -> Vec<i64> {
        let (now, next) = (batch.slice(self.now), batch.slice(self.next));
        assert!(now.iter().zip(next).all(|(now, next)| now + 1 == *next), "{now:?} {next:?}");
        now.to_vec()
    }
}
