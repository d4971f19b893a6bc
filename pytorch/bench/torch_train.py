#!/usr/bin/env python3
"""Trains the models of `stowage train` in PyTorch, too, from the same weights on the
same text. Every step's loss must be the same to 1e-4, and the norm of its gradients to
1e-3 of it. Tokens per second of both are measured in turns.

    python3 pytorch/bench/torch_train.py                     # all models, then speed
    python3 pytorch/bench/torch_train.py --quick             # small batches, under a minute
    python3 pytorch/bench/torch_train.py --model tiny-moe --no-speed

It needs PyTorch (Debian's python3-torch is enough) and nothing else; for speed PyTorch
needs an optimised BLAS (libopenblas0-pthread). stowage trains one step and saves a
checkpoint; both continue from its weights, moments and place in the text.

Losses are compared at a low learning rate (--lr). At the default rate the loss of a
mixture is chaotic in its first steps: the order of a sum decides which expert some tokens
get. After 15 steps the third digit differs, between two layouts of ranks of stowage as
well as between the two programs.

Speed is measured with one rank under the policy none, with as many threads as PyTorch
has. The programs run in turns, and a rate is that of the middle step; the rate of the best
step depends less on what else the machine does. OMP_WAIT_POLICY is passive unless set: on
a busy machine PyTorch's threads would wait long for each other. It prints one JSON object;
the exit code is 1 if a loss or a norm differs.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ["tiny-moe", "tiny-dense", "tiny-deepseek", "tiny-hybrid"]
ONE = {"pp": 1, "ep": 1, "dp": 1}
FOUR = {"pp": 2, "ep": 2, "dp": 2}
TOLERANCE = 1e-4  # of losses
NORM_TOLERANCE = 1e-3  # of the norm of all gradients, relative
# Steps that are not measured: stowage records the first and times the second.
WARM = 4


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stowage", help="the program (default: it is built from this tree)")
    p.add_argument("--model", action="append", choices=MODELS, help="a model to compare (default all)")
    p.add_argument("--steps", type=int, default=20, help="steps to compare (default 20)")
    p.add_argument("--lr", default="3e-4", help="learning rate of the compared steps (default 3e-4)")
    p.add_argument("--micro", type=int, default=8, help="sequences of a microbatch (default 8)")
    p.add_argument("--seq", type=int, default=128, help="tokens of a sequence (default 128)")
    p.add_argument("--microbatches", type=int, default=4, help="of a step, over all replicas (default 4)")
    p.add_argument("--threads", type=int, help="of each program (default all cores, with --quick one)")
    p.add_argument("--rounds", type=int, default=3, help="of the measurement of speed (default 3)")
    p.add_argument("--measured", type=int, default=8, help="steps measured in a round (default 8)")
    p.add_argument("--no-speed", action="store_true", help="compare losses only")
    p.add_argument("--golden", metavar="RUN", help="only print what --steps steps from the checkpoint of a run come to in float64, with the gradients of the first: the numbers that the tests of train compare with")
    p.add_argument("--quick", action="store_true", help="small batches on one thread; one rank and speed for the first model only")
    a = p.parse_args()
    if a.threads is None:
        a.threads = 1 if a.quick else len(os.sched_getaffinity(0))
    if a.quick:
        a.micro, a.seq, a.microbatches, a.rounds, a.measured = 2, 64, 2, 2, 4
    if min(a.steps, a.micro, a.seq, a.threads, a.rounds, a.measured) < 1 or a.microbatches < 2 or a.microbatches % 2:
        p.error("numbers must be at least 1, and --microbatches even: two replicas share them")
    return a


ARGS = parse()
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read when PyTorch is loaded
    os.environ[name] = str(ARGS.threads)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
try:
    import torch
except ImportError:
    sys.exit("torch_train: PyTorch is not installed; try `apt install python3-torch` or `pip install torch`")

sys.dont_write_bytecode = True  # nothing is left in the tree
from torch_checkpoint import Text, read_safetensors
from torch_model import Model, stacked


class Stowage:
    """Runs of the program."""

    def __init__(self, folder):
        self.program = ARGS.stowage
        if not self.program:
            self.program = os.path.join(folder, "stowage")
            self.call("go", "build", "-o", self.program, "./cmd/stowage", cwd=ROOT)

    def call(self, *command, **more):
        done = subprocess.run(command, capture_output=True, text=True, **more)
        if done.returncode:
            sys.exit(f"torch_train: `{' '.join(command)}` failed:\n{done.stderr.strip()}")

    def train(self, out, steps, *flags):
        """Trains up to a step, and gives the metrics of all steps."""
        self.call(self.program, "train", "--out", out, "--steps", str(steps), *flags, env={**os.environ, "GOMAXPROCS": str(ARGS.threads)})
        with open(os.path.join(out, "metrics.jsonl")) as f:
            return [json.loads(line) for line in f]

    def flags(self, model, ranks):
        flags = {"policy": "none", "model": model, "micro": ARGS.micro, "seq": ARGS.seq, "microbatches": ARGS.microbatches // ranks["dp"]}
        return [word for name, value in {**flags, **ranks}.items() for word in ("--" + name, str(value))]


class Trainer:
    """A run in PyTorch that goes on from a checkpoint."""

    def __init__(self, run, dtype=torch.float32):
        folder, = pathlib.Path(run, "checkpoints").glob("step-*")
        about = json.loads((folder / "checkpoint.json").read_text())
        self.config, self.step = about["config"], about["step"]
        self.text = Text(about["data"])
        weights = {n: t.to(dtype) for f in sorted(folder.glob("model-*")) for n, t in read_safetensors(f)}
        moments = {n: t.to(dtype) for f in sorted(folder.glob("optim-*")) for n, t in read_safetensors(f)}
        self.model = Model(self.config["model"], self.config["settings"], weights, self.config["batch"]["seq"])
        o = self.config["optim"]
        self.optim = torch.optim.AdamW(self.model.groups(o["weight_decay"]), lr=o["lr"], betas=(o["beta1"], o["beta2"]), eps=o["epsilon"])
        self.load(stacked(moments))

    def load(self, moments):
        for name, p in self.model.w.items():
            self.optim.state[p] = {"step": torch.tensor(float(self.step))} | {
                kind: moments[f"{name}.{kind}"].reshape(p.shape).clone() for kind in ("exp_avg", "exp_avg_sq")
            }

    def rate(self):
        o = self.config["optim"]
        if self.step < o["warm_up"]:
            return o["lr"] * (self.step + 1) / o["warm_up"]
        if not o["decay"]:
            return o["lr"]
        x = min(1, (self.step - o["warm_up"]) / max(1, o["decay"] - o["warm_up"]))
        return o["min_lr"] + (o["lr"] - o["min_lr"]) * (1 + math.cos(math.pi * x)) / 2

    def backward(self):
        """The gradients of one step, and its losses: those of each head, and the auxiliary one."""
        s = self.text.state
        count = s["ranks"] * s["microbatches"]
        total = count * s["micro"] * s["seq"]
        sums, aux = [0.0] * s["targets"], 0.0
        self.optim.zero_grad(set_to_none=True)
        for i in range(count):
            loss, parts, extra = self.model.loss(self.text.microbatch(self.step, i), total)
            loss.backward()
            sums = [a + b.item() for a, b in zip(sums, parts)]
            aux += extra.item() / count
        return sums, aux, total

    def train(self):
        """One step; gives what the metrics of stowage have of it."""
        began = time.perf_counter()
        sums, aux, total = self.backward()
        self.grads = {n: p.grad.clone() for n, p in self.model.w.items()} if ARGS.golden else {}
        clip = self.config["optim"]["clip"]
        norm = torch.nn.utils.clip_grad_norm_(self.model.w.values(), clip or math.inf)
        for g in self.optim.param_groups:
            g["lr"] = self.rate()
        self.optim.step()
        self.model.rebalance()
        self.step += 1
        return {"loss": sums[0], "mtp": sums[1:], "aux": aux, "grad_norm": norm.item(), "seconds": time.perf_counter() - began, "tokens": total}


def compare(program, model, ranks, folder):
    """The greatest differences over the steps of both."""
    program.train(folder, 1, *program.flags(model, ranks), "--lr", ARGS.lr)
    t = Trainer(folder)
    mine = program.train(folder, 1 + ARGS.steps, "--resume")[1:]
    theirs = [t.train() for _ in mine]

    def parts(m):
        return [m["loss"], m.get("aux", 0), *m.get("mtp", [])]

    norms = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(mine, theirs))
    differ = [abs(x - y) for a, b in zip(mine, theirs) for x, y in zip(parts(a), parts(b))]
    return {
        "model": model, **ranks, "steps": len(mine), "lr": t.config["optim"]["lr"], "tokens": mine[0]["tokens"],
        "first_loss": mine[0]["loss"], "last_loss": mine[-1]["loss"], "torch_last_loss": theirs[-1]["loss"],
        "loss_differs": max(differ), "norm_differs": norms,
        "same": all(d <= TOLERANCE for d in differ) and norms <= NORM_TOLERANCE,  # a NaN is not
    }


def speed(program, model, folder):
    """Tokens a second of both, in turns. The ratio is the middle one of the rounds."""
    a, rounds, best, flags = ARGS, [], [0, 0], program.flags(model, ONE)
    program.train(os.path.join(folder, "torch"), 1, *flags)
    t = Trainer(os.path.join(folder, "torch"))
    for _ in range(WARM):
        t.train()
    for i in range(a.rounds):
        mine = program.train(os.path.join(folder, str(i)), WARM + a.measured, *flags, "--save-every", "0")[WARM:]
        theirs = [t.train() for _ in mine]
        rounds.append([m[0]["tokens"] / statistics.median(x["seconds"] for x in m) for m in (mine, theirs)])
        best = [max(b, *(x["tokens"] / x["seconds"] for x in m)) for b, m in zip(best, (mine, theirs))]
    return {
        "model": model, "threads": a.threads, "micro": a.micro, "seq": a.seq, "microbatches": a.microbatches, "rounds": a.rounds,
        "tokens_per_second": statistics.median(r[0] for r in rounds), "torch_tokens_per_second": statistics.median(r[1] for r in rounds),
        "ratio": statistics.median(r[0] / r[1] for r in rounds), "best_step_ratio": best[0] / best[1], "load_average": os.getloadavg()[0],
    }


def golden(run):
    """What steps from a checkpoint come to in float64. A gradient is its norm and its
    product with the numbers of weigh; an expert's matrices have their own names."""
    torch.set_default_dtype(torch.float64)
    t = Trainer(run, torch.float64)
    steps, grads = [], {}
    for i in range(ARGS.steps):
        m = t.train()
        steps.append({k: m[k] for k in ("loss", "mtp", "aux", "grad_norm")})
        for name, g in t.grads.items() if i == 0 else ():
            if ".experts." in name:
                grads |= {name.replace(".experts.", f".experts.{e}."): weigh(x) for e, x in enumerate(g)}
            else:
                grads[name] = weigh(g)
    return {"torch": torch.__version__, "steps": steps, "grads": grads}


