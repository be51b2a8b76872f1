//! Attention on plain units: exact f32 arithmetic, any device.
//!
//! Three kernels of one make: a cube owns a tile of rows, of queries or of keys, and walks over blocks of the
//! other side. Products go block by block through shared memory as f32, with the sums of a unit in registers,
//! as in [`tile::simt`](crate::tile::simt); scores pass from one product to the next through shared memory.
//! Everything is added in order, so two runs agree bit for bit.

pub(super) mod block;
pub(super) mod forward;
mod keys;
mod queries;
mod tile;

use super::problem::{Backward, HeadsView, Problem, vector_size};
use crate::exponential::has_ptx;
use crate::launch;
use block::{HeadsLaunch, NumbersLaunch, Rules};
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use forward::forward_kernel;
use keys::keys_kernel;
use queries::queries_kernel;
use tile::Tile;

impl Problem {
    pub(super) fn rules(&self) -> Rules {
        let ptx = has_ptx(&self.q.tensor.client);
        let window = self.mask.window.is_some();
        let (causal, documents) = (self.mask.causal, self.mask.documents);
        Rules { causal, window, documents, softcap: self.softcap.is_some(), ptx }
    }

    pub(super) fn numbers(&self) -> NumbersLaunch {
        let (s, scale) = (&self.sizes, self.scale);
        let unit = if has_ptx(&self.q.tensor.client) { std::f32::consts::LOG2_E } else { 1.0 };
        let (factor, cap) = match self.softcap {
            Some(cap) => (scale / cap, cap * unit),
            None => (scale * unit, 0.0),
        };
        // No window is longer than all keys and queries, with which sums fit.
        let window = self.mask.window.unwrap_or(0).min(s.keys + s.queries);
        NumbersLaunch::new(
            s.batches,
            s.heads,
            s.kv_heads,
            s.queries,
            s.keys,
            s.width,
            window,
            factor,
            cap,
            scale,
            f32::INFINITY,
        )
    }

    /// The documents, or what stands for them where there are none.
    pub(super) fn bounds(&self) -> BufferArg {
        match &self.documents {
            Some(bounds) => bounds.clone().into_buffer_arg(),
            None => BufferArg::alias(0, 1),
        }
    }
}

/// A view as kernels take it, in vectors of `size`.
pub(super) fn heads<E: Float, N: Size>(view: &HeadsView, size: usize) -> HeadsLaunch<E, N> {
    bound(view, size, view.tensor.clone().into_buffer_arg())
}

fn bound<E: Float, N: Size>(view: &HeadsView, size: usize, buffer: BufferArg) -> HeadsLaunch<E, N> {
    let strides = [view.start(), view.batch_stride, view.head_stride, view.row_stride];
    let [start, batch, head, row] = strides.map(|stride| stride / size);
    HeadsLaunch::new(buffer, start, batch, head, row)
}

/// Writes o; and lse if it is given.
pub(crate) fn forward(problem: &Problem, o: &HeadsView, lse: Option<&CubeTensor>) {
    let (p, s) = (problem, &problem.sizes);
    let client = &o.tensor.client;
    let (tile, rules) = (Tile::new(client, s, 1), p.rules());
    let size = vector_size(&[&p.q, &p.k, &p.v], s.width, 16);
    let o_size = vector_size(&[o], s.width, 4 * o.tensor.dtype.size());
    let address = launch::address_type(&[&p.q.tensor, &p.k.tensor, &p.v.tensor, &o.tensor]);
    let keep = lse.is_some();
    let plan = (&tile, &rules, keep, size, o_size, address);
    launch::plans::note("attention on plain units", &plan, &[]);
    // SAFETY: rows are checked against T and S and columns against D before every read and write; what
    // stands in for documents and lse is not touched.
    unsafe {
        forward_kernel::launch_unchecked(
            client,
            launch::grid(client, s.queries.div_ceil(tile.own) * s.heads * s.batches),
            CubeDim::new_1d(tile.units() as u32),
            address,
            size,
            o_size,
            heads(&p.q, size),
            heads(&p.k, size),
            heads(&p.v, size),
            p.bounds(),
            heads(o, o_size),
            match lse {
                Some(lse) => lse.clone().into_buffer_arg(),
                // Positions count the buffers that are bound: q, k, v, documents, o.
                None => BufferArg::alias(3 + usize::from(p.documents.is_some()), 1),
            },
            p.numbers(),
            tile,
            rules,
            keep,
            dtype_to_elem_type(o.tensor.dtype),
        );
    }
}

