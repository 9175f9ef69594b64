//! The parts of the GPU benches: statistics, arguments, rows and their weights; and, where there is a device, that its
//! kernel weighs as the host does. Without one that test prints `skipped: no CUDA device` and why.

#[path = "../benches/common/mod.rs"]
mod common;
#[path = "../benches/gpu/mod.rs"]
mod gpu;

use common::{Args, Mode};
use gpu::kernels::{PTX, weight, weight_of_rows};
use gpu::rows::{Content, Shape, Writers};
use gpu::stats::{Difference, Random, mean, median, quantile};
use gpu::{Cuda, Flags, Kernels};
use pinring::{Feed, Pinning};

// ---- weights ----

#[test]
fn a_row_of_equal_words_has_the_weight_of_its_words() {
    for words in [1, 2, 7, 381, 4096] {
        let rows = [u32::MAX, 0, 3, 0x9E37_79B9];
        let all = rows.iter().flat_map(|&row| std::iter::repeat_n(row, words));
        assert_eq!(weight_of_rows(rows, words), weight(all), "{words} words");
    }
}

#[test]
fn a_changed_or_moved_word_changes_the_weight() {
    let words: Vec<u32> = (0..1000u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let whole = weight(words.iter().copied());
    for at in 0..999 {
        let mut torn = words.clone();
        torn[at] ^= 1;
        assert_ne!(weight(torn.iter().copied()), whole);
        torn[at] ^= 1;
        torn.swap(at, at + 1);
        assert_ne!(weight(torn), whole);
    }
}

#[test]
fn the_text_has_both_kernels_and_no_zero() {
    assert!(PTX.contains(".entry spin(") && PTX.contains(".entry weigh("));
    assert!(!PTX.contains('\0') && PTX.is_ascii());
}

#[test]
fn the_device_weighs_as_the_host_does() {
    let cuda = match Cuda::open() {
        Ok(cuda) => cuda,
        Err(error) => {
            assert!(std::env::var_os("PINRING_GPU_REQUIRED").is_none(), "PINRING_GPU_REQUIRED is set, and {error}");
            println!("skipped: no CUDA device: {error}");
            return;
        }
    };
    let kernels = Kernels::new(cuda).unwrap();
    assert!(kernels.period(kernels.cycles(20.0)).unwrap() > 19.0, "a kernel of 20 µs takes as long");
    let stream = cuda.stream().unwrap();
    let mut random = Random(3);
    for words in [1, 31, 1000, 70_001, 1 << 20] {
        let values: Vec<u32> = (0..words).map(|_| random.next() as u32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let (memory, sum) = (cuda.alloc(bytes.len()).unwrap(), cuda.alloc(8).unwrap());
        let mut got = [0; 8];
        // SAFETY: every range is as long as the call says and lives until the stream was waited for.
        #[allow(unsafe_code)]
        unsafe {
            cuda.copy_in(memory.address, bytes.as_ptr(), bytes.len(), stream.raw()).unwrap();
            cuda.set(sum.address, 0, 2, stream.raw()).unwrap();
            kernels.weigh(memory.address, words, sum.address, stream.raw()).unwrap();
            cuda.copy_out(got.as_mut_ptr(), sum.address, 8, stream.raw()).unwrap();
        }
        stream.synchronize().unwrap();
        assert_eq!(u64::from_ne_bytes(got), weight(values), "{words} words");
    }
}

/// Somebody else in the process has the device's primary context, streams of its own and kernels of its own, as cudarc has:
/// its kernels run on batches, on its stream, while the feed goes on.
#[test]
fn kernels_of_another_owner_of_the_context_run_on_batches() {
    let cuda = match Cuda::open() {
        Ok(cuda) => cuda,
        Err(error) => {
            assert!(std::env::var_os("PINRING_GPU_REQUIRED").is_none(), "PINRING_GPU_REQUIRED is set, and {error}");
            println!("skipped: no CUDA device: {error}");
            return;
        }
    };
    let (kernels, stream) = (Kernels::new(cuda).unwrap(), cuda.stream().unwrap());
    let (shape, batches) = (Shape { rows: 64, leaves: 3, words: 500 }, 200);
    let (sample, handles) = shape.declare();
    let feed = Feed::builder(sample).batch(shape.rows).device(0).pinning(Pinning::Required).start().unwrap();
    // SAFETY: the stream outlives the learner: it is declared before.
    #[allow(unsafe_code)]
    let learner = unsafe { feed.learner_on(0, stream.raw().as_pointer()) }.unwrap();
    let writers = Writers::start(&feed, shape, &handles, 5, 4).unwrap();
    writers.order(batches as u64, Content::Stamped);
    let sums = cuda.alloc(batches * shape.leaves * 8).unwrap();
    // SAFETY: in all of it, ranges are as long as the calls say, columns are released behind the kernels on the same stream,
    // and the sums live until the stream was waited for.
    #[allow(unsafe_code)]
    unsafe {
        cuda.set(sums.address, 0, sums.bytes / 4, stream.raw()).unwrap();
    }
    let mut expected = Vec::new();
    for _ in 0..batches {
        let batch = learner.next_batch().unwrap();
        let rows: Vec<_> = batch.lanes().map(|lane| lane as u64).zip(batch.first_steps()).collect();
        for (leaf, &column) in handles.columns.iter().enumerate() {
            let sum = sums.address + expected.len() as u64 * 8;
            // SAFETY: as above.
            #[allow(unsafe_code)]
            unsafe { kernels.weigh(batch.column(column).ptr, shape.column_words(), sum, stream.raw()) }.unwrap();
            expected.push(shape.column_weight(5, leaf, rows.iter().copied()));
        }
    }
    let mut got = vec![0; sums.bytes];
    // SAFETY: as above.
    #[allow(unsafe_code)]
    unsafe { cuda.copy_out(got.as_mut_ptr(), sums.address, got.len(), stream.raw()) }.unwrap();
    stream.synchronize().unwrap();
    let got: Vec<u64> = got.chunks_exact(8).map(|sum| u64::from_ne_bytes(sum.try_into().unwrap())).collect();
    assert_eq!(got, expected);
    drop(learner);
    assert_eq!(feed.stop(std::time::Duration::from_secs(10)).unwrap().fault, None);
    writers.join().unwrap();
    // The context is still the other's to use.
    drop(feed);
    let event = cuda.event().unwrap();
    event.record(stream.raw()).unwrap();
    event.synchronize().unwrap();
}

// ---- rows ----

#[test]
fn a_feed_has_the_layout_that_shapes_assume() {
    for shape in [Shape::STRUCTURED, Shape::PIXELS, Shape { rows: 3, leaves: 5, words: 7 }, Shape::of_bytes(1, 9, 2)] {
        let (sample, _) = shape.declare();
        let footprint = Feed::builder(sample).batch(shape.rows).footprint().unwrap();
        assert_eq!(footprint.slot_bytes, shape.batch_bytes(), "{shape:?}");
    }
    assert_eq!(Shape::of_bytes(1 << 20, 4, 64).batch_bytes(), 1 << 20);
}

#[test]
fn writers_write_batches_of_the_weight_that_is_expected() {
    let shape = Shape { rows: 12, leaves: 3, words: 5 };
    let (sample, handles) = shape.declare();
    let feed = Feed::builder(sample).batch(shape.rows).start().unwrap();
    let learner = feed.learner().unwrap();
    let writers = Writers::start(&feed, shape, &handles, 3, 5).unwrap();
    for content in [Content::Stamped, Content::Cached, Content::Memory, Content::Stamped] {
        writers.order(2, content);
        for _ in 0..2 {
            let batch = learner.next_batch().unwrap();
            for (leaf, &column) in handles.columns.iter().enumerate() {
                assert_eq!(batch.byte_offset(column), shape.column_offset(leaf));
                let rows = || batch.lanes().map(|lane| lane as u64).zip(batch.first_steps());
                let (got, expected) =
                    (weight(batch.slice(column).iter().copied()), shape.column_weight(3, leaf, rows()));
                assert_eq!(got == expected, content == Content::Stamped, "{content:?}");
            }
        }
    }
    // What is there is committed as it is: the rows of an earlier batch, with the numbers of new steps.
    let wide = Writers::wide(&feed, shape, &handles, 3).unwrap();
    wide.order(1, Content::Stamped);
    let stamped = learner.next_batch().unwrap();
    assert!(stamped.lanes().eq(12..24), "{:?}", stamped.lanes().collect::<Vec<_>>());
    let rows = || stamped.lanes().map(|lane| lane as u64).zip(stamped.first_steps());
    assert_eq!(weight(stamped.slice(handles.columns[1]).iter().copied()), shape.column_weight(3, 1, rows()));
    drop(stamped);
    wide.order(3, Content::There);
    for number in 9..12 {
        let batch = learner.next_batch().unwrap();
        assert_eq!((batch.sequence_number(), batch.rows()), (number, 12));
    }
    writers.order(u64::MAX, Content::Cached); // the ring fills, they wait, and the stop ends them
    feed.stop(std::time::Duration::from_secs(10)).unwrap();
    writers.join().unwrap();
    wide.join().unwrap();
}

#[test]
fn filled_memory_has_the_weight_that_is_expected() {
    let shape = Shape { rows: 4, leaves: 2, words: 3 };
    let mut memory = vec![0; shape.batch_bytes()];
    shape.fill(&mut memory, 1, 9);
    for leaf in 0..2 {
        let column = &memory[shape.column_offset(leaf)..][..shape.column_words() * 4];
        let words = column.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap()));
        assert_eq!(weight(words), shape.column_weight(1, leaf, (0..4).map(|lane| (lane, 9))));
    }
}

