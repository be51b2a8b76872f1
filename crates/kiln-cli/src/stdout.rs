//! Standard output: what a command was asked for, and nothing else.

use crate::stderr::say;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

/// Prints a line or several. Not `println`, which panics if it cannot.
pub fn print(text: impl Display) {
    let mut stdout = io::stdout().lock();
    written(writeln!(stdout, "{text}").and_then(|()| stdout.flush()));
}

/// Ends the program if this, written to standard output, did not get there.
pub fn written(result: io::Result<()>) {
    let Err(error) = result else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        // The reader has seen enough, as in `kiln verify | head`.
        std::process::exit(141);
    }
    say(format_args!("error: cannot write to standard output: {error}"));
    std::process::exit(2);
}
