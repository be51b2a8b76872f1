"""The resolvent's diagonal by other means, as `kiln bench bk` times it, forward only: the same scan in JAX, a solver of
cuSPARSE, one site after the other in Triton, and dense inverses in PyTorch.

    python3 benches/peers/bk.py --shapes large --json peers.json
"""

import ctypes
import functools
import os
import sys

import numpy
import peers
import torch
import triton
import triton.language as tl

# Or JAX takes most of the memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
try:
    import jax
    import jax.numpy as jnp
    from jax import lax
except ImportError:
    jax = None

FORWARD = ("forward",)
# The error that is let pass, as a share of the norm.
TOLERANCE = 1e-4


# JAX: associative_scan.


def scaled(parts):
    """Complex numbers over the power of two of their largest component, which rounds nothing."""
    components = [abs(f(part)) for part in parts for f in (jnp.real, jnp.imag)]
    exponent = lax.bitcast_convert_type(functools.reduce(jnp.maximum, components), jnp.int32) & (255 << 23)
    scale = lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    return tuple(lax.complex(part.real * scale, part.imag * scale) for part in parts)


def after(x, y):
    """The product y·x of 2×2 matrices, scaled: x stands before y."""
    (p, q, r, s), (a, b, c, d) = x, y
    return scaled((a * p + b * r, a * q + b * s, c * p + d * r, c * q + d * s))


def diagonal(a, b, c, z):
    """G of the minors from both sides. M = [[alpha, -1], [beta, 0]] takes (theta, beta·theta before) one site on from
    the left, and the row (phi, -phi behind) one site on from the right, which is the transpose of M on a column.
    So one scan does both, with half the launches of two: it goes over M and, backwards, over the transposes."""
    alpha = lax.complex(a - z[:, :1], jnp.broadcast_to(-z[:, 1:], a.shape))
    beta = jnp.pad(b * c, ((0, 0), (0, 1)))

    def sides(left, right, first):
        # What stands before a site, and behind it, is without the site itself: both begin with `first`, by which
        # matrices begin that take (1, 0) to itself.
        start = jnp.full((*a.shape[:-1], 1), first)
        both = jnp.stack([left[:, :-1], jnp.flip(right, -1)[:, :-1]])
        return jnp.concatenate([jnp.stack([start, start]), both], -1).astype(jnp.complex64)

    ones, zeros = jnp.ones_like(a), jnp.zeros_like(a)
    matrices = sides(alpha, alpha, 1.0), sides(-ones, beta, 0.0), sides(beta, -ones, 0.0), sides(zeros, zeros, 0.0)
    upper, _, lower, _ = lax.associative_scan(after, matrices, axis=-1)
    theta, before = scaled((upper[0], lower[0]))
    phi, behind = scaled((jnp.flip(upper[1], -1), jnp.flip(lower[1], -1)))
    # The determinant, row · M · column. Of each vector only the direction counts.
    determinant = phi * (alpha * theta - before) + behind * beta * theta
    g = theta * phi / determinant
    return jnp.stack([g.real, g.imag], -1)


@functools.cache
def on_jax():
    """All sets go through one launch of a loop: JAX has a stream of its own, so what is timed is the host's clock,
    and its overhead should be that of one launch, not of one for each evaluation."""
    every = jax.jit(lambda *stacks: lax.map(lambda one: diagonal(*one), stacks))

    def stack(sets):
        stacks = [torch.stack(of) for of in zip(*sets)]
        # JAX is not to read them before they are there.
        torch.cuda.synchronize()
        return [jnp.from_dlpack(of) for of in stacks]

    def through(sets):
        stacks = stack(sets)

        def run():
            every(*stacks).block_until_ready()

        return run

    result = lambda *one: numpy.asarray(every(*stack([one])))[0]
    return peers.Peer(result, FORWARD, through=through)


# cuSPARSE: gtsv2StridedBatch.


def system(a, b, c, z):
    """T - zI and a right-hand side of ones, as cuSPARSE wants them."""
    d = a - torch.view_as_complex(z)[:, None]
    padded = lambda x, *ends: torch.nn.functional.pad(x, ends).to(d.dtype)
    return padded(c, 1, 0), d, padded(b, 0, 1), torch.ones_like(d)


