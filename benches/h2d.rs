//! How many bytes a second reach the device through a feed, and do they arrive whole?
//!
//! ```text
//! cargo bench --bench h2d -- [WORD]… [--quick] [--test] [--json PATH] [--pairs N] [--writers N]
//! cargo bench --bench h2d -- --torn BATCHES [--writers N]
//! cargo bench --bench h2d -- --soak SECONDS [--writers N]
//! cargo bench --bench h2d -- --devices N [--json PATH] [--pairs N]
//! cargo bench --bench h2d -- --peers TURNS [--writers N]
//! ```
//!
//! *Rates*: batches of 64 KB to 256 MB in 1, 3, 44 and 256 leaves, in turns of one run: one `cudaMemcpyAsync` a batch
//! from page-locked memory (the link's own rate); the crate, with *rows there*: a writer commits what lies in the ring
//! already, so that only the feed is at work; the crate, with *rows written*: eight writers copy them from memory into
//! the ring, so that ingest and the copies share the host's memory; and one `cudaMemcpyAsync` for each leaf. Every batch
//! of a turn is taken and dropped at once. Cases are named like `34MB/44-leaves`.
//!
//! *Torn*: so many batches of 1 to 34 MB from two feeds, whose writers run as fast as they can, through a link that a
//! third stream keeps busy. The learner weighs each batch on its stream, now and then behind work that holds it up, and
//! drops the handle at once; some are downloaded and compared word by word. Not one may be torn. Before that the same
//! check must find what is torn on purpose: memory that is overwritten while its copy is queued.
//!
//! *Soak*: a feed runs with batches and downloads for so long, and feeds are started and stopped; host and device
//! memory must stay what they were.
//!
//! *Devices*: one ring feeds N devices, on demand and by rounds, with rows there; bytes a second of all together over those
//! of one device fed alone, beside the same for copies by hand, in turns of one run.
//!
//! *Peers*: lines of JSON as `scripts/peers/run.py` prints them, of the same workloads.

mod common;
mod gpu;
#[path = "gpu/devices.rs"]
#[allow(unsafe_code)]
mod devices;
#[path = "gpu/peers.rs"]
#[allow(unsafe_code)]
mod peers;
#[path = "gpu/rates.rs"]
#[allow(unsafe_code)]
mod rates;
#[path = "gpu/soak.rs"]
#[allow(unsafe_code)]
mod soak;
#[path = "gpu/torn.rs"]
#[allow(unsafe_code)]
mod torn;

use std::process::ExitCode;

/// Batches of the check for torn ones, where only checks run.
const TORN_IN_CHECK: usize = 300;

fn main() -> ExitCode {
    gpu::main("h2d", &["--torn", "--soak", "--devices", "--peers", "--writers"], |setting, report| {
        let (torn, soak) = (setting.flags.get("--torn"), setting.flags.get("--soak"));
        if let Some(count) = setting.flags.get("--devices") {
            return devices::run(setting, report, count);
        }
        if let Some(turns) = setting.flags.get("--peers") {
            return peers::run(setting, turns);
        }
        if torn.is_none() && soak.is_none() {
            rates::run(setting, report)?;
        }
        match torn {
            Some(batches) => torn::run(setting, report, batches)?,
            None if !setting.is_timing() => torn::run(setting, report, TORN_IN_CHECK)?,
            None => {}
        }
        soak.map_or(Ok(()), |seconds| soak::run(setting, report, seconds))
    })
}
