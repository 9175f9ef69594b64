//! What a writer knows of each of its lanes, and of the step it writes.
//!
//! Owns episode accounts, the marks of the open step (ended, masked), which leaves were written, and for staged unrolls
//! the flags of the steps in the lane buffer.

use crate::element::{Element, with_element};
use crate::episodes::End;
use crate::layout::Layout;

/// Reads one value as `f64`. Unsafe: see [`read_f64`].
type Read = unsafe fn(*const u8) -> f64;
/// Finds the first value that is NaN or infinite. Unsafe: see [`find_non_finite`].
type FindNonFinite = unsafe fn(*const u8, usize) -> Option<usize>;

/// # Safety
/// `from` is a leaf's place of element type `T`: aligned, and holding a valid element, since rings and lane buffers
/// start zeroed and only values of the leaf's type are written there.
unsafe fn read_f64<T: Element>(from: *const u8) -> f64 {
    // SAFETY: the caller's duty.
    unsafe { from.cast::<T>().read() }.to_f64()
}

/// # Safety
/// As for `read_f64`, for `elements` elements.
unsafe fn find_non_finite<T: Element>(from: *const u8, elements: usize) -> Option<usize> {
    // SAFETY: the caller's duty.
    (0..elements).find(|&i| !unsafe { from.cast::<T>().add(i).read() }.is_finite())
}

#[derive(Debug)]
pub(super) struct Lanes {
    states: Vec<LaneState>,
    /// Marks of the open step.
    ends: Vec<Option<End>>,
    masked: Vec<bool>,
    /// Whether any mark is set, so that most steps need not look.
    marked: bool,
    /// Lanes whose final observation was put in the open step.
    pub(super) finals: Vec<bool>,
    pub(super) reward: Option<(usize, Read)>,
    pub(super) reject: Vec<(usize, FindNonFinite)>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LaneState {
    /// The writer's tick that the lane's episode began at.
    pub(super) episode_start: u64,
    /// The return so far.
    pub(super) ret: f64,
    /// Staged unrolls: the writer's tick that the current unroll began at.
    pub(super) unroll_start: u64,
    /// Staged unrolls: whether the lag gate counted the current unroll.
    pub(super) begun: bool,
}

impl Lanes {
    #[allow(clippy::bind_instead_of_map, clippy::unnecessary_filter_map)] // with the feature `half` no type is absent
    pub(super) fn new(layout: &Layout, lanes: usize) -> Lanes {
        let reward = layout.reward.and_then(|leaf| {
            let read = with_element!(layout.leaves[leaf].dtype, T => read_f64::<T> as Read, absent => return None);
            Some((leaf, read))
        });
        let reject = layout.leaves.iter().enumerate().filter(|(_, leaf)| leaf.reject_non_finite);
        let reject = reject.filter_map(|(index, leaf)| {
            let find = with_element!(leaf.dtype, T => find_non_finite::<T> as FindNonFinite, absent => return None);
            Some((index, find))
        });
        Lanes {
            states: vec![LaneState::default(); lanes],
            ends: vec![None; lanes],
            masked: vec![false; lanes],
            marked: false,
            finals: vec![false; lanes],
            reward,
            reject: reject.collect(),
        }
    }

    /// The first leaf of an episode of `len` steps that rejects a value it holds, and that value's place.
    ///
    /// # Safety
    /// `at` gives the address of a leaf's first value: of `len` values of each leaf, and one more of an observation.
    pub(super) unsafe fn find_non_finite(
        &self,
        layout: &Layout,
        len: usize,
        at: &dyn Fn(usize, usize) -> *const u8,
    ) -> Option<(usize, usize)> {
        self.reject.iter().find_map(|&(leaf, find)| {
            let info = &layout.leaves[leaf];
            let elements = info.elements() * (len + usize::from(info.observation));
            // SAFETY: the caller's duty.
            unsafe { find(at(leaf, 0), elements) }.map(|index| (leaf, index))
        })
    }

    /// The return of an episode of `len` steps.
    ///
    /// # Safety
    /// As `find_non_finite`.
    pub(super) unsafe fn sum_rewards(&self, len: usize, at: &dyn Fn(usize, usize) -> *const u8) -> f64 {
        let Some((leaf, read)) = self.reward else { return 0.0 };
        // SAFETY: the caller's duty.
        (0..len).map(|step| unsafe { read(at(leaf, step)) }).sum()
    }

