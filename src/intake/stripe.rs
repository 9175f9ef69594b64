//! One stripe of an open slot: which of its rows are claimed, and how many of those are committed.
//!
//! Owns the one word that both numbers and the close share, so that a claim and a commit are an atomic instruction each: a
//! step of a few bytes is as long as four of them. What it does not do: know of gaps, or of other stripes.

use super::Claim;
use crate::sync::checked::{AtomicU32, AtomicU64};
use std::sync::atomic::Ordering;

/// Set once nothing is claimed any more.
const CLOSED: u64 = 1 << 63;
/// Where the room stands in the word; below it, the rows to come.
const ROOM: u32 = 32;

/// The most rows of a batch: the word counts no more.
pub(crate) const MOST_ROWS: usize = i32::MAX as usize;

/// See the module's text. Claims are taken from its front; the last commit is told that it was the last.
#[derive(Debug, Default)]
pub(super) struct Stripe {
    /// `CLOSED`, the *room* (rows that nobody claimed: 31 bits) and the rows *to come* (not committed: 32 bits).
    word: AtomicU64,
    /// Which opening of the slot this belongs to, and its rows. They change only while there is no room and no claim, and
    /// are read behind a claim or with the gate's lock held.
    opening: AtomicU64,
    start: AtomicU32,
    end: AtomicU32,
}

/// What a stripe was when it was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AtClose {
    pub(super) committed: u32,
    /// Rows that somebody had claimed, and had not committed. Those of gaps are among them.
    pub(super) claimed: u32,
    /// The first row that nobody had claimed.
    pub(super) next: u32,
}

/// What became of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Committed {
    Some,
    /// Every row of the stripe is committed now; whoever made it so sees what was written in all of them.
    All,
    /// The gate closed before: the rows were not taken.
    Closed,
}

