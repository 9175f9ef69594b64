//! How fast do environment threads get single steps into batches, and how much of that is `memcpy`?
//!
//! ```text
//! cargo bench --bench ingest -- [WORD]… [--quick] [--test] [--json PATH] [--pairs N] [--slice-ms N]
//! ```
//!
//! Rows of 29 bytes (4 leaves), 28,237 bytes (4 leaves, pixels) and 67,000 bytes (44 leaves); 1 to 8 writers of 1 or 16
//! lanes; values put from slices, written in place by
//! `overwrite`, or through views that are zeroed first. Batches of 512, 3 buffers; the learner takes each
//! batch and drops it at once. The floor: as many threads as writers, but no more than cores, fill their shares of the
//! slots by `memcpy`, from the same sources, in the same order; slot after slot, and, in a column of its own, one slot
//! again and again. Ours lies between the two where caches matter: the slot that came home last is the next to be
//! filled, so with a learner this quick it is often still in the caches. Cases are named like
//! `small/1-writers/16-lanes/put`.

mod common;

use common::crew::{Length, Part, Slice, ratio};
use common::work::{Columns, How, Leaves, Source};
use common::{Args, Cell, Crew, Failure, Floor, Mode, Report, Spread, Until, drain, watchdog};
use pinring::{Element, Feed, Sample, Writer};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

const BATCH: usize = 512;
const BUFFERS: usize = 3;
const SLICE: Duration = Duration::from_millis(100);
const ALL_WRITERS: [usize; 4] = [1, 2, 4, 8];

fn main() -> ExitCode {
    common::main("ingest", |args, report| {
        report.table(
            &format!("single steps, batch {BATCH}, {BUFFERS} buffers: medians [least, most]"),
            &[
                ("case", 32),
                ("M rows/s", 26),
                ("GB/s", 6),
                ("floor, M rows/s", 26),
                ("of floor", 18),
                ("of floor, one slot", 18),
                ("CPU ns/row", 18),
                ("floor's", 18),
            ],
        );
        rows::<f32>("small", 4, 0, args, report)?;
        rows::<u8>("pixels", 28_224, 0, args, report)?;
        rows::<u8>("structured", 31_019, 40, args, report)
    })
}

/// All cases of one kind of row.
fn rows<O>(name: &str, elements: usize, more: usize, args: &Args, report: &mut Report) -> Result<(), Failure>
where
    O: Element + From<u8> + PartialEq,
{
    for lanes in [1, 16] {
        for how in [How::Put, How::InPlace, How::Zeroed] {
            for writers in ALL_WRITERS {
                let short = match how {
                    How::Put => "put",
                    How::InPlace => "in-place",
                    How::Zeroed => "zeroed",
                };
                let case = format!("{name}/{writers}-writers/{lanes}-lanes/{short}");
                let in_quick = lanes == 1 && writers != 4;
                if !args.wants(&case) || (args.mode == Mode::Quick && !in_quick) {
                    continue;
                }
                watchdog::alive(&case);
                let (leaves, step) = Leaves::<O>::declare(elements, more);
                let case = Case { name: case, leaves, step: Sample::step(step), writers, lanes, how };
                case.check()?;
                report.checked();
                if args.mode != Mode::Check {
                    case.time(name, args, report)?;
                }
            }
        }
    }
    Ok(())
}

struct Case<O> {
    name: String,
    leaves: Leaves<O>,
    step: Sample,
    writers: usize,
    lanes: usize,
    how: How,
}

#[derive(Clone, Copy, Debug)]
enum Turn {
    /// Slot after slot.
    Floor,
    /// The same slot again and again, which stays in the caches where it fits.
    OneSlot,
    Ours,
}

impl<O: Element + From<u8> + PartialEq> Case<O> {
    fn start(&self) -> Result<(Feed, Columns<O>), Failure> {
        let mut sample = self.step.clone();
        let columns = self.leaves.columns(&mut sample);
        Ok((Feed::builder(sample).batch(BATCH).buffers(BUFFERS).start()?, columns))
    }

    /// Every row of every lane arrives once, whole, and says what it is.
    fn check(&self) -> Result<(), Failure> {
        let (feed, columns) = self.start()?;
        // More than two laps of the ring, and a last batch that is not full.
        let steps = (BATCH * BUFFERS * 2).div_ceil(self.writers * self.lanes) + 3;
        let writers = (0..self.writers).map(|_| feed.writer(self.lanes)).collect::<Result<Vec<_>, _>>()?;
        let mut seen = vec![vec![false; steps]; self.writers * self.lanes];
        let mut expected: Vec<_> = (0..seen.len()).map(|lane| Source::new(&self.leaves, lane, 1)).collect();
        std::thread::scope(|scope| {
            for writer in writers {
                scope.spawn(|| self.write_stamped(writer, steps));
            }
            let learner = feed.learner()?; // in here, so that writers end when it is dropped for an error
            for batch in learner.iter() {
                let batch = batch?;
                for (row, (lane, step)) in batch.lanes().zip(batch.first_steps()).enumerate() {
                    expected[lane].stamp(lane, step);
                    let new = !std::mem::replace(&mut seen[lane][step as usize], true);
                    if !new || !expected[lane].is_row(&columns, &batch, row, 0) {
                        return Err(format!("{}: row {row} is not step {step} of lane {lane}", self.name).into());
                    }
                }
            }
            let missing = seen.iter().flatten().filter(|&&seen| !seen).count();
            if missing == 0 { Ok(()) } else { Err(format!("{}: {missing} rows did not arrive", self.name).into()) }
        })
    }