    pub(super) fn len(&self) -> usize {
        self.states.len()
    }

    #[inline]
    pub(super) fn state(&mut self, lane: usize) -> &mut LaneState {
        &mut self.states[lane]
    }

    #[inline]
    pub(super) fn get(&self, lane: usize) -> LaneState {
        self.states[lane]
    }

    pub(super) fn mark_end(&mut self, lane: usize, end: End) {
        self.ends[lane] = Some(end);
        self.marked = true;
    }

    pub(super) fn mark_masked(&mut self, lane: usize) {
        self.masked[lane] = true;
        self.marked = true;
    }

    #[inline]
    pub(super) fn clear_marks(&mut self) {
        if self.marked {
            self.ends.fill(None);
            self.masked.fill(false);
            self.finals.fill(false);
            self.marked = false;
        }
    }

    #[inline]
    pub(super) fn any_marks(&self) -> bool {
        self.marked
    }

    #[inline]
    pub(super) fn flags(&self, lane: usize, tick: u64) -> Flags {
        let first = self.states[lane].episode_start == tick;
        if !self.marked {
            return Flags { end: None, masked: false, first };
        }
        // A step that carries no transition does not begin an episode either: the next one does.
        Flags { end: self.ends[lane], masked: self.masked[lane], first: first && !self.masked[lane] }
    }

    pub(super) fn begin_episode(&mut self, lane: usize, tick: u64) {
        let state = &mut self.states[lane];
        (state.episode_start, state.ret) = (tick, 0.0);
    }
}

/// What a writer said of one step of one lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Flags {
    pub(super) end: Option<End>,
    pub(super) masked: bool,
    /// The observation is the first of its episode.
    pub(super) first: bool,
}

/// Which leaves of the open step were written.
#[derive(Debug)]
pub(super) struct Written {
    leaves: usize,
    lanes: usize,
    /// One bit a leaf: written for every lane. The first 64 leaves stand by themselves: most steps have no more.
    first: u64,
    /// Those of them that are there.
    all_first: u64,
    more: Vec<u64>,
    /// One flag a leaf and lane, for leaves written lane by lane.
    single: Vec<bool>,
    any_single: bool,
}

impl Written {
    pub(super) fn new(leaves: usize, lanes: usize) -> Written {
        Written {
            leaves,
            lanes,
            first: 0,
            all_first: u64::MAX.checked_shr(64 - leaves.min(64) as u32).unwrap_or(0),
            more: vec![0; leaves.div_ceil(64).saturating_sub(1)],
            single: vec![false; leaves * lanes],
            any_single: false,
        }
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        self.first = 0;
        if !self.more.is_empty() {
            self.more.fill(0);
        }
        if self.any_single {
            self.single.fill(false);
            self.any_single = false;
        }
    }

    #[inline]
    pub(super) fn set(&mut self, leaf: usize) {
        match leaf.checked_sub(64) {
            None => self.first |= 1 << leaf,
            Some(leaf) => self.more[leaf / 64] |= 1 << (leaf % 64),
        }
    }

    #[inline]
    pub(super) fn is_whole(&self, leaf: usize) -> bool {
        let (word, bit) = match leaf.checked_sub(64) {
            None => (self.first, leaf),
            Some(leaf) => (self.more[leaf / 64], leaf % 64),
        };
        word >> bit & 1 == 1
    }

    /// Whether it is sure that `leaf` was written for no lane.
    #[inline]
    pub(super) fn is_untouched(&self, leaf: usize) -> bool {
        !self.is_whole(leaf) && !self.any_single
    }

    #[inline]
    pub(super) fn set_lane(&mut self, leaf: usize, lane: usize) {
        if self.lanes == 1 {
            return self.set(leaf);
        }
        self.single[leaf * self.lanes + lane] = true;
        self.any_single = true;
    }

    pub(super) fn is_set(&self, leaf: usize, lane: usize) -> bool {
        self.is_whole(leaf) || (self.any_single && self.single[leaf * self.lanes + lane])
    }

