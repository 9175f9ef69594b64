//! A pace holds back one side at a time: whatever the numbers, somebody goes on.

mod common;

use common::Watchdog;
use pinring::*;
use std::sync::mpsc;
use std::time::Duration;

/// What is sampled, and by which pace.
struct Case {
    sample: fn(Step) -> Sample,
    lanes: usize,
    batch: usize,
    pace: Pace,
    /// Steps from one end of an episode to the next; 0: none ends.
    episode: u64,
}

fn transition<const N: usize>(step: Step) -> Sample {
    Sample::transition(step, N, 0.9)
}

fn sequence<const LENGTH: usize, const STRIDE: usize>(step: Step) -> Sample {
    Sample::sequence(step, LENGTH, STRIDE)
}

/// One writer and one learner that wait without a deadline: so many batches come, and then the writers end it.
fn goes_on(case: &Case, batches: usize) {
    let mut step = Step::new();
    let obs = step.observation::<i64>("obs", &[]);
    let mut sample = (case.sample)(step);
    let column = sample.at(obs, 0);
    let builder = Feed::builder(sample).batch(case.batch).buffers(1).lanes(case.lanes).seed(3);
    let feed = builder.replay(100_000, Uniform::new()).pace(case.pace).start().unwrap();
    let (mut writer, learner) = (feed.writer(case.lanes).unwrap(), feed.learner().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for t in 0.. {
                let Ok(mut s) = writer.step() else { return };
                s.put(obs, &vec![t as i64; case.lanes]).unwrap();
                if case.episode > 0 && (t + 1) % case.episode == 0 {
                    for lane in 0..case.lanes {
                        s.end(lane, End::Terminated);
                    }
                }
                if s.commit().is_err() {
                    return;
                }
            }
        });
        for _ in 0..batches {
            let batch = learner.next_batch().unwrap();
            assert_eq!((batch.rows(), batch.slice(column).len()), (case.batch, case.batch));
        }
        feed.stop(Duration::from_secs(10)).unwrap();
    });
}

#[test]
fn no_pace_locks_writer_and_learner_up() {
    let _watchdog = Watchdog::new("pace", Duration::from_secs(180));
    let spi = |min, rate, tolerance| Pace::min_size(min).samples_per_insert(rate, tolerance);
    let cases = [
        Case { sample: transition::<3>, lanes: 1, batch: 1, pace: spi(10, 1.0, 0.0), episode: 0 },
        Case { sample: transition::<1>, lanes: 1, batch: 1, pace: spi(0, 1.0, 0.0), episode: 0 },
        Case { sample: transition::<3>, lanes: 64, batch: 64, pace: spi(500, 8.0, 0.4), episode: 0 },
        Case { sample: transition::<10>, lanes: 8, batch: 32, pace: spi(1000, 4.0, 0.0), episode: 0 },
        Case { sample: transition::<10>, lanes: 8, batch: 32, pace: spi(1000, 4.0, 0.0), episode: 7 },
        Case {
            sample: transition::<3>,
            lanes: 1,
            batch: 32,
            pace: Pace::min_size(1_000).updates_per_step(20.0, 0.0),
            episode: 0,
        },
        Case { sample: sequence::<80, 40>, lanes: 16, batch: 8, pace: spi(1000, 0.1, 2.0), episode: 0 },
        Case { sample: sequence::<8, 4>, lanes: 1, batch: 4, pace: spi(100, 1.0, 0.5), episode: 0 },
        Case { sample: sequence::<8, 4>, lanes: 1, batch: 4, pace: spi(100, 1.0, 0.0), episode: 9 },
    ];
    for (number, case) in cases.iter().enumerate() {
        println!("case {number}");
        goes_on(case, 50);
    }
}

/// A sampler that uses items up is waited for by the learner, so the writers go on.
#[test]
fn used_up_samples_hold_no_writer_back() {
    let _watchdog = Watchdog::new("pace and used-up samples", Duration::from_secs(60));
    let mut step = Step::new();
    let obs = step.observation::<i64>("obs", &[]);
    let mut sample = Sample::sequence(step, 8, 4);
    sample.at(obs, 0);
    let build = |rate| {
        let pace = Pace::min_size(0).samples_per_insert(rate, 64.0);
        Feed::builder(sample.clone())
            .batch(4)
            .buffers(1)
            .lanes(1)
            .replay(1_000, MaxTimes::new(Fifo::new(), 1))
            .pace(pace)
    };
    let refused = build(0.5).start().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Config, "{refused}"); // a quarter of a sample a step is all there is
    let feed = build(0.25).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for t in 0.. {
                let Ok(mut s) = writer.step() else { return };
                s.put(obs, &[t]).unwrap();
                if s.commit().is_err() {
                    return;
                }
            }
        });
        for _ in 0..50 {
            learner.next_batch().unwrap();
        }
        feed.stop(Duration::from_secs(10)).unwrap();
    });
}

/// Has half of the rows that it is asked for, and says so when it is told to.
#[derive(Debug)]
struct Half(Uniform, mpsc::SyncSender<()>, mpsc::Receiver<()>);

impl Sampler for Half {
    fn begin(&mut self, items: u32) -> std::result::Result<(), SamplerError> {
        self.0.begin(items)
    }
    fn insert(&mut self, item: u32, priority: Option<f32>) -> std::result::Result<(), PriorityError> {
        self.0.insert(item, priority)
    }
    fn remove(&mut self, item: u32) {
        self.0.remove(item);
    }
    fn selectable(&self) -> usize {
        self.0.selectable()
    }
    fn select(&mut self, rows: usize, draws: &mut Draws, into: &mut Vec<Selected>) -> Pass {
        let _ = (self.1.send(()), self.2.recv());
        self.0.select(rows / 2, draws, into)
    }
}

/// Six rows are due. Whether the batch of four that is being selected leaves another one due shows when the sampler has chosen.
#[test]
fn in_strict_order_no_step_is_begun_while_a_batch_is_selected_that_may_be_short() {
    let _watchdog = Watchdog::new("a short batch", Duration::from_secs(60));
    let mut step = Step::new();
    let obs = step.observation::<i64>("obs", &[]);
    let mut sample = Sample::transition(step, 1, 0.9);
    sample.at(obs, 0);
    let ((asked, asks), (tell, told)) = (mpsc::sync_channel(0), mpsc::sync_channel(0));
    let builder = Feed::builder(sample).batch(4).buffers(3).lanes(1).replay(100, Half(Uniform::new(), asked, told));
    let feed = builder.pace(Pace::min_size(4).samples_per_insert(6.0, 0.0)).start().unwrap();
    let (mut writer, learner) = (feed.writer(1).unwrap(), feed.learner().unwrap());
    for t in 0..5 {
        let mut s = writer.step().unwrap();
        s.put(obs, &[t]).unwrap();
        s.commit().unwrap();
    }
    for _ in 0..2 {
        asks.recv().unwrap();
        assert!(matches!(writer.try_step(), Err(StepError::Pace(_))), "two rows more may be due");
        tell.send(()).unwrap();
        assert_eq!(learner.next_batch().unwrap().rows(), 2);
    }
    drop(writer.step().unwrap());
    drop((asks, tell));
    feed.stop(Duration::from_secs(10)).unwrap();
}
