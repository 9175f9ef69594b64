//! Devices, their primary contexts, and which context is current on which thread.

use crate::{Answer, State};
use std::cell::{Cell, RefCell};

/// A context's handle is this and the device's number.
const CONTEXT: usize = 0xC0DE_0000;

#[derive(Clone, Default)]
pub struct Device {
    /// Retained so often and not released.
    pub retained: u32,
    /// The primary context exists: somebody retained it, or a runtime uses it.
    pub active: bool,
    /// The runtime uses it, and keeps it.
    pub runtime: bool,
    /// Rises when the context is destroyed. What was made before is gone.
    pub epoch: u64,
}

thread_local! {
    /// Contexts that were pushed.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// The context below them, which the runtime made current.
    static BOUND: Cell<usize> = const { Cell::new(0) };
    /// The device that the runtime will use on a thread without a context.
    static SELECTED: Cell<i32> = const { Cell::new(0) };
}

pub fn context_of(device: i32) -> usize {
    CONTEXT + device as usize
}

pub fn device_of(context: usize) -> i32 {
    context.wrapping_sub(CONTEXT) as i32
}

/// The context that is current on this thread.
pub fn current() -> Option<usize> {
    let bound = BOUND.get();
    STACK.with_borrow(|stack| stack.last().copied()).or((bound != 0).then_some(bound))
}

/// How many contexts this thread has pushed and not popped.
pub fn pushed() -> usize {
    STACK.with_borrow(Vec::len)
}

/// The device that the runtime calls current.
pub fn selected() -> i32 {
    current().map_or(SELECTED.get(), device_of)
}

impl State {
    pub fn set_devices(&mut self, count: i32) {
        self.devices.resize(count.max(0) as usize, Device::default());
    }

    pub fn device(&mut self, device: i32) -> Result<&mut Device, i32> {
        usize::try_from(device).ok().and_then(|d| self.devices.get_mut(d)).ok_or(101)
    }

    pub fn push(&mut self, context: usize) -> Answer {
        // A context that was destroyed can be pushed; only what is done in it fails.
        self.device(device_of(context)).map_err(|_| 1)?;
        STACK.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    pub fn pop(&mut self) -> Result<usize, i32> {
        if let Some(context) = STACK.with_borrow_mut(Vec::pop) {
            return Ok(context);
        }
        match BOUND.replace(0) {
            0 => Err(201),
            context => Ok(context),
        }
    }

    /// `cudaSetDevice`: the context on top becomes that of the device.
    pub fn select(&mut self, device: i32) -> Answer {
        self.device(device)?;
        SELECTED.set(device);
        let context = context_of(device);
        let replaced = STACK.with_borrow_mut(|stack| stack.last_mut().map(|top| *top = context));
        if replaced.is_none() {
            BOUND.set(context);
        }
        self.use_by_runtime(device)
    }

    fn use_by_runtime(&mut self, device: i32) -> Answer {
        let device = self.device(device)?;
        (device.active, device.runtime) = (true, true);
        Ok(())
    }

    /// The device of a driver's call, which needs a current context.
    pub fn in_context(&mut self) -> Result<i32, i32> {
        let device = device_of(current().ok_or(201)?);
        if !self.device(device)?.active {
            return Err(709);
        }
        Ok(device)
    }

    /// The device of a runtime's call, which makes a context current where there is none.
    pub fn in_runtime(&mut self) -> Result<i32, i32> {
        if self.devices.is_empty() {
            return Err(100);
        }
        let device = selected();
        if current().is_none() {
            BOUND.set(context_of(device));
        }
        self.use_by_runtime(device)?;
        Ok(device)
    }

    pub fn retain(&mut self, device: i32) -> Result<usize, i32> {
        let of = self.device(device)?;
        of.retained += 1;
        of.active = true;
        Ok(context_of(device))
    }

    pub fn release(&mut self, device: i32) -> Answer {
        let of = self.device(device)?;
        of.retained = of.retained.checked_sub(1).ok_or(201)?;
        if of.retained == 0 && !of.runtime {
            self.destroy_context(device);
        }
        Ok(())
    }

    /// What was made in the context is gone. It can be made anew.
    pub fn destroy_context(&mut self, device: i32) {
        self.abandon(device);
        self.memory.forget(device);
        if let Ok(of) = self.device(device) {
            (of.active, of.runtime, of.epoch) = (false, false, of.epoch + 1);
        }
    }
}
