//! A gate: where finished tokens wait for whoever takes them.
//!
//! Owns a queue, the threads and wakers that wait before it, and the reason why it closed. A token put in wakes one
//! parked thread, or every registered waker (async tasks and `select`, which look again themselves). What it does not
//! do: bound the queue. Tokens own slots of the ring, so there are never more of them than slots.

use crate::error::Closed;
use crate::sync::checked::{AtomicUsize, Condvar, Mutex, MutexGuard, lock};
use crate::sync::{Padded, Patience, Spin};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;
use std::task::Waker;

/// A first-in, first-out gate. See the module's text.
#[derive(Debug)]
pub(crate) struct Gate<T> {
    state: Mutex<State<T>>,
    arrived: Condvar,
    /// Tokens here, or a large number once closed: written with the lock held. On a cache line of its own, since a
    /// thread that spins on the lock's would slow down whoever holds it.
    hint: Padded<AtomicUsize>,
}

#[derive(Debug)]
struct State<T> {
    tokens: VecDeque<T>,
    /// Tokens ever put in: the next one's sequence number.
    sequence: u64,
    parked: usize,
    wakers: Vec<(u64, Waker)>,
    next_waker: u64,
    closed: Option<Closed>,
}

/// Who waits for what happened to a gate. They are woken when no lock is held: a waker is the user's code, and may do
/// anything, even stop the feed.
#[must_use = "somebody waits for this"]
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    threads: Threads,
    wakers: Vec<(u64, Waker)>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Threads {
    #[default]
    None,
    One,
    All,
}

impl Wakes {
    /// Those of something that happened next, before anybody was woken: to be woken together, since a waker that panics
    /// keeps its thread from what follows.
    pub(crate) fn and(mut self, next: Wakes) -> Wakes {
        self.threads = match (self.threads, next.threads) {
            (Threads::None, threads) | (threads, Threads::None) => threads,
            _ => Threads::All, // each of them is for somebody else
        };
        self.wakers.extend(next.wakers);
        self
    }
}

const CLOSED_HINT: usize = usize::MAX / 2;

impl<T> Gate<T> {
    pub(crate) fn new() -> Gate<T> {
        Gate {
            state: Mutex::new(State {
                tokens: VecDeque::new(),
                sequence: 0,
                parked: 0,
                wakers: Vec::new(),
                next_waker: 0,
                closed: None,
            }),
            arrived: Condvar::new(),
            hint: Padded(AtomicUsize::new(0)),
        }
    }

    /// Puts in the token that `make` builds from its sequence number. `None`: the gate is closed, and none was made.
    pub(crate) fn put(&self, make: impl FnOnce(u64) -> T) -> Option<Wakes> {
        self.put_if(|sequence| Some(make(sequence)))
    }

    /// As [`put`](Gate::put), but `make` may find that it is not wanted any more: then `None` too. It is asked with the lock
    /// held, so that [`take_all`](Gate::take_all) either comes later, or was seen by it.
    pub(crate) fn put_if(&self, make: impl FnOnce(u64) -> Option<T>) -> Option<Wakes> {
        let mut state = lock(&self.state);
        if state.closed.is_some() {
            return None;
        }
        let token = make(state.sequence)?;
        state.sequence += 1;
        state.tokens.push_back(token);
        self.hint.store(state.tokens.len(), Ordering::Relaxed);
        let threads = if state.parked > 0 { Threads::One } else { Threads::None };
        Some(Wakes { threads, wakers: std::mem::take(&mut state.wakers) })
    }

    /// Wakes who waits for what happened. Without any lock held.
    ///
    /// # Panics
    /// If a waker does: when all of them have been called.
    pub(crate) fn wake(&self, Wakes { threads, wakers }: Wakes) {
        match threads {
            Threads::None => {}
            Threads::One => self.arrived.notify_one(),
            Threads::All => self.arrived.notify_all(),
        }
        wake_all(wakers);
    }

    /// The number that the next token gets.
    pub(crate) fn next_sequence(&self) -> u64 {
        lock(&self.state).sequence
    }

