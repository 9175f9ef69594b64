//! How fast do environment threads get unrolls into batches, and what does a slow one cost the others?
//!
//! ```text
//! cargo bench --bench unroll -- [WORD]… [--quick] [--test] [--json PATH] [--pairs N] [--slice-ms N]
//! ```
//!
//! 64 lanes, unrolls of 20 steps of 28 KB (pixels, an action, three numbers), free-running (staged) and in lockstep (in
//! place), batch-major and time-major, driven by 1 to 8 writers. Two floors of `memcpy` by as many threads as writers,
//! but no more than cores: *once*, from the sources to where the batch has them, and *twice*, through a lane buffer of
//! ordinary memory, which is what staging has to pay at least. The second table has 8 writers, one of which sleeps in
//! each step: what the others get done beside it. Cases are named like `staged/batch-major/2-writers`.

mod common;

use common::crew::{Length, Part, Slice, ratio};
use common::{Args, Cell, Crew, Failure, Floor, Mode, Report, Spread, Until, as_bytes, drain, watchdog};
use pinring::{Batch, Column, Feed, Leaf, Sample, Step, Writer};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

const LANES: usize = 64;
const STEPS: usize = 20;
const PIXELS: usize = 28_224;
const BUFFERS: usize = 3;
const SLICE: Duration = Duration::from_millis(200);
const ALL_WRITERS: [usize; 4] = [1, 2, 4, 8];
/// What the slow writer sleeps in each step.
const SLOW: Duration = Duration::from_millis(2);

fn main() -> ExitCode {
    common::main("unroll", |args, report| {
        report.table(
            &format!("unrolls of {STEPS} steps, {LANES} lanes, {BUFFERS} buffers: medians [least, most]"),
            &[
                ("case", 30),
                ("k steps/s", 20),
                ("unrolls/s", 9),
                ("GB/s", 6),
                ("of floor, once", 18),
                ("of floor, twice", 18),
                ("CPU us/step", 16),
            ],
        );
        for case in all() {
            for writers in ALL_WRITERS {
                let case = Case { writers, ..case };
                let in_quick = !case.time_major && matches!(writers, 2 | 8);
                if !args.wants(&case.name()) || (args.mode == Mode::Quick && !in_quick) {
                    continue;
                }
                watchdog::alive(case.name());
                case.check()?;
                report.checked();
                if args.mode != Mode::Check {
                    case.time(args, report)?;
                }
            }
        }
        if args.mode == Mode::Check {
            return Ok(());
        }
        report.table(
            &format!("8 writers, one of which sleeps {} ms a step: medians [least, most]", SLOW.as_millis()),
            &[("case", 30), ("others, k steps/s", 20), ("beside it", 20), ("they keep", 18)],
        );
        for case in all().map(|case| Case { writers: 8, ..case }) {
            if args.wants(&format!("{}/slow", case.name())) && !(case.time_major && args.mode == Mode::Quick) {
                case.time_slow(args, report)?;
            }
        }
        Ok(())
    })
}

fn all() -> impl Iterator<Item = Case> {
    let kinds = [(false, false), (false, true), (true, false), (true, true)];
    kinds.into_iter().map(|(lockstep, time_major)| Case { lockstep, time_major, writers: 1 })
}

#[derive(Clone, Copy, Debug)]
struct Case {
    lockstep: bool,
    time_major: bool,
    writers: usize,
}

#[derive(Clone, Copy, Debug)]
enum Turn {
    Once,
    Twice,
    Ours,
    /// Without the last writer.
    Others,
    /// With the last writer, who is slow.
    Slow,
}

#[derive(Clone, Copy, Debug)]
struct Leaves {
    obs: Leaf<u8>,
    action: Leaf<i64>,
    numbers: [Leaf<f32>; 3],
}

#[derive(Clone, Copy, Debug)]
struct Columns {
    obs: Column<u8>,
    action: Column<i64>,
    numbers: [Column<f32>; 3],
}

/// One writer's values, lane after lane.
#[derive(Clone, Debug)]
struct Source {
    first: usize,
    obs: Vec<u8>,
    action: Vec<i64>,
    numbers: [Vec<f32>; 3],
}

impl Source {
    fn new(first: usize, lanes: usize) -> Source {
        let obs = (0..lanes * PIXELS).map(|i| (i % PIXELS * 31 + (first + i / PIXELS) * 7) as u8).collect();
        Source { first, obs, action: vec![0; lanes], numbers: std::array::from_fn(|_| vec![0.0; lanes]) }
    }

