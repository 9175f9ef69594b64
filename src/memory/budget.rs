//! How much memory a ring may take before the kernel starts killing: asked before anything is allocated.
//!
//! The budget is the least of `MemAvailable` and of what is left in every memory cgroup above this process, version 1
//! and 2. Page-locked memory can be neither swapped nor reclaimed, so swap is not counted, and of a cgroup's own
//! usage only its file cache counts as free (all of the inactive list and half of the active one, since the kernel
//! gives up the first without a fight and part of the second). A limit that cannot be read is no limit: this is a
//! check that saves a kill, not an authority. Both roots are parameters, so the rule is tested on files.
//!
//! It does not look at `memory.high` (which slows, and does not kill), at NUMA nodes, or at what other processes will
//! ask for next.

use std::fmt;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Where the kernel's files are.
#[derive(Debug, Clone)]
pub(crate) struct HostFiles {
    proc_root: PathBuf,
    cgroup_root: PathBuf,
    sys_root: PathBuf,
}

/// Which rule a [`MemoryLimit`] comes from.
///
/// ```
/// use pinring::MemoryLimitKind;
/// assert_eq!(MemoryLimitKind::CgroupV2.to_string(), "cgroup v2 memory.max");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryLimitKind {
    /// `MemAvailable` of `/proc/meminfo`: what the kernel thinks can be had without swapping.
    MemAvailable,
    /// `memory.limit_in_bytes` of a version 1 memory cgroup.
    CgroupV1,
    /// `memory.max` of a version 2 cgroup.
    CgroupV2,
}

impl fmt::Display for MemoryLimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryLimitKind::MemAvailable => "MemAvailable",
            MemoryLimitKind::CgroupV1 => "cgroup v1 memory.limit_in_bytes",
            MemoryLimitKind::CgroupV2 => "cgroup v2 memory.max",
        })
    }
}

/// One bound on the memory of this process, as read when the ring was asked for.
///
/// ```
/// # use pinring::{PinTrial, RingError};
/// // A ring of 1 TiB of slots does not fit into this machine, and the error says what stands in the way.
/// if let Err(RingError::Budget(refusal)) = PinTrial::new(1 << 30, 1 << 30).map_only() {
///     for limit in &refusal.limits {
///         println!("{limit}");
///     }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryLimit {
    /// Which rule this is.
    pub kind: MemoryLimitKind,
    /// The file it was read from.
    pub file: PathBuf,
    /// The limit itself, in bytes; for `MemAvailable` the same as `headroom`.
    pub limit: u64,
    /// Bytes that are still to be had under this limit.
    pub headroom: u64,
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryLimit { kind, file, limit, headroom } = self;
        write!(f, "{kind} leaves {headroom} bytes")?;
        if *kind != MemoryLimitKind::MemAvailable {
            write!(f, " of {limit}")?;
        }
        write!(f, " ({})", file.display())
    }
}

/// Everything that bounds the memory of this process.
#[derive(Debug, Clone)]
pub(crate) struct Budget {
    /// In no order.
    pub(crate) limits: Vec<MemoryLimit>,
}

impl Budget {
    /// The limit that leaves least; `None` where nothing bounds this process, or nothing could be read.
    pub(crate) fn tightest(&self) -> Option<&MemoryLimit> {
        self.limits.iter().min_by_key(|limit| limit.headroom)
    }
}

/// What bounds the memory of this process most tightly now, if anything does.
pub(crate) fn memory_limit() -> Option<MemoryLimit> {
    HostFiles::system().budget().tightest().cloned()
}

/// Under these directories of the cgroup root the kernel's hierarchies are, if the mount table does not say
/// otherwise.
const DEFAULT_MOUNTS: [(MemoryLimitKind, &str); 3] =
    [(MemoryLimitKind::CgroupV2, ""), (MemoryLimitKind::CgroupV2, "unified"), (MemoryLimitKind::CgroupV1, "memory")];

/// A limit at or above this is version 1's way to say "none" (the largest multiple of the page size that fits an
/// `i64`).
const NO_LIMIT: u64 = 1 << 62;

/// One mounted hierarchy that can limit memory.
struct Hierarchy {
    kind: MemoryLimitKind,
    mount: PathBuf,
    /// The cgroup that the mount shows as its root; not `/` in containers without a cgroup namespace.
    root: PathBuf,
}

impl HostFiles {
    /// The files of the running system.
    pub(crate) fn system() -> HostFiles {
        HostFiles::at("/proc", "/sys/fs/cgroup").with_sys("/sys")
    }

    /// Files under other roots, laid out as `/proc` and `/sys/fs/cgroup` are; nothing is known of devices and nodes.
    pub(crate) fn at(proc_root: impl Into<PathBuf>, cgroup_root: impl Into<PathBuf>) -> HostFiles {
        HostFiles { proc_root: proc_root.into(), cgroup_root: cgroup_root.into(), sys_root: "/nonexistent".into() }
    }

    /// With a root laid out as `/sys` is.
    pub(super) fn with_sys(self, sys_root: impl Into<PathBuf>) -> HostFiles {
        HostFiles { sys_root: sys_root.into(), ..self }
    }

    pub(super) fn proc_root(&self) -> &Path {
        &self.proc_root
    }

    pub(super) fn sys_root(&self) -> &Path {
        &self.sys_root
    }

