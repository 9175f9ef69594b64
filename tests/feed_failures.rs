//! Whatever fails, at whatever call: the error says what, nothing is left, and the next good start succeeds.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/life.rs"]
mod life;

use common::fake::Fake;
use common::scratch;
use life::{PATIENCE, Small, alone, assert_nothing_is_left, assert_nothing_is_left_with, feed_threads, rings};
use pinring::{CudaError, Error, ErrorKind, Feed, RingError, Sample, Step};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What CUDA said, somewhere down the causes of an error.
fn cuda_error(error: &Error) -> Option<&CudaError> {
    let first: &(dyn std::error::Error + 'static) = error;
    std::iter::successors(Some(first), |error| error.source()).find_map(|error| error.downcast_ref())
}

/// Whoever made a call that failed has read the last-error slot of its thread next, so that nobody else finds it.
fn assert_slots_are_drained(fake: &Fake) {
    let calls = fake.calls();
    for (at, call) in calls.iter().enumerate().filter(|(_, call)| !matches!(call.code, Some(0 | 4))) {
        if call.function != "cudaGetLastError" {
            let next = calls[at + 1..].iter().find(|next| next.thread == call.thread);
            assert_eq!(next.map(|next| next.function.as_str()), Some("cudaGetLastError"), "after {call:?}");
        }
    }
}

/// A feed that was started well: all of it page-locked, and it works; afterwards nothing is left.
fn assert_good(small: &Small, fake: &Fake, feed: Feed) {
    let [ring] = rings().try_into().expect("one ring");
    let (mut at, bytes) = (ring.start, feed.pin_report().unwrap().page_locked_bytes);
    for one in fake.live_registrations() {
        assert_eq!(one.start, at, "registrations follow one another");
        at += one.bytes;
    }
    assert_eq!((at, ring.len()), (ring.end, bytes), "all of the ring is registered");
    small.ten_batches(&feed);
    drop(feed);
    assert_nothing_is_left_with(fake);
}

alone! {
    fn whichever_cuda_call_of_a_start_fails_nothing_is_left_and_the_next_start_succeeds() {
        let small = Small::new();
        let dir = scratch("each-call");
        let mut refused = BTreeSet::new();
        for code in [1, 2, 700, 712, 999] {
            for k in 1.. {
                // A fake of its own: CUDA is initialised once for each library.
                let fake = Fake::new(&dir, &format!("libcudart.so.13.{code}.{k}"));
                fake.inject("*", k, code);
                let started = small.pinned(&fake).start();
                let log = fake.calls();
                assert_slots_are_drained(&fake);
                fake.clear_faults();
                let Some(failed) = log.get(k as usize - 1) else {
                    assert_eq!(k as usize - 1, log.len(), "each call of a start has failed once");
                    assert_good(&small, &fake, started.unwrap());
                    break;
                };
                let at = format!("{code} at call {k}, {}", failed.function);
                match started {
                    // Not knowing a version is no reason to refuse; where one call is too large, two smaller ones do.
                    Ok(feed) => {
                        let report = feed.pin_report().unwrap();
                        match failed.function.as_str() {
                            "cudaRuntimeGetVersion" => assert_eq!(report.cuda.runtime_version(), 0, "{at}"),
                            "cudaDriverGetVersion" => assert_eq!(report.cuda.driver_version(), 0, "{at}"),
                            "cudaHostRegister" => assert_eq!((code, report.pieces), (2, 2), "{at}"),
                            "cudaThreadExchangeStreamCaptureMode" => {} // for the sake of others' captures only
                            _ => panic!("it was passed over: {at}"),
                        }
                        assert_good(&small, &fake, feed);
                    }
                    Err(error) => {
                        assert_nothing_is_left_with(&fake);
                        refused.insert(failed.function.clone());
                        let operation = match failed.function.as_str() {
                            "cudaFree" => "cudaFree(0)",
                            other => other,
                        };
                        let cuda = cuda_error(&error).unwrap_or_else(|| panic!("{at}: {error}"));
                        assert_eq!((cuda.operation(), cuda.code()), (operation, code), "{at}");
                        let kind = if operation == "cudaFree(0)" { ErrorKind::Cuda } else { ErrorKind::Memory };
                        assert_eq!(error.kind(), kind, "{at}");
                        for part in [operation, &code.to_string(), cuda.symbol()] {
                            assert!(error.to_string().contains(part), "{at}: {error} names {part}");
                        }
                        assert_good(&small, &fake, small.pinned(&fake).start().unwrap_or_else(|error| panic!("{at}: {error}")));
                    }
                }
            }
        }
        let all = ["cudaFree", "cudaHostGetDevicePointer", "cudaHostGetFlags", "cudaHostRegister"];
        assert_eq!(refused.into_iter().collect::<Vec<_>>(), all);
    }
}

/// Counts warnings and errors of the crate.
struct Warnings;

static WARNINGS: AtomicUsize = AtomicUsize::new(0);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN && metadata.target().starts_with("pinring")
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        WARNINGS.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

fn warnings() -> usize {
    WARNINGS.swap(0, Ordering::Relaxed)
}

alone! {
    fn what_cuda_does_not_unregister_at_a_stop_stays_mapped_and_is_reported() {
        tracing::subscriber::set_global_default(Warnings).unwrap();
        let small = Small::new();
        let mut kept = 0;
        // Whether the memory goes, and what the log says.
        for (code, goes, warned) in
            [(1, false, 1), (2, false, 1), (700, false, 1), (709, false, 1), (712, false, 1), (713, true, 1), (4, false, 0), (999, false, 1)]
        {
            let fake = life::fake("stop");
            let feed = small.pinned(&fake).start().unwrap();
            let before = rings().len();
            warnings();
            match code {
                713 => fake.device_reset(), // nothing is registered any more
                _ => fake.inject("cudaHostUnregister", 0, code),
            }
            let report = feed.stop(PATIENCE).unwrap();
            assert_eq!(report.threads_given_up, [""; 0]);
            assert_eq!(report.fault, None, "it is no fault of an actor's");
            assert_eq!(report.kept_bytes, if goes { 0 } else { 2 * 4096 }, "code {code}");
            assert_eq!(report.to_string().contains("8192 bytes"), !goes, "{report}");
            assert_eq!(feed.stop(PATIENCE).unwrap(), report, "twice is fine");
            drop(feed);
            assert_eq!(warnings(), warned, "code {code}");
            kept += usize::from(!goes);
            assert_eq!(rings().len(), before - usize::from(goes), "code {code}");
            assert_eq!(rings().len(), kept);
            assert_eq!(fake.calls_of("cudaHostUnregister").len(), 1, "asked once");
            assert_slots_are_drained(&fake);
            life::until("no thread is left", || feed_threads().is_empty());
            // The process can pin again.
            fake.clear_faults();
            let feed = small.pinned(&fake).start().unwrap();
            small.ten_batches(&feed);
        }
    }
}

alone! {
    fn a_start_whose_undoing_fails_too_tells_of_the_first_failure_and_keeps_the_memory() {
        tracing::subscriber::set_global_default(Warnings).unwrap();
        let (small, fake) = (Small::new(), life::fake("undoing"));
        fake.inject("cudaHostGetFlags", 2, 1);
        fake.inject("cudaHostUnregister", 0, 999);
        let error = small.pinned(&fake).start().unwrap_err();
        assert_eq!(cuda_error(&error).map(CudaError::operation), Some("cudaHostGetFlags"));
        assert_eq!((rings().len(), fake.live_registrations().len()), (1, 1));
        assert_eq!(warnings(), 2, "the failed start, and the memory that stays");
        assert_eq!(fake.peek_last_error(), 0);
        life::until("no thread is left", || feed_threads().is_empty());
    }
}

alone! {
    fn a_device_reset_while_the_feed_runs_is_a_warning_at_its_end() {
        tracing::subscriber::set_global_default(Warnings).unwrap();
        let (small, fake) = (Small::new(), life::fake("reset"));
        let feed = small.pinned(&fake).start().unwrap();
        fake.device_reset();
        small.ten_batches(&feed);
        drop(feed);
        assert_eq!(warnings(), 1);
        assert_nothing_is_left_with(&fake);
        assert_good(&small, &fake, small.pinned(&fake).start().unwrap());
    }
}

alone! {
    fn every_refusal_to_initialise_is_told_apart_before_there_is_a_feed() {
        let small = Small::new();
        let mut texts = BTreeSet::new();
        for code in [34, 35, 46, 100, 101, 803, 804, 9999] {
            // Masks are CUDA's to read.
            for mask in [None, Some(""), Some("-1"), Some("MIG-abc"), Some("GPU-8932f937")] {
                // SAFETY: this process runs this test alone, and no other thread of it reads the environment now.
                #[allow(unsafe_code)]
                unsafe {
                    match mask {
                        Some(mask) => std::env::set_var("CUDA_VISIBLE_DEVICES", mask),
                        None => std::env::remove_var("CUDA_VISIBLE_DEVICES"),
                    }
                }
                let fake = life::fake("init");
                fake.inject("cudaFree", 0, code);
                let error = small.pinned(&fake).start().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Cuda);
                let cuda = cuda_error(&error).unwrap();
                assert_eq!((cuda.operation(), cuda.code()), ("cudaFree(0)", code));
                assert!(error.to_string().contains(&format!("cudaFree(0) returned {code} {}", cuda.symbol())), "{error}");
                assert!(error.to_string().contains("runtime 13.0, driver 13.0"), "{error}");
                if mask.is_none() {
                    let one_line = error.to_string().replace(&fake.path().display().to_string(), "");
                    assert!(texts.insert(one_line), "{error}");
                    assert_eq!(cuda.hint().is_some(), code != 9999, "{error}");
                }
                assert_eq!(fake.calls_of("cudaHostRegister"), []);
                assert_nothing_is_left_with(&fake);
            }
        }
        assert_eq!(texts.len(), 8);
    }
}

