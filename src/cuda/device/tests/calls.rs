//! The calls one by one: what they do, with which context, and how each fails.

use super::{Locked, assert_nothing_is_left, attached, fake};
use crate::cuda::common::Watchdog;
use crate::cuda::common::fake::Hazards;
use crate::cuda::device::{Device, Event, RawStream, Stream};
use crate::cuda::types::CudaError;
use std::time::Duration;

const BYTES: usize = 4096;

#[test]
fn bytes_go_there_and_back_in_the_order_that_events_give() {
    let (fake, device) = attached("there-and-back");
    let (feeder, learner) = (device.stream(true).unwrap(), device.stream(false).unwrap());
    let events = [(); 3].map(|()| device.event().unwrap());
    let [ready, read, back] = &events;
    let (first, second) = (device.alloc(BYTES).unwrap(), device.alloc(BYTES).unwrap());
    let mut host = Locked::new(&fake, (0..2 * BYTES).map(|i| (i / 3) as u8).collect());
    let (source, sink) = (host.at(0), host.at(BYTES));
    // SAFETY: host, device memory and streams outlive the run below, and nobody touches them meanwhile but to show when
    // bytes are read.
    unsafe {
        device.copy_in(first.address(), source, BYTES, feeder.raw()).unwrap();
        device.record(ready, feeder.raw()).unwrap();
        device.wait(learner.raw(), ready).unwrap();
        device.copy_within(second.address(), first.address(), BYTES, learner.raw()).unwrap();
        device.record(read, learner.raw()).unwrap();
        device.wait(feeder.raw(), read).unwrap();
        device.copy_out(sink, second.address(), BYTES, feeder.raw()).unwrap();
        device.record(back, feeder.raw()).unwrap();
    }
    assert!(events.iter().all(|event| !device.query(event).unwrap()));
    assert_eq!(fake.run(learner.raw().0), 0, "it waits for the feeder");
    host.bytes[0] = 77; // before the copy has run: it reads this
    assert_eq!(fake.run(feeder.raw().0), 2);
    assert_eq!([ready, read, back].map(|event| device.query(event).unwrap()), [true, false, false]);
    host.bytes[1] = 78; // after it has: it does not
    assert_eq!(fake.run_all(), 6);
    assert!(events.iter().all(|event| device.query(event).unwrap()));
    let mut expected: Vec<u8> = (0..BYTES).map(|i| (i / 3) as u8).collect();
    expected[0] = 77;
    assert_eq!(host.bytes[BYTES..], expected);
    assert_eq!(fake.device_bytes(second.address(), BYTES), expected);

    let stream = |at: usize| fake.live_streams()[at];
    assert_eq!((stream(0).handle, stream(0).flags, stream(0).priority), (feeder.raw().0, 1, 0), "non-blocking");
    assert_eq!((stream(1).handle, stream(1).flags, stream(1).priority), (learner.raw().0, 1, 0));
    assert!(fake.live_events().iter().all(|event| event.flags == 3), "no timing, and waits that sleep");
    assert_eq!(second.bytes(), BYTES);
    drop((feeder, learner, events, first, second, host, device));
    assert_nothing_is_left(&fake);
}

#[test]
fn waits_of_the_host_end_when_the_work_has_completed() {
    let _watchdog = Watchdog::new("waits of the host", Duration::from_secs(60));
    let (fake, device) = attached("host-waits");
    let (stream, event) = (device.stream(false).unwrap(), device.event().unwrap());
    let memory = device.alloc(BYTES).unwrap();
    let mut host = Locked::new(&fake, vec![5; BYTES]);
    let source = host.at(0);
    fake.hold(stream.raw().0, true);
    // SAFETY: memory, host and stream outlive both waits.
    unsafe {
        device.copy_in(memory.address(), source, BYTES, stream.raw()).unwrap();
        device.record(&event, stream.raw()).unwrap();
    }
    std::thread::scope(|s| {
        let waits = [
            s.spawn(|| device.synchronize_event(&event)),
            // SAFETY: the stream outlives the wait.
            s.spawn(|| unsafe { device.synchronize_stream(stream.raw()) }),
        ];
        let waiting = |function| fake.calls_of(function).first().is_some_and(|call| call.code.is_none());
        while !(waiting("cuEventSynchronize") && waiting("cuStreamSynchronize")) {
            std::thread::yield_now();
        }
        assert!(!device.query(&event).unwrap() && waits.iter().all(|wait| !wait.is_finished()));
        fake.hold(stream.raw().0, false);
        waits.into_iter().for_each(|wait| wait.join().unwrap().unwrap());
    });
    assert!(device.query(&event).unwrap());
    assert_eq!(fake.device_bytes(memory.address(), BYTES), [5; BYTES]);
}

