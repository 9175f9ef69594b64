//! How long does feeding keep the learner's thread from launching kernels?
//!
//! ```text
//! cargo bench --bench dispatch_stall -- [WORD]… [--quick] [--test] [--json PATH] [--steps N] [--writers N]
//! ```
//!
//! A step launches L small kernels while one batch of 34.3 MB (512 rows of 67 KB in 44 leaves) arrives, then waits for
//! its kernels. The ways of feeding take turns, step by step, on one thread that has the context current, as a
//! framework's learner has: nothing at all; copies by the learner's own thread, from ordinary memory and from
//! page-locked memory, as one copy and leaf by leaf; by a feeder thread written by hand, from both kinds of memory; by
//! the crate with *rows there* (a writer commits what lies in the ring already, as a feed's writers did before this step);
//! and by the crate with *rows written beside* (eight threads write the 34 MB of the next batch while the step runs). *blocked* is the time in calls that take or copy the batch;
//! *dispatch* is all of the learner's thread before it waits: those calls, the launches, and the release. *idle* is the
//! time of a step in which the device ran none of the L kernels. CPU is what the batch cost in all threads but for the
//! launches and the waits; for the crate it includes the writing of the rows. Differences to *nothing* have an interval
//! of 95 %. The ways come in another order in each round. While a copy from the host runs, every launch takes longer, whoever
//! issued the copy, since both use the link; *2nd half* compares the launches of the second half of a step alone, by when
//! a copy from page-locked memory is over.
//!
//! Cases, chosen by words: `L=500`, `L=2000`, `L=10000`; `sweep` (larger kernels, until the device is the bottleneck);
//! `graph` (the step as one CUDA graph); `publish` (weights out of the device); `overhead` (what `next_batch` and drop
//! cost beside the calls they are made of). `--steps` of each way, 400 at least unless asked otherwise; a quarter of
//! that in the sweep and where weights are large.
//!
//! What it does not show: a learner that runs several steps ahead of its device hides a part of such stalls.

mod common;
mod gpu;
#[path = "gpu/overhead.rs"]
#[allow(unsafe_code)]
mod overhead;
#[path = "gpu/publish.rs"]
#[allow(unsafe_code)]
mod publish;
#[path = "gpu/stall.rs"]
#[allow(unsafe_code)]
mod stall;
#[path = "gpu/ways.rs"]
#[allow(unsafe_code)]
mod ways;

use gpu::Setting;
use std::process::ExitCode;

fn main() -> ExitCode {
    gpu::main("dispatch_stall", &["--steps", "--writers"], |setting, report| {
        let steps = setting.number("--steps", 400, 40);
        stall::run(setting, report, steps)?;
        publish::run(setting, report, steps)?;
        overhead::run(setting, report)
    })
}

/// Whether any case of these names was asked for.
fn wants_any(setting: &Setting, names: &[&str]) -> bool {
    names.iter().any(|name| setting.args.wants(name))
}
