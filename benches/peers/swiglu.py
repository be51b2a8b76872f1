"""SwiGLU (elementwise) of PyTorch (eager, torch.compile) and of Liger, at the shapes of
`kiln bench swiglu`.

    python3 benches/peers/swiglu.py --shapes large --json peers.json
"""

import peers
import torch

SHAPES = {
    "small": [(2048, 384)],
    "train": [(32768, 2048)],
    "large": [(8192, 32768)],
}


def eager(gate, up):
    return torch.nn.functional.silu(gate) * up


def functions():
    found = {"torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        # Its backward writes the gradients over the inputs that it kept: the times of a second walk
        # through a graph are right, the numbers are not.
        found["liger"] = lambda gate, up: LigerSiLUMulFunction.apply(gate, up)
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


def rows(dtype, which):
    size = torch.finfo(dtype).bits // 8
    for m, d in SHAPES[which]:
        torch._dynamo.reset()
        shape, n = f"{m}×{d}", m * d
        make = lambda mean: torch.randn(m, d, device="cuda", dtype=dtype) + mean
        pairs = [(make(0.1), make(0.2)) for _ in range(peers.sets(3 * n * size))]
        found = functions()
        forward = {
            name: (lambda turn, f=f: f(*pairs[turn % len(pairs)])) for name, f in found.items()
        }
        with torch.no_grad():
            yield "forward", shape, 3 * n * size, 5 * n, forward
        dy = make(0.1)
        backward = {}
        for name, f in found.items():
            # Leaves of its own for each: Liger's backward overwrites them.
            leaves = [tuple(t.clone().requires_grad_() for t in pair) for pair in pairs]
            graphs = [f(*pair) for pair in leaves]
            backward[name] = lambda turn, ys=graphs, leaves=leaves: torch.autograd.grad(
                ys[turn % len(ys)], leaves[turn % len(leaves)], dy, retain_graph=True
            )
        yield "backward", shape, 5 * n * size, 11 * n, backward


if __name__ == "__main__":
    peers.main({"swiglu": rows})
