//! The search for CUDA: rung by rung, candidate by candidate, until one answers.
//!
//! A candidate is taken when its `cudaFree(0)` answers 0. On a code that speaks of the pair of this runtime and the
//! driver (34, 35, 803, 804) the next one is tried; any other code would be the same through every library and ends
//! the search. Whatever is opened stays open: a runtime that was mapped and called is never unmapped. The search
//! reads no device mask, selects no device and allocates nothing.

use super::driver;
use super::mapped::{self, Image};
use super::names::{Name, RuntimeName};
use super::places::{self, Environment, Found};
use super::table::{MissingSymbol, PinTable, full_text};
use super::types::{Candidate, CudaError, CudaFindError, CudaSearch, Outcome, Rung, code};
use super::{Cuda, Loaded};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::path::{Path, PathBuf};

/// The rungs, in order.
const RUNGS: [Rung; 6] =
    [Rung::ExplicitPath, Rung::AlreadyLoaded, Rung::InstalledWheels, Rung::Toolkit, Rung::Soname, Rung::Driver];
/// The names that the loader is asked for, in this order.
const SONAMES: [&str; 3] = ["libcudart.so.13", "libcudart.so.12", "libcudart.so"];

/// Climbs the ladder.
pub(super) fn climb(search: &CudaSearch) -> Result<Cuda, CudaFindError> {
    let mut climb = Climb::default();
    let step = climb.all_rungs(search);
    climb.end(step)
}

/// What trying a candidate, or a rung of them, led to.
enum Step {
    /// On to the next.
    Next,
    /// This one is taken.
    Taken(Loaded),
    /// The search ends with this failure.
    Failed(Failure),
}

/// A library whose initialisation failed.
struct Failure {
    error: CudaError,
    library: PathBuf,
    versions: (i32, i32),
}

/// The state of one search.
#[derive(Default)]
struct Climb {
    candidates: Vec<Candidate>,
    /// An address inside each library that was called, and how the record calls it.
    called: Vec<(usize, PathBuf)>,
    /// The first failure after which the search went on.
    first_failure: Option<Failure>,
}

impl Climb {
    fn all_rungs(&mut self, search: &CudaSearch) -> Step {
        let last = if search.only { Rung::ExplicitPath } else { Rung::Driver };
        for rung in RUNGS.into_iter().filter(|rung| *rung <= last) {
            match self.rung(rung, search) {
                Step::Next => {}
                done => return done,
            }
            if let (Rung::ExplicitPath, Some(path)) = (rung, &search.library) {
                tracing::warn!(path = %path.display(), "the CUDA library that was named cannot be used");
            }
        }
        Step::Next
    }

    fn rung(&mut self, rung: Rung, search: &CudaSearch) -> Step {
        let env: Environment<'_> = &|name| std::env::var_os(name);
        match rung {
            Rung::ExplicitPath => self.explicit(search.library.as_deref()),
            Rung::AlreadyLoaded => self.already_loaded(),
            Rung::InstalledWheels => self.files(rung, places::wheels(&search.roots, env)),
            Rung::Toolkit => self.files(rung, places::toolkits(env)),
            Rung::Soname => self.sonames(),
            Rung::Driver => self.driver(search.driver_library()),
        }
    }

    fn end(self, step: Step) -> Result<Cuda, CudaFindError> {
        let candidates = self.candidates;
        for candidate in &candidates {
            tracing::debug!(%candidate, "looked for CUDA");
        }
        let failure = match step {
            Step::Taken(loaded) => {
                tracing::info!(library = %loaded.library.display(), rung = %loaded.rung, "CUDA found");
                return Ok(Cuda::new(Loaded { candidates, ..loaded }));
            }
            Step::Failed(failure) => failure,
            Step::Next => match self.first_failure {
                Some(failure) => failure,
                None => return Err(CudaFindError::NotFound { candidates }),
            },
        };
        Err(CudaFindError::Init {
            error: Box::new(failure.error),
            library: failure.library,
            runtime_version: failure.versions.0,
            driver_version: failure.versions.1,
            candidates,
        })
    }

    // ---- the rungs, in order ----

    fn explicit(&mut self, path: Option<&Path>) -> Step {
        match path {
            Some(path) => self.runtime(Rung::ExplicitPath, path, None, || open_file(path)),
            None => self.nothing(Rung::ExplicitPath, "no library was named"),
        }
    }

