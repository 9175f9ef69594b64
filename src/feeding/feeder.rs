//! The feeding thread's loop: one copy a batch, handed over at once; slots come home by event.

use super::batch::Buffer;
use super::desk::{Desk, Flight, Ready, Source};
use crate::cuda::device::Stream;
use crate::cuda::types::CudaError;
use crate::error::Closed;
use crate::intake::Sealed;
use crate::sync::{Patience, Spin, Unpark};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Completion is looked for this often at first, and this often at last.
const POLL: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(2));
/// How long the stop waits for queued copies if it names no deadline.
const DRAIN: Duration = Duration::from_secs(10);

/// One device's feeding thread.
#[derive(Debug)]
pub(crate) struct Feeder {
    desk: Arc<Desk>,
    stream: Stream,
    free: Vec<Buffer>,
    /// In the order of issue.
    in_flight: VecDeque<Flight>,
    poll: Duration,
}

impl Feeder {
    pub(crate) fn new(desk: Arc<Desk>) -> Result<Feeder, CudaError> {
        let device = &desk.device;
        let stream = device.stream(false)?;
        let bytes = desk.gate.layout.slot_bytes;
        let free = (0..desk.buffers)
            .map(|_| {
                let records = Vec::with_capacity(desk.gate.layout.rows);
                Ok(Buffer { memory: device.alloc(bytes)?, released: device.event()?, recorded: false, records })
            })
            .collect::<Result<_, CudaError>>()?;
        Ok(Feeder { desk, stream, free, in_flight: VecDeque::new(), poll: POLL.0 })
    }

    /// Feeds until the gates close, then waits for the queued copies.
    pub(crate) fn run(mut self) -> Result<(), CudaError> {
        let fed = self.feed();
        let reason = self.desk.check_open().err().unwrap_or(Closed::Stopped);
        // Batches that were handed over and not taken: their buffers live until the copies into them are over.
        let (untaken, wakes) = self.desk.ready.close(reason);
        self.desk.ready.wake(wakes);
        let rows: u64 = untaken.iter().map(|ready| ready.rows as u64).sum();
        self.desk.gate.count_untaken(rows);
        if fed.is_ok() {
            self.drain();
        }
        for flight in self.in_flight.drain(..).chain(self.desk.take_inbox()) {
            flight.source.quarantine();
        }
        self.desk.in_flight.store(0, Ordering::Relaxed);
        drop(untaken);
        fed
    }

    fn feed(&mut self) -> Result<(), CudaError> {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        loop {
            self.free.extend(self.desk.take_returned());
            self.in_flight.extend(self.desk.take_inbox());
            let mut moved = self.land()?;
            let downloading = match &self.desk.downloads {
                Some(downloads) => downloads.advance(&self.desk.device)?,
                None => false,
            };
            let mut starving = false;
            if self.desk.is_wanted() {
                if self.free.is_empty() {
                    starving = self.desk.gate.batches.len() > 0;
                } else {
                    match self.desk.gate.batches.take(Patience::None, &mut Spin::default()) {
                        Ok(Some(sealed)) => {
                            self.issue(sealed)?;
                            moved = true;
                        }
                        Ok(None) => {}
                        Err(Closed::Ended | Closed::LaneGone { .. }) => {
                            let wakes = self.desk.ready.end(Closed::Ended);
                            self.desk.ready.wake(wakes);
                        }
                        Err(_) => {} // seen below, or nobody is left to feed: copies of users' may still be out
                    }
                }
            }
            if self.desk.gate.is_over() {
                return Ok(());
            }
            if moved {
                self.poll = POLL.0;
                continue;
            }
            self.rest(&waker, downloading || starving || !self.in_flight.is_empty());
        }
    }

