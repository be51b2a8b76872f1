"""The streams after a layer in hyper-connections by PyTorch (eager, torch.compile), as `kiln bench mhc_post` times them.

    python3 benches/peers/mhc_post.py --shapes large --json peers.json
"""

import peers
import torch


def eager(x, f, h_post, h_res):
    mixed = torch.einsum("bsoi,bsid->bsod", h_res, x.float())
    return (mixed + h_post[..., None] * f.float()[:, :, None]).to(x.dtype)


def of(case):
    return {name: peers.Peer(f) for name, f in peers.torches(eager).items()}


if __name__ == "__main__":
    peers.main({"mhc_post": of})
