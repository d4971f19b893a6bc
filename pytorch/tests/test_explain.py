"""explain(): who holds memory, at any time and when it runs out.

The tests have a fake list of allocated blocks, so that sums can be compared without a GPU.
With STOWAGE_DEVICE=cuda those of the class OnGPU compare them with the real allocator.

SPEC S8.4.
"""

import gc
import itertools
import json
import random
import threading
import unittest
import weakref
from unittest import mock

from common import DEVICE, allocated, runtime, stowage, torch
from stowage import _explain, _memory
from stowage._record import storage_of
from torch import nn
from zoo import leaf

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
CUDA_1 = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity; 76.50 GiB already allocated; 1.20 GiB free; 77.10 GiB reserved in total by PyTorch)"
CUDA_2 = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which 1.50 GiB is free. Including non-PyTorch memory, this process has 138.29 GiB memory in use. Of the allocated memory 130.00 GiB is allocated by PyTorch, and 7.00 GiB is reserved by PyTorch but unallocated."


def blocks_of(tensors, more=()):
    """Blocks as a caching allocator would have them for these tensors, rounded, and others."""
    found = dict(more)
    for t in tensors:
        s = storage_of(t)
        if s.nbytes():
            found[s.data_ptr()] = (s.nbytes() + 511) // 512 * 512
    # The C library's blocks are closer together than those of a GPU's allocator.
    out, order = [], sorted(found)
    for at, following in itertools.zip_longest(order, order[1:]):
        out.append((at, found[at] if following is None else min(found[at], following - at)))
    return out


def live_tensors():
    """All tensors of the CPU that Python has."""
    return [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and on_cpu(o)]


def on_cpu(t):
    try:
        return t.device.type == "cpu" and t.layout is torch.strided
    except RuntimeError:  # gradients that do not exist are tensors without a device
        return False


