//! What does the memory of a start cost? Seconds a GiB to map, pre-fault and page-lock a ring, and to give it back.
//!
//! ```text
//! cargo bench --bench pin -- [--gib N]… [--rounds N] [--quick] [--test] [--library PATH] [--ignore-memory-budget]
//! ```
//!
//! Each size is checked before it is timed: every page present, every slot verified by CUDA, nothing page-locked after
//! the drop. Beside ours, in the same rounds: the floor (zeroing memory that is there), the usual way (writing to
//! each page of ordinary memory) and, where there is CUDA, the two usual ways to page-locked memory. Without CUDA those lines say why they are missing. The
//! ring is `PinTrial`'s, which is how a feed makes it.
#![allow(unsafe_code)]

use std::error::Error;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use pinring::{CudaSearch, PinTrial, RingError};

const GIB: usize = 1 << 30;
/// About one batch of pixels.
const SLOT_BYTES: usize = 32 << 20;

type Failure = Box<dyn Error>;

fn main() -> ExitCode {
    let settings = match Settings::from_arguments() {
        Ok(settings) => settings,
        Err(error) => {
            eprintln!("pin: {error}");
            return ExitCode::from(2);
        }
    };
    for &gib in &settings.sizes {
        if let Err(error) = settings.measure(gib) {
            eprintln!("pin: {gib} GiB: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

struct Settings {
    sizes: Vec<usize>,
    /// 0: the checks alone, as with `--test` and under `cargo test --benches`, which does not say `--bench`.
    rounds: usize,
    search: CudaSearch,
    ignore_budget: bool,
}

impl Settings {
    fn from_arguments() -> Result<Settings, Failure> {
        let mut settings = Settings { sizes: Vec::new(), rounds: 5, search: CudaSearch::new(), ignore_budget: false };
        let mut check_only = !std::env::args().any(|argument| argument == "--bench");
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--gib" => settings.sizes.push(positive(&value()?)?),
                "--rounds" => settings.rounds = positive(&value()?)?,
                "--library" => settings.search = CudaSearch::new().library_only(value()?),
                "--ignore-memory-budget" => settings.ignore_budget = true,
                "--quick" => settings.rounds = 1,
                "--test" => check_only = true,
                "--bench" => {} // cargo's own
                _ => return Err(format!("{argument} is not known; see the head of benches/pin.rs").into()),
            }
        }
        if settings.sizes.is_empty() {
            settings.sizes.push(1);
        }
        if check_only {
            settings.rounds = 0;
        }
        Ok(settings)
    }

    fn trial(&self, gib: usize) -> PinTrial {
        let trial = PinTrial::new(SLOT_BYTES, gib * (GIB / SLOT_BYTES)).search(self.search.clone());
        if self.ignore_budget { trial.ignore_memory_budget() } else { trial }
    }

    /// Checks and times rings of `gib` GiB.
    fn measure(&self, gib: usize) -> Result<(), Failure> {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let threads = [1, 2, 4, 8].into_iter().filter(|threads| *threads <= cores).filter_map(NonZeroUsize::new);
        let trials: Vec<_> = threads.map(|threads| (threads, self.trial(gib).prefault_threads(threads))).collect();
        let bytes = gib * GIB;

        // Checked first.
        for (threads, trial) in &trials {
            let outcome = trial.map_only()?;
            let present = outcome.present_bytes.unwrap_or(bytes);
            if outcome.bytes != bytes || present != bytes {
                return Err(format!("{threads} threads made {present} of {bytes} bytes present: {outcome}").into());
            }
        }
        let cuda = self.check_pinned(gib)?;
        if self.rounds == 0 {
            println!("{gib} GiB checked; `cargo bench` measures");
            return Ok(());
        }
        println!(
            "{gib} GiB in slots of {} MiB: seconds a GiB, median of {} [least, most]",
            SLOT_BYTES >> 20,
            self.rounds
        );

        let [mut touch, mut zero] = [(); 2].map(|()| Samples::new(gib));
        let mut map = Samples::new(gib);
        let mut prefault: Vec<_> = trials.iter().map(|_| Samples::new(gib)).collect();
        let mut huge = Some(0);
        for _ in 0..self.rounds {
            let (touched, zeroed) = ordinary_memory(bytes);
            touch.push(touched);
            zero.push(zeroed);
            for ((_, trial), prefault) in trials.iter().zip(&mut prefault) {
                let outcome = trial.map_only()?;
                map.push(outcome.times.map);
                prefault.push(outcome.times.prefault);
                huge = outcome.huge_page_bytes;
            }
        }
        zero.print("floor: 1 thread zeroes memory that is present");
        touch.print("usual: 1 thread writes to each page of ordinary memory");
        map.print("map");
        for ((threads, _), prefault) in trials.iter().zip(&mut prefault) {
            prefault.print(&format!("pre-fault, {threads} thread{}", if threads.get() == 1 { "" } else { "s" }));
        }
        match huge {
            Some(huge) => println!("  {:<58} {huge} of {bytes} bytes", "in huge pages"),
            None => println!("  {:<58} not known here", "in huge pages"),
        }
        match cuda {
            Ok(library) => self.measure_pinned(gib, &library),
            Err(reason) => {
                println!("  {:<58} skipped: no CUDA device", "register");
                for line in reason.to_string().lines() {
                    println!("    {line}");
                }
                Ok(())
            }
        }
    }

    /// Pins once and looks at the result: the library that did it, or why there is no CUDA.
    fn check_pinned(&self, gib: usize) -> Result<Result<Peers, RingError>, Failure> {
        let slots = gib * (GIB / SLOT_BYTES);
        let outcome = match self.trial(gib).run() {
            Ok(outcome) => outcome,
            Err(reason @ RingError::Find(_)) => return Ok(Err(reason)),
            Err(error) => return Err(error.into()),
        };
        let report = &outcome.report;
        if report.slots_verified != slots || report.page_locked_bytes != gib * GIB || outcome.page_locked_after != 0 {
            return Err(format!("the check before the timing failed: {outcome}").into());
        }
        println!("  {outcome}");
        Ok(Ok(Peers::load(report.cuda.library())))
    }

    fn measure_pinned(&self, gib: usize, peers: &Peers) -> Result<(), Failure> {
        let trial = self.trial(gib);
        let [mut register, mut verify, mut whole, mut release] = [(); 4].map(|()| Samples::new(gib));
        let mut rivals = [Samples::new(gib), Samples::new(gib)];
        for _ in 0..self.rounds {
            let outcome = trial.run()?;
            let times = outcome.report.times;
            register.push(times.register);
            verify.push(times.verify);
            whole.push(times.total());
            release.push(outcome.release);
            if let Some(functions) = &peers.functions {
                rivals[0].push(functions.host_alloc(gib * GIB)?);
                rivals[1].push(functions.register_untouched(gib * GIB)?);
            }
        }
        register.print("register");
        verify.print("verify");
        whole.print("ours: find, map, pre-fault, register, verify");
        release.print("release: unregister, unmap");
        match &peers.missing {
            None => {
                rivals[0].print("peer: cudaHostAlloc");
                rivals[1].print("peer: cudaHostRegister of untouched 4 KiB pages");
            }
            Some(reason) => println!("  {:<58} skipped: {reason}", "peers"),
        }
        Ok(())
    }
}

fn positive(text: &str) -> Result<usize, Failure> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(format!("{text:?} is not a number above 0").into()),
    }
}

