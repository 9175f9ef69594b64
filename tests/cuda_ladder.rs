//! The search for CUDA, rung by rung, through `probe_cuda`: each test in a process of its own, since what a process
//! has mapped and its environment are part of the search.
#![cfg(target_os = "linux")]

mod common;

use common::fake::{self, Fake};
use common::{alone, alone_output, is_child, scratch, write_text};
use pinring::{Candidate, CudaFindError, CudaReport, CudaSearch, Outcome, Rung, probe_cuda};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

const CU12: &str = "venv/lib/python3.11/site-packages/nvidia/cuda_runtime/lib";
const CU13: &str = "venv/lib/python3.11/site-packages/nvidia/cu13/lib";

/// In the child: the test's folder. In the parent: prepares folder and environment, runs the child, and `None`.
fn stage(test: &str, prepare: impl FnOnce(&Path, &mut Command)) -> Option<PathBuf> {
    if is_child(test) {
        return std::env::var_os("DIR").map(PathBuf::from);
    }
    let dir = scratch(test);
    alone(test, |child| prepare(&dir, child.env("DIR", &dir)));
    None
}

/// The search of the environment alone.
fn probe() -> Result<CudaReport, CudaFindError> {
    probe_cuda(&CudaSearch::new())
}

fn lines(candidates: &[Candidate]) -> Vec<String> {
    candidates.iter().map(ToString::to_string).collect()
}

/// The error of a search that finds nothing but what the test put there. `None`, said aloud, where this host has a
/// CUDA that the loader finds by name.
fn refused(test: &str, result: Result<CudaReport, CudaFindError>) -> Option<CudaFindError> {
    let record = match &result {
        Ok(report) => report.candidates(),
        Err(error) => error.candidates(),
    };
    let by_name = |c: &&Candidate| c.rung() >= Rung::Soname;
    if let Some(host) = record.iter().filter(by_name).find(|c| !matches!(c.outcome(), Outcome::NotLoaded(_))) {
        println!("skipped: {test}: this host has a CUDA: {host}");
        return None;
    }
    Some(result.expect_err("nothing to find"))
}

// ---- installed wheels ----------------------------------------------------------------------------------------

#[test]
fn a_cuda_12_wheel_is_found() {
    let Some(dir) = stage("a_cuda_12_wheel_is_found", |dir, child| {
        fake::place(&dir.join(CU12), "libcudart.so.12");
        child.env("VIRTUAL_ENV", dir.join("venv"));
    }) else {
        return;
    };
    let report = probe().unwrap();
    assert_eq!(report.library(), dir.join(CU12).join("libcudart.so.12"));
    assert_eq!(report.rung(), Rung::InstalledWheels);
    assert_eq!((report.runtime_version(), report.driver_version()), (13000, 13000));
    assert_eq!(
        lines(report.candidates()),
        [
            "(none) [explicit path]: no library was named".to_owned(),
            "(none) [already loaded]: no CUDA runtime is mapped into this process".to_owned(),
            format!("{} [installed wheels]: chosen", report.library().display()),
        ]
    );
    assert!(report.to_string().contains("runtime 13.0, driver 13.0"), "{report}");
    let fake = Fake::open(report.library());
    const MODE: &str = "cudaThreadExchangeStreamCaptureMode";
    assert_eq!(fake.functions(), [MODE, "cudaFree", MODE, "cudaRuntimeGetVersion", "cudaDriverGetVersion"]);
}

#[test]
fn a_cuda_13_wheel_is_found_through_pythonpath() {
    let Some(dir) = stage("a_cuda_13_wheel_is_found_through_pythonpath", |dir, child| {
        fake::place(&dir.join("site/nvidia/cu13/lib"), "libcudart.so.13");
        child.env("PYTHONPATH", std::env::join_paths([dir.join("empty"), dir.join("site")]).unwrap());
    }) else {
        return;
    };
    assert_eq!(probe().unwrap().library(), dir.join("site/nvidia/cu13/lib/libcudart.so.13"));
}

