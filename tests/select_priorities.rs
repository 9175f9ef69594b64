//! Priorities as numbers: what is none, the floor, the largest so far, importance weights, and sums that do not drift.

use pinring::{Draws, Normalize, Prioritized, Sampler, SamplerError, Selected};

fn begun(mut sampler: Prioritized, priorities: &[f32]) -> Prioritized {
    sampler.begin(priorities.len() as u32).unwrap();
    for (item, &priority) in (0..).zip(priorities) {
        sampler.insert(item, Some(priority)).unwrap();
    }
    sampler
}

fn select(sampler: &mut Prioritized, rows: usize, seed: u64) -> Vec<Selected> {
    let mut selected = Vec::new();
    sampler.select(rows, &mut Draws::new(seed, 0), &mut selected);
    selected
}

/// The probability of each item, from rows that hold them all.
fn probabilities(sampler: &mut Prioritized, items: usize) -> Vec<f64> {
    let mut probabilities = vec![0.0; items];
    for row in select(sampler, items * 200, 1) {
        probabilities[row.item as usize] = row.probability;
    }
    probabilities
}

/// Two samplers that draw the same rows with the same numbers are the same to the last bit.
fn same(a: &mut Prioritized, b: &mut Prioritized, seed: u64) {
    let (a, b) = (select(a, 4096, seed), select(b, 4096, seed));
    assert!(a == b, "first difference: {:?}", a.iter().zip(&b).find(|(a, b)| a != b));
}

#[test]
fn what_is_no_priority_is_refused_by_index_and_nothing_is_changed() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, -f32::MIN_POSITIVE] {
        let mut sampler = begun(Prioritized::new(0.6, 0.4), &[1.0, 2.0, 3.0]);
        let mut untouched = sampler.clone();
        let error = sampler.update(&[(0, 1.0), (1, bad), (2, 2.0)]).unwrap_err();
        assert_eq!((error.index, error.priority.to_bits()), (1, bad.to_bits()));
        assert!(error.to_string().starts_with(&format!("priority {bad} at index 1 is none")), "{error}");
        sampler.remove(2);
        assert_eq!(sampler.insert(2, Some(bad)).unwrap_err().index, 0);
        assert_eq!(sampler.selectable(), 2);
        sampler.insert(2, Some(3.0)).unwrap();
        same(&mut sampler, &mut untouched, 1);
    }
}

#[test]
fn zero_counts_as_the_floor_also_minus_zero() {
    for zero in [0.0, -0.0] {
        let mut sampler = begun(Prioritized::new(1.0, 1.0).floor(0.5), &[zero, 1.5]);
        assert_eq!(probabilities(&mut sampler, 2), [0.25, 0.75]);
        assert_eq!(sampler.priority(0), Some(0.0), "kept as it was given");
        // The floor unless it is set: seldom, and never without a weight.
        let mut sampler = begun(Prioritized::new(1.0, 1.0), &[zero; 3]);
        sampler.update(&[(0, zero), (1, 1.0)]).unwrap();
        for row in select(&mut sampler, 1_000_000, 2) {
            assert!(row.weight > 0.0 && row.weight <= 1.0 && row.probability > 0.0, "{row:?}");
        }
        assert_eq!(sampler.selectable(), 3);
    }
}

#[test]
fn with_a_floor_of_zero_an_item_of_priority_zero_is_never_selected_and_not_counted() {
    for alpha in [0.0, 0.5, 1.0] {
        let mut sampler = begun(Prioritized::new(alpha, 0.5).floor(0.0), &[0.0; 40]);
        assert_eq!(sampler.selectable(), 0);
        assert_eq!(select(&mut sampler, 10, 1), []);
        sampler.update(&[(17, f32::from_bits(1)), (20, 0.0)]).unwrap();
        assert_eq!(sampler.selectable(), 1);
        assert!(select(&mut sampler, 1000, 2).iter().all(|row| row.item == 17 && row.weight == 1.0));
        sampler.update(&[(17, 0.0)]).unwrap();
        assert_eq!(sampler.selectable(), 0);
        assert_eq!(select(&mut sampler, 10, 3), []);
    }
}

