//! Attention through mma.sync fed by cp.async: compute capability 8.0 and later, bf16 and f16.
//!
//! Warps hold rows of scores in registers from one product to the next, as FlashAttention-2 does.

mod forward;
mod keys;
mod mask;
mod plan;
mod product;
mod queries;
mod rows;
mod score;
#[cfg(test)]
mod tests;
mod work;

use crate::attention::problem::{Backward, HeadsView, Problem};
use crate::device::Hardware;
use crate::launch;
use crate::tile::cuda::ptx::Float16;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use forward::{Forward, forward_kernel};
use keys::keys_kernel;
use mask::Limits;
use plan::{Pass, Plan};
use queries::{Gradient, queries_kernel};
use score::{NumbersLaunch, Score};
use work::{Grid, HeadsLaunch};

/// Elements of 16 bytes.
const CHUNK: usize = 8;

/// The largest soft-cap that tensor cores take: c·tanh(s/c) is made of c − 2c/(1 + e^(2s/c)) there, whose error of c·2⁻²³
/// or so makes one of 0.1 % in a weight.
const LARGEST_CAP: f32 = 1024.0;

/// Whether this family takes it: element type, width, alignment, soft-cap, device.
pub(crate) fn takes(problem: &Problem) -> bool {
    let hardware = Hardware::of(&problem.q.tensor.client);
    let width = problem.sizes.width;
    hardware.async_copies
        && matches!(problem.q.tensor.dtype, DType::BF16 | DType::F16)
        && (16..=256).contains(&width)
        && width.is_multiple_of(CHUNK)
        && problem.softcap.is_none_or(|cap| cap <= LARGEST_CAP)
        && [&problem.q, &problem.k, &problem.v].into_iter().all(|view| view.aligned(width))
        && [Pass::Forward, Pass::Queries, Pass::Keys]
            .into_iter()
            .all(|pass| plan(pass, problem).is_some())
}

fn plan(pass: Pass, problem: &Problem) -> Option<Plan> {
    let tensor = &problem.q.tensor;
    let memory = tensor.client.properties().hardware.max_shared_memory_size;
    Plan::new(pass, problem.sizes.width, memory, Float16::of(tensor.dtype))
}

/// That of a problem that this family [takes].
fn planned(pass: Pass, problem: &Problem) -> Plan {
    plan(pass, problem).expect("a tile that fits into shared memory")
}

fn documents(problem: &Problem) -> CubeTensor {
    problem.documents.clone().unwrap_or_else(|| launch::unused(&problem.q.tensor, DType::U32))
}