#[test]
fn a_file_that_is_no_library_is_passed_and_stays_on_record() {
    let Some(dir) = stage("a_file_that_is_no_library_is_passed_and_stays_on_record", |dir, child| {
        write_text(&dir.join(CU13).join("libcudart.so.13"), "git-lfs pointer\n");
        fake::place(&dir.join(CU12), "libcudart.so.12");
        child.env("CONDA_PREFIX", dir.join("venv"));
    }) else {
        return;
    };
    let report = probe().unwrap();
    assert_eq!(report.library(), dir.join(CU12).join("libcudart.so.12"));
    let text = dir.join(CU13).join("libcudart.so.13");
    let failed = report.candidates().iter().find(|c| c.path() == Some(&text)).expect("on record");
    assert!(matches!(failed.outcome(), Outcome::NotLoaded(why) if why.contains("libcudart.so.13: ")), "{failed}");
}

#[test]
fn look_alikes_are_passed_over_with_a_reason() {
    let Some(dir) = stage("look_alikes_are_passed_over_with_a_reason", |dir, child| {
        let folder = dir.join(CU13);
        for name in ["libcudart_static.a", "libcudart.so.13.backup", "libcudart.so.old"] {
            fake::place(&folder, name);
        }
        std::fs::create_dir_all(folder.join("libcudart.so.13")).unwrap();
        fake::place_wrong_class(&folder, "libcudart.so.12");
        fake::place_without(&dir.join(CU12), "libcudart.so.13", "cudaHostGetFlags");
        fake::place(&dir.join(CU12), "libcudart.so.12");
        child.env("VIRTUAL_ENV", dir.join("venv"));
    }) else {
        return;
    };
    let report = probe().unwrap();
    assert_eq!(report.library(), dir.join(CU12).join("libcudart.so.12"));
    let record = report.to_string();
    for (file, reason) in [
        ("cu13/lib/libcudart.so.13", "passed over: it is a directory"),
        ("cu13/lib/libcudart.so.12", "wrong ELF class: ELFCLASS32"),
        ("cu13/lib/libcudart.so.13.backup", "passed over: not the file name of a CUDA runtime"),
        ("cu13/lib/libcudart.so.old", "passed over: not the file name of a CUDA runtime"),
        ("cu13/lib/libcudart_static.a", "passed over: a static library"),
        ("cuda_runtime/lib/libcudart.so.13", "it has no cudaHostGetFlags: "),
        ("cuda_runtime/lib/libcudart.so.12", "chosen"),
    ] {
        let line =
            record.lines().skip(1).find(|l| l.contains(&format!("{file} ["))).unwrap_or_else(|| panic!("{record}"));
        assert!(line.contains(reason), "{line}");
    }
}

#[test]
fn a_root_given_by_the_user_comes_before_the_environment() {
    let Some(dir) = stage("a_root_given_by_the_user_comes_before_the_environment", |dir, child| {
        fake::place(&dir.join(CU13), "libcudart.so.13");
        fake::place(&dir.join("other/nvidia/cuda_runtime/lib"), "libcudart.so.12");
        child.env("VIRTUAL_ENV", dir.join("venv"));
    }) else {
        return;
    };
    let report = probe_cuda(&CudaSearch::new().wheel_root(dir.join("other"))).unwrap();
    assert_eq!(report.library(), dir.join("other/nvidia/cuda_runtime/lib/libcudart.so.12"));
    let left = report.candidates().last().unwrap().to_string();
    assert!(left.contains("cu13/lib/libcudart.so.13 [installed wheels]: passed over: not tried, since"), "{left}");
}

// ---- toolkits, names, the driver --------------------------------------------------------------------------------

