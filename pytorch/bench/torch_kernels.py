#!/usr/bin/env python3
"""Stowage's kernels beside PyTorch's on one GPU, in one call.

    CGO_ENABLED=0 go test -c -o nn.test ./internal/kernels/nn
    python3 pytorch/bench/torch_kernels.py --nn ./nn.test
    python3 pytorch/bench/torch_kernels.py --nn ./nn.test --only grouped attention --json kernels.json

It measures products over experts (torch._grouped_mm), dense products, every backend of
SDPA forward and backward, and what is bound by memory: RMS norm, SwiGLU, gathers of rows,
cross-entropy, AdamW and a copy, each eager and, unless --no-compile, compiled; the
faster one counts. Take gathers rows, each once; spread writes the row of a token to each of
its experts. BenchmarkPeersOnGPU of --nn has the same names and shapes. It runs
beside the script and waits for names, so that all ways to do the same work, those of PyTorch and
Stowage's, take turns launch by launch, in an order that changes: they find the same clocks, which
depend on power and heat. A row is printed as soon as it is known, and --match chooses rows where time
is short. Above a ratio of 1 Stowage is faster. Beside what is bound by memory stand the percentages of
two copies' bandwidths: of one that moves as many bytes, which takes turns with the runs of Stowage, and of
one of 1 GiB. All data is random and normal; between two runs 256 MiB are written, so that the L2
cache is cold; a time is the median of 10, between two CUDA events. FLOPs of attention are those of the scores
that the causal mask leaves.

The first weight gradients of a step ("weight") are stored, by Stowage in fp32 and by PyTorch's
product in bf16, which writes half as much; "ratio" compares these two. "same" compares with what
has the result of Stowage: PyTorch's product and its conversion to fp32, or torch.mm where it has results in
fp32. Later gradients are added to fp32 sums ("weight-added"), which in PyTorch is a product into bf16
and an addition, or torch.addmm where it takes fp32. Dense products of Stowage are its own,
without cuBLASLt.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import warnings

sys.dont_write_bytecode = True
PARTS = ["grouped", "dense", "attention", "rows"]
ROOT = pathlib.Path(__file__).resolve().parents[2]


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nn", help="the test binary of internal/kernels/nn; without it only PyTorch is measured")
    p.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="only these: " + ", ".join(PARTS))
    p.add_argument("--match", default="", help="only names that this regular expression finds")
    p.add_argument("--no-compile", action="store_true", help="do not compile what is bound by memory")
    p.add_argument("--json", metavar="FILE", help="write all figures")
    return p.parse_args()


ARGS = parse()
try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit("torch_kernels: PyTorch is not installed; try `pip install torch`")
if not torch.cuda.is_available():
    sys.exit("torch_kernels: PyTorch finds no CUDA GPU")

warnings.filterwarnings("ignore", module="__main__")  # of backends of SDPA that do not take a shape
RUNS, WARM = 10, 3
FLUSH = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
# Products over experts: experts, rows, columns of x and of the result, and the share of an
# expert. peersbench_test.go has the same.
GROUPS = {
    "wide8-2048": (8, 16384, 2048, 4096, lambda e: 1),
    "wide8-4096": (8, 16384, 4096, 8192, lambda e: 1),
    "wide8-4096-down": (8, 16384, 4096, 4096, lambda e: 1),
    "small64": (64, 49152, 2048, 2048, lambda e: 1),
    "small64-down": (64, 49152, 1024, 2048, lambda e: 1),
    "small128": (128, 65536, 2048, 1536, lambda e: 1),
    "skewed8": (8, 16384, 2048, 4096, lambda e: 1 / (e + 1)),
    "skewed64": (64, 49152, 2048, 2048, lambda e: 1 / (e + 1)),
    "empty64": (64, 49152, 2048, 2048, lambda e: max(0, e % 4 - 2)),
    "wide8-14336": (8, 8192, 4096, 14336, lambda e: 1 + e % 2),
    "uneven32": (32, 16384, 7168, 4096, lambda e: 1 + e % 5),
    "uneven256": (256, 65536, 1024, 2048, lambda e: 1 + e % 3),
    "few16": (16, 4096, 2048, 2816, lambda e: 1 + e % 4),
    "few64": (64, 2048, 2048, 1024, lambda e: 1 + e % 3),
}
DENSE = [(4096, 4096, 4096), (8192, 4096, 4096), (8192, 7168, 2048), (2048, 32000, 2048), (8192, 8192, 8192), (16384, 1024, 1024), (8192, 512, 4096), (8192, 1536, 7168), (8192, 256, 4096), (8192, 576, 7168), (4096, 576, 2048), (8192, 768, 3072), (8192, 1024, 1024), (8192, 144, 4096)]
HEADS = {"head128": (16, 16, 128, 128), "gqa128": (32, 8, 128, 128), "head64": (32, 32, 64, 64), "mla": (16, 16, 192, 128)}
OWN = "Stowage"
SAME = ", fp32"  # how ways end that give fp32 where others give bf16
WAITING = {}  # by name: its operations, its bytes, and by way what runs it
TABLE = []
CHILD = None  # the Ours that measures Stowage
COPY = []  # the rate of Stowage's copy of 1 GiB, once it is known


def say(text):
    print(text, flush=True)


def normal(*shape, **more):
    return torch.randn(*shape, device="cuda", dtype=more.pop("dtype", torch.bfloat16), **more)


def measure(name, way, run, flops=0, moved=0, around=contextlib.nullcontext):
    """Adds a way to do the work of a name to those that turns measures."""
    if not ARGS.match or re.search(ARGS.match, name):
        WAITING.setdefault(name, (flops, moved, {}))[2][way] = (run, around)


def once(run, around):
    """Returns the microseconds of one run."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with around():
        FLUSH.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) * 1e3


