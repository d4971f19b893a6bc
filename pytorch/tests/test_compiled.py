"""Compiled blocks under a budget: each form in which users compile, every plan, and no graph
that ends or is compiled again because of the plug-in. SPEC S8.6."""

import contextlib
import functools
import types
import unittest
from unittest import mock

from blocks import PLANS, Block, Compared, Layer, choices, one_pass, planned, stack, train
from common import DEVICE, runtime, stowage, torch
from stowage import _compiled, _planned, _smaller
from stowage._measured import Choice
from stowage._planned import RECORDED
from stowage._profile import Profile
from torch import nn
from torch.utils.checkpoint import checkpoint

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


class Averaging(Block):
    """A block that changes a buffer at every call, and uses it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)))
        return super().forward(x) + self.mean


class Hidden:
    """An output that PyTorch does not look into."""

    def __init__(self, x):
        self.x = x


class Hiding(Block):
    def forward(self, x):
        return Hidden(super().forward(x))


@unittest.skipUnless(hasattr(nn.Module, "compile"), "this PyTorch has no torch.compile")
class Compiled(Compared):
    def setUp(self):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    def both(self, make, under, steps=RECORDED + 3, said=None):
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
            if said is not None:
                said += [*sorted(set(choices(rt).values())), *rt._planner.notes()]
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


class Smaller(Compiled):
    """Blocks that are compiled a second time, with a smaller activation_memory_budget."""

    def both(self, make, name, steps=RECORDED + 3, **more):
        said = []
        with mock.patch.object(_planned.Planner, "_is_tight", lambda planner, known: known.recorded == RECORDED - 1):
            _, made = super().both(make, lambda model: lean(model, name, **more), steps, said)
        self.assertEqual(made[RECORDED], made[-1], "compiled again")
        return said

    def test_every_form(self):
        for form in FORMS:
            for name, want in (("lean", BUDGET), ("lean, offload", BUDGET + ", offload"), ("whole", "recompute")):
                with self.subTest(form=form, plan=name):
                    said = self.both(lambda: compile_blocks(stack(Block, 3), form), name)
                    self.assertRegex(said[0], want)
                    self.assertEqual([], said[1:])

    def test_settings_of_the_user(self):
        """The second graphs have the backend of the first, and are shared by equal blocks."""
        seen = []

        def backend(graph, inputs):
            from torch._functorch import config

            seen.append(config.activation_memory_budget)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        said = self.both(lambda: compile_blocks(stack(Block, 3), FORMS[0], backend, dynamic=False), "lean")
        self.assertRegex(said[0], BUDGET)
        self.assertEqual([1.0, 1.0, 0.9, 0.7], seen)

    def test_a_default_device(self):
        """Graphs that were tried in a backward pass are those of later forward passes."""
        with torch.device(DEVICE), torch.device(DEVICE):
            self.assertRegex(self.both(lambda: compile_blocks(stack(Block, 3), FORMS[0]), "lean")[0], BUDGET)

    def test_many_shapes(self):
        """Graphs with a budget leave room for as many of the user's as PyTorch allows."""
        from torch._dynamo import config

        name = next(n for n in ("recompile_limit", "cache_size_limit") if hasattr(config, n))
        model = compile_blocks(stack(Block, 3), FORMS[0], dynamic=False)
        with config.patch({name: 3}), mock.patch.object(_planned.Planner, "_is_tight", lambda planner, known: known.recorded == RECORDED - 1), lean(model, "lean") as rt:
            for rows in (1, 2, 3):
                train(model, lambda model, i: model(torch.randn(rows, 8)).sum().backward() or torch.zeros(1), RECORDED + 1, rt, str(rows))
                self.assertEqual(3 * rows, counts()[0])

    def test_cuda_graphs_are_left_alone(self):
        from torch._inductor import config

        makes = {"options": {"triton.cudagraphs": True}}, {"mode": "reduce-overhead"}, {"backend": "cudagraphs"}
        for more in makes:
            with self.subTest(**more), self.assertRaisesRegex(stowage.Error, "CUDA graphs"):
                _compiled.with_budget(torch.compile(torch.sin, **more), 0.5)
        with config.patch({"triton.cudagraphs": True}):
            _compiled.with_budget(torch.compile(torch.sin, backend="aot_eager"), 0.5)
            _compiled.with_budget(torch.compile(torch.sin, options={"triton.cudagraphs": False}), 0.5)
            with self.assertRaisesRegex(stowage.Error, "CUDA graphs"):
                _compiled.with_budget(torch.compile(torch.sin), 0.5)

    def other(self, factor):
        """Compiles blocks with a backend that makes other outputs with a budget."""

        def backend(graph, inputs):
            from torch._functorch import config

            made = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
            if config.activation_memory_budget == 1:
                return made
            return lambda *args: [t * factor if t.requires_grad else t for t in made(*args)]

        return lambda: compile_blocks(stack(Block, 3), FORMS[0], backend)

    def refused(self, why):
        return [f"Block is not compiled with activation_memory_budget=0.9: {why}"]

    def test_other_values_are_refused(self):
        for exact in (True, False):
            self.assertEqual(self.refused("it makes other values"), self.both(self.other(1.5), "lean", exact=exact))

    @unittest.skipUnless(DEVICE == "cpu" and torch.__version__.startswith("2.6"), "known of PyTorch 2.6 on the CPU")
    def test_other_dropout_masks_are_refused(self):
        """A graph that recomputes a mask draws another."""
        with mock.patch.object(_planned, "BUDGETS", (0.5,)):
            said = self.both(lambda: compile_blocks(stack(Layer, 3), FORMS[0]), "lean", exact=False)
        self.assertIn("Layer is not compiled with activation_memory_budget=0.5: its outputs are right and its gradients are not, as if its backward pass drew other random numbers", said)

    def test_other_bits_need_a_word(self):
        make = self.other(1 + 2**-20)
        self.assertEqual(self.refused("it makes other bits; exact=False allows that"), self.both(make, "lean"))
        with self.assertRaisesRegex(AssertionError, "step 2, tensor 0"):  # the first step that follows the plan
            self.both(make, "lean", exact=False)

    def test_failures(self):
        """Whatever fails, the block stays as it is compiled."""

        def backend(graph, inputs):
            from torch._functorch import config

            if config.activation_memory_budget < 1:
                raise ValueError("no room\nfor more")
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        said = self.both(lambda: compile_blocks(stack(Block, 3), FORMS[0], backend), "lean")
        self.assertEqual(1, len(said), said)
        self.assertRegex(said[0], "^Block is not compiled with activation_memory_budget=0.9: .*(no room|ValueError)")

        def around(function):
            @functools.wraps(function)
            def call(*args):
                return function(*args)

            return call

        def make():
            model = compile_blocks(stack(Block, 3), FORMS[2])
            for block in model.blocks:
                block.forward = around(block.forward)
            return model

        self.assertIn("Block is not compiled with activation_memory_budget=0.9: it is not known how it was compiled", self.both(make, "lean"))

    def test_backward_hooks_run_once(self):
        """One more backward pass would run them again."""
        seen = []

        def make():
            model = compile_blocks(stack(Block, 3), FORMS[0])
            model.blocks[1].up.weight.register_hook(lambda g: seen.append(1))
            return model

        said = self.both(make, "lean", steps=RECORDED + 1)
        self.assertEqual(2 * (RECORDED + 1), len(seen))  # with and without the plug-in
        self.assertIn("Block is not compiled with activation_memory_budget=0.9: it has hooks in its backward pass", said)

    def test_only_if_something_must_go(self):
        """Nothing is compiled again if the budget holds everything; otherwise what is saved decides."""

        rows = 128 if DEVICE == "cpu" else 1 << 15  # which cuBLAS's workspaces do not hide

        def step(model, i):
            model(torch.randn(rows, 8)).square().mean().backward()
            return torch.zeros(1)

        budget = "1GiB"
        for more in (False, True):
            with self.subTest(budget=budget):
                self.setUp()
                model = compile_blocks(stack(Block, 12), FORMS[0])
                with runtime("budget", budget=budget) as rt:
                    rt.attach(model)
                    train(model, step, 1, rt)
                    made = counts()[0]
                    train(model, step, 1, rt)
                    self.assertEqual(more, counts()[0] > made, rt.report())
                    made = counts()[0]
                    train(model, step, 3, rt)
                    self.assertEqual(made, counts()[0])
                    budget = rt._planner._budget.base + rt._planner.keys[""].most * 3 // 5