#[test]
fn a_toolkit_is_found_below_cuda_home() {
    let Some(dir) = stage("a_toolkit_is_found_below_cuda_home", |dir, child| {
        fake::place(&dir.join("cuda/targets/x86_64-linux/lib"), "libcudart.so.12.9.79");
        child.env("CUDA_HOME", dir.join("nowhere")).env("CUDA_PATH", dir.join("cuda"));
    }) else {
        return;
    };
    let report = probe().unwrap();
    assert_eq!(report.library(), dir.join("cuda/targets/x86_64-linux/lib/libcudart.so.12.9.79"));
    assert_eq!(report.rung(), Rung::Toolkit);
}

#[test]
fn the_loader_is_asked_by_name_and_its_find_is_named() {
    let Some(dir) = stage("the_loader_is_asked_by_name_and_its_find_is_named", |dir, child| {
        fake::place(&dir.join("lib"), "libcudart.so.13");
        child.env("LD_LIBRARY_PATH", dir.join("lib"));
    }) else {
        return;
    };
    let report = probe().unwrap();
    let file = dir.join("lib/libcudart.so.13");
    assert_eq!((report.rung(), report.library()), (Rung::Soname, &*file));
    let chosen = report.candidates().last().unwrap();
    assert_eq!(chosen.path(), Some(Path::new("libcudart.so.13")));
    assert_eq!(chosen.note().unwrap(), format!("which is {}", file.display()));
}

#[test]
fn the_driver_alone_is_the_last_rung() {
    let Some(dir) = stage("the_driver_alone_is_the_last_rung", |dir, child| {
        // Hides the runtimes of a host that has some; the driver found first is the fake.
        for name in ["libcudart.so.13", "libcudart.so.12", "libcudart.so"] {
            write_text(&dir.join("lib").join(name), "not a library");
        }
        fake::place(&dir.join("lib"), "libcuda.so.1");
        child.env("LD_LIBRARY_PATH", dir.join("lib"));
    }) else {
        return;
    };
    let report = probe().unwrap();
    assert_eq!((report.rung(), report.library()), (Rung::Driver, &*dir.join("lib/libcuda.so.1")));
    assert_eq!((report.runtime_version(), report.driver_version()), (0, 13000));
    assert!(report.to_string().contains("no runtime, driver 13.0"), "{report}");
    let calls = Fake::open(report.library()).functions();
    assert_eq!(calls[..4], ["cuInit", "cuCtxGetDevice", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]);
}

#[test]
fn the_same_library_is_not_asked_twice() {
    let Some(dir) = stage("the_same_library_is_not_asked_twice", |dir, child| {
        fake::place(&dir.join("lib"), "libcudart.so.13");
        for name in ["libcudart.so.12", "libcudart.so"] {
            write_text(&dir.join("lib").join(name), "not a library");
        }
        fake::place(&dir.join("lib"), "libcuda.so.1");
        child.env("LD_LIBRARY_PATH", dir.join("lib"));
    }) else {
        return;
    };
    let fake = Fake::open(&dir.join("lib/libcudart.so.13"));
    fake.inject("cudaFree", 0, 35);
    let report = probe().unwrap();
    assert_eq!(report.rung(), Rung::Driver);
    assert_eq!(fake.calls_of("cudaFree").len(), 1);
    let record = report.to_string();
    let same = "passed over: it is the same library as";
    let line = record.lines().find(|line| line.contains("libcudart.so.13 [name lookup]")).unwrap();
    assert!(line.contains(same) && line.contains("which was tried"), "{record}");
}

