//! Truncation inside an unroll, and both of Gymnasium's autoreset modes: the learner's bootstrapped targets, the flags
//! and the episodes' returns and lengths are those of the environment.
//!
//! *Same step*: the step that ends an episode returns the next one's first observation; the final one is only in the
//! info. *Next step*: the step after the end carries the final observation, its action is ignored and its reward is 0.

mod common;

use common::Watchdog;
use pinring::*;
use std::collections::HashMap;
use std::time::Duration;

const GAMMA: f64 = 0.5;

/// Walks up from 0. Episodes end in turn: terminated after 3 steps, truncated after 5, terminated after 1, truncated
/// after 2, and so on; a reward tells the episode and the step.
#[derive(Debug)]
struct Walk {
    lane: u32,
    episode: u32,
    at: u32,
    /// Next-step mode: the next step resets.
    over: bool,
    next_step_mode: bool,
}

struct Outcome {
    reward: f64,
    end: Option<End>,
    /// What the environment shows next.
    obs: [u32; 3],
    /// Same-step mode, at an end: what it showed last.
    final_obs: [u32; 3],
    /// Next-step mode: the action was ignored.
    ignored: bool,
}

impl Walk {
    fn obs(&self) -> [u32; 3] {
        [self.lane, self.episode, self.at]
    }
    fn reset(&mut self) {
        (self.episode, self.at, self.over) = (self.episode + 1, 0, false);
    }
    fn length(episode: u32) -> u32 {
        [3, 5, 1, 2][episode as usize % 4]
    }
    fn step(&mut self) -> Outcome {
        if self.over {
            self.reset();
            return Outcome { reward: 0.0, end: None, obs: self.obs(), final_obs: [0; 3], ignored: true };
        }
        let reward = reward(self.obs());
        self.at += 1;
        let end = match self.episode % 2 {
            _ if self.at < Walk::length(self.episode) => None,
            0 => Some(End::Terminated),
            _ => Some(End::Truncated),
        };
        let final_obs = self.obs();
        match end {
            Some(_) if self.next_step_mode => self.over = true,
            Some(_) => self.reset(),
            None => {}
        }
        Outcome { reward, end, obs: self.obs(), final_obs, ignored: false }
    }
}

fn reward([lane, episode, at]: [u32; 3]) -> f64 {
    f64::from(lane * 1000 + episode * 10 + at)
}
/// The critic: any function of the observation will do.
fn value([lane, episode, at]: [u32; 3]) -> f64 {
    f64::from(lane * 7 + episode * 3 + at + 1)
}

/// What is true of the step that begins at `obs`: its one-step target, and how its episode goes on.
fn truth([lane, episode, at]: [u32; 3]) -> (f64, Option<End>) {
    let over = at + 1 == Walk::length(episode);
    let end = over.then_some(if episode.is_multiple_of(2) { End::Terminated } else { End::Truncated });
    let next = if end == Some(End::Terminated) { 0.0 } else { value([lane, episode, at + 1]) };
    (reward([lane, episode, at]) + GAMMA * next, end)
}

#[derive(Clone, Copy, Debug)]
struct Mode {
    next_step: bool,
    within: bool,
    lockstep: bool,
    time_major: bool,
}

