//! A product as data, and its launch.

use super::family::{self, Family};
use super::operand::{Order, Stack};
#[cfg(feature = "cuda")]
use super::order::Tiles;
#[cfg(feature = "cuda")]
use super::schedule::{BlocksLaunch, Walk};
#[cfg(feature = "cuda")]
use super::{AddendLaunch, Pair};
use super::{Epilogue, Triangles, thin, units};
use crate::launch;
use crate::precision::F32Precision;
use burn::tensor::{DType, Shape};
#[cfg(feature = "cuda")]
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
#[cfg(feature = "cuda")]
use cubecl::prelude::*;
use cubecl::zspace::metadata::Metadata;

/// alpha · A·B + beta · C, of stacks of matrices.
pub(crate) struct Product {
    /// Operator, for the audit.
    pub(crate) op: &'static str,
    /// Name of the output there.
    pub(crate) name: &'static str,
    /// `[..., M, K]`, any strides.
    pub(crate) a: CubeTensor,
    /// `[..., K, N]`, the element type of `a`, any strides; leading dimensions broadcast.
    pub(crate) b: CubeTensor,
    /// C, broadcast to the shape of the result, and beta.
    pub(crate) add: Option<(CubeTensor, f64)>,
    pub(crate) alpha: f64,
    /// Of the result.
    pub(crate) dtype: DType,
    pub(crate) triangles: Triangles,
    /// The result is known to be symmetric, C too.
    pub(crate) symmetric: bool,
    /// Of f32 operands.
    pub(crate) precision: F32Precision,
    /// The kernels it should run on.
    pub(crate) family: Option<Family>,
    /// Memory for the result, of its shape and element type and with contiguous rows; new memory if
    /// none.
    pub(crate) out: Option<CubeTensor>,
    /// C stands in it.
    pub(crate) in_place: bool,
}

/// `[..., M, N]` of a product of these shapes; leading dimensions must broadcast.
pub(crate) fn shape(a: &[usize], b: &[usize]) -> Shape {
    let last = a.len() - 2;
    let leading = a[..last].iter().zip(&b[..last]).map(|(a, b)| if *a == 1 { *b } else { *a });
    Shape::from(leading.chain([a[last], b[last + 1]]).collect::<Vec<_>>())
}

/// What a family launches.
pub(super) struct Operands {
    pub(super) op: &'static str,
    pub(super) a: Stack,
    pub(super) b: Stack,
    pub(super) add: Option<(Stack, f64)>,
    pub(super) batches: usize,
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) alpha: f64,
    pub(super) triangles: Triangles,
    /// The result is known to be symmetric: a family may make half of it.
    pub(super) symmetric: bool,
    /// C stands where the result goes.
    pub(super) in_place: bool,
    /// What the second product of a pair has of its own; for wgmma alone.
    #[cfg(feature = "cuda")]
    pub(super) second: Option<Second>,
}

/// The second product of a pair: A₁·B₁, where the matrices of A are a stack, to be added to the first;
/// or A·B₁, gated by the first.
#[cfg(feature = "cuda")]
pub(super) struct Second {
    pub(super) b: Stack,
    pub(super) gated: Option<Gated>,
}

/// Where silu(A·B₀) · (A·B₁) goes, and whether the products are stored too.
#[cfg(feature = "cuda")]
pub(super) struct Gated {
    pub(super) hidden: CubeTensor,
    pub(super) keep: bool,
}

impl Operands {
    /// Blocks of K that a sum has.
    #[cfg(feature = "cuda")]
    pub(super) fn blocks_of_k(&self, depth: usize) -> usize {
        let single = self.k.div_ceil(depth);
        match &self.second {
            Some(Second { gated: None, .. }) => 2 * single,
            _ => single,
        }
    }

    /// How the two products of a pair belong together.
    #[cfg(feature = "cuda")]
    pub(super) fn pair(&self) -> Pair {
        match &self.second {
            None => Pair::None,
            Some(Second { gated: None, .. }) => Pair::Sum,
            Some(Second { gated: Some(gated), .. }) => Pair::Gate { keep: gated.keep },
        }
    }