#[test]
fn nothing_found_lists_every_rung_in_the_loaders_words() {
    const TEST: &str = "nothing_found_lists_every_rung_in_the_loaders_words";
    let Some(dir) = stage(TEST, |dir, child| {
        child.env("VIRTUAL_ENV", dir.join("venv")).env("CUDA_HOME", dir.join("cuda"));
    }) else {
        return;
    };
    // What a program compiled with panic = "abort" would do at the first panic, caught or not.
    std::panic::set_hook(Box::new(|_| std::process::abort()));
    let missing = dir.join("libcudart.so.13");
    let Some(error) = refused(TEST, probe_cuda(&CudaSearch::new().library(&missing))) else { return };
    assert!(matches!(error, CudaFindError::NotFound { .. }));
    let text = error.to_string();
    let expected = [
        format!("{} [explicit path]: {0}: cannot open shared object file: No such file", missing.display()),
        "(none) [already loaded]: no CUDA runtime is mapped".into(),
        format!("(none) [installed wheels]: VIRTUAL_ENV is {}", dir.join("venv").display()),
        format!(
            "(none) [toolkit]: no CUDA runtime in lib64, lib or targets/*/lib below {}",
            dir.join("cuda").display()
        ),
        "libcudart.so.13 [name lookup]: libcudart.so.13: cannot open shared object file".into(),
        "libcudart.so.12 [name lookup]: libcudart.so.12: cannot open shared object file".into(),
        "libcudart.so [name lookup]: libcudart.so: cannot open shared object file".into(),
        "libcuda.so.1 [driver only]: libcuda.so.1: cannot open shared object file".into(),
    ];
    let record: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("  - ")).collect();
    assert_eq!(record.len(), expected.len(), "{text}");
    for (line, expected) in record.iter().zip(&expected) {
        assert!(line.starts_with(expected.as_str()), "{line}\nis not\n{expected}");
    }
    assert!(text.lines().last().unwrap().starts_with("Install a CUDA runtime"), "{text}");
}

#[test]
fn odd_explicit_paths_are_errors_and_not_panics() {
    const TEST: &str = "odd_explicit_paths_are_errors_and_not_panics";
    let Some(dir) = stage(TEST, |_, _| {}) else { return };
    std::panic::set_hook(Box::new(|_| std::process::abort()));
    let fifo = dir.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for (path, reason) in [
        (PathBuf::new(), "the path is empty"),
        (dir.clone(), "it is a directory"),
        (fifo, "it is not a regular file"),
        (PathBuf::from("/a\0b"), ""),
        (dir.join("no"), "cannot open shared object file"),
    ] {
        let error = probe_cuda(&CudaSearch::new().library_only(&path)).unwrap_err();
        assert_eq!(error.candidates().len(), 1, "{error}");
        assert!(error.candidates()[0].to_string().contains(reason), "{error}");
    }
}

// ---- already loaded ----------------------------------------------------------------------------------------------

#[test]
fn a_loaded_runtime_wins_and_the_other_is_never_loaded() {
    let Some(dir) = stage("a_loaded_runtime_wins_and_the_other_is_never_loaded", |dir, child| {
        fake::place(&dir.join(CU13), "libcudart.so.13");
        child.env("VIRTUAL_ENV", dir.join("venv")).env("LD_LIBRARY_PATH", dir.join(CU13));
    }) else {
        return;
    };
    let loaded = Fake::new(&dir, "libcudart.so.12");
    let report = probe().unwrap();
    assert_eq!((report.rung(), report.library()), (Rung::AlreadyLoaded, loaded.path()));
    assert_eq!(loaded.calls_of("cudaFree").len(), 1, "the very image that was loaded");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("libcudart.so.13"), "{maps}");
}

