//! Copies of host batches into memory that the user owns: whole, in the user's stream, and the slot at home only when
//! they are over.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;

use common::fake::{Fake, Hazards};
use feeding::{Bytes, DEADLINE, assert_bytes, fake, learner_on, search, until};
use life::{alone, feed_threads, rings};
use pinring::*;
use std::time::Duration;

/// A feed of such bytes with a host learner and a copier, and what a framework has: a stream and memory.
struct Rig {
    fake: Fake,
    bytes: Bytes,
    feed: Feed,
    learner: Learner,
    copier: DeviceCopier,
    stream: usize,
    memory: u64,
}

impl Rig {
    fn new(name: &str) -> Rig {
        let (fake, bytes) = (fake(name, 1), Bytes::new());
        let feed = bytes.builder(&fake).start().unwrap();
        let (learner, copier) = (feed.learner().unwrap(), feed.copier(0).unwrap());
        let (stream, memory) = (fake.user_stream(1), fake.user_memory(4 * Bytes::LEN));
        Rig { fake, bytes, feed, learner, copier, stream, memory }
    }

    /// The place of so many batches before this one.
    fn place(&self, index: u64) -> u64 {
        self.memory + index * Bytes::LEN as u64
    }

    #[allow(clippy::result_large_err)] // the batch comes back by value
    fn copy(&self, batch: Batch, index: u64) -> Result<CopyTicket, CopyError> {
        // SAFETY: the rig's memory and stream.
        unsafe { self.copier.copy_to_device(batch, self.place(index), self.stream as *mut _) }
    }

    fn copy_column(&self, shared: &SharedBatch, index: u64) -> Result<CopyTicket, DeviceUseError> {
        // SAFETY: the rig's memory and stream.
        unsafe {
            self.copier.copy_column_to_device(shared, self.bytes.column, self.place(index), self.stream as *mut _)
        }
    }

