//! `{:?}` of every handle is a line to read, not the whole feed; also while a step is open and batches are waiting.

mod common;

use common::Watchdog;
use pinring::*;
use std::time::Duration;

#[test]
fn debug_texts_are_short() {
    let _watchdog = Watchdog::new("debug texts", Duration::from_secs(180));
    let mut step = Step::new();
    let obs = step.observation::<f32>("obs", &[100]);
    let reward = step.leaf::<f32>("reward", &[]);
    let mut sample = Sample::step(step);
    let column = sample.all(obs);
    let feed = Feed::builder(sample).batch(64).buffers(4).start().unwrap();
    let (intake, learner) = (feed.intake().unwrap(), feed.learner().unwrap());
    let mut writer = feed.writer(64).unwrap();
    for _ in 0..3 {
        let mut step = writer.step().unwrap();
        step.view_mut(obs).fill(1.0);
        step.view_mut(reward).fill(1.0);
        step.commit().unwrap();
    }
    let batch = learner.next_batch().unwrap();
    let shared = learner.next_batch().unwrap().share();
    let mut texts = vec![
        ("feed", format!("{feed:?}")),
        ("intake", format!("{intake:?}")),
        ("writer", format!("{writer:?}")),
        ("learner", format!("{learner:?}")),
        ("iterator", format!("{:?}", learner.iter())),
        ("future", format!("{:?}", learner.next_async())),
        ("batch", format!("{batch:?}")),
        ("minibatch", format!("{:?}", batch.minibatch(0..3))),
        ("shared", format!("{shared:?}")),
        ("bytes", format!("{:?}", shared.column(column).0)),
        ("episodes", format!("{:?}", feed.episodes())),
        ("weights", format!("{:?}", Weights::new([0u8; 1000]))),
    ];
    let mut step = writer.step().unwrap();
    texts.push(("step", format!("{step:?}")));
    texts.push(("final", format!("{:?}", step.end(0, End::Truncated))));
    for (name, text) in texts {
        let limit = if name == "feed" { 1000 } else { 250 };
        assert!((5..limit).contains(&text.len()), "{name}: {} characters: {:.300}", text.len(), text);
    }
}
