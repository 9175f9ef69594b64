//! The cases of `dispatch_stall` in which batches come to the device.

use super::wants_any;
use super::ways::{Feeder, Nothing, Ours, OwnThread, Way};
use crate::common::{Cell, Report, cpu, watchdog};
use crate::gpu::driver::{Event, Failure, Graph, Stream};
use crate::gpu::rows::Shape;
use crate::gpu::stats::{Difference, Random, mean, median, quantile};
use crate::gpu::{Setting, difference_cell};
use std::time::{Duration, Instant};

const SHAPE: Shape = Shape::STRUCTURED;
/// What one of the small kernels spins for; with its start it takes 2 to 3 µs.
const KERNEL_US: f64 = 1.5;
const SWEEP_US: [f64; 5] = [2.0, 4.0, 8.0, 16.0, 32.0];
const OURS: &str = "pinring, rows there";
/// Ours is to add at most so many hundredths to the dispatch of a step of so many kernels.
const TARGET: (&str, f64) = ("L=2000", 2.0);
const WARM_UP: usize = 5;
const CHECKS: usize = 4;

/// What a step launches.
struct Load {
    kernels: usize,
    cycles: u64,
    graph: Option<Graph>,
    /// How long the device is busy with it, if nothing holds it up.
    busy_us: f64,
}

/// What one step of one way came to, in µs.
#[derive(Clone, Copy, Debug)]
struct Turn {
    blocked: f64,
    dispatch: f64,
    /// The launches of the second half, by when a copy from page-locked memory is over. Not a number for a graph.
    second_half: f64,
    step: f64,
    idle: f64,
    cpu: f64,
}

pub fn run(setting: &Setting, report: &mut Report, steps: usize) -> Result<(), Failure> {
    if !wants_any(setting, &["L=500", "L=2000", "L=10000", "sweep", "graph"]) {
        return Ok(());
    }
    let compute = setting.cuda.stream()?;
    let mut ways = ways(setting, &compute)?;
    let result = cases(setting, report, steps, &compute, &mut ways);
    for way in ways {
        way.end()?;
    }
    result
}

fn ways(setting: &Setting, compute: &Stream) -> Result<Vec<Box<dyn Way>>, Failure> {
    let cuda = setting.cuda;
    let own = |name, tag, page_locked, per_leaf| OwnThread::new(cuda, SHAPE, name, tag, page_locked, per_leaf);
    Ok(vec![
        Box::new(Nothing::new(cuda, SHAPE)?),
        Box::new(own("pageable, own thread", 1, false, false)?),
        Box::new(own("page-locked, own thread, 44 copies", 2, true, true)?),
        Box::new(own("page-locked, own thread, one copy", 3, true, false)?),
        Box::new(Feeder::new(cuda, SHAPE, "pageable, feeder thread by hand", 4, false)?),
        Box::new(Feeder::new(cuda, SHAPE, "page-locked, feeder thread by hand", 5, true)?),
        Box::new(Ours::new(SHAPE, OURS, 6, compute, None)?),
        Box::new(Ours::new(
            SHAPE,
            "pinring, rows written beside",
            7,
            compute,
            Some(setting.number("--writers", 8, 8)),
        )?),
    ])
}

fn cases(
    setting: &Setting,
    report: &mut Report,
    steps: usize,
    compute: &Stream,
    ways: &mut [Box<dyn Way>],
) -> Result<(), Failure> {
    for way in ways.iter_mut() {
        for _ in 0..CHECKS {
            check(setting, compute, way.as_mut())?;
        }
    }
    println!("checked: every column of {CHECKS} batches of each way, by its weight on the device");
    if !setting.is_timing() {
        return Ok(());
    }
    let kernels = &setting.kernels;
    for count in [500, 2000, 10_000] {
        if setting.args.wants(&format!("L={count}")) {
            let load = Load::new(setting, count, KERNEL_US)?;
            case(setting, report, &format!("L={count}"), steps, compute, ways, &load)?;
        }
    }
    if setting.args.wants("sweep") {
        for micros in SWEEP_US {
            let load = Load::new(setting, 500, micros)?;
            case(
                setting,
                report,
                &format!("sweep: L=500, kernels of {micros} µs"),
                steps.div_ceil(4),
                compute,
                ways,
                &load,
            )?;
        }
    }
    if setting.args.wants("graph") {
        let mut load = Load::new(setting, 2000, KERNEL_US)?;
        load.graph = Some(
            compute.capture(|| (0..load.kernels).try_for_each(|_| kernels.spin_cycles(load.cycles, compute.raw())))?,
        );
        load.busy_us = load.alone(setting, compute)?;
        case(setting, report, "graph: L=2000 in one graph", steps, compute, ways, &load)?;
    }
    Ok(())
}

