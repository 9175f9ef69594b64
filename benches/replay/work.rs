//! Stores whose every byte says which step it is of, and the batches that are gathered from them.

use crate::common::{Failure, watchdog};
use pinring::*;
use std::thread::JoinHandle;

/// Bytes of the leaves of a large row of many: lists and tables, over and over.
const PARTS: [usize; 5] = [16, 128, 512, 1024, 2816];

/// What is sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Single steps, of so many bytes in 4 leaves, or in 44.
    Steps { bytes: usize, leaves: usize },
    /// Transitions with two stacks of 4 frames, n = 3.
    Stacks,
    /// Sequences of 120 steps with 124 frames, time-major.
    Sequences,
}

#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub name: &'static str,
    pub kind: Kind,
    pub rows: usize,
    /// Bytes that a copy of these samples by hand moves at once.
    pub piece: usize,
}

const FRAME: usize = 84 * 84;

const fn steps(name: &'static str, bytes: usize, leaves: usize, rows: usize) -> Work {
    Work { name, kind: Kind::Steps { bytes, leaves }, rows, piece: bytes }
}

pub const ALL: [Work; 11] = [
    steps("148B/4-leaves", 148, 4, 512),
    steps("148B/44-leaves", 148, 44, 512),
    steps("4KB/4-leaves", 4_096, 4, 512),
    steps("4KB/44-leaves", 4_096, 44, 512),
    steps("28KB/4-leaves", 28_237, 4, 512),
    steps("28KB/44-leaves", 28_237, 44, 512),
    steps("67KB/4-leaves", 67_000, 4, 512),
    steps("67KB/44-leaves", 67_000, 44, 512),
    Work { name: "stacks-of-4/n-3", kind: Kind::Stacks, rows: 512, piece: 4 * FRAME },
    Work { name: "r2d2-124-frames", kind: Kind::Sequences, rows: 64, piece: 124 * FRAME },
    steps("sac-20x256/168B", 168, 4, 20 * 256),
];

/// Those that are run by `--quick`.
pub const IN_QUICK: [&str; 4] = ["4KB/4-leaves", "28KB/4-leaves", "67KB/44-leaves", "stacks-of-4/n-3"];

/// One column, and what must be in it.
#[derive(Clone, Copy, Debug)]
pub struct Content {
    pub column: Column<u8>,
    leaf: usize,
    bytes: usize,
    /// Steps from the row's first one, `from..to`.
    from: i64,
    to: i64,
}

#[derive(Clone)]
pub struct Declared {
    pub sample: Sample,
    pub contents: Vec<Content>,
    leaves: Vec<(Leaf<u8>, usize)>,
    reward: Leaf<f32>,
}

impl Work {
    fn leaf_bytes(&self) -> Vec<usize> {
        match self.kind {
            Kind::Steps { bytes, leaves } => {
                // Three small ones, then parts, and what is left is the observation.
                let mut all = vec![8, 4, 1];
                let even = match (bytes - 13) / (leaves - 3) {
                    even if even >= 8 => even / 4 * 4,
                    even => even,
                };
                let is_large = bytes > 60_000;
                all.extend((0..leaves - 4).map(|part| if is_large { PARTS[part % PARTS.len()] } else { even }));
                all.push(bytes - all.iter().sum::<usize>());
                all
            }
            Kind::Stacks | Kind::Sequences => vec![FRAME, 8],
        }
    }

    pub fn declare(&self) -> Declared {
        let mut step = Step::new();
        let sizes = self.leaf_bytes();
        let leaves: Vec<_> =
            sizes.iter().enumerate().map(|(i, &n)| (step.observation::<u8>(&format!("leaf.{i}"), &[n]), n)).collect();
        let reward = step.leaf::<f32>("reward", &[]);
        let mut sample = match self.kind {
            Kind::Steps { .. } => Sample::sequence(step, 1, 1),
            Kind::Stacks => Sample::transition(step, 3, 0.99),
            Kind::Sequences => Sample::sequence(step, 120, 40),
        };
        let mut contents = Vec::new();
        let mut put = |column, leaf, from, to| contents.push(Content { column, leaf, bytes: sizes[leaf], from, to });
        match self.kind {
            Kind::Steps { .. } => {
                for (leaf, (handle, _)) in leaves.iter().enumerate() {
                    put(sample.at(*handle, 0), leaf, 0, 1);
                }
            }
            Kind::Stacks => {
                put(sample.window(leaves[0].0, -3..1, Pad::Repeat), 0, -3, 1);
                put(sample.next_window(leaves[0].0, -3..1, Pad::Repeat), 0, 0, 4);
                put(sample.at(leaves[1].0, 0), 1, 0, 1);
                sample.n_step_return(reward);
                sample.discount();
                sample.weight();
            }
            Kind::Sequences => {
                sample.time_major();
                put(sample.window(leaves[0].0, -3..121, Pad::Repeat), 0, -3, 121);
                put(sample.window(leaves[1].0, 0..120, Pad::Repeat), 1, 0, 120);
                sample.mask();
                sample.terminated();
            }
        }
        Declared { sample, contents, leaves, reward }
    }

