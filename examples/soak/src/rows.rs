//! What a step holds: its own number, words that follow from it, and their sum; so that any torn or foreign row shows.

/// Words of a step's observation.
pub const WORDS: usize = 32;
/// Bytes of that.
pub const BYTES: usize = WORDS * 8;

/// A stream of numbers from a seed.
#[derive(Clone, Debug)]
pub struct Rng(pub u64);

impl Rng {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }
    /// Below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n
    }
    /// Once in `n` times, on average.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// The number of a step: which lane of which writer it is of, and which step of that.
pub fn id(uid: u64, step: u64) -> u64 {
    uid << 32 | step
}

/// Fills a step's words.
pub fn fill(words: &mut [u64], id: u64) {
    let (last, rest) = words.split_last_mut().expect("a step has words");
    *last = 0;
    for (i, word) in rest.iter_mut().enumerate() {
        *word = if i == 0 { id } else { mix(id ^ (i as u64) << 56) };
        *last = last.wrapping_add(*word);
    }
}

/// The number of a step whose words are whole.
pub fn check(words: &[u64]) -> Option<u64> {
    let mut expected = [0; WORDS];
    fill(&mut expected, words[0]);
    (words == expected).then_some(words[0])
}

/// The same of bytes.
pub fn check_bytes(bytes: &[u8]) -> Option<u64> {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    }
    check(&words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_row_is_found_whichever_word_it_is() {
        let mut words = [0; WORDS];
        fill(&mut words, id(7, 9));
        assert_eq!(check(&words), Some(7 << 32 | 9));
        for word in 0..WORDS {
            let mut torn = words;
            torn[word] ^= 1 << word;
            assert_eq!(check(&torn), None, "word {word}");
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(check_bytes(&bytes), Some(id(7, 9)));
    }
}
