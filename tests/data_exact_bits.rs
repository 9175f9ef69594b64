//! Values come out bit for bit as they went in, in the type they were declared with, by every way into the ring.

use pinring::*;

/// Writes `values`, one a step, and reads them back through single steps, unrolls and lockstep.
fn round_trip<T: Element + PartialEq>(values: &[T], bits: impl Fn(T) -> u64) {
    for (steps, lockstep, time_major) in [(0, false, false), (0, true, false), (3, false, true), (3, true, false)] {
        let mut step = Step::new();
        let leaf = step.leaf::<T>("value", &[2]);
        let mut sample = if steps == 0 { Sample::step(step) } else { Sample::unroll(step, steps) };
        if time_major {
            sample.time_major();
        }
        let column = sample.all(leaf);
        assert_eq!(sample.find::<T>("value").map(|_| ()), Ok(()));
        let rows = values.len().next_multiple_of(3) / steps.max(1);
        let mut builder = Feed::builder(sample).batch(rows).buffers(2);
        if lockstep {
            builder = builder.lockstep(1);
        }
        let feed = builder.start().unwrap();
        assert_eq!(feed.columns()[0].dtype, T::DTYPE);
        let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
        let padded: Vec<T> = values.iter().copied().chain([T::default(); 3]).take(rows * steps.max(1)).collect();
        for (i, &value) in padded.iter().chain(&[T::default()]).enumerate() {
            let mut step = writer.step().unwrap();
            match i % 3 {
                0 => step.put(leaf, &[value; 2]).unwrap(),
                1 => step.view_mut(leaf).fill(value),
                _ => step.put_lane(leaf, 0, &[value; 2]).unwrap(),
            }
            step.commit().unwrap();
        }
        let batch = learner.next_batch().unwrap();
        let got = batch.view(column);
        for (i, &value) in padded.iter().enumerate() {
            let (row, step) = (i / steps.max(1), i % steps.max(1));
            for k in 0..2 {
                let got = match (steps, time_major) {
                    (0, _) => got[[row, k]],
                    (_, false) => got[[row, step, k]],
                    (_, true) => got[[step, row, k]],
                };
                assert_eq!(bits(got), bits(value), "value {i} of {}", T::DTYPE);
            }
        }
    }
}

#[test]
fn integers_and_bools() {
    round_trip(&[0u8, 1, 127, 128, 254, 255], u64::from);
    round_trip(&[0i8, -1, i8::MIN, i8::MAX], |v| v as u64);
    round_trip(&[0u16, 255, 256, u16::MAX], u64::from);
    round_trip(&[0i16, -1, i16::MIN, i16::MAX], |v| v as u64);
    round_trip(&[0u32, 1 << 24, (1 << 24) + 1, u32::MAX], u64::from);
    round_trip(&[0i32, -1, i32::MIN, i32::MAX], |v| v as u64);
    round_trip(&[0u64, (1 << 53) + 1, u64::MAX, 1 << 63], |v| v);
    round_trip(&[0i64, (1 << 53) + 1, -(1 << 53) - 1, i64::MIN, i64::MAX], |v| v as u64);
    round_trip(&[true, false, false, true, true], u64::from);
}

#[test]
fn floats_with_their_payloads() {
    let f32s =
        [0x7FC0_0001u32, 0xFFC1_2345, 0x7FA0_0000, 0x8000_0000, 0x0000_0001, 0x7F80_0000, 0xFF80_0000, 0x3F80_0000];
    round_trip(&f32s.map(f32::from_bits), |v| u64::from(v.to_bits()));
    let f64s =
        [0x7FF8_0000_0000_0001u64, 0xFFF8_DEAD_BEEF_1234, 0x7FF4_0000_0000_0000, 1 << 63, 1, 0x7FF0_0000_0000_0000];
    round_trip(&f64s.map(f64::from_bits), f64::to_bits);
}

#[cfg(feature = "half")]
#[test]
fn half_floats_with_their_payloads() {
    let bits = [0x7E01u16, 0xFE55, 0x7D00, 0x8000, 0x0001, 0x7C00, 0xFC00, 0x3C00];
    round_trip(&bits.map(half::f16::from_bits), |v| u64::from(v.to_bits()));
    let bits = [0x7FC1u16, 0xFFC5, 0x7FA0, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x3F80];
    round_trip(&bits.map(half::bf16::from_bits), |v| u64::from(v.to_bits()));
}

#[cfg(feature = "half")]
#[test]
fn half_rewards_are_summed_and_non_finite_ones_rejected() {
    let mut step = Step::new();
    let reward = step.leaf::<half::bf16>("reward", &[]);
    step.reward(reward).reject_non_finite(reward);
    let feed = Feed::builder(Sample::step(step)).start().unwrap();
    let mut writer = feed.writer(1).unwrap();
    for value in [1.5, f32::INFINITY, 2.25] {
        let mut step = writer.step().unwrap();
        step.put(reward, &[half::bf16::from_f32(value)]).unwrap();
        if value == 2.25 {
            step.end(0, End::Terminated);
        }
        assert_eq!(step.commit().is_ok(), value.is_finite());
    }
    let episode = feed.episodes().try_iter().next().unwrap();
    assert_eq!((episode.length, episode.ret), (2, 3.75));
}

/// NaN and infinities are stored where the leaf does not reject them, beside one that does.
#[test]
fn non_finite_values_are_allowed_by_default() {
    let mut step = Step::new();
    let (free, strict) = (step.leaf::<f32>("free", &[]), step.leaf::<f32>("strict", &[]));
    step.reject_non_finite(strict);
    let mut sample = Sample::step(step);
    let column = sample.all(free);
    let feed = Feed::builder(sample).batch(3).start().unwrap();
    let (mut writer, learner) = (feed.writer(3).unwrap(), feed.learner().unwrap());
    let mut step = writer.step().unwrap();
    let odd = [f32::from_bits(0x7FC0_BEEF), f32::NEG_INFINITY, f32::INFINITY];
    step.put(free, &odd).unwrap();
    step.put(strict, &[f32::MAX, f32::MIN_POSITIVE, -0.0]).unwrap();
    step.commit().unwrap();
    let batch = learner.next_batch().unwrap();
    assert_eq!(batch.slice(column).iter().map(|v| v.to_bits()).collect::<Vec<_>>(), odd.map(f32::to_bits));
    assert_eq!(feed.metrics().rejected_steps, 0);
}