    /// Whether each row of a batch is one step.
    pub fn is_steps(&self) -> bool {
        matches!(self.kind, Kind::Steps { .. })
    }

    /// Bytes of a step as it is stored.
    pub fn record_bytes(&self) -> usize {
        self.leaf_bytes().iter().map(|bytes| bytes.next_multiple_of(16)).sum::<usize>() + 16
    }
}

/// What every four bytes of a leaf hold.
fn word(lane: u64, step: u64, leaf: usize) -> [u8; 4] {
    let mixed = (lane << 40 ^ step << 8 ^ leaf as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 32) as u32 | 1).to_le_bytes()
}

pub const LANES: usize = 16;
const WRITERS: usize = 4;

impl Declared {
    /// Bytes of a full batch as the learner gets it, and as they cross the link, 16 at a time.
    pub fn bytes(&self, rows: usize) -> (usize, usize) {
        let values = |content: &Content| (content.to - content.from) as usize * rows;
        let delivered = self.contents.iter().map(|content| values(content) * content.bytes).sum();
        let crossed = self.contents.iter().map(|content| values(content) * content.bytes.next_multiple_of(16)).sum();
        (delivered, crossed)
    }

    /// Fills the store with steps of interleaved lanes. The writers stay: the source goes on.
    pub fn fill(&self, feed: &Feed, capacity: usize) -> Result<Vec<Writer>, Failure> {
        let steps = capacity.div_ceil(LANES) as u64 + 8;
        let threads: Vec<JoinHandle<Result<Writer>>> = (0..WRITERS)
            .map(|_| {
                let (writer, this) = (feed.writer(LANES / WRITERS)?, self.clone());
                Ok(std::thread::spawn(move || this.write(writer, steps)))
            })
            .collect::<Result<_>>()?;
        threads.into_iter().map(|thread| Ok(thread.join().map_err(|_| "a writer panicked")??)).collect()
    }

    fn write(&self, mut writer: Writer, steps: u64) -> Result<Writer> {
        let lanes = writer.lanes();
        let mut values: Vec<Vec<u8>> = self.leaves.iter().map(|(_, bytes)| vec![0; bytes * lanes.len()]).collect();
        for step in 0..steps {
            if step % 64 == 0 {
                watchdog::alive("filling a store");
            }
            let mut s = writer.step()?;
            for (leaf, ((handle, bytes), values)) in self.leaves.iter().zip(&mut values).enumerate() {
                for (value, lane) in values.chunks_exact_mut(*bytes).zip(lanes.clone()) {
                    let word = word(lane as u64, step, leaf);
                    value.chunks_mut(4).for_each(|part| part.copy_from_slice(&word[..part.len()]));
                }
                s.put(*handle, values)?;
            }
            s.put(self.reward, &vec![1.0; lanes.len()])?;
            s.commit()?;
        }
        Ok(writer)
    }

    /// Whether a column holds what was written, by the lane and the first step of each row.
    pub fn check(&self, content: &Content, got: &[u8], of: &[(u64, u64)], time_major: bool) -> Result<(), Failure> {
        let steps = (content.to - content.from) as usize;
        let rows = of.len();
        if got.len() != rows * steps * content.bytes {
            return Err(format!("a column of {} bytes, and not {rows} × {steps} × {}", got.len(), content.bytes).into());
        }
        for (row, &(lane, first)) in of.iter().enumerate() {
            for step in 0..steps {
                let at = if time_major { step * rows + row } else { row * steps + step };
                // Before its first step a lane's is repeated.
                let of_step = (first as i64 + content.from + step as i64).max(0) as u64;
                let word = word(lane, of_step, content.leaf);
                let value = &got[at * content.bytes..][..content.bytes];
                if !value.chunks(4).all(|part| part == &word[..part.len()]) {
                    let text =
                        format!("leaf {} of row {row}, step {step} is not step {of_step} of lane {lane}", content.leaf);
                    return Err(text.into());
                }
            }
        }
        Ok(())
    }
}
