//! The fake CUDA keeps the rules that the other tests rely on. What it has in common with a real driver is asked of
//! both in `src/cuda/device/tests/rules.rs`; here is how tests drive it.
#![cfg(target_os = "linux")]
#![allow(unsafe_code)]

mod common;

use common::fake::{self, Allocation, Fake, Hazards};
use common::{Watchdog, alone, is_child, scratch};
use libloading::os::unix::Library;
use std::sync::OnceLock;
use std::time::Duration;

/// The runtime's functions as a user of it calls them. Its pointers are only remembered by the fake, except those
/// of copies, which each test keeps alive until the stream has run.
struct Runtime(Library);

impl Runtime {
    fn of(fake: &Fake) -> Runtime {
        // SAFETY: the fake is loaded already; this only counts one more user.
        Runtime(unsafe { Library::new(fake.path()) }.expect("the fake is loaded"))
    }

    fn call(&self, name: &str, args: [usize; 5]) -> i32 {
        // SAFETY: every function called by these tests takes up to five integers or pointers and returns an int;
        // the C calling convention lets surplus integer arguments be passed.
        unsafe {
            let f = self.0.get::<unsafe extern "C" fn(usize, usize, usize, usize, usize) -> i32>(name).unwrap();
            f(args[0], args[1], args[2], args[3], args[4])
        }
    }

    fn register(&self, start: usize, bytes: usize) -> i32 {
        self.call("cudaHostRegister", [start, bytes, 3, 0, 0])
    }

    fn unregister(&self, start: usize) -> i32 {
        self.call("cudaHostUnregister", [start, 0, 0, 0, 0])
    }

    fn create(&self, what: &str) -> usize {
        let mut handle = 0_usize;
        assert_eq!(self.call(what, [(&raw mut handle).expose_provenance(), 0, 0, 0, 0]), 0);
        handle
    }
}

fn load(test: &str) -> (Fake, Runtime) {
    let fake = Fake::new(&scratch(test), "libcudart.so.13");
    let runtime = Runtime::of(&fake);
    (fake, runtime)
}

#[test]
fn registrations_follow_the_drivers_rules() {
    let (fake, rt) = load("registrations");
    assert_eq!(rt.register(0x10000, 0x1000), 0);
    assert_eq!(rt.register(0x20000, 0x1000), 0);
    for (start, bytes) in [(0x10000, 0x1000), (0x10800, 0x10), (0xf000, 0x1001), (0xf000, 0x20000), (0x10fff, 1)] {
        assert_eq!(rt.register(start, bytes), 712, "{start:x}+{bytes:x}");
    }
    assert_eq!(rt.register(0xf000, 0x1000), 0, "touching is not overlapping");
    assert_eq!(rt.register(0x30000, 0), 1);
    assert_eq!(rt.register(0, 0x1000), 1);
    assert_eq!(rt.unregister(0x10800), 1);
    assert_eq!(rt.unregister(0x50000), 713);
    assert_eq!(rt.unregister(0x10000), 0);
    assert_eq!(rt.unregister(0x10000), 713);
    let starts: Vec<usize> = fake.live_registrations().iter().map(|r| r.start).collect();
    assert_eq!(starts, [0xf000, 0x20000]);
    fake.device_reset();
    assert!(fake.live_registrations().is_empty());
    assert_eq!(rt.unregister(0x20000), 713);
}

#[test]
fn caps_refuse_one_large_range_and_too_many() {
    let (fake, rt) = load("caps");
    fake.cap(0x1000, 0x2000);
    assert_eq!(rt.register(0x10000, 0x1001), 2);
    assert_eq!(rt.register(0x10000, 0x1000), 0);
    assert_eq!(rt.register(0x20000, 0x1000), 0);
    assert_eq!(rt.register(0x30000, 1), 2);
    fake.clear_faults();
    assert_eq!(rt.register(0x30000, 0x1001), 0);
}

