//! What comes just between two looks of another thread, or while it waits for something else: nobody sleeps on, and nothing
//! is lost. Points in the code say where.

use super::waits::{learner_on, on_devices};
use super::*;
use crate::select::Pace;
use crate::sync::points;
use crate::{Column, Draws, Gather, Pass, PriorityError, Sampler, SamplerError, Selected, Uniform};
use std::sync::mpsc;

/// Longer than anything here takes: whoever waits so long was forgotten.
const LONG: Duration = Duration::from_secs(20);

/// Steps of so many lanes, sampled by pairs.
fn stored(fake: &Fake, capacity: usize, lanes: usize) -> (FeedBuilder, Leaf<f32>) {
    let mut step = Step::new();
    let leaf = step.observation::<f32>("x", &[]);
    let mut sample = Sample::transition(step, 1, 0.9);
    sample.at(leaf, 0);
    (pinned(sample, fake).lanes(lanes).replay(capacity, Uniform::new()), leaf)
}

/// Has the next thread that passes `point` wait there. It is there when the first answers, and goes on by the second.
fn hold_at(point: &'static str) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
    let ((arrived, arrival), (go_on, told)) = (mpsc::channel(), mpsc::channel());
    points::act(point, move || {
        arrived.send(()).unwrap();
        told.recv().unwrap();
    });
    (arrival, go_on)
}

/// Begins a step, on a thread of its own.
fn begin(mut writer: Writer) -> JoinHandle<Writer> {
    std::thread::spawn(move || {
        drop(writer.step().unwrap());
        writer
    })
}

alone! {
    /// The last writer goes after the feeding thread has looked for the end and before it waits for a batch. The learner
    /// hears of it all the same.
    fn an_end_that_comes_just_before_the_wait_is_heard_of() {
        let fake = fake();
        fake.auto_run(true);
        let (builder, leaf) = steps(&fake);
        let feed = on_devices(builder, &fake, 0..1).start().unwrap();
        let learner = learner_on(&feed, 0);
        let mut writer = feed.writer(1).unwrap();
        write(&mut writer, leaf).unwrap();
        drop(learner.next_batch().unwrap());
        until("the slot is home", || feed.metrics().free_slots == 2);
        let (called, calls) = mpsc::channel();
        points::act("feeding0: about to rest", move || {
            calls.recv().unwrap();
            drop(writer);
            std::thread::park_timeout(Duration::ZERO); // that call is no reason to look again
        });
        feed.desks[0].call();
        called.send(()).unwrap();
        assert_eq!(learner.next_timeout(LONG).map(drop), Err(NextError::Ended));
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!((report.dropped_rows(), report.fault), (0, None));
    }
}

alone! {
    /// The source's rows that lay ready for a learner are selected anew for the other one: the pace does not count them.
    fn the_pace_gets_back_the_rows_of_a_device_learner_that_goes() {
        let fake = fake();
        fake.devices(2);
        fake.auto_run(true);
        let (builder, leaf) = stored(&fake, 64, 1);
        let builder = on_devices(builder, &fake, 0..2).batch(4).gather(Gather::Cpu);
        let feed = builder.pace(Pace::min_size(4).updates_per_step(1.0, 0.0)).start().unwrap();
        let going = learner_on(&feed, 0);
        let mut writer = feed.writer(1).unwrap();
        (0..8).for_each(|_| write(&mut writer, leaf).unwrap()); // four batches are due
        until("two lie ready", || feed.metrics().devices[0].batches_waiting == 2 && feed.metrics().batches_waiting == 2);
        let other = learner_on(&feed, 1);
        until("and two for the other", || feed.metrics().devices[1].batches_waiting == 2);
        drop(going);
        for batch in 0..4 {
            let next = other.next_timeout(LONG);
            assert!(matches!(next, Ok(Some(_))), "batch {batch}: {next:?}");
        }
        assert_eq!(feed.metrics().dropped_rows, 8, "they reached a device, and no learner");
        drop(other);
        feed.stop(PATIENCE).unwrap();
    }
}

