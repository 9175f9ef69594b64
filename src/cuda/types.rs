//! What the search for CUDA takes and what it tells: the settings, the record of every candidate, the errors.
//!
//! Pure data. It opens nothing and calls nothing; `ladder.rs` does.

use std::fmt;
use std::path::{Path, PathBuf};

/// CUDA's codes that this crate acts on. They stay integers: a runtime may know more of them than any list here.
pub(crate) mod code {
    pub(crate) const INVALID_VALUE: i32 = 1;
    pub(crate) const MEMORY_ALLOCATION: i32 = 2;
    pub(crate) const INITIALIZATION: i32 = 3;
    pub(crate) const CUDART_UNLOADING: i32 = 4;
    pub(crate) const STUB_LIBRARY: i32 = 34;
    pub(crate) const INSUFFICIENT_DRIVER: i32 = 35;
    pub(crate) const DEVICES_UNAVAILABLE: i32 = 46;
    pub(crate) const NO_DEVICE: i32 = 100;
    pub(crate) const INVALID_DEVICE: i32 = 101;
    #[cfg(feature = "mapped-allocator")]
    pub(crate) const INVALID_HANDLE: i32 = 400;
    pub(crate) const NOT_READY: i32 = 600;
    pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
    pub(crate) const CONTEXT_IS_DESTROYED: i32 = 709;
    pub(crate) const ALREADY_REGISTERED: i32 = 712;
    pub(crate) const NOT_REGISTERED: i32 = 713;
    pub(crate) const SYSTEM_NOT_READY: i32 = 802;
    pub(crate) const DRIVER_MISMATCH: i32 = 803;
    pub(crate) const COMPAT_NOT_SUPPORTED: i32 = 804;
    pub(crate) const STREAM_CAPTURE_UNSUPPORTED: i32 = 900;
    pub(crate) const STREAM_CAPTURE_INVALIDATED: i32 = 901;
    pub(crate) const STREAM_CAPTURE_ISOLATION: i32 = 905;
    pub(crate) const STREAM_CAPTURE_IMPLICIT: i32 = 906;
    pub(crate) const CAPTURED_EVENT: i32 = 907;
}

/// A CUDA call that failed: the call, its code, and the name and text that the library has for that code.
///
/// The code stays the integer that CUDA returned; its symbol and text were asked from the same library when the
/// error was made. Its `Display` is complete: call, code, symbol, text and what to do about it.
///
/// ```
/// # use pinring::{CudaFindError, CudaSearch, probe_cuda};
/// if let Err(CudaFindError::Init { error, .. }) = probe_cuda(&CudaSearch::new()) {
///     eprintln!("{} returned {} ({})", error.operation(), error.code(), error.symbol());
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    operation: &'static str,
    code: i32,
    symbol: String,
    text: String,
}

impl CudaError {
    pub(crate) fn new(operation: &'static str, code: i32, symbol: String, text: String) -> CudaError {
        CudaError { operation, code, symbol, text }
    }