impl Load {
    fn new(setting: &Setting, kernels: usize, micros: f64) -> Result<Load, Failure> {
        let cycles = setting.kernels.cycles(micros);
        let busy_us = setting.kernels.period(cycles)? * kernels as f64;
        Ok(Load { kernels, cycles, graph: None, busy_us })
    }

    /// Launches it, and returns when the second half of it began.
    #[inline]
    fn launch(&self, setting: &Setting, compute: &Stream) -> Result<Option<Instant>, Failure> {
        if let Some(graph) = &self.graph {
            compute.launch(graph)?;
            return Ok(None);
        }
        let launch =
            |kernels: usize| (0..kernels).try_for_each(|_| setting.kernels.spin_cycles(self.cycles, compute.raw()));
        launch(self.kernels / 2)?;
        let half = Instant::now();
        launch(self.kernels - self.kernels / 2)?;
        Ok(Some(half))
    }

    /// The least time that the device took for it.
    fn alone(&self, setting: &Setting, compute: &Stream) -> Result<f64, Failure> {
        let (begin, end) = (setting.cuda.timed_event()?, setting.cuda.timed_event()?);
        let mut least = f64::INFINITY;
        for _ in 0..10 {
            begin.record(compute.raw())?;
            self.launch(setting, compute)?;
            end.record(compute.raw())?;
            compute.synchronize()?;
            least = least.min(begin.micros_until(&end)?);
        }
        Ok(least)
    }
}

/// One step whose batch is weighed, column by column.
fn check(setting: &Setting, compute: &Stream, way: &mut dyn Way) -> Result<(), Failure> {
    watchdog::alive(way.name());
    let cuda = setting.cuda;
    way.arrive(true)?;
    let at = way.take(compute)?;
    if let Some((tag, rows)) = way.rows() {
        let sums = cuda.alloc(SHAPE.leaves * 8)?;
        let mut got = cuda.page_locked(SHAPE.leaves * 8)?;
        // SAFETY: the batch has every column where the shape says, and is held; the sums and their copy live until the
        // stream was waited for.
        unsafe {
            cuda.set(sums.address, 0, SHAPE.leaves * 2, compute.raw())?;
            for leaf in 0..SHAPE.leaves {
                let (at, sum) = (at + SHAPE.column_offset(leaf) as u64, sums.address + leaf as u64 * 8);
                setting.kernels.weigh(at, SHAPE.column_words(), sum, compute.raw())?;
            }
            cuda.copy_out(got.as_mut_ptr(), sums.address, SHAPE.leaves * 8, compute.raw())?;
        }
        compute.synchronize()?;
        for (leaf, got) in got.chunks_exact(8).enumerate() {
            let expected = SHAPE.column_weight(tag, leaf, rows.iter().copied());
            if got != expected.to_ne_bytes() {
                return Err(format!("{}: column {leaf} of a batch is not what was written", way.name()).into());
            }
        }
    }
    way.release(compute)?;
    compute.synchronize()?;
    way.settle(compute)?;
    Ok(())
}