    /// beta, or nothing.
    pub(super) fn beta(&self) -> f64 {
        self.add.as_ref().map_or(0.0, |(_, beta)| *beta)
    }

    /// Distances of C's matrices, rows and columns.
    pub(super) fn add_strides(&self) -> [usize; 3] {
        self.add.as_ref().map_or([0; 3], |(add, _)| {
            let (row, col) = add.strides();
            [add.step(), row, col]
        })
    }

    /// C for a kernel.
    #[cfg(feature = "cuda")]
    pub(super) fn addend(&self) -> AddendLaunch {
        let [batch, row, col] = self.add_strides();
        AddendLaunch::new(batch, row, col, self.beta() as f32)
    }

    /// One B for a stack: a single product of all rows of A, if they follow each other.
    fn fold(&mut self) {
        let a = &self.a;
        let rows = a.order == Order::Rows && a.batch == a.rows * a.line && a.batches > 1;
        let whole = !self.triangles.masked() && !self.symmetric;
        if rows && self.b.batches == 1 && self.add.is_none() && whole {
            self.m *= self.batches;
            self.a.rows = self.m;
            (self.batches, self.a.batches) = (1, 1);
        }
    }

    /// Operands of f32 as bf16, of the same product.
    #[cfg(feature = "cuda")]
    fn halve(&mut self) {
        self.a = super::precision::halves(&self.a, self.op, false);
        self.b = super::precision::halves(&self.b, self.op, true);
        self.k *= 3;
    }

    /// Whether tensor-core kernels can read the operands; copies those whose lines are not aligned.
    #[cfg(feature = "cuda")]
    fn align(&mut self) -> bool {
        for stack in [&mut self.a, &mut self.b] {
            if !stack.aligned() {
                stack.align();
            }
        }
        self.a.aligned() && self.b.aligned()
    }

    /// The sizes as tensor-core kernels take them: tiles, blocks of K of a part, parts that are stored.
    #[cfg(feature = "cuda")]
    pub(super) fn blocks(
        &self,
        [tiles_m, tiles_n]: [usize; 2],
        depth: usize,
        splits: usize,
        walk: Walk,
    ) -> BlocksLaunch {
        let step = |stack: &Stack| u32::from(stack.batches > 1);
        let stacks = if walk.ordered() { self.batches } else { splits };
        BlocksLaunch::new(
            depth as u32,
            tiles_m as u32,
            tiles_n as u32,
            stacks as u32,
            (tiles_m * tiles_n * splits * self.batches) as u32 * walk.cluster,
            step(&self.a),
            step(&self.b),
            self.k.div_ceil(super::schedule::DEPTH) as u32,
        )
    }

    /// Square tiles of triangles, if that is what is multiplied.
    #[cfg(feature = "cuda")]
    pub(super) fn triangular(&self, size: usize) -> Option<Tiles> {
        self.triangles.masked().then_some(Tiles::Triangular(size, self.triangles))
    }

    /// The order of these tiles for so many cubes; anything where there is none.
    #[cfg(feature = "cuda")]
    pub(super) fn order(&self, tiles: Option<Tiles>, cubes: usize, out: &CubeTensor) -> BufferArg {
        let Some(tiles) = tiles else {
            return launch::unused(out, DType::U32).into_buffer_arg();
        };
        let (handle, length) = super::order::upload(out, tiles, self.batches, cubes);
        // SAFETY: the length is that of the order.
        unsafe { BufferArg::from_raw_parts(handle, length) }
    }

    /// The epilogue of a kernel that makes the result, or of one that makes parts of it.
    pub(super) fn epilogue(&self, parts: bool) -> Epilogue {
        let (scaled, add) = (self.alpha != 1.0 && !parts, self.add.is_some() && !parts);
        Epilogue { scaled, add, accumulate: false }
    }
}

impl Product {
    /// `a` · `b`.
    pub(crate) fn new(op: &'static str, a: CubeTensor, b: CubeTensor, dtype: DType) -> Self {
        let triangles = Triangles::default();
        Self {
            op,
            name: "y",
            a,
            b,
            add: None,
            alpha: 1.0,
            dtype,
            triangles,
            symmetric: false,
            precision: F32Precision::Highest,
            family: None,
            out: None,
            in_place: false,
        }
    }