    /// Makes it the values of step `step`.
    fn stamp(&mut self, step: u64) {
        for (lane, obs) in self.obs.chunks_exact_mut(PIXELS).enumerate() {
            obs[..8].copy_from_slice(&step.to_le_bytes());
            obs[PIXELS - 1] = step as u8;
            self.action[lane] = ((self.first + lane) as i64) << 32 | step as i64;
            for (index, numbers) in self.numbers.iter_mut().enumerate() {
                numbers[lane] = (step * 3) as f32 + index as f32;
            }
        }
    }

    /// Each leaf's bytes: what the floor copies.
    fn bytes(&self) -> Vec<&[u8]> {
        let mut bytes = vec![as_bytes(&self.obs), as_bytes(&self.action)];
        bytes.extend(self.numbers.iter().map(|numbers| as_bytes(numbers)));
        bytes
    }
}

impl Case {
    fn name(self) -> String {
        let way = if self.lockstep { "lockstep" } else { "staged" };
        let order = if self.time_major { "time-major" } else { "batch-major" };
        format!("{way}/{order}/{}-writers", self.writers)
    }

    fn lanes(self) -> usize {
        LANES / self.writers
    }

    /// In lockstep a batch has to hold every lane.
    fn batch(self) -> usize {
        if self.lockstep { LANES } else { LANES / 2 }
    }

    fn start(self) -> Result<(Feed, Leaves, Columns), Failure> {
        let mut step = Step::new();
        let obs = step.observation("obs", &[4, 84, 84]);
        let action = step.leaf("action", &[]);
        let numbers = ["reward", "value", "log_prob"].map(|name| step.leaf(name, &[]));
        step.reward(numbers[0]);
        let mut sample = Sample::unroll(step, STEPS);
        if self.time_major {
            sample.time_major();
        }
        let columns =
            Columns { obs: sample.all(obs), action: sample.all(action), numbers: numbers.map(|leaf| sample.all(leaf)) };
        let builder = Feed::builder(sample).batch(self.batch()).buffers(BUFFERS).lanes(LANES);
        let builder = if self.lockstep { builder.lockstep(LANES) } else { builder };
        Ok((builder.start()?, Leaves { obs, action, numbers }, columns))
    }

    fn writers(self, feed: &Feed) -> Result<Vec<Writer>, Failure> {
        (0..self.writers).map(|_| Ok(feed.writer(self.lanes())?)).collect()
    }

    /// Every unroll of every lane arrives once, whole, with the observation behind its last step.
    fn check(self) -> Result<(), Failure> {
        const UNROLLS: usize = 5;
        let (feed, leaves, columns) = self.start()?;
        let writers = self.writers(&feed)?;
        let mut seen = [[false; UNROLLS]; LANES];
        let mut expected: Vec<Source> = (0..LANES).map(|lane| Source::new(lane, 1)).collect();
        std::thread::scope(|scope| {
            for mut writer in writers {
                scope.spawn(move || {
                    let mut source = Source::new(writer.lanes().start, writer.lanes().len());
                    for step in 0..(UNROLLS * STEPS) as u64 + 1 {
                        source.stamp(step);
                        // An error: the learner found something and is gone, or, in lockstep, another writer was at
                        // its end first.
                        if write(&mut writer, &leaves, &source).is_none() {
                            return;
                        }
                    }
                });
            }
            let learner = feed.learner()?; // in here, so that writers end when it is dropped for an error
            for batch in learner.iter() {
                let batch = batch?;
                for (row, (lane, first)) in batch.lanes().zip(batch.first_steps()).enumerate() {
                    let unroll = first as usize / STEPS;
                    let new = !std::mem::replace(&mut seen[lane][unroll], true);
                    let whole = self.is_unroll(&batch, &columns, row, &mut expected[lane], first);
                    if !new || !whole || !(first as usize).is_multiple_of(STEPS) {
                        return Err(format!("{}: row {row} is not unroll {unroll} of lane {lane}", self.name()).into());
                    }
                }
            }
            match seen.iter().flatten().filter(|&&seen| !seen).count() {
                0 => Ok(()),
                missing => Err(format!("{}: {missing} unrolls did not arrive", self.name()).into()),
            }
        })
    }

    /// Whether row `row` holds the unroll of `lane` that begins with step `first`.
    fn is_unroll(self, batch: &Batch, columns: &Columns, row: usize, lane: &mut Source, first: u64) -> bool {
        let minibatch = batch.minibatch(row..row + 1);
        let axis = ndarray::Axis(usize::from(self.time_major)); // of rows; without it, [T, …] in either order
        let obs = minibatch.view(columns.obs).index_axis_move(axis, 0);
        let action = minibatch.view(columns.action).index_axis_move(axis, 0);
        let numbers = columns.numbers.map(|column| minibatch.view(column).index_axis_move(axis, 0));
        (0..=STEPS).all(|step| {
            lane.stamp(first + step as u64);
            let obs = obs.index_axis(ndarray::Axis(0), step);
            obs.as_slice() == Some(&lane.obs)
                && (step == STEPS
                    || action[[step]] == lane.action[0]
                        && numbers.iter().zip(&lane.numbers).all(|(got, wanted)| got[[step]] == wanted[0]))
        })
    }

