//! What writes: lanes that step, end their episodes, drop steps half-written, and die in the midst of one.

use crate::account::Account;
use crate::feeds::{Kind, LANES};
use crate::rows::{self, Rng, WORDS};
use pinring::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// What a thread that is to die says.
pub const KILLED: &str = "soak: this environment is to die here";

/// What writes.
#[derive(Clone)]
pub struct Environment {
    pub kind: Kind,
    pub words: Leaf<u64>,
    pub weights: Weights<u64>,
    pub account: Arc<Account>,
    pub leave: Arc<AtomicBool>,
    pub committed: Arc<AtomicU64>,
}

impl Environment {
    /// Steps until the feed ends, or it is to leave; panics now and then, in the middle of a step.
    pub fn run(self, mut writer: Writer, mut rng: Rng) {
        let uid = self.account.uids(LANES);
        let mut step = [0u64; LANES];
        let mut values = [0; LANES * WORDS];
        while !self.leave.load(Ordering::Relaxed) {
            self.account.live();
            match self.step(&mut writer, uid, &mut step, &mut values, &mut rng) {
                Ok(true) => drop(self.committed.fetch_add(LANES as u64, Ordering::Relaxed)),
                Ok(false) => {}
                Err(error) => {
                    let over = matches!(error.kind(), ErrorKind::Stopped | ErrorKind::Ended);
                    return self.account.check(over, || format!("{:?}: a writer: {error}", self.kind));
                }
            }
        }
    }

    /// One step of every lane: whether it was committed.
    fn step(
        &self,
        writer: &mut Writer,
        uid: u64,
        step: &mut [u64; LANES],
        values: &mut [u64],
        rng: &mut Rng,
    ) -> Result<bool> {
        let fill = |values: &mut [u64], step: &[u64; LANES]| {
            for (lane, words) in values.chunks_exact_mut(WORDS).enumerate() {
                rows::fill(words, rows::id(uid + lane as u64, step[lane]));
            }
        };
        fill(values, step);
        let mut open = match rng.below(4) {
            0 => match writer.step_timeout(Duration::from_millis(50)) {
                Err(StepError::Full { .. } | StepError::Pace(_) | StepError::Gathering) => return Ok(false),
                open => open?,
            },
            _ => writer.step()?,
        };
        open.put(self.words, values)?;
        if self.kind != Kind::Steps && !self.kind.is_replayed() {
            let (version, policy) = open.policy(&self.weights)?;
            self.account.check(version == *policy, || format!("version {version} came with the weights of {policy}"));
        }
        if self.kind != Kind::Lockstep {
            match rng.below(6_000) {
                0 => panic!("{KILLED}"),
                1..10 => {
                    self.account.add("steps dropped half-written", 1);
                    return Ok(false);
                }
                _ => {}
            }
        }
        let mut ended = [false; LANES];
        for lane in 0..LANES {
            if rng.once_in(50) {
                ended[lane] = true;
                let mut last = open.end(lane, if rng.once_in(2) { End::Terminated } else { End::Truncated });
                if self.kind.is_replayed() {
                    let mut words = [0; WORDS];
                    rows::fill(&mut words, rows::id(uid + lane as u64, step[lane] + 1));
                    last.put(self.words, &words)?;
                }
            }
        }
        open.commit()?;
        for (step, ended) in step.iter_mut().zip(ended) {
            *step += 1 + u64::from(ended && self.kind.is_replayed()); // the final observation has a number of its own
        }
        Ok(true)
    }
}
