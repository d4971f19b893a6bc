"""What is forecast, profiled and said, line by line, as in test_tables.py, and who is told of failures.

    STOWAGE_UPDATE=1 python3 -m unittest pytorch/tests/test_reports.py
"""

import json
import random
import types
import unittest
from unittest import mock

from blocks import Block, Layer, one_pass, stack, train
from common import DEVICE, runtime, stowage, torch
from stowage import _planned, _report
from stowage._errors import BudgetError, Error
from stowage._explain import Ledger
from stowage._explanation import Saved
from stowage._forecast import Forecast, Planned
from stowage._held import Held
from stowage._measured import CAST, Choice, Part
from stowage._planned import RECORDED
from stowage._ranks import Facts, Failure, Ranks
from tables import Table
from test_tables import Played
from torch import nn


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = x + b(x)
        return x.mean((2, 3))


class Attentive(nn.Module):
    """A block with an attention that is fused on a GPU, a gate, and norms."""

    def __init__(self, width=32):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.up, self.gate, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, s, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        p = (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v
        x = x + self.drop(self.out(p.transpose(1, 2).reshape(b, s, w)))
        y = self.after(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(50, 32), nn.ModuleList(Attentive() for _ in range(4)), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for b in self.blocks:
            x = b(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())}


@unittest.skipUnless(torch.__version__.startswith("1.13"), "other versions of PyTorch save other tensors")
class Forecasts(Table):
    """Steps on the meta device: what they hold, and the plans that are made of them. Their clock is that of the forecast."""

    CASES = {
        "dense": (lambda: stack(Layer, 3), lambda: torch.zeros(4096, 64, 8), {}),
        "convolutions": (Convolutions, lambda: torch.zeros(256, 3, 64, 64), {"optimizer": "sgd"}),
        "language": (Language, lambda: torch.zeros(64, 256, dtype=torch.long), {}),
        "under autocast": (Language, lambda: {"tokens": torch.zeros(64, 256, dtype=torch.long)}, {"autocast": torch.bfloat16, "optimizer": None, "keep": ["blocks.1"]}),
    }

    def test_as_they_were(self):
        lines = []
        for name, (make, example, more) in self.CASES.items():
            torch.manual_seed(1)
            model = make()
            whole = stowage.plan(model, example(), gpu="h100", **more)
            lines += [name, str(whole)]
            for part in (0.6, 0.3) if name in ("dense", "language") else (0.4,):
                f = stowage.plan(model, example(), gpu="h100", budget=int(whole.peak - whole.held["saved"] * (1 - part)), **more)
                lines += [f"{name} in {part}", *(f"  {key}: {json.dumps(x)}" for key, x in f.to_dict().items())]
        self.compare("forecasts", "\n".join(lines).splitlines())


class Thing:
    """Anything with attributes, in dictionaries."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Moments(Table):
    """What plans hold, of random profiles."""

    def played(self, seed):
        draw = random.Random(seed)
        bytes = lambda: draw.randrange(1000)
        units = [Thing(name=n, kind=k, compiled=False) for n, k in (("a", int), ("b", int), ("c", str), ("part", float))]
        calls = [Thing(unit=u, parent=None, number=i) for i, u in enumerate(units[:3] * draw.randrange(1, 3))]
        inner = Thing(unit=units[3], parent=calls[0], number=9)
        ops = [("take", 0, 0), ("take", 1, 0)]
        for c in calls:
            ops += [("begin", c, 0), *([("save", inner, 0)] if c is calls[0] else []), ("save", c, 0)]
        ops.append(("give", 1, 0))
        for c in reversed(calls):
            ops += [("load", c, 0), *([("load", inner, 0)] if c is calls[0] else []), ("load", c, 0), ("release", c, 0), *([("give", 0, 0)] if c is calls[1] else [])]
        p = types.SimpleNamespace(ops=ops, needs=[bytes() for _ in range(3 * len(ops))], held_then=[bytes() for _ in ops], bytes=[bytes(), bytes()])
        p.marks = sorted(draw.randrange(len(p.needs)) for _ in ops)
        p.again = {c: (bytes() + 300, 5 * bytes()) for c in calls if draw.random() < 0.7}
        p.holding = {c: [(bytes(), bytes()) for _ in range(draw.randrange(4))] for c in p.again if draw.random() < 0.8}
        p.dropping = {c: bytes() // 4 for c in calls if draw.random() < 0.7}
        p.held_before = {c: bytes() // 4 for c in calls}
        part = lambda c: Part(c.unit, c.number, 1000 + bytes(), bytes(), bytes(), bytes() // 3, {"x": 300, CAST: 200}, bytes() // 9, bytes() // 3, light=bytes() // 9, smaller={0.5: bytes() // 2}, extra=bytes() // 9)
        m = Held.__new__(Held)
        m._profile, m._fine, m._but, m._most, m.parts = p, draw.random() < 0.3, frozenset(), None, {c: part(c) for c in calls if draw.random() < 0.9}
        first = {u: draw.randrange(4) for u in units}
        m._again_whole = lambda u: Choice(whole=True, first=first[u])
        for _ in range(4):
            choices = {u: c for u in units for c in [draw.choice([None, Choice(lean=True), Choice(whole=True), Choice(lean=True, kept=frozenset([draw.choice(['x', CAST])])), Choice(whole=True, first=2), Choice(lean=True, budget=0.5)])] if c is not None}
            n, u = m.fullest(choices)
            moments = [(n, None if u is None else u.name) for n, u in m._moments(choices)]
            yield f"{seed} {m._fine} {[(u.name, str(c)) for u, c in choices.items()]}: {m.most_held(choices)} {m.most_held(choices, True)} {n} {None if u is None else u.name} {m.most_kept(choices)} {m.most_counted(choices)}"
            yield f"   {moments} {[tuple(part.cast(c._replace(offload=True))) for part in m.parts.values() for c in choices.values()]}"

    def test_as_they_were(self):
        self.compare("moments", [line for seed in range(20) for line in self.played(seed)])


class Twice(nn.Module):
    """Blocks of which one is called twice, with an activation in place, a shared input, and tensors that are saved outside."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x):
        x = (x * self.blocks[0][0].weight).exp()
        y = x + 1
        a, b = self.blocks[0](x), self.blocks[1](y)
        return self.blocks[0](a.sin() * b) * x + y.sin()


@unittest.skipUnless(torch.__version__.startswith("1.13"), "other versions of PyTorch save other tensors")
class Profiles(Table):
    """What recorded steps find, but for times."""

    def lines(self, model, step, **more):
        with runtime("budget", budget="64MiB", **more) as rt:
            rt.attach(model)
            train(model, step, RECORDED, rt)
            divisions, units = rt._planner.keys[""].measured, rt._planner.units.list
            p, numbers = divisions[0]._profile, {}
            s = lambda n: f"s{numbers.setdefault(n, len(numbers))}" if n else "-"
            name = lambda c: "none" if c is None else f"{c.unit.name}#{c.number}"
            for (kind, what, _), mark in zip(p.ops, p.marks):
                yield f"{mark} {kind} {name(what) if hasattr(what, 'unit') else s(what)}"
            for c in p.calls:
                yield f"{name(c)} in {name(c.parent)}: {[(s(n), b) for n, b in c.inputs.items()]} fixed={c.fixed} caches={c.caches} held={[(s(n), b, sorted(k)) for n, (b, k) in c.held.items()]} all={[(name(of), i) for of, i in c.all]}"
                for e in c.entries:
                    yield f"   {s(e.storage)} {e.bytes} recipe={e.recipe} small={e.small} {e.place} cached={e.cached} {e.kind!r} {e.around!r} outer={e.outer}"
            yield f"bytes {[(s(n), b, name(p.first[n])) for n, b in p.bytes.items()]} little={[(s(n), name(c)) for n, c in p.little.items()]} shared={sorted(map(s, p.shared))} fixed={[(s(n), b) for n, b in p.fixed.items()]} untold={[(s(n), b) for n, b in p.untold.items()]}"
            yield f"needs {p.needs} then={p.held_then} before={[(name(c), n) for c, n in p.held_before.items()]}"
            yield f"again {[(name(c), n, p.holding[c], p.dropping[c], len(p.saves[c])) for c, n in p.again.items()]} whole={sorted(map(name, p.whole_times))} lean={[(name(c), [kind for kind, _ in of]) for c, of in p.kinds.items()]} rooms={p.rooms}"
            yield f"largest={p.largest()} outside={p.most_outside()} repeats={p.repeats()} units={[(u.name, u.whole, u.lean, u.why) for u in units]}"
            for m in divisions:
                for c, part in m.parts.items():
                    yield f"part {m._fine} {name(c)}: {[sorted(x.items()) if isinstance(x, dict) else x for x in part[1:11]]} {part.extra}"

    def test_as_they_were(self):
        def one(model, i):
            model(torch.randn(5, 8)).square().mean().backward()
            return []

        def cast(model, i):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(3, 4, 8)).square().mean()
            loss.backward()
            return []

        lines = []
        for name, model, step, more in (
            ("twice", Twice(), one, {}), ("layers", stack(Layer, 2), one_pass, {"least": 100}), ("autocast", stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), 2), cast, {"least": 100}), ("small", stack(Block, 2), one_pass, {"least": 1000}), ("small casts", stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), 2), cast, {"least": 150}),
            ("convolutions", Convolutions(), lambda model, i: model(torch.randn(2, 3, 4, 4)).sum().backward() or [], {}),
        ):
            lines += [name, *self.lines(model, step, **more)]
        self.compare("profiles", lines)


