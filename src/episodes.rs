//! Finished episodes, on their way to whoever prints or stores returns.
//!
//! Owns the bounded stream; when nobody reads it, the newest episodes are dropped and counted, never a step.

use crossbeam_channel as channel;

/// How an episode ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The environment reached a terminal state: nothing is to be bootstrapped from behind it.
    Terminated,
    /// The episode was cut, by a time limit say: its last observation still has a value.
    Truncated,
}

/// One finished episode of one lane.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Episode {
    /// The lane.
    pub lane: usize,
    /// Steps.
    pub length: u64,
    /// The sum over the leaf named with [`Step::reward`](crate::Step::reward); 0 if none was.
    pub ret: f64,
    /// How it ended.
    pub end: End,
    /// The version of the weights that its last step was acted with.
    pub version: u64,
}

/// A handle on the stream of finished episodes; clones share it, and each episode goes to one of them.
///
/// ```
/// # use pinring::*;
/// # fn main() -> Result<()> {
/// # let mut step = Step::new();
/// # let reward = step.leaf::<f32>("reward", &[]);
/// step.reward(reward);
/// let feed = Feed::builder(Sample::step(step)).batch(8).start()?;
/// let (mut writer, episodes) = (feed.writer(1)?, feed.episodes());
/// for last in [false, true] {
///     let mut step = writer.step()?;
///     step.put(reward, &[2.0])?;
///     if last {
///         step.end(0, End::Terminated);
///     }
///     step.commit()?;
/// }
/// let episode = episodes.try_iter().next().unwrap();
/// assert_eq!((episode.length, episode.ret, episode.end), (2, 4.0, End::Terminated));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Episodes(pub(crate) channel::Receiver<Episode>);

impl Episodes {
    /// The episodes that have ended since the last call; never waits.
    pub fn try_iter(&self) -> impl Iterator<Item = Episode> + '_ {
        self.0.try_iter()
    }
}