#[test]
fn every_call_is_made_in_the_devices_context_and_the_threads_own_comes_back() {
    let (fake, search) = fake("context", 2);
    fake.set_device(1);
    let (device, raw) = (Device::attach(&search, 0).unwrap(), RawStream(0));
    let mut host = Locked::new(&fake, vec![1; BYTES]);
    let source = host.at(0);
    let before = fake.calls().len();
    let (stream, event, memory) = (device.stream(true).unwrap(), device.event().unwrap(), device.alloc(64).unwrap());
    // SAFETY: everything outlives the synchronising of both streams.
    unsafe {
        for stream in [raw, stream.raw()] {
            device.copy_in(memory.address(), source, 64, stream).unwrap();
            device.copy_within(memory.address(), memory.address(), 0, stream).unwrap();
            device.copy_out(source, memory.address(), 64, stream).unwrap();
            device.record(&event, stream).unwrap();
            device.wait(stream, &event).unwrap();
            device.synchronize_stream(stream).unwrap();
            assert!(!device.is_capturing(stream).unwrap());
        }
    }
    assert!(device.query(&event).unwrap());
    device.synchronize_event(&event).unwrap();
    device.relax_capture_mode().unwrap();
    drop((stream, event, memory));
    assert_eq!(fake.current_device(), Some(1));
    let made = fake.calls().split_off(before);
    let stack = |function: &str| function.starts_with("cuCtx") && function != "cuCtxGetStreamPriorityRange";
    // The relaxed mode around a drop is the thread's, and needs no context.
    let inside: Vec<_> =
        made.iter().filter(|call| !stack(&call.function) && !call.function.starts_with("cuThread")).collect();
    assert!(inside.len() > 18 && inside.iter().all(|call| call.device == Some(0)), "{inside:?}");
    let count = |function: &str| made.iter().filter(|call| call.function == function).count();
    assert_eq!(count("cuCtxPushCurrent_v2"), count("cuCtxPopCurrent_v2"));

    // Where the context is current already, as on most learners' threads, it is not pushed.
    fake.set_device(0);
    let before = fake.calls().len();
    let event = device.event().unwrap();
    assert_eq!(fake.functions()[before..], ["cuCtxGetCurrent", "cuEventCreate"]);
    drop(event);
    // A thread without any has none afterwards.
    std::thread::scope(|s| {
        s.spawn(|| {
            device.event().unwrap();
            assert_eq!((fake.current_device(), fake.contexts()), (None, 0));
            device.select().unwrap();
            device.event().unwrap();
            assert_eq!((fake.current_device(), fake.contexts()), (Some(0), 1));
        });
    });
}

/// One call of the table.
type Call<'a> = (&'a str, &'a str, &'a dyn Fn(&Device, &Stream, &Event) -> Result<(), CudaError>);

