"""Triangular products in PyTorch, as `kiln bench tril_matmul` times them: the dense product between masks, a
blocked recursion, and for f32 the triangular product of cuBLAS.

    python3 benches/peers/tril_matmul.py --shapes large --json peers.json
"""

import ctypes

import peers
import torch


def dense(a, b):
    return torch.tril(a @ b)


def dense_backward(a, b, dy):
    return torch.tril(dy @ b.mT), torch.tril(a.mT @ dy)


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

    a, b = (torch.randn(96, 96, device="cuda").tril() for _ in range(2))
    error = (run(a, b) - dense(a, b)).abs().max().item()
    assert error < 1e-3, f"cublasStrmm is off by {error}"
    return run


def loads(name):
    try:
        ctypes.CDLL(name)
        return True
    except OSError:
        return False


def of(case):
    # The matrices are handed over as triangles, with zeros above.
    lower = lambda *matrices: tuple(matrix.tril() for matrix in matrices)
    found, backward = {}, peers.torches(dense_backward)
    for name, f in peers.torches(dense).items():
        own = {
            "backward": lambda ab, dy, g=backward[name]: g(*ab, *dy),
            "both": lambda ab, dy, f=f, g=backward[name]: (f(*ab), g(*ab, *dy)),
        }
        own = {which: torch.no_grad()(call) for which, call in own.items()}
        found[name] = peers.Peer(f, own=own, prepare=lower, prepare_cotangents=lower)
    forward = dict(passes=("forward",), prepare=lower)
    found["blocked"] = peers.Peer(blocked, **forward)
    if case.dtype == "f32" and len(case.tensors[0]["shape"]) == 2 and (trmm := strmm()):
        found["cublas strmm"] = peers.Peer(trmm, **forward)
    return found


if __name__ == "__main__":
    peers.main({"tril_matmul": of})
