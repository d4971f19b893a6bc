"""What a step holds at every moment, and plans that keep to it. SPEC S8.6."""

import contextlib
import copy
import gc
import statistics
import types
import unittest
import weakref
from unittest import mock

from blocks import Block, Layer, one_pass, recorded, stack, train
from common import DEVICE, runtime, torch
from stowage import _clock, _contest, _measured, _plan
from stowage._again import state
from stowage._budget import limit_for
from stowage._clock import Clock
from stowage._errors import TooSmall
from stowage._key import Key
from stowage._measured import HOOK_LEAN, HOOK_WHOLE, Choice
from stowage._plan import Plan, agree, best
from stowage._planned import CAUTION, LATE, RECORDED, REFINED, SLACK, STEPS, TIMED
from stowage._ranks import Facts
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
    def test_what_the_next_block_needs_stays(self):
        with recorded(stack(Activated)) as (_, (blocks, *_)):
            for part in blocks.parts.values():
                self.assertEqual((0, 0), (part.lean, part.rest), part.unit.name)
                self.assertGreater(part.inputs, 0)

    def test_seeds_that_nothing_reads(self):
        with recorded(stack(Seeded)) as (rt, _):
            self.assertEqual({True}, {u.whole for u in rt._planner.units.list if u.parent is None}, rt._planner.notes())

    def test_everything_kept_is_what_was_measured(self):
        for make in (Block, Layer):
            with recorded(stack(make)) as (_, divisions):
                for m in divisions:
                    self.assertEqual(max(m._profile.needs), m.most_held({}))

    def test_dropping_takes_less(self):
        """The more blocks are recomputed, the less is held at once, and never less than what must be."""
        for make in (Block, Layer):
            with recorded(stack(make, 6)) as (rt, (m, *_)):
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
            with recorded(stack(make, 6)) as (rt, divisions):
                most, chosen = divisions[0].most_held({}), set()
                least = divisions[0].most_held({u: Choice(whole=True) for u in rt._planner.units.list if u.parent is None and u.whole})
                for limit in range(most, least, (least - most) // 6):
                    plan = best(divisions, rt._library.choose, limit, False, everything=True)
                    held = [m.most_held(plan.choices) for m in divisions if m.made(plan)]
                    self.assertLessEqual(held[0], limit)
                    chosen.update(str(c) for c in plan.choices.values())
                self.assertTrue(chosen & {"recompute", "recompute cheap parts"}, chosen)

    def test_room_that_a_plan_leaves(self):
        """It recomputes less, and keeps no more than there is room for."""
        for make in (Block, Layer):
            with recorded(stack(make, 6)) as (rt, divisions):
                for m in divisions:
                    m._whole, m._lean = dict.fromkeys(m._whole, 10**7), dict.fromkeys(m._lean, 10**6)
                    units = {part.unit for part in m.parts.values() if part.unit.whole and not (m._fine and part.unit.parts)}
                    all = {u: Choice(whole=True) for u in units}
                    plan = Plan(all, {}, {}, {}, {"again_ns": m.again(all), "step_ns": 10**12, "peak": 0})
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
        with recorded(stack(Block, 4)) as (_, (m, *_)), mock.patch.object(_measured, "NOTICED", 5_000_000):
            u = next(iter(m.parts.values())).unit
            names = lambda: {what for of, what in m.request(1 << 30, False)[1] if of is u}
            m._whole[u], m._lean[u] = 10**7, 10**6
            self.assertIn("lean", names())
            bytes = sum(m.request(1 << 30, False)[0]["storages"])
            m._lean[u] = 10**14  # each sort of them takes too long, whatever its share
            self.assertNotIn("lean", names())
            request, units = m.request(1 << 30, False)
            self.assertEqual(bytes, sum(request["storages"]))
            self.assertEqual([10**7], [unit["recompute_ns"] for unit, (of, what) in zip(request["units"], units) if of is u and what == "rest"])

    @unittest.skipUnless(DEVICE == "cpu", "a GPU's events take the times there")
    def test_first_passes_are_not_timed(self):
        """They wait for memory that is new to the allocator, and for code that is loaded."""
        now, seen = [0.0], set()

        class Slow(Block):
            def forward(self, x):
                first = state.again and (id(self), state.again) not in seen
                if state.again:
                    seen.add((id(self), state.again))
                now[0] += 1000.0 if first else 1.0
                return super().forward(x)

        with mock.patch.object(_clock, "time", types.SimpleNamespace(perf_counter=lambda: now[0])), recorded(stack(Slow)) as (rt, (m, *_)):
            self.assertEqual(4, len(seen))
            for u in rt._planner.units.list:
                self.assertEqual(10**9, m._whole[u])

    def test_a_unit_that_was_not_tried(self):
        """Its first pass may have waited for copies: it takes no longer than others do for as many bytes."""
        with recorded(stack(Block)) as (rt, (m, *_)):
            p, call = m._profile, next(iter(m.parts))
            call.unit.kind = Activated  # like no other
            del p.whole_times[call], p.saves[call]
            m._stamps[call.ended] = m._stamps[call.began] + 1000.0
            others = [m._shortest()[0][c.unit] for c in m.parts if c is not call]
            self.assertAlmostEqual(statistics.median(others), m._shortest()[0][call.unit], delta=2)
            p.whole_times.clear()
            self.assertEqual(10**12, m._shortest()[0][call.unit])

    def test_plans_that_leave_some_of_what_was_asked(self):
        """The next question leaves out what a plan did not use, or it would get the same answer."""
        with recorded(stack(Block, 6)) as (rt, (m, *_)):
            units = [u for u in rt._planner.units.list if u.parent is None]

            def choose(request):  # steps of 1,000 bytes
                n = min(max(-(-(limit - request["limit"]) // 1000), 0), 6)
                names = [u for u in dict.fromkeys(unit["layer"] for unit in request["units"])][:n]
                said = ["recompute" if unit["layer"] in names and unit["name"] == "rest" else "keep" for unit in request["units"]]
                return {"choices": said, "peak": limit - 1000 * n, "before_peak": 0, "step_ns": 10**9 + n, "again_ns": 0, "moved": 0}

            limit, held = 10**6, lambda choices: limit + (5 if len(choices) < 3 else 0)
            with mock.patch.object(m, "fullest", lambda choices: (held(choices), None)), mock.patch.object(m, "spared", lambda plan, limit: plan), mock.patch.object(m, "exchanged", lambda plan, *_: plan):
                plan = best([m], choose, limit, False, everything=True)
            self.assertEqual(units[:3], list(plan.choices))

    def test_a_second_pass_that_takes_too_much(self):
        """That block is kept, and others are recomputed."""
        with recorded(stack(Block, 6)) as (rt, divisions):
            units = [u for u in rt._planner.units.list if u.parent is None]
            most, least = (divisions[0].most_held({u: Choice(whole=True) for u in of}) for of in ([], units[1:]))
            first = next(call for call in divisions[0].parts if call.unit is units[0])
            divisions[0]._profile.again[first] = 1 << 30, 0
            plan = best(divisions, rt._library.choose, (most + least) // 2, False, everything=True)
            self.assertNotIn(units[0], [u for u, c in plan.choices.items() if c.whole])
            self.assertLessEqual(next(m for m in divisions if m.made(plan)).most_held(plan.choices), (most + least) // 2)
            for none in (least // 2, -17387):  # everything else alone exceeds the budget
                with self.assertRaisesRegex(TooSmall, "too small|too much"):
                    best(divisions, rt._library.choose, none, False, everything=True)

    def test_no_plan_holds_nothing(self):
        """An error that the caller drops lets go of the caller's frames, without the collector's help."""
        with recorded(stack(Block, 2)) as (rt, divisions):

            def held():
                t = torch.zeros(1)
                try:
                    best(divisions, rt._library.choose, 1, False, everything=True)
                except TooSmall:
                    return weakref.ref(t)

            gc.collect()
            gc.disable()
            try:
                self.assertIsNone(held()())
            finally:
                gc.enable()

    def test_weights_that_autocast_keeps(self):
        """They are cast again only where that lowers what is held at most."""
        with recorded(stack(Block, 4)) as (rt, (m, *_)):
            units = [u for u in rt._planner.units.list if u.parent is None]
            m._shares = {Block: {"GELU": 0.5, _plan.CAST: 0.25, "LayerNorm": 0.25}}
            m._lean = dict.fromkeys(m._lean, 10**6)
            for call, part in m.parts.items():
                m.parts[call] = part._replace(cached=8, kinds={**part.kinds, _plan.CAST: 8}, lean=part.lean + 8)
            choices = {units[0]: Choice(lean=True), units[1]: Choice(lean=True, kept=frozenset({"GELU", "LayerNorm"})), units[2]: Choice(whole=True)}
            plan = Plan(choices, {}, {}, {}, {"again_ns": m.again(choices), "step_ns": 10**9, "peak": 1000})
            for held, kept, same in ((101, 100, True), (100, 101, True), (100, 100, False)):
                with mock.patch.object(m, "most_held", lambda _: held), mock.patch.object(m, "most_kept", lambda _: kept):
                    got = m.spared(plan, 100)
                self.assertEqual(same, got is plan)
            self.assertEqual({units[0]: Choice(lean=True, kept=frozenset({_plan.CAST})), units[2]: Choice(whole=True)}, got.choices)
            self.assertEqual((1016, 10**9 - 5 * 10**5), (got.answer["peak"], got.answer["step_ns"]))

            def held(choices):
                casting = sum(c.lean and _plan.CAST not in c.kept for c in choices.values())
                return 100 if casting else 101

            with mock.patch.object(m, "most_held", held), mock.patch.object(m, "most_kept", lambda _: 0):
                got = m.spared(plan, 100)  # in the last, whose backward pass is first
            self.assertEqual({units[0]: Choice(lean=True), units[2]: Choice(whole=True)}, got.choices)

    def test_room_and_weights_that_autocast_keeps(self):
        """They take room while the forward pass runs: other cheap parts are not kept in their place."""
        with recorded(stack(Block, 4)) as (rt, (m, *_)):
            units = [u for u in rt._planner.units.list if u.parent is None]
            for call, part in m.parts.items():
                kinds = {**part.kinds, _plan.CAST: part.lean}
                m.parts[call] = part._replace(cached=part.lean, kinds=kinds, gross=kinds, lean=2 * part.lean)
            m._shares = {Block: {_plan.CAST: 0.1, "GELU": 0.6, "LayerNorm": 0.3}}
            m._lean, m._kinds = dict.fromkeys(m._lean, 10**6), {Block: [frozenset({_plan.CAST}), frozenset({"GELU", "LayerNorm"})]}
            choices = {u: Choice(lean=True, kept=frozenset({_plan.CAST})) for u in units}
            plan = _planned_by(m, choices)
            self.assertIs(plan, m.relaxed(plan, 0))
            one = next(part.lean for part in m.parts.values() if part.unit is units[0]) // 2
            self.assertEqual(3, len(m.relaxed(plan, one).choices))
            for call, part in m.parts.items():  # in the backward pass of their block there is what is dropped in their place
                m.parts[call] = part._replace(cached=0)
            self.assertIs(plan, m.relaxed(plan, 0))

    def test_units_of_other_ranks(self):
        """What another rank recomputes, and this one does not know or counts otherwise, is left as it is."""
        with recorded(stack(Layer, 3)) as (rt, (coarse, fine, *_)):
            stranger = copy.copy(rt._planner.units.list[0])
            stranger.parts = []
            for m, u in ((coarse, stranger), (fine, next(u for u in rt._planner.units.list if u.parts))):
                m._whole = dict.fromkeys(m._whole, 10**7)
                plan = Plan({u: Choice(whole=True)}, {}, {}, {}, {"again_ns": 0, "step_ns": 10**12, "peak": 0})
                m.count(plan)
                self.assertEqual(plan.choices, m.relaxed(plan, 1 << 40).choices)

    def test_what_ranks_agree_on_is_counted(self):
        with recorded(stack(Block, 4)) as (rt, divisions):
            m, units = divisions[0], rt._planner.units.list
            plan = Plan({}, {}, {}, {}, {"peak": 1 << 20})
            m.count(plan)
            agree(plan, divisions, units, {units[0].name}, set())
            self.assertEqual((1 << 20) - sum(part.dropped(Choice(whole=True)) for part in m.parts.values() if part.unit is units[0]), plan.answer["peak"])

    def test_times_of_steps_under_a_plan(self):
        with recorded(stack(Block, 4)) as (rt, (m, *_)):
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
            known.base, known.stage, known.steps, known.version, known.retimed = 0, "recompute", 0, 1, True
            real = lambda choices: known.base + 1000 + sum(p.lean + p.rest + p.inputs - p.dropped(choices.get(p.unit, Choice())) for p in m.parts.values())
            budget.size = size = (real(all) + real({})) // 2
            known.plan = Plan(all, {}, {}, {}, {"again_ns": m.again(all), "step_ns": 10**12, "peak": 0, "moved": 0, "before_peak": 0})
            m.count(known.plan)
            peaks = []
            with mock.patch.object(type(budget), "measures", True), mock.patch.object(budget, "watched", lambda _: peaks.append(real(known.plan.choices)) or peaks[-1]), mock.patch.object(budget, "watch"), mock.patch.object(planner, "_rebase"):
                planner._rewrap()
                train(model, one_pass, STEPS["recompute"], rt)
            self.assertLessEqual(max(peaks), size)
            self.assertEqual(max(peaks), rt.stats()["budget"]["planned"])
            self.assertGreater(peaks[-1], peaks[0])
            largest = max(p.dropped(Choice(whole=True)) for p in m.parts.values())
            self.assertGreater(peaks[-1], size - size // SLACK - 2 * largest)

    def test_plans_take_turns(self):
        """A device that becomes slower with every step does not decide for the plan that came first."""
        model = stack(Block, 4)
        for factor, wanted in ((0.98, True), (1.02, False)):
            with runtime("budget", budget="1GiB") as rt:
                rt.attach(model)
                train(model, one_pass, RECORDED, rt)
                planner, known = rt._planner, rt._planner.keys[""]
                fast, slow = known.plan._replace(choices={}), known.plan._replace(choices={planner.units.list[0]: Choice(offload=True)})
                known.stage, known.steps, known.plan, known.other, seen = "offload", STEPS["offload"] - 1, slow, (fast, 1), []
                facts = lambda seconds: Facts("", None, learnt=True, seconds=seconds)
                planner._advance("", known, facts(0.0), [facts(0.0)])
                self.assertEqual("compare", known.stage)
                for i in range(2 * TIMED):
                    self.assertIs(slow if i % 2 == 0 else fast, known.plan)
                    took = (1.0 + 0.005 * i) * (factor if known.plan is slow else 1.0)
                    planner._advance("", known, facts(took), [facts(took)])
                self.assertEqual(("settled", wanted), (known.stage, known.plan is slow), factor)

    def test_kernels_beside_copies(self):
        """A plan that offloads is tried if it is shorter by more than its copies slow down the rest."""
        with runtime("budget", budget="1GiB") as rt:
            model = stack(Block, 4)
            rt.attach(model)
            train(model, one_pass, RECORDED, rt)
            planner, known = rt._planner, rt._planner.keys[""]
            for copying, stage in ((0, "offload"), (10**9, "settled")):
                plan = known.plan._replace(choices={planner.units.list[0]: Choice(offload=True)}, answer={**known.plan.answer, "step_ns": 96 * 10**7, "copying_ns": copying})
                with mock.patch.object(planner, "_best", lambda known, offload: plan):
                    known.stage, known.steps = "recompute", STEPS["recompute"]
                    planner._try_offload("", known, known.plan, 1.0)
                self.assertEqual(stage, known.stage)

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
            known.other = (known.plan, 0)
            self.assertEqual(size // 2, expected())
            for kept, more in ((size // 2, 0), (size // 2 + 2 * late, 0), (size // 2 + 3 * late, 2 * late)):
                known.kept = kept
                self.assertEqual(more, known.change(size, size // 2, planner._budget.measures))
            # What stays beside it grows, too: no more than the peak left, and nothing once a step exceeded the budget.
            self.assertEqual(late // 2, known.change(size, size - late - late // 2, planner._budget.measures))
            self.assertEqual(0, known.change(size, size - late // 2, planner._budget.measures))
            known.over = 1
            self.assertEqual(0, known.change(size, size // 2, planner._budget.measures))
            known.over = 0
            # Nor once the library needed more than the limit of a plan: it would again.
            for kept in (size // 2, size // 2 + 3 * late):
                known.kept, known.lowered = kept, 1
                self.assertEqual([0, -2 * SLACK - size // SLACK], [known.change(size, peak, planner._budget.measures) for peak in (size // 4, size + 2 * SLACK)])
            known.lowered = 0
            self.assertEqual(size // 2, expected())
            known.kept = size // 4
            self.assertEqual(size // 4, expected())
            known.steps = REFINED
            self.assertEqual(0, known.change(size, size // 2, planner._budget.measures))

    def test_steps_that_hold_the_same(self):
        """Plans that compile blocks again then leave nothing of the budget, once."""
        with runtime("budget", budget="1GiB") as rt:
            model = stack(Block, 4)
            rt.attach(model)
            train(model, one_pass, RECORDED, rt)
            known, size = rt._planner.keys[""], 1 << 30
            peak = size - size // SLACK - 1
            again, left = Choice(True, budget=0.7), size - peak
            for asked, (choice, before, more) in enumerate(((Choice(True), peak, 0), (again, peak - 1, 0), (again, peak, left), (again, peak, left), (again, peak, 0))):
                known.stage, known.steps, known.other, known.before = "recompute", REFINED + 1, None, before
                known.plan.choices.update(dict.fromkeys(rt._planner.units.list, choice))
                change = known.change(size, peak, True)
                self.assertEqual(more, change)
                if asked == 3:  # another rank held too much when it was asked for the first time
                    rt._planner._refine("", known, Facts("", None, change=change))

    def test_ranks_fall_back_together(self):
        """A rank with a plan that offloads does not follow it in a stage in which others recompute everything."""
        with runtime("budget", budget="1GiB") as rt:
            model = stack(Block, 4)
            rt.attach(model)
            train(model, one_pass, RECORDED, rt)
            planner, known = rt._planner, rt._planner.keys[""]
            plan = known.plan._replace(choices=dict.fromkeys(planner.units.list, Choice(offload=True)))
            answers = iter([lambda mine: [mine, True], lambda mine: [mine, mine]])
            with mock.patch.object(planner.ranks, "gather", lambda mine: next(answers)(mine)):
                self.assertTrue(planner._adopt("", known, (plan, None), needed=True))
            self.assertTrue(known.last_resort)
            self.assertFalse(known.plan.offloads)
            self.assertTrue(all(c.whole for c in known.plan.choices.values()))
            self.assertEqual("recompute", known.stage)

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
                planner._try_offload("", known, known.plan, 1.0)
                known.stage, known.steps, known.other, known.limit = "offload", 0, None, known.flat - size // CAUTION
                known.plan.choices[planner.units.list[0]] = Choice(offload=True)
                asked.append(known.limit + known.change(size, known.peak, True))
            for limit in asked:
                self.assertTrue(fits(limit), limit / size)
                self.assertFalse(fits(limit + size // CAUTION), limit / size)


class HostBound(unittest.TestCase):
    """Where the device waits for the host, what hooks take of the host's time counts."""

    def test_when(self):
        for seconds, behind, want in ((0.06, 0.002, True), (0.06, 0.003, False), (0.2, 0.002, True), (0.2, 0.004, False), (0.06, float("inf"), False)):
            m = mock.Mock()
            known = Key()
            known.measured, known.behind, known.idle = [m], behind, True
            known.count_hooks(seconds)
            self.assertEqual(want, m.count_hooks.called, (seconds, behind))
        self.assertEqual((float("inf"), False), Clock(torch.device("cpu")).behind())

    def test_a_step_that_waits(self):
        """The device is idle when a step ends that reads its loss, and was busy between its stamps."""
        for passed, want in (([False] * 4, False), ([True, False, False, False], False), ([True, True, True, False], True), ([True] * 4, True)):
            clock = Clock(torch.device("cuda"))
            with mock.patch.multiple(torch.cuda, Event=mock.Mock(side_effect=[mock.Mock(query=lambda p=p: p) for p in [*passed, False]]), current_stream=mock.Mock(), synchronize=mock.Mock()):
                for _ in range(len(passed) + 1):
                    clock.stamp()
                self.assertEqual(want, clock.behind()[1], passed)

    def test_what(self):
        with recorded(stack(Layer, 4)) as (_, divisions):
            for m in divisions:
                calls = {u: c for c in m.parts for u in [c.unit]}
                for u, call in calls.items():
                    choices = Choice(), Choice(whole=True), Choice(lean=True), Choice(offload=True)
                    before = [m._took_again(u, c) for c in choices]
                    sorts = [s.took for s in m._sorts(u)]
                    with mock.patch.dict(m._hooks):
                        m.count_hooks()
                        after = [m._took_again(u, c) for c in choices]
                        self.assertTrue(all(b - a == HOOK_LEAN * len(call.all) for a, b in zip(sorts, (s.took for s in m._sorts(u)))))
                    self.assertEqual([0, HOOK_WHOLE * len(call.all), HOOK_LEAN * len(call.all), 0], [b - a for a, b in zip(before, after)])


class PlannedAgain(unittest.TestCase):
    """Once steps under a plan were timed, another plan takes its place if it is faster."""

    @contextlib.contextmanager
    def followed(self, others, ranks=1):
        """Yields a planner that followed a plan which recomputes all blocks, and what it knows. The solver finds
        a plan that recomputes so many."""
        with recorded(stack(Block, 4)) as (rt, _):
            planner, known = rt._planner, rt._planner.keys[""]
            units = [u for u in planner.units.list if u.parent is None]
            del known.measured[1:]  # whose second passes may end earlier
            (m,) = known.measured
            m._whole = dict.fromkeys(m._whole, 10**6)
            plan = lambda m, n: _planned_by(m, {u: m._again_whole(u) for u in units[:n]})
            known.plan, known.stage, known.steps, known.retimed, known.times = plan(m, 4), "recompute", REFINED, False, [1.0]
            asked = []

            def again(divisions, choose, limit, offload, everything):
                (m,) = divisions
                asked.append((m, limit, offload, everything))
                n = others(m)
                if isinstance(n, Exception):
                    raise n
                return plan(m, n)

            planner._found = types.SimpleNamespace(several=ranks > 1, count=ranks, gather=lambda mine: [mine] * ranks, fail=planner.ranks.fail)
            with mock.patch.object(_contest, "best", again), mock.patch.object(planner, "_try_offload"):
                yield planner, known, asked

    @staticmethod
    def step(planner, known, seconds):
        facts = Facts("", None, learnt=True, seconds=seconds)
        planner._advance("", known, facts, [facts])

    def test_only_if_it_is_faster(self):
        """By WORTH_AGAIN of a step: three passes of a millisecond in place of four."""
        for n, seconds, adopted in ((3, 0.4, True), (3, 0.5, False), (3, 0.6, False), (4, 1e-6, False)):
            with self.subTest(n=n, seconds=seconds), self.followed(lambda m: n) as (planner, known, asked):
                before, version = known.plan, known.version
                self.step(planner, known, seconds)
                self.assertEqual([(m, known.total, False, True) for m in known.measured], asked)
                self.assertEqual(n if adopted else 4, len(known.plan.choices))
                self.assertEqual((adopted, version + adopted), (known.plan is not before, known.version))
                if adopted:  # it is refined and timed as any other
                    self.assertEqual((REFINED - 1, [], "recompute"), (known.steps, known.times, known.stage))
                else:
                    self.assertEqual((REFINED + 1, [1.0]), (known.steps, known.times))

    def test_the_fastest_of_all_divisions(self):
        with self.followed(lambda m: None) as (planner, known, asked):
            known.measured += [copy.copy(known.measured[0]), copy.copy(known.measured[0])]
            numbers = dict(zip(map(id, known.measured), (3, 1, 2)))
            with mock.patch.object(_contest, "best", lambda divisions, *_, **__: _planned_by(divisions[0], dict(list(known.plan.choices.items())[: numbers[id(divisions[0])]]))):
                self.step(planner, known, 0.1)
            self.assertEqual(1, len(known.plan.choices))

    def test_once(self):
        for n in (2, 4):
            with self.subTest(n=n), self.followed(lambda m: n) as (planner, known, asked):
                for _ in range(STEPS["recompute"]):
                    self.step(planner, known, 0.1)
                self.assertEqual(known.measured, [m for m, *_ in asked])
                self.assertTrue(known.retimed)

    def test_times_are_those_of_steps(self):
        """A pass that took a tenth of the time is not worth another plan."""
        for tenth, adopted in ((1, True), (10, False)):
            with self.followed(lambda m: 3) as (planner, known, _):
                known.passes = {u: 10**6 // tenth for u in known.plan.choices}
                self.step(planner, known, 0.4)
                self.assertEqual(3 if adopted else 4, len(known.plan.choices))
                self.assertEqual({}, known.passes)

    def test_no_plan_and_errors(self):
        """A limit that is too small for a division leaves the plan. Any other error is one of all ranks."""
        for ranks in (1, 2):
            with self.subTest(ranks=ranks):
                with self.followed(lambda m: TooSmall("too small"), ranks) as (planner, known, _):
                    self.step(planner, known, 0.4)
                    self.assertEqual(4, len(known.plan.choices))
                with self.followed(lambda m: KeyError("best"), ranks) as (planner, known, _), self.assertRaises(KeyError):
                    self.step(planner, known, 0.4)

    def test_errors_of_other_plans(self):
        """All ranks hear of what fails while a plan is refined, or while one that offloads is made."""
        with self.followed(lambda m: 4, 2) as (planner, known, _):
            facts = Facts("", None, learnt=True, change=1, seconds=1.0)
            with mock.patch.object(_plan.Measured, "relaxed", side_effect=KeyError("relaxed")), self.assertRaises(KeyError):
                planner._advance("", known, facts, [facts, facts])
            with mock.patch.object(planner, "_best", side_effect=KeyError("best")), self.assertRaises(KeyError):
                type(planner)._try_offload(planner, "", known, known.plan, 1.0)
            with mock.patch.object(planner, "_best", side_effect=TooSmall("too small")):
                type(planner)._try_offload(planner, "", known, known.plan, 1.0)
            self.assertEqual("settled", known.stage)


def _planned_by(m, choices):
    """Returns a plan with these choices."""
    plan = Plan(choices, {}, {}, {}, {"again_ns": m.again(choices), "step_ns": 10**9, "peak": 0, "moved": 0, "before_peak": 0})
    m.count(plan)
    return plan


if __name__ == "__main__":
    unittest.main()
