//! Medians, tails, and how sure a difference of medians is.

/// A quantile of figures: between two of them, the line that joins them. Not a number where there are none.
pub fn quantile(figures: &[f64], q: f64) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let place = q * sorted.len().saturating_sub(1) as f64;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    match (sorted.get(low), sorted.get(high)) {
        (Some(&low), Some(&high)) => low + (high - low) * place.fract(),
        _ => f64::NAN,
    }
}

pub fn median(figures: &[f64]) -> f64 {
    quantile(figures, 0.5)
}

pub fn mean(figures: &[f64]) -> f64 {
    figures.iter().sum::<f64>() / figures.len() as f64
}

/// How much larger the median of one way is than that of another, and where it lies with 95 % confidence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

impl Difference {
    /// In hundredths of a figure.
    pub fn percent_of(self, whole: f64) -> Difference {
        let percent = |part: f64| part / whole * 100.0;
        Difference { median: percent(self.median), low: percent(self.low), high: percent(self.high) }
    }
}

const RESAMPLES: usize = 1000;

impl Difference {
    /// Of two ways whose turns alternated: figure i of both is from the same round. Rounds are drawn again, both ways
    /// together, so that what drifted over the run moves both; the interval is that of the percentiles.
    pub fn between(base: &[f64], other: &[f64]) -> Difference {
        let rounds = base.len().min(other.len());
        if rounds == 0 {
            return Difference { median: f64::NAN, low: f64::NAN, high: f64::NAN };
        }
        let (base, other) = (&base[..rounds], &other[..rounds]);
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        let (mut left, mut right) = (vec![0.0; rounds], vec![0.0; rounds]);
        let differences: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                for place in 0..rounds {
                    let round = random.below(rounds);
                    (left[place], right[place]) = (base[round], other[round]);
                }
                middle(&mut right) - middle(&mut left)
            })
            .collect();
        Difference {
            median: median(other) - median(base),
            low: quantile(&differences, 0.025),
            high: quantile(&differences, 0.975),
        }
    }
}

/// The upper median, without sorting all.
fn middle(figures: &mut [f64]) -> f64 {
    let place = figures.len() / 2;
    *figures.select_nth_unstable_by(place, f64::total_cmp).1
}

/// Numbers that look random and are the same in every run.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for place in (1..items.len()).rev() {
            items.swap(place, self.below(place + 1));
        }
    }

    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }
}
