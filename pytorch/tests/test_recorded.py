"""What recorded steps find out about each block, in small cases."""

import contextlib
import gc
import itertools
import pathlib
import random
import threading
import unittest
from unittest import mock

from blocks import Block, choices, one_pass, planned, stack, train
from common import DEVICE, runtime, stowage, torch
from noted import new
from stowage import _again, _managed, _profile
from stowage._again import Refused, state
from stowage._errors import Error, TooSmall, forget
from stowage._planned import RECORDED
from stowage._profile import Profile, Unit
from stowage._record import storage_of
from stowage._smaller import OutOfMemory
from stowage._sparing import check_sparingly
from stowage._step import Step
from test_reports import Thing
from torch import nn
from zoo import leaf

CPU = torch.device("cpu")


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


class Graphs(unittest.TestCase):
    def test_retained_by_another_pass(self):
        """A retained graph says nothing of the one that is used next."""
        models, now = [stack(Block, 2), stack(Block, 2)], [1]
        with runtime("budget", budget="64MiB") as rt, mock.patch.object(_profile, "in_backward", lambda: now[0]):
            for model in models:
                rt.attach(model)
            with rt.step():
                a, b = (model(torch.randn(5, 8)).square().mean() for model in models)
                a.backward(retain_graph=True)
                now[0] = 2
                b.backward()
            units = rt._planner.units.list
            self.assertEqual([True, True, False, False], [u.retained for u in units], [u.name for u in units])