/// Ordinary memory, by one thread: the time to write to each page of fresh memory (the usual way to have it present),
/// and to zero it once it is there (the kernel has to do that at least).
fn ordinary_memory(bytes: usize) -> (Duration, Duration) {
    let began = Instant::now();
    let mut memory = vec![0_u8; bytes];
    for page in memory.chunks_mut(4096) {
        page[0] = 1;
    }
    std::hint::black_box(&mut memory);
    let touched = began.elapsed();
    let began = Instant::now();
    memory.fill(0);
    std::hint::black_box(&memory);
    (touched, began.elapsed())
}

/// Times of one thing, a GiB.
struct Samples {
    gib: f64,
    seconds: Vec<f64>,
}

impl Samples {
    fn new(gib: usize) -> Samples {
        Samples { gib: gib as f64, seconds: Vec::new() }
    }

    fn push(&mut self, time: Duration) {
        self.seconds.push(time.as_secs_f64() / self.gib);
    }

    fn print(&mut self, what: &str) {
        self.seconds.sort_by(f64::total_cmp);
        let (least, most) = (self.seconds[0], self.seconds[self.seconds.len() - 1]);
        println!("  {what:<58} {:.4} [{least:.4}, {most:.4}]", self.seconds[self.seconds.len() / 2]);
    }
}

