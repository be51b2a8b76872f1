"""The Newton-Schulz iteration of Muon in PyTorch (eager, torch.compile) and, where they are installed, by the Triton
kernels of Dion and by Gram Newton-Schulz, as `kiln bench newton_schulz` times it.

    python3 benches/peers/newton_schulz.py --shapes train --json peers.json

Dion's kernels (github.com/microsoft/dion, dion/newton_schulz_triton.py) compute one half of the symmetric products, as
Kiln does; that file has to stand where Python finds it. Gram Newton-Schulz (`pip install gram-newton-schulz`) is another
way to nearly the same result, in f16: products of the small side, with a restart after two steps; without the kernels of
quack-kernels it is PyTorch's products, under torch.compile.
"""

import peers
import torch

A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5


def turned(iterate):
    """The iteration of the small side."""

    def run(g):
        if g.shape[-2] > g.shape[-1]:
            return iterate(g.mT).mT
        return iterate(g)

    return run


def normalised(g):
    return g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)


@turned
def eager(g):
    x = normalised(g)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x


@turned
def added(g):
    """The same with the sums in the products."""
    stack = normalised(g).flatten(0, -3) if g.dim() > 2 else normalised(g)[None]
    for _ in range(STEPS):
        gram = stack @ stack.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        stack = torch.baddbmm(stack, polynomial, stack, beta=A)
    return stack.view(g.shape)


def dion():
    from newton_schulz_triton import ns_line_1, ns_line_2, ns_line_3

    normalise = torch.compile(normalised, dynamic=False)

    @turned
    def run(g):
        x = normalise(g).contiguous()
        for _ in range(STEPS):
            gram = ns_line_1(x)
            x = ns_line_3(ns_line_2(gram, alpha=C, beta=B), x, A)
        return x

    return run


def gram_newton_schulz():
    from gram_newton_schulz import GramNewtonSchulz

    whole = GramNewtonSchulz(
        ns_use_kernels=False,
        ns_coefficients=[[A, B, C]] * STEPS,
        gram_newton_schulz_reset_iterations=[2],
        # Graphs are left to this bench.
        compile_kwargs={"fullgraph": True, "dynamic": False},
    )
    return lambda g: whole(g)


def of(case):
    found = {name: peers.Peer(f) for name, f in peers.torches(eager).items()}
    found["torch baddbmm"] = peers.Peer(added)
    for name, make in (("Dion", dion), ("Gram Newton-Schulz", gram_newton_schulz)):
        try:
            found[name] = peers.Peer(make())
        except ImportError as error:
            print(f"{name}: {error}")
    return found


if __name__ == "__main__":
    peers.main({"newton_schulz": of})
