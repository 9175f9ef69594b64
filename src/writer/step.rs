//! The step that a writer writes now: views, values, marks, and its commit.

use super::{CommitError, PolicyError, PutError, Target, Way, Writer};
use crate::element::{DType, Element};
use crate::episodes::{End, Episode};
use crate::layout::Place;
use crate::schema::{Leaf, LeafInfo};
use crate::select::error::check_priority;
use crate::slots::{copy_lanes, zero_lanes};
use crate::weights::Weights;
use ndarray::{
    ArrayBase, ArrayView, ArrayViewD, ArrayViewMut, ArrayViewMutD, Data, Dimension, IxDyn, ShapeBuilder, StrideShape,
};
use std::sync::Arc;

/// The step that a [`Writer`] writes now. Write every leaf, then [`commit`](StepMut::commit); dropped without a commit,
/// it is as if it had never begun.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// let obs = step.observation::<f32>("obs", &[3]);
/// let action = step.leaf::<i64>("action", &[]);
/// # let feed = Feed::builder(Sample::step(step)).batch(2).start()?;
/// # let mut writer = feed.writer(2)?;
/// let mut s = writer.step()?;
/// s.view_mut(obs).fill(1.0);
/// let seen = s.view(obs).sum(); // the policy reads the observation where the env wrote it
/// s.put(action, &[seen as i64; 2])?;
/// s.end(1, End::Terminated);
/// s.commit()?;
/// # Ok(()) }
/// ```
///
/// It does not outlive its writer, and its views do not outlive its commit:
///
/// ```compile_fail,E0716
/// # use pinring::*;
/// # fn write(intake: &Intake) -> Result<()> {
/// let step = intake.writer(1)?.step()?; // the writer is dropped at the end of this line
/// step.commit()?;
/// # Ok(()) }
/// ```
///
/// ```compile_fail,E0505
/// # use pinring::*;
/// # fn write(mut step: StepMut<'_>, obs: Leaf<f32>) -> Result<()> {
/// let mut view = step.view_mut(obs);
/// step.commit()?; // `step` is borrowed by `view`
/// view.fill(0.0);
/// # Ok(()) }
/// ```
///
/// Neither is a column a leaf:
///
/// ```compile_fail,E0308
/// # use pinring::*;
/// # fn write(mut step: StepMut<'_>, obs: Column<f32>) {
/// step.view_mut(obs); // expects a Leaf<f32>
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a step that is not committed never began"]
pub struct StepMut<'w> {
    pub(super) writer: &'w mut Writer,
}

impl Drop for StepMut<'_> {
    #[inline]
    fn drop(&mut self) {
        self.writer.undo(); // nothing to undo once it was committed
    }
}

