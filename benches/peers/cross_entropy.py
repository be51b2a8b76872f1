"""Cross-entropy of PyTorch (eager, torch.compile) and of Liger, as `kiln bench cross_entropy` times it.

    python3 benches/peers/cross_entropy.py --shapes large --json peers.json
"""

import peers
import torch


def eager(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets)


def wide(logits, targets):
    return torch.nn.functional.cross_entropy(logits.float(), targets)


def told(count, function):
    """Liger asks the device how many targets count and whether they are classes, which waits for the device and cannot
    be recorded. Here all of them count and are, and it is told so."""
    answers = {"item": lambda _: count, "__bool__": lambda _: True}

    def run(*inputs):
        asks = {name: getattr(torch.Tensor, name) for name in answers}
        try:
            for name, answer in answers.items():
                setattr(torch.Tensor, name, answer)
            return function(*inputs)
        finally:
            for name, ask in asks.items():
                setattr(torch.Tensor, name, ask)

    return run


def of(case):
    rows = case.tensors[0]["shape"][0]
    functions = {**peers.torches(eager), **peers.torches(wide, " .float()")}
    found = {name: peers.Peer(f) for name, f in functions.items()}
    try:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as Liger

        loss = told(rows, lambda logits, targets: Liger.apply(logits, targets, None)[0])
        # It makes the gradient in its forward, over the logits; for a cotangent of 1 its backward does nothing
        # but ask the device whether it is 1.
        found["liger"] = peers.Peer(
            loss,
            passes=("forward", "both"),
            own={"both": lambda inputs, _: loss(*inputs)},
            writes=True,
        )
    except ImportError as error:
        print(f"no Liger: {error}")
    return found


if __name__ == "__main__":
    peers.main({"cross_entropy": of})
