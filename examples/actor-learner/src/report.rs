//! Where the time went, and the words for it: the progress bar while a run lasts, the summary when it is over.
//!
//! Owns the arithmetic of shares and the verdict that follows from it. What it does not do: measure; the feed counts how
//! long each side was blocked, the learner's loop how long it trained.

use indicatif::{ProgressBar, ProgressStyle};
use std::fmt;
use std::time::Duration;

/// What was measured, from the start of the feed on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// Wall-clock time.
    pub elapsed: Duration,
    /// Time that the learner spent on learning and publishing.
    pub training: Duration,
    /// Time that the learner spent waiting for batches.
    pub learner_blocked: Duration,
    /// Time that writers waited at the lag gate for newer weights, all environment threads together.
    pub gate_blocked: Duration,
    /// Time that writers waited for room in the ring, all environment threads together.
    pub room_blocked: Duration,
    /// Environment threads.
    pub threads: usize,
    /// Environment steps learned from.
    pub steps: u64,
    /// Batches learned from.
    pub batches: u64,
    /// Rows learned from.
    pub rows: u64,
    /// Rows by policy lag: how many versions older than the learner's the acting policy was.
    pub lags: Vec<u64>,
    /// Rows that took the way over a lane buffer.
    pub staged_rows: u64,
    /// Rows that the feed dropped.
    pub dropped_rows: u64,
}

/// Who held the others up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// Writers wait for the learner.
    Learner,
    /// The learner waits for environment threads that are at work.
    Environments,
    /// Both sides wait: what lies between them does not keep up.
    Feed,
    /// Nobody waits much.
    Balanced,
}

impl Totals {
    /// What the times are of the whole.
    pub fn shares(&self) -> Shares {
        let share = |part: Duration, whole: f64| (part.as_secs_f64() / whole.max(1e-9)).min(1.0);
        let (learner, writers) = (self.elapsed.as_secs_f64(), self.elapsed.as_secs_f64() * self.threads.max(1) as f64);
        Shares {
            training: share(self.training, learner),
            learner_blocked: share(self.learner_blocked, learner),
            gate_blocked: share(self.gate_blocked, writers),
            room_blocked: share(self.room_blocked, writers),
        }
    }

    /// Mean policy lag of a row, in versions.
    pub fn mean_lag(&self) -> f64 {
        let sum: u64 = self.lags.iter().enumerate().map(|(lag, rows)| lag as u64 * rows).sum();
        sum as f64 / self.lags.iter().sum::<u64>().max(1) as f64
    }
}

/// Shares of time, 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares {
    /// Of the learner's: learning and publishing.
    pub training: f64,
    /// Of the learner's: waiting for a batch.
    pub learner_blocked: f64,
    /// Of the environment threads': waiting for newer weights.
    pub gate_blocked: f64,
    /// Of the environment threads': waiting for room in the ring.
    pub room_blocked: f64,
}

impl Shares {
    /// Of the environment threads': waiting for the learner, in one way or the other.
    pub fn writer_blocked(&self) -> f64 {
        (self.gate_blocked + self.room_blocked).min(1.0)
    }

    /// From these shares alone. A side that waits for more than a tenth of its time is held up by the other; if both
    /// are, each for more than a quarter, it is by what lies between.
    pub fn bottleneck(&self) -> Bottleneck {
        let (learner, writers) = (self.learner_blocked, self.writer_blocked());
        if learner.min(writers) > 0.25 {
            Bottleneck::Feed
        } else if learner.max(writers) <= 0.1 {
            Bottleneck::Balanced
        } else if writers > learner {
            Bottleneck::Learner
        } else {
            Bottleneck::Environments
        }
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares = self.shares();
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let seconds = self.elapsed.as_secs_f64();
        writeln!(
            f,
            "time               {seconds:.1} s, {:.0} environment steps/s",
            self.steps as f64 / seconds.max(1e-9)
        )?;
        writeln!(f, "learned from       {} steps: {} rows in {} batches", self.steps, self.rows, self.batches)?;
        write!(f, "policy lag         mean {:.2} versions; rows by lag:", self.mean_lag())?;
        for (lag, rows) in self.lags.iter().enumerate() {
            write!(f, " {lag}: {rows}")?;
        }
        writeln!(f, "\nrows               {} staged, {} dropped", self.staged_rows, self.dropped_rows)?;
        let rest = (1.0 - shares.training - shares.learner_blocked).max(0.0);
        writeln!(
            f,
            "learner            {} training, {} waiting for a batch, {} else",
            percent(shares.training),
            percent(shares.learner_blocked),
            percent(rest)
        )?;
        writeln!(
            f,
            "environments       {} acting, {} waiting for newer weights, {} for room in the ring ({} threads)",
            percent(1.0 - shares.writer_blocked()),
            percent(shares.gate_blocked),
            percent(shares.room_blocked),
            self.threads
        )?;
        write!(f, "bottleneck         {}", self.verdict())
    }
}

