"""The peak of the process in every step, with an allocator that counts real tensors. SPEC S8.6."""

import contextlib
import gc
import unittest
import warnings
import weakref
from unittest import mock

from blocks import Layer, choices, force
from common import DEVICE, runtime, same, stowage, torch
from stowage import _planned, _step
from stowage._errors import TooSmall
from stowage._plan import best
from stowage._planned import RECORDED
from stowage._record import Weak, storage_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint


class Allocator(TorchDispatchMode):
    """The memory of a device: the bytes of all storages that operators made and that are alive."""

    includes_saved = True

    def __init__(self, model):
        super().__init__()
        self.storages, self.now, self.high, self.most = {}, 0, 0, 0
        for t in [*model.parameters(), *model.buffers()]:
            self.add(t)

    def add(self, t):
        s = storage_of(t)
        if s._cdata not in self.storages:
            self.storages[s._cdata] = Weak(s), s.nbytes()
            self.now += s.nbytes()
            self.high, self.most = max(self.high, self.now), max(self.most, self.now)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.allocated()
        for t in tree_flatten(out)[0]:
            if isinstance(t, torch.Tensor):
                self.add(t)
        return out

    def allocated(self):
        for at in [at for at, (weak, _) in self.storages.items() if torch.UntypedStorage._expired(weak.of)]:
            self.now -= self.storages.pop(at)[1]
        return self.now

    def peak(self):
        return self.high

    def reset(self):
        self.high = self.allocated()


class Block(nn.Module):
    """A norm, two matrices and a residual. On the CPU, PyTorch 1.13 does not cast for norms."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x.float()))))


class Wide(nn.Module):
    """Saves one tensor three times and many bytes beside its input, so that two calls of it are much memory."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 9 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        a, b, c = self.up(x).chunk(3, -1)
        return x + self.down(torch.sigmoid(a) * torch.tanh(b) * c)


class Model(nn.Module):
    def __init__(self, make, count, width):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(width, width), nn.ModuleList(make(width) for _ in range(count)), nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@unittest.skipUnless(DEVICE == "cpu", "the allocator counts tensors of the CPU")
