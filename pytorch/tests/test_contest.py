"""Plans that take turns where the device waits for the host. SPEC S8.6."""

import contextlib
import unittest
from unittest import mock

import torch
from blocks import Block, Layer, one_pass, recorded, stack, train
from common import same

from stowage import _contest, _plan, _planned
from stowage._contest import FAR, PLANS, TURNS, Contest, contenders, divided
from stowage._errors import TooSmall
from stowage._key import NEAR, SLACK, Key
from stowage._plan import Measured, Plan
from stowage._planned import TIMED


def plan_of(m, choices):
    plan = Plan(choices, {}, {}, {}, {"again_ns": m.again(choices), "step_ns": 10**9, "peak": 0, "moved": 0, "before_peak": 0})
    m.count(plan)
    return plan


class Case(unittest.TestCase):
    """Second passes run to their end, whatever the version of PyTorch."""

    def setUp(self):
        patch = mock.patch.object(_plan, "EARLY", False)
        patch.start()
        self.addCleanup(patch.stop)


class Turns(unittest.TestCase):
    def test_order_and_the_fastest(self):
        """Plans take turns in order. The first turn of each does not count, slow steps do not even if they are the most, and
        one or two that are faster than all others do not either."""
        contest, order = Contest("abc"), []
        took = {"a": [0.1] + [2] * 9, "b": [9, 1, 1, 1] + [9] * 6, "c": [0, 0.5, 0.5] + [3] * 7}
        left = {name: list(times) for name, times in took.items()}
        while not contest.over:
            order.append(contest.now)
            contest.note(left[contest.now].pop(0))
        self.assertEqual(["a", "b", "c"] * TURNS, order)
        self.assertEqual("b", contest.fastest())

    def test_those_that_hold_too_much(self):
        for out, fastest in (("a", "b"), ("b", "a"), ("c", "a")):
            contest, order = Contest("abc"), []
            while not contest.over:
                order.append(contest.now)
                contest.drop() if contest.now == out else contest.note(1.0 if contest.now == "a" else 2.0)
            self.assertEqual([1 if name == out else TURNS for name in "abc"], [order.count(name) for name in "abc"])
            self.assertEqual(fastest, contest.fastest())
        contest = Contest("ab")
        contest.drop()
        self.assertTrue(contest.over)
        contest.drop()
        self.assertEqual("b", contest.fastest())

    def test_back_to_what_held(self):
        """A plan that holds too much once it was changed becomes what it was, stays so, and has all of its turns. If it still holds too much it leaves."""
        contest, order = Contest("ab"), []
        while not contest.over:
            order.append(contest.now)
            if contest.now == "B" and order.count("B") == 2:
                contest.drop()
                self.assertFalse(contest.first)
                continue
            if contest.first:
                contest.change(contest.now.upper() if contest.now == "b" else contest.now)
            contest.note(1.0 if contest.now == "b" else 2.0)
        self.assertEqual(["a", "b", "a", "B", "a", "B"] + ["b", "a"] * TURNS, order + ["a"])
        self.assertEqual("b", contest.fastest())
        contest.drop()
        self.assertEqual(["b"], [e.plan for e in contest._entrants])

    def test_the_last_goes_back(self):
        contest = Contest("ab")
        contest.drop()
        contest.change("c")
        contest.drop()
        self.assertEqual("b", contest.fastest())

    def test_when(self):
        known = Key()
        self.assertFalse(known.waits(1.0))
        for behind, waits in ((NEAR * 0.99, True), (NEAR * 1.01, False)):
            known.behind = behind
            self.assertEqual((waits, waits), (known.waits(1.0), Key.waits(known, 1.0)))


