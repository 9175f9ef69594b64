//! The folders in which CUDA runtimes are looked for: those of Python wheels and those of toolkits. It lists files
//! and opens none.

use super::names::{Name, RuntimeName};
use std::cmp::Reverse;
use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// How the search reads a variable: the process's environment, or a test's.
pub(super) type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// A file to try, or one that is not tried for the reason in `why_not`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) path: PathBuf,
    pub(super) why_not: Option<String>,
}

/// Below a `site-packages` folder: the layout of the CUDA 13 wheel, then that of the CUDA 12 one.
const WHEEL_FOLDERS: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_runtime/lib"];

/// The runtimes of installed wheels: below the user's roots, `VIRTUAL_ENV`, `CONDA_PREFIX` and the entries of
/// `PYTHONPATH`. Without any, why.
pub(super) fn wheels(roots: &[PathBuf], env: Environment<'_>) -> Result<Vec<Found>, String> {
    let mut sites: Vec<PathBuf> = Vec::new();
    for root in roots {
        sites.push(root.clone());
        sites.extend(site_packages(root));
    }
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        sites.extend(variable(env, name).iter().flat_map(|prefix| site_packages(prefix)));
    }
    let pythonpath = variable(env, "PYTHONPATH").unwrap_or_default();
    sites.extend(std::env::split_paths(&pythonpath).filter(|entry| !entry.as_os_str().is_empty()));

    let folders = sites.iter().flat_map(|site| WHEEL_FOLDERS.map(|folder| site.join(folder)));
    let found = list(folders);
    if !found.is_empty() {
        return Ok(found);
    }
    if !sites.is_empty() {
        return Err(format!("no CUDA runtime in {} below {}", WHEEL_FOLDERS.join(" or "), paths(&sites)));
    }
    Err(match ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().find_map(|name| Some((name, variable(env, name)?))) {
        Some((name, prefix)) => format!("{name} is {}, and no lib/python3*/site-packages is there", prefix.display()),
        None => "VIRTUAL_ENV, CONDA_PREFIX and PYTHONPATH are not set and no root was given".into(),
    })
}

/// The runtimes of toolkits: below `CUDA_HOME`, `CUDA_PATH` and `CONDA_PREFIX`. Without any, why.
pub(super) fn toolkits(env: Environment<'_>) -> Result<Vec<Found>, String> {
    let homes: Vec<PathBuf> =
        ["CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"].into_iter().filter_map(|name| variable(env, name)).collect();
    if homes.is_empty() {
        return Err("CUDA_HOME, CUDA_PATH and CONDA_PREFIX are not set".into());
    }
    let folders = homes.iter().flat_map(|home| {
        let targets = entries(&home.join("targets")).unwrap_or_default();
        let targets = targets.into_iter().map(|target| target.join("lib"));
        [home.join("lib64"), home.join("lib")].into_iter().chain(targets).collect::<Vec<_>>()
    });
    match list(folders) {
        found if found.is_empty() => {
            Err(format!("no CUDA runtime in lib64, lib or targets/*/lib below {}", paths(&homes)))
        }
        found => Ok(found),
    }
}

