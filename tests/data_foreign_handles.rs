//! Handles of another step or sample, clones included, are refused with a text that says so; no handle reads bytes as
//! what they are not.

use pinring::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

fn panic_text<R>(act: impl FnOnce() -> R) -> String {
    let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(act()))) else { panic!("it should have panicked") };
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => payload.downcast_ref::<&str>().copied().unwrap_or("no text").to_owned(),
    }
}

struct Setup {
    feed: Feed,
    /// Keeps the source from ending between two writers.
    _intake: Intake,
    learner: Learner,
    bytes: Leaf<u8>,
}

/// A step of two bytes and an i64.
fn start(step: &mut Step) -> Setup {
    let bytes = step.observation::<u8>("bytes", &[2]);
    step.leaf::<i64>("number", &[]);
    let mut sample = Sample::unroll(step.clone(), 1);
    sample.within_episode(true);
    let feed = Feed::builder(sample).batch(1).start().unwrap();
    let (learner, _intake) = (feed.learner().unwrap(), feed.intake().unwrap());
    Setup { feed, _intake, learner, bytes }
}

/// Every verb that takes a leaf, with a leaf that is not of the feed's step.
fn refuses<T: Element>(setup: &Setup, foreign: Leaf<T>, values: usize) {
    let mut writer = setup.feed.writer(1).unwrap();
    let mut step = writer.step().unwrap();
    let one = vec![T::default(); values];
    assert_eq!(step.put(foreign, &one), Err(PutError::Foreign));
    assert_eq!(step.put_lane(foreign, 0, &one), Err(PutError::Foreign));
    assert_eq!(step.put_padded(foreign, 0, &one), Err(PutError::Foreign));
    let array = ndarray::Array2::from_elem((1, values), T::default());
    assert_eq!(step.put_array(foreign, &array), Err(PutError::Foreign));
    assert_eq!(step.end(0, End::Truncated).put(foreign, &one).err(), Some(PutError::Foreign));
    for text in [panic_text(|| step.view_mut(foreign).len()), panic_text(|| step.view(foreign).len())] {
        assert!(text.contains("a leaf of another step was passed"), "{text}");
    }
}

/// The place of a panic is the caller's line, not one of the crate's.
#[test]
fn panics_name_the_callers_line() {
    let setup = start(&mut Step::new());
    let foreign = Step::new().observation::<u8>("bytes", &[2]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (here, places, before) = (std::thread::current().id(), seen.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() == here {
            places.lock().unwrap().push(info.location().unwrap().file().to_owned());
        } else {
            before(info);
        }
    }));
    let mut writer = setup.feed.writer(1).unwrap();
    let mut step = writer.step().unwrap();
    let bytes = setup.bytes;
    panic_text(|| step.view_mut(foreign).len());
    panic_text(|| step.overwrite(foreign).len());
    panic_text(|| step.overwrite_lane(foreign, 0).len());
    panic_text(|| step.overwrite_lane(bytes, 1).len());
    panic_text(|| step.view(foreign).len());
    panic_text(|| step.view(bytes).len()); // not written
    panic_text(|| step.end(1, End::Truncated).put(bytes, &[0; 2]).is_ok());
    panic_text(|| step.mask_out(1));
    drop(std::panic::take_hook());
    assert_eq!(*seen.lock().unwrap(), [file!(); 8]);
}

#[test]
fn a_leaf_of_another_step() {
    let setup = start(&mut Step::new());
    let mut other = Step::new();
    let same_place = other.observation::<u8>("bytes", &[2]);
    refuses(&setup, same_place, 2);
}

/// A clone of a step knows the same leaves, but what is declared later is its own: the same number, another leaf.
#[test]
fn a_leaf_that_a_clone_declared_later() {
    let mut step = Step::new();
    let mut clone = step.clone();
    let setup = start(&mut step);
    refuses(&setup, clone.observation::<bool>("flags", &[2]), 2); // u8 there: 255 is no bool
    refuses(&setup, clone.observation::<f64>("value", &[]), 1); // i64 there: the same size
    refuses(&setup, clone.observation::<u8>("more", &[2]), 2); // nothing there
    drop(setup.feed.writer(1).unwrap().step().unwrap().put(setup.bytes, &[1, 2]));
}

