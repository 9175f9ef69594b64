//! The sampling actor: one per stream of batches from a store, its thread the sampling thread.
//!
//! Owns the stream's round and its helpers' threads. It waits for free slots, for items and for the close, never for its
//! mailbox: what must be bounded is no message. What a helper's panic said is the sampling thread's own.

use super::host;
use super::supervisor::{Common, Failed, Supervisor};
use crate::intake::IntakeGate;
use crate::sampling::{Crew, Stream};
use crate::store::Store;
#[cfg(test)]
use crate::sync::points;
use actix::{Actor, ActorContext, Addr, AsyncContext, Context, Handler, Message};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

pub(crate) const SAMPLING: &str = "sampling";
/// Names of the threads that help to fill batches.
const GATHER: &str = "gather";

#[derive(Debug)]
pub(crate) struct Sampling {
    pub(crate) feed: u64,
    pub(crate) gate: Arc<IntakeGate>,
    pub(crate) store: Arc<Store>,
    /// Threads that fill a batch, this one included.
    pub(crate) threads: usize,
    pub(crate) common: Arc<Common>,
    pub(crate) supervisor: Addr<Supervisor>,
}

impl Actor for Sampling {
    type Context = Context<Self>;
    fn started(&mut self, context: &mut Self::Context) {
        // A message to itself, so that a panic in here is one of a handler, with the address already handed out.
        context.notify(Sample);
    }
}

/// Sample until the gates close.
#[derive(Debug)]
struct Sample;

impl Message for Sample {
    type Result = ();
}

impl Handler<Sample> for Sampling {
    type Result = ();
    fn handle(&mut self, _: Sample, _: &mut Self::Context) {
        #[cfg(test)]
        points::here("sampling: Sample");
        let crew = Arc::new(Crew::new(self.threads - 1));
        let helpers: Result<Vec<_>, _> = (0..self.threads - 1).map(|helper| self.help(helper, crew.clone())).collect();
        match helpers {
            Ok(helpers) => {
                // Whatever happens, nobody waits for helpers that were not dismissed.
                let ended = catch_unwind(AssertUnwindSafe(|| {
                    Stream::new(self.gate.clone(), self.store.clone(), crew.clone()).run();
                }));
                crew.dismiss();
                helpers.into_iter().for_each(|helper| drop(helper.join()));
                if let Err(panic) = ended {
                    std::panic::resume_unwind(panic);
                }
            }
            Err(error) => {
                crew.dismiss();
                self.fail(format!("a thread that fills batches could not be started: {error}"));
            }
        }
        // The actor itself stays until it is told: a source that ended is no failure.
    }
}

impl Sampling {
    fn help(&self, helper: usize, crew: Arc<Crew>) -> std::io::Result<JoinHandle<()>> {
        host::thread(self.feed, &format!("{GATHER}{helper}"), move || crew.work(helper))
    }

    fn fail(&self, text: String) {
        self.common.fail(SAMPLING, text.clone());
        self.supervisor.do_send(Failed { actor: SAMPLING, text });
    }
}

/// End. The round ends by the close of the gates.
#[derive(Debug)]
pub(crate) struct StopSampling;

impl Message for StopSampling {
    type Result = ();
}

impl Handler<StopSampling> for Sampling {
    type Result = ();
    fn handle(&mut self, _: StopSampling, context: &mut Self::Context) {
        #[cfg(test)]
        points::here("sampling: StopSampling");
        context.stop();
    }
}
