//! Feeds inside other people's runtimes, from several threads, several at once, and over and over: no panic, and no
//! thread left.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/life.rs"]
mod life;

use life::{PATIENCE, Small, alone, assert_nothing_is_left, assert_nothing_is_left_with, feed_threads};
use pinring::{Feed, Learner, NextError};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Start, ten batches, stop: with pinning off and on.
fn live() {
    let (small, fake) = (Small::new(), life::fake("host"));
    small.ten_batches(&small.builder().start().unwrap());
    small.ten_batches(&small.pinned(&fake).start().unwrap());
    drop(small.pinned(&fake).start().unwrap());
    assert_eq!((fake.live_registrations(), fake.peek_last_error()), (vec![], 0));
}

fn multi_thread() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

alone! {
    fn in_plain_threads() {
        live();
        let two = [(); 2].map(|()| std::thread::spawn(live));
        two.into_iter().for_each(|thread| thread.join().unwrap());
        assert_nothing_is_left();
    }
}

alone! {
    fn inside_a_multi_thread_runtime() {
        let runtime = multi_thread();
        runtime.block_on(async { live() });
        // In tasks, two at once.
        runtime.block_on(async {
            let tasks = [(); 2].map(|()| tokio::spawn(async { live() }));
            for task in tasks {
                task.await.unwrap();
            }
            tokio::task::spawn_blocking(live).await.unwrap();
            tokio::task::block_in_place(live);
        });
        let _entered = runtime.enter();
        live();
        assert_nothing_is_left();
    }
}

alone! {
    fn inside_a_current_thread_runtime() {
        let runtime = current_thread();
        runtime.block_on(async {
            live();
            tokio::spawn(async { live() }).await.unwrap();
            tokio::task::spawn_blocking(live).await.unwrap();
            tokio::task::LocalSet::new().run_until(async { tokio::task::spawn_local(async { live() }).await.unwrap() }).await;
        });
        let _entered = runtime.enter();
        live();
        assert_nothing_is_left();
    }
}

alone! {
    fn inside_an_actix_system_and_its_arbiters() {
        let system = actix::System::new();
        system.block_on(async {
            live();
            actix_rt::spawn(async { live() }).await.unwrap();
            actix_rt::task::spawn_blocking(live).await.unwrap();
            let arbiter = actix_rt::Arbiter::new();
            let (done, is_done) = std::sync::mpsc::channel();
            arbiter.spawn_fn(move || {
                live();
                done.send(()).unwrap();
            });
            is_done.recv_timeout(PATIENCE).unwrap();
            arbiter.stop();
            arbiter.join().unwrap();
        });
        // A feed of ours leaves the program's own system alone.
        assert!(actix::System::is_registered());
        actix::System::current().stop_with_code(7);
        assert_eq!(system.run_with_code().unwrap(), 7);
        live();
        assert_nothing_is_left();
    }
}

alone! {
    fn inside_an_actor_of_the_programs_own() {
        use actix::{Actor, Context, Handler, Message};
        struct Host;
        impl Actor for Host {
            type Context = Context<Self>;
        }
        struct Live;
        impl Message for Live {
            type Result = u32;
        }
        impl Handler<Live> for Host {
            type Result = u32;
            fn handle(&mut self, _: Live, _: &mut Context<Self>) -> u32 {
                live();
                7
            }
        }
        let system = actix::System::new();
        let answer = system.block_on(async { Host.start().send(Live).await.unwrap() });
        assert_eq!(answer, 7);
        // A system that stops while a feed runs does not touch it.
        let small = Small::new();
        let feed = system.block_on(async {
            let feed = small.builder().start().unwrap();
            actix::System::current().stop();
            feed
        });
        system.run().unwrap();
        small.ten_batches(&feed);
        drop(feed);
        assert_nothing_is_left();
    }
}

