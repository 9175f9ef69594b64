//! What a writer gives is taken exactly or refused with a typed error that names the leaf, what was expected and what
//! came; nothing of a refused step is stored, and its neighbours are as they were.

use ndarray::{Array2, Array3, Array4, s};
use pinring::*;

struct Setup {
    feed: Feed,
    learner: Learner,
    obs: Leaf<u8>,
    act: Leaf<f32>,
    obs_column: Column<u8>,
    act_column: Column<f32>,
}

/// Observations u8[3, 4] and actions f32[2], for batches of six single steps.
fn start(reject: bool, steps: usize) -> Setup {
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[3, 4]);
    let act = step.leaf::<f32>("act", &[2]);
    if reject {
        step.reject_non_finite(act);
    }
    let mut sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
    let (obs_column, act_column) = (sample.all(obs), sample.all(act));
    let feed = Feed::builder(sample).batch(6).when_full(WhenFull::Fail).start().unwrap();
    let learner = feed.learner().unwrap();
    Setup { feed, learner, obs, act, obs_column, act_column }
}

fn good(writer: &mut Writer, setup: &Setup, value: u8) {
    let mut step = writer.step().unwrap();
    step.view_mut(setup.obs).fill(value);
    step.view_mut(setup.act).fill(f32::from(value));
    step.commit().unwrap();
}

#[test]
fn wrong_lengths_and_shapes_are_typed_and_leave_nothing() {
    let setup = start(false, 0);
    let mut writer = setup.feed.writer(2).unwrap();
    good(&mut writer, &setup, 1);
    let mut step = writer.step().unwrap();
    let length = |leaf: &str, lanes, shape: &[usize], expected, got| {
        Err(PutError::Length { leaf: leaf.into(), lanes, shape: shape.into(), expected, got })
    };
    assert_eq!(step.put(setup.obs, &[9; 23]), length("obs", 2, &[3, 4], 24, 23));
    assert_eq!(step.put(setup.obs, &[9; 12]), length("obs", 2, &[3, 4], 24, 12));
    assert_eq!(step.put(setup.act, &[9.0; 6]), length("act", 2, &[2], 4, 6)); // one element too wide
    assert_eq!(step.put(setup.act, &[]), length("act", 2, &[2], 4, 0));
    assert_eq!(step.put_lane(setup.act, 0, &[9.0; 3]), length("act", 1, &[2], 2, 3));
    assert_eq!(step.put_lane(setup.obs, 1, &[9; 24]), length("obs", 1, &[3, 4], 12, 24));
    assert_eq!(step.put_padded(setup.obs, 1, &[9; 13]), length("obs", 1, &[3, 4], 12, 13));
    assert_eq!(step.put_lane(setup.act, 2, &[9.0; 2]), Err(PutError::Lane { lane: 2, lanes: 2 }));
    assert_eq!(step.put_padded(setup.act, 7, &[]), Err(PutError::Lane { lane: 7, lanes: 2 }));
    let shape = |expected: &[usize], got: &[usize]| {
        Err(PutError::Shape { leaf: "obs".into(), expected: expected.into(), got: got.into() })
    };
    // As many values, in the wrong order of axes; one axis too many; lanes left out; one lane.
    assert_eq!(step.put_array(setup.obs, &Array3::<u8>::zeros((2, 4, 3))), shape(&[2, 3, 4], &[2, 4, 3]));
    assert_eq!(step.put_array(setup.obs, &Array4::<u8>::zeros((2, 1, 3, 4))), shape(&[2, 3, 4], &[2, 1, 3, 4]));
    assert_eq!(step.put_array(setup.obs, &Array2::<u8>::zeros((2, 12))), shape(&[2, 3, 4], &[2, 12]));
    assert_eq!(step.put_array(setup.obs, &Array3::<u8>::zeros((1, 3, 4))), shape(&[2, 3, 4], &[1, 3, 4]));
    let text = step.put(setup.act, &[9.0; 6]).unwrap_err().to_string();
    assert_eq!(text, "leaf `act` takes 4 values here (2 lanes of shape [2]), got 6");
    // None of them wrote anything: both leaves still lack every lane.
    let error = step.commit().unwrap_err();
    assert_eq!(error, CommitError::Unwritten { leaf: "obs".into(), lane: 0 });
    good(&mut writer, &setup, 2);
    good(&mut writer, &setup, 3);
    let batch = setup.learner.next_batch().unwrap();
    let expected: Vec<u8> = [1, 1, 2, 2, 3, 3].iter().flat_map(|&value| [value; 12]).collect();
    assert_eq!(batch.slice(setup.obs_column), expected);
    assert_eq!(batch.slice(setup.act_column), [1., 1., 1., 1., 2., 2., 2., 2., 3., 3., 3., 3.]);
    assert_eq!(setup.feed.metrics().steps, 6);
}

