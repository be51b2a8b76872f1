"""The SwiGLU MLP of PyTorch (eager, torch.compile) and with Liger's gate, as `kiln bench swiglu_mlp` times it.

    python3 benches/peers/swiglu_mlp.py --shapes train --json peers.json
"""

import peers
import torch


def eager(x, gate, up, down):
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


def of(case):
    found = {name: peers.Peer(f) for name, f in peers.torches(eager).items()}
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Liger

        # Its backward writes over products that it kept, so a graph can be walked only once.
        liger = lambda x, gate, up, down: Liger.apply(x @ gate, x @ up) @ down
        found["liger"] = peers.Peer(liger, passes=("forward", "both"))
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


if __name__ == "__main__":
    peers.main({"swiglu_mlp": of})
