#!/usr/bin/env python3
"""The synthetic step of `stowage bench offload` in PyTorch, with and without
torch.autograd.graph.save_on_cpu, for comparison on the same GPU.

    stowage bench offload --device cuda --json > offload.json
    python3 pytorch/bench/torch_offload.py offload.json

The JSON has the sizes of the saved tensors, the durations of the modules and the order
of passes. It needs PyTorch with CUDA and nothing else. Steps with and without offloading
take turns; a time is the first quartile of its steps. It prints one JSON object with
step_ratio and peak_ratio, as `stowage bench offload` does.
"""

import argparse
import contextlib
import json
import sys
import time


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", help="the JSON of `stowage bench offload --json`, or - for standard input")
    p.add_argument("--steps", type=int, default=7, help="steps of each kind (default 7)")
    p.add_argument("--no-pin", action="store_true", help="save_on_cpu without pinned memory")
    p.add_argument("--modules", help="only these modules go to the host, separated by commas (default all)")
    a = p.parse_args()
    if a.steps < 1:
        p.error("--steps must be at least 1")
    try:
        with sys.stdin if a.file == "-" else open(a.file) as f:
            step = json.load(f)["step"]
        step["modules"], step["passes"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        p.error(f"{a.file} is not what `stowage bench offload --json` prints: {e!r}")
    return a, step


def load_torch():
    try:
        import torch
    except ImportError:
        sys.exit("torch_offload: PyTorch is not installed; try `pip install torch`")
    if not torch.cuda.is_available():
        sys.exit("torch_offload: PyTorch finds no CUDA GPU; run it on the machine that ran `stowage bench offload --device cuda`")
    return torch


def cycles_per_second(torch):
    """The rate of torch.cuda._sleep, which counts clock cycles of the GPU."""
    cycles, best = 200_000_000, 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        best = max(best, cycles / (time.perf_counter() - begin))
    return best


def make_step(torch, step, modules):
    rate = cycles_per_second(torch)

    class Module(torch.autograd.Function):
        """Makes the saved tensors and lasts as long as the module; backward adds
        up what was saved."""

        @staticmethod
        def forward(ctx, x, m, value, sums):
            saved = [torch.full((n,), value, dtype=torch.uint8, device="cuda") for n in m["tensor_bytes"]]
            ctx.save_for_backward(*saved)
            ctx.m, ctx.sums = m, sums
            torch.cuda._sleep(int(m["forward_us"] * 1e-6 * rate))
            return x + 1

        @staticmethod
        def backward(ctx, grad):
            ctx.sums.extend(t.sum(dtype=torch.int64) for t in ctx.saved_tensors)
            torch.cuda._sleep(int(ctx.m["backward_us"] * 1e-6 * rate))
            return grad, None, None, None

    chunks = {}
    for m in step["modules"]:
        chunks.setdefault(m["chunk"], []).append(m)

    def run(hooks):
        sums, open_passes = [], {}
        for chunk, microbatch, backward in step["passes"]:
            if backward:
                open_passes.pop((chunk, microbatch)).backward()
                continue
            x = torch.zeros(1, device="cuda", requires_grad=True)
            for i, m in enumerate(chunks.get(chunk, [])):
                away = modules is None or m["name"] in modules
                with hooks() if away else contextlib.nullcontext():
                    x = Module.apply(x, m, (31 * i + 7 * microbatch) % 251, sums)
            open_passes[chunk, microbatch] = x
        torch.cuda.synchronize()
        return sums

    return run


def measure(torch, run, hooks):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    sums = run(hooks)
    took = time.perf_counter() - begin
    return took, torch.cuda.max_memory_allocated() - before, [int(s) for s in sums]


def main():
    args, step = parse()
    torch = load_torch()
    modules = args.modules and set(args.modules.split(","))
    if modules and not modules <= {m["name"] for m in step["modules"]}:
        sys.exit(f"torch_offload: --modules names {sorted(modules - {m['name'] for m in step['modules']})}, which the step does not have")
    run = make_step(torch, step, modules)
    kinds = {
        "without": contextlib.nullcontext,
        "with": lambda: torch.autograd.graph.save_on_cpu(pin_memory=not args.no_pin),
    }
    times, peaks, sums = {k: [] for k in kinds}, {k: 0 for k in kinds}, {}
    for turn in range(args.steps + 1):
        for k, hooks in kinds.items():
            took, peak, got = measure(torch, run, hooks)
            if turn > 0:  # the first warms up
                times[k].append(took)
            peaks[k] = peak
            sums[k] = got
    quartile = {k: sorted(ts)[len(ts) // 4] for k, ts in times.items()}
    print(json.dumps({
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "pin_memory": not args.no_pin,
        "steps": args.steps,
        "step_ms": 1e3 * quartile["without"],
        "offload_step_ms": 1e3 * quartile["with"],
        "step_ratio": quartile["with"] / quartile["without"],
        "peak_bytes": peaks["without"],
        "offload_peak_bytes": peaks["with"],
        "peak_ratio": peaks["with"] / peaks["without"],
        "saved_bytes": peaks["without"] - peaks["with"],
        "equal": sums["with"] == sums["without"],
    }, indent=2))


if __name__ == "__main__":
    main()