    /// Adds to C in its own memory, if that may be taken and a result of `dtype` fits there.
    pub(crate) fn accumulate(mut self, c: CubeTensor, beta: f64) -> Self {
        let full = shape(self.a.meta.shape(), self.b.meta.shape());
        let fits = c.dtype == self.dtype && *c.meta.shape() == full && holds(&c);
        if fits && launch::reusable(&c) {
            self.out = Some(c.clone());
            self.in_place = true;
        }
        self.add = Some((c, beta));
        self
    }

    /// Runs it.
    pub(crate) fn run(self) -> CubeTensor {
        let shape = shape(self.a.meta.shape(), self.b.meta.shape());
        let given = self.out.clone();
        if shape.num_elements() == 0 {
            return launch::output(&self.a, self.op, self.name, shape, self.dtype);
        }
        let last = shape.num_dims() - 2;
        if self.a.meta.shape()[last + 1] == 0 {
            // A sum of nothing: the gradient of a weight that no row has gone through.
            return launch::zeros(&self.a, shape, self.dtype);
        }
        let leading = &shape[..last];
        let like = self.a.clone();
        let mut operands = Operands {
            op: self.op,
            batches: leading.iter().product(),
            m: shape[last],
            n: shape[last + 1],
            k: self.a.meta.shape()[last + 1],
            a: Stack::new(self.a, leading),
            b: Stack::new(self.b, leading),
            add: self.add.map(|(add, beta)| (broadcast(add, &shape), beta)),
            alpha: self.alpha,
            triangles: self.triangles,
            symmetric: self.symmetric,
            in_place: self.in_place,
            #[cfg(feature = "cuda")]
            second: None,
        };
        operands.fold();
        let mut family = family::choose(self.family, &like.client, like.dtype);
        #[cfg(feature = "cuda")]
        let high = like.dtype == DType::F32 && self.precision == F32Precision::High;
        #[cfg(feature = "cuda")]
        let exact = !high || operands.m.min(operands.n) <= thin::FEW;
        #[cfg(not(feature = "cuda"))]
        let exact = true;
        if self.family.is_none() && exact && given.as_ref().is_none_or(CubeTensor::is_contiguous) {
            if let Some(kernel) = thin::kernel(&mut operands, &like.client) {
                let out = given.unwrap_or_else(|| {
                    launch::output(&like, self.op, self.name, shape, self.dtype)
                });
                thin::run(kernel, &operands, &out);
                return out;
            }
        }
        #[cfg(feature = "cuda")]
        if high && operands.n > 1 && !self.triangles.masked() && given.as_ref().is_none_or(holds) {
            let of_halves = family::choose(self.family, &like.client, DType::BF16);
            if of_halves != Family::Units {
                operands.halve();
                family = of_halves;
            }
        }
        #[cfg(feature = "cuda")]
        let tensor_cores = family != Family::Units && operands.n > 1;
        #[cfg(feature = "cuda")]
        if tensor_cores && given.as_ref().is_none_or(holds) && operands.align() {
            let (op, name, dtype) = (self.op, self.name, self.dtype);
            let out = given
                .unwrap_or_else(|| launch::output_aligned(&like, op, name, shape.clone(), dtype));
            match family {
                Family::Wgmma => super::wgmma::run(&operands, &out),
                Family::MmaTma => super::mma::run(&operands, &out, true),
                Family::Mma | Family::Units => super::mma::run(&operands, &out, false),
            }
            return out;
        }
        let out =
            given.unwrap_or_else(|| launch::output(&like, self.op, self.name, shape, self.dtype));
        units::run(&operands, &out);
        out
    }
}

