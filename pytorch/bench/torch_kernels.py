#!/usr/bin/env python3
"""Stowage's kernels beside PyTorch's on one GPU, in one call.

    CGO_ENABLED=0 go test -c -o nn.test ./internal/kernels/nn
    python3 pytorch/bench/torch_kernels.py --nn ./nn.test
    python3 pytorch/bench/torch_kernels.py --nn ./nn.test --only grouped attention --json kernels.json

It measures products over experts (torch._grouped_mm), dense products, every backend of
SDPA forward and backward, and what is bound by memory: RMS norm, SwiGLU, gathers of rows,
cross-entropy, AdamW and a copy, each eager and, unless --no-compile, compiled; the
faster one counts. Take gathers rows, each once; spread writes the row of a token to each of
its experts. BenchmarkPeersOnGPU of --nn has the same names and shapes. It runs beside the
script, which asks it for the figures of a shape as soon as it has PyTorch's. Before each figure
the GPU rests: at its limit of power it lowers its clocks, for whoever comes next. The script prints both with ratios: above 1 Stowage is
faster. Beside what is bound by memory stand the percentages of two copies' bandwidths: of one
that moves as many bytes, which takes turns with the runs of Stowage, and of one of 1 GiB. All data is random and
normal; between two runs 256 MiB are written, so that the L2 cache is cold; a time is the
median of 10, between two CUDA events. FLOPs of attention are those of the scores that the
causal mask leaves.

The first weight gradients of a step ("weight") are stored, by Stowage in fp32 and by PyTorch's
product in bf16, which writes half as much; "ratio" compares these two. "same" compares with what
has the result of Stowage: PyTorch's product and its conversion to fp32, or torch.mm where it has results in
fp32. Later gradients are added to fp32 sums ("weight-added"), which in PyTorch is a product into bf16
and an addition, or torch.addmm where it takes fp32. Dense products of Stowage are its own,
without cuBLASLt.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
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
RUNS = 10
REST = 0.2  # seconds before each figure
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
DENSE = [(4096, 4096, 4096), (8192, 4096, 4096), (8192, 7168, 2048), (2048, 32000, 2048), (8192, 8192, 8192), (16384, 1024, 1024), (8192, 512, 4096), (8192, 1536, 7168), (8192, 256, 4096), (8192, 576, 7168), (4096, 576, 2048), (8192, 768, 3072)]
HEADS = {"head128": (16, 16, 128, 128), "gqa128": (32, 8, 128, 128), "head64": (32, 32, 64, 64), "mla": (16, 16, 192, 128)}
SAME = ", fp32"  # how ways end that give fp32 where others give bf16
RESULTS = {}  # by name: of each way, its time in microseconds and its rate
OURS = {}  # by name: the same of Stowage
CHILD = None  # the Ours that measures it


def say(text):
    print(text, flush=True)


def normal(*shape, **more):
    return torch.randn(*shape, device="cuda", dtype=more.pop("dtype", torch.bfloat16), **more)


def measure(name, way, run, flops=0, moved=0):
    """Measures one way to do the work of a name; the fastest counts."""
    if ARGS.match and not re.search(ARGS.match, name):
        return
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    torch.cuda.synchronize()
    time.sleep(REST)
    try:
        for _ in range(RUNS + 3):
            FLUSH.zero_()
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
    except Exception as e:
        RESULTS.setdefault(name, {})[way] = {"error": f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"}
        return
    took = statistics.median(times[3:])
    unit, rate = ("TFLOP/s", flops / took / 1e6) if flops else ("GB/s", moved / took / 1e3)
    RESULTS.setdefault(name, {})[way] = {"us": took, "rate": rate, "unit": unit}


class Ours:
    """The benchmark of Stowage: it waits for names and measures them."""

    def __init__(self):
        only = "|".join(ARGS.only)
        self.command = [os.path.abspath(ARGS.nn), "-test.run", "^$", "-test.bench", f"^BenchmarkPeersOnGPU$/^({only})$", "-test.benchtime", "1x", "-test.cpu", "1", "-ask"]  # one, so that names have no suffix
        self.child = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT / "internal/kernels/nn")

    def measure(self, name):
        """Reports whether the benchmark measured a name: it has ended if not."""
        said = []
        time.sleep(REST)
        try:
            self.child.stdin.write(name + "\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            pass
        for line in self.child.stdout:
            said.append(line)
            m = re.match(r"BenchmarkPeersOnGPU/(\S+)\s+\d+\s+(.*)", line)
            if m and m[1] == name:
                words = m[2].split()
                figures = {unit: float(v) for v, unit in zip(words[::2], words[1::2])}
                unit = "TFLOP/s" if "TFLOP/s" in figures else "GB/s"
                OURS[name] = {"us": figures["us"], "rate": figures[unit], "unit": unit}
                if "%copy" in figures:
                    OURS[name]["copy"] = figures["%copy"]
                return True
        say(f"torch_kernels: `{' '.join(self.command)}` ended without {name}:\n{''.join(said)[-3000:]}")
        return False

    def end(self):
        self.child.communicate()


def ours():
    """Has Stowage measure what PyTorch did since the last call."""
    global CHILD
    for name in RESULTS:
        if CHILD and name not in OURS and not CHILD.measure(name):
            CHILD = None


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
        ours()


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
        ours()


def attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for name, (heads, kv, key, value) in HEADS.items():
        for seq in (4096, 8192, 16384):
            batch = 16384 // seq
            make = lambda h, d: normal(batch, seq, h, d).transpose(1, 2)
            q, k, v, do = make(heads, key), make(kv, key), make(kv, value), make(heads, value)
            pairs, at = batch * heads * seq * seq / 2, f"attention/{name}-{seq // 1024}k/"
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
                way = backend.name.split("_")[0].lower()
                call = lambda *t: F.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=heads != kv)
                with sdpa_kernel(backend):
                    with torch.no_grad():
                        measure(at + "forward", way, lambda: call(q, k, v), flops=2 * pairs * (key + value))
                    try:
                        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                        o = call(*leaves)
                    except RuntimeError:
                        continue
                    measure(at + "backward", way, lambda: torch.autograd.grad(o, leaves, do, retain_graph=True), flops=2 * pairs * (3 * key + 2 * value))
                    del o, leaves
            ours()


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
        ours()
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
        del leaf, logits
        ours()
    p = torch.nn.Parameter(normal(big, dtype=torch.float32))
    p.grad = normal(big, dtype=torch.float32)
    optim = torch.optim.AdamW([p], lr=1e-9, fused=True)
    measure("rows/adamw", "fused", optim.step, moved=28 * big)
    del optim, p
    a, b = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    measure("rows/copy", "copy_", lambda: b.copy_(a), moved=2 << 30)
    ours()


def main():
    global CHILD
    if ARGS.nn:
        CHILD = Ours()
    for part in (p for p in PARTS if p in ARGS.only):  # in the order of the benchmark
        {"grouped": grouped, "dense": dense, "attention": attention, "rows": rows}[part]()
        torch.cuda.empty_cache()
    if CHILD:
        CHILD.end()
    table = []
    most = OURS.get("rows/copy", {}).get("rate")
    say(f"{'':36} {'PyTorch':>9} {'Stowage':>9}  {'unit':8} {'ratio':>6} {'same':>6} {'copy':>7} {'1 GiB':>7}  fastest of PyTorch; others")
    for name in RESULTS:
        ways = {w: r for w, r in RESULTS.get(name, {}).items() if "rate" in r}
        fastest = lambda of: max(of, key=lambda w: ways[w]["rate"], default=None)
        best, same = fastest([w for w in ways if not w.endswith(SAME)]), fastest([w for w in ways if w.endswith(SAME)])
        own = OURS.get(name)
        row = {"name": name, "torch": RESULTS.get(name, {}), "best": best, "stowage": own}
        if best and own:
            row["ratio"] = own["rate"] / ways[best]["rate"]
        if same and own:
            row["same"] = own["rate"] / ways[same]["rate"]
        table.append(row)
        show = lambda r: f"{r['rate']:9.1f}" if r else " " * 9
        others = "; " + ", ".join(f"{w} {r['rate']:.0f}" for w, r in ways.items() if w != best) if len(ways) > 1 else ""
        ratio = " ".join(f"{row[r]:6.3f}" if r in row else " " * 6 for r in ("ratio", "same"))
        unit = (own or ways.get(best) or {}).get("unit", "")
        part = lambda v: f"{v:5.1f} %" if v else " " * 7
        copies = part(own and own.get("copy")) + " " + part(most and own and "copy" in own and 100 * own["rate"] / most)
        say(f"{name:36} {show(ways.get(best))} {show(own)}  {unit:8} {ratio} {copies}  {best}{others}")
    if ARGS.json:
        figures = {f"{r['name']}_{r['stowage']['unit']}": r["stowage"]["rate"] for r in table if r["stowage"]} | {f"{r['name']}_{of}": r[of] for of in ("ratio", "same") for r in table if of in r} | {f"{r['name']}_copy_percent": r["stowage"]["copy"] for r in table if "copy" in (r["stowage"] or {})}
        label = {"bench": "torch_kernels", "command": " ".join(sys.argv), "hardware": torch.cuda.get_device_name(), "figures": figures}
        pathlib.Path(ARGS.json).write_text(json.dumps({**label, "torch": torch.__version__, "kernels": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
