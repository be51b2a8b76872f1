"""The Kasmina layer in PyTorch, as `kiln bench kasmina` times it: chunk by chunk, as its source has it, and the formula over
all features at once (eager, torch.compile).

    python3 benches/peers/kasmina.py --shapes small --json peers.json

A loop over hundreds of seeds is hundreds of launches; what a kernel has to be ahead of is the formula, compiled.
"""

import peers
import torch

GRAFTING, FINE_TUNING, FOSSILIZED = 3, 6, 7


def sizes(case):
    shapes = {tensor["name"]: tensor["shape"] for tensor in case.tensors}
    (_, features), (seeds,) = shapes["x"], shapes["alpha"]
    short, longer = divmod(features, seeds)
    return [short + (seed < longer) for seed in range(seeds)]


def formula(case):
    """Over all features; the map from features to seeds is made before."""
    of = torch.tensor(sizes(case), device="cuda")
    seed = torch.repeat_interleave(torch.arange(len(of), device="cuda"), of)
    feature = torch.arange(len(seed), device="cuda")

    def layer(x, alpha, blueprints, lifecycle, blueprint_id, blend):
        state, kind, a = lifecycle[seed], blend[seed], alpha[seed].float()
        w = blueprints[blueprint_id[seed], feature].float()
        w = torch.where((state == GRAFTING) | (state == FINE_TUNING), w, w.detach())
        active = (state >= GRAFTING) & (state <= FOSSILIZED)
        factor = torch.where(kind == 0, 1 + a * (w - 1), torch.where(kind == 1, w, 1.0))
        factor = torch.where(active, torch.where(kind == 3, 1 - a, factor), 1.0)
        shift = torch.where(active & (kind >= 2), a * w, 0.0)
        y = (x.float() * factor + shift).to(x.dtype)
        variances, means = torch.var_mean(x.detach().float(), 0, correction=0)
        zeros = torch.zeros(len(of), device="cuda")
        mean = zeros.index_add(0, seed, means) / of
        spread = variances + (means - mean[seed]).square()
        return y, mean, zeros.index_add(0, seed, spread) / of

    return layer


def loop(case):
    """One seed after another. The states are known on the host, those of the first set of inputs."""
    of, known = sizes(case), []

    def prepare(x, alpha, blueprints, lifecycle, blueprint_id, blend):
        if not known:
            known.extend(zip(lifecycle.tolist(), blueprint_id.tolist(), blend.tolist()))
        return x, alpha, blueprints

    def layer(x, alpha, blueprints):
        parts, means, variances = [], [], []
        begin = 0
        for seed, (size, (state, row, kind)) in enumerate(zip(of, known)):
            part = x[:, begin : begin + size]
            variance, mean = torch.var_mean(part.detach().float(), correction=0)
            means.append(mean)
            variances.append(variance)
            if GRAFTING <= state <= FOSSILIZED:
                w, a = blueprints[row, begin : begin + size].float(), alpha[seed].float()
                w = w if state in (GRAFTING, FINE_TUNING) else w.detach()
                blends = (
                    lambda p: p * (1 + a * (w - 1)),
                    lambda p: w * p,
                    lambda p: p + a * w,
                    lambda p: (1 - a) * p + a * w,
                )
                part = blends[kind](part.float()).to(x.dtype)
            parts.append(part)
            begin += size
        return torch.cat(parts, 1), torch.stack(means), torch.stack(variances)

    return layer, prepare


def of(case):
    found = {name: peers.Peer(f) for name, f in peers.torches(formula(case)).items()}
    layer, prepare = loop(case)
    found["torch loop"] = peers.Peer(layer, prepare=prepare)
    # The compiler unrolls it: minutes for many seeds.
    if len(sizes(case)) <= 200:
        found["torch.compile loop"] = peers.Peer(torch.compile(layer), prepare=prepare)
    return found


if __name__ == "__main__":
    peers.main({"kasmina": of})