// ---- statistics ----

#[test]
fn quantiles_join_neighbours_by_a_line() {
    let figures = [40.0, 10.0, 30.0, 20.0, 50.0];
    assert_eq!(median(&figures), 30.0);
    assert_eq!(median(&figures[..4]), 25.0);
    assert_eq!((quantile(&figures, 0.0), quantile(&figures, 1.0)), (10.0, 50.0));
    assert!((quantile(&figures, 0.99) - 49.6).abs() < 1e-9);
    assert_eq!(mean(&figures), 30.0);
    assert!(median(&[]).is_nan());
    assert_eq!(quantile(&[4.0], 0.99), 4.0);
}

/// Gauss-like noise: the sum of 12 uniform figures.
fn noise(random: &mut Random) -> f64 {
    (0..12).map(|_| random.below(1_000_000) as f64 / 1e6).sum::<f64>() - 6.0
}

#[test]
fn the_interval_holds_the_true_difference_about_19_times_of_20() {
    let mut random = Random(7);
    let (runs, truth) = (60, 0.4);
    let held = (0..runs).filter(|_| {
        let base: Vec<f64> = (0..100).map(|_| 10.0 + noise(&mut random)).collect();
        let other: Vec<f64> = (0..100).map(|_| 10.0 + truth + noise(&mut random)).collect();
        let found = Difference::between(&base, &other);
        assert!(found.low <= found.high);
        found.low <= truth && truth <= found.high
    });
    let held = held.count();
    assert!((50..=60).contains(&held), "{held} of {runs}");
}

