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

/// A freed allocation that streams may still use.
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
    /// It belongs to a graph.
    Captured(Backing),
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
    let mut behind = Vec::with_capacity(streams.len());
    for stream in streams {
        // SAFETY: the caller's promise.
        match unsafe { place(backing.device(), devices, *stream) } {
            Ok(Some(place)) => behind.push(place),
            Ok(None) => return Ordered::Captured(backing),
            Err(error) if error.code() == code::CONTEXT_IS_DESTROYED => {} // its work is gone with it
            Err(error) => return Ordered::Lost(backing, error),
        }
    }
    match behind.is_empty() {
        true => Ordered::Done(backing),
        false => Ordered::Waiting(Waiting { backing, behind }),
    }
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
    /// Looks whether its streams have done with it.
    pub(super) fn poll(mut self, busy: &mut Busy) -> Ordered {
        let ordinal = self.backing.device().ordinal();
        while let Some(last) = self.behind.last_mut() {
            match last {
                Behind::Recorded { stream, .. } if busy.contains(&(ordinal, *stream)) => return Ordered::Waiting(self),
                Behind::Recorded { event, stream } => match event.device().query(event) {
                    Ok(true) => drop(self.behind.pop()),
                    Ok(false) => {
                        busy.push((ordinal, *stream));
                        return Ordered::Waiting(self);
                    }
                    Err(error) if error.code() == code::CONTEXT_IS_DESTROYED => drop(self.behind.pop()),
                    Err(error) => return Ordered::Lost(self.backing, error),
                },
                // SAFETY: the legacy default stream, which lives as long as its device.
                Behind::Unrecorded { stream } => match unsafe { record(self.backing.device(), *stream) } {
                    Ok(Some(Behind::Unrecorded { .. })) => return Ordered::Waiting(self),
                    Ok(Some(recorded)) => *last = recorded,
                    Ok(None) => return Ordered::Captured(self.backing),
                    Err(error) => return Ordered::Lost(self.backing, error),
                },
            }
        }
        Ordered::Done(self.backing)
    }
}
