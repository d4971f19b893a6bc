#!/usr/bin/env python3
"""A whole Mamba-2 layer of Stowage beside PyTorch's and its authors' on one GPU, in one call.

    CGO_ENABLED=0 go test -c -o nn.test ./internal/kernels/nn
    python3 pytorch/bench/torch_mamba.py --nn ./nn.test
    python3 pytorch/bench/torch_mamba.py --nn ./nn.test --authors ~/mamba --only d2048-4k --json mamba.json

A layer is the input projection, the causal convolution with SiLU, the scan, the gated norm
and the output projection, in bf16, forward and backward, for 16,384 tokens. Three of them are
measured, with the same shapes and random normal data:

  compiled  the scan as products over chunks ("ssd minimal" of the authors, with heads of a
            group in one product), everything under torch.compile
  authors   the Triton kernels of state-spaces/mamba for the scan and the gated norm, autotuned;
            its convolution is causal_conv1d where that is installed, and else compiled. --authors
            names a folder that has mamba_ssm in it. It needs einops and packaging.
  Stowage   BenchmarkMambaLayerOnGPU of --nn, which issues the launches of the trainer's layer

Before each run 256 MiB are written several times, so that the L2 cache is cold and launches are
queued while the GPU is busy: gaps between launches of Python are not measured. A time is the
median of 10, between two CUDA events. The backward pass of Stowage computes the outputs of
the convolution and the norm and the scan's states again, as its trainer does, and adds gradients
of weights to fp32 sums, which reads and writes more than PyTorch, whose gradients are bf16 and
added to nothing.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import types

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENS, TAPS, RUNS, AHEAD = 16384, 4, 10, 24
# Hidden columns, columns of a head, groups, state, and the length of a sequence.
# mambabench_test.go has the same.
SHAPES = {
    "d2048-4k": (2048, 64, 1, 128, 4096),
    "d2048-16k": (2048, 64, 1, 128, 16384),
    "d4096-4k": (4096, 64, 1, 128, 4096),
    "d4096-8k-groups8": (4096, 64, 8, 128, 8192),
    "d4096-16k": (4096, 64, 1, 128, 16384),
    "d2048-4k-head128": (2048, 128, 1, 128, 4096),
    "d2048-4k-state256": (2048, 64, 1, 256, 4096),
}


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nn", help="the test binary of internal/kernels/nn; without it only PyTorch is measured")
    p.add_argument("--authors", metavar="FOLDER", help="a folder with mamba_ssm")
    p.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE", help="only these: " + ", ".join(SHAPES))
    p.add_argument("--kinds", nargs="+", choices=["compiled", "authors"], default=["compiled", "authors"], help="what to measure beside Stowage")
    p.add_argument("--conv", choices=["shifted", "conv1d"], default="shifted", help="the compiled convolution: a sum of shifted products, or F.conv1d")
    p.add_argument("--chunk", type=int, default=128, help="tokens of a chunk of the compiled scan (default 128)")
    p.add_argument("--mode", default="default", help="the mode of torch.compile")
    p.add_argument("--json", metavar="FILE", help="write all figures")
    return p.parse_args()


ARGS = parse()
try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit("torch_mamba: PyTorch is not installed; try `pip install torch`")
if not torch.cuda.is_available():
    sys.exit("torch_mamba: PyTorch finds no CUDA GPU")

FLUSH = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
RESULTS = {}  # by name: microseconds of each kind


def say(text):
    print(text, flush=True)


def authors():
    """The authors' scan, gated norm and convolution. The package itself is not imported,
    because it wants kernels in CUDA that the scan does not need."""
    sys.path.insert(0, ARGS.authors)
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.utils"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(pathlib.Path(ARGS.authors, *name.split(".")))]
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        causal_conv1d_fn = None
    return mamba_chunk_scan_combined, rmsnorm_fn, causal_conv1d_fn


class Layer:
    def __init__(self, hidden, head, groups, state, seq):
        self.inner, self.head, self.groups, self.state, self.seq = 2 * hidden, head, groups, state, seq
        self.heads, self.mixed = self.inner // head, self.inner + 2 * groups * state
        make = lambda *shape, scale=1.0: (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16).requires_grad_()
        width = self.inner + self.mixed + self.heads
        self.x = make(TOKENS // seq, seq, hidden)
        self.weights = [
            make(width, hidden, scale=hidden**-0.5), make(self.mixed, TAPS, scale=0.5), make(self.mixed),
            make(self.heads), make(self.heads), make(self.heads), make(self.inner), make(hidden, self.inner, scale=self.inner**-0.5),
        ]
        self.dy = torch.randn_like(self.x)

    def convolve(self, xbc, w, b):
        if ARGS.conv == "conv1d":
            return F.silu(F.conv1d(xbc.transpose(1, 2), w[:, None], b, padding=TAPS - 1, groups=self.mixed)[..., : self.seq].transpose(1, 2))
        padded = F.pad(xbc, (0, 0, TAPS - 1, 0)).float()
        return F.silu(sum(padded[:, k : k + self.seq] * w[:, k] for k in range(TAPS)) + b).to(xbc.dtype)

    def norm(self, y, z, w):
        v = y.float() * F.silu(z.float())
        parts = v.unflatten(-1, (self.groups, -1))
        return ((parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2) * w).to(y.dtype)

    def scan(self, xbc, dt, a_log, d, bias):
        """Products over chunks. Decays and their sums are fp32, products bf16."""
        batch, q, of = xbc.shape[0], ARGS.chunk, self.heads // self.groups
        x, b, c = xbc.split([self.inner, self.groups * self.state, self.groups * self.state], -1)
        x = x.reshape(batch, -1, q, self.heads, self.head)
        b, c = (t.reshape(batch, -1, q, self.groups, self.state).transpose(2, 3) for t in (b, c))  # [batch, chunk, group, token, state]
        dt = F.softplus(dt.float() + bias.float()).reshape(batch, -1, q, self.heads).transpose(2, 3)  # [batch, chunk, head, token]
        sums = (dt * -torch.exp(a_log.float())[:, None]).cumsum(-1)
        low = torch.ones(q, q, device="cuda", dtype=torch.bool).tril()
        decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(~low, float("-inf")).exp() * dt[..., None, :]
        cb = (c @ b.transpose(-1, -2))[:, :, :, None]  # for all heads of a group
        inside = (cb * decay.unflatten(2, (self.groups, of))).flatten(2, 3).to(x.dtype) @ x.transpose(2, 3)
        # What a chunk adds to the state, and the state that enters each chunk.
        weighted = (x * ((sums[..., -1:] - sums).exp() * dt).transpose(2, 3)[..., None]).to(x.dtype)
        grouped = lambda t: t.unflatten(3, (self.groups, of)).permute(0, 1, 3, 4, 5, 2).flatten(3, 4)  # [batch, chunk, group, heads x columns, token]
        added = (grouped(weighted) @ b).reshape(batch, x.shape[1], self.heads, -1).transpose(1, 2)  # [batch, head, chunk, columns x state]
        whole = sums[..., -1].transpose(1, 2).cumsum(-1)  # [batch, head, chunk]
        before = torch.ones(x.shape[1], x.shape[1], device="cuda", dtype=torch.bool).tril(-1)
        between = (F.pad(whole, (1, -1))[..., :, None] - whole[..., None, :]).masked_fill(~before, float("-inf")).exp()
        enters = (between.to(x.dtype) @ added).transpose(1, 2).reshape(batch, x.shape[1], self.groups, of * self.head, self.state)
        outside = (c @ enters.transpose(-1, -2)).unflatten(-1, (of, self.head)).permute(0, 1, 2, 4, 3, 5).flatten(2, 3)
        y = inside + outside * sums.exp()[..., None] + x.transpose(2, 3) * d[:, None, None]
        return y.to(x.dtype).transpose(2, 3).reshape(batch, self.seq, self.inner)

    def compiled(self, x, win, taps, offset, a_log, d, bias, gate, wout):
        z, xbc, dt = F.linear(x, win).split([self.inner, self.mixed, self.heads], -1)
        return F.linear(self.norm(self.scan(self.convolve(xbc, taps, offset), dt, a_log, d, bias), z, gate), wout)

    def authors(self, scan, norm, conv):
        convolve = torch.compile(self.convolve, dynamic=False, mode=ARGS.mode)

        def by_kernels(xbc, dt, a_log, d, bias):
            x, b, c = xbc.split([self.inner, self.groups * self.state, self.groups * self.state], -1)
            b, c = (t.unflatten(-1, (self.groups, self.state)) for t in (b, c))
            return scan(x.unflatten(-1, (self.heads, self.head)), dt, -torch.exp(a_log.float()), b, c, chunk_size=256, D=d, dt_bias=bias, dt_softplus=True).flatten(-2)

        def gated(y, z, w):
            return norm(y, w, None, z=z, eps=1e-5, group_size=self.inner // self.groups, norm_before_gate=False)

        def layer(x, win, taps, offset, a_log, d, bias, gate, wout):
            z, xbc, dt = F.linear(x, win).split([self.inner, self.mixed, self.heads], -1)
            xbc = conv(xbc.transpose(1, 2), taps, offset, activation="silu").transpose(1, 2) if conv else convolve(xbc, taps, offset)
            return F.linear(gated(by_kernels(xbc, dt, a_log, d, bias), z, gate), wout)

        return layer, by_kernels, gated


def measure(name, kind, run, inputs, dy):
    """Measures a function of inputs, and its backward pass."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    times = [[], []]
    try:
        for _ in range(RUNS + 3):
            for back in range(2):
                for _ in range(AHEAD):
                    FLUSH.zero_()
                events[2 * back].record()
                if back:
                    grads = torch.autograd.grad(y, inputs, dy)
                else:
                    y = run(*inputs)
                events[2 * back + 1].record()
            torch.cuda.synchronize()
            for back in range(2):
                times[back].append(events[2 * back].elapsed_time(events[2 * back + 1]) * 1e3)
    except Exception as e:
        say(f"{name} {kind}: {type(e).__name__}: {str(e).strip().splitlines()[0]}")
        return None
    names = (name, name + "-grad") if "/" in name else (name + "/forward", name + "/backward")
    for one, t in zip(names, times):
        RESULTS.setdefault(one, {})[kind] = statistics.median(t[3:])
    say(f"{name}: {kind} {RESULTS[names[0]][kind]:.0f} us forward, {RESULTS[names[1]][kind]:.0f} us backward")
    return y.detach(), grads[0]


