//! Hosting: one actor, one thread, one runtime, and a report of how it ended.
//!
//! An actor is the root future of a current-thread runtime, so it needs no actix `System` and no `Arbiter`, works inside
//! any host program, and a panic leaves `block_on` with its text. With `panic = "abort"` nothing of this can run: a
//! panic then ends the program.

use crate::sync::panic_text;
use actix::{Actor, Addr, Context};
use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread::JoinHandle;

thread_local! {
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread belongs to a feed.
pub(crate) fn on_own_thread() -> bool {
    OURS.get()
}

/// How an actor ended: on its own, or with the text of a panic or of an error.
pub(crate) type Exit = Result<(), String>;

/// The name of an actor's thread: at most 15 bytes, as the kernel keeps.
pub(crate) fn thread_name(feed: u64, actor: &str) -> String {
    format!("pr{}-{actor}", feed % 100)
}

/// A hosted actor.
#[derive(Debug)]
pub(crate) struct Hosted<A: Actor> {
    pub(crate) address: Addr<A>,
    pub(crate) thread: JoinHandle<()>,
}

/// Starts an actor on its own thread. `report` runs there, last.
pub(crate) fn host<A>(
    feed: u64,
    name: &'static str,
    actor: A,
    report: impl FnOnce(Exit) + Send + 'static,
) -> io::Result<Hosted<A>>
where
    A: Actor<Context = Context<A>> + Send,
{
    let (sender, receiver) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name(thread_name(feed, name)).spawn(move || {
        OURS.set(true);
        let exit = catch_unwind(AssertUnwindSafe(|| -> io::Result<()> {
            let runtime = actix_rt::Runtime::new()?;
            runtime.block_on(async move {
                let context = Context::<A>::new();
                let _ = sender.send(actix::AsyncContext::address(&context));
                context.into_future(actor).await;
            });
            Ok(())
        }));
        report(match exit {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("its runtime could not be started: {error}")),
            Err(panic) => Err(panic_text(panic)),
        });
    })?;
    match receiver.recv() {
        Ok(address) => Ok(Hosted { address, thread }),
        // The runtime failed; `report` has the reason, and this is the start's error.
        Err(_) => Err(io::Error::other(format!("the runtime of the {name} actor could not be started"))),
    }
}

/// Starts a plain thread of a feed's own.
pub(crate) fn thread(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(move || {
        OURS.set(true);
        run();
    })
}
