//! How handles end: in order, quietly, once, and also when CUDA does not cooperate.

use super::{assert_nothing_is_left, attached, fake};
use crate::cuda::common::fake::Fake;
use crate::cuda::common::{Watchdog, alone, is_child};
use crate::cuda::device::{Device, DeviceMemory, Event, Stream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::span;

fn handles(device: &Device) -> (Stream, Event, DeviceMemory) {
    (device.stream(false).unwrap(), device.event().unwrap(), device.alloc(64).unwrap())
}

#[test]
fn the_context_is_released_when_the_last_of_it_is_gone() {
    let (fake, device) = attached("last");
    let (stream, event, memory) = handles(&device);
    drop(device);
    drop(stream);
    let clone = memory.device().clone();
    drop(memory);
    assert!(clone.query(&event).unwrap());
    drop(clone);
    assert_eq!(fake.retained(0), 1);
    std::thread::spawn(move || drop(event)).join().unwrap();
    assert_nothing_is_left(&fake);
    let count = |function| fake.calls_of(function).len();
    for function in ["cuStreamDestroy_v2", "cuEventDestroy_v2", "cuMemFree_v2", "cuDevicePrimaryCtxRelease_v2"] {
        assert_eq!(count(function), 1, "{function}");
    }
    assert_eq!(fake.functions().iter().rfind(|f| !f.starts_with("cuThread")).unwrap(), "cuDevicePrimaryCtxRelease_v2");
}

/// The warnings of a call on this thread.
fn warnings(call: impl FnOnce()) -> Vec<String> {
    struct Listener(Arc<Mutex<Vec<String>>>);
    struct Text(String);
    impl Visit for Text {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            self.0 += &format!("{}={value:?} ", field.name());
        }
    }
    impl tracing::Subscriber for Listener {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            *metadata.level() <= tracing::Level::WARN
        }
        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }
        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn event(&self, event: &tracing::Event<'_>) {
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().unwrap().push(text.0);
        }
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }
    let heard = Arc::default();
    tracing::subscriber::with_default(Listener(Arc::clone(&heard)), call);
    heard.lock().unwrap().clone()
}

#[test]
fn a_failure_at_the_end_is_one_warning_and_no_panic() {
    for (function, operation) in [
        ("cuStreamDestroy_v2", "cuStreamDestroy"),
        ("cuEventDestroy_v2", "cuEventDestroy"),
        ("cuMemFree_v2", "cuMemFree"),
        ("cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease"),
    ] {
        for (code, loud) in [(1, true), (700, true), (9999, true), (4, false), (709, false)] {
            let (fake, search) = fake("end-fails", 1);
            // So that the context outlives what failed in it.
            let keeper = Device::attach(&search, 0).unwrap();
            let device = Device::attach(&search, 0).unwrap();
            let handles = handles(&device);
            fake.inject(function, 1, code);
            let heard = warnings(|| drop((handles, device)));
            assert_eq!(heard.len(), usize::from(loud), "{function} {code}: {heard:?}");
            assert!(heard.iter().all(|text| text.contains(&format!("{operation} returned {code} "))), "{heard:?}");
            assert_eq!((fake.contexts(), fake.capture_mode()), (0, 0));
            // What failed is left behind, and nothing else.
            let live = fake.live_streams().len() + fake.live_events().len() + fake.live_allocations().len();
            assert_eq!(live + fake.retained(0) as usize, 1 + 1, "{function} {code}");
            drop(keeper);
        }
    }
}

#[test]
fn a_context_that_cannot_be_entered_at_the_end_is_a_warning_too() {
    let (fake, device) = attached("end-push");
    let event = device.event().unwrap();
    fake.inject("cuCtxPushCurrent_v2", 1, 1);
    let heard = warnings(|| drop(event));
    assert!(heard.len() == 1 && heard[0].contains("cuCtxPushCurrent returned 1 "), "{heard:?}");
    assert_eq!(fake.live_events().len(), 1);
}

#[test]
fn a_capture_mode_that_cannot_be_changed_is_no_reason_to_leave_anything() {
    let (fake, device) = attached("end-mode");
    let handles = handles(&device);
    fake.inject("cuThreadExchangeStreamCaptureMode", 0, 1);
    assert_eq!(warnings(|| drop((handles, device))), [""; 0]);
    assert_nothing_is_left(&fake);
}