alone! {
    fn any_number_of_failed_starts_leaves_nothing_and_the_next_good_one_succeeds() {
        let (small, fake) = (Small::new(), life::fake("failed-starts"));
        fake.inject("cudaFree", 0, 35);
        for n in 1..=20 {
            let error = small.pinned(&fake).start().unwrap_err();
            assert_eq!(cuda_error(&error).map(CudaError::code), Some(35));
            assert_eq!(fake.calls_of("cudaFree").len(), n, "nothing is tried twice, and no failure is remembered");
            assert_nothing_is_left_with(&fake);
        }
        fake.clear_faults();
        assert_good(&small, &fake, small.pinned(&fake).start().unwrap());
    }
}

alone! {
    fn absence_of_cuda_is_an_error_with_every_place_and_the_loaders_own_words() {
        let small = Small::new();
        let search = pinring::CudaSearch::new().library("/no/such/libcudart.so.13");
        if pinring::probe_cuda(&search).is_ok() {
            println!("skipped: this host has CUDA");
            return;
        }
        let error = small.builder().pinning(pinring::Pinning::Required).cuda(search).start().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cuda);
        let text = error.to_string();
        for part in ["/no/such/libcudart.so.13", "cannot open shared object file", "libcudart.so.12", "libcuda.so.1", "run without pinning"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_nothing_is_left();
    }
}