/// A view is stored by its indices, whatever the order of the bytes behind it.
#[test]
fn arrays_are_stored_by_index_and_not_by_address() {
    let setup = start(false, 0);
    let mut writer = setup.feed.writer(2).unwrap();
    let value = |lane: usize, i: usize, j: usize| (100 * lane + 10 * i + j) as u8;
    let plain = Array3::from_shape_fn((2, 3, 4), |(l, i, j)| value(l, i, j));
    let turned = Array3::from_shape_fn((4, 3, 2), |(j, i, l)| value(l, i, j));
    let wide =
        Array3::from_shape_fn((2, 6, 8), |(l, i, j)| if (i + j) % 2 == 0 { value(l, i / 2, j / 2) } else { 255 });
    let backwards = Array3::from_shape_fn((2, 3, 4), |(l, i, j)| value(1 - l, 2 - i, 3 - j));
    let acts = Array2::from_shape_fn((2, 2), |(l, i)| (10 * i + l) as f32); // [element, lane] once it is turned
    for k in 0..3 {
        let mut step = writer.step().unwrap();
        match k {
            0 => step.put_array(setup.obs, &turned.view().reversed_axes()).unwrap(),
            1 => step.put_array(setup.obs, &wide.slice(s![.., ..;2, ..;2])).unwrap(),
            _ => step.put_array(setup.obs, &backwards.slice(s![..;-1, ..;-1, ..;-1])).unwrap(),
        }
        assert_eq!(step.view(setup.obs), plain.view().into_dyn());
        step.put_array(setup.act, &acts.t()).unwrap();
        step.commit().unwrap();
    }
    let batch = setup.learner.next_batch().unwrap();
    for k in 0..3 {
        assert_eq!(batch.minibatch(2 * k..2 * k + 2).view(setup.obs_column), plain.view().into_dyn());
        assert_eq!(batch.minibatch(2 * k..2 * k + 2).view(setup.act_column), acts.t().into_dyn());
    }
}

/// With so many leaves that their marks take several words, the first that lacks is named, for the lane that lacks it.
#[test]
fn the_leaf_that_was_never_written_is_named() {
    for steps in [0, 1] {
        let mut step = Step::new();
        let leaves: Vec<Leaf<f32>> = (0..130).map(|i| step.leaf(&format!("leaf{i}"), &[])).collect();
        let sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
        let feed = Feed::builder(sample).batch(3).start().unwrap();
        let learner = feed.learner().unwrap();
        let mut writer = feed.writer(3).unwrap();
        for missing in [0, 1, 63, 64, 65, 127, 128, 129] {
            for lane in [None, Some(0), Some(2)] {
                let mut step = writer.step().unwrap();
                for (i, &leaf) in leaves.iter().enumerate() {
                    if i != missing {
                        step.put(leaf, &[1.0; 3]).unwrap();
                    } else if let Some(lane) = lane {
                        (0..3).filter(|&l| l != lane).for_each(|l| step.put_lane(leaf, l, &[1.0]).unwrap());
                    }
                }
                let error = step.commit().unwrap_err();
                let lane = lane.unwrap_or(0);
                assert_eq!(error, CommitError::Unwritten { leaf: format!("leaf{missing}"), lane });
                assert!(error.to_string().contains(&format!("`leaf{missing}` was not written for lane {lane}")));
            }
        }
        assert_eq!((feed.metrics().steps, learner.try_next().unwrap().is_none()), (0, true));
        // What an earlier step wrote does not count for this one.
        let mut step = writer.step().unwrap();
        leaves.iter().for_each(|&leaf| step.put(leaf, &[1.0; 3]).unwrap());
        step.commit().unwrap();
        let error = writer.step().unwrap().commit().unwrap_err();
        assert_eq!(error, CommitError::Unwritten { leaf: "leaf0".into(), lane: 0 });
    }
}

