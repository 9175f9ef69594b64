//! The cases of `dispatch_stall` in which weights leave the device, once a step.

use crate::common::{Cell, Report, watchdog};
use crate::gpu::driver::{Cuda, DeviceMemory, Failure, Stream};
use crate::gpu::rows::Shape;
use crate::gpu::stats::{Difference, median, quantile};
use crate::gpu::{Setting, difference_cell};
use crate::ways::Memory;
use pinring::{DeviceLearner, Feed, Pinning};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

const SIZES: [(usize, &str); 2] = [(6_500_000, "6.5 MB"), (100_000_000, "100 MB")];
const KERNELS: usize = 500;
const KERNEL_US: f64 = 1.5;
const WARM_UP: usize = 3;
const DEADLINE: Duration = Duration::from_secs(30);

/// A way to get weights to the host.
enum Way {
    Nothing,
    /// `cudaMemcpy`: a copy behind the step's kernels, and a wait for it, on the learner's thread.
    Blocking(Memory),
    Download,
}

/// What downloads need.
struct Ours {
    feed: Feed,
    learner: DeviceLearner,
    /// What arrived: the first word, and whether all are equal; and when.
    sender: Sender<(u32, bool, Instant)>,
    arrived: Receiver<(u32, bool, Instant)>,
}

#[derive(Clone, Copy)]
struct Turn {
    blocked: f64,
    dispatch: f64,
    step: f64,
    arrival: f64,
}

pub fn run(setting: &Setting, report: &mut Report, steps: usize) -> Result<(), Failure> {
    for (bytes, size) in SIZES {
        let name = format!("publish: {size} a step");
        if setting.args.wants(&name) {
            watchdog::alive(&name);
            let steps = if bytes > 50_000_000 { steps.div_ceil(4) } else { steps };
            case(setting, report, &name, bytes, steps)?;
        }
    }
    Ok(())
}

fn case(setting: &Setting, report: &mut Report, name: &str, bytes: usize, steps: usize) -> Result<(), Failure> {
    let cuda = setting.cuda;
    let compute = cuda.stream()?;
    let weights = cuda.alloc(bytes)?;
    let ours = Ours::new(bytes, &compute)?;
    let mut ways = [
        ("nothing", Way::Nothing),
        ("blocking copy to pageable memory", Way::Blocking(Memory::new(cuda, bytes, false)?)),
        ("blocking copy to page-locked memory", Way::Blocking(Memory::new(cuda, bytes, true)?)),
        ("pinring download", Way::Download),
    ];
    for (what, way) in &mut ways {
        check(cuda, &compute, &weights, way, &ours).map_err(|error| format!("{what}: {error}"))?;
    }
    println!("checked: {name}: each way brings what was there, whatever is written behind it");
    if setting.is_timing() {
        let mut turns = [const { Vec::<Turn>::new() }; 4];
        let cycles = setting.kernels.cycles(KERNEL_US);
        for round in 0..WARM_UP + steps {
            watchdog::alive(name);
            for ((_, way), turns) in ways.iter_mut().zip(&mut turns) {
                let turn = turn(setting, &compute, cycles, &weights, way, &ours)?;
                if round >= WARM_UP {
                    turns.push(turn);
                }
            }
        }
        report.table(
            &format!(
                "{name}, behind L={KERNELS} kernels, which a blocking copy waits for; {steps} steps of each way; µs"
            ),
            &[
                ("way", 36),
                ("blocked p50", 9),
                ("p99", 8),
                ("dispatch p50", 9),
                ("dispatch - nothing [95 %]", 26),
                ("step p50", 9),
                ("step - nothing [95 %]", 26),
                ("on the host after, p50", 10),
            ],
        );
        let of = |way: usize, pick: fn(&Turn) -> f64| turns[way].iter().map(pick).collect::<Vec<f64>>();
        for (index, (what, way)) in ways.iter().enumerate() {
            let (blocked, dispatch, step) =
                (of(index, |t| t.blocked), of(index, |t| t.dispatch), of(index, |t| t.step));
            report.row(vec![
                (*what).into(),
                Cell::Figure(median(&blocked), 2),
                Cell::Figure(quantile(&blocked, 0.99), 1),
                Cell::Figure(median(&dispatch), 0),
                difference_cell(Difference::between(&of(0, |t| t.dispatch), &dispatch), 0),
                Cell::Figure(median(&step), 0),
                difference_cell(Difference::between(&of(0, |t| t.step), &step), 0),
                match way {
                    Way::Nothing => Cell::None,
                    _ => Cell::Figure(median(&of(index, |t| t.arrival)), 0),
                },
            ]);
        }
    }
    let Ours { feed, learner, .. } = ours;
    drop(learner);
    match feed.stop(DEADLINE)?.fault {
        None => Ok(()),
        Some(fault) => Err(format!("the feed ended by a fault: {fault}").into()),
    }
}

