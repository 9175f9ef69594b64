//! A model of a step store: lanes as plain lists, samples by their definition, and what is evicted when.
#![allow(dead_code)]

use super::data::*;
use pinring::*;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

/// A column that a test asked for: its window, and the handle of the leaf's type.
#[derive(Clone, Debug)]
pub struct Asked {
    pub leaf: Which,
    pub next: bool,
    pub offsets: Range<i64>,
    pub repeat: bool,
    pub handle: Handle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Obs,
    Small,
    Action,
    Logits,
}

#[derive(Clone, Copy, Debug)]
pub enum Handle {
    Obs(Column<u64>),
    Small(Column<u8>),
    Action(Column<i64>),
    Logits(Column<f32>),
}

impl Which {
    pub fn is_observation(self) -> bool {
        matches!(self, Which::Obs | Which::Small)
    }
    /// The leaf's values of the step `id`, as numbers that tell them apart; `None` is padding.
    pub fn values(self, id: Option<u64>) -> Vec<u64> {
        match (self, id) {
            (Which::Obs, id) => id.map_or(vec![0; 2], |id| obs_of(id).to_vec()),
            (Which::Small, id) => id.map_or(vec![0; 3], |id| small_of(id).map(u64::from).to_vec()),
            (Which::Action, id) => vec![id.map_or(0, |id| action_of(id) as u64)],
            (Which::Logits, id) => id.map_or(vec![0; 6], |id| logits_of(id).map(|v| u64::from(v.to_bits())).to_vec()),
        }
    }
}

/// What kind of sample the model is of.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// 0: a sequence.
    pub n: usize,
    pub len: usize,
    pub stride: usize,
    pub pad_short: bool,
    pub within: bool,
    pub time_major: bool,
    pub gamma: f64,
}

impl Rules {
    pub fn is_transition(&self) -> bool {
        self.n > 0
    }
    /// Steps up to the bootstrap step.
    pub fn span(&self) -> usize {
        if self.is_transition() { self.n } else { self.len }
    }
}

/// One record of a lane.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    pub id: u64,
    pub step: u64,
    pub last: bool,
    pub end: Option<End>,
    pub masked: bool,
    pub first: bool,
    pub version: u64,
    /// Where its run begins.
    pub run: usize,
}

#[derive(Clone, Debug, Default)]
pub struct Lane {
    pub records: Vec<Record>,
    pub steps: u64,
    pub run: usize,
    /// The next step's episode has none before it.
    pub fresh: bool,
    pub live: usize,
}

/// The store by its definition. `chunk` records are evicted together.
#[derive(Debug)]
pub struct Model {
    pub rules: Rules,
    pub asked: Vec<Asked>,
    pub capacity: usize,
    pub chunk: usize,
    pub lanes: Vec<Lane>,
    closed: VecDeque<(usize, usize)>,
    held: usize,
}

impl Model {
    pub fn new(rules: Rules, asked: Vec<Asked>, capacity: usize, lanes: usize) -> Model {
        let chunk = (capacity / (4 * lanes)).clamp(1, 64);
        let lanes = vec![Lane { fresh: true, ..Lane::default() }; lanes];
        Model { rules, asked, capacity, chunk, lanes, closed: VecDeque::new(), held: 0 }
    }

    /// Records that windows reach in front of the first step, and behind it.
    pub fn reach(&self) -> (i64, i64) {
        let span = self.rules.span() as i64;
        let mut back = 0;
        let mut forward = if self.rules.is_transition() { span } else { span.max(self.rules.len as i64) };
        for asked in &self.asked {
            let base = if asked.next { span } else { 0 };
            forward = forward.max(base + asked.offsets.end - 1);
            back = back.max(-asked.offsets.start - i64::from(asked.next));
        }
        (back, forward)
    }

    /// All lanes of a writer made a step: id, end, whether it is masked, whether a final observation was put.
    pub fn commit(&mut self, first: usize, steps: &[(u64, Option<End>, bool)], version: u64) {
        for (index, &(id, end, masked)) in steps.iter().enumerate() {
            let lane = &mut self.lanes[first + index];
            let outside = masked && lane.fresh;
            if outside && self.rules.within {
                continue;
            }
            let step = lane.steps;
            lane.steps += 1;
            let is_first = lane.fresh && !masked;
            if !outside {
                lane.fresh = end.is_some();
            }
            let run = lane.run;
            lane.records.push(Record { id, step, last: false, end, masked, first: is_first, version, run });
            self.added(first + index);
        }
        for (index, &(id, end, masked)) in steps.iter().enumerate() {
            let lane = &mut self.lanes[first + index];
            let stored = lane.records.last().is_some_and(|record| record.id == id);
            if self.rules.within && end.is_some() && stored {
                let (step, run) = (lane.steps, lane.run);
                let (id, end) = (final_of(id), None);
                lane.records.push(Record { id, step, last: true, end, masked, first: false, version: 0, run });
                lane.run = lane.records.len();
                self.added(first + index);
            }
        }
    }