/// Nor is it taken where a schema is declared: by `reward`, `reject_non_finite` or `all`.
#[test]
fn declarations_know_their_own_leaves() {
    let mut step = Step::new();
    let mut clone = step.clone();
    let (number, flag) = (step.leaf::<i64>("number", &[]), clone.leaf::<bool>("flag", &[]));
    let later = clone.leaf::<f32>("later", &[]);
    let error = |step: Step, declare: &dyn Fn(&mut Step), verb| {
        let mut step = step;
        declare(&mut step);
        let error = Feed::builder(Sample::step(step)).start().expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Schema);
        assert!(error.to_string().contains(&format!("passed to `{verb}`")), "{error}");
    };
    let reward = |step: &mut Step| {
        step.reward(later);
    };
    let reject = |step: &mut Step| {
        step.reject_non_finite(later);
    };
    error(step.clone(), &reward, "reward");
    error(step.clone(), &reject, "reject_non_finite");
    for foreign in [flag, clone.leaf::<bool>("more", &[])] {
        let mut sample = Sample::step(step.clone());
        sample.all(number);
        let terminated = sample.terminated(); // its number is that of `later`
        assert_eq!(sample.check(), Ok(()));
        sample.all(foreign);
        assert_eq!(sample.check(), Err(SchemaError::Foreign { verb: "all" }));
        let _ = terminated;
    }
}

#[test]
fn a_column_of_another_sample_or_of_a_clone() {
    let mut step = Step::new();
    let number = step.leaf::<i64>("number", &[]);
    let mut sample = Sample::step(step);
    let mut clone = sample.clone();
    let column = sample.all(number);
    let _version = sample.policy_version();
    let feed = Feed::builder(sample).batch(1).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    let mut s = writer.step().unwrap();
    s.put(number, &[-1]).unwrap();
    s.set_policy_version(0xFFFF);
    s.commit().unwrap();
    let batch = learner.next_batch().unwrap();
    let mut other = Step::new();
    let foreign = other.leaf::<i64>("number", &[]);
    let foreign = Sample::step(other).all(foreign);
    let flags = clone.terminated(); // the number of `policy_version` in the feed's sample
    let beyond = clone.mask(); // the number of nothing there
    let texts = [
        panic_text(|| batch.view(foreign).len()),
        panic_text(|| batch.slice(foreign).len()),
        panic_text(|| batch.minibatch(0..1).view(foreign).len()),
        panic_text(|| batch.minibatch(0..1).slice(foreign).map(<[i64]>::len)),
        panic_text(|| batch.slice(flags).len()),
        panic_text(|| batch.view(beyond).len()),
    ];
    for text in texts {
        assert!(text.contains("a column of another sample was passed"), "{text}");
    }
    let text = panic_text(|| batch.minibatch(0..2).rows());
    assert!(text.contains("0..2") && text.contains("1 rows"), "{text}");
    assert_eq!(batch.slice(column), [-1], "and the batch is as it was");
    let shared = batch.share();
    assert!(panic_text(|| shared.column(flags)).contains("a column of another sample"));
}

/// `policy` watches the observations of the feed's own step.
#[test]
fn lanes_that_a_writer_does_not_have() {
    let setup = start(&mut Step::new());
    let mut writer = setup.feed.writer(2).unwrap();
    assert!(panic_text(|| writer.seed(2)).contains("no lane 2 in a writer of 2 lanes"));
    assert!(panic_text(|| writer.abandon(2)).contains("no lane 2 in a writer of 2 lanes"));
    let mut step = writer.step().unwrap();
    assert!(
        panic_text(|| step.end(2, End::Truncated).put(setup.bytes, &[]).is_ok())
            .contains("no lane 2 in a writer of 2 lanes")
    );
    assert!(panic_text(|| step.mask_out(2)).contains("no lane 2 in a writer of 2 lanes"));
    let error = step.put_lane(setup.bytes, 2, &[0, 0]).unwrap_err();
    assert_eq!(error, PutError::Lane { lane: 2, lanes: 2 });
    assert!(error.to_string().contains("lane 2 does not exist: this writer has 2 lanes"), "{error}");
    assert_eq!(setup.learner.try_next().unwrap().map(|batch| batch.rows()), None);
}