#[test]
fn an_injected_code_hits_the_call_it_was_meant_for_and_leaves_the_slot_set() {
    let (fake, rt) = load("inject");
    fake.inject("cudaHostRegister", 2, 712);
    assert_eq!(rt.register(0x10000, 16), 0);
    assert_eq!(rt.register(0x20000, 16), 712);
    assert_eq!(rt.register(0x20000, 16), 0, "the failed call had no effect, and only the second fails");
    assert_eq!(fake.peek_last_error(), 712);
    assert_eq!(std::thread::scope(|s| s.spawn(|| fake.peek_last_error()).join().unwrap()), 0, "one slot a thread");
    assert_eq!(rt.call("cudaPeekAtLastError", [0; 5]), 712);
    assert_eq!(rt.call("cudaGetLastError", [0; 5]), 712);
    assert_eq!(rt.call("cudaGetLastError", [0; 5]), 0);

    fake.inject("*", 2, 700);
    assert_eq!(rt.unregister(0x10000), 0);
    assert_eq!(rt.unregister(0x20000), 700);
    fake.inject("cudaFree", 0, 35);
    assert_eq!([rt.call("cudaFree", [0; 5]), rt.call("cudaFree", [0; 5])], [35, 35]);
    fake.clear_faults();
    assert_eq!(rt.call("cudaFree", [0; 5]), 0);
}

#[test]
fn the_log_says_who_called_what_and_what_is_still_running() {
    let _watchdog = Watchdog::new("a call that sleeps", Duration::from_secs(60));
    let (fake, rt) = load("log");
    fake.sleep("cudaHostRegister", 300);
    std::thread::scope(|s| {
        let slow = s.spawn(|| (fake.thread(), rt.register(0x10000, 0x2000)));
        while fake.calls().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(fake.calls()[0].code, None);
        assert_eq!(rt.call("cudaFree", [0; 5]), 0, "others go on meanwhile");
        let (thread, code) = slow.join().unwrap();
        assert_eq!(code, 0);
        let calls = fake.calls();
        assert_eq!(fake.functions(), ["cudaHostRegister", "cudaFree"]);
        assert_eq!((calls[0].sequence, calls[0].thread, calls[0].pid), (0, thread, std::process::id()));
        assert_eq!((calls[0].args, calls[0].code), ([0x10000, 0x2000, 3, 0, 0], Some(0)));
        assert_eq!((calls[1].sequence, calls[1].thread), (1, fake.thread()));
    });
}

#[test]
fn a_copy_from_registered_memory_reads_its_source_when_the_stream_runs() {
    let (fake, rt) = load("deferred");
    let stream = rt.create("cudaStreamCreateWithFlags");
    let event = rt.create("cudaEventCreateWithFlags");
    assert_eq!(rt.call("cudaEventQuery", [event, 0, 0, 0, 0]), 0, "never recorded: complete");

    let mut host = vec![1_u8; 64];
    let src = host.as_mut_ptr().expose_provenance();
    let dst = fake.user_memory(64) as usize;
    let device = || fake.device_bytes(dst as u64, 64);
    assert_eq!(rt.call("cudaMemcpyAsync", [dst, src, 64, 1, stream]), 0);
    host.fill(9);
    assert_eq!(fake.run(stream), 1);
    assert_eq!(device(), [1; 64], "the bytes of a pageable source were taken at the call");

    assert_eq!(rt.register(src, 64), 0);
    assert_eq!(rt.call("cudaMemcpyAsync", [dst, src, 65, 1, stream]), 1, "half outside the registration");
    host.fill(2);
    assert_eq!(rt.call("cudaMemcpyAsync", [dst, src, 64, 1, stream]), 0);
    assert_eq!(rt.call("cudaEventRecord", [event, stream, 0, 0, 0]), 0);
    host.fill(3);
    assert_eq!(device(), [1; 64]);
    assert_eq!(rt.call("cudaGetLastError", [0; 5]), 1);
    assert_eq!(rt.call("cudaEventQuery", [event, 0, 0, 0, 0]), 600);
    assert_eq!(fake.peek_last_error(), 600, "as on a real GPU");
    assert_eq!(fake.run(stream), 2);
    assert_eq!(device(), [3; 64], "early reuse shows up as wrong bytes");
    assert_eq!(rt.call("cudaEventQuery", [event, 0, 0, 0, 0]), 0);
}

