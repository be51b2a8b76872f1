//! Parts of rows verified side by side, in processes: an audit of the gate is alone in its process, and CubeCL
//! compiles and launches what runs on a device on one thread.
//!
//! A worker is `kiln verify --worker`. It reads the number of a part from a line of stdin and answers with the
//! report, a line of JSON on stdout. It ends with its stdin, so that none outlives the program that asks.

use crate::stdout::print;
use anyhow::Context;
use kiln_bench::gate::Report;
use std::io::{self, BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

/// What happens to parts, by their numbers.
pub enum Event {
    /// It is being verified.
    Started(usize),
    /// It is done, or its process ended, and how.
    Finished(usize, Box<Result<Report, String>>),
    /// A process wrote this line to stderr.
    Said(String),
}

/// What a worker does: verifies the parts that it is asked for.
pub fn serve(parts: usize, verify: impl Fn(usize) -> Report) -> anyhow::Result<()> {
    let (sender, asked) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
        // All are done, or nobody waits any more for the one that is being verified.
        std::process::exit(0);
    });
    for line in asked {
        let part = line.parse().ok().filter(|number| *number < parts);
        let part = part.with_context(|| format!("there is no part `{line}`"))?;
        // On a line of its own, whatever a library has written.
        print(format_args!("\n{}", serde_json::to_string(&verify(part))?));
    }
    Ok(())
}

/// Verifies parts in this order by `jobs` workers, which `command` starts.
pub fn share<C: Fn() -> Command + Sync>(
    order: &[usize],
    jobs: usize,
    command: &C,
    mut show: impl FnMut(Event),
) {
    let next = &AtomicUsize::new(0);
    let (events, happened) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..jobs.min(order.len()) {
            let events = events.clone();
            scope.spawn(move || {
                let mut worker = None;
                while let Some(&part) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let _ = events.send(Event::Started(part));
                    let report = verify(part, &mut worker, command, &events);
                    let _ = events.send(Event::Finished(part, Box::new(report)));
                }
                worker.map(Worker::end)
            });
        }
        drop(events);
        for event in happened {
            show(event);
        }
    });
}

/// The report of a part by a worker, which is started if there is none.
///
/// # Errors
///
/// How the worker ended.
fn verify(
    part: usize,
    worker: &mut Option<Worker>,
    command: &impl Fn() -> Command,
    events: &Sender<Event>,
) -> Result<Report, String> {
    let mut running = match worker.take() {
        Some(running) => running,
        None => Worker::start(command(), events.clone())
            .map_err(|error| format!("its process does not start: {error}"))?,
    };
    match running.verify(part) {
        Some(report) => {
            *worker = Some(running);
            Ok(report)
        }
        None => Err(running.end()),
    }
}

struct Worker {
    process: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
    /// Passes stderr on; returns its last line.
    said: JoinHandle<String>,
}

impl Worker {
    fn start(mut command: Command, events: Sender<Event>) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn()?;
        let pipes = (process.stdin.take(), process.stdout.take(), process.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            unreachable!("all three are piped")
        };
        let stdout = BufReader::new(stdout).lines();
        let said = thread::spawn(move || pass_on(stderr, &events));
        Ok(Self { process, stdin, stdout, said })
    }

    /// The report of a part; none if the process ends before.
    fn verify(&mut self, part: usize) -> Option<Report> {
        writeln!(self.stdin, "{part}").ok()?;
        // A line that is no report is empty or of some library.
        let mut lines = self.stdout.by_ref().map_while(Result::ok);
        lines.find_map(|line| serde_json::from_str(&line).ok())
    }

    /// Waits for the end of the process and says how it was.
    fn end(self) -> String {
        let Self { mut process, stdin, stdout, said } = self;
        drop((stdin, stdout));
        let last = said.join().unwrap_or_default();
        let status = process.wait().map_or_else(|error| error.to_string(), |s| s.to_string());
        let separator = if last.is_empty() { "" } else { ": " };
        format!("its process ended with {status}{separator}{last}")
    }
}

/// Passes lines on as they come; returns the last that is not empty.
fn pass_on(stderr: ChildStderr, events: &Sender<Event>) -> String {
    let mut last = String::new();
    for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).trim_end().to_string();
        if !line.is_empty() {
            last.clone_from(&line);
        }
        let _ = events.send(Event::Said(line));
    }
    last
}

#[cfg(all(test, unix, feature = "flex"))]
mod tests {
    use super::*;
    use kiln_bench::{gate, registry};

    /// What five rows come to if this program is a worker, and what is said meanwhile.
    fn shared(program: &str, args: &[&str]) -> (Vec<Result<Report, String>>, Vec<String>) {
        let command = || {
            let mut command = Command::new(program);
            command.args(args);
            command
        };
        let (mut reports, mut said) = (vec![None; 5], vec![]);
        share(&[4, 3, 2, 1, 0], 2, &command, |event| match event {
            Event::Started(row) => assert!(reports[row].is_none()),
            Event::Finished(row, report) => reports[row] = Some(*report),
            Event::Said(line) => said.push(line),
        });
        (reports.into_iter().flatten().collect(), said)
    }

    #[test]
    fn a_process_that_dies_is_the_error_of_its_row_alone() {
        let device = kiln_ops::device::open("cpu").unwrap().device;
        let row = gate::rows(&registry::all()[..1], &device)[0];
        let report = gate::unfinished(&row, &device, None, "as the script says".into());
        let json = serde_json::to_string(&report).unwrap();
        let script = format!(
            "while read row; do
                if [ $row = 1 ]; then echo warning >&2; echo error >&2; exit 101; fi
                if [ $row = 3 ]; then kill -9 $$; fi
                echo not a report
                echo '{json}'
            done"
        );
        let (reports, said) = shared("sh", &["-c", &script]);
        let errors: Vec<_> = reports.iter().map(|report| report.as_ref().err()).collect();
        let exited = "its process ended with exit status: 101: error".to_string();
        let killed = "its process ended with signal: 9 (SIGKILL)".to_string();
        assert_eq!(errors, [None, Some(&exited), None, Some(&killed), None]);
        assert_eq!(said, ["warning", "error"]);
        let whole = reports[0].as_ref().unwrap();
        assert_eq!(serde_json::to_string(whole).unwrap(), json);
    }

    #[test]
    fn a_process_that_does_not_start_is_an_error_of_every_row() {
        let (reports, _) = shared("/nonexistent/kiln", &[]);
        assert_eq!(reports.len(), 5);
        for report in reports {
            assert!(report.unwrap_err().starts_with("its process does not start: "));
        }
    }
}
