"""The comparison with what PyTorch itself offers: that it runs, counts and decides; the times of a
machine for tests mean nothing. SPEC S6.4."""

import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
import weakref
from xml.dom import minidom

from common import DEVICE, PLUGIN, torch
from torch import nn

BENCH = PLUGIN / "bench"
sys.path.insert(0, str(BENCH))

import rivals_kinds
import rivals_models
import rivals_picture
import rivals_report


class Blocks(unittest.TestCase):
    def test_spread_evenly(self):
        self.assertEqual([[], [3], [1, 3], [1, 2, 3], [0, 1, 2, 3]], [rivals_kinds.spread(k, 4) for k in range(5)])
        for n in range(1, 30):
            for k in range(n + 1):
                self.assertEqual(k, len(rivals_kinds.spread(k, n)))

    def test_smallest_number_of_checkpoints(self):
        for n in (1, 2, 7, 24):
            for fall in (1.0, 0.5, 2.0):  # straight, and bent both ways
                peaks = [1000 - int(800 * (k / n) ** fall) for k in range(n + 1)]
                for target in range(150, 1000, 7):
                    want = next((k for k in range(n + 1) if peaks[k] <= target), None)
                    asked = {}
                    got = rivals_kinds.smallest(lambda k: asked.setdefault(k, peaks[k]), n, target, peaks[0], asked)
                    self.assertEqual(want, got, (n, fall, target))
        self.assertIsNone(rivals_kinds.smallest(lambda k: None, 4, 10, 20))
        self.assertEqual(4, rivals_kinds.smallest(lambda k: 5 if k == 4 else None, 4, 10, 20))

    def test_the_list_with_the_most_parameters_has_the_blocks(self):
        heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        self.assertEqual(["1.0", "1.1", "1.2"], rivals_models.find_blocks(nn.ModuleList([heads, nn.Sequential(*layers)])))

    def test_a_twin_has_the_parameters_and_no_hooks(self):
        m = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
        t = rivals_kinds.twin(m)
        self.assertEqual([id(p) for p in m.parameters()], [id(p) for p in t.parameters()])
        seen = []
        t[1][0].register_forward_hook(lambda *_: seen.append(1))
        t[0].forward = lambda x: x
        x = torch.randn(2, 3)
        m(x)
        self.assertEqual([], seen)
        self.assertTrue(torch.equal(m[1](x), t(x)))
        self.assertEqual([1], seen)

    def test_a_twin_has_objects_that_keep_tensors(self):
        """What a pass leaves in an object of one kind would count as held when the next kind begins its step."""
        m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        m[0].dispatcher = m[1].dispatcher = types.SimpleNamespace(routing=torch.ones(3), config={})
        m[0].config = types.SimpleNamespace(scale=m[0].weight)
        t = rivals_kinds.twin(m)
        self.assertIsNot(m[0].dispatcher, t[0].dispatcher)
        self.assertIs(t[0].dispatcher, t[1].dispatcher)
        self.assertIs(m[0].dispatcher.config, t[0].dispatcher.config)
        self.assertIs(m[0].config, t[0].config)


