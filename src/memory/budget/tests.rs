//! The budget rule on fixture files.

use super::*;

/// A directory of fixture files, removed at the end.
pub(in crate::memory) struct Fixture(PathBuf);

impl Fixture {
    pub(in crate::memory) fn new(name: &str, files: &[(&str, &str)]) -> Fixture {
        let root = std::env::temp_dir().join(format!("pinring-budget-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Fixture(root)
    }

    pub(in crate::memory) fn host(&self) -> HostFiles {
        HostFiles::at(self.0.join("proc"), self.0.join("cgroup"))
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// 76 GiB, in the kernel's words.
pub(in crate::memory) const MEMINFO_76_GIB: (&str, &str) =
    ("proc/meminfo", "MemTotal:       98765432 kB\nMemFree: 1 kB\nMemAvailable:   79691776 kB\n");

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn tightest(name: &str, files: &[(&str, &str)]) -> Option<(MemoryLimitKind, u64)> {
    let fixture = Fixture::new(name, files);
    let budget = fixture.host().budget();
    budget.tightest().map(|limit| (limit.kind, limit.headroom))
}

#[test]
fn a_small_container_on_a_large_host_has_the_containers_budget() {
    let found = tightest(
        "v2",
        &[
            MEMINFO_76_GIB,
            ("proc/self/cgroup", "0::/\n"),
            ("cgroup/memory.max", "67108864\n"),
            ("cgroup/memory.current", "0\n"),
        ],
    );
    assert_eq!(found, Some((MemoryLimitKind::CgroupV2, 64 * MIB)));
}

#[test]
fn max_is_no_limit() {
    let found = tightest(
        "v2-max",
        &[
            MEMINFO_76_GIB,
            ("proc/self/cgroup", "0::/a\n"),
            ("cgroup/a/memory.max", "max\n"),
            ("cgroup/a/memory.current", "5\n"),
        ],
    );
    assert_eq!(found, Some((MemoryLimitKind::MemAvailable, 76 * GIB)));
}

#[test]
fn every_ancestor_counts_and_the_tightest_wins() {
    let fixture = Fixture::new(
        "v2-deep",
        &[
            MEMINFO_76_GIB,
            ("proc/self/cgroup", "0::/a/b/c\n"),
            ("cgroup/a/memory.max", "1000\n"),
            ("cgroup/a/memory.current", "900\n"),
            ("cgroup/a/b/memory.max", "500\n"),
            ("cgroup/a/b/memory.current", "100\n"),
            ("cgroup/a/b/c/memory.max", "max\n"),
            ("cgroup/a/b/c/memory.current", "100\n"),
            ("cgroup/a/other/memory.max", "1\n"),
            ("cgroup/a/other/memory.current", "1\n"),
        ],
    );
    let budget = fixture.host().budget();
    let tightest = budget.tightest().unwrap();
    assert_eq!((tightest.limit, tightest.headroom), (1000, 100));
    assert!(tightest.file.ends_with("cgroup/a/memory.max"), "{tightest}");
    assert_eq!(budget.limits.len(), 3, "MemAvailable, a, a/b: {budget:?}");
}

#[test]
fn version_1_counts_its_file_cache_and_knows_its_word_for_unlimited() {
    let files = |limit: &'static str| {
        [
            MEMINFO_76_GIB,
            ("proc/self/cgroup", "9:name=systemd:/x\n4:cpu,memory:/job\n0::/\n"),
            ("cgroup/memory/job/memory.limit_in_bytes", limit),
            ("cgroup/memory/job/memory.usage_in_bytes", "9000\n"),
            (
                "cgroup/memory/job/memory.stat",
                "inactive_file 1\nactive_file 1\ntotal_inactive_file 3000\ntotal_active_file 2000\n",
            ),
        ]
    };
    // 10000 - (9000 - 3000 - 2000 / 2)
    assert_eq!(tightest("v1", &files("10000\n")), Some((MemoryLimitKind::CgroupV1, 5000)));
    for unlimited in ["9223372036854771712\n", "9223372036854710272\n", "18446744073709551615\n"] {
        let found = tightest("v1-unlimited", &files(unlimited));
        assert_eq!(found, Some((MemoryLimitKind::MemAvailable, 76 * GIB)), "{unlimited}");
    }
}

#[test]
fn a_container_without_a_cgroup_namespace_is_found_through_the_mount_table() {
    let fixture = Fixture::new(
        "bind",
        &[
            MEMINFO_76_GIB,
            ("proc/self/cgroup", "0::/kube/pod/box/sub\n"),
            (
                "proc/self/mountinfo",
                "30 23 0:26 /kube/pod/box /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n\
                 31 23 0:27 / /proc rw - proc proc rw\n",
            ),
            ("cgroup/memory.max", "4000\n"),
            ("cgroup/memory.current", "1000\n"),
            ("cgroup/sub/memory.max", "2000\n"),
            ("cgroup/sub/memory.current", "500\n"),
        ],
    );
    let budget = fixture.host().budget();
    assert_eq!(budget.limits.len(), 3, "{budget:?}");
    assert_eq!(budget.tightest().unwrap().headroom, 1500);
}

#[test]
fn both_versions_at_once_are_both_read() {
    let found = tightest(
        "hybrid",
        &[
            MEMINFO_76_GIB,
            ("proc/self/cgroup", "4:memory:/v1\n0::/v2\n"),
            (
                "proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                 36 31 0:33 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            ("cgroup/memory/v1/memory.limit_in_bytes", "800"),
            ("cgroup/memory/v1/memory.usage_in_bytes", "100"),
            ("cgroup/unified/v2/memory.max", "600"),
            ("cgroup/unified/v2/memory.current", "100"),
        ],
    );
    assert_eq!(found, Some((MemoryLimitKind::CgroupV2, 500)));
}

#[test]
fn usage_above_the_limit_leaves_nothing_and_a_path_outside_the_namespace_means_its_root() {
    let found = tightest(
        "outside",
        &[
            ("proc/self/cgroup", "0::/../neighbour\n"),
            ("cgroup/memory.max", "100"),
            ("cgroup/memory.current", "150"),
            ("neighbour/memory.max", "1"),
            ("neighbour/memory.current", "0"),
        ],
    );
    assert_eq!(found, Some((MemoryLimitKind::CgroupV2, 0)));
}

#[test]
fn unreadable_files_are_no_limit() {
    assert_eq!(tightest("empty", &[]), None);
    let garbage = [
        ("proc/meminfo", "MemAvailable: many kB\n"),
        ("proc/self/cgroup", "nonsense\n0::\n:::\n"),
        ("proc/self/mountinfo", "nonsense\n - \n1 2 3 / /x - cgroup\n"),
        ("cgroup/memory.max", "-1"),
    ];
    assert_eq!(tightest("garbage", &garbage), None);
}

#[test]
fn wsl_is_known_by_its_kernel() {
    let of = |release| {
        let fixture = Fixture::new("wsl", &[("proc/sys/kernel/osrelease", release)]);
        fixture.host().is_wsl()
    };
    assert!(of("5.15.153.1-microsoft-standard-WSL2\n"));
    assert!(!of("6.8.0-31-generic\n"));
}

#[test]
#[cfg(target_os = "linux")]
fn this_machine_has_a_budget() {
    let budget = HostFiles::system().budget();
    let available = budget.limits.iter().find(|limit| limit.kind == MemoryLimitKind::MemAvailable);
    assert!(available.is_some_and(|limit| limit.headroom > 0), "{budget:?}");
}
