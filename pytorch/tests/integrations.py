"""What the tests of integrations share: a model that notes what happens to it, data, and cases
that are asked of several frameworks."""

import contextlib
import sys
import unittest
from unittest import mock

from common import on_cpu, same, stowage, torch
from torch import nn

with contextlib.suppress(ImportError):
    import torch._dynamo  # PyTorch 2 imports it late, and tests forget what they imported: it cannot be imported twice


OPTIONS = {"policy": {"mlp": "offload"}, "device": "cpu"}
BATCHES, EVERY = 9, 4  # in an epoch; the last accumulation has one microbatch
KEYS = ["4", "4", "1"]


class Broken(Exception):
    pass


class Net(nn.Module):
    """Two layers. It breaks in the forward pass whose number is given, and notes which steps
    were under way in passes for evaluation."""

    def __init__(self, breaks=0):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))}) for _ in range(2))
        self.breaks, self.passes, self.in_steps = breaks, 0, []
        self.runtime = lambda: None

    def forward(self, x, y=None, **_):
        if self.training:
            self.passes += 1
            if self.passes == self.breaks:
                raise Broken
        else:
            self.in_steps.append(under_way(self.runtime()))
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return {"loss": (x - y).pow(2).mean(), "logits": x}


class Optimizer(torch.optim.SGD):
    """Notes steps that were under way when it was called."""

    def __init__(self, net):
        super().__init__(net.parameters(), 0.1)
        self.in_steps, self.net = [], net

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.in_steps.append(under_way(self.net.runtime()))
        super().step()
        return loss


def under_way(runtime):
    return runtime is not None and runtime._step is not None


class Data(torch.utils.data.Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(5)
        self.rows = torch.randn(n, 2, 16, generator=g)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"x": self.rows[i, 0], "y": self.rows[i, 1]}


class Endless(torch.utils.data.IterableDataset):
    """Has fewer batches than anybody was told."""

    def __init__(self, n):
        self.data = Data(n)

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


class Case(unittest.TestCase):
    def setUp(self):
        self.enterContext(on_cpu())
        self.addCleanup(self.close)
        self.keys, self.ends = [], []
        begin, end = stowage.Runtime.begin_step, stowage.Runtime.end_step

        def begin_step(rt, key=""):
            self.keys.append(key)
            begin(rt, key)

        def end_step(rt, error=None):
            self.ends.append(error)
            end(rt, error)

        for name, fn in (("begin_step", begin_step), ("end_step", end_step)):
            patch = mock.patch.object(stowage.Runtime, name, fn)
            patch.start()
            self.addCleanup(patch.stop)

    def close(self):
        for rt in list(stowage._runtime._open.values()):
            rt.close()

    def ended(self, steps, failed=0):
        """Nothing is left of the steps, and training moved something."""
        rt = steps.runtime
        self.assertFalse(under_way(rt))
        self.assertEqual(len(self.keys), len(self.ends))
        self.assertEqual(failed, sum(e is not None for e in self.ends))
        x = torch.ones(4, 4, requires_grad=True)
        moved = rt.stats()["summary"]["counts"]["OutBytes"]
        x.exp().sum().backward()  # outside of steps: no hook is left
        self.assertEqual(moved, rt.stats()["summary"]["counts"]["OutBytes"])
        if not failed:
            self.assertGreater(moved, 0)

    def equal(self, a, b):
        for p, q in zip(a.parameters(), b.parameters()):
            self.assertTrue(same(p, q))


class Both:
    """What is asked of attach() and callback() alike."""

    def test_missing(self):
        with mock.patch.dict(sys.modules, {self.package: None}), self.assertRaisesRegex(stowage.Error, "cannot be imported.*pip install '" + self.package.split(".")[0]):
            self.make(Net(), **OPTIONS)

    def test_runtime_or_options(self):
        with self.assertRaisesRegex(stowage.Error, "a runtime or the arguments"):
            self.make(Net())
        with stowage.Runtime(**OPTIONS) as rt, self.assertRaisesRegex(stowage.Error, "a runtime or the arguments"):
            self.make(Net(), runtime=rt, budget="1GiB")

    def test_a_runtime_of_the_user(self):
        net = Net()
        with stowage.Runtime(**OPTIONS) as rt:
            attached = rt.attach(net.layers[0], {"mlp": "mlp"})  # the user's choice stays
            steps = self.run_once(net, runtime=rt)
            self.assertIs(rt, steps.runtime)
            self.assertEqual([attached], rt._attached)
            self.ended(steps)

    def test_groups(self):
        with self.assertRaisesRegex(stowage.Error, "matches no module"):
            self.run_once(Net(), groups={"*.nothing": "mlp"}, **OPTIONS)

    def test_key(self):
        self.run_once(Net(), key=lambda *_: "short", **OPTIONS)
        self.assertEqual([k + " short" for k in self.expected()], self.keys)