    /// Takes the oldest token: `None` when there was none within `patience`. A closed gate that still holds tokens
    /// gives them first.
    pub(crate) fn take(&self, patience: Patience, spin: &mut Spin) -> Result<Option<T>, Closed> {
        if self.hint.load(Ordering::Relaxed) == 0 {
            if matches!(patience, Patience::None) {
                return Ok(None); // whoever puts a token in, or closes the gate, has set the hint when that is done
            }
            spin.until(|| self.hint.load(Ordering::Relaxed) > 0);
        }
        let mut state = lock(&self.state);
        loop {
            if let Some(token) = state.tokens.pop_front() {
                if state.closed.is_none() {
                    self.hint.store(state.tokens.len(), Ordering::Relaxed);
                }
                return Ok(Some(token));
            }
            if let Some(closed) = &state.closed {
                return Err(closed.clone());
            }
            let left = patience.left();
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            state.parked += 1;
            state = match left {
                None => self.arrived.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()),
                Some(left) => self.arrived.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0,
            };
            state.parked -= 1;
        }
    }

    /// Takes every token.
    pub(crate) fn take_all(&self) -> VecDeque<T> {
        let mut state = lock(&self.state);
        if state.closed.is_none() {
            self.hint.store(0, Ordering::Relaxed);
        }
        std::mem::take(&mut state.tokens)
    }

    /// Tokens that wait here.
    pub(crate) fn len(&self) -> usize {
        lock(&self.state).tokens.len()
    }

    /// Why no token will come any more, once the last one was taken.
    pub(crate) fn exhausted(&self) -> Option<Closed> {
        let state = lock(&self.state);
        if state.tokens.is_empty() { state.closed.clone() } else { None }
    }

    /// What `look` says of the oldest token, without taking it.
    pub(crate) fn peek<R>(&self, look: impl FnOnce(&T) -> R) -> Option<R> {
        lock(&self.state).tokens.front().map(look)
    }

    /// Registers a waker for the next token or the close, unless there is something to take already (then `None`).
    /// It is woken once; `forget` it when the wait is given up.
    pub(crate) fn register(&self, waker: &Waker) -> Option<u64> {
        self.register_unless(waker, |oldest, closed| oldest.is_some() || closed.is_some())
    }

    /// As [`register`](Gate::register), unless `there`, told of the oldest token and of why none will come any more, says
    /// that this is what the caller would wait for. It is asked with the lock held: nothing happens between its answer and
    /// the wait.
    pub(crate) fn register_unless(
        &self,
        waker: &Waker,
        there: impl FnOnce(Option<&T>, Option<&Closed>) -> bool,
    ) -> Option<u64> {
        let mut state = lock(&self.state);
        if there(state.tokens.front(), state.closed.as_ref()) {
            return None;
        }
        let id = state.next_waker;
        state.next_waker += 1;
        state.wakers.push((id, waker.clone()));
        Some(id)
    }

    /// Wakes every registered waker, so that it looks at the state of things again.
    pub(crate) fn wake_wakers(&self) {
        let wakers = std::mem::take(&mut lock(&self.state).wakers);
        wake_all(wakers);
    }

    pub(crate) fn forget(&self, id: u64) {
        lock(&self.state).wakers.retain(|(other, _)| *other != id);
    }

    /// No token comes any more; those that are here can still be taken.
    pub(crate) fn end(&self, reason: Closed) -> Wakes {
        let mut state = lock(&self.state);
        state.closed.get_or_insert(reason);
        self.announce(state)
    }

    /// No token comes and none is given any more; returns those that were here. The first reason stays, but for that of
    /// an end.
    pub(crate) fn close(&self, reason: Closed) -> (VecDeque<T>, Wakes) {
        let mut state = lock(&self.state);
        if state.closed.as_ref().is_none_or(Closed::is_end) {
            state.closed = Some(reason);
        }
        let drained = std::mem::take(&mut state.tokens);
        (drained, self.announce(state))
    }

    /// As `close`, but those that `keep` names can still be taken. The reason of an end stays where nothing was lost.
    pub(crate) fn close_but(&self, reason: Closed, keep: impl Fn(&T) -> bool) -> (VecDeque<T>, Wakes) {
        let mut state = lock(&self.state);
        let (kept, drained): (VecDeque<T>, VecDeque<T>) = std::mem::take(&mut state.tokens).into_iter().partition(keep);
        state.tokens = kept;
        if state.closed.as_ref().is_none_or(|closed| closed.is_end() && !drained.is_empty()) {
            state.closed = Some(reason);
        }
        (drained, self.announce(state))
    }

    fn announce(&self, mut state: MutexGuard<'_, State<T>>) -> Wakes {
        self.hint.store(CLOSED_HINT, Ordering::Relaxed);
        Wakes { threads: Threads::All, wakers: std::mem::take(&mut state.wakers) }
    }
}