const MIB: usize = 1 << 20;

/// Slots of 1 MiB.
fn large(fake: &Fake, slots: usize) -> pinring::FeedBuilder {
    let mut step = Step::new();
    step.leaf::<u8>("bytes", &[MIB / 4]);
    Feed::builder(Sample::step(step)).batch(4).buffers(slots).pinning(pinring::Pinning::Required).cuda(life::only(fake))
}

alone! {
    fn a_cap_on_one_call_is_met_with_smaller_calls_or_refused_with_the_size() {
        let fake = life::fake("cap-per-call");
        fake.cap(MIB as u64, u64::MAX);
        let feed = large(&fake, 4).start().unwrap();
        let live = fake.live_registrations();
        assert_eq!(live.iter().map(|one| one.bytes).collect::<Vec<_>>(), [MIB; 4]);
        let report = feed.pin_report().unwrap();
        assert_eq!((report.page_locked_bytes, report.pieces, report.slots_verified), (4 * MIB, 4, 4));
        drop(feed);
        assert_nothing_is_left_with(&fake);

        // Below one slot there is nothing smaller: a copy may not cross registrations.
        fake.cap(MIB as u64 - 1, u64::MAX);
        let error = large(&fake, 4).start().unwrap_err();
        assert_eq!((error.kind(), cuda_error(&error).map(CudaError::code)), (ErrorKind::Memory, Some(2)));
        for part in ["slots 0 to 0", "1048576 bytes) of a ring of 4194304 bytes", "ulimit -l"] {
            assert!(error.to_string().contains(part), "{part} in {error}");
        }
        assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn whichever_piece_is_not_unregistered_at_a_stop_stays_and_the_others_go() {
        let fake = life::fake("pieces");
        fake.cap(MIB as u64, u64::MAX);
        for k in 1..=4 {
            let feed = large(&fake, 4).start().unwrap();
            let start = fake.calls_of("cudaHostRegister").last().unwrap().args[0] as usize; // of the last piece
            fake.inject("cudaHostUnregister", k, 700);
            assert_eq!(feed.stop(PATIENCE).unwrap().kept_bytes, MIB);
            drop(feed);
            // The last piece goes first.
            let kept = start - (k as usize - 1) * MIB;
            let live: Vec<_> = fake.live_registrations().iter().map(|one| one.start).collect();
            assert!(live.len() == k as usize && live.contains(&kept), "{live:x?} has {kept:x}");
            let mapped = rings();
            assert_eq!(mapped.iter().map(|ring| ring.len()).sum::<usize>(), k as usize * MIB);
            assert!(mapped.iter().any(|ring| ring.contains(&kept)), "what is registered is mapped");
            assert_slots_are_drained(&fake);
        }
    }
}

alone! {
    fn a_quota_that_other_rings_have_used_up_is_named_with_what_they_hold() {
        let fake = life::fake("cap-in-total");
        fake.cap(u64::MAX, 8 * MIB as u64);
        let held = [large(&fake, 4).start().unwrap(), large(&fake, 4).start().unwrap()];
        let error = large(&fake, 4).start().unwrap_err();
        let refusal = match std::error::Error::source(&error).and_then(|source| source.downcast_ref()) {
            Some(RingError::Register(refusal)) => refusal,
            other => panic!("{other:?}"),
        };
        assert_eq!((refusal.asked, refusal.pinned_by_process, refusal.registered), (4 * MIB, 8 * MIB, 0));
        assert!(error.to_string().contains("8388608 bytes of other rings of this process"), "{error}");
        assert_eq!((rings().len(), fake.live_registrations().len()), (2, 2), "no half-registered ring");
        drop(held);
        assert_nothing_is_left_with(&fake);
        drop(large(&fake, 8).start().unwrap());
    }
}

#[cfg(target_pointer_width = "64")] // with fewer bits it is beyond the addresses first
alone! {
    fn a_ring_beyond_the_memory_of_this_machine_is_refused_before_cuda_is_looked_for() {
        let fake = life::fake("budget");
        let error = large(&fake, 1 << 40).start().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}"); // more buffers than can be counted
        let error = large(&fake, 1 << 30).start().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Memory);
        assert!(error.to_string().contains("a ring of 1125899906842624 bytes and "), "{error}");
        assert!(error.to_string().contains("nothing was allocated"), "{error}");
        assert_eq!(fake.calls(), []);
        assert_nothing_is_left();
    }
}

