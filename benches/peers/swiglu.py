"""SwiGLU (elementwise) of PyTorch (eager, torch.compile) and of Liger, as `kiln bench swiglu` times it.

    python3 benches/peers/swiglu.py --shapes large --json peers.json
"""

import peers
import torch


def eager(gate, up):
    return torch.nn.functional.silu(gate) * up


def of(case):
    found = {name: peers.Peer(f) for name, f in peers.torches(eager).items()}
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Liger

        # Its backward writes the gradients over the inputs that it kept.
        found["liger"] = peers.Peer(lambda gate, up: Liger.apply(gate, up), writes=True)
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


if __name__ == "__main__":
    peers.main({"swiglu": of})