    fn already_loaded(&mut self) -> Step {
        let maps = match mapped::read() {
            Ok(maps) => maps,
            Err(why) => return self.nothing(Rung::AlreadyLoaded, why),
        };
        let found = mapped::runtimes(&maps);
        if found.is_empty() {
            return self.nothing(Rung::AlreadyLoaded, "no CUDA runtime is mapped into this process");
        }
        let mut step = Step::Next;
        for (name, image) in &found {
            let note = image.replaced.then(|| "its file was replaced on disk after it was loaded".to_owned());
            step = match (step, name) {
                (Step::Next, Name::Runtime(name)) => {
                    self.runtime(Rung::AlreadyLoaded, &image.path, note, || reuse(name, image))
                }
                (done, Name::Runtime(_)) => self.left_out(Rung::AlreadyLoaded, &image.path, done),
                (step, Name::LookAlike(why)) => {
                    let outcome = Outcome::PassedOver((*why).into());
                    self.record(Candidate::new(&image.path, Rung::AlreadyLoaded, outcome));
                    step
                }
                (step, Name::Other) => step,
            };
        }
        step
    }

    fn files(&mut self, rung: Rung, found: Result<Vec<Found>, String>) -> Step {
        let found = match found {
            Ok(found) => found,
            Err(why) => return self.nothing(rung, why),
        };
        let mut step = Step::Next;
        for Found { path, why_not } in found {
            step = match (step, why_not) {
                (step, Some(why)) => {
                    self.record(Candidate::new(path, rung, Outcome::PassedOver(why)));
                    step
                }
                (Step::Next, None) => self.runtime(rung, &path, None, || open_file(&path)),
                (done, None) => self.left_out(rung, &path, done),
            };
        }
        step
    }

    fn sonames(&mut self) -> Step {
        for name in SONAMES {
            match self
                .runtime(Rung::Soname, Path::new(name), None, || open(Path::new(name), 0).map_err(Outcome::NotLoaded))
            {
                Step::Next => {}
                done => return done,
            }
        }
        Step::Next
    }

    fn driver(&mut self, path: &Path) -> Step {
        self.candidate(Rung::Driver, path, None, || open(path, 0).map_err(Outcome::NotLoaded), driver::table)
    }

    // ---- one candidate ----

    fn runtime(
        &mut self,
        rung: Rung,
        path: &Path,
        note: Option<String>,
        open: impl FnOnce() -> Result<Library, Outcome>,
    ) -> Step {
        self.candidate(rung, path, note, open, |library| {
            let table = PinTable::from_symbols(library)?;
            Ok((table, table.cudaFree as *const () as usize))
        })
    }

    /// Opens a candidate, fills its table, initialises CUDA through it, and writes its line of the record.
    fn candidate(
        &mut self,
        rung: Rung,
        path: &Path,
        note: Option<String>,
        open: impl FnOnce() -> Result<Library, Outcome>,
        fill: impl FnOnce(&Library) -> Result<(PinTable, usize), MissingSymbol>,
    ) -> Step {
        let library = match open() {
            Ok(library) => library,
            Err(outcome) => return self.record(Candidate::new(path, rung, outcome).with_note(note)),
        };
        let filled = fill(&library);
        // Never closed, whatever becomes of it: functions of it may be in use by others, and a runtime that is
        // unmapped after a call takes the process down at exit.
        let _ = library.into_raw();
        let (table, address) = match filled {
            Ok(filled) => filled,
            Err(MissingSymbol { symbol, reason }) => {
                let outcome = Outcome::MissingSymbol { symbol, reason };
                return self.record(Candidate::new(path, rung, outcome).with_note(note));
            }
        };
        // A bare name is replaced by the file that the loader found for it.
        let file = if path.as_os_str().as_encoded_bytes().contains(&b'/') { None } else { mapped::file_at(address) };
        let note = note.or_else(|| file.as_ref().map(|file| format!("which is {}", file.display())));
        let library = file.unwrap_or_else(|| path.to_owned());
        if let Some((_, before)) = self.called.iter().find(|(other, _)| *other == address) {
            let why = format!("it is the same library as {}, which was tried", before.display());
            return self.record(Candidate::new(path, rung, Outcome::PassedOver(why)).with_note(note));
        }
        self.called.push((address, library.clone()));

        // SAFETY: `cudaFree` of null frees nothing; it is the documented way to initialise. Invariant 8: the table
        // is that of a library which is never closed, as arranged above.
        let initialise = |operation| table.check(operation, unsafe { (table.cudaFree)(std::ptr::null_mut()) });
        // It does spoil other threads' captures, though; what stands for it in the driver does not.
        let checked = match rung {
            Rung::Driver => initialise("cuDevicePrimaryCtxRetain"),
            _ => table.relaxed(|| initialise("cudaFree(0)")),
        };
        let versions = table.versions();
        let (outcome, step) = match checked {
            Ok(()) => {
                let (runtime_version, driver_version) = versions;
                let candidates = Vec::new();
                let loaded = Loaded { table, library, rung, runtime_version, driver_version, candidates };
                (Outcome::Chosen, Step::Taken(loaded))
            }
            Err(error) => {
                let ends = ends_search(error.code());
                let failure = Failure { error: error.clone(), library, versions };
                let step = if ends {
                    Step::Failed(failure)
                } else {
                    self.first_failure.get_or_insert(failure);
                    Step::Next
                };
                (Outcome::Refused(error), step)
            }
        };
        self.candidates.push(Candidate::new(path, rung, outcome).with_note(note));
        step
    }

