//! Everything at once, for as long as asked: two feeds in one process, one in the order of writing and one that samples
//! stored steps; writers that die in the middle of a step and come again; learners that pause and hold batches; weights
//! behind lag gates; checkpoints that are saved and loaded; stops in the midst of it, and sources that end.
//!
//! ```text
//! cargo run --release -p soak -- [--minutes N | --seconds N] [--device auto|none|required|fake] [--seed N]
//! ```
//!
//! Every row is checked by its content: whole, in order, and (where it is not sampled) come once. At the end of every feed its
//! counters must add up, and after it the process must hold what it held before: memory, files, threads, rings. With a CUDA
//! device (`auto`: if there is one) rings are page-locked and both feeds go to it too; `fake` takes the fake CUDA of the
//! tests, in a build with the feature of that name. The table at the end says what was done; the exit code is 0 only if
//! all of it held.
//!
//! It is no bench: how fast it went says nothing.

mod account;
mod environment;
mod feeds;
mod learning;
mod process;
mod rows;

#[cfg(feature = "fake")]
#[path = "../../../tests/common/mod.rs"]
mod common;

use account::Account;
use environment::KILLED;
use feeds::{FIFO, Place, REPLAY, Soaked};
use pinring::{CudaSearch, Feed, Pinning, Sample, Step};
use process::Held;
use rows::Rng;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Nothing moves for so long: it hangs.
const STUCK: Duration = Duration::from_secs(60);
/// By so much the memory in use may go up and down: allocators keep what they were given.
const SLACK: usize = 16 << 20;
/// Rounds that show every kind of feed beside every other; what is held behind these is what it is compared with.
const WARM: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Device {
    Auto,
    None,
    Required,
    Fake,
}

#[derive(Debug)]
struct Asked {
    time: Duration,
    device: Device,
    seed: u64,
}

const USAGE: &str = "soak [--minutes N | --seconds N] [--device auto|none|required|fake] [--seed N]";

fn asked(arguments: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut asked = Asked { time: Duration::from_secs(60), device: Device::Auto, seed: 1 };
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        if argument == "--help" {
            return Err(USAGE.to_owned());
        }
        if !["--minutes", "--seconds", "--seed", "--device"].contains(&argument.as_str()) {
            return Err(format!("{argument} is not known: {USAGE}"));
        }
        let value = arguments.next().ok_or(format!("{argument} needs a value"))?;
        let number = || value.parse::<u64>().map_err(|error| format!("{argument} {value}: {error}"));
        match argument.as_str() {
            "--minutes" => asked.time = Duration::from_secs(60 * number()?),
            "--seconds" => asked.time = Duration::from_secs(number()?),
            "--seed" => asked.seed = number()?,
            "--device" => {
                asked.device = match value.as_str() {
                    "auto" => Device::Auto,
                    "none" => Device::None,
                    "required" => Device::Required,
                    "fake" if cfg!(feature = "fake") => Device::Fake,
                    "fake" => return Err("--device fake is for builds with the feature `fake`".to_owned()),
                    other => return Err(format!("--device {other}: known are auto, none, required and fake")),
                }
            }
            _ => unreachable!("it is one of the four"),
        }
    }
    if asked.time.is_zero() {
        return Err("no time at all shows nothing: give --seconds or --minutes at least 1".to_owned());
    }
    Ok(asked)
}

