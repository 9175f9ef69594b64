//! When a freed allocation may be used again: behind events in the streams whose work may use it (invariant 3).
//!
//! An event is recorded behind everything that was in the stream at the free; once it has completed nobody reads or
//! writes the memory. A stream that is being captured gets no event, which would go into the graph: what is freed there
//! belongs to the graph. The legacy default stream cannot be recorded in while a stream ordered with it captures; that
//! is made up for later, and an event recorded later covers more and not less.
//!
//! Nothing here waits. The caller has put its thread into relaxed capture mode.

use crate::cuda::device::{Capture, Device, Event, RawStream};
use crate::cuda::types::{CudaError, code};

use super::backing::Backing;

/// A freed allocation that streams may still use; none of them, if it was freed while all of its streams were captured.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) backing: Backing,
    behind: Vec<Behind>,
}

/// One stream that it waits for.
#[derive(Debug)]
enum Behind {
    Recorded { event: Event, stream: RawStream },
    Unrecorded { stream: RawStream },
}

/// What became of a freed allocation.
#[derive(Debug)]
pub(super) enum Ordered {
    /// It waits for its streams.
    Waiting(Waiting),
    /// Nobody uses it.
    Done(Backing),
    /// It went with its context, as at a device reset: there is nothing to use again.
    Gone(Backing),
    /// It belongs to a graph, and other streams may still use it too.
    Captured(Waiting),
    /// It cannot be known when its streams have done with it (invariant 4).
    Lost(Backing, CudaError),
}

/// The streams that were found busy in this pass: what comes later in them is not done either.
pub(super) type Busy = Vec<(i32, RawStream)>;

/// Puts a freed allocation behind everything that is in `streams` now. A stream may be one of another device that the
/// allocator uses.
///
/// # Safety
/// The streams are live.
pub(super) unsafe fn order(backing: Backing, streams: &[RawStream], devices: &[Device]) -> Ordered {
    let (mut behind, mut captured) = (Vec::with_capacity(streams.len()), false);
    for stream in streams {
        // SAFETY: the caller's promise.
        match unsafe { place(backing.device(), devices, *stream) } {
            Ok(Some(place)) => behind.push(place),
            Ok(None) => captured = true,
            Err(error) if error.code() == code::CONTEXT_IS_DESTROYED => return gone(backing, error),
            Err(error) => return Ordered::Lost(backing, error),
        }
    }
    match (captured, behind.is_empty()) {
        (true, _) => Ordered::Captured(Waiting { backing, behind }),
        (false, true) => Ordered::Done(backing),
        (false, false) => Ordered::Waiting(Waiting { backing, behind }),
    }
}

/// The context is gone, and with it the work that was queued there. Page-locked memory that is none any more went too; what
/// a newer context has registered, work in that one may use.
fn gone(backing: Backing, error: CudaError) -> Ordered {
    if backing.is_page_locked() { Ordered::Lost(backing, error) } else { Ordered::Gone(backing) }
}

/// # Safety
/// As for [`order`].
unsafe fn place(own: &Device, devices: &[Device], stream: RawStream) -> Result<Option<Behind>, CudaError> {
    // SAFETY: the caller's promise.
    match unsafe { record(own, stream) } {
        Err(error) if error.code() == code::INVALID_HANDLE => {
            // An event can be recorded in streams of its own device only.
            let others = devices.iter().filter(|other| !other.is(own));
            // SAFETY: the caller's promise.
            others.map(|other| unsafe { record(other, stream) }).find_map(Result::ok).ok_or(error)
        }
        placed => placed,
    }
}

/// Records an event, if that does no harm; `None` where the stream is being captured.
///
/// # Safety
/// The stream is live.
unsafe fn record(device: &Device, stream: RawStream) -> Result<Option<Behind>, CudaError> {
    // SAFETY: the caller's promise about the stream, here and below.
    match unsafe { device.capture(stream) }? {
        Capture::Here => return Ok(None),
        Capture::Elsewhere => return Ok(Some(Behind::Unrecorded { stream })),
        Capture::None => {}
    }
    let event = device.event()?;
    // SAFETY: as above.
    unsafe { device.record(&event, stream) }?;
    // A capture that began meanwhile may have taken the event, which then must not be queried.
    // SAFETY: as above.
    match unsafe { device.capture(stream) }? {
        Capture::Here => Ok(None),
        _ => Ok(Some(Behind::Recorded { event, stream })),
    }
}

impl Waiting {
    /// Whether no stream uses it but the graph's that it was freed for.
    pub(super) fn is_only_captured(&self) -> bool {
        self.behind.is_empty()
    }

    /// Looks whether its streams have done with it.
    pub(super) fn poll(mut self, busy: &mut Busy) -> Ordered {
        let ordinal = self.backing.device().ordinal();
        let is_gone = |error: &CudaError| error.code() == code::CONTEXT_IS_DESTROYED;
        // So a query is answered of an event that a capture has taken, while that goes on and behind its end.
        let captured = [code::CAPTURED_EVENT, code::INVALID_VALUE];
        let is_captured = |error: &CudaError| error.operation() == "cuEventQuery" && captured.contains(&error.code());
        while let Some(last) = self.behind.last_mut() {
            match last {
                Behind::Recorded { stream, .. } if busy.contains(&(ordinal, *stream)) => return Ordered::Waiting(self),
                Behind::Recorded { event, stream } => match event.device().query(event) {
                    Ok(true) => drop(self.behind.pop()),
                    Ok(false) => {
                        busy.push((ordinal, *stream));
                        return Ordered::Waiting(self);
                    }
                    // A capture that began and ended while the event was recorded; perhaps so in several of its streams.
                    Err(error) if is_captured(&error) => {
                        let taken = |event: &Event| event.device().query(event).is_err_and(|error| is_captured(&error));
                        self.behind.retain(|one| !matches!(one, Behind::Recorded { event, .. } if taken(event)));
                        return Ordered::Captured(self);
                    }
                    // Another device's work is gone with its context; ours takes the memory along.
                    Err(error) if is_gone(&error) && !event.device().is(self.backing.device()) => {
                        drop(self.behind.pop())
                    }
                    Err(error) if is_gone(&error) => return gone(self.backing, error),
                    Err(error) => return Ordered::Lost(self.backing, error),
                },
                // SAFETY: the legacy default stream, which lives as long as its device.
                Behind::Unrecorded { stream } => match unsafe { record(self.backing.device(), *stream) } {
                    Ok(Some(Behind::Unrecorded { .. })) => return Ordered::Waiting(self),
                    Ok(Some(recorded)) => *last = recorded,
                    Ok(None) => {
                        self.behind.pop();
                        return Ordered::Captured(self);
                    }
                    Err(error) => return Ordered::Lost(self.backing, error),
                },
            }
        }
        Ordered::Done(self.backing)
    }
}