class Peaks(unittest.TestCase):
    """Plans that offload keep to the budget from their first step on. Blocks are larger than the pieces in
    which the library is told of what a recorded step saves, as they are on a GPU."""

    def steps(self, make, count, width, batch, share, autocast):
        torch.manual_seed(1)
        model, x = Model(make, count, width), torch.randn(batch, 16, width)
        memory = Allocator(model)

        def step():
            with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = model(x).float().square().mean()
            loss.backward()

        def peak():
            memory.most = memory.allocated()
            step()
            model.zero_grad(set_to_none=True)
            return memory.most

        with memory, mock.patch.object(_step, "PIECE", 16384), mock.patch.object(_planned, "WORTH", 1e9):  # which tries plans that offload
            base = memory.allocated()
            size = int(base + share * (peak() - base))
            with runtime("budget", budget=size, memory=memory) as rt:
                rt.attach(model)
                offloads = 0
                for i in range(18):
                    known = rt._planner.keys.get("")
                    plan = known.plan if known is not None else None
                    memory.most = 0
                    with rt.step():
                        step()
                    model.zero_grad(set_to_none=True)
                    offloads += plan is not None and plan.offloads
                    stage = "recorded" if plan is None else known.stage
                    self.assertLessEqual(memory.most, size, f"step {i}, {stage}, {memory.most / size:.3f} of the budget")
                    self.assertLessEqual(memory.most, max(rt.stats()["budget"]["last"], base))
                    if offloads > 3:
                        break
                self.assertGreater(offloads, 2)

    def test_weights_that_are_cast(self):
        self.steps(Block, 10, 64, 16, 0.7, True)

    def test_many_weights_that_are_cast(self):
        self.steps(Block, 8, 128, 16, 0.8, True)

    def test_parts_of_blocks(self):
        self.steps(Layer, 4, 32, 16, 0.6, False)

    def test_blocks_that_are_large(self):
        """Recomputing all blocks is a plan wherever it fits, however little room there is to try it."""
        torch.manual_seed(1)
        model, x = Model(Wide, 8, 32), torch.randn(16, 16, 32)
        memory = Allocator(model)

        def peak(run):
            memory.most = memory.allocated()
            run(model, x).square().mean().backward()
            model.zero_grad(set_to_none=True)
            return memory.most

        def recomputed(model, x):
            x = model.first(x)
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return model.last(x)

        with memory, mock.patch.object(_step, "PIECE", 16384), mock.patch.object(_planned, "WORTH", 0.0):
            peak(Model.forward)
            least = peak(recomputed)
            for more in (1.03, 1.06, 1.12, 1.25, 1.5):
                memory.reset()
                with self.subTest(more=more), runtime("budget", budget=int(more * least), memory=memory) as rt:
                    rt.attach(model)
                    for i in range(10):
                        with rt.step():
                            most = peak(Model.forward)
                        self.assertLessEqual(most, rt._budget.size, i)
                    self.assertEqual([], rt._planner.notes())
                    plan = rt._planner.keys[""].plan
                    self.assertFalse(plan.offloads)
                    self.assertIn(sum(c.whole for c in plan.choices.values()), range(1, 9))

    def test_graphs_that_are_retained(self):
        """What a retained graph saves comes back with the first backward pass and stays, so that offloading it frees nothing."""
        torch.manual_seed(1)
        model, x = Model(Block, 6, 32), torch.randn(16, 16, 32)
        memory = Allocator(model)

        def twice():
            out = model(x)
            out.square().mean().backward(retain_graph=True)
            out.abs().mean().backward()

        def some():
            """The second loss is one of the last block alone."""
            h = model.first(x)
            for block in model.blocks[:-1]:
                h = block(h)
            h = model.blocks[-1](h)
            loss = model.last(h).square().mean()
            loss.backward(retain_graph=True)
            torch.autograd.grad(h.abs().mean(), list(model.blocks[-1].parameters()), allow_unused=True)

        for step in (twice, some):
            for share in (0.5, 0.8):
                with self.subTest(step=step.__name__, share=share), memory, mock.patch.object(_step, "PIECE", 16384), mock.patch.object(_planned, "WORTH", 1e9):
                    base = memory.most = memory.allocated()
                    step()
                    model.zero_grad(set_to_none=True)
                    size = int(base + share * (memory.most - base))
                    memory.reset()
                    with runtime("budget", budget=size, memory=memory) as rt:
                        rt.attach(model)
                        for i in range(12):
                            planned = i >= RECORDED
                            memory.most = 0
                            with rt.step():
                                step()
                            model.zero_grad(set_to_none=True)
                            if planned:
                                self.assertLessEqual(memory.most, size, f"step {i}, {memory.most / size:.3f} of the budget")

    def test_forecasts_that_are_too_high(self):
        """They say that no plan fits that only recomputes, and the solver finds one among those that may offload. What it leaves is
        given by what is no longer dropped, whatever the solver says of a higher limit."""
        torch.manual_seed(1)
        model, x = Model(Block, 12, 32), torch.randn(16, 16, 32)
        memory = Allocator(model)

        def step():
            model(x).square().mean().backward()

        with memory:
            base = memory.most = memory.allocated()
            step()
            model.zero_grad(set_to_none=True)
            size = int(base + 0.7 * (memory.most - base))
            memory.reset()
            with runtime("budget", budget=size, memory=memory) as rt:
                asked = []
                force(rt, lambda _: "whole" if len(asked) == 1 else "keep")
                forced = rt._library.choose

                def choose(request):
                    if request["offload"]:
                        asked.append(request["limit"])
                    return forced(request)

                rt._library.choose = choose
                rt.attach(model)
                held = []
                for i in range(12):
                    memory.most = 0
                    with rt.step():
                        step()
                    model.zero_grad(set_to_none=True)
                    if i >= RECORDED:
                        held.append(memory.most)
                self.assertLessEqual(max(held), size, [f"{n / size:.3f}" for n in held])
                self.assertGreater(held[-1], held[0], "nothing of the rest was given")
                self.assertFalse(rt._planner.keys[""].plan.offloads)

    def test_temporaries_that_grow(self):
        """As those of experts do that get more rows: a step that exceeds the budget is noticed at once, settled
        or not, and the next ones keep to it."""
        for at in (3, 14):
            torch.manual_seed(1)
            model, x = Model(Block, 6, 32), torch.randn(16, 16, 32)
            memory = Allocator(model)

            def step(more):
                memory.most = memory.allocated()
                held = torch.zeros(more)
                model(x).square().mean().backward()
                del held
                model.zero_grad(set_to_none=True)
                return memory.most

            with memory, mock.patch.object(_planned, "WORTH", 0.0):
                base, most = memory.allocated(), step(1)
                memory.reset()
                with runtime("budget", budget=int(base + 0.7 * (most - base)), memory=memory) as rt:
                    rt.attach(model)
                    size, more, peaks = rt._budget.size, 0, []
                    for i in range(at + 6):
                        if i == at:
                            more = (size - peaks[-1]) // 4 + size // 64
                            self.assertEqual("settled" if at > 3 else "recompute", rt._planner.keys[""].stage)
                        with rt.step():
                            peaks.append(step(more))
                    self.assertEqual([i == at for i in range(at + 6)], [peak > size for peak in peaks], [round(peak / size, 3) for peak in peaks])
                    self.assertEqual(0, rt._budget.outside)
                    self.assertGreater(rt._planner.keys[""].over, 0)