    /// The threads of the crew: writers that are floor threads too.
    fn crew(self, feed: &Feed, leaves: Leaves) -> Result<(Crew<Turn>, Arc<Floor>), Failure> {
        let floor = Arc::new(Floor::like(&feed.columns(), self.batch(), BUFFERS, Some(self.time_major)));
        let sources = (0..self.writers).map(|writer| Source::new(writer * self.lanes(), self.lanes()));
        let sources: Arc<Vec<Source>> = Arc::new(sources.collect());
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let threads = self.writers.min(cores);
        let parts = self.writers(feed)?.into_iter().enumerate().map(|(index, mut writer)| -> Part<Turn> {
            let (floor, sources) = (floor.clone(), sources.clone());
            let last = index + 1 == self.writers;
            let buffer = (index < threads).then(|| Floor::lane_buffer(&floor, self.lanes(), STEPS + 1));
            Box::new(move |turn, until| match (turn, &buffer) {
                (Turn::Once | Turn::Twice, None) => None,
                (Turn::Others, _) if last => None,
                (Turn::Once, _) => Some(self.floor(&floor, None, &sources, (index, threads), until)),
                (Turn::Twice, buffer) => Some(self.floor(&floor, buffer.as_ref(), &sources, (index, threads), until)),
                (Turn::Ours | Turn::Others | Turn::Slow, _) => {
                    let sleep = matches!(turn, Turn::Slow) && last;
                    Some(self.ours(&mut writer, &leaves, &sources[index], sleep, until))
                }
            })
        });
        Ok((Crew::new(parts.collect()), floor))
    }

    fn time(self, args: &Args, report: &mut Report) -> Result<(), Failure> {
        let (feed, leaves, _) = self.start()?;
        let (crew, floor) = self.crew(&feed, leaves)?;
        let learner = feed.learner()?;
        let learner = std::thread::spawn(move || drain(&learner));
        let slice = args.slice(SLICE);
        // Everything warms up once; in lockstep that also tells how many steps fill a slice.
        crew.slice(Turn::Once, Length::Time(slice / 2));
        crew.slice(Turn::Twice, Length::Time(slice / 2));
        let warm_up = crew.slice(Turn::Ours, Length::Steps(4 * STEPS as u64));
        let length = match self.lockstep {
            true => Length::Steps(whole_unrolls(warm_up.rate() / LANES as f64 * slice.as_secs_f64())),
            false => Length::Time(slice),
        };
        let turns = [(Turn::Once, Length::Time(slice)), (Turn::Twice, Length::Time(slice)), (Turn::Ours, length)];
        let [once, twice, ours] = crew.rounds(turns, args.pairs());
        drop(crew);
        learner.join().expect("a panic ends the process")?;

        let rate = Spread::of(ours.iter().map(|slice| slice.rate()));
        report.row(vec![
            Cell::Text(self.name()),
            Cell::Spread(rate.times(1e-3), 0),
            Cell::Figure(rate.median / STEPS as f64, 0),
            Cell::Figure(rate.median / STEPS as f64 * floor.row_bytes() as f64 / 1e9, 2),
            Cell::Spread(ratio(&ours, &once), 2),
            Cell::Spread(ratio(&ours, &twice), 2),
            Cell::Spread(Spread::of(ours.iter().map(|slice| slice.cpu_ns() / 1e3)), 2),
        ]);
        Ok(())
    }

