//! The feeding thread's loop: one copy a batch, handed over at once; slots come home by event.

use super::batch::Buffer;
use super::desk::{Desk, Flight, Ready, Source};
use super::rounds::Seat;
use super::updates::{Advanced, Updates};
use crate::cuda::device::Stream;
use crate::cuda::types::CudaError;
use crate::error::Closed;
use crate::gather::{GatherKernel, Gathering};
use crate::intake::{Credit, Sealed};
#[cfg(test)]
use crate::sync::points;
use crate::sync::{Patience, Spin, Unpark, panic_text};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Completion is looked for this often at first, and this often at last.
const POLL: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(2));
/// How long the end waits for queued copies while no stop has named a deadline.
const DRAIN: Duration = Duration::from_secs(10);

/// One device's feeding thread. Its drop gives up what is not known to be over.
#[derive(Debug)]
pub(crate) struct Feeder {
    desk: Arc<Desk>,
    stream: Stream,
    /// The kernel that gathers batches from the mapped store.
    kernel: Option<GatherKernel>,
    /// In the order in which they came back: the first is the likeliest to be idle.
    free: VecDeque<Buffer>,
    /// Where this thread gathers: came back, and the learner's stream may still use them. A gather into one of them would
    /// wait for that, and its records with it, which are in writers' way.
    releasing: Vec<Buffer>,
    /// In the order of issue.
    in_flight: VecDeque<Flight>,
    /// Priorities on their way to the store: a list to use again.
    priorities: Vec<f32>,
    poll: Duration,
    /// The buffers that were free when the learner went are meant for no batch any more.
    withdrawn: bool,
    /// The learner was told of the end of the source.
    ended: bool,
    /// The last look left a batch where it is: there is no buffer for it, or updates come first.
    starving: bool,
    /// Nothing of ours that is known of is under way on the device.
    settled: bool,
    /// A kernel may have been queued whose end cannot be learned.
    unsure: bool,
}

/// What the loop found to do.
#[derive(Debug, PartialEq, Eq)]
enum Did {
    /// Something moved: look again at once.
    Something,
    /// Nothing, but something is under way that nobody will call for: look again soon.
    Watch,
    /// Nothing until somebody calls.
    Nothing,
}

impl Feeder {
    pub(crate) fn new(desk: Arc<Desk>) -> Result<Feeder, CudaError> {
        let device = &desk.device;
        let gathering = desk.gate.gathering.as_ref().filter(|gathering| gathering.parts().is_some());
        let stream = device.stream(gathering.is_some())?; // a gather is in nobody's way
        let mut kernel = None;
        if let Some((gathering, parts)) = gathering.and_then(|gathering| Some((gathering, gathering.parts()?))) {
            let loaded = GatherKernel::new(device, &stream, parts, gathering.blocks);
            gathering
                .loaded(loaded.as_ref().map(drop).map_err(|error| format!("the kernel could not be loaded: {error}")));
            kernel = loaded.ok().map(|loaded| (loaded, parts.0.bytes()));
        }
        let table_bytes = kernel.as_ref().map_or(0, |(_, bytes)| *bytes);
        let (bytes, rows) = (desk.gate.layout.slot_bytes, desk.gate.layout.rows);
        let buffer = |_| {
            let (memory, released) = (device.alloc(bytes + table_bytes)?, device.event()?);
            Ok(Buffer {
                memory,
                released,
                recorded: false,
                filled: None,
                records: Vec::with_capacity(rows),
                ends_pass: false,
            })
        };
        let free = (0..desk.buffers).map(buffer).collect::<Result<_, CudaError>>()?;
        let kernel = kernel.map(|(kernel, _)| kernel);
        Ok(Feeder {
            desk,
            stream,
            kernel,
            free,
            releasing: Vec::new(),
            in_flight: VecDeque::new(),
            priorities: Vec::new(),
            poll: POLL.0,
            withdrawn: false,
            ended: false,
            starving: false,
            settled: true,
            unsure: false,
        })
    }