#[test]
fn an_observation_must_be_there_before_its_policy() {
    let setup = start(false, 2);
    let weights = Weights::new(());
    let mut writer = setup.feed.writer(2).unwrap();
    let mut step = writer.step().unwrap();
    let missing = Err(PolicyError::Observation { leaf: "obs".into() });
    assert_eq!(step.policy(&weights).map(|_| ()), missing);
    step.put_lane(setup.obs, 0, &[1; 12]).unwrap();
    assert_eq!(step.policy(&weights).map(|_| ()), missing);
    step.put_lane(setup.obs, 1, &[1; 12]).unwrap();
    step.policy(&weights).unwrap();
}

#[test]
fn reading_before_writing_says_which_leaf_and_lane() {
    let setup = start(false, 0);
    let mut writer = setup.feed.writer(2).unwrap();
    let mut step = writer.step().unwrap();
    step.put_lane(setup.obs, 0, &[1; 12]).unwrap();
    let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| step.view(setup.obs).len()));
    let text = *read.unwrap_err().downcast::<String>().unwrap();
    assert_eq!(text, "leaf `obs` is read before it was written for lane 1");
}

#[test]
fn non_finite_values_are_rejected_where_the_leaf_says_so() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let setup = start(true, 0);
        let mut writer = setup.feed.writer(2).unwrap();
        good(&mut writer, &setup, 1);
        let mut step = writer.step().unwrap();
        step.view_mut(setup.obs).fill(9);
        step.put(setup.act, &[0.0, 0.0, 0.0, value]).unwrap();
        let error = step.commit().unwrap_err();
        let expected = CommitError::NonFinite { leaf: "act".into(), lane: 1, index: 1, value: value.to_string() };
        assert_eq!(error, expected);
        assert!(error.to_string().contains(&format!("`act` of lane 1 holds {value} at index 1")), "{error}");
        let metrics = setup.feed.metrics();
        assert_eq!((metrics.steps, metrics.rejected_steps), (2, 1));
        good(&mut writer, &setup, 2);
        good(&mut writer, &setup, 3);
        let batch = setup.learner.next_batch().unwrap();
        assert_eq!(batch.slice(setup.act_column), [1., 1., 1., 1., 2., 2., 2., 2., 3., 3., 3., 3.]);
    }
}

/// The final observation of an episode is part of its row, so it is held to the same.
#[test]
fn non_finite_final_observations_are_rejected_too() {
    let mut step = Step::new();
    let obs = step.observation::<f64>("obs", &[2]);
    step.reject_non_finite(obs);
    let mut sample = Sample::unroll(step, 3);
    sample.within_episode(true);
    let column = sample.all(obs);
    let feed = Feed::builder(sample).batch(2).start().unwrap();
    let (mut writer, learner) = (feed.writer(2).unwrap(), feed.learner().unwrap());
    for bad in [true, false] {
        let mut step = writer.step().unwrap();
        step.view_mut(obs).fill(1.0);
        step.end(0, End::Terminated).put(obs, &[2.0, 2.0]).unwrap();
        step.end(1, End::Truncated).put(obs, &[3.0, if bad { f64::NAN } else { 3.0 }]).unwrap();
        match step.commit() {
            Err(error) if bad => {
                assert_eq!(
                    error,
                    CommitError::NonFinite { leaf: "obs".into(), lane: 1, index: 1, value: "NaN".into() }
                );
            }
            result => result.unwrap(),
        }
    }
    assert_eq!(feed.metrics().rejected_steps, 1);
    let batch = learner.next_batch().unwrap();
    assert_eq!(batch.slice(column), [1., 1., 2., 2., 0., 0., 0., 0., 1., 1., 3., 3., 0., 0., 0., 0.]);
}

