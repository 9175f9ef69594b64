//! 1. Fill and take: declare a step, start a feed, write steps, take a batch.
//!
//! Run with `cargo run --example 01_fill_and_take`. Everything happens on one thread, so that the order is plain; real
//! programs write from several threads (the next example).

use pinring::*;
use std::time::Duration;

const LANES: usize = 2;
const BATCH: usize = 6;

fn main() -> Result<()> {
    // What a writer writes each time its environments move. Observations are declared as such.
    let mut step = Step::new();
    let obs = step.observation::<f32>("obs", &[4]);
    let action = step.leaf::<i64>("action", &[]);
    let reward = step.leaf::<f32>("reward", &[]);
    step.reward(reward); // its sum is an episode's return

    // What a row of a batch holds: here one step. Leaves are written, columns are read; each has handles of its own.
    let mut sample = Sample::step(step);
    let (obs_column, reward_column) = (sample.all(obs), sample.all(reward));
    let terminated = sample.terminated(); // derived from what `end` says

    let builder = Feed::builder(sample).batch(BATCH).buffers(2).lanes(LANES);
    let footprint = builder.footprint()?; // exact, before anything is allocated
    println!("a batch takes {} bytes, the ring {}", footprint.slot_bytes, footprint.ring_bytes);

    let feed = builder.start()?; // an error here leaves nothing behind
    for column in feed.columns() {
        println!("  column {:<10} {:<4} {:?}", column.name, column.dtype.name(), column.shape);
    }

    // One writer that drives two lanes: what it writes has a row a lane.
    let mut writer = feed.writer(LANES)?;
    let learner = feed.learner()?;
    for t in 0..BATCH / LANES {
        let mut s = writer.step()?;
        s.view_mut(obs).fill(t as f32); // in place: this is the batch's memory already
        let sum = s.view(obs).sum(); // and can be read again, as a policy does
        s.put(action, &[sum as i64, -1])?; // or from a slice: one value a lane
        s.put(reward, &[1.0, 0.5])?;
        if t == 2 {
            s.end(1, End::Terminated); // lane 1's episode ends with this step
        }
        s.commit()?; // every leaf must have been written
    }

    // The slot that the writer filled is the batch. Nothing was copied.
    let batch = learner.next_batch()?;
    println!("batch {} has {} rows", batch.sequence_number(), batch.rows());
    println!("  lanes      {:?}", batch.lanes().collect::<Vec<_>>());
    println!("  first obs  {:?}", batch.view(obs_column).rows().into_iter().map(|row| row[0]).collect::<Vec<_>>());
    println!("  reward     {:?}", batch.slice(reward_column));
    println!("  terminated {:?}", batch.slice(terminated));
    drop(batch); // the slot goes home and can be filled again

    for episode in feed.episodes().try_iter() {
        println!("lane {} ended: {} steps, return {}", episode.lane, episode.length, episode.ret);
    }

    // A step that is not committed never began.
    let mut s = writer.step()?;
    s.put(action, &[7, 7])?;
    match s.commit() {
        Err(error) => println!("refused: {error}"),
        Ok(()) => unreachable!("obs and reward were not written"),
    }

    // The last writer gone is the end of the source, which the learner sees.
    drop(writer);
    match learner.next_batch() {
        Err(NextError::Ended) => println!("the source has ended"),
        other => println!("unexpected: {other:?}"),
    }
    println!("{}", feed.stop(Duration::from_secs(5))?);
    Ok(())
}
