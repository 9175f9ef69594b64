//! How failures reach a C caller: as a text to ask for, and as a line on the standard error, since a framework between
//! the allocator and the user shows neither null's reason nor a refused free.

use std::cell::RefCell;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Whether failures are printed.
pub(crate) static PRINTS: AtomicBool = AtomicBool::new(true);
/// The newest failure of any thread.
static NEWEST: Mutex<String> = Mutex::new(String::new());

thread_local! {
    /// The newest failure of this thread.
    static OWN: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Keeps the text of a failure, and prints it.
pub(crate) fn failed(text: &str) {
    if PRINTS.load(Ordering::Relaxed) {
        print(text);
    }
    // A thread that is ending has no slot of its own any more.
    let _ = OWN.try_with(|own| text.clone_into(&mut own.borrow_mut()));
    // `try_lock`: a child that was forked while another thread held it must not wait.
    if let Ok(mut newest) = NEWEST.try_lock() {
        text.clone_into(&mut newest);
    }
}

/// One write to the standard error, if there is one. Not through `std::io::stderr`: a child that was forked while another
/// thread held its lock must not wait.
fn print(text: &str) {
    // SAFETY: the descriptor is used for one write and never closed by this, since the file is not dropped.
    let mut standard_error = ManuallyDrop::new(unsafe { File::from_raw_fd(2) });
    let _ = standard_error.write_all(format!("pinring: {text}\n").as_bytes());
}

/// The newest failure of this thread; of the process, if this thread had none.
pub(crate) fn last() -> String {
    let own = OWN.try_with(|own| own.borrow().clone()).unwrap_or_default();
    if !own.is_empty() {
        return own;
    }
    match NEWEST.try_lock() {
        Ok(newest) => newest.clone(),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned).clone(),
        Err(std::sync::TryLockError::WouldBlock) => String::new(),
    }
}

/// Runs `body`; a panic in it becomes a failure and `otherwise`, and goes no further (invariant 8).
pub(crate) fn guarded<R>(otherwise: R, body: impl FnOnce() -> R) -> R {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied().map(str::to_owned);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        // Dropping a payload may itself panic.
        std::mem::forget(panic);
        failed(&format!("a bug of pinring: it panicked: {text}"));
        otherwise
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_text_and_the_other_answer() {
        assert_eq!(guarded(7, || panic!("on purpose {}", 1)), 7);
        assert_eq!(last(), "a bug of pinring: it panicked: on purpose 1");
        assert_eq!(guarded(7, || 8), 8);
    }
}