class Older(unittest.TestCase):
    """Blocks that keep a tensor of their last pass, as Megatron-LM's do with the routing."""

    class Block(nn.Module):
        def __init__(self, core):
            super().__init__()
            self.up, self.core, self.calls = nn.Linear(4, 4), core, 0

        def forward(self, *, hidden, mask=None):
            self.calls += 1
            self.routing = self.core(torch.tanh(self.up(hidden)))
            return hidden + self.routing, mask

    class Model(nn.Module):
        def __init__(self, make):
            super().__init__()
            self.layers = nn.ModuleList(make(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x, _ = layer(hidden=x)
            return x

    def test_same_gradients(self):
        torch.manual_seed(1)
        model, x = self.Model(self.Block), torch.randn(2, 4)
        case = rivals_models.Case(model, lambda m: m(x.clone().requires_grad_()).square().sum(), blocks=[f"layers.{i}" for i in range(3)], core="core")
        bench = rivals_kinds.Bench(case, DEVICE)
        rivals_kinds.Kind(bench, "eager").step()
        bench.keep_gradients("eager")
        for family, calls in (("checkpoint", [1, 2, 2]), ("selective", [1, 1, 1])):
            kind = rivals_kinds.Checkpoint(bench, 2, family)
            kind.step()
            self.assertEqual(0.0, bench.difference("eager"))
            self.assertEqual(calls, [layer.calls - model.layers[i].calls for i, layer in enumerate(kind.blocks)])
            self.assertEqual([False, True, True], ["forward" in vars(layer.core if family == "selective" else layer) for layer in kind.blocks])
            held = weakref.ref(kind.blocks[0].routing)
            kind.leave()  # what its blocks keep counts against others
            gc.collect()
            self.assertIsNone(held())
            kind.step()
            self.assertEqual(0.0, bench.difference("eager"))


class Gradients(unittest.TestCase):
    def test_difference(self):
        m = nn.Linear(3, 2)
        bench = rivals_kinds.Bench(rivals_models.Case(m, None), m.weight.device.type)
        m.weight.grad.fill_(3.0)
        bench.keep_gradients("eager")
        self.assertEqual(0.0, bench.difference("eager"))
        m.bias.grad.fill_(-0.0)  # equal, but not each bit
        self.assertTrue(0 < bench.difference("eager") < 1e-200)
        m.weight.grad.fill_(6.0)
        self.assertAlmostEqual(1.0, bench.difference("eager"))


class Decide(unittest.TestCase):
    RIVALS = [{"kind": "checkpoint", "ms": 12.0, "compiled": False, "turns_ms": []}, {"kind": "compile", "ms": 10.0, "compiled": True, "turns_ms": []}]

    def cell(self, *ours):
        return rivals_report.decide({"share": 50, "target_mib": 1.0, "ours": [dict({"error": None, "turns_ms": [], "rivals": self.RIVALS}, **o) for o in ours]})

    def test_the_fastest_rival_counts(self):
        c = self.cell({"kind": "stowage", "ms": 11.0, "compiled": False, "fits": True}, {"kind": "both", "ms": 9.0, "compiled": True, "fits": True})
        self.assertEqual(("both", "compile", 0.9), tuple(c["all"][k] for k in ("stowage", "rival", "ratio")))
        self.assertEqual(("stowage", "checkpoint", 11 / 12), tuple(c["plain"][k] for k in ("stowage", "rival", "ratio")))

    def test_what_lengthens_a_turn_counts_for_both(self):
        rivals = [{"kind": "checkpoint", "ms": 100.0, "compiled": False, "turns_ms": [100.0, 100.0, 120.0]}]
        c = self.cell({"kind": "stowage", "ms": 118.0, "compiled": False, "fits": True, "turns_ms": [99.0, 118.0, 118.8], "rivals": rivals})
        self.assertEqual(0.99, c["all"]["ratio"])

    def test_what_turns_tell(self):
        for middle, spread, turns, want in ((0.96, 0.01, 20, True), (0.96, 0.1, 20, False), (0.96, 0.1, 2000, True), (0.99, 0.01, 20, True), (1.003, 0.01, 6, False), (1.03, 0.01, 6, True)):
            times = [middle + spread * ((7 * i) % turns / turns - 0.5) for i in range(turns)]
            with self.subTest(middle=middle, spread=spread, turns=turns):
                self.assertEqual(want, rivals_report.tells([100 * t for t in times], [100.0] * turns, (rivals_report.FASTER, rivals_report.NOT_SLOWER)))

    def test_over_the_target_is_no_result(self):
        c = self.cell({"kind": "stowage", "ms": 1.0, "compiled": False, "fits": False})
        self.assertIsNone(c["all"]["stowage"])
        self.assertEqual("cells: 1, not slower: 0, 3 % faster: 0", rivals_report.tally([c["all"]]))

    def test_no_rival_fits(self):
        c = self.cell({"kind": "stowage", "ms": 99.0, "compiled": False, "fits": True, "rivals": []})
        self.assertEqual("cells: 1, not slower: 1, 3 % faster: 1 (1 where no rival fits)", rivals_report.tally([c["all"]]))


class Turns(unittest.TestCase):
    def test_each_kind_has_each_place(self):
        """A device that slows down once in a turn slows down every kind."""
        code = "import sys; sys.argv = ['x', '--small', '--kinds', 'checkpoint']; import torch_rivals as t; print([t.in_turn(['a', 'b', 'c'], i) for i in range(6)], t.known([], []))"
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(BENCH), *([] if os.environ.get("STOWAGE_INSTALLED") else [str(PLUGIN)])]))
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        self.assertEqual("[['a', 'b', 'c'], ['b', 'c', 'a'], ['c', 'a', 'b'], ['c', 'b', 'a'], ['a', 'c', 'b'], ['b', 'a', 'c']] False", done.stdout.strip(), done.stderr)


    def test_as_many_as_there_is_time_for(self):
        """Turns go on until the time is over, or there were many, or the ratio is known to be on one side of each limit, but not for
        long if ours failed. All have some."""
        code = """
import sys
sys.argv = ['x', '--small', '--kinds', 'checkpoint']
import torch_rivals as t

class Kind:
    error, peak, compare = None, 0, None
    def __init__(self, ours, seconds, varies):
        self.ours, self.seconds, self.varies, self.times, self.n = ours, seconds, varies, [], 0
    def step(self):
        self.n += 1
        clock[0] += self.seconds
        return self.seconds * (1 + self.varies * (self.n * 5 % 8 - 4))
    def tried(self, what):
        return what()
    def leave(self):
        pass
    rest = leave
    def median(self):
        return 1.0

clock = [0.0]
t.time.perf_counter = lambda: clock[0]
ever = float('inf')
for ratio, varies, until, times, error in (
    (1, 0.1, ever, 1, None), (1, 0.1, ever, 3, None), (1, 0, ever, 1, None), (1.005, 0, ever, 1, None), (0.96, 0.004, ever, 3, None), (0.99, 0.004, ever, 3, None),
    (1, 0.1, 0, 1, None), (1, 0.1, 0, 4, None), (1, 0.1, 10, 1, None), (1, 0, 20.5, 4, None), (1, 0.1, 1e9, 1, 'too small'), (0.9, 0.004, 1e9, 1, None),
):
    clock[0] = 0.0
    trial = t.Trial.__new__(t.Trial)
    ours, other = Kind(True, ratio, varies), Kind(False, 1, 0)
    ours.error = error
    trial.eager, trial.repeats, trial.compare = other, {'eager': False}, lambda kind: None
    trial.turns([other, ours], clock[0] + until, times)
    print(len(ours.times), end=' ')
"""
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(BENCH), *([] if os.environ.get("STOWAGE_INSTALLED") else [str(PLUGIN)])]))
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        self.assertEqual("20 60 6 20 7 6 3 3 4 6 3 6", done.stdout.strip(), done.stderr)


