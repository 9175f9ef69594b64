//! What was done and what went wrong, counted by all threads.

use crate::rows;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also where a thread that was to die held it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sums over the whole run.
#[derive(Debug, Default)]
pub struct Account {
    counts: Mutex<Vec<(&'static str, u64)>>,
    wrong: Mutex<Vec<String>>,
    wrongs: AtomicU64,
    /// Moves with every batch and step: what the watchdog looks at.
    pub alive: AtomicU64,
    next_uid: AtomicU64,
}

impl Account {
    /// Adds to a count; counts are listed in the order in which they came.
    pub fn add(&self, what: &'static str, by: u64) {
        let mut counts = lock(&self.counts);
        match counts.iter_mut().find(|(name, _)| *name == what) {
            Some((_, count)) => *count += by,
            None => counts.push((what, by)),
        }
    }

    /// All counts.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        lock(&self.counts).clone()
    }

    /// Notes what must not be; the first few are kept.
    pub fn wrong(&self, what: impl Into<String>) {
        self.wrongs.fetch_add(1, Ordering::Relaxed);
        let mut wrong = lock(&self.wrong);
        if wrong.len() < 20 {
            wrong.push(what.into());
        }
    }

    /// Notes it unless it holds.
    pub fn check(&self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.wrong(what());
        }
    }

    /// What must not be, and how often there was something.
    pub fn wrongs(&self) -> (u64, Vec<String>) {
        (self.wrongs.load(Ordering::Relaxed), lock(&self.wrong).clone())
    }

    /// Numbers for so many lanes of a new writer.
    pub fn uids(&self, lanes: usize) -> u64 {
        self.next_uid.fetch_add(lanes as u64, Ordering::Relaxed)
    }

    /// Something goes on.
    pub fn live(&self) {
        self.alive.fetch_add(1, Ordering::Relaxed);
    }

    /// A step's words, whole; else it is noted. Returns its number.
    pub fn whole(&self, words: &[u64], place: &str) -> Option<u64> {
        let id = rows::check(words);
        self.check(id.is_some(), || format!("{place}: a torn row, {words:x?}"));
        id
    }
}

/// Which rows came, each of which may come once.
#[derive(Debug, Default)]
pub struct Once {
    seen: HashMap<u64, Vec<u64>>,
}

impl Once {
    /// Notes a row by the number of its first step; false if it came before.
    pub fn note(&mut self, id: u64) -> bool {
        let (uid, step) = (id >> 32, id as u32 as usize);
        let bits = self.seen.entry(uid).or_default();
        if bits.len() <= step / 64 {
            bits.resize(step / 64 + 1, 0);
        }
        let bit = 1 << (step % 64);
        let fresh = bits[step / 64] & bit == 0;
        bits[step / 64] |= bit;
        fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_twice_and_what_is_torn_is_wrong() {
        let (mut once, account) = (Once::default(), Account::default());
        assert!([0, 1, 64, 1 << 32].into_iter().all(|id| once.note(id)));
        assert!(!once.note(64));
        assert_eq!(account.whole(&[1; rows::WORDS], "here"), None);
        account.check(true, || unreachable!());
        assert_eq!((account.wrongs().0, account.wrongs().1.len()), (1, 1));
    }
}