    fn record(&mut self, candidate: Candidate) -> Step {
        self.candidates.push(candidate);
        Step::Next
    }

    fn nothing(&mut self, rung: Rung, why: impl Into<String>) -> Step {
        self.record(Candidate::none(rung, why))
    }

    /// Records a candidate that is not tried any more, since `done` came first.
    fn left_out(&mut self, rung: Rung, path: &Path, done: Step) -> Step {
        let why = match &done {
            Step::Taken(loaded) => format!("not tried, since {} was chosen", loaded.library.display()),
            Step::Failed(failure) => format!("not tried, since the search ended at {}", failure.library.display()),
            Step::Next => "not tried".into(),
        };
        self.record(Candidate::new(path, rung, Outcome::PassedOver(why)));
        done
    }
}

/// Whether a code of `cudaFree(0)` would be the same through every library. Only these four speak of the runtime
/// and the driver as a pair; the others, unknown ones too, are states of the devices, the driver or the process.
fn ends_search(code: i32) -> bool {
    !matches!(code, code::STUB_LIBRARY | code::INSUFFICIENT_DRIVER | code::DRIVER_MISMATCH | code::COMPAT_NOT_SUPPORTED)
}

fn open(name: &Path, flags: i32) -> Result<Library, String> {
    // SAFETY: loading runs the library's initialisers. The names are those of NVIDIA's libraries or the user's own
    // choice, whose initialisers are made to run in any process and thread.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | flags) }.map_err(|error| full_text(&error))
}

/// Opens a file that was found or named.
fn open_file(path: &Path) -> Result<Library, Outcome> {
    if path.as_os_str().is_empty() {
        return Err(Outcome::PassedOver("the path is empty".into()));
    }
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Err(Outcome::PassedOver("it is a directory".into())),
        // A fifo or a device might keep the loader for ever.
        Ok(meta) if !meta.is_file() => Err(Outcome::PassedOver("it is not a regular file".into())),
        // Where there is no such file, the loader says so.
        _ => open(path, 0).map_err(Outcome::NotLoaded),
    }
}

/// Finds the loader's handle of an image that is mapped, without loading anything: by its path as the process knows
/// it, else by the sonames that such a file has. A path may lead to another file by now: where the image was replaced
/// on disk, and for a soname always, the function found must lie in the mapped image.
fn reuse(name: &RuntimeName, image: &Image) -> Result<Library, Outcome> {
    use std::ffi::c_void;
    use std::ptr::NonNull;
    /// The same on all architectures that CUDA exists for.
    const RTLD_NOLOAD: i32 = 4;
    let sonames = name.sonames();
    let names = std::iter::once(image.path.as_path()).chain(sonames.iter().map(Path::new));
    for (at, name) in names.enumerate() {
        let Ok(library) = open(name, RTLD_NOLOAD) else { continue };
        let address = super::table::symbol::<NonNull<c_void>>(&library, "cudaFree");
        let inside = address.is_ok_and(|address| image.holds(address.addr().get()));
        if inside || (at == 0 && !image.replaced) {
            return Ok(library);
        }
        // Somebody's loaded library, of which this was one more handle: it stays open too.
        let _ = library.into_raw();
    }
    let path = image.path.display();
    Err(Outcome::NotLoaded(match image.replaced {
        true => format!("loaded runtime was replaced on disk: {path}; restart the process to use the new one"),
        false => "it is mapped, and the loader has no such library open".into(),
    }))
}
