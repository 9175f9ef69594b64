//! Errors as a user reads them: each names what, what was expected, what came, and what to do.

mod common;
#[path = "common/life.rs"]
mod life;

use life::{PATIENCE, Small};
use pinring::{
    Closed, End, Error, ErrorKind, Feed, FeedBuilder, Learner, NextError, Pinning, Sample, Step, Weights, WhenFull,
};
use std::time::Duration;

/// Checks one error: its kind, that its text holds every part, that it is complete without its causes, and that it is
/// one a person can read.
fn check(error: impl Into<Error>, kind: ErrorKind, parts: &[&str]) {
    let error = error.into();
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    for part in parts {
        assert!(text.contains(part), "`{part}` is missing in: {text}");
    }
    assert!(text.len() > 20 && !text.ends_with(['.', ' ', '\n']), "{text:?}");
    assert!(!text.contains("  ") || text.contains("Searched"), "blanks of a broken line: {text:?}");
    for word in ["Some(", "None", "Err(", "unwrap", "{}"] {
        assert!(!text.contains(word), "code in the text: {text}");
    }
    // The text includes those of its causes, and so does what `?` in `main` prints.
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        assert!(text.contains(&inner.to_string()), "{text} lacks its cause {inner}");
        cause = inner.source();
    }
    assert!(format!("{error:?}").contains(&text), "{error:?}");
}

fn scalar() -> (Step, pinring::Leaf<f32>) {
    let mut step = Step::new();
    let leaf = step.leaf::<f32>("reward", &[]);
    (step, leaf)
}

fn refused(builder: FeedBuilder) -> Error {
    let error = builder.footprint().unwrap_err();
    assert_eq!(builder.start().unwrap_err().to_string(), error.to_string());
    error
}

#[test]
fn of_declarations() {
    let schema = |declare: &dyn Fn(&mut Step)| {
        let mut step = Step::new();
        declare(&mut step);
        refused(Feed::builder(Sample::step(step)))
    };
    let kind = ErrorKind::Schema;
    check(schema(&|_| {}), kind, &["the step has no leaf", "declare at least one"]);
    let twice = |step: &mut Step| {
        step.leaf::<f32>("obs", &[]);
        step.leaf::<u8>("obs", &[2]);
    };
    check(schema(&twice), kind, &["`obs` is used twice", "a name of its own"]);
    check(schema(&|s| _ = s.leaf::<f32>("", &[])), kind, &["is no leaf name", "single dots"]);
    check(schema(&|s| _ = s.leaf::<f32>("x", &[2, 0])), kind, &["`x`", "[2, 0]", "at least 1"]);
    check(schema(&|s| _ = s.leaf::<f32>("x", &[usize::MAX])), kind, &["`x`", "does not fit in memory", "smaller"]);
    let wide = |step: &mut Step| {
        let leaf = step.leaf::<f32>("r", &[3]);
        step.reward(leaf);
    };
    check(schema(&wide), kind, &["`r`", "[3]", "one number a step"]);
    check(refused(Feed::builder(Sample::unroll(scalar().0, 0))), kind, &["0 steps", "at least 1"]);
    let mut sample = Sample::step(scalar().0);
    sample.time_major();
    check(refused(Feed::builder(sample)), kind, &["`time_major`", "needs an unroll"]);
}

