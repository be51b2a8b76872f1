//! The losses of several runs in one picture, those of one name in one colour.

use super::curve::CurveError;
use super::metrics::{Kind, Record};
pub use super::plot::Over;
use super::plot::{COLORS, Entry, PlotError, SIZE, frame, line, nothing, plain, ranges};
use super::series::{Point, Series};
use plotters::prelude::*;

/// Runs of one name, which differ in their seeds, say.
pub struct Group {
    name: String,
    runs: Vec<Losses>,
}

/// The losses of a run.
struct Losses {
    /// Smoothed.
    training: Series,
    validation: Series,
}

impl Group {
    /// Of the records of each run, and how far a step goes on the horizontal axis: 1, or the seconds that it takes.
    pub fn new<'a>(name: &str, runs: impl IntoIterator<Item = (&'a [Record], f64)>) -> Self {
        let losses = |(records, step): (&[Record], f64)| Losses {
            training: Series::losses(records, Kind::Train).smoothed().over(step),
            validation: Series::losses(records, Kind::Validation).over(step),
        };
        Self { name: plain(name), runs: runs.into_iter().map(losses).collect() }
    }

    /// The lowest validation loss of each run; none where none is finite.
    pub fn lowest(&self) -> impl Iterator<Item = Option<f64>> + '_ {
        self.runs.iter().map(|run| run.validation.lowest().map(|(_, loss)| loss))
    }

    /// The mean of those, if every run has one.
    pub fn mean(&self) -> Option<f64> {
        let lowest: Vec<f64> = self.lowest().collect::<Option<_>>()?;
        (!lowest.is_empty()).then(|| lowest.iter().sum::<f64>() / lowest.len() as f64)
    }

    fn entry(&self, color: RGBColor) -> Entry {
        let what =
            if self.runs.len() > 1 { "mean of lowest validation" } else { "lowest validation" };
        let label = match self.mean() {
            Some(mean) => format!("{}, {what} {mean:.3}", self.name),
            None => self.name.clone(),
        };
        Entry { color, dashed: false, label }
    }
}

/// An SVG of the smoothed training losses, thin, and the validation losses of all runs over what `over` says. Its top is
/// the highest validation loss, if there is one: training begins far above the losses that tell runs apart.
///
/// There are six colours: a seventh group has the first one again. Losses that are not finite are gaps.
pub fn picture(groups: &[Group], title: &str, over: Over) -> Result<String, CurveError> {
    let mut svg = String::new();
    let drawn = render(groups, &plain(title), over, &mut svg);
    drawn.map_err(|error| CurveError::Plot(error.to_string()))?;
    Ok(svg)
}

fn render(
    groups: &[Group],
    title: &str,
    over: Over,
    svg: &mut String,
) -> Result<(), PlotError<'static>> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let colored = || groups.iter().zip(COLORS.into_iter().cycle());
    let legend: Vec<Entry> = colored().map(|(group, color)| group.entry(color)).collect();
    let runs = || groups.iter().flat_map(|group| &group.runs);
    let validation = runs().flat_map(|run| run.validation.points());
    let top = validation.map(|(_, loss)| loss).reduce(f64::max).unwrap_or(f64::INFINITY);
    let training: Vec<Series> = runs().map(|run| run.training.up_to(top)).collect();
    let losses = runs().map(|run| &run.validation).chain(&training);
    let points: Vec<Point> = losses.flat_map(Series::points).collect();
    let ranges = ranges(points.iter().copied(), std::iter::empty(), over);
    let mut chart = frame(&root, title, &legend, over, ranges)?;
    let mut training = training.iter();
    for (group, color) in colored() {
        for (run, training) in group.runs.iter().zip(training.by_ref()) {
            line(&mut chart, training, color.mix(0.45).stroke_width(2), false)?;
            line(&mut chart, &run.validation, color.stroke_width(3), true)?;
        }
    }
    if points.is_empty() {
        nothing(&root)?;
    }
    root.present()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(lowest: f64) -> Vec<Record> {
        let loss = |kind, step, loss| Record::new(kind, step).with("loss", loss);
        let mut records: Vec<Record> =
            (0..100).map(|i| loss(Kind::Train, i, 4.0 - 0.03 * i as f64)).collect();
        records.extend([50, 70, 99].map(|i| loss(Kind::Validation, i, lowest + (i % 7) as f64)));
        records
    }

    fn group(name: &str, runs: &[Vec<Record>]) -> Group {
        Group::new(name, runs.iter().map(|run| (run.as_slice(), 1.0)))
    }

    #[test]
    fn each_run_has_its_lines_and_each_group_its_mean() {
        let groups = [group("plain", &[run(1.5), run(1.7)]), group("mhc", &[run(1.25)])];
        let lowest: Vec<_> = groups[0].lowest().collect();
        assert_eq!(lowest, [Some(1.5), Some(1.7)]);
        let svg = picture(&groups, "two <runs>", Over::Steps).expect("drawn");
        for text in [
            "two &lt;runs&gt;\n",
            "plain, mean of lowest validation 1.600\n",
            "mhc, lowest validation 1.250\n",
        ] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 9);
        let of = |color: &str| svg.matches(color).count();
        // Of a run a line of each kind and three points, and of a group a sample.
        assert_eq!([of("#2F6FB7"), of("#D95F0E")], [11, 6], "{svg}");
    }

    #[test]
    fn a_run_without_a_loss_leaves_no_mean() {
        let with_nothing = group("broken", &[run(1.5), vec![]]);
        assert_eq!((with_nothing.mean(), with_nothing.lowest().last()), (None, Some(None)));
        let lone = [Record::new(Kind::Train, 5).with("loss", 2.0)];
        let svg =
            picture(&[Group::new("lone", [(&lone[..], 1.0)])], "", Over::Steps).expect("drawn");
        assert_eq!(svg.matches("<circle").count(), 1);
    }

    #[test]
    fn nothing_to_draw_is_said() {
        for groups in [&[group("empty", &[vec![]])][..], &[]] {
            let svg = picture(groups, "", Over::Steps).expect("drawn");
            assert!(svg.contains("no loss was logged yet"), "{svg}");
        }
    }
}