impl StepMut<'_> {
    /// A leaf's values to write in place: `[lanes, …]`. The first view of a step is zeroed, so that whatever the caller
    /// leaves out is zero and never an older step's bytes; later ones show what was written. A caller that writes every
    /// value anyway saves the zeroing with [`overwrite`](StepMut::overwrite).
    ///
    /// In a batch-major unroll written in place (lockstep), lanes lie T values apart: the view is strided.
    ///
    /// # Panics
    /// If the leaf belongs to another step.
    #[inline]
    #[track_caller]
    pub fn view_mut<T: Element>(&mut self, leaf: Leaf<T>) -> ArrayViewMutD<'_, T> {
        let index = self.writer.own_or_panic(leaf);
        self.writer.fill_unwritten(index, zero_lanes);
        self.writer.view_of(index)
    }

    /// A leaf's values to write in place, `[lanes, …]`, as they lie: the caller writes every one of them, in any order.
    /// What it leaves out is whatever lies there, an older step's value as a rule, and is committed as if it had been
    /// written now. A debug build first fills what this step has not written with NaN, or with the largest value of an
    /// unsigned integer, -1 or `true`, so that a test sees the hole.
    ///
    /// ```
    /// # use pinring::*;
    /// # fn main() -> Result<()> {
    /// # let mut step = Step::new();
    /// let obs = step.observation::<f32>("obs", &[3]);
    /// # let feed = Feed::builder(Sample::step(step)).batch(2).start()?;
    /// # let mut writer = feed.writer(2)?;
    /// let mut s = writer.step()?;
    /// for (lane, mut values) in s.overwrite(obs).outer_iter_mut().enumerate() {
    ///     values.fill(lane as f32); // every value, so that none needs zeroing first
    /// }
    /// s.commit()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Panics
    /// If the leaf belongs to another step.
    #[inline]
    #[track_caller]
    pub fn overwrite<T: Element>(&mut self, leaf: Leaf<T>) -> ArrayViewMutD<'_, T> {
        let index = self.writer.own_or_panic(leaf);
        if cfg!(debug_assertions) {
            self.writer.fill_unwritten(index, mark_lanes::<T>);
        } else {
            self.writer.written.set(index);
        }
        self.writer.view_of(index)
    }

    /// One lane's values of a leaf to write in place, in the order of its shape, as [`overwrite`](StepMut::overwrite)
    /// gives them: the caller writes every one. The quickest way for steps of many small leaves.
    ///
    /// # Panics
    /// If the leaf belongs to another step, or the writer has no such lane (counted within the writer).
    #[inline(always)] // as `put`
    #[track_caller]
    pub fn overwrite_lane<T: Element>(&mut self, leaf: Leaf<T>, lane: usize) -> &mut [T] {
        let index = self.writer.own_or_panic(leaf);
        self.check_lane(lane);
        let (at, stride) = self.writer.place(index);
        let (at, bytes) = (at.wrapping_add(lane * stride), self.writer.in_slot[index].bytes);
        if cfg!(debug_assertions) && !self.writer.written.is_set(index, lane) {
            // SAFETY: one lane's value of the open step, which is this writer's (invariant 2).
            unsafe { mark_lanes::<T>((at, stride), bytes, 1) }
        }
        self.writer.written.set_lane(index, lane);
        // SAFETY: one lane's value of the open step, aligned and valid for `T`: rings and lane buffers start zeroed and
        // hold nothing but values of the leaf's type. The borrow of the step keeps every other access away.
        unsafe { std::slice::from_raw_parts_mut(at.cast(), bytes / size_of::<T>()) }
    }

    /// A leaf's values as they were written in this step: `[lanes, …]`.
    ///
    /// # Panics
    /// If the leaf belongs to another step, or was not written for every lane yet.
    #[track_caller]
    pub fn view<T: Element>(&self, leaf: Leaf<T>) -> ArrayViewD<'_, T> {
        let index = self.writer.own_or_panic(leaf);
        if let Some(lane) = self.writer.written.missing_lane(index) {
            panic!("leaf `{}` is read before it was written for lane {lane}", self.writer.leaf_name(index));
        }
        let (at, _) = self.writer.place(index);
        let shape = self.writer.view_shape(index);
        // SAFETY: as for `view_mut`; the values were written in this step.
        unsafe { ArrayView::from_shape_ptr(shape, at.cast_const().cast()) }
    }

    /// Writes a leaf of every lane from a slice: `lanes × elements` values, lane by lane.
    ///
    /// # Errors
    /// [`PutError::Length`] gives both numbers.
    #[inline(always)] // for a step of a few bytes a tenth of the time would be the call
    pub fn put<T: Element>(&mut self, leaf: Leaf<T>, values: &[T]) -> Result<(), PutError> {
        let index = self.writer.own(leaf)?;
        let Place { bytes, all, .. } = self.writer.in_slot[index];
        if size_of_val(values) != all {
            return Err(self.writer.length(index, self.writer.lanes.len(), values.len()));
        }
        let to = self.writer.place(index);
        // SAFETY: `values` holds exactly the leaf's values, and `place` names the open step's own (invariant 2), aligned
        // for `T`.
        unsafe {
            match values {
                [value] => to.0.cast::<T>().write(*value), // a store instead of a call
                _ => copy_lanes((values.as_ptr().cast(), bytes), to, bytes, self.writer.lanes.len()),
            }
        }
        self.writer.written.set(index);
        Ok(())
    }

    /// Writes a leaf of every lane from any array of shape `[lanes, …]`, contiguous or not.
    ///
    /// # Errors
    /// [`PutError::Shape`] gives both shapes.
    pub fn put_array<T: Element, S: Data<Elem = T>, D: Dimension>(
        &mut self,
        leaf: Leaf<T>,
        array: &ArrayBase<S, D>,
    ) -> Result<(), PutError> {
        let index = self.writer.own(leaf)?;
        let mut expected = vec![self.writer.lanes.len()];
        expected.extend_from_slice(&self.writer.gate.layout.leaves[index].shape);
        if array.shape() != expected {
            let (leaf, got) = (self.writer.leaf_name(index).to_owned(), array.shape().to_vec());
            return Err(PutError::Shape { leaf, expected, got });
        }
        self.writer.view_of::<T>(index).assign(&array.view().into_dyn()); // every value, so none needs zeroing
        self.writer.written.set(index);
        Ok(())
    }

    /// Writes a leaf of one lane, counted within the writer.
    ///
    /// # Errors
    /// [`PutError::Length`] or [`PutError::Lane`].
    pub fn put_lane<T: Element>(&mut self, leaf: Leaf<T>, lane: usize, values: &[T]) -> Result<(), PutError> {
        let index = self.writer.own(leaf)?;
        if size_of_val(values) != self.writer.in_slot[index].bytes {
            return Err(self.writer.length(index, 1, values.len()));
        }
        self.writer.put_some(index, lane, values)
    }

    /// Writes the first values of one lane's leaf and zeroes the rest: for lists of varying length in a leaf as long as
    /// the longest.
    ///
    /// # Errors
    /// [`PutError::Length`] if there are more values than the leaf holds, or [`PutError::Lane`].
    pub fn put_padded<T: Element>(&mut self, leaf: Leaf<T>, lane: usize, values: &[T]) -> Result<(), PutError> {
        let index = self.writer.own(leaf)?;
        if size_of_val(values) > self.writer.in_slot[index].bytes {
            return Err(self.writer.length(index, 1, values.len()));
        }
        self.writer.put_some(index, lane, values)
    }

    /// Hands the observation in and gives the policy to act with, and its version: call it between observation and
    /// action. An unroll that this observation completes goes out first; then, with a
    /// [`max_policy_lag`](crate::FeedBuilder::max_policy_lag), this waits until the unroll that begins here may begin.
    /// In lockstep the version is exactly `max(0, k − n)` for unroll k, at every step of it, counted from the newest when
    /// the feed began.
    ///
    /// Rows that begin together, as lanes of one writer do, count as part of the batch that the first of them is in. A
    /// writer does not wait for a batch that cannot be filled without the unrolls its other lanes are in the middle of
    /// (as with `within_episode(true)`, where lanes drift apart): it goes on, and they run ahead by so much.
    ///
    /// With a lag it may wait for other writers, so one thread drives one writer (of many lanes), not several in turn.
    ///
    /// Dropping the step afterwards does not take the observation back from the unroll that it completed.
    ///
    /// # Errors
    /// See [`PolicyError`].
    pub fn policy<W: Send + Sync + 'static>(&mut self, weights: &Weights<W>) -> Result<(u64, Arc<W>), PolicyError> {
        let writer = &mut *self.writer;
        writer.gate.see_versions(weights.versions());
        if writer.gate.lag.as_ref().is_some_and(|lag| !Arc::ptr_eq(&lag.versions, weights.versions())) {
            return Err(PolicyError::OtherWeights);
        }
        if writer.gate.layout.is_unroll() {
            let observations = writer.gate.layout.leaves.iter().enumerate().filter(|(_, leaf)| leaf.observation);
            if let Some((_, leaf)) = observations.into_iter().find(|(i, _)| writer.written.missing_lane(*i).is_some()) {
                return Err(PolicyError::Observation { leaf: leaf.name.clone() });
            }
            // Handed in it is part of an unroll, whatever becomes of the step.
            if let Some((leaf, lane, index, value)) = writer.find_rejected(|leaf| leaf.observation) {
                return Err(PolicyError::NonFinite { leaf, lane, index, value });
            }
        }
        let (version, policy) = match writer.way {
            Way::InPlace(_) => writer.policy_in_place(weights)?,
            Way::Lockstep(_) => writer.policy_lockstep(weights)?,
            Way::Staged(_) => writer.policy_staged(weights)?,
            Way::Stored(_) => weights.latest(),
        };
        writer.version = Some(version);
        Ok((version, policy))
    }

    /// Stamps the version that this step acts with, for programs that hand weights round in their own way.
    pub fn set_policy_version(&mut self, version: u64) {
        self.writer.version = Some(version);
    }

    /// Ends the episode of `lane` (counted within the writer) with this step. Where the sample keeps one, put the final
    /// observation through what this returns.
    ///
    /// # Panics
    /// If the writer has no such lane.
    #[track_caller]
    pub fn end(&mut self, lane: usize, end: End) -> FinalMut<'_> {
        self.check_lane(lane);
        self.writer.lanes.mark_end(lane, end);
        FinalMut { writer: self.writer, lane }
    }

    /// Takes the step of `lane` out of the [`mask`](crate::Sample::mask): it is in the batch, but carries no transition,
    /// like the step on which a next-step autoreset ignores the action. In front of an episode such a step is no part of
    /// it: the next one is its first. Call it before [`policy`](StepMut::policy), which hands the observation in together
    /// with its [`is_first`](crate::Sample::is_first).
    ///
    /// # Panics
    /// If the writer has no such lane.
    #[track_caller]
    pub fn mask_out(&mut self, lane: usize) {
        self.check_lane(lane);
        self.writer.lanes.mark_masked(lane);
    }

    /// Commits the step of every lane.
    ///
    /// # Errors
    /// See [`CommitError`].
    #[inline]
    pub fn commit(self) -> Result<(), CommitError> {
        let writer = &mut *self.writer;
        if let Some((leaf, lane)) = writer.written.missing() {
            return Err(writer.unwritten(leaf, lane));
        }
        if writer.checks {
            writer.check()?;
        }
        // A step that an error kept from counting stays open, and is undone by the drop.
        match writer.open.target {
            Target::Rows => writer.commit_in_place(),
            _ => writer.commit_elsewhere(),
        }
    }

    /// Says what the sample is worth that the step of `lane` completes: of a transition the one that begins n steps
    /// before, of a sequence the one that ends here. A step that ends its episode completes several, which all get it.
    /// For a [replay](crate::FeedBuilder::replay) feed with a sampler that has priorities; a sample without one gets the
    /// largest so far.
    ///
    /// # Errors
    /// [`PutError::Priority`] if it is negative, NaN or infinite, [`PutError::Lane`], [`PutError::NotStored`].
    pub fn priority(&mut self, lane: usize, priority: f32) -> Result<&mut Self, PutError> {
        let lanes = self.writer.lanes.len();
        if lane >= lanes {
            return Err(PutError::Lane { lane, lanes });
        }
        let Way::Stored(state) = &mut self.writer.way else { return Err(PutError::NotStored) };
        if check_priority(lane, priority).is_err() {
            return Err(PutError::Priority { priority: priority.to_string() });
        }
        state.set_priority(lane, priority);
        Ok(self)
    }

    #[inline]
    #[track_caller]
    fn check_lane(&self, lane: usize) {
        let lanes = self.writer.lanes.len();
        assert!(lane < lanes, "there is no lane {lane} in a writer of {lanes} lanes: they are counted from 0");
    }
}

