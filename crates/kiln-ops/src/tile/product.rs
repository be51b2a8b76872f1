//! A product as data, and its launch.

use super::family::{self, Family};
use super::operand::Stack;
use super::units::{LinesLaunch, SizesLaunch, UnitProduct, UnitTile, units_kernel};
use super::{Epilogue, Triangles, splits};
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
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
}

/// `[..., M, N]` of a product of these shapes; leading dimensions must broadcast.
pub(crate) fn shape(a: &[usize], b: &[usize]) -> Shape {
    let last = a.len() - 2;
    let leading = a[..last].iter().zip(&b[..last]).map(|(a, b)| if *a == 1 { *b } else { *a });
    Shape::from(leading.chain([a[last], b[last + 1]]).collect::<Vec<_>>())
}

/// What both families launch.
pub(super) struct Operands {
    pub(super) a: Stack,
    pub(super) b: Stack,
    pub(super) add: Option<(Stack, f64)>,
    pub(super) batches: usize,
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
}

impl Product {
    /// `a` · `b`.
    pub(crate) fn new(op: &'static str, a: CubeTensor, b: CubeTensor, dtype: DType) -> Self {
        let triangles = Triangles::default();
        Self { op, name: "y", a, b, add: None, alpha: 1.0, dtype, triangles }
    }

    /// Runs it.
    pub(crate) fn run(self) -> CubeTensor {
        let shape = shape(self.a.meta.shape(), self.b.meta.shape());
        let last = shape.num_dims() - 2;
        let out = launch::output(&self.a, self.op, self.name, shape.clone(), self.dtype);
        if shape.num_elements() == 0 {
            return out;
        }
        let leading = &shape[..last];
        let operands = Operands {
            batches: leading.iter().product(),
            m: shape[last],
            n: shape[last + 1],
            k: self.a.meta.shape()[last + 1],
            a: Stack::new(self.a, leading),
            b: Stack::new(self.b, leading),
            add: self.add.map(|(add, beta)| (broadcast(add, &shape), beta)),
        };
        let family = family::choose(&out.client, operands.a.tensor.dtype);
        match family {
            Family::Units => units(operands, self.op, self.alpha, self.triangles, &out),
        }
        out
    }
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

fn units(o: Operands, op: &'static str, alpha: f64, triangles: Triangles, out: &CubeTensor) {
    let client = &out.client;
    let tile = unit_tile(client, &o);
    let tiles_n = o.n.div_ceil(tile.n);
    let tiles = o.m.div_ceil(tile.m) * tiles_n;
    let splits = if triangles == Triangles::default() {
        splits::number(client, tiles * o.batches, o.k.div_ceil(tile.k), 2)
    } else {
        1
    };
    let part = o.k.div_ceil(splits).next_multiple_of(tile.k);
    let splits = o.k.div_ceil(part);
    let split = splits > 1;
    let epilogue = Epilogue { scaled: alpha != 1.0 && !split, add: o.add.is_some() && !split };
    // Sums of parts of K are added up, scaled and rounded by a second kernel.
    let target = match split {
        true => splits::workspace(out, op, splits, o.batches * o.m * o.n),
        false => out.clone(),
    };
    let vector = |stack: &Stack| stack.vector_size(client, 16);
    let (a_size, b_size) = (vector(&o.a), vector(&o.b));
    let out_size = if o.n.is_multiple_of(4) { 4 } else { 1 };
    let product = UnitProduct { tile, a: o.a.order, b: o.b.order, triangles, epilogue };
    let batch = |stack: &Stack| if stack.batches > 1 { stack.batch } else { 0 };
    let beta = o.add.as_ref().map_or(0.0, |(_, beta)| *beta);
    let (add_row, add_col) = o.add.as_ref().map_or((0, 0), |(add, _)| add.strides());
    let add_batch = o.add.as_ref().map_or(0, |(add, _)| batch(add));
    let add_dtype = o.add.as_ref().map_or(out.dtype, |(add, _)| add.tensor.dtype);
    let address = launch::address_type(&[&o.a.tensor, &o.b.tensor, &target]);
    // SAFETY: positions are checked against M, N and K before every read and write; without C the
    // alias that stands in for it is not touched.
    unsafe {
        units_kernel::launch_unchecked(
            client,
            launch::grid(client, tiles * splits * o.batches),
            CubeDim::new_1d(tile.units() as u32),
            address,
            a_size,
            b_size,
            out_size,
            o.a.tensor.clone().into_buffer_arg(),
            o.b.tensor.clone().into_buffer_arg(),
            match &o.add {
                Some((add, _)) if !split => add.tensor.clone().into_buffer_arg(),
                _ => BufferArg::alias(0, 1),
            },
            target.clone().into_buffer_arg(),
            LinesLaunch::new(batch(&o.a) / a_size, o.a.line / a_size),
            LinesLaunch::new(batch(&o.b) / b_size, o.b.line / b_size),
            add_batch,
            add_row,
            add_col,
            SizesLaunch::new(o.m, o.n, o.k, o.batches, splits, part, tiles_n, tiles),
            alpha as f32,
            beta as f32,
            product,
            [o.a.tensor.dtype, if split { o.a.tensor.dtype } else { add_dtype }, target.dtype]
                .map(dtype_to_elem_type),
        );
    }
    if split {
        splits::add_up(&target, splits, o.m * o.n, &o, alpha, out);
    }
}

/// The tile: as large as fills the device.
fn unit_tile(client: &Client, o: &Operands) -> UnitTile {
    if launch::plane_size(client) == 1 {
        return UnitTile::PORTABLE;
    }
    let tiles = |tile: UnitTile| o.m.div_ceil(tile.m) * o.n.div_ceil(tile.n) * o.batches;
    if tiles(UnitTile::LARGE) >= launch::multiprocessors(client) {
        UnitTile::LARGE
    } else {
        UnitTile::SMALL
    }
}
