//! A million rows through a small ring: every field of a row encodes its id, and no row mixes two.

mod common;
#[path = "common/data.rs"]
mod data;

use common::Watchdog;
use data::mix;
use pinring::*;
use std::thread;
use std::time::Duration;

const ROWS: u64 = 1_000_000;
const WRITERS: u64 = 4;
const LANES: u64 = 10;

#[test]
fn no_row_is_torn_in_a_million() {
    let _watchdog = Watchdog::new("a million rows", Duration::from_secs(300));
    let mut step = Step::new();
    let id = step.observation::<u64>("id", &[]);
    let wide = step.observation::<u32>("wide", &[4]);
    let byte = step.leaf::<u8>("byte", &[3]);
    let float = step.leaf::<f32>("float", &[]);
    let mut sample = Sample::step(step);
    let (id_c, wide_c, byte_c, float_c) = (sample.all(id), sample.all(wide), sample.all(byte), sample.all(float));
    let version = sample.policy_version();
    // Lanes that do not divide the batch, so that rows are also copied.
    let feed = Feed::builder(sample).batch(64).buffers(3).start().unwrap();
    let learner = feed.learner().unwrap();
    let per_lane = ROWS / WRITERS / LANES;
    let intake = feed.intake().unwrap();
    let threads: Vec<_> = (0..WRITERS)
        .map(|_| {
            let mut writer = intake.writer(LANES as usize).unwrap();
            thread::spawn(move || {
                let first = writer.lanes().start as u64;
                let (mut ids, mut wides, mut bytes, mut floats) = ([0; 10], [0; 40], [0; 30], [0.0; 10]);
                for t in 0..per_lane {
                    for lane in 0..LANES as usize {
                        let id = (first + lane as u64) << 32 | t;
                        let hash = mix(id);
                        ids[lane] = id;
                        wides[lane * 4..][..4].fill(hash as u32);
                        bytes[lane * 3..][..3].fill((hash >> 32) as u8);
                        floats[lane] = (hash >> 44) as f32;
                    }
                    let mut step = writer.step().unwrap();
                    step.put(id, &ids).unwrap();
                    step.put(wide, &wides).unwrap();
                    step.put(byte, &bytes).unwrap();
                    step.put(float, &floats).unwrap();
                    step.set_policy_version(t);
                    step.commit().unwrap();
                }
            })
        })
        .collect();
    drop(intake);
    let mut seen = vec![false; ROWS as usize];
    for batch in learner.iter() {
        let batch = batch.unwrap();
        let (wides, bytes, floats) = (batch.slice(wide_c), batch.slice(byte_c), batch.slice(float_c));
        let versions = batch.slice(version);
        for (row, (lane, t)) in batch.lanes().zip(batch.first_steps()).enumerate() {
            let id = batch.slice(id_c)[row];
            let hash = mix(id);
            assert_eq!((id >> 32, id & 0xFFFF_FFFF), (lane as u64, t), "the record and the row");
            assert_eq!((wides[row * 4], wides[row * 4 + 3]), (hash as u32, hash as u32));
            assert_eq!((bytes[row * 3], bytes[row * 3 + 2]), ((hash >> 32) as u8, (hash >> 32) as u8));
            assert_eq!((floats[row], versions[row] as u64), ((hash >> 44) as f32, t));
            assert!(!std::mem::replace(&mut seen[lane * per_lane as usize + t as usize], true), "row {id} twice");
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(seen.into_iter().all(|seen| seen));
    let metrics = feed.metrics();
    assert_eq!((metrics.steps, metrics.rows, metrics.dropped_rows), (ROWS, ROWS, 0));
    assert!(metrics.staged_rows > 0);
}
