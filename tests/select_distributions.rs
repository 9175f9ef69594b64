//! What samplers draw is distributed as they say: counted, with fixed seeds, against chi-square.
//!
//! A statistic of d degrees of freedom has mean d and variance 2 d. Five deviations above the mean is less likely than one
//! in ten thousand for every d used here; the seeds are fixed, so a test passes always or never.

use pinring::{
    Draws, Fifo, Lifo, MaxTimes, Normalize, Pass, Prioritized, Sampler, Selected, Uniform, WithoutReplacement,
};

fn begun<S: Sampler>(mut sampler: S, priorities: &[f32]) -> S {
    sampler.begin(priorities.len() as u32).unwrap();
    for (item, &priority) in (0..).zip(priorities) {
        sampler.insert(item, Some(priority)).unwrap();
    }
    sampler
}

fn select(sampler: &mut impl Sampler, rows: usize, draws: &mut Draws) -> Vec<Selected> {
    let mut selected = Vec::new();
    sampler.select(rows, draws, &mut selected);
    selected
}

/// Whether the counts are those of independent draws with these probabilities. Only likely enough outcomes count.
fn fits(counts: &[u64], probabilities: &[f64]) {
    let draws: u64 = counts.iter().sum();
    let (mut statistic, mut outcomes) = (0.0, 0u32);
    for (item, (&count, &probability)) in counts.iter().zip(probabilities).enumerate() {
        let expected = probability * draws as f64;
        if probability == 0.0 {
            assert_eq!(count, 0, "item {item} has no mass");
        } else if expected >= 5.0 {
            statistic += (count as f64 - expected).powi(2) / expected;
            outcomes += 1;
        }
    }
    let freedom = f64::from(outcomes - 1);
    let most = freedom + 5.0 * (2.0 * freedom).sqrt();
    assert!(statistic < most, "chi-square {statistic:.1} with {freedom} degrees of freedom, at most {most:.1}");
}

/// Counts the items of many batches, and checks that every row says its probability.
fn counts(sampler: &mut impl Sampler, probabilities: &[f64], batches: usize, rows: usize, seed: u64) -> Vec<u64> {
    let mut draws = Draws::new(seed, 0);
    let mut counts = vec![0; probabilities.len()];
    for _ in 0..batches {
        let selected = select(sampler, rows, &mut draws);
        assert_eq!(selected.len(), rows);
        for row in selected {
            counts[row.item as usize] += 1;
            let expected = probabilities[row.item as usize];
            assert!((row.probability - expected).abs() <= 1e-12 * expected, "{row:?}, and not {expected}");
        }
    }
    counts
}

/// The test itself tells an even die from a loaded one.
#[test]
#[should_panic(expected = "chi-square")]
fn counts_of_a_loaded_die_do_not_fit_an_even_one() {
    fits(&[10_000, 10_000, 10_000, 10_000, 10_000, 10_700], &[1.0 / 6.0; 6]);
}

#[test]
fn uniform_draws_every_item_as_often() {
    for items in [1usize, 2, 10, 1000] {
        let mut uniform = begun(Uniform::new(), &vec![1.0; items]);
        let even = vec![1.0 / items as f64; items];
        let counts = counts(&mut uniform, &even, 400, 256, 1);
        if items > 1 {
            fits(&counts, &even);
        }
    }
}

#[test]
fn uniform_stays_even_after_removals_in_any_order() {
    let mut uniform = begun(Uniform::new(), &[1.0; 100]);
    for item in (0..100).filter(|item| item % 7 < 3).chain([99, 0, 98]) {
        uniform.remove(item);
    }
    let left: Vec<u32> = (0..98).filter(|item| item % 7 >= 3).collect();
    assert_eq!(uniform.selectable(), left.len());
    let mut even = vec![0.0; 100];
    left.iter().for_each(|&item| even[item as usize] = 1.0 / left.len() as f64);
    fits(&counts(&mut uniform, &even, 200, 256, 2), &even);
}

/// Neighbours in a batch are independent: pairs are as even as items.
#[test]
fn uniform_draws_pairs_as_often() {
    let mut uniform = begun(Uniform::new(), &[1.0; 8]);
    let mut pairs = [0u64; 64];
    let selected = select(&mut uniform, 128_000, &mut Draws::new(3, 0));
    for pair in selected.chunks_exact(2) {
        pairs[(pair[0].item * 8 + pair[1].item) as usize] += 1;
    }
    fits(&pairs, &[1.0 / 64.0; 64]);
}

