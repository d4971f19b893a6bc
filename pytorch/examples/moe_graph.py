#!/usr/bin/env python3
"""Runs expert layers in a CUDA graph. Only the device knows how many rows the experts get,
so buffers have room for twice as many. rt.stash keeps only the live rows of what autograd
saves; a step with more rows than room is run again. On a CPU the same step runs without a
graph.

    python3 pytorch/examples/moe_graph.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import stowage


class Expert(nn.Module):
    """One expert of each layer, on the rows of a rank."""

    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x, rows, rt):
        x = rt.stash(x, rows, name="expert_fc1")
        h = rt.stash(self.up(x), rows, name="moe_act")
        return x + self.down(F.silu(h))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--rows", type=int, default=512, help="rows on average; there is room for twice as many")
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    room, width = 2 * args.rows, 128
    layers = nn.ModuleList(Expert(width, 256) for _ in range(4)).to(device)
    optimizer = torch.optim.SGD(layers.parameters(), 1e-2)
    rt = stowage.Runtime(policy={"expert_fc1": "stash", "moe_act": "stash"}, least=0)
    rt.attach(layers, {"*": "layers"})

    def forward_backward(x, rows):
        live = (torch.arange(room, device=device) < rows)[:, None]
        for layer in layers:
            x = layer(x, rows, rt)
        loss = torch.where(live, x, x.new_zeros(())).square().sum() / (rows * width)
        loss.backward()
        return loss.detach()

    def batch(n):
        x = torch.zeros(room, width, device=device)
        x[:n] = torch.randn(n, width, device=device)
        return x, torch.tensor(n, device=device)

    step = rt.graph(forward_backward, *batch(args.rows))
    for i in range(args.steps):
        n = int(args.rows * (0.7 + 0.6 * torch.rand(()).item()))  # the host of this example knows; the step does not
        optimizer.zero_grad(set_to_none=False)
        loss = step(*batch(n))
        optimizer.step()
        print(f"step {i}: {n} of {room} rows live, loss {loss.item():.4f}")
    print(rt.report())
    rt.close()


if __name__ == "__main__":
    main()
