"""The SwiGLU MLP of PyTorch (eager, torch.compile), at the shapes of `kiln bench swiglu_mlp`.

    python3 benches/peers/swiglu_mlp.py --shapes train --json peers.json
"""

import peers
import torch

SHAPES = {
    "small": [(2048, 128, 384)],
    "train": [(32768, 768, 2048)],
    "large": [(65536, 768, 2048)],
}


def eager(x, gate, up, down):
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


def rows(dtype, which):
    size = torch.finfo(dtype).bits // 8
    for m, d, f in SHAPES[which]:
        make = lambda *s: (torch.randn(*s, device="cuda", dtype=dtype) / s[0] ** 0.5).requires_grad_()
        x = (torch.randn(m, d, device="cuda", dtype=dtype) + 0.1).requires_grad_()
        weights = make(d, f), make(d, f), make(f, d)
        shape = f"{m}×{d}, {d}×{f}, {f}×{d}"
        functions = {"torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
        moved, flops = (2 * m * d + 3 * d * f) * size, 6 * m * d * f
        with torch.no_grad():
            yield "forward", shape, moved, flops, {
                name: (lambda turn, g=g: g(x, *weights)) for name, g in functions.items()
            }
        dy = torch.randn(m, d, device="cuda", dtype=dtype)
        graphs = {name: g(x, *weights) for name, g in functions.items()}
        yield "backward", shape, 2 * moved, 2 * flops, {
            name: (lambda turn, y=y: torch.autograd.grad(y, (x, *weights), dy, retain_graph=True))
            for name, y in graphs.items()
        }


if __name__ == "__main__":
    peers.main({"swiglu_mlp": rows})