    fn end(self) {
        let Rig { fake, feed, learner, copier, .. } = self;
        fake.auto_run(true);
        drop((feed, learner, copier));
        assert_eq!((fake.live_allocations().len(), fake.live_events().len(), fake.retained(0)), (1, 0, 0));
        assert_eq!(fake.hazards(), Hazards::default());
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn a_batch_is_copied_whole_and_its_slot_comes_home_by_event() {
        let rig = Rig::new("copy");
        let mut writer = rig.feed.writer(1).unwrap();
        (0..4).for_each(|value| rig.bytes.write(&mut writer, value).unwrap());
        let mut tickets = Vec::new();
        for index in 0..4 {
            let batch = rig.learner.next_batch().unwrap();
            assert_eq!((batch.byte_len(), batch.byte_offset(rig.bytes.column)), (Bytes::LEN, 0));
            tickets.push(rig.copy(batch, index).unwrap());
        }
        // Nothing is in the learner's hands: it waits for batches, and is not told to drop some.
        assert_eq!(rig.feed.metrics().batches_held, 0);
        assert!(rig.learner.try_next().unwrap().is_none());
        let writing = rig.bytes.write_on(writer, [0xEE; 16]);
        until("the feeding thread watches", || rig.feed.metrics().devices[0].copies_in_flight == 4);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!((rig.feed.metrics().steps, rig.feed.metrics().free_slots), (4, 0));
        for ticket in &tickets {
            (0..50).for_each(|_| assert!(!ticket.is_done().unwrap()));
        }
        assert_eq!(rig.fake.peek_last_error(), 0, "no `not ready` is left behind");
        drop(tickets.pop()); // changes nothing

        // The first two run: those slots, and no others, come home.
        assert_eq!(rig.fake.run_some(rig.stream, 4), 4);
        until("two slots came home and were written again", || rig.feed.metrics().steps == 6);
        assert_eq!([0, 1, 2].map(|index| tickets[index].is_done().unwrap()), [true, true, false]);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(rig.feed.metrics().steps, 6);
        tickets[2].synchronize().unwrap(); // here the stream runs
        rig.fake.run_all();
        for index in 0..4 {
            assert_bytes(&rig.fake, rig.place(index), index as u8, "as it was");
        }
        for _ in 0..16 {
            let batch = rig.learner.next_batch().unwrap();
            let ticket = rig.copy(batch, 0).unwrap();
            ticket.synchronize().unwrap();
            assert_bytes(&rig.fake, rig.place(0), 0xEE, "a later one");
        }
        writing.join().unwrap().unwrap();
        drop(tickets);
        rig.end();
    }
}

alone! {
    /// A second stream waits for the copy in the first.
    fn a_ticket_orders_other_streams() {
        let rig = Rig::new("ticket");
        rig.bytes.write(&mut rig.feed.writer(1).unwrap(), 1).unwrap();
        let other = rig.fake.user_stream(1);
        let ticket = rig.copy(rig.learner.next_batch().unwrap(), 0).unwrap();
        // SAFETY: a stream of the device.
        unsafe { ticket.wait_on(other as *mut _) }.unwrap();
        assert_eq!(rig.fake.run(other), 0, "it waits");
        rig.fake.run(rig.stream);
        assert_eq!(rig.fake.run(other), 1);
        let log = rig.fake.calls();
        let wait = log.iter().find(|call| call.function == "cuStreamWaitEvent").unwrap();
        assert_eq!((wait.args[0], wait.args[1]), (other as u64, ticket.event() as u64));
        drop(ticket);
        rig.end();
    }
}

alone! {
    fn columns_of_a_shared_batch_keep_its_slot_until_the_last_is_over() {
        let fake = fake("columns", 1);
        let mut step = Step::new();
        let (small, large) = (step.leaf::<u8>("small", &[3]), step.leaf::<f32>("large", &[2, 5]));
        let mut sample = Sample::step(step);
        let columns = (sample.all(small), sample.all(large));
        let feed = Feed::builder(sample).batch(4).buffers(1).pinning(Pinning::Required).device(0).cuda(search(&fake));
        let feed = feed.start().unwrap();
        let (learner, copier) = (feed.learner().unwrap(), feed.copier(0).unwrap());
        let (streams, memory) = ([(); 2].map(|()| fake.user_stream(1)), fake.user_memory(4096));
        let mut writer = feed.writer(4).unwrap();
        let (bytes, floats): (Vec<u8>, Vec<f32>) = ((0..12).collect(), (0..40).map(|i| i as f32).collect());
        let mut step = writer.step().unwrap();
        step.put(small, &bytes).unwrap();
        step.put(large, &floats).unwrap();
        step.commit().unwrap();
        let shared = learner.next_batch().unwrap().share();
        // SAFETY: the test's own memory and streams.
        let tickets = unsafe {
            [
                copier.copy_column_to_device(&shared, columns.0, memory, streams[0] as *mut _).unwrap(),
                copier.copy_column_to_device(&shared, columns.1, memory + 1024, streams[1] as *mut _).unwrap(),
            ]
        };
        drop(shared);
        fake.run(streams[1]);
        until("the second is over", || feed.metrics().devices[0].copies_in_flight == 1);
        assert_eq!((feed.metrics().free_slots, feed.metrics().batches_held), (0, 1));
        assert!(tickets[1].is_done().unwrap() && !tickets[0].is_done().unwrap());
        fake.run(streams[0]);
        until("the slot is home", || feed.metrics().free_slots == 1);
        assert_eq!(feed.metrics().batches_held, 0);
        assert_eq!(fake.device_bytes(memory, 12), bytes);
        let expected: Vec<u8> = floats.iter().flat_map(|float| float.to_ne_bytes()).collect();
        assert_eq!(fake.device_bytes(memory + 1024, 160), expected);
    }
}

alone! {
    fn what_was_not_copied_is_handed_back() {
        let rig = Rig::new("handed-back");
        let mut writer = rig.feed.writer(1).unwrap();
        (0..3).for_each(|value| rig.bytes.write(&mut writer, value).unwrap());
        let mut batch = rig.learner.next_batch().unwrap();
        let mut back = |index, expected: &str| {
            let taken = std::mem::replace(&mut batch, rig.learner.next_batch().unwrap());
            let CopyError { error, batch: back } = rig.copy(taken, index).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            let back = back.expect("nothing was queued");
            assert_eq!(back.slice(rig.bytes.column), [index as u8; Bytes::LEN]);
        };
        rig.fake.inject("cuEventCreate", 1, 2);
        back(0, "cuEventCreate returned 2 CUDA_ERROR_OUT_OF_MEMORY");
        rig.fake.inject("cuMemcpyHtoDAsync_v2", 1, 1);
        back(1, "cuMemcpyHtoDAsync returned 1 CUDA_ERROR_INVALID_VALUE");
        assert!(rig.feed.closed().is_none(), "the user's error is no fault of the feed's");
        until("the slots are home", || rig.feed.metrics().free_slots == 3);

        rig.feed.stop(DEADLINE).unwrap();
        let CopyError { error, batch: back } = rig.copy(batch, 2).unwrap_err();
        assert_eq!(error, DeviceUseError::Closed(Closed::Stopped), "nobody would watch for its end");
        assert_eq!(back.expect("nothing was queued").slice(rig.bytes.column), [2; Bytes::LEN]);
        assert_eq!(rig.fake.calls_of("cuMemcpyHtoDAsync_v2").len(), 1, "the one that was refused");
        rig.end();
    }
}

alone! {
    /// The copies are queued, their events are not recorded. One slot, however many copies of it were under way.
    fn a_slot_whose_copys_end_cannot_be_learned_is_given_up_once() {
        for shared in [false, true] {
            let rig = Rig::new("given-up");
            let mut writer = rig.feed.writer(1).unwrap();
            rig.bytes.write(&mut writer, 9).unwrap();
            let batch = rig.learner.next_batch().unwrap();
            let text = if shared {
                let batch = batch.share();
                rig.fake.hold(rig.stream, true); // the first is given up at the stop
                rig.copy_column(&batch, 0).unwrap();
                rig.fake.inject("cuEventRecord", 1, 1);
                let error = rig.copy_column(&batch, 1).unwrap_err();
                assert_eq!(rig.copy_column(&batch, 2).unwrap_err(), rig.feed.closed().unwrap().into());
                assert_eq!(batch.slice(rig.bytes.column), [9; Bytes::LEN], "its owner may go on reading");
                error.to_string()
            } else {
                rig.fake.inject("cuEventRecord", 1, 1);
                let CopyError { error, batch } = rig.copy(batch, 0).unwrap_err();
                assert!(batch.is_none(), "its copy may be under way");
                error.to_string()
            };
            assert!(text.contains("cuEventRecord returned 1 CUDA_ERROR_INVALID_VALUE"), "{text}");
            let Some(Closed::Fault(fault)) = rig.feed.closed() else { panic!("{:?}", rig.feed.closed()) };
            assert_eq!(fault.actor(), "feeding0");
            rig.fake.run(rig.stream);
            let report = rig.feed.stop(if shared { Duration::from_secs(1) } else { DEADLINE }).unwrap();
            assert_eq!((report.quarantined_slots, report.still_out, report.threads_given_up.len()), (1, 0, 0), "{report}");
            assert_eq!((rig.feed.metrics().quarantined_slots, rig.feed.metrics().batches_held), (1, 0));
            rig.fake.hold(rig.stream, false);
            rig.fake.run(rig.stream);
            assert_bytes(&rig.fake, rig.place(u64::from(shared)), 9, "it ran after all");
            let Rig { fake, feed, learner, copier, .. } = rig;
            drop((feed, learner, copier));
            assert_eq!(fake.live_registrations().len(), 1, "page-locked for good");
            assert_eq!(feed_threads(), [""; 0]);
        }
        assert_eq!(rings().len(), 2, "and mapped");
    }
}

alone! {
    /// One list serves both: our buffers' copies and the user's.
    fn copies_of_the_users_and_of_the_feeds_end_in_any_order() {
        let rig = Rig::new("both");
        let own = rig.fake.user_stream(1);
        let device = learner_on(&rig.feed, 0, own).unwrap();
        let mut writer = rig.feed.writer(1).unwrap();
        (0..4).for_each(|value| rig.bytes.write(&mut writer, value).unwrap());
        until("two are on the device", || rig.feed.metrics().devices[0].batches_waiting == 2);
        let host = [rig.learner.next_batch().unwrap(), rig.learner.next_batch().unwrap()];
        for (index, batch) in host.into_iter().enumerate() {
            drop(rig.copy(batch, index as u64).unwrap());
        }
        until("all four are under way", || rig.feed.metrics().devices[0].copies_in_flight == 4);
        rig.fake.run(rig.stream); // issued last, over first
        until("the user's are home", || rig.feed.metrics().free_slots == 2);
        assert_eq!(rig.feed.metrics().devices[0].copies_in_flight, 2);
        rig.fake.run_all();
        until("all are home", || rig.feed.metrics().free_slots == 4);
        for expected in 0..2 {
            let batch = device.next_batch().unwrap();
            assert_bytes(&rig.fake, rig.bytes.address(&batch), expected, "on the device");
            assert_bytes(&rig.fake, rig.place(expected.into()), expected + 2, "in the user's memory");
        }
        drop(device);
        rig.end();
    }
}

alone! {
    /// Issued, and the feed is gone at once: the slot is kept until the copy is over, or for good.
    fn a_copy_outlives_its_feed() {
        let rig = Rig::new("outlives");
        rig.bytes.write(&mut rig.feed.writer(1).unwrap(), 4).unwrap();
        let ticket = rig.copy(rig.learner.next_batch().unwrap(), 0).unwrap();
        let Rig { fake, feed, learner, copier, memory, .. } = rig;
        std::thread::scope(|scope| {
            let dropping = scope.spawn(|| drop((feed, learner, copier)));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!dropping.is_finished(), "the copy is queued");
            assert_eq!(fake.live_registrations().len(), 1);
            fake.run_all();
        });
        assert!(ticket.is_done().unwrap());
        ticket.synchronize().unwrap();
        assert_bytes(&fake, memory, 4, "whole");
        drop(ticket);
        assert_eq!((fake.live_allocations().len(), fake.live_events().len(), fake.retained(0)), (1, 0, 0));
        life::assert_nothing_is_left_with(&fake);
    }
}
