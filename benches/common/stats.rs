//! Medians and spread.

/// The median of some figures, and the least and the most of them.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    /// # Panics
    /// If there are no figures.
    pub fn of(figures: impl IntoIterator<Item = f64>) -> Spread {
        let mut sorted: Vec<f64> = figures.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        Spread { median: quantile(&sorted, 0.5), least: sorted[0], most: sorted[sorted.len() - 1] }
    }

    /// The same figures in another unit.
    pub fn times(self, factor: f64) -> Spread {
        Spread { median: self.median * factor, least: self.least * factor, most: self.most * factor }
    }
}

/// A quantile of sorted figures: between two of them, the line that joins them.
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    let place = q * (sorted.len() - 1) as f64;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (place - low as f64)
}
