//! Back from the device: what a download hands over is what the source held when it was asked for, whatever comes next on
//! the stream; and what becomes of the user's function at every end.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;

use common::fake::Fake;
use feeding::{Bytes, DEADLINE, fake, learner_on, until};
use life::{alone, feed_threads};
use pinring::*;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// A stream's own work: overwrites device memory, in its turn.
struct Kernel {
    copy: unsafe extern "C" fn(*mut c_void, *const c_void, usize, i32, usize) -> i32,
    stream: usize,
}

impl Kernel {
    fn new(fake: &Fake, stream: usize) -> Kernel {
        // SAFETY: the fake is loaded; the signature is the runtime's.
        let copy = unsafe {
            let library = libloading::os::unix::Library::new(fake.path()).unwrap();
            let copy = *library.get(b"cudaMemcpyAsync").unwrap();
            std::mem::forget(library);
            copy
        };
        Kernel { copy, stream }
    }

    fn fill(&self, address: u64, word: u32, bytes: usize) {
        let words = vec![word; bytes / 4];
        // SAFETY: from ordinary memory, whose bytes are taken at the call.
        let code = unsafe { (self.copy)(address as *mut c_void, words.as_ptr().cast(), bytes, 1, self.stream) };
        assert_eq!(code, 0);
    }
}

/// A feed with room for downloads of `Bytes::LEN`, its learner, a stream, memory and a kernel.
struct Rig {
    fake: Fake,
    feed: Feed,
    learner: DeviceLearner,
    memory: u64,
    kernel: Kernel,
    bytes: Bytes,
}

impl Rig {
    fn new(name: &str, pinning: Pinning) -> Rig {
        let fake = fake(name, 1);
        let bytes = Bytes::new();
        let feed = bytes.builder(&fake).pinning(pinning).downloads(Bytes::LEN).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let (memory, kernel) = (fake.user_memory(Bytes::LEN), Kernel::new(&fake, stream));
        Rig { fake, feed, learner, memory, kernel, bytes }
    }

    fn download(&self, then: impl FnOnce(&[u8]) + Send + 'static) -> Result<(), DeviceUseError> {
        // SAFETY: the rig's memory, of that many bytes.
        unsafe { self.learner.download(self.memory, Bytes::LEN, then) }
    }

    fn counts(&self) -> (u64, u64) {
        let metrics = self.feed.metrics();
        (metrics.devices[0].downloads, metrics.devices[0].downloads_replaced)
    }

    /// Ends everything, which leaves the test's own memory.
    fn end(self) {
        let Rig { fake, feed, learner, .. } = self;
        fake.auto_run(true);
        drop((learner, feed));
        assert_eq!(fake.live_allocations().len(), 1);
        life::assert_nothing_is_left_with(&fake);
        assert_eq!((fake.retained(0), fake.live_events().len()), (0, 0));
        assert_eq!(fake.hazards(), common::fake::Hazards::default());
    }
}

/// The word that all of these bytes are made of.
fn word(bytes: &[u8]) -> u32 {
    let words: Vec<u32> = bytes.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words.len(), Bytes::LEN / 4);
    assert!(words.iter().all(|word| *word == words[0]), "torn: {:?} and others", &words[..8]);
    words[0]
}

fn ten_thousand(name: &str, pinning: Pinning) {
    let rig = Rig::new(name, pinning);
    rig.fake.auto_run(true);
    let seen = Arc::new(Mutex::new(Vec::new()));
    for number in 0..10_000 {
        rig.kernel.fill(rig.memory, number, Bytes::LEN);
        let seen = seen.clone();
        let then = move |bytes: &[u8]| seen.lock().unwrap().push(word(bytes));
        rig.download(then).unwrap();
        rig.kernel.fill(rig.memory, u32::MAX, Bytes::LEN); // the next operation of the stream
    }
    until("the last one has come", || seen.lock().unwrap().last() == Some(&9_999));
    let (delivered, replaced) = rig.counts();
    assert_eq!(delivered + replaced, 10_000, "each was delivered or replaced");
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!((seen.len() as u64, rig.feed.closed()), (delivered, None));
    assert!(seen.is_sorted_by(|a, b| a < b) && seen.len() > 50, "{} in order", seen.len());
    rig.end();
}

