"""A budget for the whole process: how much of it saved tensors get. SPEC S8.1.

Most tests have a fake allocator, so that they need no GPU. Those that need one compare the
allocator's real peak with the budget:

    STOWAGE_DEVICE=cuda python3 -m unittest discover -s pytorch/tests -p test_budget.py
"""

import contextlib
import gc
import unittest
from unittest import mock

from common import DEVICE, runtime, same, stowage, torch
from stowage import _budget, _memory
from stowage._library import Usage
from torch import nn
from zoo import leaf

MiB = 1 << 20


class Allocator:
    """A fake allocator: weights and temporaries are what the test says, saved tensors what the
    library counts, at the time when it counts them."""

    includes_saved = True

    def __init__(self, other=0):
        self.other = self.high = other
        self.rt, self.most = None, 0  # the peak of the process

    def saved(self):
        library = self.rt._library if self.rt is not None else None
        return library.usage().saved if library is not None else 0

    def hold(self, bytes):
        """Holds so many bytes more, or less, from now on."""
        self.other += bytes
        self._look()

    def _look(self):
        now = self.allocated()
        self.high, self.most = max(self.high, now), max(self.most, now)

    def allocated(self):
        return self.other + self.saved()

    def peak(self):
        self._look()
        return self.high

    def reset(self):
        self.high = self.allocated()


