//! APPO on CartPole-v1, fed by `pinring`.
//!
//! ```text
//! env-0, env-1, …: carts ─ policy ─ writer ─┐                           ┌─► V-trace, PPO passes (burn) ─┐
//!       ▲                                   ├─► feed ─ batch of unrolls ┤                               │
//!       │                                   ┘                           └─ dropped: the slot is free    │
//!       └──────────────── Weights<Policy>, one version a batch ◄────────────────────────────────────────┘
//!                                  └─► evaluation actor: 20 greedy episodes
//! ```
//!
//! Read [`schema`], then [`actor`], then [`train`]: together they are the use of the library. [`mod@env`], [`net`],
//! [`returns`] and [`appo`] are the learning; [`eval`], [`curve`], [`plot`], [`report`] and [`options`] the rest.

pub mod actor;
pub mod appo;
pub mod curve;
pub mod env;
pub mod eval;
pub mod net;
pub mod networks;
pub mod options;
pub mod plot;
pub mod report;
pub mod returns;
pub mod schema;
pub mod train;
