//! The ways in which a batch comes to the device, each as a learner's loop would call it.
//!
//! Every way has the same turns: the data *arrive*, the learner *takes* the batch, launches its kernels, *releases* the
//! batch, and at the end of the step it is waited for whatever the next step needs (*settle*). Ways on the learner's
//! own thread copy in `take`; ways with a feeder copy while the step runs, one batch a step, so that the copy of each
//! way falls into its own step also where ways alternate.

use crate::gpu::driver::{Cuda, DeviceMemory, Event, Failure, HostMemory, Stream};
use crate::gpu::rows::{Content, Shape, Writers};
use pinring::{Column, DeviceBatch, DeviceLearner, Feed, Pinning};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// One way of feeding.
pub trait Way {
    fn name(&self) -> &'static str;

    /// The data for the next step are there; not the learner's work, so not timed. `stamped`: fresh ones, to be checked.
    fn arrive(&mut self, stamped: bool) -> Result<(), Failure>;

    /// The batch's address on the device; what is put into `compute` from now on sees it.
    fn take(&mut self, compute: &Stream) -> Result<u64, Failure>;

    /// The kernels that use it are launched.
    fn release(&mut self, compute: &Stream) -> Result<(), Failure>;

    /// Waits until the next step could begin, and returns how long a call of the learner's that feeds took.
    fn settle(&mut self, compute: &Stream) -> Result<Duration, Failure>;

    /// Tag, and lane and step of each row, of the batch that was taken. `None`: there is no batch.
    fn rows(&self) -> Option<(u64, Vec<(u64, u64)>)>;

    /// Ends what runs.
    fn end(self: Box<Self>) -> Result<(), Failure>;
}

/// Host memory of either kind, laid out as a batch.
#[derive(Debug)]
pub enum Memory {
    Pageable(Vec<u8>),
    PageLocked(HostMemory),
}

impl Memory {
    pub fn new(cuda: &'static Cuda, bytes: usize, page_locked: bool) -> Result<Memory, Failure> {
        Ok(match page_locked {
            true => Memory::PageLocked(cuda.page_locked(bytes)?),
            false => Memory::Pageable(vec![1; bytes]), // not zeros: every page is there
        })
    }

    pub fn bytes(&self) -> &[u8] {
        match self {
            Memory::Pageable(memory) => memory,
            Memory::PageLocked(memory) => memory,
        }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Pageable(memory) => memory,
            Memory::PageLocked(memory) => memory,
        }
    }
}

fn filled_rows(shape: Shape, step: u64) -> Vec<(u64, u64)> {
    (0..shape.rows as u64).map(|lane| (lane, step)).collect()
}

// ---- nothing ----

/// No data: what the step costs by itself.
#[derive(Debug)]
pub struct Nothing {
    memory: DeviceMemory,
}

impl Nothing {
    pub fn new(cuda: &'static Cuda, shape: Shape) -> Result<Nothing, Failure> {
        Ok(Nothing { memory: cuda.alloc(shape.batch_bytes())? })
    }
}

impl Way for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }
    fn arrive(&mut self, _: bool) -> Result<(), Failure> {
        Ok(())
    }
    fn take(&mut self, _: &Stream) -> Result<u64, Failure> {
        Ok(self.memory.address)
    }
    fn release(&mut self, _: &Stream) -> Result<(), Failure> {
        Ok(())
    }
    fn settle(&mut self, _: &Stream) -> Result<Duration, Failure> {
        Ok(Duration::ZERO)
    }
    fn rows(&self) -> Option<(u64, Vec<(u64, u64)>)> {
        None
    }
    fn end(self: Box<Self>) -> Result<(), Failure> {
        Ok(())
    }
}

// ---- on the learner's own thread ----

/// The learner's thread copies, on the stream that computes.
#[derive(Debug)]
pub struct OwnThread {
    cuda: &'static Cuda,
    name: &'static str,
    shape: Shape,
    tag: u64,
    step: u64,
    from: Memory,
    to: DeviceMemory,
    /// Offset and bytes of each copy.
    copies: Vec<(usize, usize)>,
}

impl OwnThread {
    pub fn new(
        cuda: &'static Cuda,
        shape: Shape,
        name: &'static str,
        tag: u64,
        page_locked: bool,
        per_leaf: bool,
    ) -> Result<OwnThread, Failure> {
        let bytes = shape.batch_bytes();
        let leaf = |leaf| (shape.column_offset(leaf), shape.column_words() * 4);
        let copies = if per_leaf { (0..shape.leaves).map(leaf).collect() } else { vec![(0, bytes)] };
        let from = Memory::new(cuda, bytes, page_locked)?;
        Ok(OwnThread { cuda, name, shape, tag, step: 0, from, to: cuda.alloc(bytes)?, copies })
    }
}

