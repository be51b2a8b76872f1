"""The streams after a layer in hyper-connections by PyTorch (eager, torch.compile), by Liger and by TileKernels, as
`kiln bench mhc_post` times them.

    python3 benches/peers/mhc_post.py --shapes large --json peers.json

TileKernels is version 1. Its weights of the streams are transposed, which is done before anything is timed.
"""

import peers
import torch


def product(x, f, h_post, h_res):
    mixed = torch.einsum("bsoi,bsid->bsod", h_res, x.float())
    return (mixed + h_post[..., None] * f.float()[:, :, None]).to(x.dtype)


# A product is a call of a library, which wants x in f32; this the compiler makes one kernel of.
def sums(x, f, h_post, h_res):
    mixed = (h_res[..., None] * x.float()[:, :, None]).sum(3)
    return (mixed + h_post[..., None] * f.float()[:, :, None]).to(x.dtype)


def of(case):
    functions = {**peers.torches(sums), "torch": product}
    found = {name: peers.Peer(f) for name, f in functions.items()}
    try:
        from liger_kernel.transformers.functional import liger_mhc_post_res

        found["liger"] = peers.Peer(liger_mhc_post_res)
    except ImportError as error:
        print(f"no Liger: {error}")
    try:
        from tile_kernels.modeling.mhc.ops import mhc_post

        def prepare(x, f, h_post, h_res):
            return f, x, h_post[..., None], h_res.mT.contiguous()

        found["TileKernels"] = peers.Peer(mhc_post, prepare=prepare)
    except ImportError as error:
        print(f"no TileKernels: {error}")
    return found


if __name__ == "__main__":
    peers.main({"mhc_post": of})