#[cfg(target_pointer_width = "64")] // likewise
alone! {
    fn what_the_host_notes_of_each_row_counts_against_the_budget_too() {
        // One byte a row in the ring, and 32 in the notes: 3 GiB and 96 GiB.
        let mut step = Step::new();
        step.leaf::<u8>("byte", &[]);
        let rows = common::available().unwrap() / 16; // a sixteenth of the memory in the ring, twice all of it in notes
        let error = Feed::builder(Sample::step(step)).batch(rows / 64).buffers(64).start().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Memory, "{error}");
        assert!(error.to_string().contains(" bytes of ordinary memory beside it needs more than the "), "{error}");
        assert_nothing_is_left();
    }
}

#[test]
fn nothing_is_refused_without_a_call_of_cuda() {
    let fake = life::fake("zero");
    let pinned = |sample: Sample| Feed::builder(sample).pinning(pinring::Pinning::Required).cuda(life::only(&fake));
    let one_leaf = |shape: &[usize]| {
        let mut step = Step::new();
        step.leaf::<f32>("x", shape);
        step
    };
    let good = || pinned(Sample::step(one_leaf(&[2])));
    let refused = [
        (pinned(Sample::step(Step::new())), ErrorKind::Schema),
        (pinned(Sample::step(one_leaf(&[0]))), ErrorKind::Schema),
        (pinned(Sample::step(one_leaf(&[3, 0, 2]))), ErrorKind::Schema),
        (pinned(Sample::unroll(one_leaf(&[2]), 0)), ErrorKind::Schema),
        (good().batch(0), ErrorKind::Config),
        (good().buffers(0), ErrorKind::Config),
        (good().lanes(0), ErrorKind::Config),
        (good().lockstep(0), ErrorKind::Config),
    ];
    for (builder, kind) in refused {
        let shown = format!("{builder:?}");
        let error = builder.footprint().unwrap_err();
        assert_eq!(error.kind(), kind, "{shown}: {error}");
        let again = builder.start().unwrap_err();
        assert_eq!((again.kind(), again.to_string()), (kind, error.to_string()));
    }
    assert_eq!(fake.calls(), []);
}

