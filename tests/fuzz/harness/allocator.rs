//! Any sequence of calls of the mapped allocator's C functions, with good and bad numbers, against the fake CUDA: no panic
//! reaches C, allocations do not overlap and keep their bytes, counts are right at each step, and at the end all is given
//! back.

use super::bytes::Input;
use super::common::fake::{Fake, Hazards};
use super::common::scratch;
use pinring_mapped::*;
use std::ffi::{CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{null, null_mut, with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::OnceLock;

/// One allocation that was not freed.
struct Block {
    address: usize,
    bytes: usize,
    page_locked: bool,
    mark: u8,
}

/// The process's allocator finds this fake and no other, with two devices and streams of each.
fn cuda() -> &'static (Fake, Vec<usize>) {
    static CUDA: OnceLock<(Fake, Vec<usize>)> = OnceLock::new();
    CUDA.get_or_init(|| {
        let fake = Fake::new(&scratch("fuzz"), "libcudart.so.13");
        fake.devices(2);
        fake.auto_run(true);
        let path = CString::new(fake.path().as_os_str().as_bytes()).expect("a path without zeros");
        // SAFETY: a C string that outlives the call.
        assert_eq!(unsafe { pinned_use_libraries(path.as_ptr(), path.as_ptr()) }, 0);
        pinned_print_errors(0);
        pinned_reset_peaks(-1); // the first call, which makes the allocator
        let mut streams = vec![0, 1, 2]; // the default ones
        for device in [0, 0, 1] {
            fake.set_device(device);
            streams.push(fake.user_stream(1));
        }
        (fake, streams)
    })
}

fn pointer(address: usize) -> *mut c_void {
    with_exposed_provenance_mut(address)
}

fn last_error() -> String {
    let mut text = vec![0u8; 4096];
    // SAFETY: a buffer of that length.
    let length = unsafe { pinned_last_error(text.as_mut_ptr().cast(), text.len()) };
    text.truncate(length);
    String::from_utf8_lossy(&text).into_owned()
}

fn counts() -> (pinned_counts, pinned_counts) {
    let (mut page_locked, mut device) = Default::default();
    // SAFETY: pointers to structs of the header's layout.
    unsafe { pinned_statistics(-1, &mut page_locked, &mut device) };
    (page_locked, device)
}

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (fake, streams) = cuda();
    let mut live: Vec<Block> = Vec::new();
    let mut capturing: Vec<usize> = Vec::new();
    while !input.is_empty() && live.len() < 64 {
        let stream = streams[input.below(streams.len())];
        match input.below(16) {
            0..=4 => allocate(&mut input, &mut live, stream),
            5..=8 => free(&mut input, &mut live, stream),
            9 => {
                let address = any_address(&mut input, &live);
                // SAFETY: the stream lives as long as the process; the pointer is looked up and not followed.
                unsafe { pinned_record_stream(pointer(address), pointer(stream)) };
            }
            10 => {
                let address = any_address(&mut input, &live);
                let host = pinned_host_ptr_of(pointer(address));
                let block = live.iter().find(|b| (b.address..b.address + b.bytes).contains(&address));
                assert_eq!(!host.is_null(), block.is_some_and(|block| block.page_locked), "{address:#x}");
            }
            11 => match input.below(4) {
                0 => pinned_use(c_int::from(input.u8()) - 1),
                1 => assert!((0..=1).contains(&pinned_is_mode())),
                _ => assert!((-1..=1).contains(&pinned_override(c_int::from(input.u8() % 4) - 1))),
            },
            12 => match input.below(5) {
                0 => pinned_set_cache_limit(input.size()),
                1 => pinned_ignore_memory_budget(input.u8().into()),
                2 => pinned_reset_peaks(any_device(&mut input)),
                3 => _ = pinned_release(0),
                // SAFETY: nulls are left out, and nothing fits into no room.
                _ => unsafe {
                    pinned_statistics(any_device(&mut input), null_mut(), null_mut());
                    assert_eq!(pinned_last_error(null_mut(), input.size()), last_error().len());
                    assert_eq!(pinned_use_libraries(null(), null()), -1, "the allocator is in use");
                },
            },
            13 if stream > 2 && !capturing.contains(&stream) => {
                fake.begin_capture(stream, input.below(3) as u32);
                capturing.push(stream);
            }
            14 => {
                if let Some(stream) = capturing.pop() {
                    fake.end_capture(stream);
                }
            }
            _ => _ = fake.run_all(),
        }
        check(&live);
    }
    capturing.into_iter().for_each(|stream| _ = fake.end_capture(stream));
    for block in live.drain(..) {
        give_back(&block, streams[3]);
    }
    fake.run_all();
    // SAFETY: the graphs were dropped with their captures, and nothing of them was ever launched.
    unsafe { pinned_release_captured() };
    assert_eq!(pinned_release(20_000), 0, "{:?}", counts());
    let (page_locked, device) = counts();
    for counts in [page_locked, device] {
        let left = [counts.live_bytes, counts.live, counts.waiting_bytes, counts.cached_bytes, counts.captured_bytes];
        assert_eq!((left, counts.quarantined_bytes), ([0; 5], 0), "{counts:?}");
        assert_eq!(counts.allocations, counts.frees);
    }
    assert_eq!((fake.live_registrations(), fake.live_allocations()), (vec![], vec![]));
    assert_eq!((fake.hazards(), fake.contexts(), fake.capture_mode()), (Hazards::default(), 0, 0));
    pinned_override(-1);
}

