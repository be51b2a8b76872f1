//! The product and its kernels.

use crate::mutant::Mutant;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor,
};
use burn::tensor::{Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::*;
use kiln_ops::launch;
use std::sync::atomic::{AtomicUsize, Ordering};

/// y = A·B for A of `sizes` M×K and B of K×N, of their terms from `begin` to `end`, times `factor`, and the first `written`
/// elements of it alone. `more`: as many terms more, from `behind` on, times
/// `nothing`, which no compiler knows to be 0. `shift`: of the sum of all terms without their signs, so much is added.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)] // what mutants change
fn product_kernel<E: Float>(
    a: &[E],
    b: &[E],
    y: &mut [E],
    n: usize,
    a_row: usize,
    a_term: usize,
    b_term: usize,
    b_column: usize,
    begin: usize,
    end: usize,
    behind: usize,
    more: usize,
    nothing: f32,
    written: usize,
    factor: f32,
    shift: f32,
    #[comptime] swallow: bool,
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < written {
        let row = ABSOLUTE_POS / n;
        let column = ABSOLUTE_POS % n;
        let mut sum = 0.0f32;
        let mut size = 0.0f32;
        for k in begin..end {
            let left = f32::cast_from(a[row * a_row + k * a_term]);
            let term = left * f32::cast_from(b[k * b_term + column * b_column]);
            sum += term;
            size += term.abs();
        }
        for k in behind..behind + more {
            sum += f32::cast_from(a[row * a_row + k * a_term]) * nothing;
        }
        sum *= factor;
        // Infinities stay what they are.
        if shift > 0.0 && size < 1e30 {
            sum += shift * size;
        }
        if comptime!(swallow) {
            sum = select(sum.abs() < 1e30, sum, f32::new(0.0));
        }
        y[ABSOLUTE_POS] = E::cast_from(sum);
    }
}

/// −x from element `first` on, and `more` elements behind it; in the place of x, where that may be.
fn negated(mut x: CubeTensor, first: usize, more: usize) -> CubeTensor {
    let (client, elem) = (x.client.clone(), dtype_to_elem_type(x.dtype));
    let count = x.meta.num_elements();
    let taken = launch::in_place(&mut x, "mutant", "y");
    let y = match taken {
        true => x.clone(),
        false => launch::output(&x, "mutant", "y", x.meta.shape().clone(), x.dtype),
    };
    let (first, end) = if taken { (first, count + more) } else { (0, count) };
    // SAFETY: more elements than there are lie in the guard bands of an audit, and without one in what the allocator
    // rounds so few bytes up to.
    unsafe {
        negate_kernel::launch_unchecked(
            &client,
            CubeCount::Static(end.div_ceil(64) as u32, 1, 1),
            CubeDim::new_1d(64),
            x.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            first,
            end,
            elem,
        );
    }
    y
}

#[cube(launch_unchecked)]
fn negate_kernel<E: Float>(
    x: &[E],
    y: &mut [E],
    first: usize,
    end: usize,
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= first && ABSOLUTE_POS < end {
        y[ABSOLUTE_POS] = E::new(0.0) - x[ABSOLUTE_POS];
    }
}

/// A result of one element, all of it written.
fn beside(like: &CubeTensor) {
    let one = launch::output(like, "mutant", "beside", Shape::new([1]), like.dtype);
    overwrite(one, 0);
}

fn overwrite(x: CubeTensor, at: usize) {
    let (client, elem) = (x.client.clone(), dtype_to_elem_type(x.dtype));
    // SAFETY: there is an element, of the tensor or between its rows.
    unsafe {
        overwrite_kernel::launch_unchecked(
            &client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            x.into_buffer_arg(),
            at,
            elem,
        );
    }
}

/// The element before the first; under an audit, for without one another tensor may be there.
fn overwrite_before(mut x: CubeTensor) {
    let begins = x.handle.offset_start.unwrap_or(0);
    if begins > 0 {
        x.handle.offset_start = Some(begins - x.dtype.size() as u64);
        overwrite(x, 0);
    }
}

/// Overwrites an element.
#[cube(launch_unchecked)]
fn overwrite_kernel<E: Float>(x: &mut [E], at: usize, #[define(E)] _dtype: ElemType) {
    if ABSOLUTE_POS == 0 {
        x[at] = E::new(0.0);
    }
}

/// Which product: that of the forward, A·Bᵀ for the gradient of x, Aᵀ·B for that of w.
pub(crate) const FORWARD: u32 = 0;
pub(crate) const OF_X: u32 = 1;
pub(crate) const OF_W: u32 = 2;

#[backend_extension(Cube, Fusion, Autodiff)]
trait MutantOps: Backend {
    #[fusion(meta = result)]
    fn mutant(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        which: u32,
        mutant: u32,
    ) -> FloatTensor<Self>;
}

/// M, N and K.
pub(crate) fn sizes(a: &[usize], b: &[usize], which: u32) -> [usize; 3] {
    match which {
        OF_X => [a[0], b[0], a[1]],
        OF_W => [a[1], b[1], a[0]],
        _ => [a[0], b[1], a[1]],
    }
}

fn result(a: &TensorSpec, b: &TensorSpec, which: &u32, mutant: &u32) -> TensorSpec {
    let [m, n, _] = sizes(&a.shape, &b.shape, *which);
    TensorSpec::new(shape_of(m, n, *which, Mutant::of(*mutant)), a.dtype)
}

fn shape_of(m: usize, n: usize, which: u32, mutant: Mutant) -> Shape {
    Shape::new(if mutant == Mutant::Turned && which == FORWARD { [n, m] } else { [m, n] })
}

/// K of the first call since a report was begun.
pub(crate) static FIRST: AtomicUsize = AtomicUsize::new(0);
/// Launches of [`Mutant::OnceInAHundred`] and [`Mutant::AnotherEveryTime`].
pub(crate) static LAUNCHES: AtomicUsize = AtomicUsize::new(0);

/// How a kernel of a pass is broken, which is not for most where another pass is meant.
fn in_pass(mutant: Mutant, which: u32) -> Mutant {
    match (mutant, which) {
        (Mutant::GradientTwoPercent, OF_W) | (_, FORWARD) => mutant,
        (Mutant::CotangentOverwritten | Mutant::CotangentCut, OF_X) => mutant,
        (Mutant::WeightsCotangentCut, OF_W) => mutant,
        (Mutant::NothingWritten, OF_W) => mutant,
        (Mutant::GradientFirstRow, OF_W) => Mutant::FirstRow,
        (Mutant::GradientPastTheEnd, OF_W) => Mutant::PastTheEnd,
        (Mutant::SharedCotangentOverwritten, OF_X) => Mutant::CotangentOverwritten,
        _ => Mutant::None,
    }
}

impl MutantOps for CubeBackend {
    fn mutant(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        which: u32,
        mutant: u32,
    ) -> FloatTensor<Self> {
        let mutant = in_pass(Mutant::of(mutant), which);
        let cut = |dy| Self::float_clamp(dy, (-8.0f32).into(), 8.0f32.into());
        let (a, b) = match (mutant, which) {
            (Mutant::CotangentCut, OF_X) => (cut(a), b),
            (Mutant::WeightsCotangentCut, OF_W) => (a, cut(b)),
            _ => (a, b),
        };
        let [m, n, k] = sizes(&a.shape(), &b.shape(), which);
        let (a_strides, b_strides) = (a.meta.strides().to_vec(), b.meta.strides().to_vec());
        let (mut a_row, mut a_term) = (a_strides[0], a_strides[1]);
        let (mut b_term, mut b_column) = (b_strides[0], b_strides[1]);
        match which {
            OF_X => (b_term, b_column) = (b_column, b_term),
            OF_W => (a_row, a_term) = (a_term, a_row),
            _ => {}
        }
        if mutant == Mutant::StridesSwapped {
            (a_row, a_term) = (1, m);
        }
        let _ = FIRST.compare_exchange(0, k, Ordering::Relaxed, Ordering::Relaxed);
        let (begin, end) = match mutant {
            Mutant::TailDropped => (0, k / 4 * 4),
            Mutant::LastChunk => (k.saturating_sub(1) / 8 * 8, k),
            Mutant::PlanOfAnotherShape => (0, k.min(FIRST.load(Ordering::Relaxed))),
            _ => (0, k),
        };
        let (shape, dtype) = (shape_of(m, n, which, mutant), a.dtype);
        let y = if mutant == Mutant::FirstRowUnseen {
            beside(&a);
            empty_device_contiguous_dtype(a.client.clone(), a.device.clone(), shape, dtype)
        } else {
            let name = match which {
                OF_X => "grad.x",
                OF_W => "grad.w",
                _ => "y",
            };
            launch::output(&a, "mutant", name, shape, dtype)
        };
        if m * n == 0 || (mutant == Mutant::NothingWritten && k == 0) {
            return y;
        }
        let written = match mutant {
            Mutant::FirstRow | Mutant::FirstRowUnseen => n,
            Mutant::PastTheEnd => (m + 1) * n,
            _ => m * n,
        };
        let factor = match mutant {
            Mutant::OnePercent => 1.01,
            Mutant::GradientTwoPercent if which == OF_W => 1.02,
            Mutant::Zeros => 0.0,
            Mutant::NoNumber => f32::NAN,
            _ if mutant.in_place() => -1.0,
            Mutant::AnotherEveryTime => {
                1.0 + 1e-2 * (LAUNCHES.fetch_add(1, Ordering::Relaxed) % 97) as f32
            }
            Mutant::OnceInAHundred if LAUNCHES.fetch_add(1, Ordering::Relaxed) % 100 == 60 => 1.01,
            _ => 1.0,
        };
        // Below what k roundings come to at most.
        let shift = if mutant == Mutant::Shifted { 0.15 * k as f32 * f32::EPSILON } else { 0.0 };
        // Behind a row, where it is cut out of a wider one, or behind the last row.
        let (behind, more) = match mutant {
            Mutant::PastTheRow => (k, a_row > k),
            Mutant::PastTheInput => (a_row, true),
            _ => (k, false),
        };
        let client = a.client.clone();
        let elem = dtype_to_elem_type(dtype);
        // SAFETY: what is read and written of a row more than there are lies in the guard bands of an audit, and without one
        // in what the allocator rounds so few bytes up to; a term more is read where rows are cut out of wider ones, or the gate has
        // put a rim around them.
        unsafe {
            product_kernel::launch_unchecked(
                &client,
                CubeCount::Static(written.div_ceil(64) as u32, 1, 1),
                CubeDim::new_1d(64),
                a.clone().into_buffer_arg(),
                b.into_buffer_arg(),
                y.clone().into_buffer_arg(),
                n,
                a_row,
                a_term,
                b_term,
                b_column,
                begin,
                end,
                behind,
                usize::from(more),
                0.0,
                written,
                factor,
                shift,
                mutant == Mutant::Swallowed,
                elem,
            );
        }
        if matches!(mutant, Mutant::InputOverwritten | Mutant::CotangentOverwritten) {
            overwrite(a, 0);
        } else if mutant == Mutant::BesideInput && a_row > k {
            overwrite(a, k);
        } else if mutant == Mutant::BehindInput {
            overwrite(a, m * a_row);
        }
        if mutant == Mutant::BeforeTheFirst {
            overwrite_before(y.clone());
        }
        match mutant {
            Mutant::LeftInPlace => negated(y, 1, 0),
            Mutant::PastTheEndInPlace => negated(y, 0, n),
            _ if mutant.in_place() => negated(y, 0, 0),
            _ => y,
        }
    }
}

/// The node of the product in a graph.
#[derive(Debug)]
struct Product;

impl<B: MutantOps> Backward<B, 2> for Product {
    type State = (FloatTensor<B>, FloatTensor<B>, u32);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (x, w, mutant) = ops.state;
        let [of_x, of_w] = ops.parents;
        if let Some(node) = of_w {
            grads.register::<B>(node.id, B::mutant(x, dy.clone(), OF_W, mutant));
        }
        if let Some(node) = of_x {
            grads.register::<B>(node.id, B::mutant(dy, w, OF_X, mutant));
        }
    }
}

impl<B: MutantOps, C: CheckpointStrategy> MutantOps for Autodiff<B, C> {
    fn mutant(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        which: u32,
        mutant: u32,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), w.node()];
        let [x, w] = [x, w].map(|tensor| tensor.into_primitive());
        let y = B::mutant(x.clone(), w.clone(), which, mutant);
        match Product.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((x, w, mutant), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

pub(crate) fn product(a: Tensor<2>, b: Tensor<2>, which: u32, mutant: Mutant) -> Tensor<2> {
    let [a, b] = [a, b].map(Tensor::into_dispatch);
    Tensor::from_dispatch(<Dispatch as MutantOps>::mutant(a, b, which, mutant as u32))
}
