"""x + residual and its RMSNorm in PyTorch (eager, torch.compile) and Liger, at the shapes of
`kiln bench add_rms_norm`.

    python3 benches/peers/add_rms_norm.py --shapes large --json peers.json
"""

import peers
import torch
from rms_norm import EPS, SHAPES


def eager(x, residual, weight):
    total = x + residual
    return total, torch.nn.functional.rms_norm(total, (x.shape[-1],), weight, EPS)


def functions():
    found = {"torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Liger

        def liger(x, residual, weight):
            y, total = Liger.apply(x, residual, weight, EPS, 0.0, "llama", False)
            return total, y

        found["liger"] = liger
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


def rows(dtype, which):
    size = torch.finfo(dtype).bits // 8
    for m, d in SHAPES[which]:
        torch._dynamo.reset()
        shape, nbytes = f"{m}×{d}", 4 * m * d * size
        make = lambda: torch.randn(m, d, device="cuda", dtype=dtype)
        pairs = [(make() + 0.3, make()) for _ in range(peers.sets(nbytes))]
        weight = torch.randn(d, device="cuda", dtype=dtype) + 1.0
        found = functions()
        forward = {
            name: (lambda turn, f=f: f(*pairs[turn % len(pairs)], weight))
            for name, f in found.items()
        }
        with torch.no_grad():
            yield "forward", shape, nbytes, 5 * m * d, forward
        leaves = [tuple(t.requires_grad_() for t in pair) for pair in pairs]
        w = weight.requires_grad_()
        cotangents = (make(), make())
        graphs = {name: [f(*pair, w) for pair in leaves] for name, f in found.items()}
        backward = {
            name: (
                lambda turn, ys=ys: torch.autograd.grad(
                    ys[turn % len(ys)], (*leaves[turn % len(ys)], w), cotangents, retain_graph=True
                )
            )
            for name, ys in graphs.items()
        }
        yield "backward", shape, nbytes, 11 * m * d, backward


if __name__ == "__main__":
    peers.main({"add_rms_norm": rows})
