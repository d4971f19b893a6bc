"""Blocks and cheap modules that keep something, draw from random numbers of their own, or whose
weights are not what they were: second passes change nothing that anybody sees."""

import copy
import gc
import random
import unittest
import weakref

import torch
from blocks import Block, Compared, Layer, Stack, choices, one_pass, planned, refused, stack, train, why
from common import runtime
from stowage import _again, _surroundings
from stowage._planned import RECORDED
from torch import nn

PLANS = ["lean", "whole", "offload", "lean, offload"]


class Around(nn.Module):
    """A block around a module without matrices."""

    def __init__(self, inner):
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 8), inner(), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.down(self.inner(self.up(x)))


class State(Compared):
    def every_plan(self, model, step=one_pass, steps=5, plans=PLANS, prepare=lambda model: None):
        """Compares steps under every plan with plain ones. Returns why something is not recomputed."""
        prepare(model)
        want, reasons = train(model, step, steps), {}
        start = {name: t.clone() for name, t in model.state_dict().items()}
        for plan in plans:
            with self.subTest(plan=plan):
                model.load_state_dict(start)
                prepare(model)
                with planned(model, plan) as rt:
                    self.compare(want, train(model, step, steps, rt))
                    reasons.update(refused(rt))
        return reasons


class Numbers(State):
    def test_whole_numbers_that_change_before_the_backward_pass(self):
        """Autograd saves them, and they are no seeds of an attention's dropout."""

        class Times(Block):
            times = 1

            def forward(self, x):
                return super().forward(x) * self.times

        def step(model, i):
            for times in (2, 3):
                for block in model.blocks:
                    block.times = times
                if times == 2:
                    loss = model(torch.randn(3, 4, 8)).square().mean()
            loss.backward()
            return loss

        self.every_plan(stack(Times), step)


class Arguments(State):
    def test_an_argument_that_is_written_before_the_backward_pass(self):
        """Autograd does not need a bias that is added, and a library may have copied it before."""
        bias = torch.zeros(4, 8)

        class Biased(Block):
            def forward(self, x, bias):
                return super().forward(x + bias)

        class Model(Stack):
            def forward(self, x):
                x = self.first(x)
                for block in self.blocks:
                    x = block(x, bias)
                return self.last(x)

        def step(model, i):
            bias.fill_(0.5)
            loss = model(torch.randn(3, 4, 8)).square().mean()
            bias.fill_(i)
            loss.backward()
            return loss

        torch.manual_seed(1)
        model = Model(*(Biased() for _ in range(3)))
        want = train(model, step, 5)
        start = copy.deepcopy(model.state_dict())
        for seed in range(6):
            model.load_state_dict(start)
            with self.subTest(seed=seed), planned(model, "whole", kind=f"fake-{seed}") as rt:
                self.compare(want, train(model, step, 5, rt))
                self.assertEqual({"its input is written before it could run again"}, set(why(rt).values()))


class Freed(State):
    def test_models_that_keep_outputs_without_a_backward_pass(self):
        """What a graph holds must not lead to a module that holds the graph: the collector does not see it."""

        class Keeps(Block):
            def forward(self, x):
                self.out = super().forward(x)
                return self.out

        class Lists(Block):
            def __init__(self):
                super().__init__()
                self.outs = []

            def forward(self, x):
                self.outs[:] = [super().forward(x)]
                return self.outs[0]

        def hooked():
            block = Block()
            for m in block.children():
                m.register_forward_hook(lambda m, args, out: setattr(m, "seen", out))
            return block

        for make in (Keeps, Lists, hooked):
            for plan in ("keep", *PLANS, "whole, offload"):
                for steps in (0, 1, RECORDED, RECORDED + 1):
                    with self.subTest(make=make.__name__, plan=plan, steps=steps):
                        model = stack(make, 2)
                        with planned(model, plan) as rt:
                            train(model, one_pass, steps, rt)
                            with rt.step():
                                model(torch.randn(3, 4, 8))
                        left = weakref.WeakSet(model.modules())
                        del model, rt
                        gc.collect()
                        self.assertEqual([], list(left))

    def test_a_recomputed_block_after_its_step(self):
        model = stack()
        with planned(model) as rt:
            train(model, one_pass, RECORDED + 1, rt)
            with rt.step():
                loss = model(torch.randn(3, 4, 8)).sum()
            with self.assertRaisesRegex(RuntimeError, "needed after its step; call backward"):
                loss.backward()


