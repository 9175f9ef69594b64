//! Host registrations, device memory, and what a copy between them may be.

use crate::streams::{Op, Queued};
use crate::{Answer, State};
use std::alloc::{alloc, dealloc, Layout};
use std::collections::BTreeMap;
use std::time::Instant;

/// What lies between a registered host address and its device address: so that code which assumes that the two are
/// equal is found out.
pub const DEVICE_OFFSET: usize = 1 << (usize::BITS - 18);
/// `cudaHostRegisterMapped`.
const MAPPED: u32 = 0x2;
/// What uninitialised device memory holds here.
const FRESH: u8 = 0xCD;

pub struct Registration {
    pub bytes: usize,
    pub flags: u32,
    pub device: i32,
}

pub struct Allocation {
    pub bytes: usize,
    pub device: i32,
}

pub struct Memory {
    pub registrations: BTreeMap<usize, Registration>,
    pub allocations: BTreeMap<usize, Allocation>,
    pub cap_call: u64,
    pub cap_total: u64,
    /// Copies refused because a device side was not wholly inside one allocation.
    pub out_of_range: u64,
    /// Device memory freed while queued copies used it.
    pub freed_in_flight: u64,
    /// Host memory unregistered while queued copies used it.
    pub unregistered_in_flight: u64,
    /// Modules unloaded while a kernel of theirs was queued.
    pub unloaded_in_flight: u64,
}

impl Default for Memory {
    fn default() -> Memory {
        Memory {
            registrations: BTreeMap::new(),
            allocations: BTreeMap::new(),
            cap_call: u64::MAX,
            cap_total: u64::MAX,
            out_of_range: 0,
            freed_in_flight: 0,
            unregistered_in_flight: 0,
            unloaded_in_flight: 0,
        }
    }
}

/// As aligned as real device memory is at least.
fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), 256).expect("a size that this host can have")
}

impl Memory {
    /// The registration that holds `address`: where it begins, and itself.
    pub fn registration(&self, address: usize) -> Option<(usize, &Registration)> {
        let (&start, registration) = self.registrations.range(..=address).next_back()?;
        (address < start + registration.bytes).then_some((start, registration))
    }

    /// Where the bytes of a device range are in this process, if it is wholly inside one allocation or, by its
    /// device address, one mapped registration.
    pub fn device_range(&self, address: usize, n: usize) -> Option<usize> {
        if let Some((&start, allocation)) = self.allocations.range(..=address).next_back() {
            if address.checked_add(n)? <= start + allocation.bytes {
                return Some(address);
            }
        }
        let host = address.checked_sub(DEVICE_OFFSET)?;
        let (start, registration) = self.registration(host)?;
        (registration.flags & MAPPED != 0 && host + n <= start + registration.bytes).then_some(host)
    }

    /// The device address of a registered host address.
    pub fn mapped(&self, host: usize, flags: u32) -> Result<usize, i32> {
        match self.registration(host) {
            Some((_, r)) if r.flags & MAPPED != 0 && flags == 0 => Ok(host + DEVICE_OFFSET),
            _ => Err(1),
        }
    }

    fn release(&mut self, start: usize) {
        if let Some(allocation) = self.allocations.remove(&start) {
            // SAFETY: `State::allocate` allocated it with this layout, and the map held it once.
            unsafe { dealloc(start as *mut u8, layout(allocation.bytes)) };
        }
    }

    /// Everything of a device is gone.
    pub fn forget(&mut self, device: i32) {
        self.registrations.retain(|_, registration| registration.device != device);
        let gone: Vec<usize> = self.allocations.iter().filter(|(_, a)| a.device == device).map(|(&a, _)| a).collect();
        gone.into_iter().for_each(|start| self.release(start));
    }
}

impl State {
    pub fn register(&mut self, device: i32, start: usize, bytes: usize, flags: u32) -> Answer {
        self.unsafe_while_capturing()?;
        if start == 0 || bytes == 0 || flags & !0xf != 0 {
            return Err(1);
        }
        let end = start.checked_add(bytes).ok_or(1)?;
        let before = self.memory.registrations.range(..end).next_back();
        if before.is_some_and(|(&other, r)| other + r.bytes > start) {
            return Err(712);
        }
        let total: u64 = self.memory.registrations.values().map(|r| r.bytes as u64).sum();
        if bytes as u64 > self.memory.cap_call || total + bytes as u64 > self.memory.cap_total {
            return Err(2);
        }
        self.memory.registrations.insert(start, Registration { bytes, flags, device });
        Ok(())
    }

    /// `waited` is false at the first try of a call and says afterwards that it found copies to wait for.
    pub fn unregister(&mut self, start: usize, waited: &mut bool) -> Answer {
        self.unsafe_while_capturing()?;
        let Some(registration) = self.memory.registrations.get(&start) else {
            return Err(if self.memory.registration(start).is_some() { 1 } else { 713 });
        };
        let end = start + registration.bytes;
        if self.copies_touch(start, end) && !std::mem::replace(waited, true) {
            self.memory.unregistered_in_flight += 1;
        }
        self.settle_devices(None)?;
        self.memory.registrations.remove(&start);
        Ok(())
    }

