//! What was pinned, with what, and how long each part took: the record of a start that went well.
//!
//! A plain copy of figures: it holds no ring, and says nothing about what happened afterwards.

use std::fmt;
use std::time::Duration;

use crate::cuda::CudaReport;

use super::numa::NodeBytes;

/// How long each step of making a ring took.
///
/// Steps that did not occur (all that have to do with CUDA, without pinning) are zero.
///
/// ```
/// let times = pinring::PinTrial::new(4096, 16).map_only()?.times;
/// assert_eq!(times.register, std::time::Duration::ZERO);
/// assert_eq!(times.total(), times.map + times.prefault);
/// # Ok::<(), pinring::RingError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PinTimes {
    /// Finding CUDA and initialising it. Near zero if this process had done that before.
    pub find: Duration,
    /// Reserving addresses.
    pub map: Duration,
    /// Having the kernel back them with pages.
    pub prefault: Duration,
    /// Page-locking them.
    pub register: Duration,
    /// Asking CUDA about every slot.
    pub verify: Duration,
}

impl PinTimes {
    /// All of it.
    pub fn total(&self) -> Duration {
        self.find + self.map + self.prefault + self.register + self.verify
    }
}

impl fmt::Display for PinTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.3} s (find {:.3}, map {:.3}, pre-fault {:.3}, register {:.3}, verify {:.3})",
            self.total().as_secs_f64(),
            self.find.as_secs_f64(),
            self.map.as_secs_f64(),
            self.prefault.as_secs_f64(),
            self.register.as_secs_f64(),
            self.verify.as_secs_f64(),
        )
    }
}

/// How a ring came to be page-locked. Print it: the first thing to look at when a start is slow or picked the wrong
/// CUDA.
///
/// ```no_run
/// let outcome = pinring::PinTrial::new(1 << 20, 1024).run()?;
/// println!("{}", outcome.report);
/// assert_eq!(outcome.report.page_locked_bytes, 1 << 30);
/// # Ok::<(), pinring::RingError>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PinReport {
    /// The CUDA in use: library, versions, and every candidate that was tried.
    pub cuda: CudaReport,
    /// Bytes that are page-locked: all of the ring.
    pub page_locked_bytes: usize,
    /// Slots of the ring; each was verified at both ends.
    pub slots_verified: usize,
    /// Registrations that the ring is made of, each of whole slots.
    pub pieces: usize,
    /// Threads that had the pages faulted in.
    pub prefault_threads: usize,
    /// Bytes that the kernel holds in transparent huge pages; `None` where it does not say. Much less than the whole
    /// means a slow start.
    pub huge_page_bytes: Option<usize>,
    /// Where the ring lies, by NUMA node; `None` where the kernel does not say.
    pub nodes: Option<Vec<NodeBytes>>,
    /// The node of the first device that the feed attaches, where the host has several and the kernel knows it. The ring
    /// was to lie there.
    pub device_node: Option<u32>,
    /// How long it took.
    pub times: PinTimes,
}

impl fmt::Display for PinReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "page-locked {} bytes in {} registration{}, {} slots verified",
            self.page_locked_bytes,
            self.pieces,
            if self.pieces == 1 { "" } else { "s" },
            self.slots_verified,
        )?;
        writeln!(f, "  time: {}", self.times)?;
        let threads = self.prefault_threads;
        write!(f, "  pages: faulted in by {threads} thread{}; ", if threads == 1 { "" } else { "s" })?;
        match self.huge_page_bytes {
            Some(bytes) => writeln!(f, "{bytes} bytes in huge pages")?,
            None => writeln!(f, "whether in huge pages is not known")?,
        }
        let nodes = self.nodes.as_deref().unwrap_or_default();
        if nodes.len() > 1 || self.device_node.is_some() {
            let lies = nodes.iter().map(NodeBytes::to_string).collect::<Vec<_>>();
            let lies = if lies.is_empty() { "where it lies is not known".to_owned() } else { lies.join(", ") };
            write!(f, "  memory: {lies}")?;
            match self.device_node {
                Some(node) => writeln!(f, "; the first device is at node {node}")?,
                None => writeln!(f)?,
            }
        }
        write!(f, "  {}", self.cuda)
    }
}
