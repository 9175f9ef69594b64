//! Any file: a load refuses it by a typed error and leaves the store byte for byte as it was, or takes it whole, and then
//! the store saves, samples and is written on.

use super::bytes::Input;
use pinring::*;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// Longer than anything here takes; who waits so long waits for ever.
const LONG: Duration = Duration::from_secs(20);
const ROWS: usize = 3;
const LANES: usize = 2;

/// One way to declare a store, with everything needed to write to it.
struct Store {
    id: Leaf<i64>,
    done: Leaf<bool>,
    state: Leaf<f32>,
    ids: Column<i64>,
    flags: Column<bool>,
    sample: Sample,
    kind: usize,
}

const KINDS: usize = 4;

impl Store {
    fn new(kind: usize) -> Store {
        let mut step = Step::new();
        let id = step.observation("id", &[]);
        let done = step.leaf("done", &[2]);
        let state = step.leaf("state", &[3]);
        if kind == 1 {
            step.every(state, 2);
        }
        let mut sample = match kind {
            0 => Sample::transition(step, 2, 0.9),
            1 => Sample::sequence(step, 4, 2),
            _ => Sample::sequence(step, 3, 1),
        };
        match kind {
            0 => _ = (sample.window(id, -3..1, Pad::Repeat), sample.next(id)),
            1 => _ = sample.at(state, 0),
            2 => _ = sample.within_episode(false),
            _ => _ = sample.pad_short(true),
        }
        let (ids, flags) = (sample.at(id, 0), sample.at(done, 0));
        Store { id, done, state, ids, flags, sample, kind }
    }

    fn start(&self) -> Feed {
        let builder = Feed::builder(self.sample.clone()).batch(ROWS).buffers(1).lanes(LANES).seed(5);
        let builder = match self.kind {
            0 => builder.replay(16, Uniform::new()),
            1 => builder.replay(16, Prioritized::new(1.0, 0.5)),
            2 => builder.replay(16, Fifo::new()),
            _ => builder.replay(40, WithoutReplacement::new()),
        };
        builder.pace(Pace::min_size(1)).start().expect("a small feed starts")
    }

    fn write(&self, writer: &mut Writer, ids: std::ops::Range<i64>) {
        for id in ids {
            let mut s = writer.step_timeout(LONG).expect("nothing keeps this writer");
            s.put(self.id, &[id; LANES]).expect("a value for each lane");
            s.put(self.done, &[id % 2 == 0; 2 * LANES]).expect("two values for each lane");
            s.put(self.state, &[id as f32; 3 * LANES]).expect("three values for each lane");
            for lane in 0..LANES {
                s.priority(lane, (id % 7) as f32 + 0.5).expect("a priority that is one");
                if (id + lane as i64) % 6 == 5 {
                    let end = if id % 4 == 0 { End::Terminated } else { End::Truncated };
                    let mut last = s.end(lane, end);
                    if self.kind != 2 {
                        last.put(self.id, &[id + 1]).expect("the final observation");
                    }
                }
            }
            s.commit().expect("a whole step");
        }
    }

    /// A feed that holds some steps, and has none selected ahead while the batch is held.
    fn written(&self, ids: std::ops::Range<i64>) -> (Feed, Intake, Learner, Batch) {
        let feed = self.start();
        let intake = feed.intake().expect("a feed that runs"); // else it would end with the first writer
        let mut writer = feed.writer(LANES).expect("a writer");
        self.write(&mut writer, ids);
        let learner = feed.learner().expect("the learner");
        let held = learner.next_timeout(LONG).expect("a feed that runs").expect("a batch");
        (feed, intake, learner, held)
    }
}

fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("pinring-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("make a folder for the files");
        folder
    })
}

/// A whole file of each kind.
fn whole(kind: usize) -> &'static [u8] {
    static WHOLE: [OnceLock<Vec<u8>>; KINDS] = [const { OnceLock::new() }; KINDS];
    WHOLE[kind].get_or_init(|| {
        let (feed, _intake, _learner, _held) = Store::new(kind).written(0..23);
        bytes_of(&feed, "whole")
    })
}

fn bytes_of(feed: &Feed, name: &str) -> Vec<u8> {
    let path = folder().join(name);
    feed.save(&path).expect("a store that is there is saved");
    std::fs::read(&path).expect("read what was saved")
}

#[allow(dead_code)]
pub fn run(data: &[u8]) {
    _ = run_watched(data, &mut |load| load());
}

/// `around` is called with the load of the file, to watch it. Returns whether the file was taken.
pub fn run_watched(data: &[u8], around: &mut dyn FnMut(&mut dyn FnMut())) -> bool {
    let mut input = Input::new(data);
    let store = Store::new(input.below(KINDS));
    let file = file(&mut input, store.kind);
    let path = folder().join("input");
    std::fs::write(&path, file).expect("write the file");

    let (feed, intake, learner, held) = store.written(100..109);
    let before = bytes_of(&feed, "before");
    let mut loaded = None;
    around(&mut || loaded = Some(feed.load(&path)));
    let loaded = loaded.expect("it was loaded");
    let taken = loaded.is_ok();
    match loaded {
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::File, "{error}");
            assert!(before == bytes_of(&feed, "after"), "refused, and changed all the same: {error}");
        }
        Ok(loaded) => {
            assert!(loaded.live <= loaded.records, "{loaded:?}");
            assert_eq!(feed.metrics().stored_records, loaded.live);
            // What was taken can be saved, and is taken again.
            let (saved, again) = (folder().join("saved"), store.start());
            let records = feed.save(&saved).expect("a store that is there is saved").records;
            let twice = again.load(&saved).expect("what was saved is a store");
            assert_eq!((records, twice.records, twice.live), (loaded.live, loaded.live, loaded.live));
            assert_eq!(again.metrics().stored_samples, feed.metrics().stored_samples);
        }
    }
    drop(held);
    // Whatever came of it: it is written on, and what is written comes back.
    let mut writer = intake.writer(LANES).expect("a writer");
    store.write(&mut writer, 200..245);
    for _ in 0..4 {
        let batch = learner.next_timeout(LONG).expect("a feed that runs").expect("a batch");
        assert_eq!((batch.rows(), batch.slice(store.ids).len()), (ROWS, ROWS));
        let trues = batch.slice(store.flags).iter().filter(|&&flag| flag).count();
        assert!(trues <= 2 * ROWS);
    }
    taken
}

