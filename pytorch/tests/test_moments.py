"""What a step holds at every moment, and plans that keep to it. SPEC S8.6."""

import contextlib
import copy
import unittest
from unittest import mock

from blocks import Block, Layer, one_pass, stack, train
from common import runtime, torch
from stowage import _plan
from stowage._budget import limit_for
from stowage._plan import Choice, Plan, agree, best
from stowage._planned import CAUTION, LATE, RECORDED, REFINED, SLACK, STEPS
from torch import nn


class Activated(nn.Module):
    """A block whose result is saved by itself, and by the next one as its input."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.up(x))


class Unwritten(torch.autograd.Function):
    """Saves a seed that nothing reads, as attention does if it drops nothing."""

    seeds = 0

    @staticmethod
    def forward(ctx, x):
        Unwritten.seeds += 1
        ctx.save_for_backward(x, torch.tensor(Unwritten.seeds))
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Seeded(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + Unwritten.apply(torch.tanh(self.up(x)))


class Moments(unittest.TestCase):
    @contextlib.contextmanager
    def recorded(self, make, blocks=4):
        """Opens a runtime, and gives it and what its recorded steps measured: with blocks as
        units, and with their parts."""
        model = stack(make, blocks)
        with runtime("budget", budget="1GiB") as rt:
            rt.attach(model)
            train(model, one_pass, RECORDED, rt)
            yield rt, rt._planner.keys[""].measured

    def test_what_the_next_block_needs_stays(self):
        with self.recorded(Activated) as (_, (blocks, *_)):
            for part in blocks.parts.values():
                self.assertEqual((0, 0), (part.lean, part.rest), part.unit.name)
                self.assertGreater(part.inputs, 0)

    def test_seeds_that_nothing_reads(self):
        with self.recorded(Seeded) as (rt, _):
            self.assertEqual({True}, {u.whole for u in rt._planner.units.list if u.parent is None}, rt._planner.notes())

    def test_everything_kept_is_what_was_measured(self):
        for make in (Block, Layer):
            with self.recorded(make) as (_, divisions):
                for m in divisions:
                    self.assertEqual(max(m._profile.needs), m.most_held({}))

    def test_dropping_takes_less(self):
        """The more blocks are recomputed, the less is held at once, and never less than what must be."""
        for make in (Block, Layer):
            with self.recorded(make, 6) as (rt, (m, *_)):
                before = m.most_held({})
                units = [u for u in rt._planner.units.list if u.parent is None and u.whole]
                self.assertEqual(6, len(units))
                for n in range(1, 7):
                    held = m.most_held({u: Choice(whole=True) for u in units[:n]})
                    self.assertLessEqual(held, before)
                    before = held
                self.assertLess(before, m.most_held({}))
                self.assertGreaterEqual(before, sum(p.inputs for p in m.parts.values()))

    def test_plans_keep_to_the_limit(self):
        for make in (Block, Layer):
            with self.recorded(make, 6) as (rt, divisions):
                most, chosen = divisions[0].most_held({}), set()
                least = divisions[0].most_held({u: Choice(whole=True) for u in rt._planner.units.list if u.parent is None and u.whole})
                for limit in range(most, least, (least - most) // 6):
                    plan = best(divisions, rt._library.choose, limit, False, everything=True)
                    held = [m.most_held(plan.choices) for m in divisions if {p.unit for p in m.parts.values()} == set(plan.saved)]
                    self.assertLessEqual(held[0], limit)
                    chosen.update(str(c) for c in plan.choices.values())
                self.assertTrue(chosen & {"recompute", "recompute cheap parts"}, chosen)

    def test_room_that_a_plan_leaves(self):
        """It recomputes less, and keeps no more than there is room for."""
        for make in (Block, Layer):
            with self.recorded(make, 6) as (rt, divisions):
                for m in divisions:
                    m._whole, m._lean = dict.fromkeys(m._whole, 10**7), dict.fromkeys(m._lean, 10**6)
                    units = {part.unit for part in m.parts.values() if part.unit.whole and not (m is divisions[-1] and part.unit.parts)}
                    all = {u: Choice(whole=True) for u in units}
                    plan = Plan(all, {}, {}, {"again_ns": m.again(all), "step_ns": 10**12, "peak": 0})
                    m.count(plan)
                    dropped = lambda p: sum(part.dropped(p.choices.get(part.unit, Choice())) for part in m.parts.values())
                    self.assertIs(plan, m.relaxed(plan, 0))
                    took = plan.answer["step_ns"]
                    for room in range(0, dropped(plan) + 1, dropped(plan) // 24):
                        got = m.relaxed(plan, room)
                        self.assertLessEqual(set(got.choices), units)
                        self.assertLessEqual(dropped(plan) - dropped(got), room)
                        self.assertEqual(dropped(plan) - dropped(got), got.answer["peak"])
                        self.assertEqual(m.again(got.choices), got.answer["again_ns"])
                        left = room - got.answer["peak"]
                        for u, c in got.choices.items():  # nothing else would fit
                            bytes = [part.dropped(c) - part.dropped(Choice(lean=c.whole and bool(u.lean))) for part in m.parts.values() if part.unit is u]
                            self.assertGreater(sum(bytes), left, (u.name, c))
                        took = min(took, got.answer["step_ns"])
                    self.assertEqual({}, m.relaxed(plan, dropped(plan)).choices)

    def test_cheap_parts_that_are_not(self):
        """They are recomputed with the rest or not at all, and all of it takes what it took."""
        with self.recorded(Block, 4) as (_, (m, *_)), mock.patch.object(_plan, "NOTICED", 5_000_000):
            u = next(iter(m.parts.values())).unit
            names = lambda: {what for of, what in m.request(1 << 30, False)[1] if of is u}
            m._whole[u], m._lean[u] = 10**7, 10**6
            self.assertIn("lean", names())
            bytes = sum(m.request(1 << 30, False)[0]["storages"])
            m._lean[u] = 10**8
            self.assertNotIn("lean", names())
            request, units = m.request(1 << 30, False)
            self.assertEqual(bytes, sum(request["storages"]))
            self.assertEqual([10**7], [unit["recompute_ns"] for unit, (of, what) in zip(request["units"], units) if of is u and what == "rest"])

    def test_units_of_other_ranks(self):
        """What another rank recomputes, and this one does not know or counts otherwise, is left as it is."""
        with self.recorded(Layer, 3) as (rt, (coarse, fine)):
            stranger = copy.copy(rt._planner.units.list[0])
            stranger.parts = []
            for m, u in ((coarse, stranger), (fine, next(u for u in rt._planner.units.list if u.parts))):
                m._whole = dict.fromkeys(m._whole, 10**7)
                plan = Plan({u: Choice(whole=True)}, {}, {}, {"again_ns": 0, "step_ns": 10**12, "peak": 0})
                m.count(plan)
                self.assertEqual(plan.choices, m.relaxed(plan, 1 << 40).choices)

    def test_what_ranks_agree_on_is_counted(self):
        with self.recorded(Block, 4) as (rt, divisions):
            m, units = divisions[0], rt._planner.units.list
            plan = Plan({}, {}, {}, {"peak": 1 << 20})
            m.count(plan)
            agree(plan, divisions, units, {units[0].name}, set())
            self.assertEqual((1 << 20) - sum(part.dropped(Choice(whole=True)) for part in m.parts.values() if part.unit is units[0]), plan.answer["peak"])

    def test_times_of_steps_under_a_plan(self):
        with self.recorded(Block, 4) as (rt, (m, *_)):
            units = [u for u in rt._planner.units.list if u.parent is None]
            whole, lean = dict(m._whole), dict(m._lean)
            m.retime({units[0]: whole[units[0]] // 4})
            self.assertEqual(whole[units[0]] // 4, m._whole[units[0]])
            for u in units[1:]:
                self.assertAlmostEqual(whole[u] / 4, m._whole[u], delta=2 + whole[u] / 1000)
                self.assertLessEqual(m._lean[u], lean[u] / 4 + 1)
            self.assertEqual(m._whole[units[1]] + m._lean[units[2]], m.again({units[1]: Choice(whole=True), units[2]: Choice(lean=True)}))


class Refined(unittest.TestCase):
    """A device whose memory holds less than was recorded: plans recompute less until the budget
    is used, and no step exceeds it."""

    def test_steps(self):
        model = stack(Block, 6)
        with runtime("budget", budget="1GiB") as rt:
            rt.attach(model)
            train(model, one_pass, RECORDED, rt)
            planner, known = rt._planner, rt._planner.keys[""]
            (m, *_) = known.measured
            budget = planner._budget
            all = {u: Choice(whole=True) for u in planner.units.list if u.parent is None and u.whole}
            known.base, known.stage, known.steps, known.version = 0, "recompute", 0, 1
            real = lambda choices: known.base + 1000 + sum(p.lean + p.rest + p.inputs - p.dropped(choices.get(p.unit, Choice())) for p in m.parts.values())
            budget.size = size = (real(all) + real({})) // 2
            known.plan = Plan(all, {}, {}, {"again_ns": m.again(all), "step_ns": 10**12, "peak": 0, "moved": 0, "before_peak": 0})
            m.count(known.plan)
            peaks = []
            with mock.patch.object(type(budget), "measures", True), mock.patch.object(budget, "watched", lambda _: peaks.append(real(known.plan.choices)) or peaks[-1]), mock.patch.object(budget, "watch"), mock.patch.object(planner, "_rebase"):
                planner._rewrap()
                train(model, one_pass, STEPS["recompute"], rt)
            self.assertLessEqual(max(peaks), size)
            self.assertGreater(peaks[-1], peaks[0])
            largest = max(p.dropped(Choice(whole=True)) for p in m.parts.values())
            self.assertGreater(peaks[-1], size - size // SLACK - 2 * largest)

    def test_limits_that_the_library_learnt(self):
        """A plan that offloads may keep as much as the library found to fit, less what late copies take."""
        with runtime("budget", budget="1GiB") as rt:
            model = stack(Block, 4)
            rt.attach(model)
            train(model, one_pass, RECORDED, rt)
            planner, known, size = rt._planner, rt._planner.keys[""], 1 << 30
            known.stage, known.steps, known.limit, known.flat, known.outside, late = "offload", 0, size // 2, size // 2 + 7, 1000, size // LATE

            def expected():
                with mock.patch.object(planner._budget, "expect") as expect:
                    planner._expect("", known)
                return expect.call_args[0][1] + known.outside

            self.assertEqual(size // 2 - size // CAUTION, expected())  # nothing was measured yet
            known.other = (known.plan, 0, 0.0)
            self.assertEqual(size // 2, expected())
            for kept, more in ((size // 2, 0), (size // 2 + 2 * late, 0), (size // 2 + 3 * late, 2 * late)):
                known.kept = kept
                self.assertEqual(more, planner._change(known, known.plan, size // 2))
            self.assertEqual(size // 2, expected())
            known.kept = size // 4
            self.assertEqual(size // 4, expected())
            known.steps = REFINED
            self.assertEqual(0, planner._change(known, known.plan, size // 2))

    def test_room_at_another_time(self):
        """What the process left at its peak is no room for saved tensors while gradients grow: a step that
        offloads has as many of them at all times as it may, and one that recomputes has few at the end."""
        with runtime("budget", budget="1GiB") as rt:
            model = stack(Block, 4)
            rt.attach(model)
            train(model, one_pass, RECORDED, rt)
            planner, known, size = rt._planner, rt._planner.keys[""], 1 << 30
            gradients = saved = size // 2
            needs = [(gradients * i // 64, 8 * saved * (64 - i) // 64) for i in range(65)]
            fits = lambda limit: all(other + min(limit, all) <= size for other, all in needs)
            known.flat = limit_for(size, 0, needs)
            known.peak = max(other + all // 8 for other, all in needs)
            known.plan.answer["peak"] = saved
            asked = []

            def best(known, offload):
                asked.append(known.limit)
                return known.plan

            with mock.patch.object(type(planner._budget), "measures", True), mock.patch.object(planner, "_best", best):
                known.stage, known.steps, known.limit = "recompute", REFINED, known.flat - size // CAUTION
                planner._try_offload("", known, known.plan, 1.0, 1.0)
                known.stage, known.steps, known.other, known.limit = "offload", 0, None, known.flat - size // CAUTION
                known.plan.choices[planner.units.list[0]] = Choice(offload=True)
                asked.append(known.limit + planner._change(known, known.plan, known.peak))
            for limit in asked:
                self.assertTrue(fits(limit), limit / size)
                self.assertFalse(fits(limit + size // CAUTION), limit / size)


if __name__ == "__main__":
    unittest.main()
