//! The supervisor: the order of the start, the first fault, and the stop.
//!
//! Owns the other actors' addresses; their threads are the crew's. It starts pinning, then feeding device by device,
//! then sampling if steps are stored, then ingest, then answers the builder; it takes every exit report; it closes the
//! gates and ends the crew. Nothing is restarted: the first fault is final, closes the gates with its text, and a user starts a new feed.

use super::crew::Crew;
use super::feeding::{FEEDING, Feeding, FeedingPlan, StopFeeding};
use super::host::{self, Exit};
use super::ingest::{Ingest, StopIngest, Watch};
use super::pinning::{PinPlan, Pinning, StopPinning};
use super::sampling::{SAMPLING, Sampling, StopSampling};
use crate::error::{Closed, Error, ErrorKind, Fault};
use crate::feeding::Desk;
use crate::intake::{IntakeConfig, IntakeGate};
use crate::memory::{PinReport, Ring};
#[cfg(test)]
use crate::sync::points;
use actix::{Actor, ActorContext, Addr, AsyncContext, Context, Handler, Message};
use crossbeam_channel::Sender;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

pub(crate) const SUPERVISOR: &str = "supervisor";
pub(crate) const PINNING: &str = "pinning";
pub(crate) const INGEST: &str = "ingest";

/// What a started feed consists of.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) gate: Arc<IntakeGate>,
    pub(crate) pin_report: Option<PinReport>,
    /// Bytes of the ring that CUDA did not let go of, once it was dropped.
    pub(crate) kept_bytes: Arc<AtomicUsize>,
    /// One per device, in the order of the builder.
    pub(crate) desks: Vec<Arc<Desk>>,
}

/// What outlives the supervisor: the gates to close, the fault to name and the actors to end if it fails itself.
#[derive(Debug, Default)]
pub(crate) struct Common {
    pub(crate) gate: OnceLock<Arc<IntakeGate>>,
    pub(crate) fault: OnceLock<Arc<Fault>>,
    pub(crate) crew: Crew,
}

impl Common {
    /// Keeps the first fault, closes the gates with it, says so, and tells the actors to end.
    pub(crate) fn fail(&self, actor: &'static str, text: String) {
        let fault = self.fault.get_or_init(|| {
            tracing::error!(target: "pinring", actor, text, "an actor failed; the feed stops");
            Arc::new(Fault { actor, text })
        });
        if let Some(gate) = self.gate.get() {
            gate.close(Closed::Fault(fault.clone()));
        }
        self.crew.tell();
    }

    /// The fault as an error; to be asked when a start failed without an answer.
    pub(crate) fn error(&self) -> Error {
        match self.fault.get() {
            Some(fault) => Closed::Fault(fault.clone()).into(),
            None => Error::new(ErrorKind::Fault, "the supervisor ended without an answer; start a new feed"),
        }
    }
}

/// What the start needs once the ring is there.
pub(crate) type MakeGate = Box<dyn FnOnce(Arc<Ring>) -> IntakeConfig + Send>;

pub(crate) struct Supervisor {
    feed: u64,
    common: Arc<Common>,
    plan: Option<PinPlan>,
    make_gate: Option<MakeGate>,
    /// Devices that were not attached yet, the next one last.
    devices: Vec<FeedingPlan>,
    /// Threads that fill a sampled batch.
    gather_threads: usize,
    /// What the builder gets, once it is whole.
    running: Option<Running>,
    /// The builder, until it was answered.
    start: Option<Sender<Result<Running, Error>>>,
    /// For tests that kill an actor; everybody else goes through the crew.
    pinning: Option<Addr<Pinning>>,
    ingest: Option<Addr<Ingest>>,
    /// Actors that run.
    alive: usize,
    stopping: bool,
    /// Who hears when the last actor has ended.
    waiting: Option<Waiting>,
}

/// Who waits for the end.
enum Waiting {
    Stop(Sender<Vec<String>>),
    Start(Sender<Result<Running, Error>>, Error),
    /// A feed that nobody wants any more.
    Nobody,
}

impl Supervisor {
    pub(crate) fn new(
        feed: u64,
        common: Arc<Common>,
        plan: PinPlan,
        make_gate: MakeGate,
        mut devices: Vec<FeedingPlan>,
        gather_threads: usize,
        start: Sender<Result<Running, Error>>,
    ) -> Supervisor {
        devices.reverse();
        Supervisor {
            feed,
            common,
            plan: Some(plan),
            make_gate: Some(make_gate),
            devices,
            gather_threads,
            running: None,
            start: Some(start),
            pinning: None,
            ingest: None,
            alive: 0,
            stopping: false,
            waiting: None,
        }
    }