alone! {
    /// By a strict pace a writer waits for the selection of the batch that is due, and not for the device's gather.
    fn a_writer_in_strict_order_goes_on_when_the_batch_is_selected() {
        let fake = fake();
        let (builder, leaf) = stored(&fake, 256, 1);
        let builder = on_devices(builder, &fake, 0..1).batch(32).gather(Gather::Mapped);
        let feed = builder.pace(Pace::min_size(32).updates_per_step(1.0, 0.0)).start().unwrap();
        let learner = learner_on(&feed, 0);
        let mut writer = feed.writer(1).unwrap();
        (0..32).for_each(|_| write(&mut writer, leaf).unwrap());
        let_them_wait(); // the sampling is where it waits for items; if not, it is held before it looks
        let (arrived, go_on) = hold_at("sampling: round");
        write(&mut writer, leaf).unwrap();
        arrived.recv().unwrap();
        let waiting = begin(writer);
        until("it waits for the selection", || feed.gate.parked() == 1);
        go_on.send(()).unwrap();
        until("it goes on", || waiting.is_finished());
        assert_eq!(learner.next_batch().unwrap().rows(), 32);
        fake.auto_run(true);
        fake.run_all();
        drop((waiting.join().unwrap(), learner));
        feed.stop(PATIENCE).unwrap();
    }
}

alone! {
    /// A step that is written pushes out items, so that a batch needs more steps: every writer goes on, also one that has
    /// waited for the learner before.
    fn writers_that_wait_for_the_learner_go_on_when_a_step_pushes_items_out() {
        let fake = fake();
        let (builder, leaf) = stored(&fake, 16, 2);
        let builder = builder.batch(1).buffers(1).pace(Pace::min_size(15).samples_per_insert(1.0, 2.5 / 15.0));
        let feed = builder.start().unwrap();
        let learner = feed.learner().unwrap();
        let [mut one, mut other] = [(); 2].map(|()| feed.writer(1).unwrap());
        (0..8).for_each(|_| write(&mut one, leaf).unwrap());
        (0..7).for_each(|_| write(&mut other, leaf).unwrap());
        let mut open = one.step().unwrap();
        (0..2).for_each(|_| write(&mut other, leaf).unwrap());
        assert_eq!(feed.metrics().stored_samples, 15, "enough for batches");
        let batch = learner.next_batch().unwrap(); // the only slot: no further batch is selected
        let waiting = begin(other);
        until("it waits for the learner", || feed.gate.parked() == 1);
        open.put(leaf, &[1.0]).unwrap();
        open.commit().unwrap();
        assert_eq!(feed.metrics().stored_samples, 14, "too few");
        until("it goes on", || waiting.is_finished());
        drop((batch, waiting.join().unwrap()));
        feed.stop(PATIENCE).unwrap();
    }
}

alone! {
    /// A stop has begun and not come to the batches: whoever takes one then gets it.
    fn a_batch_that_select_takes_while_the_feed_closes_is_not_lost() {
        let fake = fake();
        let (builder, leaf) = steps(&fake);
        let feed = Arc::new(builder.start().unwrap());
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        (0..2).for_each(|_| write(&mut writer, leaf).unwrap());
        let (arrived, go_on) = hold_at("intake: over");
        let stopping = std::thread::spawn({
            let feed = feed.clone();
            move || feed.stop(PATIENCE).unwrap()
        });
        arrived.recv().unwrap();
        let taken = Learner::select(&[&learner], Duration::ZERO).unwrap();
        assert_eq!(taken.map(|(index, batch)| (index, batch.sequence_number())), Some((0, 0)));
        go_on.send(()).unwrap();
        assert_eq!(stopping.join().unwrap().untaken_rows, 1, "the other one");
    }
}