class Followed(unittest.TestCase):
    def test_wrong_use(self):
        """In a step that follows a plan, of which the library is not told."""
        model = stack(Block, 2)
        with planned(model, "whole") as rt:
            train(model, one_pass, RECORDED + 1, rt)
            self.assertIn("recompute", choices(rt).values())
            with rt.step():
                self.assertIsNone(rt._step)
                with self.assertRaisesRegex(Error, r"attach\(\) is called inside of a step"):
                    rt.attach(stack(Block, 2))
                with self.assertRaisesRegex(Error, "^a step is under way; end it before the next one begins"), rt.step():
                    self.fail("it began")
                said = []

                def other():
                    try:
                        rt.step().__enter__()
                    except Error as e:
                        said.append(str(e))

                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
                self.assertEqual(["a step is under way in another thread; end it before the next one begins"], said)
            self.assertIsNone(rt._now)

    def test_a_budget_that_the_library_refuses(self):
        """When a step begins, too, it is told in words about the budget."""
        with runtime("budget", budget="1MiB", recompute=False) as rt:
            with mock.patch.object(rt._library, "begin", side_effect=TooSmall("the limit is too small", 5 << 20)), self.assertRaisesRegex(stowage.BudgetError, r"^a budget of 1.0 MiB is too small: this step needs at least "), rt.step():
                self.fail("it began")
            self.assertIsNone(rt._step)

    def test_a_step_that_cannot_be_recorded(self):
        """The library's step is ended, and the next step is recorded."""
        model = stack()
        with runtime("budget") as rt:
            rt.attach(model)
            with mock.patch.object(rt._planner.units, "wrap_all", side_effect=ValueError("no")), self.assertRaisesRegex(ValueError, "^no$"), rt.step():
                self.fail("it began")
            self.assertEqual((None, None), (rt._step, rt._now))
            with rt.step():
                one_pass(model, 0)
            self.assertEqual((1, 2), (rt._planner.keys[""].recorded, rt.stats()["steps"]))

    def test_weights_that_are_replaced(self):
        """The storages of weights are those that there are when a step begins."""
        model = nn.Linear(4, 4)
        with runtime("budget", budget="1MiB") as rt:
            rt.attach(model)
            rt._refresh()
            before = set(rt._weights)
            model.weight = nn.Parameter(torch.zeros(4, 4))
            rt._refresh()
            self.assertEqual((2, 2, 1), (len(before), len(rt._weights), len(before & rt._weights)))

    def test_traces(self):
        with runtime("budget", budget="1MiB") as rt, mock.patch.object(rt._library, "trace") as trace:
            for path in ("a.trace", pathlib.Path("b.trace"), b"c.trace", None):
                rt.trace(path)
            self.assertEqual([mock.call("a.trace"), mock.call("b.trace"), mock.call("c.trace"), mock.call(None)], trace.call_args_list)

    def test_errors_that_are_kept(self):
        """They hold no frames."""
        try:
            try:
                raise KeyError
            except KeyError:
                raise TooSmall("too small", 5) from ValueError()
        except TooSmall as e:
            kept = forget(e)
        self.assertEqual((5, None, None, None), (kept.least, kept.__traceback__, kept.__context__, kept.__cause__))
        self.assertEqual(["stowage.Error", "stowage.BudgetError", "stowage.Overflow"], [f"{c.__module__}.{c.__name__}" for c in (stowage.Error, stowage.BudgetError, stowage.Overflow)])

    def test_policies_are_copied(self):
        given = {"a": "offload"}
        with runtime(policy=given) as rt:
            given["a"] = "keep"
            self.assertEqual({"a": "offload"}, rt.policy)

    def test_groups_that_steps_had(self):
        """They are no misspelt names of a model's."""
        with runtime(policy={"mpl": "offload"}) as rt:
            with self.assertRaisesRegex(Error, "did you mean 'mlp'"):
                rt.attach(stack(Block, 2), groups={"blocks.*": "mlp"})
            with rt.step(), rt.group("mpl"):
                pass
            rt.attach(stack(Block, 2), groups={"blocks.*": "mlp"})

    def test_layouts(self):
        with runtime(policy={"a": "stash"}) as rt, rt.step():
            for x, layout in ((torch.eye(4).to_sparse(), "torch.sparse_coo"), (torch.eye(4).to_mkldnn(), "torch._mkldnn")):
                with self.assertRaisesRegex(Error, f"^stash: x is {layout}; give a dense tensor"):
                    rt.stash(x, torch.tensor(2), name="a")

    def test_recorded_steps(self):
        """They leave room for second passes once it is known how large these are; one that fails forgets its tensors."""
        model = stack(Block, 2)
        with runtime("budget", budget="64MiB") as rt:
            rt.attach(model)
            with mock.patch.object(rt._budget, "begin", wraps=rt._budget.begin) as begin:
                train(model, one_pass, RECORDED, rt)
            spare = rt._planner.spare(rt._planner.keys[""])
            self.assertGreater(spare, 0)
            self.assertEqual([("", 0), ("", spare)], [c[0] for c in begin.call_args_list])
            profiles, plain = [], rt._planner.record

            def record(known, step):
                profiles.append(plain(known, step))
                return profiles[-1]

            with mock.patch.object(rt._planner, "record", record), self.assertRaisesRegex(KeyError, "of the user"), rt.step("other"):
                model(torch.randn(5, 8))
                raise KeyError("of the user")
            (p,) = profiles
            self.assertEqual((None, {}, []), (p.step, p.numbered, p.made))
            self.assertEqual({None}, {c.again for c in p.calls})

    def test_a_recorded_step_with_too_many_rows(self):
        """Nothing of it is held by its graph, which somebody keeps, and the steps after it are left to the library."""
        model, profiles, close = stack(), [], Profile.close
        with runtime("budget", live=0.001) as rt, mock.patch.object(Profile, "close", lambda p: (profiles.append(p), close(p))):
            rt.attach(model)
            for overflows in (True, False):
                with self.assertRaises(stowage.Overflow) if overflows else contextlib.nullcontext(), rt.step():
                    x = rt.stash(leaf(100, 64) * 2, rows=torch.tensor(90), name="a")
                    kept = model(torch.randn(3, 4, 8)).sum() + (x * x).sum()
                    kept.backward(retain_graph=True)
                self.assertEqual((2 - overflows, [], [None] * 3), (len(profiles), profiles[-1].made, [c.again for c in profiles[-1].calls[:3]]))
            self.assertTrue(rt._planner.keys[""].by_library)

    def test_a_step_under_a_plan_that_fails(self):
        """Its calls hold nothing, though somebody keeps their graph: a module that does would lead to itself."""
        model = stack(Block, 2)
        with planned(model, "whole") as rt:
            train(model, one_pass, RECORDED + 1, rt)
            with self.assertRaises(KeyError), rt.step():
                kept = model(torch.randn(5, 8))
                calls = [weak() for weak in rt._now.calls]
                raise KeyError
            self.assertIsNotNone(kept.grad_fn)
            self.assertEqual([None] * 2, [call.inputs for call in calls])

    def test_closed_at_its_end(self):
        for fails in (False, True):
            with contextlib.suppress(KeyError), stowage.Runtime(budget="1GiB", device="cpu") as rt:
                self.assertIsInstance(rt, stowage.Runtime)
                if fails:
                    raise KeyError
            with self.assertRaisesRegex(Error, "^this runtime is closed"), rt.step():
                self.fail("it began")

    def test_closed_when_nobody_has_it(self):
        library = mock.Mock()
        rt = stowage.Runtime(policy={"a": "offload"}, device="cpu", library=lambda *_: library)
        library.close.assert_not_called()
        del rt
        gc.collect()
        library.close.assert_called_once_with()

    def test_closed_while_somebody_reads_a_berth(self):
        """Its memory is the library's, which stays open then: also if a step is under way."""
        for reads in (True, False):
            library, memory = mock.Mock(), torch.zeros(8)
            rt = stowage.Runtime(policy={"a": "stash"}, device="cpu", library=lambda *_: library)
            rt._step = Step(library, CPU, 1, bool, None, set(), set(), rt._held)
            rt._step.views[1] = storage_of(memory)
            if not reads:
                del memory
            rt.close()
            self.assertEqual(0 if reads else 1, library.close.call_count)

    def test_rows_that_are_never_stashed(self):
        """A report says so, and of those that are it does not."""
        for stashed in ("a", "b"):
            with runtime(policy={"a": "stash", "b": "stash"}) as rt:
                with rt.step():
                    x = rt.stash(leaf(4, 8) * 2, torch.tensor(2), name=stashed)
                    x.sin().sum().backward()
                self.assertEqual(stashed == "b", "group 'a' is kept because" in rt.report())
                self.assertEqual(stashed == "a", "group 'b' is kept because" in rt.report())


