//! What this process has mapped, read from `/proc/self/maps`: CUDA runtimes by file name, and the file behind an
//! address. Parsing only; nothing is opened here but that one file.

use super::names::Name;
use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What the kernel puts behind the name of a file that is no longer there. Never part of a name that we open.
const DELETED: &[u8] = b" (deleted)";

/// One file mapped into this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Image {
    /// Its path, without the kernel's mark.
    pub(super) path: PathBuf,
    /// Whether the file was removed or replaced on disk since it was mapped.
    pub(super) replaced: bool,
    /// Where it lies.
    pub(super) ranges: Vec<Range<usize>>,
}

impl Image {
    pub(super) fn holds(&self, address: usize) -> bool {
        self.ranges.iter().any(|range| range.contains(&address))
    }

    /// What its file name is to the search.
    pub(super) fn name(&self) -> Name {
        self.path.file_name().map_or(Name::Other, Name::parse)
    }
}

/// The maps file of this process.
pub(super) fn read() -> Result<Vec<u8>, String> {
    std::fs::read("/proc/self/maps").map_err(|e| format!("/proc/self/maps cannot be read: {e}"))
}

/// Every file in it, in the order of addresses.
pub(super) fn images(maps: &[u8]) -> Vec<Image> {
    // Two files of one path (the old image of a replaced library, and the new one) differ in device and inode.
    let mut keys: Vec<((&str, &str), &[u8])> = Vec::new();
    let mut images: Vec<Image> = Vec::new();
    for line in maps.split(|&b| b == b'\n') {
        let Some(Line { range, file, path }) = parse(line) else { continue };
        match keys.iter().position(|key| *key == (file, path)) {
            Some(at) => images[at].ranges.push(range),
            None => {
                keys.push((file, path));
                let stripped = path.strip_suffix(DELETED);
                let clean = Path::new(OsStr::from_bytes(stripped.unwrap_or(path))).to_owned();
                images.push(Image { path: clean, replaced: stripped.is_some(), ranges: vec![range] });
            }
        }
    }
    images
}

/// The CUDA runtimes among them in the order of [`RuntimeName::rank`](super::names::RuntimeName::rank), then path:
/// never that of addresses, which the kernel shuffles. After them what only looks like one.
pub(super) fn runtimes(maps: &[u8]) -> Vec<(Name, Image)> {
    let mut found: Vec<(Name, Image)> = images(maps).into_iter().map(|image| (image.name(), image)).collect();
    found.retain(|(name, _)| *name != Name::Other);
    found.sort_by_key(|(name, image)| {
        let rank = if let Name::Runtime(name) = name { Some(name.rank()) } else { None };
        (rank.is_none(), rank, image.path.clone(), image.replaced)
    });
    found
}

/// The file that is mapped at an address.
pub(super) fn file_at(address: usize) -> Option<PathBuf> {
    images(&read().ok()?).into_iter().find(|image| image.holds(address)).map(|image| image.path)
}

/// One line: `start-end perms offset device inode   path`.
struct Line<'a> {
    range: Range<usize>,
    file: (&'a str, &'a str),
    path: &'a [u8],
}

/// A line that maps a file; `None` for the others.
fn parse(line: &[u8]) -> Option<Line<'_>> {
    let (head, path) = line.split_at(line.iter().position(|&b| b == b'/')?);
    let mut words = std::str::from_utf8(head).ok()?.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let hex = |text| usize::from_str_radix(text, 16).ok();
    let (_permissions, _offset, device, inode) = (words.next()?, words.next()?, words.next()?, words.next()?);
    Some(Line { range: hex(start)?..hex(end)?, file: (device, inode), path })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
30000000-30020000 r-xp 00000000 08:01 131 /opt/a b/libcudart.so.12
20000000-20010000 r--p 00000000 08:01 977 /venv/nvidia/cu13/lib/libcudart.so.13 (deleted)
20010000-20090000 r-xp 00010000 08:01 977 /venv/nvidia/cu13/lib/libcudart.so.13 (deleted)
10000000-10010000 r-xp 00000000 08:01 978                        /venv/nvidia/cu13/lib/libcudart.so.13
10010000-10020000 rw-p 00000000 00:00 0
0f000000-0f010000 r-xp 00000000 08:01 979 /venv/torchvision.libs/libcudart.faf08d9a.so.13
0e000000-0e010000 r--s 00000000 08:01 980 /opt/libcudart.so.13.backup
0d000000-0d010000 r-xp 00000000 08:01 981 /usr/lib/libc.so.6
fc000000-fc010000 rw-p 00000000 00:00 0                          [stack]
not a line/of maps
";

    #[test]
    fn runtimes_come_in_the_documented_order_with_all_their_ranges() {
        let found = runtimes(MAPS.as_bytes());
        let shown: Vec<(&str, bool, usize)> =
            found.iter().map(|(_, i)| (i.path.to_str().unwrap(), i.replaced, i.ranges.len())).collect();
        assert_eq!(
            shown,
            [
                ("/venv/nvidia/cu13/lib/libcudart.so.13", false, 1),
                ("/venv/nvidia/cu13/lib/libcudart.so.13", true, 2),
                ("/opt/a b/libcudart.so.12", false, 1),
                ("/venv/torchvision.libs/libcudart.faf08d9a.so.13", false, 1),
                ("/opt/libcudart.so.13.backup", false, 1),
            ]
        );
        assert!(found[1].1.holds(0x20010000) && !found[1].1.holds(0x20090000));
        assert!(matches!(found[4].0, Name::LookAlike(_)));
    }

    #[test]
    fn the_file_behind_a_function_of_ours_is_this_test() {
        let here = super::file_at as fn(usize) -> Option<PathBuf>;
        let file = file_at(here as *const () as usize).expect("mapped");
        assert_eq!(file, std::env::current_exe().unwrap());
        assert_eq!(file_at(8), None);
    }
}