#[test]
fn numbers_beyond_all_bounds_are_errors_and_no_panics() {
    let build = || {
        let mut step = Step::new();
        step.observation::<f32>("x", &[3]);
        Feed::builder(Sample::unroll(step, 5))
    };
    const MAX: usize = usize::MAX;
    const HALF: usize = i32::MAX as usize;
    let builders = [
        build().batch(MAX),
        build().buffers(MAX),
        build().batch(MAX).buffers(MAX),
        build().batch(HALF).buffers(HALF),
        build().batch(HALF).buffers(u32::MAX as usize),
        build().batch(1 << 30).buffers(1 << 29),
        build().lanes(MAX),
        build().lanes(MAX / 64),
        build().lockstep(MAX).batch(MAX),
        build().lockstep(HALF).batch(HALF).buffers(HALF),
        build().episodes(MAX),
        build().episodes(1 << 30),
    ];
    for builder in builders {
        let shown = format!("{builder:?}");
        match builder.footprint() {
            // As a figure it is fine; to be had it is not.
            Ok(footprint) => {
                let all = footprint.ring_bytes as u64 + footprint.ordinary_bytes as u64;
                assert!(all > 1 << (usize::BITS / 2 + 8), "{shown}: {footprint:?}")
            }
            // With 32-bit addresses a column alone can be too large.
            Err(error) if cfg!(target_pointer_width = "32") && error.kind() == ErrorKind::Schema => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::Config, "{shown}: {error}"),
        }
        let _ = builder.page_locked_bytes();
        let error = builder.start().map(drop).expect_err(&shown);
        assert!(matches!(error.kind(), ErrorKind::Config | ErrorKind::Memory | ErrorKind::Schema), "{shown}: {error}");
    }
}

/// Files that are open.
fn open_files() -> u64 {
    std::fs::read_dir("/proc/self/fd").unwrap().count() as u64
}

fn limit(resource: rustix::process::Resource, value: Option<u64>) {
    let maximum = rustix::process::getrlimit(resource).maximum;
    rustix::process::setrlimit(resource, rustix::process::Rlimit { current: value.or(maximum), maximum }).unwrap();
}

alone! {
    fn a_host_without_file_descriptors_to_spare_gets_an_error_and_nothing_is_left() {
        let (small, fake) = (Small::new(), life::fake("descriptors"));
        // A runtime needs a few where its I/O or signals are enabled, as another crate of the program may ask for.
        // The first of a process opens a pair for signals, and keeps it.
        let spare = open_files();
        for more in 0..24 {
            limit(rustix::process::Resource::Nofile, Some(spare + more));
            let started = small.pinned(&fake).start();
            limit(rustix::process::Resource::Nofile, None);
            match started {
                Ok(feed) => assert_good(&small, &fake, feed),
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::Thread | ErrorKind::Cuda), "{error}");
                    assert!(error.to_string().contains("Too many open files"), "{error}");
                    assert_nothing_is_left_with(&fake);
                }
            }
            assert!(open_files() <= spare + 2, "descriptors were left open");
        }
        assert_good(&small, &fake, small.pinned(&fake).start().unwrap());
    }
}

alone! {
    fn a_host_without_address_space_gets_an_error_and_nothing_is_left() {
        let (small, fake) = (Small::new(), life::fake("address-space"));
        drop(small.pinned(&fake).start().unwrap());
        let mut failures = 0;
        for more in 0.. {
            let status = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = status.split(' ').next().unwrap().parse().unwrap();
            limit(rustix::process::Resource::As, Some((pages + 256 + 64 * more) * 4096));
            let started = small.pinned(&fake).start();
            limit(rustix::process::Resource::As, None);
            match started {
                Ok(feed) => {
                    assert_good(&small, &fake, feed);
                    break;
                }
                Err(error) => {
                    failures += 1;
                    assert!(matches!(error.kind(), ErrorKind::Thread | ErrorKind::Memory | ErrorKind::Cuda), "{error}");
                    assert_nothing_is_left_with(&fake);
                }
            }
        }
        assert!(failures > 3, "the limit was felt {failures} times");
    }
}
