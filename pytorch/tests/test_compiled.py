"""Compiled blocks under a budget: each form in which users compile, every plan, and no graph
that ends or is compiled again because of the plug-in. SPEC S8.6."""

import contextlib
import types
import unittest

from blocks import PLANS, Compared, Layer, one_pass, planned, stack, train
from common import runtime, torch
from stowage._planned import RECORDED
from torch import nn

FORMS = ("block.compile()", "torch.compile(block)", "block.forward = torch.compile(block.forward)", "a compiled function as method")


def compile_blocks(model, form, backend="aot_eager", **more):
    """Compiles the blocks of a stack in one of the forms that users have."""
    for i, block in enumerate(model.blocks):
        if form == FORMS[0]:
            block.compile(backend=backend, **more)
        elif form == FORMS[1]:
            model.blocks[i] = torch.compile(block, backend=backend, **more)
        elif form == FORMS[2]:
            block.forward = torch.compile(block.forward, backend=backend, **more)
        else:
            block.forward = types.MethodType(torch.compile(type(block).forward, backend=backend, **more), block)
    return model


NOTHING = types.SimpleNamespace(step=lambda key: contextlib.nullcontext())


def counts():
    """How many graphs were made, and where they ended early."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@unittest.skipUnless(hasattr(nn.Module, "compile"), "this PyTorch has no torch.compile")
class Compiled(Compared):
    def setUp(self):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    def both(self, make, under, steps=RECORDED + 3):
        """Trains a model of make() without the plug-in and one under a runtime. Returns the
        names of its units and how many graphs there were before each step, and after all."""
        want = train(make(), one_pass, steps, NOTHING)
        self.setUp()
        model, made = make(), []

        def step(model, i):
            made.append(counts()[0])
            return one_pass(model, i)

        with under(model) as rt:
            self.compare(want, train(model, step, steps, rt))
            made.append(counts()[0])
            self.assertEqual({}, counts()[1])
            return [u.name for u in rt._planner.units.list], made


class Exact(Compiled):
    def test_every_form_and_plan(self):
        """A compiled block is one unit. Its graphs are there when the first step is over, or the
        first that recomputes without gradients."""
        for form in FORMS:
            for name in PLANS:
                with self.subTest(form=form, plan=name):
                    units, made = self.both(lambda: compile_blocks(stack(Layer, 3), form), lambda model: planned(model, name))
                    self.assertEqual(["blocks.0", "blocks.1", "blocks.2"], units)
                    self.assertEqual(made[RECORDED], made[-1], "compiled again")


class Inside(Compiled):
    """A model that is compiled as a whole."""

    def test_what_torch_compile_returned(self):
        units, made = self.both(lambda: torch.compile(stack(Layer, 3), backend="aot_eager"), attached)
        self.assertEqual([], units)
        self.assertEqual(made[1], made[-1], "compiled again")

    def test_the_model_itself_is_attached(self):
        """Its graph ends at blocks while steps are recorded, so that sums may be in another order;
        then it is left alone."""
        model = stack(Layer, 3)
        whole = torch.compile(model, backend="aot_eager")
        want = train(model, lambda _, i: one_pass(whole, i), RECORDED + 3, NOTHING)
        self.setUp()
        model = stack(Layer, 3)
        whole = torch.compile(model, backend="aot_eager")
        with runtime("budget") as rt:
            rt.attach(model)
            got = train(model, lambda _, i: one_pass(whole, i), RECORDED + 3, rt)
            for a, b in zip(want, got):
                for x, y in zip(a, b):
                    torch.testing.assert_close(x, y, check_device=False)
            self.assertEqual({}, rt._planner.units._wrapped)
            self.assertIn("it is inside of a function that is compiled", rt.report())


@contextlib.contextmanager
def attached(model):
    with runtime("budget") as rt:
        rt.attach(model)
        yield rt


if __name__ == "__main__":
    unittest.main()
