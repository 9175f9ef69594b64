//! Batches of a store that the device gathers: against the fake driver, whose launches walk the kernel's indices over the
//! mapped store when the stream runs. What arrives is what the CPU gathers, bit by bit; records that a queued gather reads
//! stay; and where the kernel cannot be loaded the CPU gathers, and the feed says so.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // raw streams

mod common;
#[path = "common/feeding.rs"]
mod feeding;
#[path = "common/life.rs"]
mod life;
#[path = "common/gathered.rs"]
mod gathered;

use feeding::{DEADLINE, assert_devices_are_clean, fake, learner_on, search, until};
use gathered::{Case, FRAME, Kind, LANES, ROWS};
use life::alone;
use pinring::*;
use std::time::Duration;

alone! {
    fn the_device_gathers_what_the_cpu_gathers_bit_by_bit() {
        let fake = fake("same", 1);
        fake.auto_run_after(Some(Duration::from_micros(100)));
        gathered::same_bit_by_bit(&search(&fake), 12);
        assert_devices_are_clean(&fake, fake.live_streams().len());
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// While a gather is queued its records stay, however much is written meanwhile: writers wait, and go on behind it.
    fn records_stay_until_the_gather_has_run() {
        let fake = fake("stay", 1);
        let mut case = Case::new(Kind::Flat);
        let builder = || case.builder(&search(&fake)).pace(Pace::min_size(64)).replay(128, Uniform::new()).prefetch(2).buffers(2);
        let feed = builder().gather(Gather::Mapped).start().unwrap();
        case.columns = feed.columns();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        let (state, frame, action, reward) = (case.state, case.frame, case.action, case.reward);
        // Every value of a step says which step it is.
        let write = move |writer: &mut Writer, steps: std::ops::Range<usize>| -> Result<()> {
            for t in steps {
                let mut s = writer.step()?;
                s.put(frame, &[t as u8; FRAME * LANES])?;
                s.put(state, &[t as f32; 9 * LANES])?;
                s.put(action, &[t as i64; LANES])?;
                s.put(reward, &[1.0; LANES])?;
                s.commit()?;
            }
            Ok(())
        };
        let mut writer = feed.writer(LANES).unwrap();
        write(&mut writer, 0..30).unwrap();
        // Nothing runs on the device: writers fill what room there is, and then wait.
        until("gathers are queued", || feed.metrics().devices[0].gathered >= 2);
        let writing = std::thread::spawn(move || write(&mut writer, 30..3000));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!writing.is_finished(), "the store is far smaller than what is written");
        for _ in 0..60 {
            let batch = learner.next_batch().unwrap();
            fake.run_all();
            let column = case.sample.find::<f32>("state").unwrap();
            let bytes = fake.device_bytes(batch.column(column).ptr, ROWS * 9 * 4);
            let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect();
            for (row, first) in values.chunks_exact(9).zip(batch.first_steps()) {
                assert!(row.iter().all(|value| *value == first as f32), "step {first}: {row:?}");
            }
        }
        fake.auto_run(true);
        writing.join().unwrap().unwrap();
        drop(learner);
        drop(feed);
        assert_devices_are_clean(&fake, 1);
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// No gather waits for a buffer that the learner's stream still uses: its records would be in writers' way.
    fn no_gather_is_begun_before_its_buffer_is_released() {
        let fake = fake("released", 1);
        let case = Case::new(Kind::Flat);
        let feed = case.builder(&search(&fake)).pace(Pace::min_size(8)).gather(Gather::Mapped).prefetch(2).start().unwrap();
        let stream = fake.user_stream(1);
        let learner = learner_on(&feed, 0, stream).unwrap();
        fake.auto_run(true);
        let mut writer = case.write(&feed).unwrap();
        // The learner's stream stands still: it takes two batches, drops them, and there is no third.
        fake.hold(stream, true);
        drop((learner.next_batch().unwrap(), learner.next_batch().unwrap()));
        assert!(learner.next_timeout(Duration::from_millis(100)).unwrap().is_none());
        assert_eq!(feed.metrics().devices[0].gathered, 2);
        // Writers are in nobody's way meanwhile.
        for t in 0..2000 {
            let mut s = writer.step().unwrap();
            s.put(case.frame, &[t as u8; FRAME * LANES]).unwrap();
            s.put(case.state, &[t as f32; 9 * LANES]).unwrap();
            s.put(case.action, &[t; LANES]).unwrap();
            s.put(case.reward, &[1.0; LANES]).unwrap();
            s.commit().unwrap();
        }
        fake.hold(stream, false);
        for _ in 0..10 {
            let batch = learner.next_batch().unwrap();
            // Everything is quiet by then: nobody is called when a buffer comes back.
            std::thread::sleep(Duration::from_millis(20));
            drop(batch);
        }
        drop((learner, writer, feed));
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn a_kernel_that_cannot_be_loaded_leaves_it_to_the_cpu_and_is_reported() {
        let fake = fake("load", 1);
        fake.auto_run(true);
        for (function, code) in [("cuModuleLoadData", 218), ("cuModuleGetFunction", 500), ("cuModuleLoadData", 209)] {
            let case = Case::new(Kind::Flat);
            fake.inject(function, 1, code);
            let feed = case.builder(&search(&fake)).start().unwrap();
            let Some(GatherReport::Cpu { why }) = feed.gather() else { panic!("{:?}", feed.gather()) };
            assert!(why.contains("the kernel could not be loaded") && why.contains(&code.to_string()), "{why}");
            let learner = learner_on(&feed, 0, fake.user_stream(1)).unwrap();
            let writer = case.write(&feed).unwrap();
            assert_eq!(learner.next_batch().unwrap().rows(), ROWS);
            assert_eq!(feed.metrics().devices[0].gathered, 0);
            drop((learner, writer, feed));

            fake.inject(function, 1, code);
            let error = case.builder(&search(&fake)).gather(Gather::Mapped).start().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cuda);
            assert!(error.to_string().starts_with("the device cannot gather, which `.gather(Gather::Mapped)`"), "{error}");
            assert_eq!(fake.live_registrations(), [], "nothing is left");
        }
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    fn who_takes_first_decides_and_what_cannot_be_is_refused() {
        let fake = fake("ends", 1);
        fake.auto_run(true);
        let case = Case::new(Kind::Flat);
        // The device first: its batches are out of a host learner's reach.
        let feed = case.builder(&search(&fake)).start().unwrap();
        let learner = learner_on(&feed, 0, fake.user_stream(1)).unwrap();
        let error = feed.learner().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misuse);
        assert!(error.to_string().contains("gathered on its device"), "{error}");
        drop((learner, feed));
        // The host first: the CPU gathers, for both.
        let feed = case.builder(&search(&fake)).start().unwrap();
        let (host, device) = (feed.learner().unwrap(), learner_on(&feed, 0, fake.user_stream(1)).unwrap());
        assert!(matches!(feed.gather(), Some(GatherReport::Cpu { why }) if why.contains("on the host")));
        let writer = case.write(&feed).unwrap();
        assert_eq!((host.next_batch().unwrap().rows(), device.next_batch().unwrap().rows()), (ROWS, ROWS));
        drop((host, device, writer, feed));

        let refused = |builder: FeedBuilder, says: &str| {
            let error = builder.start().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(says), "{error}");
        };
        refused(case.builder(&search(&fake)).gather(Gather::Mapped).pinning(Pinning::Off), "not page-locked");
        let alone = Feed::builder(case.sample.clone()).batch(ROWS).lanes(LANES).replay(600, Uniform::new());
        refused(alone.pinning(Pinning::Required).cuda(search(&fake)).gather(Gather::Mapped), "no device is attached");
        refused(case.builder(&search(&fake)).gather_blocks(0), "0 thread blocks cannot gather");
        let mut step = Step::new();
        step.leaf::<f32>("reward", &[]);
        refused(Feed::builder(Sample::step(step)).gather(Gather::Auto), "`.gather` and `.gather_blocks` are of stored");
        life::assert_nothing_is_left_with(&fake);
    }
}

alone! {
    /// A launch, an upload or a wait that fails ends the feed with the call's name; what it may still read is kept.
    fn a_gather_that_fails_ends_the_feed_and_its_slot_is_quarantined() {
        let fake = fake("fails", 1);
        fake.auto_run(true);
        for function in ["cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuEventRecord"] {
            let case = Case::new(Kind::Stacks);
            let feed = case.builder(&search(&fake)).gather(Gather::Mapped).start().unwrap();
            let learner = learner_on(&feed, 0, fake.user_stream(1)).unwrap();
            fake.inject(function, 1, 719);
            let writer = case.write(&feed); // perhaps it ends before everything is written
            let error = loop {
                match learner.next_timeout(DEADLINE) {
                    Ok(Some(batch)) => drop(batch),
                    Ok(None) => panic!("{function}: nothing came"),
                    Err(error) => break error,
                }
            };
            let text = error.to_string();
            assert!(text.contains(function.trim_end_matches("_v2")) && text.contains("719"), "{text}");
            drop((learner, writer));
            let report = feed.stop(DEADLINE).unwrap();
            assert_eq!(report.quarantined_slots, 1, "{function}");
        }
    }
}