/// The final observation of a lane whose episode ends with the open step: what the environment showed last, which is
/// no step of its own. Kept by unrolls with [`within_episode(true)`](crate::Sample::within_episode), where it stands
/// behind the last real step, and by replay stores, whose samples bootstrap from it; without it those bytes are zero, and a
/// store of whose samples a column reads it refuses a truncation. A sample that keeps none (`within_episode(false)`, say) refuses `put`.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// let mut step = Step::new();
/// let obs = step.observation::<f32>("obs", &[2]);
/// let mut sample = Sample::unroll(step, 4);
/// sample.within_episode(true);
/// let column = sample.all(obs);
/// let feed = Feed::builder(sample).batch(1).start()?;
/// let (mut writer, mut learner) = (feed.writer(1)?, feed.learner()?);
/// let mut s = writer.step()?;
/// s.put(obs, &[1.0, 1.0])?;
/// s.end(0, End::Truncated).put(obs, &[2.0, 2.0])?;
/// s.commit()?;
/// let batch = learner.next_batch()?;
/// assert_eq!(batch.slice(column)[..6], [1.0, 1.0, 2.0, 2.0, 0.0, 0.0]);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct FinalMut<'s> {
    writer: &'s mut Writer,
    lane: usize,
}

impl FinalMut<'_> {
    /// Writes the final observation of one leaf.
    ///
    /// # Errors
    /// [`PutError::NoFinal`] where the sample keeps none, [`PutError::Length`] if it has the wrong length.
    pub fn put<T: Element>(&mut self, leaf: Leaf<T>, values: &[T]) -> Result<&mut Self, PutError> {
        let index = self.writer.own(leaf)?;
        let layout = &self.writer.gate.layout;
        if !layout.within_episode || !layout.leaves[index].observation {
            return Err(PutError::NoFinal { leaf: self.writer.leaf_name(index).to_owned() });
        }
        if size_of_val(values) != self.writer.in_slot[index].bytes {
            return Err(self.writer.length(index, 1, values.len()));
        }
        self.writer.put_final(index, self.lane, values);
        if let Way::Stored(state) = &mut self.writer.way {
            state.note_final(index, self.lane);
        }
        Ok(self)
    }
}

