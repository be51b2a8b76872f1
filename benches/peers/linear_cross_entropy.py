"""Linear cross-entropy of PyTorch (eager, torch.compile) and of Liger, as `kiln bench linear_cross_entropy`
times it: the forward, and forward and backward together.

    python3 benches/peers/linear_cross_entropy.py --shapes large --json peers.json
"""

import peers
import torch
from cross_entropy import told


def eager(x, weight, targets):
    return torch.nn.functional.cross_entropy(x @ weight, targets)


def wide(x, weight, targets):
    return torch.nn.functional.cross_entropy((x @ weight).float(), targets)


def of(case):
    rows = case.tensors[0]["shape"][0]
    functions = {**peers.torches(eager), **peers.torches(wide, " .float()")}
    found = {name: peers.Peer(f) for name, f in functions.items()}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (
            LigerFusedLinearCrossEntropyFunction as Liger,
        )

        loss = told(rows, lambda x, w, t: Liger.apply(x, w, t)[0])
        # It makes the gradients in its forward; for a cotangent of 1 its backward does nothing but ask the
        # device whether it is 1. Its weight is [V, D].
        found["liger"] = peers.Peer(
            loss,
            passes=("forward", "both"),
            own={"both": lambda inputs, _: loss(*inputs)},
            prepare=lambda x, w, t: (x, w.T.contiguous(), t),
        )
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


if __name__ == "__main__":
    peers.main({"linear_cross_entropy": of})