#[test]
fn a_stream_waits_for_another_ones_event() {
    let (fake, rt) = load("wait");
    let [feeder, learner] = [(); 2].map(|()| rt.create("cudaStreamCreateWithFlags"));
    let [ready, read] = [(); 2].map(|()| rt.create("cudaEventCreateWithFlags"));
    assert_eq!(rt.call("cudaEventRecord", [ready, feeder, 0, 0, 0]), 0);
    assert_eq!(rt.call("cudaStreamWaitEvent", [learner, ready, 0, 0, 0]), 0);
    assert_eq!(rt.call("cudaEventRecord", [read, learner, 0, 0, 0]), 0);
    assert_eq!(fake.run(learner), 0, "the feeder's record has not run");
    assert_eq!(rt.call("cudaEventQuery", [read, 0, 0, 0, 0]), 600);
    assert_eq!(fake.run(feeder), 1);
    assert_eq!(fake.run(learner), 2);
    assert_eq!(rt.call("cudaEventQuery", [read, 0, 0, 0, 0]), 0);

    assert_eq!(rt.call("cudaEventRecord", [ready, feeder, 0, 0, 0]), 0);
    assert_eq!(rt.call("cudaStreamWaitEvent", [learner, ready, 0, 0, 0]), 0);
    assert_eq!(rt.call("cudaStreamSynchronize", [learner, 0, 0, 0, 0]), 0, "runs what it waits for");
    assert_eq!(rt.call("cudaEventQuery", [ready, 0, 0, 0, 0]), 0);
    fake.device_reset();
    assert_eq!(rt.call("cudaEventQuery", [ready, 0, 0, 0, 0]), 709);
    assert_eq!(rt.call("cudaStreamSynchronize", [learner, 0, 0, 0, 0]), 709);
}

#[test]
fn unregistering_first_lets_queued_copies_finish() {
    let (fake, rt) = load("unregister-waits");
    let (host, device) = (vec![7_u8; 16], fake.user_memory(16));
    fake.write_device(device, &[0; 16]);
    let src = host.as_ptr().expose_provenance();
    assert_eq!(rt.register(src, 16), 0);
    assert_eq!(rt.call("cudaMemcpyAsync", [device as usize, src, 16, 1, 0]), 0);
    assert_eq!(fake.device_bytes(device, 16), [0; 16]);
    assert_eq!(rt.unregister(src), 0);
    assert_eq!(fake.device_bytes(device, 16), [7; 16]);
    assert_eq!(fake.hazards().unregistered_in_flight, 1, "and it is counted");
    assert_eq!(fake.run(0), 0);
}

/// A stream with a copy of 16 bytes from locked memory and a record behind it.
struct Queued {
    stream: usize,
    event: usize,
    device: u64,
    host: Vec<u8>,
}

fn queued(fake: &Fake, rt: &Runtime, value: u8) -> Queued {
    let (stream, event, device) = (fake.user_stream(1), rt.create("cudaEventCreateWithFlags"), fake.user_memory(16));
    fake.write_device(device, &[0; 16]);
    let host = vec![value; 16];
    let src = host.as_ptr().expose_provenance();
    assert_eq!(rt.register(src, 16), 0);
    assert_eq!(rt.call("cudaMemcpyAsync", [device as usize, src, 16, 1, stream]), 0);
    assert_eq!(rt.call("cudaEventRecord", [event, stream, 0, 0, 0]), 0);
    Queued { stream, event, device, host }
}

fn query(rt: &Runtime, event: usize) -> i32 {
    rt.call("cudaEventQuery", [event, 0, 0, 0, 0])
}

#[test]
fn a_stream_runs_whole_in_part_or_with_all_others() {
    let (fake, rt) = load("run");
    let (a, b) = (queued(&fake, &rt, 1), queued(&fake, &rt, 2));
    assert_eq!(
        fake.live_streams().iter().map(|s| (s.handle, s.queued)).collect::<Vec<_>>(),
        [(a.stream, 2), (b.stream, 2)]
    );
    assert_eq!(fake.run_some(a.stream, 1), 1);
    assert_eq!(
        (fake.device_bytes(a.device, 16), query(&rt, a.event)),
        (a.host.clone(), 600),
        "the copy, not the record"
    );
    assert_eq!(fake.device_bytes(b.device, 16), [0; 16]);
    // The first waits for the second one's event, and goes on in the same run of all.
    assert_eq!(rt.call("cudaStreamWaitEvent", [a.stream, b.event, 0, 0, 0]), 0);
    let last = rt.create("cudaEventCreateWithFlags");
    assert_eq!(rt.call("cudaEventRecord", [last, a.stream, 0, 0, 0]), 0);
    assert_eq!(fake.run(a.stream), 1);
    assert_eq!([query(&rt, a.event), query(&rt, last)], [0, 600]);
    assert_eq!(fake.run_all(), 4);
    assert_eq!([query(&rt, b.event), query(&rt, last)], [0, 0]);
    assert_eq!(fake.device_bytes(b.device, 16), b.host);
    assert_eq!(fake.run_all(), 0);
}

