//! Every wait of the public interface, against every end: each scene begins one wait, each ending ends it. A wait that
//! does not end is ended by the watchdog; one that ends must say who ended it, and why.

use super::*;
use crate::actors::feeding::FEEDING;
use crate::actors::sampling::SAMPLING;
use crate::select::Pace;
use crate::store::Wanted;
use crate::sync::points;
use crate::{Deal, Gather, Uniform};
use std::any::Any;

/// Long enough to be no timeout of these tests.
const LONG: Duration = Duration::from_secs(3600);
const SHORT: Duration = Duration::from_millis(20);

/// A wait that has begun.
struct Scene {
    feed: Arc<Feed>,
    waiting: Vec<JoinHandle<Error>>,
    /// The handles of the other side: their drop is one of the ends.
    other: Vec<Box<dyn Any>>,
    /// What only has to live as long as the wait.
    kept: Vec<Box<dyn Any>>,
}

/// What a wait hears when the other side is gone.
#[derive(Clone, Copy)]
enum Other {
    LearnerGone,
    Ended,
}

struct Wait {
    name: &'static str,
    /// Begins it, with this timeout if it takes one.
    scene: fn(&Fake, Duration) -> Scene,
    other: Other,
    /// What it says at its timeout, if it takes one.
    timeout: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    Stop,
    /// The drop of the feed.
    Drop,
    Death(&'static str),
    OtherSide,
    Timeout,
}

const WAITS: &[Wait] = &[
    Wait { name: "step", scene: step, other: Other::LearnerGone, timeout: None },
    Wait { name: "step_timeout", scene: step_timeout, other: Other::LearnerGone, timeout: Some("the ring is full") },
    Wait {
        name: "step_timeout of many lanes",
        scene: step_timeout_of_many_lanes,
        other: Other::LearnerGone,
        timeout: Some("the ring is full"),
    },
    Wait { name: "step of many lanes", scene: step_of_many_lanes, other: Other::LearnerGone, timeout: None },
    Wait { name: "commit of an unroll", scene: commit_of_an_unroll, other: Other::LearnerGone, timeout: None },
    Wait {
        name: "policy that completes an unroll",
        scene: policy_of_an_unroll,
        other: Other::LearnerGone,
        timeout: None,
    },
    Wait { name: "step in lockstep", scene: lockstep_step, other: Other::LearnerGone, timeout: None },
    Wait { name: "unroll in lockstep", scene: lockstep_unroll, other: Other::LearnerGone, timeout: None },
    Wait { name: "lag gate, steps", scene: lag_of_steps, other: Other::LearnerGone, timeout: None },
    Wait { name: "lag gate, unrolls", scene: lag_of_unrolls, other: Other::LearnerGone, timeout: None },
    Wait {
        name: "lag gate, steps in lockstep",
        scene: lag_of_lockstep_steps,
        other: Other::LearnerGone,
        timeout: None,
    },
    Wait { name: "lag gate, unrolls in lockstep", scene: lag_of_lockstep, other: Other::LearnerGone, timeout: None },
    Wait { name: "step for the pace", scene: paced_step, other: Other::LearnerGone, timeout: None },
    Wait {
        name: "step_timeout for the pace",
        scene: paced_step_timeout,
        other: Other::LearnerGone,
        timeout: Some("the pace waits for the learner"),
    },
    Wait { name: "episode for the pace", scene: paced_episode, other: Other::LearnerGone, timeout: None },
    Wait {
        name: "step_timeout for a gather",
        scene: gathered_step_timeout,
        other: Other::LearnerGone,
        timeout: Some("the steps that are to be overwritten are still being gathered"),
    },
    Wait { name: "commit of an episode", scene: gathered_episode, other: Other::LearnerGone, timeout: None },
    Wait { name: "load for a gather", scene: gathered_load, other: Other::LearnerGone, timeout: None },
    Wait { name: "next_batch", scene: next_batch, other: Other::Ended, timeout: None },
    Wait { name: "next_timeout", scene: next_timeout, other: Other::Ended, timeout: Some(NOTHING) },
    Wait { name: "iter", scene: iter, other: Other::Ended, timeout: None },
    Wait { name: "next_async", scene: next_async, other: Other::Ended, timeout: None },
    Wait { name: "select", scene: select, other: Other::Ended, timeout: Some(NOTHING) },
    Wait { name: "next_batch in lockstep", scene: lockstep_next, other: Other::Ended, timeout: None },
    Wait { name: "next_batch for samples", scene: sampled_next, other: Other::Ended, timeout: None },
    Wait {
        name: "next_timeout for samples",
        scene: sampled_next_timeout,
        other: Other::Ended,
        timeout: Some("the store has 0 samples, and sampling begins with"),
    },
    Wait {
        name: "next_timeout for the pace",
        scene: paced_next,
        other: Other::Ended,
        timeout: Some("the pace waits for writers"),
    },
    Wait { name: "next_batch on a device", scene: device_next, other: Other::Ended, timeout: None },
    Wait { name: "next_timeout on a device", scene: device_next_timeout, other: Other::Ended, timeout: Some(NOTHING) },
    Wait { name: "next_batch on a device that gathers", scene: gathering_next, other: Other::Ended, timeout: None },
    Wait { name: "next_batch by rounds", scene: rounds_next, other: Other::Ended, timeout: None },
];

const NOTHING: &str = "nothing came in time";

fn nothing() -> Error {
    Error::new(ErrorKind::Full, NOTHING)
}

// ---- scenes of writers ---------------------------------------------------------------------------------------------

/// Takes what is there: else it would come home at the end of the feed, and wake who waits for it.
fn held(learner: &Learner) -> Vec<Box<dyn Any>> {
    let next = || learner.try_next().unwrap_or(None);
    std::iter::from_fn(next).map(|batch| Box::new(batch) as Box<dyn Any>).collect()
}

/// Writers of so many lanes each, before a full ring.
fn full(builder: FeedBuilder, leaf: Leaf<f32>, writers: &[usize]) -> Scene {
    let feed = builder.start().unwrap();
    let learner = feed.learner().unwrap();
    let seats: Vec<_> = writers.iter().map(|&lanes| feed.writer(lanes).unwrap()).collect(); // all, before one is gone
    let waiting: Vec<_> = seats.into_iter().map(|writer| write_on(writer, leaf)).collect();
    until("all wait", || feed.gate.parked() == waiting.len());
    let kept = held(&learner);
    Scene { feed: Arc::new(feed), waiting, other: vec![Box::new(learner)], kept }
}

fn step(fake: &Fake, _: Duration) -> Scene {
    let (builder, leaf) = steps(fake);
    full(builder, leaf, &[1, 1, 1])
}

fn step_timeout(fake: &Fake, timeout: Duration) -> Scene {
    timed(steps(fake), 1, timeout)
}

/// Two rows are free, and three are needed, all at once.
fn step_timeout_of_many_lanes(fake: &Fake, timeout: Duration) -> Scene {
    let (builder, leaf) = steps(fake);
    timed((builder.batch(4), leaf), 3, timeout)
}

/// A writer of so many lanes, behind two steps that fill the ring.
fn timed((builder, leaf): (FeedBuilder, Leaf<f32>), lanes: usize, timeout: Duration) -> Scene {
    let feed = builder.start().unwrap();
    let (mut writer, learner) = (feed.writer(lanes).unwrap(), feed.learner().unwrap());
    (0..2).for_each(|_| write(&mut writer, leaf).unwrap());
    let kept = held(&learner);
    let waiting = vec![std::thread::spawn(move || writer.step_timeout(timeout).map(drop).unwrap_err().into())];
    Scene { feed: Arc::new(feed), waiting, other: vec![Box::new(learner)], kept }
}

/// The same, but the rows are taken one by one: written aside, it waits in its commit.
fn step_of_many_lanes(fake: &Fake, _: Duration) -> Scene {
    let (builder, leaf) = steps(fake);
    full(builder.batch(4), leaf, &[3])
}

fn commit_of_an_unroll(fake: &Fake, _: Duration) -> Scene {
    let (builder, leaf) = unrolls(fake);
    full(builder, leaf, &[2])
}

fn lockstep_step(fake: &Fake, _: Duration) -> Scene {
    let (builder, leaf) = steps(fake);
    full(builder.batch(2).lockstep(2), leaf, &[1, 1])
}

fn lockstep_unroll(fake: &Fake, _: Duration) -> Scene {
    let (builder, leaf) = unrolls(fake);
    full(builder.batch(2).lockstep(2), leaf, &[1, 1])
}

/// Acts until that fails.
fn act_on(mut writer: Writer, leaf: Leaf<f32>, weights: Weights<()>) -> JoinHandle<Error> {
    let mut act = move || -> Result<(), Error> {
        let mut step = writer.step()?;
        step.put(leaf, &[1.0])?;
        step.policy(&weights)?;
        Ok(step.commit()?)
    };
    std::thread::spawn(move || {
        loop {
            if let Err(error) = act() {
                return error;
            }
        }
    })
}

fn policy_of_an_unroll(fake: &Fake, _: Duration) -> Scene {
    let (builder, leaf) = unrolls(fake);
    let feed = builder.start().unwrap();
    let learner = feed.learner().unwrap();
    let waiting = vec![act_on(feed.writer(1).unwrap(), leaf, Weights::new(()))];
    until("it waits", || feed.gate.parked() == 1);
    let kept = held(&learner);
    Scene { feed: Arc::new(feed), waiting, other: vec![Box::new(learner)], kept }
}

fn lag((builder, leaf): (FeedBuilder, Leaf<f32>), lockstep: bool) -> Scene {
    let weights = Weights::new(());
    let builder = builder.max_policy_lag(&weights, 0);
    let feed = if lockstep { builder.lockstep(1) } else { builder }.start().unwrap();
    let learner = feed.learner().unwrap();
    let waiting = vec![act_on(feed.writer(1).unwrap(), leaf, weights.clone())];
    until("it waits", || feed.gate.at_lag_gate() == 1);
    Scene { feed: Arc::new(feed), waiting, other: vec![Box::new(learner)], kept: vec![Box::new(weights)] }
}

fn lag_of_steps(fake: &Fake, _: Duration) -> Scene {
    lag(steps(fake), false)
}

fn lag_of_unrolls(fake: &Fake, _: Duration) -> Scene {
    lag(unrolls(fake), false)
}

fn lag_of_lockstep_steps(fake: &Fake, _: Duration) -> Scene {
    lag(steps(fake), true)
}

fn lag_of_lockstep(fake: &Fake, _: Duration) -> Scene {
    lag(unrolls(fake), true)
}

/// Stored steps of one lane, sampled by pairs.
fn stored(fake: &Fake) -> (FeedBuilder, Leaf<f32>) {
    let mut step = Step::new();
    let leaf = step.observation::<f32>("x", &[]);
    let mut sample = Sample::transition(step, 1, 0.9);
    sample.at(leaf, 0);
    (pinned(sample, fake).batch(4).lanes(1).replay(16, Uniform::new()), leaf)
}

fn paced(fake: &Fake, wait: impl FnOnce(Writer, Leaf<f32>) -> Error + Send + 'static) -> Scene {
    let (builder, leaf) = stored(fake);
    let feed = builder.pace(Pace::min_size(4).samples_per_insert(1.0, 2.0)).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    (0..12).for_each(|_| write(&mut writer, leaf).unwrap());
    let waiting = vec![std::thread::spawn(move || wait(writer, leaf))];
    Scene { feed: Arc::new(feed), waiting, other: vec![Box::new(learner)], kept: vec![] }
}

fn paced_step(fake: &Fake, _: Duration) -> Scene {
    paced(fake, |mut writer, _| writer.step().map(drop).unwrap_err().into())
}

fn paced_step_timeout(fake: &Fake, timeout: Duration) -> Scene {
    paced(fake, move |mut writer, _| writer.step_timeout(timeout).map(drop).unwrap_err().into())
}

fn paced_episode(fake: &Fake, _: Duration) -> Scene {
    paced(fake, |mut writer, _| writer.episode(2).map(drop).unwrap_err())
}

/// A store whose records are read as long as the scene lasts.
fn gathered(fake: &Fake) -> (Feed, Writer, Leaf<f32>, Vec<Box<dyn Any>>) {
    let (builder, leaf) = stored(fake);
    let feed = builder.start().unwrap();
    let mut writer = feed.writer(1).unwrap();
    (0..16).for_each(|_| write(&mut writer, leaf).unwrap());
    let wanted = || Wanted { rows: 4, spare: false, mixed: false };
    let selection = feed.gate.store.as_ref().unwrap().select(Vec::new(), wanted, true).unwrap().unwrap();
    (feed, writer, leaf, vec![Box::new(selection)])
}

/// Writes until a step does not begin in time.
fn gathered_step_timeout(fake: &Fake, timeout: Duration) -> Scene {
    let (feed, mut writer, leaf, kept) = gathered(fake);
    let learner = feed.learner().unwrap();
    let mut write = move || -> Result<(), Error> {
        let mut step = writer.step_timeout(timeout)?;
        step.put(leaf, &[1.0])?;
        Ok(step.commit()?)
    };
    let waiting = std::thread::spawn(move || {
        loop {
            if let Err(error) = write() {
                return error;
            }
        }
    });
    if timeout == LONG {
        until("it waits", || feed.gate.parked() == 1);
    }
    Scene { feed: Arc::new(feed), waiting: vec![waiting], other: vec![Box::new(learner)], kept }
}

fn gathered_episode(fake: &Fake, _: Duration) -> Scene {
    let (feed, mut writer, leaf, kept) = gathered(fake);
    let learner = feed.learner().unwrap();
    let waiting = std::thread::spawn(move || {
        let values = [1.0; 101];
        let mut episode = writer.episode(100).unwrap();
        episode.put(leaf, &values).unwrap();
        episode.commit(crate::End::Terminated, 0).unwrap_err().into()
    });
    until("it waits", || feed.gate.parked() == 1);
    Scene { feed: Arc::new(feed), waiting: vec![waiting], other: vec![Box::new(learner)], kept }
}

fn gathered_load(fake: &Fake, _: Duration) -> Scene {
    let (feed, writer, _, kept) = gathered(fake);
    let (intake, learner) = (feed.intake().unwrap(), feed.learner().unwrap());
    drop(writer);
    let path = common::scratch("load-waits").join("store.safetensors");
    feed.save(&path).unwrap();
    let feed = Arc::new(feed);
    let loading = feed.clone();
    let waiting = std::thread::spawn(move || loading.load(&path).unwrap_err());
    until("it waits", || feed.gate.parked() == 1);
    Scene { feed, waiting: vec![waiting], other: vec![Box::new(learner), Box::new(intake)], kept }
}

// ---- scenes of learners --------------------------------------------------------------------------------------------

/// A learner of an empty feed that waits in this way; the writer, and nobody else, is the other side.
fn empty(feed: Feed, wait: impl FnOnce(Learner) -> Error + Send + 'static) -> Scene {
    let (writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    let waiting = vec![std::thread::spawn(move || wait(learner))];
    Scene { feed: Arc::new(feed), waiting, other: vec![Box::new(writer)], kept: vec![] }
}

fn of_steps(fake: &Fake) -> Feed {
    steps(fake).0.start().unwrap()
}

fn in_time(next: Result<Option<crate::Batch>, NextError>) -> Error {
    match next {
        Ok(None) => nothing(),
        Ok(Some(_)) => panic!("a batch of nothing"),
        Err(error) => error.into(),
    }
}

fn next_batch(fake: &Fake, _: Duration) -> Scene {
    empty(of_steps(fake), |learner| learner.next_batch().unwrap_err().into())
}

fn next_timeout(fake: &Fake, timeout: Duration) -> Scene {
    empty(of_steps(fake), move |learner| in_time(learner.next_timeout(timeout)))
}

/// An iterator ends without an error where the source does.
fn iter(fake: &Fake, _: Duration) -> Scene {
    empty(of_steps(fake), |learner| match learner.iter().next() {
        None => NextError::Ended.into(),
        Some(next) => next.unwrap_err().into(),
    })
}

fn next_async(fake: &Fake, _: Duration) -> Scene {
    empty(of_steps(fake), |learner| block_on(learner.next_async()).unwrap_err().into())
}

fn select(fake: &Fake, timeout: Duration) -> Scene {
    empty(of_steps(fake), move |learner| match Learner::select(&[&learner], timeout) {
        Ok(None) => nothing(),
        Ok(Some(_)) => panic!("a batch of nothing"),
        Err(failed) => failed.error.into(),
    })
}

fn lockstep_next(fake: &Fake, _: Duration) -> Scene {
    let feed = unrolls(fake).0.batch(2).lockstep(2).start().unwrap();
    let second = feed.writer(1).unwrap();
    let mut scene = empty(feed, |learner| learner.next_batch().unwrap_err().into());
    scene.kept.push(Box::new(second)); // one gone is enough
    scene
}

fn sampled_next(fake: &Fake, _: Duration) -> Scene {
    empty(stored(fake).0.start().unwrap(), |learner| learner.next_batch().unwrap_err().into())
}

fn sampled_next_timeout(fake: &Fake, timeout: Duration) -> Scene {
    empty(stored(fake).0.start().unwrap(), move |learner| in_time(learner.next_timeout(timeout)))
}

/// All rows that are due were taken.
fn paced_next(fake: &Fake, timeout: Duration) -> Scene {
    let (builder, leaf) = stored(fake);
    let feed = builder.pace(Pace::min_size(4).samples_per_insert(1.0, 0.0)).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    (0..8).for_each(|_| write(&mut writer, leaf).unwrap());
    drop(learner.next_batch().unwrap());
    let waiting = vec![std::thread::spawn(move || in_time(learner.next_timeout(timeout)))];
    Scene { feed: Arc::new(feed), waiting, other: vec![Box::new(writer)], kept: vec![] }
}

#[allow(unsafe_code)]
pub(super) fn learner_on(feed: &Feed, device: i32) -> crate::DeviceLearner {
    // SAFETY: the legacy default stream lives as long as the device.
    unsafe { feed.learner_on(device, std::ptr::null_mut()) }.unwrap()
}

pub(super) fn on_devices(builder: FeedBuilder, fake: &Fake, devices: std::ops::Range<i32>) -> FeedBuilder {
    let search = CudaSearch::new().library_only(fake.path()).driver(fake.path());
    devices.fold(builder.cuda(search), FeedBuilder::device)
}

fn device(feed: Feed, timeout: Option<Duration>) -> Scene {
    let writer = feed.writer(1).unwrap();
    let wait = |learner: crate::DeviceLearner| {
        move || match timeout.map(|timeout| learner.next_timeout(timeout)) {
            None => Error::from(learner.next_batch().unwrap_err()),
            Some(Ok(None)) => nothing(),
            Some(next) => next.unwrap_err().into(),
        }
    };
    let devices: Vec<_> = feed.desks.iter().map(|desk| desk.device.ordinal()).collect();
    let waiting = devices.into_iter().map(|ordinal| std::thread::spawn(wait(learner_on(&feed, ordinal)))).collect();
    Scene { feed: Arc::new(feed), waiting, other: vec![Box::new(writer)], kept: vec![] }
}

fn device_next(fake: &Fake, _: Duration) -> Scene {
    device(on_devices(steps(fake).0, fake, 0..1).start().unwrap(), None)
}

fn device_next_timeout(fake: &Fake, timeout: Duration) -> Scene {
    device(on_devices(steps(fake).0, fake, 0..1).start().unwrap(), Some(timeout))
}

fn gathering_next(fake: &Fake, _: Duration) -> Scene {
    let builder = on_devices(stored(fake).0, fake, 0..1).batch(64).replay(256, Uniform::new());
    device(builder.gather(Gather::Mapped).start().unwrap(), None)
}

fn rounds_next(fake: &Fake, _: Duration) -> Scene {
    device(on_devices(steps(fake).0, fake, 0..2).buffers(4).deal(Deal::Rounds).start().unwrap(), None)
}

// ---- ends ----------------------------------------------------------------------------------------------------------

/// Whoever runs in this feed.
fn actors(feed: &Feed) -> Vec<&'static str> {
    let sampling = feed.gate.store.iter().map(|_| SAMPLING);
    ACTORS.into_iter().chain(sampling).chain(FEEDING.into_iter().take(feed.desks.len())).collect()
}

fn kill(feed: &Feed, actor: &'static str) {
    if actor == SAMPLING {
        points::crash("sampling: round", TEXT);
        until("it passes the point", || {
            feed.gate.nudge_sampling();
            feed.closed().is_some()
        });
    } else if let Some(index) = FEEDING.iter().position(|name| *name == actor) {
        feed.desks[index].crash(TEXT);
    } else {
        feed.crash(actor);
    }
}

fn end(wait: &Wait, ending: Ending, fake: &Fake) {
    let at = format!("{}: {ending:?}", wait.name);
    let timeout = if ending == Ending::Timeout { SHORT } else { LONG };
    let Scene { feed, waiting, other, kept } = (wait.scene)(fake, timeout);
    if ending != Ending::Timeout {
        std::thread::sleep(SHORT); // they are where they wait; if not, they meet the end a little later
        assert!(waiting.iter().all(|thread| !thread.is_finished()), "{at}: it does not wait");
    }
    let mut other = Some(other);
    let mut feed = Some(feed);
    match ending {
        Ending::Stop => drop(feed.as_ref().map(|feed| feed.stop(PATIENCE).unwrap())),
        Ending::Drop => match Arc::try_unwrap(feed.take().unwrap()) {
            Ok(whole) => drop(whole),
            Err(shared) => drop(shared.stop(PATIENCE).unwrap()), // who waits holds it
        },
        Ending::Death(actor) => kill(feed.as_ref().unwrap(), actor),
        Ending::OtherSide => drop(other.take()),
        Ending::Timeout => {}
    }
    for thread in waiting {
        let error = thread.join().unwrap_or_else(|_| panic!("{at}: it panicked"));
        match (ending, wait.other) {
            (Ending::Stop | Ending::Drop, _) => {
                assert_eq!(error.kind(), ErrorKind::Stopped, "{at}: {error}");
                assert!(error.to_string().contains("the feed was stopped"), "{at}: {error}");
            }
            (Ending::Death(actor), _) => assert_names(&error, actor),
            (Ending::OtherSide, Other::LearnerGone) => {
                assert!(error.to_string().contains("the learner was dropped"), "{at}: {error}");
            }
            (Ending::OtherSide, Other::Ended) => assert_eq!(error.kind(), ErrorKind::Ended, "{at}: {error}"),
            (Ending::Timeout, _) => {
                let text = wait.timeout.expect("it takes a timeout");
                assert!(error.kind() == ErrorKind::Full && error.to_string().contains(text), "{at}: {error}");
            }
        }
    }
    drop((kept, other));
    if let Some(feed) = feed {
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!(report.threads_given_up, [""; 0], "{at}");
        let fault = report.fault.map(|fault| (fault.actor, fault.text.clone()));
        let expected =
            if let Ending::Death(actor) = ending { Some((actor, format!("it panicked: {TEXT}"))) } else { None };
        assert_eq!(fault, expected, "{at}");
    }
    assert_nothing_is_left(fake);
    assert_eq!((fake.live_allocations(), fake.live_events(), fake.live_streams()), (vec![], vec![], vec![]), "{at}");
}

alone! {
    fn every_wait_ends_at_every_end_and_says_who_ended_it() {
        let fake = fake();
        fake.devices(2);
        fake.auto_run(true);
        let mut ends = 0;
        for wait in WAITS {
            let scene = (wait.scene)(&fake, LONG);
            let deaths = actors(&scene.feed).into_iter().map(Ending::Death);
            scene.feed.stop(PATIENCE).unwrap();
            scene.waiting.into_iter().for_each(|thread| drop(thread.join().unwrap()));
            drop((scene.feed, scene.other, scene.kept));
            let mut endings: Vec<_> = deaths.chain([Ending::Stop, Ending::Drop, Ending::OtherSide]).collect();
            endings.extend(wait.timeout.map(|_| Ending::Timeout));
            ends += endings.len();
            endings.into_iter().for_each(|ending| end(wait, ending, &fake));
        }
        assert!(ends > 6 * WAITS.len(), "{ends}");
    }
}
