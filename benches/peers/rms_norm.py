"""RMSNorm of PyTorch (eager, torch.compile) and of Liger, as `kiln bench rms_norm` times it.

    python3 benches/peers/rms_norm.py --shapes large --json peers.json
"""

import peers
import torch

EPS = 1e-5


def eager(x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def of(case):
    found = {name: peers.Peer(f) for name, f in peers.torches(eager).items()}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Liger

        found["liger"] = peers.Peer(lambda x, w: Liger.apply(x, w, EPS, 0.0, "llama", False))
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


if __name__ == "__main__":
    peers.main({"rms_norm": of})