class Divided(Case):
    """Divisions in which the first blocks are units as they are and the last ones have their parts as units."""

    def test_units(self):
        with recorded(stack(Layer, 4)) as (rt, measured):
            blocks = [u for u in rt._planner.units.list if u.parent is None]
            self.assertEqual({False}, {m.ends for m in measured})
            made = divided(measured)
            self.assertEqual([1, 2, 3], [len(m._but) for m in made])
            with mock.patch.object(type(measured[-1]), "ends", True):  # and those whose passes end earlier, beside the others
                self.assertEqual([1, 2, 3] * 2, [len(m._but) for m in divided(measured)])
            for n, m in enumerate(made, 1):
                self.assertEqual(set(blocks[:n]), set(m._but))
                want = {*blocks, *(p for u in blocks[n:] for p in u.parts)}
                self.assertEqual(want, {part.unit for part in m.parts.values()})
                self.assertEqual([True] * n + [False] * (4 - n), [m._can_whole(u) for u in blocks])
                self.assertTrue(m.like(m))
                self.assertFalse(any(m.like(other) for other in [*measured, *made] if other is not m))

    def test_bytes_and_times_are_those_of_the_two_divisions(self):
        with recorded(stack(Layer, 4)) as (rt, measured):
            coarse, fine = (next(m for m in measured if m._fine == of and not m.ends) for of in (False, True))
            for m in divided(measured):
                for call, part in m.parts.items():
                    of = fine if m._divides(part.unit) else coarse
                    for name in ("lean", "rest", "inputs", "cached", "fixed", "little"):
                        self.assertEqual(getattr(of.parts[call], name), getattr(part, name), (part.unit.name, name))
                    self.assertEqual(of._whole[part.unit], m._whole[part.unit])
                    self.assertEqual(of._lean[part.unit], m._lean[part.unit])
                total = sum(p.lean + p.rest + p.inputs for p in m.parts.values())
                self.assertEqual(sum(p.lean + p.rest + p.inputs for p in coarse.parts.values()), total)
                self.assertEqual(coarse.most_held({}), m.most_held({}))
                self.assertEqual(coarse.most_kept({}), m.most_kept({}))

    def test_blocks_without_parts(self):
        with recorded(stack(Block, 4)) as (_, measured):
            self.assertEqual([], divided(measured))

    def test_like_a_plan_of_blocks(self):
        """What is recomputed in blocks is recomputed in their parts, and less of it where there is room."""
        with recorded(stack(Layer, 4)) as (rt, measured):
            blocks = [u for u in rt._planner.units.list if u.parent is None]
            coarse = next(m for m in measured if not m._fine and not m.ends)
            plan = plan_of(coarse, {u: coarse._again_whole(u) for u in blocks[:3]})
            (m,) = [m for m in divided(measured) if len(m._but) == 2]
            every = {u: m._again_whole(u) for u in [*blocks[:2], *blocks[2].parts]}
            cheap = {u: c for u, c in m.strongest(m.request(1 << 30, False, True)[0]).choices.items() if u is blocks[2]}
            tight = m.most_counted({**every, **cheap})
            self.assertIsNone(m.like_plan(plan, tight - 1))
            found = m.like_plan(plan, tight)
            self.assertLessEqual((m.again(found.choices), m.most_counted(found.choices)), (m.again({**every, **cheap}), tight))
            self.assertIs(m, next(of for of in [coarse, m] if of.made(found)))
            self.assertEqual(m.again(found.choices), found.answer["again_ns"])
            room = m.like_plan(plan, coarse.most_counted({}))
            self.assertEqual({}, room.choices)
            between = m.like_plan(plan, (tight + coarse.most_counted({})) // 2)
            self.assertLess(m.again(between.choices), m.again(found.choices))
            self.assertLessEqual(m.most_counted(between.choices), (tight + coarse.most_counted({})) // 2)

    def test_gradients(self):
        """A step follows a plan that recomputes the first blocks and parts of the last ones."""
        model = stack(Layer, 4)
        with recorded(model) as (rt, measured):
            known, blocks = rt._planner.keys[""], [u for u in rt._planner.units.list if u.parent is None]
            (m,) = [m for m in divided(measured) if len(m._but) == 2]
            measured.append(m)
            known.plan = plan_of(m, {u: m._again_whole(u) for u in [*blocks[:2], *(of.parts[0] for of in blocks[2:])]})
            self.assertIs(m, known.division(known.plan))
            rt._planner._rewrap()
            for a, b in zip(train_on(model, None), train_on(model, rt)):
                self.assertTrue(same(a, b))
            self.assertEqual(1, known.followed)


def train_on(model, rt):
    """Runs a step and returns its loss and gradients."""
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    with rt.step() if rt is not None else contextlib.nullcontext():
        loss = one_pass(model, 0)
    loss = loss if torch.is_tensor(loss) else loss[0]
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


class Contenders(Case):
    @contextlib.contextmanager
    def found(self, took, seconds=1.0, like_plan=None):
        """Yields what is known, the plan, and a function that returns contenders if plans of the divisions take so many seconds again,
        in the order of known.measured and of divided(); None is too small."""
        with recorded(stack(Layer, 4)) as (rt, measured):
            known = rt._planner.keys[""]
            del measured[2:]
            plan = plan_of(measured[0], {u: measured[0]._again_whole(u) for u in rt._planner.units.list if u.parent is None})
            all = [*measured, *divided(measured)]
            asked = []

            def best(divisions, choose, limit, offload, everything):
                (m,) = divisions
                asked.append((limit, offload, everything))
                i = next(i for i, of in enumerate(all) if of.like(m))
                if took[i] is None:
                    raise TooSmall("too small")
                u = next(part.unit for part in m.parts.values() if m._can_whole(part.unit))
                return Plan({u: m._again_whole(u)._replace(first=i)}, dict.fromkeys({part.unit for part in m.parts.values()}, 0), {}, {}, {"peak": i})

            def again(m, choices):
                i = next(i for i, of in enumerate(all) if of.like(m))
                return int(1e9 * took[i])

            with mock.patch.object(_contest, "best", best), mock.patch.object(type(measured[0]), "again", again), mock.patch.object(type(measured[0]), "like_plan", like_plan or (lambda *_: None)), mock.patch.object(type(measured[0]), "made", lambda m, p: m is measured[0] and p is plan):
                yield known, plan, lambda: contenders(known, plan, None, seconds), asked

    def numbers(self, plan, found):
        return [0 if p is plan else p.answer["peak"] for p in found]

    def test_the_fastest_by_forecast(self):
        self.assertEqual(3, PLANS)
        for took, want, more in (
            ([0.10, 0.12, 0.11, 0.30, 0.25], [0, 2, 1], 1),
            ([0.10, 0.09, 0.08, 0.07, 0.06], [4, 3, 2, 0], 3),  # the plan itself has its turns whatever is forecast
            ([0.10, None, None, None, None], [0], 0),
            ([0.10, 0.10 + FAR * 1.01, 0.10 + FAR * 0.99, None, None], [0, 2], 1),
            ([0.50, 0.10, None, None, None], [1, 0], 0),
        ):
            with self.subTest(took=took), self.found(took) as (known, plan, find, asked):
                self.assertEqual(want, self.numbers(plan, find()))
                self.assertEqual(2 + more, len(known.measured))
                self.assertEqual({(known.total, False, True)}, set(asked))

    def test_the_plan_itself_for_other_divisions(self):
        """It is asked for where only the last blocks are divided, and has turns if the solver finds no faster one there."""
        asked = []

        def like_plan(m, plan, limit):
            asked.append((len(m._but), limit))
            u = next(part.unit for part in m.parts.values() if m._can_whole(part.unit))
            return Plan({u: m._again_whole(u)._replace(first=9)}, dict.fromkeys({part.unit for part in m.parts.values()}, 0), {}, {}, {"peak": 9})

        with self.found([0.10, None, 0.11, 0.3, 0.3], like_plan=like_plan) as (known, plan, find, _):
            again = type(known.measured[0]).again
            with mock.patch.object(type(known.measured[0]), "again", lambda m, choices: int(1e9 * 0.12) if any(c.first == 9 for c in choices.values()) else again(m, choices)):
                self.assertEqual([0, 2, 9], self.numbers(plan, find()))
            self.assertEqual([(n, known.total) for n in (1, 2, 3)], asked)

    def test_limit(self):
        """A plan that was relaxed by its measured peak may count more than the limit that plans are made for: others may not, of which
        nobody knows that they hold less."""
        for count in (10, 1 << 40):
            with self.found([0.1, 0.1, 0.1, 0.1, 0.1]) as (known, plan, find, asked), mock.patch.object(_contest.Measured, "most_counted", lambda *_: count):
                known.division = lambda p: known.measured[0] if p is plan else None
                find()
                self.assertEqual({known.total}, {limit for limit, _, _ in asked})

    def test_hooks_count_for_good_if_the_device_was_idle(self):
        for idle in (False, True):
            with self.found([0.1, 0.1, None, None, None]) as (known, plan, find, _):
                known.idle = idle
                find()
                self.assertEqual([idle, idle], [bool(m._hooks) for m in known.measured[:2]])

    def test_times_of_steps_count(self):
        with self.found([0.1, None, None, None, None]) as (known, plan, find, _), mock.patch.object(_contest.Measured, "retime") as retime:
            known.passes, known.cheap = {"u": 1}, {"u": {"k": 2}}
            find()
            self.assertEqual([mock.call({"u": 1}, {"u": {"k": 2}})] * 5, retime.call_args_list)
            self.assertEqual(({}, {}), (known.passes, known.cheap))


class Stages(Case):
    """A runtime whose device waits for the host."""

    def steps(self, model, rt, took, over=()):
        """Trains until the plan is settled, with steps of a plan that take as long as took(plan) says. It returns the stages and the
        plans that were followed."""
        known, stages, plans = rt._planner.keys[""], [], []
        clock = mock.Mock(side_effect=lambda device: mock.Mock(seconds=lambda: took(known.plan)))
        change = Key.change
        exceeds = lambda k, size, peak, measures: -1 if k.stage == "contest" and any(k.plan is p for p in over) else 0 if k.stage == "contest" else change(k, size, peak, measures)
        with mock.patch.object(_planned, "Stopwatch", clock), mock.patch.object(Key, "waits", lambda *_: True), mock.patch.object(Key, "change", exceeds):
            for _ in range(80):
                stages.append(known.stage)
                plans.append(known.plan)
                train(model, one_pass, 1, rt)
                if known.stage == "settled":
                    break
        return stages, plans

    @contextlib.contextmanager
    def three(self):
        """Yields a runtime that follows the first of three plans, which recompute one, two and three blocks."""
        model = stack(Layer, 4)
        with recorded(model) as (rt, measured):
            known, blocks = rt._planner.keys[""], [u for u in rt._planner.units.list if u.parent is None]
            plans = [plan_of(measured[0], {u: measured[0]._again_whole(u) for u in blocks[: n + 1]}) for n in range(3)]
            known.plan, known.stage, known.steps, known.retimed = plans[0], "recompute", 0, False
            rt._planner._rewrap()
            with mock.patch.object(_planned, "contenders", lambda *_: plans), mock.patch.object(rt._planner, "_try_offload", lambda key, k, plan, mine: setattr(k, "stage", "settled")), mock.patch.object(Measured, "relaxed", lambda m, plan, room: plan):
                yield model, rt, known, plans

    def test_the_fastest_stays(self):
        for fastest in range(3):
            with self.subTest(fastest=fastest), self.three() as (model, rt, known, plans):
                stages, followed = self.steps(model, rt, lambda plan: 1.0 if plan is plans[fastest] else 2.0)
                turns = [p for p, stage in zip(followed, stages) if stage == "contest"]
                self.assertEqual(plans * TURNS, turns)
                self.assertIs(plans[fastest], known.plan)
                after = stages[len(stages) - stages[::-1].index("contest") :]
                self.assertEqual({"recompute"}, set(after))

    def test_what_first_turns_leave(self):
        """It is given to their plans, which take turns from then on as they are, and one that cannot be changed stays as it is."""
        with self.three() as (model, rt, known, plans):
            less, rooms = [plan_of(known.measured[0], p.choices) for p in plans[:2]], []

            def relaxed(m, plan, room):
                rooms.append((room, rt._planner._budget.size - known.peak))
                if plan is plans[2]:
                    raise TooSmall("no plan")
                return less[plans.index(plan)]

            with mock.patch.object(Measured, "relaxed", relaxed):
                stages, followed = self.steps(model, rt, lambda plan: 1.0 if plan is less[1] else 2.0)
            turns = [p for p, stage in zip(followed, stages) if stage == "contest"]
            self.assertEqual([*plans, *[*less, plans[2]] * (TURNS - 1)], turns)
            self.assertIs(less[1], known.plan)
            self.assertEqual([left - rt._planner._budget.size // SLACK for _, left in rooms[:3]], [room for room, _ in rooms[:3]])

    def test_those_over_the_budget_leave(self):
        with self.three() as (model, rt, known, plans):
            drop = Contest.drop
            with mock.patch.object(Contest, "drop", lambda contest: setattr(known, "over", 7) or drop(contest)):
                stages, followed = self.steps(model, rt, lambda plan: 2.0 if plan is plans[2] else 1.0, over=plans[:2])
            self.assertEqual(plans[:2], [p for p, stage in zip(followed, stages) if stage == "contest"])
            self.assertIs(plans[2], known.plan)
            self.assertEqual(0, known.over)

    def test_those_over_the_budget_only_since_they_were_changed_go_back(self):
        with self.three() as (model, rt, known, plans):
            del plans[2]
            less = plan_of(known.measured[0], plans[1].choices)
            with mock.patch.object(Measured, "relaxed", lambda m, plan, room: less if plan is plans[1] and known.stage == "contest" else plan):
                stages, followed = self.steps(model, rt, lambda plan: 2.0 if plan is plans[0] else 1.0, over=[less])
            turns = [p for p, stage in zip(followed, stages) if stage == "contest"]
            names = {id(plans[0]): "a", id(plans[1]): "b", id(less): "less"}
            self.assertEqual(["a", "b", "a", "less", *["b", "a"] * (TURNS - 1), "b"], [names[id(p)] for p in turns])
            self.assertIs(plans[1], known.plan)

    def test_one_plan_has_no_contest(self):
        with self.three() as (model, rt, known, plans):
            del plans[1:]
            stages, _ = self.steps(model, rt, lambda plan: 1.0)
            self.assertNotIn("contest", stages)
            self.assertIs(plans[0], known.plan)

    def test_comparing_after_it(self):
        """A plan that offloads is compared with the one that stayed as plans were in the contest: over as many turns, of which slow ones do not
        count. Without a contest the medians of three turns decide."""
        for contest, slow, turns, offloads in ((True, 5, TURNS, True), (True, TURNS, TURNS, False), (False, 1, TIMED, True), (False, 2, TIMED, False)):
            with self.subTest(contest=contest, slow=slow), self.three() as (_, rt, known, plans):
                known.contest = Contest(plans) if contest else None
                known.stage, known.steps, known.turns, known.plan, known.other = "compare", 0, {False: [], True: []}, plans[1], (plans[0], known.limit)
                for turn in range(turns):
                    self.assertEqual(("compare", plans[1]), (known.stage, known.plan))
                    rt._planner._compare("", known, 9.0 if turn < slow else 1.0)
                    self.assertEqual(("compare", plans[0]), (known.stage, known.plan))
                    rt._planner._compare("", known, 2.0)
                self.assertEqual(("settled", plans[1] if offloads else plans[0]), (known.stage, known.plan))

    def test_memory_that_grows_ends_it(self):
        with self.three() as (model, rt, known, plans):
            known.stage, known.contest = "contest", Contest(plans)
            with mock.patch.object(rt._planner._budget, "held_now", lambda: known.base + rt._planner._budget.size // 2), mock.patch.object(rt._planner, "_solve", lambda *_: (plans[1], None)):
                rt._planner._rebase("", known)
            self.assertEqual(("recompute", plans[1]), (known.stage, known.plan))


if __name__ == "__main__":
    unittest.main()
