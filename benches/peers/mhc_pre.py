"""What precedes a layer in hyper-connections by PyTorch (eager, torch.compile), by Liger, by TransformerEngine and by
TileKernels, as `kiln bench mhc_pre` times it.

    python3 benches/peers/mhc_pre.py --shapes large --json peers.json

Products of PyTorch are in TF32, for which x is first written in f32, or, where the name says so, in bf16, φ and y too.
Liger's φ is in bf16.

TransformerEngine wants the streams of a number beside each other, [b, s, d, n]. Who uses it keeps x and φ like that,
so they are laid out before anything is timed. φ is in f32 and its products in TF32 or, where the name says so, φ is in
bf16. Beside its default it is timed with `use_split_k`, which adds up y by atomics in the forward and leaves the
backward as it is. Sinkhorn normalises in the same order and as often, but in logarithms and without HC_EPS, which h_pre
does not have either, and NORM_EPS is 2⁻²³: with these the results are the same.

TileKernels is version 1, which TileLang 0.1.9 compiles: from 2.0 on it leaves the product and autograd to others. Its
products are in TF32. The forward alone is by its kernels for inference. In the backward they add to the gradient that
its post op leaves with the storage of x, for which zeros are written here.
"""

import peers
import torch

NORM_EPS = HC_EPS = 1e-6


def eager(repeats, halves):
    def run(x, phi, alpha, bias, gamma):
        (b, s, n, d), wide = x.shape, x.flatten(2)
        r = torch.rsqrt(wide.float().square().mean(-1, keepdim=True) + NORM_EPS)
        y = (wide @ phi.to(x.dtype).T).float() if halves else wide.float() @ phi.T
        y = y * r
        pre, post, res = torch.split(y, (n, n, n * n), dim=-1)
        bias_pre, bias_post, bias_res = torch.split(bias, (n, n, n * n))
        h_pre = torch.sigmoid(alpha[0] * pre + bias_pre) + HC_EPS
        h_post = 2 * torch.sigmoid(alpha[1] * post + bias_post)
        h_res = (alpha[2] * res + bias_res).view(b, s, n, n).softmax(-1) + HC_EPS
        h_res = h_res / (h_res.sum(-2, keepdim=True) + HC_EPS)
        for _ in range(repeats - 1):
            h_res = h_res / (h_res.sum(-1, keepdim=True) + HC_EPS)
            h_res = h_res / (h_res.sum(-2, keepdim=True) + HC_EPS)
        h_in = (h_pre[..., None] * x.float()).sum(-2).to(x.dtype)
        return h_in, h_post, h_res

    return run


def liger(repeats):
    """A call of Liger's, and what makes its inputs of ours."""
    from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_pre

    # It wants φ as [in, out] and in 16 bits, and three numbers for α.
    def prepare(x, phi, alpha, bias, gamma):
        return (x, phi.T.to(x.dtype).contiguous(), bias, *alpha.clone().unbind())

    def run(x, phi, bias, pre, post, res):
        h_pre, h_post, h_res = liger_mhc_coeffs(
            x, phi, bias, pre, post, res,
            tmax=repeats, rms_eps=NORM_EPS, pre_eps=HC_EPS, sinkhorn_eps=HC_EPS,
        )  # fmt: skip
        return liger_mhc_pre(x, h_pre), h_post, h_res

    return run, prepare


def tile_kernels(repeats):
    """A call of TileKernels', and what makes its inputs of ours."""
    from tile_kernels.modeling.mhc.functional import mhc_pre

    def steps(x, phi, alpha, bias):
        h_in, (h_post, h_res) = mhc_pre(
            x, phi, alpha, bias,
            norm_eps=NORM_EPS, post_mult_value=2.0, pre_eps=HC_EPS, sinkhorn_eps=HC_EPS, sinkhorn_repeat=repeats,
            n_splits=1,
        )  # fmt: skip
        return h_in, h_post.squeeze(-1), h_res

    # Its own gradient of x goes by the storage of x, not by autograd.
    class Steps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.inputs = [t.detach().requires_grad_() for t in inputs]
            with torch.enable_grad():
                ctx.outputs = steps(*ctx.inputs)
            return tuple(y.detach() for y in ctx.outputs)

        @staticmethod
        def backward(ctx, *cotangents):
            x, *parameters = ctx.inputs
            x.untyped_storage().grad_from_mhc_post = dx = torch.zeros_like(x)
            return dx, *torch.autograd.grad(ctx.outputs, parameters, cotangents, retain_graph=True)

    def run(*inputs):
        return Steps.apply(*inputs) if torch.is_grad_enabled() else steps(*inputs)

    def prepare(x, phi, alpha, bias, gamma):
        assert x.shape[2] == 4, "TileKernels has four streams"
        return x, phi, alpha, bias

    return run, prepare


def of(case):
    torch.backends.cuda.matmul.allow_tf32 = True
    repeats = int(case.shape.split("sinkhorn=")[1])
    functions = {**peers.torches(eager(repeats, False)), **peers.torches(eager(repeats, True), " bf16")}
    found = {name: peers.Peer(f) for name, f in functions.items()}
    try:
        run, prepare = liger(repeats)
        found["liger"] = peers.Peer(run, prepare=prepare)
    except ImportError as error:
        print(f"no Liger: {error}")
    try:
        from transformer_engine.pytorch.triton import mhc

        # It wants bias as a row.
        def beside(halves):
            def prepare(x, phi, alpha, bias, gamma):
                phi = phi.unflatten(1, x.shape[2:]).transpose(1, 2).flatten(1)
                return x.transpose(2, 3).contiguous(), phi.to(x.dtype) if halves else phi, alpha, bias[None]

            return prepare

        # These are the steps of its mhc_generate_mix_and_aggregate, which always repeats 20 times.
        def transformer_engine(split):
            def run(x, phi, alpha, bias):
                b, s, d, n = x.shape
                y, ms = mhc.mhc_fused_projection(x.view(b * s, d * n), phi, use_split_k=split)
                h_pre, h_post, h_res = mhc.mhc_fused_scale(y, alpha, bias, ms, n)
                h_res = mhc.mhc_fused_sinkhorn(h_res.view(b, s, n, n), n, iters=repeats)
                return mhc.mhc_fused_aggregate(x, h_pre.view(b, s, n), n), h_post.view(b, s, n), h_res

            return run

        for halves, suffix in ((False, ""), (True, " bf16")):
            prepare = beside(halves)
            found[f"TransformerEngine{suffix}"] = peers.Peer(transformer_engine(False), prepare=prepare)
            found[f"TransformerEngine split-K{suffix}"] = peers.Peer(
                transformer_engine(True), passes=("forward", "both"), prepare=prepare
            )
    except ImportError as error:
        print(f"no TransformerEngine: {error}")
    try:
        run, prepare = tile_kernels(repeats)
        found["TileKernels"] = peers.Peer(run, prepare=prepare)
    except ImportError as error:
        print(f"no TileKernels: {error}")
    return found


if __name__ == "__main__":
    peers.main({"mhc_pre": of})
