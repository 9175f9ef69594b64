//! The settings of a feed that gathers its batches on a device, and what came of them.

use super::{Feed, FeedBuilder, Pinning};
use crate::error::{Error, ErrorKind, Result};
use crate::feeding::rounds::Deal;
use crate::gather::{BLOCKS, Gather, GatherReport, Gathering, Tables, refusal};
use crate::layout::Layout;
use crate::memory::Ring;
use crate::store::StoreConfig;

/// As many as the largest device has multiprocessors, and more.
const MOST_BLOCKS: u32 = 1024;

/// What was asked for. `None`: not asked.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GatherSettings {
    by: Option<Gather>,
    blocks: Option<u32>,
}

impl FeedBuilder {
    /// Who puts the rows of sampled batches together. Default [`Gather::Auto`]: the device, where that can be. While it
    /// does, [`Feed::learner`] is refused; in `Auto` whichever end is taken first decides.
    pub fn gather(mut self, by: Gather) -> Self {
        self.gather.by = Some(by);
        self
    }

    /// Thread blocks of the kernel that gathers, of 1,024 threads each: how much of a device it takes. Default 4, which
    /// fill the link where rows have some kilobytes; more help where they are smaller.
    pub fn gather_blocks(mut self, blocks: u32) -> Self {
        self.gather.blocks = Some(blocks);
        self
    }

    pub(super) fn check_gather(&self) -> Result<()> {
        let GatherSettings { by, blocks } = self.gather;
        let config = |text: String| Err(Error::new(ErrorKind::Config, text));
        if self.replay.is_none() && (by.is_some() || blocks.is_some()) {
            return config("`.gather` and `.gather_blocks` are of stored steps: give `.replay(steps, sampler)`".into());
        }
        if blocks.is_some_and(|blocks| !(1..=MOST_BLOCKS).contains(&blocks)) {
            let got = blocks.unwrap_or_default();
            return config(format!("{got} thread blocks cannot gather: give `.gather_blocks` 1 to {MOST_BLOCKS}"));
        }
        Ok(())
    }

    /// What the feed will gather with, once its ring is there. The store lies behind the first `buffers` slots.
    ///
    /// # Errors
    /// The device was asked for, and cannot.
    pub(super) fn gathering(
        &self,
        layout: &Layout,
        store: &StoreConfig,
    ) -> Result<impl FnOnce(&Ring) -> Gathering + Send + 'static> {
        let tables = match self.pinning {
            _ if self.mix.is_some() => Err("rows of a second store are mixed in".to_owned()),
            Pinning::Required => Tables::new(layout, &store.plan, store.record_layout.bytes),
            Pinning::Off => Err("the store is not page-locked: give `.pinning(Pinning::Required)`".to_owned()),
        };
        let (by, blocks) = (self.gather.by.unwrap_or_default(), self.gather.blocks.unwrap_or(BLOCKS));
        let (buffers, devices) = (self.buffers, self.devices.len());
        let turns = if self.deal == Deal::Rounds { devices } else { 1 };
        if by == Gather::Mapped {
            let why = if devices == 0 { Some("no device is attached: give `.device`") } else { None };
            if let Some(why) = why.or(tables.as_ref().err().map(String::as_str)) {
                return Err(refusal(ErrorKind::Config, why));
            }
        }
        Ok(move |ring: &Ring| {
            Gathering::new(by, blocks, devices, || {
                let store = ring.device_line(buffers);
                Ok((tables?, store.ok_or("for devices the store does not lie in one line")?))
            })
            .in_turns(turns)
        })
    }
}

impl Feed {
    /// Who gathers the batches of a replay feed, and why; `None` for a feed without a store. In [`Gather::Auto`] it is
    /// settled once a learner was taken.
    pub fn gather(&self) -> Option<GatherReport> {
        self.gate.gathering.as_ref().map(Gathering::report)
    }

    /// Settles that a learner of the host takes the batches.
    pub(super) fn gather_for_host(&self) -> Result<()> {
        match &self.gate.gathering {
            Some(gathering) if !gathering.take_host() => Err(Error::new(
                ErrorKind::Misuse,
                "the batches of this feed are gathered on its device: take them with `learner_on`, or build it with \
                 `.gather(Gather::Cpu)`",
            )),
            _ => Ok(()),
        }
    }
}