impl Way for OwnThread {
    fn name(&self) -> &'static str {
        self.name
    }
    fn arrive(&mut self, stamped: bool) -> Result<(), Failure> {
        if stamped {
            self.step += 1;
            self.shape.fill(self.from.bytes_mut(), self.tag, self.step);
        }
        Ok(())
    }
    fn take(&mut self, compute: &Stream) -> Result<u64, Failure> {
        for &(offset, bytes) in &self.copies {
            let from = self.from.bytes()[offset..][..bytes].as_ptr();
            // SAFETY: both memories are ours and as long as the batch; the step is waited for before they change.
            unsafe { self.cuda.copy_in(self.to.address + offset as u64, from, bytes, compute.raw())? };
        }
        Ok(self.to.address)
    }
    fn release(&mut self, _: &Stream) -> Result<(), Failure> {
        Ok(())
    }
    fn settle(&mut self, _: &Stream) -> Result<Duration, Failure> {
        Ok(Duration::ZERO)
    }
    fn rows(&self) -> Option<(u64, Vec<(u64, u64)>)> {
        Some((self.tag, filled_rows(self.shape, self.step)))
    }
    fn end(self: Box<Self>) -> Result<(), Failure> {
        Ok(())
    }
}

// ---- by a feeder thread of the user's own ----

/// A thread that copies one batch ahead, on a stream of its own, with events both ways: what a user would write by hand.
#[derive(Debug)]
pub struct Feeder {
    name: &'static str,
    shape: Shape,
    tag: u64,
    step: u64,
    next_buffer: usize,
    buffers: Arc<[FeederBuffer; 2]>,
    /// `None`: go home.
    to_thread: Sender<Option<Order>>,
    from_thread: Receiver<Result<Order, Failure>>,
    next: Option<Order>,
    taken: Option<Order>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct FeederBuffer {
    memory: DeviceMemory,
    ready: Event,
    released: Event,
}

#[derive(Clone, Copy, Debug)]
struct Order {
    buffer: usize,
    step: u64,
    stamped: bool,
}

impl Feeder {
    pub fn new(
        cuda: &'static Cuda,
        shape: Shape,
        name: &'static str,
        tag: u64,
        page_locked: bool,
    ) -> Result<Feeder, Failure> {
        let bytes = shape.batch_bytes();
        let buffer = || {
            Ok::<_, Failure>(FeederBuffer { memory: cuda.alloc(bytes)?, ready: cuda.event()?, released: cuda.event()? })
        };
        let buffers = Arc::new([buffer()?, buffer()?]);
        let mut memory = Memory::new(cuda, bytes, page_locked)?;
        let stream = cuda.stream()?;
        let (to_thread, orders) = channel::<Option<Order>>();
        let (answers, from_thread) = channel();
        let theirs = buffers.clone();
        let thread = std::thread::spawn(move || {
            let mut copy = |order: Order| -> Result<Order, Failure> {
                let buffer = &theirs[order.buffer];
                if order.stamped {
                    stream.synchronize()?; // the last copy still reads the memory
                    shape.fill(memory.bytes_mut(), tag, order.step);
                }
                stream.wait(&buffer.released)?;
                let from = memory.bytes().as_ptr();
                // SAFETY: both memories are as long as the batch. They are freed when this thread has ended, after the
                // stream was waited for.
                unsafe { cuda.copy_in(buffer.memory.address, from, bytes, stream.raw())? };
                buffer.ready.record(stream.raw())?;
                Ok(order)
            };
            let ready = cuda.make_current();
            if let Err(error) = ready {
                let _ = answers.send(Err(error));
                return;
            }
            while let Ok(Some(order)) = orders.recv() {
                let _ = answers.send(copy(order)); // nobody hears it at the end
            }
            let _ = stream.synchronize();
        });
        let mut feeder = Feeder {
            name,
            shape,
            tag,
            step: 0,
            next_buffer: 0,
            buffers,
            to_thread,
            from_thread,
            next: None,
            taken: None,
            thread,
        };
        feeder.arrive(true)?;
        Ok(feeder)
    }