/// From the least `f32` above zero to the largest, with the exponents at the ends of their range.
#[test]
fn at_the_edges_of_the_float_range_only_items_with_mass_are_selected_and_every_figure_is_finite() {
    let extremes = [0.0, f32::from_bits(1), f32::MIN_POSITIVE, 1.0, f32::MAX];
    for alpha in [0.0, 0.5, 1.0, 4.0] {
        for beta in [0.0, 0.5, 1.0] {
            for by in [Normalize::Batch, Normalize::Store] {
                for last in 1..extremes.len() {
                    let priorities: Vec<f32> = (0..1000).map(|item| extremes[item % (last + 1)]).collect();
                    let sampler = Prioritized::new(alpha, beta).floor(0.0).normalize(by).stratified(last % 2 == 0);
                    let mut sampler = begun(sampler, &priorities);
                    for row in select(&mut sampler, 2000, 5) {
                        assert!(priorities[row.item as usize] > 0.0, "alpha {alpha}: {row:?} has no mass");
                        assert!(row.probability > 0.0 && row.probability <= 1.0, "{row:?}");
                        assert!(row.weight > 0.0 && row.weight <= 1.0, "{row:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn an_item_without_a_priority_gets_the_largest_so_far() {
    let mut sampler = Prioritized::new(1.0, 1.0);
    sampler.begin(8).unwrap();
    sampler.insert(0, None).unwrap();
    assert_eq!(sampler.priority(0), Some(1.0));
    sampler.insert(1, Some(4.0)).unwrap();
    sampler.insert(2, None).unwrap();
    assert_eq!(sampler.priority(2), Some(4.0));
    sampler.update(&[(0, 9.0), (1, 0.5)]).unwrap();
    sampler.remove(0);
    sampler.insert(3, None).unwrap();
    assert_eq!(sampler.priority(3), Some(9.0), "so far, whether it is still there or not");
    assert_eq!(sampler.priority(0), None);
    sampler.update(&[(0, 5.0), (5, 7.0)]).unwrap(); // not there: passed over
    assert_eq!(sampler.selectable(), 3);
    sampler.begin(8).unwrap();
    sampler.insert(0, None).unwrap();
    assert_eq!(sampler.priority(0), Some(1.0), "begun anew");
}

#[test]
fn weights_are_those_of_the_paper_and_normalised_by_batch_or_store() {
    let mut sampler = begun(Prioritized::new(1.0, 1.0), &[1.0, 3.0]);
    for row in select(&mut sampler, 100, 1) {
        // (N P)^-1 is 2 and 2/3; divided by the larger.
        let raw = 1.0 / (2.0 * row.probability);
        assert!((raw - [2.0, 2.0 / 3.0][row.item as usize]).abs() < 1e-12);
        assert_eq!(row.weight, [1.0, 1.0 / 3.0][row.item as usize]);
    }
    // A batch without the least likely item: by itself its weights reach 1, by the store they do not.
    let priorities = [1e-3, 100.0, 400.0];
    let mut by_batch = begun(Prioritized::new(1.0, 0.5), &priorities);
    let mut by_store = begun(Prioritized::new(1.0, 0.5).normalize(Normalize::Store), &priorities);
    for row in select(&mut by_batch, 64, 2) {
        assert_eq!(row.weight, [f32::NAN, 1.0, 0.5][row.item as usize]);
    }
    for row in select(&mut by_store, 64, 2) {
        let weight = (1e-3f32 as f64 / f64::from(priorities[row.item as usize])).sqrt() as f32;
        assert!((row.weight - weight).abs() < 1e-6 * weight, "{row:?}, and not {weight}");
    }
    // The least of the store follows updates and removals.
    by_store.update(&[(0, 400.0)]).unwrap();
    assert!(select(&mut by_store, 64, 3).iter().all(|row| row.weight == [0.5, 1.0, 0.5][row.item as usize]));
    by_store.remove(1);
    assert!(select(&mut by_store, 64, 3).iter().all(|row| row.weight == 1.0));
}

#[test]
fn beta_can_be_set_while_running_and_alpha_is_checked_at_the_beginning() {
    let mut sampler = begun(Prioritized::new(1.0, 0.0), &[1.0, 4.0]);
    for (beta, weight) in [(0.0, 1.0), (0.5, 0.5), (1.0, 0.25)] {
        sampler.set_beta(beta).unwrap();
        assert!(select(&mut sampler, 64, 1).iter().all(|row| row.weight == [1.0, weight][row.item as usize]));
    }
    for beta in [-0.1, 1.1, f64::NAN] {
        assert!(matches!(sampler.set_beta(beta), Err(SamplerError::Beta { .. })));
        assert!(matches!(Prioritized::new(0.6, beta).begin(1), Err(SamplerError::Beta { .. })));
    }
    for alpha in [-0.1, 4.1, f64::NAN, f64::INFINITY] {
        assert!(matches!(Prioritized::new(alpha, 0.4).begin(1), Err(SamplerError::Alpha { .. })));
    }
    for floor in [-1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(Prioritized::new(0.6, 0.4).floor(floor).begin(1), Err(SamplerError::Floor { .. })));
    }
}

/// One huge priority leaves nothing behind, and draws are even again.
#[test]
fn a_huge_priority_that_comes_and_goes_leaves_no_trace() {
    let mut sampler = begun(Prioritized::new(1.0, 0.4), &[1.0; 1024]);
    let mut untouched = sampler.clone();
    sampler.update(&[(7, 1e20)]).unwrap();
    assert!(select(&mut sampler, 1000, 1).iter().all(|row| row.item == 7));
    sampler.update(&[(7, 1.0)]).unwrap();
    same(&mut sampler, &mut untouched, 1);
    assert!(select(&mut sampler, 1000, 2).iter().all(|row| row.probability == 1.0 / 1024.0));
}

/// After ten million updates the sampler is that of its priorities alone, to the last bit.
#[test]
fn sums_do_not_drift_in_ten_million_updates() {
    const ITEMS: u32 = 4096;
    let mut sampler = begun(Prioritized::new(0.6, 0.4).normalize(Normalize::Store), &[1.0; ITEMS as usize]);
    let mut draws = Draws::new(1, 0);
    let mut priorities = vec![1.0; ITEMS as usize];
    let mut updates = Vec::new();
    for _ in 0..10_000 {
        updates.clear();
        for _ in 0..1000 {
            let item = draws.below(u64::from(ITEMS)) as u32;
            // Eleven powers of ten, above the floor.
            let priority = 10f32.powi(draws.below(12) as i32 - 5) * (0.5 + draws.unit() as f32);
            priorities[item as usize] = priority;
            updates.push((item, priority));
        }
        sampler.update(&updates).unwrap();
    }
    let total: f64 = priorities.iter().map(|&priority| f64::from(priority).powf(0.6)).sum();
    for row in select(&mut sampler, 1000, 2) {
        let expected = f64::from(priorities[row.item as usize]).powf(0.6) / total;
        assert!((row.probability / expected - 1.0).abs() < 1e-12, "{row:?}, and not {expected}");
    }
    let mut fresh = begun(Prioritized::new(0.6, 0.4).normalize(Normalize::Store), &priorities);
    same(&mut sampler, &mut fresh, 3);
}