#[test]
fn each_call_may_fail_with_its_name_code_and_the_drivers_symbol() {
    let (fake, device) = attached("calls-fail");
    let (stream, event) = (device.stream(false).unwrap(), device.event().unwrap());
    let memory = device.alloc(64).unwrap();
    let mut host = Locked::new(&fake, vec![1; 64]);
    let (address, host) = (memory.address(), host.at(0));
    // SAFETY (of all below): the stream lives, and what is copied is never run or lives until the end.
    let calls: [Call<'_>; 14] = [
        ("cuThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode", &|d, _, _| d.relax_capture_mode()),
        ("cuCtxGetStreamPriorityRange", "cuCtxGetStreamPriorityRange", &|d, _, _| d.stream(true).map(drop)),
        ("cuStreamCreateWithPriority", "cuStreamCreateWithPriority", &|d, _, _| d.stream(true).map(drop)),
        ("cuEventCreate", "cuEventCreate", &|d, _, _| d.event().map(drop)),
        ("cuMemAlloc_v2", "cuMemAlloc", &|d, _, _| d.alloc(64).map(drop)),
        // SAFETY: as above.
        ("cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync", &|d, s, _| unsafe { d.copy_in(address, host, 64, s.raw()) }),
        // SAFETY: as above.
        ("cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync", &|d, s, _| unsafe { d.copy_out(host, address, 64, s.raw()) }),
        // SAFETY: as above.
        ("cuMemcpyDtoDAsync_v2", "cuMemcpyDtoDAsync", &|d, s, _| unsafe {
            d.copy_within(address, address, 8, s.raw())
        }),
        // SAFETY: as above.
        ("cuEventRecord", "cuEventRecord", &|d, s, e| unsafe { d.record(e, s.raw()) }),
        // SAFETY: as above.
        ("cuStreamWaitEvent", "cuStreamWaitEvent", &|d, s, e| unsafe { d.wait(s.raw(), e) }),
        ("cuEventQuery", "cuEventQuery", &|d, _, e| d.query(e).map(drop)),
        ("cuEventSynchronize", "cuEventSynchronize", &|d, _, e| d.synchronize_event(e)),
        // SAFETY: as above.
        ("cuStreamSynchronize", "cuStreamSynchronize", &|d, s, _| unsafe { d.synchronize_stream(s.raw()) }),
        // SAFETY: as above.
        ("cuStreamIsCapturing", "cuStreamIsCapturing", &|d, s, _| unsafe { d.is_capturing(s.raw()).map(drop) }),
    ];
    let live = || (fake.live_streams().len(), fake.live_events().len(), fake.live_allocations().len());
    let whole = live();
    for (function, operation, call) in calls {
        for (code, symbol) in [
            (1, "CUDA_ERROR_INVALID_VALUE"),
            (2, "CUDA_ERROR_OUT_OF_MEMORY"),
            (4, "CUDA_ERROR_DEINITIALIZED"),
            (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
            (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"),
            (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
            (9999, "unknown to this driver"),
        ] {
            fake.inject(function, 1, code);
            let error = call(&device, &stream, &event).unwrap_err();
            assert_eq!((error.operation(), error.code(), error.symbol()), (operation, code, symbol));
            assert_eq!((fake.contexts(), live()), (0, whole));
        }
        // The context cannot be made current: the call is not made.
        fake.inject("cuCtxPushCurrent_v2", 1, 709);
        let made = fake.calls_of(function).len();
        let error = call(&device, &stream, &event).unwrap_err();
        assert_eq!((error.operation(), error.code()), ("cuCtxPushCurrent", 709));
        assert_eq!(fake.calls_of(function).len(), made);
        // What is current cannot be asked: then it is pushed.
        fake.inject("cuCtxGetCurrent", 1, 700);
        call(&device, &stream, &event).unwrap();
        assert_eq!((fake.contexts(), live()), (0, whole));
    }
    let text = {
        fake.inject("cuMemAlloc_v2", 1, 2);
        device.alloc(64).unwrap_err().to_string()
    };
    assert!(text.contains("the device's memory is taken") && !text.contains("page-lock"), "{text}");
}

#[test]
fn a_context_that_cannot_be_popped_does_not_hide_what_the_call_did() {
    let (fake, device) = attached("pop");
    fake.inject("cuCtxPopCurrent_v2", 1, 1);
    let event = device.event().unwrap();
    assert_eq!((fake.live_events().len(), fake.contexts()), (1, 1));
    drop(event);
    assert_eq!(fake.live_events(), []);
}

/// What an event says is not what has happened.
#[test]
fn an_event_whose_record_failed_reads_complete_while_the_copy_is_pending() {
    let (fake, device) = attached("record-fails");
    let (stream, event, memory) = (device.stream(false).unwrap(), device.event().unwrap(), device.alloc(64).unwrap());
    fake.write_device(memory.address(), &[0; 64]);
    let mut host = Locked::new(&fake, vec![3; 64]);
    let source = host.at(0);
    // SAFETY: memory and host outlive the run below.
    unsafe {
        device.copy_in(memory.address(), source, 64, stream.raw()).unwrap();
        fake.inject("cuEventRecord", 1, 1);
        assert_eq!(device.record(&event, stream.raw()).unwrap_err().code(), 1);
    }
    assert!(device.query(&event).unwrap(), "so say the fake and the hardware alike: our own state must not ask here");
    device.synchronize_event(&event).unwrap();
    assert_eq!(fake.device_bytes(memory.address(), 64), [0; 64], "and the copy has not run");
    // SAFETY: the stream lives. This is what tells.
    unsafe { device.synchronize_stream(stream.raw()).unwrap() };
    assert_eq!(fake.device_bytes(memory.address(), 64), [3; 64]);
}

/// 600 is an answer, and leaves no trace where a framework would find it.
#[test]
fn a_pending_event_is_no_error_and_the_runtimes_slot_stays_as_it_was() {
    let (fake, device) = attached("pending");
    let (stream, event) = (device.stream(false).unwrap(), device.event().unwrap());
    // SAFETY: the stream lives.
    unsafe { device.record(&event, stream.raw()).unwrap() };
    assert!((0..50).all(|_| !device.query(&event).unwrap()));
    assert_eq!(fake.peek_last_error(), 0);
    fake.set_last_error(7);
    fake.inject("cuEventQuery", 1, 700);
    device.query(&event).unwrap_err();
    assert_eq!(fake.peek_last_error(), 7, "nor does an error of ours touch another's");
}

/// Events belong to one device.
#[test]
fn an_event_of_another_device_is_refused() {
    let (fake, search) = fake("other-device", 2);
    let [zero, one] = [0, 1].map(|ordinal| Device::attach(&search, ordinal).unwrap());
    let (event, stream) = (zero.event().unwrap(), one.stream(false).unwrap());
    let recorded = std::panic::catch_unwind(|| {
        // SAFETY: the stream lives.
        unsafe { one.record(&event, stream.raw()) }
    });
    match recorded {
        // A mistake of ours, found where there are debug assertions.
        Err(panic) => {
            let text = panic.downcast::<String>().unwrap();
            assert!(cfg!(debug_assertions) && text.contains("Fake GPU 0") && text.contains("Fake GPU 1"), "{text}");
        }
        Ok(refused) => assert_eq!((cfg!(debug_assertions), refused.unwrap_err().code()), (false, 400)),
    }
    // SAFETY: the stream lives. Its own device is as good as the event's for the driver to see it.
    let refused = unsafe { zero.record(&event, stream.raw()) };
    assert_eq!(refused.unwrap_err().code(), 400, "a stream carries no device here; the driver knows it");
    assert!(fake.live_events().iter().all(|event| event.recorded == 0));
}

#[test]
fn ranges_that_are_not_wholly_ours_are_refused_by_the_driver() {
    let (fake, device) = attached("ranges");
    let (stream, memory) = (device.stream(false).unwrap(), device.alloc(64).unwrap());
    let mut host = Locked::new(&fake, vec![1; 128]);
    let (source, address, raw) = (host.at(0), memory.address(), stream.raw());
    let code = |result: Result<(), CudaError>| result.unwrap_err().code();
    // SAFETY: the driver refuses each of these, so that nothing is read or written.
    unsafe {
        assert_eq!(code(device.copy_in(address, source, 65, raw)), 1, "beyond the device memory");
        assert_eq!(code(device.copy_in(address - 1, source, 8, raw)), 1);
        assert_eq!(code(device.copy_within(address, address + 60, 8, raw)), 1);
        assert_eq!(code(device.copy_out(source, 8, 8, raw)), 1);
        assert_eq!(code(device.copy_in(address, source.wrapping_add(100), 64, raw)), 1, "beyond the locked memory");
        // A stream that is none.
        assert_eq!(code(device.copy_in(address, source, 8, RawStream(0x7777))), 400);
    }
    assert_eq!(fake.hazards(), Hazards { out_of_range: 4, ..Hazards::default() });
    let before = fake.calls().len();
    let error = device.alloc(0).unwrap_err();
    assert_eq!((error.operation(), error.code(), error.symbol()), ("cuMemAlloc", 1, "CUDA_ERROR_INVALID_VALUE"));
    assert!(error.to_string().contains("zero bytes"), "{error}");
    assert_eq!(fake.calls().len(), before, "without a call");
    assert_eq!(device.alloc(usize::MAX).unwrap_err().code(), 2);
}
