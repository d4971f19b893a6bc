"""What blocks change where versions and attributes do not show it: through .data, by NumPy, in containers inside of others, in
norms that read what they count, and in generators known by name. Steps are those without a runtime, recorded ones too."""

import collections
import dataclasses
import enum
import sys
import types
import unittest
import weakref
from unittest import mock

import numpy
import torch
from blocks import Block, Compared, choices, one_pass, planned, stack, train, why
from common import same, stowage
from stowage import _again, _before, _managed, _units
from stowage._contents import COPIED, Contents
from torch import nn
from torch.utils import checkpoint

LATE = 4  # the step in which something begins
STEPS = LATE + 3


def values(x):
    """Copies of tensors and of other data."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if isinstance(x, dict):
        return {key: values(y) for key, y in x.items()}
    if isinstance(x, (list, tuple, collections.deque)):
        return [values(y) for y in x]
    return x.copy() if isinstance(x, numpy.ndarray) else x


def equal(x, y):
    if isinstance(x, torch.Tensor):
        return same(x, y)
    if isinstance(x, dict):
        return list(x) == list(y) and all(equal(x[key], y[key]) for key in x)
    if isinstance(x, list):
        return len(x) == len(y) and all(map(equal, x, y))
    return numpy.array_equal(x, y) if isinstance(x, numpy.ndarray) else x == y


class Unseen(Compared):
    def check(self, make, kind="recompute", reason="", look=lambda model: None, plans=("whole", "whole, offload"), prepare=lambda model, i: None):
        """Compares steps of a model that is made anew each time, its weights and what look() finds in it. A plan does this kind of
        thing with blocks, or there is a reason why not."""

        def step(model, i):
            prepare(model, i)
            loss = one_pass(model, i)
            found.append(values(look(model)))
            return [loss, *model.parameters()]

        def run(rt=None):
            found.clear()
            return train(model, step, STEPS, rt), list(found)

        found = []
        with mock.patch("copy.deepcopy", lambda x: x):
            model = make()
            want, seen = run()
            for plan in plans:
                with self.subTest(plan=plan):
                    model = make()
                    with planned(model, plan) as rt:
                        got, now = run(rt)
                        self.compare(want, got)
                        self.assertTrue(equal(seen, now), f"{seen[-1]} {now[-1]}")
                        self.assertEqual({reason} - {""}, set(why(rt).values()))
                        self.assertEqual({True}, {kind in c for c in choices(rt).values()} or {True})


def block(forward, first=lambda self: None):
    """Returns what makes models of blocks that do something before their own forward pass, which gives them their input."""

    class Changes(Block):
        def __init__(self):
            super().__init__()
            first(self)

        def forward(self, x):
            return super().forward(forward(self, x))

    return lambda: stack(Changes, 2)


class Writes(Unseen):
    """Blocks that write where a second pass would write again are kept."""

    def test_weights(self):
        def norm(b, x):
            with torch.no_grad():
                b.up.weight.copy_(nn.functional.normalize(b.up.weight, dim=1))
            return x

        def data(b, x):
            b.down.bias.data.mul_(0.9)
            return x

        def replaced(b, x):
            b.up.weight.data = nn.functional.normalize(b.up.weight.data, dim=1)
            return x

        for forward in (norm, data, replaced):
            with self.subTest(forward.__name__):
                self.check(block(forward), reason="it writes to its weights", plans=("whole", "lean"))

    def test_weights_of_cheap_modules(self):
        class Clamps(nn.LayerNorm):
            def forward(self, x):
                self.weight.data.mul_(0.99)
                return super().forward(x)

        class Norms(Block):
            def __init__(self):
                super().__init__()
                self.norm = Clamps(8)

        self.check(lambda: stack(Norms, 2), reason="it writes to its weights", plans=("whole", "lean"))

    def test_buffers(self):
        """Codebooks and other averages."""

        def first(b):
            b.register_buffer("mean", torch.zeros(8))

        def forward(b, x):
            b.mean.data.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            return x

        self.check(block(forward, first), reason="it changes its buffers")

    def test_buffers_for_later_calls(self):
        """A buffer that the first call makes, such as a table of angles, keeps no block from being recomputed."""

        def lazy(b, x):
            if "angles" not in b._buffers:
                b.register_buffer("angles", torch.linspace(0.5, 1, x.shape[-1]), persistent=False)
            return x * b.angles

        def first(b):
            b.register_buffer("angles", None)

        def empty(b, x):
            if b.angles is None:
                b.angles = torch.linspace(0.5, 1, x.shape[-1])
            return x * b.angles

        def late(b, x):
            b.calls = getattr(b, "calls", 0) + 1
            if b.calls == LATE:
                b.angles = torch.linspace(0.6, 1, x.shape[-1])
            return empty(b, x)

        look = lambda model: [dict(m._buffers) for m in model.modules()]
        for forward, prepare in ((lazy, lambda b: None), (empty, first), (late, first)):
            with self.subTest(forward.__name__):
                self.check(block(forward, prepare), look=look)

    def test_attributes(self):
        def tensors(b, x):
            b.count.data += 1
            return x

        def arrays(b, x):
            b.count[1] += 1
            return x

        for forward, count in ((tensors, lambda: torch.zeros(3)), (arrays, lambda: numpy.zeros(3))):
            first = lambda b, count=count: setattr(b, "count", count())
            self.check(block(forward, first), reason="it writes to its attribute 'count'", look=lambda m: [b.count for b in m.blocks])

    def test_weights_that_are_written_late(self):
        """A second pass that writes to what autograd saved is an error."""

        def forward(b, x):
            if on:
                with torch.no_grad():
                    b.up.weight.mul_(0.999)
            return x

        on, model = [], block(forward)()
        with planned(model) as rt:
            train(model, one_pass, LATE, rt)
            on.append(1)
            with self.assertRaisesRegex(stowage.Error, "modified by an inplace operation"):
                train(model, one_pass, 1, rt)

    def test_sums(self):
        """Tensors that are too large to be copied are summed up."""
        module = nn.Linear(1, COPIED + 1)
        module.empty, module.names = torch.zeros(0), numpy.array([None, "a"])
        contents = Contents([module, nn.BatchNorm1d(2)])
        self.assertEqual("", contents.written())
        module.weight.data[-1] += 1
        self.assertEqual("it writes to its weights", contents.written())

    def test_large_arrays(self):
        """Arrays are looked at as a whole, if they are not too large."""
        with mock.patch("stowage._contents.MOST", 5000):
            for n, want in ((5000, "it writes to its attribute 'table'"), (5001, "")):
                module = nn.Identity()
                module.table = numpy.zeros(n, numpy.uint8)
                contents = Contents([module])
                self.assertEqual("", contents.written())
                module.table[-1] += 1
                self.assertEqual(want, contents.written())

    def test_arrays_of_objects(self):
        """Such an array is no data: it may have anything that a block makes when it is called first."""
        module = nn.Identity()
        module.table = numpy.array([None, module], object)
        contents = Contents([module])
        module.table[0] = {}
        self.assertEqual("", contents.written())


class Data(Unseen):
    """Data that is put back in recorded steps, too."""

    def test_containers_inside_of_others(self):
        def first(b):
            b.own = {"of": {"n": 0, "all": []}, "more": collections.defaultdict(list), "often": collections.Counter()}

        def forward(b, x):
            b.own["of"]["n"] += 1
            b.own["of"]["all"].append(b.own["of"]["n"])
            b.own["more"]["x"] += range(9)  # more than is looked at, after some steps
            b.own["often"]["calls"] += 1
            return x * (1 + b.own["of"]["n"] // LATE + len(b.own["more"]["x"]) // (9 * LATE))

        self.check(block(forward, first), look=lambda m: [b.own for b in m.blocks])

    def test_objects(self):
        @dataclasses.dataclass
        class Inner:
            n: int = 0

        class Slots:
            __slots__ = ("inner", "all")

            def __init__(self):
                self.inner, self.all = Inner(), ()

        def forward(b, x):
            b.own.inner.n += 1
            b.own.all = (*b.own.all, b.own.inner.n)
            return x * (1 + b.own.inner.n // LATE)

        self.check(block(forward, lambda b: setattr(b, "own", Slots())), look=lambda m: [(b.own.inner.n, b.own.all) for b in m.blocks])

    def test_queues_and_counters(self):
        for queue in (collections.deque(maxlen=100), collections.deque([1, 2], maxlen=2), collections.Counter()):

            def forward(b, x):
                b.own.append(float(x.detach().sum())) if isinstance(b.own, collections.deque) else b.own.update([len(b.own)])
                return x

            self.check(block(forward, lambda b, queue=queue: setattr(b, "own", queue.copy())), look=lambda m: [b.own for b in m.blocks], reason="it changes its attribute 'own' at every call")

    def test_numbers_of_numpy_and_members(self):
        class Phase(enum.Enum):
            FIRST, SECOND = 1, 2

        def forward(b, x):
            b.calls += 1
            if b.calls > LATE:
                b.phase = Phase.SECOND
            return x * (1 + b.calls // LATE) * (1.5 if b.phase is Phase.FIRST else 2.5)

        self.check(block(forward, lambda b: b.__dict__.update(calls=numpy.int64(0), phase=Phase.FIRST)), look=lambda m: [(b.calls, b.phase) for b in m.blocks])

    def test_what_is_not_a_number(self):
        """It is the same as before."""
        self.check(block(lambda b, x: x, lambda b: setattr(b, "best", float("nan"))))
        self.assertTrue(_units.other(1.0, float("nan")))

    def test_generators(self):
        known, own = torch.Generator(), types.SimpleNamespace(seed=1)

        def drawn(b, x):
            return x * torch.rand(8, generator=known)

        def inside(b, x):
            return x * torch.rand(8, generator=b.own[0].generator)

        def first(b):
            known.manual_seed(3)
            own.generator = torch.Generator().manual_seed(4)
            b.own = [own]

        class Knows(Block):
            def forward(self, x):
                return drawn(self, super().forward(x)) * torch.rand(8, generator=known)

        def make():
            known.manual_seed(3)
            return stack(Knows, 2)

        self.check(make, reason="it draws from a generator", look=lambda m: known.get_state())
        self.check(block(inside, first), reason="it draws from a generator", look=lambda m: own.generator.get_state())

    def test_what_long_ones_get(self):
        """Of containers that are not looked at a second pass leaves as many."""
        module, many = nn.Linear(2, 2), list(range(_before.LONG + 1))
        module.own = {"list": list(many), "dict": dict.fromkeys(many)}
        before = _before.Before([module])
        self.assertTrue(before.same([module]))
        module.own["list"].append("first")
        module.own["dict"].update({"first": 1, "next": 2})
        self.assertFalse(before.same([module]))
        with before:
            self.assertEqual([len(many)] * 2, [len(x) for x in module.own.values()])
            module.own["list"] += ["second", "second"]
            module.own["dict"]["second"] = 2
        self.assertEqual(([*many, "first"], [*many, "first", "next"]), (module.own["list"], list(module.own["dict"])))


class Results(Unseen):
    def test_what_the_next_call_reads(self):
        """Results without a graph that blocks begin to read late: a second pass finds those of the call before."""

        def forward(b, x):
            y = x + b.last.mean(0) if b.on and b.last is not None else x
            b.last = x.detach()
            return y.tanh()

        def prepare(model, i):
            for b in model.blocks:
                b.on = i >= LATE

        self.check(block(forward, lambda b: b.__dict__.update(last=None, on=False)), look=lambda m: [b.last for b in m.blocks], prepare=prepare)


    def test_they_are_not_held(self):
        """Once a step is over nobody has what the next one would read."""

        def forward(b, x):
            b.last = x.detach()
            return x

        model = block(forward, lambda b: setattr(b, "last", None))()
        with planned(model) as rt:
            train(model, one_pass, LATE, rt)
            self.assertEqual({"recompute"}, set(choices(rt).values()))
            last = [weakref.ref(b.last) for b in model.blocks]
            for b in model.blocks:
                b.last = None
            self.assertEqual([None, None], [x() for x in last])


class Errors(unittest.TestCase):
    def test_the_end_of_a_second_pass_is_none(self):
        """A block that handles errors does not handle it."""
        self.assertFalse(issubclass(_again._Stop, Exception))


class Types(Unseen):
    def test_default_types(self):
        """A second pass has that of the first."""

        def step(model, i):
            torch.set_default_dtype(torch.float64 if i >= LATE else torch.float32)
            try:
                loss = model(torch.randn(3, 4, 8, dtype=torch.float32)).square().mean()
            finally:
                torch.set_default_dtype(torch.float32)
            loss.backward()
            return loss

        make = block(lambda b, x: x * torch.linspace(0.1, 1, 8).to(x.dtype))
        want = train(make(), step, STEPS)
        for plan in ("whole", "whole, offload"):
            with planned(make(), plan) as rt:
                self.compare(want, train(next(a.model for a in rt._attached), step, STEPS, rt))
                self.assertIs(torch.float32, torch.get_default_dtype())


class Renorm(nn.BatchNorm1d):
    """Reads its running means while it trains, after a few steps."""

    def forward(self, x):
        most = 1.0 if int(self.num_batches_tracked) < LATE else 3.0
        mean, deviation = x.mean((0, 1)), x.var((0, 1), unbiased=False).add(self.eps).sqrt()
        scale = (deviation.detach() / self.running_var.add(self.eps).sqrt()).clamp(1 / most, most)
        if self.training:
            self.running_mean += 0.1 * (mean.detach() - self.running_mean)
            self.running_var += 0.1 * (deviation.detach() ** 2 - self.running_var)
            self.num_batches_tracked += 1
        return ((x - mean) / deviation * scale) * self.weight + self.bias


class Norms(Unseen):
    def test_running_means_that_are_read(self):
        class Norm(Block):
            def __init__(self):
                super().__init__()
                self.norm = Renorm(8)

        make = lambda: stack(Norm, 2)
        self.check(make)
        self.check(make, plans=("lean",))

        def twice(model, i):
            loss = model(torch.randn(3, 4, 8)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            return loss

        model = make()
        want = train(model, twice, STEPS)
        with planned(model) as rt:
            self.compare(want, train(model, twice, STEPS, rt))

    def test_which_only_count(self):
        class Calls(nn.BatchNorm1d):
            def forward(self, x):
                return nn.functional.batch_norm(x, self.running_mean, self.running_var).relu()

        class Wraps(nn.BatchNorm1d):
            def forward(self, x):
                return super().forward(x).relu()

        for kind, counts in ((nn.BatchNorm2d, True), (nn.SyncBatchNorm, True), (nn.InstanceNorm1d, True), (Calls, True), (Wraps, True), (Renorm, False)):
            self.assertEqual(counts, _units.only_counts(kind))


class Checkpoints(Unseen):
    """Checkpoints that begin late count what is saved, now and when they run again."""

    def test_inside_of_blocks(self):
        class Inside(Block):
            on = False

            def inner(self, x):
                return self.down(self.act(self.up(self.norm(x))))

            def forward(self, x):
                return x + (checkpoint.checkpoint(self.inner, x, use_reentrant=False) if self.on else self.inner(x))

        def prepare(model, i):
            for b in model.blocks:
                b.on = i >= LATE

        self.check(lambda: stack(Inside, 2), prepare=prepare, plans=("whole", "lean", "lean, offload"))

    def test_around_blocks(self):
        class Around(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks, self.mids, self.last, self.on = nn.ModuleList(Block() for _ in range(2)), nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 1), False

            def forward(self, x):
                for b, mid in zip(self.blocks, self.mids):
                    f = lambda x, b=b, mid=mid: mid(b(mid(x)).tanh()).tanh()
                    x = checkpoint.checkpoint(f, x, use_reentrant=False) if self.on else f(x)
                return self.last(x)

        def make():
            torch.manual_seed(1)
            return Around()

        def again():  # as PyTorch 2 tells it
            frame = sys._getframe(1)
            while frame is not None and not (frame.f_code.co_name == "unpack" and frame.f_code.co_filename.endswith("checkpoint.py")):
                frame = frame.f_back
            return -1 if frame is None else 1

        for told in (_managed.in_backward, again):
            with mock.patch.object(_managed, "in_backward", told):
                self.check(make, prepare=lambda model, i: setattr(model, "on", i >= LATE), plans=("whole", "lean", "whole, offload"))


if __name__ == "__main__":
    unittest.main()
