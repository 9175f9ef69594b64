//! The cases of `h2d` that are timed.

use crate::common::{Cell, Mode, Report, Spread, watchdog};
use crate::gpu::Setting;
use crate::gpu::driver::{DeviceMemory, Failure, HostMemory, Stream};
use crate::gpu::rows::{Content, Handles, Shape, Writers};
use pinring::{DeviceBatch, DeviceLearner, Feed, Pinning};
use std::time::{Duration, Instant};

const SIZES: [(usize, &str); 7] = [
    (64 << 10, "64KB"),
    (256 << 10, "256KB"),
    (1 << 20, "1MB"),
    (4 << 20, "4MB"),
    (16 << 20, "16MB"),
    (34_332_672, "34MB"),
    (256 << 20, "256MB"),
];
const LEAVES: [usize; 4] = [1, 3, 44, 256];
const IN_QUICK: ([&str; 3], [usize; 2]) = (["64KB", "1MB", "34MB"], [1, 44]);
const CHECKED: usize = 4;
/// From this size on, with so many leaves, the feed is to reach so much of the link's own rate.
const TARGET: (usize, [usize; 2], f64) = (32 << 20, [1, 44], 0.98);
/// Bytes of one turn, and the batches and copies that it has at least and at most.
const TURN_BYTES: usize = 2_000_000_000;
const TURN_BATCHES: (usize, usize) = (8, 4000);
const TURN_COPIES: usize = 20_000;
const DEADLINE: Duration = Duration::from_secs(10);

/// One size and number of leaves.
struct Case<'a> {
    setting: &'a Setting,
    name: String,
    shape: Shape,
    buffers: usize,
    stream: Stream,
    handles: Handles,
    feed: Feed,
    learner: DeviceLearner,
    writers: Writers,
    /// Commit rows that are there.
    committer: Writers,
}

pub fn run(setting: &Setting, report: &mut Report) -> Result<(), Failure> {
    let mut checked = 0;
    if setting.is_timing() {
        report.table(
            "to the device, GB/s: medians [least, most] of turns",
            &[
                ("case", 18),
                ("bytes a batch", 10),
                ("batches a turn", 8),
                ("one copy, by hand", 22),
                ("pinring, rows there", 22),
                ("of by hand", 20),
                ("pinring, rows written", 22),
                ("written, of by hand", 20),
                ("a copy a leaf, by hand", 22),
            ],
        );
    }
    for (bytes, size) in SIZES {
        for leaves in LEAVES {
            let name = format!("{size}/{leaves}-leaves");
            let in_quick = IN_QUICK.0.contains(&size) && IN_QUICK.1.contains(&leaves);
            if setting.args.wants(&name) && (setting.args.mode == Mode::Full || in_quick) {
                watchdog::alive(&name);
                let rows = if bytes < 1 << 20 { 64 } else { 512 };
                let case = Case::start(setting, name, Shape::of_bytes(bytes, leaves, rows))?;
                let result = case.check().and_then(|()| match setting.is_timing() {
                    true => case.time(report),
                    false => Ok(()),
                });
                case.end()?;
                result?;
                checked += 1;
            }
        }
    }
    println!("checked: every column of {CHECKED} batches of each of {checked} cases, by its weight on the device");
    Ok(())
}

