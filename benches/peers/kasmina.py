"""The Kasmina layer in PyTorch, as `kiln bench kasmina` times it: chunk by chunk, as its source has it, and the formula over
all features at once, each eager and with torch.compile.

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


def moments(part):
    variance, mean = torch.var_mean(part.detach().float(), correction=0)
    return mean, variance


def blended(part, w, a, kind):
    """The chunk of a seed that contributes, and its mean and variance."""
    p, w, a = part.float(), w.float(), a.float()
    if kind == 0:
        y = p * (1 + a * (w - 1))
    elif kind == 1:
        y = w * p
    elif kind == 2:
        y = p + a * w
    else:
        y = (1 - a) * p + a * w
    return (y.to(part.dtype), *moments(p))


def compiled(function):
    """By itself for each kind of blend and each size of chunk."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False)


def joined(chunks):
    ys, means, variances = zip(*chunks)
    return torch.cat(ys, 1), torch.stack(means), torch.stack(variances)


def loops(case):
    """One seed after another, eager and each chunk compiled. What seeds are is known on the host, from the first set of
    inputs."""
    of, known = sizes(case), []

    def prepare(x, alpha, blueprints, lifecycle, blueprint_id, blend):
        if not known:
            known.extend(zip(lifecycle.tolist(), blueprint_id.tolist(), blend.tolist()))
        return x, alpha, blueprints

    def of_chunks(seen, made):
        def layer(x, alpha, blueprints):
            found = []
            parts = zip(x.split(of, 1), blueprints.split(of, 1), alpha.unbind(), known)
            for part, rows, a, (state, row, kind) in parts:
                if GRAFTING <= state <= FOSSILIZED:
                    w = rows[row] if state in (GRAFTING, FINE_TUNING) else rows[row].detach()
                    found.append(made(part, w, a, kind))
                else:
                    found.append((part, *seen(part)))
            return joined(found)

        return layer

    return {
        "torch loop": in_loop(of_chunks(moments, blended), prepare, of),
        "torch.compile loop": in_loop(of_chunks(compiled(moments), compiled(blended)), prepare, of),
    }


def in_loop(layer, prepare, sizes):
    """Recorded, a call has thousands of launches: not too many calls."""
    return peers.Peer(layer, prepare=prepare, calls=max(1, 4000 // len(sizes)))


def of(case):
    found = {name: peers.Peer(f) for name, f in peers.torches(formula(case)).items()}
    return found | loops(case)


if __name__ == "__main__":
    peers.main({"kasmina": of})
