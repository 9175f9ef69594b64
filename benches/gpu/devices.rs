//! The case of `h2d` with several devices: what all links together carry, over what one does.

use super::rates::expected;
use crate::common::{Cell, Report, Spread, watchdog};
use crate::gpu::driver::{Cuda, DeviceMemory, Failure, HostMemory, Stream};
use crate::gpu::rows::{Content, Handles, Shape, Writers};
use crate::gpu::{Kernels, Setting};
use pinring::{Deal, DeviceBatch, DeviceLearner, Feed, NextError, Pinning};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, PoisonError};
use std::time::{Duration, Instant};

const SHAPES: [(&str, Shape); 2] = [
    ("34MB/44-leaves", Shape::STRUCTURED),
    ("256MB/1-leaves", Shape { rows: 512, leaves: 1, words: (256 << 20) / 4 / 512 }),
];
/// Bytes that each device gets in a turn.
const TURN_BYTES: usize = 4_000_000_000;
/// Batches of memory that copies by hand rotate over, at both ends.
const BY_HAND: usize = 3;
const CHECKED: usize = 4;
/// Two devices are to carry at least so many times what one does.
const TARGET: f64 = 1.95;
const DEADLINE: Duration = Duration::from_secs(10);

/// One device, and what copies to it by hand need.
struct Link {
    cuda: &'static Cuda,
    kernels: Kernels,
    stream: Stream,
    from: HostMemory,
    to: Vec<DeviceMemory>,
}

/// One feed of some of the devices.
struct Fed {
    feed: Feed,
    handles: Handles,
    learners: Vec<DeviceLearner>,
    writers: Writers,
}

pub fn run(setting: &Setting, report: &mut Report, count: usize) -> Result<(), Failure> {
    let cudas: Vec<_> = (0..count as i32).map(Cuda::open_on).collect::<Result<_, _>>()?;
    report.table(
        &format!("{count} devices, rows there: GB/s of all together, medians [least, most] of turns"),
        &[("case", 18), ("what", 22), ("one device", 22), ("all devices", 24), ("all over one", 22)],
    );
    for (name, shape) in SHAPES {
        if setting.args.wants(name) {
            case(setting, report, name, shape, &cudas)?;
        }
    }
    Ok(())
}

