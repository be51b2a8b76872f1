"""Matrix products of PyTorch (cuBLAS, and what max-autotune finds), as `kiln bench matmul matmul_nt matmul_tn gram`
times them.

    python3 benches/peers/matmul.py --shapes large --json peers.json
"""

import peers


def products(a_turned, b_turned):
    def product(a, b):
        return (a.mT if a_turned else a) @ (b.mT if b_turned else b)

    return lambda case: {name: peers.Peer(f) for name, f in peers.torches(product).items()}


def gram(case):
    """The dense product: cuBLAS has none of halves that is symmetric."""
    return {name: peers.Peer(f) for name, f in peers.torches(lambda a: a @ a.mT).items()}


if __name__ == "__main__":
    peers.main(
        {
            "matmul": products(False, False),
            "matmul_nt": products(False, True),
            "matmul_tn": products(True, False),
            "gram": gram,
        }
    )
