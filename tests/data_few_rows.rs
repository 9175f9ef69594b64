//! Batches of one to three rows, of more writers than they have stripes, whose steps are committed, dropped and forgotten: each
//! committed step comes once and whole, whatever gaps the others leave.

mod common;

use common::Watchdog;
use pinring::*;
use std::time::Duration;

const STEPS: u64 = 600;

fn run(rows: usize, buffers: usize, writers: usize, lanes: usize) {
    let mut step = Step::new();
    let words = step.leaf::<u64>("words", &[3]);
    let mut sample = Sample::step(step);
    let column = sample.all(words);
    let feed = Feed::builder(sample).batch(rows).buffers(buffers).start().unwrap();
    let learner = feed.learner().unwrap();
    let writing: Vec<_> = (0..writers as u64)
        .map(|number| {
            let mut writer = feed.writer(lanes).unwrap();
            std::thread::spawn(move || {
                let mut committed = Vec::new();
                for t in 0..STEPS {
                    let id = |lane: u64| number << 32 | lane << 24 | t;
                    let values: Vec<u64> = (0..lanes as u64).flat_map(|lane| [id(lane); 3]).collect();
                    let mut s = writer.step().unwrap();
                    match (t * 7 + number * 3) % 11 {
                        0 => drop(s),
                        1 => std::mem::forget(s),
                        2 => assert!(s.commit().is_err(), "nothing was put"),
                        _ => {
                            s.put(words, &values).unwrap();
                            s.commit().unwrap();
                            committed.extend((0..lanes as u64).map(id));
                        }
                    }
                }
                committed
            })
        })
        .collect();
    let mut seen = Vec::new();
    for batch in learner.iter() {
        for words in batch.unwrap().slice(column).chunks(3) {
            assert!(words.iter().all(|word| *word == words[0]), "torn: {words:x?}");
            seen.push(words[0]);
        }
    }
    let mut committed: Vec<u64> = writing.into_iter().flat_map(|writing| writing.join().unwrap()).collect();
    seen.sort_unstable();
    committed.sort_unstable();
    assert!(seen == committed, "{} of {} rows, {rows} a batch", seen.len(), committed.len());
    let report = feed.stop(Duration::from_secs(20)).unwrap();
    assert_eq!((report.dropped_rows(), report.still_out), (0, 0), "{report}");
}

#[test]
fn of_few_rows_and_many_writers_each_step_comes_once() {
    let _watchdog = Watchdog::new("few rows", Duration::from_secs(100));
    for rows in [1, 2, 3, 5] {
        for (buffers, writers, lanes) in [(1, 1, 1), (1, 4, 1), (2, 7, 1), (3, 3, 2), (2, 3, 4)] {
            if lanes <= rows * buffers {
                run(rows, buffers, writers, lanes);
            }
        }
    }
    run(130, 2, 70, 1); // more than there are stripes
}
