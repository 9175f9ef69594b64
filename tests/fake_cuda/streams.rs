//! Streams and events, and how what is queued comes to run: when a test says so, when a call waits for it, or, in
//! auto-run mode, by itself.

use crate::contexts::selected;
use crate::launch::Launch;
use crate::{lock, thread_id, Answer, State, CHANGED, WAIT};
use std::collections::VecDeque;
use std::sync::Once;
use std::time::{Duration, Instant};

/// Handles up to this one are the default streams.
const DEFAULTS: usize = 2;
/// `cudaStreamNonBlocking`.
pub const NON_BLOCKING: u32 = 1;

pub enum Op {
    Copy {
        dst: usize,
        src: usize,
        n: usize,
    },
    /// A copy from pageable memory: the bytes were taken at the call.
    Bytes {
        dst: usize,
        bytes: Box<[u8]>,
    },
    Gather {
        function: usize,
        launch: Launch,
        threads: u32,
    },
    Record {
        event: usize,
        turn: u64,
    },
    Wait {
        event: usize,
        turn: u64,
    },
}

pub struct Queued {
    pub op: Op,
    pub at: Instant,
}

pub struct Stream {
    pub device: i32,
    pub epoch: u64,
    pub flags: u32,
    pub priority: i32,
    /// A default stream: of its device, or of one thread and its device.
    pub default: Option<Default>,
    pub destroyed: bool,
    /// A test holds it: nothing in it runs.
    pub held: bool,
    pub capture: Option<u64>,
    pub ops: VecDeque<Queued>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Default {
    Legacy,
    OfThread(u64),
}

/// Events and streams that were destroyed stay in the maps: what is queued may still speak of them.
pub struct Event {
    pub device: i32,
    pub epoch: u64,
    pub flags: u32,
    pub destroyed: bool,
    /// Where it was recorded last.
    pub stream: usize,
    pub recorded: u64,
    pub done: u64,
    /// The capture that it was last recorded in.
    pub capture: Option<u64>,
}

/// What makes a stream run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// A test: up to a wait for a pending event.
    Told,
    /// A call that waits for it: what it waits for runs first.
    Forced,
    /// What was queued before this.
    Due(Instant),
}

impl State {
    pub fn create_stream(&mut self, device: i32, flags: u32, priority: i32) -> usize {
        let handle = self.handle();
        self.add_stream(handle, device, flags, priority, None);
        handle
    }

    fn add_stream(&mut self, key: usize, device: i32, flags: u32, priority: i32, default: Option<Default>) {
        let epoch = self.devices[device as usize].epoch;
        let (ops, capture) = (VecDeque::new(), None);
        let (destroyed, held) = (false, false);
        let stream = Stream { device, epoch, flags, priority, default, destroyed, held, capture, ops };
        self.streams.insert(key, stream);
    }

    pub fn create_event(&mut self, device: i32, flags: u32) -> usize {
        let handle = self.handle();
        let epoch = self.devices[device as usize].epoch;
        let event = Event { device, epoch, flags, destroyed: false, stream: 0, recorded: 0, done: 0, capture: None };
        self.events.insert(handle, event);
        handle
    }

    /// The key of a stream's handle: itself, or that of the default stream which it means on this thread.
    pub fn stream(&mut self, handle: usize) -> Result<usize, i32> {
        if handle > DEFAULTS {
            let stream = self.streams.get(&handle).filter(|s| !s.destroyed && s.default.is_none()).ok_or(400)?;
            let current = self.devices.get(stream.device as usize).is_some_and(|d| d.epoch == stream.epoch);
            return if current { Ok(handle) } else { Err(709) };
        }
        let device = selected();
        let epoch = self.device(device)?.epoch;
        let default = if handle == 2 { Default::OfThread(thread_id()) } else { Default::Legacy };
        let found =
            self.streams.iter().find(|(_, s)| s.default == Some(default) && s.device == device && s.epoch == epoch);
        if let Some((&key, _)) = found {
            return Ok(key);
        }
        let key = self.handle();
        self.add_stream(key, device, 0, 0, Some(default));
        Ok(key)
    }

    pub fn event(&mut self, handle: usize) -> Result<&mut Event, i32> {
        let event = self.events.get_mut(&handle).filter(|e| !e.destroyed).ok_or(400)?;
        let current = self.devices.get(event.device as usize).is_some_and(|d| d.epoch == event.epoch);
        if current {
            Ok(event)
        } else {
            Err(709)
        }
    }