fn main() -> ExitCode {
    let asked = match asked(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(error) => {
            eprintln!("soak: {error}");
            return ExitCode::from(2);
        }
    };
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        // Environments that are to die do so in silence.
        if !panic.payload().downcast_ref::<String>().is_some_and(|text| text.contains(KILLED)) {
            hook(panic);
        }
    }));
    match soak(&asked) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("soak: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The CUDA to use, and what is said of it.
fn place(device: Device) -> Result<(Place, String), pinring::Error> {
    if matches!(device, Device::None | Device::Fake) {
        return Ok((Place::default(), "none".to_owned()));
    }
    let mut step = Step::new();
    step.leaf::<u8>("probe", &[]);
    let probe = Feed::builder(Sample::step(step)).batch(1).pinning(Pinning::Required).device(0).start();
    match (probe, device) {
        (Ok(feed), _) => {
            let report = feed.pin_report().map_or_else(String::new, |report| report.cuda.to_string());
            Ok((Place { cuda: Some(CudaSearch::new()) }, format!("device 0, {report}")))
        }
        (Err(error), Device::Required) => Err(error),
        (Err(_), _) => Ok((Place::default(), "none found".to_owned())),
    }
}

/// Runs, and prints the table: whether everything held.
fn soak(asked: &Asked) -> Result<bool, Box<dyn std::error::Error>> {
    let (place, cuda) = place(asked.device)?;
    #[cfg(feature = "fake")]
    let fake = (asked.device == Device::Fake).then(Fake::new);
    #[cfg(feature = "fake")]
    let (place, cuda) = match &fake {
        Some(fake) => (Place { cuda: Some(fake.search()) }, "the fake of the tests".to_owned()),
        None => (place, cuda),
    };
    println!("soak: {:?}, seed {}, CUDA: {cuda}", asked.time, asked.seed);
    let account = Arc::new(Account::default());
    watch(account.clone());
    let folder = Folder::new()?;
    let (mut rng, begun) = (Rng(asked.seed), Instant::now());
    let (mut looks, mut threads) = (Vec::new(), Held::now().threads);
    let mut round = 0;
    // At least every kind beside every other, and one more round to compare.
    while begun.elapsed() < asked.time || round <= WARM {
        let left = asked.time.saturating_sub(begun.elapsed());
        let most = (asked.time / 12).clamp(Duration::from_millis(400), Duration::from_secs(6));
        let pause = Duration::from_millis(rng.below(most.as_millis() as u64)).min(left.max(Duration::from_millis(100)));
        let file = folder.0.join("store");
        let kinds = [FIFO[round % FIFO.len()], REPLAY[round % REPLAY.len()]];
        let mut feeds = Vec::new();
        for kind in kinds {
            feeds.push(Soaked::start(kind, &place, &file, &account, &mut rng)?);
        }
        let until = Instant::now() + pause;
        while Instant::now() < until {
            std::thread::sleep((until - Instant::now()).min(Duration::from_millis(150)));
            feeds.iter().for_each(|feed| feed.disturb(&mut rng));
        }
        feeds.into_iter().for_each(|feed| feed.end(rng.once_in(2)));
        account.add("rounds", 1);
        let held = Held::settled(threads);
        #[cfg(feature = "fake")]
        fake.iter().for_each(|fake| fake.check(&account));
        if round < WARM {
            threads = threads.max(held.threads);
        } else {
            looks.push(held);
        }
        round += 1;
    }
    Ok(table(&account, &looks, begun.elapsed()))
}

/// Prints what was done and what is held: whether everything held.
fn table(account: &Account, looks: &[Held], time: Duration) -> bool {
    let quarter = (looks.len() / 4).max(1);
    let most = |looks: &[Held], of: fn(&Held) -> usize| looks.iter().map(of).max().unwrap_or(0);
    let (early, late) = (&looks[..quarter], &looks[looks.len() - quarter..]);
    // Allocators, and CUDA's driver more than they, take what they will need in the course of the first minute.
    let warm = looks.get(quarter..2 * quarter).unwrap_or(early);
    println!("\n{:44} {:>16}", "done", "count");
    for (what, count) in account.counts() {
        println!("{what:44} {count:>16}");
    }
    println!("\n{:44} {:>12} {:>12} {:>12}", "held between rounds", "early", "late", "most");
    type Of = fn(&Held) -> usize;
    let held: [(&str, &[Held], Of, usize); 4] = [
        ("bytes of memory in use", warm, |held| held.rss, SLACK),
        ("open files", early, |held| held.files, 0),
        ("threads", early, |held| held.threads, 0),
        ("bytes of rings", early, |held| held.rings, 0),
    ];
    for (what, early, of, slack) in held {
        let (first, last) = (most(early, of), most(late, of));
        println!("{what:44} {first:>12} {last:>12} {:>12}", most(looks, of));
        account.check(last <= first + slack, || format!("{what} grew from {first} to {last}"));
    }
    let parts = looks.chunks(looks.len().div_ceil(12).max(1));
    let megabytes: Vec<String> = parts.map(|part| format!("{:.0}", most(part, |held| held.rss) as f64 / 1e6)).collect();
    println!("memory in use, MB, in the course of it: {}", megabytes.join(" "));
    account.check(most(looks, |held| held.rings) == 0, || "a ring outlived its feed".to_owned());
    let (wrongs, texts) = account.wrongs();
    println!("\nafter {:.1} s: {}", time.as_secs_f64(), if wrongs == 0 { "all of it held" } else { "it did not hold" });
    texts.iter().for_each(|text| println!("wrong: {text}"));
    if wrongs > texts.len() as u64 {
        println!("… and {} more", wrongs - texts.len() as u64);
    }
    wrongs == 0
}

/// Ends the process, with a code of its own, where nothing moves any more.
fn watch(account: Arc<Account>) {
    std::thread::spawn(move || {
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let now = account.alive.load(Ordering::Relaxed);
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() > STUCK {
                eprintln!(
                    "soak: nothing has moved for {STUCK:?}; done so far: {:?}, {:?}",
                    account.counts(),
                    account.wrongs()
                );
                std::process::exit(3);
            }
        }
    });
}

/// A folder for the checkpoints, which goes at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> std::io::Result<Folder> {
        let folder = std::env::temp_dir().join(format!("pinring-soak-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Folder(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(feature = "fake")]
struct Fake(common::fake::Fake);

#[cfg(feature = "fake")]
impl Fake {
    fn new() -> Fake {
        let fake = common::fake::Fake::new(&common::scratch("soak"), "libcudart.so.13");
        fake.keep_log(false);
        fake.auto_run_after(Some(Duration::from_micros(50)));
        Fake(fake)
    }

    fn search(&self) -> CudaSearch {
        CudaSearch::new().library_only(self.0.path()).driver(self.0.path())
    }

    /// Between rounds nothing is registered, allocated or left.
    fn check(&self, account: &Account) {
        let fake = &self.0;
        let left = [
            fake.live_registrations().len(),
            fake.live_allocations().len(),
            fake.live_events().len(),
            fake.live_streams().len(),
            fake.retained(0) as usize,
        ];
        account
            .check(left == [0; 5], || format!("registrations, allocations, events, streams, contexts left: {left:?}"));
        account.check(fake.hazards() == common::fake::Hazards::default(), || format!("{:?}", fake.hazards()));
    }
}
