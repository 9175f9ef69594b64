//! The supervisor: the order of the start, the first fault, and the stop.
//!
//! Owns the other actors' addresses and threads. It starts pinning, then feeding, then ingest, then answers the
//! builder; it takes
//! every exit report; and it stops the others in reverse order. Nothing is restarted: the first fault is final, closes
//! the gates with its text, and a user starts a new feed.

use super::feeding::{FEEDING, Feeding, FeedingPlan};
use super::host::{self, Exit, Hosted};
use super::ingest::{Ingest, StopIngest, Watch};
use super::pinning::{PinPlan, Pinning, StopPinning};
use crate::error::{Closed, Error, ErrorKind, Fault};
use crate::feeding::Desk;
use crate::intake::{IntakeConfig, IntakeGate};
use crate::memory::{PinReport, Ring, RingError};
use actix::{Actor, ActorContext, Addr, AsyncContext, Context, Handler, Message};
use crossbeam_channel::Sender;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

pub(crate) const SUPERVISOR: &str = "supervisor";
pub(crate) const PINNING: &str = "pinning";
pub(crate) const INGEST: &str = "ingest";

/// What a started feed consists of.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) gate: Arc<IntakeGate>,
    pub(crate) pin_report: Option<PinReport>,
    /// One per device, in the order of the builder.
    pub(crate) desks: Vec<Arc<Desk>>,
}

/// What outlives the supervisor: the gates to close and the fault to name if it panics itself.
#[derive(Debug, Default)]
pub(crate) struct Common {
    pub(crate) gate: OnceLock<Arc<IntakeGate>>,
    pub(crate) fault: OnceLock<Arc<Fault>>,
}

impl Common {
    /// Keeps the first fault, closes the gates with it, and says so.
    pub(crate) fn fail(&self, actor: &'static str, text: String) {
        let fault = self.fault.get_or_init(|| {
            tracing::error!(target: "pinring", actor, text, "an actor failed; the feed stops");
            Arc::new(Fault { actor, text })
        });
        if let Some(gate) = self.gate.get() {
            gate.close(Closed::Fault(fault.clone()));
        }
    }

    pub(crate) fn error(&self) -> Option<Error> {
        self.fault.get().map(|fault| Closed::Fault(fault.clone()).into())
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
    desks: Vec<Arc<Desk>>,
    pin_report: Option<PinReport>,
    /// The builder, until it was answered.
    start: Option<Sender<Result<Running, Error>>>,
    pinning: Option<Child<Pinning>>,
    ingest: Option<Child<Ingest>>,
    feeding: Vec<Child<Feeding>>,
    stopping: bool,
    stop: Option<StopOrder>,
}

/// An actor that was started.
struct Child<A: Actor> {
    address: Addr<A>,
    thread: Option<JoinHandle<()>>,
    exited: bool,
}

impl<A: Actor> From<Hosted<A>> for Child<A> {
    fn from(hosted: Hosted<A>) -> Child<A> {
        Child { address: hosted.address, thread: Some(hosted.thread), exited: false }
    }
}

impl<A: Actor> Child<A> {
    /// Joins the thread if its actor has exited; else the thread is given up.
    fn end(&mut self, feed: u64, name: &str) -> Option<String> {
        let thread = self.thread.take()?;
        if self.exited {
            let _ = thread.join(); // its panic, if any, is in the exit report
            return None;
        }
        Some(host::thread_name(feed, name))
    }
}

impl Supervisor {
    pub(crate) fn new(
        feed: u64,
        common: Arc<Common>,
        plan: PinPlan,
        make_gate: MakeGate,
        mut devices: Vec<FeedingPlan>,
        start: Sender<Result<Running, Error>>,
    ) -> Supervisor {
        devices.reverse();
        Supervisor {
            feed,
            common,
            plan: Some(plan),
            make_gate: Some(make_gate),
            devices,
            desks: Vec::new(),
            pin_report: None,
            start: Some(start),
            pinning: None,
            ingest: None,
            feeding: Vec::new(),
            stopping: false,
            stop: None,
        }
    }

