//! Streams, events, graphs and memory of the benches' own: each gives itself back when it is dropped.

use super::{Cuda, Failure, NOT_READY, THREAD_LOCAL};
use std::ffi::c_void;
use std::ptr;

/// A stream's handle, alive as long as the [`Stream`] it is from.
#[derive(Clone, Copy, Debug)]
pub struct RawStream(pub(super) usize);

impl RawStream {
    /// As the crate and other libraries take it.
    pub fn as_pointer(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.0)
    }
}

#[derive(Debug)]
pub struct Module(pub(super) usize);

#[derive(Clone, Copy, Debug)]
pub struct Function(pub(super) usize);

#[derive(Debug)]
pub struct Stream {
    pub(super) cuda: &'static Cuda,
    pub(super) handle: usize,
}

impl Stream {
    pub fn raw(&self) -> RawStream {
        RawStream(self.handle)
    }

    /// Waits, spinning, for everything in the stream.
    pub fn synchronize(&self) -> Result<(), Failure> {
        // SAFETY: here and below: the handles are alive, since they are borrowed.
        self.cuda.check("cuStreamSynchronize", unsafe { (self.cuda.table.cuStreamSynchronize)(self.handle) })
    }

    /// What is queued from now on runs behind the event's last record.
    #[inline]
    pub fn wait(&self, event: &Event) -> Result<(), Failure> {
        // SAFETY: as above; the flags must be 0.
        self.cuda
            .check("cuStreamWaitEvent", unsafe { (self.cuda.table.cuStreamWaitEvent)(self.handle, event.handle, 0) })
    }

    pub fn is_capturing(&self) -> Result<bool, Failure> {
        let mut status = 0;
        // SAFETY: as above; the out-pointer is a live integer of ours.
        let answer = unsafe { (self.cuda.table.cuStreamIsCapturing)(self.handle, &mut status) };
        self.cuda.check("cuStreamIsCapturing", answer)?;
        Ok(status != 0)
    }

    /// Captures what `work` puts into the stream as one graph, ready to be launched.
    pub fn capture(&self, work: impl FnOnce() -> Result<(), Failure>) -> Result<Graph, Failure> {
        let (cuda, table) = (self.cuda, &self.cuda.table);
        let (mut graph, mut ready) = (0, 0);
        // SAFETY: all of it: as above; the out-pointers are live integers of ours; what is created is destroyed once.
        unsafe {
            cuda.check("cuStreamBeginCapture", (table.cuStreamBeginCapture_v2)(self.handle, THREAD_LOCAL))?;
            let worked = work();
            let ended = cuda.check("cuStreamEndCapture", (table.cuStreamEndCapture)(self.handle, &mut graph));
            worked.and(ended)?;
            let made = (table.cuGraphInstantiateWithFlags)(&mut ready, graph, 0);
            let made = cuda.check("cuGraphInstantiateWithFlags", made);
            cuda.check("cuGraphDestroy", (table.cuGraphDestroy)(graph))?;
            made?;
        }
        Ok(Graph { cuda, handle: ready })
    }

    pub fn launch(&self, graph: &Graph) -> Result<(), Failure> {
        // SAFETY: as above. What the graph's kernels use is kept by whoever captured them.
        self.cuda.check("cuGraphLaunch", unsafe { (self.cuda.table.cuGraphLaunch)(graph.handle, self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `Cuda::stream`, destroyed here alone.
        unsafe { (self.cuda.table.cuStreamDestroy_v2)(self.handle) };
    }
}

#[derive(Debug)]
pub struct Graph {
    pub(super) cuda: &'static Cuda,
    pub(super) handle: usize,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `Stream::capture`, destroyed here alone.
        unsafe { (self.cuda.table.cuGraphExecDestroy)(self.handle) };
    }
}

#[derive(Debug)]
pub struct Event {
    pub(super) cuda: &'static Cuda,
    pub(super) handle: usize,
}

impl Event {
    #[inline]
    pub fn record(&self, stream: RawStream) -> Result<(), Failure> {
        // SAFETY: here and below: the event is alive, since it is borrowed; so is the stream, by `RawStream`'s word.
        self.cuda.check("cuEventRecord", unsafe { (self.cuda.table.cuEventRecord)(self.handle, stream.0) })
    }

    pub fn is_done(&self) -> Result<bool, Failure> {
        // SAFETY: as above.
        match unsafe { (self.cuda.table.cuEventQuery)(self.handle) } {
            NOT_READY => Ok(false),
            answer => self.cuda.check("cuEventQuery", answer).map(|()| true),
        }
    }

    /// Waits for the last record.
    pub fn synchronize(&self) -> Result<(), Failure> {
        // SAFETY: as above.
        self.cuda.check("cuEventSynchronize", unsafe { (self.cuda.table.cuEventSynchronize)(self.handle) })
    }

    /// Microseconds from this event to a later one, both timed and done.
    pub fn micros_until(&self, later: &Event) -> Result<f64, Failure> {
        let mut millis = 0.0;
        // SAFETY: as above; the out-pointer is a live number of ours.
        let answer = unsafe { (self.cuda.table.cuEventElapsedTime)(&mut millis, self.handle, later.handle) };
        self.cuda.check("cuEventElapsedTime", answer)?;
        Ok(f64::from(millis) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `Cuda::make_event`, destroyed here alone.
        unsafe { (self.cuda.table.cuEventDestroy_v2)(self.handle) };
    }
}

#[derive(Debug)]
pub struct DeviceMemory {
    pub(super) cuda: &'static Cuda,
    pub address: u64,
    pub bytes: usize,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `Cuda::alloc`, freed here alone. The driver waits for what still uses it.
        unsafe { (self.cuda.table.cuMemFree_v2)(self.address) };
    }
}

/// Page-locked memory of the bench's own.
#[derive(Debug)]
pub struct HostMemory {
    pub(super) cuda: &'static Cuda,
    pub(super) at: *mut u8,
    pub(super) bytes: usize,
}

// SAFETY: memory like a `Box<[u8]>`; the driver frees it from any thread.
unsafe impl Send for HostMemory {}
// SAFETY: as for a `Box<[u8]>`: whoever shares it reads it.
unsafe impl Sync for HostMemory {}

impl std::ops::Deref for HostMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `bytes` initialised bytes of our own.
        unsafe { std::slice::from_raw_parts(self.at, self.bytes) }
    }
}

impl std::ops::DerefMut for HostMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `Cuda::page_locked`, freed here alone.
        unsafe { (self.cuda.table.cuMemFreeHost)(self.at.cast()) };
    }
}