class Layers(unittest.TestCase):
    """Eight layers that each save 64 KiB and take temporaries of a fake allocator."""

    SIZE, COUNT = 65536, 8

    def step(self, rt, memory, temporaries=0, gradients=0, key=""):
        memory.most = 0
        with rt.step(key):
            y = self.x = leaf(128, 128)
            for i in range(self.COUNT):
                with rt.group("abc"[i % 3]):
                    memory.hold(temporaries)
                    y = torch.tanh(y) * 1.0
                    memory.hold(-temporaries)
            y.sum().backward()
            memory.hold(gradients)
            memory.hold(-gradients)
        return self.x.grad, rt.stats()

    def open(self, memory, **more):
        kept = runtime("budget", memory=memory, **more)
        return kept

    @unittest.skipUnless(DEVICE == "cpu", "the fake allocator counts tensors of the CPU")
    def test_saved_tensors_get_what_is_left(self):
        """From the recorded step on the peak keeps to the budget, and steps use most of it."""
        want = None
        for budget, weights, temporaries, gradients in ((40, 30, 4, 2), (40, 30, 4, 8), (36, 30, 2, 0), (60, 30, 2, 0), (1000, 0, 0, 0)):
            budget, weights, temporaries, gradients = (n * self.SIZE for n in (budget, weights, temporaries, gradients))
            with self.subTest(budget=budget, temporaries=temporaries, gradients=gradients):
                memory = Allocator(weights)
                with self.open(memory, budget=budget) as rt:
                    memory.rt = rt
                    for i in range(5):
                        grad, stats = self.step(rt, memory, temporaries, gradients)
                        want = grad if want is None else want
                        self.assertEqual(want.shape, grad.shape)
                        self.assertLessEqual(memory.most, budget, f"step {i}")
                        moved = stats["summary"]["counts"]["OutBytes"]
                    # Gradients are there when nothing is saved any more, and take no room.
                    room = budget - weights - temporaries
                    self.assertLessEqual(weights + max(temporaries, gradients) - stats["budget"]["other"], 2 * self.SIZE)
                    self.assertEqual(room < (self.COUNT - 1) * self.SIZE, moved > 0)
                    limit = stats["saved_limit"]
                    if moved:
                        self.assertLessEqual(limit, room)
                        self.assertGreaterEqual(limit, room - 6 * budget // _budget.MARGIN)

    @unittest.skipUnless(DEVICE == "cpu", "the fake allocator counts tensors of the CPU")
    def test_an_optimiser_that_takes_memory_after_the_first_step(self):
        memory, budget = Allocator(10 * self.SIZE), 30 * self.SIZE
        with self.open(memory, budget=budget) as rt:
            memory.rt = rt
            self.step(rt, memory)
            self.assertGreater(rt.stats()["saved_limit"], 15 * self.SIZE)
            memory.hold(16 * self.SIZE)
            for _ in range(4):
                _, stats = self.step(rt, memory)
                self.assertLessEqual(memory.most, budget)
                self.assertGreater(stats["summary"]["counts"]["OutBytes"], 0)
            memory.hold(-16 * self.SIZE)  # and gives it back
            for _ in range(3 + _budget.PATIENCE):
                _, stats = self.step(rt, memory)
            self.assertEqual(0, stats["summary"]["counts"]["OutBytes"])

    @unittest.skipUnless(DEVICE == "cpu", "the fake allocator counts tensors of the CPU")
    def test_temporaries_that_grow(self):
        """A step that exceeds the budget is noticed, and the next ones keep to it."""
        memory, budget = Allocator(10 * self.SIZE), 20 * self.SIZE
        with self.open(memory, budget=budget) as rt:
            memory.rt = rt
            for _ in range(4):
                self.step(rt, memory, self.SIZE)
            self.assertFalse(rt._budget.measuring)
            self.step(rt, memory, 6 * self.SIZE)
            self.assertGreater(memory.most, budget)
            self.step(rt, memory, 6 * self.SIZE)  # is measured
            for _ in range(3):
                self.step(rt, memory, 6 * self.SIZE)
                self.assertLessEqual(memory.most, budget)

    @unittest.skipUnless(DEVICE == "cpu", "the fake allocator counts tensors of the CPU")
    def test_between_steps(self):
        """What is held between steps, by an optimiser for example, is not blamed on steps."""
        memory, budget = Allocator(10 * self.SIZE), 30 * self.SIZE
        with self.open(memory, budget=budget) as rt:
            memory.rt = rt
            for _ in range(6):
                self.step(rt, memory)
                memory.hold(25 * self.SIZE)
                memory.hold(-25 * self.SIZE)
            self.assertFalse(rt._budget.measuring)
            self.assertIn("held between steps, more than the budget", rt.report())

    @unittest.skipUnless(DEVICE == "cpu", "the fake allocator counts tensors of the CPU")
    def test_keys_are_measured_apart(self):
        memory, budget = Allocator(10 * self.SIZE), 24 * self.SIZE
        with self.open(memory, budget=budget) as rt:
            memory.rt = rt
            for _ in range(4):
                for key, temporaries, moves in (("short", 1, False), ("long", 9, True)):
                    _, stats = self.step(rt, memory, temporaries * self.SIZE, key=key)
                    self.assertLessEqual(memory.most, budget)
            for key, temporaries, moves in (("short", 1, False), ("long", 9, True)):
                _, stats = self.step(rt, memory, temporaries * self.SIZE, key=key)
                self.assertEqual(moves, stats["summary"]["counts"]["OutBytes"] > 0, key)

    @unittest.skipUnless(DEVICE == "cpu", "the fake allocator counts tensors of the CPU")
    def test_gradients_that_come_and_go(self):
        """Two bases take turns, as with gradient accumulation: no plan is made again for it."""
        memory, budget = Allocator(10 * self.SIZE), 20 * self.SIZE
        with self.open(memory, budget=budget) as rt:
            memory.rt = rt
            limits = set()
            for i in range(12):
                if i % 2:
                    memory.hold(4 * self.SIZE)
                self.step(rt, memory, 0, 0 if i % 2 else 4 * self.SIZE)
                if i % 2:
                    memory.hold(-4 * self.SIZE)
                if i >= 6:
                    limits.add(rt.stats()["saved_limit"])
                    self.assertFalse(rt._budget.measuring)
                    self.assertLessEqual(memory.most, budget)
            self.assertEqual(1, len(limits))

    @unittest.skipUnless(DEVICE == "cpu", "the fake allocator counts tensors of the CPU")
    def test_a_budget_that_is_too_small(self):
        """The error names what holds how much, and a budget of the least that it names works."""
        for weights, temporaries in ((50, 0), (10, 0), (10, 30)):
            memory = Allocator(weights * self.SIZE)
            budget = 10 * self.SIZE + self.SIZE // 2
            with self.subTest(weights=weights, temporaries=temporaries), self.open(memory, budget=budget) as rt:
                memory.rt = rt
                with self.assertRaisesRegex(stowage.BudgetError, r"a budget of 672.0 KiB is too small: this step needs at least .* bytes\): .*temporaries and others .*raise the budget") as raised:
                    for _ in range(2):
                        self.step(rt, memory, temporaries * self.SIZE)
            e = raised.exception
            self.assertEqual(budget, e.budget)
            self.assertGreater(e.least, (weights + temporaries) * self.SIZE)
            least, saw = e.least, 0
            while saw < 3:  # before its first step nothing is known of what a model saves
                memory = Allocator(weights * self.SIZE)
                with self.open(memory, budget=least) as rt:
                    memory.rt = rt
                    try:
                        for _ in range(3):
                            self.step(rt, memory, temporaries * self.SIZE)
                        self.assertLessEqual(memory.most, least)
                        break
                    except stowage.BudgetError as again:
                        self.assertGreater(again.least, least)
                        least, saw = again.least, saw + 1
            self.assertLess(saw, 3)

    @unittest.skipUnless(DEVICE == "cpu", "the fake allocator counts tensors of the CPU")
    def test_exceeded_beside_other_ranks(self):
        """A rank that others wait for begins its step; alone it is told that the budget is exceeded, from its last byte on."""
        for more, exceeded in ((-1, False), (0, True), (1, True)):
            memory = Allocator(10 * self.SIZE)
            with self.open(memory, budget=10 * self.SIZE) as rt:
                memory.rt = rt
                memory.hold(more - rt._library.usage().own)
                for begin in (lambda alone: rt._budget.begin("", alone=alone), lambda alone: rt._budget.watch(False, alone=alone)):
                    begin(False)
                    with self.assertRaises(stowage.BudgetError) if exceeded else contextlib.nullcontext():
                        begin(True)

    @unittest.skipUnless(DEVICE == "cpu", "the fake allocator counts tensors of the CPU")
    def test_a_step_that_fails(self):
        memory, budget = Allocator(10 * self.SIZE), 16 * self.SIZE
        with self.open(memory, budget=budget) as rt:
            memory.rt = rt
            for _ in range(3):
                with self.assertRaises(ZeroDivisionError), rt.step():
                    leaf(128, 128).exp().sum().backward()
                    1 / 0
            for _ in range(4):
                self.step(rt, memory, self.SIZE)
                self.assertLessEqual(memory.most, budget)

    @unittest.skipUnless(DEVICE == "cpu", "the fake allocator counts tensors of the CPU")
    def test_berths_count(self):
        """Berths of stashed rows are part of the budget."""
        others = []
        for live in (0, 500):
            memory = Allocator(MiB)
            with self.open(memory, budget=4 * MiB) as rt:
                memory.rt = rt
                for _ in range(5):
                    with rt.step():
                        x = leaf(512, 64)
                        for _ in range(4):
                            x = rt.stash(torch.tanh(x) * 1.0, rows=torch.tensor(live))
                            x = x * x
                        x.sum().backward()
                stats = rt.stats()
                self.assertGreaterEqual(stats["budget"]["other"], MiB + stats["room"])
                others.append(stats["budget"]["other"])
        self.assertGreater(others[1], others[0] + 200 * 1024)


class Held(unittest.TestCase):
    def model(self):
        torch.manual_seed(3)
        m = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
        m[2].weight = m[0].weight  # counts once
        return m, torch.optim.Adam(m.parameters())

    def test_what_a_model_holds(self):
        m, optimizer = self.model()
        device = next(m.parameters()).device

        class A:
            model = m

        A.optimizer = optimizer
        floats = 64 * 64 + 64 + 2 * 64
        buffers = 2 * 64 * 4 + 8
        self.assertEqual({"weights": 4 * floats + buffers, "gradients": 0, "optimizer": 0}, _memory.held_by([A], device))
        self.assertEqual(4 * floats, _memory.gradients_to_come([A], device))
        m(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        held = _memory.held_by([A], device)
        self.assertEqual(4 * floats, held["gradients"])
        self.assertGreaterEqual(held["optimizer"], 8 * floats)
        self.assertEqual(0, _memory.gradients_to_come([A], device))

    def test_a_storage_counts_once(self):
        class A:
            model, optimizer = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), None

        A.model[1].weight.data = A.model[0].weight.data  # two parameters, one memory
        device = A.model[0].weight.device
        self.assertEqual(256, _memory.held_by([A], device)["weights"])

    @unittest.skipUnless(DEVICE == "cpu", "STOWAGE_DEVICE is not cpu")
    def test_on_the_cpu_the_model_and_its_optimiser_count(self):
        m, optimizer = self.model()
        layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
        model = nn.Sequential(m, layers)
        optimizer = torch.optim.Adam(model.parameters())
        with runtime("budget", budget="720KiB") as rt:
            rt.attach(model, {"1.*": "a"}, optimizer=optimizer)
            for _ in range(4):
                with rt.step():
                    model(torch.randn(256, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            with rt.step():
                model(torch.randn(256, 64)).sum().backward()
            held = _memory.held_by(rt._attached, torch.device("cpu"))
            stats = rt.stats()
            self.assertGreaterEqual(stats["budget"]["other"], sum(held.values()))
            self.assertLessEqual(stats["summary"]["device_peak"] + sum(held.values()), 720 * 1024)
            self.assertGreater(stats["summary"]["counts"]["OutBytes"], 0)
        with runtime("budget", budget="100KiB") as rt:
            rt.attach(model, {"1.*": "a"}, optimizer=optimizer)
            with self.assertRaisesRegex(stowage.BudgetError, r"budget of 100.0 KiB is too small.*weights 1\d\d.\d KiB.*gradients .*optimizer "), rt.step():
                pass


@unittest.skipUnless(DEVICE == "cuda", "STOWAGE_DEVICE is not cuda")
class RealPeaks(unittest.TestCase):
    """The allocator's own peak, read without the runtime's help, keeps to the budget."""

    def train(self, budget, steps=6, **more):
        torch.manual_seed(5)
        width, layers, batch = 1024, 12, 4096
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)])
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        peaks, grads = [], []
        with contextlib.ExitStack() as closing:
            rt = None if budget is None else closing.enter_context(stowage.Runtime(budget=budget, device=DEVICE, **more))
            closing.callback(lambda: print(f"peaks {[p >> 20 for p in peaks]} MiB under a budget of {budget}\n{rt.report() if rt is not None else ''}"))
            if rt is not None:
                rt.attach(model, {"*.*": "mlp"}, optimizer=optimizer)
            self.steps(rt, model, optimizer, steps, torch.Size((batch, width)), peaks, grads)
        return peaks, grads

    def steps(self, rt, model, optimizer, steps, shape, peaks, grads):
        for _ in range(steps):
            x = torch.randn(shape)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            if rt is None:
                model(x).square().mean().backward()
                peaks.append(torch.cuda.max_memory_allocated())
            else:
                rt._budget.peak = 0
                try:
                    with rt.step():
                        model(x).square().mean().backward()
                finally:  # a measured step resets the peak; the runtime has kept the highest
                    peaks.append(max(torch.cuda.max_memory_allocated() + rt._library.usage().own, rt._budget.peak))
            grads.append([p.grad.cpu() for p in list(model.parameters())[:2]])  # the budget is not for them
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def test_peaks(self):
        whole, want = self.train(None)
        full = max(whole)
        for share in (2.0, 0.95, 0.85, 0.75):
            budget = int(full * share)
            with self.subTest(share=share):
                gc.collect()
                peaks, got = self.train(budget)
                for i, p in enumerate(peaks):
                    self.assertLessEqual(p, budget, f"step {i} of {peaks}")
                for a, b in zip(want, got):
                    for x, y in zip(a, b):
                        self.assertTrue(same(x, y))

    def test_too_small(self):
        with self.assertRaises(stowage.BudgetError) as raised:
            self.train("64MiB")
        print(raised.exception)
        self.assertIn("weights", raised.exception.held)


