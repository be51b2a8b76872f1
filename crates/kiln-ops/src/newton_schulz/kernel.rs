//! The steps through the products of [tile](crate::tile), and the kernels before them: the sums of the squares of each
//! matrix, and one over its norm, by which the products of the first step multiply. Without a step the matrix is divided.

use super::{Coefficients, NewtonSchulzOptions, OP};
use crate::launch::{self, Rows};
use crate::reduce::{self, RowUnits, Sums};
use crate::swiglu::kernel::{flatten, place};
use crate::tile::view::transposed;
use crate::tile::{Alpha, Family, Product};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;
/// Vectors of a unit, while there are enough cubes.
const VECTORS: usize = 4;
/// The most sums of a matrix: one for each unit of those that add them up.
const PARTS: usize = 128;

/// Units of a cube and what they do, fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    row: RowUnits,
    /// Whether what is read is rows at a distance.
    strided: bool,
}

/// Units of a cube. Without planes each level of a tree is a barrier, which software drivers pay for.
pub(crate) fn units(client: &Client) -> u32 {
    let most = if launch::plane_size(client) > 1 { UNITS } else { UNITS / 4 };
    most.min(client.properties().hardware.max_units_per_cube)
}

/// How many sums the squares of a matrix of `vectors` are added up in, each by a cube.
pub(crate) fn parts(client: &Client, vectors: usize) -> usize {
    let units = units(client) as usize;
    vectors.div_ceil(units * VECTORS).clamp(1, PARTS.min(units))
}

/// Sum `part` of matrix `matrix` is that of every so many vectors.
#[cube(launch_unchecked, address_type = "dynamic")]
fn squares_kernel<E: Float, N: Size>(
    g: &[Vector<E, N>],
    sums: &mut [f32],
    vectors: usize,
    parts: usize,
    width: usize,
    stride: usize,
    matrices: usize,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    let matrix = CUBE_POS / parts;
    let units = comptime!(plan.row.units as usize);
    let mut squares = Vector::<f32, N>::new(0.0f32);
    if matrix < matrices {
        let first = CUBE_POS % parts * units + UNIT_POS_X as usize;
        for i in range_stepped(first, vectors, parts * units) {
            let x = g[place(matrix * vectors + i, width, stride, plan.strided)];
            let x = Vector::<f32, N>::cast_from(x);
            squares += x * x;
        }
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.row.shared()));
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = reduce::vector::<Sums<1>, N>(squares);
    reduce::rows::<Sums<1>>(&mut sum, &mut shared, plan.row);
    if matrix < matrices && UNIT_POS_X == 0 {
        sums[CUBE_POS] = sum[0];
    }
}

/// Each matrix divided by its norm times `scale`, plus 1e-7.
#[cube(launch_unchecked, address_type = "dynamic")]
fn normalise_kernel<E: Float, N: Size>(
    g: &[Vector<E, N>],
    sums: &[f32],
    x: &mut [Vector<E, N>],
    scale: f32,
    vectors: usize,
    parts: usize,
    width: usize,
    stride: usize,
    matrices: usize,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    let matrix = CUBE_POS / parts;
    let unit = UNIT_POS_X as usize;
    let units = comptime!(plan.row.units as usize);
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = 0.0f32;
    if matrix < matrices && unit < parts {
        sum[0] = sums[matrix * parts + unit];
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.row.shared()));
    reduce::rows::<Sums<1>>(&mut sum, &mut shared, plan.row);
    if matrix < matrices {
        let divisor = Vector::<f32, N>::new(sum[0].sqrt() * scale + 1e-7f32);
        let first = CUBE_POS % parts * units + unit;
        for i in range_stepped(first, vectors, parts * units) {
            let at = matrix * vectors + i;
            let value = g[place(at, width, stride, plan.strided)];
            x[at] = Vector::cast_from(Vector::<f32, N>::cast_from(value) / divisor);
        }
    }
}

