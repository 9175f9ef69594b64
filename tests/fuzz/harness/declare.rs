//! Any declarations: they are refused by a typed error, or the sizes are those of the formula and every byte of a batch
//! has a place of its own. Nothing panics.

use super::bytes::Input;
use pinring::*;
use std::time::Duration;

/// Rings up to this size are started, and where their columns lie is looked at.
const SMALL: u128 = 1 << 20;
/// The longest sequence, and the farthest offset.
const MOST_STEPS: i32 = 1 << 20;

/// A column as this model has it: the values of a row, the bytes of each and its element's, none where they do not count.
struct Expected {
    values: u128,
    bytes: u128,
}

/// A leaf under whatever type it has.
#[derive(Clone, Copy)]
enum Any {
    Bool(Leaf<bool>),
    U8(Leaf<u8>),
    I16(Leaf<i16>),
    F32(Leaf<f32>),
    I64(Leaf<i64>),
}

#[derive(Clone, Copy)]
enum AnyColumn {
    Bool(Column<bool>),
    U8(Column<u8>),
    I16(Column<i16>),
    F32(Column<f32>),
    I64(Column<i64>),
}

macro_rules! each {
    ($any:expr, $leaf:ident => $body:expr) => {
        match $any {
            Any::Bool($leaf) => $body,
            Any::U8($leaf) => $body,
            Any::I16($leaf) => $body,
            Any::F32($leaf) => $body,
            Any::I64($leaf) => $body,
        }
    };
}

macro_rules! column {
    ($any:expr, $leaf:ident => $body:expr) => {
        match $any {
            Any::Bool($leaf) => AnyColumn::Bool($body),
            Any::U8($leaf) => AnyColumn::U8($body),
            Any::I16($leaf) => AnyColumn::I16($body),
            Any::F32($leaf) => AnyColumn::F32($body),
            Any::I64($leaf) => AnyColumn::I64($body),
        }
    };
}

/// What was declared, and what this model makes of it.
struct Declared {
    sample: Sample,
    /// Something was wrong, so that the feed must be refused.
    wrong: bool,
    /// The columns, if they are known.
    columns: Vec<Expected>,
    handles: Vec<AnyColumn>,
    leaves: Vec<(Any, bool)>,
    replayed: bool,
    /// Nothing odd was declared: what is small must be taken.
    plain: bool,
    steps: usize,
}

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let declared = declare(&mut input);
    let (rows, buffers, lanes) = (input.size(), input.size(), input.size());
    let (capacity, devices, downloads, prefetch) = (input.size(), input.below(3), input.size(), input.size());
    let build = || {
        let mut builder = Feed::builder(declared.sample.clone()).batch(rows).buffers(buffers).prefetch(prefetch);
        if declared.replayed {
            builder = builder.lanes(lanes).replay(capacity, Uniform::new());
        }
        (0..devices).fold(builder, |builder, device| builder.device(device as i32).downloads(downloads))
    };
    let checked = declared.sample.check();
    assert!(!declared.wrong || checked.is_err(), "a mistake was taken: {:?}", declared.sample);
    let _ = (declared.sample.find::<f32>("a"), declared.sample.find::<u8>("b.c"), declared.sample.find::<bool>("mask"));
    let footprint = build().footprint();
    if declared.wrong {
        let error = footprint.expect_err("declarations with a mistake have no footprint");
        assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
        return;
    }
    let slot = slot_bytes(&declared.columns, rows as u128);
    match footprint {
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Schema | ErrorKind::Config), "{error}");
            let small = [rows, buffers, lanes, capacity, prefetch].iter().all(|count| (1..1000).contains(count));
            let fits = slot.saturating_mul(buffers as u128) <= SMALL && downloads < 1 << 20;
            assert!(!(declared.plain && !declared.replayed && small && fits), "refused without a reason: {error}");
        }
        Ok(footprint) => {
            assert_eq!(footprint.slot_bytes as u128, slot);
            let store = (footprint.store_bytes as u128).div_ceil(slot);
            assert_eq!(footprint.ring_bytes as u128, (buffers as u128 + store) * slot);
            let records = footprint.store_records as u128 * footprint.record_bytes_each as u128;
            assert_eq!(footprint.store_bytes as u128, records.next_multiple_of(SLOT_ALIGN as u128));
            assert!(isize::try_from(footprint.ring_bytes).is_ok());
            if !declared.replayed && slot.saturating_mul(buffers as u128) <= SMALL && devices == 0 {
                look(&declared, build(), rows);
            }
        }
    }
}