impl Totals {
    /// The bottleneck in a sentence, with the shares it rests on.
    pub fn verdict(&self) -> String {
        let shares = self.shares();
        let [training, learner, writers] =
            [shares.training, shares.learner_blocked, shares.writer_blocked()].map(|s| format!("{:.0} %", s * 100.0));
        match shares.bottleneck() {
            Bottleneck::Learner => format!(
                "On this task the learner, not the feed, is the bottleneck: it trained for {training} of the time and \
                 waited for data for {learner}, while the environment threads waited for it for {writers}."
            ),
            Bottleneck::Environments => format!(
                "On this run the environment threads, not the feed, are the bottleneck: the learner waited for data for \
                 {learner} of the time, while they waited for {writers} of theirs."
            ),
            Bottleneck::Feed => format!(
                "On this run the feed is the bottleneck: the learner waited for {learner} of the time and the \
                 environment threads for {writers}, each for the other."
            ),
            Bottleneck::Balanced => format!(
                "No bottleneck on this run: the learner waited for {learner} of the time, the environment threads for \
                 {writers}."
            ),
        }
    }
}

/// The progress bar; or nothing, which costs nothing.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar on stderr that grows with the return up to `goal`, if `show` is set and stderr is a terminal.
    pub fn new(show: bool, goal: f64) -> Progress {
        if !show {
            return Progress(ProgressBar::hidden());
        }
        let style = ProgressStyle::with_template("{bar:20} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
        Progress(ProgressBar::new(goal as u64).with_style(style))
    }

    /// Moves the bar.
    pub fn show(&self, totals: &Totals, mean: f64) {
        if self.0.is_hidden() {
            return;
        }
        let shares = totals.shares();
        let [training, learner, writers] =
            [shares.training, shares.learner_blocked, shares.writer_blocked()].map(|share| share * 100.0);
        let rate = totals.steps as f64 / totals.elapsed.as_secs_f64().max(1e-9) / 1e3;
        self.0.set_position(mean as u64);
        self.0.set_message(format!(
            "return {mean:.0}, {:.0} k steps, {rate:.1} k/s; learner trains {training:.0} %, waits {learner:.0} %; envs wait \
             {writers:.0} %",
            totals.steps as f64 / 1e3
        ));
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(training: u64, learner_blocked: u64, writer_blocked: u64) -> Totals {
        Totals {
            elapsed: Duration::from_secs(10),
            training: Duration::from_millis(training * 100),
            learner_blocked: Duration::from_millis(learner_blocked * 100),
            gate_blocked: Duration::from_millis(writer_blocked * 150), // of two threads: three quarters of their waiting
            room_blocked: Duration::from_millis(writer_blocked * 50),
            threads: 2,
            steps: 50_000,
            batches: 50,
            rows: 800,
            lags: vec![200, 600],
            ..Totals::default()
        }
    }

    #[test]
    fn the_verdict_follows_from_the_shares() {
        for (training, learner, writers, expected, word) in [
            (95, 4, 60, Bottleneck::Learner, "the learner, not the feed, is the bottleneck"),
            (30, 70, 2, Bottleneck::Environments, "environment threads, not the feed"),
            (40, 60, 55, Bottleneck::Feed, "the feed is the bottleneck"),
            (92, 8, 9, Bottleneck::Balanced, "No bottleneck"),
        ] {
            let totals = totals(training, learner, writers);
            assert_eq!(totals.shares().bottleneck(), expected);
            assert!(totals.verdict().contains(word), "{}", totals.verdict());
            assert!(totals.verdict().contains(&format!("{writers} %")), "{}", totals.verdict());
        }
    }

    #[test]
    fn the_summary_names_every_figure() {
        let text = totals(95, 4, 60).to_string();
        for part in [
            "10.0 s, 5000 environment steps/s",
            "50000 steps: 800 rows in 50 batches",
            "mean 0.75 versions; rows by lag: 0: 200 1: 600",
            "0 staged, 0 dropped",
            "95.0 % training, 4.0 % waiting for a batch, 1.0 % else",
            "40.0 % acting, 45.0 % waiting for newer weights, 15.0 % for room in the ring (2 threads)",
        ] {
            assert!(text.contains(part), "`{part}` is not in:\n{text}");
        }
    }

    #[test]
    fn an_empty_run_divides_by_nothing() {
        let text = Totals::default().to_string();
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
}
