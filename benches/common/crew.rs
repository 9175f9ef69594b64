//! Threads that take turns at floor and ours.
//!
//! The same threads run every slice of a case, one kind of turn after the other, so that both see the same cores, the
//! same caches and the same neighbours. Between slices they sleep.

use super::{Spread, cpu, watchdog};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// When a thread's part of a slice is over.
#[derive(Debug)]
pub struct Until<'a> {
    stop: &'a AtomicBool,
    steps: u64,
}

impl Until<'_> {
    /// Asked before each step.
    #[inline]
    pub fn over(&self, done: u64) -> bool {
        done >= self.steps || self.stop.load(Ordering::Relaxed)
    }
}

/// How long a slice is.
#[derive(Clone, Copy, Debug)]
pub enum Length {
    Time(Duration),
    /// Every thread does as many steps: where they wait for each other.
    Steps(u64),
}

/// What a slice came to: what each thread did, or `None` if it had no part.
#[derive(Clone, Debug)]
pub struct Slice(Vec<Option<Done>>);

#[derive(Clone, Copy, Debug)]
struct Done {
    begun: Instant,
    ended: Instant,
    cpu: Option<Duration>,
    done: u64,
}

impl Slice {
    /// Of all threads together, a second.
    pub fn rate(&self) -> f64 {
        self.rate_of(self.0.len())
    }

    /// Of the first `threads` threads together, a second: from the first one's begin to the last one's end.
    pub fn rate_of(&self, threads: usize) -> f64 {
        let parts = || self.0[..threads].iter().flatten();
        let seconds = parts().map(|part| part.ended).max().zip(parts().map(|part| part.begun).min());
        let seconds = seconds.map_or(f64::NAN, |(ended, begun)| (ended - begun).as_secs_f64());
        parts().map(|part| part.done).sum::<u64>() as f64 / seconds
    }

    /// Nanoseconds of a processor that one of what was done took; not a number where the system does not say.
    pub fn cpu_ns(&self) -> f64 {
        let cpu: Option<Duration> = self.0.iter().flatten().map(|part| part.cpu).sum();
        let done: u64 = self.0.iter().flatten().map(|part| part.done).sum();
        cpu.map_or(f64::NAN, |cpu| cpu.as_secs_f64() * 1e9 / done as f64)
    }
}

/// A thread's part in a slice: does its turn until it is over and says how much that was; `None` if it has no part.
pub type Part<T> = Box<dyn FnMut(T, &Until<'_>) -> Option<u64> + Send>;

/// See the module's text.
#[derive(Debug)]
pub struct Crew<T> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared<T> {
    begin: Barrier,
    end: Barrier,
    /// `None`: go home.
    turn: Mutex<Option<T>>,
    stop: AtomicBool,
    steps: AtomicU64,
    results: Mutex<Vec<Option<Done>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Copy + Send + 'static> Crew<T> {
    pub fn new(parts: Vec<Part<T>>) -> Crew<T> {
        let shared = Arc::new(Shared {
            begin: Barrier::new(parts.len() + 1),
            end: Barrier::new(parts.len() + 1),
            turn: Mutex::new(None),
            stop: AtomicBool::new(false),
            steps: AtomicU64::new(0),
            results: Mutex::new(vec![None; parts.len()]),
        });
        let threads = parts.into_iter().enumerate().map(|(index, part)| {
            let shared = shared.clone();
            std::thread::spawn(move || shared.work(index, part))
        });
        let threads = threads.collect();
        Crew { shared, threads }
    }

    /// One slice; returns when every thread has ended its part.
    pub fn slice(&self, turn: T, length: Length) -> Slice {
        watchdog::alive("a slice");
        let shared = &self.shared;
        *locked(&shared.turn) = Some(turn);
        shared.stop.store(false, Ordering::Relaxed);
        let (steps, time) = match length {
            Length::Time(time) => (u64::MAX, time),
            Length::Steps(steps) => (steps, Duration::ZERO),
        };
        shared.steps.store(steps, Ordering::Relaxed);
        shared.begin.wait();
        if !time.is_zero() {
            std::thread::sleep(time);
            shared.stop.store(true, Ordering::Relaxed);
        }
        shared.end.wait();
        Slice(locked(&shared.results).clone())
    }
}

impl<T: Copy + Send + 'static> Crew<T> {
    /// As many slices of each of the turns as there are rounds; every round begins with another turn. Slices with the
    /// same place were taken one behind the other.
    pub fn rounds<const N: usize>(&self, turns: [(T, Length); N], rounds: usize) -> [Vec<Slice>; N] {
        let mut slices = [const { Vec::new() }; N];
        for round in 0..rounds {
            for place in (0..N).map(|place| (place + round) % N) {
                slices[place].push(self.slice(turns[place].0, turns[place].1));
            }
        }
        slices
    }
}

/// The median, and the spread, of what pairs of slices say of each other.
pub fn ratio(ours: &[Slice], floor: &[Slice]) -> Spread {
    Spread::of(ours.iter().zip(floor).map(|(ours, floor)| ours.rate() / floor.rate()))
}

impl<T: Copy> Shared<T> {
    fn work(&self, index: usize, mut part: Part<T>) {
        loop {
            self.begin.wait();
            let Some(turn) = *locked(&self.turn) else { return };
            let until = Until { stop: &self.stop, steps: self.steps.load(Ordering::Relaxed) };
            let (begun, cpu) = (Instant::now(), cpu::of_thread());
            let done = part(turn, &until).map(|done| {
                let (ended, now) = (Instant::now(), cpu::of_thread());
                Done { begun, ended, cpu: now.zip(cpu).map(|(now, cpu)| now - cpu), done }
            });
            locked(&self.results)[index] = done;
            self.end.wait();
        }
    }
}

impl<T> Drop for Crew<T> {
    fn drop(&mut self) {
        *locked(&self.shared.turn) = None;
        self.shared.begin.wait();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