class Marks(State):
    def test_views_of_the_input_of_a_cheap_module(self):
        """Autograd saves the same memory, marked as a conjugate or as negative."""

        class Conjugate(nn.Module):
            def forward(self, z):
                return z.conj() * z + z.conj().exp()

        class Negative(nn.Module):
            def forward(self, z):
                return z * z.conj().imag * z.conj().imag.exp()

        for inner in (Conjugate, Negative):
            with self.subTest(inner.__name__):

                class Block(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.up, self.inner, self.down = nn.Linear(8, 8), inner(), nn.Linear(8, 8)

                    def forward(self, x):
                        z = torch.view_as_complex(self.up(x).view(*x.shape[:-1], 4, 2))
                        return x + self.down(torch.view_as_real(self.inner(z * 0.3)).flatten(-2))

                self.assertFalse(self.every_plan(stack(Block, 2)))


class Parts(State):
    def test_products_of_a_block_beside_its_parts(self):
        """The backward pass of a part begins first, and the product reads what the block saved."""

        class Gated(Layer):
            def __init__(self):
                super().__init__()
                self.scale, self.gate = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

            def forward(self, x):
                x = x + self.attention(self.norm(x))
                return x + self.mlp((self.scale(x) * x.sigmoid()) @ self.gate)

        self.assertFalse(self.every_plan(stack(Gated, 2)))

    def test_blocks_that_call_themselves(self):
        class Calls(Block):
            def forward(self, x, depth=2):
                y = super().forward(x)
                return y if depth == 0 else self(y, depth - 1) + y

        class Borrows(nn.Module):
            """Another block, which is one of the model itself."""

            def __init__(self, other):
                super().__init__()
                self.other, self.last = other, nn.Linear(8, 8)

            def forward(self, x):
                return self.last(self.other(x))

        self.assertFalse(self.every_plan(stack(Calls, 2), plans=[*PLANS, "whole, offload"]))
        lent = [Block(), Block()]
        self.assertFalse(self.every_plan(Stack(*lent, *map(Borrows, lent)), plans=[*PLANS, "whole, offload"]))


class Keeps(State):
    """Modules without matrices, alone and in blocks, which keep something between their calls."""

    def check(self, inner, why, **more):
        reasons = self.every_plan(stack(lambda: Around(inner), 2), **more)
        self.assertEqual({why}, set(reasons.values()))

    def test_buffers(self):
        class Running(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("most", torch.ones(()))

            def forward(self, x):
                with torch.no_grad():
                    self.most.mul_(0.9).add_(0.1 * x.abs().max())
                return torch.tanh(x / self.most) * x

        self.check(Running, "it changes its buffers")

    def test_tensors_that_are_written(self):
        class Running(nn.Module):
            def forward(self, x):
                self.most.mul_(0.9).add_(0.1 * x.detach().abs().max())
                return torch.tanh(x / self.most.clone()) * x

        self.check(Running, "it writes to its attribute 'most'", prepare=lambda model: [setattr(b.inner, "most", torch.ones(())) for b in model.blocks])

    def test_tensors_that_are_replaced(self):
        class Running(nn.Module):
            def forward(self, x):
                self.most = 0.9 * self.most + 0.1 * x.detach().abs().max()
                return torch.tanh(x / self.most) * x

        reasons = self.every_plan(stack(lambda: Around(Running), 2), prepare=lambda model: [setattr(b.inner, "most", torch.ones(())) for b in model.blocks])
        self.assertRegex(reasons["blocks.0"], "makes other values")

    def test_tensors_that_only_others_read(self):
        """They are counted once, and the block is recomputed."""

        class Counts(Block):
            def forward(self, x):
                out = super().forward(x)
                self.loss, self.seen["sum"] = out.square().mean(), self.seen["sum"] + out.detach().sum()
                return out

        def step(model, i):
            loss = model(torch.randn(3, 4, 8)).square().mean() + sum(b.loss for b in model.blocks)
            read = [b.loss for b in model.blocks]
            loss.backward()
            self.assertTrue(all(b.loss is t for b, t in zip(model.blocks, read)))
            return [loss, *(b.seen["sum"] for b in model.blocks)]

        def prepare(model):
            for b in model.blocks:
                b.loss, b.seen = None, {"sum": torch.zeros(())}

        self.assertFalse(self.every_plan(stack(Counts, 2), step, prepare=prepare))

    def test_objects_that_are_given(self):
        class Board:
            def __init__(self, x):
                self.x, self.sums = x, []

        class Writes(Block):
            def forward(self, board):
                board.x = super().forward(board.x)
                board.sums.append(board.x.sum())
                return board

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(Writes() for _ in range(3))

            def forward(self, x):
                board = Board(x)
                for block in self.blocks:
                    board = block(board)
                return board

        def step(model, i):
            board = model(torch.randn(3, 4, 8))
            (board.x.square().mean() + sum(board.sums)).backward()
            return [board.x, *board.sums]

        self.assertEqual({"it writes to its input"}, set(self.every_plan(Model(), step).values()))


class Draws(State):
    def check(self, draw, why, prepare):
        class Cheap(nn.Module):
            def forward(self, x):
                return torch.tanh(x) * x * draw(self)

        class Depth(Block):
            def forward(self, x):
                return super().forward(x) if draw(self) > 0.1 else x

        def step(model, i):
            loss = one_pass(model, i)
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # of blocks that were left out
            return loss

        for make in (lambda: Around(Cheap), Depth):
            self.assertEqual({why}, set(self.every_plan(stack(make, 2), step, steps=8, prepare=prepare).values()))

    def test_python(self):
        self.check(lambda _: random.random(), "it draws from Python's random numbers", lambda _: random.seed(1))

    def test_numpy(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("there is no NumPy")
        self.check(lambda _: numpy.random.rand(), "it draws from NumPy's random numbers", lambda _: numpy.random.seed(1))
        own = lambda model: [setattr(m, "own", numpy.random.default_rng(1)) for m in model.modules()]
        self.check(lambda m: m.own.random(), "it draws from a generator", own)

    def test_generators(self):
        own = lambda model: [setattr(m, "own", random.Random(1)) for m in model.modules()]
        self.check(lambda m: m.own.random(), "it draws from a generator", own)
        given = torch.Generator().manual_seed(1)
        draws = _surroundings.Draws([given])
        self.assertEqual("", draws.drawn())
        first = torch.rand(3, generator=given)
        self.assertEqual("a generator", draws.drawn())
        draws.set()
        self.assertTrue(torch.equal(first, torch.rand(3, generator=given)))


class Weights(State):
    def test_functional_call(self):
        """Weights that a module has for one call, equal to its own in recorded steps."""
        call = torch.func.functional_call if hasattr(torch, "func") else torch.nn.utils.stateless.functional_call

        class Tuned(nn.Module):
            def __init__(self):
                super().__init__()
                self.base = stack(Layer, 2)
                self.more = nn.ParameterList(nn.Parameter(torch.zeros_like(p)) for p in self.base.parameters())

            def forward(self, x):
                return call(self.base, {name: p + more for (name, p), more in zip(self.base.named_parameters(), self.more)}, (x,))

        def step(model, i):
            loss = one_pass(model, i)
            if i > 1:
                with torch.no_grad():
                    for p in model.more:
                        p += 0.01
            else:
                model.more.zero_grad()
            return loss

        self.assertFalse(self.every_plan(Tuned(), step))

    def test_modules_are_what_they_were_and_are_again(self):
        """For a second pass, whether it ends well or not: their weights, as functional_call of PyTorch 2 exchanges them, their mode and their class."""

        class Other(nn.Linear):
            pass

        m = nn.Linear(3, 3)
        own, lent, bias = m.weight, nn.Parameter(torch.ones(3, 3)), m.bias
        m._parameters["weight"], m.training, m.__class__ = lent, False, Other
        then = [_surroundings.mode_of(m)]
        m._parameters["weight"], m.training, m.__class__ = own, True, nn.Linear

        def is_now(weight, training, kind):
            self.assertIs(weight, m.weight)
            self.assertIs(bias, m.bias)
            self.assertEqual((training, kind), (m.training, type(m)))

        with _surroundings.modes_again(then):
            is_now(lent, False, Other)
        is_now(own, True, nn.Linear)
        with self.assertRaises(KeyError), _surroundings.modes_again(then):
            is_now(lent, False, Other)
            raise KeyError
        is_now(own, True, nn.Linear)
        self.assertIs(_surroundings.AS_IT_IS, _surroundings.modes_again([_surroundings.mode_of(m)]))

    @unittest.skipIf(_again.STOPS, "a script turns what ends a second pass into another exception, so blocks with scripts are kept")
    def test_scripted_modules(self):
        """Their weights are in another kind of dictionary."""

        class Scripted(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.f = torch.jit.script(nn.LayerNorm(8)), torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))

            def forward(self, x):
                return x + self.f(self.norm(x))

        model = stack(Scripted, 2)
        for i in range(3):  # first runs of scripts save other tensors
            one_pass(model, i)
        with planned(model) as rt:
            train(model, one_pass, 4, rt)
            self.assertEqual({}, refused(rt))
            self.assertEqual({"recompute"}, set(choices(rt).values()))

    def test_written_in_the_backward_pass(self):
        """An optimiser that runs when a gradient is there: that of a last bias comes before anything saved is asked for."""

        class Last(Block):
            def __init__(self):
                super().__init__()
                self.bias = nn.Parameter(torch.randn(8))

            def forward(self, x):
                return super().forward(x) + self.bias

        def prepare(model):
            for p in model.parameters():
                node = p.expand_as(p).grad_fn.next_functions[0][0]
                node.register_hook(lambda *_, p=p: update(p))
                nodes.append(node)

        @torch.no_grad()
        def update(p):
            p.add_(p.grad, alpha=-0.01)

        def step(model, i):
            if model not in prepared:
                prepare(model)
                prepared.add(model)
            return one_pass(model, i)

        nodes, prepared = [], set()
        for make, why in ((Last, "a weight of it is written in the backward pass before it could run again"), (Block, "")):
            reasons = self.every_plan(stack(make, 2), step)
            self.assertEqual({why} - {""}, set(reasons.values()))


@unittest.skipIf(torch.__version__ < "2", "this PyTorch has no gradients of nested tensors")
class Nested(State):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)

        def forward(self, x):
            n = torch.nested.as_nested_tensor([x[0, :2], x[1, :3], x[2]])
            return x + torch.nested.to_padded_tensor(self.down(self.act(self.up(n))), 0.0, (3, 4, 8))

    def test_they_have_no_size(self):
        """So they stay, and blocks are recomputed."""
        self.assertFalse(self.every_plan(stack(Nested.Block, 2), plans=[*PLANS, "whole, offload"]))

    def test_under_a_policy(self):
        model = stack(Nested.Block, 2)
        want = train(model, one_pass)
        with runtime("offload") as rt:
            rt.attach(model, groups={"blocks.*": "a"})
            self.compare(want, train(model, one_pass, rt=rt))


class Written(State):
    def test_results_without_a_history(self):
        """Of norms and operators, in later steps."""

        class Clips(Block):
            def forward(self, x):
                y = self.norm(x)
                self.clip(y)
                h = torch.nn.functional.silu(self.up(y))
                self.clip(h)
                return x + self.down(h)

            @torch.no_grad()
            def clip(self, t):
                if on:
                    t.clamp_(-0.2, 0.2)

        def step(model, i):
            on[:] = [1] if i > 3 else []
            return one_pass(model, i)

        on = []
        self.assertFalse(self.every_plan(stack(Clips, 2), step, 6))

    def test_operators_in_place(self):
        """They are recomputed, if they were in recorded steps."""

        class Over(Block):
            def forward(self, x):
                return x + self.down(self.up(torch.nn.functional.silu(self.norm(x), inplace=True)))

        model = stack(Over, 2)
        self.assertFalse(self.every_plan(model))
        with planned(model, "lean") as rt:
            train(model, one_pass, 3, rt)
            self.assertIn("SiluBackward0 in place", rt._planner._refused.tried)
            self.assertEqual({"recompute cheap parts"}, set(choices(rt).values()))


if __name__ == "__main__":
    unittest.main()