    fn report_to(address: Addr<Supervisor>, actor: &'static str) -> impl FnOnce(Exit) + Send + 'static {
        move |exit| address.do_send(Exited { actor, exit })
    }

    /// Ends the crew; the builder hears of `error` when nothing runs any more.
    fn refuse(&mut self, error: Error, context: &mut Context<Self>) {
        let waiting = self.start.take().map_or(Waiting::Nobody, |start| Waiting::Start(start, error));
        self.end(waiting, context);
    }

    fn end(&mut self, waiting: Waiting, context: &mut Context<Self>) {
        self.stopping = true;
        self.waiting = Some(waiting);
        if let Some(gate) = self.common.gate.get() {
            gate.stop();
        }
        self.common.crew.tell();
        self.finish_if_alone(context);
    }

    /// An actor failed. A start ends with the fault; a feed that runs has its gates closed, and waits for its stop.
    fn fail(&mut self, actor: &'static str, text: String) {
        self.common.fail(actor, text);
        self.stopping = true;
        if let Some(start) = self.start.take() {
            self.waiting = Some(Waiting::Start(start, self.common.error()));
        }
    }

    fn finish_if_alone(&mut self, context: &mut Context<Self>) {
        if self.alive == 0 {
            self.finish(None, context);
        }
    }

    /// Joins who has ended by `deadline`, gives up the others, and answers.
    fn finish(&mut self, deadline: Option<Instant>, context: &mut Context<Self>) {
        let Some(waiting) = self.waiting.take() else { return };
        let given_up = self.common.crew.end(deadline);
        match waiting {
            Waiting::Stop(answer) => drop(answer.send(given_up)),
            Waiting::Start(start, error) => drop(start.send(Err(error))),
            Waiting::Nobody => {}
        }
        context.stop();
    }

    /// The ring is there: makes the gate and starts the rest.
    fn run(&mut self, ring: Arc<Ring>, make_gate: MakeGate, context: &mut Context<Self>) {
        let (pin_report, kept_bytes) = (ring.report().cloned(), ring.kept_bytes());
        let gate = Arc::new(IntakeGate::new(make_gate(ring)));
        let _ = self.common.gate.set(gate.clone());
        self.running = Some(Running { gate, pin_report, kept_bytes, desks: Vec::new() });
        self.start_next(context);
    }

    /// Starts the next device's feeding actor, whose answer brings the one behind it; after the last, ingest, and then
    /// answers the builder.
    fn start_next(&mut self, context: &mut Context<Self>) {
        let Some(gate) = self.running.as_ref().map(|running| running.gate.clone()) else { return };
        let address = context.address();
        if let Some(plan) = self.devices.pop() {
            let name = FEEDING[plan.index];
            let (common, supervisor) = (self.common.clone(), address.clone());
            let feeding = Feeding { feed: self.feed, plan, gate, common, supervisor };
            match host::host(self.feed, name, feeding, Supervisor::report_to(address, name)) {
                Ok(hosted) => {
                    self.common.crew.add(hosted, || StopFeeding);
                    self.alive += 1;
                }
                Err(error) => self.refuse(error, context),
            }
            return;
        }
        if let Some(store) = gate.store.clone() {
            let (common, supervisor) = (self.common.clone(), address.clone());
            let (feed, threads) = (self.feed, self.gather_threads);
            let sampling = Sampling { feed, gate: gate.clone(), store, threads, common, supervisor };
            match host::host(self.feed, SAMPLING, sampling, Supervisor::report_to(address.clone(), SAMPLING)) {
                Ok(hosted) => {
                    self.common.crew.add(hosted, || StopSampling);
                    self.alive += 1;
                }
                Err(error) => return self.refuse(error, context),
            }
        }
        let ingest = Ingest { gate, watch: Watch::new() };
        match host::host(self.feed, INGEST, ingest, Supervisor::report_to(address, INGEST)) {
            Ok(hosted) => {
                self.ingest = Some(self.common.crew.add(hosted, || StopIngest));
                self.alive += 1;
            }
            Err(error) => return self.refuse(error, context),
        }
        let Some(running) = self.running.take() else { return };
        let (pinned, devices) = (running.pin_report.is_some(), running.desks.len());
        tracing::info!(target: "pinring", feed = self.feed, pinned, devices, "the feed runs");
        // Nobody may be there to take it: the start was given up while it was stuck.
        if self.start.take().is_none_or(|start| start.send(Ok(running)).is_err()) {
            self.end(Waiting::Nobody, context);
        }
    }
}

impl Actor for Supervisor {
    type Context = Context<Self>;
    fn started(&mut self, context: &mut Self::Context) {
        let Some(plan) = self.plan.take() else { return };
        let supervisor = context.address();
        let pinning = Pinning { plan, supervisor: supervisor.clone(), ring: None, device: None };
        match host::host(self.feed, PINNING, pinning, Supervisor::report_to(supervisor, PINNING)) {
            Ok(hosted) => {
                self.pinning = Some(self.common.crew.add(hosted, || StopPinning));
                self.alive += 1;
            }
            Err(error) => self.refuse(error, context),
        }
    }
}

/// The ring, or why there is none.
pub(crate) struct Pinned(pub(crate) Result<Arc<Ring>, Error>);

impl Message for Pinned {
    type Result = ();
}

impl Handler<Pinned> for Supervisor {
    type Result = ();
    fn handle(&mut self, Pinned(made): Pinned, context: &mut Self::Context) {
        #[cfg(test)]
        points::here("supervisor: Pinned");
        let Some(make_gate) = self.make_gate.take().filter(|_| !self.stopping) else { return };
        match made {
            Ok(ring) => self.run(ring, make_gate, context),
            Err(error) => {
                tracing::error!(target: "pinring", error = %error, "the ring could not be made");
                self.refuse(error, context);
            }
        }
    }
}

/// A device is attached and its feeding thread runs, or why not.
#[derive(Debug)]
pub(crate) struct FeedingUp(pub(crate) Result<Arc<Desk>, Error>);

impl Message for FeedingUp {
    type Result = ();
}

impl Handler<FeedingUp> for Supervisor {
    type Result = ();
    fn handle(&mut self, FeedingUp(up): FeedingUp, context: &mut Self::Context) {
        #[cfg(test)]
        points::here("supervisor: FeedingUp");
        match up {
            Ok(_) if self.stopping => {}
            Ok(desk) => {
                self.running.iter_mut().for_each(|running| running.desks.push(desk.clone()));
                self.start_next(context);
            }
            Err(error) => {
                tracing::error!(target: "pinring", error = %error, "a device could not be attached");
                self.refuse(error, context);
            }
        }
    }
}

/// An actor met an error that ends the feed.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) actor: &'static str,
    pub(crate) text: String,
}

