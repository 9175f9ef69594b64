//! Graph capture: which streams are in one, who may call what meanwhile, and how it gets lost. What is captured is
//! not kept.

use crate::{thread_id, Answer, State};
use std::cell::Cell;

/// `CU_STREAM_CAPTURE_MODE_*`.
pub const GLOBAL: u32 = 0;
pub const RELAXED: u32 = 2;

pub struct Capture {
    pub device: i32,
    /// The thread that began it.
    thread: u64,
    mode: u32,
    origin: usize,
    pub lost: bool,
}

thread_local! {
    /// The capture mode of this thread, which says what it holds to be unsafe.
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

pub fn exchange_mode(mode: u32) -> Result<u32, i32> {
    if mode > RELAXED {
        return Err(1);
    }
    Ok(MODE.replace(mode))
}

pub fn mode() -> u32 {
    MODE.get()
}

impl State {
    /// A call that other threads' captures may forbid: 900, and those are lost.
    pub fn unsafe_while_capturing(&mut self) -> Answer {
        let (me, mode) = (thread_id(), MODE.get());
        let mut forbidden = false;
        for capture in self.captures.values_mut() {
            let mine = capture.thread == me && capture.mode != RELAXED;
            let forbids = match mode {
                GLOBAL => mine || capture.mode == GLOBAL,
                RELAXED => false,
                _ => mine,
            };
            capture.lost |= forbids;
            forbidden |= forbids;
        }
        if forbidden {
            Err(900)
        } else {
            Ok(())
        }
    }

    /// Work is put into a stream: whether it is captured. 901 where the capture is lost already; 906, and it is
    /// lost, where this is the legacy default stream and a stream ordered with it is capturing.
    pub fn enters(&mut self, key: usize) -> Result<bool, i32> {
        if let Some(id) = self.streams[&key].capture {
            let lost = self.captures.get(&id).is_some_and(|capture| capture.lost);
            return if lost { Err(901) } else { Ok(true) };
        }
        match self.captures_before_legacy(key) {
            ids if ids.is_empty() => Ok(false),
            ids => {
                self.captures.iter_mut().filter(|(id, _)| ids.contains(id)).for_each(|(_, c)| c.lost = true);
                Err(906)
            }
        }
    }

    /// The captures of streams that the legacy default stream is ordered with, if `key` is that one.
    fn captures_before_legacy(&self, key: usize) -> Vec<u64> {
        let stream = &self.streams[&key];
        if stream.default != Some(crate::streams::Default::Legacy) {
            return Vec::new();
        }
        let ordered =
            |s: &&crate::streams::Stream| s.device == stream.device && s.flags & crate::streams::NON_BLOCKING == 0;
        self.streams.values().filter(ordered).filter_map(|s| s.capture).collect()
    }

    /// A stream is to wait for an event: true where that is part of a capture and nothing is queued.
    pub fn waits_in_capture(&mut self, key: usize, captured: bool, of_event: Option<u64>) -> Result<bool, i32> {
        let of_stream = self.streams[&key].capture.filter(|_| captured);
        match (of_stream, of_event) {
            (None, None) => Ok(false),
            (Some(mine), Some(other)) if mine == other => Ok(true),
            (Some(mine), _) => {
                self.lose(mine);
                Err(905)
            }
            (None, Some(other)) => match self.captures.get(&other) {
                Some(capture) if capture.lost => Err(901),
                Some(_) => {
                    // The stream joins the capture.
                    if let Some(stream) = self.streams.get_mut(&key) {
                        stream.capture = Some(other);
                    }
                    Ok(true)
                }
                None => Err(1),
            },
        }
    }

    /// A query of an event that was last recorded in a capture: 907, and the capture is lost; 1 once it has ended.
    pub fn not_captured(&mut self, capture: Option<u64>) -> Answer {
        match capture.map(|id| self.captures.get_mut(&id)) {
            Some(Some(capture)) => {
                capture.lost = true;
                Err(907)
            }
            Some(None) => Err(1),
            None => Ok(()),
        }
    }

    /// A query of, or a wait for, a stream that is capturing: 900, and the capture is lost.
    pub fn not_capturing(&mut self, key: usize) -> Answer {
        match self.streams[&key].capture {
            Some(id) => {
                self.lose(id);
                Err(900)
            }
            None if self.captures_before_legacy(key).is_empty() => Ok(()),
            None => self.enters(key).map(|_| ()),
        }
    }

    fn lose(&mut self, id: u64) {
        if let Some(capture) = self.captures.get_mut(&id) {
            capture.lost = true;
        }
    }

    /// `cuStreamIsCapturing`: 0 no, 1 yes, 2 its capture is lost.
    pub fn capture_status(&mut self, stream: usize) -> Result<i32, i32> {
        let key = self.stream(stream)?;
        match self.streams[&key].capture.and_then(|id| self.captures.get(&id)) {
            Some(capture) if capture.lost => Ok(2),
            Some(_) => Ok(1),
            None if self.captures_before_legacy(key).is_empty() => Ok(0),
            None => Err(906),
        }
    }

    pub fn begin_capture(&mut self, stream: usize, mode: u32) -> Answer {
        let key = self.stream(stream)?;
        let id = self.handle() as u64;
        let stream = self.streams.get_mut(&key).ok_or(400)?;
        if mode > RELAXED {
            return Err(1);
        }
        if stream.default == Some(crate::streams::Default::Legacy) {
            return Err(900);
        }
        if stream.capture.is_some() {
            return Err(401);
        }
        stream.capture = Some(id);
        let capture = Capture { device: stream.device, thread: thread_id(), mode, origin: key, lost: false };
        self.captures.insert(id, capture);
        Ok(())
    }

    /// Ends a capture: 901 where it was lost, and then there is no graph.
    pub fn end_capture(&mut self, stream: usize) -> Answer {
        let key = self.stream(stream)?;
        let id = self.streams[&key].capture.ok_or(401)?;
        let capture = self.captures.get(&id).ok_or(401)?;
        if capture.mode != RELAXED && capture.thread != thread_id() {
            return Err(908);
        }
        if capture.origin != key {
            return Err(401);
        }
        let lost = capture.lost;
        self.captures.remove(&id);
        self.streams.values_mut().filter(|s| s.capture == Some(id)).for_each(|s| s.capture = None);
        if lost {
            Err(901)
        } else {
            Ok(())
        }
    }
}
