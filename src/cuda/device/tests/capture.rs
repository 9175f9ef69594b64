//! While a learner captures a graph, nothing of ours spoils its capture.

use super::{assert_nothing_is_left, attached, fake};
use crate::cuda::common::Watchdog;
use crate::cuda::device::{Device, RawStream};
use std::sync::mpsc;
use std::time::Duration;

const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

#[test]
fn a_thread_of_ours_that_is_relaxed_goes_on_and_the_capture_is_intact() {
    let _watchdog = Watchdog::new("a capture beside a feeder", Duration::from_secs(60));
    let (fake, device) = attached("relaxed");
    let learner = fake.user_stream(1);
    let (begun, begins) = mpsc::channel();
    let (done, ends) = mpsc::channel();
    std::thread::scope(|s| {
        let fake = &fake;
        let capturing = s.spawn(move || {
            fake.begin_capture(learner, GLOBAL);
            begun.send(()).unwrap();
            ends.recv().unwrap();
            fake.end_capture(learner)
        });
        begins.recv().unwrap();
        device.relax_capture_mode().unwrap();
        assert_eq!(fake.capture_mode(), RELAXED);
        let (stream, event) = (device.stream(true).unwrap(), device.event().unwrap());
        let memory = device.alloc(64).unwrap();
        // SAFETY: the streams live. Nothing is copied from memory that goes.
        unsafe {
            assert!(device.is_capturing(RawStream(learner)).unwrap());
            assert!(!device.is_capturing(stream.raw()).unwrap());
            device.copy_within(memory.address(), memory.address() + 32, 32, stream.raw()).unwrap();
            device.record(&event, stream.raw()).unwrap();
            assert!(!device.query(&event).unwrap());
            device.synchronize_stream(stream.raw()).unwrap();
        }
        device.synchronize_event(&event).unwrap();
        assert!(device.query(&event).unwrap());
        drop((stream, event, memory));
        done.send(()).unwrap();
        assert!(capturing.join().unwrap(), "the capture is intact");
    });
    assert_eq!(fake.capture_mode(), RELAXED, "a drop puts back the mode that was");
}

#[test]
fn a_thread_that_is_not_relaxed_gets_900_and_spoils_it() {
    let (fake, device) = attached("not-relaxed");
    let learner = fake.user_stream(1);
    let event = device.event().unwrap();
    fake.begin_capture(learner, GLOBAL);
    std::thread::scope(|s| {
        s.spawn(|| {
            let error = device.query(&event).unwrap_err();
            assert_eq!((error.code(), error.symbol()), (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"));
            assert!(error.to_string().contains("its capture is lost"), "{error}");
        });
    });
    // SAFETY: the stream lives.
    assert!(unsafe { device.is_capturing(RawStream(learner)) }.unwrap(), "until it is ended, though lost");
    assert!(!fake.end_capture(learner));
}

#[test]
fn attaching_and_dropping_on_any_thread_leave_a_capture_intact() {
    let (fake, search) = fake("drop-captures", 1);
    let device = Device::attach(&search, 0).unwrap();
    let handles = || (device.stream(false).unwrap(), device.event().unwrap(), device.alloc(64).unwrap());
    let (mine, others) = (handles(), handles());
    let learner = fake.user_stream(1);
    fake.begin_capture(learner, GLOBAL);
    drop(mine); // the thread that captures drops a batch in the middle of it
    std::thread::scope(|s| {
        s.spawn(|| {
            drop(others);
            drop(Device::attach(&search, 0).unwrap());
            assert_eq!(fake.capture_mode(), GLOBAL);
        });
    });
    drop(device);
    assert!(fake.end_capture(learner), "the capture is intact");
    assert_eq!(fake.live_allocations(), []);
    assert_eq!((fake.live_events(), fake.live_streams().len()), (vec![], 1), "the learner's own");
    assert_eq!((fake.retained(0), fake.capture_mode()), (0, GLOBAL));
}

#[test]
fn what_a_capturing_stream_may_not_do_is_told_apart() {
    let (fake, device) = attached("told-apart");
    let (beside, ordered) = (RawStream(fake.user_stream(1)), RawStream(fake.user_stream(0)));
    let (outside, captured, stream) = (device.event().unwrap(), device.event().unwrap(), device.stream(false).unwrap());
    // SAFETY: the streams live until the end of this test.
    let capturing = |stream| unsafe { device.is_capturing(stream) }.unwrap();
    assert!(![beside, ordered, RawStream(0), RawStream(1), RawStream(2)].into_iter().any(capturing));
    // SAFETY: as above.
    unsafe { device.record(&outside, stream.raw()).unwrap() };

    fake.begin_capture(beside.0, GLOBAL);
    assert!(capturing(beside) && !capturing(ordered) && !capturing(RawStream(0)));
    // SAFETY: as above.
    let error = unsafe { device.wait(beside, &outside) }.unwrap_err();
    assert_eq!((error.code(), error.symbol()), (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"));
    assert!(error.to_string().contains("before or after the capture"), "{error}");
    assert!(!fake.end_capture(beside.0), "and it is lost: ask first");

    fake.begin_capture(beside.0, GLOBAL);
    // SAFETY: as above.
    unsafe { device.record(&captured, beside).unwrap() };
    assert_eq!(device.query(&captured).unwrap_err().code(), 907);
    assert!(!fake.end_capture(beside.0), "and it is lost");

    fake.begin_capture(ordered.0, GLOBAL);
    assert!(capturing(ordered) && capturing(RawStream(0)) && capturing(RawStream(1)) && !capturing(RawStream(2)));
    assert!(fake.end_capture(ordered.0), "asking harms nothing");
    fake.begin_capture(ordered.0, GLOBAL);
    // SAFETY: as above.
    assert_eq!(unsafe { device.record(&captured, RawStream(0)) }.unwrap_err().code(), 906);
    assert!(!fake.end_capture(ordered.0), "work in the legacy stream is lost on it");
    assert!(!capturing(ordered) && !capturing(RawStream(0)));
    drop((outside, captured, stream));
    drop(device);
    assert_eq!(fake.live_streams().len(), 2);
    assert_nothing_of_ours_is_left(&fake);
}

fn assert_nothing_of_ours_is_left(fake: &crate::cuda::common::fake::Fake) {
    assert_eq!((fake.live_events(), fake.live_allocations(), fake.retained(0)), (vec![], vec![], 0));
}

#[test]
fn without_a_capture_nothing_of_this_shows() {
    let (fake, device) = attached("no-capture");
    assert!(device.query(&device.event().unwrap()).unwrap());
    drop(device);
    assert_nothing_is_left(&fake);
}
