//! Feeding a device, as scenarios that run against the fake library and on a real GPU alike: what they check comes back
//! through `download`, or through copies of the test's own.
#![allow(dead_code)]

use crate::common::Watchdog;
use pinring::*;
use std::sync::mpsc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(30);

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
        let builder = Feed::builder(sample).batch(rows).device(0).downloads(bytes).cuda(search.clone());
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
}

/// Every batch arrives whole: each is downloaded and compared word by word, its handle dropped at once.
pub fn batches_arrive_whole(search: &CudaSearch, pinning: Pinning, rows: usize, row_words: usize, batches: usize) {
    let _watchdog = Watchdog::new("batches_arrive_whole", DEADLINE * 4);
    let numbered = Numbered::start(1, search, rows, row_words, |b| b.pinning(pinning).buffers(3)).unwrap();
    // SAFETY: the legacy default stream lives as long as the device.
    #[allow(unsafe_code)]
    let learner = unsafe { numbered.feed.learner_on(0, std::ptr::null_mut()) }.unwrap();
    let writer = numbered.feed.writer(1).unwrap();
    std::thread::scope(|scope| {
        let written = scope.spawn(|| numbered.write(writer, batches));
        let (sender, receiver) = mpsc::channel();
        for expected in 0..batches as u64 {
            let batch = learner.next_batch().unwrap();
            assert_eq!((batch.rows(), batch.sequence_number()), (rows, expected));
            let sender = sender.clone();
            let column = batch.column(numbered.column);
            assert_eq!((&column.shape[..], &column.strides[..]), (&[rows, row_words][..], &[row_words, 1][..]));
            let then = move |bytes: &[u8]| sender.send(bytes.to_vec()).unwrap();
            // SAFETY: the column's bytes on the learner's device; the batch is dropped behind the snapshot on its stream.
            #[allow(unsafe_code)]
            unsafe { learner.download(column.ptr, numbered.column_bytes(), then) }.unwrap();
            drop(batch);
            let bytes = receiver.recv_timeout(DEADLINE).expect("the download arrives");
            assert_eq!(numbered.wrong_words(expected, &bytes), 0, "batch {expected}");
        }
        assert!(matches!(learner.next_batch(), Err(NextError::Ended)));
        written.join().unwrap().unwrap();
    });
    let metrics = numbered.feed.metrics();
    assert_eq!(metrics.devices[0].batches, batches as u64);
    assert_eq!(metrics.devices[0].pageable, pinning == Pinning::Off);
    assert_eq!((metrics.quarantined_slots, metrics.batches_taken), (0, batches as u64));
    let report = numbered.feed.stop(DEADLINE).unwrap();
    assert_eq!((report.dropped_rows(), report.still_out, report.fault), (0, 0, None));
    assert!(report.threads_given_up.is_empty());
}
