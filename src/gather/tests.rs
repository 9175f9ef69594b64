//! The kernel's walk against plain copies, over samples, records and tables of records of every kind.

use super::emulate::emulate;
use super::launch::{CHUNK, Chunk, Launch, NOTHING, WARP};
use super::*;
use crate::layout::Layout;
use crate::sample::{Pad, Sample};
use crate::schema::Step;
use crate::store::{Plan, RecordLayout};
use proptest::prelude::*;

const RECORDS: u32 = 23;
/// What nobody wrote.
const UNTOUCHED: u8 = 0xA5;

/// Memory that begins at a multiple of 256 bytes, as that of a device does.
struct Memory {
    bytes: Vec<u8>,
    skip: usize,
    at: u64,
    len: usize,
}

impl Memory {
    fn new(at: u64, content: &[u8]) -> Memory {
        let mut bytes = vec![0; content.len() + 256];
        let skip = bytes.as_ptr().align_offset(256);
        bytes[skip..skip + content.len()].copy_from_slice(content);
        Memory { bytes, skip, at, len: content.len() }
    }

    fn content(&self) -> &[u8] {
        &self.bytes[self.skip..self.skip + self.len]
    }

    /// The host's address of bytes that are wholly in here.
    fn find(&mut self, address: u64, bytes: usize) -> Option<*mut u8> {
        let from = usize::try_from(address.checked_sub(self.at)?).ok()?;
        (from + bytes <= self.len).then(|| self.bytes[self.skip + from..].as_mut_ptr())
    }
}