#[test]
fn of_two_loaded_runtimes_the_same_one_is_picked_every_time() {
    const TEST: &str = "of_two_loaded_runtimes_the_same_one_is_picked_every_time";
    let names = ["libcudart.so.12", "libcudart.faf08d9a.so.13"];
    if is_child(TEST) {
        let dir = PathBuf::from(std::env::var_os("DIR").unwrap());
        let order = std::env::var("ORDER").unwrap();
        let load = |index: usize| Fake::open(&dir.join(names[index]));
        let fakes = if order == "forth" { [load(0), load(1)] } else { [load(1), load(0)] };
        let report = probe().unwrap();
        println!("chosen {}", report.library().display());
        let rejected = report.candidates().last().unwrap().to_string();
        assert!(
            rejected.contains("libcudart.faf08d9a.so.13 [already loaded]: passed over: not tried, since"),
            "{rejected}"
        );
        let other = fakes.iter().find(|fake| fake.path() != report.library()).unwrap();
        assert!(other.calls().is_empty());

        let forced = probe_cuda(&CudaSearch::new().library(other.path())).unwrap();
        assert_eq!((forced.rung(), forced.library()), (Rung::ExplicitPath, other.path()), "an override exists");
        return;
    }
    let dir = scratch(TEST);
    names.iter().for_each(|name| drop(fake::place(&dir, name)));
    let mut chosen = BTreeSet::new();
    for run in 0..20 {
        let order = if run % 2 == 0 { "forth" } else { "back" };
        let output = alone(TEST, |child| {
            child.env("DIR", &dir).env("ORDER", order);
        });
        let stdout = String::from_utf8(output.stdout).unwrap();
        chosen.insert(stdout.lines().find(|line| line.contains("chosen ")).expect("a choice").to_owned());
    }
    assert_eq!(chosen.len(), 1, "{chosen:?}");
    assert!(chosen.first().unwrap().ends_with("libcudart.so.12"), "{chosen:?}");
}

#[test]
fn a_runtime_replaced_on_disk_is_used_through_its_loaded_image() {
    let Some(dir) = stage("a_runtime_replaced_on_disk_is_used_through_its_loaded_image", |_, _| {}) else { return };
    // Removed; replaced by another file; loaded through a link, so that the loader knows it by another path.
    let removed = Fake::new(&dir.join("removed"), "libcudart.so.12");
    std::fs::remove_file(removed.path()).unwrap();
    let report = probe().unwrap();
    assert_eq!((report.rung(), report.library()), (Rung::AlreadyLoaded, removed.path()));
    assert_eq!(removed.calls_of("cudaFree").len(), 1);
    assert!(report.candidates().last().unwrap().note().unwrap().contains("replaced on disk"));

    std::fs::create_dir(dir.join("real")).unwrap();
    std::os::unix::fs::symlink(dir.join("real"), dir.join("link")).unwrap();
    let linked = Fake::new(&dir.join("link"), "libcudart.so.13");
    std::fs::remove_file(linked.path()).unwrap();
    fake::place(&dir.join("real"), "libcudart.so.13");
    let report = probe_cuda(&CudaSearch::new().wheel_root("/a/search/of/its/own")).unwrap();
    assert_eq!(report.library(), dir.join("real/libcudart.so.13"));
    assert_eq!(linked.calls_of("cudaFree").len(), 1, "the loaded image, not the new file");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let files = maps.lines().filter(|line| line.contains("real/libcudart.so.13")).collect::<Vec<_>>();
    assert!(!files.is_empty() && files.iter().all(|line| line.ends_with(" (deleted)")), "{files:?}");
}

#[test]
fn a_replaced_runtime_out_of_reach_is_said_to_be_replaced() {
    const TEST: &str = "a_replaced_runtime_out_of_reach_is_said_to_be_replaced";
    let Some(dir) = stage(TEST, |_, _| {}) else { return };
    // Loaded through a link, and its soname is not its file's name: neither leads to the image.
    let odd = fake::place(&dir.join("real"), "libodd.so.1");
    let real = dir.join("real/libcudart.so.12");
    std::fs::rename(odd, &real).unwrap();
    std::os::unix::fs::symlink(dir.join("real"), dir.join("link")).unwrap();
    let fake = Fake::open(&dir.join("link/libcudart.so.12"));
    std::fs::remove_file(&real).unwrap();
    let Some(error) = refused(TEST, probe()) else { return };
    let text = error.to_string();
    assert!(text.contains(&format!("loaded runtime was replaced on disk: {}", real.display())), "{text}");
    assert!(!text.contains("(deleted)"), "{text}");
    assert!(fake.calls().is_empty());
}