    /// The call that failed, by its C name: `cudaHostRegister`.
    pub fn operation(&self) -> &'static str {
        self.operation
    }

    /// The integer that it returned.
    pub fn code(&self) -> i32 {
        self.code
    }

    /// The library's name for the code: `cudaErrorInsufficientDriver`.
    pub fn symbol(&self) -> &str {
        &self.symbol
    }

    /// The library's text for the code, in its words.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What usually causes this code and what helps, where that is known.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self.code {
            code::INVALID_VALUE => "the range is empty, is not mapped writable, or is not one registered range",
            code::MEMORY_ALLOCATION if self.operation == "cuMemAlloc" => {
                "the device's memory is taken, by this process or another (see nvidia-smi): ask for fewer or smaller \
                 device buffers, or attach the device before the framework's allocator takes what is left"
            }
            code::MEMORY_ALLOCATION => {
                "the host refused to page-lock that much: the limits are those of the host, the container and the \
                 driver (WSL has a small one of its own), not the GPU's memory; ask for fewer bytes or smaller pieces"
            }
            code::INITIALIZATION => "CUDA cannot be used in a child process forked after its parent initialised it",
            code::CUDART_UNLOADING => "the process is exiting",
            code::STUB_LIBRARY => {
                "a stub of libcuda was loaded in place of the driver: take the toolkit's stubs folder out of \
                 LD_LIBRARY_PATH"
            }
            code::INSUFFICIENT_DRIVER => {
                "the driver is older than this runtime, or there is none here: update it, install a runtime of the \
                 driver's CUDA version, or start the container with its GPUs (--gpus all)"
            }
            code::DEVICES_UNAVAILABLE => {
                "another process holds the device in exclusive mode (nvidia-smi -q -d COMPUTE), or MIG slices changed"
            }
            code::NO_DEVICE => {
                "no device is visible to this process: see nvidia-smi, the container's device settings and \
                 CUDA_VISIBLE_DEVICES"
            }
            code::INVALID_DEVICE => {
                "the device asked for is not among the visible ones: CUDA_VISIBLE_DEVICES renumbers them from 0, and \
                 a process sees one MIG slice only"
            }
            code::ALREADY_REGISTERED => {
                "a part of the range is page-locked already, by this process or a library in it"
            }
            code::NOT_REGISTERED => "nothing is registered at that address: as after a device reset",
            code::SYSTEM_NOT_READY => "the fabric manager of this host is not running or not ready",
            code::DRIVER_MISMATCH => {
                "the loaded kernel module and libcuda.so.1 are of different driver versions: reboot, or reload the \
                 module, after a driver update"
            }
            code::COMPAT_NOT_SUPPORTED => {
                "a forward-compatibility libcuda was loaded that this GPU does not support: remove the cuda-compat \
                 folder from LD_LIBRARY_PATH, or update the driver"
            }
            code::ILLEGAL_ADDRESS => {
                "a kernel or copy of this process touched device memory that is not its own; every later call fails \
                 the same: find it with compute-sanitizer, and start the process anew"
            }
            code::CONTEXT_IS_DESTROYED => "the device was reset by other code of this process",
            code::STREAM_CAPTURE_UNSUPPORTED | code::STREAM_CAPTURE_INVALIDATED => {
                "a graph was being captured and its capture is lost: capture in thread-local or relaxed mode, or keep \
                 such calls out of the capture"
            }
            code::STREAM_CAPTURE_ISOLATION | code::STREAM_CAPTURE_IMPLICIT | code::CAPTURED_EVENT => {
                "a graph is being captured in that stream: make the call before or after the capture"
            }
            _ => return None,
        })
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} returned {} {} ({})", self.operation, self.code, self.symbol, self.text)?;
        self.hint().map_or(Ok(()), |hint| write!(f, "; {hint}"))
    }
}

impl std::error::Error for CudaError {}

/// A step of the ladder on which the search for CUDA climbs, in this order.
///
/// ```
/// assert_eq!(pinring::Rung::InstalledWheels.to_string(), "installed wheels");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rung {
    /// The library that the user named.
    ExplicitPath,
    /// A runtime that this process has mapped already.
    AlreadyLoaded,
    /// The vendor folders of installed Python wheels.
    InstalledWheels,
    /// A CUDA toolkit.
    Toolkit,
    /// What the loader itself finds by name.
    Soname,
    /// The driver alone, `libcuda.so.1`, without a runtime.
    Driver,
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Rung::ExplicitPath => "explicit path",
            Rung::AlreadyLoaded => "already loaded",
            Rung::InstalledWheels => "installed wheels",
            Rung::Toolkit => "toolkit",
            Rung::Soname => "name lookup",
            Rung::Driver => "driver only",
        })
    }
}

/// What became of a [`Candidate`].
///
/// ```
/// # use pinring::{CudaSearch, Outcome, probe_cuda};
/// # if cfg!(target_os = "linux") {
/// let error = probe_cuda(&CudaSearch::new().library_only("/no/such/libcudart.so.13")).unwrap_err();
/// assert!(matches!(error.candidates()[0].outcome(), Outcome::NotLoaded(reason) if reason.contains("/no/such")));
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// CUDA was initialised through it; it is the one in use.
    Chosen,
    /// The loader refused it, for this reason in the loader's words.
    NotLoaded(String),
    /// It was loaded and lacks a function that is needed.
    MissingSymbol {
        /// The C name of the function.
        symbol: &'static str,
        /// The loader's words.
        reason: String,
    },
    /// It was loaded and could not initialise CUDA.
    Refused(CudaError),
    /// It was not opened, or not called, for this reason.
    PassedOver(String),
    /// There was no candidate on this rung, for this reason.
    Nothing(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Chosen => f.write_str("chosen"),
            Outcome::NotLoaded(reason) => f.write_str(reason),
            Outcome::MissingSymbol { symbol, reason } => write!(f, "it has no {symbol}: {reason}"),
            Outcome::Refused(error) => error.fmt(f),
            Outcome::PassedOver(reason) => write!(f, "passed over: {reason}"),
            Outcome::Nothing(reason) => f.write_str(reason),
        }
    }
}

