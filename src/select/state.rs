//! What samplers save, as bytes: a tag, then little-endian numbers and lists.
//!
//! Owns the form. What it does not do: know what the numbers mean.

use super::SamplerError;

/// Bytes being written.
#[derive(Debug)]
pub(super) struct Saved(Vec<u8>);

impl Saved {
    pub(super) fn new(tag: &[u8; 4]) -> Saved {
        Saved(tag.to_vec())
    }

    pub(super) fn u64(mut self, value: u64) -> Saved {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// A list of 32-bit numbers, behind its length.
    pub(super) fn items(self, items: &[u32]) -> Saved {
        let mut saved = self.u64(items.len() as u64);
        saved.0.extend(items.iter().flat_map(|item| item.to_le_bytes()));
        saved
    }

    /// Bytes, behind their length.
    pub(super) fn inner(self, bytes: &[u8]) -> Saved {
        let mut saved = self.u64(bytes.len() as u64);
        saved.0.extend(bytes);
        saved
    }

    pub(super) fn bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Bytes being read; every mistake is an error.
#[derive(Debug)]
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(tag: &[u8; 4], saved: &'a [u8]) -> Result<Reader<'a>, SamplerError> {
        match saved.split_first_chunk() {
            Some((found, rest)) if found == tag => Ok(Reader(rest)),
            _ => Err(SamplerError::Saved { why: "they are another sampler's" }),
        }
    }

    fn take(&mut self, bytes: u64) -> Result<&'a [u8], SamplerError> {
        let bytes = usize::try_from(bytes).ok().filter(|&bytes| bytes <= self.0.len());
        let (taken, rest) = self.0.split_at(bytes.ok_or(SamplerError::Saved { why: "they are cut short" })?);
        self.0 = rest;
        Ok(taken)
    }

    pub(super) fn u64(&mut self) -> Result<u64, SamplerError> {
        let bytes = self.take(8)?;
        Ok(u64::from_le_bytes(std::array::from_fn(|i| bytes[i])))
    }

    /// The number of items, which must be that of now.
    pub(super) fn items(&mut self, now: usize) -> Result<u32, SamplerError> {
        let items = self.u64()?;
        if items == now as u64 {
            Ok(now as u32)
        } else {
            Err(SamplerError::Saved { why: "the store had another size" })
        }
    }

    /// A list of 32-bit numbers.
    pub(super) fn numbers(&mut self) -> Result<Vec<u32>, SamplerError> {
        let bytes = self.u64()?.saturating_mul(4);
        let numbers = self.take(bytes)?.chunks_exact(4);
        Ok(numbers.map(|bytes| u32::from_le_bytes(std::array::from_fn(|i| bytes[i]))).collect())
    }

    /// A list of items, each below `items`.
    pub(super) fn present(&mut self, items: usize) -> Result<Vec<u32>, SamplerError> {
        let present = self.numbers()?;
        match present.iter().all(|&item| (item as usize) < items) {
            true => Ok(present),
            false => Err(SamplerError::Saved { why: "an item is beyond the store" }),
        }
    }

    /// Bytes behind their length.
    pub(super) fn inner(&mut self) -> Result<&'a [u8], SamplerError> {
        let bytes = self.u64()?;
        self.take(bytes)
    }

    pub(super) fn end(self) -> Result<(), SamplerError> {
        if self.0.is_empty() { Ok(()) } else { Err(SamplerError::Saved { why: "they go on where they should end" }) }
    }
}