    pub fn queue(&mut self, key: usize, queued: Queued) {
        if let Some(stream) = self.streams.get_mut(&key) {
            stream.ops.push_back(queued);
        }
    }

    pub fn destroy_stream(&mut self, handle: usize) -> Answer {
        if handle <= DEFAULTS {
            return Err(400);
        }
        let key = self.stream(handle)?;
        // Its work goes on.
        self.streams.get_mut(&key).ok_or(400)?.destroyed = true;
        Ok(())
    }

    pub fn destroy_event(&mut self, handle: usize) -> Answer {
        self.event(handle)?.destroyed = true;
        Ok(())
    }

    pub fn record(&mut self, handle: usize, stream: usize) -> Answer {
        let key = self.stream(stream)?;
        let device = self.event(handle)?.device;
        if device != self.streams[&key].device {
            return Err(400);
        }
        let captured = self.enters(key)?;
        let capture = self.streams[&key].capture.filter(|_| captured);
        let event = self.event(handle)?;
        event.capture = capture;
        if !captured {
            event.stream = key;
            event.recorded += 1;
            let turn = event.recorded;
            self.queue_behind_blocking(key);
            self.queue(key, Queued { op: Op::Record { event: handle, turn }, at: Instant::now() });
        }
        Ok(())
    }

    /// What is queued in a device's legacy default stream runs behind what its blocking streams have, those of threads
    /// included; the fake keeps that rule for events.
    fn queue_behind_blocking(&mut self, key: usize) {
        let legacy = &self.streams[&key];
        if legacy.default != Some(Default::Legacy) {
            return;
        }
        let (device, epoch) = (legacy.device, legacy.epoch);
        let busy = |(&other, s): (&usize, &Stream)| {
            let blocking = s.device == device && s.epoch == epoch && s.flags & NON_BLOCKING == 0 && other != key;
            (blocking && !s.ops.is_empty()).then_some(other)
        };
        for other in self.streams.iter().filter_map(busy).collect::<Vec<_>>() {
            let event = self.create_event(device, 0);
            let mark = self.events.get_mut(&event).expect("just made");
            (mark.destroyed, mark.stream, mark.recorded) = (true, other, 1);
            self.queue(other, Queued { op: Op::Record { event, turn: 1 }, at: Instant::now() });
            self.queue(key, Queued { op: Op::Wait { event, turn: 1 }, at: Instant::now() });
        }
    }

    pub fn wait(&mut self, stream: usize, handle: usize) -> Answer {
        let key = self.stream(stream)?;
        let event = self.event(handle)?;
        let (turn, of_event) = (event.recorded, event.capture);
        let captured = self.enters(key)?;
        if turn == 0 && of_event.is_none() {
            return Ok(()); // never recorded: nothing to wait for, nor to capture
        }
        if self.waits_in_capture(key, captured, of_event)? {
            return Ok(());
        }
        self.queue(key, Queued { op: Op::Wait { event: handle, turn }, at: Instant::now() });
        Ok(())
    }

    pub fn query_event(&mut self, handle: usize) -> Answer {
        let capture = self.event(handle)?.capture;
        self.not_captured(capture)?;
        self.unsafe_while_capturing()?;
        self.run_due();
        let event = self.event(handle)?;
        if event.done >= event.recorded {
            Ok(())
        } else {
            Err(600)
        }
    }

    pub fn query_stream(&mut self, handle: usize) -> Answer {
        self.unsafe_while_capturing()?;
        let key = self.stream(handle)?;
        self.not_capturing(key)?;
        self.run_due();
        if self.streams[&key].ops.is_empty() {
            Ok(())
        } else {
            Err(600)
        }
    }

    pub fn synchronize_event(&mut self, handle: usize) -> Answer {
        let event = self.event(handle)?;
        let (stream, turn, capture) = (event.stream, event.recorded, event.capture);
        self.not_captured(capture)?;
        self.unsafe_while_capturing()?;
        if self.is_done(handle, turn) {
            return Ok(());
        }
        match self.auto {
            Some(_) => self.run_due(),
            None => self.run(stream, How::Forced, Some((handle, turn)), u64::MAX),
        };
        if self.is_done(handle, turn) {
            Ok(())
        } else {
            Err(WAIT)
        }
    }

    pub fn synchronize_stream(&mut self, handle: usize) -> Answer {
        self.unsafe_while_capturing()?;
        let key = self.stream(handle)?;
        self.not_capturing(key)?;
        self.settle(key)
    }