    /// The next batch, as soon as its copy is issued; the stream waits for the copy.
    fn next(&mut self, compute: &Stream) -> Result<Order, Failure> {
        let order = self.from_thread.recv().map_err(|_| "the feeder is gone")??;
        compute.wait(&self.buffers[order.buffer].ready)?;
        Ok(order)
    }
}

impl Way for Feeder {
    fn name(&self) -> &'static str {
        self.name
    }
    fn arrive(&mut self, stamped: bool) -> Result<(), Failure> {
        self.step += u64::from(stamped);
        let order = Order { buffer: self.next_buffer, step: self.step, stamped };
        self.next_buffer = 1 - self.next_buffer;
        Ok(self.to_thread.send(Some(order)).map_err(|_| "the feeder is gone")?)
    }
    fn take(&mut self, compute: &Stream) -> Result<u64, Failure> {
        let order = match self.next.take() {
            Some(order) => order,
            None => self.next(compute)?,
        };
        self.taken = Some(order);
        Ok(self.buffers[order.buffer].memory.address)
    }
    fn release(&mut self, compute: &Stream) -> Result<(), Failure> {
        let order = self.taken.take().ok_or("nothing was taken")?;
        self.buffers[order.buffer].released.record(compute.raw())
    }
    fn settle(&mut self, compute: &Stream) -> Result<Duration, Failure> {
        let begun = Instant::now();
        let order = self.next(compute)?;
        let blocked = begun.elapsed();
        self.buffers[order.buffer].ready.synchronize()?;
        self.next = Some(order);
        Ok(blocked)
    }
    fn rows(&self) -> Option<(u64, Vec<(u64, u64)>)> {
        let taken = self.taken.as_ref()?;
        Some((self.tag, filled_rows(self.shape, taken.step)))
    }
    fn end(self: Box<Self>) -> Result<(), Failure> {
        let _ = self.to_thread.send(None);
        Ok(self.thread.join().map_err(|_| "the feeder panicked")?)
    }
}

// ---- by the crate ----

/// A feed with writers of its own, one batch a step.
#[derive(Debug)]
pub struct Ours {
    name: &'static str,
    content: Content,
    feed: Feed,
    learner: Option<DeviceLearner>,
    writers: Option<Writers>,
    tag: u64,
    column: Column<u32>,
    next: Option<DeviceBatch>,
    taken: Option<DeviceBatch>,
}

impl Ours {
    /// Whose writers write every row in the step (`threads`), or commit what is there (`None`).
    pub fn new(
        shape: Shape,
        name: &'static str,
        tag: u64,
        compute: &Stream,
        threads: Option<usize>,
    ) -> Result<Ours, Failure> {
        let (sample, handles) = shape.declare();
        let feed = Feed::builder(sample).batch(shape.rows).buffers(3).prefetch(2).device(0);
        let feed = feed.pinning(Pinning::Required).start()?;
        // SAFETY: the stream is one of device 0, and the caller keeps it until `end`.
        let learner = unsafe { feed.learner_on(0, compute.raw().as_pointer())? };
        let (writers, content) = match threads {
            Some(threads) => (Writers::start(&feed, shape, &handles, tag, threads)?, Content::Cached),
            None => (Writers::wide(&feed, shape, &handles, tag)?, Content::There),
        };
        let (learner, writers, column) = (Some(learner), Some(writers), handles.columns[0]);
        let mut ours = Ours { name, content, feed, learner, writers, tag, column, next: None, taken: None };
        ours.arrive(true)?;
        Ok(ours)
    }

    fn next(&self) -> Result<DeviceBatch, Failure> {
        Ok(self.learner.as_ref().ok_or("the learner is gone")?.next_batch()?)
    }
}

impl Way for Ours {
    fn name(&self) -> &'static str {
        self.name
    }
    fn arrive(&mut self, stamped: bool) -> Result<(), Failure> {
        let writers = self.writers.as_ref().ok_or("the writers are gone")?;
        writers.order(1, if stamped { Content::Stamped } else { self.content });
        Ok(())
    }
    fn take(&mut self, _: &Stream) -> Result<u64, Failure> {
        let batch = match self.next.take() {
            Some(batch) => batch,
            None => self.next()?,
        };
        let address = batch.column(self.column).ptr;
        self.taken = Some(batch);
        Ok(address)
    }
    fn release(&mut self, _: &Stream) -> Result<(), Failure> {
        drop(self.taken.take());
        Ok(())
    }
    fn settle(&mut self, _: &Stream) -> Result<Duration, Failure> {
        let begun = Instant::now();
        let batch = self.next()?;
        let blocked = begun.elapsed();
        batch.synchronize()?;
        self.next = Some(batch);
        Ok(blocked)
    }
    fn rows(&self) -> Option<(u64, Vec<(u64, u64)>)> {
        let batch = self.taken.as_ref()?;
        Some((self.tag, batch.lanes().map(|lane| lane as u64).zip(batch.first_steps()).collect()))
    }
    fn end(mut self: Box<Self>) -> Result<(), Failure> {
        (self.next, self.taken) = (None, None);
        self.learner = None;
        let report = self.feed.stop(Duration::from_secs(10))?;
        if let Some(fault) = report.fault {
            return Err(format!("the feed ended by a fault: {fault}").into());
        }
        self.writers.take().map_or(Ok(()), Writers::join)
    }
}