fn case(
    setting: &Setting,
    report: &mut Report,
    name: &str,
    shape: Shape,
    cudas: &[&'static Cuda],
) -> Result<(), Failure> {
    watchdog::alive(name);
    let links: Vec<Link> = cudas.iter().map(|cuda| Link::new(cuda, shape)).collect::<Result<_, _>>()?;
    let one = Fed::start(shape, &links[..1], Deal::OnDemand)?;
    let all = [("on demand", Deal::OnDemand), ("by rounds", Deal::Rounds)];
    let all = all.map(|(deal_name, deal)| Fed::start(shape, &links, deal).map(|fed| (deal_name, fed)));
    let all = all.into_iter().collect::<Result<Vec<_>, _>>()?;
    one.check(shape, &links)?;
    all.iter().try_for_each(|(_, fed)| fed.check(shape, &links))?;
    println!("checked: {name}: every column of {CHECKED} batches of each feed, by its weight on the device");
    report.checked();
    if setting.is_timing() {
        let batches = (TURN_BYTES / shape.batch_bytes()).max(8);
        let rate = |devices: usize, time: Duration| {
            (devices * batches * shape.batch_bytes()) as f64 / time.as_secs_f64() / 1e9
        };
        let mut hand = (Vec::new(), Vec::new());
        let mut ours = (Vec::new(), vec![Vec::new(); all.len()]);
        for turn in 0..1 + setting.args.pairs() {
            watchdog::alive(name);
            let by_hand = (by_hand(&links[..1], shape, batches)?, by_hand(&links, shape, batches)?);
            let alone = one.turn(&links, batches)?;
            let together: Vec<_> = all.iter().map(|(_, fed)| fed.turn(&links, batches)).collect::<Result<_, _>>()?;
            if turn > 0 {
                // The first warms up.
                hand.0.push(rate(1, by_hand.0));
                hand.1.push(rate(links.len(), by_hand.1));
                ours.0.push(rate(1, alone));
                ours.1.iter_mut().zip(together).for_each(|(all, time)| all.push(rate(links.len(), time)));
            }
        }
        let row = |report: &mut Report, what: &str, one: &[f64], all: &[f64]| {
            let ratio = Spread::of(one.iter().zip(all).map(|(one, all)| all / one));
            let spread = |figures: &[f64]| Cell::Spread(Spread::of(figures.iter().copied()), 2);
            report.row(vec![name.into(), what.into(), spread(one), spread(all), Cell::Spread(ratio, 3)]);
            ratio.median
        };
        row(report, "one copy, by hand", &hand.0, &hand.1);
        for ((deal, _), figures) in all.iter().zip(&ours.1) {
            let ratio = row(report, &format!("pinring, {deal}"), &ours.0, figures);
            if links.len() == 2 {
                report.at_least(format!("{name}, {deal}: two devices over one"), ratio, TARGET);
            }
        }
    }
    one.end()?;
    all.into_iter().try_for_each(|(_, fed)| fed.end())?;
    links.into_iter().try_for_each(Link::end)
}

impl Link {
    /// Made with the device's context current, as everything that is done with it.
    fn new(cuda: &'static Cuda, shape: Shape) -> Result<Link, Failure> {
        cuda.make_current()?;
        let bytes = shape.batch_bytes();
        let to = (0..BY_HAND).map(|_| cuda.alloc(bytes)).collect::<Result<_, _>>()?;
        let from = cuda.page_locked(bytes * BY_HAND)?;
        Ok(Link { cuda, kernels: Kernels::new(cuda)?, stream: cuda.stream()?, from, to })
    }

    fn end(self) -> Result<(), Failure> {
        self.cuda.make_current() // its memory and its stream are given back now
    }

    /// So many copies of a batch.
    fn copy(&self, shape: Shape, batches: usize) -> Result<(), Failure> {
        let bytes = shape.batch_bytes();
        for batch in 0..batches {
            let (from, to) = (&self.from[batch % BY_HAND * bytes..][..bytes], self.to[batch % BY_HAND].address);
            // SAFETY: both memories have a batch's bytes and live until the stream was waited for below.
            unsafe { self.cuda.copy_in(to, from.as_ptr(), bytes, self.stream.raw())? };
        }
        self.stream.synchronize()
    }
}

/// Runs `work` for each link on a thread of its own, with its device current; from the start of all to the end of all.
fn together<'a>(
    links: &'a [Link],
    work: impl Fn(usize, &'a Link) -> Result<(), Failure> + Sync,
    begin: impl FnOnce(),
) -> Result<Duration, Failure> {
    let start = Barrier::new(links.len() + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = links
            .iter()
            .enumerate()
            .map(|(index, link)| {
                let (start, work) = (&start, &work);
                scope.spawn(move || {
                    let current = link.cuda.make_current();
                    start.wait();
                    current.and_then(|()| work(index, link))
                })
            })
            .collect();
        start.wait();
        let begun = Instant::now();
        begin();
        let done = threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked")?);
        done.collect::<Result<Vec<()>, Failure>>()?;
        Ok(begun.elapsed())
    })
}

/// From the first copy issued to the last byte on a device; every link at once.
fn by_hand(links: &[Link], shape: Shape, batches: usize) -> Result<Duration, Failure> {
    together(links, |_, link| link.copy(shape, batches), || {})
}