    /// Reads every limit there is.
    pub(crate) fn budget(&self) -> Budget {
        let mut limits = Vec::from_iter(self.mem_available());
        for hierarchy in self.hierarchies() {
            if let Some(cgroup) = self.cgroup_of_this_process(hierarchy.kind) {
                limits.extend(ancestors(&hierarchy, &cgroup).filter_map(|directory| match hierarchy.kind {
                    MemoryLimitKind::CgroupV1 => v1_limit(&directory),
                    _ => v2_limit(&directory),
                }));
            }
        }
        Budget { limits }
    }

    /// Whether this kernel is that of the Windows Subsystem for Linux, whose pinned memory has a limit of its own.
    pub(crate) fn is_wsl(&self) -> bool {
        fs::read_to_string(self.proc_root.join("sys/kernel/osrelease"))
            .is_ok_and(|release| release.to_ascii_lowercase().contains("microsoft"))
    }

    fn mem_available(&self) -> Option<MemoryLimit> {
        let file = self.proc_root.join("meminfo");
        let text = fs::read_to_string(&file).ok()?;
        let kib = text.lines().find_map(|line| {
            line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        })?;
        let bytes = kib.saturating_mul(1024);
        Some(MemoryLimit { kind: MemoryLimitKind::MemAvailable, file, limit: bytes, headroom: bytes })
    }

    /// Where the hierarchies are mounted: by the mount table, else at the usual places.
    fn hierarchies(&self) -> Vec<Hierarchy> {
        let table = fs::read_to_string(self.proc_root.join("self/mountinfo")).unwrap_or_default();
        let mounted: Vec<_> = table.lines().filter_map(|line| self.mounted(line)).collect();
        if !mounted.is_empty() {
            return mounted;
        }
        DEFAULT_MOUNTS
            .into_iter()
            .map(|(kind, under)| Hierarchy { kind, mount: self.cgroup_root.join(under), root: PathBuf::from("/") })
            .collect()
    }

    /// Reads one line of the mount table: `id parent device root mount-point options… - type source super-options`.
    fn mounted(&self, line: &str) -> Option<Hierarchy> {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, mount) = (left.next()?, Path::new(left.next()?));
        let mut right = right.split(' ');
        let kind = match right.next()? {
            "cgroup2" => MemoryLimitKind::CgroupV2,
            "cgroup" if right.nth(1)?.split(',').any(|option| option == "memory") => MemoryLimitKind::CgroupV1,
            _ => return None,
        };
        // The table speaks of the system's own root; ours may be another.
        let mount = match mount.strip_prefix("/sys/fs/cgroup") {
            Ok(under) => self.cgroup_root.join(under),
            Err(_) => mount.to_path_buf(),
        };
        Some(Hierarchy { kind, mount, root: PathBuf::from(root) })
    }

    /// The path of this process in the hierarchies of `kind`: `0::/path` (version 2) or `id:…,memory,…:/path`.
    fn cgroup_of_this_process(&self, kind: MemoryLimitKind) -> Option<PathBuf> {
        let text = fs::read_to_string(self.proc_root.join("self/cgroup")).ok()?;
        text.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let ours = match kind {
                MemoryLimitKind::CgroupV1 => controllers.split(',').any(|name| name == "memory"),
                _ => controllers.is_empty(),
            };
            ours.then(|| PathBuf::from(path))
        })
    }
}

/// The directories of `cgroup` and of all its ancestors, as far as the mount shows them. A path that the mount does
/// not show (a process moved out of its namespace: `/../x`) leaves the mount's root, which bounds it all the same.
fn ancestors(hierarchy: &Hierarchy, cgroup: &Path) -> impl Iterator<Item = PathBuf> {
    let below = cgroup.strip_prefix(&hierarchy.root).or_else(|_| cgroup.strip_prefix("/"));
    let below = below.unwrap_or(Path::new(""));
    let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    let below = if plain { below } else { Path::new("") };
    below.ancestors().map(|part| hierarchy.mount.join(part)).collect::<Vec<_>>().into_iter()
}

fn v2_limit(directory: &Path) -> Option<MemoryLimit> {
    let file = directory.join("memory.max");
    let limit = read_number(&file)?; // "max" is no number, and no limit
    let used = read_number(&directory.join("memory.current"))?;
    let cache = file_cache(&directory.join("memory.stat"), "");
    Some(limit_of(MemoryLimitKind::CgroupV2, file, limit, used, cache))
}

fn v1_limit(directory: &Path) -> Option<MemoryLimit> {
    let file = directory.join("memory.limit_in_bytes");
    let limit = read_number(&file).filter(|limit| *limit < NO_LIMIT)?;
    let used = read_number(&directory.join("memory.usage_in_bytes"))?;
    let cache = file_cache(&directory.join("memory.stat"), "total_");
    Some(limit_of(MemoryLimitKind::CgroupV1, file, limit, used, cache))
}

fn limit_of(kind: MemoryLimitKind, file: PathBuf, limit: u64, used: u64, cache: u64) -> MemoryLimit {
    let headroom = limit.saturating_sub(used.saturating_sub(cache));
    MemoryLimit { kind, file, limit, headroom }
}

/// The part of a cgroup's usage that the kernel can take back from files: all that is inactive, half of what is
/// active.
fn file_cache(stat: &Path, prefix: &str) -> u64 {
    let text = fs::read_to_string(stat).unwrap_or_default();
    let field = |name: &str| {
        text.lines()
            .find_map(|line| {
                let value = line.strip_prefix(prefix)?.strip_prefix(name)?.strip_prefix(' ')?;
                value.trim().parse::<u64>().ok()
            })
            .unwrap_or(0)
    };
    field("inactive_file").saturating_add(field("active_file") / 2)
}

fn read_number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
pub(in crate::memory) mod tests;