/// Whether tensor-core kernels can write a result there: rows at one distance that begin at multiples of 16
/// bytes, whatever the number of rows, and matrices behind each other.
fn holds(out: &CubeTensor) -> bool {
    let (shape, strides) = (out.meta.shape(), out.meta.strides());
    let last = shape.num_dims() - 2;
    let offset = out.handle.offset_start.unwrap_or(0) as usize;
    let aligned = [offset, strides[last] * out.dtype.size()].iter().all(|b| b.is_multiple_of(16));
    let behind = (0..last).all(|i| strides[i] == strides[i + 1] * shape[i + 1]);
    aligned && behind && strides[last] >= shape[last + 1] && strides[last + 1] == 1
}

/// Whether two products can be one: on wgmma.
pub(crate) fn pairs(family: Option<Family>, like: &CubeTensor) -> bool {
    family::choose(family, &like.client, like.dtype) == Family::Wgmma
}

/// A·B₀ and A·B₁ as `[2, M, N]` if `keep`, and silu(A·B₀) · (A·B₁), of matrices, where
/// [`pairs`] says so.
#[cfg(feature = "cuda")]
pub(crate) fn gate(
    op: &'static str,
    a: CubeTensor,
    [b, second]: [CubeTensor; 2],
    keep: bool,
) -> (Option<CubeTensor>, CubeTensor) {
    let (like, dtype) = (a.clone(), a.dtype);
    let [m, k, n] = [a.meta.shape()[0], a.meta.shape()[1], b.meta.shape()[1]];
    let output = |name, shape| launch::output_aligned(&like, op, name, shape, dtype);
    let hidden = output("hidden", Shape::new([m, n]));
    let products = keep.then(|| output("products", Shape::new([2, m, n])));
    let [a, b, second] = [a, b, second].map(|matrix| Stack::new(matrix, &[]));
    let gated = Some(Gated { hidden: hidden.clone(), keep });
    let second = Second { b: second, gated };
    let operands = pair(op, [a, b], [m, n, k], second);
    super::wgmma::run(&operands, products.as_ref().unwrap_or(&hidden));
    (products, hidden)
}

/// A₀·B₀ + A₁·B₁ of a stack `a` of two, in its element type, where [`pairs`] says so.
#[cfg(feature = "cuda")]
pub(crate) fn sum(
    op: &'static str,
    name: &'static str,
    a: CubeTensor,
    [b, second]: [CubeTensor; 2],
) -> CubeTensor {
    let (m, k, n) = (a.meta.shape()[1], a.meta.shape()[2], b.meta.shape()[1]);
    let out = launch::output_aligned(&a, op, name, Shape::new([m, n]), a.dtype);
    let a = Stack::new(a, &[2]);
    let [b, second] = [b, second].map(|matrix| Stack::new(matrix, &[]));
    super::wgmma::run(&pair(op, [a, b], [m, n, k], Second { b: second, gated: None }), &out);
    out
}

/// A pair of products, its matrices of B in one order and with aligned lines.
#[cfg(feature = "cuda")]
fn pair(
    op: &'static str,
    [a, b]: [Stack; 2],
    [m, n, k]: [usize; 3],
    mut second: Second,
) -> Operands {
    let mut o = Operands {
        op,
        a,
        b,
        add: None,
        batches: 1,
        m,
        n,
        k,
        alpha: 1.0,
        triangles: Triangles::default(),
        symmetric: false,
        in_place: false,
        second: None,
    };
    let b = &mut second.b;
    if b.order != o.b.order {
        for stack in [&mut *b, &mut o.b] {
            *stack = Stack::new(into_contiguous(stack.tensor.clone()), &[]);
        }
    }
    if !b.aligned() {
        b.align();
    }
    o.align();
    o.second = Some(second);
    o
}

/// C as a stack; one row or column for all is a stride of zero.
fn broadcast(add: CubeTensor, shape: &Shape) -> Stack {
    let last = shape.num_dims() - 2;
    let mut expanded = burn_cubecl::kernel::untile(add);
    let (from, strides) = (expanded.meta.shape().to_vec(), expanded.meta.strides().to_vec());
    let stride = |i: usize| if from[i] == 1 && shape[i] != 1 { 0 } else { strides[i] };
    let strides: Vec<usize> = (0..shape.num_dims()).map(stride).collect();
    *expanded.meta = Metadata::new(shape.clone(), strides);
    Stack::new(expanded, &shape[..last])
}
