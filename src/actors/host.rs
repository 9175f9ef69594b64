//! Hosting: one actor, one thread, one runtime, and a report of how it ended.
//!
//! An actor is the root future of a current-thread runtime, so it needs no actix `System` and no `Arbiter`, works inside
//! any host program, and a panic leaves `block_on` with its text. With `panic = "abort"` nothing of this can run: a
//! panic then ends the program.

use crate::error::{Error, ErrorKind};
use crate::sync::panic_text;
use actix::{Actor, Addr, Context};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;
use std::time::Instant;

thread_local! {
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread belongs to a feed.
pub(crate) fn on_own_thread() -> bool {
    OURS.get()
}

/// How an actor ended: on its own, or with the text of a panic.
pub(crate) type Exit = Result<(), String>;

/// The name of an actor's thread: at most 15 bytes, as the kernel keeps.
fn thread_name(feed: u64, actor: &str) -> String {
    format!("pr{}-{actor}", feed % 100)
}

/// A hosted actor.
#[derive(Debug)]
pub(crate) struct Hosted<A: Actor> {
    pub(crate) address: Addr<A>,
    pub(crate) thread: ActorThread,
}

/// The thread of an actor, which can be waited for with a deadline.
#[derive(Debug)]
pub(crate) struct ActorThread {
    handle: JoinHandle<()>,
    /// Carries nothing; disconnected when the thread is at its end.
    ended: Receiver<()>,
}

impl ActorThread {
    /// Joins the thread if it ends by `deadline` (`None`: whenever it ends). Else it is left to itself, and its name is
    /// the error.
    pub(crate) fn join_by(self, deadline: Option<Instant>) -> Result<(), String> {
        if let Some(deadline) = deadline
            && let Err(RecvTimeoutError::Timeout) = self.ended.recv_deadline(deadline)
        {
            return Err(self.handle.thread().name().unwrap_or_default().to_owned());
        }
        let _ = self.handle.join(); // its panic, if any, was reported
        Ok(())
    }

    /// Whether it has ended.
    pub(crate) fn is_finished(&self) -> bool {
        self.handle.is_finished()
    }
}

/// Starts an actor on its own thread. `report` runs there, last.
pub(crate) fn host<A>(
    feed: u64,
    name: &'static str,
    actor: A,
    report: impl FnOnce(Exit) + Send + 'static,
) -> Result<Hosted<A>, Error>
where
    A: Actor<Context = Context<A>> + Send,
{
    let failed = |reason: &dyn std::fmt::Display| {
        let text = format!(
            "the thread of the {name} actor could not be started: {reason}. Each actor takes one thread with its stack \
             and a few file descriptors: see `ulimit -u`, `ulimit -v` and `ulimit -n`"
        );
        Error::new(ErrorKind::Thread, text)
    };
    let (sender, receiver) = crossbeam_channel::bounded(1);
    let (alive, ended) = crossbeam_channel::bounded(0);
    let handle = std::thread::Builder::new().name(thread_name(feed, name)).spawn(move || {
        let _alive = alive;
        OURS.set(true);
        // Some parts of a runtime are made with `expect`.
        let runtime = match catch_unwind(actix_rt::Runtime::new) {
            Ok(Ok(runtime)) => runtime,
            Ok(Err(error)) => return drop(sender.send(Err(error.to_string()))),
            Err(panic) => return drop(sender.send(Err(panic_text(panic)))),
        };
        let exit = catch_unwind(AssertUnwindSafe(|| {
            runtime.block_on(async move {
                let context = Context::<A>::new();
                let _ = sender.send(Ok(actix::AsyncContext::address(&context)));
                context.into_future(actor).await;
            });
        }));
        report(exit.map_err(panic_text));
    });
    let thread = ActorThread { handle: handle.map_err(|error| failed(&error))?, ended };
    match receiver.recv() {
        Ok(Ok(address)) => Ok(Hosted { address, thread }),
        Ok(Err(reason)) => {
            let _ = thread.join_by(None);
            Err(failed(&reason))
        }
        Err(_) => {
            let _ = thread.join_by(None);
            Err(failed(&"it ended at once"))
        }
    }
}

/// Starts a plain thread of a feed's own.
pub(crate) fn thread(feed: u64, name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(thread_name(feed, name)).spawn(move || {
        OURS.set(true);
        run();
    })
}
