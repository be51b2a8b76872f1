"""Triangular products in PyTorch, at the shapes of `kiln bench tril_matmul`: the dense product between
masks, a blocked recursion, and for f32 the triangular product of cuBLAS.

    python3 benches/peers/tril_matmul.py --shapes large --json peers.json
"""

import ctypes

import peers
import torch

SHAPES = {
    "small": [(1, 128), (1, 512)],
    "train": [(16, 1024)],
    "large": [(1, 4096), (1, 8192), (16, 1024)],
}


def dense(a, b):
    return torch.tril(a @ b)


def blocked(a, b):
    """Halves: the diagonal blocks by recursion, the block below them by two products."""
    n = a.shape[-1]
    if n <= 512:
        return torch.tril(a @ b)
    h = n // 2
    y = torch.zeros_like(a)
    y[..., :h, :h] = blocked(a[..., :h, :h], b[..., :h, :h])
    y[..., h:, h:] = blocked(a[..., h:, h:], b[..., h:, h:])
    y[..., h:, :h] = a[..., h:, :h] @ b[..., :h, :h] + a[..., h:, h:] @ b[..., h:, :h]
    return y


def strmm():
    """cublasStrmm: tril(A)·B. Row-major is column-major transposed: C' = B'·A', A' upper."""
    library = next(
        (name for name in ("libcublas.so.13", "libcublas.so.12", "libcublas.so") if loads(name)), None
    )
    if library is None:
        return None
    call = ctypes.CDLL(library).cublasStrmm_v2
    one = ctypes.c_float(1.0)

    def run(a, b):
        n, y = a.shape[-1], torch.empty_like(a)
        right, upper, plain, not_unit = 1, 1, 0, 0
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        pointer = lambda t: ctypes.c_void_p(t.data_ptr())
        status = call(
            handle, right, upper, plain, not_unit, n, n, ctypes.byref(one),
            pointer(a), n, pointer(b), n, pointer(y), n,
        )
        assert status == 0, f"cublasStrmm returned {status}"
        return y

    return run


def loads(name):
    try:
        ctypes.CDLL(name)
        return True
    except OSError:
        return False


def rows(dtype, which):
    size = torch.finfo(dtype).bits // 8
    compiled = torch.compile(dense, dynamic=False)
    for batches, n in SHAPES[which]:
        shape = (n, n) if batches == 1 else (batches, n, n)
        make = lambda: torch.randn(*shape, device="cuda", dtype=dtype).tril()
        elements = batches * n * n
        sets = [(make(), make()) for _ in range(peers.sets(2 * elements * size))]
        functions = {"torch.tril(a @ b)": dense, "torch.compile": compiled, "blocked": blocked}
        if dtype == torch.float32 and batches == 1 and (trmm := strmm()):
            functions["cublas strmm"] = trmm
            a, b = sets[0]
            error = (trmm(a, b) - dense(a, b)).abs().max().item()
            assert error < 1e-2, f"cublasStrmm is off by {error}"
        flops = batches * n * (n + 1) * (n + 2) / 3
        yield "forward", "×".join(map(str, shape)), 2 * elements * size, flops, {
            name: (lambda turn, f=f: f(*sets[turn % len(sets)])) for name, f in functions.items()
        }
        dy = make()

        def backward(turn):
            a, b = sets[turn % len(sets)]
            return torch.tril(dy @ b.mT), torch.tril(a.mT @ dy)

        yield "backward", "×".join(map(str, shape)), 3.5 * elements * size, 2 * flops, {
            "torch.tril(a @ b)": backward
        }


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    peers.main({"tril_matmul": rows})
