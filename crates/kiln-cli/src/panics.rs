//! What the user sees of a bug: one line instead of a panic message.

use crate::stderr::say;
use std::panic::PanicHookInfo;

/// Turns a panic in any thread into one line on stderr and exit status 101, unless
/// `RUST_BACKTRACE` asks for more, or it is one of a call that is stressed, which is caught and becomes a red row.
pub fn install() {
    let more = std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0");
    let of_rust = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let description = describe(panic);
        if description.starts_with("failed printing to") && description.contains("Broken pipe") {
            // Nobody listens to stderr any more, as in `kiln verify 2>&1 | head`: no bug.
            std::process::exit(141);
        }
        if more {
            return of_rust(panic);
        }
        if kiln_bench::gate::quiet() {
            return;
        }
        say(format_args!("error: internal: {description} (please report)"));
        std::process::exit(101);
    }));
}

fn describe(panic: &PanicHookInfo<'_>) -> String {
    let payload = panic.payload();
    let message = payload
        .downcast_ref::<&str>()
        .map(|text| text.to_string())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into());
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    match panic.location() {
        Some(place) => format!("{message}, at {}:{}", place.file(), place.line()),
        None => message,
    }
}
