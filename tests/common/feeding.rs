//! Feeding a device: what the tests of it share, and scenarios that run against the fake library and on a real GPU alike.
//! What those check comes back through `download`.
#![allow(dead_code)]
#![allow(unsafe_code)] // raw streams

use crate::common::fake::{Fake, Hazards};
use crate::common::{Watchdog, scratch};
use pinring::*;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::{Duration, Instant};

pub const DEADLINE: Duration = Duration::from_secs(30);
/// The legacy default stream, which lives as long as its device.
pub const LEGACY: usize = 0;
/// The calling thread's own default stream.
pub const PER_THREAD: usize = 2;

// ---- against the fake ----------------------------------------------------------------------------------------------

/// A fake that is runtime and driver in one, with so many devices. What is queued runs when the test says so.
pub fn fake(name: &str, devices: i32) -> Fake {
    let fake = Fake::new(&scratch(name), "libcudart.so.13");
    fake.devices(devices);
    fake
}

/// Finds this fake and nothing else.
pub fn search(fake: &Fake) -> CudaSearch {
    CudaSearch::new().library_only(fake.path()).driver(fake.path())
}

/// `Feed::learner_on`, for streams that live as long as the test.
pub fn learner_on(feed: &Feed, device: i32, stream: usize) -> Result<DeviceLearner> {
    // SAFETY: the test's streams are never destroyed.
    unsafe { feed.learner_on(device, stream as *mut c_void) }
}

/// Samples of one step, each [`Bytes::LEN`] equal bytes, one to a batch: a slot is one value.
#[derive(Clone)]
pub struct Bytes {
    leaf: Leaf<u8>,
    pub column: Column<u8>,
    sample: Sample,
}

impl Bytes {
    pub const LEN: usize = 4096;

    pub fn new() -> Bytes {
        let mut step = Step::new();
        let leaf = step.leaf::<u8>("bytes", &[Bytes::LEN]);
        let mut sample = Sample::step(step);
        let column = sample.all(leaf);
        Bytes { leaf, column, sample }
    }

    /// Four slots, page-locked, device 0 with two buffers; all of it by `fake`.
    pub fn builder(&self, fake: &Fake) -> FeedBuilder {
        self.builder_on(search(fake))
    }

    /// The same, by the CUDA that a search finds.
    pub fn builder_on(&self, search: CudaSearch) -> FeedBuilder {
        let builder = Feed::builder(self.sample.clone()).batch(1).buffers(4).pinning(Pinning::Required);
        builder.device(0).cuda(search)
    }

    pub fn sample(&self) -> Sample {
        self.sample.clone()
    }

    pub fn write(&self, writer: &mut Writer, value: u8) -> Result<()> {
        let mut step = writer.step()?;
        step.put(self.leaf, &[value; Bytes::LEN])?;
        Ok(step.commit()?)
    }

    /// Writes on a thread of its own, until an error.
    pub fn write_on(
        &self,
        mut writer: Writer,
        values: impl IntoIterator<Item = u8, IntoIter: Send + 'static>,
    ) -> Writing {
        let (this, values) = (self.clone(), values.into_iter());
        std::thread::spawn(move || {
            for value in values {
                this.write(&mut writer, value)?;
            }
            Ok(())
        })
    }

    /// Where the batch lies on its device.
    pub fn address(&self, batch: &DeviceBatch) -> u64 {
        batch.column(self.column).ptr
    }
}

pub type Writing = std::thread::JoinHandle<Result<()>>;

/// The bytes there are all this value.
pub fn assert_bytes(fake: &Fake, address: u64, value: u8, what: &str) {
    let bytes = fake.device_bytes(address, Bytes::LEN);
    let wrong = bytes.iter().filter(|byte| **byte != value).count();
    assert_eq!(wrong, 0, "{what}: expected {value:#x} everywhere, found {:#x} at the start", bytes[0]);
}

/// The stream that the feeding thread of a device has for its copies. Before the test makes streams of its own.
pub fn copy_stream(fake: &Fake, device: i32) -> usize {
    let streams = fake.live_streams();
    streams.iter().rfind(|stream| stream.device == device).expect("the feeding thread's stream").handle
}

