"""Training of the decoder that `kiln train` trains, in PyTorch with torch.compile: tokens per second.

    python3 benches/peers/train.py                      # 124M, 32 windows of 1024 tokens
    python3 benches/peers/train.py --layers 6 --width 384 --heads 6 --context 256 --batch 64 --vocabulary 65

The same architecture and the same step: pre-norm blocks of RMSNorm, RoPE, causal attention and SwiGLU, an embedding
that is the output projection too, activations in bf16, parameters and moments in f32, cross-entropy, clipping by
the global norm, AdamW (fused). The tokens are random: a step does the same with them.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, mlp_width):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x, cos, sin):
        b, t, width = x.shape
        heads = lambda y: y.view(b, t, self.heads, width // self.heads).transpose(1, 2)
        q, k, v = map(heads, self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def turn(x, cos, sin):
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        mlp_width = -(-8 * args.width // 3 // 64) * 64
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads, mlp_width) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.width, eps=1e-5)
        size = args.width // args.heads
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(args.context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.embedding(tokens).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main():
    parser = argparse.ArgumentParser(description="Times training in PyTorch with torch.compile.")
    for name, default in [("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("batch", 32)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--mode", default="default", help="of torch.compile; `max-autotune-no-cudagraphs` for one")
    args = parser.parse_args()
    torch.manual_seed(1)
    # Sums of gradients in f32 are made of bf16 products.
    torch.set_float32_matmul_precision("high")
    model = Decoder(args).cuda()
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    compiled = torch.compile(model, mode=args.mode, dynamic=False)
    shape = (args.batch, args.context)
    data = [torch.randint(args.vocabulary, (2, *shape), device="cuda") for _ in range(4)]

    def step(turn):
        tokens, targets = data[turn % len(data)]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for turn in range(10):
        step(turn)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for turn in range(args.steps):
        loss = step(turn)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / args.steps
    count = sum(p.numel() for p in model.parameters())
    print(
        json.dumps(
            {
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "mode": args.mode,
                "parameters": count,
                "tokens_per_second": round(args.batch * args.context / seconds),
                "step_ms": round(1e3 * seconds, 2),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                "loss": round(loss.item(), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
