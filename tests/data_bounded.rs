//! What is resident is bounded by the ring, whatever the writers do: a stopped learner stops them, and nothing is lost.

mod common;

use common::Watchdog;
use pinring::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Resident bytes of this process.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("this process's status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("the resident size");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number of KiB") * 1024
}

/// Four writers at full speed with rows of 1 MiB, eight buffers of one row, and a learner that sleeps for two seconds.
#[test]
fn writers_of_a_megabyte_a_row_stop_with_the_learner() {
    const MIB: usize = 1 << 20;
    const ROWS: u64 = 60;
    let _watchdog = Watchdog::new("bounded residency", Duration::from_secs(180));
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[MIB]);
    let mut sample = Sample::step(step);
    let column = sample.all(obs);
    let feed = Feed::builder(sample).batch(1).buffers(8).start().unwrap();
    let learner = feed.learner().unwrap();
    let committed = AtomicU64::new(0);
    thread::scope(|scope| {
        let intake = feed.intake().unwrap();
        for index in 0..4u8 {
            let (mut writer, committed) = (intake.writer(1).unwrap(), &committed);
            scope.spawn(move || {
                let mut row = vec![0; MIB];
                for t in 0..ROWS as u8 {
                    row.fill(index * 64 + t % 64);
                    let mut step = writer.step().unwrap();
                    step.put(obs, &row).unwrap();
                    step.commit().unwrap();
                    committed.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        drop(intake);
        while feed.metrics().batches < 8 {
            thread::sleep(Duration::from_millis(1));
        }
        let before = resident();
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(100));
            let metrics = feed.metrics();
            assert_eq!((metrics.batches_waiting, metrics.free_slots), (8, 0));
            assert!(committed.load(Ordering::Relaxed) <= 8, "a row has no other place than the ring");
        }
        let grown = resident().saturating_sub(before);
        assert!(grown < 32 << 20, "{grown} bytes more are resident");
        // It wakes up: everything comes, once and in each writer's order.
        let mut next = [0u64; 4];
        for batch in learner.iter() {
            let batch = batch.unwrap();
            let bytes = batch.slice(column);
            let (writer, lane) = (bytes[0] / 64, batch.lanes().next().unwrap());
            assert_eq!((bytes[0], bytes[MIB / 2]), (bytes[MIB - 1], bytes[MIB - 1]));
            assert_eq!((batch.first_steps().next().unwrap(), u64::from(bytes[0] % 64)), (next[lane], next[lane] % 64));
            assert_eq!(usize::from(writer), lane);
            next[lane] += 1;
        }
        assert_eq!(next, [ROWS; 4]);
    });
    assert_eq!(feed.metrics().batches, 4 * ROWS);
}
