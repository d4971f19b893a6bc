#!/usr/bin/env python3
"""Speed of `stowage train --device cuda` beside PyTorch's on the same models, in one call.

    python3 pytorch/bench/torch_moe.py --stowage ./stowage                     # four models
    python3 pytorch/bench/torch_moe.py --stowage ./stowage --model wide8 config.json --json moe.json
    python3 pytorch/bench/torch_moe.py --quick                                 # tiny models on the CPU: are the losses the same?

PyTorch runs as a good user would have it (moe_model.py): bf16 copies of fp32 parameters, SDPA
with the fastest of its backends for the shape, products over experts with counts on the
device, sums of gradients in fp32, fused AdamW; eager, with torch.compile, also in its mode
max-autotune, and with the passes of a step as one CUDA graph. A rate is that of the middle step
of all rounds (--rounds). Compiling for max-autotune takes minutes the first time; then PyTorch has
it in its cache (TORCHINDUCTOR_CACHE_DIR).
First the policies of Stowage take turns, then the first of them and the kinds of PyTorch;
whoever waits for its turn is stopped by a signal and does nothing. A step has 4 microbatches of
2 x 4096 tokens, clips the norm of the gradients and updates all parameters. Memory is the
most that PyTorch's allocator gave out, and the peak of Stowage's device.

Both train on the same text. Weights at this size are drawn by each program; that
both compute the same is shown with tiny models of the same kinds, where PyTorch continues
from a checkpoint of Stowage (--quick does only that). Parameters of both are counted.
"""

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

sys.dont_write_bytecode = True  # nothing is left in the tree
from moe_shapes import MODELS, describe, shapes, tiny, within, work

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds that Stowage may take for a turn
KINDS = {"eager": "eager", "compiled": "default", "graph": "default", "tuned": "max-autotune-no-cudagraphs", "tuned-graph": "max-autotune-no-cudagraphs"}  # modes of torch.compile
WARM = 4  # steps of Stowage that are not measured: it records the first and times the second
TOLERANCE = 1e-4  # of losses in fp32


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stowage", help="the program (default: it is built from this tree)")
    p.add_argument("--model", nargs="+", default=list(MODELS), help=f"models (default {' '.join(MODELS)}), or files with a config.json of such a kind")
    p.add_argument("--policy", nargs="+", default=["none"], help="memory policies of Stowage (default none), each with flags if it needs some: \"offload --offload-modules core_attn\"")
    p.add_argument("--kinds", nargs="*", choices=list(KINDS), default=["eager", "compiled", "graph"], help="ways to run PyTorch (default eager compiled graph; tuned is max-autotune); without any, only policies are compared")
    p.add_argument("--micro", type=int, default=2, help="sequences of a microbatch (default 2)")
    p.add_argument("--seq", type=int, default=4096, help="tokens of a sequence (default 4096)")
    p.add_argument("--microbatches", type=int, default=4, help="of a step (default 4)")
    p.add_argument("--rounds", type=int, default=2, help="turns of each program (default 2)")
    p.add_argument("--measured", type=int, default=5, help="steps measured in a turn (default 5)")
    p.add_argument("--profile", action="store_true", help="print PyTorch's time by kernel")
    p.add_argument("--no-check", action="store_true", help="do not compare losses of tiny models first")
    p.add_argument("--quick", action="store_true", help="compare losses of tiny models on the CPU, and nothing else")
    p.add_argument("--json", metavar="FILE", help="write all figures")
    a = p.parse_args()
    if min(a.micro, a.seq, a.microbatches, a.rounds, a.measured) < 1:
        p.error("numbers must be at least 1")
    for name in a.model:
        if name not in MODELS:
            try:
                config = json.loads(pathlib.Path(name).read_text())
                describe(config)
            except (OSError, ValueError, TypeError, KeyError) as e:
                p.error(f"--model takes {', '.join(MODELS)} or a config.json of such a kind, and {name} is none ({type(e).__name__}: {e})")
            MODELS[name] = config
    return a


ARGS = parse()
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has asked CUDA cannot fork another that uses it
if ARGS.quick:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
try:
    import torch
except ImportError:
    sys.exit("torch_moe: PyTorch is not installed; try `apt install python3-torch` or `pip install torch`")
if not ARGS.quick and not torch.cuda.is_available():
    sys.exit("torch_moe: PyTorch finds no CUDA GPU; --quick compares losses without one")

