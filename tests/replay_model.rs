//! Random programs against a model of the store: which samples there are, and every value of every column, for random
//! windows, episodes, masks, abandoned lanes, writers that come and go, and clears; with every order of wraps that small
//! stores have. `PINRING_REPLAY_SEEDS` runs more of them.

mod common;
#[path = "common/data.rs"]
mod data;
#[path = "common/replay.rs"]
mod replay;

use common::Watchdog;
use data::*;
use pinring::*;
use replay::*;
use std::collections::BTreeSet;
use std::time::Duration;

fn rules(rng: &mut Rng) -> Rules {
    let transition = rng.percent(50);
    Rules {
        n: if transition { 1 + rng.below(4) as usize } else { 0 },
        len: 1 + rng.below(6) as usize,
        stride: 1 + rng.below(5) as usize,
        pad_short: !transition && rng.percent(50),
        within: transition || rng.percent(60),
        time_major: !transition && rng.percent(50),
        gamma: 0.9,
    }
}

struct Setting {
    rules: Rules,
    /// Makes another feed like `feed`, of that capacity.
    builder: Box<dyn Fn(usize) -> FeedBuilder>,
    feed: Feed,
    leaves: Leaves,
    derived: Derived,
    model: Model,
}

fn setting(rng: &mut Rng, seed: u64) -> Setting {
    let rules = rules(rng);
    let (step, leaves) = schema();
    let mut sample = match rules.is_transition() {
        true => Sample::transition(step, rules.n, rules.gamma),
        false => Sample::sequence(step, rules.len, rules.stride),
    };
    if !rules.is_transition() {
        sample.within_episode(rules.within).pad_short(rules.pad_short);
    }
    if rules.time_major {
        sample.time_major();
    }
    let asked = ask(rng, &mut sample, &leaves, &rules);
    let derived = Derived::ask(&mut sample, &leaves, &rules);
    let (lanes, rows, buffers) = (1 + rng.below(4) as usize, 1 + rng.below(9) as usize, 1 + rng.below(2) as usize);
    let mut capacity = 1 + rng.below(60) as usize;
    let builder = move |capacity| {
        let builder = Feed::builder(sample.clone()).batch(rows).buffers(buffers).lanes(lanes).seed(seed);
        builder.replay(capacity, WithoutReplacement::new()).pace(Pace::min_size(1))
    };
    while builder(capacity).footprint().is_err() {
        capacity += 1;
    }
    let footprint = builder(capacity).footprint().unwrap();
    let model = Model::new(rules, asked, capacity, lanes);
    let chunks = capacity.div_ceil(model.chunk) + lanes + 2;
    assert_eq!(footprint.store_records, chunks * model.chunk);
    let feed = builder(capacity).start().unwrap();
    Setting { rules, builder: Box::new(builder), feed, leaves, derived, model }
}

fn commit(rng: &mut Rng, setting: &mut Setting, writer: &mut Writer, name: u64, attempt: u64) {
    let (lanes, leaves) = (writer.lanes(), setting.leaves);
    let ids: Vec<u64> = (0..lanes.len()).map(|lane| id(name, lane, attempt)).collect();
    let mut step = writer.step().unwrap();
    write_observation(&mut step, &leaves, &ids, rng.next());
    write_rest(&mut step, &leaves, &ids, rng.next());
    let mut steps = Vec::new();
    for (lane, &id) in ids.iter().enumerate() {
        let masked = rng.percent(10);
        let end = rng.percent(18).then(|| if rng.percent(50) { End::Terminated } else { End::Truncated });
        if masked {
            step.mask_out(lane);
        }
        if let Some(end) = end {
            let mut last = step.end(lane, end);
            if setting.rules.within {
                last.put(leaves.obs, &obs_of(final_of(id))).unwrap();
                last.put(leaves.small, &small_of(final_of(id))).unwrap();
            }
        }
        steps.push((id, end, masked));
    }
    if rng.percent(5) {
        return; // never begun
    }
    let version = rng.below(100);
    step.set_policy_version(version);
    step.commit().unwrap();
    setting.model.commit(lanes.start, &steps, version);
}

/// Stores an episode as a whole, perhaps longer than the store.
fn episode(rng: &mut Rng, setting: &mut Setting, writer: &mut Writer, name: u64, attempt: u64) {
    let (leaves, lane, len) = (setting.leaves, writer.lanes().start, 1 + rng.below(100) as usize);
    let ids: Vec<u64> = (0..len).map(|t| id(name, 0, attempt + t as u64)).collect();
    let last = final_of(ids[len - 1]);
    let observed: Vec<u64> = ids.iter().copied().chain([last]).collect();
    let obs: Vec<u64> = observed.iter().flat_map(|&id| obs_of(id)).collect();
    let small: Vec<u8> = observed.iter().flat_map(|&id| small_of(id)).collect();
    let actions: Vec<i64> = ids.iter().map(|&id| action_of(id)).collect();
    let logits: Vec<f32> = ids.iter().flat_map(|&id| logits_of(id)).collect();
    let rewards: Vec<f32> = ids.iter().map(|&id| reward_of(id)).collect();
    let (end, version) = (if rng.percent(50) { End::Terminated } else { End::Truncated }, rng.below(100));
    let mut episode = writer.episode(len).unwrap();
    assert!(matches!(episode.put(leaves.obs, &obs[2..]), Err(PutError::Episode { .. })));
    episode.put(leaves.obs, &obs).unwrap().put(leaves.small, &small).unwrap();
    episode.put(leaves.action, &actions).unwrap().put(leaves.logits, &logits).unwrap();
    episode.put(leaves.reward, &rewards).unwrap();
    episode.commit(end, version).unwrap();
    setting.model.cut(lane..lane + 1);
    for (t, &id) in ids.iter().enumerate() {
        setting.model.commit(lane, &[(id, (t + 1 == len).then_some(end), false)], version);
    }
    let ended = setting.feed.episodes().try_iter().last().unwrap();
    let ret: f64 = rewards.iter().map(|&reward| f64::from(reward)).sum();
    assert_eq!((ended.lane, ended.length, ended.ret, ended.end), (lane, len as u64, ret, end));
}