#[test]
fn a_pass_without_replacement_is_every_order_as_often() {
    let mut sampler = begun(WithoutReplacement::new(), &[1.0; 4]);
    let mut draws = Draws::new(4, 0);
    let mut orders = [0u64; 256];
    for _ in 0..24_000 {
        let selected = select(&mut sampler, 4, &mut draws);
        let probabilities: Vec<f64> = selected.iter().map(|row| row.probability).collect();
        assert_eq!(probabilities, [0.25, 1.0 / 3.0, 0.5, 1.0]);
        orders[selected.iter().fold(0, |order, row| order * 4 + row.item as usize)] += 1;
    }
    let seen: Vec<u64> = orders.into_iter().filter(|&count| count > 0).collect();
    assert_eq!(seen.len(), 24, "the orders of four items");
    fits(&seen, &[1.0 / 24.0; 24]);
}

#[test]
fn a_pass_ends_with_a_short_batch_and_says_so() {
    let mut sampler = begun(WithoutReplacement::new(), &[1.0; 1000]);
    let mut draws = Draws::new(5, 0);
    for pass in 0..3 {
        let mut seen = vec![0; 1000];
        for rows in [300, 300, 300, 100] {
            let mut selected = Vec::new();
            let ended = sampler.select(300, &mut draws, &mut selected);
            assert_eq!(selected.len(), rows, "pass {pass}");
            assert_eq!(ended == Pass::Ended, rows == 100);
            selected.iter().for_each(|row| seen[row.item as usize] += 1);
        }
        assert_eq!(seen, [1; 1000]);
    }
    // One whose batches come out even ends with a full one.
    for batch in 0..20 {
        let mut selected = Vec::new();
        let ended = sampler.select(250, &mut draws, &mut selected);
        assert_eq!((selected.len(), ended == Pass::Ended), (250, batch % 4 == 3));
    }
}

fn proportional(priorities: &[f32], alpha: f64) -> Vec<f64> {
    let masses: Vec<f64> = priorities.iter().map(|&p| if p > 0.0 { f64::from(p).powf(alpha) } else { 0.0 }).collect();
    let total: f64 = masses.iter().sum();
    masses.iter().map(|mass| mass / total).collect()
}

#[test]
fn prioritized_draws_by_the_power_of_priorities_stratified_or_not() {
    let priorities: Vec<f32> = (0..300).map(|item| if item % 11 == 0 { 0.0 } else { (1 + item % 17) as f32 }).collect();
    for alpha in [0.0, 0.6, 1.0, 2.0] {
        for stratified in [false, true] {
            let sampler = Prioritized::new(alpha, 0.4).floor(0.0).stratified(stratified);
            let mut sampler = begun(sampler, &priorities);
            let expected = proportional(&priorities, alpha);
            fits(&counts(&mut sampler, &expected, 800, 256, 6), &expected);
        }
    }
}

/// By updates the same as by inserts: the exponent is applied once, wherever a priority comes from.
#[test]
fn prioritized_draws_the_same_whether_priorities_came_with_the_insert_or_later() {
    let expected = proportional(&[1.0, 16.0], 0.5);
    assert_eq!(expected, [0.2, 0.8]);
    let inserted = begun(Prioritized::new(0.5, 1.0), &[1.0, 16.0]);
    let mut updated = begun(Prioritized::new(0.5, 1.0), &[3.0, 5.0]);
    updated.update(&[(1, 2.0), (0, 1.0), (1, 16.0)]).unwrap();
    for (mut sampler, seed) in [(inserted, 7), (updated, 8)] {
        fits(&counts(&mut sampler, &expected, 1000, 256, seed), &expected);
    }
}

/// A stratum of a batch gives each row its own part of the mass: no item can be drawn more often than its mass, rounded
/// up at both ends, allows.
#[test]
fn a_stratified_batch_holds_each_item_about_as_often_as_its_mass_says() {
    let mut sampler = begun(Prioritized::new(1.0, 0.0).stratified(true), &[1.0, 2.0, 5.0]);
    let mut draws = Draws::new(9, 0);
    for _ in 0..1000 {
        let mut counts = [0; 3];
        select(&mut sampler, 80, &mut draws).iter().for_each(|row| counts[row.item as usize] += 1);
        assert_eq!(counts, [10, 20, 50], "80 rows divide the masses 1, 2 and 5 evenly");
    }
}

