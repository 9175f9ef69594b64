//! Rows go where there is room: single steps, and unrolls of free-running lanes.
//!
//! An open slot is cut into one contiguous *stripe* per writer, each with a word of its own, so that writers do not
//! meet. A claim takes the next rows of the writer's own stripe, else of the fullest; gaps that dropped steps left are
//! filled first. When no single run is long enough, the step is *staged*: written in the writer's lane buffer and
//! copied at commit into whatever rows there are. Free slots are a list, never a cycle, and slots are sealed as they
//! fill, so one slow writer holds up one slot at the most.

use super::stripe::{Committed, Stripe};
use super::{IntakeGate, NoRoom, State, Wait};
use crate::error::Closed;
use crate::gate::Wakes;
use crate::metrics::WriterCounters;
use crate::sync::{Padded, Patience, Spin, lock};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// More stripes than this gain nothing: they would be a few rows each.
const MAX_STRIPES: usize = 64;

/// The stripes of all slots, as many for each, used while their slot is open.
#[derive(Debug)]
pub(super) struct Stripes {
    a_slot: usize,
    all: Box<[Padded<Stripe>]>,
}

impl Stripes {
    pub(super) fn new(slots: usize, rows: usize) -> Stripes {
        let a_slot = MAX_STRIPES.min(rows);
        Stripes { a_slot, all: (0..slots * a_slot).map(|_| Padded::default()).collect() }
    }

    /// The stripes of an open slot, and the number of the first.
    fn of(&self, open: &Open) -> (&[Padded<Stripe>], u32) {
        let first = open.slot as usize * self.a_slot;
        (&self.all[first..first + open.stripes as usize], first as u32)
    }

    #[inline]
    fn get(&self, index: u32) -> &Stripe {
        &self.all[index as usize]
    }
}

/// Rows that one writer may write, until it commits or drops them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) slot: u32,
    pub(crate) start: u32,
    pub(crate) rows: u32,
    /// Counted over all slots, as in the cursor.
    pub(super) stripe: u32,
    pub(super) opening: u64,
}

impl Claim {
    /// Which batch, in order of opening, these rows are part of.
    pub(crate) fn batch(&self) -> u64 {
        self.opening - 1
    }
}

/// What a claim came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claimed {
    /// One run of rows, to be written in place.
    Rows(Claim),
    /// There is room, but not in one run: write the step in the lane buffer.
    Staged,
}

/// Where a writer claimed last.
#[derive(Debug, Default)]
pub(crate) struct StripeCursor {
    /// The writer's index among the writers.
    writer: usize,
    slot: u32,
    stripe: u32,
    opening: u64,
    spin: Spin,
}

impl StripeCursor {
    pub(crate) fn new(writer: usize) -> StripeCursor {
        StripeCursor { writer, ..StripeCursor::default() }
    }
}

#[derive(Debug, Default)]
pub(super) struct Fill {
    /// Oldest first.
    open: Vec<Open>,
    gaps: Vec<Claim>,
    /// After the close: slots that were open, and the rows in them that somebody still has a claim on.
    held: Vec<(u32, u32)>,
}

#[derive(Debug)]
struct Open {
    slot: u32,
    opening: u64,
    stripes: u32,
    /// Stripes that are not complete.
    left: u32,
    opened: Instant,
}

impl Fill {
    /// The batch, in order of opening, that is being filled now.
    fn filling(&self, opened: u64) -> u64 {
        self.open.first().map_or(opened, |open| open.opening - 1)
    }
}

impl IntakeGate {
    /// Claims `rows` rows in one run, when `claim_own` has none.
    pub(crate) fn claim(
        &self,
        rows: usize,
        cursor: &mut StripeCursor,
        patience: Patience,
        counters: &Padded<WriterCounters>,
    ) -> Result<Claimed, NoRoom> {
        self.claim_slow(cursor, patience, counters, false, |gate, state, cursor| {
            if let Some(place) = state.striped.gaps.iter().position(|gap| gap.rows as usize >= rows) {
                return Some(Claimed::Rows(gate.take_gap(state, place, rows)));
            }
            if !state.striped.gaps.is_empty() {
                return Some(Claimed::Staged);
            }
            let mut scraps = false;
            for open in &state.striped.open {
                match gate.claim_in(open, rows, rows, cursor) {
                    Ok(claim) => return Some(Claimed::Rows(claim)),
                    Err(room) => scraps |= room,
                }
            }
            if scraps || rows > gate.layout.rows {
                // A step wider than a batch never fits in one run.
                return (scraps || !state.free.is_empty()).then_some(Claimed::Staged);
            }
            gate.open_stripes(state).map(|open| {
                let claim = gate.claim_in(&open, rows, rows, cursor);
                state.striped.open.push(open);
                claim.map_or(Claimed::Staged, Claimed::Rows)
            })
        })
    }