    /// The lanes' episodes are given up.
    pub fn cut(&mut self, lanes: Range<usize>) {
        for lane in &mut self.lanes[lanes] {
            (lane.run, lane.fresh) = (lane.records.len(), true);
        }
    }

    pub fn clear(&mut self) {
        self.held -= self.closed.len() * self.chunk;
        self.closed.clear();
        for lane in &mut self.lanes {
            lane.live = lane.records.len();
        }
    }

    fn added(&mut self, lane: usize) {
        self.held += 1;
        let records = self.lanes[lane].records.len();
        if records.is_multiple_of(self.chunk) {
            self.closed.push_back((lane, records));
        }
        while let Some(&(lane, end)) = self.closed.front() {
            if self.held - self.chunk < self.capacity {
                break;
            }
            self.closed.pop_front();
            self.held -= self.chunk;
            self.lanes[lane].live = self.lanes[lane].live.max(end);
        }
    }

    /// Every sample that may be drawn now: lane, step.
    pub fn items(&self) -> BTreeSet<(usize, u64)> {
        let mut items = BTreeSet::new();
        for (index, lane) in self.lanes.iter().enumerate() {
            for at in (0..lane.records.len()).filter(|&at| self.is_item(lane, at)) {
                items.insert((index, lane.records[at].step));
            }
        }
        items
    }

    /// The positions of a run, and whether it ended with a final observation.
    fn run(&self, lane: &Lane, at: usize) -> (Range<usize>, bool) {
        let start = lane.records[at].run;
        let end = at + lane.records[at..].iter().take_while(|record| record.run == start).count();
        (start..end, lane.records[end - 1].last)
    }

    fn is_item(&self, lane: &Lane, at: usize) -> bool {
        let (rules, record) = (&self.rules, lane.records[at]);
        if record.last || (rules.is_transition() && record.masked) {
            return false;
        }
        let (run, ended) = self.run(lane, at);
        let (back, forward) = self.reach();
        let known = at as i64 + forward < run.end as i64 - i64::from(ended);
        let short = ended && (rules.is_transition() || rules.pad_short || at + rules.len < run.end);
        let stride = if rules.is_transition() { 1 } else { rules.stride };
        let reached = (run.start as i64).max(at as i64 - back);
        (known || short) && (at - run.start).is_multiple_of(stride) && reached >= lane.live as i64
    }

    /// Compares every column of row `row`.
    pub fn check(&self, batch: &Batch, row: usize, derived: &Derived) {
        let lane_id = batch.lanes().nth(row).unwrap();
        let step = batch.first_steps().nth(row).unwrap();
        let lane = &self.lanes[lane_id];
        let at = lane.records.iter().position(|r| r.step == step && !r.last).expect("a step that was written");
        let (run, ended) = self.run(lane, at);
        let last_step = run.end as i64 - 1 - i64::from(ended);
        let real = last_step - at as i64 + 1;
        let span = if ended { real.min(self.rules.span() as i64) } else { self.rules.span() as i64 };
        let context = format!("lane {lane_id}, step {step}, run {run:?}, {:?}", self.rules);
        for asked in &self.asked {
            let base = at as i64 + if asked.next { span } else { 0 };
            let highest = if asked.leaf.is_observation() { run.end as i64 - 1 } else { last_step };
            for (place, offset) in asked.offsets.clone().enumerate() {
                let wanted = base + offset;
                let inside = wanted.clamp(run.start as i64, highest);
                let id = (inside == wanted || asked.repeat).then(|| lane.records[inside as usize].id);
                let got = read_value(batch, asked, row, place, self.rules.time_major);
                assert_eq!(got, asked.leaf.values(id), "{asked:?}, value {place} of {context}");
            }
        }
        let steps: Vec<Record> = lane.records[at..=last_step as usize].to_vec();
        self.check_derived(batch, row, derived, &steps, (span as usize, ended && real as usize <= self.rules.span()));
    }

