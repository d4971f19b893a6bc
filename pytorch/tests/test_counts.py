"""What a step counts, what it tells of rows and of blocks under a plan, and its records. The library here does nothing by itself."""

import contextlib
import dataclasses
import unittest
from unittest import mock

from common import DEVICE, torch
from noted import CPU, new, release_dead
from stowage import _again, _managed, _step
from stowage._again import state
from stowage._errors import Error
from stowage._managed import Following, Passes, Units
from stowage._measured import Cast, Choice
from stowage._plan import Plan
from stowage._profile import Unit
from stowage._record import Kept, Rows, Weak, is_held, storage_at, storage_of
from stowage._step import Ticket, any_alive, first_made
from torch import nn
from zoo import leaf


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


class Counted(unittest.TestCase):
    """Bytes that the library only counts."""

    def test_blocks(self):
        """What a block reserved is loaded when its backward pass begins, and free when the next one does."""
        for budget in (False, True):
            step, calls = new(budget=budget)
            around = lambda *calls: [*(["before"] if budget else []), *calls, *(["after"] if budget else [])]
            noted = lambda *what: [what] if budget else []
            with _step.InGroup(step, "g"):
                handle = step.pack(torch.zeros(8) + 1)
                one = step.reserve(100)
            self.assertEqual([*around(*noted("saved", 1, 32), ("save", "g", (1, 32, False, False))), *around(*noted("saved", 2, 100), ("save", "kept", (2, 100, False, True)))], calls.taken())
            two, three = step.reserve(200), step.reserve(300)
            self.assertEqual((2, 3, 4), (one, two, three))
            calls.taken()
            step.begin_backward(three, 0)
            self.assertEqual(around(("load", 4)), calls.taken())
            step.begin_backward(two, 50)
            want = [*around(("release", 4), *noted("released", 4), ("load", 3)), *around(*noted("saved", 5, 50), ("save", "kept", (5, 50, False, True))), ("load", 5)]
            self.assertEqual(want, calls.taken())
            step.begin_backward(None, 0)
            self.assertEqual(around(("release", 3), *noted("released", 3), ("release", 5), *noted("released", 5)), calls.taken())
            step.begin_backward(two, 0)  # which is free
            self.assertEqual(around(), calls.taken())
            step.unreserve(one)
            self.assertEqual(around(("release", 2), *noted("released", 2)), calls.taken())
            self.assertEqual({}, step.reserved)
            passing = step.reserve(70)
            step.passing.append(passing)
            calls.taken()
            calls.returned = [1]
            step.begin_backward(None, 0)
            self.assertEqual(around(("release", 6), *noted("released", 6)), calls.taken())
            self.assertIsNone(handle.record.memory)  # what the library returned then
            step.over = True
            step.begin_backward(None, 60)
            self.assertEqual([], calls.taken())

    def test_memory_is_returned_at_any_call(self):
        step, calls = new()
        handles = []
        for _ in range(4):
            with _step.InGroup(step, "g"):
                handles.append(step.pack(torch.zeros(8) + 1))
        with _step.InGroup(step, "dies"):
            step.pack(torch.zeros(8) + 1)
        calls.taken()
        calls.returned = [1]
        number = step.reserve(10)
        self.assertEqual([("save", "kept", (6, 10, False, True)), ("release", 5)], calls.taken())
        calls.returned = [2]
        step.begin_backward(number, 0)
        calls.returned = [3]
        with mock.patch.object(step, "reserve", lambda n: 77):
            step.begin_backward(None, 0)
            calls.returned = [4]
            step.begin_backward(None, 1)
        self.assertEqual([None] * 4, [h.record.memory for h in handles])
        self.assertEqual([77], step.ending)

    def test_calls_that_are_forgotten(self):
        """What they reserved is free at the next call, unless their backward pass began."""
        step, calls = new()
        numbers = [step.reserve(10 * i) for i in (1, 2, 3, 4)]
        tickets = [Ticket(step, [n]) for n in numbers]
        step.begin_backward(numbers[0], 0)
        step.passing.append(numbers[1])
        calls.taken()
        del tickets[:3]
        self.assertEqual([], calls.taken())  # only a note
        step.reserve(99)
        *released, saved = calls.taken()
        self.assertEqual(([("release", 2), ("release", 3)], ("save", "kept", (5, 99, False, True))), (sorted(released), saved))
        self.assertEqual(([1], [], [1, 4, 5]), (step.ending, step.passing, sorted(step.reserved)))
        step.begin_backward(None, 0)
        self.assertEqual([("release", 1)], calls.taken())
        tickets.clear()
        step.end(False)
        self.assertEqual([("release", 4), ("end", False)], calls.taken())

    def test_one_fails(self):
        """None is released twice."""
        step, calls = new()
        numbers = [step.reserve(10) for _ in range(3)]
        step.passing += numbers
        calls.taken()
        calls.fail = Error("no")
        with self.assertRaises(Error):
            step.begin_backward(None, 0)
        step.begin_backward(None, 0)
        self.assertEqual([("release", 1), ("release", 2), ("release", 3)], calls.taken())

    def test_a_load_that_fails(self):
        """What was reserved for a second pass is free at once, because that pass does not run. The error is that of the load."""
        for budget in (False, True):
            step, calls = new(budget=budget)
            with mock.patch.object(calls, "load", side_effect=Error("no")), self.assertRaisesRegex(Error, "^no$"):
                step.begin_backward(None, 50)
            self.assertEqual(("release", 1), [call for call in calls.taken() if call[0] == "release"][0])
            self.assertEqual(({}, []), (step.reserved, step.ending))
            with mock.patch.object(calls, "load", side_effect=Error("no")), mock.patch.object(calls, "release", side_effect=Error("neither")), self.assertRaisesRegex(Error, "^no$"):
                step.begin_backward(None, 60)
            step.begin_backward(None, 70)
            self.assertEqual([3], step.ending)