    /// Claims up to `rows` rows in one run, wherever there is one: for staged rows.
    pub(crate) fn claim_some(
        &self,
        rows: usize,
        cursor: &mut StripeCursor,
        patience: Patience,
        counters: &Padded<WriterCounters>,
    ) -> Result<Claim, NoRoom> {
        self.claim_slow(cursor, patience, counters, false, |gate, state, cursor| {
            if let Some(gap) = state.striped.gaps.first() {
                let rows = rows.min(gap.rows as usize);
                return Some(gate.take_gap(state, 0, rows));
            }
            for open in &state.striped.open {
                if let Ok(claim) = gate.claim_in(open, 1, rows, cursor) {
                    return Some(claim);
                }
            }
            let open = gate.open_stripes(state)?;
            let claim = gate.claim_in(&open, 1, rows, cursor).ok();
            state.striped.open.push(open);
            claim
        })
    }

    /// Waits within `patience` until `rows` rows could be claimed, or all there are; claims none of them.
    pub(crate) fn wait_for_room(
        &self,
        rows: usize,
        cursor: &mut StripeCursor,
        patience: Patience,
        counters: &Padded<WriterCounters>,
    ) -> Result<(), NoRoom> {
        let rows = rows.min(self.buffers * self.layout.rows);
        self.claim_slow(cursor, patience, counters, true, |gate, state, _| {
            let gaps: usize = state.striped.gaps.iter().map(|gap| gap.rows as usize).sum();
            let free = state.free.len() * gate.layout.rows;
            let open = |open: &Open| gate.stripes.of(open).0.iter().map(|stripe| stripe.room()).sum::<usize>();
            (gaps + free + state.striped.open.iter().map(open).sum::<usize>() >= rows).then_some(())
        })
    }

    /// The batch that staged rows will begin in, for the lag gate.
    pub(crate) fn filling(&self) -> u64 {
        let state = lock(&self.state);
        state.striped.filling(state.opened)
    }

    /// The claim's rows are written. They are the learner's when their slot is full.
    #[inline]
    pub(crate) fn commit(self: &Arc<Self>, claim: &Claim) -> Result<(), Closed> {
        match self.stripes.get(claim.stripe).commit(claim.rows) {
            Committed::Some => {}
            Committed::All => self.complete_stripe(claim.opening),
            Committed::Closed => return Err(self.end_claim_after_close(claim)),
        }
        Ok(())
    }

    /// The claim's rows were not written: as if never claimed.
    pub(crate) fn unclaim(self: &Arc<Self>, claim: &Claim) {
        let mut state = lock(&self.state);
        if state.closed.is_some() {
            drop(state);
            self.end_claim_after_close(claim);
            return;
        }
        if !self.stripes.get(claim.stripe).give_back(claim) {
            state.striped.gaps.push(*claim);
            self.gaps_hint.store(true, Ordering::Relaxed);
        }
        self.wake_one(state);
        if let Some(lag) = &self.lag {
            lag.versions.wake(); // who waits there with rows of a later batch may come for these
        }
    }

    /// Ends a claim that outlived the close; the last one of its slot brings that home, the last of all gives the ring up.
    #[cold]
    fn end_claim_after_close(&self, claim: &Claim) -> Closed {
        let mut state = lock(&self.state);
        let reason = state.closed.clone().unwrap_or(Closed::Stopped);
        if let Some(place) = state.striped.held.iter().position(|(slot, _)| *slot == claim.slot) {
            let (slot, rows) = &mut state.striped.held[place];
            let slot = *slot;
            *rows -= claim.rows;
            if *rows == 0 {
                state.striped.held.swap_remove(place);
                state.free.push(slot);
            }
        }
        let ring = self.release_ring(&mut state);
        drop(state);
        drop(ring);
        reason
    }

    /// Whether a batch before `batch` has rows that nobody claimed.
    pub(crate) fn has_room_before(&self, batch: u64) -> bool {
        let state = lock(&self.state);
        let earlier = |opening: u64| opening <= batch;
        let mut open = state.striped.open.iter().filter(|open| earlier(open.opening));
        state.striped.gaps.iter().any(|gap| earlier(gap.opening))
            || open.any(|open| self.stripes.of(open).0.iter().any(|stripe| stripe.room() > 0))
    }

