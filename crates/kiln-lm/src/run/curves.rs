//! The losses of several runs in one picture, those that only differ in their seeds in one colour.

use super::curve::CurveError;
use super::disk::replace_file;
use super::metrics::{Kind, Record};
use super::plot::{COLORS, Chart, Entry, POINTS, PlotError, SIZE, frame, nothing, plain, ranges};
use super::series::{Series, smoothed, thinned};
use plotters::prelude::*;
use std::path::Path;

/// Runs of one name, which differ in their seeds, say.
pub struct Group {
    name: String,
    runs: Vec<Losses>,
}

/// The losses of a run.
struct Losses {
    training: Series,
    validation: Series,
}

impl Group {
    /// Of the records of each run.
    pub fn new(name: &str, runs: &[Vec<Record>]) -> Self {
        let losses = |records: &Vec<Record>| Losses {
            training: Series::losses(records, Kind::Train),
            validation: Series::losses(records, Kind::Validation),
        };
        Self { name: plain(name), runs: runs.iter().map(losses).collect() }
    }

    /// The lowest validation loss of each run; none where none is finite.
    pub fn lowest(&self) -> impl Iterator<Item = Option<f64>> + '_ {
        self.runs.iter().map(|run| run.validation.lowest().map(|(_, loss)| loss))
    }

    /// The mean of those.
    pub fn mean(&self) -> Option<f64> {
        let lowest: Vec<f64> = self.lowest().flatten().collect();
        (!lowest.is_empty()).then(|| lowest.iter().sum::<f64>() / lowest.len() as f64)
    }
}

/// Draws the smoothed training losses, thin, and the validation losses of all runs to an SVG file, replacing it as a whole.
///
/// There are six colours: a seventh group has the first one again. Losses that are not finite are gaps.
pub fn draw(groups: &[Group], path: &Path, title: &str) -> Result<(), CurveError> {
    let mut svg = String::new();
    render(groups, &plain(title), &mut svg).map_err(|error| CurveError::Plot(error.to_string()))?;
    Ok(replace_file(path, svg.as_bytes())?)
}

fn colored(groups: &[Group]) -> impl Iterator<Item = (&Group, RGBColor)> + Clone {
    groups.iter().zip(COLORS.into_iter().cycle())
}

fn render(groups: &[Group], title: &str, svg: &mut String) -> Result<(), PlotError<'static>> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let runs = groups.iter().flat_map(|group| &group.runs);
    let points = runs.flat_map(|run| run.training.points().chain(run.validation.points()));
    let legend: Vec<Entry> = colored(groups).map(|(group, color)| entry(group, color)).collect();
    let mut chart = frame(&root, title, &legend, ranges(points.clone(), std::iter::empty()))?;
    for (group, color) in colored(groups) {
        for run in &group.runs {
            lines(&mut chart, run, color)?;
        }
    }
    if points.clone().next().is_none() {
        nothing(&root)?;
    }
    root.present()
}

fn entry(group: &Group, color: RGBColor) -> Entry {
    let label = match group.mean() {
        Some(mean) => format!("{}, best validation {mean:.3}", group.name),
        None => group.name.clone(),
    };
    Entry { color, dashed: false, label }
}

fn lines(
    chart: &mut Chart<'_, '_>,
    run: &Losses,
    color: RGBColor,
) -> Result<(), PlotError<'static>> {
    for part in run.training.parts() {
        let line = thinned(&smoothed(part), POINTS);
        chart.draw_series(LineSeries::new(line, color.mix(0.45).stroke_width(2)))?;
    }
    for part in run.validation.parts() {
        chart.draw_series(LineSeries::new(thinned(part, POINTS), color.stroke_width(3)))?;
    }
    if run.validation.len() <= 60 {
        let dots = run.validation.points().map(|at| Circle::new(at, 6, color.filled()));
        chart.draw_series(dots)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(lowest: f64) -> Vec<Record> {
        let loss = |kind, step, loss| Record::new(kind, step).with("loss", loss);
        let mut records: Vec<Record> =
            (0..100).map(|i| loss(Kind::Train, i, 4.0 - 0.01 * i as f64)).collect();
        records.extend([50, 70, 99].map(|i| loss(Kind::Validation, i, lowest + (i % 7) as f64)));
        records
    }

    fn svg(groups: &[Group]) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("curves.svg");
        draw(groups, &path, "two <runs>").expect("drawn");
        std::fs::read_to_string(path).expect("text")
    }

    #[test]
    fn each_run_has_its_lines_and_each_group_its_mean() {
        let groups = [Group::new("plain", &[run(1.5), run(1.7)]), Group::new("mhc", &[run(1.25)])];
        let lowest: Vec<_> = groups[0].lowest().collect();
        assert_eq!(lowest, [Some(1.5), Some(1.7)]);
        let svg = svg(&groups);
        for text in
            ["two &lt;runs&gt;\n", "plain, best validation 1.600\n", "mhc, best validation 1.250\n"]
        {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 9);
        let of = |color: &str| svg.matches(color).count();
        // Per run a line and three points in full, and one lighter line; a sample in the legend.
        assert!(of("#2F6FB7") > of("#D95F0E") && of("#D95F0E") > 3, "{svg}");
    }

    #[test]
    fn nothing_to_draw_is_said() {
        let group = Group::new("empty", &[vec![]]);
        assert_eq!((group.mean(), group.lowest().next()), (None, Some(None)));
        assert!(svg(&[group]).contains("no loss was logged yet"));
        assert!(svg(&[]).contains("no loss was logged yet"));
    }
}
