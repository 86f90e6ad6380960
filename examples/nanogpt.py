"""A plain loop as small language models are trained in: decay groups, bf16 autocast, accumulation, clipping, a schedule
of one's own, a checkpoint. `python examples/nanogpt.py state_25`."""

import io
import math
import os
import sys

if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]  # scripts beside this one have the names of libraries
import torch
from torch import Tensor, nn

from baoc import BaocOptimizer  # line 1

VOCAB, WIDTH, LENGTH = 64, 64, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.c_proj(mixed)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids[:, :-1]) + self.wpe.weight[: ids.shape[1] - 1]
        for block in self.h:
            x = block(x)
        return nn.functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), ids[:, 1:].flatten())


def main(budget: str = "state_25", steps: int = 60) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT().to(device)
    for matrix in (p for p in model.parameters() if p.ndim >= 2):
        nn.init.normal_(matrix, std=0.02)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = BaocOptimizer(groups, model=model, budget=budget, lr=3e-3, betas=(0.9, 0.95))  # line 2
    text = (torch.arange(4096, device=device) ** 2 // 3) % VOCAB
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 10) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for _ in range(2):
            starts = torch.randint(0, 4096 - LENGTH - 1, (8, 1), device=device)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(text[starts + torch.arange(LENGTH, device=device)]) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == steps // 2:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file := io.BytesIO())
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    print(f"loss {2 * loss.item():.4f}\n{optimizer.summary()}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