    fn time_slow(self, args: &Args, report: &mut Report) -> Result<(), Failure> {
        let (feed, leaves, _) = self.start()?;
        let (crew, _) = self.crew(&feed, leaves)?;
        let learner = feed.learner()?;
        let learner = std::thread::spawn(move || drain(&learner));
        let slice = args.slice(2 * SLICE);
        let others = self.writers - 1;
        // In lockstep nobody can do without the last writer: there the comparison is with all of them being quick.
        let alone = if self.lockstep { Turn::Ours } else { Turn::Others };
        let length = |turn| match (self.lockstep, turn) {
            (false, _) => Length::Time(slice),
            (true, Turn::Slow) => Length::Steps(whole_unrolls(slice.as_secs_f64() / SLOW.as_secs_f64())),
            (true, _) => Length::Steps(10 * STEPS as u64),
        };
        // In lockstep all do the same, and the time until the last is done is everybody's.
        let rate = |slice: Slice| match self.lockstep {
            false => slice.rate_of(others),
            true => slice.rate() / self.writers as f64 * others as f64,
        };
        crew.slice(alone, length(alone));
        let pairs = (0..args.pairs()).map(|_| {
            let without = rate(crew.slice(alone, length(alone)));
            (without, rate(crew.slice(Turn::Slow, length(Turn::Slow))))
        });
        let pairs: Vec<(f64, f64)> = pairs.collect();
        drop(crew);
        learner.join().expect("a panic ends the process")?;
        report.row(vec![
            Cell::Text(format!("{}/slow", self.name())),
            Cell::Spread(Spread::of(pairs.iter().map(|pair| pair.0 / 1e3)), 0),
            Cell::Spread(Spread::of(pairs.iter().map(|pair| pair.1 / 1e3)), 0),
            Cell::Spread(Spread::of(pairs.iter().map(|(without, with)| with / without)), 2),
        ]);
        Ok(())
    }

    /// Writes steps until it is over; returns lane-steps.
    fn ours(self, writer: &mut Writer, leaves: &Leaves, source: &Source, sleep: bool, until: &Until<'_>) -> u64 {
        let mut steps = 0;
        while !until.over(steps) {
            if sleep {
                std::thread::sleep(SLOW);
            }
            write(writer, leaves, source).expect("the feed runs");
            steps += 1;
        }
        steps * self.lanes() as u64
    }

    /// Fills rows of its share of slot after slot with whole unrolls, one writer's lanes after the other's, step by
    /// step: through the lane buffer, if there is one. Returns lane-steps.
    fn floor(
        self,
        floor: &Floor,
        buffer: Option<&Floor>,
        sources: &[Source],
        (index, threads): (usize, usize),
        until: &Until<'_>,
    ) -> u64 {
        let mine: Vec<Vec<&[u8]>> = sources.iter().skip(index).step_by(threads).map(Source::bytes).collect();
        let share = self.batch() / threads;
        let (mut done, mut slot, mut filled) = (0, 0, 0);
        for values in mine.iter().cycle() {
            if let Some(buffer) = buffer {
                (0..STEPS).for_each(|step| put_step(buffer, 0, 0, step, (values, 0), self.lanes()));
            }
            let mut lane = 0;
            while lane < self.lanes() {
                if until.over(done) {
                    return done;
                }
                let rows = (self.lanes() - lane).min(share - filled);
                let row = index * share + filled;
                for step in 0..=STEPS {
                    match buffer {
                        None => put_step(floor, slot, row, step, (values, lane), rows),
                        Some(buffer) => copy_step(buffer, lane, (floor, slot, row), step, rows),
                    }
                }
                (lane, filled, done) = (lane + rows, filled + rows, done + (rows * STEPS) as u64);
                if filled == share {
                    (slot, filled) = ((slot + 1) % BUFFERS, 0);
                }
            }
        }
        done
    }
}

/// Puts step `step` of `rows` lanes from lane `first` on: every column that has such a step.
fn put_step(floor: &Floor, slot: usize, row: usize, step: usize, (values, first): (&[&[u8]], usize), rows: usize) {
    for (column, values) in values.iter().enumerate() {
        let item = floor.columns[column].item;
        if step < floor.columns[column].steps {
            // SAFETY: threads have shares of rows, and lane buffers, of their own.
            #[allow(unsafe_code)]
            unsafe {
                floor.put(column, slot, row, step, &values[first * item..(first + rows) * item], rows)
            };
        }
    }
}

/// Copies step `step` of `rows` lanes from lane `first` on out of a lane buffer.
fn copy_step(buffer: &Floor, first: usize, (floor, slot, row): (&Floor, usize, usize), step: usize, rows: usize) {
    for column in 0..floor.columns.len() {
        if step < floor.columns[column].steps {
            // SAFETY: as above.
            #[allow(unsafe_code)]
            unsafe {
                buffer.copy(column, (first, step), (floor, slot, row, step), rows)
            };
        }
    }
}

fn write(writer: &mut Writer, leaves: &Leaves, source: &Source) -> Option<()> {
    let mut step = writer.step().ok()?;
    step.put(leaves.obs, &source.obs).expect("the observations fit");
    step.put(leaves.action, &source.action).expect("the actions fit");
    for (&leaf, numbers) in leaves.numbers.iter().zip(&source.numbers) {
        step.put(leaf, numbers).expect("the numbers fit");
    }
    step.commit().ok()
}

/// At least one unroll, and whole ones.
fn whole_unrolls(steps: f64) -> u64 {
    ((steps / STEPS as f64) as u64).max(1) * STEPS as u64
}
