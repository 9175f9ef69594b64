//! Ends a bench that hangs, instead of letting it wait for ever.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longer than any slice or check by far, also in a debug build on a loaded machine.
const LIMIT: Duration = Duration::from_secs(180);

static ALIVE: Mutex<Option<(Instant, String)>> = Mutex::new(None);

/// Starts the watch, and makes a panic on any thread end the process: the threads that wait for that one would wait
/// for ever.
pub fn start(bench: &'static str) {
    alive(bench);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let last = ALIVE.lock().map_or(None, |alive| alive.clone());
            if let Some((at, doing)) = last.filter(|(at, _)| at.elapsed() > LIMIT) {
                eprintln!("{bench}: no progress for {} s: {doing}", at.elapsed().as_secs());
                std::process::exit(3);
            }
        }
    });
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        std::process::exit(101);
    }));
}

/// Says that the bench goes on, and with what.
pub fn alive(doing: impl Into<String>) {
    if let Ok(mut alive) = ALIVE.lock() {
        *alive = Some((Instant::now(), doing.into()));
    }
}
