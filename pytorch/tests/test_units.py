"""Blocks and cheap modules of models, found without being named. SPEC S8.6."""

import collections
import dataclasses
import gc
import types
import unittest
import weakref

from blocks import Attention, Block, Layer, Stack, one_pass, stack
from common import runtime, stowage, torch
from stowage import _units
from stowage._attach import called, listed
from stowage._measured import Choice
from stowage._step import first_made
from torch import nn


class Outer(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Listed(unittest.TestCase):
    def test_names(self):
        """Of equal layers once, and not all of many."""
        model = Outer(layers=nn.ModuleList(nn.Tanh() for _ in range(20)), **{f"m{i}": nn.Tanh() for i in range(8)})
        self.assertEqual("layers, layers.*, " + ", ".join(f"m{i}" for i in range(8)), listed(model))
        model.m8 = nn.Tanh()
        self.assertEqual("layers, layers.*, " + ", ".join(f"m{i}" for i in range(8)) + " and 1 more", listed(model))
        self.assertEqual("none", listed(nn.Tanh()))

    def test_what_is_called(self):
        """Of lists and dictionaries what is in them, at any depth."""
        a, b, c = nn.Tanh(), nn.Tanh(), nn.Sequential(nn.Tanh())
        self.assertEqual([a, b, c], list(called(nn.ModuleDict({"x": a, "y": nn.ModuleList([b, nn.ModuleDict({"z": c})])}))))
        self.assertEqual([c], list(called(c)))


def names(model, modules):
    by = {m: name for name, m in model.named_modules()}
    return [by[m] for m in modules]


class Blocks(unittest.TestCase):
    def found(self, model):
        return names(model, _units.blocks(model))

    def test_layers_and_their_parts(self):
        model = Outer(model=Outer(embed=nn.Embedding(5, 8), layers=nn.ModuleList(Layer() for _ in range(3)), norm=nn.LayerNorm(8)), head=nn.Linear(8, 5))
        want = [f"model.layers.{i}{part}" for i in range(3) for part in ("", ".attention", ".mlp")]
        self.assertEqual(want, self.found(model))
        # With many layers, these alone are units.
        model = Outer(layers=nn.ModuleList(Layer() for _ in range(_units.FEW)))
        self.assertEqual([f"layers.{i}" for i in range(_units.FEW)], self.found(model))

    def test_cores_of_attention(self):
        """A core without matrices takes the place of the attention around it."""

        Part, Mlp, CoreAttention = (type(name, (Outer,), {}) for name in ("Part", "Mlp", "CoreAttention"))
        core = lambda: CoreAttention(drop=nn.Dropout(0.1))

        def parts(**more):
            layers = nn.ModuleList(Outer(attention=Part(up=nn.Linear(8, 8), **{name: make() for name, make in more.items()}), mlp=Mlp(up=nn.Linear(8, 8))) for _ in range(2))
            found = self.found(nn.ModuleDict({"layers": layers}))
            self.assertEqual(["layers.0", "layers.1"], found[::3])
            return [name.replace("layers.0.", "") for name in found[1:3]]

        self.assertEqual(["attention.core", "mlp"], parts(core=core))
        # One that has matrices, or is one module, or one of several, or something else is none.
        for more in ({"core": lambda: CoreAttention(up=nn.Linear(8, 8))}, {"core": CoreAttention}, {"core": core, "other": core}, {"core": lambda: Mlp(drop=nn.Dropout(0.1))}):
            self.assertEqual(["attention", "mlp"], parts(**more))

    def test_one_part_is_no_finer(self):
        model = Outer(layers=nn.ModuleList(Outer(norm=nn.LayerNorm(8), attention=Attention()) for _ in range(3)))
        self.assertEqual(["layers.0", "layers.1", "layers.2"], self.found(model))

    def test_lists_of_lists(self):
        model = Outer(stages=nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2)))
        self.assertEqual(["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"], self.found(model))

    def test_chains_of_chains(self):
        model = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))
        self.assertEqual(["0.0", "0.1", "1.0", "1.1"], self.found(model))
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
        self.assertEqual(["0", "1", "2"], self.found(model))

    def test_stages(self):
        """An encoder and a decoder of one class, towers, and stages of layers are no blocks: their layers are."""
        Tower, Encoder, Moe = (type(name, (Outer,), {}) for name in ("Tower", "Encoder", "Moe"))
        encoder = lambda n: Encoder(tokens=nn.Embedding(1000, 8), layers=nn.ModuleList(Layer() for _ in range(n)), norm=nn.LayerNorm(8))
        layers = lambda model: [name for name in self.found(model) if name.split(".")[-1].isdigit()]
        want = [f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(3)]
        self.assertEqual(want, layers(Outer(encoder=encoder(3), decoder=encoder(3), head=nn.Linear(8, 5))))
        towers = Outer(text=Tower(model=encoder(3), out=nn.Linear(8, 8)), image=Tower(model=encoder(2), out=nn.Linear(8, 8)))
        self.assertEqual([f"text.model.layers.{i}" for i in range(3)] + [f"image.model.layers.{i}" for i in range(2)], layers(towers))
        # Two lists of two.
        stages = Outer(stages=nn.ModuleList(Tower(a=nn.ModuleList([Block(), Block()]), b=nn.ModuleList([Attention(), Attention()])) for _ in range(2)))
        self.assertEqual([f"stages.{i}.{part}.{j}" for i in range(2) for part in "ab" for j in range(2)], self.found(stages))
        # A layer of experts is a block, and so is one whose lists are a small part of it, or short.
        for part in ({"experts": nn.ModuleList(Block() for _ in range(4))}, {"heads": nn.ModuleList(Block() for _ in range(3)), "up": nn.Linear(8, 800)}, {"body": nn.Sequential(Block(), Block())}):
            model = Outer(layers=nn.ModuleList(Moe(mlp=Tower(**part)) for _ in range(2)))
            self.assertEqual(["layers.0", "layers.1"], self.found(model))

    def test_one_layer(self):
        """It may be called again and again."""
        self.assertEqual(["encoder.groups.0", "encoder.groups.0.attention", "encoder.groups.0.mlp"], self.found(Outer(tokens=nn.Embedding(1000, 8), encoder=Outer(groups=nn.ModuleList([Layer()])), head=nn.Linear(8, 2))))
        self.assertEqual([], self.found(Outer(layer=Layer(), other=nn.Linear(8, 80))))

    def test_recurrent_modules(self):
        """They have no modules inside and are many operators all the same."""
        for make in (nn.LSTM, nn.GRUCell):
            self.assertEqual(["0", "1"], self.found(nn.ModuleList(make(4, 4) for _ in range(2))))

    def test_shared_modules_count_once(self):
        one = Block()
        model = Outer(a=Block(), b=one, again=one, list=nn.ModuleList([one, Block()]))
        self.assertEqual(3, len(self.found(model)))

    def test_no_blocks(self):
        for model in (nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), Outer(a=Block(), b=Attention()), nn.ModuleList()):
            with self.subTest(model=type(model)):
                self.assertEqual([], self.found(model))
        # Modules without matrices are no blocks.
        self.assertEqual([], self.found(nn.Sequential(*(Outer(norm=nn.LayerNorm(4)) for _ in range(3)))))

    def test_compiled_modules(self):
        def compiled(module):
            wrapper = Outer()
            wrapper._orig_mod = module
            return wrapper

        model = Outer(layers=nn.ModuleList(compiled(Layer()) for _ in range(3)))
        self.assertEqual(["layers.0", "layers.1", "layers.2"], self.found(model))
        self.assertEqual([], self.found(compiled(stack())))
        model = stack(Layer, 2)
        for block in model.blocks:  # module.compile()
            block._compiled_call_impl = block.forward
        self.assertEqual(["blocks.0", "blocks.1"], self.found(model))

    def test_compiled_forward_methods(self):
        """What torch.compile and torch.compiler.disable make of a function."""

        def compiled(function, **more):
            def wrapper(*args):
                return function(*args)

            wrapper._torchdynamo_orig_callable = function
            wrapper.__dict__.update(more)
            return wrapper

        once = compiled(Layer.forward)
        forms = {
            "its forward method": lambda b: setattr(b, "forward", compiled(b.forward)),
            "the function of its class": lambda b: setattr(b, "forward", types.MethodType(once, b)),
        }
        for name, form in forms.items():
            with self.subTest(name):
                model = stack(Layer, 2)
                for block in model.blocks:
                    form(block)
                self.assertEqual(["blocks.0", "blocks.1"], self.found(model))
                self.assertEqual([], _units.cheap(model.blocks[0]))
        model = stack(Layer, 2)
        for block in model.blocks:
            block.forward = compiled(block.forward, _torchdynamo_disable=True)
        self.assertEqual(6, len(self.found(model)))

    def test_blocks_of_a_compiled_model(self):
        model = stack(Layer, 3)
        model.forward = types.MethodType(lambda *_: None, model)
        model.forward.__func__._torchdynamo_orig_callable = Stack.forward
        self.assertEqual([], self.found(model))
        self.assertEqual([model], _units.hidden(model))
        self.assertEqual([], _units.hidden(stack(Layer, 3)))
        with runtime("budget") as rt:
            a = rt.attach(model)
            self.assertEqual(["Stack is compiled as a whole, so its blocks cannot be recomputed; compile the blocks instead"], rt._planner.notes())
            a.detach()
            self.assertEqual([], rt._planner.notes())


