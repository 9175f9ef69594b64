//! Priorities that come back from a device, against the fake library: they are those that lay there behind the work before,
//! they wait for nobody and nobody for them, and whatever fails, none is lost without a count.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))] // device addresses by way of usize
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;
#[path = "common/priorities.rs"]
mod priorities;

use common::fake::{Fake, Hazards};
use feeding::{DEADLINE, LEGACY, PER_THREAD, assert_devices_are_clean, fake, learner_on, search, until};
use life::{alone, feed_threads};
use pinring::*;
use priorities::{Counted, ROWS, same_as_from_the_host, values};
use std::time::Duration;

const UPDATED: [f32; ROWS] = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.5];

/// A feed whose store holds 200 steps, its learner, its stream, and memory for priorities.
struct Rig {
    fake: Fake,
    kind: Counted,
    feed: Feed,
    learner: DeviceLearner,
    writer: Writer,
    stream: usize,
    memory: u64,
}

impl Rig {
    fn new(name: &str, set: impl FnOnce(FeedBuilder) -> FeedBuilder) -> Rig {
        let (fake, kind) = (fake(name, 1), Counted::new());
        let feed = set(kind.builder(&search(&fake))).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let memory = fake.user_memory(ROWS * 4);
        let mut writer = feed.writer(1).unwrap();
        kind.write(&mut writer, 0..200).unwrap();
        Rig { fake, kind, feed, learner, writer, stream, memory }
    }

    /// A kernel of the learner's, which leaves these values in its turn.
    fn put(&self, values: &[f32]) {
        let code = self.fake.user_copy_in(self.memory, values.as_ptr().cast(), size_of_val(values), self.stream);
        assert_eq!(code, 0);
    }

    fn update(&self, keys: &Keys) -> Result<(), DeviceUpdateError> {
        // SAFETY: the rig's memory has room for a batch's priorities.
        unsafe { self.learner.update_priorities(keys, self.memory, keys.len()) }
    }

    fn keys(&self) -> Keys {
        self.learner.next_batch().unwrap().keys()
    }

    fn counts(&self) -> (u64, u64, u64, usize) {
        let device = &self.feed.metrics().devices[0];
        (device.updates, device.updates_refused, device.updates_lost, device.updates_waiting)
    }

    fn peek(&self, keys: &Keys) -> Vec<f32> {
        self.feed.peek(keys).unwrap().into_iter().map(|priority| priority.unwrap_or(-1.0)).collect()
    }

    /// Of steps that are in a batch twice, the last row's value.
    fn expected(&self, keys: &Keys, values: &[f32]) -> Vec<f32> {
        let steps: Vec<u64> = keys.iter().map(|(_, step)| step).collect();
        steps.iter().map(|step| values[steps.iter().rposition(|other| other == step).unwrap()]).collect()
    }