/// Takes batches up to the end of a pass, and checks every row. The samples of the pass.
fn pass(setting: &Setting, learner: &Learner, check: bool) -> BTreeSet<(usize, u64)> {
    let mut seen = BTreeSet::new();
    loop {
        let batch = learner.next_batch().unwrap();
        for (row, key) in batch.lanes().zip(batch.first_steps()).enumerate() {
            setting.model.check(&batch, row, &setting.derived);
            assert!(seen.insert(key) || !check, "{key:?} twice in one pass");
        }
        if batch.ends_pass() {
            return seen;
        }
    }
}

/// The same samples and values from a file, and in a store that has room for fewer, as if that had been the store.
fn restored(setting: &Setting, items: &BTreeSet<(usize, u64)>, seed: u64) {
    let path = common::scratch("replay-model").join("store.safetensors");
    let saved = setting.feed.save(&path).unwrap();
    let held: usize = setting.model.lanes.iter().map(|lane| lane.records.len() - lane.live).sum();
    assert_eq!(saved.records, held);
    let feed = (setting.builder)(setting.model.capacity).start().unwrap();
    for _ in 0..2 {
        let loaded = feed.load(&path).unwrap();
        assert_eq!((loaded.records, loaded.live, loaded.resumed), (held, held, true));
    }
    assert_eq!(feed.metrics().stored_samples, items.len(), "seed {seed}, {:?}", setting.rules);
    let learner = feed.learner().unwrap();
    (0..2).for_each(|_| drop(pass(setting, &learner, false)));
    assert_eq!(&pass(setting, &learner, true), items, "seed {seed}, {:?}", setting.rules);
    // A store of more room has the same; one of less some of them.
    for capacity in [setting.model.capacity * 3 + 1, setting.model.capacity / 2] {
        let Ok(feed) = (setting.builder)(capacity).start() else { continue };
        let loaded = feed.load(&path).unwrap();
        assert_eq!((loaded.records, loaded.resumed), (held, false));
        if capacity < setting.model.capacity || feed.metrics().stored_samples == 0 {
            assert!(feed.metrics().stored_samples <= items.len());
        } else {
            assert_eq!(feed.metrics().stored_samples, items.len(), "seed {seed}, {:?}", setting.rules);
        }
        if feed.metrics().stored_samples > 0 {
            let learner = feed.learner().unwrap();
            let seen = pass(setting, &learner, false);
            assert!(seen.is_subset(items), "seed {seed}: {seen:?} of {items:?}");
        }
    }
}

fn run(seed: u64) {
    let mut rng = Rng(seed);
    let mut setting = setting(&mut rng, seed);
    let lanes = setting.model.lanes.len();
    let learner = setting.feed.learner().unwrap();
    let split = 1 + rng.below(lanes as u64) as usize;
    let (mut names, widths) = (0, [split, lanes - split]);
    let mut writers: Vec<(u64, Writer)> = Vec::new();
    let intake = setting.feed.intake().unwrap();
    let mut seat = |width: usize| {
        names += 1;
        (names, intake.writer(width).unwrap())
    };
    widths.into_iter().filter(|&width| width > 0).for_each(|width| writers.push(seat(width)));
    for round in 0..3 {
        for attempt in 0..rng.below(90) {
            let place = rng.below(writers.len() as u64) as usize;
            let (name, writer) = &mut writers[place];
            let range = writer.lanes();
            match rng.below(100) {
                0..3 => {
                    let lane = rng.below(range.len() as u64) as usize;
                    writer.abandon(lane).unwrap();
                    setting.model.cut(range.start + lane..range.start + lane + 1);
                }
                3..5 => {
                    let width = range.len();
                    drop(writers.remove(place));
                    writers.insert(place, seat(width));
                    setting.model.cut(range);
                }
                5 => {
                    setting.feed.clear().unwrap();
                    setting.model.clear();
                }
                6..10 if range.len() == 1 => {
                    episode(&mut rng, &mut setting, writer, *name, (round * 1000 + attempt) << 8);
                }
                _ => commit(&mut rng, &mut setting, writer, *name, (round * 1000 + attempt) << 8),
            }
        }
        let items = setting.model.items();
        let metrics = setting.feed.metrics();
        assert_eq!(metrics.stored_samples, items.len(), "{:?}", setting.rules);
        if items.is_empty() {
            continue;
        }
        // Batches that were selected before, and the pass that they began.
        pass(&setting, &learner, false);
        pass(&setting, &learner, false);
        assert_eq!(pass(&setting, &learner, true), items, "seed {seed}, {:?}", setting.rules);
        if seed.is_multiple_of(3) {
            restored(&setting, &items, seed);
        }
    }
}

#[test]
fn samples_and_their_values_are_those_of_the_model() {
    let _watchdog = Watchdog::new("replay model", Duration::from_secs(300));
    let seeds = std::env::var("PINRING_REPLAY_SEEDS").map_or(150, |seeds| seeds.parse().expect("a number"));
    for seed in 0..seeds {
        let ran = std::panic::catch_unwind(|| run(seed));
        if let Err(panic) = ran {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
