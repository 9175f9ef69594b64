//! File names of CUDA runtimes: which names are one, and which of several comes first. Pure.

use std::cmp::Reverse;
use std::ffi::OsStr;

/// A file name that a CUDA runtime has: `libcudart.so`, `.so.13`, `.so.12.9.79`, or with the hash that wheel
/// builders put in when they bundle one: `libcudart.faf08d9a.so.13`, `libcudart-faf08d9a.so.12`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RuntimeName {
    /// The hash with the sign before it; empty without one.
    tag: String,
    version: Vec<u32>,
}

/// What a file name is to the search.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Name {
    Runtime(RuntimeName),
    /// Begins like one and is none, for this reason.
    LookAlike(&'static str),
    Other,
}

impl Name {
    pub(super) fn parse(name: &OsStr) -> Name {
        let Some(rest) = name.to_str().unwrap_or("").strip_prefix("libcudart") else { return Name::Other };
        if rest.ends_with(".a") {
            return Name::LookAlike("a static library");
        }
        const NO_RUNTIME: Name = Name::LookAlike("not the file name of a CUDA runtime");
        let Some((tag, version)) = rest.split_once(".so") else { return NO_RUNTIME };
        let hash = tag.strip_prefix(['.', '-']);
        let tagged = hash.is_some_and(|h| !h.is_empty() && h.bytes().all(|b| b.is_ascii_hexdigit()));
        if !tag.is_empty() && !tagged {
            return NO_RUNTIME;
        }
        let numbers: Option<Vec<u32>> = match version.strip_prefix('.') {
            Some(numbers) => numbers.split('.').map(number).collect(),
            None if version.is_empty() => Some(Vec::new()),
            None => None,
        };
        numbers.map_or(NO_RUNTIME, |version| Name::Runtime(RuntimeName { tag: tag.into(), version }))
    }
}

/// Digits only: `u32::from_str` would also take a plus sign.
fn number(text: &str) -> Option<u32> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

impl RuntimeName {
    /// The order among several: plain names before hashed ones; 13, 12, unversioned, then the rest; the short name
    /// before longer ones of the same version; the higher version first.
    pub(super) fn rank(&self) -> impl Ord + use<> {
        let family = match self.version.first() {
            Some(13) => 0,
            Some(12) => 1,
            None => 2,
            Some(_) => 3,
        };
        (!self.tag.is_empty(), family, self.version.len(), Reverse(self.version.clone()), self.tag.clone())
    }

    /// The sonames that a library in a file of this name may have, the most exact first.
    pub(super) fn sonames(&self) -> Vec<String> {
        let name = |length: usize| {
            let version: String = self.version[..length].iter().map(|n| format!(".{n}")).collect();
            format!("libcudart{}.so{version}", self.tag)
        };
        (0..=self.version.len()).rev().map(name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime(name: &str) -> RuntimeName {
        match Name::parse(OsStr::new(name)) {
            Name::Runtime(runtime) => runtime,
            other => panic!("{name}: {other:?}"),
        }
    }

    #[test]
    fn names_are_told_from_look_alikes() {
        for name in
            ["libcudart.so", "libcudart.so.13", "libcudart.so.12.9.79", "libcudart.faf08d9a.so.13", "libcudart-1f.so"]
        {
            runtime(name);
        }
        for name in [
            "libcudart_static.a",
            "libcudart_static.so",
            "libcudart.so.13.backup",
            "libcudart.so.13 (deleted)",
            "libcudart.so.",
            "libcudart.so.+13",
            "libcudart.so.99999999999",
            "libcudart.so13",
            "libcudart.old.so.13",
            "libcudart..so.13",
            "libcudart",
            "libcudart.so.13~",
        ] {
            assert!(matches!(Name::parse(OsStr::new(name)), Name::LookAlike(_)), "{name}");
        }
        for name in ["libcuda.so.1", "libcudnn.so.9", ""] {
            assert_eq!(Name::parse(OsStr::new(name)), Name::Other, "{name}");
        }
    }

    #[test]
    fn the_order_is_fixed() {
        let ordered = [
            "libcudart.so.13",
            "libcudart.so.13.0.96",
            "libcudart.so.12",
            "libcudart.so.12.9.79",
            "libcudart.so.12.4.127",
            "libcudart.so",
            "libcudart.so.14",
            "libcudart.so.11.0",
            "libcudart.aa.so.13",
            "libcudart.ab.so.13",
            "libcudart.aa.so.12",
        ];
        let mut sorted = ordered;
        sorted.reverse();
        sorted.sort_by_key(|name| runtime(name).rank());
        assert_eq!(sorted, ordered);
    }

    #[test]
    fn sonames_go_from_exact_to_short() {
        assert_eq!(runtime("libcudart.so.13.0").sonames(), ["libcudart.so.13.0", "libcudart.so.13", "libcudart.so"]);
        assert_eq!(runtime("libcudart.fa.so.13").sonames(), ["libcudart.fa.so.13", "libcudart.fa.so"]);
    }
}