    /// Claims `rows` rows of a batch before `batch`; none if those have no room.
    pub(crate) fn claim_before(&self, batch: u64, rows: usize, cursor: &mut StripeCursor) -> Option<Claimed> {
        let mut state = lock(&self.state);
        let earlier = |opening: u64| opening <= batch; // openings are counted from 1
        let gap = |gap: &Claim| earlier(gap.opening) && gap.rows as usize >= rows;
        if let Some(place) = state.striped.gaps.iter().position(gap) {
            return Some(Claimed::Rows(self.take_gap(&mut state, place, rows)));
        }
        let mut scraps = state.striped.gaps.iter().any(|gap| earlier(gap.opening));
        for open in state.striped.open.iter().filter(|open| earlier(open.opening)) {
            match self.claim_in(open, rows, rows, cursor) {
                Ok(claim) => return Some(Claimed::Rows(claim)),
                Err(room) => scraps |= room,
            }
        }
        scraps.then_some(Claimed::Staged)
    }

    /// The short way: the next rows of the stripe that the writer claimed in last.
    #[inline]
    pub(crate) fn claim_own(&self, rows: usize, cursor: &StripeCursor) -> Option<Claim> {
        if cursor.opening == 0 || self.gaps_hint.load(Ordering::Relaxed) {
            return None;
        }
        let stripe = self.stripes.get(cursor.stripe);
        if stripe.opening() != cursor.opening {
            return None; // older slots come first; what opens from here on is as good
        }
        stripe.claim(rows as u32, rows as u32, cursor.slot, cursor.stripe)
    }

    /// The long way: under the gate's lock, waiting for room if there is none. `choosy`: not any room will do.
    fn claim_slow<R>(
        &self,
        cursor: &mut StripeCursor,
        patience: Patience,
        counters: &Padded<WriterCounters>,
        choosy: bool,
        attempt: impl Fn(&Self, &mut State, &mut StripeCursor) -> Option<R>,
    ) -> Result<R, NoRoom> {
        let mut spin = std::mem::take(&mut cursor.spin);
        let mut wait = Wait { choosy, ..Wait::new(&mut spin, counters) };
        let mut state = lock(&self.state);
        let result = loop {
            if let Some(closed) = &state.closed {
                let closed = closed.clone();
                drop(state);
                break Err(NoRoom::Closed(closed));
            }
            if let Some(done) = attempt(self, &mut state, cursor) {
                if wait.waited() && state.parked + state.choosy > 0 {
                    self.wake_one(state); // room may be left for the next
                } else {
                    drop(state);
                }
                break Ok(done);
            }
            let (again, waited) = self.wait(state, patience, &mut wait);
            state = again;
            if !waited {
                drop(state);
                break Err(NoRoom::Full);
            }
        };
        cursor.spin = spin;
        result
    }

    /// Claims `least..=most` rows of an open slot: of the writer's own stripe, else of the fullest. `Err` tells whether
    /// there was any room at all.
    fn claim_in(&self, open: &Open, least: usize, most: usize, cursor: &mut StripeCursor) -> Result<Claim, bool> {
        let (stripes, first) = self.stripes.of(open);
        let own = (cursor.writer % open.stripes as usize) as u32;
        let room = |index: u32| stripes[index as usize].room();
        let mut best = (room(own), own);
        if best.0 < least {
            best = (0..open.stripes).map(|index| (room(index), index)).max_by_key(|&(room, _)| room).unwrap_or(best);
        }
        loop {
            let (least, most) = (least as u32, most as u32);
            if let Some(claim) = stripes[best.1 as usize].claim(least, most, open.slot, first + best.1) {
                (cursor.slot, cursor.stripe, cursor.opening) = (open.slot, claim.stripe, claim.opening);
                return Ok(claim);
            }
            // Its own writer was quicker: look again. Rooms only shrink here, since dropped claims need the lock of
            // the gate, which the caller holds, to show up elsewhere.
            best = (0..open.stripes).map(|index| (room(index), index)).max().unwrap_or(best);
            if best.0 < least as usize {
                return Err(best.0 > 0);
            }
        }
    }

    fn take_gap(&self, state: &mut State, place: usize, rows: usize) -> Claim {
        let gap = &mut state.striped.gaps[place];
        let claim = Claim { rows: rows as u32, ..*gap };
        gap.start += rows as u32;
        gap.rows -= rows as u32;
        if gap.rows == 0 {
            state.striped.gaps.remove(place);
        }
        self.gaps_hint.store(!state.striped.gaps.is_empty(), Ordering::Relaxed);
        claim
    }