/// `policy` hands the observation in: what it completes must not hold what the leaf rejects.
#[test]
fn a_rejected_observation_is_not_handed_in() {
    for lockstep in [false, true] {
        let mut step = Step::new();
        let obs = step.observation::<f32>("obs", &[]);
        step.reject_non_finite(obs);
        let mut sample = Sample::unroll(step, 1);
        let column = sample.all(obs);
        let builder = Feed::builder(sample).batch(2);
        let feed = if lockstep { builder.lockstep(2) } else { builder }.start().unwrap();
        let (mut writer, learner) = (feed.writer(2).unwrap(), feed.learner().unwrap());
        let weights = Weights::new(());
        let mut step = writer.step().unwrap();
        step.put(obs, &[1.0, 2.0]).unwrap();
        step.commit().unwrap();
        let mut step = writer.step().unwrap();
        step.put(obs, &[3.0, f32::INFINITY]).unwrap();
        let error = step.policy(&weights).map(|_| ()).unwrap_err();
        assert_eq!(error, PolicyError::NonFinite { leaf: "obs".into(), lane: 1, index: 0, value: "inf".into() });
        assert_eq!(Error::from(error).kind(), ErrorKind::Input);
        assert_eq!((learner.try_next().unwrap().map(|_| ()), feed.metrics().rejected_steps), (None, 1));
        step.put_lane(obs, 1, &[4.0]).unwrap();
        step.policy(&weights).unwrap();
        step.commit().unwrap();
        assert_eq!(learner.next_batch().unwrap().slice(column), [1.0, 3.0, 2.0, 4.0]);
    }
}

/// A final observation has a place only where the sample keeps one.
#[test]
fn final_observations_without_a_place_are_refused() {
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[2]);
    let act = step.leaf::<u8>("act", &[]);
    let feed = |within: bool| {
        let mut sample = Sample::unroll(step.clone(), 2);
        sample.within_episode(within);
        Feed::builder(sample).start().unwrap()
    };
    let through = feed(false);
    let mut writer = through.writer(1).unwrap();
    let error = writer.step().unwrap().end(0, End::Truncated).put(obs, &[1, 1]).map(|_| ()).unwrap_err();
    assert_eq!(error, PutError::NoFinal { leaf: "obs".into() });
    assert!(error.to_string().contains("bootstrap_value"), "it says what to do instead: {error}");
    let within = feed(true);
    let mut writer = within.writer(1).unwrap();
    let mut step = writer.step().unwrap();
    let mut last = step.end(0, End::Truncated);
    assert_eq!(last.put(act, &[1]).map(|_| ()), Err(PutError::NoFinal { leaf: "act".into() }));
    let length = PutError::Length { leaf: "obs".into(), lanes: 1, shape: vec![2], expected: 2, got: 3 };
    assert_eq!(last.put(obs, &[1, 1, 1]).map(|_| ()), Err(length));
}

/// Handles by name, for schemas that come from a config file: the element type must be the leaf's own.
#[test]
fn a_name_is_found_in_its_own_type_only() {
    let mut step = Step::new();
    step.observation::<u8>("obs", &[3, 4]);
    step.leaf::<f32>("act", &[2]);
    assert!(step.find::<u8>("obs").is_ok() && step.find::<f32>("act").is_ok());
    let error = step.find::<f32>("obs").unwrap_err();
    assert_eq!(error, SchemaError::ElementType { name: "obs".into(), expected: DType::F32, got: DType::U8 });
    assert_eq!(error.to_string(), "`obs` holds u8, not f32: ask for it as `u8`");
    let error = step.find::<f64>("acts").unwrap_err();
    assert_eq!(error.to_string(), "there is no `acts`; there are: `obs` (u8), `act` (f32)");
    let mut sample = Sample::unroll(step, 2);
    assert!(sample.find::<bool>("mask").is_err(), "a derived column is there when it was asked for");
    sample.mask();
    assert!(sample.find::<bool>("mask").is_ok() && sample.find::<u8>("obs").is_ok());
    let error = sample.find::<i64>("act").unwrap_err();
    assert_eq!(error, SchemaError::ElementType { name: "act".into(), expected: DType::I64, got: DType::F32 });
}
