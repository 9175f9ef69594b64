//! The actors that a supervisor started: how each is told to end, and its thread.
//!
//! Owns what must outlive the supervisor: should it fail or hang, whoever stops the feed ends the others without it.
//! It does not decide when.

use super::host::{ActorThread, Hosted};
use crate::sync::lock;
use actix::dev::ToEnvelope;
use actix::{Actor, Addr, Handler, Message};
use std::sync::Mutex;
use std::time::Instant;

/// In the order in which they were started.
#[derive(Default)]
pub(crate) struct Crew(Mutex<Vec<Member>>);

struct Member {
    thread: ActorThread,
    stop: Box<dyn Fn() + Send>,
}

impl Crew {
    /// Takes in an actor that ends when it gets the message that `stop` makes.
    pub(crate) fn add<A, M>(&self, hosted: Hosted<A>, stop: fn() -> M) -> Addr<A>
    where
        A: Actor + Handler<M>,
        A::Context: ToEnvelope<A, M>,
        M: Message<Result = ()> + Send + 'static,
    {
        let (address, thread) = (hosted.address.clone(), hosted.thread);
        lock(&self.0).push(Member { thread, stop: Box::new(move || hosted.address.do_send(stop())) });
        address
    }

    /// Tells every actor to end, the last that was started first. Waits for nobody.
    pub(crate) fn tell(&self) {
        lock(&self.0).iter().rev().for_each(|member| (member.stop)());
    }

    /// Tells every actor to end and joins their threads. Returns the names of those that did not end by `deadline`
    /// and are left to themselves; `None` waits for all.
    pub(crate) fn end(&self, deadline: Option<Instant>) -> Vec<String> {
        self.tell();
        let members = std::mem::take(&mut *lock(&self.0));
        members.into_iter().rev().filter_map(|member| member.thread.join_by(deadline).err()).collect()
    }
}

impl std::fmt::Debug for Crew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(lock(&self.0).iter().map(|member| &member.thread)).finish()
    }
}
