"""The streams after a layer in hyper-connections by PyTorch (eager, torch.compile) and by Liger, as `kiln bench mhc_post` times them.

    python3 benches/peers/mhc_post.py --shapes large --json peers.json
"""

import peers
import torch


def eager(x, f, h_post, h_res):
    mixed = torch.einsum("bsoi,bsid->bsod", h_res, x.float())
    return (mixed + h_post[..., None] * f.float()[:, :, None]).to(x.dtype)


def of(case):
    found = {name: peers.Peer(f) for name, f in peers.torches(eager).items()}
    try:
        from liger_kernel.transformers.functional import liger_mhc_post_res

        found["liger"] = peers.Peer(liger_mhc_post_res)
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


if __name__ == "__main__":
    peers.main({"mhc_post": of})
