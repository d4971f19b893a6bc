"""What random recorded steps are counted to hold and to take, and the plans that are made of them, line by line, as in test_tables.py.

    STOWAGE_UPDATE=1 python3 -m unittest pytorch/tests/test_measured.py
"""

import json
import random
import types
import unittest
import zlib
from unittest import mock

from common import DEVICE
from stowage import _measured, _plan
from stowage._errors import TooSmall
from stowage._measured import CAST, KEEP, Choice, Part
from stowage._plan import Plan, agree, best, measured, settle
from stowage._profile import Profile
from tables import Table
from test_reports import Thing

KINDS = ["LayerNorm", "GELU", CAST]
LEAST = 100


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


class Block(Thing):
    """Stands for a block, or a part of one."""

    def __init__(self, name, kind, parent=None, compiled=False):
        super().__init__(name=name, kind=kind, parent=parent, compiled=compiled, whole=True, lean=True, retained=False, parts=[], why="")
        if parent is not None:
            parent.parts.append(self)


class Made:
    """A recorded step of random blocks: what some of them saved was tried, and what others saved is shared."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        kinds = [type(name, (), {}) for name in ("Layer", "Other", "Compiled", "Part")]
        self.units = [Block("a", kinds[0]), Block("b", kinds[0]), Block("c", kinds[1])]
        self.units += [Block(f"{u.name}.part", kinds[3], u) for u in self.units[: draw.randrange(3)]]
        if seed % 3 == 1:
            self.units.append(Block("d", kinds[2], compiled=True))
        for u in self.units:
            u.whole = draw.choice([True, True, True, True, None, False])
            u.lean = None if u.compiled else draw.choice([True, True, True, None, False])
            u.retained = draw.random() < 0.1
        self.stamps, self.last = [0.0], 0
        p = self.profile = types.SimpleNamespace(
            calls=[], ops=[], marks=[], needs=[], held_then={}, again={}, holding={}, dropping={}, held_before={}, lean_times={}, whole_times={}, saves={}, kinds={}, first={}, bytes={},
            little={}, casts_stay=seed % 5 == 2, shared=set(), fixed={}, weights={900, 901}, least=LEAST, smaller={b: {} for b in (0.5, 0.25)} if seed % 3 == 1 else {}, not_smaller={}, clock=types.SimpleNamespace(read=lambda: self.stamps),
        )
        self.outside = [self.storage() for _ in range(2)]
        for s in self.outside:
            p.first[s], p.bytes[s] = None, draw.randrange(LEAST, 3000)
            self.note("take", s)
        order = [u for u in self.units if u.parent is None]
        for number in range(draw.choice([1, 1, 2])):
            for u in order:
                self.forward(u, number, None)
        self.note("give", self.outside[1])
        for call in [c for c in reversed(p.calls) if c.parent is None]:
            self.backward(call)
        p.needs = [draw.randrange(2000, 9000) for _ in range(len(p.ops) + 5)]
        p.marks = sorted(draw.randrange(len(p.needs)) for _ in p.ops)
        if draw.random() < 0.7:
            self.note("give", self.outside[0])
            p.marks.append(p.marks[-1])

    def storage(self):
        self.last += 1
        return self.last

    def stamp(self, most=2000):
        self.stamps.append(self.stamps[-1] + self.draw.randrange(1, most) / 2**20)
        return len(self.stamps) - 1

    def note(self, kind, what):
        self.profile.ops.append((kind, what, len(self.stamps) - 1))

    def forward(self, u, number, parent):
        draw, p = self.draw, self.profile
        call = Thing(unit=u, number=number, parent=parent, entries=[], all=[], inputs={}, held={}, results=[], began=self.stamp(), loaded=-1, was_checked=True)
        self.note("begin", call)
        p.held_before[call] = draw.randrange(4000)
        known = [s for s in p.bytes if draw.random() < 0.3][-2:]
        call.inputs = {s: p.bytes[s] for s in known}
        call.inputs.update({self.storage(): draw.choice([50, 400, 700]) for _ in range(draw.randrange(2))})
        if draw.random() < 0.2:
            call.inputs[900] = 640
        inside = [part for part in u.parts if draw.random() < 0.9]
        for i in range(draw.randrange(2, 7)):
            if inside and i == 1:
                self.forward(inside.pop(), number, call)
            s = draw.choice([self.storage()] * 4 + [*p.bytes, *call.inputs][-3:] + [901] * (i == 2))
            n = 0 if s in p.weights else p.bytes.get(s) or draw.choice([40, 60, LEAST, 200, 300, 500, 800, 1500])
            how = draw.choice(["", "", "recipe", "small", "outer"]) if n >= LEAST and not u.compiled else ""
            kind = draw.choice(KINDS) if how else ""
            entry = Thing(storage=s, bytes=n, recipe=True if how in ("recipe", "outer") else None, small=True if how == "small" else None, kind=kind, around=draw.choice([kind, kind, "GELU", ""]) if how else "", outer=how == "outer", cached=kind == CAST or n > 0 and draw.random() < 0.05, sources=draw.sample(p.calls, min(len(p.calls), 1)) if how and draw.random() < 0.1 else [], passing=draw.choice([0, 0, 50]) if how else 0)
            call.entries.append(entry)
            c = call
            while c is not None:
                c.all.append((call, len(call.entries) - 1))
                c = c.parent
            Profile.saved(p, call, entry)
            if n >= LEAST and draw.random() < 0.1:
                p.fixed[s] = n
            if how == "small" and draw.random() < 0.3:
                call.results.append((draw.choice([*p.bytes, self.storage()]), draw.choice([30, 300]), kind))
            if how == "small" and draw.random() < 0.5:
                call.held[draw.choice([*p.bytes, self.storage()])] = draw.choice([30, 300]), {kind, draw.choice(KINDS)}
        call.ended = self.stamp()
        p.calls.append(call)
        self.note("save", call)

    def backward(self, call):
        draw, p = self.draw, self.profile
        call.loaded = self.stamp()
        p.held_then[len(p.ops)] = draw.randrange(5000)
        self.note("load", call)
        parts = [c for c in p.calls if c.parent is call]
        if draw.random() < 0.1:
            call.was_checked = False  # as in a forward pass that failed
        for c in (*parts, call) if call.was_checked else ():
            if draw.random() < 0.8:
                begin = self.stamp()
                p.saves[c] = [begin] + [self.stamp() for _ in c.all]
                p.whole_times[c] = begin, self.stamp(200)
                held = sorted(draw.randrange(3000) for _ in c.all)
                p.holding[c] = [(n, n // 2) for n in held]
                p.again[c], p.dropping[c] = (held[-1] + draw.randrange(500), draw.randrange(2000)), draw.randrange(1500)
            cheap = [e for e in c.entries if e.recipe is not None or e.small is not None]
            if cheap and draw.random() < 0.8:
                p.kinds[c] = [("", self.stamp())] + [(e.kind, self.stamp(draw.choice([50, 1000]))) for e in cheap]
                p.lean_times[c] = p.kinds[c][0][1], p.kinds[c][-1][1]
            for b, of in p.smaller.items():
                if c.unit.compiled and draw.random() < 0.8:
                    of[c] = types.SimpleNamespace(share=draw.choice([0.25, 0.5]), dropped=draw.randrange(200, 1200), before=(self.stamp(), self.stamp()), after=(self.stamp(), self.stamp(4000)))
                    if draw.random() < 0.1:
                        p.not_smaller[c.unit.kind, b] = "because"
        for c in parts:
            c.loaded = self.stamp()
            p.held_then[len(p.ops)] = draw.randrange(5000)
            self.note("load", c)


def shown(x):
    """Returns figures in words that do not depend on the order of a set."""
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return shown({name: y for name, y in zip(x._fields, x) if y not in (0, 0.0, False, frozenset())})
    if isinstance(x, (dict, types.MappingProxyType)):
        return "{" + " ".join(f"{shown(k)}:{shown(y)}" for k, y in x.items()) + "}"
    if isinstance(x, (list, tuple)):
        return "[" + " ".join(map(shown, x)) + "]"
    if isinstance(x, (set, frozenset)):
        return "(" + ",".join(sorted(map(shown, x))) + ")"
    if isinstance(x, Block):
        return x.name
    if isinstance(x, Thing):
        return f"{x.unit.name}#{x.number}"
    return x.__name__ if isinstance(x, type) else f"{x:.4g}" if isinstance(x, float) else str(x)


def digest(request):
    return zlib.crc32(json.dumps(request, sort_keys=True).encode())


class Solver:
    """Answers anything that a question allows, and that its limit is too small."""

    def __init__(self, seed):
        self.draw, self.said = random.Random(seed), []

    def __call__(self, request):
        draw = self.draw
        self.said.append(f"{request['limit']}/{request['effort']:.3g}/{digest(request)}")
        if draw.random() < 0.15:
            raise TooSmall("too small", request["limit"] + draw.choice([-5, 0, 400]))
        may = lambda u: ["keep"] + ["offload"] * u["offload"] + ["recompute"] * 2 * (u["recompute_ns"] > 0)
        answer = {name: draw.randrange(10**6) for name in ("step_ns", "before_ns", "again_ns", "copying_ns", "peak", "before_peak", "moved")}
        return {"choices": [draw.choice(may(u)) for u in request["units"]], **answer}


class Divisions(Table):
    def plans(self, m, draw):
        """Yields plans with any choices."""
        units = list(dict.fromkeys(part.unit for part in m.parts.values()))
        for _ in range(2):
            choices = {}
            for u in units:
                can = [Choice(), *([m._again_whole(u)] * 3 if m._can_whole(u) else []), *m._again_smaller(u)]
                sorts = m._sorts(u)
                can += [m._leanest(u, sorts[:n], False) for n in (1, 2) if sorts[:n] and u in m._cheap]
                c = draw.choice(can)._replace(offload=draw.random() < 0.1)
                if c != Choice():
                    choices[u] = c
            plan = Plan(choices, {}, {}, {}, {"step_ns": draw.randrange(10**7), "again_ns": 5, "peak": draw.randrange(9000), "moved": 3})
            m.count(plan)
            yield plan

    def played(self, seed):
        made = Made(seed)
        p, draw = made.profile, made.draw
        divisions = measured(p, made.units, alone=seed % 5 > 0)
        yield f"step {seed}: {shown([(u, u.whole, u.lean) for u in made.units])} {len(p.calls)} calls, {len(p.ops)} ops, shared {shown(p.shared)} little {shown(p.little)}"
        for i, m in enumerate(divisions):
            yield f" {i} fine={m._fine} budget={m._budget} ends={shown(m._ends)} {m.ends} like={[m.like(o) for o in divisions]}"
            yield f"  whole {shown(m._whole)} lean {shown(m._lean)} shares {shown(m._shares)} kinds {shown(m._kinds)} cheap {shown(m._cheap)}"
            for call, part in m.parts.items():
                yield f"  {shown(call)} {shown(part._replace(kinds=dict(part.kinds))[2:])}"
            yield f"  times {[(k, at) for k, _, at in m._times()]}"
            names = []
            for given in ((5000, True), (5000, False), (4000, False, True), (4000, False, True, set(made.units[:1])), (3000, True, False, None, set(made.units[1:2]), 1)):
                request, names = m.request(*given)
                yield f"  request {given[0]} {shown(given[1:])}: {shown(names)} {shown([tuple(u.values()) for u in request['units']])} {len(request['ops'])} ops {request['span']} {digest(request)} {shown(m._others)}"
            for plan in self.plans(m, draw):
                yield f"  plan {shown(plan[:4])} again={m.again(plan.choices)} made={[o.made(plan) for o in divisions]} {plan.expected} {plan.offloads}"
                limit = m.most_counted(plan.choices)
                for name, other in (("relaxed", m.relaxed(plan, 600)), ("spared", m.spared(plan, limit + 100)), ("mixed", m.mixed(plan, limit)), ("exchanged", m.exchanged(plan, limit))):
                    yield f"   {name} " + ("the same" if other is plan else f"{shown(other)} holds {m.most_counted(other.choices) - limit} more")
            yield f"  strongest {shown(m.strongest({'span': 77}))}"
            answer = {"choices": [draw.choice(["keep", "offload", "recompute"]) for _ in names], "step_ns": 1}
            yield f"  halves {shown(m.halves(names, answer))} {shown(m.plan(names, answer)[0])}"
        for limit in (2500, 4500):
            for offload in (False, True):
                solver = Solver(f"{seed} {limit} {offload}")
                try:
                    plan = best(divisions, solver, limit, offload, not offload)
                    yield f" best {limit} {offload}: {shown(plan[:4])} {plan.answer['step_ns']} {plan.answer['peak']} {plan.answer.get('before_peak')}"
                    agree(plan, divisions, made.units, {"a", "d"}, {"b", "c", "d"})
                    yield f"  agreed: {shown(plan[:4])} {plan.answer['peak']}"
                except TooSmall as e:
                    yield f" best {limit} {offload}: {e} {e.least}"
                yield f"  asked {len(solver.said)} times, {zlib.crc32(' '.join(solver.said).encode())}"
        units = list({part.unit: None for part in divisions[0].parts.values()})
        for m in divisions:
            choices = {u: m._again_whole(u) if i % 2 else Choice(True, kept=frozenset([KINDS[i % 3]]), budget=0.25 * u.compiled) for i, u in enumerate(units)}
            for turn in range(2):
                took = {u: draw.randrange(10**6) for u in units if draw.random() < 0.4}
                cheap = {u: {k: draw.randrange(10**6) for k in KINDS if draw.random() < 0.5} for u in units if draw.random() < 0.4 + turn}
                m.retime(took, *[cheap] * (seed % 2))
                yield f" retimed {shown(m._whole)} {shown(m._lean)} {shown(m._shares)} {shown(m._kinds)} {[shown(m._sorts(u)) for u in units]} {m.again(choices)}"
            yield f" all of {[m.all_of(u, c, 1000) for u, c in choices.items()]}"
            m.count_hooks()
            for step in (10**3, 10**9):
                m.calibrate(step, 10)
                yield f" calibrated {shown(m._hooks)} {m._pace:.4g} {m._middle} {m.again(choices)} {[at for _, _, at in m._times()][-4:]}"

    def test_as_they_were(self):
        lines = []
        with mock.patch.object(_plan, "EARLY", True):
            for seed in range(24):
                with mock.patch.object(_measured, "NOTICED", 0 if seed % 2 else 10**12):
                    lines += self.played(seed)
        self.compare("divisions", lines)


class Alone(unittest.TestCase):
    def test_units_that_could_not_be_tried(self):
        """Equal ones speak for them: one that cannot be recomputed is enough, and those that were tried keep what they said."""
        for said, want in (("?", "?"), ("+?", "++"), ("-?", "--"), ("+-?", "+--"), ("+", "+"), ("?-+?", "--+-")):
            for attribute in ("whole", "lean"):
                of = {"?": None, "+": True, "-": False}
                units = [types.SimpleNamespace(**{"kind": int, "whole": None, "lean": None, attribute: of[c]}) for c in said]
                others = types.SimpleNamespace(kind=str, whole=True, lean=False)
                settle([*units, others])
                self.assertEqual([of[c] for c in want], [getattr(u, attribute) for u in units])
                self.assertEqual((True, False), (others.whole, others.lean))

    def test_what_is_held_again(self):
        """What a call may hold more if its second pass is left out: the most that this may free, without what it keeps if it ends earlier."""
        part = Part(None, 0, 600, 300, 50, 0, {"a": 400, "b": 200}, 70, little=9, most=940)
        whole, ends, lean = Choice(whole=True), Choice(whole=True, first=3), Choice(lean=True)
        self.assertEqual([949, 879, 349, 279, 949 - 839, 0], [part.back(c, to) for c, to in ((whole, KEEP), (ends, KEEP), (whole, lean), (ends, lean), (whole, ends), (KEEP, KEEP))])


if __name__ == "__main__":
    unittest.main()
