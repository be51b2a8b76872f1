"""Cross-entropy of PyTorch (eager, torch.compile) and of Liger, at the shapes of
`kiln bench cross_entropy`.

    python3 benches/peers/cross_entropy.py --shapes large --json peers.json
"""

import peers
import torch

SHAPES = {
    "small": [(2048, 256)],
    "train": [(8192, 50304)],
    "large": [(32768, 50304)],
}


def eager(logits, targets):
    return torch.nn.functional.cross_entropy(logits.float(), targets)


def liger():
    try:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        return lambda logits, targets: LigerCrossEntropyFunction.apply(logits, targets, None)[0]
    except ImportError as error:
        print(f"no Liger: {error}")
        return None


def rows(dtype, which):
    size = torch.finfo(dtype).bits // 8
    for m, v in SHAPES[which]:
        torch._dynamo.reset()
        shape, n = f"{m}×{v}", m * v
        count = peers.sets(n * size)
        logits = [torch.randn(m, v, device="cuda", dtype=dtype) + 0.5 for _ in range(count)]
        targets = torch.randint(v, (m,), device="cuda")
        found = {"torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
        forward = {
            name: (lambda turn, f=f: f(logits[turn % count], targets)) for name, f in found.items()
        }
        fused = liger()
        if fused is not None:
            forward["liger"] = lambda turn: fused(logits[turn % count], targets)
        with torch.no_grad():
            yield "forward", shape, n * size, 4 * n, forward
        # The graphs of the others are made before Liger writes over the logits.
        leaves = [x.clone().requires_grad_() for x in logits]
        graphs = {name: [f(x, targets) for x in leaves] for name, f in found.items()}
        backward = {
            name: (
                lambda turn, ys=ys: torch.autograd.grad(
                    ys[turn % count], leaves[turn % count], retain_graph=True
                )
            )
            for name, ys in graphs.items()
        }
        if fused is not None:
            own = [x.requires_grad_() for x in logits]

            # Liger makes the gradient in its forward, over the logits: its backward alone does
            # nothing, so both are timed here.
            def both(turn):
                leaf = own[turn % count]
                return torch.autograd.grad(fused(leaf, targets), leaf)

            backward["liger"] = both
        yield "backward", shape, 2 * n * size, 4 * n, backward


if __name__ == "__main__":
    peers.main({"cross_entropy": rows})
