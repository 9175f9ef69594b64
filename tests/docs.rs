//! The pages keep what they say: their links lead somewhere, every error text of `docs/errors.md` is one of the sources'
//! and every one of the sources' is there, and the files and tests that a page names exist.

use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()))
}

/// Every file below `folder` that ends in `.ending`.
fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("list {}: {e}", folder.display())) {
            let path = entry.expect("an entry of the folder").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == ending) {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "no .{ending} below {folder}");
    found.sort();
    found
}

fn pages() -> Vec<PathBuf> {
    let mut pages = files("docs", "md");
    pages.extend(["README.md", "CHANGELOG.md"].map(|name| root().join(name)));
    pages
}

/// A page without its fenced code.
fn prose(page: &Path) -> String {
    let text = read(page);
    let parts: Vec<&str> = text.split("\n```").collect();
    assert!(parts.len() % 2 == 1, "{}: a code block is not closed", page.display());
    parts.iter().step_by(2).map(|part| part.trim_start_matches(|c: char| c.is_alphanumeric() || c == ',')).collect()
}

// ---- links ---------------------------------------------------------------------------------------------------

/// What the usual renderers make of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let (mut links, mut broken) = (0, Vec::new());
    for page in pages() {
        let text = prose(&page);
        for part in text.split("](").skip(1) {
            let target = part.split(')').next().unwrap_or_default();
            if target.starts_with("http") {
                continue;
            }
            links += 1;
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let path = if file.is_empty() { page.clone() } else { page.with_file_name("").join(file) };
            let found = path.exists()
                && (heading.is_empty()
                    || read(&path).lines().any(|l| l.starts_with('#') && anchor(l.trim_start_matches('#')) == heading));
            if !found {
                broken.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(links > 30, "only {links} links were found");
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

#[test]
fn the_readme_leads_to_every_page_and_every_page_says_what_is_not_done() {
    let readme = read(&root().join("README.md"));
    for page in files("docs", "md") {
        if page.parent() != Some(&root().join("docs")) {
            continue;
        }
        let name = format!("docs/{}", page.file_name().and_then(|n| n.to_str()).expect("a page's name"));
        assert!(readme.contains(&format!("({name})")), "README.md does not link to {name}");
        let last = read(&page).lines().rfind(|line| line.starts_with("## ")).map(str::to_owned).unwrap_or_default();
        assert!(last.contains("does not do") || last.contains("do not do"), "{name} ends with `{last}`");
    }
}

/// `src/…`, `tests/…` and the like, and names of tests: words in backticks with three underscores or more.
#[test]
fn files_and_tests_that_a_page_names_exist() {
    let sources: String = ["src", "tests", "examples"].iter().flat_map(|f| files(f, "rs")).map(|f| read(&f)).collect();
    let mut missing = Vec::new();
    for page in pages() {
        for word in prose(&page).split('`').skip(1).step_by(2) {
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            let test = word.matches('_').count() >= 3 && word.chars().all(plain) && word.contains(char::is_alphabetic);
            let file =
                ["src/", "tests/", "examples/", "benches/", "scripts/", "docs/"].iter().any(|f| word.starts_with(f));
            let known = match (test, file) {
                (true, _) => ["fn {}(", "fn {}<", "{}:"].iter().any(|p| sources.contains(&p.replace("{}", word))),
                (_, true) => root().join(word.split(' ').next().unwrap_or(word)).exists(),
                _ => true,
            };
            if !known {
                missing.push(format!("{}: {word}", page.display()));
            }
        }
    }
    assert!(missing.is_empty(), "named, and not there:\n{}", missing.join("\n"));
}

// ---- error texts ---------------------------------------------------------------------------------------------

/// A string literal of a source, and the code of the file before it, without literals and comments.
struct Literal {
    before: String,
    text: String,
}

impl Literal {
    /// Whether the literal is an argument of one of these calls.
    fn is_in(&self, calls: &[&str]) -> bool {
        calls.iter().any(|call| {
            let Some(at) = self.before.rfind(call) else { return false };
            let own_name = !self.before[..at].ends_with(char::is_alphanumeric); // not the end of a longer one
            let mut depth = 1;
            own_name
                && self.before[at + call.len()..].chars().all(|c| {
                    depth += i32::from(c == '(') - i32::from(c == ')');
                    depth > 0
                })
        })
    }
}

/// The string literals of a source file, continuation lines joined. Comments are left out; the file's unit tests too.
fn literals(source: &str) -> Vec<Literal> {
    let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or(source);
    let (mut found, mut before, mut rest) = (Vec::new(), String::new(), source.chars().peekable());
    while let Some(c) = rest.next() {
        match c {
            '/' if rest.peek() == Some(&'/') => while rest.next_if(|&c| c != '\n').is_some() {},
            '\'' => {
                // A character, which may be a quote; or a lifetime.
                let escaped = rest.next_if_eq(&'\\').is_some();
                let c = rest.next();
                if escaped || rest.peek() == Some(&'\'') {
                    while rest.next_if(|&c| c != '\'').is_some() {}
                    rest.next();
                } else {
                    before.extend(c);
                }
            }
            '"' => {
                let mut text = String::new();
                while let Some(c) = rest.next().filter(|&c| c != '"') {
                    match c {
                        '\\' => match rest.next() {
                            Some('\n') => while rest.next_if(|c| c.is_whitespace()).is_some() {},
                            Some('n') => text.push('…'),
                            Some(escaped) => text.push(escaped),
                            None => {}
                        },
                        c => text.push(c),
                    }
                }
                found.push(Literal { before: before.clone(), text });
            }
            c => before.push(c),
        }
    }
    found
}

/// Words in one line with single blanks, and `{}` for every value in braces.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut depth = 0;
    for c in text.split_whitespace().collect::<Vec<_>>().join(" ").chars() {
        match c {
            '{' => {
                depth += 1;
                plain.push_str("{}");
            }
            '}' => depth -= 1,
            _ if depth > 0 => {}
            c => plain.push(c),
        }
    }
    plain
}

/// The texts between double backticks.
fn texts(page: &str) -> Vec<String> {
    page.split("``").skip(1).step_by(2).map(plain).collect()
}

fn fragments(text: &str) -> impl Iterator<Item = &str> {
    text.split('…').map(str::trim).filter(|fragment| !fragment.is_empty())
}

fn all_literals() -> Vec<Literal> {
    let tests = |path: &PathBuf| path.components().any(|part| part.as_os_str().to_string_lossy().starts_with("tests"));
    files("src", "rs").into_iter().filter(|path| !tests(path)).flat_map(|path| literals(&read(&path))).collect()
}

#[test]
fn error_texts_of_the_page_are_those_of_the_sources() {
    let sources: Vec<String> = all_literals().iter().map(|literal| plain(&literal.text)).collect();
    let page = read(&root().join("docs/errors.md"));
    let texts = texts(&page);
    assert!(texts.len() > 80, "only {} texts were found", texts.len());
    let mut unknown = Vec::new();
    for text in &texts {
        for fragment in fragments(text) {
            // A text may be written in several pieces: each must be a literal, or a part of one.
            if !sources.iter().any(|source| source.contains(fragment)) {
                unknown.push(fragment.to_owned());
            }
        }
    }
    assert!(unknown.is_empty(), "docs/errors.md has what no source says:\n{}", unknown.join("\n"));
}

#[test]
fn error_texts_of_the_sources_are_on_the_page() {
    let page = read(&root().join("docs/errors.md"));
    let texts = texts(&page);
    let (mut checked, mut missing) = (0, Vec::new());
    let calls = ["#[error(", "Error::new(", "config(", "tracing::warn!(", "tracing::error!("];
    for literal in all_literals().iter().filter(|literal| literal.is_in(&calls) && literal.text != "pinring") {
        checked += 1;
        for fragment in fragments(&plain(&literal.text)) {
            if !texts.iter().any(|known| known.contains(fragment)) {
                missing.push(fragment.to_owned());
            }
        }
    }
    assert!(checked > 60, "only {checked} texts were found in the sources");
    assert!(missing.is_empty(), "docs/errors.md does not have:\n{}", missing.join("\n"));
}

#[test]
fn the_reader_of_literals_reads_what_rust_reads() {
    let source = "let a = \"one \\\n   two {x:?}\"; // \"no\"\nlet b = ('\"', 'x', b'\\'', \"a\\\"b\\nc\"); fn f<'a>() -> &'a str { \"d\" }";
    let found: Vec<String> = literals(source).into_iter().map(|literal| plain(&literal.text)).collect();
    assert_eq!(found, ["one two {}", "a\"b…c", "d"]);
}