impl Stripe {
    /// Begins anew with rows `start..end`. Nobody has a claim on it, and the caller holds the gate's lock.
    pub(super) fn open(&self, opening: u64, start: u32, end: u32) {
        self.opening.store(opening, Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
        let rows = u64::from(end - start);
        // SYNC: pairs with the Acquire in `claim`: who gets rows knows which, and sees what the slot's last holder did.
        self.word.store(rows << ROOM | rows, Ordering::Release);
    }

    /// Rows that nobody claimed, as of just now.
    pub(super) fn room(&self) -> usize {
        room(self.word.load(Ordering::Relaxed)) as usize
    }

    /// The opening that it belongs to, as of just now.
    #[inline]
    pub(super) fn opening(&self) -> u64 {
        self.opening.load(Ordering::Relaxed)
    }

    /// Claims the next rows: `least..=most` of them, or none. `slot` and `index` say whose stripe it is.
    #[inline]
    pub(super) fn claim(&self, least: u32, most: u32, slot: u32, index: u32) -> Option<Claim> {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let room = room(word);
            if room < least || word & CLOSED != 0 {
                return None;
            }
            let rows = room.min(most);
            let next = word - (u64::from(rows) << ROOM);
            // SYNC: pairs with the Release in `open` and `give_back`. An equal word of a later opening is as good: the
            // room is what it says, and what the rows are is read behind this.
            match self.word.compare_exchange_weak(word, next, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    let start = self.end.load(Ordering::Relaxed) - room;
                    return Some(Claim { slot, start, rows, stripe: index, opening: self.opening() });
                }
                Err(now) => word = now,
            }
        }
    }

    /// Counts a claim's rows as committed.
    #[inline]
    pub(super) fn commit(&self, rows: u32) -> Committed {
        // SYNC: Release for what was written in the rows, Acquire for what others wrote in theirs: the last one seals.
        let word = self.word.fetch_sub(u64::from(rows), Ordering::AcqRel);
        if word & CLOSED != 0 {
            Committed::Closed
        } else if to_come(word) == rows {
            Committed::All
        } else {
            Committed::Some
        }
    }

    /// Takes a claim back, if none was made behind it; else its rows are a gap. The caller holds the gate's lock.
    pub(super) fn give_back(&self, claim: &Claim) -> bool {
        let behind = self.end.load(Ordering::Relaxed) - (claim.start + claim.rows);
        let mut word = self.word.load(Ordering::Relaxed);
        while room(word) == behind {
            let next = word + (u64::from(claim.rows) << ROOM);
            // SYNC: pairs with the Acquire in `claim`: the next to have these rows writes over what was begun in them.
            match self.word.compare_exchange_weak(word, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
        false
    }

    /// Ends it: nothing more is claimed or committed. The caller holds the gate's lock.
    pub(super) fn close(&self) -> AtClose {
        // SYNC: Acquire for what was written in committed rows.
        let word = self.word.fetch_or(CLOSED, Ordering::Acquire);
        let (start, end) = (self.start.load(Ordering::Relaxed), self.end.load(Ordering::Relaxed));
        AtClose { committed: end - start - to_come(word), claimed: to_come(word) - room(word), next: end - room(word) }
    }

    /// Its first row.
    pub(super) fn start(&self) -> u32 {
        self.start.load(Ordering::Relaxed)
    }
}

fn room(word: u64) -> u32 {
    ((word & !CLOSED) >> ROOM) as u32
}

fn to_come(word: u64) -> u32 {
    word as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_claimed_from_the_front_and_the_last_commit_knows() {
        let stripe = Stripe::default();
        assert_eq!(stripe.claim(1, 1, 0, 0), None, "it was never opened");
        stripe.open(3, 10, 15);
        let first = stripe.claim(2, 2, 1, 7).unwrap();
        assert_eq!(first, Claim { slot: 1, start: 10, rows: 2, stripe: 7, opening: 3 });
        assert_eq!((stripe.claim(4, 9, 1, 7), stripe.room()), (None, 3));
        let rest = stripe.claim(1, 9, 1, 7).unwrap();
        assert_eq!((rest.start, rest.rows, stripe.room()), (12, 3, 0));
        assert_eq!(stripe.commit(rest.rows), Committed::Some);
        assert_eq!(stripe.commit(first.rows), Committed::All);
    }

    #[test]
    fn the_last_claim_can_be_given_back_and_no_other() {
        let stripe = Stripe::default();
        stripe.open(1, 0, 4);
        let claims = [0, 1, 2].map(|_| stripe.claim(1, 1, 0, 0).unwrap());
        assert!(!stripe.give_back(&claims[1]), "another was made behind it");
        assert!(stripe.give_back(&claims[2]));
        assert!(stripe.give_back(&claims[1]), "now it is the last");
        assert_eq!(stripe.claim(3, 3, 0, 0).unwrap().start, 1);
    }

    #[test]
    fn a_close_says_what_was_committed_and_what_was_claimed() {
        let stripe = Stripe::default();
        stripe.open(1, 8, 8 + MOST_ROWS as u32);
        let claims = [5, 7].map(|rows| stripe.claim(rows, rows, 0, 0).unwrap());
        stripe.commit(claims[1].rows);
        assert_eq!(stripe.close(), AtClose { committed: 7, claimed: 5, next: 20 });
        assert_eq!(stripe.claim(1, 1, 0, 0), None);
        assert_eq!(stripe.commit(claims[0].rows), Committed::Closed);
    }
}

#[cfg(all(test, pinring_loom))]
mod orders {
    use super::*;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    struct Slot {
        stripe: Stripe,
        /// What is written in each row: relaxed, so that who is not ordered behind a write may miss it.
        rows: Vec<AtomicU32>,
        gate: Mutex<Gate>,
    }

    #[derive(Default)]
    struct Gate {
        gaps: u32,
        closed: bool,
    }

    fn slot(rows: u32) -> Arc<Slot> {
        let slot = Slot {
            stripe: Stripe::default(),
            rows: (0..rows).map(|_| AtomicU32::new(0)).collect(),
            gate: Mutex::new(Gate::default()),
        };
        slot.stripe.open(1, 0, rows);
        Arc::new(slot)
    }

    /// Writes one row; whether its commit was the last.
    fn write(slot: &Slot) -> Option<Committed> {
        let claim = slot.stripe.claim(1, 1, 0, 0)?;
        assert_eq!(claim.opening, slot.stripe.opening());
        let row = &slot.rows[claim.start as usize];
        row.store(row.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        Some(slot.stripe.commit(claim.rows))
    }

    /// Every row is written once, one commit is told that it was the last, and sees all of them; then the slot begins anew.
    #[test]
    fn the_last_commit_sees_every_row() {
        loom::model(|| {
            let slot = slot(3);
            let writers = [0, 1].map(|_| {
                let slot = slot.clone();
                thread::spawn(move || {
                    let committed = write(&slot);
                    if committed == Some(Committed::All) {
                        slot.rows.iter().for_each(|row| assert_eq!(row.load(Ordering::Relaxed), 1));
                        slot.stripe.open(2, 0, 1);
                    }
                    committed
                })
            });
            let mine = write(&slot);
            let mut all: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).chain([mine]).collect();
            if mine == Some(Committed::All) {
                slot.stripe.open(2, 0, 1);
            }
            all.retain(|committed| *committed == Some(Committed::All));
            assert_eq!(all.len(), 1);
            assert!(slot.stripe.claim(1, 1, 0, 0).is_some_and(|claim| (claim.start, claim.opening) == (0, 2)));
        });
    }

    /// Who comes with an old word finds either no room, or rows of the new opening with its number.
    #[test]
    fn a_claim_across_two_openings_is_of_one_of_them() {
        loom::model(|| {
            let slot = slot(2);
            let late = thread::spawn({
                let slot = slot.clone();
                move || slot.stripe.claim(1, 1, 0, 0).map(|claim| (claim.start, claim.opening))
            });
            let mut last = None;
            while let Some(committed) = write(&slot) {
                last = Some(committed);
            }
            if last == Some(Committed::All) {
                slot.stripe.open(2, 5, 7); // the other one had nothing yet: it finds what is there now
            }
            let late = late.join().unwrap();
            match last {
                Some(Committed::All) => assert!(matches!(late, None | Some((5 | 6, 2))), "{late:?}"),
                _ => assert!(matches!(late, Some((0 | 1, 1))), "{late:?}"),
            }
        });
    }

    /// Who gets a row that was given back is ordered behind what was begun in it, and may write over that.
    #[test]
    fn a_row_that_was_given_back_shows_what_was_begun_in_it() {
        loom::model(|| {
            let slot = slot(1);
            let dropper = thread::spawn({
                let slot = slot.clone();
                move || {
                    let Some(claim) = slot.stripe.claim(1, 1, 0, 0) else { return false };
                    slot.rows[0].store(7, Ordering::Relaxed);
                    slot.stripe.give_back(&claim)
                }
            });
            let row = slot.stripe.claim(1, 1, 0, 0).map(|_| slot.rows[0].load(Ordering::Relaxed));
            match (row, dropper.join().unwrap()) {
                (Some(row), dropped_before) => assert_eq!(row, if dropped_before { 7 } else { 0 }),
                (None, dropped) => assert!(dropped),
            }
        });
    }

    /// However a claim ends (committed, given back, left as a gap, or later), the close counts its row once.
    #[test]
    fn a_close_counts_each_row_once() {
        loom::model(|| {
            let slot = slot(2);
            let committer = thread::spawn({
                let slot = slot.clone();
                move || write(&slot)
            });
            let dropper = thread::spawn({
                let slot = slot.clone();
                move || {
                    let Some(claim) = slot.stripe.claim(1, 1, 0, 0) else { return 0 };
                    slot.rows[claim.start as usize].store(0, Ordering::Relaxed);
                    let mut gate = slot.gate.lock().unwrap();
                    if gate.closed {
                        return claim.rows;
                    }
                    if !slot.stripe.give_back(&claim) {
                        gate.gaps += claim.rows;
                    }
                    0
                }
            });
            let mut gate = slot.gate.lock().unwrap();
            gate.closed = true;
            let (at_close, gaps) = (slot.stripe.close(), gate.gaps);
            drop(gate);
            let (committed, dropped_later) = (committer.join().unwrap(), dropper.join().unwrap());
            assert_eq!(at_close.committed, u32::from(committed == Some(Committed::Some)));
            let later = u32::from(committed == Some(Committed::Closed)) + dropped_later;
            assert_eq!(at_close.claimed, gaps + later, "{committed:?}");
        });
    }
}