import moe_model
from moe_model import Model
from torch_checkpoint import Text, read_safetensors
from torch_model import stacked

OPTIM = {"lr": 3e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "clip": 1.0}


def say(text):
    print(text, flush=True)


class Stowage:
    """Runs of the program."""

    def __init__(self, folder):
        self.folder, self.program = folder, ARGS.stowage
        if not self.program:
            self.program = os.path.join(folder, "stowage")
            subprocess.run(["go", "build", "-o", self.program, "./cmd/stowage"], cwd=ROOT, check=True)
        self.runs = 0

    def command(self, model, policy, batch, *flags):
        self.runs += 1
        out, config = os.path.join(self.folder, f"run{self.runs}"), os.path.join(self.folder, f"model{self.runs}.json")
        pathlib.Path(config).write_text(json.dumps(model))
        micro, seq, microbatches = batch
        return out, [
            self.program, "train", "--model", config, "--policy", *policy.split(), "--pp", "1", "--ep", "1", "--dp", "1", "--micro", str(micro), "--seq", str(seq),
            "--microbatches", str(microbatches), "--lr", str(OPTIM["lr"]), "--trace=false", "--out", out, *flags,
        ]

    def start(self, model, policy, batch):
        """A run that trains until it is ended."""
        out, command = self.command(model, policy, batch, "--device", "cuda", "--bf16", "--save-every", "0", "--steps", "1000000")
        return Run(out, command)

    def train(self, model, batch, steps, more, *flags):
        """Trains steps, then more from the checkpoint: gives the folder behind the first
        and the metrics of the others. The learning rate is low."""
        out, command = self.command(model, "none", batch, "--warm-up", "1", *flags)
        for extra in (["--steps", str(steps)], ["--steps", str(steps + more), "--resume"]):
            done = subprocess.run(command + extra, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"torch_moe: `{' '.join(command + extra)}` failed:\n{done.stderr.strip()[-2000:]}")
            if "--resume" not in extra:
                checkpoint = read(out)
        return checkpoint, [json.loads(line) for line in open(os.path.join(out, "metrics.jsonl"))][steps:]


class Run:
    """A run of the program whose steps are measured in turns. It is killed in the end: a
    checkpoint would take longer than the steps do."""

    def __init__(self, out, command):
        self.metrics, self.command, self.log = os.path.join(out, "metrics.jsonl"), command, tempfile.TemporaryFile("w+")
        self.steps = []
        # A run that is stopped must not outlive this program: prctl(PR_SET_PDEATHSIG).
        last = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        self.child = subprocess.Popen(command, stdout=self.log, stderr=self.log, preexec_fn=last)

    def until(self, steps):
        """Waits for so many steps, then stops the program."""
        began = time.monotonic()
        while len(self.steps) < steps:
            if self.child.poll() is not None or time.monotonic() - began > PATIENCE:
                self.end()
                self.log.seek(0)
                sys.exit(f"torch_moe: `{' '.join(self.command)}` failed:\n{self.log.read()[-2000:]}")
            time.sleep(0.01)
            if os.path.exists(self.metrics):
                self.steps = [json.loads(line) for line in pathlib.Path(self.metrics).read_text().split("\n")[:-1]]
        self.child.send_signal(signal.SIGSTOP)

    def turn(self, n):
        """Measures steps. The first two are not counted: one of them was interrupted, and the
        work before it may not be over."""
        self.child.send_signal(signal.SIGCONT)
        first = len(self.steps) + 2
        self.until(first + n)
        return self.steps[first : first + n]

    def end(self):
        self.child.kill()
        self.child.wait()


def read(run):
    """The checkpoint of a run: what it says, weights and moments."""
    folder, = pathlib.Path(run, "checkpoints").glob("step-*")
    tensors = [{n: t.clone() for f in sorted(folder.glob(kind)) for n, t in read_safetensors(f)} for kind in ("model-*", "optim-*")]
    return json.loads((folder / "checkpoint.json").read_text()), *tensors


