"""RMSNorm of PyTorch (eager, torch.compile) and of Liger, at the shapes of `kiln bench rms_norm`.

    python3 benches/peers/rms_norm.py --shapes large --json peers.json
"""

import peers
import torch

SHAPES = {
    "small": [(2048, 128), (4096, 384)],
    "train": [(32768, 768), (16384, 1024)],
    "large": [(16384, 4096), (32768, 768), (8192, 8192), (4096, 16384), (131072, 128)],
}
EPS = 1e-5


def eager(x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def functions():
    found = {"torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        found["liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


def rows(dtype, which):
    size = torch.finfo(dtype).bits // 8
    for m, d in SHAPES[which]:
        torch._dynamo.reset()
        shape, nbytes = f"{m}×{d}", 2 * m * d * size
        xs = [torch.randn(m, d, device="cuda", dtype=dtype) + 0.3 for _ in range(peers.sets(nbytes))]
        weight = torch.randn(d, device="cuda", dtype=dtype) + 1.0
        found = functions()
        forward = {
            name: (lambda turn, f=f: f(xs[turn % len(xs)], weight)) for name, f in found.items()
        }
        with torch.no_grad():
            yield "forward", shape, nbytes, 4 * m * d, forward
        leaves = [x.requires_grad_() for x in xs]
        w = weight.requires_grad_()
        dy = torch.randn(m, d, device="cuda", dtype=dtype)
        # The graphs are made once and walked again and again: only the backward is timed.
        graphs = {name: [f(x, w) for x in leaves] for name, f in found.items()}
        backward = {
            name: (
                lambda turn, ys=ys: torch.autograd.grad(
                    ys[turn % len(ys)], (leaves[turn % len(ys)], w), dy, retain_graph=True
                )
            )
            for name, ys in graphs.items()
        }
        yield "backward", shape, 3 * m * d * size, 10 * m * d, backward


if __name__ == "__main__":
    peers.main({"rms_norm": rows})
