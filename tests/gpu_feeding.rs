//! On a host with a GPU: feeding it. Without one each test prints `skipped: no CUDA device` and why.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses, and the driver beside the feed

mod common;
#[path = "common/feeding.rs"]
mod feeding;

use feeding::{Bytes, DEADLINE, learner_on, until};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use pinring::*;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The CUDA of this host, and the turn: a capture in one test would be spoilt by what the others do themselves.
fn search() -> Option<(CudaSearch, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match probe_cuda(&CudaSearch::new()) {
        Ok(_) => Some((CudaSearch::new(), turn)),
        Err(error) => {
            assert!(std::env::var_os("PINRING_GPU_REQUIRED").is_none(), "PINRING_GPU_REQUIRED is set, and {error}");
            println!("skipped: no CUDA device: {}", error.to_string().lines().next().unwrap_or_default());
            None
        }
    }
}

/// The driver as another part of the process uses it, in device 0's primary context, current on the thread that made it.
struct Driver {
    library: Library,
}

impl Driver {
    fn new() -> Driver {
        // SAFETY: the driver that the feed has loaded.
        let driver = Driver { library: unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }.unwrap() };
        let (retain, set) =
            (driver.get::<Retain>("cuDevicePrimaryCtxRetain"), driver.get::<OfHandle>("cuCtxSetCurrent"));
        let mut context = 0;
        // SAFETY: an out-pointer of ours, and the context that came through it.
        unsafe { assert_eq!((retain(&mut context, 0), set(context)), (0, 0)) };
        driver
    }

    fn get<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the types below are the functions' signatures.
        unsafe { *self.library.get::<F>(name).unwrap() }
    }

    fn stream(&self) -> usize {
        let mut stream = 0;
        // SAFETY: an out-pointer of ours.
        assert_eq!(unsafe { self.get::<Create>("cuStreamCreate")(&mut stream, 1) }, 0);
        stream
    }

    fn memory(&self, bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: an out-pointer of ours.
        assert_eq!(unsafe { self.get::<Alloc>("cuMemAlloc_v2")(&mut address, bytes) }, 0);
        address
    }

    /// Fills memory in its turn, as a kernel would.
    fn fill(&self, address: u64, word: u32, words: usize, stream: usize) {
        // SAFETY: memory of the test's.
        assert_eq!(unsafe { self.get::<Fill>("cuMemsetD32Async")(address, word, words, stream) }, 0);
    }

    fn page_locked(&self, bytes: usize) -> *mut c_void {
        let mut at = std::ptr::null_mut();
        // SAFETY: an out-pointer of ours.
        assert_eq!(unsafe { self.get::<HostAlloc>("cuMemHostAlloc")(&mut at, bytes, 1) }, 0);
        at
    }

    fn copy_in(&self, to: u64, from: *mut c_void, bytes: usize, stream: usize) {
        // SAFETY: memory of the test's, as long at both ends, which is never freed.
        assert_eq!(unsafe { self.get::<CopyIn>("cuMemcpyHtoDAsync_v2")(to, from, bytes, stream) }, 0);
    }

    fn copy_within(&self, to: u64, from: u64, bytes: usize, stream: usize) {
        // SAFETY: memory of the test's and of a batch that is released behind this.
        assert_eq!(unsafe { self.get::<CopyWithin>("cuMemcpyDtoDAsync_v2")(to, from, bytes, stream) }, 0);
    }

    fn is_done(&self, event: usize) -> bool {
        // SAFETY: an event of a batch that is held.
        unsafe { self.get::<OfHandle>("cuEventQuery")(event) == 0 }
    }

    /// What is put into `later` from now on runs behind what is in `earlier` now.
    fn order(&self, earlier: usize, later: usize) {
        let mut event = 0;
        // SAFETY: streams of the test's, and an event that is theirs until it has done its work.
        unsafe {
            assert_eq!(self.get::<Create>("cuEventCreate")(&mut event, 2), 0);
            assert_eq!(self.get::<Record>("cuEventRecord")(event, earlier), 0);
            assert_eq!(self.get::<Wait>("cuStreamWaitEvent")(later, event, 0), 0);
            assert_eq!(self.get::<OfHandle>("cuEventDestroy_v2")(event), 0);
        }
    }

    fn synchronize(&self, stream: usize) {
        // SAFETY: a stream of the test's.
        assert_eq!(unsafe { self.get::<OfHandle>("cuStreamSynchronize")(stream) }, 0);
    }

    fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        // SAFETY: as many bytes at both ends.
        assert_eq!(unsafe { self.get::<Read>("cuMemcpyDtoH_v2")(read.as_mut_ptr().cast(), address, bytes) }, 0);
        read
    }

    /// Begins a capture in global mode, in which calls of other threads can spoil it.
    fn begin_capture(&self, stream: usize) {
        // SAFETY: a stream of the test's.
        assert_eq!(unsafe { self.get::<Begin>("cuStreamBeginCapture_v2")(stream, 0) }, 0);
    }

    /// Ends a capture that must be whole, and makes it ready to be launched.
    fn instantiate(&self, stream: usize) -> usize {
        let (mut graph, mut ready) = (0, 0);
        // SAFETY: a stream of the test's, out-pointers of ours, and the graph that came through the first.
        unsafe {
            assert_eq!(self.get::<End>("cuStreamEndCapture")(stream, &mut graph), 0);
            assert_eq!(self.get::<Instantiate>("cuGraphInstantiateWithFlags")(&mut ready, graph, 0), 0);
        }
        ready
    }

    fn launch(&self, graph: usize, stream: usize) {
        // SAFETY: a graph of the test's, whose memory lives on.
        assert_eq!(unsafe { self.get::<Record>("cuGraphLaunch")(graph, stream) }, 0);
    }

    /// Whether the capture was whole.
    fn end_capture(&self, stream: usize) -> bool {
        let mut graph = 0;
        // SAFETY: a stream of the test's, an out-pointer, and the graph that came through it.
        unsafe {
            let whole = self.get::<End>("cuStreamEndCapture")(stream, &mut graph) == 0 && graph != 0;
            if graph != 0 {
                assert_eq!(self.get::<OfHandle>("cuGraphDestroy")(graph), 0);
            }
            whole
        }
    }
}