#[test]
fn of_settings() {
    let build = || Feed::builder(Sample::step(scalar().0));
    let kind = ErrorKind::Config;
    check(refused(build().batch(0)), kind, &["a batch of 0 rows", "`.batch` at least 1"]);
    check(refused(build().buffers(0)), kind, &["a ring of 0 buffers", "`.buffers` at least 1"]);
    check(refused(build().lanes(0)), kind, &["0 lanes", "`.lanes`", "at least 1"]);
    #[cfg(target_pointer_width = "64")] // with fewer bits there is no such number
    {
        check(refused(build().batch(1 << 40)), kind, &["`batch(1099511627776)`", "at most 2147483647"]);
        check(refused(build().buffers(1 << 40)), kind, &["`buffers(1099511627776)`", "at most 4294967295"]);
        check(refused(build().lanes(1 << 40)), kind, &["`lanes(1099511627776)`", "at most 4294967295"]);
        let long = Feed::builder(Sample::unroll(scalar().0, 1 << 40));
        check(refused(long.batch(1)), kind, &["`unroll(1099511627776)`", "at most 4294967295"]);
        let most = u32::MAX as usize;
        let both = build().batch(i32::MAX as usize).buffers(most);
        check(refused(both), kind, &["4294967295", "more bytes than can be addressed", "less"]);
    }
    #[cfg(target_pointer_width = "32")]
    check(
        refused(build().batch(1 << 20).buffers(1 << 20)),
        kind,
        &["1048576 buffers", "more bytes than can be addressed"],
    );
    check(refused(build().episodes(1 << 30)), kind, &["`episodes(1073741824)`", "at most 1048576"]);
    check(
        refused(build().batch(8).lockstep(4).lanes(2)),
        kind,
        &["`.lockstep(4)`", "`.lanes(2)`", "leave `.lanes` away"],
    );
    check(refused(build().batch(8).lockstep(3)), kind, &["a batch of 8 rows", "3 lanes", "change `.batch`"]);
    let fails = build().batch(4).lockstep(2).when_full(WhenFull::Fail);
    check(refused(fails), kind, &["lockstep", "leave `.when_full` at `Block`"]);
    let mut within = Sample::unroll(scalar().0, 2);
    within.within_episode(true);
    check(refused(Feed::builder(within).batch(2).lockstep(2)), kind, &["lockstep", "leave `.within_episode` at false"]);
}

#[test]
fn of_the_machine() {
    let build = || Feed::builder(Sample::step(scalar().0));
    let huge = build().batch(i32::MAX as usize).buffers(1 << 21);
    let parts =
        ["a ring of 18014398509481984 bytes", "bytes of ordinary memory", "MemAvailable leaves", "a smaller ring"];
    if cfg!(target_pointer_width = "32") {
        check(huge.start().unwrap_err(), ErrorKind::Schema, &["2147483647 rows does not fit in memory"]);
    } else if cfg!(target_os = "linux") {
        check(huge.start().unwrap_err(), ErrorKind::Memory, &parts);
    }
    let search = pinring::CudaSearch::new().library_only("/no/such/libcudart.so.13");
    let error = build().pinning(Pinning::Required).cuda(search).start().unwrap_err();
    let parts: &[&str] = if cfg!(target_os = "linux") {
        &["/no/such/libcudart.so.13 [explicit path]", "cannot open shared object file", "run without pinning"]
    } else {
        &["CUDA can be searched for and loaded on Linux only, and this is", "run without pinning"]
    };
    check(error, ErrorKind::Cuda, parts);
}

#[test]
#[cfg(target_os = "linux")]
fn of_cuda() {
    let small = Small::new();
    for (function, code, kind, parts) in [
        ("cudaFree", 35, ErrorKind::Cuda, &["cudaErrorInsufficientDriver", "--gpus all", "driver 13.0"][..]),
        ("cudaHostRegister", 2, ErrorKind::Memory, &["slots 0 to 0", "4096 bytes) of a ring of 8192", "ulimit -l"]),
        (
            "cudaHostRegister",
            712,
            ErrorKind::Memory,
            &["slots 0 to 1", "another owner", "leaves that registration alone"],
        ),
        ("cudaHostGetFlags", 1, ErrorKind::Memory, &["slot 0 is not page-locked at its first byte (0x"]),
        ("cudaHostGetDevicePointer", 1, ErrorKind::Memory, &["no device address for slots 0 to 1 (0x"]),
    ] {
        let fake = life::fake("texts");
        fake.inject(function, 0, code);
        let error = small.pinned(&fake).start().unwrap_err();
        check(error, kind, &[parts, &[function, &format!("returned {code} cudaError")]].concat());
    }
}