    /// Ends everything, which leaves the test's own memory.
    fn end(self) {
        let Rig { fake, feed, learner, writer, memory, .. } = self;
        fake.auto_run(true);
        drop((learner, writer, feed));
        fake.free_user_memory(memory);
        assert_devices_are_clean(&fake, 1);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn priorities_from_a_device_are_those_from_the_host() {
        let fake = fake("same", 1);
        fake.auto_run_after(Some(Duration::from_micros(100)));
        let memory = fake.user_memory(ROWS * 4);
        let put = |values: &[f32]| {
            assert_eq!(fake.user_copy_in(memory, values.as_ptr().cast(), size_of_val(values), LEGACY), 0);
        };
        same_as_from_the_host(&search(&fake), memory, put, 60);
        fake.free_user_memory(memory);
        assert_devices_are_clean(&fake, 0);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// The call returns at once; what it copies is what lay there behind the kernels before it and in front of those behind.
    fn an_update_is_of_its_place_in_the_stream_and_waits_for_it_alone() {
        let rig = Rig::new("place", |b| b);
        let keys = rig.keys();
        let before = rig.peek(&keys);
        rig.put(&UPDATED);
        rig.update(&keys).unwrap();
        rig.put(&[9.0; ROWS]); // the next kernel
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!((rig.counts(), rig.peek(&keys)), ((0, 0, 0, 1), before), "nothing has run");
        // The copy is in the learner's own stream, and the feeding thread waits for no more than its event.
        let copy = &rig.fake.calls_of("cuMemcpyDtoHAsync_v2")[0];
        assert_eq!((copy.args[1], copy.args[2], copy.args[3]), (rig.memory, ROWS as u64 * 4, rig.stream as u64));
        let of_learner = |call: &&common::fake::Call| call.thread == rig.fake.thread();
        let calls = rig.fake.calls();
        assert!(!calls.iter().filter(of_learner).any(|call| call.function.contains("Synchronize")), "nobody waits");
        rig.fake.run_all();
        until("it has come", || rig.counts().0 == 1);
        assert_eq!(rig.peek(&keys), rig.expected(&keys, &UPDATED));
        assert_eq!(rig.counts(), (1, 0, 0, 0));
        rig.end();
    }
}

/// The learner's stream hangs: as many batches as can be taken are, each updated; then one update more finds no place.
fn places(name: &str, by: Gather, copied_ahead: usize) {
    let rig = Rig::new(name, |b| b.gather(by).buffers(4).prefetch(2));
    let footprint = rig.kind.builder(&search(&rig.fake)).buffers(4).prefetch(2).footprint().unwrap();
    let registered: usize = rig.fake.live_registrations().iter().map(|registration| registration.bytes).sum();
    assert_eq!(footprint.page_locked_bytes, registered);
    assert_eq!(footprint.page_locked_bytes, footprint.ring_bytes + (4 + 2 + 1) * SLOT_ALIGN);
    for round in 0..3 {
        rig.fake.hold(rig.stream, true);
        let mut taken = Vec::new();
        // Everything that does not need the stream may happen: copies ahead run.
        while let Some(batch) = rig.learner.next_timeout(Duration::from_millis(300)).unwrap_or_else(|e| panic!("{e}")) {
            let keys = batch.keys();
            drop(batch);
            rig.put(&values(taken.len(), ROWS));
            rig.update(&keys).unwrap_or_else(|error| panic!("update {} of round {round}: {error}", taken.len()));
            taken.push(keys);
            rig.fake.run_all();
        }
        assert_eq!(taken.len(), copied_ahead, "round {round}");
        let refused = loop {
            if let Err(error) = rig.update(&taken[0]) {
                break error;
            }
        };
        assert_eq!(refused, DeviceUpdateError::Full { pending: 7, places: 7 });
        assert_eq!(Error::from(refused).kind(), ErrorKind::Full);
        rig.fake.hold(rig.stream, false);
        until("all have come", || {
            rig.fake.run_all();
            rig.counts().3 == 0
        });
        rig.update(&taken[0]).unwrap();
        rig.fake.run_all();
        until("the last has come", || rig.counts() == (8 * (round + 1), 0, 0, 0));
    }
    rig.end();
}

alone! {
    fn one_update_a_batch_never_finds_every_place_taken_however_late_the_stream() {
        places("places", Gather::Cpu, 6);
    }
}

alone! {
    fn nor_where_the_device_gathers() {
        places("places-gather", Gather::Mapped, 2);
    }
}

alone! {
    fn keys_count_as_they_are_when_the_priorities_come() {
        let mut rig = Rig::new("stale", |b| b);
        let keys = rig.keys();
        rig.put(&UPDATED);
        rig.update(&keys).unwrap();
        rig.kind.write(&mut rig.writer, 200..1000).unwrap(); // laps the store
        assert_eq!(rig.feed.metrics().stale_keys, 0);
        rig.fake.run_all();
        until("it has come", || rig.counts() == (1, 0, 0, 0));
        assert_eq!(rig.feed.metrics().stale_keys, ROWS as u64);
        assert_eq!(rig.feed.peek(&keys).unwrap(), vec![None; ROWS]);
        // And of a store that was cleared or loaded meanwhile.
        rig.fake.auto_run(true);
        let keys = rig.keys();
        rig.fake.hold(rig.stream, true);
        rig.update(&keys).unwrap();
        rig.feed.clear().unwrap();
        rig.fake.hold(rig.stream, false);
        until("it has come too", || rig.counts() == (2, 0, 0, 0));
        assert_eq!(rig.feed.metrics().stale_keys, 2 * ROWS as u64);
        rig.end();
    }
}

alone! {
    fn an_array_with_a_value_that_is_no_priority_is_refused_as_a_whole_and_counted() {
        let rig = Rig::new("refused", |b| b);
        rig.fake.auto_run(true);
        let keys = rig.keys();
        rig.put(&UPDATED);
        rig.update(&keys).unwrap();
        until("the good one has come", || rig.counts() == (1, 0, 0, 0));
        let was = rig.peek(&keys);
        for (count, bad) in [(1, f32::NAN), (2, -0.5), (3, f32::INFINITY)] {
            let mut array = [1.0; ROWS];
            array[5] = bad;
            rig.put(&array);
            rig.update(&keys).unwrap();
            until("it was looked at", || rig.counts() == (1, count, 0, 0));
            assert_eq!(rig.peek(&keys), was, "{bad}: nothing was changed");
        }
        rig.put(&[-0.0; ROWS]);
        rig.update(&keys).unwrap();
        until("minus zero is zero", || rig.counts() == (2, 3, 0, 0));
        assert_eq!(rig.peek(&keys), [0.0; ROWS]);
        assert_eq!(rig.feed.closed(), None);
        rig.end();
    }
}

alone! {
    fn what_does_not_fit_is_refused_before_anything_is_queued() {
        let rig = Rig::new("fit", |b| b);
        rig.fake.auto_run(true);
        let (keys, before) = (rig.keys(), rig.fake.calls_of("cuMemcpyDtoHAsync_v2").len());
        // SAFETY: refused.
        let short = unsafe { rig.learner.update_priorities(&keys, rig.memory, ROWS - 1) };
        assert_eq!(short, Err(UpdateError::Length { keys: ROWS, priorities: ROWS - 1 }.into()));
        let other = Counted::new();
        let second = other.builder(&search(&rig.fake)).start().unwrap();
        let foreign = learner_on(&second, 0, LEGACY).unwrap();
        // SAFETY: refused.
        let refused = unsafe { foreign.update_priorities(&keys, rig.memory, ROWS) };
        assert_eq!(refused, Err(UpdateError::Foreign.into()));
        drop((foreign, second));
        assert_eq!(rig.fake.calls_of("cuMemcpyDtoHAsync_v2").len(), before);
        // An address that is none is the caller's error, and costs nothing.
        for _ in 0..20 {
            // SAFETY: the fake refuses the address.
            let refused = unsafe { rig.learner.update_priorities(&keys, 0x10, ROWS) }.unwrap_err();
            assert!(matches!(refused, DeviceUpdateError::Device(DeviceUseError::Cuda(_))), "{refused}");
            assert!(refused.to_string().contains("cuMemcpyDtoHAsync returned 1 CUDA_ERROR_INVALID_VALUE"), "{refused}");
            assert_eq!(Error::from(refused).kind(), ErrorKind::Cuda);
        }
        rig.put(&UPDATED);
        rig.update(&keys).unwrap();
        until("the feed goes on", || rig.counts() == (1, 0, 0, 0));
        assert_eq!(rig.feed.closed(), None);
        assert_eq!(rig.fake.hazards(), Hazards { out_of_range: 20, ..Hazards::default() }, "the caller's");
    }
}

alone! {
    /// Into ordinary memory the copy would hold the learner's thread.
    fn without_page_locked_memory_there_is_no_place_and_without_priorities_no_need() {
        let rig = Rig::new("unpinned", |b| b.pinning(Pinning::Off));
        rig.fake.auto_run(true);
        let keys = rig.keys();
        let refused = rig.update(&keys).unwrap_err();
        assert_eq!(refused, DeviceUpdateError::NotPinned);
        assert!(refused.to_string().contains("`.pinning(Pinning::Required)`"), "{refused}");
        assert_eq!(Error::from(refused).kind(), ErrorKind::Misuse);
        assert_eq!(rig.learner.update_priorities_from_host(&keys, &UPDATED).unwrap().applied, ROWS);
        assert_eq!(rig.peek(&keys), rig.expected(&keys, &UPDATED));
        rig.end();

        for pinning in [Pinning::Off, Pinning::Required] {
            let mut rig = Rig::new("uniform", |b| b.pinning(pinning).replay(256, Uniform::new()));
            rig.fake.auto_run(true);
            let footprint = rig.kind.builder(&search(&rig.fake)).replay(256, Uniform::new()).footprint().unwrap();
            assert_eq!(footprint.page_locked_bytes, footprint.ring_bytes, "nothing is reserved");
            let keys = rig.keys();
            rig.update(&keys).unwrap();
            rig.kind.write(&mut rig.writer, 200..1000).unwrap();
            rig.update(&keys).unwrap();
            assert_eq!(rig.fake.calls_of("cuMemcpyDtoHAsync_v2").len(), 0);
            assert_eq!((rig.feed.metrics().stale_keys, rig.counts()), (ROWS as u64, (0, 0, 0, 0)));
            rig.end();
        }
    }
}

alone! {
    fn a_stream_that_captures_is_left_alone_and_other_captures_stay_whole() {
        let rig = Rig::new("capture", |b| b);
        rig.fake.auto_run(true);
        let keys = rig.keys();
        let other = rig.fake.user_stream(1);
        for mode in [0, 1, 2] {
            rig.fake.begin_capture(rig.stream, mode);
            assert_eq!(rig.update(&keys), Err(DeviceUseError::Capturing.into()));
            assert!(rig.fake.end_capture(rig.stream), "whole");
            rig.put(&UPDATED);
            let before = rig.counts().0;
            // While somebody else captures, in global mode too, the update goes its way.
            rig.fake.begin_capture(other, mode);
            rig.update(&keys).unwrap();
            until("it has come", || rig.counts() == (before + 1, 0, 0, 0));
            assert!(rig.fake.end_capture(other), "whole");
        }
        let Rig { fake, feed, learner, writer, memory, .. } = rig;
        drop((learner, writer, feed));
        fake.free_user_memory(memory);
        assert_devices_are_clean(&fake, 2);
    }
}

alone! {
    fn a_learner_of_its_threads_stream_updates_on_that_thread() {
        let (fake, kind) = (fake("per-thread", 1), Counted::new());
        fake.auto_run(true);
        let feed = kind.builder(&search(&fake)).start().unwrap();
        let learner = learner_on(&feed, 0, PER_THREAD).unwrap();
        kind.write(&mut feed.writer(1).unwrap(), 0..200).unwrap();
        let (keys, memory) = (learner.next_batch().unwrap().keys(), fake.user_memory(ROWS * 4));
        // SAFETY: room for as many values.
        let update = || unsafe { learner.update_priorities(&keys, memory, ROWS) };
        update().unwrap();
        let elsewhere = std::thread::scope(|scope| scope.spawn(update).join().unwrap());
        assert_eq!(elsewhere, Err(DeviceUseError::OtherThread.into()));
    }
}

alone! {
    /// Rows of a second store are its own sampler's, also where the feed's has no priorities.
    fn of_a_mixture_each_store_hears_of_its_own_rows() {
        let (fake, kind) = (fake("mixture", 1), Counted::new());
        fake.auto_run(true);
        let store = Store::builder(kind.sample.clone(), 256, Prioritized::new(1.0, 1.0)).build().unwrap();
        kind.write(&mut store.writer(1).unwrap(), 1000..1100).unwrap();
        let builder = || kind.builder(&search(&fake)).gather(Gather::Auto).replay(256, Uniform::new()).mix(&store, 0.5);
        let footprint = builder().footprint().unwrap();
        assert_eq!(footprint.page_locked_bytes, footprint.ring_bytes + 6 * SLOT_ALIGN);
        let feed = builder().start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let mut writer = feed.writer(1).unwrap();
        kind.write(&mut writer, 0..200).unwrap();
        let memory = fake.user_memory(ROWS * 4);
        assert_eq!(fake.user_copy_in(memory, UPDATED.as_ptr().cast(), ROWS * 4, stream), 0);
        let keys = (0..8).map(|_| learner.next_batch().unwrap().keys()).last().unwrap();
        // SAFETY: as many values were put there.
        unsafe { learner.update_priorities(&keys, memory, ROWS) }.unwrap();
        until("it has come", || feed.metrics().devices[0].updates == 1);
        let steps: Vec<u64> = keys.iter().map(|(_, step)| step).collect();
        let last = |row: usize| (4..ROWS).rfind(|&other| steps[other] == steps[row]).unwrap();
        let expected: Vec<_> = (0..ROWS).map(|row| (row >= 4).then(|| UPDATED[last(row)])).collect();
        assert_eq!(feed.peek(&keys).unwrap(), expected, "the last four are the second store's");
        drop((learner, writer, feed, store));
        fake.free_user_memory(memory);
        assert_devices_are_clean(&fake, 1);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn whichever_call_of_a_start_fails_no_place_is_left() {
        let (fake, kind) = (fake("start", 1), Counted::new());
        fake.auto_run(true);
        drop(kind.builder(&search(&fake)).start().unwrap()); // CUDA is found once
        let mut refused = 0;
        for k in 1.. {
            let before = fake.calls().len();
            fake.inject("*", k, 2);
            let started = kind.builder(&search(&fake)).start();
            let log = fake.calls().split_off(before);
            fake.clear_faults();
            refused += usize::from(started.is_err());
            drop(started);
            assert_devices_are_clean(&fake, 0);
            life::assert_nothing_is_left_with(&fake);
            if log.get(k as usize - 1).is_none_or(|call| call.code != Some(2)) {
                assert!(log.len() < k as usize, "each call of a start has failed once: {k} of {}", log.len());
                break;
            }
        }
        assert!(refused > 20, "{refused} starts were refused");
    }
}

// ---- ends ------------------------------------------------------------------------------------------------------------

alone! {
    fn what_is_on_its_way_at_the_stop_is_waited_for_in_whatever_order_things_are_dropped() {
        for order in 0..3 {
            let rig = Rig::new("ends", |b| b);
            let keys = rig.keys();
            for number in 0..3 {
                rig.put(&values(number, ROWS));
                rig.update(&keys).unwrap();
            }
            let Rig { fake, feed, learner, writer, memory, .. } = rig;
            fake.auto_run_after(Some(Duration::from_millis(5)));
            if order == 0 {
                drop(learner);
                feed.stop(DEADLINE).unwrap();
            } else if order == 1 {
                drop(writer);
                feed.stop(DEADLINE).unwrap();
                // SAFETY: refused.
                let late = unsafe { learner.update_priorities(&keys, memory, ROWS) };
                assert_eq!(late, Err(DeviceUseError::Closed(Closed::Stopped).into()));
                drop(learner);
            } else {
                feed.stop(DEADLINE).unwrap();
                drop((writer, learner));
            }
            let device = &feed.metrics().devices[0];
            assert_eq!((device.updates, device.updates_lost, device.quarantined_buffers), (3, 0, 0), "order {order}");
            drop(feed);
            fake.free_user_memory(memory);
            assert_devices_are_clean(&fake, 1);
            life::assert_nothing_is_left_with(&fake);
        }
    }
}

alone! {
    /// The stream never gets there: the stop gives the updates up, counts them, and keeps their places.
    fn what_never_comes_is_counted_and_its_places_are_kept() {
        let rig = Rig::new("never", |b| b);
        rig.fake.auto_run(true);
        let keys = rig.keys();
        until("both buffers are full, and nothing is under way", || {
            let device = &rig.feed.metrics().devices[0];
            (device.batches_waiting, device.copies_in_flight) == (2, 0)
        });
        rig.fake.hold(rig.stream, true);
        (0..3).for_each(|_| rig.update(&keys).unwrap());
        let report = rig.feed.stop(Duration::from_secs(1)).unwrap();
        assert_eq!(report.threads_given_up, ["pr0-pinning"], "to unregister the ring waits for the stream: {report}");
        assert_eq!(rig.counts(), (0, 0, 3, 0));
        // Two buffers and six places: to free them would wait for the stream.
        assert_eq!(rig.feed.metrics().devices[0].quarantined_buffers, 2 + 6);
        let Rig { fake, feed, learner, writer, stream, .. } = rig;
        drop((feed, learner, writer));
        fake.hold(stream, false);
        fake.run_all();
        until("the ring is unregistered, the places are not", || fake.live_registrations().len() == 1);
        assert_eq!(fake.live_registrations()[0].bytes, 6 * SLOT_ALIGN);
        assert_eq!(fake.hazards(), Hazards::default());
        until("the threads have ended", || feed_threads().is_empty());
    }
}

alone! {
    /// Each call that updates make fails once: what was asked for is applied, refused by an error, or counted as lost.
    fn whichever_call_fails_every_update_is_accounted_for() {
        let (mut ended, mut lost, mut kept) = (0, 0, 0);
        for (function, codes) in [
            ("cuStreamIsCapturing", [1, 999]), ("cuMemcpyDtoHAsync_v2", [1, 999]), ("cuEventRecord", [1, 700]),
            ("cuEventQuery", [1, 719]), ("cuCtxPushCurrent_v2", [1, 999]),
        ] {
            for code in codes {
                for nth in 1..=6 {
                    let at = format!("{function} number {nth} returns {code}");
                    let rig = Rig::new("turn", |b| b);
                    rig.fake.auto_run(true);
                    let keys = rig.keys();
                    until("nothing is under way", || rig.feed.metrics().devices[0].copies_in_flight == 0);
                    rig.fake.inject(function, nth, code);
                    let (mut queued, mut error) = (0, None::<Error>);
                    for number in 0..6 {
                        rig.put(&values(number, ROWS));
                        match rig.update(&keys) {
                            Ok(()) => queued += 1,
                            Err(failed) => error = Some(failed.into()),
                        }
                        if let Err(failed) = rig.learner.next_timeout(Duration::ZERO) {
                            error.get_or_insert(failed.into());
                        }
                    }
                    rig.feed.stop(DEADLINE).unwrap();
                    rig.fake.clear_faults();
                    let (applied, refused, gone, waiting) = rig.counts();
                    assert_eq!((applied + refused + gone, waiting), (queued, 0), "{at}: {error:?}");
                    assert_eq!(refused, 0, "{at}: what came was whole");
                    let quarantined = rig.feed.metrics().devices[0].quarantined_buffers;
                    if function == "cuMemcpyDtoHAsync_v2" && code == 1 {
                        assert_eq!((rig.feed.closed(), quarantined), (Some(Closed::Stopped), 0), "{at}: the caller's error alone");
                    }
                    (ended, lost, kept) = (ended + usize::from(error.is_some()), lost + gone, kept + quarantined);
                    let Rig { fake, feed, learner, writer, .. } = rig;
                    drop((learner, writer, feed));
                    assert_eq!(fake.hazards(), Hazards::default(), "{at}");
                    if function == "cuMemcpyDtoHAsync_v2" {
                        assert_eq!(fake.live_registrations().is_empty(), quarantined == 0, "{at}: {quarantined} are kept");
                    }
                    assert_eq!(feed_threads(), [""; 0], "{at}");
                }
            }
        }
        assert!(ended > 10 && kept > 5, "{ended} errors, {lost} lost, {kept} kept");
    }
}