#[test]
fn a_held_stream_runs_for_nobody_and_holds_up_who_waits_for_it() {
    let _watchdog = Watchdog::new("a held stream", Duration::from_secs(60));
    let (fake, rt) = load("hold");
    let (a, b) = (queued(&fake, &rt, 1), queued(&fake, &rt, 2));
    fake.hold(a.stream, true);
    assert!(fake.live_streams()[0].held);
    assert_eq!([fake.run(a.stream), fake.run_all()], [0, 2], "only the other one");
    assert_eq!([query(&rt, a.event), query(&rt, b.event)], [600, 0]);
    let start = a.host.as_ptr().expose_provenance();
    std::thread::scope(|s| {
        let waits = [
            s.spawn(|| rt.call("cudaStreamSynchronize", [a.stream, 0, 0, 0, 0])),
            s.spawn(|| rt.call("cudaEventSynchronize", [a.event, 0, 0, 0, 0])),
            s.spawn(|| rt.unregister(start)),
        ];
        let running = || fake.calls().iter().filter(|call| call.code.is_none()).count();
        while running() < waits.len() {
            std::thread::yield_now();
        }
        assert_eq!(query(&rt, a.event), 600, "others are not held up");
        assert!(fake.live_registrations().iter().any(|r| r.start == start));
        fake.hold(a.stream, false);
        assert_eq!(waits.map(|wait| wait.join().unwrap()), [0; 3]);
    });
    assert_eq!(fake.device_bytes(a.device, 16), [1; 16]);
    assert!(fake.live_registrations().iter().all(|r| r.start != start));
    assert_eq!(fake.hazards(), Hazards { unregistered_in_flight: 1, ..Hazards::default() });
}

#[test]
fn an_error_that_stays_frees_who_waits() {
    let _watchdog = Watchdog::new("a wait that fails", Duration::from_secs(60));
    let (fake, rt) = load("poison");
    let a = queued(&fake, &rt, 1);
    fake.hold(a.stream, true);
    std::thread::scope(|s| {
        let wait = s.spawn(|| rt.call("cudaStreamSynchronize", [a.stream, 0, 0, 0, 0]));
        while !fake.calls().iter().any(|call| call.code.is_none()) {
            std::thread::yield_now();
        }
        fake.poison(2, 700);
        assert_eq!(query(&rt, a.event), 600, "from the second call on");
        assert_eq!(query(&rt, a.event), 700);
        assert_eq!(wait.join().unwrap(), 700);
    });
    fake.hold(a.stream, false);
    assert_eq!([fake.run(a.stream), fake.run_all()], [0, 0], "nothing runs any more");
    fake.clear_faults();
    assert_eq!(fake.run(a.stream), 2);
}

#[test]
fn work_completes_by_itself_in_auto_run_mode() {
    let _watchdog = Watchdog::new("auto-run", Duration::from_secs(60));
    let (fake, rt) = load("auto");
    fake.auto_run(true);
    let a = queued(&fake, &rt, 1);
    while fake.device_bytes(a.device, 16) != a.host {
        std::thread::yield_now(); // no call of CUDA's drives it
    }
    // Far off: a query does not hurry it, nor does a wait; a run by hand does.
    fake.auto_run_after(Some(Duration::from_secs(1000)));
    let b = queued(&fake, &rt, 2);
    assert_eq!(query(&rt, b.event), 600);
    assert_eq!(fake.run(b.stream), 2);
    // Soon: the wait ends when it is time.
    fake.auto_run_after(Some(Duration::from_millis(30)));
    let c = queued(&fake, &rt, 3);
    let begun = std::time::Instant::now();
    assert_eq!(rt.call("cudaEventSynchronize", [c.event, 0, 0, 0, 0]), 0);
    assert!(begun.elapsed() >= Duration::from_millis(25), "{:?}", begun.elapsed());
    assert_eq!(fake.device_bytes(c.device, 16), c.host);
    // A held stream is held in this mode too.
    fake.auto_run(true);
    let d = queued(&fake, &rt, 4);
    fake.hold(d.stream, true);
    let e = queued(&fake, &rt, 5);
    while query(&rt, e.event) != 0 {
        std::thread::yield_now();
    }
    fake.auto_run(false);
    let f = queued(&fake, &rt, 6);
    assert_eq!([query(&rt, f.event), query(&rt, f.event)], [600, 600], "by itself no longer");
}

