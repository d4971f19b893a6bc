"""What planner and budget decide, line by line, from what random steps report.

Gradients are right whatever they decide, so that other tests notice little of it. Here every decision is written down in
testdata, and another one is a failure. If a change of them is meant, write the tables anew and look at the difference:

    STOWAGE_UPDATE=1 python3 -m unittest pytorch/tests/test_tables.py
"""

import random
import types
import unittest
import warnings
from unittest import mock

from common import DEVICE, torch
from stowage import _contest, _planned
from stowage._budget import Budget, largest, least_for, limit_for
from stowage._errors import BudgetError, Error, TooSmall
from stowage._key import BEHIND, Key
from stowage._library import Usage
from stowage._measured import Choice
from stowage._plan import Plan
from stowage._planned import Planner
from stowage._ranks import Facts, Failure, Ranks
from tables import Table

SIZE = 1 << 20


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


class Division:
    """Stands for what recorded steps measured: any figures, the same for the same choices."""

    def __init__(self, number, said, draw):
        self.number, self.said, self.draw = number, said, draw
        self.parts = {i: types.SimpleNamespace(light=draw.randrange(SIZE // 64)) for i in range(2)}

    def any(self, what, choices, below):
        return random.Random(f"{self.number} {what} {sorted((u.name, str(c)) for u, c in choices.items())}").randrange(below)

    def made(self, plan):
        return plan.answer["division"] == self.number

    def most_held(self, choices, perhaps=False):
        return self.any("held", choices, SIZE) // (2 if perhaps else 1)

    def most_counted(self, choices):
        return self.any("counted", choices, SIZE)

    def again(self, choices):
        return self.any("again", choices, 10**7)

    def relaxed(self, plan, change):
        return self.other(plan, f"relaxed({change})")

    def mixed(self, plan, limit):
        return self.other(plan, f"mixed({limit})")

    def other(self, plan, what):
        self.said.append(f"{plan.answer['name']} {what}")
        return plan._replace(answer={**plan.answer, "name": plan.answer["name"] + what[0]}) if self.draw.random() < 0.7 else plan

    def calibrate(self, step_ns, again_ns):
        self.said.append(f"calibrate({step_ns}, {again_ns})")

    def retime(self, passes, cheap):
        self.said.append(f"retime({sorted((u.name, t) for u, t in passes.items())}, {len(cheap)})")

    def count_hooks(self):
        self.said.append("count_hooks()")

    def request(self, *given):
        self.said.append(f"request{given}")
        return {}, []

    def strongest(self, request):
        return Plan({u: Choice(whole=True) for u in UNITS} if self.draw.random() < 0.9 else {}, {}, {}, {}, answer(f"strongest{self.number}", self.number, self.draw))

    def all_of(self, u, choice, t):
        self.said.append(f"all_of({u.name}, {choice}, {t})")
        return 2 * t


class Named:
    """Stands for a block."""

    compiled, parent = False, None

    def __init__(self, name):
        self.name, self.whole, self.lean, self.why = name, None, None, ""


UNITS = [Named(name) for name in "abc"]


def answer(name, division, draw):
    return {"name": name, "division": division, "peak": draw.randrange(SIZE), "again_ns": draw.randrange(10**7), "step_ns": draw.randrange(10**8, 10**9)}


class Played(Ranks):
    """Ranks of which the others are played: they often have what this one has."""

    def __init__(self, count, draw, may_lack=lambda: False):
        self.count, self.draw, self.may_lack, self._device, self._group = count, draw, may_lack, torch.device("cpu"), None

    def gather(self, mine):
        return [mine] + [self.played(mine) for _ in range(self.count - 1)]

    def played(self, mine):
        if self.draw.random() < 0.85:
            return mine
        if isinstance(mine, bool):
            return not mine
        if isinstance(mine, Facts):
            what = self.draw.choice(["change", "lacks", "learnt", "fits"])
            return mine._replace(**{"change": {"change": self.draw.choice([-1000, 1000])}, "lacks": {"lacks": 77}, "learnt": {"learnt": False}, "fits": {"fits": frozenset()}}[what])
        if isinstance(mine, tuple) and len(mine) == 3:
            if self.draw.random() < 0.2:
                return None, False, Failure("of another rank", (1, 2, {}) if self.draw.random() < 0.5 else None)
            return (None if self.may_lack() and self.draw.random() < 0.3 else (["b"], ["c"])), False, None
        return mine


class Decisions(Table):
    def played(self, seed):
        """Yields lines of a run of steps: what happened, what was asked, and what is known then."""
        draw, said = random.Random(seed), []
        several, calm = seed % 3 == 2, seed % 5 < 3
        for u in UNITS:
            u.whole, u.lean, u.why = None, None, ""
        plans = iter(range(10**6))

        def any_plan(offload):
            choices = {}
            for u in UNITS:
                how = draw.choice(["keep", "whole", "lean", "offload"] if offload else ["keep", "whole", "lean", "smaller"])
                if how != "keep":
                    choices[u] = Choice(True, budget=0.5) if how == "smaller" else Choice(**{how: True})
            return Plan(choices, {}, {}, {}, answer(f"p{next(plans)}", draw.randrange(3), draw))

        def best(divisions, choose, limit, offload, everything=False):
            said.append(f"best({len(divisions)}, {limit}, {offload}, {everything})")
            if draw.random() < (0.05 if calm else 0.25):
                raise TooSmall("too small", limit + 500)
            if draw.random() < 0.05:
                raise ArithmeticError("of the solver")
            return any_plan(offload)

        def begin(name, stream):
            said.append(f"begin({name!r})")
            if draw.random() < (0.04 if calm else 0.4):
                raise TooSmall("too small", known.limit + draw.randrange(-100, 3000))

        library = types.SimpleNamespace(choose=None, begin=begin, usage=lambda: types.SimpleNamespace(limit=max(known.limit, 1)))
        budget = types.SimpleNamespace(
            size=SIZE, base=1000, asked=0, measures=seed % 2 == 0, step_peak=5, planned=0,
            held_now=lambda: known.base + draw.choice([0] * (60 if calm else 6) + [100, -5000, SIZE // 100, SIZE // 20]),
            expect=lambda key, limit: said.append(f"expect({key!r}, {limit})"), limit_of=lambda key: SIZE // 2,
            outgrown=lambda n: BudgetError(f"outgrown by {n}", SIZE, n, {}), explain=lambda e: BudgetError("explained", SIZE, e.least, {}),
            exceeded=lambda: BudgetError("exceeded", SIZE, 1, {}) if draw.random() < 0.02 else None, room=lambda: SIZE // 4 - draw.randrange(2) * 300,
            begin=lambda key, alone: said.append(f"limit({key!r}, {alone})"), watch=lambda exactly, alone: said.append(f"watch({exactly}, {alone})"),
            watched=lambda saved: said.append(f"watched({saved})") or draw.choice([SIZE - SIZE // 128 - 5] * 40 * calm + [SIZE - SIZE // 3, SIZE - SIZE // 128, SIZE - 100, SIZE - SIZE // 60, SIZE + 3000, known.peak]),
            learnt=lambda key: draw.choice([0] * 9 * calm + [0, known.limit, known.limit + SIZE // 16, known.limit + SIZE // 8]),
        )
        rt = types.SimpleNamespace(device=torch.device("cpu"), _attached=[], _library=library, _weights=set(), _least=0, _seen=set(), _held=[], _moves=bool, _refresh=lambda: said.append("refresh"), _step=None, _now=None)
        planner = Planner(rt, budget, None)
        planner._found = Played(3 if several else 1, draw, lambda: known.other is not None)
        planner.units = types.SimpleNamespace(list=UNITS, hidden={}, is_alone=False, rewrap=lambda plans: said.append("rewrap"), wrap_all=lambda: None)
        known = planner.keys[""] = Key()
        known.limit, known.total, known.flat, known.base, known.outside, known.room = SIZE // 2, SIZE * 3 // 4, SIZE // 2, 1000, 300, SIZE // 4
        if seed % 4 > 1:  # in the middle of a run
            known.recorded, known.measured, known.steps, known.fitted = 2, [Division(i, said, draw) for i in range(2)], seed % 5, seed % 7 > 0
            known.plan, known.other = any_plan(True)._replace(choices={UNITS[0]: Choice(offload=True), UNITS[1]: Choice(lean=True)}), (any_plan(False), SIZE // 3)
            known.stage, known.turns = "offload" if seed % 3 else "compare", {False: [], True: []}
            known.last_resort = seed % 11 == 3

        def step(*_):
            return types.SimpleNamespace(stream=0, over=False, raised=draw.choice([None, "raised by a hook"]), end=end)

        def end(failed):
            said.append(f"end({failed})")
            if draw.random() < 0.1:
                raise TooSmall("too small", known.limit + 2000)

        class Watch:
            def __init__(self, device):
                pass

            def seconds(self):
                return draw.randrange(1, 9) / 10

            def read(self):
                return {UNITS[0]: 5}, {UNITS[1]: {"x": 3}}, (draw.choice([0.0, 1.0]), True)

        measured = lambda profile, units, alone: said.append(f"measured({alone})") or [Division(i, said, draw) for i in range(2)]
        contenders = lambda known, plan, choose, seconds: said.append(f"contenders({seconds})") or [any_plan(False) for _ in range(draw.randrange(3))] + [plan]
        with mock.patch.object(_contest, "best", best), mock.patch.multiple(_planned, best=best, contenders=contenders, Step=step, Stopwatch=Watch, Passes=Watch, measured=measured, _explain=types.SimpleNamespace(add_to_error=lambda e, rt, step: said.append(f"explain({step is not None})")), agree=lambda plan, divisions, units, whole, lean: said.append(f"agree({sorted(whole)}, {sorted(lean)})"), Following=lambda *_: types.SimpleNamespace(close=lambda: said.append("close"))):
            settled, before = 0, {}
            for turn in range(30 if calm else 14):
                event = ""
                try:
                    if several or known.plan is not None or known.recorded:
                        planner.begin("")
                    if known.plan is None:
                        event = "record"
                        learnt = draw.random() < 0.9
                        known.profile = types.SimpleNamespace(rooms={("a", 0): (1000, 5000, 200), ("b", 1): (4000, 4500, 600)})
                        said_units = {u.name: draw.choice([(None, None), (True, True), (False, True), (True, None)]) for u in UNITS}
                        planner._end("", known, Facts("", None, learnt=learnt, units=said_units))
                    else:
                        event = "follow"
                        with planner.follow("", known):
                            if draw.random() < 0.05:
                                raise draw.choice([Error, RuntimeError])("of the user")
                except (RuntimeError, ArithmeticError) as e:
                    event += f" {type(e).__name__}: {e}"
                    if "outgrown" in str(e) or "explained" in str(e):
                        known.fitted = True
                yield f"{turn} {event}: {'; '.join(said)}"
                said.clear()
                fields = {name: x for name, x in vars(known).items() if name not in ("plan", "other", "measured", "profile", "small", "passes", "cheap", "last", "contest", "held")}
                fields.update(agreed=sorted(known.agreed), asked=budget.asked, planned=budget.planned, units="".join(str(u.whole)[0] + str(u.lean)[0] for u in UNITS), why=[u.why for u in UNITS])
                yield "   " + " ".join(f"{name}={x}" for name, x in fields.items() if before.get(name) != str(x))
                before = {name: str(x) for name, x in fields.items()}
                shown = lambda plan: plan.answer["name"] + ":" + ",".join(f"{u.name} {c}" for u, c in plan.choices.items())
                yield "   " + (shown(known.plan) if known.plan is not None else "no plan") + (f" other {known.other[1]} {shown(known.other[0])}" if known.other else "") + (f" last {known.last.change} {known.last.lacks}" if known.last else "")
                settled = settled + 1 if known.stage == "settled" else 0
                if known.by_library or settled > 6:
                    return

    def test_as_they_were(self):
        lines = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for seed in range(60):
                lines += [f"run {seed}", *self.played(seed)]
        lines += sorted({f"warned: {w.message}" for w in caught})
        self.compare("decisions", lines)


class Recorded(unittest.TestCase):
    """What a planner takes from recorded steps, and what it says."""

    def planner(self, measures=True, several=False, alone=False):
        budget = types.SimpleNamespace(size=SIZE, base=1000, measures=measures, limit_of=lambda key: {"k": 5000}[key], held_now=lambda: 2000, room=lambda: 777)
        rt = types.SimpleNamespace(device=torch.device("cpu"), _attached=[], _weights=set(), _least=0, _now=None, _library=None)
        planner = Planner(rt, budget, None)
        planner._found = types.SimpleNamespace(several=several)
        planner.units = types.SimpleNamespace(list=UNITS, hidden={1: "model"}, is_alone=alone, wrap_all=mock.Mock(), unwrap=mock.Mock())
        return planner

    def profile(self, repeats=True, calls=(1,)):
        kind = type("Block", (), {})
        return mock.Mock(calls=list(calls), needs=[5, 70_000, 6], untold={1: 300, 2: 40}, not_smaller={(kind, 0.5): "because"}, largest=lambda: 123, in_compiled=lambda: 456, most_outside=lambda: 789, repeats=lambda: repeats, rewritten=[])

    def test_learnt(self):
        for measures in (True, False):
            planner, known, profile = self.planner(measures), Key(), self.profile()
            UNITS[0].whole, UNITS[0].lean = True, None
            with mock.patch.object(planner, "_end") as end:
                planner.learn("k", known, types.SimpleNamespace(used_rows=False), profile)
            profile.close.assert_called_once_with()
            flat = 5340 if measures else 5000
            self.assertEqual((123, profile, 70_000, 1000, 456, 789), (known.largest, known.profile, known.most, known.base, known.in_compiled, known.outside))
            self.assertEqual((flat, 1, SIZE - 1000 - SIZE // 128), (known.flat, known.limit, known.total))
            ((key, of, facts), _), = end.call_args_list
            self.assertEqual(("k", known, True, False, (True, None)), (key, of, facts.learnt, facts.by_library, facts.units["a"]))
            self.assertEqual(369, planner.spare(known))
            said = planner.notes()
            self.assertIn("model is compiled as a whole, so its blocks cannot be recomputed; compile the blocks instead", said)
            self.assertIn("Block is not compiled with activation_memory_budget=0.5: because", said)
            with mock.patch.object(planner, "_end"):
                planner._budget.limit_of = lambda key: SIZE // 2
                planner.learn("k", known, types.SimpleNamespace(used_rows=False), profile)
            self.assertEqual(known.flat - SIZE // 16, known.limit)

    def test_left_to_the_library(self):
        """Steps with rows, without blocks, and with one block that is called once."""
        for rows, calls, alone, repeats, left in ((True, (1,), False, True, True), (False, (), False, True, True), (False, (1,), True, False, True), (False, (1,), True, True, False), (False, (1,), False, False, False)):
            planner = self.planner(alone=alone)
            with mock.patch.object(planner, "_end") as end:
                planner.learn("k", Key(), types.SimpleNamespace(used_rows=rows), self.profile(repeats, calls))
            self.assertEqual((left, not left), (end.call_args[0][2].by_library, end.call_args[0][2].learnt))

    def test_records(self):
        """Compiled blocks are compiled again only in the last recorded step, if that one held too much."""
        room = SIZE - 2000 - SIZE // 128
        for recorded, most, several, compiled, tight in ((1, room + 1, False, True, True), (1, room, False, True, False), (0, room + 1, False, True, False), (1, room + 1, True, True, False), (1, room + 1, False, False, False)):
            planner, known, step = self.planner(several=several), Key(), mock.Mock()
            known.recorded, known.most, known.in_compiled, known.agreed = recorded, most, 1000, {"agreed"}
            with mock.patch.object(_planned, "Profile") as profile, mock.patch.object(_planned, "allow_more_graphs") as more, mock.patch.object(Named, "compiled", compiled):
                self.assertIs(profile.return_value, planner.record(known, step))
            *_, agreed, budgets, exact, enough = profile.call_args[0]
            self.assertEqual(({"agreed"} if several else None, _planned.BUDGETS if tight else (), True, (most + 2000 - SIZE) / 1000), (agreed, budgets, exact, enough))
            self.assertEqual((tight, 777), (more.called, known.room))
            planner.units.wrap_all.assert_called_once_with()
            self.assertIs(profile.return_value, planner._runtime._now.profile)

    def test_captures_and_other_models(self):
        planner = self.planner()
        planner.check_capture("unknown")
        planner.keys["mine"] = Key()
        with self.assertRaisesRegex(Error, "steps under key 'mine' are planned with recomputation, which cannot be captured"):
            planner.check_capture("mine")
        planner.leave("mine"), planner.leave("new")
        planner.check_capture("mine")
        self.assertTrue(planner.keys["new"].by_library)
        self.assertIsNone(planner.begin("new"))
        self.assertEqual("recorded", planner.stats()["mine"]["stage"])
        planner.keys["mine"].plan = Plan({}, {}, {}, {}, {"again_ns": 1, "moved": 2, "before_peak": 3, "peak": 4})
        planner.keys["mine"].followed = 7
        self.assertEqual({"stage": "recompute", "steps": 7, "choices": {}, "recomputed_ns": 1, "offloaded": 2, "saved": 3, "kept": 4}, planner.stats()["mine"])
        planner.changed()
        self.assertEqual(({}, None), (planner.keys, planner._found))
        planner.units.unwrap.assert_called_once_with()
        planner._setting = False
        self.assertFalse(planner.ranks.several)
        planner.units.list = []
        self.assertIsNone(planner.begin("k"))
        self.assertEqual({}, planner.keys)

    def test_a_plan_that_offloads_is_tried(self):
        """With a limit that leaves room for copies; what else a measured step held is held again, and what it exceeded the budget by is left."""
        for measures, flat, limit in ((False, SIZE, 5000 + SIZE // 32), (True, 2 * SIZE, SIZE // 2 + SIZE - SIZE // 4 - 900 - SIZE // 128 - SIZE // 64), (True, SIZE // 2, SIZE // 2 - SIZE // 64), (True, 10, 5000 + SIZE // 32)):
            for solved, seconds, stage in (((None, TooSmall("no")), 1.0, "settled"), (({UNITS[0]: Choice(offload=True)}, 0.98), 1.0, "offload"), (({UNITS[0]: Choice(offload=True)}, 0.995), 1.0, "settled"), (({UNITS[0]: Choice(lean=True)}, 0.5), 1.0, "settled")):
                planner, known = self.planner(measures), Key()
                planner._found = Played(1, random.Random(1))
                planner.units.rewrap = planner._budget.expect = lambda *_: None
                plan = Plan({}, {}, {}, {}, {"peak": SIZE // 2})
                known.plan, known.limit, known.flat, known.peak, known.over, known.times, known.steps = plan, 5000, flat, SIZE // 4, 900, [1.0], 7
                other = solved if solved[0] is None else (Plan(solved[0], {}, {}, {}, {"step_ns": int(1e9 * solved[1]), "peak": 1}), None)
                with mock.patch.object(planner, "_attempt", side_effect=lambda make: self.assertEqual(limit, known.limit) or other):
                    planner._try_offload("k", known, plan, seconds)
                self.assertEqual((stage, limit if stage == "offload" else 5000), (known.stage, known.limit))
                self.assertEqual((plan, 5000), known.other)
                self.assertEqual(([], 0) if stage == "offload" else ([1.0], 7), (known.times, known.steps))
                self.assertIs(other[0] if stage == "offload" else plan, known.plan)

    def test_a_plan_to_hope_for(self):
        """The one that recomputes everything is followed if it may fit and forecasts say that it does not, on all ranks."""
        plan = Plan({UNITS[0]: Choice(whole=True)}, {}, {}, {}, {})
        for strongest, others, hopes in (((99, 101, plan), True, True), ((100, 101, plan), True, True), ((101, 102, plan), True, False), ((99, 100, plan), True, False), ((0, 0, None), True, False), ((99, 101, plan), False, False)):
            planner, known = self.planner(), Key()
            known.total = 100
            planner._found = types.SimpleNamespace(gather=lambda mine: [mine, others])
            with mock.patch.object(Key, "strongest", return_value=strongest), mock.patch.object(planner, "_adopt", return_value="adopted") as adopt:
                self.assertEqual("adopted" if hopes else False, planner._hope("k", known))
            self.assertEqual([mock.call("k", known, (plan, None), last=True)] if hopes else [], adopt.call_args_list)

    def test_ranks_hear_of_budgets_that_are_exceeded(self):
        for error in (None, BudgetError("exceeded", SIZE, 5, {"weights": 3})):
            planner = self.planner(several=True)
            planner._budget.exceeded = lambda: error
            with mock.patch.object(planner, "_conclude") as conclude:
                planner.begin("k")
            ((key, known, facts, given), _), = conclude.call_args_list
            self.assertEqual(("k", planner.keys["k"], error), (key, known, given))
            self.assertEqual(None if error is None else ("exceeded", (SIZE, 5, {"weights": 3})), facts.failure and tuple(facts.failure))

    def test_states_of_keys(self):
        known = Key()
        known.recorded, known.steps = 1, 4
        self.assertEqual((1, "recorded", 4), known.state())
        known.plan, known.stage = Plan({}, {}, {}, {}, {}), "compare"
        self.assertEqual((1, "compare", 4), known.state())

    def test_ranks_without_blocks_agree_too(self):
        planner = self.planner(several=True)
        planner._budget.exceeded, planner.units.list = lambda: None, []
        with mock.patch.object(planner, "_conclude") as conclude:
            self.assertIs(planner.keys.setdefault("k", Key()), planner.begin("k"))
        conclude.assert_called_once()

    def test_facts_of_several_steps(self):
        """Until ranks exchange them, the worst of them counts."""
        planner, known = self.planner(several=True), Key()
        for change, lacks in ((-5, 0), (3, 70), (-2, 8)):
            planner._end("k", known, Facts("k", None, learnt=True, change=change, lacks=lacks))
        self.assertEqual((-5, 70, True), (known.last.change, known.last.lacks, known.last.learnt))

    def test_who_asks_for_ranks(self):
        planner = self.planner()
        planner._found = None
        planner._runtime._attached = [types.SimpleNamespace(model=None), types.SimpleNamespace(model="model")]
        with mock.patch.object(_planned, "Ranks") as ranks:
            self.assertIs(planner.ranks, planner.ranks)
        ranks.assert_called_once_with(None, ["model"], torch.device("cpu"))


class Changes(Table):
    """What a key wants of its limit, and which second passes fit."""

    def test_as_they_were(self):
        draw, lines = random.Random(1), []
        for _ in range(300):
            k = Key()
            k.plan = Plan({UNITS[0]: Choice(offload=True) if draw.random() < 0.5 else Choice(lean=True, budget=draw.choice([0.0, 0.5]))} if draw.random() < 0.9 else {}, {}, {}, {}, {})
            k.stage, k.steps, k.over = draw.choice(["recompute", "offload", "compare", "settled"]), draw.randrange(6), draw.choice([0, 0, 900])
            k.limit, k.flat, k.kept = (draw.choice([0, SIZE // 2, SIZE // 2 + SIZE // 32, SIZE - 5000]) for _ in range(3))
            k.other, k.squeezed = draw.choice([None, None, None, (k.plan, 5)]), draw.random() < 0.3
            peak = draw.choice([SIZE + 1, SIZE, SIZE - 1, SIZE // 2, SIZE - SIZE // 128, SIZE - SIZE // 128 - SIZE // 512, SIZE - SIZE // 128 - SIZE // 512 - 1, SIZE - 3000])
            k.before, measures = draw.choice([peak, peak, 7]), draw.random() < 0.8
            lines.append(f"{k.stage} {k.steps} {k.over} {k.limit} {k.flat} {k.kept} {k.other is not None} {k.squeezed} {peak} {k.before} {measures} {[str(c) for c in k.plan.choices.values()]}: {k.change(SIZE, peak, measures)}")
        self.compare("changes", lines)

    def test_second_passes_that_fit(self):
        """There must be room in the recorded step and now; what needs less of the room is tried sparingly."""
        k = Key()
        self.assertEqual(frozenset(), k.fits(0, {}))
        k.profile = types.SimpleNamespace(rooms={("a", 0): (100, 10**6, 999_000), ("b", 1): (100, 10**6, 0), ("c", 0): (10**6, 100, 0)})
        units = {"a": (None, None), "b": (False, True), "c": (True, True)}
        self.assertEqual({("a", 0, "sparingly"), ("a", 0, "whole"), ("a", 0, "lean"), ("b", 1, "lean")}, k.fits(0, units))
        self.assertEqual({("a", 0, "sparingly"), ("b", 1, "lean")}, k.fits(900, units))
        self.assertEqual({("b", 1, "lean")}, k.fits(0, {"b": (False, None)}))
        self.assertEqual(frozenset(), k.fits(10**6, units))

    def test_hooks_count_if_the_device_waits(self):
        for seconds, behind, count in ((1.0, 0.0029, True), (1.0, 0.003, False), (0.024, 0.0009, True), (0.024, 0.0011, False)):
            k, m = Key(), mock.Mock()
            k.measured, k.behind, k.idle = [m, m], behind, True
            k.count_hooks(seconds)
            self.assertEqual(2 * count, m.count_hooks.call_count, (seconds, behind, BEHIND))


class Limits(Table):
    """The saved limit of a budget, from random memory."""

    def played(self, seed):
        draw = random.Random(seed)
        now = types.SimpleNamespace(allocated=SIZE // 4, peak=SIZE // 4, saved=0, rows=0, own=0)
        said = []

        class Memory:
            includes_saved = seed % 2 == 0

            def allocated(self):
                return now.allocated

            def peak(self):
                return max(now.peak, now.allocated)

            def reset(self):
                said.append("reset")
                now.peak = now.allocated

        library = types.SimpleNamespace(limit=lambda n: said.append(f"limit({n})"), usage=lambda: Usage(now.saved, now.rows, now.own, 0, 0, 0))
        b = Budget(SIZE, Memory(), library, lambda: {"weights": SIZE // 5, "gradients": 0}, lambda: SIZE // 16)
        base = SIZE // 4

        def line(what, value=""):
            shown = f"other={b.other} peak={b.peak} step={b.step_peak} outside={b.outside} measuring={b.measuring} began={b.base} needs={b.needs()[-3:]} room={b.room()} now={b.held_now()} beyond={b.held_beyond()} least={b.least()}"
            out = f"{what} {value}: {'; '.join(said)}\n   {shown}"
            said.clear()
            return out.split("\n")

        def attempt(f):
            try:
                return f()
            except Error as e:
                return f"{type(e).__name__}: {e}" + (f" least {e.least} {e.held}" if isinstance(e, BudgetError) else "")

        calm = seed % 3 == 0  # steps alike, of which the later ones hold less: the limit rises after a while
        for turn in range(24 if calm else 8):
            base += 0 if calm else draw.choice([0, 0, 0, 500, SIZE // 32, -SIZE // 32])
            key = "" if calm else draw.choice(["", "", "other"])
            now.allocated, now.peak, now.saved, now.rows, now.own = base, base + (0 if calm else draw.choice([0, SIZE])), 0, 0, 0 if calm else draw.choice([0, 4096])
            if calm:
                b.begin("")
                for i in range(4):
                    now.allocated += 9000
                    now.peak = now.allocated + (SIZE // 3 if turn == 0 else SIZE // 5)
                    if b.measuring:
                        b.before_call()
                        b.saved(i, SIZE // 6)
                        b.after_call()
                yield from line("passes")
                if turn in (3, 17):
                    now.peak = SIZE + 7
                now.allocated = base
                b.end()
                yield from line("end", f"{b.limit_of('')} {b.learnt('')} {b._known.waited}")
                if turn == 5:
                    base += SIZE // 200 * (seed % 2)
                    b._known.extras[-1].needs = [(n // 2, s) for n, s in b._known.extras[-1].needs]
                continue
            if draw.random() < 0.1:
                now.allocated = SIZE + 5
            yield from line("exceeded", attempt(b.exceeded))
            alone = draw.random() < 0.8
            if draw.random() < 0.3:
                exactly = draw.random() < 0.5
                yield from line(f"watch {exactly} {alone}", attempt(lambda: b.watch(exactly, alone)))
                now.allocated, now.peak = base, base + draw.randrange(SIZE)
                yield from line("watched", attempt(lambda: b.watched(draw.choice([None, SIZE // 3]))))
                continue
            spare = draw.choice([0, 0, SIZE // 8, SIZE])
            refused = attempt(lambda: b.begin(key, spare, alone))
            yield from line(f"begin {key!r} {spare} {alone}", refused)
            if refused:
                continue
            now.allocated = base
            alive = {}
            for call in range(draw.randrange(2, 7)):
                n = draw.randrange(1000, SIZE // 10)
                id = draw.randrange(1, 5)
                if draw.random() < 0.6:
                    now.allocated += n
                now.peak = now.allocated + draw.choice([0, SIZE // 9, SIZE // 3])
                if b.measuring:
                    b.before_call()
                    if draw.random() < 0.7:
                        b.saved(id, n)
                        alive.setdefault(id, n)
                        now.saved = min(sum(alive.values()), SIZE // 5)
                        now.rows = draw.choice([0, 100])
                    else:
                        b.released([id, id + 1])
                    b.after_call()
                yield from line("call", f"{b.mark()} {b.readings}")
            if draw.random() < 0.3:
                b.pause()
                now.peak += SIZE // 7

                def run():
                    now.allocated, now.peak = now.allocated + 70, now.allocated + 900
                    return "made"

                yield from line("second pass", b.second_pass(run))
                b.resume()
                yield from line("resumed")
            now.allocated, now.saved = base, 0
            b.end()
            yield from line("end", f"{attempt(lambda: b.limit_of(key))} {b.learnt(key)}")
            yield from line("check", attempt(b.check))
            if draw.random() < 0.3:
                b.asked = draw.choice([0, 5000])
                yield from line("explain", attempt(lambda: b.explain(TooSmall("", draw.choice([6000, SIZE])))))
            if draw.random() < 0.2:
                b.expect("other", draw.choice([0, SIZE // 3]))
                yield from line("expect", b.learnt("other"))

    def test_as_they_were(self):
        self.compare("limits", [line for seed in range(13) for line in [f"run {seed}", *self.played(seed)]])

    def test_formulas(self):
        """Limits and least budgets of random needs, by trying every one."""
        draw = random.Random(2)
        for _ in range(200):
            size, base = draw.randrange(2000, 9000), draw.randrange(1000)
            needs = [(draw.randrange(1500), draw.randrange(1500)) for _ in range(draw.randrange(5))]
            few = largest(needs)
            self.assertTrue(set(few) <= set(needs))
            for need in needs:
                self.assertTrue(any(a >= need[0] and b >= need[1] for a, b in few))
            for i, need in enumerate(few):
                self.assertFalse(any(a >= need[0] and b >= need[1] for j, (a, b) in enumerate(few) if i != j))
            most = max((s for _, s in needs), default=0)
            limit = limit_for(size, base, needs)
            rooms = [size - base - n - size // 256 for n, s in needs if s > size - base - n - size // 256 or 2 * s >= most]
            self.assertEqual(min([size - base, *rooms]), limit)
            saved = draw.randrange(1000)
            fits = lambda n: n - n // 256 >= max([base, *(base + x + min(saved, s) for x, s in needs)])
            least = least_for(base, needs, saved)
            self.assertTrue(fits(least))
            self.assertLessEqual(least - min(n for n in range(least + 1) if fits(n)), 2)