alone! {
    fn of_ten_thousand_downloads_none_is_torn() {
        ten_thousand("torn", Pinning::Required);
    }
}

alone! {
    fn nor_through_ordinary_memory() {
        ten_thousand("torn-pageable", Pinning::Off);
    }
}

alone! {
    /// Nothing is read before its copy has run, and what waits is replaced by what is newer.
    fn a_download_waits_for_its_copies_and_the_newest_wins() {
        let rig = Rig::new("newest", Pinning::Required);
        let (sender, receiver) = mpsc::channel();
        struct Guard(mpsc::Sender<(u32, bool)>, u32, bool);
        impl Drop for Guard {
            fn drop(&mut self) {
                self.0.send((self.1, self.2)).unwrap();
            }
        }
        for number in 0..5 {
            rig.kernel.fill(rig.memory, number, Bytes::LEN);
            let mut guard = Guard(sender.clone(), number, false);
            rig.download(move |bytes| {
                let guard = &mut guard;
                assert_eq!(word(bytes), guard.1);
                guard.2 = true; // it was called, and is dropped when this ends
            })
            .unwrap();
            // The first of them is on its way out; those behind it replace each other.
            if number == 0 {
                until("it is being copied out", || !rig.fake.calls_of("cuMemcpyDtoHAsync_v2").is_empty());
            }
        }
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [(1, false), (2, false), (3, false)], "dropped uncalled");
        assert_eq!(rig.counts(), (0, 3), "no byte has moved yet");
        rig.fake.auto_run(true);
        assert_eq!([(); 2].map(|()| receiver.recv_timeout(DEADLINE).unwrap()), [(0, true), (4, true)]);
        assert_eq!(rig.counts(), (2, 3));
        rig.end();
    }
}