/// Fills values that a debug build lends without zeroing: all bits set, which is NaN, -1 or the largest; `true` is 1.
///
/// # Safety
/// All of them are values of `T`, and the caller's to write.
unsafe fn mark_lanes<T: Element>((at, stride): (*mut u8, usize), bytes: usize, lanes: usize) {
    let mark = if T::DTYPE == DType::Bool { 1 } else { 0xff };
    for lane in 0..lanes {
        // SAFETY: the caller's duty; all bits set is a value of every element type but `bool`.
        unsafe { std::ptr::write_bytes(at.wrapping_add(lane * stride), mark, bytes) }
    }
}

impl Writer {
    /// The leaf's number, if it is of the feed's step. A clone of that step has the same schema and may have declared
    /// other leaves later, so the element type is compared too: bytes are never taken for what they are not.
    #[inline]
    pub(super) fn own<T: Element>(&self, leaf: Leaf<T>) -> Result<usize, PutError> {
        let index = leaf.index as usize;
        let same = leaf.schema == self.schema && self.in_slot.get(index).is_some_and(|own| own.dtype == T::DTYPE);
        if same { Ok(index) } else { Err(PutError::Foreign) }
    }

    #[inline]
    #[track_caller]
    fn own_or_panic<T: Element>(&self, leaf: Leaf<T>) -> usize {
        match self.own(leaf) {
            Ok(index) => index,
            Err(error) => panic!("{error}"), // no closure, which would be the place that the panic names
        }
    }

