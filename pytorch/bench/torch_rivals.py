#!/usr/bin/env python3
"""Time against memory: Stowage and what a PyTorch user would pick instead, at equal peaks, in one
process.

    pip install --no-deps dist/stowage-*.whl # or: PYTHONPATH=pytorch STOWAGE_LIBRARY=build/libstowage.so
    python3 pytorch/bench/torch_rivals.py --list
    python3 pytorch/bench/torch_rivals.py --model gpt --json gpt.json --svg gpt.svg
    python3 pytorch/bench/torch_rivals.py --model vit conv --quick
    python3 pytorch/bench/torch_rivals.py --import mine:make     # mine.make() returns (model, step(model) -> loss[, names of blocks])
    python3 pytorch/bench/torch_rivals.py --small --quick        # on the CPU: does it run? times mean nothing

A step clears the gradients, which stay allocated, and runs the forward and backward passes;
there is no optimiser. Targets are peaks that leave a share of what the step saves:

    target = peak of eager - saved + share x saved

At each target these kinds are tried; the peak of each is at most the target, or it does not
count:
  checkpoint       of k blocks of n, spread evenly, with the smallest k that fits
  selective        the same, keeping matrix products, convolutions and attention
  compile          torch.compile of each block, with values of activation_memory_budget
  compiled checkpoint  checkpoints of k compiled blocks
  save_on_cpu      PyTorch's own offload (--slow)
  stowage          the plug-in with the target as its budget; also on compiled blocks, on those
                   with exact=False, and with half of the checkpoints of the first kind (--mixed)
Then eager is compared with the plug-in under a budget that holds everything.

All kinds are first run once or twice, which gives their peaks and rough times. The fastest
ones that fit, or eager if none does, and Stowage then take turns, until the ratio of Stowage to the fastest rival is
known well enough for a verdict, or there were many; with --seconds, until the time of a target is over. A time is the median
of its turns. A ratio is the median of the ratios within a turn: a slower clock or a busy host lengthens both. The peak is torch.cuda.max_memory_allocated() plus what the runtime holds itself; Stowage's is the
highest of all its steps. On the CPU there is no such figure: there it is counted from weights,
gradients and saved tensors. A cell is a target of a model: Stowage is not slower if it takes at
most 1.005 of the time of the fastest rival, and 3 % faster at 0.97.

Gradients of each kind are compared with those of eager, or of compiled blocks, bit for bit,
if these repeat themselves; --exact makes PyTorch deterministic, which is slower. A rival whose
gradients differ does not count: with dropout a selective checkpoint draws other masks. Blocks
that are compiled with another budget may round otherwise. They count unless their gradients
differ by a sixteenth or more, which no rounding does: with dropout they are wrong, because
PyTorch draws another mask in the backward pass (pytorch/pytorch#190758).
"""

import argparse
import gc
import itertools
import json
import os
import pathlib
import sys
import time
import traceback

sys.dont_write_bytecode = True
STARTED = time.perf_counter()
NAMES = ["gpt", "gpt-wide", "llama", "mixture", "vit", "conv", "megatron"]
LAYERED = {"gpt", "gpt-wide", "llama", "mixture", "vit"}  # transformers that can have any number of layers
REPEATS = 4  # steps that must give the same gradients; adding in any order often does in two
FAMILIES = ["checkpoint", "selective", "compile", "compiled-checkpoint", "stowage", "stowage-compiled", "stowage-inexact", "nothing-moved"]
COMPILED = {"compile", "compiled-checkpoint", "stowage-compiled", "stowage-inexact"}