class OfRows(unittest.TestCase):
    def rows(self, step, x, count, name="rows", alone=True):
        step.rows[x.data_ptr()] = Rows(count, x[0].numel() * 4, name, alone, Weak(storage_of(x)))

    def test_a_step(self):
        """Each tensor is a group by itself, under its own name. It is used in its berth, through one storage, which
        is released once nobody reads it."""
        step, calls = new()
        x, y, count = torch.randn(4, 4) + 0, torch.randn(4, 4) + 0, torch.tensor(2)
        self.rows(step, x, count), self.rows(step, y, count, "stays")
        with _step.InGroup(step, "g"):
            plain = step.pack(torch.zeros(8) + 1)
            one = step.pack(x)
            self.assertEqual([("save", "g", (1, 32, False, False)), ("save", "rows", (2, 64, 16, False))], calls.taken()[:2])
            two = step.pack(y)  # of a name that stays: of the group that it is in
            self.assertEqual("g", two.group.name)
        self.assertEqual([("save", "g", (3, 64, 16, False))], calls.taken())
        self.assertTrue(step.used_rows)
        berth = torch.zeros(64, dtype=torch.uint8)
        calls.berths[2] = berth.data_ptr()
        step.take_back([2])
        got, again = step.unpack(one), step.unpack(one)
        self.assertEqual([("load", 2), ("rows", 2)], calls.taken())
        self.assertEqual((berth.data_ptr(),) * 2, (got.data_ptr(), again.data_ptr()))
        self.assertEqual(storage_of(got)._cdata, storage_of(again)._cdata)
        self.assertEqual((64, torch.Size([4, 4])), (storage_of(got).nbytes(), got.shape))
        del one, again
        release_dead(step)
        self.assertEqual([], calls.taken())  # somebody reads it
        self.assertEqual([(2, [2])], list(step.dead))
        del got
        release_dead(step)
        self.assertEqual([("release", 2)], calls.taken())
        self.assertEqual({}, step.views)
        self.assertEqual(y.data_ptr(), step.unpack(two).data_ptr())

    def test_outside_of_groups(self):
        step, calls = new()
        x, count = torch.randn(4, 4) + 0, torch.tensor(2)
        self.rows(step, x, count)
        one = step.pack(x)
        self.assertEqual([("save", "rows", (1, 64, 16, False))], calls.taken())
        self.assertIs(Kept, type(step.pack(torch.zeros(8) + 1)))
        again = step.pack(x)
        self.assertEqual(1, again.record.id)
        step, calls = new()
        self.rows(step, x, count, alone=False)
        one = step.pack(x)  # a group, of all rows
        self.assertEqual([], calls.taken())
        self.assertIs(Kept, type(step.pack(torch.zeros(8) + 1)))
        self.assertEqual([("save", "rows", (1, 64, False, False))], calls.taken())

    def test_berths_of_some(self):
        """One of a dead group is read; others of it and of other groups never were."""
        step, calls = new()
        x, berth = torch.randn(4, 4) + 0, torch.zeros(64, dtype=torch.uint8)
        self.rows(step, x, torch.tensor(2))
        with _step.InGroup(step, "g"):
            plain = step.pack(torch.zeros(8) + 1)
            one = step.pack(x)
        calls.berths[2] = berth.data_ptr()
        step.take_back([2])
        with mock.patch.object(_step, "storage_at", lambda *given: self.assertTrue(step.lock.locked()) or storage_at(*given)):
            got = step.unpack(one)
        calls.taken()
        self.assertFalse(step.viewed([1]))
        self.assertTrue(step.viewed([1, 2]))
        del plain
        release_dead(step)
        self.assertEqual([("release", 1)], calls.taken())
        del got
        self.assertFalse(step.viewed([1, 2]))

    def test_equal_rows(self):
        x, count = torch.randn(4, 4) + 0, torch.tensor(2)
        weak = Weak(storage_of(x))
        one = Rows(count, 16, "a", True, weak)
        self.assertTrue(one.same(Rows(count, 16, "a", True, Weak(storage_of(x)))))
        for other in (
            Rows(torch.tensor(2), 16, "a", True, weak), Rows(count, 8, "a", True, weak), Rows(count, 16, "b", True, weak),
            Rows(count, 16, "a", True, Weak(storage_of(torch.randn(4, 4)))),
        ):
            self.assertFalse(one.same(other))
        count.add_(0)
        self.assertFalse(one.same(Rows(count, 16, "a", True, weak)))

    def test_which_are_no_rows(self):
        """If not they alone are kept, if their count changed, or if another storage has the address."""
        for what in ("whole", "count", "address"):
            with self.subTest(what):
                step, calls = new()
                x, count = torch.randn(4, 4) + 0, torch.tensor(2)
                self.rows(step, x, count, alone=what != "whole")
                if what == "count":
                    count.add_(1)
                if what == "address":
                    step.rows[x.data_ptr()] = Rows(count, 16, "rows", True, Weak(storage_of(torch.zeros(4, 4))))
                with _step.InGroup(step, "g"):
                    handle = step.pack(x)
                self.assertEqual([("save", "g" if what == "address" else "rows", (1, 64, False, False))], calls.taken())
                self.assertFalse(step.used_rows)

    def test_rows_of_another_count(self):
        """Rows that only another count calls live may be gone: it is another record."""
        step, calls = new()
        x, count = torch.randn(4, 4) + 0, torch.tensor(2)
        self.rows(step, x, count)
        one = step.pack(x)
        self.rows(step, x, torch.tensor(3))
        two = step.pack(x)
        self.assertEqual((1, 2), (one.record.id, two.record.id))

    def test_what_is_held_after_the_step(self):
        step, calls = new()
        x, count = torch.randn(4, 4) + 0, torch.tensor(2)
        self.rows(step, x, count)
        calls.returned = [1]
        one = step.pack(x)
        berth = torch.zeros(64, dtype=torch.uint8)
        calls.berths[1] = berth.data_ptr()
        got = step.unpack(one)
        with self.assertRaisesRegex(Error, "a stashed tensor is still held after its step"):
            step.end(False)
        self.assertEqual((1, {}), (len(step.held), step.views))
        self.assertTrue(any_alive(step.held))
        del got, one
        self.assertFalse(any_alive(step.held))
        self.assertEqual([], step.held)
        for failed in (False, True):
            step, calls = new()
            self.rows(step, x, count)
            calls.returned = [1]
            one = step.pack(x)
            calls.berths[1] = berth.data_ptr()
            got = step.unpack(one) if failed else step.unpack(one).clone()
            step.end(failed)  # the user has an error already
            self.assertEqual(failed, bool(step.held))
        step, calls = new()
        self.rows(step, x, count)
        one = step.pack(x)
        calls.berths[1] = berth.data_ptr()
        one.record.memory = None
        got = step.unpack(one)
        with mock.patch.object(calls, "end", side_effect=Error("no")), self.assertRaisesRegex(Error, "^no$"):
            step.end(False)
        self.assertTrue(any_alive(step.held), "or the library's end would free a berth that somebody reads")

    def test_held_in_a_cycle(self):
        """What only the collector has to find is not held."""
        held = [Weak(storage_of(torch.zeros(4)))]
        self.assertFalse(any_alive(held))
        cycle = [torch.zeros(4)]
        cycle.append(cycle)
        held = [Weak(storage_of(cycle[0]))]
        del cycle
        self.assertFalse(any_alive(held))