impl Message for Failed {
    type Result = ();
}

impl Handler<Failed> for Supervisor {
    type Result = ();
    fn handle(&mut self, Failed { actor, text }: Failed, context: &mut Self::Context) {
        #[cfg(test)]
        points::here("supervisor: Failed");
        self.fail(actor, text);
        self.finish_if_alone(context);
    }
}

/// An actor's thread is at its end.
#[derive(Debug)]
pub(crate) struct Exited {
    actor: &'static str,
    exit: Exit,
}

impl Message for Exited {
    type Result = ();
}

impl Handler<Exited> for Supervisor {
    type Result = ();
    fn handle(&mut self, Exited { actor, exit }: Exited, context: &mut Self::Context) {
        #[cfg(test)]
        points::here("supervisor: Exited");
        self.alive = self.alive.saturating_sub(1);
        let exit = match exit {
            // Actors end when they are told to.
            Ok(()) if !self.stopping => Err("it ended without being asked to".to_owned()),
            other => other,
        };
        if let Err(text) = exit {
            self.fail(actor, text);
        }
        self.finish_if_alone(context);
    }
}

/// Stop everything by `deadline`.
#[derive(Debug)]
pub(crate) struct Stop {
    pub(crate) deadline: Instant,
    /// Gets the names of the threads that were given up.
    pub(crate) answer: Sender<Vec<String>>,
}

impl Message for Stop {
    type Result = ();
}

impl Handler<Stop> for Supervisor {
    type Result = ();
    fn handle(&mut self, Stop { deadline, answer }: Stop, context: &mut Self::Context) {
        #[cfg(test)]
        points::here("supervisor: Stop");
        tracing::info!(target: "pinring", feed = self.feed, "the feed stops");
        if let Some(gate) = self.common.gate.get() {
            gate.set_stop_deadline(deadline);
        }
        context.run_later(deadline.saturating_duration_since(Instant::now()), move |supervisor, context| {
            supervisor.finish(Some(deadline), context);
        });
        self.end(Waiting::Stop(answer), context);
    }
}

impl std::fmt::Debug for Supervisor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supervisor").field("feed", &self.feed).field("stopping", &self.stopping).finish_non_exhaustive()
    }
}

/// Panic with this text: how tests kill an actor.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct Crash(pub(crate) String);

#[cfg(test)]
impl Message for Crash {
    type Result = ();
}

/// Tells the named actor to panic.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct CrashActor(pub(crate) &'static str, pub(crate) String);

#[cfg(test)]
impl Message for CrashActor {
    type Result = ();
}

#[cfg(test)]
impl Handler<CrashActor> for Supervisor {
    type Result = ();
    fn handle(&mut self, CrashActor(actor, text): CrashActor, _: &mut Self::Context) {
        match actor {
            PINNING => self.pinning.iter().for_each(|pinning| pinning.do_send(Crash(text.clone()))),
            INGEST => self.ingest.iter().for_each(|ingest| ingest.do_send(Crash(text.clone()))),
            _ => panic!("{text}"),
        }
    }
}