#[test]
fn what_is_only_mapped_is_not_taken_for_loaded() {
    const TEST: &str = "what_is_only_mapped_is_not_taken_for_loaded";
    let Some(dir) = stage(TEST, |_, _| {}) else { return };
    // The file of a running program is mapped too: here the program bears the name of a runtime.
    let program = dir.join("libcudart.so.13");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let output = Command::new(&program)
        .args(["as_a_mapped_file", "--exact", "--nocapture", "--ignored"])
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains("libcudart.so.13 [already loaded]: "), "{stdout}");
}

#[test]
#[ignore = "run by what_is_only_mapped_is_not_taken_for_loaded, as a program named like a runtime"]
fn as_a_mapped_file() {
    match probe() {
        Ok(report) => println!("{report}"),
        Err(error) => println!("{error}"),
    }
}

// ---- codes --------------------------------------------------------------------------------------------------------

#[test]
fn every_code_of_initialisation_has_its_own_error_whatever_the_mask_says() {
    const TEST: &str = "every_code_of_initialisation_has_its_own_error_whatever_the_mask_says";
    let symbols = [
        (34, "cudaErrorStubLibrary"),
        (35, "cudaErrorInsufficientDriver"),
        (46, "cudaErrorDevicesUnavailable"),
        (100, "cudaErrorNoDevice"),
        (101, "cudaErrorInvalidDevice"),
        (803, "cudaErrorSystemDriverMismatch"),
        (804, "cudaErrorCompatNotSupportedOnDevice"),
        (9999, "unrecognized error code"),
    ];
    if is_child(TEST) {
        std::panic::set_hook(Box::new(|info| {
            eprintln!("{info}");
            std::process::abort()
        }));
        let dir = PathBuf::from(std::env::var_os("DIR").unwrap());
        let mut texts = BTreeSet::new();
        for (code, symbol) in symbols {
            let fake = Fake::new(&dir.join(code.to_string()), "libcudart.so.12");
            fake.versions(12090, 12080);
            fake.inject("cudaFree", 1, code);
            let search = CudaSearch::new().library_only(fake.path());
            let failure = probe_cuda(&search).unwrap_err();
            let CudaFindError::Init { error, library, runtime_version, driver_version, candidates } = &failure else {
                panic!("{failure}");
            };
            assert_eq!((error.operation(), error.code(), error.symbol()), ("cudaFree(0)", code, symbol));
            assert_eq!((library.as_path(), *runtime_version, *driver_version), (fake.path(), 12090, 12080));
            assert_eq!(candidates.len(), 1);
            assert_eq!(error.hint().is_some(), code != 9999);
            let text = failure.to_string();
            for part in [&format!(" returned {code} {symbol} ("), "runtime 12.9, driver 12.8"] {
                assert!(text.contains(part), "{text}");
            }
            texts.insert(text);
            assert!(fake.calls_of("cudaHostRegister").is_empty());
            assert_eq!(fake.peek_last_error(), 0, "drained");
            assert!(probe_cuda(&search).is_ok(), "a failure is not kept");
        }
        assert_eq!(texts.len(), symbols.len());
        return;
    }
    for mask in ["", "-1", "MIG-abc", "GPU-8932f937"] {
        let dir = scratch(TEST);
        alone(TEST, |child| {
            child.env("DIR", &dir).env("CUDA_VISIBLE_DEVICES", mask);
        });
    }
}

