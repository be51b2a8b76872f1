//! `kiln op`: one operator on tensors from a file.

use super::is_same;
use crate::stdout::print;
use anyhow::{anyhow, bail};
use kiln_bench::op_io::{self, Request};
use kiln_ops::device;
use kiln_ops::policy::Implementation;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `kiln op`.
#[derive(clap::Args)]
pub struct Args {
    /// Operator.
    #[arg(required_unless_present = "list")]
    op: Option<String>,
    /// List the operators, or the one that is named: inputs, attributes, outputs.
    #[arg(long, conflicts_with_all = ["input", "output", "device", "kernel", "set"])]
    list: bool,
    /// Safetensors file with the inputs and, for the backward, cotangents `grad.<output>`.
    #[arg(long, required_unless_present = "list")]
    input: Option<PathBuf>,
    /// Safetensors file to write.
    #[arg(long, required_unless_present = "list")]
    output: Option<PathBuf>,
    /// auto, cuda, cuda:INDEX, wgpu, vulkan, cpu or ndarray.
    #[arg(long, default_value = "auto")]
    device: String,
    /// auto, fused or reference.
    #[arg(long, default_value_t = Implementation::Auto)]
    kernel: Implementation,
    /// An attribute: key=value.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Runs the operator, or lists them.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let op = args.op.map(|name| kiln_bench::registry::find(&name).map_err(|e| anyhow!(e)));
    let op = op.transpose()?;
    if args.list {
        match op {
            Some(op) => print(op_io::describe(op.spec())),
            None => print(op_io::list()),
        }
        return Ok(ExitCode::SUCCESS);
    }
    let (Some(op), Some(input), Some(output)) = (op, args.input, args.output) else {
        unreachable!("clap asks for them unless --list is given")
    };
    // The inputs would be gone.
    if is_same(&input, &output) {
        let (input, output) = (input.display(), output.display());
        bail!("--output {output} is the file of --input {input}, expected another");
    }
    let device = device::open(&args.device)?;
    let request = Request { op, input, output, opened: device, kernel: args.kernel, set: args.set };
    op_io::run(&request).map_err(|e| anyhow!(e))?;
    Ok(ExitCode::SUCCESS)
}