#[test]
fn each_thread_has_its_contexts_and_its_default_streams() {
    let (fake, rt) = load("threads");
    fake.devices(2);
    assert_eq!((fake.current_device(), fake.contexts()), (None, 0));
    assert_eq!(rt.call("cuEventQuery", [1, 0, 0, 0, 0]), 201, "the driver makes none");
    let memory = fake.user_memory(16);
    assert_eq!(fake.current_device(), Some(0), "the runtime does");
    fake.set_device(1);
    let other = fake.user_memory(32);
    let device = |at: usize| fake.live_allocations()[at].device;
    assert_eq!((fake.current_device(), fake.live_allocations().len()), (Some(1), 2));
    let whose =
        |address| fake.live_allocations().into_iter().find(|a: &Allocation| a.address == address).unwrap().device;
    assert_eq!((whose(memory), whose(other)), (0, 1));
    assert_eq!(device(0) + device(1), 1);

    let mut context = 0_usize;
    let out = (&raw mut context).expose_provenance();
    assert_eq!(rt.call("cuDevicePrimaryCtxRetain", [out, 0, 0, 0, 0]), 0);
    assert_eq!(rt.call("cuCtxPushCurrent_v2", [context, 0, 0, 0, 0]), 0);
    assert_eq!((fake.current_device(), fake.contexts()), (Some(0), 1));
    assert_eq!(rt.call("cudaPeekAtLastError", [0; 5]), 0);
    assert_eq!(fake.calls().last().unwrap().device, Some(0));
    assert_eq!(rt.call("cuCtxPopCurrent_v2", [out, 0, 0, 0, 0]), 0);
    assert_eq!((fake.current_device(), fake.contexts()), (Some(1), 0));
    assert_eq!(fake.calls().last().unwrap().device, Some(0), "what was current when the call began");

    // Stream 2 is the thread's own, 0 and 1 are everybody's, and wait for what every blocking stream has queued before.
    fake.set_device(0);
    let events = [(); 2].map(|()| rt.create("cudaEventCreateWithFlags"));
    assert_eq!(rt.call("cudaEventRecord", [events[1], 1, 0, 0, 0]), 0);
    assert_eq!(rt.call("cudaEventRecord", [events[0], 2, 0, 0, 0]), 0);
    std::thread::scope(|s| {
        s.spawn(|| {
            assert_eq!(fake.current_device(), None);
            assert_eq!([fake.run(2), fake.run(0)], [0, 1]);
        });
    });
    assert_eq!([query(&rt, events[0]), query(&rt, events[1])], [600, 0]);
    assert_eq!(fake.run(2), 1);
    fake.devices(1);
    assert_eq!(rt.call("cudaSetDevice", [1, 0, 0, 0, 0]), 101);
}

#[test]
fn copies_out_to_pageable_memory_end_with_the_call_and_ranges_are_checked() {
    let (fake, rt) = load("copies");
    let (device, stream) = (fake.user_memory(16), fake.user_stream(1));
    assert_eq!(fake.device_bytes(device, 2), [0xCD; 2], "fresh memory is not zero");
    fake.write_device(device, &[8; 16]);
    let mut host = [0_u8; 16];
    let dst = host.as_mut_ptr().expose_provenance();
    assert_eq!(rt.call("cudaMemcpyAsync", [dst, device as usize, 16, 2, stream]), 0);
    assert_eq!(host, [8; 16]);
    for (to, from, kind) in [(dst, dst, 1), (dst, dst, 2), (device as usize + 8, device as usize, 3), (dst, dst, 3)] {
        assert_eq!(rt.call("cudaMemcpyAsync", [to, from, 16, kind, stream]), 1, "{kind}");
    }
    assert_eq!(fake.hazards().out_of_range, 4);
    assert_eq!(rt.call("cudaFree", [device as usize, 0, 0, 0, 0]), 0);
    assert_eq!(rt.call("cudaFree", [device as usize, 0, 0, 0, 0]), 1);
    assert!(fake.live_allocations().is_empty());
}

