//! What does it cost to choose the items of a batch, and to give them new priorities?
//!
//! ```text
//! cargo bench --bench sample -- [WORD]… [--quick] [--test] [--json PATH] [--pairs N] [--slice-ms N]
//! ```
//!
//! 1,000 to 10,000,000 items, batches of 512, one thread. Uniform, without replacement and by age: selection. Prioritized
//! (α = 0.6, β = 0.4): selection with importance weights, then the update of the same 512 items with new priorities, timed
//! apart; also stratified, and with weights normalised by the store. The last column is a new item in the place of an old
//! one, with its part of the next selection. The peers' figures for the same work are those of `scripts/peers/run.py
//! selection`. Cases are named like `prioritized/1000000`.

mod common;

use common::{Args, Cell, Failure, Mode, Report, Spread, watchdog};
use pinring::{Draws, Fifo, MaxTimes, Normalize, Pass, Prioritized, Sampler, Selected, Uniform, WithoutReplacement};
use std::hint::black_box;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const BATCH: usize = 512;
const SLICE: Duration = Duration::from_millis(100);
/// The size that the targets are for.
const MILLION: u32 = 1_000_000;

fn main() -> ExitCode {
    common::main("sample", |args, report| {
        report.table(
            &format!("a batch of {BATCH}, µs: medians [least, most]"),
            &[("case", 32), ("sample", 20), ("update", 20), ("replace an item, ns", 20)],
        );
        for items in [1_000, 10_000, 100_000, MILLION, 10_000_000] {
            if items > MILLION && args.mode == Mode::Check {
                continue; // the checks are the same for every size
            }
            for kind in Kind::ALL {
                let name = format!("{}/{items}", kind.name());
                let in_quick = items == MILLION || items == 1_000;
                if !args.wants(&name) || (args.mode == Mode::Quick && !in_quick) {
                    continue;
                }
                watchdog::alive(&name);
                Case { name, kind, items }.run(args, report)?;
            }
        }
        Ok(())
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Uniform,
    WithoutReplacement,
    Fifo,
    MaxTimes,
    Prioritized,
    Stratified,
    ByStore,
}

impl Kind {
    const ALL: [Kind; 7] = [
        Kind::Uniform,
        Kind::WithoutReplacement,
        Kind::Fifo,
        Kind::MaxTimes,
        Kind::Prioritized,
        Kind::Stratified,
        Kind::ByStore,
    ];

    fn name(self) -> &'static str {
        match self {
            Kind::Uniform => "uniform",
            Kind::WithoutReplacement => "without-replacement",
            Kind::Fifo => "fifo",
            Kind::MaxTimes => "max-times-uniform",
            Kind::Prioritized => "prioritized",
            Kind::Stratified => "prioritized-stratified",
            Kind::ByStore => "prioritized-by-store",
        }
    }

    fn sampler(self) -> Box<dyn Sampler> {
        let prioritized = Prioritized::new(0.6, 0.4);
        match self {
            Kind::Uniform => Box::new(Uniform::new()),
            Kind::WithoutReplacement => Box::new(WithoutReplacement::new()),
            Kind::Fifo => Box::new(Fifo::new()),
            Kind::MaxTimes => Box::new(MaxTimes::new(Uniform::new(), u32::MAX - 1)),
            Kind::Prioritized => Box::new(prioritized),
            Kind::Stratified => Box::new(prioritized.stratified(true)),
            Kind::ByStore => Box::new(prioritized.normalize(Normalize::Store)),
        }
    }

    fn has_priorities(self) -> bool {
        matches!(self, Kind::Prioritized | Kind::Stratified | Kind::ByStore)
    }
}

struct Case {
    name: String,
    kind: Kind,
    items: u32,
}

impl Case {
    /// A full store's sampler; priorities spread over four powers of ten.
    fn sampler(&self, draws: &mut Draws) -> Result<Box<dyn Sampler>, Failure> {
        let mut sampler = self.kind.sampler();
        sampler.begin(self.items)?;
        for item in 0..self.items {
            sampler.insert(item, Some(priority(draws)))?;
        }
        Ok(sampler)
    }

    fn run(&self, args: &Args, report: &mut Report) -> Result<(), Failure> {
        let mut draws = Draws::new(1, 0);
        let mut sampler = self.sampler(&mut draws)?;
        self.check(&mut *sampler, &mut draws)?;
        report.checked();
        if args.mode == Mode::Check {
            return Ok(());
        }
        let mut times = (0..=args.pairs()).map(|_| self.slice(&mut *sampler, &mut draws, args.slice(SLICE)));
        times.next().transpose()?; // warms up
        let times = times.collect::<Result<Vec<_>, _>>()?;
        let sample = Spread::of(times.iter().map(|time| time.sample));
        let update = Spread::of(times.iter().map(|time| time.update));
        report.row(vec![
            Cell::Text(self.name.clone()),
            Cell::Spread(sample, 1),
            if self.kind.has_priorities() { Cell::Spread(update, 1) } else { Cell::None },
            Cell::Spread(Spread::of(times.iter().map(|time| time.replace * 1e3)), 0),
        ]);
        if self.kind == Kind::Prioritized && self.items == MILLION {
            report.at_most(format!("{}, sample, µs", self.name), sample.median, 60.0);
            report.at_most(format!("{}, update, µs", self.name), update.median, 50.0);
        }
        Ok(())
    }

    /// Every row is an item with the probability that its priority says, and updates arrive.
    fn check(&self, sampler: &mut dyn Sampler, draws: &mut Draws) -> Result<(), Failure> {
        let mass = |sampler: &dyn Sampler, item| sampler.priority(item).map(|p| f64::from(p).powf(0.6));
        let mut selected = Vec::new();
        for _ in 0..4 {
            let total: f64 = (0..self.items).filter_map(|item| mass(sampler, item)).sum();
            selected.clear();
            let pass = sampler.select(BATCH, draws, &mut selected);
            let whole = selected.len() == BATCH || (pass == Pass::Ended && !selected.is_empty());
            let fits = |row: &Selected| match mass(sampler, row.item) {
                Some(mass) => (row.probability / (mass / total) - 1.0).abs() < 1e-9 && row.weight > 0.0,
                None => row.item < self.items && row.weight == 1.0,
            };
            if !whole || !selected.iter().all(fits) {
                return Err(format!("{}: rows are not what was asked for", self.name).into());
            }
            let updates: Vec<(u32, f32)> = selected.iter().map(|row| (row.item, priority(draws))).collect();
            sampler.update(&updates)?;
            let last = |item| updates.iter().rev().find(|(known, _)| *known == item).map(|(_, p)| *p);
            if self.kind.has_priorities() && !updates.iter().all(|&(item, _)| sampler.priority(item) == last(item)) {
                return Err(format!("{}: an update did not arrive", self.name).into());
            }
        }
        Ok(())
    }

    /// Mean µs of each part.
    fn slice(&self, sampler: &mut dyn Sampler, draws: &mut Draws, length: Duration) -> Result<Times, Failure> {
        let (mut sampling, mut updating, mut replacing) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        let (mut selected, mut updates, mut batches) = (Vec::new(), Vec::new(), 0u32);
        let begun = Instant::now();
        while begun.elapsed() < length {
            selected.clear();
            let at = Instant::now();
            sampler.select(BATCH, draws, &mut selected);
            sampling += at.elapsed();
            black_box(&selected);
            updates.clear();
            updates.extend(selected.iter().map(|row| (row.item, priority(draws))));
            let at = Instant::now();
            sampler.update(&updates)?;
            updating += at.elapsed();
            batches += 1;
        }
        // Chunks of consecutive items leave and come, as a store evicts.
        let (mut next, mut replaced) = (draws.below(u64::from(self.items)) as u32, 0u32);
        let begun = Instant::now();
        while begun.elapsed() < length / 4 {
            for _ in 0..64 {
                sampler.remove(next);
                sampler.insert(next, None)?;
                next = (next + 1) % self.items;
            }
            sampler.update(&[])?; // what waits is part of it
            replaced += 64;
        }
        replacing += begun.elapsed();
        let micros = |time: Duration, count: u32| time.as_secs_f64() * 1e6 / f64::from(count);
        Ok(Times {
            sample: micros(sampling, batches),
            update: micros(updating, batches),
            replace: micros(replacing, replaced),
        })
    }
}

struct Times {
    sample: f64,
    update: f64,
    replace: f64,
}

fn priority(draws: &mut Draws) -> f32 {
    10f32.powi(draws.below(4) as i32 - 2) * (0.5 + draws.unit() as f32)
}