/// One over the norm of each matrix times `scale`, plus 1e-7, and the square of that.
#[cube(launch_unchecked, address_type = "dynamic")]
fn norms_kernel(
    sums: &[f32],
    inverse: &mut [f32],
    squared: &mut [f32],
    scale: f32,
    parts: usize,
    matrices: usize,
    #[comptime] row: RowUnits,
) {
    let (matrix, unit) = (CUBE_POS, UNIT_POS_X as usize);
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = 0.0f32;
    if matrix < matrices && unit < parts {
        sum[0] = sums[matrix * parts + unit];
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(row.shared()));
    reduce::rows::<Sums<1>>(&mut sum, &mut shared, row);
    if matrix < matrices && unit == 0 {
        let one_over = 1.0f32 / (sum[0].sqrt() * scale + 1e-7f32);
        inverse[matrix] = one_over;
        squared[matrix] = one_over * one_over;
    }
}

/// Matrices on the host: `[..., M, N]`, of so many vectors of `size` elements each.
pub(crate) struct Matrices {
    rows: Rows,
    strided: bool,
    vectors: usize,
    size: usize,
}

impl Matrices {
    /// With elements; copied only where rows do not follow each other at one distance.
    pub(crate) fn new(g: CubeTensor) -> Self {
        let shape = g.meta.shape();
        let last = shape.num_dims() - 2;
        let elements = shape[last] * shape[last + 1];
        let mut rows = [Rows::new(g)];
        let strided = flatten(&mut rows);
        let [rows] = rows;
        let mut size = launch::vector_size(&rows.tensor.client, rows.tensor.dtype, &[&rows]);
        // Each begins with a vector.
        while !elements.is_multiple_of(size) {
            size /= 2;
        }
        Self { rows, strided, vectors: elements / size, size }
    }

    fn count(&self) -> usize {
        self.rows.tensor.meta.num_elements() / (self.vectors * self.size)
    }

    fn plan(&self) -> Plan {
        let client = &self.rows.tensor.client;
        Plan { row: RowUnits::new(client, units(client), 1), strided: self.strided }
    }

    /// The sums of their squares, `[matrices, parts]`, f32.
    fn squares(&self) -> CubeTensor {
        let g = &self.rows.tensor;
        let client = &g.client;
        let (plan, parts) = (self.plan(), parts(client, self.vectors));
        let shape = Shape::new([self.count(), parts]);
        let sums = launch::scratch(g, OP, "sums of squares", shape, DType::F32);
        let address = launch::address_type(&[g, &sums]);
        let ways = [("several vectors a unit", self.vectors > parts * plan.row.units as usize)];
        launch::plans::note("squares of matrices", &(&plan, self.size, address), &ways);
        // SAFETY: a unit keeps to vectors and matrices below their numbers.
        unsafe {
            squares_kernel::launch_unchecked(
                client,
                launch::grid(client, self.count() * parts),
                plan.row.cube_dim(),
                address,
                self.size,
                g.clone().into_buffer_arg(),
                sums.clone().into_buffer_arg(),
                self.vectors,
                parts,
                self.rows.width / self.size,
                self.rows.stride / self.size,
                self.count(),
                plan,
                dtype_to_elem_type(g.dtype),
            );
        }
        sums
    }

    /// X after the steps, where the squares of each matrix add up to its `sums`, `[matrices, parts]`.
    pub(crate) fn iterated(
        self,
        sums: CubeTensor,
        options: NewtonSchulzOptions,
        family: Option<Family>,
    ) -> CubeTensor {
        if options.steps == 0 {
            return self.divided(sums, options.coefficients);
        }
        let [inverse, squared] = self.norms(sums, options.coefficients);
        let x = into_contiguous(self.rows.tensor);
        iterate(x, [inverse, squared], options, family)
    }