class Cheap(unittest.TestCase):
    def test_norms_and_activations(self):
        block = Outer(norm=nn.LayerNorm(8), up=nn.Linear(8, 8), act=nn.Sequential(nn.GELU(), nn.SiLU()), drop=nn.Dropout(), same=nn.Identity(), batch=nn.BatchNorm1d(8))
        self.assertEqual(["norm", "act.0", "act.1", "batch"], names(block, _units.cheap(block)))

    def test_shared_and_compiled(self):
        act = nn.GELU()
        block = Outer(a=act, b=nn.Sequential(act), c=nn.ReLU())
        self.assertEqual(2, len(_units.cheap(block)))
        block.c._compiled_call_impl = block.c.forward
        self.assertEqual([act], _units.cheap(block))


class Found(unittest.TestCase):
    def test_models_with_the_same_blocks(self):
        model = stack()
        with runtime("budget") as rt:
            first, second = rt.attach(model), rt.attach(model.blocks)
            self.assertEqual(4, len(rt._planner.units.list))
            self.assertEqual([f"blocks.{i}" for i in range(4)], [u.name for u in rt._planner.units.list])
            first.detach()
            second.detach()
            self.assertEqual([], rt._planner.units.list + rt._planner.units.cheap)

    def test_no_two_units_have_one_name(self):
        """Ranks and plans know units by their names, also where models come and go."""
        with runtime("budget") as rt:
            names = lambda: [u.name for u in rt._planner.units.list]
            attached = [rt.attach(stack()) for _ in range(3)]
            self.assertEqual((12, 12), (len(names()), len(set(names()))))
            attached[1].detach()
            rt.attach(stack())
            rt.attach(stack())
            self.assertEqual((16, 16), (len(names()), len(set(names()))))
            self.assertEqual(len(rt._planner.units.cheap), len(set(rt._planner.units.cheap)))

    def test_what_several_plans_need(self):
        """What one of them needs is wrapped, and nothing else: blocks, and cheap parts of those that recompute them."""
        model = nn.Sequential(nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))}))
        with runtime("budget") as rt:
            rt.attach(model)
            units = rt._planner.units
            a, b, c = units.list
            plan = lambda offloads=False, **choices: types.SimpleNamespace(choices={x: Choice(**{y: True}) for x, y in ((a, choices.get("a")), (b, choices.get("b"))) if y}, saved=(c,), offloads=offloads)
            wrapped = lambda *plans: units.rewrap(plans) or set(units._wrapped)
            cheap = {u: u.module[1] for u in units.list}
            self.assertEqual({a.module}, wrapped(plan(a="whole")))
            self.assertEqual({a.module, cheap[a]}, wrapped(plan(a="lean")))
            for plans in ((plan(a="lean"), None, plan(b="whole")), (plan(b="whole"), plan(a="lean"))):
                self.assertEqual({a.module, b.module, cheap[a], cheap[b]}, wrapped(*plans))
            self.assertEqual({b.module, c.module}, wrapped(plan(b="offload", offloads=True)))
            self.assertEqual(set(), wrapped(None))
            self.assertEqual([], [m for m in model.modules() if "forward" in m.__dict__])

    def test_plans_end_with_a_model(self):
        """What was planned for other models is wrong without one, and would hold it."""
        with runtime("budget") as rt:
            rt.attach(stack())
            other = rt.attach(stack())
            with rt.step():
                pass
            self.assertEqual([""], [*rt.stats()["plans"]])
            other.detach()
            self.assertEqual({}, rt.stats()["plans"])

    def test_a_model_that_is_detached_is_not_held(self):
        """Neither by the runtime nor by what attach() returned, which somebody keeps."""
        for options in ({"kind": "budget"}, {}):
            with runtime(**options) as rt:
                model = stack()
                alive, kept = weakref.ref(model), rt.attach(model, {"*": "a"})
                with rt.step():
                    one_pass(model, 0)
                kept.detach()
                del model
                gc.collect()
                self.assertIsNone(alive())

    def test_parts_know_their_block(self):
        model = Stack(Layer(), Layer())
        with runtime("budget") as rt:
            rt.attach(model, keep=["blocks.1*"])
            units = {u.name: u for u in rt._planner.units.list}
            self.assertIs(units["blocks.0"], units["blocks.0.mlp"].parent)
            self.assertEqual([units["blocks.0.attention"], units["blocks.0.mlp"]], units["blocks.0"].parts)
            self.assertEqual({"blocks.1", "blocks.1.attention", "blocks.1.mlp"}, {u.name for u in units.values() if u.why})


