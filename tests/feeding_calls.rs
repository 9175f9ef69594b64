//! Every CUDA call of a feed at work, met by every kind of failure: an error, one that stays, memory that is out, a "not
//! ready", a call that never returns, a context that is destroyed. Whatever it hits, no batch is torn, no row is lost
//! without a count, nobody hangs, the error names the call and its code, and nothing is left that is not counted.
//!
//! Of each function the first few calls are met, of all calls some more at even distances. `PINRING_EVERY_CALL=N` meets
//! every N-th call there is, with 1 all of them, which takes some ten minutes.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;

use common::fake::{Call, Fake, Hazards, Trap};
use feeding::{fake, learner_on, search, until};
use life::{alone, feed_threads, rings};
use pinring::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

const WORDS: usize = 16;
const ROWS: usize = 4;
const BYTES: usize = ROWS * WORDS * 8;
/// Steps of each of two writers.
const STEPS: u64 = 40;
/// A stop that nothing hinders, and one that is to give up.
const PATIENT: Duration = Duration::from_secs(30);
const IMPATIENT: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Failure {
    Code(i32),
    Trap(Trap),
}

/// Which feed is at work.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    /// Steps in the order of writing: to a learner on the device, and to one on the host that copies its batches.
    Fifo,
    /// Stored steps that the device gathers.
    Replay,
}

