"""The plug-in beside other parts of PyTorch that handle memory, hooks or graphs themselves:
DDP, FSDP2, torch.compile, make_graphed_callables. Gradients are equal bit for bit with and
without it. SPEC S6.4."""

import contextlib
import importlib
import unittest

from common import DEVICE, plain, runtime, same, stowage, torch, under
from launch import FSDP2, run_ranks
from ranks import AROUND, GROUPS, ROWS, Net, W, Watch, compare, moved, settings, steps
from stowage import _step
from stowage._record import storage_of
from torch import nn
from zoo import leaf
from torch.autograd import Variable


def by_itself(model, last):
    return contextlib.nullcontext()


class FSDPModule:
    """The name that fully_shard puts among a module's classes."""

    unshard = None


class Shard(torch.Tensor):
    """Stands for a DTensor: a parameter that is no plain tensor."""


class Gathered:
    """What fully_shard does to a module's parameters, on one rank and in one place: they are
    whole in a storage of their own while the module runs, which is freed after it and
    filled again before its backward pass. Freed memory is full of not-a-numbers."""

    def __init__(self, module, reshard=True):
        module.__class__ = type("FSDP" + type(module).__name__, (FSDPModule, type(module)), {})
        self.reshard, self.whole = reshard, []
        for m in module.modules():
            for name, p in m._parameters.items():
                if type(p) is nn.Parameter:
                    shard = torch.Tensor._make_subclass(Shard, p.detach().clone(), p.requires_grad)
                    room = torch.empty(p.numel())
                    whole = nn.Parameter(room.as_strided(p.size(), p.stride()), p.requires_grad)
                    self.whole.append((m._parameters, name, shard, whole, room))
        self.free()
        first = module.register_forward_pre_hook(self.before)
        module._forward_pre_hooks.move_to_end(first.id, last=False)
        module.register_forward_hook(self.after)

    def gather(self):
        for place, name, shard, whole, room in self.whole:
            place[name] = whole
            memory = storage_of(room)
            if memory.nbytes() == 0:
                memory.resize_(room.numel() * room.element_size())
                room.data.copy_(shard.detach().flatten())

    def free(self):
        for place, name, shard, whole, room in self.whole:
            place[name] = shard
            memory = storage_of(room)
            if memory.nbytes():
                room.data.fill_(float("nan"))
                memory.resize_(0)

    def before(self, module, args):
        self.gather()

    def after(self, module, args, out):
        if self.reshard:
            self.free()
        out.register_hook(self.backward)

    def backward(self, grad):
        self.gather()
        Variable._execution_engine.queue_callback(self.over)

    def over(self):
        for _, _, shard, whole, _ in self.whole:
            if whole.grad is not None:
                shard.grad = whole.grad if shard.grad is None else shard.grad + whole.grad
                whole.grad = None
        self.free()


