//! What a device owns for us, each freed by its drop: streams, events, memory, kernels.
//!
//! A handle keeps its device's context retained. Its drop runs with that context current and in relaxed capture mode,
//! since a drop may fall on a thread of the user's while a learner captures a graph, which a plain free would spoil.
//! A drop reports what failed as an event and never panics; in a forked child it calls nothing. It does not wait for
//! what was queued: who drops one has seen its work complete.

use super::{Device, RawStream};

/// A stream of ours. Work in it is not ordered with the legacy default stream.
#[derive(Debug)]
pub(crate) struct Stream {
    device: Device,
    handle: usize,
}

/// An event of ours: without timing, and a thread that waits for it sleeps.
///
/// To the driver an event that was never recorded is complete. What has happened is therefore state of our own (an
/// enum of whoever owns the event) and never read off an event: a failed `record` must not free a buffer.
#[derive(Debug)]
pub(crate) struct Event {
    device: Device,
    handle: usize,
}

/// Device memory of ours, at one address until it is dropped. Its bytes are not initialised.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    device: Device,
    address: u64,
    bytes: usize,
}

/// A kernel, and the module that it is in.
#[derive(Debug)]
pub(crate) struct Kernel {
    device: Device,
    module: usize,
    function: usize,
}

impl Stream {
    pub(super) fn new(device: Device, handle: usize) -> Stream {
        Stream { device, handle }
    }

    /// The handle, for the calls of [`Device`].
    pub(crate) fn raw(&self) -> RawStream {
        RawStream(self.handle)
    }
}

impl Event {
    pub(super) fn new(device: Device, handle: usize) -> Event {
        Event { device, handle }
    }

    /// The `CUevent`, which is also a `cudaEvent_t`.
    pub(crate) fn raw(&self) -> usize {
        self.handle
    }

    /// The device that it is of.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl DeviceMemory {
    pub(super) fn new(device: Device, address: u64, bytes: usize) -> DeviceMemory {
        DeviceMemory { device, address, bytes }
    }

    /// The first byte, as the device counts.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Its length.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device that it is of.
    #[cfg_attr(not(any(test, feature = "mapped-allocator")), allow(dead_code))]
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl Kernel {
    pub(super) fn new(device: Device, module: usize) -> Kernel {
        Kernel { device, module, function: 0 }
    }

    pub(super) fn set_function(&mut self, function: usize) {
        self.function = function;
    }

    pub(super) fn function(&self) -> usize {
        self.function
    }

    /// The device that it is of.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let module = self.module;
        // SAFETY: a module that `Device::kernel` loaded and only this drop unloads. That none of its kernels runs is the
        // promise that `launch` asks of its callers (invariant 3).
        self.device.give_back("cuModuleUnload", |table| unsafe { (table.cuModuleUnload)(module) });
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let handle = self.handle;
        // SAFETY: a stream that `Device::stream` created and only this drop destroys. Work still in it completes.
        self.device.give_back("cuStreamDestroy", |table| unsafe { (table.cuStreamDestroy_v2)(handle) });
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let handle = self.handle;
        // SAFETY: an event that `Device::event` created and only this drop destroys. The driver keeps a pending one
        // until it has completed.
        self.device.give_back("cuEventDestroy", |table| unsafe { (table.cuEventDestroy_v2)(handle) });
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let address = self.address;
        // SAFETY: memory that `Device::alloc` allocated and only this drop frees. That no queued work reads or writes
        // it any more is the promise that `copy_in`, `copy_out` and `copy_within` ask of their callers (invariant 3).
        self.device.give_back("cuMemFree", |table| unsafe { (table.cuMemFree_v2)(address) });
    }
}