class Blocks(unittest.TestCase):
    """What a step that follows a plan tells the library of a block."""

    def follow(self, choice, saved=0, again=0, cast=Cast(), budget=False):
        step, calls = new()
        u = Unit("block", nn.Tanh(), None)
        answer = {"peak": 0}
        plan = Plan({u: choice}, {u: saved} if saved else {}, {u: again} if again else {}, {u: cast} if any(cast) else {}, answer)
        return Following(plan, CPU, 1, step), u, step, calls

    def test_what_is_counted(self):
        """What a block keeps is counted before it runs, with what autocast casts; its backward pass frees it. What a second pass
        takes is counted while it runs."""
        for choice, saved, again, cast, first in (
            (Choice(), 100, 0, Cast(), [("save", "kept", (1, 100, False, True))]),
            (Choice(), 0, 0, Cast(), []),
            (Choice(offload=True), 100, 0, Cast(), []),
            (Choice(offload=True), 100, 0, Cast(7, 0), [("save", "kept", (1, 7, False, True))]),
            (Choice(whole=True), 100, 60, Cast(), [("save", "kept", (1, 100, False, True))]),
            (Choice(whole=True), 0, 60, Cast(), []),
            (Choice(whole=True), 100, 0, Cast(7, 9), [("save", "kept", (1, 100, False, True)), ("save", "kept", (2, 9, False, True))]),
            (Choice(whole=True, offload=True), 100, 60, Cast(0, 9), [("save", "kept", (1, 9, False, True))]),
        ):
            with self.subTest(choice=str(choice), saved=saved, again=again, cast=cast):
                now, u, step, calls = self.follow(choice, saved, again, cast)
                x = leaf(4) * 2
                y = now.forward(u, u.module.forward, (x,), {})
                said = calls.taken()
                self.assertEqual(first, said[: len(first)])
                moved = [call for call in said[len(first) :]]
                self.assertEqual([("save", "block", (len(first) + 1, 16, False, False))] if choice.offload else [], moved)
                self.assertEqual([len(first)] if cast.passes else [], step.passing)
                y.sum().backward()
                kept = saved if not choice.offload else cast.stays
                want = [("release", len(first))] if cast.passes else []
                want += [("load", 1)] if kept else []
                group = len(first) + len(moved)
                want += [("save", "kept", (group + 1, again, False, True)), ("load", group + 1)] if again else []
                want += [("load", len(first) + 1)] if moved else []
                self.assertEqual(want, [call for call in calls.taken() if call[0] != "release" or call in want])
                self.assertEqual([1] * bool(kept) + [group + 1] * bool(again), step.ending)

    def test_no_backward_pass(self):
        """Nothing stays reserved if the block fails, or if nobody can ask for its gradient."""
        now, u, step, calls = self.follow(Choice(), 100)
        now.forward(u, u.module.forward, (torch.zeros(3),), {})
        self.assertEqual([("save", "kept", (1, 100, False, True)), ("release", 1)], calls.taken())
        for choice in (Choice(whole=True), Choice(whole=True, offload=True)):
            now, u, step, calls = self.follow(choice, 100, 50, Cast(3, 9))

            def fail(x):
                raise KeyError("of the block")

            with self.assertRaisesRegex(KeyError, "of the block"):
                now.forward(u, fail, (leaf(3),), {})
            self.assertEqual(([], {}, [], "release"), (step.passing, step.reserved, step.stack, calls.log[-1][0]))
            calls.fail = Error("no")
            with self.assertRaisesRegex(Error, "no"):
                now.forward(u, fail, (leaf(3),), {})
        now, u, step, calls = self.follow(Choice(), 100)
        y = now.forward(u, u.module.forward, (leaf(3),), {})
        del y
        step.reserve(5)
        self.assertIn(("release", 1), calls.taken())

    def test_elsewhere(self):
        """On another stream the library is told nothing; a block that something else recomputes is left alone."""
        now, u, step, calls = self.follow(Choice(offload=True), 100, 50, Cast(3, 9))
        with mock.patch.object(step, "on_other_stream", lambda: True):
            y = now.forward(u, u.module.forward, (leaf(3) * 2,), {})
        y.sum().backward()
        self.assertEqual([], calls.taken())
        u.left_alone = True
        now.forward(u, u.module.forward, (leaf(3) * 2,), {})
        self.assertEqual([], calls.taken())

    def test_budgets_of_compilers(self):
        """A block is compiled once for each, and what was made for one is not taken for another."""
        with mock.patch.object(_managed, "with_budget", lambda forward, budget: lambda x: (x * budget, forward)):
            now, u, step, calls = self.follow(Choice(True, budget=0.5))
            first = now.held(u, Choice(True, budget=0.5), _again.IN_PLACE, u.module.forward, (4,), {})
            made = u.smaller[0.5]
            other = now.held(u, Choice(True, budget=0.25), _again.IN_PLACE, u.module.forward, (4,), {})
            now.held(u, Choice(True, budget=0.5), _again.IN_PLACE, u.module.forward, (4,), {})
        self.assertEqual(((2.0, u.module.forward), (1.0, u.module.forward)), (first, other))
        self.assertIs(made, u.smaller[0.5])

    def test_what_runs_inside(self):
        """A block knows that it is made again, and what is cheap in it; afterwards, and after an exception, the thread is as it was."""
        for choice, lean, whole in ((Choice(), object, ("outer",)), (Choice(whole=True), None, ("outer", "u")), (Choice(lean=True), _again.Lean, ("outer",)), (Choice(offload=True), object, ("outer",))):
            for fails in (False, True):
                now, u, step, calls = self.follow(choice)
                before, seen = (object(), ("outer",)), []
                u.parent = Unit("block around", nn.Tanh(), None)

                def forward(x):
                    seen.append((state.lean, state.whole))
                    if fails:
                        raise KeyError("of the block")
                    return x.tanh()

                with mock.patch.multiple(state, lean=before[0], whole=before[1]):
                    with self.assertRaises(KeyError) if fails else contextlib.nullcontext():
                        now.forward(u, forward, (leaf(3),), {})
                    self.assertEqual(before, (state.lean, state.whole))
                ((had, units),) = seen
                self.assertEqual(whole, tuple("u" if x is u else x for x in units))
                self.assertTrue(had is None if lean is None else had is before[0] if lean is object else type(had) is lean, (choice, had))
                self.assertFalse(had.made if lean is _again.Lean else {})

    def test_parts_of_a_block(self):
        """A part that keeps everything is not offloaded, made lean or recomputed with its block, if the plan counts it."""
        for block, counted, own in ((Choice(offload=True), True, True), (Choice(lean=True), True, True), (Choice(whole=True, offload=True), True, False), (Choice(), True, False), (Choice(offload=True), False, False)):
            outer = Unit("block", nn.Tanh(), None)
            part = Unit("part", nn.Tanh(), outer)
            plan = Plan({outer: block}, {part: 5} if counted else {}, {}, {}, {})
            now, packed = Following(plan, CPU, 1, None), []
            _again.state.lean = marker = object()
            try:
                with _again.hooks(lambda t: packed.append(t), lambda t: t):
                    now.forward(part, lambda x: self.assertIs(None if own else marker, _again.state.lean) or x.tanh(), (leaf(3),), {})
                self.assertIs(marker, _again.state.lean)
            finally:
                _again.state.lean = None
            self.assertEqual(0 if own else 1, len(packed))

    def test_who_is_wrapped(self):
        """What a plan needs: blocks that it changes, all that it counts if it offloads, parts of blocks that it changes,
        cheap modules in those. Everything else is as it was."""
        model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(3))
        rt = mock.Mock(_now=None)
        units = Units(rt)
        us = [Unit(str(i), m, None) for i, m in enumerate(model)]
        part = Unit("part", model[0][0], us[0])
        units.list, units.cheap = [*us, part], [m[1] for m in model]
        wrapped = lambda: sorted(name for name, m in model.named_modules() if "forward" in m.__dict__)
        plan = lambda choices, saved=(): Plan(choices, dict.fromkeys(saved, 1), {}, {}, {})
        for plans, want in (
            ([None], []),
            ([plan({us[1]: Choice(whole=True)}, us)], ["1"]),
            ([plan({us[1]: Choice(lean=True)}, us)], ["1", "1.1"]),
            ([plan({us[1]: Choice(offload=True)}, us)], ["0", "1", "2"]),
            ([plan({us[0]: Choice(whole=True)}, [part])], ["0", "0.0"]),
            ([plan({us[1]: Choice(whole=True)}, [part])], ["1"]),
            ([plan({us[1]: Choice(whole=True)}), None, plan({us[2]: Choice(lean=True)})], ["1", "1.1", "2", "2.1"]),
            ([], []),
        ):
            units.rewrap(plans)
            self.assertEqual(want, wrapped())
        us[1].not_cheap.add(model[1][1])
        units.wrap_all()
        self.assertEqual(["0", "0.0", "0.1", "1", "2", "2.1"], wrapped())
        units.forget(nn.ModuleList([model[0]]))
        self.assertEqual(([], us[1:], [model[1][1], model[2][1]]), (wrapped(), units.list, units.cheap))
        units.forget(None)
        self.assertTrue(units.list)

    def test_times(self):
        """The shortest second pass of a unit, and all of its cheap parts; those inside of others are counted once."""
        passes, now = Passes(CPU), iter(range(100))
        a, b = Unit("a", nn.Tanh(), None), Unit("b", nn.Tanh(), None)
        stamps = [0.0, 5.0, 6.0, 8.0, 9.0, 13.0, 13.0, 16.0, 20.0, 21.0]
        with mock.patch("time.perf_counter", side_effect=stamps):
            for u in (a, a, a, b):
                passes.timed(u)(lambda: None)
            inner = lambda: passes.cheap(a)("inner", lambda: 3)
            self.assertEqual(3, passes.cheap(a)("norm", inner))
        with mock.patch("time.perf_counter", side_effect=[30.0, 32.0, 40.0, 40.0]):
            passes.cheap(a)("norm", lambda: None)
            with self.assertRaises(KeyError):
                passes.cheap(b)("act", lambda: {}[0])
        self.assertFalse(passes._inside)
        self.assertEqual(({a: 2 * 10**9, b: 3 * 10**9}, {a: {"norm": 3 * 10**9}, b: {"act": 1}}, (float("inf"), False)), passes.read())