/// One line of the record that every search keeps: a library that was looked at, or a rung that had none.
///
/// ```
/// # use pinring::{CudaSearch, Rung, probe_cuda};
/// let record = match probe_cuda(&CudaSearch::new().library("/no/such/libcudart.so.13")) {
///     Ok(report) => report.candidates().to_vec(),
///     Err(error) => error.candidates().to_vec(),
/// };
/// # if cfg!(target_os = "linux") {
/// assert_eq!(record[0].rung(), Rung::ExplicitPath);
/// assert!(record[0].to_string().starts_with("/no/such/libcudart.so.13 [explicit path]: "));
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    path: Option<PathBuf>,
    rung: Rung,
    note: Option<String>,
    outcome: Outcome,
}

impl Candidate {
    pub(crate) fn new(path: impl Into<PathBuf>, rung: Rung, outcome: Outcome) -> Candidate {
        Candidate { path: Some(path.into()), rung, note: None, outcome }
    }

    pub(crate) fn none(rung: Rung, why: impl Into<String>) -> Candidate {
        Candidate { path: None, rung, note: None, outcome: Outcome::Nothing(why.into()) }
    }

    pub(crate) fn with_note(mut self, note: Option<String>) -> Candidate {
        self.note = note;
        self
    }

    /// The file, or the bare name handed to the loader; `None` for a rung that had no candidate.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The rung that it was found on.
    pub fn rung(&self) -> Rung {
        self.rung
    }

    /// Something worth knowing about it whatever became of it: its file was replaced, the name led to this file.
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// What became of it.
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "{}", path.display())?,
            None => f.write_str("(none)")?,
        }
        write!(f, " [{}]", self.rung)?;
        if let Some(note) = &self.note {
            write!(f, " ({note})")?;
        }
        write!(f, ": {}", self.outcome)
    }
}

/// Where to look for CUDA, besides the places that are always looked at.
///
/// Without any settings the search reads the environment and tries, in this order: runtimes mapped into the
/// process, installed Python wheels, toolkits, names, the driver. `docs/cuda-loading.md` has every path.
///
/// ```
/// use pinring::CudaSearch;
///
/// let search = CudaSearch::new()
///     .library("/opt/cuda/lib64/libcudart.so.13")              // first of all
///     .wheel_root("/srv/venvs/learner")                        // before VIRTUAL_ENV
///     .driver("/usr/lib/wsl/lib/libcuda.so.1");                // where the loader does not find it
/// # let _ = search;
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CudaSearch {
    pub(super) library: Option<PathBuf>,
    pub(super) only: bool,
    pub(super) roots: Vec<PathBuf>,
    pub(super) driver: Option<PathBuf>,
}

/// The driver's name, which every installation has.
const DRIVER: &str = "libcuda.so.1";

impl CudaSearch {
    /// The search of the environment alone.
    pub fn new() -> CudaSearch {
        CudaSearch::default()
    }

    /// Tries this library first. If it cannot be used the search goes on, with a warning event and a line in the
    /// record; [`library_only`](Self::library_only) insists. A name without a slash is one for the loader to find.
    pub fn library(mut self, path: impl Into<PathBuf>) -> CudaSearch {
        self.library = Some(path.into());
        self.only = false;
        self
    }

    /// Uses this library or none.
    pub fn library_only(mut self, path: impl Into<PathBuf>) -> CudaSearch {
        self.library = Some(path.into());
        self.only = true;
        self
    }

    /// Looks for wheels here too, before the environment's places: a `site-packages` folder, or the environment
    /// (a virtual or conda one) above it. May be called several times; they are tried in that order.
    pub fn wheel_root(mut self, path: impl Into<PathBuf>) -> CudaSearch {
        self.roots.push(path.into());
        self
    }

    /// Uses this file as the CUDA driver, for installations where the loader does not find `libcuda.so.1` or finds a
    /// wrong one. It is the last rung of the search, and devices are driven through it. A process has one driver: it
    /// must be the one that the runtime in use has loaded.
    pub fn driver(mut self, path: impl Into<PathBuf>) -> CudaSearch {
        self.driver = Some(path.into());
        self
    }

    /// The driver to open.
    pub(super) fn driver_library(&self) -> &Path {
        self.driver.as_deref().unwrap_or(Path::new(DRIVER))
    }
}

