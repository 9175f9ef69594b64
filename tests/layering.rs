//! The order of the `mod` lines in `src/lib.rs` is the order of dependence: a module uses only itself and what is
//! declared above it.
//!
//! The sources are read as text, without comments, strings and test modules. Counted as a use is every path that
//! begins at the crate's root: `crate::name`, `crate::{name, …}`, a name that `lib.rs` exports from a module, and
//! `super::` beyond the module's own root.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Uses against the order that are meant: (user, used, reason). Empty, and it should stay so.
const EXCEPTIONS: [(&str, &str, &str); 0] = [];

#[test]
fn modules_use_only_what_is_declared_above_them() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let root = code_of(&fs::read_to_string(src.join("lib.rs")).unwrap());
    let order = modules(&root);
    assert!(order.len() > 10 && order.contains(&"feed".to_owned()), "read from lib.rs: {order:?}");
    let exports = exports(&root, &order);
    assert_eq!(exports.get("Feed").map(String::as_str), Some("feed"), "{exports:?}");

    let (mut files, mut violations) = (0, Vec::new());
    for (place, module) in order.iter().enumerate() {
        let sources = sources_of(&src, module);
        assert!(!sources.is_empty(), "module {module} has no file");
        for (path, depth) in sources {
            files += 1;
            let uses = uses(&code_of(&fs::read_to_string(&path).unwrap()), depth, &order, &exports);
            for used in uses.iter().filter(|used| !allowed(&order[..=place], module, used)) {
                violations.push(format!("{} uses `{used}`, which is not above `{module}`", path.display()));
            }
        }
    }
    assert!(files > 30, "only {files} files were read");
    assert!(violations.is_empty(), "against the order of lib.rs ({}):\n{}", order.join(", "), violations.join("\n"));
}

/// Every file means the same on every processor: where one's own instructions came in, others would need a way beside
/// them, and a test of that.
#[test]
fn no_code_is_for_one_processor_alone() {
    let mut sources = Vec::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), 0, &mut sources);
    assert!(sources.len() > 80, "only {} files were read", sources.len());
    for (path, _) in sources {
        let code = code_of(&fs::read_to_string(&path).unwrap());
        for word in ["target_arch", "target_feature", "core::arch", "std::arch", "asm!", "x86_64", "aarch64"] {
            assert!(!code.contains(word), "{} has `{word}`", path.display());
        }
    }
}

fn allowed(above: &[String], module: &str, used: &str) -> bool {
    above.iter().any(|name| name == used) || EXCEPTIONS.iter().any(|(user, u, _)| (*user, *u) == (module, used))
}

/// The check itself finds every way to name a module, and nothing in comments, strings and tests.
#[test]
fn the_check_sees_each_kind_of_use() {
    let order = ["low", "mine", "high"].map(str::to_owned);
    let exports = BTreeMap::from([("High".to_owned(), "high".to_owned())]);
    let seen = |source: &str, depth| uses(&code_of(source), depth, &order, &exports).into_iter().collect::<Vec<_>>();
    assert_eq!(seen("use crate::high::Thing;", 1), ["high"]);
    assert_eq!(seen("fn f() -> crate::High { crate::low::g() }", 1), ["high", "low"]);
    assert_eq!(seen("use crate::{low::{a, b}, high::c};", 1), ["high", "low"]);
    assert_eq!(seen("use crate::{\n    High,\n};", 1), ["high"]);
    assert_eq!(seen("use super::high;", 1), ["high"]);
    assert_eq!(seen("use super::high;", 2), [""; 0], "in a file below the module, `super` is the module");
    assert_eq!(seen("use super::super::{high};", 2), ["high"]);
    assert_eq!(seen("$crate::high::go!()", 1), ["high"]);
    assert_eq!(
        seen("/* crate::high /* */ */ // crate::high\nlet s = \"crate::high\"; let r = r#\"crate::high\"#;", 1),
        [""; 0]
    );
    assert_eq!(seen("['\"', '\\'', '\\\\']; fn f<'a>() {} use crate::low; 'x'", 1), ["low"], "quotes as characters");
    assert_eq!(seen("#[cfg(test)]\nmod tests { use crate::high; mod more { } }\nuse crate::low;", 1), ["low"]);
    assert_eq!(seen("#[cfg(test)]\nmod tests;\nuse crate::high;", 1), ["high"]);
    assert!(allowed(&order[..2], "mine", "low") && !allowed(&order[..2], "mine", "high"));
}

/// The names of the `mod` lines, in order.
fn modules(root: &str) -> Vec<String> {
    root.lines().filter_map(|line| Some(line.trim().strip_prefix("mod ")?.strip_suffix(';')?.to_owned())).collect()
}

