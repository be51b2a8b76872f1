//! The kiln program.
fn main() {}
