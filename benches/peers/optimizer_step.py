"""What stands between the last gradient and the next forward, in PyTorch: the global norm, clipping and a step of the
optimizer, over the parameters that `cargo run --release --example optimizer_step -- cuda` has, in f32: the median of 9
bursts of 10 steps, on its own and behind other work, as there.

    python3 benches/peers/optimizer_step.py

`adamw` is torch's fused one. `muon` is `torch.optim.Muon` (PyTorch 2.9 or newer) for the matrices of the blocks, one after
the other, and the fused AdamW for the rest. Both iterate in bf16. `clip_grad_norm_` writes the gradients: 40 bytes an
element move in torch's AdamW, 32 in Kiln's.
"""

import argparse
import json
import statistics
import time

import torch

WIDTH = 768
# Work before a burst, passes over so many numbers: the host is soon done with it.
BUSY = 1 << 28
PASSES = 400


def parameters(layers, vocabulary):
    mlp = -(-8 * WIDTH // 3 // 64) * 64
    of_block = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * mlp), (mlp, WIDTH), (WIDTH,), (WIDTH,)]
    shapes = [(vocabulary, WIDTH), *of_block * layers, (WIDTH,)]
    made = [torch.nn.Parameter(0.02 * torch.randn(shape, device="cuda")) for shape in shapes]
    for p in made:
        p.grad = 1e-3 * torch.randn_like(p)
    return made


def optimizers(kind, all):
    embedding, rest = all[0], all[1:]
    matrices = [p for p in rest if p.dim() == 2]
    vectors = [p for p in rest if p.dim() == 1]
    plain = {"params": vectors, "weight_decay": 0.0}
    options = dict(lr=6e-4, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    if kind == "adamw":
        return [torch.optim.AdamW([{"params": [embedding, *matrices]}, plain], **options)]
    muon = torch.optim.Muon(matrices, lr=6e-4, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW([{"params": [embedding]}, plain], **options)]


def spread(times):
    """Middle, least and most."""
    return [round(time, 3) for time in (statistics.median(times), min(times), max(times))]


def main():
    parser = argparse.ArgumentParser(description="Times the norm of gradients and the optimizer's step in PyTorch.")
    parser.add_argument("kinds", nargs="*", default=["adamw", "muon"], help="adamw, muon")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--bursts", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    for kind in args.kinds:
        all = parameters(args.layers, args.vocabulary)
        of = optimizers(kind, all)
        # Clipping scales gradients where they are: from the second step of a burst on their norm is 1, the work the same.
        whole = [p.grad.clone() for p in all]
        numbers = torch.zeros(BUSY, device="cuda")

        def burst(steps, passes):
            torch._foreach_copy_([p.grad for p in all], whole)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(passes):
                numbers.sum()
            for _ in range(steps):
                torch.nn.utils.clip_grad_norm_(all, 1.0)
                for one in of:
                    one.step()
            torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - begun)

        burst(1, PASSES)
        alone, behind = [], []
        for _ in range(args.bursts):
            alone.append(burst(args.steps, 0) / args.steps)
            work = burst(0, PASSES)
            behind.append((burst(args.steps, PASSES) - work) / args.steps)
        print(
            json.dumps(
                {
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "optimizer": kind,
                    "parameters": sum(p.numel() for p in all),
                    "alone_ms": spread(alone),
                    "behind_other_work_ms": spread(behind),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