    fn leaf_name(&self, index: usize) -> &str {
        &self.gate.layout.leaves[index].name
    }

    #[cold]
    fn length(&self, index: usize, lanes: usize, got: usize) -> PutError {
        let leaf = &self.gate.layout.leaves[index];
        PutError::Length {
            leaf: leaf.name.clone(),
            lanes,
            shape: leaf.shape.clone(),
            expected: leaf.elements() * lanes,
            got,
        }
    }

    /// Where leaf `index` of the open step lies: lane 0's address, and the bytes from lane to lane.
    #[inline]
    pub(super) fn place(&self, index: usize) -> (*mut u8, usize) {
        let open = &self.open;
        debug_assert_ne!(open.target, Target::Nowhere, "a StepMut exists only while a step is open");
        let in_slot = &self.in_slot[index];
        if open.target == Target::Rows {
            // Rows of single steps follow each other: each number that is not read here is a part of what `put` costs.
            debug_assert_eq!((open.step, in_slot.row_stride), (0, in_slot.bytes), "a row holds one step");
            return (open.slot.0.wrapping_add(in_slot.offset + open.row * in_slot.bytes), in_slot.bytes);
        }
        self.place_elsewhere(index)
    }

    fn place_elsewhere(&self, index: usize) -> (*mut u8, usize) {
        let open = &self.open;
        let (base, place) = match open.target {
            Target::Lockstep => (self.gate.slots.slot(open.claim.slot), &self.in_slot[index]),
            _ => (self.buffer.base(), &self.buffer.places[index]),
        };
        (base.wrapping_add(place.at(open.row, open.step)), place.row_stride)
    }