/// No CUDA could be used. The text lists every candidate, one a line, and ends with what to do.
///
/// ```
/// # use pinring::{CudaFindError, CudaSearch, probe_cuda};
/// match probe_cuda(&CudaSearch::new()) {
///     Ok(report) => println!("{report}"),
///     Err(CudaFindError::Init { error, .. }) if error.code() == 100 => println!("no GPU here"),
///     Err(error) => eprintln!("{error}"),
/// }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CudaFindError {
    /// No candidate could be loaded, or none had the functions that are needed.
    NotFound {
        /// Everything that was looked at, in order.
        candidates: Vec<Candidate>,
    },
    /// A library was loaded, and CUDA could not be initialised through it. Where several were tried this is the
    /// first of them; the record has the codes of all.
    Init {
        /// The call that failed.
        error: Box<CudaError>,
        /// The library that it was made through.
        library: PathBuf,
        /// That library's CUDA version as an integer (13000 is 13.0); 0 if it has none to tell.
        runtime_version: i32,
        /// The CUDA version that the driver supports (13000 is 13.0); 0 if there is no driver.
        driver_version: i32,
        /// Everything that was looked at, in order.
        candidates: Vec<Candidate>,
    },
    /// This system is not Linux, and so has no search.
    Unsupported,
}

impl fmt::Display for CudaFindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CudaFindError::NotFound { candidates } => write!(
                f,
                "no CUDA library could be loaded. Searched, in order:{}\nInstall a CUDA runtime where it is looked for \
                 (for example the nvidia-cuda-runtime wheel in the active environment), start after your framework has \
                 initialised CUDA, name a library, or run without pinning",
                Record(candidates)
            ),
            CudaFindError::Init { error, library, runtime_version, driver_version, candidates } => write!(
                f,
                "CUDA could not be initialised: {error}. Library {}, {}, {}. Searched, in order:{}",
                library.display(),
                Version("runtime", *runtime_version),
                Version("driver", *driver_version),
                Record(candidates)
            ),
            CudaFindError::Unsupported => write!(
                f,
                "CUDA can be searched for and loaded on Linux only, and this is {}; run without pinning",
                std::env::consts::OS
            ),
        }
    }
}

impl std::error::Error for CudaFindError {
    /// The failed call, for `downcast_ref::<CudaError>()`: without its box, which a derive would leave in the way.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            CudaFindError::Init { error, .. } => Some(&**error),
            _ => None,
        }
    }
}

impl CudaFindError {
    /// Everything that was looked at, in order.
    pub fn candidates(&self) -> &[Candidate] {
        match self {
            CudaFindError::NotFound { candidates } | CudaFindError::Init { candidates, .. } => candidates,
            CudaFindError::Unsupported => &[],
        }
    }
}

/// A record, one line a candidate, each on a line of its own.
pub(super) struct Record<'a>(pub(super) &'a [Candidate]);

impl fmt::Display for Record<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|candidate| write!(f, "\n  - {candidate}"))
    }
}

/// A CUDA version in words: `runtime 13.0`, `no driver`.
pub(super) struct Version(pub(super) &'static str, pub(super) i32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            version if version > 0 => write!(f, "{} {}.{}", self.0, version / 1000, version % 1000 / 10),
            _ => write!(f, "no {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_call_code_symbol_text_and_remedy() {
        let error = CudaError::new(
            "cudaFree(0)",
            35,
            "cudaErrorInsufficientDriver".into(),
            "CUDA driver version is insufficient for CUDA runtime version".into(),
        );
        let text = error.to_string();
        for part in ["cudaFree(0) returned 35 cudaErrorInsufficientDriver (CUDA driver", "--gpus all"] {
            assert!(text.contains(part), "{text}");
        }
        let unknown = CudaError::new("cudaFree(0)", 9999, "unrecognized error code".into(), "so".into());
        assert_eq!(unknown.to_string(), "cudaFree(0) returned 9999 unrecognized error code (so)");
    }

    #[test]
    fn a_record_has_a_line_for_each_candidate() {
        let candidates = vec![
            Candidate::none(Rung::AlreadyLoaded, "no CUDA runtime is mapped into this process"),
            Candidate::new("libcudart.so.13", Rung::Soname, Outcome::NotLoaded("libcudart.so.13: no".into())),
            Candidate::new("/x/libcudart_static.a", Rung::Toolkit, Outcome::PassedOver("static".into()))
                .with_note(Some("noted".into())),
        ];
        let error = CudaFindError::Init {
            error: Box::new(CudaError::new("cudaFree(0)", 100, "cudaErrorNoDevice".into(), "none".into())),
            library: "/x/libcudart.so.13".into(),
            runtime_version: 12090,
            driver_version: 0,
            candidates,
        };
        let text = error.to_string();
        assert!(text.contains("Library /x/libcudart.so.13, runtime 12.9, no driver."), "{text}");
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(
            lines,
            [
                "  - (none) [already loaded]: no CUDA runtime is mapped into this process",
                "  - libcudart.so.13 [name lookup]: libcudart.so.13: no",
                "  - /x/libcudart_static.a [toolkit] (noted): passed over: static",
            ]
        );
    }
}