fn any_device(input: &mut Input) -> c_int {
    match input.u8() {
        0 => c_int::MIN,
        1 => c_int::MAX,
        2 => 2,
        3 => -1,
        other => c_int::from(other % 2),
    }
}

/// The beginning of an allocation, some byte of one, one behind it, or anything.
fn any_address(input: &mut Input, live: &[Block]) -> usize {
    let block = (!live.is_empty()).then(|| &live[input.below(live.len())]);
    match (input.below(8), block) {
        (0, _) => 0,
        (1, _) => input.u64() as usize,
        (2, Some(block)) => block.address + block.bytes,
        (3, Some(block)) => block.address.wrapping_sub(1),
        (4, Some(block)) => block.address + input.below(block.bytes),
        (_, Some(block)) => block.address,
        (_, None) => input.u8().into(),
    }
}

fn allocate(input: &mut Input, live: &mut Vec<Block>, stream: usize) {
    let size = match input.u8() {
        0 => 0,
        1 => -1,
        2 => isize::MIN,
        3 => isize::MAX,
        4 => 1 << (usize::BITS - 18),
        5..40 => isize::from(input.u8()) * 16_384,
        other => isize::from(other) * 40,
    };
    let (device, pool) = (any_device(input), input.once_in(3));
    let allocate = if pool { pinned_pool_malloc } else { pinned_malloc };
    let address = allocate(size, device, pointer(stream)).addr();
    if address == 0 {
        let text = last_error();
        assert!(!text.contains("a bug of pinring"), "{text}");
        let sound = (1..1 << 30).contains(&size) && (0..2).contains(&device);
        assert!(size == 0 || !text.is_empty());
        assert!(!sound, "{size} bytes of device {device}: {text}");
        return;
    }
    let bytes = usize::try_from(size).expect("nothing is allocated of a negative size");
    let host = pinned_host_ptr_of(pointer(address));
    let (page_locked, mark) = (!host.is_null(), input.u8());
    if page_locked {
        // SAFETY: the host's side of an allocation of so many bytes, which nobody else has.
        unsafe { std::ptr::write_bytes(host.cast::<u8>(), mark, bytes) };
    }
    assert!(page_locked || !pool, "a pool is page-locked");
    live.push(Block { address, bytes, page_locked, mark });
}

fn free(input: &mut Input, live: &mut Vec<Block>, stream: usize) {
    let address = any_address(input, live);
    match live.iter().position(|block| block.address == address) {
        Some(place) => give_back(&live.swap_remove(place), stream),
        None => {
            // SAFETY: no first byte of an allocation, which is refused before anything is followed.
            unsafe { pinned_free(pointer(address), -7, 99, pointer(stream)) };
            let text = last_error();
            assert!(address == 0 || text.contains("was not freed"), "{text}");
        }
    }
}

fn give_back(block: &Block, stream: usize) {
    if block.page_locked {
        let host = pinned_host_ptr_of(pointer(block.address)).addr();
        for at in [0, block.bytes / 2, block.bytes - 1] {
            // SAFETY: a byte of a live allocation that no device writes to.
            let byte = unsafe { with_exposed_provenance::<u8>(host + at).read() };
            assert_eq!(byte, block.mark, "byte {at} of {}", block.bytes);
        }
    }
    // SAFETY: the stream lives as long as the process, and nothing uses the memory.
    unsafe { pinned_pool_free(pointer(block.address), 0, 0, pointer(stream)) };
}

fn check(live: &[Block]) {
    let mut ranges: Vec<_> = live.iter().map(|block| (block.address, block.address + block.bytes)).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:x?}");
    let (page_locked, device) = counts();
    for (counts, of_kind) in [(page_locked, true), (device, false)] {
        let blocks = live.iter().filter(|block| block.page_locked == of_kind);
        let (number, bytes) = blocks.fold((0, 0), |(number, bytes), block| (number + 1, bytes + block.bytes as u64));
        assert_eq!((counts.live, counts.live_bytes), (number, bytes));
        assert!(counts.peak >= number && counts.peak_bytes >= bytes && counts.quarantined_bytes == 0);
    }
    let text = last_error();
    assert!(!text.contains("a bug of pinring"), "{text}");
}