class Trainer:
    """Trains in PyTorch. With moments it goes on from a checkpoint."""

    def __init__(self, about, settings, tensors, text, device, moments=None, step=0):
        self.text, self.step, self.device = text, step, device
        self.model = Model(about, settings, tensors, text.state["seq"], device, copies=device == "cuda")
        how = {"fused": True} if device == "cuda" else {}
        self.optim = torch.optim.AdamW(self.model.groups(OPTIM["weight_decay"]), lr=OPTIM["lr"], betas=(OPTIM["beta1"], OPTIM["beta2"]), eps=OPTIM["epsilon"], **how)
        for name, p in self.model.main.items():
            p.grad = self.model.grads[name]
            if moments:
                self.optim.state[p] = {"step": torch.tensor(float(step), device=device if how else "cpu")} | {
                    kind: moments[f"{name}.{kind}"].reshape(p.shape).clone().to(device) for kind in ("exp_avg", "exp_avg_sq")
                }
        self.graph = None  # with its tokens and its sums

    def batches(self):
        """The tokens of the next step, on the device."""
        s = self.text.state
        return [[t.to(self.device, non_blocking=True) for t in self.text.microbatch(self.step, i)[:2]] for i in range(s["microbatches"])]

    def passes(self, batches):
        """The gradients of a step, its loss and its auxiliary one."""
        s = self.text.state
        total = s["microbatches"] * s["micro"] * s["seq"]
        parts = [self.model.backward(rows, targets, total, i == 0) for i, (rows, targets) in enumerate(batches)]
        return sum(p[0] for p in parts), sum(p[1] for p in parts) / len(parts)

    def capture(self):
        """Makes one graph of the passes of a step."""
        static, graph = [[t.clone() for t in b] for b in self.batches()], torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sums = self.passes(static)
        self.graph = graph, static, sums

    def train(self, batches):
        if self.graph:
            graph, static, (loss, aux) = self.graph
            for to, of in zip(static, batches):
                torch._foreach_copy_(to, of)
            graph.replay()
        else:
            loss, aux = self.passes(batches)
        more = {"foreach": True} if self.device == "cuda" else {}
        norm = torch.nn.utils.clip_grad_norm_(list(self.model.main.values()), OPTIM["clip"], **more)
        self.optim.step()
        self.model.update()
        self.step += 1
        return loss, aux, norm

    def timed(self):
        """One step; the host waits for the loss, as a user does who prints it."""
        batches = self.batches()
        if self.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        loss, aux, norm = self.train(batches)
        loss, aux, norm = float(loss), float(aux), float(norm)
        return {"loss": loss, "aux": aux, "grad_norm": norm, "seconds": time.perf_counter() - began}


def check(program, name, steps=6):
    """The greatest difference of losses and, relative, of norms, over some steps of a tiny model in fp32."""
    (about, weights, moments), mine = program.train(tiny(name), (2, 64, 2), 1, steps, "--lr", str(OPTIM["lr"]))
    config = about["config"]
    for want, got in zip(describe(tiny(name)), (config["model"], config["settings"])):
        if not within(want, got):
            sys.exit(f"torch_moe: Stowage reads {name} as {got}; {want} is expected")
    if sum(math.prod(s) for s in shapes(config["model"]).values()) != sum(t.numel() for t in weights.values()):
        sys.exit(f"torch_moe: the parameters of {name} are not those of Stowage")
    t = Trainer(config["model"], config["settings"], weights, Text(about["data"]), "cpu", stacked(moments), about["step"])
    theirs = [t.timed() for _ in mine]
    differ = max(abs(a[k] - b[k]) for a, b in zip(mine, theirs) for k in ("loss", "aux") if k in a)
    norms = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(mine, theirs))
    return {"loss_differs": differ, "norm_differs": norms, "last_loss": mine[-1]["loss"], "torch_last_loss": theirs[-1]["loss"]}


def draw(about, device):
    """Parameters at random, on the device."""
    torch.manual_seed(1)
    out = {}
    for name, shape in shapes(about).items():
        if name.endswith("expert_bias"):
            out[name] = torch.zeros(shape, device=device)
        elif len(shape) == 1:
            out[name] = torch.ones(shape, device=device)
        else:
            out[name] = torch.randn(shape, device=device) * 0.02
    return out


