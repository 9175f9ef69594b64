//! Seeds of environments are functions of the feed's seed and the lane's number, and of nothing else.

use pinring::*;
use std::collections::HashSet;

fn feed(seed: Option<u64>) -> Feed {
    let mut step = Step::new();
    step.leaf::<u8>("act", &[]);
    let builder = Feed::builder(Sample::step(step));
    if let Some(seed) = seed { builder.seed(seed) } else { builder }.start().unwrap()
}

/// The seeds of 64 lanes, dealt out to writers of these widths.
fn seeds(feed: &Feed, widths: &[usize]) -> Vec<u64> {
    let intake = feed.intake().unwrap();
    let writers: Vec<Writer> = widths.iter().map(|&width| intake.writer(width).unwrap()).collect();
    let mut seeds = vec![None; 64];
    for writer in writers.iter().rev() {
        for (local, lane) in writer.lanes().enumerate().rev() {
            assert_eq!(seeds[lane].replace(writer.seed(local)), None);
        }
    }
    seeds.into_iter().map(|seed| seed.expect("64 lanes")).collect()
}

#[test]
fn the_same_seed_gives_the_same_lanes() {
    let first = seeds(&feed(Some(42)), &[64]);
    assert_eq!(seeds(&feed(Some(42)), &[64]), first, "twice");
    assert_eq!(seeds(&feed(Some(42)), &[1; 64]), first, "whatever the writers");
    assert_eq!(seeds(&feed(Some(42)), &[7, 50, 3, 4]), first);
    let again = feed(Some(42));
    let on_a_thread = std::thread::scope(|scope| scope.spawn(|| seeds(&again, &[32, 32])).join().unwrap());
    assert_eq!(on_a_thread, first, "whatever the thread");
}

#[test]
fn lanes_and_feeds_differ() {
    let mut all = HashSet::new();
    for seed in [0, 1, 42, 43, u64::MAX] {
        let lanes = seeds(&feed(Some(seed)), &[64]);
        assert!(lanes.iter().all(|&lane| all.insert(lane)), "pairwise different");
        assert!(!lanes.contains(&seed) && !lanes.contains(&0));
    }
    assert_eq!(all.len(), 5 * 64);
    let unseeded: HashSet<Vec<u64>> = (0..4).map(|_| seeds(&feed(None), &[64])).collect();
    assert_eq!(unseeded.len(), 4, "runs without a seed differ");
}

/// Asking twice, writing and dropping change nothing.
#[test]
fn asking_has_no_effect() {
    let feed = feed(Some(7));
    let intake = feed.intake().unwrap();
    let writer = intake.writer(4).unwrap();
    let first: Vec<u64> = (0..4).map(|lane| writer.seed(lane)).collect();
    assert_eq!((0..4).map(|lane| writer.seed(lane)).collect::<Vec<_>>(), first);
    drop(writer);
    let writer = intake.writer(4).unwrap();
    assert_eq!((0..4).map(|lane| writer.seed(lane)).collect::<Vec<_>>(), first, "a lane keeps its seed");
}
