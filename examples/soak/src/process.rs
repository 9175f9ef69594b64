//! What this process holds, as the kernel sees it.

use std::fmt;

/// A look at the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Bytes of memory that are in use.
    pub rss: usize,
    /// Open files.
    pub files: usize,
    /// Threads.
    pub threads: usize,
    /// Bytes of rings: what is mapped and wiped on fork, but for the one page by which forks are noticed.
    pub rings: usize,
}

impl Held {
    /// Now; zeros where the system does not tell.
    pub fn now() -> Held {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<usize>().ok()
        };
        let files = std::fs::read_dir("/proc/self/fd").map_or(0, |files| files.count().saturating_sub(1));
        let (rss, threads) = (number("VmRSS:").unwrap_or(0) << 10, number("Threads:").unwrap_or(0));
        Held { rss, files, threads, rings: rings() }
    }

    /// When what was ended is off the kernel's lists: a joined thread is on them for a moment longer.
    pub fn settled(threads: usize) -> Held {
        let mut held = Held::now();
        for _ in 0..200 {
            if held.threads <= threads {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
            held = Held::now();
        }
        held
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Held { rss, files, threads, rings } = self;
        write!(f, "{:.1} MB in use, {files} files, {threads} threads, {rings} bytes of rings", *rss as f64 / 1e6)
    }
}

fn rings() -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let (mut rings, mut current) = (0, 0);
    for line in smaps.lines() {
        let hex = |text| usize::from_str_radix(text, 16).ok();
        let first = line.split(' ').next().unwrap_or("");
        if let Some((Some(start), Some(end))) = first.split_once('-').map(|(start, end)| (hex(start), hex(end))) {
            current = end - start;
        } else if line.strip_prefix("VmFlags:").is_some_and(|flags| flags.split(' ').any(|flag| flag == "wf")) {
            rings += if current > 4096 { current } else { 0 };
        }
    }
    rings
}