#[test]
fn codes_of_the_pair_try_the_next_library_and_all_are_reported() {
    const TEST: &str = "codes_of_the_pair_try_the_next_library_and_all_are_reported";
    let Some(dir) = stage(TEST, |_, _| {}) else { return };
    let names = ["libcudart.so.13", "libcudart.so.12", "libcudart.so", "libcudart.so.11.0", "libcudart.aa.so.13"];
    let fakes = names.map(|name| Fake::new(&dir, name));
    for (fake, code) in fakes.iter().zip([35, 34, 803, 804]) {
        fake.inject("cudaFree", 1, code);
    }
    let report = probe().unwrap();
    assert_eq!(report.library(), fakes[4].path());
    let codes: Vec<i32> = report
        .candidates()
        .iter()
        .filter_map(|c| if let Outcome::Refused(error) = c.outcome() { Some(error.code()) } else { None })
        .collect();
    assert_eq!(codes, [35, 34, 803, 804]);

    for fake in &fakes {
        fake.inject("cudaFree", 0, 35);
    }
    let again = CudaSearch::new().wheel_root("/a/search/of/its/own");
    let Some(failure) = refused(TEST, probe_cuda(&again)) else { return };
    let CudaFindError::Init { error, library, candidates, .. } = &failure else { panic!("{failure}") };
    assert_eq!((error.code(), library.as_path()), (35, fakes[0].path()), "the first of them");
    assert_eq!(candidates.iter().filter(|c| matches!(c.outcome(), Outcome::Refused(_))).count(), 5);
    assert_eq!(failure.to_string().matches("cudaErrorInsufficientDriver").count(), 6);
}

#[test]
fn codes_of_the_host_end_the_search() {
    let Some(dir) = stage("codes_of_the_host_end_the_search", |_, _| {}) else { return };
    for code in [46, 100, 101, 2, 999] {
        let folder = dir.join(code.to_string());
        let (first, second) = (Fake::new(&folder, "libcudart.so.13"), Fake::new(&folder, "libcudart.so.12"));
        first.inject("cudaFree", 1, code);
        let failure = probe_cuda(&CudaSearch::new().library(first.path())).unwrap_err();
        let CudaFindError::Init { error, candidates, .. } = &failure else { panic!("{failure}") };
        assert_eq!((error.code(), candidates.len()), (code, 1), "{failure}");
        assert!(second.calls().is_empty());
    }
    // On a rung with more of them, the record names those that were not tried.
    let all = dir.join("all");
    let fake = Fake::new(&all, "libcudart.so.13");
    let failure = {
        let mapped = ["46", "100", "101", "2", "999"].map(|code| Fake::open(&dir.join(code).join("libcudart.so.13")));
        mapped.iter().chain([&fake]).for_each(|fake| fake.inject("cudaFree", 0, 100));
        probe().unwrap_err()
    };
    assert!(failure.to_string().contains("not tried, since the search ended at"), "{failure}");
}

#[test]
fn an_explicit_library_that_fails_is_on_record_and_the_search_goes_on() {
    let Some(dir) = stage("an_explicit_library_that_fails_is_on_record_and_the_search_goes_on", |dir, child| {
        fake::place(&dir.join(CU12), "libcudart.so.12");
        fake::place_without(dir, "libbroken.so", "cudaHostUnregister");
        child.env("VIRTUAL_ENV", dir.join("venv"));
    }) else {
        return;
    };
    let search = CudaSearch::new().library(dir.join("libbroken.so"));
    let report = probe_cuda(&search).unwrap();
    assert_eq!(report.rung(), Rung::InstalledWheels);
    let first = report.candidates()[0].to_string();
    assert!(first.contains("libbroken.so [explicit path]: it has no cudaHostUnregister: "), "{first}");
    let only = probe_cuda(&CudaSearch::new().library_only(dir.join("libbroken.so"))).unwrap_err();
    assert!(matches!(&only, CudaFindError::NotFound { candidates } if candidates.len() == 1), "{only}");
}

#[test]
fn a_search_for_nothing_ends_the_process_in_its_own_way() {
    const TEST: &str = "a_search_for_nothing_ends_the_process_in_its_own_way";
    if is_child(TEST) {
        std::panic::set_hook(Box::new(|_| std::process::abort()));
        let only = CudaSearch::new().library_only("/no/such/libcudart.so.13");
        let error = probe_cuda(&only).unwrap_err();
        eprintln!("{error}");
        std::process::exit(7);
    }
    let output = alone_output(TEST, |_| {});
    assert_eq!(output.status.code(), Some(7), "not by a signal: {}", output.status);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("/no/such/libcudart.so.13: cannot open shared object file"), "{stderr}");
}