#[test]
fn of_writers_and_learners() {
    let small = Small::new();
    let feed = small.builder().lanes(3).start().unwrap();
    let config = ErrorKind::Config;
    check(feed.writer(0).unwrap_err(), config, &["a writer of 0 lanes", "at least 1"]);
    check(
        feed.writer(4).unwrap_err(),
        config,
        &["4 lanes", "there is room for 3 lanes, of which 0", "raise `.lanes(…)`"],
    );
    let writer = feed.writer(2).unwrap();
    check(feed.writer(2).unwrap_err(), config, &["2 lanes", "there is room for 3 lanes, of which 2"]);
    let learner = feed.learner().unwrap();
    check(feed.learner().unwrap_err(), ErrorKind::Misuse, &["taken already", "one learner", "start another feed"]);
    drop(writer);
    check(feed.writer(1).unwrap_err(), ErrorKind::Ended, &["the feed ended", "every writer and intake handle is gone"]);
    check(learner.next_batch().unwrap_err(), ErrorKind::Ended, &["the feed ended", "every batch was taken"]);
    feed.stop(PATIENCE).unwrap();
    check(feed.writer(1).unwrap_err(), ErrorKind::Ended, &["the feed ended"]);
    check(learner.next_batch().unwrap_err(), ErrorKind::Stopped, &["the feed was stopped"]);
}

#[test]
fn of_a_writer_that_is_too_large_which_ends_nothing() {
    let small = Small::new();
    for when_alone in [true, false] {
        let feed = small.builder().start().unwrap();
        let intake = (!when_alone).then(|| feed.intake().unwrap());
        for lanes in [usize::MAX, usize::MAX / 2, 1 << (usize::BITS - 4), (u32::MAX as usize).saturating_add(1)] {
            let error = feed.writer(lanes).unwrap_err();
            check(error, ErrorKind::Config, &[&format!("a writer of {lanes} lanes"), "ask for fewer lanes"]);
        }
        if cfg!(all(target_os = "linux", target_pointer_width = "64")) {
            let error = feed.writer(u32::MAX as usize).unwrap_err();
            check(
                error,
                ErrorKind::Memory,
                &["a writer of 4294967295 lanes takes", "MemAvailable leaves", "fewer lanes"],
            );
        }
        assert_eq!(feed.closed(), None, "nothing of that ended the source");
        drop(intake);
        if when_alone {
            small.ten_batches(&feed);
        }
    }
}

#[test]
fn of_steps() {
    let mut step = Step::new();
    let obs = step.observation::<f32>("obs", &[2]);
    let reward = step.leaf::<f64>("reward", &[]);
    step.reject_non_finite(reward);
    let (other, foreign) = scalar();
    let weights = Weights::new(());
    let feed = Feed::builder(Sample::unroll(step, 2)).batch(1).max_policy_lag(&weights, 9).start().unwrap();
    let mut writer = feed.writer(2).unwrap();
    let input = ErrorKind::Input;

    let mut s = writer.step().unwrap();
    check(s.put(obs, &[1.0]).unwrap_err(), input, &["`obs` takes 4 values", "2 lanes of shape [2]", "got 1"]);
    check(s.put_lane(obs, 0, &[1.0]).unwrap_err(), input, &["`obs` takes 2 values", "got 1"]);
    check(s.put_lane(obs, 7, &[1.0; 2]).unwrap_err(), input, &["lane 7", "2 lanes, counted from 0"]);
    check(s.put_padded(obs, 0, &[1.0; 3]).unwrap_err(), input, &["`obs` takes 2 values", "got 3"]);
    let array = ndarray::Array2::<f32>::zeros((2, 3));
    check(s.put_array(obs, &array).unwrap_err(), input, &["`obs`", "[2, 2] (lanes first)", "got [2, 3]"]);
    check(s.put(foreign, &[1.0, 2.0]).unwrap_err(), input, &["another step", "the handles of the step"]);
    check(
        s.end(0, End::Truncated).put(obs, &[1.0; 2]).unwrap_err(),
        input,
        &["`obs` keeps no final", "within_episode(true)"],
    );
    check(s.policy(&weights).unwrap_err(), input, &["write every observation before", "`obs` was not written"]);
    s.put(obs, &[1.0; 4]).unwrap();
    let others = Weights::new(());
    check(s.policy(&others).unwrap_err(), ErrorKind::Misuse, &["not the weights", "pass the same `Weights`"]);
    check(s.commit().unwrap_err(), input, &["`reward` was not written for lane 0", "every leaf must be written"]);

    let mut s = writer.step().unwrap();
    s.put(obs, &[1.0; 4]).unwrap();
    s.put(reward, &[1.0, f64::NAN]).unwrap();
    check(s.commit().unwrap_err(), input, &["`reward` of lane 1 holds NaN at index 0", "rejects non-finite"]);

    let mut s = writer.step().unwrap();
    s.put(obs, &[1.0; 4]).unwrap();
    s.put(reward, &[1.0, 1.0]).unwrap();
    check(s.commit().unwrap_err(), input, &["has a `max_policy_lag`", "must ask `policy`"]);
    drop(other);
}

