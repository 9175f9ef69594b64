//! Modules and launches: the gather kernel, run by the host's walk of its indices.

use crate::emulate::emulate;
use crate::launch::Launch;
use crate::streams::{Op, Queued};
use crate::{Answer, Poison, State};
use std::time::Instant;

/// `CUDA_ERROR_ILLEGAL_ADDRESS`.
const ILLEGAL_ADDRESS: i32 = 700;

impl State {
    pub fn load_module(&mut self, text: &str) -> usize {
        let module = self.handle();
        self.modules.insert(module, text.to_owned());
        module
    }

    pub fn launch(&mut self, function: usize, launch: Launch, threads: u32, stream: usize) -> Answer {
        if !self.modules.contains_key(&function) {
            return Err(400);
        }
        let key = self.stream(stream)?;
        if !self.enters(key)? {
            self.queue(key, Queued { op: Op::Gather { function, launch, threads }, at: Instant::now() });
        }
        Ok(())
    }

    /// Whether a kernel of the module is queued.
    pub fn launches_of(&self, module: usize) -> bool {
        let mut queued = self.streams.values().flat_map(|stream| &stream.ops);
        queued.any(|queued| matches!(queued.op, Op::Gather { function, .. } if function == module))
    }

    pub fn gather(&mut self, launch: &Launch, threads: u32) {
        let at = |address: u64, bytes: usize| {
            self.memory.device_range(address as usize, bytes).map(|address| address as *mut u8)
        };
        // SAFETY: every range is one of device memory, or of a registration, which the crate must keep until the stream has
        // run this.
        if !unsafe { emulate(launch, threads, &at) } {
            self.poison = Some(Poison { after: 0, code: ILLEGAL_ADDRESS });
        }
    }
}
