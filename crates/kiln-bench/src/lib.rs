//! What Kiln measures and verifies: one registry of operators, and what works on all of them.
//!
//! * [`operator`]: an operator's inputs, attributes, outputs, float64 oracle, test cases, bench
//!   shapes and the bytes and operations it cannot avoid.
//! * [`dims`]: the sizes of their dimensions.
//! * [`registry`]: all of them by name. New operators join by a row.
//! * [`gate`]: the correctness gate, `kiln verify`.
//! * [`mod@bench`]: times behind the gate, `kiln bench`.
//! * [`special`]: numbers that are no average ones.
//! * [`spot`]: the check of what is timed.
//! * `ladder`: kernels of `tril_matmul` from naive to tensor cores, and two that cheat, `kiln bench
//!   tril_matmul --ladder`.
//! * [`op_io`]: one operator on tensors from a file, `kiln op`.
//! * [`files`]: files that appear whole or not at all.

pub mod attributes;
pub mod bench;
pub mod dims;
pub mod files;
pub mod gate;
pub mod host;
#[cfg(feature = "cube")]
pub mod ladder;
pub mod op_io;
pub mod operator;
pub mod registry;
mod rows;
pub mod special;
pub mod spot;