@unittest.skipUnless(DEVICE == "cpu", "parameters are gathered in memory of the CPU")
class Parameters(unittest.TestCase):
    def make(self, reshard=True):
        torch.manual_seed(3)
        model = Net()
        for block in model.blocks:
            Gathered(block, reshard)
        Gathered(model, reshard)
        return model

    def test_gathered_for_a_module_and_freed_after_it(self):
        for reshard in (True, False):
            with self.subTest(reshard=reshard), contextlib.redirect_stdout(None):
                compare(f"gathered reshard={reshard}", lambda: self.make(reshard), by_itself)

    def test_gathered_in_modules_without_a_group(self):
        """The second batch too, where PyTorch tells that the backward pass before is over."""
        model, batches = self.make(), 2 if _step._knows_backward else 1
        want = steps(self.make(), contextlib.nullcontext, batches=batches)
        with runtime("offload", policy={"other": "offload"}) as rt:
            rt.attach(model, {"head": "c"})
            watch = Watch(model)
            got = steps(model, lambda: watch.step(rt), batches=batches)
            self.assertGreater(moved(rt), 0)
        self.assertEqual(0, watch.passed)
        for a, b in zip(want, got, strict=True):
            self.assertTrue(same(a, b))

    def test_frozen_ones_of_a_model_that_is_not_attached(self):
        frozen, x = nn.Linear(W, W).requires_grad_(False), torch.randn(W, W, requires_grad=True)
        with runtime() as rt, rt.step(), rt.group("a"):
            y = frozen(x.tanh())
            self.assertEqual(1, len(rt._step.pending))  # of tanh
            y.sum().backward()

    def test_sharded_after_attach(self):
        torch.manual_seed(3)
        model = Net()
        with runtime() as rt:
            rt.attach(model, GROUPS)
            for block in model.blocks:
                Gathered(block)
            Gathered(model)
            with self.assertRaisesRegex(stowage.Error, r"fully_shard\(\) was called after attach\(\)"), rt.step():
                pass

    def test_memory_that_graphs_write(self):
        """A replay writes where the last one did, and autograd is not told."""
        room = torch.empty(W, W)

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                room.data.copy_(x)
                return room.detach()

            @staticmethod
            def backward(ctx, grad):
                return grad.clone()

        def case(g):
            x = leaf(W, W)
            for i in range(2):  # only the second has a backward pass
                with g("a"):
                    y = Graphed.apply(x + i).sin()
                with g("b"):
                    z = y.exp()
            z.sum().backward()
            return [x.grad]

        for kind in ("offload", "limit", "fake-2", "fake-3"):
            with self.subTest(kind), runtime(kind) as rt:
                for _ in range(3):
                    self.assertTrue(same(plain(case)[0], under(rt, case)[0]))


class Ranks(unittest.TestCase):
    def run_ranks(self, case, ranks, device="cpu"):
        for text in run_ranks(self, "ranks.py", case, ranks, device):
            self.assertGreaterEqual(text.count(": equal, "), 6)

    def test_ddp(self):
        self.run_ranks("ddp", 2)

    @unittest.skipUnless(FSDP2, "this PyTorch has no fully_shard, or none for the CPU")
    def test_fsdp2(self):
        self.run_ranks("fsdp", 2)

    @unittest.skipUnless(FSDP2, "this PyTorch has no fully_shard, or none for the CPU")
    @unittest.skipUnless(DEVICE == "cuda", "STOWAGE_DEVICE is not cuda")
    def test_fsdp2_on_a_gpu(self):
        self.run_ranks("fsdp", 1, "cuda")


