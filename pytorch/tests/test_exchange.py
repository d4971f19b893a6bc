"""Better plans from the same units: exchanges, whole units, times of steps under a plan, and cheap parts
that are written in place or made around a part of a block. SPEC S8.6."""

import itertools
import random
import unittest
from unittest import mock

from blocks import PLANS, Block, Compared, Layer, choices, one_pass, planned, recorded, refused, stack, train
from common import torch
from stowage import _again
from stowage._measured import KEEP, Choice
from stowage._plan import BRIEF, Measured, Plan, best
from stowage._planned import RECORDED
from torch import nn


def most_saved(m, request, said=None):
    """Returns the most bytes that a question has saved at once, if some of its units are recomputed."""
    now, most, saved = 0, 0, {}
    for op in request["ops"]:
        if "storage" in op:
            if op["storage"] not in m._others:
                now += request["storages"][op["storage"]] * (1 if op["op"] == "take" else -1)
        else:
            call = op["unit"], op["microbatch"]
            if op["op"] == "save":
                saved[call] = sum(request["storages"][s] for s in op["storages"])
            again = said is not None and said[op["unit"]] == "recompute"
            now += saved[call] * {"save": not again, "load": again, "release": -1}[op["op"]]
        most = max(most, now)
    return most


class Exchanged(unittest.TestCase):
    def test_as_good_as_all_choices(self):
        """Blocks that differ: no other choices that hold as little take less time."""
        with recorded(stack()) as (_, (m, *_)):
            r = random.Random(5)
            units = list(dict.fromkeys(part.unit for part in m.parts.values()))
            for _ in range(20):
                m._whole = {u: r.randrange(1000, 3000) for u in units}
                m._lean = {u: r.randrange(10, 900) for u in units}
                options = [[KEEP, m._again_whole(u), *(m._leanest(u, of, False) for n in (1, 2) for of in itertools.combinations(m._sorts(u), n))] for u in units]
                all = {u: m._again_whole(u) for u in units}
                limit = r.randrange(m.most_counted(all), m.most_counted({}))
                plan = m.exchanged(self.plan(m, all), limit)
                self.assertLessEqual(m.most_counted(plan.choices), limit)
                least = min(m.again(dict(zip(units, of))) for of in itertools.product(*options) if m.most_counted(dict(zip(units, of))) <= limit)
                self.assertLessEqual(m.again(plan.choices), 1.1 * least)
                self.assertEqual(plan.answer["again_ns"], m.again(plan.choices))

    def test_cheap_parts_of_parts(self):
        """A block whose norms are all inside of parts may recompute them, unless those of a part cannot be."""

        class Parts(Layer):
            def forward(self, x):
                return x + self.mlp(x + self.attention(x))

        with recorded(stack(Parts)) as (rt, divisions):
            m = next(m for m in divisions if not m._fine and not m.ends)
            units = [u for u in rt._planner.units.list if u.parent is None]
            self.assertEqual({None}, {u.lean for u in units})
            whole = {u: m._again_whole(u) for u in units}
            m._whole, m._lean = dict.fromkeys(m._whole, 1000), dict.fromkeys(m._lean, 100)
            m._shares = {key: dict.fromkeys(of, 1 / len(of)) for key, of in m._shares.items()}
            m._kinds = m._sorted()
            dropped = lambda choices: sum(part.dropped(choices.get(part.unit, KEEP)) for part in m.parts.values())
            lean = {u: Choice(lean=True) for u in units}
            plans = {"relaxed": m.relaxed(self.plan(m, whole), dropped(whole) - dropped(lean)), "exchanged": m.exchanged(self.plan(m, whole), m.most_counted(lean))}
            for u in units:
                u.whole = False
            plans["strongest"] = m.strongest(m.request(1 << 30, False, everything=True)[0])
            for name, plan in plans.items():
                with self.subTest(name):
                    self.assertTrue(any(c.lean for c in plan.choices.values()), plan.choices)
            units[1].parts[1].lean = False
            again = Measured(m._profile, False)
            self.assertEqual({units[0], units[2], units[3]}, set(again.strongest(again.request(1 << 30, False, everything=True)[0]).choices))

    def test_what_is_kept(self):
        """As the question for the solver counts it."""
        for make in (Block, Layer):
            with recorded(stack(make)) as (_, divisions):
                for m in divisions:
                    request, names = m.request(1 << 30, False, everything=True)
                    self.assertEqual(most_saved(m, request), m.most_kept({}))
                    all = m.strongest(request).choices
                    said = ["recompute" if u in all and (all[u].whole and what != "inputs" or what.startswith("lean")) else "keep" for u, what in names]
                    self.assertEqual(most_saved(m, request, said), m.most_kept(all))

    def test_what_plans_say_that_they_keep(self):
        """By their own choices, which need not be those of the solver."""
        for make in (Block, Layer):
            with recorded(stack(make)) as (rt, divisions):
                for m in divisions:
                    least, most = m.most_counted(m.strongest(m.request(1 << 30, False, everything=True)[0]).choices), m.most_counted({})
                    for i in range(5):
                        plan = best([m], rt._library.choose, least + (most - least) * i // 4, False, everything=True)
                        self.assertEqual((m.most_kept(plan.choices), m.most_kept({})), (plan.answer["peak"], plan.answer["before_peak"]))

    def test_the_largest_call(self):
        """What it saves twice counts twice: there must be room for a pass that saves it in two places."""

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

            def forward(self, x):
                a, b = self.up(x).chunk(2, -1)
                return x + self.down(torch.cat([a * b, b], -1))

        with recorded(stack(Twice)) as (_, (m, *_)):
            rows = 3 * 4 * 4  # bytes of a column; up saves 8 of them, the product 16 twice, down 16
            self.assertEqual((8 + 16 + 16 + 16) * rows, m._profile.largest())

    @staticmethod
    def plan(m, of):
        plan = Plan(of, {}, {}, {}, {"again_ns": m.again(of), "step_ns": 10**9, "peak": 0})
        m.count(plan)
        return plan

    def test_the_solver_finds_none(self):
        """Everything is recomputed then, if that is little enough, and less if it can be."""
        from stowage._errors import TooSmall

        def choose(request):
            e = TooSmall("too small")
            e.least = 1 << 40
            raise e

        with recorded(stack()) as (_, divisions):
            m = divisions[0]
            units = list(dict.fromkeys(part.unit for part in m.parts.values()))
            least = m.most_held({u: m._again_whole(u) for u in units})
            limit = (least + m.most_held({})) // 2
            plan = best([m], choose, limit, False, everything=True)
            self.assertLessEqual(m.most_held(plan.choices), limit)
            self.assertLess(m.again(plan.choices), sum(m._whole[u] for u in units))
            with self.assertRaises(TooSmall):
                best([m], choose, least - 1, False, everything=True)


class Halves(unittest.TestCase):
    def test_asked_again(self):
        """An answer that offloads the inputs of a block alone is no plan: the block is asked for as one."""
        with recorded(stack()) as (_, (m, *_)):
            asked = []

            def choose(request):
                asked.append(([unit["name"] for unit in request["units"]], request["effort"]))
                inputs = [i for i, unit in enumerate(request["units"]) if unit["name"] == "inputs"]
                said = ["offload" if i in inputs[:1] else "keep" for i in range(len(request["units"]))]
                return {"choices": said, "peak": 0, "before_peak": 0, "step_ns": 10**9, "again_ns": 0, "moved": 0}

            plan = best([m], choose, 1 << 30, True)
            blocks = len({part.unit for part in m.parts.values()})
            brief = [(blocks - i, BRIEF) for i in range(blocks + 1)]
            self.assertEqual([*brief, (0, 1)], [(names.count("inputs"), effort) for names, effort in asked])
            self.assertEqual({}, plan.choices)

    def test_the_longer_search_counts_if_it_is_better(self):
        with recorded(stack()) as (_, (m, *_)):
            for took, half, want in ((9, False, True), (11, False, False), (9, True, False)):

                def choose(request):
                    last = request["effort"] == 1
                    names = [unit["name"] for unit in request["units"]]
                    said = ["offload" if last and (name == "inputs" or not half) and not name.startswith("lean") else "keep" for name in names]
                    return {"choices": said, "peak": 0, "before_peak": 0, "step_ns": (took if last else 10) * 10**8, "again_ns": 0, "moved": 0}

                self.assertEqual(want, best([m], choose, 1 << 30, True).offloads)

    def test_one_question_takes_all_of_the_search(self):
        """Plans that only recompute: others are asked for briefly."""
        with recorded(stack()) as (rt, (m, *_)):
            efforts = []

            def choose(request):
                efforts.append(request["effort"])
                return rt._library.choose(request)

            least, most = m.most_counted(m.strongest(m.request(1 << 30, False, everything=True)[0]).choices), m.most_counted({})
            best([m], choose, (least + most) // 2, False, everything=True)
            self.assertEqual((1, {BRIEF, 1}), (efforts.count(1), set(efforts)))

    def test_bytes_are_the_same(self):
        with recorded(stack()) as (_, (m, *_)):
            units = {part.unit for part in m.parts.values()}
            (a, _), (b, _) = m.request(1 << 30, True), m.request(1 << 30, True, one=units)
            self.assertEqual(sum(a["storages"]), sum(b["storages"]))
            self.assertFalse(any(unit["recompute_ns"] for unit in b["units"] if unit["name"] == "rest"))


class Times(unittest.TestCase):
    def test_cheap_parts_by_kind(self):
        with recorded(stack()) as (_, (m, *_)):
            units = list(dict.fromkeys(part.unit for part in m.parts.values()))
            m._shares = {Block: {"GELU": 0.25, "LayerNorm": 0.75}}
            m._lean = {u: 1000 for u in m._lean}
            m.retime({}, {units[1]: {"GELU": 500}})
            for u in units:  # the norm was not timed, and takes longer by as much
                self.assertEqual(500, m._took_again(u, Choice(lean=True, kept=frozenset({"LayerNorm"}))))
                self.assertEqual(2000, m._took_again(u, Choice(lean=True)))
            m.retime({}, {units[1]: {"GELU": 500}, units[2]: {"LayerNorm": 300}})
            self.assertEqual({800}, {m._took_again(u, Choice(lean=True)) for u in units})

    def test_passes_of_units_like_no_other(self):
        with recorded(stack(Layer)) as (_, (m, *_)):
            kinds = {u.kind for u in m._whole}
            self.assertGreater(len(kinds), 1)
            u = next(u for u in m._whole if u.parent is None)
            before = dict(m._whole)
            m.retime({u: 3 * before[u]})
            for other, t in before.items():
                self.assertAlmostEqual(3 * t, m._whole[other], delta=2)

    def test_steps_under_a_plan_time_them(self):
        model = stack()
        with planned(model, "lean") as rt:
            train(model, one_pass, RECORDED, rt)
            known = rt._planner.keys[""]
            known.stage, known.plan = "recompute", known.plan._replace(choices={u: c._replace(offload=False) for u, c in known.plan.choices.items()})
            with mock.patch.object(rt._planner, "_advance"):
                train(model, one_pass, 2, rt)
            units = [u for u in rt._planner.units.list if u.parent is None]
            self.assertEqual(set(units), set(known.cheap))
            self.assertEqual({"LayerNorm", "GELU"}, {kind for of in known.cheap.values() for kind in of})
            self.assertEqual({}, known.passes)
            self.assertTrue(all(t > 0 for of in known.cheap.values() for t in of.values()))


class InPlace(nn.Module):
    """An activation that writes over the output of a norm, and the same one over a sum."""

    def __init__(self, width=8):
        super().__init__()
        self.up, self.norm, self.down, self.act = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(x + self.down(self.act(self.norm(self.up(x)))))


class Overwritten(Compared):
    def test_every_plan(self):
        model = stack(InPlace)
        want = train(model, one_pass, RECORDED + 2)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        for name in PLANS:
            with self.subTest(plan=name), planned(model, name) as rt:
                model.load_state_dict(state)
                self.compare(want, train(model, one_pass, RECORDED + 2, rt))
                self.assertEqual({}, refused(rt))
                self.assertEqual(4 if name != "keep" else 0, len(choices(rt)))
                self.assertTrue(all(block.act.inplace for block in model.blocks))

    def test_what_is_dropped(self):
        """The result of the first, which autograd and the product after it save, and what the norm saves; the sum stays."""
        model = stack(InPlace)
        with planned(model, "lean") as rt:
            made = []
            with mock.patch.object(_again.Lean, "pack", lambda lean, t, pack=_again.Lean.pack: made.append(pack(lean, t)) or made[-1]):
                train(model, one_pass, RECORDED + 1, rt)
            self.assertEqual({"LayerNorm"}, {r.kind for r in made if type(r) is _again.Recipe})
            for part in rt._planner.keys[""].measured[0].parts.values():
                self.assertEqual({"LayerNorm": 3 * 4 * (8 + 2) * 4}, part.kinds)

    def test_an_activation_alone_is_kept(self):
        """There is nothing to make its input from."""

        class Alone(InPlace):
            def forward(self, x):
                return x + self.down(self.act(self.up(x)))

        model = stack(Alone)
        want = train(model, one_pass, RECORDED + 2)
        with planned(model, "lean") as rt:
            self.compare(want, train(model, one_pass, RECORDED + 2, rt))
            self.assertFalse(any("ReLU" in part.kinds for part in rt._planner.keys[""].measured[0].parts.values()))


class Around(Compared):
    def test_a_norm_before_a_part(self):
        """What attention saves of the norm before it can be made again where the block is one unit, and
        where attention is a unit of its own it is kept."""
        with recorded(stack(Layer)) as (_, divisions):
            coarse, fine = (next(m for m in divisions if m._fine == of and not m.ends) for of in (False, True))
            bytes = 3 * 4 * 8 * 4
            self.assertTrue(all(part.kinds["LayerNorm"] >= 2 * bytes for part in coarse.parts.values()))
            for call, part in fine.parts.items():
                if call.unit.name.endswith("attention"):
                    self.assertNotIn("LayerNorm", {kind for kind, n in part.kinds.items() if n})
            for u in coarse._whole:
                if u.parent is None:
                    self.assertIn("LayerNorm", coarse._shares_of(u))

    def test_gradients(self):
        model = stack(Layer)
        want = train(model, one_pass, RECORDED + 2)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        for fine in (False, True):
            for name in ("lean", "lean, offload"):
                with self.subTest(fine=fine, plan=name), planned(model, name, fine) as rt:
                    model.load_state_dict(state)
                    self.compare(want, train(model, one_pass, RECORDED + 2, rt))
                    self.assertEqual({}, refused(rt))


if __name__ == "__main__":
    unittest.main()
