"""Matrix products of PyTorch (cuBLAS), at the shapes of `kiln bench matmul matmul_nt matmul_tn gram`.

    python3 benches/peers/matmul.py --shapes large --json peers.json
"""

import peers
import torch

TRAIN = [(768, 768), (768, 2304), (768, 4096), (2048, 768), (768, 50304)]
DECODING = [(m, 8192, 8192) for m in (1, 8, 16, 64)]
# By which operands are stored transposed: the product, decoding with a transposed weight and dX, dW.
THIN = {
    (False, False): DECODING + [(8192, 8192, 64), (16384, 8192, 24), (16384, 8192, 80)],
    (False, True): DECODING + [(16384, 24, 8192), (16384, 80, 8192)],
    (True, False): [(8192, 16384, 24), (8192, 16384, 80)],
}
SHAPES = {
    "small": [(64, 64, 64), (128, 128, 128), (256, 256, 256)],
    "train": [(m, k, n) for m in (32768, 8192) for k, n in TRAIN],
    "large": [(s, s, s) for s in (2048, 4096, 8192)],
}


def rows(a_turned, b_turned):
    def make(dtype, which):
        size = torch.finfo(dtype).bits // 8
        shapes = THIN[a_turned, b_turned] if which == "thin" else SHAPES[which]
        for m, k, n in shapes:
            # The gradients of the products of training: dX = dY·Wᵀ and dW = Xᵀ·dY.
            if which == "train" and b_turned:
                k, n = n, k
            if which == "train" and a_turned:
                m, k = k, m
            a_shape = (k, m) if a_turned else (m, k)
            b_shape = (n, k) if b_turned else (k, n)
            names = ["×".join(map(str, s)) for s in (a_shape, b_shape)]
            shape = ", ".join(dict.fromkeys(names))
            nbytes = (m * k + k * n + m * n) * size
            random = lambda s: torch.randn(*s, device="cuda", dtype=dtype) + 0.1
            sets = [(random(a_shape), random(b_shape)) for _ in range(peers.sets(nbytes))]
            views = [(a.T if a_turned else a, b.T if b_turned else b) for a, b in sets]
            flops = 2 * m * n * k
            yield "forward", shape, nbytes, flops, {
                "torch": lambda turn: views[turn % len(views)][0] @ views[turn % len(views)][1]
            }
            dy = random((m, n))

            def backward(turn):
                a, b = views[turn % len(views)]
                return dy @ b.T, a.T @ dy

            nbytes = (2 * (m * k + k * n) + m * n) * size
            yield "backward", shape, nbytes, 2 * flops, {"torch": backward}

    return make


GRAM = {
    "small": [(64, 64), (128, 128), (256, 256)],
    "train": [(768, 768), (768, 3072), (24, 768, 768), (24, 768, 3072)],
    "large": [(s, s) for s in (2048, 4096, 8192)],
    "thin": [],
}


def gram(dtype, which):
    """The dense product: cuBLAS has none of halves that is symmetric."""
    size = torch.finfo(dtype).bits // 8
    for shape in GRAM[which]:
        *batch, m, k = shape
        batches = batch[0] if batch else 1
        nbytes = batches * (m * k + m * m) * size
        flops = 2 * batches * m * m * k
        random = lambda s: torch.randn(*s, device="cuda", dtype=dtype) + 0.1
        a = [random(shape) for _ in range(peers.sets(nbytes))]
        name = "×".join(map(str, shape))
        yield "forward", name, nbytes, flops, {
            "torch": lambda turn: a[turn % len(a)] @ a[turn % len(a)].mT
        }
        dy = random((*batch, m, m))
        nbytes = batches * (2 * m * k + m * m) * size
        backward = lambda turn: dy @ a[turn % len(a)] + dy.mT @ a[turn % len(a)]
        yield "backward", name, nbytes, 2 * flops, {"torch": backward}


if __name__ == "__main__":
    peers.main(
        {
            "matmul": rows(False, False),
            "matmul_nt": rows(False, True),
            "matmul_tn": rows(True, False),
            "gram": gram,
        },
        ("small", "train", "large", "thin"),
    )
