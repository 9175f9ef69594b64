//! The ingest actor: the intake gate's watch and its end.
//!
//! Owns the gate's close at the stop. While the feed runs it looks once a second whether somebody has waited long, says
//! so in the log with who waits for whom, and wakes async learners that hold every batch so that they get their error.
//! It waits for the stop, and sends its exit report. No step passes through it: writers reach the gate themselves.

use crate::error::Closed;
use crate::intake::IntakeGate;
#[cfg(test)]
use crate::sync::points;
use actix::{Actor, ActorContext, AsyncContext, Context, Handler, Message};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the gate is looked at.
const TICK: Duration = Duration::from_secs(1);
/// How long nothing may pass while somebody waits before it is said.
const STALL: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Ingest {
    pub(crate) gate: Arc<IntakeGate>,
    pub(crate) watch: Watch,
}

/// What was seen last.
#[derive(Debug)]
pub(crate) struct Watch {
    passed: (u64, u64),
    since: Instant,
    said: bool,
}

impl Watch {
    pub(crate) fn new() -> Watch {
        Watch { passed: (0, 0), since: Instant::now(), said: false }
    }
}

impl Actor for Ingest {
    type Context = Context<Self>;
    fn started(&mut self, context: &mut Self::Context) {
        context.run_interval(TICK, |ingest, context| {
            #[cfg(test)]
            points::here("ingest: look");
            if matches!(ingest.gate.closed(), Some(Closed::Stopped | Closed::Fault(_))) {
                context.stop(); // also when the supervisor that should say so is gone
                return;
            }
            ingest.gate.batches.wake_wakers();
            ingest.look();
        });
    }
}

impl Ingest {
    fn look(&mut self) {
        let metrics = self.gate.metrics();
        let (watch, parked, at_lag_gate) = (&mut self.watch, self.gate.parked(), self.gate.at_lag_gate());
        let passed = (metrics.steps, metrics.batches_taken);
        if passed != watch.passed || parked + at_lag_gate == 0 {
            *watch = Watch { passed, ..Watch::new() };
        } else if !watch.said && watch.since.elapsed() >= STALL {
            watch.said = true;
            let seconds = watch.since.elapsed().as_secs();
            if at_lag_gate > 0 {
                let newest = self.gate.seen_versions().map(|versions| versions.newest());
                tracing::warn!(
                    target: "pinring",
                    writers = at_lag_gate,
                    newest,
                    held = metrics.batches_held,
                    waiting = metrics.batches_waiting,
                    seconds,
                    "stalled: writers wait at the lag gate for newer weights, and none were published"
                );
                return;
            }
            if self.gate.store.is_some() {
                tracing::warn!(
                    target: "pinring",
                    writers = parked,
                    held = metrics.batches_held,
                    waiting = metrics.batches_waiting,
                    seconds,
                    "stalled: writers wait for the pace of the replay store, and the learner has taken nothing"
                );
                return;
            }
            tracing::warn!(
                target: "pinring",
                writers = parked,
                held = metrics.batches_held,
                waiting = metrics.batches_waiting,
                lanes_without_writer = self.gate.lanes_without_writer(),
                seconds,
                "stalled: writers wait for room in the ring, and the learner has taken nothing"
            );
        }
    }
}

/// Close the gate and end.
#[derive(Debug)]
pub(crate) struct StopIngest;

impl Message for StopIngest {
    type Result = ();
}

impl Handler<StopIngest> for Ingest {
    type Result = ();
    fn handle(&mut self, _: StopIngest, context: &mut Self::Context) {
        #[cfg(test)]
        points::here("ingest: StopIngest");
        self.gate.close(Closed::Stopped);
        context.stop();
    }
}

#[cfg(test)]
impl Handler<super::supervisor::Crash> for Ingest {
    type Result = ();
    fn handle(&mut self, crash: super::supervisor::Crash, _: &mut Self::Context) {
        panic!("{}", crash.0);
    }
}
