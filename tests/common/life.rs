//! What the tests of a feed's life share: tests in a process of their own, the process's threads and rings as the
//! kernel sees them, and the smallest feed there is.
#![allow(dead_code, unused_macros, unused_imports)]

#[cfg(target_os = "linux")]
use super::common::fake::Fake;
use pinring::{Batch, Column, CudaSearch, Feed, FeedBuilder, Leaf, Pinning, Sample, Step, Writer};
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Until a threaded test that hangs is ended.
pub const PATIENCE: Duration = Duration::from_secs(100);

/// As long, or many times that where a test was told to try more than it does.
pub fn patience() -> Duration {
    if every_call().is_some() { PATIENCE * 60 } else { PATIENCE }
}

/// `PINRING_EVERY_CALL=N`: every N-th CUDA call is to be met by a failure, and not only some; with 1 all are.
pub fn every_call() -> Option<usize> {
    std::env::var("PINRING_EVERY_CALL").ok()?.parse().ok().filter(|stride| *stride > 0)
}

/// Declares a test that runs in a process of its own, under a watchdog: for what is the whole process's, like its
/// threads, its mappings and its environment.
macro_rules! alone {
    ($(#[$meta:meta])* fn $name:ident() $body:block) => {
        $crate::life::alone! { $(#[$meta])* fn $name(|_command| {}) $body }
    };
    ($(#[$meta:meta])* fn $name:ident($prepare:expr) $body:block) => {
        #[test]
        $(#[$meta])*
        fn $name() {
            if !$crate::common::is_child(stringify!($name)) {
                $crate::common::alone(stringify!($name), $prepare);
                return;
            }
            let _watchdog = $crate::common::Watchdog::new(stringify!($name), $crate::life::patience());
            $body
        }
    };
}
pub(crate) use alone;

/// Waits until `done`, and fails with `what` if that does not come.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE / 2, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Threads of this process: id and name.
pub fn threads() -> Vec<(u64, String)> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("the list of threads");
    let name = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?; // it may have ended meanwhile
        Some((task.file_name().to_str()?.parse().ok()?, name.trim_end().to_owned()))
    };
    tasks.filter_map(|task| name(task.ok()?)).collect()
}

/// Names of the threads that feeds of this process have now, sorted.
pub fn feed_threads() -> Vec<String> {
    let ours = |name: &String| {
        let rest = name.strip_prefix("pr").unwrap_or("");
        rest.starts_with(|c: char| c.is_ascii_digit()) || rest == "-prefault"
    };
    let mut names: Vec<_> = threads().into_iter().map(|(_, name)| name).filter(ours).collect();
    names.sort();
    names
}

/// What the kernel has mapped and wipes on fork: the rings of this process, but for the one page by which forked
/// children are noticed.
pub fn rings() -> Vec<Range<usize>> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("the list of mappings");
    let (mut rings, mut current) = (Vec::new(), 0..0);
    for line in smaps.lines() {
        let first = line.split(' ').next().unwrap_or("");
        let hex = |text| usize::from_str_radix(text, 16).ok();
        if let Some((Some(start), Some(end))) = first.split_once('-').map(|(start, end)| (hex(start), hex(end))) {
            current = start..end;
        } else if line.strip_prefix("VmFlags:").is_some_and(|flags| flags.split(' ').any(|flag| flag == "wf")) {
            rings.push(current.clone());
        }
    }
    rings.retain(|ring| ring.len() > 4096);
    rings
}

/// Nothing of any feed is left in this process: no thread, no mapping. (A joined thread is on the list for a moment
/// longer.) Rings must have been larger than a page.
pub fn assert_nothing_is_left() {
    assert_eq!(rings(), [], "mapped");
    until("no thread of a feed is left", || feed_threads().is_empty());
}

/// And nothing with CUDA.
#[cfg(target_os = "linux")]
pub fn assert_nothing_is_left_with(fake: &Fake) {
    assert_eq!(fake.live_registrations(), []);
    assert_eq!(fake.peek_last_error(), 0, "this thread's last error");
    assert_nothing_is_left();
}

/// The smallest sample: a step of one number.
#[derive(Clone)]
pub struct Small {
    pub reward: Leaf<f32>,
    pub column: Column<f32>,
    sample: Sample,
}

impl Small {
    pub fn new() -> Small {
        let mut step = Step::new();
        let reward = step.leaf::<f32>("reward", &[]);
        let mut sample = Sample::step(step);
        let column = sample.all(reward);
        Small { reward, column, sample }
    }

    /// Batches of 4 rows in 2 buffers: a ring of two pages.
    pub fn builder(&self) -> FeedBuilder {
        Feed::builder(self.sample.clone()).batch(4).buffers(2)
    }

    /// The same, page-locked by `fake` and nothing else.
    #[cfg(target_os = "linux")]
    pub fn pinned(&self, fake: &Fake) -> FeedBuilder {
        self.builder().pinning(Pinning::Required).cuda(only(fake))
    }

    /// Writes `values`, one a step.
    pub fn write(&self, writer: &mut Writer, values: impl IntoIterator<Item = f32>) -> pinring::Result<()> {
        for value in values {
            let mut step = writer.step()?;
            step.put(self.reward, &[value])?;
            step.commit()?;
        }
        Ok(())
    }

    pub fn values(&self, batch: &Batch) -> Vec<f32> {
        batch.slice(self.column).to_vec()
    }

    /// Ten batches through a feed, then a stop that left nothing.
    pub fn ten_batches(&self, feed: &Feed) {
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        let this = self.clone();
        let writing = std::thread::spawn(move || this.write(&mut writer, (0..40).map(|i| i as f32)));
        for batch in 0..10u8 {
            let first = 4.0 * f32::from(batch);
            let next = learner.next_batch().unwrap();
            assert_eq!(self.values(&next), [first, first + 1.0, first + 2.0, first + 3.0]);
        }
        writing.join().unwrap().unwrap();
        let report = feed.stop(PATIENCE).unwrap();
        assert_eq!((report.dropped_rows(), report.still_out, report.threads_given_up.len()), (0, 0, 0), "{report}");
        assert_eq!(report.fault, None);
    }
}

/// This fake, or none.
#[cfg(target_os = "linux")]
pub fn only(fake: &Fake) -> CudaSearch {
    CudaSearch::new().library_only(fake.path())
}

/// A fake under the usual name in a folder of its own.
#[cfg(target_os = "linux")]
pub fn fake(name: &str) -> Fake {
    Fake::new(&super::common::scratch(name), "libcudart.so.13")
}

/// Files that this process has mapped.
pub fn mapped_files() -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the list of mappings");
    maps.lines().filter_map(|line| Some(PathBuf::from(&line[line.find('/')?..]))).collect()
}
