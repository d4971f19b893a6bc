"""Compiled blocks beside themselves with smaller budgets. The compiler is played: a block that saves less is any function."""

import random
import types
import unittest
from unittest import mock

from common import DEVICE, torch
from stowage import _smaller
from stowage._again import state
from stowage._errors import Error
from stowage._inputs import IN_PLACE, Inputs
from stowage._record import storage_of
from stowage._smaller import OutOfMemory, Smaller, compare
from stowage._surroundings import Random, Surroundings
from test_reports import Thing
from torch import nn
from zoo import leaf

CPU = torch.device("cpu")


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


class Tanh(torch.autograd.Function):
    """The tangent of one, saved as so many tensors of its size."""

    @staticmethod
    def forward(ctx, x, many, off):
        y = x.tanh()
        ctx.save_for_backward(*(y + 0 for _ in range(many)))
        ctx.off = off
        return y * 1

    @staticmethod
    def backward(ctx, g):
        (y, *_) = ctx.saved_tensors
        return g * (1 - y * y) * (1 + ctx.off), None, None


class Compare(unittest.TestCase):
    def setUp(self):
        self.linear = nn.Linear(8, 8)
        self.ticks = iter(range(10**6))

    def form(self, many, out=0.0, back=0.0):
        """Returns a form of the block that saves so many tensors, and how far off it is."""

        def forward(x):
            self.ran.append((many, state.again))
            y = Tanh.apply(self.linear(x), many, back)
            return y + out

        return forward

    def run_compare(self, forms, own=None, budgets=(0.5, 0.25, 0.1), refused=(), module=None, exact=True, enough=2.0, saves=True):
        self.ran, self.compiled = [], []
        unit = Thing(kind=Tanh, module=module or self.linear, smaller={})
        x = leaf(4, 8)
        own = own or self.form(4)
        call = Thing(unit=unit, again=(own, Inputs(IN_PLACE, (x,), {})), all=[1] if saves else [], random=Random(CPU), around=Surroundings())
        clock = types.SimpleNamespace(fill=lambda: None, stamp=lambda: next(self.ticks))
        p = types.SimpleNamespace(device=CPU, weights={storage_of(w)._cdata for w in self.linear.parameters()}, budgets=budgets, not_smaller=dict.fromkeys(refused, "before"), smaller={b: {} for b in budgets}, exact=exact, enough=enough, clock=clock)

        def with_budget(forward, b):
            self.assertIs(own, forward)
            self.compiled.append(b)
            if isinstance(forms[b], Exception):
                raise forms[b]
            return forms[b]

        before, numbers = state.again, torch.get_rng_state()
        with mock.patch.object(_smaller, "with_budget", with_budget):
            try:
                compare(p, call)
            finally:
                self.assertEqual(before, state.again)
                self.assertTrue(torch.equal(numbers, torch.get_rng_state()))
        self.assertEqual({1}, {again for _, again in self.ran} or {1})
        return {b: of[call] for b, of in p.smaller.items() if call in of}, {b: why for (_, b), why in p.not_smaller.items()}

    def test_figures(self):
        made, refused = self.run_compare({0.5: self.form(2), 0.25: self.form(1), 0.1: self.form(4)})
        self.assertEqual(({}, [0.5, 0.25, 0.1]), (refused, self.compiled))
        size = 4 * 8 * 4
        self.assertEqual({0.5: (4 * size, 2 * size), 0.25: (4 * size, 3 * size), 0.1: (4 * size, 0)}, {b: (s.saved, s.dropped) for b, s in made.items()})
        self.assertEqual([4] * 2 + [2] * 2 + [1] * 2 + [4] * 2, [many for many, _ in self.ran])
        self.assertEqual([(2, 3)] * 3, [s.before for s in made.values()])  # of the second time
        self.assertEqual([(6, 7), (10, 11), (14, 15)], [s.after for s in made.values()])
        self.assertEqual((0.5, 0.0), (made[0.5].share, Smaller(0, 0, (0, 1), (0, 1)).share))

    def test_outputs_are_not_counted(self):
        """They stay for the next block in any case."""
        form = lambda x: self.linear(x).exp().tanh()  # each saves its result
        made, refused = self.run_compare({0.5: form}, own=form, budgets=(0.5,))
        self.assertEqual(({}, 4 * 8 * 4, 0), (refused, made[0.5].saved, made[0.5].dropped))

    def test_more_is_not_less(self):
        made, _ = self.run_compare({0.5: self.form(9)}, budgets=(0.5,))
        self.assertEqual(0, made[0.5].dropped)

    def test_as_many_values(self):
        """One output or one gradient less are other values, whatever the rest is."""
        two = lambda x: (self.linear(x).tanh(), x * 2)
        for form, why in ((two, None), (lambda x: two(x)[:1], "it makes other values"), (lambda x: (self.linear(x).tanh(), x.detach() * 2), "it makes other values"), (lambda x: (nn.functional.linear(x, self.linear.weight, self.linear.bias.detach()).tanh(), x * 2), "its outputs are right and its gradients are not, as if its backward pass drew other random numbers")):
            _, refused = self.run_compare({0.5: form}, own=two, budgets=(0.5,))
            self.assertEqual(why, refused.get(0.5))

    def test_until_two_drop_enough(self):
        for enough, tried in ((0.75, [0.5, 0.25, 0.1]), (0.5, [0.5, 0.25]), (0.0, [0.5, 0.25])):
            made, _ = self.run_compare({0.5: self.form(2), 0.25: self.form(1), 0.1: self.form(1)}, enough=enough)
            self.assertEqual((tried, tried), (list(made), self.compiled))

    def test_refused(self):
        """What fails or makes other values is, with the budgets below it."""
        good, far, bits = self.form(2), self.form(2, out=1.0), self.form(2, out=1e-6)
        values, gradients, rounds = "it makes other values", "its outputs are right and its gradients are not, as if its backward pass drew other random numbers", "it makes other bits; exact=False allows that"
        for form, why in ((far, values), (self.form(2, back=1.0), gradients), (bits, rounds), (self.form(2, back=1e-6), rounds), (ArithmeticError("of the \n compiler"), "ArithmeticError: of the compiler"), (Error("a sentence"), "a sentence")):
            made, refused = self.run_compare({0.5: good, 0.25: form, 0.1: good})
            self.assertEqual(([0.5], {0.25: why}, [0.5, 0.25]), (list(made), refused, self.compiled))
        made, refused = self.run_compare({0.5: bits, 0.25: far, 0.1: good}, exact=False)
        self.assertEqual(([0.5], {0.25: values}), (list(made), refused))
        made, refused = self.run_compare({0.5: good}, refused=[(Tanh, 0.25), (nn.Linear, 0.5)])
        self.assertEqual(([0.5], [0.5]), (list(made), self.compiled))
        for more in ({"refused": [(Tanh, 0.5)]}, {"saves": False}, {"budgets": ()}):
            self.assertEqual({}, self.run_compare({}, **more)[0])
            self.assertEqual(([], []), (self.compiled, self.ran))

    def test_the_block_itself_fails(self):
        def fail(x):
            raise KeyError("of the block")

        made, refused = self.run_compare({}, own=fail)
        self.assertEqual(({}, {0.5: "KeyError: 'of the block'"}, []), (made, refused, self.compiled))
        made, refused = self.run_compare({}, own=lambda x: self.linear(x).detach())
        self.assertEqual({0.5: "its outputs are not known, so that nothing can be compared"}, refused)

    def test_memory_that_runs_out(self):
        """It says nothing of the block."""
        for forms, own in (({0.5: OutOfMemory()}, None), ({}, mock.Mock(side_effect=OutOfMemory()))):
            with self.assertRaises(OutOfMemory):
                self.run_compare(forms, own=own)

    def test_side_effects(self):
        hooked, weight, plain = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        hooked.register_full_backward_hook(lambda *_: None)
        weight.weight.register_hook(lambda g: g)
        plain.register_forward_hook(lambda *_: None)
        for module, why in ((hooked, "it has hooks in its backward pass"), (weight, "it has hooks in its backward pass"), (plain, "")):
            self.assertEqual(why, _smaller.side_effects(module))
            _, refused = self.run_compare({b: self.form(2) for b in (0.5, 0.25, 0.1)}, module=module)
            self.assertEqual({0.5: why} if why else {}, refused)

    def test_outputs_that_vary(self):
        """What a block makes otherwise each time is not compared bit for bit."""
        noise = random.Random(1)

        def varies(many):
            def forward(x):
                self.ran.append((many, state.again))
                y = Tanh.apply(self.linear(x), many, 0.0)
                return y * (1 + 1e-6 * noise.random()), y + 0

            return forward

        made, refused = self.run_compare({0.5: varies(2)}, own=varies(4), budgets=(0.5,))
        self.assertEqual(([0.5], {}), (list(made), refused))

    def test_running_means(self):
        """They are counted once, by the first pass."""
        norm = nn.BatchNorm1d(8)
        before = norm.running_mean.clone()
        self.run_compare({0.5: lambda x: norm(x)}, own=lambda x: norm(x), budgets=(0.5,), module=norm)
        self.assertTrue(torch.equal(before, norm.running_mean))


if __name__ == "__main__":
    unittest.main()
