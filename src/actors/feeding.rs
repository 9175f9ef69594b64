//! The feeding actor: one per device, its thread the feeding thread.
//!
//! Owns the device's stream, buffers and in-flight list, through a [`Feeder`] that runs on its thread from the start to
//! the close of the gates. It waits for batches, for completions and for the close, never for its mailbox: what must be
//! bounded is no message. It sends the supervisor its desk, or why there is none, and the first CUDA error.

use super::host;
use super::supervisor::{Common, Failed, FeedingUp, Supervisor};
use crate::cuda::device::Device;
use crate::cuda::types::{CudaError, CudaSearch};
use crate::error::{Error, ErrorKind, Result};
use crate::feeding::Desk;
use crate::feeding::download::{Downloads, Finished};
use crate::feeding::feeder::Feeder;
use crate::feeding::rounds::Seat;
use crate::feeding::updates::Updates;
use crate::gather::Gathering;
use crate::intake::IntakeGate;
use crate::layout::SLOT_ALIGN;
use crate::memory::{PinWatch, Ring, RingPlan};
#[cfg(test)]
use crate::sync::points;
use actix::{Actor, ActorContext, Addr, AsyncContext, Context, Handler, Message};
use crossbeam_channel::Receiver;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Names of feeding actors, by the order of their devices at the builder.
pub(crate) const FEEDING: [&str; 16] = [
    "feeding0",
    "feeding1",
    "feeding2",
    "feeding3",
    "feeding4",
    "feeding5",
    "feeding6",
    "feeding7",
    "feeding8",
    "feeding9",
    "feeding10",
    "feeding11",
    "feeding12",
    "feeding13",
    "feeding14",
    "feeding15",
];

/// Names of the threads that call downloads' functions.
const DELIVERY: &str = "then";

/// What a feeding actor is made from.
#[derive(Clone, Debug)]
pub(crate) struct FeedingPlan {
    /// Its place among the devices.
    pub(crate) index: usize,
    pub(crate) ordinal: i32,
    pub(crate) prefetch: usize,
    /// Bytes of the largest download; 0 for none.
    pub(crate) download_bytes: usize,
    /// Room for priorities that come back.
    pub(crate) updates: Option<RingPlan>,
    /// Whether memory is asked for without a look at what seems to be left.
    pub(crate) ignore_budget: bool,
    pub(crate) search: CudaSearch,
    pub(crate) pinned: bool,
    /// Its place in the rounds, if batches are dealt by those.
    pub(crate) seat: Option<Seat>,
}

#[derive(Debug)]
pub(crate) struct Feeding {
    pub(crate) feed: u64,
    pub(crate) plan: FeedingPlan,
    pub(crate) gate: Arc<IntakeGate>,
    pub(crate) common: Arc<Common>,
    pub(crate) supervisor: Addr<Supervisor>,
}

impl Actor for Feeding {
    type Context = Context<Self>;
    fn started(&mut self, context: &mut Self::Context) {
        // A message to itself, so that a panic in here is one of a handler, with the address already handed out.
        context.notify(Feed);
    }
}

/// Attach the device and feed it until the gates close.
#[derive(Debug)]
struct Feed;

impl Message for Feed {
    type Result = ();
}

impl Handler<Feed> for Feeding {
    type Result = ();
    fn handle(&mut self, _: Feed, context: &mut Self::Context) {
        #[cfg(test)]
        points::here("feeding0: Feed");
        match self.attach() {
            Ok((feeder, ends)) => {
                #[cfg(test)]
                points::here("feeding0: attached");
                self.supervisor.do_send(FeedingUp(Ok(ends.desk.clone())));
                feeder.run();
                #[cfg(test)]
                points::here("feeding0: fed");
                drop(ends);
            }
            Err(error) => self.supervisor.do_send(FeedingUp(Err(error))),
        }
        context.stop();
    }
}

/// End. The loop ends by the close of the gates; this is for an actor that has not entered it.
#[derive(Debug)]
pub(crate) struct StopFeeding;

impl Message for StopFeeding {
    type Result = ();
}