#[test]
fn a_waiting_stream_joins_a_capture_and_leaves_it_at_its_end() {
    let (fake, rt) = load("joins");
    let (origin, joined, event) = (fake.user_stream(1), fake.user_stream(1), rt.create("cudaEventCreateWithFlags"));
    let status = |stream| {
        let mut status = 7_i32;
        let out = (&raw mut status).expose_provenance();
        assert_eq!(rt.call("cuStreamIsCapturing", [stream, out, 0, 0, 0]), 0);
        status
    };
    fake.begin_capture(origin, 0);
    assert_eq!(rt.call("cudaEventRecord", [event, origin, 0, 0, 0]), 0);
    assert_eq!(rt.call("cudaStreamWaitEvent", [joined, event, 0, 0, 0]), 0);
    assert_eq!([status(origin), status(joined)], [1, 1]);
    assert!(fake.end_capture(origin));
    assert_eq!([status(origin), status(joined)], [0, 0]);
    fake.begin_capture(origin, 0);
    assert_eq!(query(&rt, rt.create("cudaEventCreateWithFlags")), 900);
    assert_eq!(status(origin), 2);
    let late =
        std::thread::scope(|s| s.spawn(|| rt.call("cudaStreamEndCapture", [origin, 0, 0, 0, 0])).join().unwrap());
    assert_eq!(late, 908, "by the thread that began it");
    assert!(!fake.end_capture(origin));
    assert_eq!(fake.run_all(), 0, "what is captured does not run");
}

#[test]
fn two_copies_share_nothing() {
    let dir = scratch("two-copies");
    let (a, b) = (Fake::new(&dir, "libcudart.so.12"), Fake::new(&dir, "libcudart.so.13"));
    let (ra, rb) = (Runtime::of(&a), Runtime::of(&b));
    assert_eq!(ra.register(0x10000, 16), 0);
    assert_eq!(ra.register(0x10000, 16), 712);
    assert_eq!((a.peek_last_error(), b.peek_last_error()), (712, 0));
    assert_eq!((a.calls().len(), b.calls().len()), (2, 0));
    assert_eq!(rb.register(0x10000, 16), 0, "as the fake has it; real runtimes share the driver's registrations");
}

#[test]
fn broken_copies_are_broken_in_the_way_they_say() {
    let dir = scratch("broken");
    let lacking = fake::place_without(&dir, "libcudart.so.12", "cudaHostGetFlags");
    // SAFETY: the fake runs no code when loaded; the symbols are only looked up.
    unsafe {
        let library = Library::new(&lacking).unwrap();
        assert!(library.get::<*const u8>("cudaHostGetFlags").is_err());
        assert!(library.get::<*const u8>("cudaHostRegister").is_ok());
        assert!(Library::new(fake::place_wrong_class(&dir, "libcudart.so.13")).is_err());
    }
}

unsafe extern "C" {
    safe fn atexit(hook: extern "C" fn()) -> i32;
}

#[test]
fn after_the_exit_hooks_every_call_answers_4() {
    static LATE: OnceLock<(Fake, Runtime)> = OnceLock::new();
    extern "C" fn late() {
        if let Some((_, rt)) = LATE.get() {
            rt.unregister(0x10000);
        }
    }
    if is_child("after_the_exit_hooks_every_call_answers_4") {
        // Hooks run last in, first out: ours is registered before the fake's, so it runs after it.
        assert_eq!(atexit(late), 0);
        let (fake, rt) = load("exit");
        fake.log_file(std::env::var_os("LOG").expect("the parent says where").as_ref());
        assert_eq!(rt.register(0x10000, 16), 0);
        assert!(LATE.set((fake, rt)).is_ok());
        return;
    }
    let log = scratch("exit-log").join("log");
    alone("after_the_exit_hooks_every_call_answers_4", |child| {
        child.env("LOG", &log);
    });
    let text = std::fs::read_to_string(log).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines[0].contains("cudaHostRegister") && lines[0].ends_with("-> 0"), "{text}");
    assert_eq!(lines[1], "exit-hook");
    assert!(lines[2].contains("cudaHostUnregister") && lines[2].ends_with("-> 4"), "{text}");
}