    /// Opens a free slot, cut into one stripe per writer; widths are multiples of the widest writer where they can be.
    fn open_stripes(&self, state: &mut State) -> Option<Open> {
        let (slot, opening) = self.open_slot(state)?;
        let rows = self.layout.rows;
        let (writers, widest) = self.lanes.writers();
        let unit = widest.min(rows);
        let units = rows / unit;
        let count = writers.clamp(1, units.min(MAX_STRIPES));
        let open = Open { slot, opening, stripes: count as u32, left: count as u32, opened: Instant::now() };
        let mut start = 0;
        for (index, stripe) in self.stripes.of(&open).0.iter().enumerate() {
            let end = if index + 1 == count {
                rows
            } else {
                start + (units / count + usize::from(index < units % count)) * unit
            };
            stripe.open(opening, start as u32, end as u32);
            start = end;
        }
        Some(open)
    }

    #[cold]
    fn complete_stripe(self: &Arc<Self>, opening: u64) {
        let mut state = lock(&self.state);
        let Some(place) = state.striped.open.iter().position(|open| open.opening == opening) else {
            return; // closed in between: the rows were counted as dropped there
        };
        let open = &mut state.striped.open[place];
        open.left -= 1;
        if open.left == 0 {
            let open = state.striped.open.remove(place);
            let wakes = self.seal(&state, open.slot, self.layout.rows, open.opened);
            drop(state);
            self.batches.wake(wakes);
        }
    }

    /// At the close: no more claims; returns the committed rows that are lost, and the slots in which nobody has a claim.
    pub(super) fn abandon_stripes(&self, state: &mut State) -> (u64, Vec<u32>) {
        let (mut rows, mut slots) = (0, Vec::new());
        self.gaps_hint.store(false, Ordering::Relaxed);
        let gaps = std::mem::take(&mut state.striped.gaps);
        for open in std::mem::take(&mut state.striped.open) {
            let mut claimed = 0;
            for stripe in self.stripes.of(&open).0 {
                let at_close = stripe.close();
                rows += u64::from(at_close.committed);
                claimed += at_close.claimed;
            }
            claimed -= gaps.iter().filter(|gap| gap.slot == open.slot).map(|gap| gap.rows).sum::<u32>();
            match claimed {
                0 => slots.push(open.slot),
                claimed => state.striped.held.push((open.slot, claimed)),
            }
        }
        (rows, slots)
    }

    /// The source ended: gathers the committed rows of all open slots into full batches and a last, partial one.
    pub(super) fn finish_stripes(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        if state.closed.is_some() {
            return;
        }
        state.closed = Some(Closed::Ended);
        let open = std::mem::take(&mut state.striped.open);
        let rows: Vec<(u32, usize)> = open.iter().flat_map(|open| self.committed_rows(&state, open)).collect();
        state.striped.gaps.clear();
        let targets = open.iter().flat_map(|open| (0..self.layout.rows).map(|row| (open.slot, row)));
        for (&from, to) in rows.iter().zip(targets) {
            if from != to {
                // SAFETY: no writer is left, so this thread, which holds the gate's lock, has every open slot to
                // itself (invariant 2). Rows move only towards the front of the list of targets, and a row is read
                // before anything later is written over it, since the k-th row never stands before the k-th target.
                #[allow(unsafe_code)]
                unsafe {
                    self.slots.move_row(from, to)
                };
            }
        }
        let mut left = rows.len();
        let mut sealed = Vec::new();
        for open in open {
            let rows = left.min(self.layout.rows);
            left -= rows;
            if rows == 0 {
                state.free.push(open.slot);
            } else {
                if rows < self.layout.rows {
                    // SAFETY: as above.
                    #[allow(unsafe_code)]
                    unsafe {
                        self.slots.close_ranks(open.slot, rows)
                    };
                }
                sealed.push((open, rows));
            }
        }
        let sealed = sealed.into_iter().map(|(open, rows)| self.seal(&state, open.slot, rows, open.opened));
        let wakes = sealed.fold(Wakes::default(), Wakes::and).and(self.batches.end(Closed::Ended));
        let ring = self.release_ring(&mut state);
        self.announce_close(state);
        drop(ring);
        self.wake_watchers();
        self.batches.wake(wakes); // last: a waker may panic, or never return
    }

    fn committed_rows(&self, state: &MutexGuard<'_, State>, open: &Open) -> Vec<(u32, usize)> {
        let (stripes, _) = self.stripes.of(open);
        let gap = |row: usize| {
            let of_slot = state.striped.gaps.iter().filter(|gap| gap.opening == open.opening);
            of_slot.into_iter().any(|gap| (gap.start..gap.start + gap.rows).contains(&(row as u32)))
        };
        let claimed = stripes.iter().flat_map(|stripe| stripe.start() as usize..stripe.close().next as usize);
        claimed.filter(|&row| !gap(row)).map(|row| (open.slot, row)).collect()
    }
}