class Budget:
    """One that takes notes, with room for everything."""

    readings = 3

    def __init__(self, log):
        self.log = log

    def room(self):
        return 1 << 30

    def pause(self):
        self.log.append("pause")

    def resume(self):
        self.log.append("resume")

    def held_beyond(self):
        return 17

    def pass_now(self):
        return 5, 4

    def second_pass(self, run):
        self.log.append("second")
        return run(), 7, 3

    def needs(self):
        return [1, 2]


class Again(Block):
    """Does something else only when it runs again."""

    def __init__(self, act):
        super().__init__()
        self.other = act

    def forward(self, x):
        if state.again:
            self.other()
        return super().forward(x)


class Profiles(unittest.TestCase):
    """A profile on its own."""

    def profile(self, **more):
        step, calls = new()
        self.log = []
        p = Profile(CPU, step, set(), 1, Budget(self.log), Refused(), **more)
        self.addCleanup(p.close)
        return p

    def run_block(self, p, module, x=None, name="block"):
        u = Unit(name, module, None)
        return u, p.forward(u, module.forward, (leaf(3, 8) * 2 if x is None else x,), {})

    def test_a_call_that_fails(self):
        """It leaves no trace in the thread, and is no call."""
        p, u = self.profile(), Unit("block", Block(), None)

        def fail(x):
            self.assertIs(p.stack[-1], state.lean.to)
            raise KeyError("of the block")

        outer = object()
        with mock.patch.object(state, "lean", outer):
            with self.assertRaisesRegex(KeyError, "of the block"):
                p.forward(u, fail, (leaf(3, 8),), {})
            self.assertIs(outer, state.lean)
        self.assertEqual(([], []), (p.stack, p.calls))
        self.assertEqual(1, p.count[u])

    def test_the_backward_pass(self):
        """What is tried is no part of the step: the budget is told, and the step is quiet meanwhile."""
        p = self.profile()
        u, y = self.run_block(p, Again(lambda: self.log.append(p.step.quiet)))
        (call,) = p.calls
        self.assertEqual([], self.log)
        y.sum().backward()
        self.assertEqual(["pause", "second", True, "second", True, True, "second", "resume"], self.log)
        self.assertEqual((False, 0), (p.step.quiet, state.again))
        self.assertEqual((True, True, ""), (u.whole, u.lean, u.why))
        self.assertEqual(({"GeluBackward0"}, {}), (p.refused.tried, dict(p.refused)))
        self.assertEqual(((7, 3), 7, 17), (p.again[call], p.dropping[call], p.held_before[call]))
        self.assertEqual({len(p.ops) - 1: 17}, p.held_then)
        self.assertEqual([("begin", 0), ("save", 0), ("load", 3)], [(kind, mark) for (kind, _, _), mark in zip(p.ops, p.marks)])
        order = [call.began, call.ended, call.loaded, *p.whole_times[call], call.resumed]
        self.assertEqual(sorted(order), order)
        self.assertTrue(all(stamp > 0 for stamp in order))
        self.assertEqual((None, None, None, []), (call.again, call.around, call.random, call.weights))

    def test_storages_that_calls_share(self):
        """Small ones and large ones, of other calls; not of the same one."""
        p = self.profile()
        p.least = 100
        a, b = Thing(), Thing()
        for call, storage, bytes, shared in ((a, 1, 50, False), (a, 1, 50, False), (b, 1, 50, True), (a, 2, 100, False), (a, 2, 100, False), (b, 2, 100, True), (b, 3, 0, False), (a, 3, 0, False)):
            p.saved(call, Thing(storage=storage, bytes=bytes))
            self.assertEqual(shared, storage in p.shared, (storage, bytes))
        self.assertEqual(({1: a}, {2: a}, {2: 100}), (p.little, p.first, p.bytes))

    def test_in_compiled_functions(self):
        """A block that a compiled function calls after its graph ended is left alone, and so is one in a checkpoint."""
        for name, why in (("in_compiled", "it is inside of a function that is compiled"), ("in_checkpoint", "torch.utils.checkpoint recomputes it")):
            p, u = self.profile(), Unit("block", Block(), None)
            with mock.patch.object(_managed, name, return_value=True):
                y = _managed.Recording(p.step, p).forward(u, lambda x, by: x * by, (3,), {"by": 4})
            self.assertEqual((12, False, False, True, []), (y, u.whole, u.lean, u.left_alone, p.calls))
            self.assertIn(why, u.why)

    def test_calls_and_cheap_parts(self):
        """Calls of a unit are numbered, and each of its cheap tensors is timed."""

        class Gated(nn.Module):
            def forward(self, x):
                return (nn.functional.gelu(x) * nn.functional.silu(x * 2)).exp()

        p, module = self.profile(), Gated()
        u = Unit("block", module, None)
        ys = [p.forward(u, module.forward, (leaf(3, 8) * 2,), {}) for _ in range(3)]
        self.assertEqual([0, 1, 2], [c.number for c in p.calls])
        sum(y.sum() for y in ys).backward()
        for c in p.calls:
            kinds = [e.kind for e in c.entries if e.kind]
            self.assertEqual((["", *kinds], ["GeluBackward0", "SiluBackward0"]), ([kind for kind, _ in p.kinds[c]], sorted(set(kinds))))
            stamps = [at for _, at in p.kinds[c]]
            self.assertEqual((sorted(stamps), (stamps[0], stamps[-1])), (stamps, p.lean_times[c]))
        self.assertEqual({"GeluBackward0", "SiluBackward0"}, p.refused.tried)

    def test_values_that_vary(self):
        """A unit may be recomputed if what differs differs from run to run by rounding: something of it does, all of it is near,
        and as much is saved. It runs three times more at most, or once if other ranks run it, too."""
        one, near, far = torch.ones(4), torch.ones(4) + 1e-6, torch.ones(4) * 2
        for runs, agreed, ran, whole in (
            ([[near, one]], None, 1, True),  # one of two varies
            ([[one, one], [one, near]], None, 2, True),
            ([[one, one]] * 3, None, 3, False),
            ([[near, far]] * 3, None, 3, False),
            ([[near]] * 3, None, 3, False),
            ([[one, one], [near, near]], True, 1, False),
            ([[near, one]], True, 1, True),
        ):
            p, u = self.profile(), Unit("block", Block(), None)
            call, passes = Thing(unit=u, all=[None, None]), iter(runs)
            p.agreed = agreed
            with mock.patch.object(p, "second", side_effect=lambda _: next(passes)) as second:
                p.judge(call, 2, {0: one, 1: one})
            self.assertEqual((ran, whole), (second.call_count, u.whole), runs)
        for agreed, ran in ((None, 0), (True, 1)):  # nothing differs
            p, u = self.profile(), Unit("block", Block(), None)
            p.agreed = agreed
            with mock.patch.object(p, "second", return_value=[one]) as second:
                p.judge(Thing(unit=u, all=[None]), 1, {})
            self.assertEqual((ran, True), (second.call_count, u.whole))

    def test_what_second_passes_keep(self):
        """The first and the timed one make everything; one more keeps nothing."""
        p, needs = self.profile(), []

        def collect(forward, module, args, kwargs, need, **more):
            needs.append(need)
            return _again.collect(forward, module, args, kwargs, need, **more)

        _, y = self.run_block(p, Block())
        (call,) = p.calls
        with mock.patch.object(_profile, "collect", collect):
            y.sum().backward()
        n = len(call.all)
        self.assertEqual([n, 0, n], needs)

    def test_random_numbers_of_a_second_pass(self):
        """Those that it draws from Python are not missing later."""
        p = self.profile()
        _, y = self.run_block(p, Again(lambda: random.random()))
        before = random.getstate()
        y.sum().backward()
        self.assertEqual(before, random.getstate())

    def test_attributes_of_a_second_pass(self):
        block = Again(lambda: setattr(block, "number", 2))
        block.number = 1
        p = self.profile()
        _, y = self.run_block(p, block)
        y.sum().backward()
        self.assertEqual(1, block.number)

    def test_a_second_pass_that_fails(self):
        """A step goes on; memory that runs out says nothing of the block."""
        for error, why in ((KeyError("again"), "its second forward pass failed (KeyError: 'again')"), (OutOfMemory(), "")):
            def fail():
                raise error

            p = self.profile()
            u, y = self.run_block(p, Again(fail))
            y.sum().backward()
            self.assertEqual(((False, False) if why else (None, None), why, "resume", False), ((u.whole, u.lean), u.why, self.log[-1], p.step.quiet))

    def test_what_is_tried_where_memory_is_tight(self):
        """A second pass that needs what is away comes back first needs room for that, too; without it, it is tried sparingly."""
        for room, away, want in ((125, 0, "whole lean"), (124, 0, ""), (175, 50, "whole lean"), (174, 50, "sparingly"), (124, 50, "")):
            p, tried = self.profile(), []
            with mock.patch.multiple(p, sizes=lambda call: (100, away), room=lambda: room, check_whole=lambda *_: tried.append("whole"), check_lean=lambda *_: tried.append("lean")):
                with mock.patch.object(_profile, "check_sparingly", lambda *_: tried.append("sparingly")):
                    u, y = self.run_block(p, Block())
                    y.sum().backward()
            self.assertEqual((want, {("block", 0): (100, room, away)}), (" ".join(tried), p.rooms))

    def test_retained_before(self):
        """A call whose graph is not retained does not take back what another said."""
        p = self.profile()
        module = Block()
        u, a = self.run_block(p, module)
        b = p.forward(u, module.forward, (a,), {})
        u.retained = True
        b.sum().backward()
        self.assertTrue(u.retained)

    def test_what_is_no_dense_tensor(self):
        """It has no storage, and takes nothing."""

        class Sparse(nn.Module):
            def forward(self, x):
                return torch.sparse.mm(torch.eye(8).to_sparse(), x.t()).t() * 2

        p = self.profile()
        _, y = self.run_block(p, Sparse())
        (call,) = p.calls
        self.assertEqual([0], [e.bytes for e in call.entries if e.storage == 0])

    def test_what_ranks_agree_on(self):
        """Only that is tried."""
        for agreed, tried in ((set(), []), ({("block", 0, "lean")}, ["second"]), ({("block", 0, "whole")}, ["second"] * 2), ({("block", 1, "whole")}, []), ({("block", 0, "sparingly")}, ["second"] * 2)):
            p = self.profile(agreed=agreed)
            u, y = self.run_block(p, Block())
            y.sum().backward()
            self.assertEqual(tried, [x for x in self.log if x == "second"])
            self.assertEqual(("block", 0, "lean") in agreed, bool(p.lean_times))
            ((name, (need, room, away)),) = p.rooms.items()
            self.assertEqual((("block", 0), 1 << 30, 0), (name, room, away))
            self.assertGreater(need, 0)