class Words(Table):
    """Reports and verdicts about random figures."""

    def test_as_they_were(self):
        draw, lines = random.Random(4), []
        size = lambda: draw.choice([0, 1, 700, 5 << 10, 3 << 20, 70 << 30])
        units = lambda: {c: draw.randrange(1, 4) for c in ("keep", "offload") if draw.random() < 0.7}
        for i in range(24):
            stats = {
                "steps": draw.choice([0, 1, 1, 2, 30]), "overflows": draw.choice([0, 0, 1, 2]), "saved_limit": draw.choice([0, 5000]), "room": draw.choice([0, 9000]),
                "summary": {"groups": [{"name": name, "groups": draw.randrange(9), "bytes": size(), "moved": size(), "units": units()} for name in ("a", "long name")[: draw.randrange(3)]], "device_peak": size(), "host_peak": size()},
                "rows": draw.choice([None, [{"name": "rows", "storages": 3, "bytes": size(), "units": units()}]]),
                "memory": {"kind": [{"current": size()}, {"current": size()}]}, "decision": draw.choice([None, {}, {"notes": ["of the library"]}]),
            }
            if draw.random() < 0.6:
                stats["budget"] = {"size": 1 << 20, "other": size(), "peak": size(), "outside": size()}
            if draw.random() < 0.5:
                choices = [{}, {"recompute": ["b.0"], "offload": ["b.1", "b.2", "b.3"]}]
                stats["plans"] = {key: {"stage": draw.choice(["settled", "recorded", "compare"]), "steps": draw.choice([0, 1, 5]), "saved": size(), "kept": size(), "choices": draw.choice(choices), "recomputed_ns": draw.choice([0, 1_500_000]), "offloaded": size()} for key in ("", "long")}
            lines += [f"report {i}", *_report.table(stats, draw.choice([(), ["one", "two"]])).splitlines()]
        for i in range(40):
            planned = lambda: draw.choice([None, Planned(size(), size(), draw.randrange(10**7), {"recompute": ["b.0"]}, 10**6, size(), size(), size())])
            f = Forecast("Net", {"weights": size(), "gradients": size(), "optimizer": size(), "saved": size(), "other": size()}, [Saved(f"b.{j}.act", "", size()) for j in range(draw.randrange(4))], max(size(), 1), "the loss", size(), {}, size())
            f.gpu, f.memory, f.usable, f.step_ns = draw.choice([("", None, None, None), ("h100", 80 << 30, draw.choice([1000, 75 << 30]), 10**7)])
            f.budget = draw.choice([None, 1 << 30, 5 << 20, 12345]) if f.gpu else None
            f.plan, f.least, f.notes = planned(), planned(), draw.choice([[], ["a note"]])
            lines += [f"forecast {i} {f.fits}", *str(f).splitlines()]
        self.compare("words", lines)


