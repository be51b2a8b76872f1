"""Linear cross-entropy of PyTorch (eager, torch.compile) and of Liger, forward and backward together (the row `backward`), at
the shapes of `kiln bench linear_cross_entropy`, and the memory that each takes at its peak.

    python3 benches/peers/linear_cross_entropy.py --shapes large --json peers.json
"""

import peers
import torch

SHAPES = {
    "small": [(2048, 128, 256)],
    "train": [(8192, 768, 50304)],
    "large": [(32768, 768, 50304)],
}


def eager(x, weight, targets):
    return torch.nn.functional.cross_entropy((x @ weight).float(), targets)


def functions():
    found = {"torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        # Liger's weight is [V, D].
        found["liger"] = lambda x, w, t: LigerFusedLinearCrossEntropyFunction.apply(x, w, t)[0]
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


def rows(dtype, which):
    size = torch.finfo(dtype).bits // 8
    for m, d, v in SHAPES[which]:
        x = (torch.randn(m, d, device="cuda", dtype=dtype) + 0.1).requires_grad_()
        weight = (torch.randn(d, v, device="cuda", dtype=dtype) / d**0.5).requires_grad_()
        turned = weight.detach().T.contiguous().requires_grad_()
        targets = torch.randint(v, (m,), device="cuda")

        def both(name, f):
            w = turned if name == "liger" else weight
            return lambda turn: torch.autograd.grad(f(x, w, targets), (x, w))

        calls = {name: both(name, f) for name, f in functions().items()}
        for name, call in calls.items():
            call(0)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            call(0)
            torch.cuda.synchronize()
            print(f"{name}: {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB at the peak")
        bytes_moved = 3 * (m * d + d * v) * size
        yield "backward", f"{m}×{d}, {d}×{v}", bytes_moved, 6 * m * d * v, calls


if __name__ == "__main__":
    peers.main({"linear_cross_entropy": rows})