type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;
type OfHandle = unsafe extern "C" fn(usize) -> i32;
type Create = unsafe extern "C" fn(*mut usize, u32) -> i32;
type Alloc = unsafe extern "C" fn(*mut u64, usize) -> i32;
type Fill = unsafe extern "C" fn(u64, u32, usize, usize) -> i32;
type Read = unsafe extern "C" fn(*mut c_void, u64, usize) -> i32;
type HostAlloc = unsafe extern "C" fn(*mut *mut c_void, usize, u32) -> i32;
type CopyIn = unsafe extern "C" fn(u64, *mut c_void, usize, usize) -> i32;
type CopyWithin = unsafe extern "C" fn(u64, u64, usize, usize) -> i32;
type Record = unsafe extern "C" fn(usize, usize) -> i32;
type Wait = unsafe extern "C" fn(usize, usize, u32) -> i32;
type Begin = unsafe extern "C" fn(usize, u32) -> i32;
type Instantiate = unsafe extern "C" fn(*mut usize, usize, u64) -> i32;
type End = unsafe extern "C" fn(usize, *mut usize) -> i32;

#[test]
fn batches_arrive_whole() {
    let Some((search, _turn)) = search() else { return };
    for (rows, words) in [(16, 8), (64, 2048), (512, 8376)] {
        feeding::batches_arrive_whole(&search, Pinning::Required, 1, (rows, words), 60);
    }
    feeding::batches_arrive_whole(&search, Pinning::Off, 1, (64, 2048), 40);
}

#[test]
fn batches_arrive_whole_on_two_devices() {
    let Some((search, _turn)) = search() else { return };
    let two = feeding::Bytes::new().builder_on(search.clone()).device(1).start();
    match two {
        Ok(feed) => drop(feed),
        Err(error) => {
            assert!(error.to_string().contains("there is no device 1"), "{error}");
            println!("skipped: one device");
            return;
        }
    }
    for pinning in [Pinning::Required, Pinning::Off] {
        feeding::batches_arrive_whole(&search, pinning, 2, (64, 2048), 200);
        feeding::rounds_arrive_whole(&search, pinning, 2, (64, 2048), 100);
    }
}

