"""Blocks and cheap modules that keep something, draw from random numbers of their own, or whose
weights are not what they were: second passes change nothing that anybody sees."""

import unittest

import torch
from blocks import Compared, Layer, one_pass, planned, refused, stack, train
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

                self.assertFalse(self.every_plan(stack(Block)))


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

        self.assertFalse(self.every_plan(stack(Gated)))


if __name__ == "__main__":
    unittest.main()
