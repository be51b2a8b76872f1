"""RoPE (half layout) of PyTorch (eager, torch.compile) and of Liger, as `kiln bench rope` times it.

    python3 benches/peers/rope.py --shapes large --json peers.json
"""

import peers
import torch


def table(length, width):
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float().cuda(), angles.sin().float().cuda()


def eager(x, cos, sin):
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).to(x.dtype)


def of(case):
    _, heads, length, width = case.tensors[0]["shape"]
    cos, sin = table(length, width)
    found = {
        name: peers.Peer(lambda x, f=f: f(x, cos, sin)) for name, f in peers.torches(eager).items()
    }
    try:
        from liger_kernel.ops import rope

        # Liger turns queries and keys in place, with the opposite sign, in [B, T, H, D] memory and
        # from a table that has each angle twice. It gets the same heads in two tensors, laid
        # as it likes them, and is called without autograd, which would refuse to write over leaves. Its
        # backward, which is the same kernel with another sign, turns the same tensors again.
        keys = max(1, heads // 5)
        laid = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
        angles = [torch.cat((a, a), dim=-1)[None] for a in (cos, sin)]
        forward = lambda qk, _: rope.rope_forward(*(t.detach() for t in qk), *angles)
        backward = lambda qk, _: rope.rope_backward(*(t.detach() for t in qk), *angles)
        both = lambda qk, _: (forward(qk, _), backward(qk, _))
        found["liger"] = peers.Peer(
            None,
            own={"forward": forward, "backward": backward, "both": both},
            prepare=lambda x: (laid(x[:, : heads - keys]), laid(x[:, heads - keys :])),
            writes=True,
        )
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


if __name__ == "__main__":
    peers.main({"rope": of})