alone! {
    fn a_slow_function_holds_nobody_up() {
        let rig = Rig::new("slow", Pinning::Required);
        rig.fake.auto_run(true);
        let (release, wait) = mpsc::channel::<()>();
        let (sender, receiver) = mpsc::channel();
        let mut waiting = Some(wait);
        let mut writer = rig.feed.writer(1).unwrap();
        for number in 0..50 {
            rig.kernel.fill(rig.memory, number, Bytes::LEN);
            let (wait, sender) = (waiting.take(), sender.clone());
            let then = move |bytes: &[u8]| {
                wait.into_iter().for_each(|wait| assert!(wait.recv().is_err()));
                sender.send(word(bytes)).unwrap();
            };
            rig.download(then).unwrap();
            // Batches go on meanwhile.
            rig.bytes.write(&mut writer, number as u8).unwrap();
            drop(rig.learner.next_batch().unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(release);
        until("the newest has come", || receiver.try_iter().last() == Some(49));
        let (delivered, replaced) = rig.counts();
        assert_eq!(delivered + replaced, 50);
        assert!(replaced > 40, "{replaced}: only two buffers of the host's are there");
        rig.end();
    }
}

// ---- the user's function ---------------------------------------------------------------------------------------------

alone! {
    fn a_function_that_panics_stops_the_feed_with_its_text() {
        let rig = Rig::new("panics", Pinning::Required);
        rig.fake.auto_run(true);
        rig.download(|_| panic!("no room on the disk")).unwrap();
        let error = rig.learner.next_batch().unwrap_err();
        let text = "the feeding0 actor failed: a download's function failed: it panicked: no room on the disk";
        assert!(error.to_string().contains(text), "{error}");
        let Some(Closed::Fault(fault)) = rig.feed.closed() else { panic!("{:?}", rig.feed.closed()) };
        assert_eq!(fault.actor(), "feeding0");
        let refused = rig.download(|_| unreachable!()).unwrap_err();
        assert!(refused.to_string().contains("no room on the disk"), "{refused}");
        let report = rig.feed.stop(DEADLINE).unwrap();
        assert_eq!((report.threads_given_up.len(), report.quarantined_slots), (0, 0));
        rig.end();
    }
}

alone! {
    /// It runs on a thread of the feed's, which cannot wait for itself.
    fn a_function_may_drop_the_feed_and_may_not_stop_it() {
        let rig = Rig::new("drops", Pinning::Required);
        rig.fake.auto_run(true);
        let Rig { fake, feed, learner, memory, .. } = rig;
        let feed = Arc::new(feed);
        let (sender, receiver) = mpsc::channel();
        let mine = Arc::downgrade(&feed);
        let then = move |_: &[u8]| {
            let feed = mine.upgrade().unwrap();
            let refused = feed.stop(DEADLINE).unwrap_err();
            sender.send((refused.kind(), feed)).unwrap();
        };
        // SAFETY: the rig's memory.
        unsafe { learner.download(memory, Bytes::LEN, then) }.unwrap();
        let (kind, again) = receiver.recv_timeout(DEADLINE).unwrap();
        assert_eq!(kind, ErrorKind::Misuse);
        assert_eq!(learner.next_batch().unwrap_err(), NextError::Closed(Closed::Stopped), "its gates are closed");
        drop((again, feed, learner));
        until("the threads have ended", || feed_threads().is_empty());

        let feed = Bytes::new().builder(&fake).downloads(Bytes::LEN).start().unwrap();
        let learner = learner_on(&feed, 0, fake.user_stream(1)).unwrap();
        let writer = feed.writer(1).unwrap();
        // SAFETY: the rig's memory.
        unsafe { learner.download(memory, Bytes::LEN, move |_| drop(feed)) }.unwrap();
        assert_eq!(learner.next_batch().unwrap_err(), NextError::Closed(Closed::Stopped));
        until("the threads end by themselves", || feed_threads().is_empty());
        drop((learner, writer));
        until("nothing is left", || fake.retained(0) == 0);
        assert_eq!(fake.live_allocations().len(), 1, "the test's own");
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn a_download_that_waits_at_the_stop_is_delivered_and_later_ones_are_refused() {
        let rig = Rig::new("at-stop", Pinning::Required);
        let (sender, receiver) = mpsc::channel();
        for number in [1, 2] {
            rig.kernel.fill(rig.memory, number, Bytes::LEN);
            let sender = sender.clone();
            rig.download(move |bytes| sender.send(word(bytes)).unwrap()).unwrap();
            until("the first is on its way", || !rig.fake.calls_of("cuMemcpyDtoHAsync_v2").is_empty());
        }
        let report = std::thread::scope(|scope| {
            let stopping = scope.spawn(|| rig.feed.stop(DEADLINE).unwrap());
            until("it has begun", || rig.feed.closed().is_some());
            assert_eq!(rig.download(|_| unreachable!()), Err(DeviceUseError::Closed(Closed::Stopped)));
            std::thread::sleep(Duration::from_millis(30));
            assert!(!stopping.is_finished());
            rig.fake.auto_run(true);
            stopping.join().unwrap()
        });
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [1, 2]);
        assert_eq!((report.threads_given_up.len(), report.quarantined_slots), (0, 0));
        assert_eq!(rig.fake.live_registrations(), [], "at the stop's end nothing is page-locked");
        assert_eq!(rig.download(|_| unreachable!()), Err(DeviceUseError::Closed(Closed::Stopped)));
        rig.end();
    }
}

alone! {
    /// The learner's stream never gets there: the stop gives the download up, and its function is dropped uncalled.
    fn a_download_that_never_ends_is_given_up_at_the_stop() {
        let rig = Rig::new("never", Pinning::Required);
        rig.fake.hold(rig.kernel.stream, true);
        let (sender, receiver) = mpsc::channel::<()>();
        rig.download(move |_| sender.send(()).unwrap()).unwrap();
        until("it waits for the learner's stream", || !rig.fake.calls_of("cuMemcpyDtoHAsync_v2").is_empty());
        let report = rig.feed.stop(Duration::from_secs(1)).unwrap();
        // To unregister the ring waits for the stream too, which is CUDA's way.
        assert_eq!(report.threads_given_up, ["pr0-pinning"], "{report}");
        assert_eq!(receiver.recv_timeout(DEADLINE), Err(mpsc::RecvTimeoutError::Disconnected));
        assert_eq!(rig.feed.metrics().devices[0].quarantined_buffers, 4, "freeing waits for the stream");
        let Rig { fake, feed, learner, kernel, .. } = rig;
        drop((feed, learner));
        fake.hold(kernel.stream, false);
        fake.run_all();
        until("the ring is unregistered", || fake.live_registrations().len() == 1);
        assert_eq!(fake.hazards().freed_in_flight, 0);
        until("the threads have ended", || feed_threads().is_empty());
    }
}

alone! {
    fn more_bytes_than_the_feed_was_built_for_are_refused() {
        let rig = Rig::new("too-large", Pinning::Required);
        rig.fake.auto_run(true);
        let before = rig.fake.calls().len();
        // SAFETY: refused without a call.
        let refused = unsafe { rig.learner.download(rig.memory, Bytes::LEN + 1, |_| unreachable!()) };
        assert_eq!(refused, Err(DeviceUseError::TooLarge { bytes: Bytes::LEN + 1, max: Bytes::LEN }));
        assert_eq!(rig.fake.calls().len(), before);
        let (sender, receiver) = mpsc::channel();
        for bytes in [0, 1, Bytes::LEN] {
            let sender = sender.clone();
            // SAFETY: the rig's memory.
            unsafe { rig.learner.download(rig.memory, bytes, move |bytes| sender.send(bytes.len()).unwrap()) }.unwrap();
            assert_eq!(receiver.recv_timeout(DEADLINE), Ok(bytes));
        }
        // An address that is none is the user's error, and costs the next download nothing.
        // SAFETY: the fake refuses it.
        let refused = unsafe { rig.learner.download(0x10, 16, |_| unreachable!()) }.unwrap_err();
        assert!(refused.to_string().contains("cuMemcpyDtoDAsync returned 1 CUDA_ERROR_INVALID_VALUE"), "{refused}");
        let sent = sender.clone();
        rig.download(move |bytes| sent.send(bytes.len()).unwrap()).unwrap();
        assert_eq!(receiver.recv_timeout(DEADLINE), Ok(Bytes::LEN));

        let feed = Bytes::new().builder(&rig.fake).start().unwrap();
        let learner = learner_on(&feed, 0, rig.kernel.stream).unwrap();
        // SAFETY: refused without a call.
        let refused = unsafe { learner.download(rig.memory, 1, |_| unreachable!()) }.unwrap_err();
        assert_eq!(refused, DeviceUseError::TooLarge { bytes: 1, max: 0 });
        assert!(refused.to_string().contains("give `.downloads` at least that many"), "{refused}");
        assert_eq!(Error::from(refused).kind(), ErrorKind::Input);
        drop((learner, feed));
        rig.fake.hazards(); // the refused address is counted there
        let Rig { fake, feed, learner, .. } = rig;
        drop((learner, feed));
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// The snapshot is queued, the record behind it fails: nobody knows when it has run, so nothing reads it.
    fn a_snapshot_whose_end_cannot_be_learned_is_never_handed_over() {
        for (function, nth) in [("cuEventRecord", 1), ("cuEventRecord", 2), ("cuMemcpyDtoHAsync_v2", 1), ("cuStreamWaitEvent", 1)] {
            let rig = Rig::new("lost", Pinning::Required);
            rig.fake.inject(function, nth, 999);
            let (sender, receiver) = mpsc::channel::<()>();
            // The learner's own call fails, or that of the feeding thread.
            let asked = rig.download(move |_| sender.send(()).unwrap());
            let error = rig.learner.next_batch().unwrap_err();
            let words = format!("{} returned 999", function.trim_end_matches("_v2"));
            for text in [error.to_string()].into_iter().chain(asked.err().map(|error| error.to_string())) {
                assert!(text.contains(&words), "{text}");
            }
            rig.fake.auto_run(true);
            assert_eq!(receiver.recv_timeout(DEADLINE), Err(mpsc::RecvTimeoutError::Disconnected), "dropped uncalled");
            let report = rig.feed.stop(DEADLINE).unwrap();
            assert_eq!((report.threads_given_up.len(), report.quarantined_slots), (0, 0));
            assert_eq!(rig.feed.metrics().devices[0].quarantined_buffers, 2, "{function} number {nth}");
            let Rig { fake, feed, learner, .. } = rig;
            drop((feed, learner));
            assert_eq!(fake.live_allocations().len(), 3, "both stages, and the test's own");
            assert_eq!(feed_threads(), [""; 0]);
        }
    }
}