impl<'a> Case<'a> {
    fn start(setting: &'a Setting, name: String, shape: Shape) -> Result<Case<'a>, Failure> {
        let buffers = if shape.batch_bytes() > 100 << 20 { 4 } else { 8 };
        let stream = setting.cuda.stream()?;
        let (sample, handles) = shape.declare();
        let feed = Feed::builder(sample).batch(shape.rows).buffers(buffers).prefetch(3).device(0);
        let feed = feed.pinning(Pinning::Required).start()?;
        // SAFETY: a stream of device 0; fields are dropped in order, so it must outlive the learner: see `end`.
        let learner = unsafe { feed.learner_on(0, stream.raw().as_pointer())? };
        let writers = Writers::start(&feed, shape, &handles, 1, setting.number("--writers", 8, 8))?;
        let committer = Writers::wide(&feed, shape, &handles, 1)?;
        Ok(Case { setting, name, shape, buffers, stream, handles, feed, learner, writers, committer })
    }

    fn end(self) -> Result<(), Failure> {
        let Case { stream, feed, learner, writers, committer, .. } = self;
        drop(learner);
        let fault = feed.stop(DEADLINE)?.fault;
        writers.join()?;
        committer.join()?;
        drop(stream);
        fault.map_or(Ok(()), |fault| Err(format!("the feed ended by a fault: {fault}").into()))
    }

    /// Every column of some batches has the weight of the rows that were written, by either kind of writers.
    fn check(&self) -> Result<(), Failure> {
        self.check_of(&self.writers)?;
        self.check_of(&self.committer)
    }

    fn check_of(&self, writers: &Writers) -> Result<(), Failure> {
        writers.order(CHECKED as u64 / 2, Content::Stamped);
        for _ in 0..CHECKED / 2 {
            let batch = self.learner.next_batch()?;
            let expected = expected(self.shape, 1, &batch);
            let got = self.weigh(&batch)?;
            if let Some(leaf) = (0..self.shape.leaves).find(|&leaf| got[leaf] != expected[leaf]) {
                let number = batch.sequence_number();
                return Err(format!("{}: column {leaf} of batch {number} is not what was written", self.name).into());
            }
        }
        Ok(())
    }

    fn weigh(&self, batch: &DeviceBatch) -> Result<Vec<u64>, Failure> {
        let (cuda, leaves, stream) = (self.setting.cuda, self.shape.leaves, self.stream.raw());
        let sums = cuda.alloc(leaves * 8)?;
        let mut got = cuda.page_locked(leaves * 8)?;
        // SAFETY: the columns are the batch's, which is held; the sums and their copy live until the stream was waited
        // for.
        unsafe {
            cuda.set(sums.address, 0, leaves * 2, stream)?;
            for (leaf, &column) in self.handles.columns.iter().enumerate() {
                let sum = sums.address + leaf as u64 * 8;
                self.setting.kernels.weigh(batch.column(column).ptr, self.shape.column_words(), sum, stream)?;
            }
            cuda.copy_out(got.as_mut_ptr(), sums.address, leaves * 8, stream)?;
        }
        self.stream.synchronize()?;
        Ok(got.chunks_exact(8).map(|sum| u64::from_ne_bytes(sum.try_into().expect("8 bytes"))).collect())
    }

    fn time(&self, report: &mut Report) -> Result<(), Failure> {
        let bytes = self.shape.batch_bytes();
        let batches = (TURN_BYTES / bytes).clamp(TURN_BATCHES.0, TURN_BATCHES.1);
        let by_leaf_batches = batches.min((TURN_COPIES / self.shape.leaves).max(1));
        let cuda = self.setting.cuda;
        let from = cuda.page_locked(bytes * self.buffers)?;
        let to: Vec<DeviceMemory> = (0..3).map(|_| cuda.alloc(bytes)).collect::<Result<_, _>>()?;
        let whole = [(0, bytes)];
        let leaf = |leaf| (self.shape.column_offset(leaf), self.shape.column_words() * 4);
        let by_leaf: Vec<_> = (0..self.shape.leaves).map(leaf).collect();
        let rate = |batches: usize, time: Duration| (batches * bytes) as f64 / time.as_secs_f64() / 1e9;

        let (mut hand, mut there, mut written, mut leaves) = (vec![], vec![], vec![], vec![]);
        for turn in 0..1 + self.setting.args.pairs() {
            watchdog::alive(&self.name);
            let figures = [
                rate(batches, self.by_hand(&from, &to, batches, &whole)?),
                rate(batches, self.ours(batches, &self.committer, Content::There)?),
                rate(batches, self.ours(batches, &self.writers, Content::Memory)?),
                rate(by_leaf_batches, self.by_hand(&from, &to, by_leaf_batches, &by_leaf)?),
            ];
            if turn > 0 {
                // The first warms up.
                [&mut hand, &mut there, &mut written, &mut leaves]
                    .into_iter()
                    .zip(figures)
                    .for_each(|(all, figure)| all.push(figure));
            }
        }
        let of_hand = |ours: &[f64]| Spread::of(hand.iter().zip(ours).map(|(hand, ours)| ours / hand));
        let (there_of_hand, written_of_hand) = (of_hand(&there), of_hand(&written));
        let (size, leaf_counts, least) = TARGET;
        if bytes >= size && leaf_counts.contains(&self.shape.leaves) {
            report.at_least(format!("{}, rows there, of by hand", self.name), there_of_hand.median, least);
        }
        report.row(vec![
            Cell::Text(self.name.clone()),
            bytes.into(),
            batches.into(),
            Cell::Spread(Spread::of(hand), 2),
            Cell::Spread(Spread::of(there), 2),
            Cell::Spread(there_of_hand, 3),
            Cell::Spread(Spread::of(written), 2),
            Cell::Spread(written_of_hand, 3),
            if self.shape.leaves == 1 { Cell::None } else { Cell::Spread(Spread::of(leaves), 2) },
        ]);
        Ok(())
    }

    /// From the first row committed to the last byte on the device.
    fn ours(&self, batches: usize, writers: &Writers, content: Content) -> Result<Duration, Failure> {
        let begun = Instant::now();
        writers.order(batches as u64, content);
        for _ in 0..batches {
            drop(self.learner.next_batch()?);
        }
        self.stream.synchronize()?;
        Ok(begun.elapsed())
    }

    /// From the first copy issued to the last byte on the device.
    fn by_hand(
        &self,
        from: &HostMemory,
        to: &[DeviceMemory],
        batches: usize,
        copies: &[(usize, usize)],
    ) -> Result<Duration, Failure> {
        let whole = self.shape.batch_bytes();
        let begun = Instant::now();
        for batch in 0..batches {
            let from = &from[batch % self.buffers * whole..][..whole];
            let to = to[batch % to.len()].address;
            for &(offset, bytes) in copies {
                let from = from[offset..][..bytes].as_ptr();
                // SAFETY: both memories have a batch's bytes and live until the stream was waited for. Copies of one
                // stream follow each other.
                unsafe { self.setting.cuda.copy_in(to + offset as u64, from, bytes, self.stream.raw())? };
            }
        }
        self.stream.synchronize()?;
        Ok(begun.elapsed())
    }
}

/// The weight that each column of a batch must have.
pub fn expected(shape: Shape, tag: u64, batch: &DeviceBatch) -> Vec<u64> {
    let rows: Vec<(u64, u64)> = batch.lanes().map(|lane| lane as u64).zip(batch.first_steps()).collect();
    (0..shape.leaves).map(|leaf| shape.column_weight(tag, leaf, rows.iter().copied())).collect()
}