/// Nothing of a feed is left on the devices, and no copy was ever torn from its memory.
pub fn assert_devices_are_clean(fake: &Fake, users_streams: usize) {
    assert_eq!(fake.hazards(), Hazards::default());
    assert_eq!(fake.live_registrations(), []);
    assert_eq!(fake.live_allocations(), []);
    assert_eq!(fake.live_events(), []);
    assert_eq!(fake.live_streams().len(), users_streams, "{:?}", fake.live_streams());
    assert_eq!([0, 1, 2].map(|device| fake.retained(device)), [0; 3], "primary contexts");
}

/// Waits until `done`, and fails with `what` if that does not come.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < DEADLINE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

// ---- everywhere ----------------------------------------------------------------------------------------------------

/// What element `i` of row `row` of a batch holds, told apart by `feed`.
fn value(feed: u64, row: u64, i: usize) -> u64 {
    (feed << 56) ^ (row << 24) ^ (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// A feed of rows of `words` 64-bit words, checked by every word.
pub struct Numbered {
    pub feed: Feed,
    words: Leaf<u64>,
    pub column: Column<u64>,
    tag: u64,
    row_words: usize,
    rows: usize,
}

impl Numbered {
    /// With downloads of a whole batch. `set` attaches the devices.
    pub fn start(
        tag: u64,
        search: &CudaSearch,
        rows: usize,
        row_words: usize,
        set: impl Fn(FeedBuilder) -> FeedBuilder,
    ) -> Result<Numbered> {
        let mut step = Step::new();
        let words = step.observation::<u64>("words", &[row_words]);
        let mut sample = Sample::step(step);
        let column = sample.all(words);
        let bytes = rows * row_words * 8;
        let builder = Feed::builder(sample).batch(rows).downloads(bytes).cuda(search.clone());
        let feed = set(builder).start()?;
        Ok(Numbered { feed, words, column, tag, row_words, rows })
    }

    /// Writes `batches` batches, on this thread.
    pub fn write(&self, mut writer: Writer, batches: usize) -> Result<()> {
        let mut row = vec![0; self.row_words];
        for number in 0..(batches * self.rows) as u64 {
            row.iter_mut().enumerate().for_each(|(i, word)| *word = value(self.tag, number, i));
            let mut step = writer.step()?;
            step.put(self.words, &row)?;
            step.commit()?;
        }
        Ok(())
    }

    /// Words of `bytes` that are not those of batch `sequence`, written by one writer.
    pub fn wrong_words(&self, sequence: u64, bytes: &[u8]) -> usize {
        let first = sequence * self.rows as u64;
        let words = bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
        let expected = (0..self.rows as u64)
            .flat_map(|row| (0..self.row_words).map(move |i| (row, i)))
            .map(|(row, i)| value(self.tag, first + row, i));
        assert_eq!(bytes.len(), self.rows * self.row_words * 8);
        words.zip(expected).filter(|(got, expected)| got != expected).count()
    }

    pub fn column_bytes(&self) -> usize {
        self.rows * self.row_words * 8
    }

    /// Takes batches until the end, each downloaded, compared word by word, and its handle dropped at once. Returns
    /// their sequence numbers.
    pub fn take_all(&self, device: i32, learner: DeviceLearner) -> Vec<u64> {
        let (sender, receiver) = mpsc::channel();
        let mut taken = Vec::new();
        loop {
            let batch = match learner.next_batch() {
                Ok(batch) => batch,
                Err(NextError::Ended) => return taken,
                Err(error) => panic!("{error}"),
            };
            let column = batch.column(self.column);
            assert_eq!((batch.rows(), batch.device()), (self.rows, device));
            assert_eq!(
                (&column.shape[..], &column.strides[..]),
                (&[self.rows, self.row_words][..], &[self.row_words, 1][..])
            );
            let first = batch.sequence_number() * self.rows as u64;
            assert!(batch.first_steps().eq(first..first + self.rows as u64));
            let sender = sender.clone();
            let then = move |bytes: &[u8]| sender.send(bytes.to_vec()).unwrap();
            // SAFETY: the column's bytes on the learner's device; the batch is dropped behind the snapshot on its stream.
            unsafe { learner.download(column.ptr, self.column_bytes(), then) }.unwrap();
            taken.push(batch.sequence_number());
            drop(batch);
            let bytes = receiver.recv_timeout(DEADLINE).expect("the download arrives");
            assert_eq!(self.wrong_words(*taken.last().unwrap(), &bytes), 0, "batch {}", taken.last().unwrap());
        }
    }
}

/// Every batch arrives whole and once, over so many devices.
pub fn batches_arrive_whole(
    search: &CudaSearch,
    pinning: Pinning,
    devices: i32,
    (rows, row_words): (usize, usize),
    batches: usize,
) {
    let _watchdog = Watchdog::new("batches_arrive_whole", DEADLINE * 4);
    let attach = |builder: FeedBuilder| (0..devices).fold(builder.pinning(pinning).buffers(3), FeedBuilder::device);
    let numbered = Numbered::start(1, search, rows, row_words, attach).unwrap();
    let writer = numbered.feed.writer(1).unwrap();
    let taken = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for device in 0..devices {
            let learner = learner_on(&numbered.feed, device, LEGACY).unwrap();
            let (numbered, taken) = (&numbered, &taken);
            scope.spawn(move || {
                let seen = numbered.take_all(device, learner);
                taken.lock().unwrap().extend(seen);
            });
        }
        numbered.write(writer, batches).unwrap();
    });
    let mut taken = taken.into_inner().unwrap();
    taken.sort();
    assert!(taken.into_iter().eq(0..batches as u64));
    let metrics = numbered.feed.metrics();
    assert_eq!(metrics.devices.iter().map(|device| device.batches).sum::<u64>(), batches as u64);
    assert_eq!(metrics.devices.iter().map(|device| device.downloads).sum::<u64>(), batches as u64);
    assert_eq!(metrics.devices.iter().map(|device| device.bytes).sum::<u64>(), batches as u64 * slot_bytes(&numbered));
    assert!(metrics.devices.iter().all(|device| device.pageable == (pinning == Pinning::Off)));
    assert_eq!((metrics.quarantined_slots, metrics.batches_taken), (0, batches as u64));
    let report = numbered.feed.stop(DEADLINE).unwrap();
    assert_eq!((report.dropped_rows(), report.still_out, report.fault), (0, 0, None));
    assert_eq!((report.quarantined_slots, report.threads_given_up.len()), (0, 0));
    let idle = |device: &DeviceMetrics| device.copies_in_flight == 0 && device.quarantined_buffers == 0;
    assert!(numbered.feed.metrics().devices.iter().all(idle));
}