    fn write_stamped(&self, mut writer: Writer, steps: usize) {
        let first = writer.lanes().start;
        let mut source = Source::new(&self.leaves, first, self.lanes);
        for step in 0..steps as u64 {
            source.stamp(first, step);
            if self.write(&mut writer, &source).is_none() {
                return; // the learner found something and is gone
            }
        }
    }

    #[inline]
    fn write(&self, writer: &mut Writer, source: &Source<O>) -> Option<()> {
        let mut step = writer.step().ok()?;
        self.leaves.write(&mut step, source, self.how).expect("values fit their leaves");
        step.commit().ok()
    }

    fn time(self, rows: &str, args: &Args, report: &mut Report) -> Result<(), Failure> {
        let (feed, _) = self.start()?;
        let floor = Arc::new(Floor::like(&feed.columns(), BATCH, BUFFERS, None));
        let row_bytes = floor.row_bytes();
        let case = Arc::new(self);
        let sources: Arc<Vec<_>> =
            (0..case.writers).map(|w| Source::new(&case.leaves, w * case.lanes, case.lanes)).collect::<Vec<_>>().into();
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let floor_threads = case.writers.min(cores);
        let parts = (0..case.writers).map(|index| -> Result<Part<Turn>, Failure> {
            let mut writer = feed.writer(case.lanes)?;
            let (case, floor, sources) = (case.clone(), floor.clone(), sources.clone());
            Ok(Box::new(move |turn, until| match turn {
                Turn::Ours => Some(case.ours(&mut writer, &sources[index], until)),
                Turn::Floor | Turn::OneSlot if index >= floor_threads => None,
                Turn::Floor => Some(case.floor(&floor, BUFFERS, &sources, (index, floor_threads), until)),
                Turn::OneSlot => Some(case.floor(&floor, 1, &sources, (index, floor_threads), until)),
            }))
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let learner = feed.learner()?;
        let learner = std::thread::spawn(move || drain(&learner));
        let crew = Crew::new(parts);

        let length = Length::Time(args.slice(SLICE));
        let turns = [Turn::Floor, Turn::OneSlot, Turn::Ours].map(|turn| (turn, length));
        crew.rounds(turns, 1); // all warm up once
        let [floor, one_slot, ours] = crew.rounds(turns, args.pairs());
        drop(crew);
        learner.join().expect("a panic ends the process")?;

        let rate = |slices: &[Slice]| Spread::of(slices.iter().map(|slice| slice.rate() / 1e6));
        let cpu = |slices: &[Slice]| Spread::of(slices.iter().map(Slice::cpu_ns));
        let (rows_a_second, of_floor) = (rate(&ours), ratio(&ours, &floor));
        let digits = if rows_a_second.median < 5.0 { 3 } else { 1 };
        report.row(vec![
            Cell::Text(case.name.clone()),
            Cell::Spread(rows_a_second, digits),
            Cell::Figure(rows_a_second.median * row_bytes as f64 / 1e3, 2),
            Cell::Spread(rate(&floor), digits),
            Cell::Spread(of_floor, 2),
            Cell::Spread(ratio(&ours, &one_slot), 2),
            Cell::Spread(cpu(&ours), 0),
            Cell::Spread(cpu(&floor), 0),
        ]);
        let least = match (rows, case.lanes, case.writers) {
            _ if case.how == How::Zeroed => return Ok(()), // what the zeros cost; no target is set for them
            ("small", 1, 1) => Some(35.0),
            ("small", 1, 8) => Some(15.0),
            ("small", _, 1) => Some(100.0),
            ("small", _, 8) => Some(40.0),
            _ => None,
        };
        match least {
            Some(least) => report.at_least(format!("{}, M rows/s", case.name), rows_a_second.median, least),
            None if rows != "small" && case.writers != 4 => {
                report.at_least(format!("{}, of floor", case.name), of_floor.median, 0.85);
            }
            None => {}
        }
        Ok(())
    }

    /// Writes steps until it is over; returns rows.
    fn ours(&self, writer: &mut Writer, source: &Source<O>, until: &Until<'_>) -> u64 {
        let mut steps = 0;
        while !until.over(steps) {
            self.write(writer, source).expect("the feed runs");
            steps += 1;
        }
        steps * self.lanes as u64
    }

    /// Fills its share of so many slots in turn, step by step, from its sources in turn; returns rows.
    fn floor(
        &self,
        floor: &Floor,
        slots: usize,
        sources: &[Source<O>],
        share: (usize, usize),
        until: &Until<'_>,
    ) -> u64 {
        let mine: Vec<Vec<&[u8]>> = sources.iter().skip(share.0).step_by(share.1).map(Source::bytes).collect();
        // Whole steps: what is left over at the end of a slot is a row or two of 512.
        let steps = BATCH / share.1 / self.lanes;
        let first = share.0 * steps * self.lanes;
        let mut done = 0;
        loop {
            for slot in 0..slots {
                for step in 0..steps {
                    if until.over(done) {
                        return done * self.lanes as u64;
                    }
                    let row = first + step * self.lanes;
                    for (column, &values) in mine[done as usize % mine.len()].iter().enumerate() {
                        // SAFETY: shares do not overlap.
                        #[allow(unsafe_code)]
                        unsafe {
                            floor.put(column, slot, row, 0, values, self.lanes)
                        };
                    }
                    done += 1;
                }
            }
        }
    }
}