impl Handler<StopFeeding> for Feeding {
    type Result = ();
    fn handle(&mut self, _: StopFeeding, context: &mut Self::Context) {
        #[cfg(test)]
        points::here("feeding0: StopFeeding");
        context.stop();
    }
}

impl Feeding {
    fn name(&self) -> &'static str {
        FEEDING[self.plan.index]
    }

    /// Attaches the device and makes everything that needs memory on it, so that the start fails if that does.
    fn attach(&self) -> Result<(Feeder, Ends)> {
        let plan = &self.plan;
        let cuda = |error: CudaError| Error::from_source(ErrorKind::Cuda, error);
        let device = Device::attach(&plan.search, plan.ordinal).map_err(|e| Error::from_source(ErrorKind::Cuda, e))?;
        device.select().map_err(cuda)?; // for what the runtime does here, and it saves a push and a pop a call
        device.relax_capture_mode().map_err(cuda)?;
        let (mut downloads, mut finished) = (None, None);
        if plan.download_bytes > 0 {
            let slot_bytes = plan.download_bytes.next_multiple_of(SLOT_ALIGN);
            let (ignore_budget, watch) = (plan.ignore_budget, PinWatch::new(None));
            let ring = RingPlan { ignore_budget, ..RingPlan::new(slot_bytes, 2) };
            let host = match plan.pinned {
                true => Ring::pinned(&ring, &plan.search, || device.pci_address(), &watch)?,
                false => Ring::unpinned(&ring, &watch)?,
            };
            let (sender, receiver) = crossbeam_channel::unbounded();
            downloads = Some(Downloads::new(&device, host, plan.download_bytes, sender).map_err(cuda)?);
            finished = Some(receiver);
        }
        let updates = plan.updates.as_ref().map(|room| -> Result<Updates> {
            let host = Ring::pinned(room, &plan.search, || device.pci_address(), &PinWatch::new(None))?;
            Updates::new(&device, host).map_err(cuda)
        });
        let updates = updates.transpose()?;
        let (name, common, supervisor) = (self.name(), self.common.clone(), self.supervisor.clone());
        let on_fault = move |text: String| {
            common.fail(name, text.clone()); // at once, on whatever thread met it
            supervisor.do_send(Failed { actor: name, text });
        };
        let (gate, seat, on_fault) = (self.gate.clone(), plan.seat.clone(), Box::new(on_fault));
        let desk = Desk::new(device, gate, plan.prefetch, plan.pinned, (downloads, updates), seat, on_fault);
        let desk = Arc::new(desk);
        desk.attend();
        let feeder = Feeder::new(desk.clone()).map_err(cuda)?;
        if let Some(error) = self.gate.gathering.as_ref().and_then(Gathering::refused) {
            return Err(error);
        }
        let delivery = finished.map(|finished| self.deliver(desk.clone(), finished)).transpose()?;
        Ok((feeder, Ends { desk, delivery }))
    }

    /// Starts the thread that calls downloads' functions.
    fn deliver(&self, desk: Arc<Desk>, finished: Receiver<Option<Finished>>) -> Result<JoinHandle<()>> {
        let run = move || {
            let Some(downloads) = &desk.downloads else { return };
            while let Ok(Some(finished)) = finished.recv() {
                downloads.deliver(finished, |text| desk.fail_with(format!("a download's function failed: {text}")));
            }
        };
        host::thread(self.feed, &format!("{DELIVERY}{}", self.plan.index), run).map_err(|error| {
            Error::new(ErrorKind::Thread, format!("the thread for downloads could not be started: {error}"))
        })
    }
}

/// What feeding has besides its loop. Dropped, however that ended, its memory goes: that of updates, and that of downloads
/// behind the thread that calls their functions, which ends behind what it has.
struct Ends {
    desk: Arc<Desk>,
    /// Taken by the drop.
    delivery: Option<JoinHandle<()>>,
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.desk.updates.iter().for_each(|updates| updates.free(&self.desk));
        if let (Some(thread), Some(downloads)) = (self.delivery.take(), &self.desk.downloads) {
            downloads.end();
            let _ = thread.join(); // behind the user's function, if that runs
            downloads.free(&self.desk);
        }
    }
}
