//! The points of a loss curve: gaps where a loss is not finite, smoothing, and thinning of what
//! has more points than can be seen.

use super::metrics::{Kind, Record};

/// Step and loss.
pub(crate) type Point = (f64, f64);

/// The share of a curve that smoothing averages over to either side.
const SMOOTHING: usize = 40;
/// Losses beyond this are as good as infinite, and would overflow the arithmetic of an axis.
pub(crate) const LARGEST: f64 = 1e30;

/// A curve, in parts between which there is no finite value.
#[derive(Debug, Default)]
pub(crate) struct Series {
    parts: Vec<Vec<Point>>,
}

impl Series {
    /// The losses of one kind of record, in the order of the records.
    pub(crate) fn losses(records: &[Record], kind: Kind) -> Self {
        let losses = records
            .iter()
            .filter(|record| record.kind == kind)
            .filter_map(|record| Some((record.step as f64, record.get("loss")?)));
        let mut parts = vec![Vec::new()];
        for (step, loss) in losses {
            if loss.abs() <= LARGEST {
                if let Some(part) = parts.last_mut() {
                    part.push((step, loss));
                }
            } else {
                parts.push(Vec::new());
            }
        }
        parts.retain(|part| !part.is_empty());
        Self { parts }
    }

    /// The same curve with steps of this length.
    pub(crate) fn over(self, length: f64) -> Self {
        let point = |(step, loss): Point| (step * length, loss);
        let part = |part: Vec<Point>| part.into_iter().map(point).collect();
        Self { parts: self.parts.into_iter().map(part).collect() }
    }

    /// The same curve without losses above `top`.
    pub(crate) fn up_to(&self, top: f64) -> Self {
        let parts = self.parts().flat_map(|part| part.split(|(_, loss)| *loss > top));
        Self { parts: parts.filter(|part| !part.is_empty()).map(<[Point]>::to_vec).collect() }
    }

    /// The same curve, smoothed.
    pub(crate) fn smoothed(&self) -> Self {
        Self { parts: self.parts().map(smoothed).collect() }
    }

    pub(crate) fn parts(&self) -> impl Iterator<Item = &[Point]> {
        self.parts.iter().map(Vec::as_slice)
    }

    pub(crate) fn points(&self) -> impl Iterator<Item = Point> + Clone {
        self.parts.iter().flatten().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.parts.iter().map(Vec::len).sum()
    }

    pub(crate) fn last(&self) -> Option<Point> {
        self.points().last()
    }

    pub(crate) fn lowest(&self) -> Option<Point> {
        self.points().min_by(|(_, a), (_, b)| a.total_cmp(b))
    }
}

/// A centred moving average, which unlike an exponential one does not lag behind a falling loss.
///
/// Its window narrows towards the ends, on the right to no less than a quarter of the full one:
/// otherwise the curve would end in the noise of a single step.
fn smoothed(points: &[Point]) -> Vec<Point> {
    let widest = points.len() / SMOOTHING;
    let mut sums = Vec::with_capacity(points.len() + 1);
    let mut sum = 0.0;
    sums.push(sum);
    for (_, loss) in points {
        sum += loss;
        sums.push(sum);
    }
    let mean = |(index, (step, _)): (usize, &Point)| {
        let right = widest.min(index).min(points.len() - 1 - index);
        let left = right.max(widest / 2).min(index);
        let window = (left + right + 1) as f64;
        (*step, (sums[index + right + 1] - sums[index - left]) / window)
    };
    points.iter().enumerate().map(mean).collect()
}

/// At most about `most` points that look the same: the lowest and the highest of each stretch,
/// and both ends.
pub(crate) fn thinned(points: &[Point], most: usize) -> Vec<Point> {
    if points.len() <= most {
        return points.to_vec();
    }
    let stretch = points.len().div_ceil(most.div_ceil(2).max(1));
    let mut thin = Vec::with_capacity(most + 2);
    thin.extend(points.first());
    for part in points.chunks(stretch) {
        let by_loss = |a: &(usize, &Point), b: &(usize, &Point)| a.1.1.total_cmp(&b.1.1);
        let low = part.iter().enumerate().min_by(by_loss);
        let high = part.iter().enumerate().max_by(by_loss);
        if let (Some((low, _)), Some((high, _))) = (low, high) {
            thin.push(part[low.min(high)]);
            thin.push(part[low.max(high)]);
        }
    }
    thin.extend(points.last());
    thin
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_split_at_what_is_not_finite() {
        let losses = [f64::NAN, 3.0, 2.0, f64::INFINITY, f64::NAN, 1.0, 1e300];
        let records: Vec<Record> = losses
            .iter()
            .enumerate()
            .map(|(step, loss)| Record::new(Kind::Train, step as u64).with("loss", *loss))
            .chain([Record::new(Kind::Validation, 9).with("loss", 0.5)])
            .collect();
        let series = Series::losses(&records, Kind::Train);
        assert_eq!(series.parts, [vec![(1.0, 3.0), (2.0, 2.0)], vec![(5.0, 1.0)]]);
        assert_eq!((series.len(), series.last()), (3, Some((5.0, 1.0))));
        assert_eq!(series.lowest(), Some((5.0, 1.0)));
        let low = series.up_to(2.0).over(3.0);
        assert_eq!(low.parts, [vec![(6.0, 2.0)], vec![(15.0, 1.0)]]);
        let spike = Series { parts: vec![vec![(1.0, 1.0), (2.0, 9.0), (3.0, 1.0)]] };
        assert_eq!(spike.up_to(2.0).parts, [[(1.0, 1.0)], [(3.0, 1.0)]]);
        assert!(Series::losses(&[], Kind::Train).is_empty());
    }

    #[test]
    fn smoothing_keeps_a_straight_line_and_flattens_noise() {
        let line: Vec<Point> = (0..400).map(|i| (i as f64, 10.0 - i as f64 / 100.0)).collect();
        for (index, (smooth, exact)) in smoothed(&line).iter().zip(&line).enumerate() {
            // The window is one-sided at the end: it lags by half of its 5 steps there.
            let lag = if index < 395 { 1e-9 } else { 0.0251 };
            assert!((smooth.1 - exact.1).abs() < lag, "{smooth:?} {exact:?}");
        }
        let noise: Vec<Point> =
            (0..400).map(|i| (i as f64, if i % 2 == 0 { 1.0 } else { -1.0 })).collect();
        assert!(smoothed(&noise)[20..385].iter().all(|(_, loss)| loss.abs() < 0.1));
        assert_eq!(smoothed(&line[..1]), line[..1]);
        assert_eq!(smoothed(&[]), []);
    }

    #[test]
    fn thinning_keeps_ends_and_extremes() {
        let mut points: Vec<Point> = (0..10_000).map(|i| (i as f64, 2.0)).collect();
        points[5_123].1 = 9.0;
        points[7_001].1 = 0.5;
        let thin = thinned(&points, 100);
        assert!(thin.len() <= 102, "{}", thin.len());
        assert!(thin.contains(&(5_123.0, 9.0)) && thin.contains(&(7_001.0, 0.5)));
        assert_eq!((thin[0], thin[thin.len() - 1]), (points[0], points[9_999]));
        assert!(thin.windows(2).all(|pair| pair[0].0 <= pair[1].0));
        assert_eq!(thinned(&points[..50], 100), points[..50]);
    }
}
