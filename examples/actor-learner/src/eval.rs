//! The evaluation actor: plays greedily with a given network, on a thread of its own, away from the feed.
//!
//! Owns its carts. A request carries the network to play with, so that what is judged is one set of weights and not a
//! moving target. What it does not do: decide when to evaluate, or write steps that anyone learns from.

use crate::env::Carts;
use crate::net::{Mlp, Scratch};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

/// Episodes of one evaluation.
pub const EPISODES: usize = 20;

/// The outcome of one evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Environment steps learned from when it was asked for.
    pub steps: u64,
    /// The version of the weights.
    pub version: u64,
    /// The return of every episode.
    pub returns: Vec<f64>,
}

impl Evaluation {
    /// The mean return.
    pub fn mean(&self) -> f64 {
        self.returns.iter().sum::<f64>() / self.returns.len() as f64
    }
}

struct Request {
    steps: u64,
    version: u64,
    network: Mlp,
}

/// The evaluation thread panicked; its message is on stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the evaluation thread panicked")]
pub struct Gone;

/// The actor's handle. Dropping it ends the thread.
#[derive(Debug)]
pub struct Evaluator {
    requests: Option<Sender<Request>>,
    replies: Receiver<Evaluation>,
    pending: bool,
    thread: Option<JoinHandle<()>>,
}

impl Evaluator {
    /// Starts the thread. Every evaluation plays the same first states, which are drawn from `seed`.
    ///
    /// # Errors
    /// If the system has no thread left.
    pub fn start(seed: u64) -> std::io::Result<Evaluator> {
        let (requests, inbox) = channel::<Request>();
        let (outbox, replies) = channel();
        let thread = std::thread::Builder::new().name("evaluation".into()).spawn(move || {
            for Request { steps, version, network } in inbox {
                if outbox.send(Evaluation { steps, version, returns: play(&network, seed) }).is_err() {
                    return;
                }
            }
        })?;
        Ok(Evaluator { requests: Some(requests), replies, pending: false, thread: Some(thread) })
    }

    /// Asks for an evaluation of what `network` prefers: of a policy's logits, or of action values.
    pub fn request(&mut self, steps: u64, version: u64, network: Mlp) {
        if let Some(requests) = &self.requests {
            let _ = requests.send(Request { steps, version, network }); // if the thread is gone, `reply` says so
        }
        self.pending = true;
    }

    /// Whether one is under way.
    pub fn pending(&self) -> bool {
        self.pending
    }

    /// The evaluation that was asked for, if there is one and, unless `wait` is set, if it is finished.
    ///
    /// # Errors
    /// [`Gone`] if the thread panicked.
    pub fn reply(&mut self, wait: bool) -> Result<Option<Evaluation>, Gone> {
        if !self.pending {
            return Ok(None);
        }
        let reply = match self.replies.try_recv() {
            Err(TryRecvError::Empty) if !wait => return Ok(None),
            Err(TryRecvError::Empty) => self.replies.recv().map_err(|_| Gone)?,
            Err(TryRecvError::Disconnected) => return Err(Gone),
            Ok(reply) => reply,
        };
        self.pending = false;
        Ok(Some(reply))
    }
}

impl Drop for Evaluator {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there has been printed, and told by `reply`
        }
    }
}

/// The returns of [`EPISODES`] greedy episodes.
pub fn play(network: &Mlp, seed: u64) -> Vec<f64> {
    let mut carts = Carts::new((0..EPISODES as u64).map(|episode| seed.wrapping_add(episode)));
    let mut scratch = Scratch::default();
    let mut episode = |lane| {
        let mut steps = 1.0;
        while carts.step(lane, network.greedy(&carts.observation(lane), &mut scratch)).is_none() {
            steps += 1.0;
        }
        steps
    };
    (0..EPISODES).map(&mut episode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::Dense;

    /// Pushes where the pole leans and where it is falling to; a controller known to hold it for all 500 steps.
    fn controller() -> Mlp {
        let weight = vec![-0.1, 0.1, -0.2, 0.2, -1.0, 1.0, -0.5, 0.5];
        Mlp { layers: vec![Dense { weight, bias: vec![0.0; 2] }] }
    }

    #[test]
    fn a_known_controller_holds_and_a_constant_push_does_not() {
        assert_eq!(play(&controller(), 1), vec![500.0; EPISODES]);
        let mut pushes_left = controller();
        pushes_left.layers[0] = Dense { weight: vec![0.0; 8], bias: vec![1.0, 0.0] };
        let returns = play(&pushes_left, 1);
        assert!(returns.iter().all(|&r| (5.0..20.0).contains(&r)), "{returns:?}");
    }

    #[test]
    fn the_actor_replies_once_per_request_and_ends_when_dropped() {
        let mut evaluator = Evaluator::start(9).unwrap();
        assert_eq!(evaluator.reply(true), Ok(None), "nothing was asked");
        evaluator.request(64, 3, controller());
        assert!(evaluator.pending());
        let evaluation = evaluator.reply(true).unwrap().unwrap();
        assert_eq!((evaluation.steps, evaluation.version, evaluation.mean()), (64, 3, 500.0));
        assert!(!evaluator.pending());
        assert_eq!(evaluator.reply(true), Ok(None));
    }

    #[test]
    fn a_panic_of_the_actor_is_told_instead_of_waited_for() {
        let mut evaluator = Evaluator::start(9).unwrap();
        let mut broken = controller();
        broken.layers.clear(); // the observation's four numbers pass for logits
        broken.layers.push(Dense { weight: Vec::new(), bias: Vec::new() });
        evaluator.request(64, 3, broken);
        assert_eq!(evaluator.reply(true), Err(Gone));
    }
}
