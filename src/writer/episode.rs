//! A whole episode at once, into a step store: for recorded data.

use super::{CommitError, PutError, Target, Way, Writer};
use crate::element::Element;
use crate::episodes::{End, Episode};
use crate::error::{Closed, Error, ErrorKind, Result};
use crate::schema::Leaf;
use crate::store::{Flags, Opened};
use std::marker::PhantomData;

/// An episode that a [`Writer`] stores as a whole. Put every leaf, then [`commit`](EpisodeMut::commit); nothing is copied
/// before that, and then each value once. Dropped without a commit, it is as if it had never begun.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// let obs = step.observation::<f32>("obs", &[2]);
/// let action = step.leaf::<i64>("action", &[]);
/// # let mut sample = Sample::transition(step, 1, 0.99);
/// # let column = sample.next(obs);
/// let feed = Feed::builder(sample).batch(4).lanes(1).replay(1000, Uniform::new()).start()?;
/// let mut writer = feed.writer(1)?;
/// let mut episode = writer.episode(10)?; // ten steps, and what was observed behind the last
/// episode.put(obs, &[0.5; 11 * 2])?;
/// episode.put(action, &[1; 10])?;
/// episode.commit(End::Terminated, 0)?;
/// assert_eq!(feed.metrics().stored_samples, 10);
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "an episode that is not committed never began"]
pub struct EpisodeMut<'w, 'v> {
    writer: &'w mut Writer,
    len: usize,
    /// Of each leaf, the first value.
    values: Vec<Option<*const u8>>,
    borrowed: PhantomData<&'v [u8]>,
}

impl Writer {
    /// Begins an episode of `len` steps, which is stored as a whole; waits as [`step`](Writer::step) does. Of a replay
    /// feed's writer of one lane. An episode that the lane is in the middle of is given up. To a pace the episode is one
    /// step when it begins, and `len` steps when it is there. Of an episode longer than the store its last steps stay.
    ///
    /// # Errors
    /// [`ErrorKind::Misuse`] for other writers, [`ErrorKind::Config`] for 0 steps, or more than are counted in 32 bits; otherwise as [`step`](Writer::step).
    pub fn episode<'v>(&mut self, len: usize) -> Result<EpisodeMut<'_, 'v>> {
        let lanes = self.lanes.len();
        if !matches!(self.way, Way::Stored(_)) || lanes != 1 {
            return Err(Error::new(
                ErrorKind::Misuse,
                format!("an episode is stored by a writer of one lane of a replay feed, but this one has {lanes}"),
            ));
        }
        let most = u32::MAX as usize - 1; // and one observation more
        if len == 0 || len > most {
            return Err(Error::new(
                ErrorKind::Config,
                format!("an episode of {len} steps cannot be stored: give `episode` 1 to {most}"),
            ));
        }
        drop(self.step()?); // waits, and opens nothing
        let values = vec![None; self.gate.layout.leaves.len()];
        Ok(EpisodeMut { writer: self, len, values, borrowed: PhantomData })
    }
}

impl<'v> EpisodeMut<'_, 'v> {
    /// The values of a leaf, step by step: `len × elements`; of an observation one more, the final one.
    ///
    /// # Errors
    /// [`PutError::Episode`] gives both numbers; [`PutError::Foreign`].
    pub fn put<T: Element>(&mut self, leaf: Leaf<T>, values: &'v [T]) -> Result<&mut Self, PutError> {
        let index = self.writer.own(leaf)?;
        let info = &self.writer.gate.layout.leaves[index];
        let steps = self.len + usize::from(info.observation);
        let expected = steps.checked_mul(info.elements());
        if expected != Some(values.len()) {
            return Err(PutError::Episode {
                leaf: info.name.clone(),
                steps,
                expected: expected.unwrap_or(usize::MAX),
                got: values.len(),
            });
        }
        self.values[index] = Some(values.as_ptr().cast());
        Ok(self)
    }

    /// Stores the episode, whose steps were acted with `version` of the weights.
    ///
    /// # Errors
    /// [`CommitError::Unwritten`] and [`CommitError::NonFinite`], with nothing stored; [`CommitError::Closed`] if the feed
    /// ends meanwhile.
    pub fn commit(self, end: End, version: u64) -> Result<(), CommitError> {
        let EpisodeMut { writer, len, values, .. } = self;
        if writer.gate.is_inherited() {
            return Err(Closed::UsedAfterFork.into());
        }
        let layout = writer.gate.layout.clone();
        let unwritten = values.iter().position(Option::is_none);
        if let Some(leaf) = unwritten {
            return Err(CommitError::Unwritten { leaf: layout.leaves[leaf].name.clone(), lane: 0 });
        }
        let at = |leaf: usize, step: usize| {
            values[leaf].unwrap_or(std::ptr::null()).wrapping_add(step * layout.leaves[leaf].bytes())
        };
        // SAFETY: for both, the leaf's values as `put` took them: `len` of each, one more of an observation.
        let rejected = unsafe { writer.lanes.find_non_finite(&layout, len, &at) };
        if let Some((leaf, index)) = rejected {
            writer.counters.reject(1);
            let (leaf, value) = (layout.leaves[leaf].name.clone(), "NaN or an infinity".to_owned());
            return Err(CommitError::NonFinite { leaf, lane: 0, index, value });
        }
        // SAFETY: as above.
        let ret = unsafe { writer.lanes.sum_rewards(len, &at) };
        let lane = writer.seat.lanes.start as u32;
        let Way::Stored(state) = &writer.way else { unreachable!("`episode` looked at the way") };
        let closed = |closed| {
            writer.counters.drop_rows(1);
            CommitError::Closed(closed)
        };
        state.store.cut(lane as usize..lane as usize + 1);
        let mut done = 0;
        while done < len {
            let opened = state.store.open_run(lane, len - done, &writer.counters);
            let (ring, first, count) = opened.map_err(closed)?;
            for step in 0..count {
                let opened = first.behind(step);
                for leaf in 0..layout.leaves.len() {
                    // SAFETY: a value of the episode, outside of the ring; the record is this lane's, opened and not
                    // published, and `ring` keeps it mapped (invariants 2 and 7).
                    unsafe { state.store.put(opened, leaf, Some(at(leaf, done + step as usize))) };
                }
            }
            let flags = |step: u32| {
                let (first, last) = (done + step as usize == 0, done + step as usize + 1 == len);
                Flags {
                    terminated: last && end == End::Terminated,
                    truncated: last && end == End::Truncated,
                    first,
                    ..Flags::default()
                }
            };
            state.store.publish_run(lane, first, count, version, &flags).map_err(closed)?;
            drop(ring);
            done += count as usize;
        }
        if layout.within_episode {
            let mut opened = [Opened::default()];
            let ring = state.store.open(lane, &mut opened, &writer.counters).map_err(closed)?;
            for (leaf, _) in layout.leaves.iter().enumerate().filter(|(_, info)| info.observation && info.every == 1) {
                // SAFETY: the final observation that `put` took; the record as above.
                unsafe { state.store.put(opened[0], leaf, Some(at(leaf, len))) };
            }
            state.store.publish_final(lane, opened[0], None).map_err(closed)?;
            drop(ring);
        }
        writer.tick += len as u64;
        writer.counters.step(len as u64);
        writer.gate.finished(Episode { lane: lane as usize, length: len as u64, ret, end, version });
        writer.lanes.begin_episode(0, writer.tick);
        debug_assert_eq!(writer.open.target, Target::Nowhere, "no step is open beside an episode");
        Ok(())
    }
}