    fn report_to(address: Addr<Supervisor>, actor: &'static str) -> impl FnOnce(Exit) + Send + 'static {
        move |exit| address.do_send(Exited { actor, exit })
    }

    /// Answers the builder with an error and ends, with what was started ended before.
    fn refuse(&mut self, error: Error, context: &mut Context<Self>) {
        self.refuse_with(Some(error), context);
    }

    fn refuse_with(&mut self, error: Option<Error>, context: &mut Context<Self>) {
        self.stopping = true;
        if let Some(pinning) = &self.pinning {
            pinning.address.do_send(StopPinning);
        }
        if let (Some(start), Some(error)) = (self.start.take(), error) {
            // The pinning thread has nothing of ours any more when it has exited; the builder hears after that.
            self.stop = Some(StopOrder::Refusal(start, error));
        }
        self.go_on(context);
    }

    /// Takes the next step of a stop that is under way.
    fn go_on(&mut self, context: &mut Context<Self>) {
        if !self.stopping {
            return;
        }
        if let Some(ingest) = self.ingest.as_ref().filter(|ingest| !ingest.exited) {
            ingest.address.do_send(StopIngest);
            return;
        }
        if self.feeding.iter().any(|feeding| !feeding.exited) {
            return; // the closed gates end them, once their queued copies are over
        }
        if let Some(pinning) = self.pinning.as_ref().filter(|pinning| !pinning.exited) {
            pinning.address.do_send(StopPinning);
            return;
        }
        self.finish(context);
    }

    /// Joins what has exited, gives up what has not, and answers.
    fn finish(&mut self, context: &mut Context<Self>) {
        let Some(stop) = self.stop.take() else { return };
        let mut given_up = Vec::new();
        given_up.extend(self.ingest.as_mut().and_then(|child| child.end(self.feed, INGEST)));
        for (feeding, name) in self.feeding.iter_mut().zip(FEEDING) {
            given_up.extend(feeding.end(self.feed, name));
        }
        given_up.extend(self.pinning.as_mut().and_then(|child| child.end(self.feed, PINNING)));
        match stop {
            StopOrder::Stop(answer) => drop(answer.send(given_up)),
            StopOrder::Refusal(start, error) => drop(start.send(Err(error))),
        }
        context.stop();
    }
}

/// Who waits for the end.
enum StopOrder {
    Stop(Sender<Vec<String>>),
    Refusal(Sender<Result<Running, Error>>, Error),
}

impl Actor for Supervisor {
    type Context = Context<Self>;
    fn started(&mut self, context: &mut Self::Context) {
        let Some(plan) = self.plan.take() else { return };
        let supervisor = context.address();
        let pinning = Pinning { plan, supervisor: supervisor.clone(), ring: None };
        match host::host(self.feed, PINNING, pinning, Supervisor::report_to(supervisor, PINNING)) {
            Ok(hosted) => self.pinning = Some(hosted.into()),
            Err(error) => self.refuse(thread_error(PINNING, &error), context),
        }
    }
}

fn thread_error(actor: &str, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Thread, format!("the thread of the {actor} actor could not be started: {error}"))
}

/// The ring, or why there is none.
pub(crate) struct Pinned(pub(crate) Result<Arc<Ring>, RingError>);

impl Message for Pinned {
    type Result = ();
}

impl Handler<Pinned> for Supervisor {
    type Result = ();
    fn handle(&mut self, Pinned(made): Pinned, context: &mut Self::Context) {
        let ring = match made {
            Ok(ring) => ring,
            Err(error) => {
                tracing::error!(target: "pinring", error = %error, "the ring could not be made");
                self.refuse(error.into(), context);
                return;
            }
        };
        let Some(make_gate) = self.make_gate.take() else { return };
        self.pin_report = ring.report().cloned();
        let gate = Arc::new(IntakeGate::new(make_gate(ring)));
        let _ = self.common.gate.set(gate.clone());
        if self.stopping {
            gate.close(Closed::Stopped);
            self.go_on(context);
            return;
        }
        self.start_next(gate, context);
    }
}

impl Supervisor {
    /// Starts the next device's feeding actor, or behind the last one ingest, and then answers the builder.
    fn start_next(&mut self, gate: Arc<IntakeGate>, context: &mut Context<Self>) {
        if let Some(plan) = self.devices.pop() {
            let name = FEEDING[plan.index];
            let (common, supervisor) = (self.common.clone(), context.address());
            let feeding = Feeding { feed: self.feed, plan, gate: gate.clone(), common, supervisor: supervisor.clone() };
            match host::host(self.feed, name, feeding, Supervisor::report_to(supervisor, name)) {
                Ok(hosted) => self.feeding.push(hosted.into()),
                Err(error) => {
                    gate.close(Closed::Stopped);
                    self.refuse(thread_error(name, &error), context);
                }
            }
            return; // its answer brings the next
        }
        let ingest = Ingest { gate: gate.clone(), watch: Watch::new() };
        match host::host(self.feed, INGEST, ingest, Supervisor::report_to(context.address(), INGEST)) {
            Ok(hosted) => self.ingest = Some(hosted.into()),
            Err(error) => {
                gate.close(Closed::Stopped);
                self.refuse(thread_error(INGEST, &error), context);
                return;
            }
        }
        let (pin_report, desks) = (self.pin_report.take(), std::mem::take(&mut self.desks));
        tracing::info!(
            target: "pinring", feed = self.feed, pinned = pin_report.is_some(), devices = desks.len(), "the feed runs"
        );
        if let Some(start) = self.start.take() {
            let _ = start.send(Ok(Running { gate, pin_report, desks }));
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
        let Some(gate) = self.common.gate.get().cloned() else { return };
        match up {
            Ok(desk) => self.desks.push(desk),
            Err(error) => {
                gate.close(Closed::Stopped);
                self.refuse(error, context);
                return;
            }
        }
        if !self.stopping {
            self.start_next(gate, context);
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
        self.common.fail(actor, text);
        if !self.stopping {
            self.refuse_with(self.common.error(), context);
        }
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
        match actor {
            PINNING => self.pinning.iter_mut().for_each(|child| child.exited = true),
            INGEST => self.ingest.iter_mut().for_each(|child| child.exited = true),
            _ => {
                let fed = self.feeding.iter_mut().zip(FEEDING).filter(|(_, name)| *name == actor);
                fed.for_each(|(child, _)| child.exited = true);
            }
        }
        let exit = match exit {
            // Actors end when they are told to.
            Ok(()) if !self.stopping => Err("it ended without being asked to".to_owned()),
            other => other,
        };
        if let Err(text) = exit {
            self.common.fail(actor, text);
            if !self.stopping {
                self.refuse_with(self.common.error(), context);
                return;
            }
        }
        self.go_on(context);
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
        tracing::info!(target: "pinring", feed = self.feed, "the feed stops");
        self.stopping = true;
        self.stop = Some(StopOrder::Stop(answer));
        if let Some(gate) = self.common.gate.get() {
            gate.set_stop_deadline(deadline);
            gate.close(Closed::Stopped);
        }
        self.go_on(context);
        context.run_later(deadline.saturating_duration_since(Instant::now()), |supervisor, context| {
            supervisor.finish(context);
        });
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
            PINNING => self.pinning.iter().for_each(|child| child.address.do_send(Crash(text.clone()))),
            INGEST => self.ingest.iter().for_each(|child| child.address.do_send(Crash(text.clone()))),
            _ => panic!("{text}"),
        }
    }
}