/// Every batch arrives whole on the device whose turn it is, round by round.
pub fn rounds_arrive_whole(
    search: &CudaSearch,
    pinning: Pinning,
    devices: i32,
    (rows, row_words): (usize, usize),
    rounds: usize,
) {
    let _watchdog = Watchdog::new("rounds_arrive_whole", DEADLINE * 4);
    let attach = |builder: FeedBuilder| (0..devices).fold(builder.pinning(pinning).buffers(4), FeedBuilder::device);
    let attach = |builder: FeedBuilder| attach(builder).deal(Deal::Rounds);
    let numbered = Numbered::start(1, search, rows, row_words, attach).unwrap();
    let writer = numbered.feed.writer(1).unwrap();
    let step = devices as usize;
    std::thread::scope(|scope| {
        for device in 0..devices {
            let learner = learner_on(&numbered.feed, device, LEGACY).unwrap();
            let numbered = &numbered;
            scope.spawn(move || {
                let seen = numbered.take_all(device, learner);
                assert!(seen.into_iter().eq((device as u64..).step_by(step).take(rounds)), "device {device}");
            });
        }
        numbered.write(writer, rounds * step).unwrap();
    });
    let metrics = numbered.feed.metrics();
    for device in &metrics.devices {
        assert_eq!(
            (device.batches, device.batches_taken, device.downloads),
            (rounds as u64, rounds as u64, rounds as u64)
        );
    }
    let report = numbered.feed.stop(DEADLINE).unwrap();
    assert_eq!((report.dropped_rows(), report.still_out, report.fault), (0, 0, None));
}

fn slot_bytes(numbered: &Numbered) -> u64 {
    numbered.column_bytes().next_multiple_of(SLOT_ALIGN) as u64
}