class Records(unittest.TestCase):
    def test_kept(self):
        """A leaf stays itself, so that its gradient is its own. Anything else has no history, which would be a cycle."""
        x = leaf(3)
        y = x * 2
        self.assertIs(x, Kept(x, None).tensor)
        kept = Kept(y, None)
        self.assertEqual((None, y.data_ptr(), 0), (kept.tensor.grad_fn, kept.tensor.data_ptr(), kept.version))

    def test_weak(self):
        """It frees what names the storage, and not the storage."""
        storage, freed = storage_of(torch.zeros(4)), []
        weak = Weak(storage, freed.append)
        of = weak.of
        self.assertEqual(storage._cdata, weak.storage()._cdata)
        del weak
        self.assertEqual([of], freed)
        torch.UntypedStorage._free_weak_ref(of)

    def test_what_others_hold(self):
        """Moving it would free nothing: weights, also frozen ones, other leaves that take gradients, views and casts of all
        these, parts of larger storages, and what graphs write."""
        made, weight = leaf(4, 4) * 2, nn.Parameter(torch.zeros(4, 4))
        frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        held = [weight, weight.t(), weight[1:], frozen, frozen[1:], leaf(4), leaf(4).view(2, 2), leaf(4).half(), weight.half().t(), made.unsafe_chunk(2)[0], torch.zeros(8)[:4].detach()]
        for t in (*held, made, made[1:], made.t(), made.half(), made.half()[1:], torch.zeros(4), torch.zeros(8)[:4], made.detach()):
            self.assertEqual(any(t is x for x in held), is_held(t), (t.shape, t.dtype, t.grad_fn))

    def test_memory_of_a_device(self):
        """PyTorch is given the address and the size, as bytes that may be written."""
        given = []
        with mock.patch.object(torch, "as_tensor", lambda memory, device: given.append((memory.__cuda_array_interface__, device)) or torch.zeros(4)):
            storage_at(4096, 100, torch.device("cuda", 1))
        self.assertEqual([({"shape": (100,), "typestr": "|u1", "data": (4096, False), "version": 2}, torch.device("cuda", 1))], given)


@dataclasses.dataclass
class Out:
    loss: object
    hidden: object = None


class FirstMade(unittest.TestCase):
    def test_anywhere(self):
        x = leaf(3)
        y, z = x * 2, x * 3
        for out, want in (
            (y, y), (x, None), (None, None), ((x, y, z), y), ([None, [x, (z,)]], z), ({"a": 1, "b": {"c": y}}, y),
            (Out(None, z), z), (Out(x), None), (Out((x, y), z), y), ("text", None), ({"a": x}, None), ((), None),
        ):
            self.assertIs(want, first_made(out))


if __name__ == "__main__":
    unittest.main()