def weigh(g):
    g = g.flatten()
    return [g.norm().item(), (g * (torch.arange(len(g)) * 7919 % 1009 / 1009 - 0.5)).sum().item()]


def blas():
    """The file that PyTorch's products come from, if it is one of its own."""
    with open("/proc/self/maps") as f:
        names = {os.path.basename(line.split()[-1]) for line in f if ".so" in line}
    return sorted(n for n in names if "blas" in n or "mkl" in n)


def say(text):
    print(text, file=sys.stderr, flush=True)


def main():
    a = ARGS
    torch.set_num_threads(a.threads)
    if a.golden:
        print(json.dumps(golden(a.golden), indent=1))
        return
    (torch.ones(64, 64) @ torch.ones(64, 64)).sum()  # loads what products need
    models, losses, speeds = a.model or MODELS, [], []
    with tempfile.TemporaryDirectory() as folder:
        program = Stowage(folder)
        for model in models:
            for ranks in [FOUR] if a.quick and model != models[0] else [ONE, FOUR]:
                if model == "tiny-dense":
                    ranks = {**ranks, "ep": 1}
                with tempfile.TemporaryDirectory() as f:
                    x = compare(program, model, ranks, f)
                losses.append(x)
                say(f"{model:14} {ranks}: loss {x['first_loss']:.4f} to {x['last_loss']:.4f}, differs by {x['loss_differs']:.1e} at most, the norm by {x['norm_differs']:.1e} of it")
        for model in [] if a.no_speed else models[:1] if a.quick else models:
            with tempfile.TemporaryDirectory() as f:
                x = speed(program, model, f)
            speeds.append(x)
            both = f"{x['tokens_per_second']:.0f} tokens/s, PyTorch {x['torch_tokens_per_second']:.0f}"
            say(f"{model:14} {both}: {x['ratio']:.2f} times as many, of the best steps {x['best_step_ratio']:.2f}; threads {a.threads}, load {x['load_average']:.1f}")
    if speeds and blas() and not any(word in n for n in blas() for word in ("openblas", "mkl", "blis", "atlas")):
        say("torch_train: PyTorch runs on the reference BLAS, which is slow; install libopenblas0-pthread before you judge its speed")
    print(json.dumps({"torch": torch.__version__, "blas": blas(), "tolerance": TOLERANCE, "losses": losses, "speed": speeds}, indent=2))
    bad = [f"{x['model']} (pp {x['pp']}, ep {x['ep']}, dp {x['dp']})" for x in losses if not x["same"]]
    if bad:
        sys.exit(f"torch_train: {', '.join(bad)}: losses differ by more than {TOLERANCE}, or the gradients' norm by more than {NORM_TOLERANCE} of it")


if __name__ == "__main__":
    main()