/// The ways in turns, and a table.
fn case(
    setting: &Setting,
    report: &mut Report,
    name: &str,
    steps: usize,
    compute: &Stream,
    ways: &mut [Box<dyn Way>],
    load: &Load,
) -> Result<(), Failure> {
    let events = (setting.cuda.timed_event()?, setting.cuda.timed_event()?);
    let mut turns: Vec<Vec<Turn>> = ways.iter().map(|_| Vec::with_capacity(steps)).collect();
    let (mut random, mut order) = (Random(steps as u64), (0..ways.len()).collect::<Vec<_>>());
    for round in 0..WARM_UP + steps {
        watchdog::alive(name);
        random.shuffle(&mut order); // or each way would always have the same one before it
        for &way in &order {
            let turn = turn(setting, compute, ways[way].as_mut(), load, &events)?;
            if round >= WARM_UP {
                turns[way].push(turn);
            }
        }
    }
    report.table(
        &format!("{name}: the device alone needs {:.0} µs; {steps} steps of each way; µs", load.busy_us),
        &[
            ("way", 36),
            ("blocked p50", 9),
            ("p99", 8),
            ("dispatch p50", 9),
            ("dispatch p99", 9),
            ("dispatch - nothing [95 %]", 26),
            ("in %", 18),
            ("2nd half, in %", 18),
            ("step p50", 9),
            ("step p99", 9),
            ("step - nothing [95 %]", 26),
            ("idle p50", 9),
            ("CPU a batch", 9),
        ],
    );
    let of = |way: usize, pick: fn(&Turn) -> f64| turns[way].iter().map(pick).collect::<Vec<f64>>();
    for (index, way) in ways.iter().enumerate() {
        let (blocked, dispatch, step) = (of(index, |t| t.blocked), of(index, |t| t.dispatch), of(index, |t| t.step));
        let more = Difference::between(&of(0, |t| t.dispatch), &dispatch);
        let percent = more.percent_of(median(&of(0, |t| t.dispatch)));
        let halves = (of(0, |t| t.second_half), of(index, |t| t.second_half));
        let half = Difference::between(&halves.0, &halves.1).percent_of(median(&halves.0));
        if name == TARGET.0 && way.name() == OURS {
            report.at_most(format!("{name}, {OURS}: dispatch beyond nothing, in %"), percent.median, TARGET.1);
            let what = format!("{name}, {OURS}: launches while nothing is copied, beyond nothing, in %");
            report.at_most(what, half.median, TARGET.1);
        }
        report.row(vec![
            way.name().into(),
            Cell::Figure(median(&blocked), 2),
            Cell::Figure(quantile(&blocked, 0.99), 1),
            Cell::Figure(median(&dispatch), 0),
            Cell::Figure(quantile(&dispatch, 0.99), 0),
            difference_cell(more, 0),
            difference_cell(percent, 1),
            if load.graph.is_some() { Cell::None } else { difference_cell(half, 1) },
            Cell::Figure(median(&step), 0),
            Cell::Figure(quantile(&step, 0.99), 0),
            difference_cell(Difference::between(&of(0, |t| t.step), &step), 0),
            Cell::Figure(median(&of(index, |t| t.idle)), 0),
            Cell::Figure(mean(&of(index, |t| t.cpu)), 0),
        ]);
    }
    Ok(())
}

/// One step of one way.
fn turn(
    setting: &Setting,
    compute: &Stream,
    way: &mut dyn Way,
    load: &Load,
    (begin, end): &(Event, Event),
) -> Result<Turn, Failure> {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    way.arrive(false)?;
    let cpu = (cpu::of_process(), cpu::of_thread());
    begin.record(compute.raw())?;
    let t0 = Instant::now();
    let at = way.take(compute)?;
    let t1 = Instant::now();
    // SAFETY: the batch has more than 4 KiB and is held until it is released behind this.
    unsafe { setting.kernels.touch(at, compute.raw())? };
    let half = load.launch(setting, compute)?;
    let t2 = Instant::now();
    way.release(compute)?;
    let t3 = Instant::now();
    end.record(compute.raw())?;
    compute.synchronize()?;
    let t4 = Instant::now();
    let late = way.settle(compute)?;
    let t5 = Instant::now();
    // Of this thread only what feeds: launches and waits are not the batch's.
    let others = match (cpu, (cpu::of_process(), cpu::of_thread())) {
        ((Some(all), Some(own)), (Some(all_now), Some(own_now))) => {
            micros((all_now - all).saturating_sub(own_now - own))
        }
        _ => f64::NAN,
    };
    let feeding = micros(t1 - t0) + micros(t3 - t2) + micros(late);
    Ok(Turn {
        blocked: micros(t1 - t0) + micros(late),
        dispatch: micros(t3 - t0) + micros(late),
        second_half: half.map_or(f64::NAN, |half| micros(t2 - half)),
        step: micros(t5 - t0),
        idle: (begin.micros_until(end)? - load.busy_us).max(0.0) + micros(t5 - t4),
        cpu: others + feeding,
    })
}