@unittest.skipUnless(DEVICE == "cpu", "the allocator counts tensors of the CPU")
class LastResort(unittest.TestCase):
    """No plan keeps to the budget by forecasts. SPEC S8.6."""

    def steps(self, share, more, kept=False, count=RECORDED + 6):
        """Runs steps, each of which holds so many more bytes than the recorded ones, as a share of the budget. Returns the
        peaks as a share of it, the warnings, and gradients that differ from those without a runtime. Where they
        are kept, a forecast finds the first plan."""
        torch.manual_seed(1)
        model, x = Model(Block, 6, 32), torch.randn(16, 16, 32)
        memory, peaks = Allocator(model), []

        def step(more):
            memory.most = memory.allocated()
            held = torch.zeros(int(more))
            model(x).square().mean().backward()
            del held
            gradients = [p.grad for p in model.parameters()]
            model.zero_grad(set_to_none=True)
            return memory.most, gradients

        plans = []

        def none(*args, **more):
            if kept and not plans:
                plans.append(best(*args, **more))
                return plans[0]
            raise TooSmall("no plan", 1 << 40)

        with memory, warnings.catch_warnings(record=True) as said, mock.patch.object(_planned, "best", none):
            warnings.simplefilter("always")
            base, (most, want) = memory.allocated(), step(1)
            memory.reset()
            with runtime("budget", budget=int(base + share * (most - base)), memory=memory) as rt:
                rt.attach(model)
                for i in range(count):
                    with rt.step():
                        peak, got = step(more(i) * rt._budget.size / 4 + 1)
                    peaks.append(peak / rt._budget.size)
                    self.assertTrue(all(map(same, want, got)))
                self.assertIn("recompute", set(choices(rt).values()))
        return peaks, [str(w.message) for w in said if "budget" in str(w.message)]

    def test_forecasts_that_are_wrong(self):
        """Everything is recomputed, and the run goes on."""
        peaks, said = self.steps(0.7, lambda i: 0)
        self.assertLessEqual(max(peaks[RECORDED:]), 1)
        self.assertEqual([], said)

    def test_steps_that_grow(self):
        """A run does not end for a step that exceeds the budget. It is told of once."""
        for kept in (False, True):
            peaks, said = self.steps(0.7, lambda i: (i > RECORDED + 1) * 0.5, kept)
            self.assertLessEqual(max(peaks[RECORDED : RECORDED + 2]), 1)
            self.assertGreater(peaks[-1], 1)
            self.assertEqual(1, len(said), said)
            self.assertRegex(said[0], "needs at least .* the steps go on")

    def test_a_budget_that_nothing_keeps_to(self):
        with self.assertRaisesRegex(stowage.BudgetError, "too small: this step needs at least") as raised:
            self.steps(0.7, lambda i: (i >= RECORDED) * 0.5)
        self.assertGreater(raised.exception.least, raised.exception.budget)

    def test_plans_that_fail_hold_no_tensors(self):
        """The error of a plan that fails has frames of the user, and they have tensors: it is not kept."""
        gc.collect()
        gc.disable()
        try:
            torch.manual_seed(1)
            model, held = Model(Block, 6, 32), []

            def step(rt):
                loss = model(torch.randn(16, 16, 32)).square().mean()
                loss.backward()
                held.append(weakref.ref(loss))

            def outer(rt):
                x = torch.zeros(1)
                held.append(weakref.ref(x))
                with rt.step():
                    step(rt)

            for size in range(300, 700, 50):  # with some there is no plan that only recomputes, or none at all
                with runtime("budget", budget=size << 10) as rt:
                    rt.attach(model)
                    for _ in range(RECORDED + 3):
                        try:
                            outer(rt)
                        except stowage.BudgetError:
                            break
                        model.zero_grad(set_to_none=True)
                        self.assertFalse([w for w in held if w() is not None], size)
        finally:
            gc.enable()


if __name__ == "__main__":
    unittest.main()