class Ours:
    """The benchmark of Stowage: it waits for names and runs each as often as it is asked."""

    def __init__(self):
        only = "|".join(ARGS.only)
        self.command = [os.path.abspath(ARGS.nn), "-test.run", "^$", "-test.bench", f"^BenchmarkPeersOnGPU$/^({only})$", "-test.benchtime", "1x", "-ask"]
        self.child = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT / "internal/kernels/nn")

    def once(self, name):
        """Returns the microseconds of one run, and of a copy if there was one."""
        said = []
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(name + "\n")
            self.child.stdin.flush()
        for line in self.child.stdout:
            said.append(line)
            if line.startswith(f"peer {name} "):
                return [float(v) for v in line.split()[2:]]
        sys.exit(f"torch_kernels: `{' '.join(self.command)}` ended without {name}:\n{''.join(said)[-3000:]}")

    def end(self):
        self.child.communicate()


def turns():
    """Measures what waits, each name by all its ways in turns, and prints it."""
    for name, (flops, moved, ways) in WAITING.items():
        results, runs, copies = {}, {}, []
        for way, (run, around) in ways.items():
            try:
                for _ in range(WARM):
                    once(run, around)
                runs[way] = lambda run=run, around=around: once(run, around)
            except Exception as e:
                results[way] = {"error": f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"}
        if CHILD:

            def own():
                took, *copy = CHILD.once(name)
                copies.extend(copy)
                return took

            runs[OWN] = own
        times = {way: [] for way in runs}
        for i in range(RUNS + 2 if runs else 0):
            order = list(runs)[i % len(runs) :] + list(runs)[: i % len(runs)]
            for way in order[:: 1 - i % 2 * 2]:
                times[way].append(runs[way]())
        unit, work = ("TFLOP/s", flops / 1e6) if flops else ("GB/s", moved / 1e3)
        for way, took in times.items():
            us = statistics.median(took[2:])
            results[way] = {"us": us, "rate": work / us, "unit": unit}
        if copies:
            results[OWN]["copy"] = 100 * moved / min(moved, 2 << 30) * statistics.median(copies[2:]) / results[OWN]["us"]
        show(name, unit, results)
    WAITING.clear()


def show(name, unit, results):
    """Prints a row: the fastest way of PyTorch beside Stowage."""
    if not TABLE:
        say(f"{'':36} {'PyTorch':>9} {'Stowage':>9}  {'unit':8} {'ratio':>6} {'same':>6} {'copy':>7} {'1 GiB':>7}  fastest of PyTorch; others")
    own = results.pop(OWN, None)
    ways = {w: r["rate"] for w, r in results.items() if "rate" in r}
    best, same = (max(of, key=lambda w: ways[w], default=None) for of in ([w for w in ways if not w.endswith(SAME)], [w for w in ways if w.endswith(SAME)]))
    row = {"name": name, "torch": results, "best": best, "stowage": own}
    for key, way in (("ratio", best), ("same", same)):
        if way and own:
            row[key] = own["rate"] / ways[way]
    if name == "rows/copy" and own:
        COPY.append(own["rate"])
    TABLE.append(row)
    rate = lambda v: f"{v:9.1f}" if v else " " * 9
    part = lambda v: f"{v:5.1f} %" if v else " " * 7
    others = "; " + ", ".join(f"{w} {v:.0f}" for w, v in ways.items() if w != best) if len(ways) > 1 else ""
    ratio = " ".join(f"{row[r]:6.3f}" if r in row else " " * 6 for r in ("ratio", "same"))
    copies = part(own and own.get("copy")) + " " + part(COPY and own and "copy" in own and 100 * own["rate"] / COPY[0])
    say(f"{name:36} {rate(best and ways[best])} {rate(own and own['rate'])}  {unit:8} {ratio} {copies}  {best}{others}")


def counts(experts, rows, share):
    shares = [share(e) for e in range(experts)]
    n = [int(rows * s / sum(shares)) for s in shares]
    n[next(e for e, s in enumerate(shares) if s)] += rows - sum(n)
    return n


def grouped():
    if not hasattr(torch, "_grouped_mm"):
        say("this PyTorch has no torch._grouped_mm")
        return
    for name, (experts, rows, k, n, share) in GROUPS.items():
        x, y, w = normal(rows, k), normal(rows, n), normal(experts, n, k)
        ends = torch.tensor(counts(experts, rows, share), device="cuda").cumsum(0).to(torch.int32)
        flops, at = 2 * rows * k * n, f"grouped/{name}/"
        measure(at + "forward", "grouped_mm", lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends), flops)
        measure(at + "input", "grouped_mm", lambda: torch._grouped_mm(y, w, offs=ends), flops)
        measure(at + "weight", "grouped_mm", lambda: torch._grouped_mm(y.t(), x, offs=ends), flops)
        grad = torch.zeros(experts, n, k, device="cuda")
        measure(at + "weight", "grouped_mm, copy_" + SAME, lambda: grad.copy_(torch._grouped_mm(y.t(), x, offs=ends)), flops)
        measure(at + "weight-added", "grouped_mm, add_", lambda: grad.add_(torch._grouped_mm(y.t(), x, offs=ends)), flops)
        turns()


