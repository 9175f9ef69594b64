//! Numbers out of an input of bytes, so that each byte of it decides something small.
#![allow(dead_code)]

/// What is left of an input. Behind its end everything is zero.
pub struct Input<'d> {
    rest: &'d [u8],
}

impl<'d> Input<'d> {
    pub fn new(data: &'d [u8]) -> Input<'d> {
        Input { rest: data }
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub fn u8(&mut self) -> u8 {
        let Some((&first, rest)) = self.rest.split_first() else { return 0 };
        self.rest = rest;
        first
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.u8()))
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let wide = if bound > 256 { u16::from_le_bytes([self.u8(), self.u8()]).into() } else { usize::from(self.u8()) };
        wide % bound
    }

    /// True once in so many times.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == times - 1
    }

    /// Mostly small; else one at which arithmetic breaks, or any.
    pub fn size(&mut self) -> usize {
        match self.u8() {
            kind @ 0..200 => usize::from(kind) % 9,
            200..230 => usize::from(self.u8()),
            kind @ 230..254 => {
                let edge = [31, 32, 33, 62, 63, 20, 21, 12][usize::from(kind) % 8];
                let number = 1u64.checked_shl(edge).unwrap_or(0).wrapping_add(u64::from(self.u8() % 5)).wrapping_sub(2);
                usize::try_from(number).unwrap_or(usize::MAX)
            }
            254 => usize::MAX - usize::from(self.u8()),
            _ => self.u64() as usize,
        }
    }

    pub fn rest(&mut self) -> &'d [u8] {
        std::mem::take(&mut self.rest)
    }
}