fn variable(env: Environment<'_>, name: &str) -> Option<PathBuf> {
    env(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The `site-packages` folders of an environment, the highest Python version first.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = Vec::new();
    for lib in ["lib", "lib64"] {
        for entry in entries(&prefix.join(lib)).unwrap_or_default() {
            let name = entry.file_name().unwrap_or_default().to_string_lossy();
            let Some(rest) = name.strip_prefix("python3") else { continue };
            let minor = rest.strip_prefix('.').unwrap_or(rest);
            // python3.13t and the like are versions too: the digits in front count.
            let digits = minor.len() - minor.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            versions.push((minor[..digits].parse().unwrap_or(0), entry.join("site-packages")));
        }
    }
    versions.retain(|(_, site)| site.is_dir());
    versions.sort_by_key(|(minor, _)| Reverse(*minor));
    versions.into_iter().map(|(_, site)| site).collect()
}

/// The runtimes in some folders: folder by folder, in each by rank, then what only looks like one. A folder or file
/// that was met before under another name is left out.
fn list(folders: impl IntoIterator<Item = PathBuf>) -> Vec<Found> {
    let mut seen = HashSet::new();
    let mut all = Vec::new();
    for folder in folders {
        if !seen.insert(real(&folder)) {
            continue;
        }
        let entries = match entries(&folder) {
            Ok(entries) => entries,
            Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => continue,
            Err(e) => {
                all.push(Found { path: folder, why_not: Some(format!("the folder cannot be listed: {e}")) });
                continue;
            }
        };
        let mut runtimes: Vec<(RuntimeName, PathBuf)> = Vec::new();
        let mut others = Vec::new();
        for path in entries {
            match path.file_name().map_or(Name::Other, Name::parse) {
                Name::Runtime(name) => runtimes.push((name, path)),
                Name::LookAlike(why) => others.push(Found { path, why_not: Some(why.into()) }),
                Name::Other => {}
            }
        }
        runtimes.sort_by_key(|(name, _)| name.rank());
        let new = runtimes.into_iter().filter(|(_, path)| seen.insert(real(path)));
        all.extend(new.map(|(_, path)| Found { path, why_not: None }));
        all.extend(others);
    }
    all
}

/// The entries of a folder, by name.
fn entries(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    Ok(entries)
}

fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::common::{scratch, write_text};
    use super::*;

    fn touch(root: &Path, files: &[&str]) {
        files.iter().for_each(|file| write_text(&root.join(file), ""));
    }

    fn names(root: &Path, found: Result<Vec<Found>, String>) -> Vec<String> {
        let name = |f: Found| f.path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        found.unwrap().into_iter().map(name).collect()
    }

    #[test]
    fn wheels_are_found_in_both_layouts_and_in_order() {
        let root = scratch("places-wheels");
        touch(
            &root,
            &[
                "venv/lib/python3.9/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
                "venv/lib/python3.13/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
                "venv/lib/python3.13/site-packages/nvidia/cu13/lib/libcudart.so.13",
                "venv/lib/python3.13/site-packages/nvidia/cu13/lib/libcudart_static.a",
                "venv/lib/python3.13/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
                "path/nvidia/cuda_runtime/lib/libcudart.so.12",
                "path/nvidia/cuda_runtime/lib/libcudart.so.13",
                "given/nvidia/cu13/lib/libcudart.so.13",
            ],
        );
        let env = |name: &str| match name {
            "VIRTUAL_ENV" => Some(root.join("venv").into_os_string()),
            "CONDA_PREFIX" => Some("".into()),
            "PYTHONPATH" => Some(std::env::join_paths(["".into(), root.join("no"), root.join("path")]).unwrap()),
            _ => None,
        };
        assert_eq!(
            names(&root, wheels(&[root.join("given")], &env)),
            [
                "given/nvidia/cu13/lib/libcudart.so.13",
                "venv/lib/python3.13/site-packages/nvidia/cu13/lib/libcudart.so.13",
                "venv/lib/python3.13/site-packages/nvidia/cu13/lib/libcudart_static.a",
                "venv/lib/python3.13/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
                "venv/lib/python3.9/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12",
                "path/nvidia/cuda_runtime/lib/libcudart.so.13",
                "path/nvidia/cuda_runtime/lib/libcudart.so.12",
            ]
        );
    }

    #[test]
    fn a_toolkits_links_are_one_candidate() {
        let root = scratch("places-toolkit");
        touch(&root, &["targets/x86_64-linux/lib/libcudart.so.12.9.79", "targets/x86_64-linux/lib/libcudart_static.a"]);
        touch(&root, &["lib64/stubs/libcuda.so"]);
        std::fs::remove_dir_all(root.join("lib64")).unwrap();
        std::os::unix::fs::symlink("targets/x86_64-linux/lib", root.join("lib64")).unwrap();
        for (link, file) in [("libcudart.so.12", "libcudart.so.12.9.79"), ("libcudart.so", "libcudart.so.12")] {
            std::os::unix::fs::symlink(file, root.join("lib64").join(link)).unwrap();
        }
        let env = |name: &str| matches!(name, "CUDA_HOME" | "CUDA_PATH").then(|| root.clone().into_os_string());
        assert_eq!(names(&root, toolkits(&env)), ["lib64/libcudart.so.12", "lib64/libcudart_static.a"]);
    }

    #[test]
    fn nothing_found_says_where_it_was_looked_for() {
        let root = scratch("places-none");
        let unset = |_: &str| None;
        assert!(wheels(&[], &unset).unwrap_err().contains("PYTHONPATH are not set"));
        assert!(toolkits(&unset).unwrap_err().contains("CUDA_PATH"));
        let set = |_: &str| Some(root.clone().into_os_string());
        let venv = |name: &str| (name == "VIRTUAL_ENV").then(|| root.clone().into_os_string());
        let shown = root.display().to_string();
        assert!(wheels(&[], &venv).unwrap_err().starts_with(&format!("VIRTUAL_ENV is {shown}, and no lib/python3*")));
        assert!(wheels(&[], &set).unwrap_err().ends_with(&format!("below {shown}")));
        assert!(toolkits(&set).unwrap_err().contains(&shown));
    }
}