#[test]
fn an_error_that_stays_fails_every_call_and_lets_everything_end() {
    let (fake, device) = attached("poison");
    let (stream, event, memory) = handles(&device);
    // SAFETY: the stream lives.
    unsafe { device.record(&event, stream.raw()).unwrap() };
    fake.poison(1, 700);
    for result in [
        device.query(&event).map(drop),
        device.synchronize_event(&event),
        // SAFETY: the stream lives.
        unsafe { device.synchronize_stream(stream.raw()) },
        device.event().map(drop),
    ] {
        let error = result.unwrap_err();
        assert_eq!((error.code(), error.symbol()), (700, "CUDA_ERROR_ILLEGAL_ADDRESS"));
        assert!(error.to_string().contains("compute-sanitizer"), "{error}");
    }
    let heard = warnings(|| drop((stream, event, memory)));
    assert_eq!(heard.len(), 3, "{heard:?}");
    assert!(warnings(|| drop(device)).is_empty(), "releasing works still");
    assert_eq!((fake.contexts(), fake.retained(0)), (0, 0));
}

#[test]
fn after_a_reset_everything_answers_709_and_ends_in_silence() {
    let (fake, device) = attached("reset");
    let (stream, event, memory) = handles(&device);
    // SAFETY: the stream lives.
    unsafe { device.record(&event, stream.raw()).unwrap() };
    fake.device_reset();
    for result in [
        device.query(&event).map(drop),
        // SAFETY: the driver knows that the stream is gone.
        unsafe { device.record(&event, stream.raw()) },
        device.event().map(drop),
    ] {
        let error = result.unwrap_err();
        assert_eq!((error.code(), error.symbol()), (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"));
        assert!(error.to_string().contains("was reset by other code"), "{error}");
    }
    assert_eq!(warnings(|| drop((stream, event, memory, device))), [""; 0]);
    assert_eq!((fake.contexts(), fake.retained(0)), (0, 0));
}

#[test]
fn freed_memory_that_is_still_copied_to_is_counted_by_the_fake() {
    let _watchdog = Watchdog::new("a free that waits", Duration::from_secs(60));
    let (fake, device) = attached("in-flight");
    let (stream, memory) = (device.stream(false).unwrap(), device.alloc(64).unwrap());
    // SAFETY: a pageable source is copied at the call. That the memory goes first is what this test is about; the fake
    // lets the copy finish.
    unsafe { device.copy_in(memory.address(), [7_u8; 64].as_ptr(), 64, stream.raw()).unwrap() };
    drop(memory);
    assert_eq!(fake.hazards().freed_in_flight, 1);
    assert_eq!(fake.live_allocations(), []);
}

unsafe extern "C" {
    safe fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    safe fn _exit(status: i32) -> !;
}

/// Alone: a child of many threads might find a lock held by one that it does not have.
#[test]
fn a_forked_child_ends_its_copies_without_a_call() {
    const TEST: &str = "cuda::device::tests::ends::a_forked_child_ends_its_copies_without_a_call";
    if !is_child(TEST) {
        alone(TEST, |_| {});
        return;
    }
    let (fake, device) = attached("forked");
    let handles = handles(&device);
    let before = fake.calls().len();
    let child = fork();
    if child == 0 {
        let dropped = catch_unwind(AssertUnwindSafe(|| drop((handles, device))));
        _exit(i32::from(dropped.is_err() || fake.calls().len() != before));
    }
    assert!(child > 0, "fork: {}", std::io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: a child of ours, and an integer of ours.
    assert_eq!(unsafe { waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child called CUDA");
    drop((handles, device));
    assert_nothing_is_left(&fake);
}

/// The fake lets what is destroyed go on, as CUDA does.
#[test]
fn a_stream_that_is_dropped_finishes_what_is_in_it() {
    let (fake, device): (Fake, Device) = attached("dropped-stream");
    let (stream, event, memory) = handles(&device);
    // SAFETY: a pageable source is copied at the call; the memory outlives the run.
    unsafe {
        device.copy_in(memory.address(), [9_u8; 64].as_ptr(), 64, stream.raw()).unwrap();
        device.record(&event, stream.raw()).unwrap();
    }
    drop(stream);
    assert!(!device.query(&event).unwrap());
    assert_eq!(fake.run_all(), 2);
    assert!(device.query(&event).unwrap());
    assert_eq!(fake.device_bytes(memory.address(), 64), [9; 64]);
}