class Ledgers(unittest.TestCase):
    """Bytes by holder, with the blocks of an allocator and without."""

    def test_blocks(self):
        """What lies in a block takes all of it, once, whoever has it first; other memory is not the allocator's."""
        flat = torch.zeros(1000)
        at = flat.data_ptr()
        part = lambda a, b: types.SimpleNamespace(data_ptr=lambda: at + a, nbytes=lambda: b - a)
        ledger = Ledger([(at, 512), (at + 512, 1024), (at + 4000, 8)], torch.device("cpu"))
        take = lambda holder, a, b: ledger.take_storage(holder, part(a, b))
        self.assertEqual((512, 0, 1024, 0, 0, 8, 0), (take("weights", 0, 100), take("saved", 100, 200), take("saved", 512, 600), take("weights", 1535, 1540), take("saved", 1536, 1600), take("saved", 4007, 4009), take("saved", -1, 1)))
        self.assertEqual(({"weights": 512, "gradients": 0, "optimizer": 0, "saved": 1032}, 1544, True), (ledger.held, ledger.total(), ledger.counted))
        self.assertEqual(0, take("saved", 0, 0))

    def test_storages(self):
        ledger = Ledger(None, torch.device("cpu"))
        x, y = torch.zeros(10), torch.zeros(4)
        ledger.exclude(y.data_ptr())
        self.assertEqual(40, ledger.take("weights", [x, x[2:], None, y, object()]))
        self.assertEqual((1, 40, False), (ledger.unread, ledger.total(), ledger.counted))
        self.assertEqual(0, ledger.take("saved", [x, torch.zeros(0)]))