alone! {
    /// A learner goes while a batch is in the making that was begun for its buffers. It does not lie there, with the records
    /// that it reads, until another learner has a buffer.
    fn what_was_begun_for_a_learner_that_went_keeps_no_writer() {
        let fake = fake();
        fake.devices(2);
        fake.auto_run(true);
        let (builder, leaf) = stored(&fake, 256, 1);
        let builder = on_devices(builder, &fake, 0..2).batch(32).buffers(8).gather(Gather::Mapped);
        let feed = builder.start().unwrap();
        let other = learner_on(&feed, 1);
        let mut writer = feed.writer(1).unwrap();
        (0..64).for_each(|_| write(&mut writer, leaf).unwrap());
        let held = [other.next_batch().unwrap(), other.next_batch().unwrap()]; // all its buffers
        let (arrived, go_on) = hold_at("sampling: delivers");
        let going = learner_on(&feed, 0);
        arrived.recv().unwrap();
        drop(going);
        let gathering = feed.gate.gathering.as_ref().unwrap();
        until("its buffers are withdrawn", || gathering.owes(0));
        go_on.send(()).unwrap();
        until("the batch is not delivered", || !gathering.owes(0));
        let writing = std::thread::spawn(move || {
            (0..512).for_each(|_| write(&mut writer, leaf).unwrap());
            writer
        });
        until("everything is overwritten", || writing.is_finished());
        drop(held);
        (0..8).for_each(|_| assert_eq!(other.next_batch().unwrap().rows(), 32));
        drop((other, writing.join().unwrap()));
        feed.stop(PATIENCE).unwrap();
    }
}

/// A waker that does not return before it may.
struct Slow(std::sync::Mutex<mpsc::Receiver<()>>);

impl Wake for Slow {
    fn wake(self: Arc<Self>) {
        let _ = self.0.lock().unwrap().recv();
    }
}