class Sparing(unittest.TestCase):
    """Second passes that are compared by digests, with a profile that is played."""

    def check(self, saved, passes, agreed=None, room=10**6, weights=()):
        """Tries a call that saved these tensors, whose passes make those. Returns the profile, the call and what was decided."""
        passes, ticks, held = iter(passes), itertools.count(100), itertools.count(1)
        call = Thing()
        call.value = lambda i: saved[i]
        call.all = [(call, i) for i in range(len(saved))]
        p = mock.Mock(device=CPU, agreed=agreed, holding={}, again={}, dropping={}, saves={}, whole_times={}, ran=[])
        p.sizes.return_value, p.room.return_value = (800, 0), room
        p.own.side_effect = lambda call: [i not in weights for i in range(len(saved))]
        p.clock.stamp.side_effect = lambda: next(ticks)
        p.budget.pass_now.side_effect = lambda: (next(held), 0)
        figures = iter([(7, 3), (5, 1)])

        def second(call, keep=True, each=lambda t: None):
            made = next(passes)
            p.ran.append((len(made), keep))
            for t in made:
                each(t)
            return made if keep else []

        p.second = second
        p.budget.second_pass.side_effect = lambda run: (run(), *next(figures))
        check_sparingly(p, call)
        (decided,) = p.decide.call_args_list
        return p, call, decided[0][1:]

    def test_figures(self):
        a, b = torch.randn(3, 4), torch.randn(5)
        p, call, decided = self.check([a, b], [[a, b]] * 4)
        self.assertEqual((2, [], False), decided)
        self.assertEqual(((7, 3), 5), (p.again[call], p.dropping[call]))
        self.assertEqual([(1, 0), (2, 0)], p.holding[call])
        self.assertEqual(([100, 101, 102], (100, 103)), (p.saves[call], p.whole_times[call]))
        self.assertEqual([(2, True), (2, False), (2, False), (2, False)], p.ran)
        p.clock.fill.assert_called_once_with()

    def test_verdicts(self):
        a, b = torch.randn(3, 4), torch.randn(5)
        other, kind = torch.randn(3, 4), ((3, 4), torch.float32)
        near, nearer = a * (1 + 1e-6), a * (1 + 2e-6)
        for name, saved, passes, ran, decided, more in (
            ("equal", [a, b], [[a, b]] * 9, 4, (2, [], False), {}),
            ("other values", [a, b], [[other, b]] * 9, 6, (2, [kind], False), {}),
            ("other values, without room", [a, b], [[other, b]] * 9, 4, (2, [kind], False), {"room": 104}),
            ("other values, with just enough room", [a, b], [[other, b]] * 9, 6, (2, [kind], False), {"room": 105}),
            ("other values, and ranks that agree", [a, b], [[other, b]] * 9, 4, (2, [kind], False), {"agreed": set()}),
            ("near, and from pass to pass", [a, b], [[near, b]] * 2 + [[nearer, b]] * 9, 4, (2, [kind], True), {}),
            ("near, and late", [a, b], [[near, b]] * 4 + [[nearer, b]] * 9, 5, (2, [kind], True), {}),
            ("far, and from pass to pass", [a, b], [[other, b]] * 2 + [[a, b]] * 9, 6, (2, [kind], False), {}),
            ("one is near and another is far", [a, a], [[near, other]] * 2 + [[nearer, a]] * 9, 6, (2, [kind, kind], False), {}),
            ("one is near and another stays", [a, a], [[near, near]] * 2 + [[near, nearer]] * 9, 4, (2, [kind, kind], True), {}),
            ("weights do not count", [a, b], [[other, b]] * 9, 4, (2, [], False), {"weights": {0}}),
            ("seeds do not count", [a, torch.tensor([1])], [[a, torch.tensor([2])]] * 9, 4, (2, [], False), {}),
            ("gone", [None, b], [[other, b]] * 9, 4, (2, [], False), {}),
            ("fewer", [a, b], [[other]] * 9, 4, (1, [], False), {}),
            ("more", [a], [[other, b]] * 9, 4, (2, [], False), {}),
        ):
            with self.subTest(name):
                p, call, said = self.check(saved, passes, **more)
                self.assertEqual((decided, ran), (said, len(p.ran)))


if __name__ == "__main__":
    unittest.main()
