"""RoPE (half layout) of PyTorch (eager, torch.compile) and of Liger, at the shapes of `kiln bench rope`.

    python3 benches/peers/rope.py --shapes large --json peers.json
"""

import peers
import torch

SHAPES = {
    "small": [(16, 4, 128, 32)],
    "train": [(32, 12, 1024, 64)],
    "large": [(8, 40, 2048, 128)],
}


def table(length, width):
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float().cuda(), angles.sin().float().cuda()


def eager(x, cos, sin):
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).to(x.dtype)


def liger():
    try:
        from liger_kernel.ops import rope

        return rope
    except ImportError as error:
        print(f"no Liger: {error}")
        return None


def rows(dtype, which):
    size = torch.finfo(dtype).bits // 8
    for b, h, t, d in SHAPES[which]:
        torch._dynamo.reset()
        shape, n = f"{b}×{h}×{t}×{d}", b * h * t * d
        cos, sin = table(t, d)
        make = lambda: torch.randn(b, h, t, d, device="cuda", dtype=dtype)
        xs = [make() for _ in range(peers.sets(2 * n * size))]
        found = {"torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
        forward = {
            name: (lambda turn, f=f: f(xs[turn % len(xs)], cos, sin)) for name, f in found.items()
        }
        kernels = liger()
        if kernels is not None:
            # Liger turns queries and keys in place, with the opposite sign, in [B, T, H, D] memory and
            # from a table that has each angle twice. It gets the same heads in two tensors, laid
            # as it likes them, and is called without autograd, which would refuse to write over leaves.
            keys = max(1, h // 5)
            laid = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
            pairs = [(laid(x[:, : h - keys]), laid(x[:, h - keys :])) for x in xs]
            angles = [torch.cat((a, a), dim=-1)[None] for a in (cos, sin)]
            forward["liger"] = lambda turn: kernels.rope_forward(*pairs[turn % len(pairs)], *angles)
        with torch.no_grad():
            yield "forward", shape, 2 * n * size, 3 * n, forward
        leaves = [x.requires_grad_() for x in xs]
        dy = make()
        graphs = {name: [f(x, cos, sin) for x in leaves] for name, f in found.items()}
        backward = {
            name: (
                lambda turn, ys=ys: torch.autograd.grad(
                    ys[turn % len(ys)], leaves[turn % len(ys)], dy, retain_graph=True
                )
            )
            for name, ys in graphs.items()
        }
        if kernels is not None:
            backward["liger"] = lambda turn: kernels.rope_backward(*pairs[turn % len(pairs)], *angles)
        yield "backward", shape, 2 * n * size, 3 * n, backward


if __name__ == "__main__":
    peers.main({"rope": rows})
