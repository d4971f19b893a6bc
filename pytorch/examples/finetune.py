#!/usr/bin/env python3
"""Trains a small decoder under a budget; lines that use Stowage are numbered. It runs on a
CPU as on a GPU, without any download, and compares its losses with those of a large budget.

    python3 pytorch/examples/finetune.py
    python3 pytorch/examples/finetune.py --budget 36MiB --steps 50
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import stowage  # 1


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        h = self.input_layernorm(x)
        x = x + self.self_attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, width=128, layers=8):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, tokens):
        n = tokens.shape[1] - 1
        mask = torch.full((n, n), float("-inf"), device=tokens.device).triu(1)
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def train(args, device, budget):
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    text = torch.tensor(list(open(__file__, "rb").read()), device=device)
    rt = stowage.Runtime(budget=budget, least="4KiB")  # 2
    rt.attach(model, optimizer=optimizer)  # 3: it finds the blocks itself; on a GPU the optimiser need not be given
    losses = []
    for step in range(args.steps):
        at = torch.randint(0, len(text) - 65, (8,)).tolist()
        batch = torch.stack([text[i : i + 65] for i in at])
        with rt.step():  # 4
            loss = model(batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    print(rt.report(), end="\n\n")
    rt.close()
    return losses


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--budget", default="44MiB", help="for weights, gradients, optimiser and saved tensors together (default 44MiB, for a CPU; all of them take about 59MiB)")
    p.add_argument("--steps", type=int, default=20)
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    everything, budget = train(args, device, "1TiB"), train(args, device, args.budget)
    print(f"loss {budget[0]:.4f} to {budget[-1]:.4f}; with all memory {everything[-1]:.4f}: {'the same numbers' if budget == everything else 'DIFFERENT'}")
    raise SystemExit(budget != everything)


if __name__ == "__main__":
    main()