#[test]
fn drift_that_both_ways_share_does_not_widen_it() {
    let mut random = Random(9);
    let drift: Vec<f64> = (0..400).map(f64::from).collect();
    let base: Vec<f64> = drift.iter().map(|d| d + noise(&mut random) * 0.1).collect();
    let other: Vec<f64> = drift.iter().map(|d| d + 5.0 + noise(&mut random) * 0.1).collect();
    let found = Difference::between(&base, &other);
    assert!(found.low > 4.0 && found.high < 6.0, "{found:?}");
}

#[test]
fn equal_ways_differ_by_nothing() {
    let figures = [3.0, 1.0, 2.0];
    assert_eq!(Difference::between(&figures, &figures), Difference { median: 0.0, low: 0.0, high: 0.0 });
    let part = Difference { median: 1.0, low: -2.0, high: 4.0 }.percent_of(200.0);
    assert_eq!(part, Difference { median: 0.5, low: -1.0, high: 2.0 });
    assert!(Difference::between(&[], &figures).median.is_nan());
}

#[test]
fn a_shuffle_gives_every_order_about_equally_often() {
    let (mut random, mut seen) = (Random(11), std::collections::HashMap::new());
    for _ in 0..6000 {
        let mut items = [0, 1, 2];
        random.shuffle(&mut items);
        *seen.entry(items).or_insert(0) += 1;
    }
    assert!(seen.len() == 6 && seen.values().all(|&count| (850..1150).contains(&count)), "{seen:?}");
}

// ---- arguments ----

fn take(words: &str) -> Result<(Flags, Vec<String>), String> {
    let arguments = words.split_whitespace().map(str::to_owned);
    Flags::take(arguments, &["--steps", "--torn"]).map_err(|error| error.to_string())
}

#[test]
fn own_flags_are_taken_and_the_rest_is_left() {
    let (flags, rest) = take("--bench L=500 --steps 7 --json a.json --quick --steps 9").unwrap();
    assert_eq!((flags.get("--steps"), flags.get("--torn")), (Some(9), None));
    assert_eq!(rest, ["--bench", "L=500", "--json", "a.json", "--quick"]);
    let args = Args::from_arguments(rest.into_iter()).unwrap();
    assert!(args.mode == Mode::Quick && args.wants("L=500") && !args.wants("L=2000"));
}

#[test]
fn what_is_no_number_is_refused_by_name() {
    assert_eq!(take("--steps").unwrap_err(), "--steps needs a number");
    assert_eq!(take("--torn 0").unwrap_err(), "--torn 0: not a number above 0");
    assert_eq!(take("--torn many").unwrap_err(), "--torn many: not a number above 0");
    let (_, rest) = take("--soak 3").unwrap();
    assert!(Args::from_arguments(rest.into_iter()).is_err(), "a flag of nobody's");
}