/// Batches are dropped at once while their copies wait behind others for the link, and writers go on: no slot is written
/// before its copy has run, and a second stream reads nothing before that either.
#[test]
fn batches_that_wait_for_the_link_are_whole_though_they_were_dropped() {
    let Some((search, _turn)) = search() else { return };
    const NOISE: usize = 64 << 20;
    const COPIES: usize = 16;
    let bytes = Bytes::new();
    let feed = bytes.builder_on(search).start().unwrap();
    let driver = Driver::new();
    let [noise, stream, second] = [(); 3].map(|()| driver.stream());
    let (from, to) = (driver.page_locked(NOISE), driver.memory(NOISE));
    let memory = driver.memory(256 * Bytes::LEN);
    let learner = learner_on(&feed, 0, stream).unwrap();
    let writing = bytes.write_on(feed.writer(1).unwrap(), 0..=255);
    let mut late = 0;
    for index in 0..256 {
        if index % 16 == 0 {
            (0..COPIES).for_each(|_| driver.copy_in(to, from, NOISE, noise)); // about 20 ms of them
        }
        let batch = learner.next_batch().unwrap();
        late += usize::from(!driver.is_done(batch.ready_event() as usize));
        // SAFETY: a stream of the test's.
        unsafe { batch.wait_on(second as *mut _) }.unwrap();
        // Every other batch is read by the second stream, which the learner's stream waits for.
        let reader = [stream, second][index % 2];
        driver.copy_within(memory + (index * Bytes::LEN) as u64, bytes.address(&batch), Bytes::LEN, reader);
        driver.order(second, stream);
        drop(batch);
    }
    writing.join().unwrap().unwrap();
    [noise, stream, second].into_iter().for_each(|stream| driver.synchronize(stream));
    let read = driver.read(memory, 256 * Bytes::LEN);
    for (index, batch) in read.chunks(Bytes::LEN).enumerate() {
        assert!(batch.iter().all(|byte| *byte == index as u8), "batch {index} begins with {}", batch[0]);
    }
    println!("256 batches, of which {late} were handed over while their copies waited; none torn");
    assert!(late > 0, "the copies that keep the link busy held nothing up");
    let report = feed.stop(DEADLINE).unwrap();
    assert!(report.fault.is_none() && report.quarantined_slots == 0, "{report}");
}

/// The source is overwritten by the very next operation on the learner's stream.
#[test]
fn of_ten_thousand_downloads_none_is_torn() {
    let Some((search, _turn)) = search() else { return };
    const WORDS: usize = 1 << 18;
    for pinning in [Pinning::Required, Pinning::Off] {
        let bytes = Bytes::new();
        let feed = bytes.builder_on(search.clone()).pinning(pinning).downloads(4 * WORDS).start().unwrap();
        let driver = Driver::new();
        let (stream, memory) = (driver.stream(), driver.memory(4 * WORDS));
        let learner = learner_on(&feed, 0, stream).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        for number in 0..10_000u32 {
            driver.fill(memory, number, WORDS, stream);
            let seen = seen.clone();
            let then = move |bytes: &[u8]| {
                // SAFETY: any bits are an integer.
                let (head, words, tail) = unsafe { bytes.align_to::<u32>() };
                assert_eq!((head.len(), words.len(), tail.len()), (0, WORDS, 0));
                assert!(words.iter().all(|word| *word == words[0]), "torn: {} and others", words[0]);
                seen.lock().unwrap().push(words[0]);
            };
            // SAFETY: the test's memory.
            unsafe { learner.download(memory, 4 * WORDS, then) }.unwrap();
            driver.fill(memory, u32::MAX, WORDS, stream);
        }
        until("the last has come", || seen.lock().unwrap().last() == Some(&9_999) || feed.closed().is_some());
        let device = &feed.metrics().devices[0];
        assert_eq!(device.downloads + device.downloads_replaced, 10_000, "{:?}", feed.closed());
        let seen = seen.lock().unwrap();
        assert!(seen.is_sorted_by(|a, b| a < b));
        println!("{pinning:?}: {} of 10000 downloads of {} bytes were delivered, none torn", seen.len(), 4 * WORDS);
        let report = feed.stop(DEADLINE).unwrap();
        assert!(report.fault.is_none() && report.threads_given_up.is_empty(), "{report}");
    }
}