alone! {
    fn a_learner_is_awaited_under_any_runtime() {
        for runtime in [multi_thread(), current_thread()] {
            let small = Small::new();
            let feed = small.builder().start().unwrap();
            let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
            let this = small.clone();
            let writing = std::thread::spawn(move || {
                for value in 0..40 {
                    this.write(&mut writer, [value as f32]).unwrap();
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
            let rows = runtime.block_on(async {
                let mut rows = 0;
                loop {
                    match learner.next_async().await {
                        Ok(batch) => rows += batch.rows(),
                        Err(error) => break (rows, error),
                    }
                }
            });
            assert_eq!(rows, (40, NextError::Ended));
            writing.join().unwrap();
            assert_eq!(feed.stop(PATIENCE).unwrap().dropped_rows(), 0);
        }
        assert_nothing_is_left();
    }
}

alone! {
    fn a_runtime_may_shut_down_with_a_waiting_task_in_it() {
        let small = Small::new();
        let feed = small.builder().start().unwrap();
        let learner = std::sync::Arc::new(feed.learner().unwrap());
        let runtime = multi_thread();
        let awaiting = learner.clone();
        drop(runtime.spawn(async move { awaiting.next_async().await.map(drop) }));
        std::thread::sleep(Duration::from_millis(20));
        drop(runtime);
        small.write(&mut feed.writer(1).unwrap(), [1.0, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!(small.values(&learner.next_batch().unwrap()), [1.0, 2.0, 3.0, 4.0]);
        drop(feed);
        assert_nothing_is_left();
    }
}

alone! {
    fn a_feed_may_move_between_threads_and_runtimes() {
        let small = Small::new();
        let feed = current_thread().block_on(async { small.builder().start().unwrap() });
        let small = std::thread::spawn(move || {
            small.write(&mut feed.writer(1).unwrap(), [1.0; 4]).unwrap();
            multi_thread().block_on(async { drop(feed) });
            small
        });
        small.join().unwrap();
        assert_nothing_is_left();
    }
}

alone! {
    fn two_hundred_starts_and_drops_leave_no_thread_and_every_name_fits() {
        let (small, fake) = (Small::new(), life::fake("two-hundred"));
        for round in 0..200 {
            let feed = if round % 2 == 0 { small.builder() } else { small.pinned(&fake) }.start().unwrap();
            // The kernel keeps 15 bytes; a longer name would be cut here.
            let names = ["ingest", "pinning", "supervisor"].map(|actor| format!("pr{}-{actor}", round % 100));
            assert_eq!(feed_threads(), names);
            drop(feed);
            life::until("no thread is left", || feed_threads().is_empty());
        }
        assert_nothing_is_left_with(&fake);
        assert_eq!(life::threads().len(), 3, "the harness, this test and its watchdog: {:?}", life::threads());
    }
}

alone! {
    fn feeds_start_and_end_on_many_threads_at_once() {
        let fake = life::fake("many");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let small = Small::new();
                    for _ in 0..15 {
                        small.ten_batches(&small.pinned(&fake).start().unwrap());
                    }
                });
            }
        });
        assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn several_feeds_of_one_process_are_selected_from() {
        let small = Small::new();
        let feeds: Vec<Feed> = (0..4).map(|_| small.builder().start().unwrap()).collect();
        let learners: Vec<Learner> = feeds.iter().map(|feed| feed.learner().unwrap()).collect();
        let writing: Vec<_> = (0..4u8)
            .map(|index| {
                let (mut writer, this) = (feeds[usize::from(index)].writer(1).unwrap(), small.clone());
                std::thread::spawn(move || this.write(&mut writer, [f32::from(index); 40]).unwrap())
            })
            .collect();
        let all: Vec<&Learner> = learners.iter().collect();
        let mut batches = [0; 4];
        loop {
            match Learner::select(&all, PATIENCE) {
                Ok(Some((index, batch))) => {
                    assert_eq!(small.values(&batch), [index as f32; 4]);
                    batches[index] += 1;
                }
                Ok(None) => panic!("it waited in vain"),
                Err(error) => {
                    assert_eq!(error.error, NextError::Ended);
                    break;
                }
            }
        }
        assert_eq!(batches, [10; 4]);
        writing.into_iter().for_each(|thread| thread.join().unwrap());
        drop((learners, feeds));
        assert_nothing_is_left();
    }
}