impl Fed {
    fn start(shape: Shape, links: &[Link], deal: Deal) -> Result<Fed, Failure> {
        let (sample, handles) = shape.declare();
        let feed = Feed::builder(sample).batch(shape.rows).buffers(4 + 2 * links.len()).prefetch(3).deal(deal);
        let feed = (0..links.len() as i32).fold(feed, |feed, device| feed.device(device));
        let feed = feed.pinning(Pinning::Required).start()?;
        let learner = |(device, link): (usize, &Link)| {
            // SAFETY: a stream of that device, which is destroyed behind `end`.
            unsafe { feed.learner_on(device as i32, link.stream.raw().as_pointer()) }
        };
        let learners = links.iter().enumerate().map(learner).collect::<Result<_, _>>()?;
        let writers = Writers::wide(&feed, shape, &handles, 1)?;
        Ok(Fed { feed, handles, learners, writers })
    }

    /// Every column of some batches has the weight of the rows that were written, on whichever device.
    fn check(&self, shape: Shape, links: &[Link]) -> Result<(), Failure> {
        let batches = CHECKED.next_multiple_of(self.learners.len());
        let wrong = std::sync::Mutex::new(None);
        let each = |index: usize, link: &Link, batch: DeviceBatch| {
            let (expected, sums) = (expected(shape, 1, &batch), link.cuda.alloc(shape.leaves * 8)?);
            let mut got = link.cuda.page_locked(shape.leaves * 8)?;
            // SAFETY: the columns are the batch's, which is held; the sums and their copy live until the stream was waited
            // for.
            unsafe {
                link.cuda.set(sums.address, 0, shape.leaves * 2, link.stream.raw())?;
                for (leaf, &column) in self.handles.columns.iter().enumerate() {
                    let (at, sum) = (batch.column(column).ptr, sums.address + leaf as u64 * 8);
                    link.kernels.weigh(at, shape.column_words(), sum, link.stream.raw())?;
                }
                link.cuda.copy_out(got.as_mut_ptr(), sums.address, shape.leaves * 8, link.stream.raw())?;
            }
            link.stream.synchronize()?;
            let right = got.chunks_exact(8).zip(expected).all(|(got, expected)| got == expected.to_ne_bytes());
            if !right {
                let text = format!("batch {} on device {index} is not what was written", batch.sequence_number());
                *wrong.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
            }
            Ok(())
        };
        self.take(links, batches, Content::Stamped, each)?;
        let wrong = wrong.into_inner().unwrap_or_else(PoisonError::into_inner);
        wrong.map_or(Ok(()), |text| Err(text.into()))
    }

    /// From the first row committed to the last byte on a device: so many batches for each device, dropped at once.
    fn turn(&self, links: &[Link], batches: usize) -> Result<Duration, Failure> {
        self.take(links, batches * self.learners.len(), Content::There, |_, _, batch| {
            drop(batch);
            Ok(())
        })
    }

    /// Has so many batches written in all, and gives each to `each` on the thread of its device.
    fn take(
        &self,
        links: &[Link],
        batches: usize,
        content: Content,
        each: impl Fn(usize, &Link, DeviceBatch) -> Result<(), Failure> + Sync,
    ) -> Result<Duration, Failure> {
        let taken = AtomicUsize::new(0);
        let work = |index: usize, link: &Link| {
            let learner = &self.learners[index];
            // Who gets how many is only known behind the last.
            while taken.load(Ordering::Relaxed) < batches {
                match learner.try_next() {
                    Ok(Some(batch)) => {
                        taken.fetch_add(1, Ordering::Relaxed);
                        each(index, link, batch)?;
                    }
                    Ok(None) => std::hint::spin_loop(),
                    Err(NextError::AllHeld { .. }) => unreachable!("batches are dropped at once"),
                    Err(error) => return Err(error.into()),
                }
            }
            link.stream.synchronize()
        };
        together(&links[..self.learners.len()], work, || self.writers.order(batches as u64, content))
    }

    fn end(self) -> Result<(), Failure> {
        let Fed { feed, learners, writers, .. } = self;
        drop(learners);
        let fault = feed.stop(DEADLINE)?.fault;
        writers.join()?;
        fault.map_or(Ok(()), |fault| Err(format!("the feed ended by a fault: {fault}").into()))
    }
}