    /// Ends once everything in a stream has run.
    pub fn settle(&mut self, key: usize) -> Answer {
        match self.auto {
            Some(_) => self.run_due(),
            None => self.run(key, How::Forced, None, u64::MAX),
        };
        if self.streams.get(&key).is_none_or(|s| s.ops.is_empty()) {
            Ok(())
        } else {
            Err(WAIT)
        }
    }

    /// Ends once everything of a device, or of all, has run.
    pub fn settle_devices(&mut self, device: Option<i32>) -> Answer {
        let keys: Vec<usize> =
            self.streams.iter().filter(|(_, s)| device.is_none_or(|d| d == s.device)).map(|(&key, _)| key).collect();
        for key in keys {
            self.settle(key)?;
        }
        Ok(())
    }

    fn is_done(&self, event: usize, turn: u64) -> bool {
        self.events.get(&event).is_none_or(|e| e.done >= turn)
    }

    /// Runs a stream in order: to its end, past the record `until`, or `most` operations; not where it is held, nor
    /// past a wait for an event that is pending.
    pub fn run(&mut self, key: usize, how: How, until: Option<(usize, u64)>, most: u64) -> u64 {
        let mut ran = 0;
        while ran < most && self.poisoned().is_none() {
            let Some(stream) = self.streams.get(&key).filter(|s| !s.held) else { break };
            let Some(next) = stream.ops.front() else { break };
            if matches!(how, How::Due(before) if next.at > before) {
                break;
            }
            if let Op::Wait { event, turn } = next.op {
                if !self.is_done(event, turn) && how == How::Forced {
                    let other = self.events.get(&event).map_or(key, |e| e.stream);
                    if other != key {
                        ran += self.run(other, how, Some((event, turn)), u64::MAX);
                    }
                }
                if !self.is_done(event, turn) {
                    break;
                }
            }
            let Some(Queued { op, .. }) = self.streams.get_mut(&key).and_then(|s| s.ops.pop_front()) else { break };
            ran += 1;
            match op {
                // SAFETY: the contract of a copy: both ranges stay valid until the stream has run it. `copy` and not
                // `copy_nonoverlapping`, since a test may well pass the same buffer.
                Op::Copy { dst, src, n } => unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, n) },
                // SAFETY: as above for the destination; the bytes are owned.
                Op::Bytes { dst, bytes } => unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst as *mut u8, bytes.len());
                },
                Op::Gather { launch, threads, .. } => self.gather(&launch, threads),
                Op::Record { event, turn } => {
                    if let Some(e) = self.events.get_mut(&event) {
                        e.done = e.done.max(turn);
                    }
                    if until == Some((event, turn)) {
                        break;
                    }
                }
                Op::Wait { .. } => {}
            }
        }
        ran
    }

    /// Runs all streams, in the order in which they were made, again and again until nothing more can run.
    pub fn run_all(&mut self, how: How) -> u64 {
        let mut ran = 0;
        loop {
            let keys: Vec<usize> = self.streams.keys().copied().collect();
            let more: u64 = keys.into_iter().map(|key| self.run(key, how, None, u64::MAX)).sum();
            ran += more;
            if more == 0 {
                return ran;
            }
        }
    }

    /// In auto-run mode, runs what was queued long enough ago.
    pub fn run_due(&mut self) -> u64 {
        let Some(delay) = self.auto else { return 0 };
        match Instant::now().checked_sub(delay) {
            Some(before) => self.run_all(How::Due(before)),
            None => 0,
        }
    }

    /// A device's context is destroyed: what can still run does, the rest never will.
    pub fn abandon(&mut self, device: i32) {
        self.run_all(How::Told);
        for stream in self.streams.values_mut().filter(|s| s.device == device) {
            stream.ops.clear();
            stream.capture = None;
        }
        self.captures.retain(|_, capture| capture.device != device);
        self.events.values_mut().filter(|e| e.device == device).for_each(|e| e.done = e.recorded);
    }

    /// The thread that makes work complete by itself. It ends with the process.
    pub fn start_auto_runner() {
        static STARTED: Once = Once::new();
        STARTED.call_once(|| {
            std::thread::spawn(|| loop {
                let mut s = lock();
                if s.run_due() > 0 {
                    CHANGED.notify_all();
                }
                let pause = s.auto.map_or(Duration::from_millis(100), |delay| {
                    let first =
                        s.streams.values().filter(|s| !s.held).filter_map(|s| s.ops.front()).map(|q| q.at).min();
                    let due = first.map(|at| (at + delay).saturating_duration_since(Instant::now()));
                    due.map_or(Duration::from_millis(100), |due| due.max(Duration::from_micros(50)))
                });
                drop(s.wait(pause));
            });
        });
    }
}
