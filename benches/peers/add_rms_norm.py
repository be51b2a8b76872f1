"""x + residual and its RMSNorm in PyTorch (eager, torch.compile) and Liger, as `kiln bench add_rms_norm` times it.

    python3 benches/peers/add_rms_norm.py --shapes large --json peers.json
"""

import peers
import torch
from rms_norm import EPS


def eager(x, residual, weight):
    total = x + residual
    return total, torch.nn.functional.rms_norm(total, (x.shape[-1],), weight, EPS)


def of(case):
    found = {name: peers.Peer(f) for name, f in peers.torches(eager).items()}
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Liger

        def liger(x, residual, weight):
            y, total = Liger.apply(x, residual, weight, EPS, 0.0, "llama", False)
            return total, y

        found["liger"] = peers.Peer(liger)
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


if __name__ == "__main__":
    peers.main({"add_rms_norm": of})