class Learnt(unittest.TestCase):
    def test_no_more_than_was_saved(self):
        """A limit that did not matter to steps says nothing of others that save more."""
        with runtime("budget", budget=1000) as rt:
            budget = rt._budget
            known = budget._keys.setdefault("a", _budget.Known())
            self.assertEqual(0, budget.learnt("a"))
            known.limit = 900
            known.extras = [_budget.Extra(0, [(20, 300), (150, 150)])]
            self.assertEqual(300, budget.learnt("a"))
            known.limit = 200
            self.assertEqual(200, budget.learnt("a"))


class Fake:
    """A library whose usage is what the test says."""

    def __init__(self):
        self.saved = self.own = 0
        self.limits = []

    def limit(self, bytes):
        self.limits.append(bytes)

    def usage(self):
        return Usage(self.saved, 0, self.own, 0, 0, 0)


class Alone(unittest.TestCase):
    """The arithmetic, without a runtime."""

    def test_own_memory_counts(self):
        library, memory = Fake(), Allocator(1000)
        b = _budget.Budget(25600, memory, library, dict, lambda: 600)
        library.own = 4000
        b.begin("")
        self.assertEqual([(25600 - 5000 - 600) // 2], library.limits)
        memory.hold(700)
        b.before_call()
        b.after_call()
        memory.hold(-700)
        b.end()
        self.assertEqual(5700, b.other)
        self.assertEqual(25600, library.limits[-1])  # nothing is saved

    def test_rows_count_where_memory_has_nothing_that_is_saved(self):
        """Rows that lie in place, and saved tensors, are part of the peak once."""
        for measures, want in ((True, 1500), (False, 1740)):
            library, memory = Fake(), Allocator(1000)
            memory.includes_saved = measures
            b = _budget.Budget(25600, memory, library, dict, lambda: 0)
            with mock.patch.object(library, "usage", lambda: Usage(200, 40, 500, 0, 0, 0)):
                b.begin("")
                self.assertEqual((want, want, 25600 - want), (b.peak, b.step_peak or want, b.room()))
                b.watch(False)
                self.assertEqual(want, b.watched(None))

    def test_what_is_tried_counts_in_the_peak_alone(self):
        library, memory = Fake(), Allocator(1000)
        b = _budget.Budget(25600, memory, library, dict, lambda: 0)
        b.begin("")
        b.pause()
        memory.hold(9000)
        memory.hold(-9000)
        b.resume()
        b.before_call()
        self.assertEqual((10000, 10000, 0), (b.peak, b.step_peak, max(b.needs())))

    def test_times_with_few_saved_tensors_do_not_count(self):
        """Everything else may take the memory of saved tensors once they are released."""
        library, memory = Fake(), Allocator(1000)
        b = _budget.Budget(25600, memory, library, dict, lambda: 0)
        b.begin("")

        def call(other, *saved, released=()):
            memory.hold(other)
            b.before_call()
            memory.hold(-other)
            for id in saved:
                b.saved(id, 10240)
            b.released(released)
            b.after_call()

        call(0, 1)
        call(500, 1, 2)  # the first again
        call(600, 3)
        call(700)  # with 30720 saved: 1000 + 700 leave 23900
        call(8000, released=[1])
        call(8000, released=[1])  # with 30720, since another group needs the first
        call(9000, released=[2])  # with 20480: 15600
        call(24000, released=[3])  # with 10240: 600
        call(24500)  # with nothing
        b.end()
        self.assertEqual(25500, b.other)
        self.assertEqual(600 - 100, library.limits[-1])
        self.assertEqual([(24500, 0), (24000, 10240), (9000, 20480), (8000, 30720)], b._extra.needs)

    def test_the_limit_is_kept_as_long_as_it_fits(self):
        library, memory = Fake(), Allocator(1000)
        b = _budget.Budget(25600, memory, library, dict, lambda: 0)
        for more in (0, 50, 30, -80, 90, 5):
            memory.hold(more)
            b.begin("")
            b.saved(1, 99999)
            b.after_call()
            b.end()
        self.assertEqual(1, len(set(library.limits[1:])))

    def test_of_bases_that_are_near_the_newest_counts(self):
        library, memory = Fake(), Allocator(1000)
        b = _budget.Budget(25600, memory, library, dict, lambda: 0)
        for more, other in ((0, 5000), (150, 9000)):  # no base is near the one before
            memory.hold(more)
            b.begin("")
            memory.hold(other)
            b.before_call()
            memory.hold(-other)
            b.after_call()
            b.end()
        memory.hold(-75)  # which is near both
        b.begin("")
        self.assertEqual(1075 + 9000, b.other)

    def test_of_many_bases_the_newest_are_known(self):
        library, memory = Fake(), Allocator(1000)
        b = _budget.Budget(25600, memory, library, dict, lambda: 0)
        for _ in range(2 * _budget.BASES):
            for _ in range(2):
                b.begin("")
                b.end()
            b.begin("")
            self.assertFalse(b.measuring, f"steps that begin with {b.base} were measured twice")
            b.end()
            self.assertLessEqual(len(b._known.extras), _budget.BASES)
            memory.hold(200)  # the next base is not near

    def test_what_is_too_small(self):
        """By how much a step exceeded it, and a measured step that held more beside saved tensors."""
        library, memory = Fake(), Allocator(1000)
        b = _budget.Budget(25600, memory, library, lambda: {"weights": 900, "gradients": 0}, lambda: 50)
        b.begin("")
        self.assertIsNone(b.exceeded())
        memory.hold(24600)
        self.assertIsNotNone(b.exceeded())  # nothing is left
        memory.hold(-1)
        self.assertIsNone(b.exceeded())
        memory.hold(-24599)
        b.begin("")
        e = b.outgrown(30000)
        self.assertEqual((25600, 30000 + 30000 // 255 + 1), (e.budget, e.least))
        self.assertEqual({"weights": 900, "gradients": 50, "temporaries and others": 29050}, e.held)
        b.other = 25600
        b.check()
        b.other = 25601
        with self.assertRaises(stowage.BudgetError) as raised:
            b.check()
        self.assertEqual({"weights": 900, "gradients": 50, "temporaries and others": 24651}, raised.exception.held)
        b.measuring = False
        b.check()

    def test_a_limit_is_raised_after_a_while(self):
        """And again only after as many steps."""
        b = _budget.Budget(25600, Allocator(0), Fake(), dict, lambda: 0)
        b._extra, known = _budget.Extra(0, [(5600, 99999)]), _budget.Known()
        high = 25600 - 5600 - 100
        for _ in range(2):
            self.assertEqual([high - 401] * _budget.PATIENCE + [high], [b._derive(known, high - 401) for _ in range(_budget.PATIENCE + 1)])
        self.assertEqual([high - 400] * 20, [b._derive(known, high - 400) for _ in range(20)])  # which leaves little
        b._derive(known, high - 401)
        self.assertEqual((high, 0), (b._derive(known, high + 101), known.waited))  # which does not fit
        self.assertEqual((high + 100, high), (b._derive(known, high + 100), b._derive(known, 0)))

    def test_a_step_that_grows_is_measured_again(self):
        """Not if its peak was there before it began, nor if it is just the budget. A higher peak of what
        came before, such as an optimiser's, hides nothing."""
        for high, peak, measured in ((1000, 25600, 2), (1000, 25601, 0), (25000, 25600, 2), (30000, 25601, 0), (30000, 25600, 2)):
            library, memory = Fake(), Allocator(1000)
            b = _budget.Budget(25600, memory, library, dict, lambda: 0)
            for _ in range(2):
                b.begin("")
                b.end()
            memory.high = high
            b.begin("")
            self.assertFalse(b.measuring)
            memory.high = peak
            b.end()
            self.assertEqual(measured, b._extra.measured)


if __name__ == "__main__":
    unittest.main()
