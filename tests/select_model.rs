//! Samplers against the naive ones that a list makes, over random inserts, removals, updates and selections; and what is
//! saved and restored goes on as if nothing had been.

use pinring::{
    Draws, Fifo, Lifo, MaxTimes, Normalize, Pass, Prioritized, Sampler, SamplerError, Selected, Uniform,
    WithoutReplacement,
};
use proptest::prelude::*;

const ITEMS: u32 = 90;

#[derive(Clone, Debug)]
enum Act {
    Insert(u32, Option<f32>),
    Remove(u32),
    Update(Vec<(u32, f32)>),
    Select(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let priority = prop_oneof![Just(0.0f32), Just(-0.0), 0.01..100.0f32, Just(1e-40), Just(1e30)];
    let act = prop_oneof![
        4 => (0..ITEMS, prop::option::of(priority.clone())).prop_map(|(item, priority)| Act::Insert(item, priority)),
        2 => (0..ITEMS).prop_map(Act::Remove),
        2 => prop::collection::vec((0..ITEMS, priority), 0..12).prop_map(Act::Update),
        3 => (0usize..20).prop_map(Act::Select),
    ];
    prop::collection::vec(act, 1..150)
}

/// The items that are there, oldest first, each with its priority, its selections, and whether this pass had it.
#[derive(Clone, Debug, Default)]
struct Naive {
    items: Vec<Item>,
    largest: f32,
}

#[derive(Clone, Copy, Debug)]
struct Item {
    item: u32,
    priority: f32,
    times: u32,
    seen: bool,
}

impl Naive {
    fn new() -> Naive {
        Naive { largest: 1.0, ..Naive::default() }
    }
    fn get(&mut self, item: u32) -> Option<&mut Item> {
        self.items.iter_mut().find(|known| known.item == item)
    }
    fn set(&mut self, item: u32, priority: f32) {
        self.largest = self.largest.max(priority);
        if let Some(known) = self.get(item) {
            known.priority = priority;
        }
    }
    fn insert(&mut self, item: u32, priority: Option<f32>) {
        if self.get(item).is_none() {
            self.items.push(Item { item, priority: 0.0, times: 0, seen: false });
        }
        self.set(item, priority.unwrap_or(self.largest));
    }
    fn remove(&mut self, item: u32) {
        self.items.retain(|known| known.item != item);
    }
    fn update(&mut self, priorities: &[(u32, f32)]) {
        for &(item, priority) in priorities {
            if self.get(item).is_some() {
                self.set(item, priority);
            }
        }
    }
}

/// Whether a selection of so many rows is one that the naive sampler could have made.
type Check<'a> = dyn FnMut(&mut Naive, usize, &[Selected], Pass) -> Result<(), TestCaseError> + 'a;

/// Runs the acts on both, and lets `check` judge each selection.
fn run(sampler: &mut dyn Sampler, acts: &[Act], check: &mut Check<'_>) -> Result<(), TestCaseError> {
    sampler.begin(ITEMS).unwrap();
    let (mut naive, mut draws) = (Naive::new(), Draws::new(1, 0));
    for act in acts {
        match act {
            Act::Insert(item, priority) => {
                sampler.insert(*item, *priority).unwrap();
                naive.insert(*item, *priority);
            }
            Act::Remove(item) => {
                sampler.remove(*item);
                naive.remove(*item);
            }
            Act::Update(priorities) => {
                sampler.update(priorities).unwrap();
                naive.update(priorities);
            }
            Act::Select(rows) => {
                let mut selected = Vec::new();
                let pass = sampler.select(*rows, &mut draws, &mut selected);
                check(&mut naive, *rows, &selected, pass)?;
            }
        }
        prop_assert_eq!(sampler.selectable(), naive.items.len());
    }
    Ok(())
}

fn items(selected: &[Selected]) -> Vec<u32> {
    selected.iter().map(|row| row.item).collect()
}

/// Every kind that is part of the crate.
fn all() -> Vec<Box<dyn Sampler>> {
    vec![
        Box::new(Uniform::new()),
        Box::new(WithoutReplacement::new()),
        Box::new(Prioritized::new(0.6, 0.4)),
        Box::new(Prioritized::new(1.0, 1.0).stratified(true).normalize(Normalize::Store)),
        Box::new(Fifo::new()),
        Box::new(Lifo::new()),
        Box::new(MaxTimes::new(Uniform::new(), 3)),
        Box::new(MaxTimes::new(Prioritized::new(0.5, 0.4), 2)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn uniform_selects_any_item_that_is_there(acts in acts()) {
        run(&mut Uniform::new(), &acts, &mut |naive, rows, selected, pass| {
            let there = naive.items.len();
            prop_assert_eq!(selected.len(), if there > 0 { rows } else { 0 });
            prop_assert_eq!(pass, Pass::GoesOn);
            for row in selected {
                prop_assert!(naive.get(row.item).is_some(), "{:?} is not there", row);
                prop_assert_eq!((row.probability, row.weight), (1.0 / there as f64, 1.0));
            }
            Ok(())
        })?;
    }

    #[test]
    fn without_replacement_a_pass_has_every_item_once(acts in acts()) {
        run(&mut WithoutReplacement::new(), &acts, &mut |naive, rows, selected, pass| {
            if naive.items.iter().all(|item| item.seen) {
                naive.items.iter_mut().for_each(|item| item.seen = false);
            }
            let left = naive.items.iter().filter(|item| !item.seen).count();
            prop_assert_eq!(selected.len(), rows.min(left));
            for row in selected {
                let item = naive.get(row.item);
                prop_assert!(item.as_ref().is_some_and(|item| !item.seen), "{:?} is not there, or had its turn", row);
                item.unwrap().seen = true;
            }
            prop_assert_eq!(pass == Pass::Ended, rows >= left && left > 0 && rows > 0);
            if pass == Pass::Ended {
                // What comes before the next selection is part of the next pass, with everything else.
                naive.items.iter_mut().for_each(|item| item.seen = false);
            }
            Ok(())
        })?;
    }

    /// Which item a number falls into is checked by the tree's own tests; here probabilities and weights are.
    #[test]
    fn prioritized_knows_priorities_probabilities_and_weights(
        acts in acts(),
        alpha in prop::sample::select(vec![0.0, 0.5, 0.6, 1.0, 2.0]),
        beta in prop::sample::select(vec![0.0, 0.4, 1.0]),
        by in prop::sample::select(vec![Normalize::Batch, Normalize::Store]),
        stratified: bool,
    ) {
        let mut sampler = Prioritized::new(alpha, beta).floor(1e-3).normalize(by).stratified(stratified);
        run(&mut sampler, &acts, &mut |naive, rows, selected, _| {
            prop_assert_eq!(selected.len(), if naive.items.is_empty() { 0 } else { rows });
            let mass = |priority: f32| f64::from(priority.max(1e-3)).powf(alpha);
            let total: f64 = naive.items.iter().map(|item| mass(item.priority)).sum();
            let probability = |priority| mass(priority) / total;
            let there = naive.items.len() as f64;
            let weight = |probability: f64| (there * probability).powf(-beta);
            let of_the_batch = selected.iter().map(|row| weight(row.probability)).fold(0.0, f64::max);
            let of_the_store = naive.items.iter().map(|item| weight(probability(item.priority))).fold(0.0, f64::max);
            let largest = if by == Normalize::Batch { of_the_batch } else { of_the_store };
            for row in selected {
                let item = naive.get(row.item);
                prop_assert!(item.is_some(), "{:?} is not there", row);
                let expected = probability(item.unwrap().priority);
                prop_assert!((row.probability / expected - 1.0).abs() < 1e-9, "{:?}, and not {}", row, expected);
                let weight = weight(row.probability) / largest;
                prop_assert!((f64::from(row.weight) - weight).abs() < 1e-5 * weight + 1e-30, "{:?}, and not {}", row, weight);
            }
            Ok(())
        })?;
    }

    #[test]
    fn by_age_is_the_order_of_insertion(acts in acts()) {
        run(&mut Fifo::new(), &acts, &mut |naive, rows, selected, _| {
            let oldest: Vec<u32> = naive.items.iter().map(|item| item.item).take(rows).collect();
            prop_assert_eq!(items(selected), oldest);
            Ok(())
        })?;
        run(&mut Lifo::new(), &acts, &mut |naive, rows, selected, _| {
            let newest: Vec<u32> = naive.items.iter().rev().map(|item| item.item).take(rows).collect();
            prop_assert_eq!(items(selected), newest);
            Ok(())
        })?;
    }

    #[test]
    fn an_item_is_selected_at_most_so_many_times_and_batches_are_as_full_as_that_allows(
        acts in acts(),
        times in 1u32..5,
        prioritized: bool,
    ) {
        let mut uniform = MaxTimes::new(Uniform::new(), times);
        let mut by_priority = MaxTimes::new(Prioritized::new(0.6, 0.4), times);
        let sampler: &mut dyn Sampler = if prioritized { &mut by_priority } else { &mut uniform };
        run(sampler, &acts, &mut |naive, rows, selected, _| {
            let left: u32 = naive.items.iter().map(|item| times - item.times).sum();
            prop_assert_eq!(selected.len(), rows.min(left as usize));
            for row in selected {
                let item = naive.get(row.item);
                prop_assert!(item.is_some(), "{:?} is not there, or had its times", row);
                let item = item.unwrap();
                item.times += 1;
                if item.times == times {
                    naive.remove(row.item);
                }
            }
            Ok(())
        })?;
    }

    /// Restored into a new one, a sampler selects the same from then on; and cut anywhere, what was saved is refused and
    /// changes nothing.
    #[test]
    fn a_restored_sampler_goes_on_as_the_saved_one(before in acts(), after in acts(), cut in 0.0..1.0f64) {
        for (mut saved, mut restored) in all().into_iter().zip(all()) {
            run(&mut *saved, &before, &mut |_, _, _, _| Ok(())).ok();
            let bytes = saved.save();
            restored.begin(ITEMS).unwrap();
            restored.insert(5, None).unwrap();
            let untouched = restored.save();
            let cut = (cut * bytes.len() as f64) as usize;
            prop_assert!(restored.restore(&bytes[..cut]).is_err());
            prop_assert!(restored.restore(&[&bytes[..], &[0]].concat()).is_err());
            prop_assert_eq!(restored.save(), untouched);
            prop_assert!(restored.restore(&bytes).is_ok());
            let (mut a, mut b) = (Draws::new(2, 0), Draws::new(2, 0));
            for act in &after {
                let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
                match act {
                    Act::Insert(item, priority) => {
                        saved.insert(*item, *priority).unwrap();
                        restored.insert(*item, *priority).unwrap();
                    }
                    Act::Remove(item) => {
                        saved.remove(*item);
                        restored.remove(*item);
                    }
                    Act::Update(priorities) => {
                        saved.update(priorities).unwrap();
                        restored.update(priorities).unwrap();
                    }
                    Act::Select(rows) => {
                        let passes = (saved.select(*rows, &mut a, &mut of_a), restored.select(*rows, &mut b, &mut of_b));
                        prop_assert_eq!(passes.0, passes.1);
                    }
                }
                prop_assert_eq!(of_a, of_b, "{:?}", saved);
                prop_assert_eq!(saved.selectable(), restored.selectable());
            }
        }
    }
}

#[test]
fn another_samplers_state_or_that_of_another_size_is_refused() {
    let samplers = all();
    for (i, mut into) in all().into_iter().enumerate() {
        for (j, from) in samplers.iter().enumerate() {
            into.begin(ITEMS).unwrap();
            // The two prioritized ones differ in settings alone, and settings are not saved.
            let alike = i == j || (i.min(j), i.max(j)) == (2, 3);
            let mut other = all().remove(j);
            other.begin(ITEMS).unwrap();
            assert_eq!(into.restore(&other.save()).is_ok(), alike, "{into:?} from {from:?}");
            other.begin(ITEMS + 1).unwrap();
            let error = into.restore(&other.save()).unwrap_err();
            assert!(
                error.to_string().contains(if alike { "the store had another size" } else { "another sampler's" })
                    || (i, j) == (6, 7)
                    || (i, j) == (7, 6),
                "{error}"
            );
            assert!(matches!(error, SamplerError::Saved { .. }));
        }
    }
}

#[test]
fn a_lower_limit_than_the_saved_one_counts_at_once() {
    let mut saved = MaxTimes::new(Fifo::new(), 5);
    saved.begin(3).unwrap();
    (0..3).for_each(|item| saved.insert(item, None).unwrap());
    saved.select(1, &mut Draws::new(0, 0), &mut Vec::new());
    saved.select(1, &mut Draws::new(0, 0), &mut Vec::new());
    let mut restored = MaxTimes::new(Fifo::new(), 2);
    restored.begin(3).unwrap();
    restored.restore(&saved.save()).unwrap();
    assert_eq!(restored.selectable(), 2);
    assert_eq!(restored.most_times(), Some(2));
    assert_eq!(MaxTimes::new(Fifo::new(), 0).begin(3), Err(SamplerError::NoTimes));
    assert_eq!(restored.set_beta(0.5), Err(SamplerError::NoBeta));
}