/// The file that an input makes: itself, or a whole one with a few changes that matter to its form.
fn file(input: &mut Input, kind: usize) -> Vec<u8> {
    match input.below(8) {
        0 => return input.rest().to_vec(),
        1 => {
            let text = input.rest();
            return [&(text.len() as u64).to_le_bytes(), text].concat();
        }
        _ => {}
    }
    let mut file = whole(if input.once_in(16) { input.below(KINDS) } else { kind }).to_vec();
    for _ in 0..1 + input.below(4) {
        let data = (8 + u64::from_le_bytes(std::array::from_fn(|i| file.get(i).copied().unwrap_or(0)))) as usize;
        let data = data.clamp(8, file.len().max(8));
        match input.below(10) {
            0..=5 => damage_array(input, &mut file, data),
            6 => damage_number(input, &mut file, data),
            7 => _ = file.get_mut(8 + input.below(4096)).map(|byte| *byte = input.u8()),
            8 => file.truncate(input.below(file.len() + 1)),
            _ => file.extend(std::iter::repeat_n(input.u8(), input.below(64))),
        }
        if file.len() < 16 {
            break;
        }
    }
    file
}

/// Numbers at which sums and comparisons break.
fn edge(input: &mut Input, now: u64) -> u64 {
    match input.below(14) {
        0 => 0,
        1 => 1,
        2 => u64::MAX,
        3 => u64::MAX - 1,
        4 => u64::from(u32::MAX),
        5 => 1 << 31,
        6 => 1 << 62,
        7 => (1 << 62) - 1,
        8 => now.wrapping_add(1),
        9 => now.wrapping_sub(1),
        10 => f32::NAN.to_bits().into(),
        11 => f64::INFINITY.to_bits(),
        12 => u64::from(input.u8()),
        _ => input.u64(),
    }
}

/// Another number into one of the arrays, or two of its numbers swapped.
fn damage_array(input: &mut Input, file: &mut [u8], data: usize) {
    const ARRAYS: [(&str, usize); 15] = [
        ("pinring/flags", 1),
        ("pinring/lane", 4),
        ("pinring/age", 4),
        ("pinring/step", 8),
        ("pinring/version", 8),
        ("pinring/record", 4),
        ("pinring/unused", 4),
        ("pinring/lane_steps", 8),
        ("pinring/sampler", 1),
        ("pinring/draws", 8),
        ("pinring/pace", 8),
        ("pinring/priority", 4),
        ("done", 1),
        ("id", 8),
        ("state", 4),
    ];
    let (name, size) = ARRAYS[input.below(ARRAYS.len())];
    let header = String::from_utf8_lossy(&file[8..data]).into_owned();
    let offsets =
        header.split_once(&format!("\"{name}\":")).and_then(|(_, rest)| rest.split_once("\"data_offsets\":["));
    let Some((range, _)) = offsets.and_then(|(_, rest)| rest.split_once(']')) else { return };
    let numbers: Vec<usize> = range.split(',').filter_map(|number| number.parse().ok()).collect();
    let [begin, end] = numbers[..] else { return };
    let Some(array) = data.checked_add(begin).zip(data.checked_add(end)).and_then(|(a, b)| file.get_mut(a..b)) else {
        return;
    };
    let count = array.len() / size;
    if count == 0 {
        return;
    }
    let (at, other) = (input.below(count) * size, input.below(count) * size);
    if input.once_in(4) {
        (0..size).for_each(|byte| array.swap(at + byte, other + byte));
        return;
    }
    let mut now = [0; 8];
    now[..size].copy_from_slice(&array[at..at + size]);
    let number = edge(input, u64::from_le_bytes(now));
    let every = input.once_in(5); // sometimes the same into the whole array
    for place in if every { (0..count).map(|i| i * size).collect() } else { vec![at] } {
        array[place..place + size].copy_from_slice(&number.to_le_bytes()[..size]);
    }
}

/// Another number into the header, whose length follows.
fn damage_number(input: &mut Input, file: &mut Vec<u8>, data: usize) {
    let header = String::from_utf8_lossy(&file[8..data]).into_owned();
    let starts = |(at, c): (usize, char)| c.is_ascii_digit() && !header[..at].ends_with(|c: char| c.is_ascii_digit());
    let numbers: Vec<usize> = header.char_indices().filter(|&c| starts(c)).map(|(at, _)| at).collect();
    if numbers.is_empty() {
        return;
    }
    let at = numbers[input.below(numbers.len())];
    let length = header[at..].find(|c: char| !c.is_ascii_digit()).unwrap_or(header.len() - at);
    let now = header[at..at + length].parse().unwrap_or(0);
    let changed = format!("{}{}{}", &header[..at], edge(input, now), &header[at + length..]);
    let rest = file.split_off(data);
    file.truncate(0);
    file.extend((changed.len() as u64).to_le_bytes());
    file.extend(changed.into_bytes());
    file.extend(rest);
}