def dense():
    for m, n, k in DENSE:
        x, w, y = normal(m, k), normal(n, k), normal(m, n)
        out = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16), torch.empty_like(x), torch.empty_like(w)]
        flops, at = 2 * m * n * k, f"dense/{m}x{n}x{k}/"
        measure(at + "forward", "mm", lambda: torch.mm(x, w.t(), out=out[0]), flops)
        measure(at + "input", "mm", lambda: torch.mm(y, w, out=out[1]), flops)
        measure(at + "weight", "mm", lambda: torch.mm(y.t(), x, out=out[2]), flops)
        grad = torch.zeros(n, k, device="cuda")
        measure(at + "weight", "mm, copy_" + SAME, lambda: grad.copy_(torch.mm(y.t(), x, out=out[2])), flops)
        measure(at + "weight", "mm" + SAME, lambda: torch.mm(y.t(), x, out_dtype=torch.float32, out=grad), flops)
        measure(at + "weight-added", "mm, add_", lambda: grad.add_(torch.mm(y.t(), x, out=out[2])), flops)
        measure(at + "weight-added", "addmm", lambda: torch.addmm(grad, y.t(), x, out_dtype=torch.float32, out=grad), flops)
        turns()


def attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    @contextlib.contextmanager
    def only(backend):
        with sdpa_kernel(backend), torch.no_grad():
            yield

    for name, (heads, kv, key, value) in HEADS.items():
        for seq in (4096, 8192, 16384):
            batch = 16384 // seq
            make = lambda h, d: normal(batch, seq, h, d).transpose(1, 2)
            q, k, v, do = make(heads, key), make(kv, key), make(kv, value), make(heads, value)
            pairs, at = batch * heads * seq * seq / 2, f"attention/{name}-{seq // 1024}k/"
            call = lambda *t: F.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=heads != kv)
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
                way, around = backend.name.split("_")[0].lower(), lambda backend=backend: only(backend)
                measure(at + "forward", way, lambda: call(q, k, v), flops=2 * pairs * (key + value), around=around)
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                try:
                    with sdpa_kernel(backend):
                        o = call(*leaves)
                except RuntimeError:
                    continue
                back = lambda o=o, leaves=leaves: torch.autograd.grad(o, leaves, do, retain_graph=True)
                measure(at + "backward", way, back, flops=2 * pairs * (3 * key + 2 * value), around=around)
            turns()


def both(name, fn, *args, moved):
    """Measures a function as it is and compiled."""
    measure(name, "eager", lambda: fn(*args), moved=moved)
    if not ARGS.no_compile:
        measure(name, "compiled", lambda f=torch.compile(fn, dynamic=False): f(*args), moved=moved)