/// The newest and the last item are drawn like the others, and one alone is drawn always.
#[test]
fn every_item_is_drawn_also_the_last_one() {
    fn check(sampler: &mut dyn Sampler) {
        sampler.begin(4).unwrap();
        sampler.insert(0, None).unwrap();
        let mut draws = Draws::new(10, 0);
        let mut selected = Vec::new();
        sampler.select(10, &mut draws, &mut selected);
        assert!(selected.len() == 10 && selected.iter().all(|row| row.item == 0));
        (1..4).for_each(|item| sampler.insert(item, None).unwrap());
        let mut counts = [0; 4];
        selected.clear();
        sampler.select(4000, &mut draws, &mut selected);
        selected.iter().for_each(|row| counts[row.item as usize] += 1);
        assert!(counts.iter().all(|count| (850..=1150).contains(count)), "{sampler:?}: {counts:?}");
    }
    check(&mut Uniform::new());
    check(&mut Prioritized::new(0.6, 0.4));
    check(&mut Prioritized::new(0.6, 0.4).stratified(true).normalize(Normalize::Store));
    check(&mut MaxTimes::new(Uniform::new(), 10_000));
}

/// Rows of items that had their times are drawn anew among the others: as choosing one row after the other would.
#[test]
fn max_times_is_even_until_items_leave() {
    let mut firsts = [0u64; 6];
    let mut draws = Draws::new(11, 0);
    for _ in 0..24_000 {
        // Two items once each: both orders are as likely, in one batch as in two.
        let mut sampler = begun(MaxTimes::new(Uniform::new(), 1), &[1.0; 3]);
        let selected = select(&mut sampler, 3, &mut draws);
        let order: Vec<u32> = selected.iter().map(|row| row.item).collect();
        let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        firsts[orders.iter().position(|known| order == known).expect("each item once")] += 1;
    }
    fits(&firsts, &[1.0 / 6.0; 6]);
}

/// Prioritized and at most once is weighted sampling without replacement: P(a, b) = P(a) P(b) / (1 − P(a)).
#[test]
fn max_times_of_prioritized_is_successive_sampling() {
    let p = proportional(&[1.0, 2.0, 5.0], 1.0);
    let mut pairs = [0u64; 9];
    let mut draws = Draws::new(12, 0);
    for _ in 0..30_000 {
        let mut sampler = begun(MaxTimes::new(Prioritized::new(1.0, 1.0), 1), &[1.0, 2.0, 5.0]);
        let selected = select(&mut sampler, 2, &mut draws);
        pairs[(selected[0].item * 3 + selected[1].item) as usize] += 1;
    }
    let expected: Vec<f64> =
        (0..9).map(|pair| if pair % 4 == 0 { 0.0 } else { p[pair / 3] * p[pair % 3] / (1.0 - p[pair / 3]) }).collect();
    fits(&pairs, &expected);
}

#[test]
fn by_age_the_oldest_or_the_newest_come_first_and_removed_ones_not_at_all() {
    let mut draws = Draws::new(13, 0);
    let mut items = |sampler: &mut dyn Sampler| {
        sampler.begin(10).unwrap();
        [4, 9, 0, 7, 2].into_iter().for_each(|item| sampler.insert(item, None).unwrap());
        sampler.insert(9, Some(3.0)).unwrap(); // there already: as old as it was
        [4, 7, 7].into_iter().for_each(|item| sampler.remove(item));
        sampler.insert(4, None).unwrap();
        let mut selected = Vec::new();
        sampler.select(3, &mut draws, &mut selected);
        sampler.select(9, &mut draws, &mut selected);
        selected.iter().map(|row| row.item).collect::<Vec<_>>()
    };
    assert_eq!(items(&mut Fifo::new()), [9, 0, 2, 9, 0, 2, 4]);
    assert_eq!(items(&mut Lifo::new()), [4, 2, 0, 4, 2, 0, 9]);
    assert_eq!(items(&mut MaxTimes::new(Fifo::new(), 1)), [9, 0, 2, 4]);
    assert_eq!(items(&mut MaxTimes::new(Fifo::new(), 2)), [9, 0, 2, 9, 0, 2, 4]);
}

/// The same seed gives the same items, other seeds and streams others, whoever else draws.
#[test]
fn selection_is_a_function_of_the_seed() {
    let drawn = |seed, stream| {
        let mut sampler = begun(Prioritized::new(0.6, 0.4), &[1.0; 1000]);
        let mut draws = Draws::new(seed, stream);
        (0..10).flat_map(|_| select(&mut sampler, 100, &mut draws)).map(|row| row.item).collect::<Vec<_>>()
    };
    assert_eq!(drawn(42, 0), drawn(42, 0));
    let streams: Vec<_> = (0..4).map(|stream| drawn(42, stream)).collect();
    assert!((0..4).all(|a| (0..a).all(|b| streams[a] != streams[b])));
    assert_ne!(drawn(43, 0), streams[0]);
}