/// A thread captures graphs in global mode while feeds start, feed, stop and go on others; the learner's own capture is
/// whole too, and its calls are refused.
#[test]
fn no_capture_is_lost() {
    let Some((search, _turn)) = search() else { return };
    let bytes = Bytes::new();
    drop(bytes.builder_on(search.clone()).start().unwrap());
    let (done, mut whole, mut lost) = (AtomicBool::new(false), 0, 0);
    std::thread::scope(|scope| {
        // What the test itself must not call while it captures.
        let driver = Driver::new();
        let (memory, streams) = (driver.memory(Bytes::LEN), [(); 4].map(|()| driver.stream()));
        let (bytes, search, done) = (&bytes, &search, &done);
        let feeding = scope.spawn(move || {
            for stream in streams {
                // Another search each time, so that CUDA is initialised each time.
                let search = search.clone().wheel_root(format!("/no/such/folder/{stream}"));
                let feed = bytes.builder_on(search).downloads(Bytes::LEN).start().unwrap();
                let learner = learner_on(&feed, 0, stream).unwrap();
                let copier = feed.copier(0).unwrap();
                let host = feed.learner().unwrap();
                let writing = bytes.write_on(feed.writer(1).unwrap(), 0..200);
                loop {
                    match host.try_next() {
                        // SAFETY: the test's memory and stream.
                        Ok(Some(batch)) => unsafe {
                            copier.copy_to_device(batch, memory, stream as *mut _).unwrap().synchronize().unwrap()
                        },
                        Ok(None) => {}
                        Err(_) => break,
                    }
                    let Ok(Some(batch)) = learner.try_next() else { continue };
                    let value = batch.sequence_number() as u8;
                    let then = move |bytes: &[u8]| assert!(bytes.iter().all(|byte| *byte == value));
                    // SAFETY: the batch's own bytes.
                    unsafe { learner.download(bytes.address(&batch), Bytes::LEN, then) }.unwrap();
                }
                writing.join().unwrap().unwrap();
                let report = feed.stop(DEADLINE).unwrap();
                assert!(report.fault.is_none() && report.quarantined_slots == 0, "{report}");
            }
            done.store(true, Ordering::Relaxed);
        });
        let stream = driver.stream();
        while !done.load(Ordering::Relaxed) && !feeding.is_finished() {
            driver.begin_capture(stream);
            std::thread::sleep(Duration::from_micros(300));
            *(if driver.end_capture(stream) { &mut whole } else { &mut lost }) += 1;
        }
    });
    assert_eq!(lost, 0, "of {whole}");
    println!("{whole} captures beside feeds, none lost");

    let feed = bytes.builder_on(search).downloads(Bytes::LEN).start().unwrap();
    let driver = Driver::new();
    let stream = driver.stream();
    let learner = learner_on(&feed, 0, stream).unwrap();
    let writing = bytes.write_on(feed.writer(1).unwrap(), 0..3);
    let (first, second) = (learner.next_batch().unwrap(), learner.next_batch().unwrap());
    driver.begin_capture(stream);
    assert_eq!(learner.next_batch().unwrap_err(), NextError::Device(DeviceUseError::Capturing));
    // SAFETY: refused.
    assert_eq!(unsafe { learner.download(bytes.address(&first), 1, |_| ()) }, Err(DeviceUseError::Capturing));
    // SAFETY: refused.
    assert_eq!(unsafe { first.wait_on(stream as *mut _) }, Err(DeviceUseError::Capturing));
    let address = bytes.address(&first);
    drop(first);
    assert!(driver.end_capture(stream), "the learner's own");
    let third = learner.next_batch().unwrap();
    third.synchronize().unwrap();
    assert_eq!((bytes.address(&third), driver.read(address, Bytes::LEN)), (address, vec![2; Bytes::LEN]));
    drop(second);
    writing.join().unwrap().unwrap();
}

/// A graph that was captured while two feeds ran is replayed on every batch of both, and computes what it should.
#[test]
fn a_thousand_replays_beside_two_feeds_are_right() {
    let Some((search, _turn)) = search() else { return };
    const EACH: usize = 500;
    let bytes = Bytes::new();
    let feeds = [(); 2].map(|()| bytes.builder_on(search.clone()).start().unwrap());
    let driver = Driver::new();
    let stream = driver.stream();
    let learners = feeds.each_ref().map(|feed| learner_on(feed, 0, stream).unwrap());
    let value = |of: usize, number: usize| (number * 2 + of + 1) as u8;
    let writing: Vec<_> = (0..2)
        .map(|of| {
            let values = (0..EACH).map(move |number| value(of, number));
            bytes.write_on(feeds[of].writer(1).unwrap(), values)
        })
        .collect();
    let [from, through, to] = [(); 3].map(|()| driver.memory(Bytes::LEN));
    driver.begin_capture(stream);
    driver.copy_within(through, from, Bytes::LEN, stream);
    driver.fill(from, 0, Bytes::LEN / 4, stream);
    driver.copy_within(to, through, Bytes::LEN, stream);
    std::thread::sleep(Duration::from_millis(50)); // both feeds go on meanwhile
    let graph = driver.instantiate(stream);
    let results = driver.memory(2 * EACH * Bytes::LEN);
    for number in 0..EACH {
        for (of, learner) in learners.iter().enumerate() {
            let batch = learner.next_batch().unwrap();
            driver.copy_within(from, bytes.address(&batch), Bytes::LEN, stream);
            drop(batch);
            driver.launch(graph, stream);
            let place = (number * 2 + of) * Bytes::LEN;
            driver.copy_within(results + place as u64, to, Bytes::LEN, stream);
        }
    }
    driver.synchronize(stream);
    for writing in writing {
        writing.join().unwrap().unwrap();
    }
    let read = driver.read(results, 2 * EACH * Bytes::LEN);
    for (replay, result) in read.chunks(Bytes::LEN).enumerate() {
        let expected = value(replay % 2, replay / 2);
        assert!(result.iter().all(|byte| *byte == expected), "replay {replay}: {} for {expected}", result[0]);
    }
    for feed in feeds {
        let report = feed.stop(DEADLINE).unwrap();
        assert!(report.fault.is_none() && report.quarantined_slots == 0, "{report}");
    }
    println!("{} replays beside two feeds, all right", 2 * EACH);
}