@unittest.skipUnless(hasattr(torch, "compile"), "this PyTorch has no torch.compile")
class Compiled(unittest.TestCase):
    def setUp(self):
        importlib.import_module("torch._dynamo").reset()

    def make(self, how, backend, blocks=4):
        torch.manual_seed(3)
        model = Net(blocks=blocks)
        if how == "whole":
            return torch.compile(model, backend=backend)
        if how == "blocks":
            model.blocks = nn.ModuleList([torch.compile(b, backend=backend) for b in model.blocks])
        if how == "in place":
            for b in model.blocks:
                b.compile(backend=backend)
        return model

    def counts(self):
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"], counters["frames"]["total"]

    def equal(self, want, got):
        for a, b in zip(want, got, strict=True):
            self.assertTrue(same(a, b))

    def check(self, how, backend, kind, groups=AROUND):
        """Compiled without the plug-in, then with it; and no graph is made twice."""
        self.setUp()
        want = steps(self.make(how, backend), contextlib.nullcontext)
        more = settings(kind, lambda: self.make(how, backend), groups)
        self.setUp()
        model = self.make(how, backend)
        with runtime(kind, **more) as rt:
            rt.attach(model, groups)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            self.equal(want, steps(model, rt.step))
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(before[name])
            made = self.counts()
            self.assertGreater(made[0], 0)
            self.equal(want, steps(model, rt.step))
            self.assertEqual(made, self.counts(), "compiled again")
            return moved(rt)

    def test_around(self):
        for how in ("blocks", "in place"):
            for kind in ("offload", "limit"):
                with self.subTest(how=how, kind=kind):
                    self.assertGreater(self.check(how, "aot_eager", kind), 0)

    def test_the_whole_model(self):
        """Its graph ends where a group begins. A limit finds less to move: a graph saves
        what it saves at its end."""
        self.assertGreater(self.check("whole", "aot_eager", "offload"), 0)
        self.check("whole", "aot_eager", "limit")

    def test_one_group_around_the_whole_model(self):
        self.check("whole", "aot_eager", "offload", {"": "a"})

    def test_parameters_stay(self):
        """A graph saves views of parameters that do not tell whose they are."""
        for how in ("blocks", "whole"):
            self.setUp()
            with self.subTest(how), runtime("offload") as rt:
                model = self.make(how, "aot_eager")
                rt.attach(model, AROUND)
                watch = Watch(model)
                steps(model, lambda: watch.step(rt))
                self.assertGreater(watch.kept, 0)
                self.assertGreater(watch.moved, 0)

    def test_a_group_inside(self):
        with runtime("offload") as rt:

            def part(x):
                with rt.group("a"):
                    x = x.sin()
                with rt.group("b"):
                    return x.exp().sin()

            x = leaf(W, W)
            want, = torch.autograd.grad(part(x).sum(), x)
            compiled = torch.compile(part, backend="aot_eager")
            for _ in range(3):
                with rt.step():
                    got, = torch.autograd.grad(compiled(x).sum(), x)
                self.assertTrue(same(want, got))

    @unittest.skipUnless(DEVICE == "cuda", "STOWAGE_DEVICE is not cuda")
    def test_inductor(self):
        """Fused kernels round by where a graph ends, so both have the same groups."""
        model = self.make("whole", "inductor", 2)
        with runtime("offload") as rt:
            rt.attach(model, AROUND)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            want = steps(model, contextlib.nullcontext)
            for _ in range(2):
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        p.copy_(before[name])
                self.equal(want, steps(model, rt.step))
            self.assertGreater(moved(rt), 0)


@unittest.skipUnless(DEVICE == "cuda", "STOWAGE_DEVICE is not cuda")
class Graphs(unittest.TestCase):
    def make(self):
        torch.manual_seed(3)
        return Net()

    def graph(self, model, i=1):
        torch.cuda.make_graphed_callables(model.blocks[i], (torch.randn(ROWS, W, requires_grad=True),))

    def want(self):
        model = self.make()
        self.graph(model)
        return steps(model, contextlib.nullcontext, batches=1)

    def equal(self, want, got):
        for a, b in zip(want, got, strict=True):
            self.assertTrue(same(a, b))

    def test_a_graphed_block(self):
        want = self.want()
        for kind in ("offload", "limit"):
            with self.subTest(kind), runtime(kind, **settings(kind, self.make, GROUPS, batches=1)) as rt:
                model = self.make()
                self.graph(model)
                rt.attach(model, GROUPS)
                self.equal(want, steps(model, rt.step, batches=1))
                self.assertGreater(moved(rt), 0)

    def test_captured_inside_of_a_step(self):
        """What was saved before, and hooks within the block, do not disturb the capture."""
        want = self.want()
        with runtime("offload") as rt:
            model = self.make()
            rt.attach(model, {"*.norm": "b"})
            with rt.step():
                x = model.blocks[0](torch.randn(ROWS, W))
                with rt.group("a"):
                    y = x.sin()
                    self.graph(model)
                y.sum().backward()
            model.zero_grad()
            self.equal(want, steps(model, rt.step, batches=1))

    def test_a_block_with_hooks_is_refused(self):
        with runtime("offload") as rt:
            model = self.make()
            rt.attach(model, AROUND)
            with self.assertRaisesRegex((AssertionError, RuntimeError), "must not have hooks"):
                self.graph(model)


if __name__ == "__main__":
    unittest.main()