#[test]
fn of_full_rings_and_held_batches() {
    let small = Small::new();
    for when_full in [WhenFull::Fail, WhenFull::Timeout(Duration::from_millis(1))] {
        let feed = small.builder().batch(1).when_full(when_full).start().unwrap();
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        small.write(&mut writer, [1.0, 2.0]).unwrap();
        let full = ["the ring is full", "all 2 buffers", "step_timeout", "more `.buffers`"];
        check(writer.step().unwrap_err(), ErrorKind::Full, &full);
        let held: Vec<_> = (0..2).map(|_| learner.next_batch().unwrap()).collect();
        let all = ["all 2 of 2 buffers are held", "drop a batch before taking the next"];
        check(learner.try_next().unwrap_err(), ErrorKind::Full, &all);
        check(learner.next_batch().unwrap_err(), ErrorKind::Full, &all);
        drop(held);
    }
    // Wider than a batch, so it is written aside and finds too little room at its commit.
    let feed = small.builder().batch(1).buffers(2).when_full(WhenFull::Fail).start().unwrap();
    let mut writer = feed.writer(3).unwrap();
    let mut step = writer.step().unwrap();
    step.put(small.reward, &[1.0; 3]).unwrap();
    let parts = ["the ring is full: 1 whole samples were dropped", "more `.buffers`"];
    check(step.commit().unwrap_err(), ErrorKind::Full, &parts);
}

#[test]
fn of_lockstep() {
    let (step, leaf) = scalar();
    let feed = Feed::builder(Sample::step(step)).batch(2).lockstep(2).start().unwrap();
    let learner = feed.learner().unwrap();
    let (mut one, two) = (feed.writer(1).unwrap(), feed.writer(1).unwrap());
    check(one.abandon(0).unwrap_err(), ErrorKind::Misuse, &["lockstep", "cannot be abandoned", "end its episode"]);
    drop(two);
    let gone = loop {
        match one.step() {
            Ok(mut step) => {
                step.put(leaf, &[1.0]).unwrap();
                if let Err(error) = step.commit() {
                    break Error::from(error);
                }
            }
            Err(error) => break error.into(),
        }
    };
    check(gone, ErrorKind::Ended, &["the writer of lanes 1..2 was dropped", "every batch needs every lane"]);
    assert!(matches!(feed.closed(), Some(Closed::LaneGone { first: 1, end: 2 })));
    assert_eq!(learner.next_batch().unwrap_err(), NextError::Ended);

    let weights = Weights::new(());
    let (step, leaf) = scalar();
    let feed = Feed::builder(Sample::step(step)).batch(1).lockstep(1).max_policy_lag(&weights, 0).start().unwrap();
    (0..3).for_each(|_| _ = weights.publish(()));
    let mut writer = feed.writer(1).unwrap();
    let mut step = writer.step().unwrap();
    step.put(leaf, &[1.0]).unwrap();
    let parts = ["acts with version 0", "only 3 to 3 are kept", "publish once for each batch"];
    check(step.policy(&weights).unwrap_err(), ErrorKind::Misuse, &parts);
}

#[test]
fn of_ends() {
    for (closed, kind) in [
        (Closed::Ended, ErrorKind::Ended),
        (Closed::LaneGone { first: 0, end: 4 }, ErrorKind::Ended),
        (Closed::Stopped, ErrorKind::Stopped),
        (Closed::LearnerGone, ErrorKind::Stopped),
        (Closed::UsedAfterFork, ErrorKind::Misuse),
    ] {
        check(closed, kind, &["the"]);
    }

    check(Learner::select(&[], Duration::MAX).unwrap_err(), ErrorKind::Ended, &["the feed ended"]);
}