def shape(name, kernels):
    torch.manual_seed(1)
    layer = Layer(*SHAPES[name])
    inputs, found = [layer.x, *layer.weights], {}
    if kernels:
        whole, scan, gated = layer.authors(*kernels)
        found["authors"] = measure(name, "authors", whole, inputs, layer.dy)
        make = lambda cols: torch.randn(TOKENS // layer.seq, layer.seq, cols, device="cuda", dtype=torch.bfloat16).requires_grad_()
        y, z = make(layer.inner), make(layer.inner)
        measure(name + "/scan", "authors", scan, [make(layer.mixed), make(layer.heads), *layer.weights[3:6]], torch.randn_like(y))
        measure(name + "/norm", "authors", gated, [y, z, layer.weights[6]], torch.randn_like(y))
    if "compiled" in ARGS.kinds:
        found["compiled"] = measure(name, "compiled", torch.compile(layer.compiled, dynamic=False, mode=ARGS.mode), inputs, layer.dy)
    if found.get("compiled") and found.get("authors"):
        off = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found["compiled"], found["authors"])]
        say(f"{name}: compiled and authors differ by {off[0]:.1e} in the output and by {off[1]:.1e} in the gradient of x")
    torch._dynamo.reset()


def ours():
    """The results of Stowage, by name."""
    only = "|".join(ARGS.only + ["copy"])
    command = [os.path.abspath(ARGS.nn), "-test.run", "^$", "-test.bench", f"^BenchmarkMambaLayerOnGPU$/^({only})$", "-test.benchtime", "1x", "-test.cpu", "1"]  # one, so that names have no suffix
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "internal/kernels/nn")
    found = {}
    for line in done.stdout.splitlines():
        m = re.match(r"BenchmarkMambaLayerOnGPU/(\S+)\s+\d+\s+(.*)", line)
        if m:
            words = m[2].split()
            found[m[1]] = {unit: float(v) for v, unit in zip(words[::2], words[1::2])}
    if done.returncode or not found:
        say(f"torch_mamba: `{' '.join(command)}` failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return found


def main():
    global FLUSH
    kernels = authors() if ARGS.authors and "authors" in ARGS.kinds else None
    for name in ARGS.only:
        shape(name, kernels)
        torch.cuda.empty_cache()
    FLUSH = None
    torch.cuda.empty_cache()
    mine = ours() if ARGS.nn else {}
    copied = mine.get("copy", {}).get("GB/s")
    say(f"{'microseconds':32} {'compiled':>10} {'authors':>10} {'Stowage':>10} {'ratio':>7}  of a copy's bandwidth, {copied or 0:.0f} GB/s")
    table = []
    for name in dict.fromkeys([*RESULTS, *mine]):
        peers, own = RESULTS.get(name, {}), mine.get(name, {})
        row = {"name": name, **peers, "stowage": own.get("us")}
        if peers and own:
            row["ratio"] = min(peers.values()) / own["us"]
        if copied and re.search("conv|norm", name):
            row["of_copy"] = own["GB/s"] / copied
        table.append(row)
        show = lambda v: f"{v:10.0f}" if v else " " * 10
        ratio = f"{row['ratio']:7.2f}" if "ratio" in row else " " * 7
        say(f"{name:32} {show(peers.get('compiled'))} {show(peers.get('authors'))} {show(row['stowage'])} {ratio}  {row['of_copy']:.0%}" if "of_copy" in row
            else f"{name:32} {show(peers.get('compiled'))} {show(peers.get('authors'))} {show(row['stowage'])} {ratio}")
    if ARGS.json:
        figures = {f"{r['name']}_us": r["stowage"] for r in table if r["stowage"]} | {f"{r['name']}_ratio": r["ratio"] for r in table if "ratio" in r}
        label = {"bench": "torch_mamba", "command": " ".join(sys.argv), "hardware": torch.cuda.get_device_name(), "figures": figures}
        pathlib.Path(ARGS.json).write_text(json.dumps({**label, "torch": torch.__version__, "layers": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
