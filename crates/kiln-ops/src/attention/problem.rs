//! What is attended to, as data: what every family of kernels is asked for.

use crate::tile::Family;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::tensor::CubeTensor;

/// `[B, H, T, D]`, a head's elements next to each other, everything else at any distance. Heads may be a part of
/// those of a wider tensor, `[B, T, (H + 2·Hkv)·D]` for instance: `first` is the first of them.
#[derive(Clone)]
pub(crate) struct HeadsView {
    pub(crate) tensor: CubeTensor,
    /// Heads of the tensor that come before.
    pub(crate) first: usize,
    /// Elements from one to the next.
    pub(crate) batch_stride: usize,
    pub(crate) head_stride: usize,
    pub(crate) row_stride: usize,
}

/// Everything but the tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sizes {
    /// B.
    pub(crate) batches: usize,
    /// H.
    pub(crate) heads: usize,
    /// Hkv.
    pub(crate) kv_heads: usize,
    /// T.
    pub(crate) queries: usize,
    /// S.
    pub(crate) keys: usize,
    /// D.
    pub(crate) width: usize,
}

impl Sizes {
    /// Queries that read the same keys.
    pub(crate) fn together(&self) -> usize {
        self.heads / self.kv_heads * self.queries
    }
}

/// Which keys a query sees, and what becomes of a score: comptime in kernels except for the numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Mask {
    /// Query t sees keys s <= t + S − T.
    pub(crate) causal: bool,
    /// It sees only the last `window` of those it would see: s > t + S − T − window. (With causal only.)
    pub(crate) window: Option<usize>,
    /// Packed documents: `[2, T]` u32 on the device; row 0 the first key of the document of each row, row 1 one
    /// past its last. Needs T = S and one batch. Both rows never decrease.
    pub(crate) documents: bool,
}

/// A call.
pub(crate) struct Problem {
    pub(crate) q: HeadsView,
    pub(crate) k: HeadsView,
    pub(crate) v: HeadsView,
    pub(crate) sizes: Sizes,
    pub(crate) mask: Mask,
    pub(crate) scale: f32,
    /// c·tanh(s/c) in place of the scaled score s.
    pub(crate) softcap: Option<f32>,
    pub(crate) documents: Option<CubeTensor>,
}

/// What a backward reads and writes beside the problem. dq, dk and dv may be parts of one packed tensor.
pub(crate) struct Backward<'a> {
    pub(crate) dy: &'a HeadsView,
    /// `[B, H, T]` f32, base 2; +∞ of a row that sees nothing.
    pub(crate) lse: &'a CubeTensor,
    /// `[B, H, T]` f32, rowsum(dO·O).
    pub(crate) delta: &'a CubeTensor,
    pub(crate) dq: &'a HeadsView,
    pub(crate) dk: &'a HeadsView,
    pub(crate) dv: &'a HeadsView,
    /// Which of dq, dk and dv somebody wants; the others may be written.
    pub(crate) wanted: [bool; 3],
}

impl Backward<'_> {
    /// Whether dq is wanted.
    pub(crate) fn of_queries(&self) -> bool {
        self.wanted[0]
    }

    /// Whether dk or dv is wanted.
    pub(crate) fn of_keys(&self) -> bool {
        self.wanted[1] || self.wanted[2]
    }
}

/// What a family of kernels offers.
pub(crate) struct Kernels {
    pub(crate) family: Family,
    /// Whether it takes a problem: element type, width, alignment.
    pub(crate) takes: fn(&Problem) -> bool,
    /// Writes o; and the log-sum-exp if it is given.
    pub(crate) forward: fn(&Problem, &HeadsView, Option<&CubeTensor>),
    /// Writes what is wanted of dq, dk and dv; others too where one kernel makes them.
    pub(crate) backward: fn(&Problem, &Backward<'_>),
}

impl HeadsView {
    /// All heads of a `[B, H, T, D]` tensor. Copies only where the elements of a head are apart.
    pub(crate) fn new(tensor: CubeTensor) -> Self {
        let tensor = untile(tensor);
        let apart = tensor.meta.strides()[3] != 1 && tensor.meta.shape()[3] > 1;
        let tensor = if apart { into_contiguous(tensor) } else { tensor };
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        // Where there is only one, a distance that no alignment fails on.
        let stride = |i: usize| if shape[i] > 1 { strides[i] } else { 0 };
        let [batch_stride, head_stride, row_stride] = [0, 1, 2].map(stride);
        Self { tensor, first: 0, batch_stride, head_stride, row_stride }
    }

    /// Heads of `width` elements from the `first` on of a `[B, T, …·width]` tensor.
    pub(crate) fn packed(tensor: &CubeTensor, first: usize, width: usize) -> Self {
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let stride = |i: usize| if shape[i] > 1 { strides[i] } else { 0 };
        let [batch_stride, row_stride] = [0, 1].map(stride);
        Self { tensor: tensor.clone(), first, batch_stride, head_stride: width, row_stride }
    }

    /// The element that the first head begins with.
    pub(crate) fn start(&self) -> usize {
        self.first * self.head_stride
    }

    /// Whether every row of `width` elements can be read in vectors of `size` elements.
    pub(crate) fn fits(&self, width: usize, size: usize) -> bool {
        let offset = self.tensor.handle.offset_start.unwrap_or(0) as usize;
        let all = [width, self.start(), self.batch_stride, self.head_stride, self.row_stride];
        all.iter().all(|distance| distance.is_multiple_of(size))
            && offset.is_multiple_of(size * self.tensor.dtype.size())
    }

    /// Whether rows begin at multiples of 16 bytes, as TMA and cp.async want it.
    pub(crate) fn aligned(&self, width: usize) -> bool {
        self.fits(width, 16 / self.tensor.dtype.size())
    }
}

/// The widest vector, up to `bytes`, in which the rows of all of them can be read.
pub(crate) fn vector_size(views: &[&HeadsView], width: usize, bytes: usize) -> usize {
    let tensor = &views[0].tensor;
    let element = tensor.dtype.size();
    let fits = |size: &usize| views.iter().all(|view| view.fits(width, *size));
    let sizes = tensor.client.io_optimized_vector_sizes(element);
    sizes.filter(|size| size * element <= bytes).filter(fits).max().unwrap_or(1)
}
