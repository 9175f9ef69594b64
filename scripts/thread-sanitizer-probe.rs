//! What `scripts/sanitize.sh thread` looks at first: threads that meet at a lock, a condition variable, a value made once and an
//! `Arc`. In order, which is to give no report; with an argument without, which is to give one.

use std::cell::UnsafeCell;
use std::sync::{Arc, Condvar, Mutex, OnceLock};

struct Place(UnsafeCell<u64>);
// SAFETY: whether it is shared in order is what is looked at.
unsafe impl Sync for Place {}

fn main() {
    let ordered = std::env::args().nth(1).is_none();
    static ONCE: OnceLock<Vec<u64>> = OnceLock::new();
    let shared = Arc::new((Mutex::new(0u64), Condvar::new(), Place(UnsafeCell::new(0))));
    let work = move |shared: Arc<(Mutex<u64>, Condvar, Place)>| {
        for turn in 0..5_000u64 {
            let mut locked = shared.0.lock().unwrap();
            if turn % 500 == 0 {
                locked = shared.1.wait_timeout(locked, std::time::Duration::from_micros(50)).unwrap().0;
            }
            *locked += 1;
            if !ordered {
                drop(locked);
            }
            // SAFETY: under the lock; without it this is the race that is to be seen.
            unsafe { *shared.2.0.get() += ONCE.get_or_init(|| vec![1])[0] };
            shared.1.notify_all();
        }
    };
    let threads: Vec<_> = (0..4).map(|_| Arc::clone(&shared)).map(|of| std::thread::spawn(move || work(of))).collect();
    drop(shared);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
