"""The streams after a layer and what precedes the next, in hyper-connections, by PyTorch (eager, torch.compile) and by
Liger, as `kiln bench mhc_post_pre` times them.

    python3 benches/peers/mhc_post_pre.py --shapes large --json peers.json

Each makes the streams as mhc_post.py has them, and of these what mhc_pre.py has: PyTorch's products in TF32 or, where
the name says so, in bf16; Liger's φ in bf16.
"""

import mhc_post
import mhc_pre
import peers
import torch


def of(case):
    torch.backends.cuda.matmul.allow_tf32 = True
    repeats = int(case.shape.split("sinkhorn=")[1])

    def joined(halves):
        read = mhc_pre.eager(repeats, halves)

        def run(x, f, h_post, h_res, phi, alpha, bias, gamma):
            y = mhc_post.sums(x, f, h_post, h_res)
            return y, *read(y, phi, alpha, bias, gamma)

        return run

    functions = {**peers.torches(joined(False)), **peers.torches(joined(True), " bf16")}
    found = {name: peers.Peer(f) for name, f in functions.items()}
    try:
        from liger_kernel.transformers.functional import liger_mhc_post_res

        read, prepare = mhc_pre.liger(repeats)

        def run(x, f, h_post, h_res, *weights):
            y = liger_mhc_post_res(x, f, h_post, h_res)
            return y, *read(y, *weights)

        # `prepare` makes the weights as Liger wants them beside streams of the type of x.
        found["liger"] = peers.Peer(
            run, prepare=lambda x, f, h_post, h_res, *weights: (x, f, h_post, h_res, *prepare(x, *weights)[1:])
        )
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


if __name__ == "__main__":
    peers.main({"mhc_post_pre": of})