    /// The first lane for which `leaf` was not written.
    pub(super) fn missing_lane(&self, leaf: usize) -> Option<usize> {
        if self.is_whole(leaf) { None } else { (0..self.lanes).find(|&lane| !self.is_set(leaf, lane)) }
    }

    /// The first leaf that was not written, and the first lane for which it was not.
    #[inline]
    pub(super) fn missing(&self) -> Option<(usize, usize)> {
        if self.first == self.all_first && self.more.is_empty() { None } else { self.find_missing() }
    }

    #[inline(never)] // the short way stays short
    fn find_missing(&self) -> Option<(usize, usize)> {
        (0..self.leaves).find_map(|leaf| self.missing_lane(leaf).map(|lane| (leaf, lane)))
    }
}

/// Flags and versions of the steps in the lane buffer.
#[derive(Debug)]
pub(super) struct History {
    lanes: usize,
    entries: Vec<(Flags, u64)>,
}

impl History {
    pub(super) fn new(depth: usize, lanes: usize) -> History {
        History { lanes, entries: vec![(Flags::default(), 0); depth * lanes] }
    }
    pub(super) fn set(&mut self, step: usize, lane: usize, flags: Flags, version: u64) {
        self.entries[step * self.lanes + lane] = (flags, version);
    }
    pub(super) fn get(&self, step: usize, lane: usize) -> (Flags, u64) {
        self.entries[step * self.lanes + lane]
    }
    /// Bytes a lane, for the footprint.
    pub(super) fn lane_bytes(depth: usize) -> Option<usize> {
        depth.checked_mul(size_of::<(Flags, u64)>())
    }
}

/// Bytes a lane beside its buffer, for the footprint, if they can be addressed.
pub(crate) fn lane_state_bytes(layout: &Layout, depth: usize) -> Option<usize> {
    let leaves = layout.leaves.len();
    let stored = if layout.kind.is_replayed() { super::stored::State::lane_bytes(leaves) } else { 0 };
    let state = size_of::<LaneState>() + size_of::<Option<End>>() + 2 * size_of::<bool>() + leaves + stored;
    History::lane_bytes(depth)?.checked_add(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_that_cannot_be_addressed_is_none() {
        assert_eq!(History::lane_bytes(10).map(|ten| ten % 10), Some(0));
        assert_eq!(History::lane_bytes(usize::MAX / 2), None);
    }

    #[test]
    fn missing_names_the_first_leaf_and_lane() {
        let mut written = Written::new(70, 2);
        assert_eq!(written.missing(), Some((0, 0)));
        (0..69).for_each(|leaf| written.set(leaf));
        assert_eq!(written.missing(), Some((69, 0)));
        written.set_lane(69, 0);
        assert_eq!(written.missing(), Some((69, 1)));
        written.set_lane(69, 1);
        assert_eq!(written.missing(), None);
        written.clear();
        assert_eq!(written.missing(), Some((0, 0)));
        let mut written = Written::new(64, 1);
        (0..64).for_each(|leaf| written.set(leaf));
        assert_eq!(written.missing(), None);
    }

    /// Whatever is left out, with words of 64 leaves full, begun or missing, is found; and nothing else is.
    #[test]
    fn whichever_leaf_of_many_is_missing_is_named() {
        for leaves in [1, 2, 63, 64, 65, 127, 128, 129, 193] {
            for lanes in [1, 2, 3] {
                let mut written = Written::new(leaves, lanes);
                for left_out in (0..leaves).flat_map(|leaf| (0..lanes).map(move |lane| (leaf, lane))) {
                    written.clear();
                    for leaf in (0..leaves).rev() {
                        match leaf == left_out.0 {
                            false => written.set(leaf),
                            true => {
                                (0..lanes).filter(|&lane| lane != left_out.1).for_each(|l| written.set_lane(leaf, l))
                            }
                        }
                    }
                    assert_eq!(written.missing(), Some(left_out), "{leaves} leaves, {lanes} lanes");
                    assert!(written.is_set(left_out.0, (left_out.1 + 1) % lanes) == (lanes > 1));
                    written.set_lane(left_out.0, left_out.1);
                    assert_eq!(written.missing(), None, "{leaves} leaves, {lanes} lanes");
                }
            }
        }
    }
}
