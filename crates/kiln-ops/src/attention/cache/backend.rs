//! Attention with a cache as a Burn operation: dispatch and fusion.

use super::super::backend::{Settings, rows};
use super::super::problem::{HeadsView, Mask, Problem, Sizes};
use super::super::{AttentionOptions, OP, family};
use super::append::append;
use crate::launch;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::untile;
use burn_cubecl::tensor::CubeTensor;

/// What is no tensor.
#[derive(Clone, Copy, Debug)]
pub struct Cached {
    /// Positions in the cache before the call.
    pub before: usize,
    /// The rest.
    pub settings: Settings,
}

/// Attention with a cache, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait CachedAttentionOps: Backend {
    /// y, and the keys and values with those of `qkv`: in the memory of `k` and `v` unless somebody else holds it.
    #[fusion(meta = |qkv, k, v, call| {
        let shape = call.sizes(&qkv.shape, &k.shape).output(true);
        (TensorSpec::new(shape, qkv.dtype), k.clone(), v.clone())
    })]
    fn attend_cached(
        qkv: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        call: Cached,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

impl Cached {
    /// Those of the keys that are filled by the call included.
    fn sizes(&self, qkv: &[usize], k: &[usize]) -> Sizes {
        let (batches, queries) = (qkv[0], qkv[1]);
        let [heads, kv_heads] = self.settings.heads;
        Sizes { batches, heads, kv_heads, queries, keys: self.before + queries, width: k[3] }
    }
}

/// One to write to, and whether it is a copy.
fn own(tensor: CubeTensor, name: &'static str) -> (CubeTensor, bool) {
    let mut tensor = untile(tensor);
    match tensor.is_nonoverlapping() && launch::is_own(&mut tensor, OP, name) {
        true => (tensor, false),
        false => (tensor.copy(), true),
    }
}

impl CachedAttentionOps for CubeBackend {
    fn attend_cached(
        qkv: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        call: Cached,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let sizes = call.sizes(qkv.meta.shape(), k.meta.shape());
        let Sizes { heads, kv_heads, width, .. } = sizes;
        let qkv = rows(qkv);
        let ((k, k_copied), (v, v_copied)) = (own(k, "cache of keys"), own(v, "cache of values"));
        let y = launch::output(&qkv, OP, "y", sizes.output(true), qkv.dtype);
        if y.meta.num_elements() > 0 {
            let part = |first| HeadsView::packed(&qkv, first, width);
            let [to_k, to_v] = [&k, &v].map(|tensor| HeadsView::new(tensor.clone()));
            let (new_k, new_v) = (part(heads), part(heads + kv_heads));
            append([&new_k, &new_v], [&to_k, &to_v], &sizes, call.before, k_copied || v_copied);
            let AttentionOptions { causal, window, softcap, .. } = call.settings.options;
            let problem = Problem {
                q: part(0),
                k: to_k,
                v: to_v,
                sizes,
                mask: Mask { causal, window, documents: false },
                scale: call.settings.options.scale_for(width) as f32,
                softcap: softcap.map(|cap| cap as f32),
                documents: None,
            };
            let view = HeadsView::packed(&y, 0, width);
            family::forward(&problem, &view, None, call.settings.family);
        }
        (y, k, v)
    }
}

/// [`attention_cached`](super::attention_cached) through the kernels, without its checks.
pub(super) fn fused(
    qkv: Tensor<3>,
    heads: usize,
    held: [Tensor<4>; 2],
    before: usize,
    options: AttentionOptions,
) -> (Tensor<3>, [Tensor<4>; 2]) {
    let settings = Settings::new([heads, held[0].dims()[1]], options);
    let [k, v] = held.map(Tensor::into_dispatch);
    let call = Cached { before, settings };
    let (y, k, v) = Dispatch::attend_cached(qkv.into_dispatch(), k, v, call);
    (Tensor::from_dispatch(y), [Tensor::from_dispatch(k), Tensor::from_dispatch(v)])
}
