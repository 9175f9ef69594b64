//! A tree over one number an item, of fan-out 8: sums for selection by mass, or minima.
//!
//! Owns the arithmetic. Every inner number is a function of the items' numbers alone, recomputed from the eight below
//! it and never patched by differences, so that rounding does not add up however many updates there are. What it does not
//! do: know priorities or exponents.

/// Numbers of a node: one cache line.
const FAN: usize = 8;

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Node([f64; FAN]);

/// What a node passes up.
pub(super) trait Up {
    /// That of an item that is not there.
    const NOTHING: f64;
    fn up(numbers: &[f64; FAN]) -> f64;
}

/// Sums, in the order of the items.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sum;

impl Up for Sum {
    const NOTHING: f64 = 0.0;
    #[inline]
    fn up(numbers: &[f64; FAN]) -> f64 {
        numbers.iter().sum()
    }
}

/// Minima.
#[derive(Clone, Copy, Debug)]
pub(super) struct Min;

impl Up for Min {
    const NOTHING: f64 = f64::INFINITY;
    #[inline]
    fn up(numbers: &[f64; FAN]) -> f64 {
        numbers.iter().copied().fold(f64::INFINITY, f64::min)
    }
}

/// The tree. Changes to items are noted, and carried up together, level by level, by [`settle`](Tree::settle).
#[derive(Clone, Debug)]
pub(super) struct Tree<U> {
    /// The lowest level first: eight items a node. The last level is the root alone.
    levels: Vec<Vec<Node>>,
    /// Nodes of the lowest level with changes that are not carried up yet; some more than once.
    changed: Vec<u32>,
    up: std::marker::PhantomData<fn() -> U>,
}

impl<U: Up> Tree<U> {
    /// A tree of so many items, none of them there.
    pub(super) fn new(items: usize) -> Tree<U> {
        let mut levels = Vec::new();
        let mut nodes = items;
        while nodes > 1 || levels.is_empty() {
            nodes = nodes.div_ceil(FAN).max(1);
            levels.push(vec![Node([U::NOTHING; FAN]); nodes]);
        }
        Tree { levels, changed: Vec::new(), up: std::marker::PhantomData }
    }

    /// Bytes of a tree of so many items.
    pub(super) fn bytes(items: usize) -> usize {
        let (mut nodes, mut all) = (items, 0_usize);
        while nodes > 1 || all == 0 {
            nodes = nodes.div_ceil(FAN).max(1);
            all = all.saturating_add(nodes);
        }
        all.saturating_mul(size_of::<Node>())
    }

    #[inline]
    pub(super) fn get(&self, item: u32) -> f64 {
        self.levels[0][item as usize / FAN].0[item as usize % FAN]
    }

    #[inline]
    pub(super) fn set(&mut self, item: u32, number: f64) {
        let node = item / FAN as u32;
        self.levels[0][node as usize].0[item as usize % FAN] = number;
        if self.changed.last() != Some(&node) {
            self.changed.push(node);
        }
    }

    /// How many noted changes wait.
    pub(super) fn waiting(&self) -> usize {
        self.changed.len()
    }

    /// Carries the noted changes up to the root. O(changes × levels), and never more than O(items).
    pub(super) fn settle(&mut self) {
        for level in 1..self.levels.len() {
            let (below, above) = self.levels.split_at_mut(level);
            let (below, above) = (&below[level - 1], &mut above[0]);
            let mut carry = |node: usize| above[node / FAN].0[node % FAN] = U::up(&below[node].0);
            if self.changed.len() < below.len() {
                for node in &mut self.changed {
                    carry(*node as usize);
                    *node /= FAN as u32;
                }
                self.changed.dedup();
            } else {
                // From here on every level is smaller than the list: all of it is no more work.
                (0..below.len()).for_each(carry);
                self.changed.truncate(above.len());
            }
        }
        self.changed.clear();
    }

    /// The number of all items together. Changes are settled.
    pub(super) fn root(&self) -> f64 {
        debug_assert!(self.changed.is_empty(), "settled first");
        self.levels.last().map_or(U::NOTHING, |root| U::up(&root[0].0))
    }
}

impl Tree<Sum> {
    /// For each number in `at` the item within whose mass it falls, masses being laid end to end in the order of the
    /// items. Numbers are from 0 to [`root`](Tree::root), which must be above 0 and settled. All descend together, a level
    /// at a time, so that the waits for memory overlap. An item without mass is never found.
    pub(super) fn find(&self, at: &mut [(u32, f64)]) {
        debug_assert!(self.changed.is_empty(), "settled first");
        for (node, _) in at.iter_mut() {
            *node = 0;
        }
        for level in self.levels.iter().rev() {
            // Nothing but loads: many more of them wait for memory at once than with the search between them.
            let touched = at.iter().fold(0, |touched, &(node, _)| touched ^ level[node as usize].0[0].to_bits());
            std::hint::black_box(touched);
            for (node, rest) in at.iter_mut() {
                let (child, before) = child(&level[*node as usize].0, *rest);
                *node = *node * FAN as u32 + child;
                *rest -= before;
            }
        }
    }
}

