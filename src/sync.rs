//! Small things that every lock and every wait in the crate share.
//!
//! Owns the rule for poisoned locks, deadlines, and the short spin before a thread parks.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::Wake;
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Locks, also when another thread panicked while it held the lock: every critical section in this crate leaves its
/// state whole at each point where it could panic, and a fault is reported by the actor's exit, not by poison.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The lock, if nobody has it.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// What gates and version counters are built from: the standard library's locks and atomics; under
/// `--cfg pinring_loom` those of loom, whose tests try every order of what their threads do.
pub(crate) mod checked {
    #[cfg(not(pinring_loom))]
    pub(crate) use super::lock;
    #[cfg(pinring_loom)]
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};
    #[cfg(pinring_loom)]
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    #[cfg(not(pinring_loom))]
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};
    #[cfg(not(pinring_loom))]
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

    #[cfg(pinring_loom)]
    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// How long a verb may wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    /// `try_…`.
    None,
    /// `…_timeout`.
    Until(Instant),
    /// The plain verb.
    Forever,
}

impl Patience {
    pub(crate) fn timeout(timeout: Duration) -> Patience {
        Instant::now().checked_add(timeout).map_or(Patience::Forever, Patience::Until)
    }

    /// The time left: `None` is without end.
    pub(crate) fn left(self) -> Option<Duration> {
        match self {
            Patience::None => Some(Duration::ZERO),
            Patience::Until(deadline) => Some(deadline.saturating_duration_since(Instant::now())),
            Patience::Forever => None,
        }
    }
}

/// Spins before parking, for at most 20 µs, while that pays: a spin that was in vain makes the next ones rarer, so that
/// a thread that waits long (a writer before a full ring) costs nothing.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    /// Waits to go straight to sleep before the next spin.
    skip: u32,
    in_vain: u32,
}

impl Spin {
    const LIMIT: Duration = Duration::from_micros(20);

    /// Spins until `ready`, and says whether it became so.
    pub(crate) fn until(&mut self, mut ready: impl FnMut() -> bool) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return ready();
        }
        if cfg!(pinring_loom) {
            return ready(); // a spin is endless to a model; what matters comes behind it
        }
        let begun = Instant::now();
        loop {
            for _ in 0..16 {
                if ready() {
                    self.in_vain = 0;
                    return true;
                }
                std::hint::spin_loop();
            }
            if begun.elapsed() >= Spin::LIMIT {
                self.in_vain = (self.in_vain + 1).min(6);
                self.skip = (1 << self.in_vain) - 1;
                return false;
            }
        }
    }
}

/// Keeps what it holds on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

impl<T> std::ops::Deref for Padded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// Wakes a parked thread, as a waker.
pub(crate) struct Unpark(pub(crate) Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// What a panic said.
pub(crate) fn panic_text(panic: Box<dyn Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => format!("it panicked: {text}"),
        Err(panic) => match panic.downcast::<&'static str>() {
            Ok(text) => format!("it panicked: {text}"),
            Err(panic) => {
                // A foreign payload may panic when it is dropped, and then nobody would hear of the first panic.
                std::mem::forget(panic);
                "it panicked without a text".to_owned()
            }
        },
    }
}

/// Points that threads pass, where tests have them panic or do something in between. One at a time, for the whole process.
#[cfg(test)]
pub(crate) mod points {
    use super::lock;
    use std::sync::Mutex;

    type Act = Box<dyn FnOnce() + Send>;

    static ARMED: Mutex<Option<(&'static str, Act)>> = Mutex::new(None);

    /// The next thread that passes `point` does this there.
    pub(crate) fn act(point: &'static str, act: impl FnOnce() + Send + 'static) {
        *lock(&ARMED) = Some((point, Box::new(act)));
    }

    /// The next thread that passes `point` panics with `text`.
    pub(crate) fn crash(point: &'static str, text: &str) {
        let text = text.to_owned();
        act(point, move || panic!("{text}"));
    }

    /// Takes that back; whether nobody had passed it.
    pub(crate) fn disarm() -> bool {
        lock(&ARMED).take().is_some()
    }

    /// A point.
    pub(crate) fn here(point: &'static str) {
        let mut armed = lock(&ARMED);
        let told = if armed.as_ref().is_some_and(|(at, _)| *at == point) { armed.take() } else { None };
        drop(armed); // not held meanwhile
        if let Some((_, act)) = told {
            act();
        }
    }
}
