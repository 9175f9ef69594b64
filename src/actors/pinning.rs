//! The pinning actor: CUDA's start and the ring, all of it before any other actor exists.
//!
//! Owns a share of the ring for as long as the feed runs. At the stop it gives that up last, so that unregistering,
//! which waits for every queued copy of the process, happens on this thread unless a batch is still out. It waits for
//! nothing but the stop, and sends the ring, or why there is none. It selects the first
//! device that the feed attaches, on its own thread alone, and allocates on none.

use super::supervisor::{Pinned, Supervisor};
use crate::cuda::device::Device;
use crate::cuda::types::{CudaError, CudaSearch};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{PinWatch, Ring, RingPlan};
#[cfg(test)]
use crate::sync::points;
use actix::{Actor, ActorContext, Addr, AsyncContext, Context, Handler, Message};
use std::sync::Arc;

/// What the ring is made from.
#[derive(Debug)]
pub(crate) struct PinPlan {
    pub(crate) ring: RingPlan,
    /// Where CUDA is looked for; `None` with pinning off, and then no library is opened.
    pub(crate) cuda: Option<CudaSearch>,
    pub(crate) watch: PinWatch,
    /// The first device to feed: the ring is registered from its context, so that no other gets one.
    pub(crate) device: Option<i32>,
}

#[derive(Debug)]
pub(crate) struct Pinning {
    pub(crate) plan: PinPlan,
    pub(crate) supervisor: Addr<Supervisor>,
    pub(crate) ring: Option<Arc<Ring>>,
    /// Kept while this thread may call CUDA: its context is the thread's current one.
    pub(crate) device: Option<Device>,
}

impl Actor for Pinning {
    type Context = Context<Self>;
    fn started(&mut self, context: &mut Self::Context) {
        // A message to itself, so that a panic in here is one of a handler, with the address already handed out.
        context.notify(Pin);
    }
}

/// Map, find CUDA, register, verify.
#[derive(Debug)]
struct Pin;

impl Message for Pin {
    type Result = ();
}

impl Handler<Pin> for Pinning {
    type Result = ();
    fn handle(&mut self, _: Pin, _: &mut Self::Context) {
        #[cfg(test)]
        points::here("pinning: Pin");
        let made = self.make();
        self.supervisor.do_send(Pinned(made));
    }
}

impl Pinning {
    fn make(&mut self) -> Result<Arc<Ring>> {
        let PinPlan { ring, cuda, watch, device } = &self.plan;
        let selected = match (cuda, device) {
            (Some(search), Some(ordinal)) => Some(select(search, *ordinal)),
            _ => None,
        };
        let ring = match cuda {
            Some(search) => {
                let address = || selected.as_ref()?.as_ref().ok()?.pci_address();
                Ring::pinned(ring, search, address, watch)
            }
            None => Ring::unpinned(ring, watch),
        };
        // Without CUDA the first fails too, but the ring's error names everything that was looked at.
        let ring = Arc::new(ring?);
        self.device = selected.transpose()?;
        self.ring = Some(ring.clone());
        Ok(ring)
    }
}

/// Makes a device the calling thread's own.
fn select(search: &CudaSearch, ordinal: i32) -> Result<Device> {
    let cuda = |error: CudaError| Error::from_source(ErrorKind::Cuda, error);
    let device = Device::attach(search, ordinal).map_err(|error| Error::from_source(ErrorKind::Cuda, error))?;
    device.select().map_err(cuda)?;
    Ok(device)
}

/// Give the ring up and end.
#[derive(Debug)]
pub(crate) struct StopPinning;

impl Message for StopPinning {
    type Result = ();
}

impl Handler<StopPinning> for Pinning {
    type Result = ();
    fn handle(&mut self, _: StopPinning, context: &mut Self::Context) {
        #[cfg(test)]
        points::here("pinning: StopPinning");
        self.ring = None;
        context.stop();
    }
}

#[cfg(test)]
impl Handler<super::supervisor::Crash> for Pinning {
    type Result = ();
    fn handle(&mut self, crash: super::supervisor::Crash, _: &mut Self::Context) {
        panic!("{}", crash.0);
    }
}