BUDGET = "^compile with activation_memory_budget=0.[79]"


@contextlib.contextmanager
def lean(model, name, **more):
    """Opens a runtime that follows a plan, and prefers one in which blocks are compiled again."""
    with planned(model, name, **more) as rt:
        choose = rt._library.choose

        def prefer(request):
            answer = choose(request)
            answer["step_ns"] -= sum(u["name"] == "lean" for u in request["units"])
            return answer

        rt._library.choose = prefer
        yield rt


class WithoutCompiler(Compared):
    """The same with stand-ins, for any PyTorch: a checkpoint is a graph that saves less."""

    def make(self, kind=Layer, count=3):
        model = stack(kind, count)
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda *args, forward=forward: forward(*args)
            block.forward._torchdynamo_orig_callable = forward
        return model

    def tried(self, kind, smaller, step=one_pass, **more):
        """Trains under a plan that would take the smaller graphs. Returns its choices and notes."""
        want = train(self.make(kind), step, RECORDED + 3, NOTHING)
        with mock.patch.object(_planned.Planner, "_is_tight", lambda planner, known: known.recorded == RECORDED - 1), mock.patch.object(_smaller, "with_budget", smaller):
            model = self.make(kind)
            with lean(model, "lean", **more) as rt:
                self.compare(want, train(model, step, RECORDED + 3, rt))
                return choices(rt), " ".join(rt._planner.notes())

    def test_blocks_that_cannot_run_again(self):
        """Nothing is tried with blocks that change something, or that are to be kept."""
        smaller = lambda call, budget: lambda *args: checkpoint(call, *args, use_reentrant=False)
        self.assertEqual({}, self.tried(Averaging, smaller)[0])
        self.assertEqual({}, self.tried(Layer, smaller, keep=["blocks.*"])[0])

    def test_outputs_that_are_not_known(self):
        def step(model, i):
            x = model.first(torch.randn(3, 4, 8))
            for block in model.blocks:
                x = block(x).x
            loss = model.last(x).square().mean()
            loss.backward()
            return loss

        wrong = lambda call, budget: lambda *args: Hidden(checkpoint(lambda t: call(t).x * 3, *args, use_reentrant=False))
        made, notes = self.tried(Hiding, wrong, step)
        self.assertEqual({}, made)
        self.assertIn("its outputs are not known", notes)

    def said(self, name, smaller, **more):
        want = train(self.make(), one_pass, RECORDED + 3, NOTHING)
        with mock.patch.object(_planned.Planner, "_is_tight", lambda planner, known: known.recorded == RECORDED - 1):
            with mock.patch.object(_smaller, "with_budget", smaller):
                model = self.make()
                with lean(model, name, **more) as rt:
                    self.compare(want, train(model, one_pass, RECORDED + 3, rt))
                    self.assertEqual({"blocks.0", "blocks.1", "blocks.2"}, {u.name for u in rt._planner.units.list})
                    return [*sorted(set(choices(rt).values())), *rt._planner.notes()]

    def test_a_graph_that_saves_less(self):
        smaller = lambda call, budget: lambda *args: checkpoint(call, *args, use_reentrant=False)
        self.assertEqual(["compile with activation_memory_budget=0.9"], self.said("lean", smaller))
        self.assertEqual(["compile with activation_memory_budget=0.9, offload"], self.said("lean, offload", smaller))

    def measured(self, smaller, blocks=3, enough=0.0, **more):
        """Returns what recorded steps say of blocks that may be compiled with budgets."""
        tight = mock.patch.object(_planned.Planner, "_is_tight", lambda planner, known: known.recorded == RECORDED - 1)
        with tight, mock.patch.object(_smaller, "with_budget", smaller), mock.patch.object(_planned, "Profile", lambda *args: Profile(*args[:-1], enough)):
            model = self.make(count=blocks)
            with runtime("budget", exact=False, **more) as rt:
                rt.attach(model)
                train(model, one_pass, RECORDED, rt)
                return [m for m in rt._planner.keys[""].measured if m._budget]

    def test_until_one_drops_enough(self):
        """Smaller budgets are tried until one drops enough and one more is there to make up for a little; how much they drop is known to the byte."""
        tried = []

        def smaller(call, budget):
            tried.append(budget)
            layer = call._torchdynamo_orig_callable.__self__
            if budget > 0.5:
                return call
            return lambda x: (lambda y: y + checkpoint(layer.mlp, y, use_reentrant=False))(x + layer.attention(layer.norm(x)))

        divisions = self.measured(smaller, enough=0.1, least=100)
        self.assertEqual([0.9, 0.7, 0.5, 0.3] * 3, tried)
        for m in divisions:
            for call, part in m.parts.items():
                self.assertGreater(part.little, 0)  # which is dropped, too
                self.assertEqual({b: of[call].dropped for b, of in m._profile.smaller.items() if of}, part.smaller)
            self.assertEqual([False, False, True, True], [n > 0 for n in part.smaller.values()])

    def divisions(self, blocks, shares, took):
        """Returns what is measured with budgets, as if a block saved so much less with each and took so much longer, and 1000 to recompute."""
        divisions = self.measured(lambda call, budget: lambda *args: checkpoint(call, *args, use_reentrant=False), blocks)
        self.assertEqual([*shares], [m._budget for m in divisions])
        for m in divisions:
            m._smaller = {b: {kind: (shares[b], took[b]) for kind in of} for b, of in m._smaller.items()}
            for call, part in m.parts.items():
                all = part.lean + part.rest
                drops = {b: int(share * all) for b, share in shares.items()}
                m.parts[call] = part._replace(lean=drops[m._budget], rest=all - drops[m._budget], kinds={"": drops[m._budget]}, smaller=drops)
            units = list(dict.fromkeys(part.unit for part in m.parts.values()))
            m._lean, m._whole = dict.fromkeys(units, took[m._budget]), dict.fromkeys(units, 1000)
            m.most_counted = lambda choices, m=m: sum(part.lean + part.rest - part.dropped(choices.get(part.unit, Choice())) for part in m.parts.values())
            yield m, m.strongest(m.request(0, False, True)[0]), dict.fromkeys(units, Choice(True, budget=0.9))

    def test_two_budgets_in_a_plan(self):
        """Where blocks with one budget hold a little too much, some get a smaller one: a whole block would take longer."""
        for m, strongest, one in self.divisions(3, {0.9: 0.5, 0.7: 0.6}, {0.9: 100, 0.7: 300}):
            made = m.exchanged(strongest, m.most_counted(one) - 1)
            self.assertEqual([0.7, 0.9, 0.9], sorted(c.budget for c in made.choices.values()), m._budget)
            self.assertTrue(m.made(made))
            self.assertEqual(500, m.again(made.choices))
            part = next(iter(m.parts.values()))
            self.assertEqual(one, m.relaxed(made, part.smaller[0.7] - part.smaller[0.9]).choices)

    def test_one_budget_for_all(self):
        """A plan is no slower than one budget for all blocks that holds no more: many small changes make up for a block that is
        recomputed, and the last of them may be another budget for one block."""
        for m, strongest, one in self.divisions(8, {0.9: 0.3, 0.7: 0.4}, {0.9: 100, 0.7: 150}):
            first, last = list(one)[0], list(one)[-1]
            two = dict.fromkeys(one, Choice(True, budget=0.7))
            start = strongest._replace(choices={**one, first: strongest.choices[first], last: two[last]})
            for same, took in ((two, 1200), ({**two, last: one[last]}, 1150), (one, 800)):
                limit = m.most_counted(same)
                made = m.exchanged(m.mixed(start, limit), limit)
                self.assertEqual(took, m.again(made.choices), made.choices)
                self.assertLessEqual(m.most_counted(made.choices), limit)
                self.assertTrue(m.made(made))

    def test_refused(self):
        def fails(call, budget):
            raise ValueError("no\ncompiler")

        cases = {"ValueError: no compiler": fails, "it makes other bits; exact=False allows that": lambda call, _: lambda x: call(x) * (1 + 2**-20), "it makes other values": lambda call, _: lambda x: call(x) * 2}
        for why, smaller in cases.items():
            with self.subTest(why):
                self.assertEqual([f"Layer is not compiled with activation_memory_budget=0.9: {why}"], self.said("lean", smaller))


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