class Keep(unittest.TestCase):
    """keep= holds for what it names, for its parts, and for blocks around it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.mlp = nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Sequential(nn.Linear(4, 4), nn.GELU())

        def forward(self, x):
            return x + self.mlp(self.attn(x))

    def kept(self, *patterns):
        model = nn.ModuleDict({"blocks": nn.ModuleList(self.Block() for _ in range(3))})
        with runtime("budget") as rt:
            rt.attach(model, keep=patterns)
            return {u.name for u in rt._planner.units.list if u.whole is False and u.lean is False}

    def test_what_it_names(self):
        self.assertEqual({"blocks.1", "blocks.1.attn", "blocks.1.mlp"}, self.kept("blocks.1"))
        self.assertEqual({"blocks.0", "blocks.1", "blocks.2", "blocks.0.mlp", "blocks.1.mlp", "blocks.2.mlp"}, self.kept("*.mlp"))
        self.assertEqual({"blocks.2", "blocks.2.attn"}, self.kept("blocks.2.attn.0"))
        self.assertEqual(set(), self.kept())

    def test_what_nothing_has(self):
        with self.assertRaisesRegex(stowage.Error, "keep: '.*norm' matches no module; the modules are blocks"):
            self.kept("*.norm")
        with self.assertRaisesRegex(stowage.Error, "keep: '.*nrom' matches no module"):
            self.kept("blocks.0*", "*.nrom")
        with self.assertRaisesRegex(stowage.Error, "keep: expected a list of patterns"):
            with runtime("budget") as rt:
                rt.attach(nn.Linear(1, 1), keep="blocks.1")
        for wrong in (7, None, [1]):
            with self.subTest(wrong), self.assertRaisesRegex(stowage.Error, "keep: expected a list of patterns, got"):
                with runtime("budget") as rt:
                    rt.attach(nn.Linear(1, 1), keep=wrong)

    def test_no_optimizer(self):
        model = nn.Linear(1, 1)
        schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1), 1)
        for wrong in ("adam", schedule):
            with self.assertRaisesRegex(stowage.Error, "attach: expected an optimiser, got (str|StepLR)"):
                with runtime("budget") as rt:
                    rt.attach(model, optimizer=wrong)


class Results(unittest.TestCase):
    def test_first_tensor_with_a_backward_pass(self):
        t, other = torch.ones(2, requires_grad=True) * 2, torch.ones(2)

        class Output(collections.OrderedDict):
            pass

        @dataclasses.dataclass
        class Data:
            n: int
            x: object

        @dataclasses.dataclass
        class Slots:
            __slots__ = ("x",)
            x: object

        class Registered:
            def __init__(self, *of):
                self.of = of

        torch.utils._pytree._register_pytree_node(Registered, lambda x: (list(x.of), None), lambda of, _: Registered(*of))
        itself = Data(3, [other])
        itself.x.append(itself)
        chain = None
        for _ in range(5000):
            chain = Data(0, chain)
        self.assertIsNone(first_made(chain))
        self.assertIsNone(first_made(itself))
        itself.x.append(t)
        later = t * 2
        self.assertIs(t, first_made([[other, t], later]))
        for out in (itself, collections.deque([other, t]), Registered(other, [t]), Slots(t), t, (other, t), [None, {"a": other, "b": (t,)}], Output(a=3, b=t), Data(3, [other, t]), {"a": Data(1, None), "b": Data(2, t)}):
            self.assertIs(t, first_made(out))
        for out in (None, 3, other, [other], Data(3, other), object()):
            self.assertIsNone(first_made(out))


class Uncounted(unittest.TestCase):
    def test_running_means_are_put_back(self):
        for momentum in (0.1, None):
            norm = nn.BatchNorm1d(4, momentum=momentum)
            before = dict(norm._buffers)
            values = [b.clone() for b in before.values()]
            with _units.Uncounted(norm):
                norm(torch.randn(5, 4))
                self.assertEqual(1, norm.num_batches_tracked)
            for name, b in norm._buffers.items():
                self.assertIs(before[name], b)
            for a, b in zip(values, norm._buffers.values()):
                self.assertTrue(torch.equal(a, b))


if __name__ == "__main__":
    unittest.main()