class Overview(unittest.TestCase):
    ROW = {"kind": "stowage, 50 %", "error": None, "ratio": 1.2, "kept": True, "gradients": "equal"}

    def test_a_line_for_each_model(self):
        ours = {"kind": "stowage, 50 %", "ms": 9.0, "turns_ms": [8.0, 9.0, 18.0], "rivals": [{"ms": 12.0, "turns_ms": []}, {"ms": 10.0, "turns_ms": [10.0, 9.5, 20.0]}]}
        model = lambda ours, **row: {"model": "m", "rows": [dict(self.ROW, **row), {"kind": "stowage, nothing moved", "ratio": 1.001}], "cells": [{"share": 50, "ours": ours}]}
        for want, ours_, row in (
            ("m: 50 % 0.900, kept, equal; nothing moved 1.001", [ours], {}),
            ("m: 50 % 0.900, EXCEEDED, varying; nothing moved 1.001", [ours], {"kept": False, "gradients": "eager differs from itself"}),
            ("m: 50 % 1.200 of eager, no rival, kept, equal; nothing moved 1.001", [dict(ours, rivals=[])], {}),
            ("m: 50 % too small; nothing moved 1.001", [ours], {"error": "a budget of 1 B is too small"}),
            ("m: 50 % not measured; nothing moved 1.001", [], {}),
        ):
            self.assertEqual(want, rivals_report.overview([model(ours_, **row)]))