/// What `lib.rs` exports under the crate's root, and the module that each name is from.
fn exports(root: &str, modules: &[String]) -> BTreeMap<String, String> {
    let mut exports = BTreeMap::new();
    for part in root.split("pub use ").skip(1) {
        let part = &part[..part.find(';').unwrap_or(part.len())];
        let module = ident(part);
        if modules.iter().any(|name| name == module) {
            let names = part.split(|c: char| !c.is_alphanumeric() && c != '_');
            exports.extend(names.filter(|name| !name.is_empty()).map(|name| (name.to_owned(), module.to_owned())));
        }
    }
    exports
}

/// The files of a module, and how deep below the crate's root the module of each is. Files of tests are left out.
fn sources_of(src: &Path, module: &str) -> Vec<(PathBuf, usize)> {
    let mut sources = Vec::new();
    let file = src.join(format!("{module}.rs"));
    if file.is_file() {
        sources.push((file, 1));
    }
    walk(&src.join(module), 1, &mut sources);
    sources
}

fn walk(dir: &Path, depth: usize, sources: &mut Vec<(PathBuf, usize)>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        if name == "tests" {
            continue;
        }
        if path.is_dir() {
            walk(&path, depth + 1, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push((path, depth + usize::from(name != "mod")));
        }
    }
}

/// The modules that a text uses by a path from the crate's root. The text belongs to a module `depth` below the root.
fn uses(code: &str, depth: usize, modules: &[String], exports: &BTreeMap<String, String>) -> BTreeSet<String> {
    let up = "super::".repeat(depth);
    let mut used = BTreeSet::new();
    for start in ["crate::", up.as_str()] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            for name in first_names(&code[at + start.len()..]) {
                if modules.contains(&name) {
                    used.insert(name);
                } else if let Some(module) = exports.get(&name) {
                    used.insert(module.clone());
                }
            }
        }
    }
    used
}

/// The first name of a path, or of each path of a group: `a::b` gives a, `{a::{b, c}, d}` gives a and d.
fn first_names(path: &str) -> Vec<String> {
    let Some(group) = path.strip_prefix('{') else { return vec![ident(path).to_owned()] };
    let (mut names, mut depth, mut fresh) = (Vec::new(), 0, true);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => fresh = true,
            c if fresh && !c.is_whitespace() => {
                names.push(ident(&group[at..]).to_owned());
                fresh = false;
            }
            _ => {}
        }
    }
    names
}

fn ident(text: &str) -> &str {
    &text[..text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len())]
}

/// The text without comments, the insides of strings, and inline test modules.
fn code_of(source: &str) -> String {
    let mut code = String::new();
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        let skip = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if let Some(length) = raw_string(rest, code.chars().next_back()) {
            length
        } else if c == '"' {
            string(rest)
        } else if rest.starts_with("'\"'") {
            3
        } else if let Some(escape) = rest.strip_prefix("'\\") {
            // The escaped character may itself be a quote.
            escape.char_indices().skip(1).find(|(_, c)| *c == '\'').map_or(rest.len(), |(at, _)| at + 3)
        } else {
            code.push(c);
            c.len_utf8()
        };
        rest = &rest[skip..];
    }
    without_test_modules(&code)
}

fn block_comment(text: &str) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < text.len() {
        let here = &text.as_bytes()[at..];
        match () {
            () if here.starts_with(b"/*") => (at, depth) = (at + 2, depth + 1),
            () if here.starts_with(b"*/") => (at, depth) = (at + 2, depth - 1),
            () => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

fn raw_string(text: &str, before: Option<char>) -> Option<usize> {
    if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let after = text.strip_prefix('r')?;
    let marks = after.len() - after.trim_start_matches('#').len();
    let inside = after[marks..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(marks));
    Some(2 + marks + inside.find(&end)? + end.len())
}

fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '"' if !escaped => return at + 1,
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}

fn without_test_modules(code: &str) -> String {
    let mut out = String::new();
    let mut rest = code;
    while let Some(at) = rest.find("#[cfg(") {
        let attribute = at + rest[at..].find(']').map_or(rest.len() - at, |end| end + 1);
        let is_test = rest[at..attribute].split(|c: char| !c.is_alphanumeric()).any(|word| word == "test");
        let item = rest[attribute..].trim_start();
        let body = item.find(['{', ';']).filter(|body| item.as_bytes()[*body] == b'{');
        out.push_str(&rest[..at]);
        match body.filter(|_| is_test && item.starts_with("mod ")) {
            Some(body) => rest = &item[body + block(&item[body..])..],
            None => rest = &rest[attribute..],
        }
    }
    out + rest
}

/// The length of a block in braces.
fn block(text: &str) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    text.len()
}