alone! {
    /// Whoever ends the source is kept by a waker of the user's. The learner on the device hears of the end all the same.
    fn a_slow_waker_keeps_nobody_from_the_news_of_the_end() {
        let fake = fake();
        fake.auto_run(true);
        let replay = stored(&fake, 64, 1).0.gather(Gather::Cpu);
        for (kind, builder) in [("lockstep", steps(&fake).0.lockstep(1)), ("replay", replay), ("steps", steps(&fake).0)] {
            let feed = on_devices(builder, &fake, 0..1).start().unwrap();
            let (host, device) = (feed.learner().unwrap(), learner_on(&feed, 0));
            let writer = feed.writer(1).unwrap();
            let (go_on, told) = mpsc::channel();
            let waker = Waker::from(Arc::new(Slow(std::sync::Mutex::new(told))));
            let mut next = Box::pin(host.next_async());
            // In the line of those who wait it stands before the feeding thread.
            let (arrived, feeding) = hold_at("feeding0: about to rest");
            feed.desks[0].call();
            arrived.recv().unwrap();
            assert!(next.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            feeding.send(()).unwrap();
            let_them_wait(); // if the feeding thread is not there yet, it sees the end itself
            let ending = std::thread::spawn(move || drop(writer));
            let end = device.next_timeout(LONG).map(drop);
            assert_eq!(end, Err(NextError::Ended), "{kind}");
            go_on.send(()).unwrap();
            ending.join().unwrap();
            drop(next);
            drop((host, device));
            feed.stop(PATIENCE).unwrap();
        }
    }
}

/// A waker that panics.
struct Broken;

impl Wake for Broken {
    fn wake(self: Arc<Self>) {
        panic!("{TEXT}");
    }
}

alone! {
    /// A commit in lockstep that wakes it ends by that panic, and the writer with it. The end is told all the same, behind
    /// the batch.
    fn a_broken_waker_keeps_nobody_from_the_end_of_a_lockstep_feed() {
        let fake = fake();
        for ((builder, leaf), before) in [(steps(&fake), 0), (unrolls(&fake), 1)] {
            let feed = builder.lockstep(1).start().unwrap();
            let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
            (0..before).for_each(|_| write(&mut writer, leaf).unwrap());
            let mut next = Box::pin(learner.next_async());
            let waker = Waker::from(Arc::new(Broken));
            assert!(next.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            let panic = std::thread::spawn(move || write(&mut writer, leaf)).join().unwrap_err();
            assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some(TEXT));
            assert_eq!(learner.next_timeout(LONG).unwrap().map(|batch| batch.rows()), Some(1));
            assert_eq!(learner.next_timeout(LONG).map(drop), Err(NextError::Ended));
            drop(next);
            feed.stop(PATIENCE).unwrap();
        }
    }
}

alone! {
    /// A supervisor that has died takes no stop. What it started has the time that was given all the same.
    fn a_stop_without_a_supervisor_waits_for_queued_copies_until_its_deadline() {
        let fake = fake();
        let (builder, leaf) = steps(&fake);
        let feed = on_devices(builder, &fake, 0..1).start().unwrap();
        let learner = learner_on(&feed, 0);
        let mut writer = feed.writer(1).unwrap();
        write(&mut writer, leaf).unwrap();
        drop(learner.next_batch().unwrap()); // its copy does not run yet
        feed.crash(SUPERVISOR);
        until("the gate is closed", || feed.closed().is_some());
        let fake = Arc::new(fake);
        let running = std::thread::spawn({
            let fake = fake.clone();
            move || {
                std::thread::sleep(Duration::from_secs(2)); // longer than what is given where the deadline is over
                fake.auto_run(true);
                fake.run_all();
            }
        });
        let report = feed.stop(PATIENCE).unwrap();
        running.join().unwrap();
        assert_eq!((report.threads_given_up, report.quarantined_slots), (vec![], 0));
    }
}

alone! {
    /// A load that is refused, because a lane gets a writer while it begins: that writer's steps are a run of their own all
    /// the same, and no sample begins with the last writer's step.
    fn a_writer_that_comes_amid_a_refused_load_goes_on_with_nobodys_run() {
        let mut step = Step::new();
        let leaf = step.observation::<f32>("x", &[]);
        let mut sample = Sample::transition(step, 1, 0.9);
        let (now, next) = (sample.at(leaf, 0), sample.next(leaf));
        let builder = Feed::builder(sample).lanes(1).replay(64, Uniform::new()).batch(32).buffers(1);
        let feed = Arc::new(builder.pace(Pace::min_size(1)).start().unwrap());
        let write = |writer: &mut Writer| {
            for value in 0..4 {
                let mut step = writer.step().unwrap();
                step.put(leaf, &[value as f32]).unwrap();
                step.commit().unwrap();
            }
        };
        let _intake = feed.intake().unwrap(); // there will be more writers
        write(&mut feed.writer(1).unwrap());
        let file = std::env::temp_dir().join(format!("pinring-amid-{}.safetensors", std::process::id()));
        feed.save(&file).unwrap();
        let (made, writer) = mpsc::channel();
        points::act("load: pauses", {
            let feed = feed.clone();
            move || made.send(feed.writer(1).unwrap()).unwrap()
        });
        let error = feed.load(&file).unwrap_err();
        assert!(error.to_string().contains("1 lane"), "{error}");
        std::fs::remove_file(&file).unwrap();
        let mut writer = writer.recv().unwrap();
        write(&mut writer);
        let learner = feed.learner().unwrap();
        for _ in 0..30 {
            let batch = learner.next_batch().unwrap();
            let pairs = batch.slice(now).iter().zip(batch.slice(next));
            pairs.for_each(|(now, next)| assert_eq!(*next, now + 1.0));
        }
    }
}

const BUFFERS: usize = 3;

/// Batches that are worth helpers, of a store whose steps hold their numbers; and the feed's learner.
fn helped(fake: &Fake) -> (Feed, Writer, Learner, Column<f32>) {
    helped_by(fake, Uniform::new())
}

fn helped_by(fake: &Fake, sampler: impl Sampler + 'static) -> (Feed, Writer, Learner, Column<f32>) {
    const ROWS: usize = 1 << 16;
    let mut step = Step::new();
    let leaf = step.observation::<f32>("x", &[]);
    let mut sample = Sample::transition(step, 1, 0.9);
    let column = sample.at(leaf, 0);
    let builder = pinned(sample, fake).lanes(1).replay(64, sampler).batch(ROWS).buffers(BUFFERS).gather_threads(4);
    let feed = builder.pace(Pace::min_size(1)).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    for value in 0..8 {
        let mut step = writer.step().unwrap();
        step.put(leaf, &[value as f32]).unwrap();
        step.commit().unwrap();
    }
    (feed, writer, learner, column)
}

alone! {
    /// A helper has taken rows and is late with them: the batch is handed over when it has filled them, and not before.
    fn rows_that_a_helper_is_late_with_are_waited_for() {
        let fake = fake();
        let (feed, writer, learner, column) = helped(&fake);
        let take = || {
            let Some(batch) = learner.next_timeout(Duration::from_millis(10)).unwrap() else { return };
            assert!(batch.slice(column).iter().zip(batch.first_steps()).all(|(value, step)| *value == step as f32));
        };
        for _ in 0..10 {
            let (arrived, go_on) = hold_at("gather: fills");
            until("a helper has rows", || {
                take();
                arrived.try_recv().is_ok()
            });
            let_them_wait(); // the batch before may be handed over meanwhile
            (0..BUFFERS).for_each(|_| take()); // there are slots for more
            let made = feed.metrics().batches;
            let_them_wait();
            assert_eq!(feed.metrics().batches, made, "the next one is in the making");
            go_on.send(()).unwrap();
            until("it is handed over", || feed.metrics().batches > made);
        }
        take();
        drop((writer, learner));
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!((report.fault, report.threads_given_up), (None, vec![]));
    }
}

alone! {
    /// Whoever fills rows and panics is told of by the sampling thread; nobody waits for the rows, and no helper is left.
    fn a_panic_over_rows_is_the_sampling_threads_own_whoever_fills_them() {
        let fake = fake();
        for point in ["sampling: fills", "gather: fills"] {
            let (feed, writer, learner, _) = helped(&fake);
            points::crash(point, TEXT);
            let error = std::iter::from_fn(|| Some(learner.next_timeout(LONG))).find_map(Result::err).unwrap();
            let words = format!("a row could not be filled: it panicked: {TEXT}");
            assert!(error.to_string().contains("the sampling actor failed"), "{point}: {error}");
            assert!(error.to_string().contains(&words), "{point}: {error}");
            drop((writer, learner));
            let report = feed.stop(PATIENCE).unwrap();
            assert!(report.fault.is_some_and(|fault| fault.text.contains(&words)));
            assert_eq!(report.threads_given_up, [""; 0], "{point}");
            drop(feed);
            until("no helper is left", || feed_threads().is_empty());
        }
    }
}

/// Panics when it is asked a second time and a helper has come to rows of the first batch; tells how that goes on, and before
/// it panics.
#[derive(Debug)]
struct Breaks(Uniform, mpsc::Sender<mpsc::Sender<()>>, Option<mpsc::Receiver<()>>);

impl Sampler for Breaks {
    fn begin(&mut self, items: u32) -> std::result::Result<(), SamplerError> {
        self.0.begin(items)
    }
    fn insert(&mut self, item: u32, priority: Option<f32>) -> std::result::Result<(), PriorityError> {
        self.0.insert(item, priority)
    }
    fn remove(&mut self, item: u32) {
        self.0.remove(item);
    }
    fn selectable(&self) -> usize {
        self.0.selectable()
    }
    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        if let Some(arrived) = self.2.take() {
            arrived.recv().unwrap();
            self.1.send(mpsc::channel().0).unwrap();
            panic!("{TEXT}");
        }
        let (arrived, go_on) = hold_at("gather: fills");
        (self.2, _) = (Some(arrived), self.1.send(go_on));
        self.0.select(rows, draws, into)
    }
}

alone! {
    /// The sampler panics while a helper is late with rows of the batch before: that one's slot stays out until it has them.
    fn a_slot_that_a_helper_fills_is_kept_when_the_sampler_panics() {
        let fake = fake();
        let (tell, told) = mpsc::channel();
        let (feed, writer, learner, _) = helped_by(&fake, Breaks(Uniform::new(), tell, None));
        let (go_on, _) = (told.recv().unwrap(), told.recv().unwrap()); // two slots are out
        until("the slot of the second batch is home", || feed.metrics().free_slots == BUFFERS - 1);
        let_them_wait();
        assert_eq!(feed.metrics().free_slots, BUFFERS - 1);
        go_on.send(()).unwrap();
        assert!(learner.next_batch().unwrap_err().to_string().contains(TEXT), "the batch in the making is lost");
        until("it is home", || feed.metrics().free_slots == BUFFERS);
        drop((writer, learner));
        assert_eq!(feed.stop(PATIENCE).unwrap().threads_given_up, [""; 0]);
    }
}