    /// Issues the copy of one batch and hands it over.
    fn issue(&mut self, sealed: Sealed) -> Result<(), CudaError> {
        let Some(mut buffer) = self.free.pop() else { return Ok(()) };
        let Sealed { lease, rows, sequence, sealed } = sealed;
        let (desk, stream) = (&self.desk, self.stream.raw());
        let slots = &desk.gate.slots;
        buffer.records.clear();
        // SAFETY: the slot is sealed and its lease is here (invariant 2).
        buffer.records.extend((0..rows).map(|row| unsafe { slots.record(lease.slot, row) }));
        let bytes = desk.gate.layout.slot_bytes;
        // From here on the copy may be queued: whatever fails, the slot does not come home (invariants 3 and 4).
        let issued = (|| {
            // SAFETY: the buffer is free: its last use is behind `released`, which this stream waits for. The slot is
            // mapped, and its lease is kept in `in_flight` until the event has completed.
            unsafe {
                if buffer.recorded {
                    desk.device.wait(stream, &buffer.released)?;
                }
                let ready = desk.event()?;
                desk.device.copy_in(buffer.memory.address(), slots.slot(lease.slot).cast_const(), bytes, stream)?;
                desk.device.record(&ready, stream)?;
                Ok(ready)
            }
        })();
        match issued {
            Ok(ready) => {
                buffer.recorded = false;
                desk.copies.fetch_add(1, Ordering::Relaxed);
                desk.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                self.in_flight.push_back(Flight { source: Source::Slot(lease), done: ready.clone() });
                desk.in_flight.store(self.in_flight.len(), Ordering::Relaxed);
                let mut parts = Some((buffer, ready));
                let put = desk.ready.put(|_| {
                    let (buffer, ready) = parts.take().expect("made once");
                    Ready { buffer, ready, rows, sequence, sealed }
                });
                match put {
                    Some(wakes) => desk.ready.wake(wakes),
                    None => {
                        self.free.extend(parts.map(|(buffer, _)| buffer)); // closed in between
                        desk.gate.count_untaken(rows as u64);
                    }
                }
                Ok(())
            }
            Err(error) => {
                lease.quarantine();
                std::mem::forget(buffer);
                desk.gate.count_untaken(rows as u64);
                Err(error)
            }
        }
    }

    /// Lets slots come home whose copies are over. True if any did.
    fn land(&mut self) -> Result<bool, CudaError> {
        let mut landed = false;
        // Copies on users' streams complete in any order; ours in the order of issue.
        let mut index = 0;
        while index < self.in_flight.len() {
            if self.desk.device.query(&self.in_flight[index].done)? {
                self.in_flight.remove(index);
                landed = true;
            } else {
                index += 1;
            }
        }
        self.desk.in_flight.store(self.in_flight.len(), Ordering::Relaxed);
        Ok(landed)
    }

    /// Sleeps: for the polling time while something is out, else until a batch comes or somebody calls.
    fn rest(&mut self, waker: &Waker, something_out: bool) {
        let registered = if self.desk.is_wanted() { self.desk.gate.batches.register(waker) } else { None };
        if registered.is_none() && !something_out && self.desk.is_wanted() && self.desk.gate.batches.len() > 0 {
            return; // it came in between
        }
        if something_out {
            std::thread::park_timeout(self.poll);
            self.poll = (self.poll * 2).min(POLL.1);
        } else {
            std::thread::park();
        }
        registered.into_iter().for_each(|id| self.desk.gate.batches.forget(id));
    }

    /// At the stop: waits for the queued copies, until the deadline.
    fn drain(&mut self) {
        let deadline = self.desk.gate.stop_deadline().unwrap_or_else(|| Instant::now() + DRAIN);
        self.poll = POLL.0;
        loop {
            self.in_flight.extend(self.desk.take_inbox());
            let landed = self.land();
            let downloading = match &self.desk.downloads {
                Some(downloads) => downloads.advance(&self.desk.device),
                None => Ok(false),
            };
            match (landed, downloading) {
                (Err(error), _) | (_, Err(error)) => {
                    self.desk.fail(&error);
                    return;
                }
                (Ok(_), Ok(downloading)) if self.in_flight.is_empty() && !downloading => return,
                _ if Instant::now() >= deadline => return,
                _ => std::thread::park_timeout(self.poll),
            }
            self.poll = (self.poll * 2).min(POLL.1);
        }
    }
}
