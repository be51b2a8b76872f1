"""Causal attention of PyTorch, on cuDNN and on FlashAttention-2, and of the package
flash-attn-4 where it is installed (on Hopper FlashAttention-3), as `kiln bench attention` times it; with
`--shapes thin` that of one query over many keys.

    python3 benches/peers/attention.py --shapes large --json peers.json
"""

import peers
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}


def attend(q, k, v, _documents):
    # A single query sees all keys; PyTorch would line it up with the first.
    return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1])


def on(backend):
    def run(*inputs):
        with sdpa_kernel(backend):
            return attend(*inputs)

    return peers.Peer(run)


def of(case):
    if case.dtype == "f32":
        return {"torch": peers.Peer(attend)}
    found = {name: on(backend) for name, backend in BACKENDS.items()}
    try:
        from flash_attn.cute import flash_attn_func

        # It wants [B, T, H, D] in memory.
        turned = lambda x: x.transpose(1, 2).contiguous()
        found["flash-attn-4"] = peers.Peer(
            lambda q, k, v, _: flash_attn_func(q, k, v, causal=True)[0],
            prepare=lambda q, k, v, ends: (turned(q), turned(k), turned(v), ends),
            prepare_cotangents=lambda dy: (turned(dy),),
        )
    except ImportError as error:
        print(f"no flash-attn-4: {error}")
    return found


if __name__ == "__main__":
    peers.main({"attention": of})