    /// Feeds until the gates close, then waits for what is queued. Whatever fails is told to the desk.
    pub(crate) fn run(mut self) {
        self.settled = false;
        match catch_unwind(AssertUnwindSafe(|| self.feed())) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.desk.fail(&error),
            Err(panic) => self.desk.fail_with(panic_text(panic)),
        }
        self.settled = self.drain();
    }

    fn feed(&mut self) -> Result<(), CudaError> {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        loop {
            #[cfg(test)]
            self.desk.crash_if_told();
            let did = self.look()?;
            if self.desk.gate.over().is_some() {
                return Ok(());
            }
            match did {
                Did::Something => self.poll = POLL.0,
                Did::Watch => self.rest(&waker, true),
                Did::Nothing => self.rest(&waker, false),
            }
        }
    }

    /// One round: lets slots come home, moves the downloads on, issues a copy.
    fn look(&mut self) -> Result<Did, CudaError> {
        self.collect();
        let landed = self.land()? | self.release()?;
        // Before a batch is issued: of one update a batch, none then finds every place taken (see `updates`).
        let updated = self.update()?;
        let downloading = self.download()?;
        let (issued, starving) = if updated == Advanced::NotLooked { (false, true) } else { self.take()? };
        self.starving = starving;
        let updating = updated != Advanced::All;
        // A gather is begun when a buffer is back, so it is this thread that looks for that, before there is any batch.
        let lent = self.gathers() && self.free.len() + self.releasing.len() < self.desk.buffers;
        let watched = !self.in_flight.is_empty() || !self.releasing.is_empty() || lent;
        Ok(match (landed || issued, updating || downloading || starving || watched) {
            (true, _) => Did::Something,
            (false, true) => Did::Watch,
            (false, false) => Did::Nothing,
        })
    }

    /// Takes what others have put down.
    fn collect(&mut self) {
        let returned = self.desk.take_returned();
        if self.gathers() {
            self.releasing.extend(returned)
        } else {
            self.free.extend(returned)
        }
        self.in_flight.extend(self.desk.take_inbox());
    }

    /// Whether batches are gathered here, and not copied.
    fn gathers(&self) -> bool {
        self.kernel.is_some() && self.desk.gate.gathering.as_ref().is_some_and(|gathering| gathering.tables().is_some())
    }

    /// Lets the sampling know of buffers that the learner's stream has passed. True if there are any.
    fn release(&mut self) -> Result<bool, CudaError> {
        let (mut index, mut released) = (0, 0);
        while index < self.releasing.len() {
            if self.releasing[index].is_idle(&self.desk.device)? {
                self.free.push_back(self.releasing.swap_remove(index));
                released += 1;
            } else {
                index += 1;
            }
        }
        let (gate, turn) = (&self.desk.gate, self.desk.turn());
        if self.desk.is_wanted() {
            gate.grant(turn, released);
        } else if self.gathers() && self.desk.is_learner_gone() && !std::mem::replace(&mut self.withdrawn, true) {
            // Nothing is copied into them any more; other devices have their own.
            let free = self.free.len() - released;
            gate.withdraw(turn, free);
        }
        Ok(released > 0)
    }

    /// Tells the store of the priorities that have come back.
    fn update(&mut self) -> Result<Advanced, CudaError> {
        let Some(updates) = &self.desk.updates else { return Ok(Advanced::All) };
        updates.advance(&self.desk, &mut self.priorities)
    }

    fn download(&self) -> Result<bool, CudaError> {
        self.desk.downloads.as_ref().map_or(Ok(false), |downloads| downloads.advance(&self.desk.device))
    }

    /// Takes a batch if there is a buffer for it, and issues its copy. Says whether it did, and whether a batch waits for
    /// a buffer.
    fn take(&mut self) -> Result<(bool, bool), CudaError> {
        if !self.desk.is_wanted() {
            return Ok((false, false));
        }
        if !self.ended && self.desk.gate.batches.exhausted().as_ref().is_some_and(Closed::is_end) {
            self.ended = true;
            match &self.desk.seat {
                None => self.desk.ready.wake(self.desk.ready.end(Closed::Ended)),
                Some(seat) => seat.end(),
            }
            return Ok((false, false));
        }
        if !self.is_next() {
            return Ok((false, false));
        }
        let Some(buffer) = self.usable()? else { return Ok((false, true)) };
        match self.desk.gate.batches.take(Patience::None, &mut Spin::default()) {
            Ok(Some(sealed)) => {
                self.desk.seat.iter().for_each(Seat::pass_on);
                self.issue(sealed, buffer).map(|()| (true, false))
            }
            Ok(None) | Err(_) => {
                self.free.push_front(buffer);
                Ok((false, false))
            }
        }
    }

    /// Whether a batch lies there for this device. By rounds nobody else takes that one.
    fn is_next(&self) -> bool {
        let desk = &self.desk;
        desk.gate.batches.peek(|sealed| desk.is_mine(sealed.sequence)).unwrap_or(false)
    }

    /// A buffer that the next copy may go to. From page-locked memory the copy waits for the buffer's release on the
    /// device. From ordinary memory this thread might: so it takes a buffer that was released.
    fn usable(&mut self) -> Result<Option<Buffer>, CudaError> {
        if let (false, Some(first)) = (self.desk.pinned, self.free.front())
            && first.recorded
            && !self.desk.device.query(&first.released)?
        {
            return Ok(None);
        }
        Ok(self.free.pop_front())
    }

    /// Issues the copy or the gather of one batch and hands it over.
    fn issue(&mut self, sealed: Sealed, mut buffer: Buffer) -> Result<(), CudaError> {
        let Sealed { lease, rows, sequence, sealed, ends_pass, clears, gather, credit } = sealed;
        credit.into_iter().for_each(Credit::spend);
        let (desk, stream) = (&self.desk, self.stream.raw());
        let slots = &desk.gate.slots;
        buffer.ends_pass = ends_pass;
        buffer.records.clear();
        // SAFETY: the slot is sealed and its lease is here (invariant 2).
        buffer.records.extend((0..rows).map(|row| unsafe { slots.record(lease.slot, row) }));
        let bytes = desk.gate.layout.slot_bytes;
        // From here on the copy may be queued: whatever fails, the slot does not come home (invariants 3 and 4).
        let issued = (|| {
            // SAFETY: the buffer is free: its last use is behind `released`, which this stream waits for, or is a copy in
            // this stream. The slot is mapped, and its lease is kept in `in_flight` until the event has completed.
            unsafe {
                if buffer.recorded {
                    desk.device.wait(stream, &buffer.released)?;
                }
                let ready = desk.event()?;
                let slot = slots.slot(lease.slot).cast_const();
                match gather {
                    None => desk.device.copy_in(buffer.memory.address(), slot, bytes, stream)?,
                    Some(_) => self.gather(&buffer, slot)?,
                }
                desk.device.record(&ready, stream)?;
                Ok(ready)
            }
        })();
        let gathered = gather.is_some();
        let source = match gather {
            None => Source::Slot(lease),
            Some(gather) => Source::Gather(lease, gather),
        };
        let ready = match issued {
            Ok(ready) => ready,
            Err(error) => {
                source.quarantine();
                desk.quarantine(buffer);
                desk.gate.count_untaken(rows as u64);
                self.unsure |= gathered;
                return Err(error);
            }
        };
        (buffer.recorded, buffer.filled) = (false, Some(ready.clone()));
        desk.copies.fetch_add(1, Ordering::Relaxed);
        desk.gathers.fetch_add(u64::from(gathered), Ordering::Relaxed);
        desk.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.in_flight.push_back(Flight { source, done: ready.clone() });
        desk.in_flight.store(self.in_flight.len(), Ordering::Relaxed);
        let ready = Ready { buffer, ready, sequence, sealed, clears };
        let put = match &desk.seat {
            None => desk.put(ready),
            Some(seat) => seat.put(ready),
        };
        if let Err(ready) = put {
            desk.take_back(ready); // closed in between, or the learner is gone
        }
        Ok(())
    }

    /// Queues what puts a batch together that the device gathers: copies of what the host knows, then the kernel.
    ///
    /// # Safety
    /// The slot holds what the sampling thread has written for it, and the buffer is free, both as `issue` has it.
    unsafe fn gather(&self, buffer: &Buffer, slot: *const u8) -> Result<(), CudaError> {
        let (device, stream) = (&self.desk.device, self.stream.raw());
        let parts = self.desk.gate.gathering.as_ref().and_then(Gathering::parts);
        let (Some((tables, _)), Some(kernel)) = (parts, &self.kernel) else {
            unreachable!("batches are made for a device's gather only where every device has loaded the kernel");
        };
        let (batch, table) =
            (buffer.memory.address(), buffer.memory.address() + self.desk.gate.layout.slot_bytes as u64);
        // SAFETY: table and columns are parts of the slot; the buffer has the layout of a slot, and room for the table. The
        // records that the table names stay with the gather in `in_flight`.
        unsafe {
            device.copy_in(table, slot.add(tables.at), tables.bytes(), stream)?;
            for part in &tables.copied {
                device.copy_in(batch + part.start as u64, slot.add(part.start), part.len(), stream)?;
            }
            kernel.queue(batch, table, stream)
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

    /// Sleeps: for the polling time if `watching`, else until a batch or the end of the source comes, or somebody calls.
    /// Nobody is missed: a call that came since the last look has left its mark on this thread, which then does not sleep;
    /// and what came to the gate is seen there before this thread counts as one that waits. Where the oldest batch is
    /// another device's, whose feeding thread takes it calls this one.
    fn rest(&mut self, waker: &Waker, watching: bool) {
        #[cfg(test)]
        points::here("feeding0: about to rest");
        let (desk, batches) = (&self.desk, &self.desk.gate.batches);
        let there = |oldest: Option<&Sealed>, closed: Option<&Closed>| match oldest {
            Some(sealed) => desk.is_mine(sealed.sequence),
            None => !self.ended && closed.is_some_and(Closed::is_end),
        };
        let wanted = desk.is_wanted();
        let registered = if wanted { batches.register_unless(waker, there) } else { None };
        if wanted && registered.is_none() && !self.starving {
            return; // it came since the last look
        }
        if watching {
            std::thread::park_timeout(self.poll);
            self.poll = (self.poll * 2).min(POLL.1);
        } else {
            std::thread::park();
        }
        registered.into_iter().for_each(|id| batches.forget(id));
    }

    /// At the end: waits for everything that is queued, until the stop's deadline. Whether it is over.
    fn drain(&mut self) -> bool {
        let begun = Instant::now();
        self.poll = POLL.0;
        self.desk.updates.iter().for_each(Updates::close);
        loop {
            match self.settle() {
                Ok(true) => return true,
                Ok(false) => {}
                Err(error) => {
                    self.desk.fail(&error);
                    return false;
                }
            }
            // It may be set while this waits. Whom it has given up before this began has time.
            let deadline = self.desk.gate.stop_deadline().filter(|deadline| *deadline > begun);
            if Instant::now() >= deadline.unwrap_or(begun + DRAIN) {
                return false;
            }
            std::thread::park_timeout(self.poll);
            self.poll = (self.poll * 2).min(POLL.1);
        }
    }

    /// Whether nothing is under way any more.
    fn settle(&mut self) -> Result<bool, CudaError> {
        self.collect();
        self.land()?;
        let (updated, downloading) = (self.update()?, self.download()?);
        let mut busy = updated != Advanced::All || downloading || !self.in_flight.is_empty();
        for buffer in self.free.iter().chain(&self.releasing) {
            busy |= !buffer.is_idle(&self.desk.device)?;
        }
        Ok(!busy)
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        self.collect();
        if !self.settled {
            self.desk.give_up();
        }
        if (!self.settled || self.unsure)
            && let Some(kernel) = self.kernel.take()
        {
            let (tables, bytes) = kernel.quarantine();
            self.desk.count_quarantined(tables, bytes);
        }
        self.in_flight.drain(..).for_each(|flight| flight.source.quarantine());
        self.desk.in_flight.store(0, Ordering::Relaxed);
        let buffers = self.free.drain(..).chain(self.releasing.drain(..));
        buffers.for_each(|buffer| self.desk.discard(buffer));
    }
}