impl Ours {
    fn new(bytes: usize, compute: &Stream) -> Result<Ours, Failure> {
        let (sample, _) = Shape { rows: 1, leaves: 1, words: 1 }.declare(); // no batches are fed here
        let feed = Feed::builder(sample).batch(1).device(0).downloads(bytes).pinning(Pinning::Required).start()?;
        // SAFETY: a stream of device 0, which the caller keeps longer than the learner.
        let learner = unsafe { feed.learner_on(0, compute.raw().as_pointer())? };
        let (sender, arrived) = channel();
        Ok(Ours { feed, learner, sender, arrived })
    }

    /// Issues a download. `whole`: all of it is read when it arrives.
    fn download(&self, weights: &DeviceMemory, whole: bool) -> Result<(), Failure> {
        let sender = self.sender.clone();
        let then = move |bytes: &[u8]| {
            let arrived = Instant::now();
            let equal = !whole || bytes.chunks_exact(4).all(|word| word == &bytes[..4]);
            let first = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let _ = sender.send((first, equal, arrived)); // nobody hears it at the end
        };
        // SAFETY: memory on device 0 of as many bytes, which outlives the learner.
        unsafe { self.learner.download(weights.address, weights.bytes, then)? };
        Ok(())
    }
}

/// Words are set, the weights are published, the words are overwritten: what was there must arrive.
fn check(cuda: &Cuda, compute: &Stream, weights: &DeviceMemory, way: &mut Way, ours: &Ours) -> Result<(), Failure> {
    for round in 1..=4u32 {
        let word = round * 0x0101_0101;
        let set = |word| {
            // SAFETY: the weights have as many words, and outlive the stream's work.
            unsafe { cuda.set(weights.address, word, weights.bytes / 4, compute.raw()) }
        };
        set(word)?;
        let (first, equal) = match way {
            Way::Nothing => continue,
            Way::Blocking(memory) => {
                blocking_copy(cuda, compute, weights, memory)?;
                set(!word)?;
                let bytes = memory.bytes();
                (u32::from_ne_bytes(bytes[..4].try_into()?), bytes.chunks_exact(4).all(|word| word == &bytes[..4]))
            }
            Way::Download => {
                ours.download(weights, true)?;
                set(!word)?;
                let (first, equal, _) = ours.arrived.recv_timeout(DEADLINE)?;
                (first, equal)
            }
        };
        if (first, equal) != (word, true) {
            return Err(format!("{first:#x} arrived where {word:#x} was published; all words equal: {equal}").into());
        }
    }
    compute.synchronize()
}

fn blocking_copy(cuda: &Cuda, compute: &Stream, weights: &DeviceMemory, to: &mut Memory) -> Result<(), Failure> {
    let to = to.bytes_mut();
    // SAFETY: both have as many bytes, and the copy is waited for here.
    unsafe { cuda.copy_out(to.as_mut_ptr(), weights.address, weights.bytes, compute.raw())? };
    compute.synchronize()
}

fn turn(
    setting: &Setting,
    compute: &Stream,
    cycles: u64,
    weights: &DeviceMemory,
    way: &mut Way,
    ours: &Ours,
) -> Result<Turn, Failure> {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let t0 = Instant::now();
    for _ in 0..KERNELS {
        setting.kernels.spin_cycles(cycles, compute.raw())?;
    }
    let t1 = Instant::now();
    match way {
        Way::Nothing => {}
        Way::Blocking(memory) => blocking_copy(setting.cuda, compute, weights, memory)?,
        Way::Download => ours.download(weights, false)?,
    }
    let t2 = Instant::now();
    compute.synchronize()?;
    let t3 = Instant::now();
    // Not timed as a part of the step, but in it, so that it disturbs no other way's.
    let arrived = match way {
        Way::Download => ours.arrived.recv_timeout(DEADLINE)?.2,
        _ => t2,
    };
    Ok(Turn {
        blocked: micros(t2 - t1),
        dispatch: micros(t2 - t0),
        step: micros(t3 - t0),
        arrival: micros(arrived.saturating_duration_since(t1)),
    })
}
