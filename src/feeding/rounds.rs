//! Rounds: batches dealt to several devices in turn, and given to their learners by whole rounds.
//!
//! Of n devices, the i-th gets every batch whose sequence number is i modulo n; round k is the n batches from k n on. A
//! batch that was copied waits here until every device has its own of that round; then all of them are handed over at
//! once. So every device gets its batch of round k before any gets one of round k + 1, no learner is ever ahead of
//! what the others can take, and a round that one learner has begun can be given to all: the end, whatever its reason,
//! takes back only rounds that nobody has begun. What it does not do: wait. Learners wait before their desk.
//!
//! Order of locks: `state`, then the gate of a desk.

use super::Desk;
use super::desk::Ready;
use crate::error::Closed;
use crate::gate::Wakes;
use crate::sync::lock;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};

/// In what order batches go to several devices.
///
/// ```no_run
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # step.leaf::<f32>("reward", &[]);
/// let feed = Feed::builder(Sample::step(step)).pinning(Pinning::Required).device(0).device(1).deal(Deal::Rounds).start()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Deal {
    /// Each batch goes to the first device that has a buffer for it: a fast device gets more of them. The default.
    #[default]
    OnDemand,
    /// By rounds of one batch for each device, in the order of [`FeedBuilder::device`](crate::FeedBuilder::device):
    /// every device gets its batch of round k before any gets one of round k + 1, and all learners end at the same
    /// round. The slowest device sets the pace; rounds begin when every device has its learner, and end for all when
    /// one of them is dropped. For data-parallel training, where the learners wait for each other in every step.
    Rounds,
}

/// What the desks of a feed by rounds share.
#[derive(Debug)]
pub(crate) struct Rounds {
    state: Mutex<State>,
}

/// One device's place.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    rounds: Arc<Rounds>,
    index: usize,
    devices: usize,
}

#[derive(Debug)]
struct State {
    /// Set as devices are attached, all of them before any batch is dealt.
    desks: Vec<Weak<Desk>>,
    /// Copied batches of rounds that are not complete.
    early: Vec<VecDeque<Ready>>,
    /// Devices that have seen the end of the source, with everything that was theirs copied.
    ended: Vec<bool>,
    /// Rounds of which some learner has taken its batch: they are given to all.
    begun: u64,
    closed: Option<Closed>,
}

/// What an end takes back, and whom it wakes: settled when no lock is held.
#[derive(Default)]
struct Aftermath {
    wakes: Vec<(Arc<Desk>, Wakes)>,
    untaken: Vec<(Arc<Desk>, Ready)>,
}

impl Rounds {
    /// Seats for so many devices, in order.
    pub(crate) fn seats(devices: usize) -> Vec<Seat> {
        let state = State {
            desks: (0..devices).map(|_| Weak::new()).collect(),
            early: (0..devices).map(|_| VecDeque::new()).collect(),
            ended: vec![false; devices],
            begun: 0,
            closed: None,
        };
        let rounds = Arc::new(Rounds { state: Mutex::new(state) });
        (0..devices).map(|index| Seat { rounds: rounds.clone(), index, devices }).collect()
    }
}

impl Seat {
    /// The device of this seat is attached.
    pub(crate) fn take(&self, desk: &Arc<Desk>) {
        lock(&self.rounds.state).desks[self.index] = Arc::downgrade(desk);
    }

    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// Whether the batch of this number is this device's.
    pub(crate) fn is_mine(&self, sequence: u64) -> bool {
        sequence % self.devices as u64 == self.index as u64
    }

    /// The round of a batch.
    pub(crate) fn round(&self, sequence: u64) -> u64 {
        sequence / self.devices as u64
    }

    /// This device took its turn: the next one may be waiting for its own.
    pub(crate) fn pass_on(&self) {
        let next = (self.index + 1) % self.devices;
        let desk = lock(&self.rounds.state).desks[next].upgrade();
        desk.iter().for_each(|desk| desk.call());
    }

