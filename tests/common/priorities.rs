//! Priorities that come back from a device: what the tests of it share, against the fake library and on a real GPU alike.
#![allow(dead_code)] // each test uses a part
#![allow(unsafe_code)] // raw streams and addresses

use crate::feeding::{LEGACY, learner_on, until};
use pinring::*;
use std::ops::Range;

pub const ROWS: usize = 8;
pub const CAPACITY: usize = 256;

/// Steps that count up.
pub struct Counted {
    pub sample: Sample,
    pub obs: Leaf<i64>,
    pub column: Column<i64>,
}

impl Counted {
    pub fn new() -> Counted {
        let mut step = Step::new();
        let obs = step.observation::<i64>("obs", &[]);
        let mut sample = Sample::transition(step, 1, 0.9);
        let column = sample.at(obs, 0);
        Counted { sample, obs, column }
    }

    /// Three slots, two buffers on device 0, priorities as they are.
    pub fn builder(&self, search: &CudaSearch) -> FeedBuilder {
        let builder = Feed::builder(self.sample.clone()).batch(ROWS).buffers(3).prefetch(2).lanes(1).seed(5);
        let builder = builder.replay(CAPACITY, Prioritized::new(1.0, 0.4)).gather(Gather::Cpu);
        builder.pinning(Pinning::Required).cuda(search.clone()).device(0)
    }

    pub fn write(&self, writer: &mut Writer, ids: Range<i64>) -> Result<()> {
        for id in ids {
            let mut s = writer.step()?;
            s.put(self.obs, &[id])?;
            s.commit()?;
        }
        Ok(())
    }
}

/// Priorities that tell rows and updates apart; with halves, quarters and zero.
pub fn values(update: usize, rows: usize) -> Vec<f32> {
    (0..rows).map(|row| ((update * 13 + row * 5) % 32) as f32 / 4.0).collect()
}

/// What a feed's sampler has in the end, and what it was told: priorities of all keys that were seen, and stale keys.
type Told = (Vec<Option<f32>>, u64);

/// Takes batches and updates them in each of two ways, from the host and from a device; what the samplers have then is
/// the same. `put` writes values to device memory behind what the legacy stream was given.
pub fn same_as_from_the_host(search: &CudaSearch, memory: u64, put: impl Fn(&[f32]), updates: usize) {
    let kind = Counted::new();
    let run = |on_device: bool| -> Told {
        let feed = kind.builder(search).start().unwrap();
        let learner = learner_on(&feed, 0, LEGACY).unwrap();
        let mut writer = feed.writer(1).unwrap();
        let (mut seen, mut last) = (Vec::new(), vec![None; CAPACITY * 2]);
        kind.write(&mut writer, 0..200).unwrap();
        for update in 0..updates {
            let batch = learner.next_batch().unwrap();
            let (keys, rows) = (batch.keys(), batch.rows());
            drop(batch);
            // By the step, since which rows a batch has depends on when it was selected.
            let values: Vec<f32> = keys.iter().map(|(_, step)| values(update, 64)[step as usize % 64]).collect();
            if on_device {
                put(&values);
                // SAFETY: as many values were put there, and it stays.
                unsafe { learner.update_priorities(&keys, memory, rows) }.unwrap();
                until("the update has come", || feed.metrics().devices[0].updates == update as u64 + 1);
            } else {
                assert_eq!(learner.update_priorities_from_host(&keys, &values).unwrap().stale, 0);
            }
            keys.iter().zip(&values).for_each(|((_, step), value)| last[step as usize] = Some(*value));
            seen.push(keys);
        }
        for keys in &seen {
            let expected: Vec<_> = keys.iter().map(|(_, step)| last[step as usize]).collect();
            assert_eq!(feed.peek(keys).unwrap(), expected, "on the device: {on_device}");
        }
        // Everything is overwritten: an update of what is gone changes nothing, and is counted.
        kind.write(&mut writer, 200..200 + 2 * CAPACITY as i64).unwrap();
        let (stale, keys) = (feed.metrics().stale_keys, &seen[0]);
        if on_device {
            put(&values(0, keys.len()));
            // SAFETY: as above.
            unsafe { learner.update_priorities(keys, memory, keys.len()) }.unwrap();
            until("the last one has come", || feed.metrics().devices[0].updates == updates as u64 + 1);
        } else {
            learner.update_priorities_from_host(keys, &values(0, keys.len())).unwrap();
        }
        let device = &feed.metrics().devices[0];
        assert_eq!((device.updates_refused, device.updates_lost, device.updates_waiting), (0, 0, 0));
        (feed.peek(keys).unwrap(), feed.metrics().stale_keys - stale)
    };
    let (host, device) = (run(false), run(true));
    assert_eq!(host, device);
    assert_eq!(device, (vec![None; ROWS], ROWS as u64));
}