/// The formula of the README.
fn slot_bytes(columns: &[Expected], rows: u128) -> u128 {
    let column = |column: &Expected| {
        let bytes = column.values.saturating_mul(column.bytes).saturating_mul(rows);
        bytes.checked_next_multiple_of(COLUMN_ALIGN as u128).unwrap_or(u128::MAX)
    };
    let sum = columns.iter().map(column).fold(0u128, u128::saturating_add);
    sum.checked_next_multiple_of(SLOT_ALIGN as u128).unwrap_or(u128::MAX)
}

fn declare(input: &mut Input) -> Declared {
    const NAMES: [&str; 12] = ["a", "b", "b.c", "obs", "obs.x", "obs_y", "d", "e", "mask", "", "a.", "next.a"];
    let mut step = Step::new();
    let (mut leaves, mut sizes, mut wrong, mut plain) = (Vec::<(Any, bool)>::new(), Vec::new(), false, true);
    let mut names: Vec<String> = Vec::new();
    for _ in 0..input.below(6) {
        // Mostly a fresh name, else any.
        let name = match input.once_in(4) {
            true => NAMES[input.below(NAMES.len())].to_owned(),
            false => format!("l{}", names.len()),
        };
        plain &= !NAMES.contains(&name.as_str());
        let shape: Vec<usize> = (0..input.below(4)).map(|_| input.size()).collect();
        let observation = input.once_in(2);
        let (leaf, size) = match (input.below(5), observation) {
            (0, true) => (Any::Bool(step.observation(&name, &shape)), 1),
            (0, false) => (Any::Bool(step.leaf(&name, &shape)), 1),
            (1, true) => (Any::U8(step.observation(&name, &shape)), 1),
            (1, false) => (Any::U8(step.leaf(&name, &shape)), 1),
            (2, true) => (Any::I16(step.observation(&name, &shape)), 2),
            (2, false) => (Any::I16(step.leaf(&name, &shape)), 2),
            (3, true) => (Any::F32(step.observation(&name, &shape)), 4),
            (3, false) => (Any::F32(step.leaf(&name, &shape)), 4),
            (_, true) => (Any::I64(step.observation(&name, &shape)), 8),
            (_, false) => (Any::I64(step.leaf(&name, &shape)), 8),
        };
        let bytes = shape.iter().fold(size, |bytes: u128, &dim| bytes.saturating_mul(dim as u128));
        let parent = |a: &str, b: &str| b.strip_prefix(a).is_some_and(|rest| rest.starts_with('.'));
        wrong |= bytes == 0 || bytes > isize::MAX as u128 || name.split('.').any(str::is_empty);
        wrong |= names.iter().any(|other| *other == name || parent(other, &name) || parent(&name, other));
        names.push(name);
        leaves.push((leaf, observation));
        sizes.push(bytes);
    }
    wrong |= leaves.is_empty();
    if let (true, Some((leaf, _))) = (input.once_in(3), leaves.last()) {
        each!(*leaf, leaf => _ = step.reward(leaf));
        let scalar = step.leaves().last().is_some_and(|info| info.shape.is_empty());
        wrong |= !scalar;
    }
    if let (true, Some((leaf, _))) = (input.once_in(6), leaves.first()) {
        let every = input.size();
        each!(*leaf, leaf => _ = step.every(leaf, every));
        wrong |= !(1..=MOST_STEPS as usize).contains(&every);
        plain = false; // whether sequences fit to it does not count here
    }
    let infos: Vec<(usize, usize)> = step.leaves().iter().map(|info| (info.elements(), info.bytes())).collect();
    for (&(_, bytes), &expected) in infos.iter().zip(&sizes) {
        assert_eq!(bytes as u128, expected.min(usize::MAX as u128), "what does not fit is as much as can be");
    }
    let kind = input.below(4);
    let (steps, other) = (input.size(), input.size());
    let gamma = [0.0, 0.5, 1.0, -0.1, 1.5, f64::NAN][input.below(6)];
    let in_range = |steps: usize| (1..=MOST_STEPS as usize).contains(&steps);
    let mut sample = match kind {
        0 => Sample::step(step),
        1 => {
            wrong |= steps == 0;
            Sample::unroll(step, steps)
        }
        2 => {
            wrong |= !in_range(steps) || !(0.0..=1.0).contains(&gamma);
            Sample::transition(step, steps, gamma)
        }
        _ => {
            wrong |= !in_range(steps) || !in_range(other);
            Sample::sequence(step, steps, other)
        }
    };
    let (replayed, has_time) = (kind >= 2, kind % 2 == 1);
    let (mut columns, mut handles) = (Vec::new(), Vec::new());
    let values = |observation: bool| match has_time {
        true => steps as u128 + u128::from(observation),
        false => 1,
    };
    if !replayed {
        for (&(leaf, observation), &bytes) in leaves.iter().zip(&sizes) {
            columns.push(Expected { values: values(observation), bytes });
            handles.push(column!(leaf, leaf => sample.all(leaf)));
        }
    }
    if input.once_in(4) {
        wrong |= !has_time;
        sample.time_major();
    }
    let (mut seen, mut windows) = (Vec::new(), Vec::new());
    for _ in 0..input.below(5) {
        let choice = input.below(if replayed { 7 } else { 5 });
        if choice < 5 {
            if seen.contains(&choice) {
                continue;
            }
            seen.push(choice);
            let of_steps = if has_time { steps as u128 } else { 1 };
            plain &= !names.iter().any(|name| name == "mask");
            let flag = match choice {
                0 => sample.terminated(),
                1 => sample.truncated(),
                2 => sample.mask(),
                3 => sample.is_first(),
                _ => {
                    handles.push(AnyColumn::I64(sample.policy_version()));
                    columns.push(Expected { values: of_steps, bytes: 8 });
                    continue;
                }
            };
            handles.push(AnyColumn::Bool(flag));
            columns.push(Expected { values: of_steps + u128::from(choice == 3 && has_time), bytes: 1 });
            // A leaf of that name and a column of it are two of one name.
            wrong |= choice == 2 && !replayed && names.iter().any(|name| name == "mask");
            continue;
        }
        if leaves.is_empty() {
            continue;
        }
        let window = (choice, input.below(leaves.len()), offset(input), offset(input), input.once_in(2));
        if windows.contains(&window) {
            continue; // asked for twice, it is one column
        }
        windows.push(window);
        let (_, place, from, to, repeat) = window;
        let pad = if repeat { Pad::Repeat } else { Pad::Zeros };
        wrong |= from >= to || from < -MOST_STEPS || to > MOST_STEPS;
        each!(leaves[place].0, leaf => _ = match choice {
            5 => sample.window(leaf, from..to, pad),
            _ => sample.next_window(leaf, from..to, pad),
        });
        columns.push(Expected { values: (i128::from(to) - i128::from(from)).max(0) as u128, bytes: sizes[place] });
    }
    wrong |= replayed && columns.is_empty();
    Declared { sample, wrong, columns, handles, leaves, replayed, plain, steps: if has_time { steps } else { 1 } }
}