class FakeDevice:
    """A device in the place of the CPU, whose allocator has all tensors of Python, some
    blocks of nobody, free blocks and a limit."""

    def __init__(self, others=3 * MiB, free=8 * MiB, total=GiB):
        self.others, self.free, self.total = others, free, total

    def __call__(self, device):
        self.blocks = blocks_of(live_tensors(), {(1 << 62) + i * MiB: self.others // 3 for i in range(3)})
        allocated = sum(n for _, n in self.blocks)
        return _memory.Picture(self.blocks, allocated + 5 * MiB, MiB, 2 * MiB, self.free, self.total)

    def __enter__(self):
        self.patch = mock.patch.object(_memory, "picture_of", self)
        self.patch.__enter__()
        return self

    def __exit__(self, *a):
        self.patch.__exit__(*a)


class Saves(nn.Module):
    """Saves one result of 64 KiB, and fails if it is told to."""

    SIZE = 64 * KiB

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.fails = None

    def forward(self, x):
        if self.fails is not None:
            raise self.fails
        return torch.exp(x * 0.0) * 1.0


def tree(rng, depth=3):
    """Returns a random tree of modules with leaves that save."""
    if depth == 0 or rng.random() < 0.3:
        return Saves()
    return nn.Sequential(*[tree(rng, depth - 1) for _ in range(rng.randint(1, 3))])


def note_of(e):
    notes = getattr(e, "__notes__", None)
    return notes[0] if notes else str(e).partition("\n")[2]


@unittest.skipUnless(DEVICE == "cpu", "the blocks are those of the CPU")
class Sums(unittest.TestCase):
    def check(self, x):
        """The law of every explanation, and that its text and dictionary are well formed."""
        d = x.to_dict()
        self.assertEqual(x.allocated, sum(x.held.values()), x)
        self.assertEqual(x.held["saved"], sum(s.bytes for s in x.saved), x)
        self.assertTrue(all(n >= 0 for n in x.held.values()), x)
        self.assertEqual([s.bytes for s in x.saved], sorted((s.bytes for s in x.saved), reverse=True))
        json.dumps(d)
        for line in str(x).splitlines():
            self.assertLessEqual(len(line), 100)
        return x

    def test_without_a_runtime(self):
        gc.collect()
        before = self.check(stowage.explain())
        m = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
        m[2].weight = m[0].weight  # counts once
        optimizer = torch.optim.Adam(m.parameters())
        floats = 4 * (64 * 64 + 64 + 2 * 64)

        def more():
            x = self.check(stowage.explain(m, optimizer))
            return {name: x.held[name] - before.held[name] for name in x.held}

        self.assertEqual({"weights": floats + 2 * 64 * 4 + 8, "gradients": 0, "optimizer": 0, "saved": 0, "other": 0}, more())
        m(torch.randn(8, 64)).sum().backward()
        self.assertEqual(floats, more()["gradients"])
        optimizer.step()
        self.assertGreaterEqual(more()["optimizer"], 2 * floats)

    def test_the_rest_is_what_nobody_has(self):
        gc.collect()
        with FakeDevice(3 * MiB) as fake:
            x = self.check(stowage.explain())
            self.assertEqual(sum(n for _, n in fake.blocks), x.allocated)
            self.assertLessEqual(3 * MiB, x.held["other"])
            self.assertEqual((5 * MiB, 2 * MiB, MiB, 8 * MiB, GiB), (x.unused, x.largest, x.pending, x.free, x.total))
            self.assertEqual(GiB, x.allocated + x.unused + x.runtime + x.elsewhere + x.free)
            for words in ("temporaries and others", "the largest free block", "freed, but in use on another stream", "the device", "1.0 GiB  100.0%"):
                self.assertIn(words, str(x))

    def test_random_trees(self):
        """What each module saved is what the innermost module with a group saved."""
        for seed in range(24):
            gc.collect()  # an exception that a module has holds frames
            with self.subTest(seed=seed):
                self.random_tree(random.Random(seed))

    def random_tree(self, rng):
        model = nn.Sequential(tree(rng), tree(rng), Saves())
        named = [(name, m) for name, m in model.named_modules() if name]
        grouped = dict(rng.sample(named, rng.randint(1, len(named))))
        leaves = [(name, m) for name, m in named if isinstance(m, Saves)]
        failing = rng.randrange(len(leaves) + 1)
        want = {}
        for name, _ in leaves[:failing]:
            inner = [g for g in grouped if name == g or name.startswith(g + ".")]
            key = max(inner, key=len) if inner else "outside of groups"
            want[key] = want.get(key, 0) + 1
        if failing < len(leaves):
            leaves[failing][1].fails = RuntimeError(FULL)
        kind, made = rng.choice(["keep", "limit", "offload"]), []
        of_runtime = _explain.of_runtime

        def remember(*given):
            made.append(of_runtime(*given))
            return made[-1]

        with runtime(kind, **({"saved_limit": "1GiB"} if kind == "limit" else {})) as rt, FakeDevice(), mock.patch.object(_explain, "of_runtime", remember):
            rt.attach(model, {name: rng.choice("abc") for name in grouped})
            try:
                with rt.step():
                    y = model(leaf(128, 128))
                    rt.explain()
                    del y
            except RuntimeError as e:
                self.assertIn("memory of cpu when 4.0 KiB more did not fit:", note_of(e))
        (x,) = made
        self.check(x)
        # A product with a number saves the number, in a block of its own.
        got = {s.module: s.bytes // Saves.SIZE for s in x.saved if s.bytes >= Saves.SIZE}
        if kind == "offload":
            self.assertEqual(sum(want.values()), (x.held["saved"] + x.offloaded) // Saves.SIZE)
            self.assertLessEqual(set(got), set(want))
        else:
            self.assertEqual(want, got)

    def test_offloaded_tensors_stay_where_they_are(self):
        with runtime("offload") as rt:
            for _ in range(3):
                with rt.step():
                    y = leaf(128, 128)
                    for i in range(8):
                        with rt.group("abc"[i % 3]):
                            y = torch.tanh(y) * 1.0
                    usage = rt._library.usage()
                    x = self.check(rt.explain())
                    self.assertEqual(usage, rt._library.usage())
                    self.assertEqual(8, (x.held["saved"] + x.offloaded) // (64 * KiB))
                    y.sum().backward()
            self.assertGreater(x.offloaded, 0)
            self.assertIn("saved tensors in host memory", str(x))


@unittest.skipUnless(DEVICE == "cpu", "the blocks are those of the CPU")
class Failures(unittest.TestCase):
    def failing(self, e):
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                raise type(e)(*e.args)  # another: the class would hold this one and its frames

        return Fails.apply

    def leaves(self, rt, e, where):
        """Runs a step that fails with e, and returns what leaves it."""
        model = nn.Sequential(Saves(), Saves(), Saves())
        rt.attach(model, {"?": "a"})
        fails = self.failing(e)
        with self.assertRaises(BaseException) as raised, rt.step():
            x = leaf(128, 128)
            if where == "backward":
                x = fails(x)
            y = model(x).sum()
            if where == "forward":
                raise e
            y.backward()
        return raised.exception

    def test_forward_and_backward(self):
        for e in (RuntimeError(FULL), torch.cuda.OutOfMemoryError(CUDA_1), torch.cuda.OutOfMemoryError(CUDA_2)):
            for where in ("forward", "backward"):
                with self.subTest(where, e=e), runtime("keep") as rt:
                    got = self.leaves(rt, type(e)(str(e)), where)
                    self.assertIs(type(e), type(got))
                    self.assertIn("did not fit:", note_of(got))
                    self.assertIn("* (3 modules)" if where == "forward" else "saved tensors", note_of(got))
                    with rt.step():
                        leaf(4).exp().sum().backward()

    def test_other_exceptions_are_left_alone(self):
        for e in (ValueError("x"), RuntimeError("x"), KeyboardInterrupt()):
            with runtime("keep") as rt:
                self.assertFalse(getattr(self.leaves(rt, e, "forward"), "__notes__", None))

    def test_an_exception_that_is_caught(self):
        with runtime("keep") as rt, mock.patch.object(_explain, "of_runtime") as made, rt.step():
            try:
                raise RuntimeError(FULL)
            except RuntimeError:
                pass
            leaf(4).exp().sum().backward()
        made.assert_not_called()

    def test_exceptions_without_notes(self):
        """Before Python 3.11 the text is part of the exception's own."""

        class Old(RuntimeError):
            def __getattribute__(self, name):
                if name == "add_note":
                    raise AttributeError(name)
                return super().__getattribute__(name)

        with runtime("keep") as rt:
            got = self.leaves(rt, Old(FULL), "forward")
        self.assertIs(Old, type(got))
        self.assertTrue(str(got).startswith(FULL + "\nmemory of cpu when 4.0 KiB more did not fit:\n"), got)

    def test_memory_runs_out_when_a_tensor_is_reloaded(self):
        with runtime("offload") as rt:
            for i in range(3):
                with self.assertRaises(stowage.Error) if i == 2 else mock.MagicMock() as raised, rt.step():
                    y = leaf(128, 128)
                    for j in range(8):
                        with rt.group("abc"[j % 3]):
                            y = torch.tanh(y) * 1.0
                    with mock.patch.object(rt._step, "provide", side_effect=RuntimeError(FULL)) if i == 2 else mock.MagicMock():
                        y.sum().backward()
            e = raised.exception
            text = str(e) + "".join(getattr(e, "__notes__", ()))
            self.assertIn("no memory to reload a saved tensor", text)
            self.assertEqual(1, text.count("memory of cpu when 4.0 KiB more did not fit"))

    def test_temporaries_that_are_freed_since(self):
        with FakeDevice(), runtime("keep") as rt:
            for text, words in ((CUDA_1, "76.[45] GiB"), (CUDA_2, "1(29.9|30.0) GiB")):
                self.assertRegex(str(_explain.of_runtime(rt, None, text)), f"note: about {words} more were allocated when memory\\s+ran out")
            x = _explain.of_runtime(rt, None, CUDA_1)
            self.assertIn("when 2.0 GiB more did not fit", str(x))
            self.assertEqual(int(76.5 * GiB) + x.runtime + x.free, x.most)

    def test_nothing_is_kept(self):
        """After the exception is gone so are tensors, without the collector's help."""
        gc.collect()
        gc.disable()
        try:
            for where in ("forward", "backward", "between"):
                with runtime("keep") as rt:
                    model = nn.Sequential(Saves(), Saves())
                    a = rt.attach(model, {"?": "a"})
                    seen = []

                    def run(explain):
                        try:
                            with rt.step():
                                y = model(leaf(128, 128))
                                z = self.failing(RuntimeError(FULL))(y)
                                seen.extend(weakref.ref(t) for t in (y, z))
                                if where == "forward":
                                    raise RuntimeError(FULL)
                                if where == "backward":
                                    y.sum().backward()
                                    z.sum().backward()
                                return rt.explain() if explain else None
                        except RuntimeError as e:
                            return note_of(e)

                    x = run(True)
                    self.assertTrue(x)
                    self.assertEqual([None] * len(seen), [w() for w in seen], where)
                    m = weakref.ref(model)
                    a.detach()
                    del model
                    self.assertIsNotNone(x)
                del run, a
                self.assertIsNone(m(), where)
        finally:
            gc.enable()

    def test_a_step_that_saves_much(self):
        """The list of what was saved does not grow with the number of backward passes."""
        with runtime("keep") as rt, rt.step():
            for i in range(2000):
                leaf(4).exp().exp().exp().sum().backward()
            self.assertLess(len(rt._step.saves), 4200)
            x = leaf(128, 128)
            y = x.exp().exp()
            self.assertEqual(2 * 64 * KiB, rt.explain().held["saved"])
            del y

    def test_a_module_that_keeps_its_output(self):
        """The places of saved tensors do not hold their modules."""

        class Keeps(Saves):
            def forward(self, x):
                self.last = super().forward(x)
                return self.last

        for kind in ("keep", "offload"):
            with runtime(kind) as rt:
                model = nn.Sequential(Keeps())
                a = rt.attach(model, {"0": "a"})
                with rt.step():
                    model(leaf(128, 128)).sum().backward()
                m = weakref.ref(model[0])
                a.detach()
                del model, a
            gc.collect()
            self.assertIsNone(m(), kind)


class Robust(unittest.TestCase):
    def test_wrong_arguments(self):
        for given in ((5,), ("x", "y"), ([None, 3], None, None), (None, None, "nonsense"), (None, None, 3.5), (None, object())):
            with self.subTest(given=given):
                self.assertIn("memory of", str(stowage.explain(*given)))
        self.assertIn("expected a torch.nn.Module as model, got int", str(stowage.explain(5)))

    def test_what_cannot_be_read(self):
        class Trouble(torch.Tensor):
            @classmethod
            def __torch_function__(cls, *_, **__):
                raise ValueError("not for you")

        class Optimizer:
            @property
            def state(self):
                raise ValueError("no state")

        m = nn.Linear(3, 3)
        m.register_buffer("trouble", torch.ones(100).as_subclass(Trouble))
        self.assertEqual(allocated(36, 12, 400), stowage.explain(m).held["weights"])
        del m.trouble
        x = stowage.explain(m, Optimizer())
        self.assertIn("note: the optimiser's state could not be read (ValueError: no state)", str(x))
        self.assertEqual(allocated(36, 12), x.held["weights"])
        with mock.patch.object(_memory, "picture_of", side_effect=RuntimeError("another allocator")):
            self.assertIn("another allocator", str(stowage.explain(m)))
        with mock.patch.object(_explain, "Ledger", side_effect=KeyError("x")):
            self.assertIn("the rest could not be read (KeyError", str(stowage.explain(m)))

    def test_sparse_gradients(self):
        e = nn.Embedding(1000, 16, sparse=True)
        gc.collect()
        before = stowage.explain(e).held["gradients"]
        e(torch.arange(10)).sum().backward()
        self.assertEqual(allocated(10 * 8, 10 * 16 * 4), stowage.explain(e).held["gradients"] - before)

    def test_a_closed_runtime(self):
        with runtime("keep") as rt:
            pass
        self.assertIn("memory of", str(rt.explain()))

    def test_from_other_threads(self):
        """Threads that look do not disturb the step, nor does the step disturb them."""
        with runtime("offload") as rt:
            over, trouble = threading.Event(), []

            def look():
                while not over.is_set():
                    x = rt.explain()
                    if sum(x.held.values()) != x.allocated or any("not be read" in n for n in x.notes):
                        trouble.append(str(x))

            threads = [threading.Thread(target=look) for _ in range(3)]
            for t in threads:
                t.start()
            for _ in range(10):
                with rt.step():
                    y = leaf(128, 128)
                    for i in range(6):
                        with rt.group("abc"[i % 3]):
                            y = torch.tanh(y) * 1.0
                    y.sum().backward()
            over.set()
            for t in threads:
                t.join()
            self.assertEqual([], trouble[:1])
            self.assertEqual(10, rt.stats()["steps"])


class Words(unittest.TestCase):
    """The text, from numbers."""

    def make(self, **given):
        x = stowage.Explanation()
        x.device, x.counted = "cuda:0", True
        for name, value in given.items():
            setattr(x, name, value)
        return x

    def test_budgets(self):
        for given, words in (
            ({}, "which budget would fit is not known: no step was measured under one"),
            ({"least": 3 * GiB, "budget": 4 * GiB}, "a step needs a budget of 3.0 GiB or more; this runtime has 4.0 GiB; how much this process can have is not known"),
            ({"most": 9 * GiB}, "this process can have a budget of 9.0 GiB; the smallest that would fit is not known before a step was measured under one"),
            ({"most": 9 * GiB, "failed": True, "budget": 8 * GiB, "then": 6 * GiB, "asked": GiB}, "the budget of 8.0 GiB was kept, but no free block was large enough; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
            ({"most": 9 * GiB, "failed": True, "budget": 8 * GiB, "then": 8 * GiB, "asked": GiB}, "the step exceeded its budget of 8.0 GiB, of which the runtime cannot lower all; shard the model, or make the batch smaller"),
            ({"most": 9 * GiB, "least": 3 * GiB, "failed": True, "budget": 12 * GiB}, "a budget between 3.0 GiB and 9.0 GiB would have fitted; this runtime has 12.0 GiB"),
            ({"most": 9 * GiB, "least": 10 * GiB, "failed": True}, "no budget would have fitted: a step needs at least 10.0 GiB, and this process can have 9.0 GiB; shard the model, or make the batch smaller"),
            ({"most": 9 * GiB, "stays": 10 * GiB}, "no budget would fit: weights, gradients and optimiser state take 10.0 GiB, and this process can have 9.0 GiB; shard the model, or make the batch smaller"),
        ):
            with self.subTest(words):
                x = self.make(**given)
                self.assertEqual(words, x.advice())
                self.assertIn(words, " ".join(str(x).split()))

    def test_layers_that_are_alike_share_a_line(self):
        saved = [stowage._explanation.Saved(f"model.layers.{i}.{part}", part, n * MiB) for i in range(32) for part, n in (("mlp", 64), ("self_attn", 16))]
        saved += [stowage._explanation.Saved(f"part{i}." + "very_long_name." * 20, "x", KiB) for i in range(30)]
        x = self.make(saved=saved, held={"weights": 0, "gradients": 0, "optimizer": 0, "saved": sum(s.bytes for s in saved), "other": 0}, total=80 * GiB)
        lines = str(x).splitlines()
        self.assertRegex(str(x), r"model\.layers\.\*\.mlp \(32 modules\) +2\.0 GiB +2\.5%")
        self.assertLessEqual(max(map(len, lines)), 100)
        self.assertIn("21 more", str(x))
        self.assertLess(len(lines), 30)

    def test_the_budget_of_a_measured_step(self):
        """The least budget that is named is enough, and not what the runtime has."""
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
        budget = 64 * MiB if DEVICE == "cpu" else 4 * GiB
        with runtime("budget", budget=budget) as rt:
            rt.attach(model, {"?": "a"})
            self.assertIn("no step was measured" if DEVICE == "cpu" else "not known before", str(rt.explain()).replace("\n  ", " "))
            for _ in range(3):
                with rt.step():
                    model(torch.randn(256, 64)).sum().backward()
                model.zero_grad(set_to_none=True)
            x = rt.explain()
        self.assertEqual(budget, x.budget)
        self.assertGreaterEqual(x.least, 2 * 6 * 4 * (64 * 64 + 64))
        # On a GPU everything counts that the process holds, workspaces of libraries too.
        self.assertLess(x.least, MiB if DEVICE == "cpu" else torch.cuda.memory_allocated() + 64 * MiB)


class Snapshots(unittest.TestCase):
    """The allocator's own description of its blocks."""

    def test_both_forms(self):
        """PyTorch 1.13 leaves out the addresses of blocks."""
        for addresses in (False, True):
            segments = [
                {"device": 1, "address": 7, "total_size": 99, "blocks": [{"size": 99, "state": "active_allocated"}]},
                {"device": 0, "address": 8192, "total_size": 4096, "blocks": [{"size": 1024, "state": "active_allocated"}, {"size": 2048, "state": "inactive"}, {"size": 1024, "state": "active_allocated"}]},
                {"device": 0, "address": 1024, "total_size": 3072, "blocks": [{"size": 512, "state": "inactive"}, {"size": 512, "state": "active_pending_free"}, {"size": 2048, "state": "active_allocated"}]},
            ]
            for s in segments if addresses else ():
                at = s["address"]
                for b in s["blocks"]:
                    b["address"], at = at, at + b["size"]
            with mock.patch.multiple(torch.cuda, is_initialized=lambda: True, memory_snapshot=lambda: segments, mem_get_info=lambda d: (10, 20000), is_current_stream_capturing=lambda: False):
                got = _memory.picture_of(torch.device("cuda", 0))
            self.assertEqual(([(2048, 2048), (8192, 1024), (11264, 1024)], 7168, 512, 2048, 10, 20000), tuple(got))

    def test_in_a_capture(self):
        """The driver is asked nothing then. What a block says of its address counts."""
        blocks = [{"size": 8, "state": "active_allocated", "address": 640}, {"size": 16, "state": "inactive", "address": 512}, {"size": 32, "state": "active_allocated", "address": 528}]
        cuda = dict(is_initialized=lambda: True, memory_snapshot=lambda: [{"device": 0, "address": 512, "total_size": 256, "blocks": blocks}], mem_get_info=mock.Mock(side_effect=AssertionError))
        with mock.patch.multiple(torch.cuda, is_current_stream_capturing=lambda: True, **cuda):
            self.assertEqual(([(528, 32), (640, 8)], 256, 0, 16, None, None), tuple(_memory.picture_of(torch.device("cuda", 0))))

    def test_no_gpu_is_started(self):
        with mock.patch.multiple(torch.cuda, is_initialized=lambda: False, memory_snapshot=mock.Mock(side_effect=AssertionError)):
            self.assertEqual(_memory.Picture(), _memory.picture_of(torch.device("cuda", 0)))
            self.assertIn("memory of cuda:0 now", str(stowage.explain(device="cuda:0")))


@unittest.skipUnless(DEVICE == "cuda", "STOWAGE_DEVICE is not cuda")
class OnGPU(unittest.TestCase):
    def test_sums_are_the_allocators(self):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)])
        optimizer = torch.optim.Adam(model.parameters())
        with runtime("keep") as rt:
            rt.attach(model, {"?": "a"}, optimizer=optimizer)
            for _ in range(2):
                with rt.step():
                    y = model(torch.randn(4096, 1024))
                    before = torch.cuda.memory_allocated()
                    x = rt.explain()
                    self.assertEqual(before, torch.cuda.memory_allocated())
                    y.sum().backward()
                    del y
                optimizer.step()
            self.assertEqual(before, x.allocated)
            self.assertEqual(before, sum(x.held.values()))
            self.assertEqual(4, len(x.saved))
            with self.assertRaises(torch.cuda.OutOfMemoryError) as raised, rt.step():
                model(torch.randn(4096, 1024)).sum().backward()
                torch.empty(1 << 44, dtype=torch.uint8)
            print(note_of(raised.exception))
            self.assertIn("16.0 TiB more did not fit", note_of(raised.exception))


if __name__ == "__main__":
    unittest.main()