/// Word `i` of a lane's step.
fn word(lane: usize, step: u64, i: usize) -> u64 {
    ((lane as u64) << 56) ^ (step << 32) ^ (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Whether the bytes are those of the rows, word by word.
fn is_whole(bytes: &[u8], rows: &[(usize, u64)]) -> bool {
    let expected = rows.iter().flat_map(|&(lane, step)| (0..WORDS).map(move |i| word(lane, step, i)));
    let found = bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
    found.take(rows.len() * WORDS).eq(expected)
}

/// What is seen of a run.
#[derive(Default)]
struct Seen {
    /// Rows that a learner took.
    taken: Mutex<Vec<(usize, u64)>>,
    torn: AtomicUsize,
    downloaded: AtomicUsize,
    /// What the learners' own calls said.
    said: Mutex<Vec<String>>,
}

impl Seen {
    fn say(&self, error: impl std::fmt::Display) {
        self.said.lock().unwrap().push(error.to_string());
    }
    fn check(&self, bytes: &[u8], rows: &[(usize, u64)]) {
        self.torn.fetch_add(usize::from(!is_whole(bytes, rows)), Ordering::Relaxed);
    }
}

/// What the framework around has: a stream for each learner, and memory to copy to.
#[derive(Clone, Copy)]
struct User {
    streams: [usize; 2],
    memory: u64,
}

impl User {
    fn new(fake: &Fake) -> User {
        let user = User { streams: [fake.user_stream(1), fake.user_stream(1)], memory: fake.user_memory(BYTES) };
        let ones = [1_f32; ROWS]; // priorities, before anything is copied there
        assert_eq!(fake.user_copy_in(user.memory, ones.as_ptr().cast(), size_of_val(&ones), user.streams[0]), 0);
        fake.run(user.streams[0]);
        user
    }
}

struct AtWork {
    feed: Feed,
    words: Leaf<u64>,
    column: Column<u64>,
    shape: Shape,
}

impl AtWork {
    fn start(fake: &Fake, shape: Shape) -> AtWork {
        let mut step = Step::new();
        let words = step.observation::<u64>("words", &[WORDS]);
        let mut sample = match shape {
            Shape::Fifo => Sample::step(step),
            Shape::Replay => Sample::transition(step, 1, 0.9),
        };
        let column = if shape == Shape::Fifo { sample.all(words) } else { sample.at(words, 0) };
        let builder = Feed::builder(sample).batch(ROWS).buffers(5).lanes(2).seed(1).downloads(BYTES);
        let builder = builder.pinning(Pinning::Required).cuda(search(fake)).device(0);
        let builder = match shape {
            Shape::Fifo => builder,
            Shape::Replay => builder.replay(64, Prioritized::new(0.6, 0.4)).gather(Gather::Mapped),
        };
        AtWork { feed: builder.start().unwrap(), words, column, shape }
    }

    /// Writers and learners, each on a thread. What a writer ends with is the number of its committed steps.
    fn go(&self, user: User, seen: &Arc<Seen>) -> (Vec<JoinHandle<u64>>, Vec<JoinHandle<()>>) {
        let device = learner_on(&self.feed, 0, user.streams[0]).unwrap();
        let host = (self.shape == Shape::Fifo).then(|| (self.feed.learner().unwrap(), self.feed.copier(0).unwrap()));
        let writers = [(); 2].map(|()| self.feed.writer(1).unwrap());
        let words = self.words;
        let write = move |mut writer: Writer| {
            let lane = writer.lanes().start;
            let mut committed = 0;
            for step in 0..STEPS {
                let row: Vec<u64> = (0..WORDS).map(|i| word(lane, step, i)).collect();
                let Ok(mut open) = writer.step() else { break };
                open.put(words, &row).unwrap();
                if open.commit().is_err() {
                    break;
                }
                committed += 1;
            }
            committed
        };
        let writing = writers.into_iter().map(|writer| std::thread::spawn(move || write(writer))).collect();
        let (seen_here, column, shape) = (seen.clone(), self.column, self.shape);
        let mut learning = vec![std::thread::spawn(move || learn_on_device(&device, column, shape, user, &seen_here))];
        if let Some((learner, copier)) = host {
            let seen = seen.clone();
            learning.push(std::thread::spawn(move || learn_on_host(&learner, &copier, column, user, &seen)));
        }
        (writing, learning)
    }
}

fn learn_on_device(learner: &DeviceLearner, column: Column<u64>, shape: Shape, user: User, seen: &Arc<Seen>) {
    for turn in 0.. {
        if shape == Shape::Replay && turn == 20 {
            return; // as many as there are in the other feed, about
        }
        let batch = match learner.next_batch() {
            Ok(batch) => batch,
            Err(NextError::Ended) => return,
            Err(error) => return seen.say(error),
        };
        let rows: Vec<_> = batch.lanes().zip(batch.first_steps()).collect();
        seen.taken.lock().unwrap().extend(&rows);
        let then = {
            let seen = seen.clone();
            move |bytes: &[u8]| {
                seen.downloaded.fetch_add(1, Ordering::Relaxed);
                seen.check(bytes, &rows);
            }
        };
        // SAFETY: the batch's memory, whose release is behind the snapshot; a stream of the device.
        let calls = unsafe {
            [learner.download(batch.column(column).ptr, BYTES, then), batch.wait_on(user.streams[1] as *mut c_void)]
        };
        let waited = if turn % 3 == 0 { batch.synchronize() } else { Ok(()) };
        calls.into_iter().chain([waited]).filter_map(Result::err).for_each(|error| seen.say(error));
        if shape == Shape::Replay {
            // SAFETY: the memory holds as many, and nobody writes there in a replay feed.
            let updated = unsafe { learner.update_priorities(&batch.keys(), user.memory, ROWS) };
            updated.err().into_iter().for_each(|error| seen.say(error));
        }
    }
}

fn learn_on_host(learner: &Learner, copier: &DeviceCopier, column: Column<u64>, user: User, seen: &Seen) {
    loop {
        let batch = match learner.next_batch() {
            Ok(batch) => batch,
            Err(NextError::Ended) => return,
            Err(error) => return seen.say(error),
        };
        let rows: Vec<_> = batch.lanes().zip(batch.first_steps()).collect();
        seen.taken.lock().unwrap().extend(&rows);
        let bytes: Vec<u8> = batch.slice(column).iter().flat_map(|word| word.to_ne_bytes()).collect();
        seen.check(&bytes, &rows);
        if batch.byte_len() > BYTES {
            continue; // padded by more than the memory has
        }
        // SAFETY: memory and stream of the test's, which outlive the copy.
        match unsafe { copier.copy_to_device(batch, user.memory, user.streams[1] as *mut c_void) } {
            Ok(ticket) => {
                // SAFETY: as above.
                let waits = unsafe { ticket.wait_on(user.streams[0] as *mut c_void) };
                let over = ticket.is_done().map(drop);
                [waits, over, ticket.synchronize()]
                    .into_iter()
                    .filter_map(Result::err)
                    .for_each(|error| seen.say(error));
            }
            Err(error) => seen.say(error),
        }
    }
}

/// Calls that have nobody to tell, or whose failure another call tells: what they are about is kept, and counted. A context
/// is made current for each of the others, those that have nobody to tell among them.
const TOLD_ELSEWHERE: [&str; 12] = [
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cudaThreadExchangeStreamCaptureMode",
    "cuEventDestroy_v2",
    "cuStreamDestroy_v2",
    "cuMemFree_v2",
    "cuModuleUnload",
    "cuDevicePrimaryCtxRelease_v2",
    "cudaHostUnregister",
    "cudaGetLastError",
];

/// Sums the buffers of the events that say how many are quarantined.
struct Quarantines;

static QUARANTINED: AtomicUsize = AtomicUsize::new(0);

impl tracing::field::Visit for Quarantines {
    fn record_u64(&mut self, field: &tracing::field::Field, value: u64) {
        if field.name() == "buffers" {
            QUARANTINED.fetch_add(value as usize, Ordering::Relaxed);
        }
    }
    fn record_debug(&mut self, _: &tracing::field::Field, _: &dyn std::fmt::Debug) {}
}

impl tracing::Subscriber for Quarantines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR && metadata.target().starts_with("pinring")
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut Quarantines);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// How often each function was met, and how often somebody was told.
type Table = BTreeMap<String, (usize, usize)>;

/// One run that meets `failure` at the `nth` call of `function`. Returns what it called, and whether that call was among it.
fn meet(
    fake: &Fake,
    shape: Shape,
    user: User,
    (function, nth): (&str, u64),
    failure: Failure,
    table: &mut Table,
) -> (Vec<Call>, bool) {
    let at = format!("{failure:?} at call {nth} of {function}, {shape:?}");
    let before = (fake.live_registrations().len(), fake.live_allocations().len(), rings().len());
    let work = AtWork::start(fake, shape);
    let (begin, hangs) = (fake.call_count(), failure == Failure::Trap(Trap::Hang));
    match failure {
        Failure::Code(code) => fake.inject(function, nth, code),
        Failure::Trap(trap) => fake.trap(function, nth, trap),
    }
    let seen = Arc::new(Seen::default());
    let (writing, learning) = work.go(user, &seen);
    let all_ended =
        || writing.iter().all(|thread| thread.is_finished()) && learning.iter().all(|thread| thread.is_finished());
    until(&at, || all_ended() || (hangs && fake.hung().is_some()));

    // The stop comes back also while a call hangs, and whoever is not inside of that call ends.
    let report = work.feed.stop(if hangs { IMPATIENT } else { PATIENT }).unwrap();
    let hung = fake.hung();
    if let Some(hung) = &hung {
        let left = |thread: &JoinHandle<()>| usize::from(!thread.is_finished());
        until(&format!("{at}: writers end"), || writing.iter().all(|thread| thread.is_finished()));
        let name =
            life::threads().into_iter().find(|(id, _)| *id == hung.thread).map(|(_, name)| name).unwrap_or_default();
        let ours = feed_threads().contains(&name);
        until(&format!("{at}: learners end"), || learning.iter().map(left).sum::<usize>() <= usize::from(!ours));
        assert!(!ours || report.threads_given_up.contains(&name), "{at}: {name} hangs in {hung:?}, and {report}");
    } else {
        assert_eq!(report.threads_given_up, [""; 0], "{at}");
    }
    let metrics = work.feed.metrics();
    let feed = work.feed;
    let dropping = std::thread::spawn(move || drop(feed));
    until(&format!("{at}: the drop"), || dropping.is_finished() || fake.hung().is_some());
    let late = fake.hung().is_some() && hung.is_none();
    fake.clear_faults();
    dropping.join().unwrap();
    let committed: u64 = writing.into_iter().map(|thread| thread.join().unwrap()).sum();
    learning.into_iter().for_each(|thread| thread.join().unwrap_or_else(|_| panic!("{at}: a learner panicked")));
    until(&format!("{at}: no thread is left"), || feed_threads().is_empty());
    let log = fake.calls_from(begin);
    let was_met = if function == "*" { log.len() as u64 >= nth } else { of(&log, function) >= nth };

    // Nothing torn, nothing lost.
    let (taken, said) = (seen.taken.lock().unwrap(), seen.said.lock().unwrap());
    assert_eq!(seen.torn.load(Ordering::Relaxed), 0, "{at}: torn");
    if shape == Shape::Fifo {
        assert_eq!(taken.iter().collect::<BTreeSet<_>>().len(), taken.len(), "{at}: a row came twice");
        // Behind a hang rows may still be on their way when the stop reports.
        let counted = report.dropped_rows() + taken.len() as u64;
        assert!(
            counted == committed || hung.is_some() && counted <= committed,
            "{at}: {committed} rows, {} taken: {report}",
            taken.len()
        );
    }

    // Who was told, and in which words.
    let fault = report.fault.as_ref().map(|fault| fault.text().to_owned());
    let words = |call: &str, code: i32| format!("{} returned {code} ", call.trim_end_matches("_v2"));
    let code = match failure {
        Failure::Code(code) | Failure::Trap(Trap::Poison(code)) => Some(code),
        Failure::Trap(Trap::Reset) => Some(709),
        Failure::Trap(Trap::Hang) => None,
    };
    let at_fault = log.get(nth as usize - 1).map(|call| call.function.as_str()).filter(|_| function == "*");
    let met = at_fault.unwrap_or(function);
    let texts = || said.iter().chain(&fault).map(String::as_str);
    if let Some(code) = code {
        let told = texts().any(|text| text.contains(&words(met, code)));
        let row = table.entry(met.to_owned()).or_default();
        (row.0, row.1) = (row.0 + usize::from(was_met), row.1 + usize::from(told));
        if let Some(fault) = &fault {
            let known = log.iter().any(|call| fault.contains(&words(&call.function, call.code.unwrap_or(0))));
            assert!(known && fault.contains(&format!("returned {code} ")), "{at}: {fault}");
        }
        let no_error = code == 600 && met == "cuEventQuery";
        if let (true, true, Failure::Code(_)) = (was_met, function != "*", failure)
            && !no_error
            && !TOLD_ELSEWHERE.contains(&met)
            && !["cuEventQuery", "cuStreamIsCapturing"].contains(&met)
        {
            assert!(told, "{at}: nobody was told: {said:?}, {report}");
        }
    } else if let Some(fault) = &fault {
        panic!("{at}: a call that was only late is no fault: {fault}");
    }
    for text in said.iter().filter(|text| text.contains("stopped by a fault")) {
        assert!(text.contains("returned") && text.contains("; start a new feed"), "{at}: {text}");
    }

    // What is left is counted.
    let failed = |function: &str| log.iter().filter(|call| call.function == function && call.code != Some(0)).count();
    let quarantined = QUARANTINED.swap(0, Ordering::Relaxed); // behind the last look at the metrics too
    assert!(quarantined as u64 >= metrics.devices[0].quarantined_buffers, "{at}: {metrics:?}");
    let allocations = fake.live_allocations().len() as isize - before.1 as isize;
    let most = (quarantined + failed("cuMemFree_v2")) as isize;
    assert!(allocations <= most, "{at}: {allocations} allocations, {quarantined} counted");
    let places = usize::from(quarantined > 0) * if shape == Shape::Replay { 2 } else { 1 }; // downloads', and updates'
    let kept = usize::from(report.quarantined_slots > 0) + places + failed("cudaHostUnregister");
    let now = (fake.live_registrations().len(), rings().len());
    if !late && hung.is_none() {
        assert!(
            now.0 <= before.0 + kept && now.1 <= before.2 + kept,
            "{at}: {now:?} after {before:?}, {kept} counted: {report}"
        );
    }
    assert_eq!(fake.hazards(), Hazards::default(), "{at}");
    (log, was_met)
}

fn of(log: &[Call], function: &str) -> u64 {
    log.iter().filter(|call| call.function == function).count() as u64
}

/// Meets the failure at some calls, or all of them.
fn meet_each(failure: Failure, first: u64, some: usize) {
    tracing::subscriber::set_global_default(Quarantines).unwrap();
    let every = life::every_call();
    let (mut met, mut table) = (0, Table::new());
    for shape in [Shape::Fifo, Shape::Replay] {
        let new_fake = || {
            let fake = fake(&format!("calls-{shape:?}"), 1);
            fake.auto_run(true);
            let user = User::new(&fake);
            (fake, user)
        };
        let (mut fake, mut user) = new_fake();
        // What a run without failures calls.
        let (log, was_met) = meet(&fake, shape, user, ("*", u64::MAX), failure, &mut Table::new());
        assert!(!was_met);
        let functions: BTreeSet<String> = log.iter().map(|call| call.function.clone()).collect();
        let mut targets: Vec<(String, u64)> = Vec::new();
        if let Some(stride) = every {
            targets.extend((1..=log.len() as u64).step_by(stride).map(|nth| ("*".to_owned(), nth)));
        } else {
            let firsts = functions
                .iter()
                .flat_map(|function| (1..=first.min(of(&log, function))).map(|nth| (function.clone(), nth)));
            targets.extend(firsts);
            let stride = (log.len() / some).max(1);
            targets.extend((1..=log.len() as u64).step_by(stride).map(|nth| ("*".to_owned(), nth)));
        }
        for (turn, (function, nth)) in targets.iter().enumerate() {
            if turn % 50 == 49 {
                (fake, user) = new_fake(); // handles that are gone stay in its lists
            }
            met += usize::from(meet(&fake, shape, user, (function, *nth), failure, &mut table).1);
            if failure == Failure::Trap(Trap::Reset) {
                user = User::new(&fake); // theirs went with the context
            }
        }
    }
    println!("{failure:?}: met {met} calls");
    for (function, (met, told)) in &table {
        println!("{function:40} met {met:5} told {told:5}");
    }
    assert!(met > 20, "{met}");
}

alone! {
    fn an_error_at_any_call_is_named_and_nothing_is_lost() {
        meet_each(Failure::Code(999), 4, 25);
    }
}

alone! {
    fn memory_that_is_out_at_any_call_is_named_and_nothing_is_lost() {
        meet_each(Failure::Code(2), 2, 15);
    }
}

alone! {
    fn a_not_ready_at_any_call_is_named_and_nothing_is_lost() {
        meet_each(Failure::Code(600), 2, 15);
    }
}

alone! {
    fn an_error_that_stays_from_any_call_on_is_named_and_nothing_is_lost() {
        meet_each(Failure::Trap(Trap::Poison(700)), 3, 25);
    }
}

alone! {
    fn a_context_that_is_destroyed_at_any_call_is_named_and_nothing_is_lost() {
        meet_each(Failure::Trap(Trap::Reset), 3, 25);
    }
}

alone! {
    fn a_call_that_never_returns_keeps_nobody_but_its_own_thread() {
        meet_each(Failure::Trap(Trap::Hang), 2, 8);
    }
}