/// Into memory of the user's, on the user's stream.
#[test]
fn copies_into_the_users_memory_are_whole() {
    let Some((search, _turn)) = search() else { return };
    let bytes = Bytes::new();
    let feed = bytes.builder_on(search).start().unwrap();
    let driver = Driver::new();
    let (stream, memory) = (driver.stream(), driver.memory(256 * Bytes::LEN));
    let (learner, copier) = (feed.learner().unwrap(), feed.copier(0).unwrap());
    let writing = bytes.write_on(feed.writer(1).unwrap(), 0..=255);
    let mut last = None;
    for (index, batch) in learner.iter().enumerate() {
        let place = memory + (index * Bytes::LEN) as u64;
        // SAFETY: the test's memory and stream.
        last = Some(unsafe { copier.copy_to_device(batch.unwrap(), place, stream as *mut _) }.unwrap());
    }
    writing.join().unwrap().unwrap();
    last.unwrap().synchronize().unwrap();
    let read = driver.read(memory, 256 * Bytes::LEN);
    assert!(read.chunks(Bytes::LEN).enumerate().all(|(index, batch)| batch.iter().all(|byte| *byte == index as u8)));
    until("every slot is home", || feed.metrics().free_slots == 4);
}

/// Not a bench: a first look at the rate, printed.
#[test]
fn rate() {
    let Some((search, _turn)) = search() else { return };
    let mut step = Step::new();
    let leaves: Vec<_> = (0..44).map(|i| step.leaf::<u8>(&format!("l{i}"), &[1522])).collect();
    let rows = 512;
    let feed =
        Feed::builder(Sample::step(step)).batch(rows).buffers(6).pinning(Pinning::Required).device(0).cuda(search);
    let feed = feed.start().unwrap();
    println!("{}", feed.pin_report().unwrap());
    let learner = learner_on(&feed, 0, feeding::LEGACY).unwrap();
    let writers: Vec<_> = (0..8)
        .map(|_| {
            let (mut writer, leaves) = (feed.writer(16).unwrap(), leaves.clone());
            std::thread::spawn(move || {
                let row = vec![7u8; 16 * 1522];
                while let Ok(mut step) = writer.step() {
                    leaves.iter().for_each(|leaf| step.put(*leaf, &row).unwrap());
                    if step.commit().is_err() {
                        break;
                    }
                }
            })
        })
        .collect();
    for _ in 0..20 {
        drop(learner.next_batch().unwrap());
    }
    let (begun, batches) = (Instant::now(), 400);
    let (mut next, mut dropped) = (vec![], vec![]);
    let mut bytes = 0;
    for _ in 0..batches {
        let a = Instant::now();
        let batch = learner.next_batch().unwrap();
        let b = Instant::now();
        bytes += 44 * 1522 * rows;
        let c = Instant::now();
        drop(batch);
        next.push((b - a).as_nanos());
        dropped.push(c.elapsed().as_nanos());
    }
    let seconds = begun.elapsed().as_secs_f64();
    next.sort();
    dropped.sort();
    println!(
        "{batches} batches of {} MB: {:.2} GB/s; next p50 {} ns (waits for the link), drop p50 {} ns p99 {} ns",
        bytes / batches / 1_000_000,
        bytes as f64 / seconds / 1e9,
        next[next.len() / 2],
        dropped[dropped.len() / 2],
        dropped[dropped.len() * 99 / 100]
    );
    println!("{:#?}", feed.metrics());
    println!("{}", feed.stop(std::time::Duration::from_secs(10)).unwrap());
    writers.into_iter().for_each(|w| w.join().unwrap());
}
