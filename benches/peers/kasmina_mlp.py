"""The Kasmina layer with MLPs in PyTorch, as `kiln bench kasmina_mlp` times it: chunk by chunk, as its source has it (eager,
torch.compile), and the chunks that an MLP is blended into in batched products (bmm, eager and torch.compile, and
_grouped_mm), beside the formula of rows over all features.

    python3 benches/peers/kasmina_mlp.py --shapes large --dtype bf16 --json peers.json

Which seeds blend an MLP PyTorch is told: it makes no products for others.
"""

import kasmina
import peers
import torch
import torch.nn.functional as F

MLP = 4


def parts(mlp):
    """W1, b1, W2 transposed and b2 of MLPs, or of one."""
    widest = mlp.shape[-1]
    rows = lambda begin, end: mlp[..., begin * widest : end * widest, :]
    biases = mlp[..., 4 * widest :, :]
    return rows(0, 2), biases[..., :2, :].flatten(-2), rows(2, 4), biases[..., 2, :]


class Known:
    """What the host knows of the seeds, those of the first set of inputs."""

    def __init__(self, case):
        self.sizes, self.seeds = kasmina.sizes(case), None

    def prepare(self, *inputs):
        x, alpha, blueprints, lifecycle, blueprint_id, blend, mlps = inputs
        if self.seeds is None:
            self.seeds = list(zip(lifecycle.tolist(), blueprint_id.tolist(), blend.tolist()))
            active = [i for i, seed in enumerate(self.seeds) if self.active(seed)]
            trains = [self.trains(self.seeds[i]) for i in active]
            self.at = torch.tensor(active, device="cuda")
            self.ids = torch.tensor([self.seeds[i][1] for i in active], device="cuda")
            self.frozen = torch.tensor([not t for t in trains], device="cuda")
        return inputs

    @staticmethod
    def active(seed):
        return kasmina.GRAFTING <= seed[0] <= kasmina.FOSSILIZED and seed[2] == MLP

    @staticmethod
    def trains(seed):
        return seed[0] in (kasmina.GRAFTING, kasmina.FINE_TUNING)


def of_rows(case):
    formula = kasmina.formula(case)

    def layer(x, alpha, blueprints, lifecycle, blueprint_id, blend):
        lifecycle = torch.where(blend == MLP, 0, lifecycle)
        return formula(x, alpha, blueprints, lifecycle, blueprint_id, blend)

    return layer


def batched(case, known, product):
    """All chunks of one size, by a batched product with a bias."""
    rows = of_rows(case)

    def layer(x, alpha, blueprints, lifecycle, blueprint_id, blend, mlps):
        y, mean, variance = rows(x, alpha, blueprints, lifecycle, blueprint_id, blend)
        count, size = x.shape[0], known.sizes[0]
        chunks = x.view(count, len(known.sizes), size)[:, known.at].transpose(0, 1)
        own = mlps[known.ids]
        own = torch.where(known.frozen[:, None, None], own.detach(), own)
        w1, b1, w2, b2 = parts(own)
        hidden = F.relu(product(chunks, w1.transpose(1, 2)) + b1[:, None])
        out = product(hidden, w2) + b2[:, None]
        a = alpha[known.at].float()[:, None, None]
        blended = ((1 - a) * chunks + a * out).to(x.dtype).transpose(0, 1)
        y = y.view(count, len(known.sizes), size).index_copy(1, known.at, blended)
        return y.view(x.shape), mean, variance

    return layer


def blended(part, mlp, a):
    """The chunk of a seed that blends an MLP, and its mean and variance."""
    w1, b1, w2, b2 = parts(mlp)
    hidden = F.relu(F.linear(part, w1, b1))
    a = a.float()
    y = (1 - a) * part + a * (hidden @ w2 + b2)
    return (y.to(part.dtype), *kasmina.moments(part))


def loop(known, seen, of_row, of_mlp):
    """One seed after another."""

    def layer(x, alpha, blueprints, lifecycle, blueprint_id, blend, mlps):
        found = []
        chunks = zip(x.split(known.sizes, 1), blueprints.split(known.sizes, 1), alpha.unbind(), known.seeds)
        every = mlps.unbind()
        for part, rows, a, (state, row, kind) in chunks:
            if not kasmina.GRAFTING <= state <= kasmina.FOSSILIZED:
                found.append((part, *seen(part)))
                continue
            own = every[row] if kind == MLP else rows[row]
            own = own if known.trains((state, row, kind)) else own.detach()
            found.append(of_mlp(part, own, a) if kind == MLP else of_row(part, own, a, kind))
        return kasmina.joined(found)

    return layer


def of(case):
    known = Known(case)
    peer = lambda f: peers.Peer(f, prepare=known.prepare)
    found = {}
    # Chunks of one size, aligned as _grouped_mm wants them.
    if len(set(known.sizes)) == 1:
        bmm = peers.torches(batched(case, known, torch.bmm), " bmm")
        found.update({name: peer(f) for name, f in bmm.items()})
        if known.sizes[0] % 8 == 0:
            grouped = batched(case, known, lambda a, b: torch._grouped_mm(a.contiguous(), b))
            found["torch _grouped_mm"] = peer(grouped)
    of_chunk = kasmina.moments, kasmina.blended, blended
    loops = {
        "torch loop": loop(known, *of_chunk),
        "torch.compile loop": loop(known, *map(kasmina.compiled, of_chunk)),
    }
    return found | {name: kasmina.in_loop(f, known.prepare, known.sizes) for name, f in loops.items()}


if __name__ == "__main__":
    peers.main({"kasmina_mlp": of})
