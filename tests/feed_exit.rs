//! Ends of the process: a feed that nobody stopped must not make a program crash, hang or complain at its exit.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

mod common;
#[path = "common/life.rs"]
mod life;

use common::fake::Fake;
use common::{alone_output, is_child, scratch};
use life::Small;
use pinring::{Batch, Feed, Learner, Writer};
use std::sync::{Mutex, OnceLock};

unsafe extern "C" {
    safe fn atexit(hook: extern "C" fn()) -> i32;
}

/// Runs the test `name` in a process of its own, which must end well and say nothing; returns the fake's log.
fn ends_well(name: &str) -> Vec<String> {
    let log = scratch(name).join("log");
    let output = alone_output(name, |child| {
        child.env("LOG", &log);
    });
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{}\n{out}\n{error}", output.status);
    assert_eq!(error, "", "nothing is said at the exit");
    std::fs::read_to_string(log).expect("the fake's log").lines().map(str::to_owned).collect()
}

type All = (Small, Feed, Writer, Learner, Batch);

/// A feed that runs, page-locked, with a batch taken and a step begun.
fn running(name: &str) -> All {
    let fake = Fake::new(&scratch(&format!("{name}-fake")), "libcudart.so.13");
    fake.log_file(std::env::var_os("LOG").expect("the parent says where").as_ref());
    let small = Small::new();
    let feed = small.pinned(&fake).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    for _ in 0..4 {
        small.write(&mut writer, [1.0]).unwrap();
    }
    let batch = learner.next_batch().unwrap();
    std::mem::forget(writer.step().unwrap());
    (small, feed, writer, learner, batch)
}

fn of<'l>(log: &'l [String], function: &str) -> Vec<&'l String> {
    log.iter().filter(|line| line.contains(function)).collect()
}

/// Statics are not dropped, so the actors' threads still run when the process ends.
#[test]
fn a_feed_in_a_static() {
    static KEPT: OnceLock<Mutex<All>> = OnceLock::new();
    const NAME: &str = "a_feed_in_a_static";
    if is_child(NAME) {
        assert!(KEPT.set(Mutex::new(running(NAME))).is_ok());
        return;
    }
    let log = ends_well(NAME);
    assert_eq!(of(&log, "cudaHostUnregister").len(), 0, "{log:?}");
}

/// As an embedding program may do on purpose, to be quick at its end.
#[test]
fn a_feed_that_is_forgotten_with_all_its_handles() {
    const NAME: &str = "a_feed_that_is_forgotten_with_all_its_handles";
    if is_child(NAME) {
        std::mem::forget(running(NAME));
        return;
    }
    ends_well(NAME);
}

/// An exit hook that runs when CUDA has shut down already: every call of it answers 4, and that is nothing to tell.
#[test]
fn a_feed_that_is_dropped_behind_cudas_own_end() {
    static KEPT: Mutex<Option<All>> = Mutex::new(None);
    extern "C" fn late() {
        drop(KEPT.lock().unwrap().take());
    }
    const NAME: &str = "a_feed_that_is_dropped_behind_cudas_own_end";
    if is_child(NAME) {
        // Hooks run last in, first out: this one is registered before CUDA's, so it runs after it.
        assert_eq!(atexit(late), 0);
        *KEPT.lock().unwrap() = Some(running(NAME));
        return;
    }
    let log = ends_well(NAME);
    let hook = log.iter().position(|line| line == "exit-hook").expect("CUDA ended");
    let unregistered = of(&log[hook..], "cudaHostUnregister");
    assert!(!unregistered.is_empty() && unregistered.iter().all(|line| line.ends_with("-> 4")), "{log:?}");
}

/// `exit` in the middle of everything, from a thread that holds nothing.
#[test]
fn a_process_that_exits_at_full_speed() {
    const NAME: &str = "a_process_that_exits_at_full_speed";
    if is_child(NAME) {
        let (small, feed, mut writer, learner, batch) = running(NAME);
        drop(batch);
        std::thread::spawn(move || while small.write(&mut writer, [2.0]).is_ok() {});
        let learning = std::thread::spawn(move || {
            for _ in 0..2_000 {
                drop(learner.next_batch().unwrap());
            }
            learner
        });
        let learner = learning.join().unwrap();
        std::thread::spawn(move || while learner.next_batch().is_ok() {});
        std::mem::forget(feed);
        println!("1 passed"); // what the harness says, which `exit` does not let it say
        std::process::exit(0);
    }
    ends_well(NAME);
}
