//! A product as an operator asks for it, and which family runs it.

use super::cuda;
use super::family::{self, Family};
use super::problem::{Alpha, Problem, Triangles};
use super::simt;
use super::thin;
use super::view::{MatrixView, broadcast};
use crate::launch;
use crate::precision::F32Precision;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;

/// alpha · A·B + beta · C, of batches of matrices.
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
    pub(crate) alpha: Alpha,
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

impl Product {
    /// `a` · `b`.
    pub(crate) fn new(op: &'static str, a: CubeTensor, b: CubeTensor, dtype: DType) -> Self {
        Self {
            op,
            name: "y",
            a,
            b,
            add: None,
            alpha: Alpha::new(1.0),
            dtype,
            triangles: Triangles::default(),
            symmetric: false,
            precision: F32Precision::Highest,
            family: None,
            out: None,
            in_place: false,
        }
    }

    /// Adds to C in its own memory, if that may be taken and a result of `dtype` fits there.
    pub(crate) fn accumulate(mut self, mut c: CubeTensor, beta: f64) -> Self {
        let full = shape(self.a.meta.shape(), self.b.meta.shape());
        let fits = c.dtype == self.dtype && *c.meta.shape() == full && cuda::holds(&c);
        if fits && launch::in_place(&mut c, self.op, self.name) {
            self.out = Some(c.clone());
            self.in_place = true;
        }
        self.add = Some((c, beta));
        self
    }

    /// Runs it.
    pub(crate) fn run(self) -> CubeTensor {
        let shape = shape(self.a.meta.shape(), self.b.meta.shape());
        let k = self.a.meta.shape()[shape.num_dims() - 1];
        if shape.num_elements() == 0 {
            return launch::output(&self.a, self.op, self.name, shape, self.dtype);
        }
        if k == 0 && self.add.is_none() && self.out.is_none() {
            // A sum of nothing: the gradient of a weight that no row has gone through.
            return launch::zeros(&self.a, shape, self.dtype);
        }
        let (op, name, dtype, given) = (self.op, self.name, self.dtype, self.out.clone());
        let (wanted, precision, like) = (self.family, self.precision, self.a.clone());
        let in_place = self.in_place;
        let mut problem = self.problem(&shape);
        let client = &like.client;
        let high = like.dtype == DType::F32 && precision == F32Precision::High;
        let contiguous = given.as_ref().is_none_or(CubeTensor::is_contiguous);
        if wanted.is_none()
            && contiguous
            && let Some(kernel) = thin::kernel(&mut problem, client, high, given.as_ref())
        {
            let out = given.unwrap_or_else(|| launch::output(&like, op, name, shape, dtype));
            thin::run(kernel, &problem, &out);
            return out;
        }
        let mut family = family::choose(wanted, client, like.dtype);
        let whole = problem.n > 1 && k > 0 && !problem.triangles.masked();
        if high && whole {
            let of_bf16 = family::choose(wanted, client, DType::BF16);
            if of_bf16 != Family::Simt && given.as_ref().is_none_or(cuda::holds) {
                cuda::in_bf16(&mut problem);
                family = of_bf16;
            }
        }
        if k > 0 && cuda::takes(&mut problem, family, given.as_ref()) {
            let out =
                given.unwrap_or_else(|| launch::output_aligned(&like, op, name, shape, dtype));
            if family == Family::Wgmma {
                thin::transpose(&mut problem, client);
            }
            cuda::run(&problem, family, in_place, &out);
            return out;
        }
        let out = given.unwrap_or_else(|| launch::output(&like, op, name, shape, dtype));
        simt::run(&problem, &out);
        out
    }

    fn problem(self, shape: &Shape) -> Problem {
        let last = shape.num_dims() - 2;
        let leading = &shape[..last];
        let (a, b) = if self.a.meta.shape()[last + 1] > 0 {
            (MatrixView::new(self.a, leading), MatrixView::new(self.b, leading))
        } else {
            // A sum of nothing is that of one zero.
            let mut sizes = shape.to_vec();
            let zero = launch::zeros(&self.a, Shape::from(vec![1; last + 2]), self.a.dtype);
            let mut zeros = |i: usize, size: usize| {
                sizes[last + i] = size;
                sizes[last + 1 - i] = 1;
                broadcast(zero.clone(), &Shape::from(sizes.clone()))
            };
            (zeros(0, shape[last]), zeros(1, shape[last + 1]))
        };
        let mut problem = Problem {
            batches: leading.iter().product(),
            add: self.add.map(|(add, beta)| (broadcast(add, shape), beta)),
            alpha: self.alpha,
            triangles: self.triangles,
            symmetric: self.symmetric,
            ..Problem::new(self.op, a, b)
        };
        problem.fold();
        problem
    }
}

/// Whether [`dual`](super::dual) GEMMs of matrices with these sizes run here: on wgmma, and of more than a
/// column.
pub(crate) fn dual_runs(family: Option<Family>, like: &CubeTensor, [m, n, k]: [usize; 3]) -> bool {
    let sizes = m > 0 && n > 1 && k > 1;
    sizes && family::choose(family, &like.client, like.dtype) == Family::Wgmma
}