    fn check_derived(&self, batch: &Batch, row: usize, d: &Derived, steps: &[Record], (span, ended): (usize, bool)) {
        let rules = &self.rules;
        assert_eq!(batch.slice(d.weight)[row], 1.0);
        if let (true, Some((ret, discount))) = (rules.is_transition(), d.sums) {
            let powers: Vec<f32> = (0..=rules.n).map(|k| rules.gamma.powi(k as i32) as f32).collect();
            let mut total = reward_of(steps[0].id);
            for k in 1..span {
                total += powers[k] * reward_of(steps[k].id);
            }
            assert_eq!(batch.slice(ret)[row].to_bits(), total.to_bits(), "bit for bit");
            let end = if ended { steps[span - 1].end } else { None };
            let expected = if end == Some(End::Terminated) { 0.0 } else { powers[span] };
            assert_eq!(batch.slice(discount)[row], expected);
            assert_eq!(batch.slice(d.terminated)[row], end == Some(End::Terminated));
            assert_eq!(batch.slice(d.truncated)[row], end == Some(End::Truncated));
            assert_eq!((batch.slice(d.mask)[row], batch.slice(d.is_first)[row]), (!steps[0].masked, steps[0].first));
            assert_eq!(batch.slice(d.version)[row], steps[0].version as i64);
            return;
        }
        let (rows, len) = (batch.rows(), rules.len);
        let at = |step: usize, of: usize| if rules.time_major { step * rows + row } else { row * of + step };
        assert_eq!(batch.lengths().nth(row).unwrap(), steps.len().min(len));
        for step in 0..len {
            let known = steps.get(step);
            let ended = |end| known.is_some_and(|s| s.end == Some(end));
            assert_eq!(batch.slice(d.terminated)[at(step, len)], ended(End::Terminated), "terminated {step}");
            assert_eq!(batch.slice(d.truncated)[at(step, len)], ended(End::Truncated), "truncated {step}");
            assert_eq!(batch.slice(d.mask)[at(step, len)], known.is_some_and(|s| !s.masked), "mask {step}");
            assert_eq!(batch.slice(d.version)[at(step, len)], known.map_or(0, |s| s.version as i64), "version {step}");
        }
        for step in 0..=len {
            let first = steps.get(step).is_some_and(|s| s.first);
            assert_eq!(batch.slice(d.is_first)[at(step, len + 1)], first, "is_first {step}");
        }
    }
}

/// The derived columns of a replayed sample.
#[derive(Clone, Copy, Debug)]
pub struct Derived {
    pub terminated: Column<bool>,
    pub truncated: Column<bool>,
    pub is_first: Column<bool>,
    pub mask: Column<bool>,
    pub version: Column<i64>,
    pub weight: Column<f32>,
    pub sums: Option<(Column<f32>, Column<f32>)>,
}

impl Derived {
    pub fn ask(sample: &mut Sample, leaves: &Leaves, rules: &Rules) -> Derived {
        Derived {
            terminated: sample.terminated(),
            truncated: sample.truncated(),
            is_first: sample.is_first(),
            mask: sample.mask(),
            version: sample.policy_version(),
            weight: sample.weight(),
            sums: rules.is_transition().then(|| (sample.n_step_return(leaves.reward), sample.discount())),
        }
    }
}

fn read_value(batch: &Batch, asked: &Asked, row: usize, place: usize, time_major: bool) -> Vec<u64> {
    let (rows, len) = (batch.rows(), (asked.offsets.end - asked.offsets.start) as usize);
    let at = if time_major { place * rows + row } else { row * len + place };
    fn items<T: Element>(batch: &Batch, column: Column<T>, at: usize, n: usize) -> Vec<T> {
        batch.slice(column)[at * n..][..n].to_vec()
    }
    match asked.handle {
        Handle::Obs(column) => items(batch, column, at, 2),
        Handle::Small(column) => items(batch, column, at, 3).into_iter().map(u64::from).collect(),
        Handle::Action(column) => items(batch, column, at, 1).into_iter().map(|v| v as u64).collect(),
        Handle::Logits(column) => items(batch, column, at, 6).into_iter().map(|v| u64::from(v.to_bits())).collect(),
    }
}

/// Asks a sample for random windows.
pub fn ask(rng: &mut Rng, sample: &mut Sample, leaves: &Leaves, rules: &Rules) -> Vec<Asked> {
    let mut asked = Vec::new();
    for _ in 0..1 + rng.below(5) {
        let leaf = [Which::Obs, Which::Small, Which::Action, Which::Logits][rng.below(4) as usize];
        let (next, repeat) = (rng.percent(40), rng.percent(50));
        let from = rng.below(6) as i64 - 4;
        let verb = rng.below(3);
        macro_rules! declare {
            ($leaf:expr, $handle:ident) => {{
                let pad = if repeat { Pad::Repeat } else { Pad::Zeros };
                let (column, next, offsets, repeat) = match (verb, next) {
                    (0, true) => (sample.next($leaf), true, 0..1, false),
                    (0, false) => (sample.at($leaf, from as i32), false, from..from + 1, false),
                    (1, _) => {
                        let observation = leaf.is_observation() && !rules.is_transition();
                        let len = if rules.is_transition() { 1 } else { rules.len as i64 + i64::from(observation) };
                        (sample.all($leaf), false, 0..len, false)
                    }
                    (_, next) => {
                        let to = from + 1 + rng.below(5) as i64;
                        let range = from as i32..to as i32;
                        let column = match next {
                            true => sample.next_window($leaf, range, pad),
                            false => sample.window($leaf, range, pad),
                        };
                        (column, next, from..to, repeat)
                    }
                };
                asked.push(Asked { leaf, next, offsets, repeat, handle: Handle::$handle(column) });
            }};
        }
        match leaf {
            Which::Obs => declare!(leaves.obs, Obs),
            Which::Small => declare!(leaves.small, Small),
            Which::Action => declare!(leaves.action, Action),
            Which::Logits => declare!(leaves.logits, Logits),
        }
    }
    asked
}