def norm(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


def norm_grad(x, w, dy):
    """Gradients of x and w: what autograd does, in one function so that it can be fused."""
    x, dy = x.float(), dy.float()
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    g = dy * w.float()
    dx = r * g - x * r**3 * (g * x).mean(-1, keepdim=True)
    return dx.to(torch.bfloat16), (dy * x * r).sum(0)


def norm_grad_add(x, w, dy, more):
    """The same, with the gradient of a residual connection added."""
    dx, dw = norm_grad(x, w, dy)
    return dx + more, dw


def swiglu(h):
    a, b = h.chunk(2, -1)
    return F.silu(a) * b


def swiglu_grad(h, dy):
    a, b = (t.float() for t in h.chunk(2, -1))
    s, dy = a.sigmoid(), dy.float()
    return torch.cat((dy * b * s * (1 + a * (1 - s)), dy * a * s), -1).to(torch.bfloat16)


def take(x, order):
    return x.index_select(0, order)


def combine(rows, place, top):
    return rows.index_select(0, place).view(-1, top, rows.shape[1]).sum(1)


def cross_entropy(logits, targets):
    """The losses and the gradient of their sum."""
    x = logits.float()
    p = x.softmax(-1)
    losses = x.logsumexp(-1) - x.gather(1, targets[:, None])[:, 0]
    one = torch.arange(x.shape[1], device=x.device)[None] == targets[:, None]
    return losses, (p - one).to(torch.bfloat16)


def rows():
    tokens, top, big = 8192, 6, 1 << 27
    a, b = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    measure("rows/copy", "copy_", lambda: b.copy_(a), moved=2 << 30)
    turns()
    for cols in (2048, 4096):
        x, y, more, w, wide = normal(tokens, cols), normal(tokens, cols), normal(tokens, cols), normal(cols), normal(tokens, 2 * cols)
        sorted_, unit = normal(tokens * top, cols), tokens * cols * 2
        order = torch.randperm(tokens * top, device="cuda")
        name = lambda what: f"rows/{what}-{cols}"
        measure(name("copy"), "copy_", lambda: y.copy_(x), moved=2 * unit)
        both(name("norm"), norm, x, w, moved=2 * unit)
        both(name("norm-grad"), norm_grad, x, w, y, moved=3 * unit)
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        out = norm(*leaves)
        measure(name("norm-grad"), "autograd", lambda: torch.autograd.grad(out, leaves, y, retain_graph=True), moved=3 * unit)
        both(name("norm-grad-add"), norm_grad_add, x, w, y, more, moved=4 * unit)
        both(name("swiglu"), swiglu, wide, moved=3 * unit)
        both(name("swiglu-grad"), swiglu_grad, wide, y, moved=5 * unit)
        both(name("take"), take, sorted_, order, moved=sorted_.numel() * 4)
        both(name("spread"), take, x, order // top, moved=sorted_.numel() * 2 + unit)
        both(name("combine"), combine, sorted_, order.argsort(), top, moved=sorted_.numel() * 2 + unit)
        turns()
    for count, vocab, kind in ((tokens, 32000, torch.bfloat16), (2048, 128256, torch.bfloat16), (tokens, 32000, torch.float32), (2048, 128256, torch.float32)):
        logits, targets = normal(count, vocab, dtype=kind), torch.arange(count, device="cuda") * 7919 % vocab
        name, moved = "rows/cross-entropy-" + "fp32-" * (kind == torch.float32) + str(vocab), logits.numel() * (logits.element_size() + 2)
        both(name, cross_entropy, logits, targets, moved=moved)
        leaf = logits.detach().requires_grad_()
        loss = lambda x, t: F.cross_entropy(x.float(), t, reduction="sum")
        measure(name, "F.cross_entropy", lambda: torch.autograd.grad(loss(leaf, targets), leaf), moved=moved)
        if not ARGS.no_compile:
            f = torch.compile(loss, dynamic=False)
            measure(name, "F.cross_entropy, compiled", lambda: torch.autograd.grad(f(leaf, targets), leaf), moved=moved)
        turns()
    p = torch.nn.Parameter(normal(big, dtype=torch.float32))
    p.grad = normal(big, dtype=torch.float32)
    optim = torch.optim.AdamW([p], lr=1e-9, fused=True)
    measure("rows/adamw", "fused", optim.step, moved=28 * big)
    turns()


def main():
    global CHILD
    if ARGS.nn:
        CHILD = Ours()
    for part in (p for p in PARTS if p in ARGS.only):  # in the order of the benchmark
        {"grouped": grouped, "dense": dense, "attention": attention, "rows": rows}[part]()
        torch.cuda.empty_cache()
    if CHILD:
        CHILD.end()
    if ARGS.json:
        own = [r for r in TABLE if r["stowage"]]
        figures = {f"{r['name']}_{r['stowage']['unit']}": r["stowage"]["rate"] for r in own} | {f"{r['name']}_{of}": r[of] for of in ("ratio", "same") for r in own if of in r} | {f"{r['name']}_copy_percent": r["stowage"]["copy"] for r in own if "copy" in r["stowage"]}
        label = {"bench": "torch_kernels", "command": " ".join(sys.argv), "hardware": torch.cuda.get_device_name(), "figures": figures}
        pathlib.Path(ARGS.json).write_text(json.dumps({**label, "torch": torch.__version__, "kernels": TABLE}, indent=2) + "\n")


if __name__ == "__main__":
    main()
