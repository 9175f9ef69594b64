//! A slot that comes home reaches a writer that can use it, whoever else waits.

mod common;

use common::Watchdog;
use pinring::*;
use std::sync::mpsc;
use std::time::Duration;

/// Fills one unroll of one step for every lane, and leaves the next step's observation to be written.
fn write(writer: &mut Writer, obs: Leaf<u8>) -> Result<()> {
    let mut step = writer.step()?;
    step.view_mut(obs).fill(1);
    Ok(step.commit()?)
}

/// Eight lanes wait for eight rows, with a time limit; one lane waits for one row. A slot of four comes home: that is
/// enough for the one.
#[test]
fn who_needs_much_does_not_keep_it_from_who_needs_little() {
    let _watchdog = Watchdog::new("a wake that is passed on", Duration::from_secs(180));
    let mut step = Step::new();
    let obs = step.observation::<u8>("obs", &[]);
    let feed = Feed::builder(Sample::unroll(step, 1)).batch(4).buffers(2).start().unwrap();
    let learner = feed.learner().unwrap();
    let (mut many, mut one) = (feed.writer(8).unwrap(), feed.writer(1).unwrap());
    write(&mut one, obs).unwrap();
    write(&mut many, obs).unwrap();
    write(&mut many, obs).unwrap(); // hands eight unrolls over: both buffers are full
    let held = [learner.next_batch().unwrap(), learner.next_batch().unwrap()];
    let wide = std::thread::spawn(move || many.step_timeout(Duration::from_secs(120)).map(drop));
    std::thread::sleep(Duration::from_millis(50)); // it parks first
    let (told, done) = mpsc::channel();
    let narrow = std::thread::spawn(move || {
        let result = write(&mut one, obs);
        told.send(()).unwrap();
        result
    });
    std::thread::sleep(Duration::from_millis(50));
    let [first, second] = held;
    drop(first);
    done.recv().unwrap(); // hangs, and the watchdog says so, if the wake was lost
    narrow.join().unwrap().unwrap();
    drop(second);
    feed.stop(Duration::from_secs(10)).unwrap();
    assert_eq!(wide.join().unwrap(), Err(StepError::Closed(Closed::Stopped)));
}
