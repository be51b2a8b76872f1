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
    // Asked for below: a name that is no operator's is said first.
    #[arg(long)]
    input: Option<PathBuf>,
    /// Safetensors file to write.
    #[arg(long)]
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
    let Some(op) = op else { unreachable!("clap asks for it unless --list is given") };
    let (input, output) = match (args.input, args.output) {
        (Some(input), Some(output)) => (input, output),
        (Some(_), None) => bail!("--output FILE is missing"),
        (None, Some(_)) => bail!("--input FILE is missing"),
        (None, None) => bail!("--input FILE and --output FILE are missing"),
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