/// A waker is the user's: one that panics must not keep the others from their news.
fn wake_all(wakers: Vec<(u64, Waker)>) {
    let mut first = None;
    for (_, waker) in wakers {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
            first.get_or_insert(panic);
        }
    }
    if let Some(panic) = first {
        resume_unwind(panic);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    struct Count(AtomicUsize);

    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn put<T>(gate: &Gate<T>, make: impl FnOnce(u64) -> T) {
        gate.wake(gate.put(make).expect("it is open"));
    }

    fn close<T>(gate: &Gate<T>, reason: Closed) -> VecDeque<T> {
        let (drained, wakes) = gate.close(reason);
        gate.wake(wakes);
        drained
    }

    /// What is not wanted any more is never seen, and uses up no number.
    #[test]
    fn what_is_not_wanted_any_more_is_not_put() {
        let gate = Gate::new();
        put(&gate, |sequence| sequence);
        assert!(gate.put_if(|_| None).is_none());
        put(&gate, |sequence| sequence);
        assert_eq!(gate.take_all(), [0, 1]);
    }

    #[test]
    fn gives_in_order_and_then_the_reason() {
        let gate = Gate::new();
        for _ in 0..3 {
            put(&gate, |sequence| sequence);
        }
        gate.wake(gate.end(Closed::Ended));
        assert!(gate.put(|_| panic!("it is closed")).is_none());
        let mut spin = Spin::default();
        for expected in 0..3 {
            assert_eq!(gate.take(Patience::Forever, &mut spin), Ok(Some(expected)));
        }
        assert_eq!(gate.take(Patience::Forever, &mut spin), Err(Closed::Ended));
    }

    #[test]
    fn close_hands_back_what_was_not_taken_and_keeps_the_first_reason() {
        let gate = Gate::new();
        put(&gate, |_| 'a');
        assert_eq!(close(&gate, Closed::LearnerGone), ['a']);
        assert!(close(&gate, Closed::Stopped).is_empty());
        assert_eq!(gate.take(Patience::None, &mut Spin::default()), Err(Closed::LearnerGone));
    }

    #[test]
    fn a_close_that_keeps_some_gives_them_before_the_reason() {
        let close = |gate: &Gate<u64>, below: u64| {
            let (drained, wakes) = gate.close_but(Closed::Stopped, |token| *token < below);
            gate.wake(wakes);
            drained
        };
        let mut spin = Spin::default();
        let gate = Gate::new();
        (0..4).for_each(|_| put(&gate, |sequence| sequence));
        assert_eq!(close(&gate, 2), [2, 3]);
        assert_eq!(close(&gate, 2), [], "again: they stay");
        assert_eq!(gate.take(Patience::Forever, &mut spin), Ok(Some(0)));
        assert_eq!(gate.take(Patience::Forever, &mut spin), Ok(Some(1)));
        assert_eq!(gate.take(Patience::Forever, &mut spin), Err(Closed::Stopped));

        // An end stays one where nothing was lost by the close.
        for (below, reason) in [(1, Closed::Ended), (0, Closed::Stopped)] {
            let gate = Gate::new();
            put(&gate, |sequence| sequence);
            gate.wake(gate.end(Closed::Ended));
            assert_eq!(close(&gate, below).len(), 1 - below as usize);
            assert_eq!(
                gate.take(Patience::None, &mut spin).map(|token| token.is_some()).ok(),
                (below == 1).then_some(true)
            );
            assert_eq!(gate.take(Patience::None, &mut spin), Err(reason));
        }
    }

    #[test]
    fn a_parked_thread_wakes_for_a_token_and_for_the_close() {
        let gate = Arc::new(Gate::new());
        let taker = std::thread::spawn({
            let gate = gate.clone();
            move || {
                let mut spin = Spin::default();
                (
                    gate.take(Patience::timeout(Duration::from_secs(60)), &mut spin),
                    gate.take(Patience::Forever, &mut spin),
                )
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        put(&gate, |_| 1);
        std::thread::sleep(Duration::from_millis(20));
        close(&gate, Closed::Stopped);
        assert_eq!(taker.join().unwrap(), (Ok(Some(1)), Err(Closed::Stopped)));
    }

    /// Both of two parked threads, and every waker of either.
    #[test]
    fn wakes_that_are_joined_reach_everybody() {
        let gate = Arc::new(Gate::new());
        let takers: Vec<_> = (0..2)
            .map(|_| {
                let gate = gate.clone();
                std::thread::spawn(move || gate.take(Patience::Forever, &mut Spin::default()))
            })
            .collect();
        while lock(&gate.state).parked < 2 {
            std::thread::yield_now();
        }
        let counts = [(); 2].map(|()| Arc::new(Count(AtomicUsize::new(0))));
        let [first, second] = counts.clone().map(|count| {
            assert!(gate.register_unless(&Waker::from(count), |_, _| false).is_some());
            gate.put(|_| ()).unwrap()
        });
        gate.wake(first.and(second));
        takers.into_iter().for_each(|taker| assert_eq!(taker.join().unwrap(), Ok(Some(()))));
        counts.iter().for_each(|count| assert_eq!(count.0.load(Ordering::Relaxed), 1));
    }

    #[test]
    fn a_forgotten_waker_is_not_woken() {
        let gate = Gate::new();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let first = gate.register(&waker).unwrap();
        gate.register(&waker).unwrap();
        gate.forget(first);
        put(&gate, |_| ());
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(gate.register(&waker), None, "a token is there already");
    }

    /// Who does not want the token that is there waits, and hears of the next, and of the end.
    #[test]
    fn a_waker_waits_behind_a_token_that_it_does_not_want() {
        let gate = Gate::new();
        let woken = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(woken.clone());
        let register = || gate.register_unless(&waker, |oldest, closed| oldest == Some(&1) || closed.is_some());
        put(&gate, |_| 0);
        assert!(register().is_some());
        put(&gate, |_| 1);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        assert!(register().is_some(), "the oldest is still the other");
        assert_eq!(gate.take(Patience::None, &mut Spin::default()), Ok(Some(0)));
        assert_eq!(register(), None);
        assert_eq!(gate.take(Patience::None, &mut Spin::default()), Ok(Some(1)));
        gate.wake(gate.end(Closed::Ended));
        assert_eq!(woken.0.load(Ordering::Relaxed), 2);
        assert_eq!(register(), None);
    }
}

/// Every order in which a few threads may meet here. See `.ci/run` for how it is run.
#[cfg(all(test, pinring_loom))]
mod orders {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;
    use std::time::Duration;

    const LONG: Duration = Duration::from_secs(3600);

    fn put(gate: &Gate<u64>) -> bool {
        gate.put(|sequence| sequence).map(|wakes| gate.wake(wakes)).is_some()
    }

    fn take(gate: &Gate<u64>) -> Result<Option<u64>, Closed> {
        gate.take(Patience::Forever, &mut Spin::default())
    }

    /// No token is lost, none is given twice, and nobody who parked sleeps on.
    #[test]
    fn two_takers_get_the_two_tokens_of_two_threads() {
        loom::model(|| {
            let gate = Arc::new(Gate::new());
            let takers: Vec<_> = (0..2)
                .map(|_| {
                    let gate = gate.clone();
                    thread::spawn(move || take(&gate).unwrap().unwrap())
                })
                .collect();
            assert!(put(&gate) && put(&gate));
            let mut taken: Vec<_> = takers.into_iter().map(|taker| taker.join().unwrap()).collect();
            taken.sort_unstable();
            assert_eq!(taken, [0, 1]);
        });
    }

    /// A look without waiting reads the hint alone: whoever knows of a token finds it.
    #[test]
    fn who_knows_of_a_token_finds_it_without_waiting() {
        loom::model(|| {
            let gate = Arc::new(Gate::new());
            let putter = thread::spawn({
                let gate = gate.clone();
                move || assert!(put(&gate))
            });
            let early = gate.take(Patience::None, &mut Spin::default()).unwrap();
            putter.join().unwrap();
            let late = gate.take(Patience::None, &mut Spin::default()).unwrap();
            assert_eq!([early, late].into_iter().flatten().collect::<Vec<_>>(), [0]);
        });
    }

    /// Each token is taken or handed back by the close, and both sides hear of it.
    #[test]
    fn a_close_loses_nothing_and_wakes_who_waits() {
        loom::model(|| {
            let gate = Arc::new(Gate::new());
            let taker = thread::spawn({
                let gate = gate.clone();
                move || take(&gate)
            });
            let putter = thread::spawn({
                let gate = gate.clone();
                move || put(&gate)
            });
            let (drained, wakes) = gate.close(Closed::Stopped);
            gate.wake(wakes);
            let (taken, was_put) = (taker.join().unwrap(), putter.join().unwrap());
            let taken = match taken {
                Ok(token) => token.into_iter().count(),
                Err(reason) => {
                    assert_eq!(reason, Closed::Stopped);
                    0
                }
            };
            assert_eq!(taken + drained.len(), usize::from(was_put));
        });
    }

    /// A waker that was registered is woken, or there was something to take.
    #[test]
    fn a_registered_waker_hears_of_the_token() {
        struct Mark(std::sync::atomic::AtomicBool);
        impl std::task::Wake for Mark {
            fn wake(self: std::sync::Arc<Self>) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        loom::model(|| {
            let gate = Arc::new(Gate::new());
            let mark = std::sync::Arc::new(Mark(false.into()));
            let putter = thread::spawn({
                let gate = gate.clone();
                move || assert!(put(&gate))
            });
            let registered = gate.register(&Waker::from(mark.clone()));
            putter.join().unwrap();
            assert!(registered.is_none() || mark.0.load(Ordering::SeqCst));
            assert_eq!(gate.take(Patience::timeout(LONG), &mut Spin::default()), Ok(Some(0)));
        });
    }
}