class Failures(unittest.TestCase):
    """What one rank raises all of them do."""

    def ranks(self, count, others=()):
        ranks = Played(count, random.Random(1))
        ranks.gather = lambda mine: [mine, *others]
        return ranks

    def test_facts(self):
        mine = Facts("k", (1, "recompute", 2))
        same = [mine._replace(change=5)]
        self.assertEqual([mine, *same], self.ranks(2, same).facts(mine))
        for other, sentence in (
            (mine._replace(key="x"), "ranks run steps under different keys \\(rank 0: 'k', rank 1: 'x'\\); give the same keys"),
            (mine._replace(state=(1, "recompute", 3)), "ranks have run different steps \\(rank 0: \\(1, 'recompute', 2\\), rank 1: \\(1, 'recompute', 3\\)\\); attach"),
            (mine._replace(failure=Failure("it broke")), "^rank 1 of 2: it broke$"),
        ):
            with self.assertRaisesRegex(Error, sentence):
                self.ranks(2, [other]).facts(mine)
        with self.assertRaises(BudgetError) as raised:
            self.ranks(3, [mine, mine._replace(failure=Failure("too small", (1, 2, {"weights": 3})))]).facts(mine)
        self.assertEqual(("rank 2 of 3: too small", 1, 2, {"weights": 3}), (str(raised.exception), raised.exception.budget, raised.exception.least, raised.exception.held))

    def test_own(self):
        """A rank raises its own error first; one of a budget is another object, which holds no frames."""
        own = KeyError("mine")
        with self.assertRaises(KeyError):
            self.ranks(2).fail([Failure("other"), Failure("mine")], own)
        own = BudgetError("mine", 1, 2, {"weights": 3})
        with self.assertRaises(BudgetError) as raised:
            self.ranks(2).fail([Failure("other")], own)
        e = raised.exception
        self.assertIsNot(own, e)
        self.assertEqual(("mine", 1, 2, {"weights": 3}), (str(e), e.budget, e.least, e.held))
        with self.assertRaisesRegex(Error, "^alone$"):
            self.ranks(1).fail([None, Failure("alone")], None)
        self.ranks(2).fail([None, None], None)

    def test_in_words(self):
        for e, want in ((Error("one"), Failure("one")), (KeyError("k"), Failure("KeyError: 'k'")), (BudgetError("b", 1, 2, {"x": 3}), Failure("b", (1, 2, {"x": 3})))):
            self.assertEqual(want, _planned.failure_of(e))


class Groups(unittest.TestCase):
    """Which ranks must agree."""

    def ranks(self, setting, models=()):
        size = lambda group: {None: 8, "one": 2, "two": 4}[group]
        with mock.patch.multiple(torch.distributed, is_available=lambda: True, is_initialized=lambda: True, get_world_size=size):
            r = Ranks(setting, models, torch.device("cpu"))
        return r._group, r.count, r.several

    def model(self, *groups, ndim=1):
        m = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        for p, g in zip(m.parameters(), groups):
            p.device_mesh = types.SimpleNamespace(ndim=ndim, get_group=lambda g=g: g)
        return m

    def test_settings(self):
        self.assertEqual((None, 1, False), self.ranks(False, [self.model("one")]))
        self.assertEqual((None, 8, True), self.ranks(True, [self.model("one")]))
        self.assertEqual(("two", 4, True), self.ranks("two", [self.model("one")]))

    def test_found(self):
        """By what is distributed: its group if there is one, and else all ranks."""
        self.assertEqual((None, 1, False), self.ranks(None, [self.model()]))
        self.assertEqual(("one", 2, True), self.ranks(None, [self.model("one", "one"), self.model("one")]))
        self.assertEqual((None, 8, True), self.ranks(None, [self.model("one", "two")]))
        self.assertEqual((None, 8, True), self.ranks(None, [self.model("one", ndim=2)]))
        ddp = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
        torch.nn.Module.__init__(ddp)
        ddp.process_group = "two"
        self.assertEqual(("two", 4, True), self.ranks(None, [torch.nn.Sequential(ddp)]))
        with mock.patch("stowage._ranks.is_sharded", lambda m: isinstance(m, torch.nn.Linear)):
            self.assertEqual((None, 8, True), self.ranks(None, [self.model()]))
            self.assertEqual(("one", 2, True), self.ranks(None, [self.model("one")]))

    def test_exchanges(self):
        """Over the group, of as many as it has."""
        r = Ranks(False, (), torch.device("cpu"))
        self.assertEqual([5], r.gather(5))
        r.count, r._group = 3, "group"

        def all_gather(all, mine, group):
            self.assertEqual(([None] * 3, "group"), (all, group))
            all[:] = [mine, 1, 2]

        with mock.patch.object(torch.distributed, "all_gather_object", all_gather):
            self.assertEqual([5, 1, 2], r.gather(5))


if __name__ == "__main__":
    unittest.main()