@functools.cache
def cusparse():
    """A solution x of (T - zI)x = 1: not the diagonal, but the standard solver at hand for such matrices. It has to
    move 40 bytes a site (three diagonals and the right-hand side in, the solution out, all complex) where bk has to
    move 20. Its rows say bk's bytes, as those of one shape must agree: only times compare."""
    # It is there, as PyTorch itself is linked to it.
    for name in ("libcusparse.so.12", "libcusparse.so.13", "libcusparse.so"):
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            pass
    else:
        return None

    def call(name, *arguments):
        # A refusal while it is recorded has to be a RuntimeError, and it is then launched call by call.
        status = getattr(library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")

    handle = ctypes.c_void_p()
    call("cusparseCreate", ctypes.byref(handle))
    sizes = {}

    def run(dl, d, du, x):
        rows, n = d.shape
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (dl, d, du, x)]
        arguments = (handle, n, *pointers, rows, n)
        if (rows, n) not in sizes:
            size = ctypes.c_size_t()
            call("cusparseCgtsv2StridedBatch_bufferSizeExt", *arguments, ctypes.byref(size))
            sizes[rows, n] = size.value
        # PyTorch's allocator hands out what it has, in a recording too, and counts it.
        buffer = torch.empty(sizes[rows, n], dtype=torch.uint8, device=d.device)
        # What is recorded is on a stream that is current only then.
        call("cusparseSetStream", handle, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        call("cusparseCgtsv2StridedBatch", *arguments, ctypes.c_void_p(buffer.data_ptr()))
        return x

    # The solution stands where the right-hand side was. Solved again and again it would leave f32, and a copy in each
    # call would be timed: it is made good between bursts.
    return peers.Peer(run, FORWARD, prepare=system, writes=True)


# Triton: one site after the other.


@triton.jit
def continued_fractions(a, b, c, z, g, rows, n, BLOCK: tl.constexpr):
    """A row is one thread's. There is no guard: a pivot of 0, which random numbers do not have, would spoil its row."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    there = row < rows
    re, im = tl.load(z), tl.load(z + 1)
    a += row * n
    b += row * (n - 1)
    c += row * (n - 1)
    g += row * n * 2
    # From the left: the pivots go where G is to stand. (x, y) is beta over the pivot before. Each site is read
    # while the one before it is worked on, as no load moves up across a store.
    x = tl.zeros([BLOCK], tl.float32)
    y = tl.zeros([BLOCK], tl.float32)
    site = tl.load(a, there)
    beta = tl.load(b, there & (n > 1), 0.0) * tl.load(c, there & (n > 1), 0.0)
    for j in range(n):
        more = there & (j + 2 < n)
        next_a = tl.load(a + j + 1, there & (j + 1 < n), 0.0)
        next_b = tl.load(b + j + 1, more, 0.0)
        next_c = tl.load(c + j + 1, more, 0.0)
        u = site - re - x
        v = -im - y
        tl.store(g + 2 * j, u, there)
        tl.store(g + 2 * j + 1, v, there)
        over = beta / (u * u + v * v)
        x = u * over
        y = -v * over
        site = next_a
        beta = next_b * next_c
    # Lanes that have no row of their own do with what others have stored.
    tl.debug_barrier()
    # From the right: (x, y) is beta over the pivot behind, and G is 1 over what it leaves of the left pivot.
    x = tl.zeros([BLOCK], tl.float32)
    y = tl.zeros([BLOCK], tl.float32)
    last = n - 1
    site = tl.load(a + last, there)
    left_u = tl.load(g + 2 * last, there)
    left_v = tl.load(g + 2 * last + 1, there)
    beta = tl.load(b + last - 1, there & (last > 0), 0.0) * tl.load(c + last - 1, there & (last > 0), 0.0)
    for i in range(n):
        j = last - i
        before = there & (j > 0)
        more = there & (j > 1)
        next_a = tl.load(a + j - 1, before, 0.0)
        next_u = tl.load(g + 2 * j - 2, before, 0.0)
        next_v = tl.load(g + 2 * j - 1, before, 0.0)
        next_b = tl.load(b + j - 2, more, 0.0)
        next_c = tl.load(c + j - 2, more, 0.0)
        u = left_u - x
        v = left_v - y
        square = u * u + v * v
        tl.store(g + 2 * j, u / square, there)
        tl.store(g + 2 * j + 1, -v / square, there)
        u = site - re - x
        v = -im - y
        over = beta / (u * u + v * v)
        x = u * over
        y = -v * over
        site, left_u, left_v = next_a, next_u, next_v
        beta = next_b * next_c


def sequential(a, b, c, z):
    rows, n = a.shape
    g = torch.empty((rows, n, 2), dtype=a.dtype, device=a.device)
    block = min(32, triton.next_power_of_2(rows))
    continued_fractions[(triton.cdiv(rows, block),)](a, b, c, z, g, rows, n, BLOCK=block, num_warps=1)
    return g


# PyTorch: dense inverses.

# Sites from which a row keeps the device busy by itself, and needs memory enough.
ONE_ROW = 1024


def dense(a, b, c, z):
    rows, n = a.shape
    if n >= ONE_ROW and rows > 1:
        return torch.cat([dense(a[i : i + 1], b[i : i + 1], c[i : i + 1], z) for i in range(rows)])
    matrix = torch.zeros((rows, n, n), dtype=torch.complex64, device=a.device)
    matrix.diagonal(0, 1, 2).copy_(a - torch.view_as_complex(z)[:, None])
    matrix.diagonal(1, 1, 2).copy_(b)
    matrix.diagonal(-1, 1, 2).copy_(c)
    return torch.view_as_real(torch.linalg.inv(matrix).diagonal(0, 1, 2)).contiguous()


def dense_fits(rows, n):
    """Beyond, one call takes many seconds: work goes with the cube of N. Counted are the matrix, its factors and its
    inverse of all rows."""
    return n <= 8192 and 3 * 8 * rows * n * n <= 100e9


checked = set()


def check(name, peer, device="cuda"):
    """Ends the run if a peer is off from dense inverses in float64. T is far enough from singular for cuSPARSE, which
    does not pivot."""
    if name in checked:
        return
    rows, n = 3, 257
    generator = torch.Generator().manual_seed(5)
    normal = lambda n, mean, deviation: torch.randn(rows, n, generator=generator) * deviation + mean
    a, b, c = normal(n, -2.0, 1.0), normal(n - 1, 0.8, 0.4), normal(n - 1, 0.8, 0.4)
    z = torch.tensor([[0.3, 2.0]])
    found = peer.run(*peer.prepare(*(t.to(device) for t in (a, b, c, z))))
    if isinstance(found, torch.Tensor):
        found = (torch.view_as_real(found) if found.is_complex() else found).cpu().numpy()
    a, b, c, z = (t.double().numpy() for t in (a, b, c, z))
    matrices = [numpy.diag(a) + numpy.diag(b, 1) + numpy.diag(c, -1) for a, b, c in zip(a, b, c)]
    inverse = numpy.linalg.inv(numpy.stack(matrices) - complex(*z[0]) * numpy.eye(n))
    # The solution for a right-hand side of ones is a sum of columns.
    wanted = inverse.sum(-1) if peer.writes else inverse.diagonal(0, 1, 2)
    wanted = numpy.stack([wanted.real, wanted.imag], -1)
    error = numpy.linalg.norm(found - wanted) / numpy.linalg.norm(wanted)
    if not error <= TOLERANCE:
        sys.exit(f"error: {name} is off by {error:.1e} of the norm")
    checked.add(name)


def of(case):
    rows, n = case.tensors[0]["shape"]
    found = {}
    if jax is not None and jax.default_backend() == "gpu":
        found["jax"] = on_jax()
    else:
        print("no JAX with CUDA")
    solver = cusparse()
    if solver is not None:
        found["cusparse gtsv"] = solver
    else:
        print("no cuSPARSE")
    found["sequential"] = peers.Peer(sequential, FORWARD)
    if dense_fits(rows, n):
        # It asks the device whether a matrix was singular, which cannot be recorded. Its calls are long enough to
        # hide their launches.
        found["dense"] = peers.Peer(dense, FORWARD, records=False)
    for name, peer in found.items():
        check(name, peer)
    return found


if __name__ == "__main__":
    # bk is f32 only.
    peers.main({"bk": of}, dtype="f32")
