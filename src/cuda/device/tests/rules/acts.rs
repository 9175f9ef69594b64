//! The calls that are made while a stream captures.

use super::{Act, BYTES, Caller, GLOBAL, World};

fn nothing(_: &World<'_>) -> usize {
    0
}

fn leave(_: &World<'_>, _: usize) {}

/// Calls that are part of how the crate works with a device while somebody else captures.
pub(super) const ACTS: [Act; 20] = [
    Act {
        name: "query of an event",
        before: nothing,
        act: |w, _| w.raw.call("cuEventQuery", &[w.recorded]),
        after: leave,
    },
    Act {
        name: "wait of the host for an event",
        before: nothing,
        act: |w, _| w.raw.call("cuEventSynchronize", &[w.recorded]),
        after: leave,
    },
    Act {
        name: "wait of the host for a stream",
        before: nothing,
        act: |w, _| w.raw.call("cuStreamSynchronize", &[w.other]),
        after: leave,
    },
    Act {
        name: "query of a stream",
        before: nothing,
        act: |w, _| w.raw.call("cuStreamQuery", &[w.other]),
        after: leave,
    },
    Act {
        name: "allocating and freeing",
        before: nothing,
        act: |w, _| w.raw.made("cuMemAlloc_v2", &[BYTES]).map_or_else(|e| e, |at| w.raw.call("cuMemFree_v2", &[at])),
        after: leave,
    },
    Act {
        name: "freeing",
        before: |w| w.raw.made("cuMemAlloc_v2", &[BYTES]).unwrap(),
        act: |w, at| w.raw.call("cuMemFree_v2", &[at]),
        after: |w, at| {
            w.raw.call("cuMemFree_v2", &[at]);
        },
    },
    Act {
        name: "registering",
        before: nothing,
        act: |w, _| w.register(w.pageable, BYTES),
        after: |w, _| {
            w.unregister(w.pageable);
        },
    },
    Act {
        name: "unregistering",
        before: |w| w.register(w.pageable, BYTES) as usize,
        act: |w, _| w.unregister(w.pageable),
        after: |w, _| {
            w.unregister(w.pageable);
        },
    },
    Act {
        name: "creating and destroying an event",
        before: nothing,
        act: |w, _| w.raw.made("cuEventCreate", &[3]).map_or_else(|e| e, |e| w.raw.call("cuEventDestroy_v2", &[e])),
        after: leave,
    },
    Act {
        name: "creating a stream",
        before: nothing,
        act: |w, _| w.raw.made("cuStreamCreateWithPriority", &[1, 0]).map_or_else(|e| e, |_| 0),
        after: leave,
    },
    Act {
        name: "destroying a stream",
        before: |w| w.raw.made("cuStreamCreateWithPriority", &[1, 0]).unwrap(),
        act: |w, stream| w.raw.call("cuStreamDestroy_v2", &[stream]),
        after: leave,
    },
    Act {
        name: "copy in from locked memory",
        before: nothing,
        act: |w, _| w.raw.call("cuMemcpyHtoDAsync_v2", &[w.device, w.locked, 64, w.other]),
        after: leave,
    },
    Act {
        name: "copy in from pageable memory",
        before: nothing,
        act: |w, _| w.raw.call("cuMemcpyHtoDAsync_v2", &[w.device, w.pageable, 64, w.other]),
        after: leave,
    },
    Act {
        name: "copy out to locked memory",
        before: nothing,
        act: |w, _| w.raw.call("cuMemcpyDtoHAsync_v2", &[w.locked, w.device, 64, w.other]),
        after: leave,
    },
    Act {
        name: "copy within",
        before: nothing,
        act: |w, _| w.raw.call("cuMemcpyDtoDAsync_v2", &[w.device + 4096, w.device, 64, w.other]),
        after: leave,
    },
    Act {
        name: "record in another stream",
        before: nothing,
        act: |w, _| w.raw.call("cuEventRecord", &[w.recorded, w.other]),
        after: leave,
    },
    Act {
        name: "wait of another stream",
        before: nothing,
        act: |w, _| w.raw.call("cuStreamWaitEvent", &[w.other, w.recorded, 0]),
        after: leave,
    },
    Act {
        name: "capturing? of the stream",
        before: nothing,
        act: |w, _| i32::from(w.status(w.capturing) != "status 1"),
        after: leave,
    },
    Act {
        name: "the address of locked memory",
        before: nothing,
        act: |w, _| w.raw.made("cuMemHostGetDevicePointer_v2", &[w.locked, 0]).map_or_else(|e| e, |_| 0),
        after: leave,
    },
    Act {
        name: "retaining and releasing the context",
        before: nothing,
        act: |w, _| match w.raw.made("cuDevicePrimaryCtxRetain", &[0]) {
            Ok(_) => w.raw.call("cuDevicePrimaryCtxRelease_v2", &[0]),
            Err(code) => code,
        },
        after: leave,
    },
];

/// Calls of the thread that captures, on the stream that does or on what belongs to it.
pub(super) const INSIDE: [Act; 14] = [
    Act {
        name: "wait for an outside event",
        before: nothing,
        act: |w, _| w.raw.call("cuStreamWaitEvent", &[w.capturing, w.recorded, 0]),
        after: leave,
    },
    Act {
        name: "wait for an event that was never recorded",
        before: nothing,
        act: |w, _| w.raw.call("cuStreamWaitEvent", &[w.capturing, w.never, 0]),
        after: leave,
    },
    Act {
        name: "record",
        before: |w| w.raw.made("cuEventCreate", &[3]).unwrap(),
        act: |w, event| w.raw.call("cuEventRecord", &[event, w.capturing]),
        after: leave,
    },
    Act {
        name: "record, then query of that event",
        before: |w| w.raw.made("cuEventCreate", &[3]).unwrap(),
        act: |w, event| match w.raw.call("cuEventRecord", &[event, w.capturing]) {
            0 => w.raw.call("cuEventQuery", &[event]),
            code => code,
        },
        after: leave,
    },
    Act {
        name: "record, then query of that event by a relaxed thread",
        before: |w| w.raw.made("cuEventCreate", &[3]).unwrap(),
        act: |w, event| match w.raw.call("cuEventRecord", &[event, w.capturing]) {
            0 => std::thread::scope(|s| {
                let query = || w.elsewhere(Caller::Relaxed, || w.raw.call("cuEventQuery", &[event]));
                s.spawn(query).join().unwrap()
            }),
            code => code,
        },
        after: leave,
    },
    Act {
        name: "record, then a relaxed thread waits for that event",
        before: |w| w.raw.made("cuEventCreate", &[3]).unwrap(),
        act: |w, event| match w.raw.call("cuEventRecord", &[event, w.capturing]) {
            0 => std::thread::scope(|s| {
                let wait = || w.elsewhere(Caller::Relaxed, || w.raw.call("cuEventSynchronize", &[event]));
                s.spawn(wait).join().unwrap()
            }),
            code => code,
        },
        after: leave,
    },
    Act {
        name: "wait of the host for the stream",
        before: nothing,
        act: |w, _| w.raw.call("cuStreamSynchronize", &[w.capturing]),
        after: leave,
    },
    Act {
        name: "wait of a relaxed thread for the stream",
        before: nothing,
        act: |w, _| {
            std::thread::scope(|s| {
                let wait = || w.elsewhere(Caller::Relaxed, || w.raw.call("cuStreamSynchronize", &[w.capturing]));
                s.spawn(wait).join().unwrap()
            })
        },
        after: leave,
    },
    Act {
        name: "copy in from locked memory",
        before: nothing,
        act: |w, _| w.raw.call("cuMemcpyHtoDAsync_v2", &[w.device, w.locked, 64, w.capturing]),
        after: leave,
    },
    Act {
        name: "copy in from pageable memory",
        before: nothing,
        act: |w, _| w.raw.call("cuMemcpyHtoDAsync_v2", &[w.device, w.pageable, 64, w.capturing]),
        after: leave,
    },
    Act {
        name: "a lost capture and one more copy",
        before: nothing,
        act: |w, _| {
            w.raw.call("cuStreamWaitEvent", &[w.capturing, w.recorded, 0]);
            w.raw.call("cuMemcpyHtoDAsync_v2", &[w.device, w.locked, 64, w.capturing])
        },
        after: leave,
    },
    Act {
        name: "a lost capture and its status",
        before: nothing,
        act: |w, _| {
            w.raw.call("cuStreamWaitEvent", &[w.capturing, w.recorded, 0]);
            w.status(w.capturing).strip_prefix("status ").map_or(-1, |status| status.parse().unwrap())
        },
        after: leave,
    },
    Act {
        name: "a lost capture and a query by another thread",
        before: nothing,
        act: |w, _| {
            w.raw.call("cuStreamWaitEvent", &[w.capturing, w.recorded, 0]);
            std::thread::scope(|s| {
                let query = || w.elsewhere(Caller::Other, || w.raw.call("cuEventQuery", &[w.recorded]));
                s.spawn(query).join().unwrap()
            })
        },
        after: leave,
    },
    Act {
        name: "one more begin",
        before: nothing,
        act: |w, _| w.raw.call("cuStreamBeginCapture_v2", &[w.capturing, GLOBAL]),
        after: leave,
    },
];

/// Calls that touch the legacy default stream while a stream that is ordered with it captures.
pub(super) const LEGACY: [Act; 4] = [
    Act {
        name: "capturing? of the legacy stream",
        before: nothing,
        act: |w, _| w.status(0).parse().unwrap_or(0),
        after: leave,
    },
    Act {
        name: "record in the legacy stream",
        before: nothing,
        act: |w, _| w.raw.call("cuEventRecord", &[w.recorded, 0]),
        after: leave,
    },
    Act {
        name: "wait of the legacy stream",
        before: nothing,
        act: |w, _| w.raw.call("cuStreamWaitEvent", &[0, w.recorded, 0]),
        after: leave,
    },
    Act {
        name: "copy in the legacy stream",
        before: nothing,
        act: |w, _| w.raw.call("cuMemcpyHtoDAsync_v2", &[w.device, w.locked, 64, 0]),
        after: leave,
    },
];
