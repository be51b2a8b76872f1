"""Rows of a table of PyTorch (eager, torch.compile), as `kiln bench embedding` times them.

    python3 benches/peers/embedding.py --shapes train --json peers.json

PyTorch's gradient of a table adds by atomics, or after a sort, as it decides; torch.compile's does by atomics: two runs may
differ.
"""

import peers
import torch


def eager(weight, tokens):
    return torch.nn.functional.embedding(tokens, weight)


def of(case):
    return {name: peers.Peer(f) for name, f in peers.torches(eager).items()}


if __name__ == "__main__":
    peers.main({"embedding": of})