/// The ways through a kernel that are not in what it is specialised on.
fn ways(problem: &Problem) -> [(&'static str, bool); 3] {
    let sizes = &problem.sizes;
    [
        ("several query heads a KV head", sizes.heads > sizes.kv_heads),
        ("more keys than queries", sizes.keys > sizes.queries),
        ("more queries than keys", sizes.queries > sizes.keys),
    ]
}

/// Writes o; and lse if it is given.
pub(crate) fn forward(problem: &Problem, o: &HeadsView, lse: Option<&CubeTensor>) {
    forward_by(planned(Pass::Forward, problem), problem, o, lse);
}

fn forward_by(plan: Plan, problem: &Problem, o: &HeadsView, lse: Option<&CubeTensor>) {
    let client = &o.tensor.client;
    let spec = Forward {
        plan,
        limits: Limits::of(problem),
        score: Score::of(problem),
        lse: lse.is_some(),
    };
    let lse = lse.cloned().unwrap_or_else(|| launch::unused(&o.tensor, DType::F32));
    let documents = documents(problem);
    let [q, k, v] = [&problem.q, &problem.k, &problem.v];
    let address =
        launch::address_type(&[&q.tensor, &k.tensor, &v.tensor, &o.tensor, &lse, &documents]);
    launch::plans::note("attention on mma.sync", &(&spec, address), &ways(problem));
    let grid = Grid::of_queries(problem, plan.tile.rows());
    // SAFETY: copies beyond the operands have no bytes, results are only touched inside their rows and columns.
    unsafe {
        forward_kernel::launch_unchecked(
            client,
            launch::grid(client, grid.cubes),
            CubeDim::new_1d(plan.tile.units()),
            address,
            CHUNK,
            q.tensor.clone().into_buffer_arg(),
            k.tensor.clone().into_buffer_arg(),
            v.tensor.clone().into_buffer_arg(),
            documents.into_buffer_arg(),
            o.tensor.clone().into_buffer_arg(),
            lse.into_buffer_arg(),
            HeadsLaunch::of(q),
            HeadsLaunch::of(k),
            HeadsLaunch::of(v),
            HeadsLaunch::of(o),
            grid.sizes,
            NumbersLaunch::of(problem),
            spec,
            dtype_to_elem_type(q.tensor.dtype),
        );
    }
}

/// Writes dq, dk, dv where they are wanted, all of every row. Bits repeat.
pub(crate) fn backward(problem: &Problem, with: &Backward<'_>) {
    if with.of_queries() {
        queries_by(planned(Pass::Queries, problem), problem, with);
    }
    if with.of_keys() {
        keys_by(planned(Pass::Keys, problem), problem, with);
    }
}

fn gradient(plan: Plan, problem: &Problem) -> Gradient {
    Gradient { plan, limits: Limits::of(problem), score: Score::of(problem) }
}

fn queries_by(plan: Plan, problem: &Problem, with: &Backward<'_>) {
    let client = &with.dq.tensor.client;
    let spec = gradient(plan, problem);
    let documents = documents(problem);
    let [q, k, v, dy, dq] = [&problem.q, &problem.k, &problem.v, with.dy, with.dq];
    let heads = [q, k, v, dy, dq].map(|view| &view.tensor);
    let address = launch::address_type(&[&heads[..], &[with.lse, with.delta, &documents]].concat());
    launch::plans::note("attention.grad of queries on mma.sync", &(&spec, address), &ways(problem));
    let grid = Grid::of_queries(problem, plan.tile.rows());
    // SAFETY: copies beyond the operands have no bytes, results are only touched inside their rows and columns.
    unsafe {
        queries_kernel::launch_unchecked(
            client,
            launch::grid(client, grid.cubes),
            CubeDim::new_1d(plan.tile.units()),
            address,
            CHUNK,
            q.tensor.clone().into_buffer_arg(),
            k.tensor.clone().into_buffer_arg(),
            v.tensor.clone().into_buffer_arg(),
            dy.tensor.clone().into_buffer_arg(),
            with.lse.clone().into_buffer_arg(),
            with.delta.clone().into_buffer_arg(),
            documents.into_buffer_arg(),
            dq.tensor.clone().into_buffer_arg(),
            HeadsLaunch::of(q),
            HeadsLaunch::of(k),
            HeadsLaunch::of(v),
            HeadsLaunch::of(dy),
            HeadsLaunch::of(dq),
            grid.sizes,
            NumbersLaunch::of(problem),
            spec,
            dtype_to_elem_type(q.tensor.dtype),
        );
    }
}

fn keys_by(plan: Plan, problem: &Problem, with: &Backward<'_>) {
    let client = &with.dk.tensor.client;
    let spec = gradient(plan, problem);
    let documents = documents(problem);
    let [q, k, v, dy] = [&problem.q, &problem.k, &problem.v, with.dy];
    let [dk, dv] = [with.dk, with.dv];
    let heads = [q, k, v, dy, dk, dv].map(|view| &view.tensor);
    let address = launch::address_type(&[&heads[..], &[with.lse, with.delta, &documents]].concat());
    launch::plans::note("attention.grad of keys on mma.sync", &(&spec, address), &ways(problem));
    let grid = Grid::of_keys(problem, plan.tile.rows());
    // SAFETY: copies beyond the operands have no bytes, results are only touched inside their rows and columns.
    unsafe {
        keys_kernel::launch_unchecked(
            client,
            launch::grid(client, grid.cubes),
            CubeDim::new_1d(plan.tile.units()),
            address,
            CHUNK,
            q.tensor.clone().into_buffer_arg(),
            k.tensor.clone().into_buffer_arg(),
            v.tensor.clone().into_buffer_arg(),
            dy.tensor.clone().into_buffer_arg(),
            with.lse.clone().into_buffer_arg(),
            with.delta.clone().into_buffer_arg(),
            documents.into_buffer_arg(),
            dk.tensor.clone().into_buffer_arg(),
            dv.tensor.clone().into_buffer_arg(),
            HeadsLaunch::of(q),
            HeadsLaunch::of(k),
            HeadsLaunch::of(v),
            HeadsLaunch::of(dy),
            HeadsLaunch::of(dk),
            HeadsLaunch::of(dv),
            grid.sizes,
            NumbersLaunch::of(problem),
            spec,
            dtype_to_elem_type(q.tensor.dtype),
        );
    }
}
