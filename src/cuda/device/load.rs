//! The driver's library: opened once for each name that it is asked for by, and never closed.

use super::{DeviceError, DeviceTable};
use crate::cuda::table::{MissingSymbol, full_text};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The drivers loaded so far, by the name that they were asked for. A failure is not kept.
static LOADED: Mutex<Vec<(PathBuf, DeviceTable)>> = Mutex::new(Vec::new());

pub(super) fn driver(path: &Path, ordinal: i32) -> Result<DeviceTable, DeviceError> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, table)) = loaded.iter().find(|(name, _)| name == path) {
        return Ok(*table);
    }
    // SAFETY: loading runs the library's initialisers. The name is that of NVIDIA's driver or the user's own
    // choice, whose initialisers are made to run in any process and thread.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| DeviceError::NotLoaded { ordinal, library: path.into(), reason: full_text(&error) })?;
    let table = DeviceTable::from_symbols(&library);
    // Never closed, whatever becomes of it: functions of it may be in use by others.
    let _ = library.into_raw();
    let table = table.map_err(|MissingSymbol { symbol, reason }| DeviceError::MissingSymbol {
        ordinal,
        library: path.into(),
        symbol,
        reason,
    })?;
    loaded.push((path.into(), table));
    Ok(table)
}