fn run(mode: Mode) {
    const STEPS: usize = 4;
    const LANES: usize = 3;
    const TICKS: u64 = 400;
    let _watchdog = Watchdog::new("autoreset", Duration::from_secs(180));
    let mut step = Step::new();
    let obs = step.observation::<u32>("obs", &[3]);
    let reward = step.leaf::<f64>("reward", &[]);
    let bootstrap = step.leaf::<f64>("bootstrap_value", &[]);
    step.reward(reward);
    let mut sample = Sample::unroll(step, STEPS);
    sample.within_episode(mode.within);
    if mode.time_major {
        sample.time_major();
    }
    let (obs_c, reward_c, bootstrap_c) = (sample.all(obs), sample.all(reward), sample.all(bootstrap));
    let (terminated, truncated) = (sample.terminated(), sample.truncated());
    let (is_first, mask) = (sample.is_first(), sample.mask());
    let builder = Feed::builder(sample).batch(LANES).buffers(2).episodes(1 << 14);
    let feed = if mode.lockstep { builder.lockstep(LANES) } else { builder }.start().unwrap();
    let (mut writer, learner, weights) = (feed.writer(LANES).unwrap(), feed.learner().unwrap(), Weights::new(()));
    let actor = std::thread::spawn(move || {
        let mut envs: Vec<Walk> = (0..LANES as u32)
            .map(|lane| Walk { lane, episode: lane, at: 0, over: false, next_step_mode: mode.next_step })
            .collect();
        let mut shown: Vec<[u32; 3]> = envs.iter().map(Walk::obs).collect();
        for _ in 0..TICKS {
            let mut step = writer.step().unwrap();
            step.put(obs, shown.as_flattened()).unwrap();
            for (lane, env) in envs.iter().enumerate() {
                if env.over {
                    step.mask_out(lane); // before `policy`, which hands the observation in with its flags
                }
            }
            step.policy(&weights).unwrap();
            for (lane, env) in envs.iter_mut().enumerate() {
                let out = env.step();
                assert_eq!(out.ignored, shown[lane][1] != env.episode && mode.next_step);
                step.put_lane(reward, lane, &[out.reward]).unwrap();
                // The recipe: where the final observation has no place in the row, its value has.
                let last = if mode.next_step { out.obs } else { out.final_obs };
                let boot = if out.end == Some(End::Truncated) { value(last) } else { 0.0 };
                step.put_lane(bootstrap, lane, &[boot]).unwrap();
                if let Some(end) = out.end {
                    let mut place = step.end(lane, end);
                    if mode.within {
                        place.put(obs, &last).unwrap();
                    }
                }
                shown[lane] = out.obs;
            }
            step.commit().unwrap();
        }
    });
    let mut seen: HashMap<[u32; 3], u32> = HashMap::new();
    let (mut masked, mut boundaries) = (0, HashMap::new());
    for batch in learner.iter() {
        let batch = batch.unwrap();
        let rows = batch.rows();
        let (lanes, firsts): (Vec<_>, Vec<_>) = (batch.lanes().collect(), batch.first_steps().collect());
        let lengths: Vec<_> = batch.lengths().collect();
        for row in 0..rows {
            let at = |t: usize, of: usize| if mode.time_major { t * rows + row } else { row * of + t };
            let obs_at = |t: usize| -> [u32; 3] {
                let at = at(t, STEPS + 1);
                batch.slice(obs_c)[at * 3..at * 3 + 3].try_into().unwrap()
            };
            let first_at = |t: usize| batch.slice(is_first)[at(t, STEPS + 1)];
            for t in 0..lengths[row] {
                let (here, next) = (obs_at(t), obs_at(t + 1));
                let flag = |column| batch.slice(column)[at(t, STEPS)];
                if !flag(mask) {
                    assert!(mode.next_step && !first_at(t), "a reset step begins nothing: {here:?}");
                    assert_eq!(here[2], Walk::length(here[1]), "it carries the final observation");
                    masked += 1;
                    continue;
                }
                assert_eq!(first_at(t), here[2] == 0, "is_first of {here:?} in {mode:?}");
                let (target, end) = truth(here);
                let ended = match (flag(terminated), flag(truncated)) {
                    (false, false) => None,
                    (true, false) => Some(End::Terminated),
                    (false, true) => Some(End::Truncated),
                    both => panic!("{both:?}"),
                };
                assert_eq!(ended, end, "the end of {here:?}");
                // What a learner computes, from the batch alone.
                let boot = batch.slice(bootstrap_c)[at(t, STEPS)];
                let follows = match ended {
                    Some(End::Terminated) => 0.0,
                    // Where the row shows what came last, its value is the critic's own; elsewhere it is the leaf's.
                    Some(End::Truncated) if mode.next_step || mode.within => value(next),
                    Some(End::Truncated) => boot,
                    None => value(next),
                };
                if ended == Some(End::Truncated) {
                    assert_eq!(boot, follows, "both ways give the same");
                }
                let got = batch.slice(reward_c)[at(t, STEPS)] + GAMMA * follows;
                assert_eq!(got, target, "the target of {here:?} in {mode:?}");
                assert_eq!(here[0] as usize, lanes[row]);
                assert_eq!(seen.insert(here, 1), None, "{here:?} twice");
            }
            // The observation behind an unroll is the next one's first, with the same flag.
            if !mode.within {
                boundaries.insert((lanes[row], firsts[row], false), (obs_at(0), first_at(0)));
                boundaries.insert((lanes[row], firsts[row] + STEPS as u64, true), (obs_at(STEPS), first_at(STEPS)));
            }
        }
    }
    actor.join().unwrap();
    for (&(lane, step, behind), shown) in &boundaries {
        if behind && let Some(next) = boundaries.get(&(lane, step, false)) {
            assert_eq!(shown, next, "lane {lane}, step {step}");
        }
    }
    let metrics = feed.metrics();
    assert_eq!(metrics.steps, LANES as u64 * TICKS);
    assert_eq!(seen.len() as u64 + masked + metrics.unfinished_steps, metrics.steps);
    assert_eq!(masked > 0, mode.next_step);
    // Returns and lengths: the same in both modes, reset steps are no part of an episode.
    let mut episodes: HashMap<usize, u32> = (0..LANES).map(|lane| (lane, lane as u32)).collect();
    let mut count = 0;
    for episode in feed.episodes().try_iter() {
        let number = episodes.get_mut(&episode.lane).unwrap();
        let length = Walk::length(*number);
        let ret: f64 = (0..length).map(|at| self::reward([episode.lane as u32, *number, at])).sum();
        assert_eq!((episode.length, episode.ret), (u64::from(length), ret));
        assert_eq!(Some(episode.end), truth([episode.lane as u32, *number, length - 1]).1);
        *number += 1;
        count += 1;
    }
    assert_eq!((metrics.episodes, metrics.episodes_dropped), (count, 0));
    assert!(count > 300);
}

