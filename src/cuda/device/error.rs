//! Why a device could not be attached. Data only.

use super::super::types::CudaError;
use std::fmt;
use std::path::PathBuf;

/// A device could not be attached: the driver could not be loaded, there is no such device, or a call failed.
///
/// Its `Display` is complete: what was asked for, what was found, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The driver's library could not be loaded.
    #[error(
        "device {ordinal} needs the CUDA driver, and {} could not be loaded: {reason}. Install NVIDIA's driver, start \
         the container with its GPUs (--gpus all), or name the driver's library", .library.display()
    )]
    NotLoaded {
        /// The device that was asked for.
        ordinal: i32,
        /// The file, or the bare name handed to the loader.
        library: PathBuf,
        /// The loader's words.
        reason: String,
    },
    /// The driver's library lacks a function that is needed.
    #[error(
        "device {ordinal} needs {symbol}, which the CUDA driver {} does not have: {reason}. Update the driver (CUDA \
         11 or newer), or name the right library", .library.display()
    )]
    MissingSymbol {
        /// The device that was asked for.
        ordinal: i32,
        /// The file, or the bare name handed to the loader.
        library: PathBuf,
        /// The C name of the function.
        symbol: &'static str,
        /// The loader's words.
        reason: String,
    },
    /// No device has this number.
    #[error(
        "there is no device {ordinal}: {} to this process, numbered from 0. CUDA_VISIBLE_DEVICES chooses and \
         renumbers them, and a process sees one MIG slice only", Visible(*.count)
    )]
    NoSuchDevice {
        /// The device that was asked for.
        ordinal: i32,
        /// How many devices there are.
        count: i32,
    },
    /// A call of the driver failed.
    #[error("device {ordinal} could not be attached: {error}")]
    Call {
        /// The device that was asked for.
        ordinal: i32,
        /// The call that failed.
        #[source]
        error: CudaError,
    },
    /// This platform has no loading of CUDA.
    #[error(
        "device {ordinal} cannot be attached: CUDA can be loaded on Linux only, and this is {}",
        std::env::consts::OS
    )]
    Unsupported {
        /// The device that was asked for.
        ordinal: i32,
    },
}

struct Visible(i32);

impl fmt::Display for Visible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("1 device is visible"),
            count => write!(f, "{count} devices are visible"),
        }
    }
}
