#!/usr/bin/env python3
"""Says what a training step of a decoder with 1.3 billion parameters would hold on a GPU, on a
machine that has none. The model is on the meta device and takes no memory.

    python3 pytorch/examples/forecast.py
    python3 pytorch/examples/forecast.py --gpu b200 --batch 16
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import stowage


def attention(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):  # PyTorch 2
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(mask, float("-inf")).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, width, heads, **at):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width, **at), nn.Linear(width, width, **at)

    def forward(self, x):
        batch, rows, width = x.shape
        q, k, v = (t.view(batch, rows, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(attention(q, k, v).transpose(1, 2).reshape(batch, rows, width))


class Layer(nn.Module):
    def __init__(self, width, heads, **at):
        super().__init__()
        self.norm, self.attention, self.mlp_norm = nn.LayerNorm(width, **at), Attention(width, heads, **at), nn.LayerNorm(width, **at)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, **at), nn.GELU(), nn.Linear(4 * width, width, **at))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self, width=2048, layers=24, heads=16, words=32000, **at):
        super().__init__()
        self.embed, self.layers = nn.Embedding(words, width, **at), nn.ModuleList(Layer(width, heads, **at) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, **at), nn.Linear(width, words, bias=False, **at)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpu", default="h100")
    p.add_argument("--batch", type=int, default=8, help="sequences of 1024 tokens (default 8)")
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--budget", help="such as 60GiB (default all that PyTorch can have)")
    args = p.parse_args()
    tokens = torch.empty(args.batch, 1025, dtype=torch.long, device="meta")
    print(stowage.plan(Decoder(layers=args.layers, device="meta"), tokens, gpu=args.gpu, budget=args.budget, autocast=torch.bfloat16))


if __name__ == "__main__":
    main()
