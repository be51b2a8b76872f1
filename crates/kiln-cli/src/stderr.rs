//! Standard error: what is said beside the result.

use std::fmt::Display;
use std::io::{self, Write};

/// Says a line or several. Not `eprintln`, which panics if nobody listens: the work goes on.
pub fn say(text: impl Display) {
    let _ = writeln!(io::stderr(), "{text}");
}