    pub fn allocate(&mut self, device: i32, bytes: usize) -> Result<usize, i32> {
        self.unsafe_while_capturing()?;
        if bytes == 0 {
            return Err(1);
        }
        // More than any device has, and more than a test may take from its host.
        if bytes as u64 > 1 << 40 {
            return Err(2);
        }
        // SAFETY: the layout has a size above zero; the bytes are filled before anybody reads them.
        let start = unsafe {
            let start = alloc(layout(bytes));
            if start.is_null() {
                return Err(2);
            }
            start.write_bytes(FRESH, bytes);
            start as usize
        };
        self.memory.allocations.insert(start, Allocation { bytes, device });
        Ok(start)
    }

    /// `waited` as for [`unregister`](Self::unregister).
    pub fn free(&mut self, start: usize, waited: &mut bool) -> Answer {
        self.unsafe_while_capturing()?;
        let Some(&Allocation { bytes, device }) = self.memory.allocations.get(&start) else { return Err(1) };
        if self.copies_touch(start, start + bytes) && !std::mem::replace(waited, true) {
            self.memory.freed_in_flight += 1;
        }
        self.settle_devices(Some(device))?;
        self.memory.release(start);
        Ok(())
    }

    /// Whether a queued copy reads or writes in a range.
    fn copies_touch(&self, start: usize, end: usize) -> bool {
        let touches = |at: usize, n: usize| at < end && at + n > start;
        self.streams.values().flat_map(|s| &s.ops).any(|queued| match &queued.op {
            Op::Copy { dst, src, n } => touches(*dst, *n) || touches(*src, *n),
            Op::Bytes { dst, bytes } => touches(*dst, bytes.len()),
            // By where it begins: enough to tell a batch's memory, and a store.
            Op::Gather { launch, .. } => {
                let host = (launch.store as usize).wrapping_sub(DEVICE_OFFSET);
                touches(launch.batch as usize, 1) || touches(launch.table as usize, 1) || touches(host, 1)
            }
            Op::Record { .. } | Op::Wait { .. } => false,
        })
    }

    /// Queues one copy. `kind`: 1 host to device, 2 device to host, 3 device to device. True where the caller must
    /// wait for the stream: the host side is pageable and is written.
    pub fn copy(&mut self, dst: usize, src: usize, n: usize, kind: i32, stream: usize) -> Result<bool, i32> {
        let key = self.stream(stream)?;
        let captured = self.enters(key)?;
        if n == 0 {
            return Ok(false);
        }
        if dst == 0 || src == 0 || !(1..=3).contains(&kind) {
            return Err(1);
        }
        let on_device = |memory: &Memory, address| memory.device_range(address, n);
        let sides = (
            if kind == 2 { Some(dst) } else { on_device(&self.memory, dst) },
            if kind == 1 { Some(src) } else { on_device(&self.memory, src) },
        );
        let (Some(to), Some(from)) = sides else {
            self.memory.out_of_range += 1;
            return Err(1);
        };
        let host = match kind {
            1 => Some(src),
            2 => Some(dst),
            _ => None,
        };
        let pageable = match host {
            Some(host) => !self.locked(host, n)?,
            None => false,
        };
        if captured {
            return Ok(false);
        }
        let op = if pageable && kind == 1 {
            // SAFETY: the contract of a copy: the source is readable while the call runs.
            Op::Bytes { dst: to, bytes: unsafe { std::slice::from_raw_parts(src as *const u8, n) }.into() }
        } else {
            Op::Copy { dst: to, src: from, n }
        };
        self.queue(key, Queued { op, at: Instant::now() });
        Ok(pageable && kind == 2)
    }

    /// [`copy`](Self::copy) for a call that may have to be made again: it is queued once, and then waited for.
    pub fn copy_once(
        &mut self,
        wait: &mut Option<usize>,
        dst: usize,
        src: usize,
        n: usize,
        kind: i32,
        stream: usize,
    ) -> Answer {
        if wait.is_none() && self.copy(dst, src, n, kind, stream)? {
            *wait = Some(self.stream(stream)?);
        }
        wait.map_or(Ok(()), |key| self.settle(key))
    }

    /// Whether a host range is page-locked; 1 for one that leaves a registration half-way. One that only enters a
    /// registration is pageable.
    fn locked(&self, host: usize, n: usize) -> Result<bool, i32> {
        let end = host.checked_add(n).ok_or(1)?;
        match self.memory.registration(host) {
            Some((start, r)) if end > start + r.bytes => Err(1),
            Some(_) => Ok(true),
            None => Ok(false),
        }
    }
}
