//! Which NUMA node a ring's pages are to lie on, and on which they lie.
//!
//! A page lies on the node of the processor that touches it first. So the threads that pre-fault a ring for a device run
//! on processors of that device's node meanwhile ([`OnNode`]): unlike a memory policy this needs no privilege, also in
//! containers, and ends with them. Where it cannot be had the ring is as good as without, only farther from its device:
//! nothing here is an error, and the report says what came of it.

use std::fmt;
use std::fs;
use std::ops::Range;

use super::budget::HostFiles;

/// Bytes of a ring that lie on one NUMA node.
///
/// ```
/// # use pinring::PinTrial;
/// // Where CUDA is there:
/// if let Ok(outcome) = PinTrial::new(1 << 20, 4).run() {
///     for on_node in outcome.report.nodes.iter().flatten() {
///         println!("{on_node}"); // "4194304 bytes on node 0"
///     }
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeBytes {
    /// The kernel's number of the node.
    pub node: u32,
    /// Bytes in memory there.
    pub bytes: usize,
}

impl fmt::Display for NodeBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes on node {}", self.bytes, self.node)
    }
}

/// The processors of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) number: u32,
    pub(super) processors: Vec<usize>,
}

impl HostFiles {
    /// Whether this host has several nodes with memory, so that a ring can lie on the wrong one.
    fn has_several_nodes(&self) -> bool {
        let nodes = |file| self.sys_file(&format!("devices/system/node/{file}"));
        nodes("has_memory").or_else(|| nodes("online")).is_some_and(|list| numbers(&list).len() > 1)
    }

    /// The node of the device at a PCI address, if there are several and the kernel knows. `address` is asked for only then.
    pub(super) fn node_near(&self, address: impl FnOnce() -> Option<String>) -> Option<Node> {
        if !self.has_several_nodes() {
            return None;
        }
        let address = address()?.to_lowercase();
        // The driver's domain has eight digits on some systems, the kernel's four.
        let short = address.strip_prefix("0000").filter(|rest| rest.len() == "0000:00:00.0".len()).unwrap_or(&address);
        let number = self.sys_file(&format!("bus/pci/devices/{short}/numa_node"))?.trim().parse().ok()?; // -1: not known
        let processors = numbers(&self.sys_file(&format!("devices/system/node/node{number}/cpulist"))?);
        Some(Node { number, processors })
    }

    fn sys_file(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.sys_root().join(path)).ok()
    }

    /// On which nodes the pages of an address range lie; `None` where the kernel does not say.
    pub(super) fn nodes_of(&self, range: Range<usize>) -> Option<Vec<NodeBytes>> {
        let maps = fs::read_to_string(self.proc_root().join("self/numa_maps")).ok()?;
        let mut nodes: Vec<NodeBytes> = Vec::new();
        for line in maps.lines() {
            let mut words = line.split_ascii_whitespace();
            let start = words.next().and_then(|word| usize::from_str_radix(word, 16).ok())?;
            if !range.contains(&start) {
                continue; // a mapping of somebody else's: ours is fenced, so none begins before it and reaches into it
            }
            let words = words.collect::<Vec<_>>();
            let page = words.iter().find_map(|word| word.strip_prefix("kernelpagesize_kB=")?.parse::<usize>().ok());
            for word in words {
                let counted = word.strip_prefix('N').and_then(|word| word.split_once('='));
                let Some((Ok(node), Ok(pages))) = counted.map(|(n, p)| (n.parse::<u32>(), p.parse::<usize>())) else {
                    continue;
                };
                let bytes = page.unwrap_or(4).saturating_mul(1024).saturating_mul(pages);
                match nodes.iter_mut().find(|other| other.node == node) {
                    Some(other) => other.bytes = other.bytes.saturating_add(bytes),
                    None => nodes.push(NodeBytes { node, bytes }),
                }
            }
        }
        nodes.sort_by_key(|on_node| on_node.node);
        (!nodes.is_empty()).then_some(nodes)
    }
}

/// No host has more processors, or nodes.
const MOST: usize = 1 << 16;

/// The numbers of a list as the kernel writes them: `0-3,8,10-11`. What is none is left out.
fn numbers(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    // A list that says so is not one.
    let sane = |range: &std::ops::RangeInclusive<usize>| range.end().saturating_sub(*range.start()) < MOST;
    list.trim().split(',').filter_map(range).filter(sane).flatten().take(MOST).collect()
}

/// Keeps the calling thread on a node's processors until it is dropped: then it may run where it might before.
#[derive(Debug)]
pub(super) struct OnNode {
    #[cfg(target_os = "linux")]
    before: rustix::thread::CpuSet,
}

impl OnNode {
    /// `None` where this thread may run on no processor of the node, or the system does not let it choose.
    #[cfg(target_os = "linux")]
    pub(super) fn enter(node: &Node) -> Option<OnNode> {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        let before = sched_getaffinity(None).ok()?;
        let mut there = CpuSet::new();
        let allowed = node.processors.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU && before.is_set(cpu));
        allowed.for_each(|&cpu| there.set(cpu));
        if there.count() == 0 {
            return None;
        }
        sched_setaffinity(None, &there).ok()?;
        Some(OnNode { before })
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn enter(_: &Node) -> Option<OnNode> {
        None
    }
}

