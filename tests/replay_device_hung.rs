//! Priorities from a device whose calls hang, against the fake library: whoever is in the call is stuck, and nobody else.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams and addresses

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;
#[path = "common/priorities.rs"]
mod priorities;

use common::Watchdog;
use common::fake::{Hazards, Trap};
use feeding::{fake, learner_on, search, until};
use life::{alone, feed_threads};
use pinring::*;
use priorities::{Counted, ROWS};
use std::time::Duration;

alone! {
    /// The learner is in a call that does not come back: metrics are told, batches are fed, and a stop gives up nobody
    /// but the learner's own thread, which is not the feed's.
    fn a_learner_that_hangs_in_an_update_holds_up_nobody_else() {
        for function in ["cuMemcpyDtoHAsync_v2", "cuEventRecord"] {
            let _watchdog = Watchdog::new("a hung update", Duration::from_secs(60));
            let (fake, kind) = (fake(function, 1), Counted::new());
            fake.auto_run(true);
            let feed = kind.builder(&search(&fake)).start().unwrap();
            let learner = learner_on(&feed, 0, fake.user_stream(1)).unwrap();
            let memory = fake.user_memory(ROWS * 4);
            kind.write(&mut feed.writer(1).unwrap(), 0..200).unwrap();
            let keys = learner.next_batch().unwrap().keys();
            until("both buffers are full, and nothing is under way", || {
                let device = &feed.metrics().devices[0];
                (device.batches_waiting, device.copies_in_flight) == (2, 0)
            });
            std::thread::scope(|scope| {
                fake.trap(function, 1, Trap::Hang);
                // SAFETY: room for as many values.
                let hung = scope.spawn(|| unsafe { learner.update_priorities(&keys, memory, ROWS) });
                until("it hangs", || fake.hung().is_some());
                let device = &feed.metrics().devices[0];
                assert!(device.updates_waiting <= 1, "somebody answers");
                let report = feed.stop(Duration::from_secs(2)).unwrap();
                assert!(!report.threads_given_up.contains(&"pr0-feeding0".to_owned()), "{function}: {report}");
                fake.clear_faults();
                let _ = hung.join().unwrap();
            });
            drop((learner, feed));
            fake.run_all(); // the copy that hung is queued now, and reads that memory
            fake.free_user_memory(memory);
            assert_eq!(fake.hazards(), Hazards::default());
            until("the threads have ended", || feed_threads().is_empty());
        }
    }
}

alone! {
    /// The feeding thread is in a call that does not come back: the learner's next update is refused when the feed is over.
    fn a_feeding_thread_that_hangs_looking_for_an_update_does_not_hold_up_the_learner() {
        let _watchdog = Watchdog::new("a hung look", Duration::from_secs(60));
        let (fake, kind) = (fake("look", 1), Counted::new());
        fake.auto_run(true);
        let feed = kind.builder(&search(&fake)).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let memory = fake.user_memory(ROWS * 4);
        kind.write(&mut feed.writer(1).unwrap(), 0..200).unwrap();
        let keys = learner.next_batch().unwrap().keys();
        until("both buffers are full, and nothing is under way", || {
            let device = &feed.metrics().devices[0];
            (device.batches_waiting, device.copies_in_flight) == (2, 0)
        });
        // SAFETY: room for as many values.
        let update = || unsafe { learner.update_priorities(&keys, memory, ROWS) };
        fake.hold(stream, true);
        fake.trap("cuEventQuery", 1, Trap::Hang);
        update().unwrap();
        until("it hangs", || fake.hung().is_some());
        std::thread::scope(|scope| {
            let late = scope.spawn(update);
            assert_eq!(feed.metrics().devices[0].updates_waiting, 1, "somebody answers");
            let report = feed.stop(Duration::from_secs(1)).unwrap();
            assert!(report.threads_given_up.contains(&"pr0-feeding0".to_owned()), "{report}");
            let late = late.join().unwrap();
            assert!(matches!(late, Ok(()) | Err(DeviceUpdateError::Device(DeviceUseError::Closed(_)))), "{late:?}");
        });
        fake.hold(stream, false);
        fake.clear_faults();
        fake.run_all();
        until("the threads have ended", || feed_threads().is_empty());
        drop((learner, feed));
        assert_eq!(fake.hazards(), Hazards::default());
    }
}