/// The functions of the runtime that the peers need, from the library that the ring used.
struct Peers {
    functions: Option<Functions>,
    missing: Option<String>,
}

struct Functions {
    alloc: unsafe extern "C" fn(*mut *mut u8, usize, u32) -> i32,
    free: unsafe extern "C" fn(*mut u8) -> i32,
    register: unsafe extern "C" fn(*mut u8, usize, u32) -> i32,
    unregister: unsafe extern "C" fn(*mut u8) -> i32,
}

impl Peers {
    fn load(path: &std::path::Path) -> Peers {
        match Functions::load(path) {
            Ok(functions) => Peers { functions: Some(functions), missing: None },
            Err(error) => Peers { functions: None, missing: Some(format!("{}: {error:?}", path.display())) },
        }
    }
}

/// Portable and mapped, as ours.
const FLAGS: u32 = 3;

impl Functions {
    fn load(path: &std::path::Path) -> Result<Functions, libloading::Error> {
        // SAFETY: the process has this library loaded and initialised already (the ring used it); the signatures are
        // those of NVIDIA's headers; the library is never closed.
        unsafe {
            let library = Box::leak(Box::new(libloading::Library::new(path)?));
            Ok(Functions {
                alloc: *library.get(b"cudaHostAlloc\0")?,
                free: *library.get(b"cudaFreeHost\0")?,
                register: *library.get(b"cudaHostRegister\0")?,
                unregister: *library.get(b"cudaHostUnregister\0")?,
            })
        }
    }

    fn host_alloc(&self, bytes: usize) -> Result<Duration, Failure> {
        let mut memory = std::ptr::null_mut();
        let began = Instant::now();
        // SAFETY: the out-pointer is ours.
        succeeded("cudaHostAlloc", unsafe { (self.alloc)(&mut memory, bytes, FLAGS) })?;
        let took = began.elapsed();
        // SAFETY: just allocated, used by nobody.
        succeeded("cudaFreeHost", unsafe { (self.free)(memory) })?;
        Ok(took)
    }

    fn register_untouched(&self, bytes: usize) -> Result<Duration, Failure> {
        let began = Instant::now();
        let mut memory = vec![0_u8; bytes];
        // SAFETY: the range is the vector's, which outlives the registration.
        succeeded("cudaHostRegister", unsafe { (self.register)(memory.as_mut_ptr(), bytes, FLAGS) })?;
        let took = began.elapsed();
        // SAFETY: registered above.
        let unregistered = succeeded("cudaHostUnregister", unsafe { (self.unregister)(memory.as_mut_ptr()) });
        if unregistered.is_err() {
            std::mem::forget(memory); // never free what may still be page-locked
        }
        unregistered.map(|()| took)
    }
}

fn succeeded(call: &str, code: i32) -> Result<(), Failure> {
    if code == 0 { Ok(()) } else { Err(format!("{call} returned {code}").into()) }
}