#[cfg(target_os = "linux")]
impl Drop for OnNode {
    fn drop(&mut self) {
        let _ = rustix::thread::sched_setaffinity(None, &self.before); // it was so before; a refusal leaves a slower thread
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// A host with these files under `sys`.
    fn host(name: &str, files: &[(&str, &str)]) -> HostFiles {
        let root = std::env::temp_dir().join(format!("numa-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        HostFiles::at(root.join("proc"), root.join("cgroup")).with_sys(root.join("sys"))
    }

    const TWO: &[(&str, &str)] = &[
        ("sys/devices/system/node/has_memory", "0-1\n"),
        ("sys/devices/system/node/node1/cpulist", "2-3,6\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/numa_node", "1\n"),
        ("sys/bus/pci/devices/0000:c2:00.0/numa_node", "-1\n"),
    ];

    #[test]
    fn a_devices_node_is_the_kernels() {
        let host = host("two", TWO);
        let near = |address: &str| host.node_near(|| Some(address.into()));
        let one = Some(Node { number: 1, processors: vec![2, 3, 6] });
        assert_eq!(near("0000:C1:00.0"), one, "the driver writes capitals");
        assert_eq!(near("00000000:C1:00.0"), one);
        assert_eq!(near("0000:c2:00.0"), None, "the kernel does not know");
        assert_eq!(near("0000:c3:00.0"), None, "no such device");
        assert_eq!(host.node_near(|| None), None);
    }

    #[test]
    fn with_one_node_nothing_is_asked() {
        for (name, list) in [("one", "0\n"), ("none", "\n"), ("odd", "0-99999999999,x\n")] {
            let host = host(name, &[("sys/devices/system/node/has_memory", list)]);
            assert_eq!(host.node_near(|| unreachable!("the driver")), None, "{list:?}");
        }
        assert_eq!(HostFiles::at("/nonexistent", "/nonexistent").node_near(|| unreachable!()), None);
    }

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(numbers("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(numbers("\n"), []);
        assert_eq!(numbers("3-1,a,5,-2"), [5]);
    }

    #[test]
    fn pages_are_counted_by_node_within_the_range() {
        let maps = "\
            10000000 default anon=512 dirty=512 N0=512 kernelpagesize_kB=4\n\
            20000000 default anon=3 N0=1 N1=2 kernelpagesize_kB=4\n\
            20200000 bind:1 anon=1 N1=1 kernelpagesize_kB=2048\n\
            30000000 default\n";
        let host = host("maps", &[("proc/self/numa_maps", maps)]);
        let nodes = host.nodes_of(0x2000_0000..0x3000_0000).unwrap();
        let expected = [(0, 4096), (1, 2 * 4096 + (2 << 20))];
        assert_eq!(nodes.iter().map(|n| (n.node, n.bytes)).collect::<Vec<_>>(), expected);
        assert_eq!(nodes[0].to_string(), "4096 bytes on node 0");
        assert_eq!(host.nodes_of(0x3000_0000..0x4000_0000), None, "nothing is in memory there");
        assert_eq!(HostFiles::at("/nonexistent", "/nonexistent").nodes_of(0..usize::MAX), None);
    }

    /// Whatever lies where the kernel's files should, what comes of it is bounded, and no arithmetic goes wrong.
    #[test]
    fn files_that_are_not_the_kernels_do_no_harm() {
        assert_eq!(numbers(&"0-65535,".repeat(10_000)).len(), MOST);
        for list in ["-1", "--", "0-", "-", ",,,", "0x1-2", "18446744073709551615-18446744073709551615,0", "\u{fffd}\0"]
        {
            assert!(numbers(list).len() <= 2, "{list:?}");
        }
        let most = usize::MAX;
        let maps = format!(
            "1000 default N0={most} N0={most} N1=1 kernelpagesize_kB={most}\n\
             2000 N1={most} N=1 N99999999999=1 N1=-1 N2=x kernelpagesize_kB=-4\n"
        );
        let nodes = host("garbage", &[("proc/self/numa_maps", &maps)]).nodes_of(0..most).unwrap();
        assert_eq!(nodes.iter().map(|n| (n.node, n.bytes)).collect::<Vec<_>>(), [(0, most), (1, most)]);
        for maps in ["", "\n", "zz default N0=1\n", "\0\0\0"] {
            assert_eq!(host("none", &[("proc/self/numa_maps", maps)]).nodes_of(0..most), None, "{maps:?}");
        }
        for (number, list) in [("99999999999999999999", "0"), ("-7", "0"), ("1/../..", "0"), ("", "0")] {
            let mut files = TWO.to_vec();
            files[2].1 = number;
            files[1].1 = list;
            assert_eq!(host(&format!("node{}", number.len()), &files).node_near(|| Some("0000:c1:00.0".into())), None);
        }
    }

    #[test]
    fn a_thread_is_on_the_node_for_a_while_and_then_where_it_was() {
        use rustix::thread::sched_getaffinity;
        std::thread::spawn(|| {
            let before = sched_getaffinity(None).unwrap();
            let cpus = || (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| before.is_set(cpu));
            let last = cpus().next_back().unwrap();
            let beyond = (0..).find(|&cpu| !before.is_set(cpu) || cpu >= rustix::thread::CpuSet::MAX_CPU).unwrap();
            let on_node = OnNode::enter(&Node { number: 0, processors: vec![last, beyond] }).unwrap();
            let there = sched_getaffinity(None).unwrap();
            assert!(there.count() == 1 && there.is_set(last));
            drop(on_node);
            assert_eq!(sched_getaffinity(None).unwrap(), before);
            for nowhere in [vec![], vec![beyond], vec![usize::MAX]] {
                assert!(OnNode::enter(&Node { number: 9, processors: nowhere }).is_none());
            }
            assert_eq!(sched_getaffinity(None).unwrap(), before);
        })
        .join()
        .unwrap();
    }
}
