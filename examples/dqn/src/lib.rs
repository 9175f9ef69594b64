//! Double DQN with prioritized replay on CartPole-v1, fed by `pinring`.
//!
//! ```text
//! env-0, env-1, …: carts ─ ε-greedy ─ writer ─┐                          ┌─► targets, loss, Adam (burn) ─┐
//!       ▲                                     ├─► store ─ sampled batch ─┤                               │
//!       │                                     ┘     ▲                    └─► |δ|: new priorities ──┐     │
//!       │                                           └──────────────────────────────────────────────┘     │
//!       └──────────────── Weights<Mlp>, one version an update ◄──────────────────────────────────────────┘
//! ```
//!
//! Read [`schema`], then [`actor`], then [`train`]: together they are the use of the library. [`learner`] is the learning.
//! Carts, networks, evaluation and curve are those of the other example, `actor_learner`.

pub mod actor;
pub mod learner;
pub mod schema;
pub mod train;