    #[inline]
    fn view_shape(&self, index: usize) -> StrideShape<IxDyn> {
        let shape = &self.shapes[index];
        let strides = if self.open.target == Target::Buffer { &shape.in_buffer } else { &shape.in_slot };
        shape.dims.clone().strides(strides.clone())
    }

    /// A leaf of the open step.
    #[inline]
    fn view_of<T: Element>(&mut self, index: usize) -> ArrayViewMutD<'_, T> {
        let (at, _) = self.place(index);
        let shape = self.view_shape(index);
        // SAFETY: `place` gives the leaf's `lanes` values, aligned and valid for `T`, and the borrow of the writer keeps
        // every other access away until the view is dropped. The caller checked that the leaf is of `T`.
        unsafe { ArrayViewMut::from_shape_ptr(shape, at.cast()) }
    }

    /// Fills a leaf for the lanes for which it was not written yet, by `zero_lanes` or the like, and counts it as written.
    #[inline]
    fn fill_unwritten(&mut self, index: usize, fill: unsafe fn((*mut u8, usize), usize, usize)) {
        let (at, stride) = self.place(index);
        let bytes = self.in_slot[index].bytes;
        if self.written.is_untouched(index) {
            // SAFETY: the open step's rows are this writer's (invariant 2), and `place` names them.
            unsafe { fill((at, stride), bytes, self.lanes.len()) };
        } else if !self.written.is_whole(index) {
            for lane in (0..self.lanes.len()).filter(|&lane| !self.written.is_set(index, lane)) {
                // SAFETY: as above, one lane of them.
                unsafe { fill((at.wrapping_add(lane * stride), stride), bytes, 1) };
            }
        }
        self.written.set(index);
    }

    fn put_some<T: Element>(&mut self, index: usize, lane: usize, values: &[T]) -> Result<(), PutError> {
        let lanes = self.lanes.len();
        if lane >= lanes {
            return Err(PutError::Lane { lane, lanes });
        }
        let (at, stride) = self.place(index);
        let (bytes, written) = (self.in_slot[index].bytes, size_of_val(values));
        let at = at.wrapping_add(lane * stride);
        // SAFETY: the lane's value in the open step is this writer's (invariant 2); `written` is at most its size.
        unsafe {
            copy_lanes((values.as_ptr().cast(), written), (at, written), written, 1);
            zero_lanes((at.wrapping_add(written), 0), bytes - written, 1);
        }
        self.written.set_lane(index, lane);
        Ok(())
    }

    #[cold]
    fn unwritten(&self, leaf: usize, lane: usize) -> CommitError {
        CommitError::Unwritten { leaf: self.leaf_name(leaf).to_owned(), lane }
    }

    /// What a commit asks of some feeds.
    #[inline(never)] // single steps in place may be a few bytes
    fn check(&self) -> Result<(), CommitError> {
        if let Some((leaf, lane, index, value)) = self.find_rejected(|_| true) {
            return Err(CommitError::NonFinite { leaf, lane, index, value });
        }
        if self.gate.lag.is_some() && self.version.is_none() {
            return Err(CommitError::PolicyNotAsked);
        }
        Ok(())
    }

    #[inline(never)] // as above
    fn commit_elsewhere(&mut self) -> Result<(), CommitError> {
        match self.way {
            Way::InPlace(_) => self.commit_staged_step(self.version.unwrap_or(0)),
            Way::Lockstep(_) => self.commit_lockstep(),
            Way::Staged(_) => self.commit_staged(),
            Way::Stored(_) => self.commit_stored(),
        }
    }

    /// The first value of the open step, final observations included, that its leaf rejects: leaf, lane, index, text.
    /// Counted.
    fn find_rejected(&self, wanted: impl Fn(&LeafInfo) -> bool) -> Option<(String, usize, usize, String)> {
        for &(index, find) in &self.lanes.reject {
            let leaf = &self.gate.layout.leaves[index];
            if !wanted(leaf) {
                continue;
            }
            let (at, stride) = self.place(index);
            for lane in 0..self.lanes.len() {
                let last = (leaf.observation && self.lanes.finals[lane]).then(|| self.final_place(index, lane));
                for value in std::iter::once(at.wrapping_add(lane * stride)).chain(last) {
                    // SAFETY: the leaf's place, of its type and number of elements, written in this step.
                    let Some(found) = (unsafe { find(value, leaf.elements()) }) else { continue };
                    self.counters.reject(1);
                    let value = value.wrapping_add(found * leaf.dtype.size()).cast_const();
                    let text = match leaf.dtype {
                        // SAFETY: as above.
                        DType::F64 => format!("{}", unsafe { value.cast::<f64>().read() }),
                        // SAFETY: as above.
                        DType::F32 => format!("{}", unsafe { value.cast::<f32>().read() }),
                        _ => "NaN or an infinity".to_owned(),
                    };
                    return Some((leaf.name.clone(), lane, found, text));
                }
            }
        }
        None
    }

    /// Counts the committed step in every lane's episode. The open step's values must still be in place.
    #[inline]
    pub(super) fn account(&mut self, version: u64) {
        let lanes = self.lanes.len();
        if let Some((leaf, read)) = self.lanes.reward {
            let (at, stride) = self.place(leaf);
            for lane in 0..lanes {
                // SAFETY: the reward's place in the open step, written in this step.
                self.lanes.state(lane).ret += unsafe { read(at.wrapping_add(lane * stride).cast_const()) };
            }
        }
        if self.lanes.any_marks() {
            self.account_marks(version);
        }
        self.tick += 1;
        self.counters.step(lanes as u64);
        self.open.target = Target::Nowhere;
    }

    /// Ends episodes, and leaves steps that come before one out of it.
    #[cold]
    fn account_marks(&mut self, version: u64) {
        for lane in 0..self.lanes.len() {
            let (flags, tick) = (self.lanes.flags(lane, self.tick), self.tick);
            let state = self.lanes.get(lane);
            if flags.masked && state.episode_start == tick {
                self.lanes.begin_episode(lane, tick + 1); // a reset step in front of an episode is no part of it
            } else if let Some(end) = flags.end {
                let (lane_id, length) = (self.seat.lanes.start + lane, tick + 1 - state.episode_start);
                self.gate.finished(Episode { lane: lane_id, length, ret: state.ret, end, version });
                self.lanes.begin_episode(lane, tick + 1);
            }
        }
        self.lanes.clear_marks();
    }
}