/// Mostly near; else where arithmetic breaks.
fn offset(input: &mut Input) -> i32 {
    const EDGES: [i32; 8] =
        [i32::MIN, i32::MAX, i32::MIN + 1, MOST_STEPS, MOST_STEPS + 1, -MOST_STEPS, -MOST_STEPS - 1, 300];
    match input.u8() {
        near @ 0..248 => i32::from(near % 19) - 9,
        edge => EDGES[usize::from(edge - 248)],
    }
}

/// Where the columns of a real batch lie: one behind the other, at their alignment, with the bytes that they should have.
fn look(declared: &Declared, builder: FeedBuilder, rows: usize) {
    if declared.steps.saturating_mul(rows) > 512 {
        return;
    }
    let feed = builder.start().expect("a small feed starts");
    let (mut writer, learner) = (feed.writer(1).expect("a writer"), feed.learner().expect("the learner"));
    let batch = loop {
        if let Some(batch) = learner.try_next().expect("a feed that runs") {
            break batch;
        }
        let mut s = writer.step_timeout(Duration::from_secs(20)).expect("there is room for one batch");
        for &(leaf, _) in &declared.leaves {
            each!(leaf, leaf => _ = s.view_mut(leaf));
        }
        s.commit().expect("every leaf was written");
    };
    let mut end = 0;
    let mut base = None;
    for (&column, expected) in declared.handles.iter().zip(&declared.columns) {
        let (address, bytes) = match column {
            AnyColumn::Bool(column) => place(batch.slice(column)),
            AnyColumn::U8(column) => place(batch.slice(column)),
            AnyColumn::I16(column) => place(batch.slice(column)),
            AnyColumn::F32(column) => place(batch.slice(column)),
            AnyColumn::I64(column) => place(batch.slice(column)),
        };
        let base = *base.get_or_insert(address);
        assert_eq!(bytes as u128, expected.values * expected.bytes * rows as u128);
        assert_eq!((address % COLUMN_ALIGN, base % SLOT_ALIGN), (0, 0));
        assert_eq!(address - base, end, "right behind the one before");
        end = (end + bytes).next_multiple_of(COLUMN_ALIGN);
    }
    assert_eq!(feed.stop(Duration::from_secs(20)).expect("the feed runs").quarantined_slots, 0);
}

fn place<T>(values: &[T]) -> (usize, usize) {
    (values.as_ptr().addr(), size_of_val(values))
}