    /// One over the norm of each, and the square of that: `[matrices]`.
    fn norms(&self, sums: CubeTensor, coefficients: Coefficients) -> [CubeTensor; 2] {
        let (row, count) = (self.plan().row, self.count());
        let client = &sums.client;
        let made = ["one over norms", "its squares"]
            .map(|name| launch::scratch(&sums, OP, name, Shape::new([count]), DType::F32));
        let address = launch::address_type(&[&sums]);
        launch::plans::note("norms", &(&row, address), &[]);
        let [inverse, squared] = made.clone().map(CubeTensor::into_buffer_arg);
        // SAFETY: a unit keeps to sums of its matrix, which there is.
        unsafe {
            norms_kernel::launch_unchecked(
                client,
                launch::grid(client, count),
                row.cube_dim(),
                address,
                sums.clone().into_buffer_arg(),
                inverse,
                squared,
                coefficients.norm_scale() as f32,
                sums.meta.shape()[1],
                count,
                row,
            );
        }
        made
    }

    /// X₀, contiguous, of matrices whose squares add up to those of `sums`.
    fn divided(mut self, sums: CubeTensor, coefficients: Coefficients) -> CubeTensor {
        let (plan, count) = (self.plan(), self.count());
        let parts = sums.meta.shape()[1];
        let taken = launch::in_place(&mut self.rows.tensor, OP, "x");
        let g = &self.rows.tensor;
        let client = g.client.clone();
        let x = match taken {
            true => g.clone(),
            false => launch::output(g, OP, "x", g.meta.shape().clone(), g.dtype),
        };
        let address = launch::address_type(&[g, &sums, &x]);
        launch::plans::note("division by norms", &(&plan, self.size, address), &[]);
        // SAFETY: a unit keeps to vectors and matrices below their numbers; in its place it has read what it writes.
        unsafe {
            normalise_kernel::launch_unchecked(
                &client,
                launch::grid(&client, count * parts),
                plan.row.cube_dim(),
                address,
                self.size,
                g.clone().into_buffer_arg(),
                sums.into_buffer_arg(),
                x.clone().into_buffer_arg(),
                coefficients.norm_scale() as f32,
                self.vectors,
                parts,
                self.rows.width / self.size,
                self.rows.stride / self.size,
                count,
                plan,
                dtype_to_elem_type(x.dtype),
            );
        }
        x
    }
}

/// X after the steps, of `g`, `[..., M, N]` with elements; no more is computed of A and A² than one half.
pub(super) fn newton_schulz(
    g: CubeTensor,
    options: NewtonSchulzOptions,
    family: Option<Family>,
) -> CubeTensor {
    let matrices = Matrices::new(g);
    let sums = matrices.squares();
    matrices.iterated(sums, options, family)
}

/// The steps, of what X₀ is with the factor `inverse`, whose square is `squared`.
fn iterate(
    x: CubeTensor,
    [inverse, squared]: [CubeTensor; 2],
    options: NewtonSchulzOptions,
    family: Option<Family>,
) -> CubeTensor {
    let last = x.meta.shape().num_dims() - 2;
    let tall = x.meta.shape()[last] > x.meta.shape()[last + 1];
    let dtype = x.dtype;
    let product = |a, b| Product { family, ..Product::new(OP, a, b, dtype) };
    let mut x = x;
    for step in 0..options.steps {
        let [a, b, c] = options.coefficients.of(step);
        let scaled =
            |by: &CubeTensor| Alpha { number: 1.0, scales: (step == 0).then(|| by.clone()) };
        let other = transposed(x.clone());
        let pair = if tall { (other, x.clone()) } else { (x.clone(), other) };
        let gram = product(pair.0, pair.1);
        let gram = Product { symmetric: true, alpha: scaled(&squared), ..gram }.run();
        let square = product(gram.clone(), gram.clone());
        let square = Product { symmetric: true, alpha: Alpha::new(c), ..square };
        // Never in the place of what is added: it is an operand too.
        let polynomial = Product { add: Some((gram, b)), ..square }.run();
        // Of the transpose it is (B·Xᵀ)ᵀ = X·B.
        let pair = if tall { (x.clone(), polynomial) } else { (polynomial, x.clone()) };
        let moved = Product { alpha: scaled(&inverse), ..product(pair.0, pair.1) };
        x = Product { add: Some((x, a)), ..moved }.run();
    }
    x
}
