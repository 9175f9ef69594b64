//! 7. Replay: steps stored once, sampled by priority, with the pace of a Q-learner and without a framework.
//!
//! Run with `cargo run --release --example 07_replay`. The environment is a corridor of nine rooms with a prize at one
//! end; the learner keeps a table in place of a network, and everything else is as in a DQN: n-step returns that stop at
//! the episode's end, a discount that is 0 behind a terminal state and not behind the time limit, importance weights,
//! priorities from TD errors, a target that lags behind, and weights that go back to the actors.

use pinring::*;
use std::time::Duration;

const ROOMS: usize = 9;
const LANES: usize = 4;
const LIMIT: usize = 40; // steps an episode, if the prize is not found
const UPDATES: usize = 2_000;
const GAMMA: f64 = 0.95;

type Table = [[f32; 2]; ROOMS];

fn best(values: [f32; 2]) -> usize {
    usize::from(values[1] > values[0])
}

/// Walks the corridor, one environment a lane, until the feed is over.
fn act(mut writer: Writer, leaves: (Leaf<i64>, Leaf<i64>, Leaf<f32>), weights: &Weights<Table>) -> Result<()> {
    let (room, action, reward) = leaves;
    let mut draws = Draws::new(writer.seed(0), 0);
    let mut at = [(0usize, 0usize); LANES]; // room and steps
    loop {
        let mut s = writer.step()?; // waits if the learner is too far behind
        s.put(room, &at.map(|(room, _)| room as i64))?;
        let (_, table) = s.policy(weights)?;
        let actions = at.map(|(room, _)| {
            let explore = draws.unit() < 0.3 || table[room][0] == table[room][1];
            if explore { draws.below(2) as usize } else { best(table[room]) }
        });
        s.put(action, &actions.map(|action| action as i64))?;
        let mut rewards = [0.0; LANES];
        for (lane, (room_of, steps)) in at.iter_mut().enumerate() {
            *room_of = if actions[lane] == 1 { *room_of + 1 } else { room_of.saturating_sub(1) };
            *steps += 1;
            if *room_of == ROOMS - 1 {
                rewards[lane] = 1.0;
                s.end(lane, End::Terminated); // nothing is bootstrapped from there
                *steps = 0;
            } else if *steps == LIMIT {
                // The episode was cut: what the environment shows now is what the value is bootstrapped from.
                s.end(lane, End::Truncated).put(room, &[*room_of as i64])?;
                *steps = 0;
            }
            if *steps == 0 {
                *room_of = 0;
            }
        }
        s.put(reward, &rewards)?;
        s.commit()?;
    }
}

fn main() -> Result<()> {
    let mut step = Step::new();
    let room = step.observation::<i64>("room", &[]);
    let action = step.leaf::<i64>("action", &[]);
    let reward = step.leaf::<f32>("reward", &[]);
    step.reward(reward);
    let mut sample = Sample::transition(step, 3, GAMMA);
    let (now, then, did) = (sample.at(room, 0), sample.next(room), sample.at(action, 0));
    let (ret, discount, weight) = (sample.n_step_return(reward), sample.discount(), sample.weight());

    let feed = Feed::builder(sample)
        .batch(32)
        .buffers(2)
        .lanes(LANES)
        .seed(7)
        .replay(5_000, Prioritized::new(0.6, 0.4))
        .pace(Pace::min_size(500).samples_per_insert(4.0, 0.1)) // each step is seen four times, about
        .start()?;
    let weights = Weights::new(Table::default());
    let (writer, policy) = (feed.writer(LANES)?, weights.clone());
    let actor = std::thread::spawn(move || act(writer, (room, action, reward), &policy).unwrap_err().kind());

    let (learner, episodes) = (feed.learner()?, feed.episodes());
    let (mut table, mut target) = (Table::default(), Table::default());
    for update in 0..UPDATES {
        let batch = learner.next_batch()?;
        let mut errors = Vec::with_capacity(batch.rows());
        for row in 0..batch.rows() {
            let (s, a, s2) = (batch.slice(now)[row] as usize, batch.slice(did)[row] as usize, batch.slice(then)[row]);
            let next = target[s2 as usize][best(table[s2 as usize])]; // double: the newest chooses, the target values
            let error = batch.slice(ret)[row] + batch.slice(discount)[row] * next - table[s][a];
            table[s][a] += 0.2 * batch.slice(weight)[row] * error;
            errors.push(error.abs());
        }
        let keys = batch.keys();
        drop(batch); // the slot is filled again while the priorities are set
        learner.update_priorities(&keys, &errors)?;
        feed.set_beta(0.4 + 0.6 * update as f64 / UPDATES as f64)?;
        if update % 50 == 0 {
            target = table;
            weights.publish(table);
        }
        if update % 500 == 0 {
            let lengths: Vec<u64> = episodes.try_iter().map(|episode| episode.length).collect();
            let mean = lengths.iter().sum::<u64>() as f64 / lengths.len().max(1) as f64;
            println!("update {update:5}: {} episodes since, of {mean:.1} steps on average", lengths.len());
        }
    }
    let metrics = feed.metrics();
    println!("{} steps, {} of them can be sampled, {} rows drawn", metrics.steps, metrics.stored_samples, metrics.rows);
    println!("{} priorities came too late", metrics.stale_keys);
    let greedy: Vec<usize> = table[..ROOMS - 1].iter().map(|&values| best(values)).collect();
    println!("from each room: {greedy:?}, and the first is worth {:.2}", table[0][1]);
    assert_eq!(greedy, [1; ROOMS - 1], "the prize is to the right");

    feed.stop(Duration::from_secs(5))?;
    assert_eq!(actor.join().expect("the actor's thread"), ErrorKind::Stopped);
    Ok(())
}