fn words(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// A sample of leaves of these sizes: transitions with stacks and returns, or sequences.
fn sample(sizes: &[usize], n: usize, time: Option<(usize, bool)>, all: bool) -> Sample {
    let mut step = Step::new();
    let leaves: Vec<_> =
        sizes.iter().enumerate().map(|(i, &size)| step.observation::<u8>(&format!("l{i}"), &[size])).collect();
    let (reward, action) = (step.leaf::<f32>("reward", &[]), step.leaf::<i64>("action", &[]));
    let mut sample = match time {
        Some((len, _)) => Sample::sequence(step, len, 1),
        None => Sample::transition(step, n, 0.97),
    };
    if let Some((_, true)) = time {
        sample.time_major();
    }
    if all {
        sample.terminated();
    }
    for (i, leaf) in leaves.into_iter().enumerate() {
        sample.window(leaf, -(i as i32)..2, Pad::Repeat);
        if time.is_none() {
            sample.next_window(leaf, -1..1, Pad::Zeros);
        }
    }
    if all {
        sample.at(action, 0);
        sample.mask();
    }
    if time.is_none() {
        sample.n_step_return(reward);
    }
    sample
}

struct World {
    layout: Layout,
    plan: Plan,
    record_bytes: usize,
    tables: Tables,
}

impl World {
    fn new(sample: &Sample, rows: usize) -> Result<World, String> {
        let layout = Layout::new(sample, rows).unwrap();
        let records = RecordLayout::new(&layout.leaves).unwrap();
        let plan = Plan::new(&layout, &records);
        let tables = Tables::new(&layout, &plan, records.bytes)?;
        Ok(World { layout, plan, record_bytes: records.bytes, tables })
    }

    /// The batch by the walk, and by plain copies. No byte is written twice: a device has no order of its threads.
    fn both(&self, records: &[u8], numbers: &[u32], threads: u32) -> (Vec<u8>, Vec<u8>) {
        let chunks = self.tables.chunks.iter().flat_map(|c| [c.from, c.layout, c.to, c.row_stride]);
        let batch = vec![UNTOUCHED; self.layout.slot_bytes];
        let contents = [
            records.to_vec(),
            batch.clone(),
            words(numbers.iter().copied()),
            words(chunks),
            words(self.tables.powers.iter().copied()),
        ];
        let mut memories: Vec<Memory> =
            (1u64..).zip(&contents).map(|(place, content)| Memory::new(place << 40, content)).collect();
        let [store, batch_at, table, chunks, powers] = [1, 2, 3, 4, 5].map(|place| place << 40);
        let launch = Launch { store, batch: batch_at, table, chunks, powers, ..self.tables.launch() };
        let mut written = vec![0u32; batch.len()];
        {
            let memories = std::cell::RefCell::new((&mut memories, &mut written));
            let at = |address: u64, bytes: usize| {
                let (memories, written) = &mut *memories.borrow_mut();
                if let Some(from) = address.checked_sub(batch_at).filter(|from| *from < written.len() as u64) {
                    written.iter_mut().skip(from as usize).take(bytes).for_each(|times| *times += 1);
                }
                memories.iter_mut().find_map(|m| m.find(address, bytes))
            };
            // SAFETY: `at` gives bytes of the memories alone.
            assert!(unsafe { emulate(&launch, threads, &at) }, "out of bounds, or not aligned");
        }
        let twice = written.iter().position(|&times| times > 1);
        assert_eq!(twice, None, "written more than once, of {:?}", self.tables);
        (memories[1].content().to_vec(), self.plainly(batch, records, numbers))
    }

    fn plainly(&self, mut batch: Vec<u8>, records: &[u8], numbers: &[u32]) -> Vec<u8> {
        for row in 0..self.layout.rows {
            let numbers = &numbers[row * self.tables.stride..][..self.tables.stride];
            for of in &self.plan.moves {
                let to = of.to + row * of.row_stride;
                let to = &mut batch[to..to + of.bytes as usize];
                match numbers[of.entry as usize] {
                    NOTHING => to.fill(0),
                    record => {
                        let from = record as usize * self.record_bytes + of.from as usize;
                        to.copy_from_slice(&records[from..from + of.bytes as usize]);
                    }
                }
            }
            if let (Some(sum), Some(column)) = (self.plan.sum, self.layout.derived.n_step_return) {
                let reward = |k: usize| {
                    let record = numbers[sum.entry as usize + k] as usize;
                    let from = record * self.record_bytes + sum.from as usize;
                    f32::from_ne_bytes(records[from..from + 4].try_into().unwrap())
                };
                let steps = numbers[self.tables.stride - 1] as usize;
                let total = (1..steps).fold(reward(0), |total, k| total + self.plan.powers[k] * reward(k));
                let column = &self.layout.columns[column];
                let at = column.offset + row * column.row_stride;
                batch[at..at + 4].copy_from_slice(&total.to_ne_bytes());
            }
        }
        batch
    }
}

fn numbers(world: &World, seed: u64, n: usize) -> Vec<u32> {
    let mut draws = crate::select::Draws::new(seed, 0);
    let entries = world.plan.entries.len();
    let mut numbers = Vec::new();
    for _ in 0..world.layout.rows {
        for entry in 0..entries {
            // Rewards that are added up are always there.
            let summed = world.plan.sum.is_some_and(|sum| entry >= sum.entry as usize);
            let nothing = !summed && draws.below(5) == 0;
            numbers.push(if nothing { NOTHING } else { draws.below(u64::from(RECORDS)) as u32 });
        }
        if world.plan.sum.is_some() {
            numbers.push(1 + draws.below(n as u64) as u32);
        }
    }
    numbers
}

/// Bytes of records: leaves are anything, rewards are numbers of many sizes, so that every rounding shows.
fn records(world: &World, seed: u64) -> Vec<u8> {
    let mut draws = crate::select::Draws::new(seed, 1);
    let mut bytes: Vec<u8> = (0..RECORDS as usize * world.record_bytes).map(|_| draws.next_u64() as u8).collect();
    if let Some(sum) = world.plan.sum {
        for record in bytes.chunks_exact_mut(world.record_bytes) {
            let reward = (draws.unit() as f32 - 0.5) * 10f32.powi(draws.below(9) as i32 - 4);
            record[sum.from as usize..][..4].copy_from_slice(&reward.to_ne_bytes());
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_walk_of_the_kernel_is_plain_copies(
        sizes in prop::collection::vec(prop_oneof![1usize..70, 500..1200usize], 1..5),
        n in 1usize..7,
        time in prop::option::of((1usize..6, any::<bool>())),
        all: bool,
        rows in 1usize..40,
        warps in 1u32..4,
        seed: u64,
    ) {
        let Ok(world) = World::new(&sample(&sizes, n, time, all), rows) else { return Ok(()) };
        let (walked, plain) = world.both(&records(&world, seed), &numbers(&world, seed, n), warps * WARP);
        let wrong = (0..plain.len()).find(|&i| walked[i] != plain[i]);
        prop_assert_eq!(wrong, None, "of {:?}", world.tables);
    }

    /// The table lies where the device writes, in no column of the host, and what is copied holds every one of those.
    #[test]
    fn the_table_is_in_nobodys_way_and_every_column_of_the_host_is_copied(
        sizes in prop::collection::vec(1usize..3000, 1..5),
        time in prop::option::of((1usize..6, any::<bool>())),
        all: bool,
        rows in 1usize..600,
    ) {
        let Ok(world) = World::new(&sample(&sizes, 3, time, all), rows) else { return Ok(()) };
        let (layout, tables) = (&world.layout, &world.tables);
        let table = tables.at..tables.at + tables.bytes();
        prop_assert!(tables.at % 4 == 0 && table.end <= layout.slot_bytes);
        for part in &tables.copied {
            prop_assert!(part.end <= layout.slot_bytes);
        }
        for column in [layout.derived.terminated, layout.derived.mask].into_iter().flatten() {
            let column = &layout.columns[column];
            let bytes = column.item_bytes * column.steps * rows;
            let apart = column.offset + bytes <= table.start || table.end <= column.offset;
            prop_assert!(apart, "{} and the table at {:?}", column.name, table);
            let copied = tables.copied.iter().any(|p| p.start <= column.offset && column.offset + bytes <= p.end);
            prop_assert!(copied, "{}: {:?}", column.name, tables.copied);
        }
    }
}

#[test]
fn a_chunk_is_written_in_parts_that_are_whole_and_aligned() {
    for (bytes, to, row_stride, alignment) in [
        (16, 256, 7056, 16),
        (16, 256, 148, 4),
        (4, 260, 148, 4),
        (4, 512, 4, 4),
        (1, 3, 1, 1),
        (6, 8, 16, 2),
        (8, 24, 8, 8),
    ] {
        let chunk = Chunk::new(7, 32, 0, bytes, to, row_stride);
        assert_eq!((chunk.entry(), chunk.bytes(), chunk.alignment()), (7, bytes as usize, alignment));
        assert!(chunk.is_first() && !Chunk::new(7, 32, 16, bytes, to, row_stride).is_first());
        assert_eq!(
            Chunk::new(7, 32, 16, bytes, to, row_stride),
            Chunk { from: 48, to: to + 16, layout: chunk.layout & !(1 << 7), ..chunk }
        );
    }
    assert_eq!((NOTHING, CHUNK), (crate::store::NOTHING, 16));
}

#[test]
fn a_sample_that_is_smaller_than_its_table_is_left_to_the_cpu() {
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[]);
    let mut of_bytes = Sample::transition(step, 3, 0.99);
    of_bytes.window(obs, -3..1, Pad::Repeat);
    let why = World::new(&of_bytes, 1024).err().unwrap();
    assert!(why.contains("larger than the batch"), "{why}");
}

#[test]
fn who_gathers_follows_what_was_asked_what_is_possible_and_who_takes() {
    let parts = || Ok((World::new(&sample(&[512], 1, None, true), 8)?.tables, 0x1000));
    let none = || -> Result<(Tables, u64), String> { unreachable!("nobody asks") };
    let why = |gathering: &Gathering| match gathering.report() {
        GatherReport::Cpu { why } => why,
        GatherReport::Kernel { .. } => String::new(),
    };
    let cpu = Gathering::new(Gather::Cpu, 4, 1, none);
    assert!(cpu.take_host() && cpu.tables().is_none() && why(&cpu) == "asked for");
    let alone = Gathering::new(Gather::Auto, 4, 0, none);
    assert!(alone.take_host() && why(&alone).contains("no device"));

    // In `Auto` the end that is taken first decides.
    let auto = Gathering::new(Gather::Auto, 4, 2, parts);
    auto.loaded(Ok(()));
    auto.take_device();
    assert!(auto.tables().is_none(), "one of two devices has yet to load the kernel");
    auto.loaded(Ok(()));
    assert!(auto.tables().is_some() && !auto.take_host());
    assert_eq!(auto.report(), GatherReport::Kernel { blocks: 4 });
    let auto = Gathering::new(Gather::Auto, 4, 1, parts);
    auto.loaded(Ok(()));
    assert!(auto.take_host());
    auto.take_device();
    assert!(auto.tables().is_none() && why(&auto).contains("on the host"));

    // A device that could not load it leaves it to the CPU, or ends a start that insists.
    let failed = Gathering::new(Gather::Auto, 4, 1, parts);
    failed.loaded(Err("too old".to_owned()));
    failed.take_device();
    assert!(failed.tables().is_none() && failed.take_host() && why(&failed) == "too old");
    assert!(failed.refused().is_none());
    let forced = Gathering::new(Gather::Mapped, 4, 1, parts);
    assert!(forced.refused().is_none());
    forced.loaded(Ok(()));
    assert!(!forced.take_host());
    let forced = Gathering::new(Gather::Mapped, 4, 1, parts);
    forced.loaded(Err("too old".to_owned()));
    assert!(forced.refused().unwrap().to_string().contains("too old"));
}