class Whole(unittest.TestCase):
    def run_it(self, *args, cwd=None):
        env = dict(os.environ, CUDA_VISIBLE_DEVICES="")  # a GPU's libraries hold more than small models
        if "STOWAGE_LIBRARY" in env:
            env["STOWAGE_LIBRARY"] = os.path.abspath(env["STOWAGE_LIBRARY"])
        if not os.environ.get("STOWAGE_INSTALLED"):
            env["PYTHONPATH"] = str(PLUGIN)
        return subprocess.run([sys.executable, str(BENCH / "torch_rivals.py"), *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)

    def test_small(self):
        """The second target is less than weights and gradients take."""
        with tempfile.TemporaryDirectory() as folder:
            # What is compiled for the CPU needs a compiler.
            kinds = [] if shutil.which("g++") else ["--kinds", "checkpoint", "selective", "stowage", "nothing-moved"]
            figures, svg = pathlib.Path(folder) / "r.json", pathlib.Path(folder) / "r.svg"
            done = self.run_it("--small", "--model", "gpt", "vit", "megatron", "--megatron-path", folder, "--shares", "60", "-60", "--steps", "1", "--settle", "3", *kinds, "--json", str(figures), "--svg", str(svg))
            self.assertEqual(0, done.returncode, done.stdout + done.stderr)
            got = json.loads(figures.read_text())
            minidom.parse(str(svg))
        self.assertIn("megatron: skipped: ", done.stdout)
        self.assertEqual(["gpt", "vit"], [m["model"] for m in got["models"]])
        for m in got["models"]:
            rows = {r["kind"]: r for r in m["rows"]}
            self.assertIn("checkpoint of 4 of 4 blocks", rows)
            self.assertTrue(rows["stowage, 60 %"]["kept"], rows)
            self.assertIn("too small", rows["stowage, -60 %"]["error"])
            self.assertLessEqual({r["gradients"] for r in m["rows"] if r["ours"]}, {"equal", "-"})
            first, last = m["cells"]
            self.assertGreater(first["all"]["ratio"], 0)
            self.assertIsNone(last["all"]["stowage"])

    def test_no_time(self):
        done = self.run_it("--small", "--model", "gpt", "--kinds", "checkpoint", "stowage", "--shares", "60", "40", "--seconds", "0.1")
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.assertIn("gpt: 60 % not measured; 40 % not measured", done.stdout)
        done = self.run_it("--layers", "2", "--model", "conv")
        self.assertIn("error: --layers takes a number above 0", done.stderr)

    def test_seconds_that_are_no_number(self):
        done = self.run_it("--seconds", "nan")
        self.assertEqual(2, done.returncode)
        self.assertIn("argument --seconds: expected a number above 0, got 'nan'", done.stderr)

    def test_peaks_of_what_is_not_compiled(self):
        for args in (["--kinds", "checkpoint", "stowage"], ["--compile-budgets", "1.0"]):
            done = self.run_it("--same-peaks", *args)
            self.assertEqual(2, done.returncode)
            self.assertIn("error: --same-peaks takes targets from the kind compile", done.stderr)

    def test_models_of_your_own(self):
        code = """
import torch
def make():
    x = torch.ones(4, 8)
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))), lambda m: m(x).square().mean()
"""
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "mine.py").write_text(code)
            done = self.run_it("--small", "--import", "mine:make", "--import", "mine:missing", "--kinds", "checkpoint", "stowage", "--shares", "90", "--steps", "1", "--settle", "2", cwd=folder)
        self.assertEqual(1, done.returncode, done.stdout + done.stderr)
        self.assertIn("mine:make: from mine:make; 0.0 M parameters, 3 blocks", done.stdout)
        self.assertIn("checkpoint of 3 of 3 blocks", done.stdout)
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        self.assertEqual(1, len(failed), done.stdout)
        self.assertIn("mine:missing: AttributeError", failed[0])


class Picture(unittest.TestCase):
    def test_nothing_to_draw(self):
        text = rivals_picture.picture({"models": [{"model": "a < b", "what": "", "rows": []}], "device": "cpu", "torch": "0", "stowage": "0"})
        self.assertIn("no kind gave a result", text)
        minidom.parseString(text)

    def test_ticks(self):
        self.assertEqual([20, 25, 30, 35, 40, 45], rivals_picture.ticks(19.9, 47.2))
        self.assertEqual([1.0, 1.5], rivals_picture.ticks(0.93, 1.62, most=2))


if __name__ == "__main__":
    unittest.main()