def fastest_attention(about):
    """Leaves PyTorch the backend of SDPA that takes the least time forward and backward with
    the model's heads, and gives its name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    a = about["layers"][0]
    if "mla" in a:
        a = a["mla"]
        heads, kv, d, v = a["heads"], a["heads"], a["nope"] + a["rope"], a["v"]
    else:
        a = a["attention"]
        heads, kv, d, v = a["heads"], a["kv_heads"], a["head_dim"], a["head_dim"]
    make = lambda h, w: torch.randn(ARGS.micro, ARGS.seq, h, w, device="cuda", dtype=torch.bfloat16).requires_grad_()
    q, k, val = make(heads, d), make(kv, d), make(kv, v)
    times = {}
    warnings.filterwarnings("ignore", module="moe_model")  # of backends that do not take these heads
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                for i in range(4):
                    if i == 2:
                        torch.cuda.synchronize()
                        began = time.perf_counter()
                    o = moe_model.attend(q, k, val)
                    o.backward(o.detach())
                torch.cuda.synchronize()
                times[backend] = time.perf_counter() - began
        except RuntimeError:
            continue
    best = min(times, key=times.get)
    torch.backends.cuda.enable_cudnn_sdp(best == SDPBackend.CUDNN_ATTENTION)
    torch.backends.cuda.enable_flash_sdp(best == SDPBackend.FLASH_ATTENTION)
    torch.backends.cuda.enable_mem_efficient_sdp(best == SDPBackend.EFFICIENT_ATTENTION)
    torch.backends.cuda.enable_math_sdp(False)
    return best.name


class Kind:
    """One way to run PyTorch, with its times and its peak. All ways train the same parameters."""

    def __init__(self, name, trainer):
        self.name, self.trainer, self.steps, self.graph = name, trainer, [], None
        self.use()
        began = time.perf_counter()
        for _ in range(2):
            trainer.timed()
        if name.endswith("graph"):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                trainer.timed()
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # without what compiling took
        if name.endswith("graph"):
            trainer.capture()
            self.graph = trainer.graph
        trainer.timed()
        self.first = time.perf_counter() - began
        self.peak = torch.cuda.max_memory_allocated()  # a graph holds memory that is allocated only while it is made

    def use(self):
        self.trainer.model.use(KINDS[self.name])
        self.trainer.graph = self.graph

    def measure(self, n):
        self.use()
        torch.cuda.reset_peak_memory_stats()
        self.steps += [self.trainer.timed() for _ in range(n)]
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())

    def profile(self):
        from torch.profiler import ProfilerActivity, profile

        batches = self.trainer.batches()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            self.trainer.train(batches)
            torch.cuda.synchronize()
        rows = sorted(((e.self_device_time_total, e.count, e.key) for e in p.key_averages()), reverse=True)
        all = sum(r[0] for r in rows)
        say(f"  {self.name}: {all / 1e3:.1f} ms of kernels in a step")
        for t, n, name in rows[:32]:
            say(f"    {t / 1e3:8.2f} ms {t / all:6.1%} {n:5} x {t / n:8.1f} us  {name[:110]}")


def rate(steps, tokens):
    return tokens / statistics.median(s["seconds"] for s in steps)


def start(name, trainer):
    """A kind behind its first steps, or None if this PyTorch cannot run it."""
    try:
        return Kind(name, trainer)
    except Exception as e:
        say(f"  PyTorch {name} failed: {type(e).__name__}: {str(e).strip()[:600]}")
    torch.cuda.empty_cache()
    return None


def speed(program, name):
    a = ARGS
    config = MODELS[name]
    about, settings = describe(config)
    tokens = a.micro * a.seq * a.microbatches
    params, flops = work(about, a.seq)
    say(f"{name}: {params / 1e6:.1f} M parameters, {flops * tokens / 1e12:.1f} TFLOP a step of {tokens} tokens; attention by {fastest_attention(about)}")
    data = {"seq": a.seq, "micro": a.micro, "microbatches": a.microbatches, "ranks": 1, "targets": 1, "seed": 1}
    text, results, kinds = Text(data), {}, []
    runs = {}
    try:
        for policy in a.policy:  # one at a time: a run times its first steps to plan the others
            began = time.monotonic()
            runs[policy] = program.start(config, policy, (a.micro, a.seq, a.microbatches))
            runs[policy].until(WARM)
            say(f"  stowage {policy.split()[0]}: first steps took {time.monotonic() - began:.1f} s")
        mine = {policy: [] for policy in runs}
        for i in range(a.rounds if len(runs) > 1 else 0):
            for policy in a.policy[:: 1 - i % 2 * 2]:  # to and fro: who was before decides how warm the GPU is
                mine[policy] += runs[policy].turn(a.measured)
        for policy in a.policy[1:]:
            runs[policy].end()
        first, beside = runs[a.policy[0]], []
        trainer = Trainer(about, settings, draw(about, "cuda"), text, "cuda") if a.kinds else None
        for way in a.kinds:
            kind = start(way, trainer)
            if kind is None:
                continue
            kinds.append(kind)
            say(f"  PyTorch {kind.name}: first steps took {kind.first:.1f} s")
            if a.profile and not kind.graph:
                kind.profile()
        if a.kinds and not kinds:
            sys.exit("torch_moe: no kind of PyTorch ran")
        for i in range(a.rounds):
            for kind in [None, *kinds][:: 1 - i % 2 * 2]:
                if kind:
                    kind.measure(a.measured)
                else:
                    beside += first.turn(a.measured)
    finally:
        for run in runs.values():
            run.end()
    best, best_rate = max(((k.name, rate(k.steps, tokens)) for k in kinds), key=lambda k: k[1], default=(a.policy[0], rate(beside, tokens)))
    rows = [("PyTorch " + k.name, rate(k.steps, tokens), k.peak, 1) for k in kinds]
    for policy, run in runs.items():
        slower = rate(mine[a.policy[0]], tokens) / rate(mine[policy], tokens) if mine[policy] else 1
        short = policy.split()[0]
        rows.append(("stowage " + (short if [p.split()[0] for p in a.policy].count(short) == 1 else policy), rate(beside, tokens) / slower, run.steps[-1]["peak_device_bytes"], slower))
        if any(s["loss"] != t["loss"] for s, t in zip(first.steps, run.steps)):
            sys.exit(f"torch_moe: losses of {name} under {policy} are not those under {a.policy[0]}")
    for who, r, peak, slower in rows:
        say(f"  {who:24} {r:10.0f} tokens/s {peak / 2**30:8.2f} GiB {flops * r / 1e12:7.1f} TFLOP/s {r / best_rate:7.3f}x" + (f", a step takes {slower:.3f}x of {a.policy[0]}'s" if slower != 1 else ""))
        results[who] = {"tokens_per_second": r, "peak_bytes": peak, "ratio": r / best_rate}
        if who.startswith("stowage"):
            results[who]["step_ratio"] = slower
    return {"model": name, "hardware": torch.cuda.get_device_name(), "parameters": params, "flops_per_token": flops, "tokens": tokens, "best": best, "results": results}


def alone(work, *args):
    """The result of work in a process of its own, which leaves nothing on the GPU."""
    fork = multiprocessing.get_context("fork")
    mine, its = fork.Pipe(False)
    child = fork.Process(target=lambda: its.send(work(*args)))
    child.start()
    its.close()
    try:
        return mine.recv()
    except EOFError:
        sys.exit(1)  # it said why
    finally:
        child.join()


def write(out):
    """Writes the figures so far."""
    if not ARGS.json:
        return
    figures = {f"{s['model']}_{who.replace(' ', '_')}_{k}": v for s in out["speed"] for who, r in s["results"].items() for k, v in r.items()}
    label = {"bench": "torch_moe", "command": shlex.join(sys.argv), "hardware": next((s["hardware"] for s in out["speed"]), ""), "figures": figures}
    pathlib.Path(ARGS.json).write_text(json.dumps({**label, **out}, indent=2) + "\n")


def main():
    a, bad, out = ARGS, [], {"torch": torch.__version__, "check": {}, "speed": []}
    with tempfile.TemporaryDirectory() as folder:
        program = Stowage(folder)
        for name in [] if a.no_check else a.model:
            x = out["check"][name] = check(program, name)
            x["same"] = x["loss_differs"] <= TOLERANCE and x["norm_differs"] <= 10 * TOLERANCE  # a NaN is not
            if not x["same"]:
                bad.append(name)
            say(f"{name}, tiny, fp32: losses differ by {x['loss_differs']:.1e} at most, norms by {x['norm_differs']:.1e} of them")
        for name in [] if a.quick else a.model:
            out["speed"].append(alone(speed, program, name))
            write(out)
    write(out)
    if bad:
        sys.exit(f"torch_moe: {', '.join(bad)}: losses or norms of the programs differ")


if __name__ == "__main__":
    main()