def above_zero(text):
    """Reads a number above zero. Not-a-number is none."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", nargs="+", choices=NAMES, metavar="NAME", help="only these (default all): " + ", ".join(NAMES))
    p.add_argument("--layers", type=int, help="layers of the transformers, megatron's excepted")
    p.add_argument("--import", dest="imported", action="append", default=[], metavar="MODULE:FUNCTION", help="a model of your own; without --model only that")
    p.add_argument("--list", action="store_true", help="list models and kinds")
    p.add_argument("--kinds", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="KIND", help="only these: " + ", ".join(FAMILIES))
    p.add_argument("--shares", nargs="+", type=float, help="percent of what is saved that targets leave (default 85 70 50 30 20)")
    p.add_argument("--compile-budgets", nargs="*", type=float, help="values of activation_memory_budget (default 1.0 0.7 0.5)")
    p.add_argument("--same-peaks", action="store_true", help="instead of shares, targets are the peaks of the kind compile with budgets below 1.0")
    p.add_argument("--compile-all", action="store_true", help="compile models, too, whose graphs break in every block")
    p.add_argument("--steps", type=int, help="measured turns (default 4); of short steps up to four times as many")
    p.add_argument("--seconds", type=above_zero, default=float("inf"), help="time for all; each model gets an equal part of what is left, and each of its targets too, which has turns until its part is over, and three at least. When no time is left, targets are reported as not measured")
    p.add_argument("--settle", type=int, default=100, help="steps that Stowage gets at most to record and settle its plan (default 100)")
    p.add_argument("--rivals", type=int, default=2, help="rivals that take turns at each target, beside the best that is not compiled (default 2)")
    p.add_argument("--groups", choices=["known", "blocks"], default="known", help="groups for attach(): names that it knows, or whole blocks")
    p.add_argument("--slow", action="store_true", help="save_on_cpu, too")
    p.add_argument("--mixed", action="store_true", help="Stowage with some blocks checkpointed, too")
    p.add_argument("--exact", action="store_true", help="deterministic algorithms, to compare gradients")
    p.add_argument("--quick", action="store_true", help="three targets, two compile budgets, two turns")
    p.add_argument("--small", action="store_true", help="tiny models, on the CPU if not told otherwise")
    p.add_argument("--device", choices=["cuda", "cpu"], help="default cuda, and with --small cpu")
    p.add_argument("--megatron-path", default="build/megatron", help="folder that has megatron/core (default build/megatron)")
    p.add_argument("--json", metavar="FILE", help="write all figures")
    p.add_argument("--svg", metavar="FILE", help="draw time against memory")
    a = p.parse_args()
    a.shares = a.shares or ([85, 50, 20] if a.quick else [85, 70, 50, 30, 20])
    if a.compile_budgets is None:
        a.compile_budgets = [1.0, 0.5] if a.quick else [1.0, 0.7, 0.5]
    if a.same_peaks and ("compile" not in a.kinds or all(b >= 1 for b in a.compile_budgets)):
        p.error("--same-peaks takes targets from the kind compile, so that it must be among --kinds, with a budget below 1.0 among --compile-budgets")
    if a.layers is not None and (a.layers < 1 or not a.model or not LAYERED.issuperset(a.model)):
        p.error("--layers takes a number above 0, and --model with some of " + ", ".join(sorted(LAYERED)))
    a.steps = a.steps or (2 if a.quick else 4)
    return a


ARGS = parse()
if ARGS.list:
    print("models: " + ", ".join(NAMES) + "\nkinds: " + ", ".join(FAMILIES))
    sys.exit()
if ARGS.exact:  # read when cuBLAS is loaded
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
try:
    import torch

    import stowage
except ImportError as e:
    sys.exit(f"torch_rivals: {e}; install PyTorch and `pip install dist/stowage-*.whl`, or set PYTHONPATH=pytorch")
DEVICE = ARGS.device or ("cpu" if ARGS.small else "cuda")
if DEVICE == "cuda" and not torch.cuda.is_available():
    sys.exit("torch_rivals: PyTorch finds no CUDA GPU; --small --quick tries it without one")

import rivals_report as report
from rivals_kinds import MIB, SEED, Bench, Checkpoint, Compiled, Kind, OnCPU, Shared, Stowed, Unsupported, count_saved, inductor, selective, sentence, smallest
from rivals_megatron import megatron
from rivals_models import MODELS, imported
from rivals_picture import picture


ROUNDING = 1 / 16
LEAST, ENOUGH = 3, 6  # turns if there is no time, and those after which a ratio may be known
MOST = 5  # turns go on until a verdict is known, at most so many times as often


def in_turn(kinds, turn):
    """Returns the kinds in another order at every turn."""
    first = turn % len(kinds)
    order = kinds[first:] + kinds[:first]
    return order if turn // len(kinds) % 2 == 0 else order[::-1]


def known(kinds, limits):
    """Reports whether the times of turns tell on which side of the limits the ratio of our kind to each of the others is."""
    ours = next((k for k in kinds if k.ours), None)
    others = [k for k in kinds if k is not ours and k.error is None]
    if ours is None or any(len(k.times) != len(ours.times) or len(k.times) < ENOUGH for k in [ours, *others]):
        return False
    return all(report.tells(ours.times, k.times, limits) for k in others)


def say(text):
    print(text, flush=True)


class Trial:
    """Measures one model. Kinds that were run are in `kinds`, with what they took."""

    def __init__(self, name, case, until=float("inf")):
        self.until = until  # when it should be over
        self.name, self.case, self.bench = name, case, Bench(case, DEVICE)
        self.kinds, self.cells, self.backends = [], [], {}
        self.eager = Kind(self.bench, "eager")
        self.repeats = {"eager": True}
        if hasattr(getattr(torch, "compiler", None), "reset") and self.compiles():
            torch.compiler.reset()  # graphs of the model before; it takes seconds to load

    def compiles(self):
        return (self.case.compiles or ARGS.compile_all) and not COMPILED.isdisjoint(ARGS.kinds)

    def wants(self, family):
        return family in ARGS.kinds

    def run(self):
        self.measure_eager()
        self.probe_compiled()
        targets = self.probe_checkpoints()
        nothing = self.nothing_moved(self.part_of(len(targets) + 1)) if self.wants("nothing-moved") else None
        for i, (share, target, found) in enumerate(targets):
            begin = time.perf_counter()
            if begin > STARTED + ARGS.seconds:
                self.cells.append(report.decide({"share": share, "target_mib": target / MIB, "ours": []}))
                say(report.cell_line(self.cells[-1]))
                continue
            self.measure_target(share, target, found, self.part_of(len(targets) - i))
        slow = self.save_on_cpu() if ARGS.slow else None  # last: PyTorch does not give its pinned memory back
        return {
            "model": self.name, "what": self.case.what, "parameters": sum(p.numel() for p in self.case.model.parameters()), "blocks": len(self.case.blocks),
            "saved_mib": self.saved / MIB, "eager_mib": self.eager.peak / MIB, "repeats": self.repeats, "counted": not self.bench.cuda,
            "rows": [report.row(k, self) for k in [self.eager, slow, nothing, *self.kinds] if k is not None], "cells": self.cells,
        }  # fmt: skip

    def part_of(self, parts):
        """Returns when the next of so many equal parts of the time that is left is over."""
        now = time.perf_counter()
        return now + max(self.until - now, 0) / parts

    def measure_eager(self):
        """Measures what eager takes and saves, and whether its gradients repeat."""
        k = self.eager
        for _ in range(2):
            k.step()  # libraries load, the allocator grows
        self.bench.keep_gradients("eager")
        k.peak = 0
        for _ in range(REPEATS):
            k.probe = k.step()
            self.repeats["eager"] &= self.bench.difference("eager") == 0
        k.differs = 0.0
        torch.manual_seed(SEED)
        self.bench.clear()
        self.saved = count_saved(k.loss, k.model)
        k.count()
        say(f"  eager {k.probe:.1f} ms, peak {k.peak / MIB:,.1f} MiB, of which {self.saved / MIB:,.1f} MiB are saved; gradients {'repeat' if self.repeats['eager'] else 'DIFFER from one step to the next'}")

    def probe(self, kind, warm=0):
        """Runs a kind to see its peak and roughly its time. Returns the kind."""

        def steps():
            for _ in range(warm):
                kind.step()
            kind.peak = 0
            kind.probe = kind.step()
            kind.count()
            self.compare(kind)

        kind.tried(steps)
        kind.rest()
        self.kinds.append(kind)
        return kind

    def compare(self, kind):
        """Compares gradients, of rivals once."""
        if self.repeats.get(kind.like, False) and (kind.ours or kind.differs is None):
            kind.differs = max(self.bench.difference(kind.like), kind.differs or 0.0)
            if kind.differs and kind.like == "eager":
                self.check_repeats()

    def check_repeats(self):
        """Looks once more whether gradients of eager repeat: adding in any order often gives the same sums for some steps."""
        for _ in range(2 * REPEATS):
            self.eager.step()
            self.repeats["eager"] &= self.bench.difference("eager") == 0

    def probe_compiled(self):
        """Compiles the blocks for each budget, if anything that is asked for needs it."""
        if not self.compiles():
            return
        budgets = ARGS.compile_budgets if self.wants("compile") else []
        for budget in dict.fromkeys([1.0, *budgets]):
            begin = time.perf_counter()
            make = lambda: self.backends.__setitem__(budget, inductor(budget, False if self.case.compiles else None))
            if not self.supported(make):
                break
            kind = self.probe(Compiled(self.bench, budget, self.backends[budget]), warm=2)
            say(f"  {kind.name}: {kind.error or f'{kind.probe:.1f} ms, peak {kind.peak / MIB:,.0f} MiB'} ({time.perf_counter() - begin:.0f} s to compile)")
            self.bench.forget()
            if kind.error is not None:
                del self.backends[budget]
            elif budget == 1.0:
                self.bench.keep_gradients("compile 1.0")
                self.repeats["compile 1.0"] = True
                for _ in range(REPEATS):
                    kind.step()
                    self.repeats["compile 1.0"] &= self.bench.difference("compile 1.0") == 0

    def make_ladders(self):
        """Returns the families of checkpoints, each as a function of k, with those tried."""
        ladders = {}
        if self.wants("checkpoint"):
            ladders["checkpoint"] = lambda k: Checkpoint(self.bench, k)
        if self.wants("selective") and self.supported(selective):
            ladders["selective"] = lambda k: Checkpoint(self.bench, k, "selective")
        if self.wants("compiled-checkpoint") and 1.0 in self.backends:
            ladders["compiled checkpoint"] = lambda k: Checkpoint(self.bench, k, "compiled checkpoint", self.backends[1.0])
        return {name: (make, {}) for name, make in ladders.items()}

    def probe_checkpoints(self):
        """Returns the targets: a share, a peak, and of each family the fewest checkpoints that
        fit, by name. No runtime is open, and the allocator has all memory that they take."""
        self.eager.step()
        ladders, targets = self.make_ladders(), []
        if ARGS.same_peaks:
            peaks = dict.fromkeys(k.peak for k in self.kinds if k.family == "compile" and k.budget < 1 and k.error is None)
            if not peaks:
                say("  no compiled peaks to take as targets")
            goals = [(round(100 - 100 * (self.eager.peak - peak) / self.saved, 1), peak) for peak in peaks]
        else:
            goals = [(share, int(self.eager.peak - self.saved + share / 100 * self.saved)) for share in ARGS.shares]
        for share, target in goals:
            found = {}
            for name, (make, tried) in ladders.items():
                if any(self.wrong(k) for k in tried.values()):
                    continue  # more checkpoints of this family would be as wrong
                found[name] = self.fewest(target, make, tried)
            targets.append((share, target, found))
        return targets

    def wrong(self, kind):
        """Reports whether the gradients of a rival are not those of what it is compared with."""
        return self.repeats.get(kind.like) and (kind.differs or 0) > (ROUNDING if kind.family == "compile" else 0)

    def supported(self, what):
        try:
            what()
        except Unsupported as e:
            say(f"  skipped: {e}")
            return False
        return True

    def fewest(self, target, make, tried):
        """Returns the checkpoints with the smallest k whose peak is at most the target, or None."""
        n = len(self.case.blocks)

        def peak(k):
            if k not in tried:
                tried[k] = self.probe(make(k), warm=1 if k == n else 0)
            return tried[k].peak if tried[k].error is None else None

        k = smallest(peak, n, target, self.eager.peak, tried)
        return None if k is None else tried[k]

    def save_on_cpu(self):
        kind = OnCPU(self.bench)

        def steps():
            kind.step()  # pins memory
            kind.probe = kind.step()
            kind.count()

        kind.tried(steps)
        if not self.bench.cuda:
            kind.peak = 0  # what is saved is still in the same memory
        return kind

    def turns(self, kinds, until, times=1, limits=(report.FASTER, report.NOT_SLOWER)):
        """Runs kinds in turns until it is known on which side of the limits our kind is, for as long as there is time, and if it has
        no end, so many times more than usual at most; the first turn does not count. Rivals have their peaks from before, when no runtime was open."""
        began = time.perf_counter()
        peaks = {k: k.peak for k in kinds if not k.ours}
        for k in kinds:
            k.times = []
        for turn in itertools.count():
            # A device that reaches its power limit slows down about once in a second. In one order it would
            # do so in the same kind at every turn.
            for k in in_turn(kinds, turn):
                took = k.tried(k.step)
                if took is not None and turn:
                    k.times.append(took)
                    if k is self.eager and self.repeats["eager"]:
                        self.repeats["eager"] = self.bench.difference("eager") == 0
                    elif turn == 1:
                        k.tried(lambda: self.compare(k))
                k.leave()
            now = time.perf_counter()
            over = now + (now - began) / (turn + 1) > until if until < float("inf") else turn >= MOST * times * ARGS.steps  # when another turn would end
            failed = any(k.ours and k.error is not None for k in kinds)
            done = turn >= min(LEAST, ARGS.steps) and (over or failed or known(kinds, limits))
            if done:
                break
        for k in kinds:
            k.against, k.peak = report.paired(k.times, self.eager.times) if self.eager in kinds else None, peaks.get(k, k.peak)
            k.rest()

    def measure_ours(self, kind, others, until, *turns):
        """Measures Stowage in turns with others, until about then. Returns its time and theirs."""
        begin = time.perf_counter()
        kind.tried(lambda: kind.settle(ARGS.settle, until))
        settled = time.perf_counter()
        self.turns([*others, kind], until, *turns)
        kind.tried(kind.count)
        kind.close()
        kind.seconds = settled - begin, time.perf_counter() - settled
        return {k.name: k.median() for k in [*others, kind] if k.error is None and k.times}

    def stowed(self, name, budget, **more):
        return Stowed(self.bench, name, budget, ARGS.groups, least=0 if ARGS.small else None, **more)

    def nothing_moved(self, until):
        kind = self.stowed("stowage, nothing moved", "1TiB")
        self.measure_ours(kind, [self.eager], until, 3, [report.NOTHING])
        say(f"  {kind.name}: {kind.error or f'{kind.median():.1f} ms, {kind.against:.3f} of eager'}; {report.effort(kind)}")
        return kind

    def measure_target(self, share, target, found, until):
        compiled = [k for k in self.kinds if k.family == "compile"]
        fitting = sorted((k for k in [*found.values(), *compiled] if k is not None and k.error is None and k.peak <= target and not self.wrong(k)), key=lambda k: k.probe)
        plain = [k for k in fitting if not k.compiled][:1]  # for those who cannot compile
        rivals = list(dict.fromkeys(fitting[: ARGS.rivals] + plain))
        cell = {"share": share, "target_mib": target / MIB, "ours": []}
        ours = []
        if self.wants("stowage"):
            ours.append(self.stowed(f"stowage, {share:g} %", target))
        if ARGS.mixed and found.get("checkpoint") is not None:
            k = (found["checkpoint"].k + 1) // 2
            ours.append(self.stowed(f"stowage, {share:g} %, {k} checkpointed", target, checkpoints=k))
        if self.wants("stowage-compiled") and 1.0 in self.backends:
            ours.append(self.stowed(f"stowage, {share:g} %, compiled", target, backend=self.backends[1.0]))
        if self.wants("stowage-inexact") and 1.0 in self.backends:
            ours.append(self.stowed(f"stowage, {share:g} %, compiled, exact=False", target, backend=self.backends[1.0], exact=False))
        for i, kind in enumerate(ours):
            # A device has one runtime at a time: later kinds of ours run beside the best rivals alone.
            best = report.best(rivals)[:1] if kind.compiled else report.best(rivals)
            beside = rivals or [self.eager] if i == 0 else best
            kind.target, kind.tag = target, f"{share:g} %"
            left = time.perf_counter()
            report.note(cell, kind, rivals, self.measure_ours(kind, beside, left + (until - left) / (len(ours) - i)))
            self.kinds.append(kind)
        if ours:
            self.cells.append(report.decide(cell))
            say(report.cell_line(cell) + "".join(f"\n    {report.effort(kind)}" for kind in ours))
        else:
            self.turns([self.eager, *rivals], until)


def measure(name, make, models):
    """Measures a model, the first of so many that are left."""
    begin = time.perf_counter()
    until = begin + (STARTED + ARGS.seconds - begin) / models
    torch.manual_seed(0)
    case = make()
    say(f"{name}: {case.what or 'your own'}; {sum(p.numel() for p in case.model.parameters()) / 1e6:,.1f} M parameters, {len(case.blocks)} blocks")
    where = {p.device.type for p in case.model.parameters()}
    if where != {DEVICE}:
        raise ValueError(f"expected all parameters on {DEVICE}, got {sorted(where)}; move the model, or give --device")
    trial = Trial(name, case, until)
    gc.disable()
    trial.bench.forget()
    try:
        result = trial.run()
    finally:
        Shared.end_all()  # others may need more host memory for gradients
        gc.enable()
        gc.unfreeze()
    result["seconds"] = round(time.perf_counter() - begin, 1)
    say(report.table(result))
    return result


def makers():
    names = ARGS.model or ([] if ARGS.imported else NAMES)
    for name in names:
        if name == "megatron":
            yield name, lambda: megatron(ARGS.megatron_path, ARGS.small, DEVICE)
        else:
            yield name, lambda make=MODELS[name]: make(ARGS.small, DEVICE, **({} if ARGS.layers is None else {"layers": ARGS.layers}))
    for name in ARGS.imported:
        sys.path.insert(0, os.getcwd())
        yield name, lambda name=name: imported(name)


def write(out):
    """Writes what there is so far."""
    if ARGS.json:
        pathlib.Path(ARGS.json).write_text(json.dumps(out, indent=2) + "\n")
    if ARGS.svg:
        pathlib.Path(ARGS.svg).write_text(picture(out))


def main():
    if ARGS.exact:
        torch.use_deterministic_algorithms(True, warn_only=True)
        if hasattr(torch.utils, "deterministic"):
            torch.utils.deterministic.fill_uninitialized_memory = False  # no kind reads it
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    out = {"torch": torch.__version__, "stowage": stowage.__version__, "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu", "exact": ARGS.exact, "models": [], "failed": []}
    say(f"PyTorch {out['torch']} on {out['device']}, stowage {out['stowage']}")
    todo = list(makers())
    for i, (name, make) in enumerate(todo):
        try:
            result = measure(name, make, len(todo) - i)
            out["models"].append(result)
            out["failed"] += report.failures(result)
        except Unsupported as e:
            say(f"{name}: skipped: {e}")
        except Exception as e:
            traceback.print_exc()
            out["failed"].append(f"{name}: {sentence(e)}")
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        write(out)
    say(report.overview(out["models"]))
    say(report.summary(out["models"]))
    for text in out["failed"]:
        say(f"FAILED: {text}")
    sys.exit(1 if out["failed"] else 0)


if __name__ == "__main__":
    main()
