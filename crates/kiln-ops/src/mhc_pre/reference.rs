//! What precedes a layer, in plain Burn operations.

use super::{MhcPre, MhcPreOptions};
use crate::matmul::reference::exact;
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{DType, Tensor};

/// [`mhc_pre`](fn@super::mhc_pre) without its checks.
pub fn mhc_pre(
    x: Tensor<4>,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    gamma: Option<Tensor<2>>,
    options: MhcPreOptions,
) -> MhcPre {
    let MhcPreOptions { norm_eps, hc_eps, sinkhorn } = options;
    let (dtype, [b, s, n, d]) = (x.dtype(), x.dims());
    let (tokens, width) = (b * s, n * d);
    if tokens == 0 {
        // Burn takes a 0 in a shape for the size that was there.
        let (device, small) = (x.device(), (&x.device(), DType::F32));
        return MhcPre {
            x,
            h_in: Tensor::zeros([b, s, d], (&device, dtype)),
            h_post: Tensor::zeros([b, s, n], small),
            h_res: Tensor::zeros([b, s, n, n], small),
        };
    }
    let (streams, x) = (x.clone(), x.cast(DType::F32).reshape([tokens, width]));
    let phi = super::scaled(phi, gamma);
    let squares = (x.clone() * x.clone()).mean_dim(1);
    let r = squares.add_scalar(norm_eps).sqrt().recip();
    let y = exact(x.clone(), phi.transpose()) * r;
    let part = |which: usize, first: usize, count: usize| -> Tensor<2> {
        let alpha = alpha.clone().narrow(0, which, 1).reshape([1, 1]);
        let bias = bias.clone().narrow(0, first, count).reshape([1, count]);
        y.clone().narrow(1, first, count) * alpha + bias
    };
    let h_pre = sigmoid(part(0, 0, n)).add_scalar(hc_eps).reshape([tokens, n, 1]);
    let h_post = sigmoid(part(1, n, n)).mul_scalar(2.0);
    let mut h_res = part(2, 2 * n, n * n).reshape([tokens, n, n]);
    let normalised = |of: Tensor<3>, dim: usize| of.clone() / of.sum_dim(dim).add_scalar(hc_eps);
    if sinkhorn > 0 {
        h_res = normalised(softmax(h_res, 2).add_scalar(hc_eps), 1);
    }
    for _ in 1..sinkhorn {
        h_res = normalised(normalised(h_res, 2), 1);
    }
    let h_in: Tensor<2> = (x.reshape([tokens, n, d]) * h_pre).sum_dim(1).reshape([tokens, d]);
    MhcPre {
        x: streams,
        h_in: h_in.cast(dtype).reshape([b, s, d]),
        h_post: h_post.reshape([b, s, n]),
        h_res: h_res.reshape([b, s, n, n]),
    }
}