#[test]
fn same_step_autoreset_with_bootstrap_values() {
    for (lockstep, time_major) in [(false, false), (false, true), (true, false), (true, true)] {
        run(Mode { next_step: false, within: false, lockstep, time_major });
    }
}

#[test]
fn same_step_autoreset_with_final_observations() {
    for time_major in [false, true] {
        run(Mode { next_step: false, within: true, lockstep: false, time_major });
    }
}

#[test]
fn next_step_autoreset() {
    for (lockstep, time_major) in [(false, false), (false, true), (true, false), (true, true)] {
        run(Mode { next_step: true, within: false, lockstep, time_major });
    }
    run(Mode { next_step: true, within: true, lockstep: false, time_major: false });
}

/// Single steps know the same flags; the learner pairs them itself.
#[test]
fn single_steps_with_reset_steps() {
    let mut step = Step::new();
    let reward = step.leaf::<f32>("reward", &[]);
    step.reward(reward);
    let mut sample = Sample::step(step);
    let (first, mask, term) = (sample.is_first(), sample.mask(), sample.terminated());
    let feed = Feed::builder(sample).batch(6).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    for t in 0..6 {
        let mut step = writer.step().unwrap();
        if t == 3 {
            step.mask_out(0);
        }
        step.put(reward, &[1.0]).unwrap();
        if t == 2 || t == 5 {
            step.end(0, End::Terminated);
        }
        step.commit().unwrap();
    }
    let batch = learner.next_batch().unwrap();
    assert_eq!(batch.slice(first), [true, false, false, false, true, false]);
    assert_eq!(batch.slice(mask), [true, true, true, false, true, true]);
    assert_eq!(batch.slice(term), [false, false, true, false, false, true]);
    let episodes: Vec<(u64, f64)> = feed.episodes().try_iter().map(|e| (e.length, e.ret)).collect();
    assert_eq!(episodes, [(3, 3.0), (2, 2.0)]);
}
