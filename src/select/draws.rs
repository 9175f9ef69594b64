//! The numbers that samplers draw.
//!
//! Owns a small generator whose whole state can be saved with a store. What it does not do: keep secrets.

/// Random numbers for selection: xoshiro256++ (Blackman and Vigna 2021, "Scrambled Linear Pseudorandom Number
/// Generators", section 4), seeded through SplitMix64. The same seed and stream give the same numbers on every machine.
///
/// ```
/// use pinring::Draws;
/// let (mut a, mut b) = (Draws::new(42, 0), Draws::new(42, 0));
/// assert_eq!(a.next_u64(), b.next_u64());
/// assert!(a.below(6) < 6 && (0.0..1.0).contains(&a.unit()));
/// assert_ne!(a.next_u64(), Draws::new(42, 1).next_u64(), "streams of one seed differ");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draws {
    state: [u64; 4],
}

impl Draws {
    /// The numbers of that seed. Streams of one seed are independent of each other.
    pub fn new(seed: u64, stream: u64) -> Draws {
        let mut mixed = seed ^ split_mix(&mut stream.wrapping_mul(0xd134_2543_de82_ef95));
        let state = [(); 4].map(|()| split_mix(&mut mixed));
        // All zeros is the one state that never leaves itself.
        Draws { state: if state == [0; 4] { [1; 4] } else { state } }
    }

    /// The next 64 bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let drawn = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (c, d) = (c ^ a, d ^ b);
        self.state = [a ^ d, b ^ c, c ^ (b << 17), d.rotate_left(45)];
        drawn
    }

    /// A number in `0..bound`, every one as likely as the others (Lemire 2019, "Fast Random Integer Generation in an
    /// Interval").
    ///
    /// # Panics
    /// If `bound` is 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "there is no number below 0");
        loop {
            let wide = u128::from(self.next_u64()) * u128::from(bound);
            // Few draws land here, and of these few are refused.
            if (wide as u64) >= bound || (wide as u64) >= bound.wrapping_neg() % bound {
                return (wide >> 64) as u64;
            }
        }
    }

    /// A number in `0.0..1.0`, a multiple of 2⁻⁵³.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// What to save; [`from_state`](Draws::from_state) goes on where this one is.
    pub fn state(&self) -> [u64; 4] {
        self.state
    }

    /// Goes on where the generator was whose state this is. `None` for four zeros, which no generator has.
    pub fn from_state(state: [u64; 4]) -> Option<Draws> {
        (state != [0; 4]).then_some(Draws { state })
    }
}

/// Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators".
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The generator's published reference output for the state 1, 2, 3, 4.
    #[test]
    fn the_first_numbers_are_those_of_xoshiro256_plus_plus() {
        let mut draws = Draws::from_state([1, 2, 3, 4]).unwrap();
        let drawn = [(); 4].map(|()| draws.next_u64());
        assert_eq!(drawn, [41_943_041, 58_720_359, 3_588_806_011_781_223, 3_591_011_842_654_386]);
    }

    #[test]
    fn a_saved_state_goes_on_and_four_zeros_are_refused() {
        let mut draws = Draws::new(7, 3);
        draws.next_u64();
        let mut restored = Draws::from_state(draws.state()).unwrap();
        assert_eq!([(); 5].map(|()| restored.next_u64()), [(); 5].map(|()| draws.next_u64()));
        assert_eq!(Draws::from_state([0; 4]), None);
    }

    #[test]
    fn numbers_below_a_bound_are_even_also_where_the_bound_divides_badly() {
        let mut draws = Draws::new(1, 0);
        for bound in [1, 2, 3, 7, 10] {
            let mut counts = vec![0u32; bound as usize];
            (0..10_000 * bound).for_each(|_| counts[draws.below(bound) as usize] += 1);
            assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{bound}: {counts:?}");
        }
        // Three quarters of 2^64: without refusals the upper half would be drawn half as often.
        let bound = 3 << 62;
        let high = (0..30_000).filter(|_| draws.below(bound) >= bound / 2).count();
        assert!((14_500..15_500).contains(&high), "{high}");
    }
}