/// Writes dq, dk, dv where they are wanted, all of every row.
pub(crate) fn backward(problem: &Problem, with: &Backward<'_>) {
    if with.of_queries() {
        of_queries(problem, with);
    }
    if with.of_keys() {
        of_keys(problem, with);
    }
}

/// Writes dq.
fn of_queries(problem: &Problem, with: &Backward<'_>) {
    let (p, s, dq) = (problem, &problem.sizes, with.dq);
    let client = &dq.tensor.client;
    let (tile, rules) = (Tile::new(client, s, 1), p.rules());
    let inputs = [&p.q, &p.k, &p.v, with.dy];
    let size = vector_size(&inputs, s.width, 16);
    let dq_size = vector_size(&[dq], s.width, 4 * dq.tensor.dtype.size());
    let large: Vec<&CubeTensor> = inputs.iter().chain([&dq]).map(|view| &view.tensor).collect();
    let address = launch::address_type(&large);
    let plan = (&tile, &rules, size, dq_size, address);
    launch::plans::note("attention.grad of queries on plain units", &plan, &[]);
    // SAFETY: as in `forward`.
    unsafe {
        queries_kernel::launch_unchecked(
            client,
            launch::grid(client, s.queries.div_ceil(tile.own) * s.heads * s.batches),
            CubeDim::new_1d(tile.units() as u32),
            address,
            size,
            dq_size,
            heads(&p.q, size),
            heads(&p.k, size),
            heads(&p.v, size),
            heads(with.dy, size),
            with.lse.clone().into_buffer_arg(),
            with.delta.clone().into_buffer_arg(),
            p.bounds(),
            heads(dq, dq_size),
            p.numbers(),
            tile,
            rules,
            dtype_to_elem_type(dq.tensor.dtype),
        );
    }
}

/// Writes dk and dv.
fn of_keys(problem: &Problem, with: &Backward<'_>) {
    let (p, s, dk, dv) = (problem, &problem.sizes, with.dk, with.dv);
    let client = &dk.tensor.client;
    let (tile, rules) = (Tile::new(client, s, 2), p.rules());
    let inputs = [&p.q, &p.k, &p.v, with.dy];
    let size = vector_size(&inputs, s.width, 16);
    let to_size = vector_size(&[dk, dv], s.width, 4 * dk.tensor.dtype.size());
    let large: Vec<&CubeTensor> =
        inputs.iter().chain([&dk, &dv]).map(|view| &view.tensor).collect();
    let address = launch::address_type(&large);
    // Parts of one tensor are one buffer, which is bound once.
    let packed = dk.first != dv.first;
    let plan = (&tile, &rules, size, to_size, address);
    launch::plans::note("attention.grad of keys on plain units", &plan, &[("packed", packed)]);
    // SAFETY: as in `forward`.
    unsafe {
        keys_kernel::launch_unchecked(
            client,
            launch::grid(client, s.keys.div_ceil(tile.own) * s.kv_heads * s.batches),
            CubeDim::new_1d(tile.units() as u32),
            address,
            size,
            to_size,
            heads(&p.q, size),
            heads(&p.k, size),
            heads(&p.v, size),
            heads(with.dy, size),
            with.lse.clone().into_buffer_arg(),
            with.delta.clone().into_buffer_arg(),
            p.bounds(),
            heads(dk, to_size),
            match packed {
                // Positions count the buffers that are bound: q, k, v, dy, lse, delta, documents.
                true => {
                    let position = 6 + usize::from(p.documents.is_some());
                    bound(dv, to_size, BufferArg::alias(position, dv.tensor.meta.num_elements()))
                }
                false => heads(dv, to_size),
            },
            p.numbers(),
            tile,
            rules,
            dtype_to_elem_type(dk.tensor.dtype),
        );
    }
}