    /// A batch of this device's was copied; the round may be complete by it. Given back if the rounds are over.
    pub(crate) fn put(&self, ready: Ready) -> Result<(), Ready> {
        let mut aftermath = Aftermath::default();
        let mut state = lock(&self.rounds.state);
        if state.closed.is_some() {
            return Err(ready);
        }
        state.early[self.index].push_back(ready);
        if state.early.iter().all(|early| !early.is_empty()) {
            let State { desks, early, .. } = &mut *state;
            for (desk, early) in desks.iter().zip(early) {
                // A desk lives as long as its feeding thread, whose batch this is.
                let (Some(desk), Some(ready)) = (desk.upgrade(), early.pop_front()) else { continue };
                let mut ready = Some(ready);
                match desk.ready.put(|_| ready.take().expect("made once")) {
                    Some(wakes) => aftermath.wakes.push((desk, wakes)),
                    None => aftermath.untaken.extend(ready.map(|ready| (desk, ready))),
                }
            }
        }
        drop(state);
        aftermath.settle();
        Ok(())
    }

    /// A learner is about to get its batch of this round: from then on the others get theirs too. The error: the rounds
    /// have ended before it, and nobody gets it.
    pub(crate) fn begin(&self, round: u64) -> Result<(), Closed> {
        let mut state = lock(&self.rounds.state);
        match &state.closed {
            Some(reason) if round >= state.begun => Err(reason.clone()),
            _ => {
                state.begun = state.begun.max(round + 1);
                Ok(())
            }
        }
    }

    /// The source ended and this device has copied all that was its own. When all have, batches of a last round that is
    /// not complete are taken back, and the learners see the end behind the rounds that are.
    pub(crate) fn end(&self) {
        let mut aftermath = Aftermath::default();
        let mut state = lock(&self.rounds.state);
        if std::mem::replace(&mut state.ended[self.index], true) {
            return;
        }
        let desks: Vec<_> = state.desks.iter().filter_map(Weak::upgrade).collect();
        if state.ended.iter().all(|ended| *ended) {
            aftermath.withdraw_early(&mut state);
            aftermath.wakes.extend(desks.iter().map(|desk| (desk.clone(), desk.ready.end(Closed::Ended))));
        }
        drop(state);
        desks.iter().for_each(|desk| desk.call()); // they look for the end too
        let rest = aftermath.untaken.len();
        if rest > 0 {
            tracing::info!(target: "pinring", batches = rest, "the source ended within a round, which nobody gets");
        }
        aftermath.settle();
    }

    /// No round begins any more; one that has begun is still given to all.
    pub(crate) fn close(&self, reason: Closed) {
        let mut aftermath = Aftermath::default();
        let mut state = lock(&self.rounds.state);
        state.closed.get_or_insert_with(|| reason.clone());
        aftermath.withdraw_early(&mut state);
        let begun = state.begun;
        for desk in state.desks.iter().filter_map(Weak::upgrade) {
            let (untaken, wakes) = desk.ready.close_but(reason.clone(), |ready| self.round(ready.sequence) < begun);
            aftermath.untaken.extend(untaken.into_iter().map(|ready| (desk.clone(), ready)));
            aftermath.wakes.push((desk, wakes));
        }
        drop(state);
        aftermath.settle();
    }

    /// Why no round begins any more.
    pub(crate) fn closed(&self) -> Option<Closed> {
        lock(&self.rounds.state).closed.clone()
    }
}

impl Aftermath {
    fn withdraw_early(&mut self, state: &mut State) {
        let State { desks, early, .. } = state;
        for (desk, early) in desks.iter().zip(early) {
            if let Some(desk) = desk.upgrade() {
                self.untaken.extend(early.drain(..).map(|ready| (desk.clone(), ready)));
            }
        }
    }

    fn settle(self) {
        self.untaken.into_iter().for_each(|(desk, ready)| desk.take_back(ready));
        self.wakes.into_iter().for_each(|(desk, wakes)| desk.ready.wake(wakes)); // last: a waker may panic, or never return
    }
}