/// Which of eight masses, laid end to end, a number falls into, and the sum of those before it.
#[inline]
fn child(masses: &[f64; FAN], at: f64) -> (u32, f64) {
    // The sums before each child, and that of all.
    let mut before = [0.0; FAN + 1];
    for (child, mass) in masses.iter().enumerate() {
        before[child + 1] = before[child] + mass;
    }
    // A child without mass ends where it begins, and is passed over with the one before it.
    let child = before[1..].iter().map(|&end| usize::from(end <= at)).sum::<usize>();
    if child < FAN { (child as u32, before[child]) } else { last(masses) }
}

/// The last child that has mass: what remains of a number was rounded up to the node's sum, or beyond.
#[cold]
fn last(masses: &[f64; FAN]) -> (u32, f64) {
    let child = masses.iter().rposition(|&mass| mass > 0.0).unwrap_or(FAN - 1);
    (child as u32, masses[..child].iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tree<U: Up>(numbers: &[f64]) -> Tree<U> {
        let mut tree = Tree::new(numbers.len());
        (0..).zip(numbers).for_each(|(item, &number)| tree.set(item, number));
        tree.settle();
        tree
    }

    fn found(tree: &Tree<Sum>, at: f64) -> u32 {
        let mut rows = [(0, at)];
        tree.find(&mut rows);
        rows[0].0
    }

    /// Every inner number, level by level.
    fn inner<U: Up>(tree: &Tree<U>) -> Vec<u64> {
        tree.levels.iter().flatten().flat_map(|node| node.0.map(f64::to_bits)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whole masses have exact sums: the tree finds what counting finds.
        #[test]
        fn a_number_falls_where_counting_says(masses in prop::collection::vec(0u32..4, 1..700), at in 0.0..1.0f64) {
            let numbers: Vec<f64> = masses.iter().map(|&mass| f64::from(mass)).collect();
            let tree = tree::<Sum>(&numbers);
            let total: f64 = numbers.iter().sum();
            prop_assert_eq!(tree.root(), total);
            prop_assume!(total > 0.0);
            for at in [at * total, 0.0, (at * total).floor(), total - 1.0] {
                let mut left = at;
                let expected = numbers.iter().position(|mass| { left -= mass; left < 0.0 });
                prop_assert_eq!(Some(found(&tree, at) as usize), expected);
            }
        }

        /// In whatever order and groups changes come, the tree is that of the numbers alone, bit for bit.
        #[test]
        fn the_tree_is_a_function_of_its_numbers(
            items in 1usize..700,
            changes in prop::collection::vec((any::<u32>(), -300.0..300.0f64, prop::bool::weighted(0.1)), 0..2000),
        ) {
            let mut numbers = vec![0.0; items];
            let mut kept = Tree::<Sum>::new(items);
            let mut minima = Tree::<Min>::new(items);
            for (item, exponent, settle) in changes {
                let item = item % items as u32;
                numbers[item as usize] = exponent.exp2();
                kept.set(item, exponent.exp2());
                minima.set(item, exponent.exp2());
                if settle {
                    kept.settle();
                    minima.settle();
                }
            }
            kept.settle();
            minima.settle();
            prop_assert_eq!(inner(&kept), inner(&tree::<Sum>(&numbers)));
            let least = numbers.iter().copied().filter(|&number| number > 0.0).fold(f64::INFINITY, f64::min);
            prop_assert_eq!(minima.root(), least);
        }

        /// At the edges of what numbers can be, and with numbers rounded up to the sum: never an item without mass.
        #[test]
        fn an_item_without_mass_is_never_found(
            masses in prop::collection::vec((0u8..3, -1074.0..1000.0f64), 1..600),
            at in 0.0..1.0f64,
        ) {
            let numbers: Vec<f64> =
                masses.iter().map(|&(is, exponent)| if is == 0 { exponent.exp2() } else { 0.0 }).collect();
            let tree = tree::<Sum>(&numbers);
            let total = tree.root();
            prop_assume!(total > 0.0);
            for at in [at * total, 0.0, f64::MIN_POSITIVE, total.next_down(), total, total * 1.000001] {
                let item = found(&tree, at) as usize;
                prop_assert!(numbers[item] > 0.0, "{} falls into item {} without mass", at, item);
            }
        }
    }

    #[test]
    fn a_tree_of_any_size_has_one_root() {
        for items in [0, 1, 7, 8, 9, 64, 65, 512, 513] {
            let tree = Tree::<Sum>::new(items);
            assert_eq!(tree.levels.last().map(Vec::len), Some(1), "{items}");
            assert!(tree.levels[0].len() * FAN >= items);
            assert_eq!(tree.root(), 0.0);
        }
    }

    #[test]
    fn a_number_rounded_beyond_the_sum_finds_the_last_item_with_mass() {
        let mut numbers = [0.0; 100];
        (numbers[3], numbers[40]) = (1.0, 2.0);
        let tree = tree::<Sum>(&numbers);
        assert_eq!([0.0, 0.9, 1.0, 2.9, 3.0, 4.0].map(|at| found(&tree, at)), [3, 3, 40, 40, 40, 40]);
    }
}
