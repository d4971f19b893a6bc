"""Parts of the package on their own, where a whole step would hide what they do. The GPU and other libraries are played."""

import contextlib
import copy
import ctypes
import functools
import random
import types
import unittest
from unittest import mock

from blocks import Block, Compared, choices, one_pass, planned, stack, train
from common import DEVICE, same, stowage, torch
from stowage import _again, _bits, _compiled, _explain, _library, _memory, _profile, _rerun, _runtime, _smaller, _surroundings, _units
from stowage._clock import FILL, Clock, Stopwatch
from stowage._errors import Error, Overflow, TooSmall
from stowage._planned import RECORDED
from stowage._record import Handle, Kept
from torch import nn
from zoo import leaf

GPU = torch.device("cuda", 1)
CPU = torch.device("cpu")


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


class Played:
    """Plays torch.cuda for a while, and notes what it is asked."""

    def __init__(self):
        self.log, self.state, self.replayed = [], torch.zeros(4), lambda: None

    def __enter__(self):
        note = lambda name, result=None: lambda *a, **k: self.log.append((name, *a, *k.values())) or (result(*a) if callable(result) else result)

        @contextlib.contextmanager
        def inside(name, *given, **more):
            self.log.append((name, *given, *more.values()))
            yield
            self.log.append((f"end of {name}",))

        class Stream:
            def __init__(stream, name):
                stream.name, stream.cuda_stream = name, 9

            def wait_stream(stream, other):
                self.log.append((f"{stream.name} waits for {other.name}",))

        class Graph:
            def replay(_):
                self.log.append(("replay",))
                self.replayed()

        self.patch = mock.patch.multiple(
            torch.cuda, get_rng_state=note("get random", lambda *_: self.state.clone()), set_rng_state=note("set random"), synchronize=note("synchronize"), _sleep=note("sleep"),
            device=functools.partial(inside, "device"), stream=lambda s: inside(f"stream {s.name}"), graph=lambda g, stream: inside(f"capture on {stream.name}"), CUDAGraph=Graph,
            Stream=lambda device: Stream("side"), current_stream=lambda device=None: Stream("main"), reset_peak_memory_stats=note("reset"),
            memory_stats_as_nested_dict=lambda device: {"allocated_bytes": {"all": {"current": 5, "peak": 7}}} if device == GPU else {},
        )
        self.patch.__enter__()
        return self

    def __exit__(self, *error):
        self.patch.__exit__(*error)

    def said(self):
        log, self.log = self.log, []
        return log


class Reruns(unittest.TestCase):
    def runtime(self, model, device=CPU, overflows=True):
        log = []

        @contextlib.contextmanager
        def step(key):
            log.append(key)
            yield

        return types.SimpleNamespace(device=device, _attached=[types.SimpleNamespace(model=model)], _overflows=overflows, step=step, log=log, check=lambda: None)

    def test_what_is_put_back(self):
        """Random numbers, buffers, tensors that are named, and gradients: those that were there, with what they had."""
        model = nn.BatchNorm1d(3)
        model.weight.grad = torch.ones(3)
        mine = torch.ones(2)
        with Played() as gpu:
            for device in (CPU, GPU):
                for gradients in (True, False):
                    state = _rerun.State(self.runtime(model, device), [mine], gradients)
                    self.assertEqual([("get random", GPU)] if device is GPU else [], gpu.said())
                    first, grad = torch.rand(3), model.weight.grad
                    mine.add_(1)
                    model.running_mean.add_(1)
                    model.weight.grad.add_(1)
                    model.weight.grad, model.bias.grad = torch.zeros(3), torch.zeros(3)
                    state.restore()
                    self.assertTrue(same(first, torch.rand(3)))
                    self.assertEqual([("set random", mock.ANY, GPU)] if device is GPU else [], gpu.said())
                    self.assertEqual(([1.0] * 2, [0.0] * 3), (mine.tolist(), model.running_mean.tolist()))
                    if gradients:
                        self.assertIs(grad, model.weight.grad)
                        self.assertEqual([1.0] * 3, grad.tolist())
                        self.assertIsNone(model.bias.grad)
                    else:
                        self.assertEqual([0.0] * 3, model.weight.grad.tolist())
                    model.weight.grad, model.bias.grad = torch.ones(3), None

    def test_until_there_is_room(self):
        for fails in range(_rerun.TRIES + 1):
            rt, total, left = self.runtime(nn.Linear(2, 2)), torch.zeros(()), [fails]

            def fn(a, b):
                total.add_(1)
                if left[0]:
                    left[0] -= 1
                    raise Overflow("too many rows")
                return a + b

            if fails < _rerun.TRIES:
                self.assertEqual(7, _rerun.run(rt, fn, (3, 4), "key", [total]))
                self.assertEqual(1, total)
            else:
                with self.assertRaisesRegex(Error, r"^the step overflowed 4 times; use .* \(too many rows\)$"):
                    _rerun.run(rt, fn, (3, 4), "key", [total])
                self.assertEqual(0, total)
            self.assertEqual(["key"] * min(fails + 1, _rerun.TRIES), rt.log)
        rt = self.runtime(nn.Linear(2, 2), overflows=False)
        with mock.patch.object(_rerun, "State", side_effect=AssertionError):  # nothing is copied
            self.assertEqual(7, _rerun.run(rt, lambda a, b: a + b, (3, 4), "", []))

    def graph(self, gpu, overflows=True):
        model, total, calls = nn.Linear(2, 1), torch.zeros(()), []
        model.weight.grad = torch.ones(1, 2)
        rt = self.runtime(model, GPU, overflows)

        def fn(x, scale):
            calls.append((x.data_ptr(), None if model.weight.grad is None else 1, x.grad is None))
            total.add_(1)
            y = model(x).sum() * scale
            y.backward()
            return y

        x = leaf(3, 2)
        return _rerun.Graph(rt, fn, (x, 2.0), "key", [total]), rt, model, total, calls, x

    def test_a_graph_is_captured(self):
        """After three steps on a stream of its own, without gradients, and from the state before them."""
        with Played() as gpu:
            graph, rt, model, total, calls, x = self.graph(gpu)
            # Every step finds no gradients, so that a replay writes them and does not add to them.
            self.assertEqual([(graph.inputs[0].data_ptr(), None, True)] * 4, calls)
            self.assertEqual(["key"] * 4, rt.log)
            self.assertEqual(1, total)  # three times back, and the capture, which is played here
            said = [entry[0] for entry in gpu.said() if "random" not in entry[0]]
            self.assertEqual(["side waits for main", "stream side", "end of stream side", "main waits for side", "capture on side", "end of capture on side"], said)
            self.assertIsNot(x, graph.inputs[0])
            self.assertNotEqual(x.data_ptr(), graph.inputs[0].data_ptr())
            self.assertTrue(graph.inputs[0].requires_grad and same(x, graph.inputs[0]))

    def test_a_graph_is_called(self):
        with Played() as gpu:
            for overflows in (False, True):
                graph, rt, model, total, calls, x = self.graph(gpu, overflows)
                graph._drop_gradients()
                self.assertEqual((None, None, None), (model.weight.grad, model.bias.grad, graph.inputs[0].grad))
                gpu.said()
                other = torch.randn(3, 2)
                self.assertIs(graph.out, graph(other, 2.0))
                self.assertTrue(same(other, graph.inputs[0]))
                self.assertEqual([("replay",)], [e for e in gpu.said() if "random" not in e[0]])
                graph(graph.inputs[0], 2.0)  # its own
                for given, sentence in (
                    ((other,), "captured with 2 arguments and called with 1"),
                    ((other, 3.0), "captured with the argument 2.0 and called with 3.0; only tensors may change"),
                    ((torch.randn(4, 2), 2.0), r"captured with torch.float32 \[3, 2\] and called with torch.float32 \[4, 2\]"),
                    ((other.double(), 2.0), r"captured with torch.float32 \[3, 2\] and called with torch.float64 \[3, 2\]"),
                ):
                    with self.assertRaisesRegex(Error, sentence):
                        graph(*given)

    def test_a_replay_that_overflows(self):
        for fails in range(_rerun.TRIES + 1):
            with Played() as gpu:
                graph, rt, model, total, calls, x = self.graph(gpu)
                total.zero_()
                left = [fails]
                gpu.replayed = lambda: total.add_(1)
                gpu.said()

                def check():
                    if left[0]:
                        left[0] -= 1
                        raise Overflow("too many rows")

                rt.check = check
                if fails < _rerun.TRIES:
                    graph(x, 2.0)
                    self.assertEqual(1, total)
                else:
                    with self.assertRaisesRegex(Error, "overflowed 4 times"):
                        graph(x, 2.0)
                    self.assertEqual(0, total)
                self.assertEqual(min(fails + 1, _rerun.TRIES), gpu.said().count(("replay",)))


class Devices(unittest.TestCase):
    def test_clocks(self):
        with Played() as gpu:
            events = [mock.Mock(), mock.Mock(), mock.Mock()]
            for i, e in enumerate(events):
                events[0].elapsed_time.side_effect = lambda e: 500.0 * events.index(e)
                e.query.return_value = True
            with mock.patch.object(torch.cuda, "Event", side_effect=events) as made:
                clock = Clock(GPU)
                self.assertEqual([], clock.read())
                clock.fill()
                self.assertEqual([("device", GPU), ("sleep", FILL), ("end of device",)], gpu.said())
                self.assertEqual([0, 1, 2], [clock.stamp() for _ in range(3)])
                made.assert_called_with(enable_timing=True)
                self.assertEqual([0.0, 0.5, 1.0], clock.read())
                self.assertEqual([("synchronize", GPU)], gpu.said())
                self.assertLess(clock.behind(), 1)
                self.assertEqual([("synchronize", GPU)], gpu.said())
            Stopwatch(GPU).seconds()
            self.assertEqual([("synchronize", GPU)] * 2, gpu.said())
            Stopwatch(CPU).seconds(), Clock(CPU).fill()
            self.assertEqual([], gpu.said())
        clock = Clock(CPU)
        with mock.patch("time.perf_counter", side_effect=[5.0, 7.0, 6.5]):
            clock.stamp(), clock.stamp(), clock.stamp()
        self.assertEqual(([0.0, 2.0, 1.5], float("inf")), (clock.read(), clock.behind()))
        with mock.patch("time.perf_counter", side_effect=[5.0, 7.0]):
            self.assertEqual(2.0, Stopwatch(CPU).seconds())

    def test_memory(self):
        with Played() as gpu:
            memory = _memory.CudaMemory(GPU)
            self.assertEqual((5, 7), (memory.allocated(), memory.peak()))
            memory.reset()
            self.assertEqual([("reset", GPU)], gpu.said())
            self.assertEqual((0, 0), (_memory.CudaMemory(torch.device("cuda", 0)).allocated(), _memory.CudaMemory(torch.device("cuda", 0)).peak()))

    def test_what_models_hold(self):
        """Every storage once: weights, buffers, gradients, and the optimiser's state, of this device."""
        tied = nn.Linear(4, 4, bias=False)
        model = nn.Sequential(tied, nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        model[2].weight = tied.weight
        on_meta = nn.Linear(4, 4, device="meta")
        optimizer = torch.optim.Adam(model.parameters())
        attached = [types.SimpleNamespace(model=m, optimizer=o) for m, o in ((model, optimizer), (None, None), (on_meta, None), (model, None))]
        counted = _memory.CountedMemory(attached)
        weights = 4 * (16 + 4 * 4) + 8
        self.assertEqual({"weights": weights, "gradients": 0, "optimizer": 0}, _memory.held_by(attached, CPU))
        self.assertEqual(4 * (16 + 8), _memory.gradients_to_come(attached, CPU))
        self.assertEqual((weights, weights), (counted.allocated(), counted.peak()))
        tied.weight.grad = torch.zeros(4, 4)
        self.assertEqual(4 * 8, _memory.gradients_to_come(attached, CPU))
        model[1].bias.requires_grad_(False)
        self.assertEqual(4 * 4, _memory.gradients_to_come(attached, CPU))
        model[1].bias.requires_grad_()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        steps = sum(s["step"].element_size() for s in optimizer.state.values())
        self.assertEqual({"weights": weights, "gradients": 96, "optimizer": 2 * 96 + steps}, _memory.held_by(attached, CPU))
        optimizer.state["other"] = "no dictionary"
        optimizer.state[tied.weight]["text"] = "no tensor"
        self.assertEqual(weights + 3 * 96 + steps, counted.allocated())

    def test_tensors_that_are_no_plain_memory(self):
        class Mine(torch.Tensor):
            pass

        seen = set()
        plain = torch.zeros(6)
        shard = types.SimpleNamespace(_local_tensor=plain)
        self.assertEqual([24, 0, 0, 0, 12], [_memory._new_bytes(t, CPU, seen) for t in (shard, plain, plain[2:], torch.eye(3).to_sparse(), torch.zeros(3).as_subclass(Mine))])

    def test_random_numbers(self):
        with Played() as gpu:
            one, other = _surroundings.Random(GPU), _surroundings.Random(GPU)
            self.assertEqual([("get random", GPU)] * 2, gpu.said())
            self.assertTrue(one.same(other))
            other.set()
            self.assertEqual([("set random", other.gpu, GPU)], gpu.said())
            other.gpu = torch.ones(4)
            self.assertFalse(one.same(other))
            self.assertTrue(one.same(_surroundings.Random(CPU)))
            torch.rand(1)
            self.assertFalse(one.same(_surroundings.Random(CPU)))
            one.set()
            self.assertTrue(one.same(_surroundings.Random(CPU)))

    def test_devices_of_runtimes(self):
        made = []

        def library(config, provide):
            made.append(config)
            raise Error("played")

        with Played(), mock.patch.multiple(torch.cuda, is_available=lambda: True, init=lambda: None, current_device=lambda: 3):
            for given, want in ((None, 3), ("cuda", 3), ("cuda:1", 1), (torch.device("cuda", 2), 2)):
                with self.assertRaisesRegex(Error, "played"):
                    stowage.Runtime(saved_limit="1MiB", device=given, library=library, rank=4, host="2KiB", live=0.25, log=True)
                self.assertEqual({"device": "cuda", "least": 1 << 20, "log": True, "rank": 4, "ordinal": want, "stream": 9, "saved_limit": 1 << 20, "host": 2048, "live": 0.25}, made.pop())
        with self.assertRaisesRegex(Error, "played"):
            stowage.Runtime(policy={"a": "offload"}, device="cpu", library=library)
        self.assertEqual({"device": "cpu", "least": 0, "log": False, "rank": 0, "policy": {"a": "offload"}}, made.pop())

    def test_captures(self):
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            self.assertEqual((False, True), (_runtime._capturing(CPU), _runtime._capturing(GPU)))
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
            self.assertFalse(_runtime._capturing(GPU))

    def test_children(self):
        """A forked child passes everything through, and a process that ends closes its runtimes, whatever one of them raises."""
        rts = {str(i): mock.Mock() for i in range(3)}
        rts["1"]._step = rts["2"]._now = None
        rts["0"].close.side_effect = Error("no")
        with mock.patch.object(_runtime, "_open", rts):
            _runtime._in_child()
            _runtime._close_all()
        rts["0"]._step.disown.assert_called_once_with()
        self.assertEqual((-1, -1), (rts["0"]._now.thread, rts["1"]._now.thread))
        for rt in rts.values():
            rt.close.assert_called_once_with()


class Around(unittest.TestCase):
    """What a second pass finds."""

    def test_default_devices(self):
        """Those of the first pass: the ones that are missing now, or the innermost if others are there."""
        entered = []

        class Device:
            def __init__(self, name):
                self.name = name

            def __enter__(self):
                entered.append(self.name)

            def __exit__(self, *_):
                entered.append(f"-{self.name}")

        a, b, c = map(Device, "abc")
        for want, now, enters in (((a, b), (), "ab"), ((a, b), (a,), "b"), ((a, b), (c,), "b"), ((a,), (a, b), "a"), ((a,), (b, a), "a"), ((), (), "")):
            with mock.patch.object(_surroundings, "default_devices", lambda: want):
                s = _surroundings.Surroundings()
            with mock.patch.object(_surroundings, "default_devices", lambda: now), s.again():
                self.assertEqual(list(enters), entered, (enters, now))
            self.assertEqual([f"-{name}" for name in reversed(enters)], entered[len(enters) :])
            entered.clear()
        s = _surroundings.Surroundings()
        with mock.patch.object(_surroundings, "default_devices", lambda: (a,)), mock.patch.object(torch, "device", lambda name: Device(name)), s.again():
            self.assertEqual(["cpu"], entered)  # a device of now, where there was none

    def test_the_stack(self):
        class DeviceContext:
            def __init__(self, device):
                self.device = device

        modes = [DeviceContext("one"), object(), DeviceContext("two")]
        with mock.patch.multiple(torch._C, create=True, _len_torch_function_stack=lambda: 3, _get_function_stack_at=modes.__getitem__):
            self.assertEqual(("one", "two"), _surroundings.default_devices())

    def test_autocast(self):
        for first, second in ((True, False), (False, True), (True, True), (False, False)):
            for cache in (True, False):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first, cache_enabled=cache):
                    s = _surroundings.Surroundings()
                    self.assertEqual(first and cache, s.caches())
                    want = _surroundings.autocasts()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=second):
                    before = _surroundings.autocasts()
                    self.assertEqual(first == second, s.same())
                    with s.again():
                        self.assertEqual(want, _surroundings.autocasts())
                        if first != second:
                            self.assertEqual(cache, torch.is_autocast_cache_enabled())
                    self.assertEqual(before, _surroundings.autocasts())

    def test_autocast_of_gpus(self):
        """It is entered where there is a GPU, or where it was on without one."""
        s = _surroundings.Surroundings()
        s.devices = ("other",)
        for there, on in ((False, False), (False, True), (True, False)):
            entered = []
            s.gpu = on, torch.float16

            def autocast(device, **how):
                entered.append((device, how["enabled"], how["dtype"], how["cache_enabled"]))
                return contextlib.nullcontext()

            with mock.patch.object(torch, "autocast", autocast), mock.patch.object(torch.cuda, "is_available", lambda: there), mock.patch.object(_surroundings, "default_devices", lambda: ("other",)):
                with s._again():
                    pass
            self.assertEqual([("cuda", on, torch.float16, True)] * (there or on) + [("cpu", False, torch.bfloat16, True)], entered)

    def test_modes(self):
        a, b = nn.Dropout(), nn.Dropout()
        b.eval()
        modes = [_surroundings.mode_of(a), _surroundings.mode_of(b)]
        with _surroundings.modes_again(modes):
            self.assertEqual((True, False), (a.training, b.training))
        a.eval()
        with contextlib.suppress(KeyError), _surroundings.modes_again(modes):
            self.assertEqual((True, False), (a.training, b.training))
            raise KeyError
        self.assertEqual((False, False), (a.training, b.training))


class SecondPasses(unittest.TestCase):
    def test_arguments(self):
        """Those of the first call: in any containers, tensors that are given twice twice, without history."""
        x, y = leaf(3), torch.randn(2)
        z = x * 2
        for args, kwargs in (((x, 3, y, x), {"a": z, "b": "text"}), (([x, {"k": (y, z)}], None, (z,)), {"a": [z], "b": x}), ((), {}), ((z,), {})):
            args_again, kwargs_again = _again.Inputs(_again.IN_PLACE, args, kwargs).again()
            flat, again = (torch.utils._pytree.tree_flatten((list(a), k)) for a, k in ((args, kwargs), (args_again, kwargs_again)))
            self.assertEqual(flat[1], again[1])
            twice = {}
            for a, b in zip(flat[0], again[0]):
                if not isinstance(a, torch.Tensor):
                    self.assertIs(a, b)
                    continue
                self.assertIs(b, twice.setdefault(id(a), b))
                self.assertTrue(same(a, b))
                self.assertEqual((a.requires_grad, None, a.data_ptr()), (b.requires_grad, b.grad_fn, b.data_ptr()))
                self.assertIsNot(a, b)

    def test_what_a_pass_saves(self):
        """As many tensors as are needed, without history, and the state of the thread as before."""
        module, x = nn.Identity(), leaf(4)
        forward = lambda x: x.exp().sin().exp()
        for need, many in ((-1, 3), (0, 0), (3, 3), (2, 2 if _again.STOPS else 3)):
            seen = []
            with torch.no_grad():
                saved, out = _again.collect(forward, module, (x,), {}, need, seen.append)
            self.assertEqual(many, len(saved))
            self.assertEqual([None] * many, [t.grad_fn for t in saved])
            self.assertEqual(2 if _again.STOPS and need == 2 else 3, len(seen))
            if need < 2:
                self.assertTrue(same(forward(x), out))
        marker = object()
        _again.state.lean = marker
        try:
            for fail in (False, True):
                with contextlib.suppress(KeyError):
                    _again.collect(lambda: self.assertEqual((1, None), (_again.state.again, _again.state.lean)) or {}["x" if fail else 0], module, (), {}, -1)
                self.assertEqual((0, marker), (_again.state.again, _again.state.lean))
        finally:
            _again.state.lean = None
        with self.assertRaisesRegex(RuntimeError, "a backward pass runs inside of a forward pass that is recomputed"):
            _again.collect(lambda x: torch.autograd.grad(x.exp().sum(), x), module, (x,), {}, -1)

    def test_a_whole_block(self):
        """Its second pass has the inputs, random numbers, modes and autocast of the first, and happens once."""
        block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Tanh())
        x, runs = leaf(5, 6), []

        def forward(x):
            runs.append(torch.get_rng_state())
            return block(x)

        def reset():
            block[2].reset_running_stats()
            torch.manual_seed(3)

        for first in (0, 2):
            reset()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                want = torch.autograd.grad(block(x).float().sum(), [x, *block.parameters()])
            means = [b.clone() for b in block.buffers()]
            reset()
            runs.clear()
            timed = []
            with torch.autocast("cpu", dtype=torch.bfloat16):
                whole = _again.Whole(block, forward, (x,), {}, CPU, _again.IN_PLACE, lambda run: timed.append(1) or run(), first)
                with _again.hooks(whole.pack, whole.unpack):
                    y = forward(x).float().sum()
            whole.end()
            self.assertEqual({*block.parameters(), x}, set(whole.weights) | {x})
            self.assertEqual([(m, True) for m in block.modules()], sorted((mode[:2] for mode in whole.modes), key=lambda mode: list(block.modules()).index(mode[0])))
            block.eval()
            torch.rand(5)
            state = torch.get_rng_state()
            got = torch.autograd.grad(y, [x, *block.parameters()])
            self.assertTrue(torch.equal(state, torch.get_rng_state()))
            self.assertTrue(torch.equal(*runs))
            self.assertFalse(any(m.training for m in block.modules()))
            block.train()
            self.assertEqual([1], timed)
            self.assertEqual({}, whole.values) if not first else None
            for a, b in zip([*want, *means], [*got, *block.buffers()], strict=True):
                self.assertTrue(same(a, b))

    def test_weights_that_change(self):
        block, x = nn.Linear(3, 3), leaf(2, 3)
        outside = leaf(3)
        for change in (block.weight, block.bias, outside, x):
            whole = _again.Whole(block, lambda x: block(x) * outside, (x,), {}, CPU, _again.IN_PLACE)
            with _again.hooks(whole.pack, whole.unpack):
                y = whole.forward(x)
            whole.end()
            with torch.no_grad():
                change.add_(1)
            with self.assertRaisesRegex(RuntimeError, r"modified by an inplace operation: \[torch.float32 .* is at version 1, and version 0 was saved|is at version \d+, and version \d+ was saved"):
                y.sum().backward()

    def test_other_passes(self):
        """One that saves something else is an error."""
        for second in (lambda x: x.exp().exp(), lambda x: x[:2].exp(), lambda x: x.double().exp()):
            forwards = iter((lambda x: x.exp(), second))
            x = leaf(3)
            whole = _again.Whole(nn.Identity(), lambda x: next(forwards)(x), (x,), {}, CPU, _again.IN_PLACE)
            with _again.hooks(whole.pack, whole.unpack):
                y = whole.forward(x)
            whole.end()
            with self.assertRaisesRegex(RuntimeError, "Identity saved 1 tensors and other ones when it was run again"):
                y.sum().backward()

    def test_recipes(self):
        """An operator that gives another shape or other strides is an error; views are those that were saved."""
        made = torch.randn(4, 6)
        for t in (made, made.t(), made[1:, ::2], made[2]):
            recipe = _again.Recipe("kind", lambda: made.clone(), made, t)
            got = recipe.value()
            self.assertTrue(same(t, got))
            self.assertEqual((t.stride(), t.storage_offset()), (got.stride(), got.storage_offset()))
        for other in (made.t().contiguous().t(), made.double(), made[:3], torch.randn(5, 6)[1:]):
            with self.assertRaisesRegex(Error, "gave another shape when it was repeated"):
                _again.Recipe("kind", lambda: other, made, made).value()

    def test_operators_that_can_be_repeated(self):
        """From what autograd saved for them, bit for bit; dropout with the mask of the first time."""
        x, y = leaf(4, 4), leaf(4, 4)
        F = nn.functional
        for make in (lambda: F.gelu(x), lambda: F.gelu(x, approximate="tanh"), lambda: F.silu(x), lambda: x * y, lambda: torch.native_dropout(F.silu(x), 0.4, True)[0], lambda: torch.native_dropout(torch.native_dropout(x * y, 0.5, True)[0], 0.4, True)[0]):
            t = make()
            recipe = _again.recipe(t, {})
            self.assertIsNotNone(recipe)
            self.assertTrue(same(t, recipe.value()))
            self.assertIsNone(recipe.value().grad_fn)
            self.assertIsNone(_again.recipe(t, {}, {recipe.kind}))
            part = t[1:]
            self.assertTrue(same(part, _again.recipe(part, {}).value()))
            self.assertTrue(same(t.double(), _again.recipe(t.double(), {}).value()))
        deep = x * y
        for _ in range(4):
            deep = torch.native_dropout(deep, 0.1, True)[0]
        one = torch.native_dropout(x * y, 1.0, True)[0]
        self.assertTrue(same(one, _again.recipe(one, {}).value()))
        for t in (x, x.exp(), x * 2.0, x.detach(), deep, torch.native_dropout(x, 0.5, True)[0], (x * torch.ones(4, 4)), torch.eye(3).to_sparse()):
            self.assertIsNone(_again.recipe(t, {}))

    def test_casts(self):
        """Of weights and of operators that can be repeated, and not of anything else."""
        w, x = nn.Parameter(torch.randn(4, 4)), leaf(4, 4)
        half = w.to(torch.bfloat16)
        self.assertIs(w, _again.cast_weight(half))
        self.assertIs(w, _again.cast_weight(half[1:]))
        for t in (w, x.exp(), x.exp().to(torch.bfloat16), torch.zeros(3)):
            self.assertIsNone(_again.cast_weight(t))
        recipe = _again.recipe(half, {})
        self.assertTrue(same(half, recipe.value()))
        for t in (x.to(torch.bfloat16), x.exp().to(torch.bfloat16)):
            self.assertIsNone(_again.recipe(t, {}))
        with torch.no_grad():
            w.add_(1)
        with self.assertRaisesRegex(Error, "modified by an inplace operation"):
            recipe.value()

    def test_views(self):
        """Of a tensor with the same storage: any shape, strides and type, conjugates and negatives."""
        base = torch.randn(4, 6, dtype=torch.complex64)
        for t in (base, base.t(), base[1:, ::2], base.conj(), base.conj()[2:], torch.view_as_real(base), base.conj().imag, base.imag, base.conj().t()):
            view = _again.View(t)
            for of in (base, base.t(), base.conj(), t):
                got = view.of(of)
                self.assertTrue(same(t.resolve_conj().resolve_neg(), got.resolve_conj().resolve_neg()))
                self.assertEqual((t.dtype, t.size(), t.stride(), t.storage_offset(), t.is_conj(), t.is_neg()), (got.dtype, got.size(), got.stride(), got.storage_offset(), got.is_conj(), got.is_neg()))
                self.assertEqual(t.storage().data_ptr(), got.storage().data_ptr())

    def test_in_checkpoints(self):
        said = []
        self.assertFalse(_again.in_checkpoint())
        torch.utils.checkpoint.checkpoint(lambda x: said.append(_again.in_checkpoint()) or x, leaf(2))
        self.assertEqual([True], said)

    def test_kinds(self):
        """What is made from a norm or activation is of its kind, and what is made from an operator is one more."""
        x, y, norm, lean = leaf(4, 8), leaf(4, 8), nn.LayerNorm(8), _again.Lean(_again.IN_PLACE, 1)
        self.addCleanup(lean.made.clear)  # a node must not lead to itself
        drop, F = lambda t: torch.native_dropout(t, 0.5, True)[0], nn.functional
        h = lean.call(norm, norm.forward, x * 2)
        kept = {h.grad_fn: None}
        for t, want in (
            (h, "LayerNorm"), (drop(h), "LayerNorm"), (drop(drop(h)), "LayerNorm"), (h.double(), "LayerNorm"), (F.gelu(h), "GeluBackward0"), (x * y, "MulBackward0"), (drop(x * y), "NativeDropoutBackward0 of MulBackward0"),
            ((x * y).double(), "ToCopyBackward0 of MulBackward0"), (drop(F.silu(h)), "NativeDropoutBackward0 of SiluBackward0"), (norm.weight.double(), "ToCopyBackward0"),
        ):
            recipe = _again.recipe(t, lean.made)
            self.assertEqual(want, recipe.kind)
            self.assertTrue(same(t, recipe.value()))
            self.assertIs(lean.made[h.grad_fn] if want == "LayerNorm" else None, recipe.small)
        for t in (h, drop(h), h.double()):
            self.assertIsNone(_again.recipe(t, kept))
        for t in (x.double(), x.exp().double(), (x * 2).double(), drop(x), drop(x.exp())):
            self.assertIsNone(_again.recipe(t, lean.made))

    def test_results_are_made_once(self):
        """The norm of a gated product, of dropout after it, and of an activation that saves its result is made once for
        all that need it, and forgotten after the last."""
        for build in (lambda h, u: h * u, lambda h, u: torch.native_dropout(h * u, 0.5, True)[0], lambda h, u: h * h + u):
            runs, norm, x = [], nn.LayerNorm(8), leaf(4, 8)
            up, down = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(x):
                runs.append(1)
                return norm(x)

            lean = _again.Lean(_again.IN_PLACE, 1)
            torch.manual_seed(1)
            want = torch.autograd.grad(down(build(norm(x * 2), up(x))).square().sum(), [x, up.weight, down.weight, norm.weight])
            torch.manual_seed(1)
            with _again.hooks(lean.pack, lean.unpack):
                h = lean.call(norm, forward, x * 2)
                small = lean.made[h.grad_fn]
                loss = down(build(h, up(x))).square().sum()
            del h
            lean.made.clear()
            runs.clear()
            got = torch.autograd.grad(loss, [x, up.weight, down.weight, norm.weight])
            for a, b in zip(want, got):
                self.assertTrue(same(a, b))
            self.assertEqual(([1], None, {}), (runs, small.y, small.values))
            self.assertLessEqual(small.uses, 0)

    def test_modules_that_save_their_results(self):
        """After a norm, one of those does not hold its input: it is made again, too. After one that is kept it is kept."""
        norm, act, x = nn.LayerNorm(8), nn.Sigmoid(), leaf(4, 8)
        down = nn.Linear(8, 8)
        with mock.patch.object(_again, "by_result", {act}):
            for refused in ((), ("LayerNorm",)):
                packed = []

                class Holder:
                    @staticmethod
                    def pack(t):
                        packed.append(t.data_ptr())
                        return _again.IN_PLACE.pack(t)

                    unpack = staticmethod(_again.IN_PLACE.unpack)

                lean = _again.Lean(Holder(), 1, refused)
                want = torch.autograd.grad(down(act(norm(x * 2))).square().sum(), [x, norm.weight, down.weight])
                with _again.hooks(lean.pack, lean.unpack):
                    h = lean.call(norm, norm.forward, x * 2)
                    y = lean.call(act, act.forward, h)
                    loss = down(y).square().sum()
                made = lean.made[y.grad_fn]
                if refused:
                    self.assertIsNone(made)
                    self.assertIn(y.data_ptr(), packed)
                else:
                    self.assertEqual(("LayerNorm", None), (made.kind, made.held))
                    self.assertEqual(1, made.before.small.uses)
                    self.assertFalse({h.data_ptr(), y.data_ptr()} & set(packed))
                del h, y
                lean.made.clear()
                for a, b in zip(want, torch.autograd.grad(loss, [x, norm.weight, down.weight])):
                    self.assertTrue(same(a, b))

    def test_sentences_of_hooks(self):
        for e, want in ((RuntimeError("Error: a sentence\n\nAt:\n  file.py"), "a sentence"), (RuntimeError("Error: a sentence"), ""), (RuntimeError("a sentence\n\nAt:\n"), ""), (Error("Error: a\n\nAt:\n"), "")):
            self.assertEqual(want, _again.raised(e))


class CheapParts(unittest.TestCase):
    """Norms and activations whose results are dropped, in a program of any of them."""

    def program(self, r, call):
        """Returns a loss, from modules that are called by call(module, x)."""
        h, kept = r.x, []
        for i in range(r.length):
            h = r.matrices[i](h)
            for m in r.modules[i]:
                h = call(m, h)
            if r.gated[i]:
                h = nn.functional.silu(h) * r.matrices[-1](h)
            if r.dropped[i]:
                h = torch.native_dropout(h, 0.3, True)[0]
            kept.append(h)
        return (r.matrices[0](h) + kept[0]).square().sum()

    def new(self, seed):
        draw = random.Random(seed)
        r = types.SimpleNamespace(length=draw.randrange(1, 4))
        r.matrices = [nn.Linear(8, 8) for _ in range(r.length + 1)]
        make = [lambda: nn.LayerNorm(8), nn.GELU, nn.ReLU, lambda: nn.ReLU(inplace=True), nn.Sigmoid, nn.Tanh, nn.SiLU, lambda: nn.BatchNorm1d(8), nn.Softplus, lambda: nn.ELU(inplace=False)]
        r.modules = [[draw.choice(make)() for _ in range(draw.randrange(4))] for _ in range(r.length)]
        for of in r.modules:
            for before, m in zip(of, of[1:]):
                if isinstance(m, nn.ReLU) and not isinstance(before, (nn.LayerNorm, nn.BatchNorm1d)):
                    m.inplace = False  # autograd saved what it would overwrite
        r.gated, r.dropped = ([draw.random() < p for _ in range(r.length)] for p in (0.3, 0.3))
        r.x = leaf(6, 8)
        r.weights = [r.x, *(p for m in r.matrices for p in m.parameters()), *(p for of in r.modules for m in of for p in m.parameters())]
        return r, draw

    def test_as_without_them(self):
        smaller = 0
        for seed in range(80):
            torch.manual_seed(seed)
            r, draw = self.new(seed)
            states = [copy.deepcopy(m.state_dict()) for of in r.modules for m in of]

            def run(call, pack, unpack):
                for m, state in zip([m for of in r.modules for m in of], states):
                    m.load_state_dict(state)
                torch.manual_seed(seed)
                with _again.hooks(pack, unpack):
                    return self.program(r, call)

            held, inplace = [], [getattr(m, "inplace", None) for of in r.modules for m in of]

            class Holder:
                def __init__(self):
                    self.now = set()

                def pack(self, t):
                    k = _again.IN_PLACE.pack(t)
                    if not (t.is_leaf and t.requires_grad):
                        self.now.add(_again.storage_of(t)._cdata)
                        held.append(k.tensor)  # so that no number is used twice
                    return k

                unpack = staticmethod(_again.IN_PLACE.unpack)

            plain, dropping = Holder(), Holder()
            want = torch.autograd.grad(run(lambda m, x: m(x), plain.pack, plain.unpack), r.weights, allow_unused=True)
            means = [b.clone() for of in r.modules for m in of for b in m.buffers()]
            timed, smalls = [], []
            refused = {type(m).__name__ for of in r.modules for m in of if draw.random() < 0.15}
            lean = _again.Lean(dropping, draw.choice([1, 33, 193]), refused, (lambda kind, make: timed.append(kind) or make()) if draw.random() < 0.5 else None)

            def call(m, x):
                y = lean.call(m, m.forward, x)
                small = lean.made.get(y.grad_fn)
                if small is not None:
                    smalls.append(small)
                return y

            loss = run(call, lean.pack, lean.unpack)
            lean.made.clear()
            for m in [m for of in r.modules for m in of]:
                m.eval()  # a second pass trains all the same
            got = torch.autograd.grad(loss, r.weights, allow_unused=True)
            for m in [m for of in r.modules for m in of]:
                self.assertFalse(m.training)
                m.train()
            for a, b in zip(want, got, strict=True):
                self.assertTrue(a is b is None or same(a, b), seed)
            for a, b in zip(means, [b for of in r.modules for m in of for b in m.buffers()], strict=True):
                self.assertTrue(same(a, b), seed)
            self.assertEqual([(None, {})] * len(smalls), [(s.x, s.values) for s in smalls])
            self.assertFalse(set(timed) & refused)
            self.assertLessEqual(len(dropping.now), len(plain.now) + len(smalls))
            smaller += len(dropping.now) < len(plain.now)
            self.assertEqual(0, _again.state.again)
            self.assertEqual(inplace, [getattr(m, "inplace", None) for of in r.modules for m in of])
        self.assertGreater(smaller, 40)

    def test_one_call(self):
        """What it drops is what its pass saves, but for its input and what is small; it is made when it is asked for, and
        forgotten with its last use."""
        x, norm = leaf(6, 8) * 2, nn.LayerNorm(8)
        runs = []

        def forward(x):
            runs.append(x.requires_grad)
            return norm(x)

        saves = len(_again.collect(norm, norm, (x,), {}, -1)[0])
        lean = _again.Lean(_again.IN_PLACE, 100)
        self.addCleanup(lean.made.clear)
        y = lean.call(norm, forward, x)
        small = lean.made[y.grad_fn]
        self.assertEqual(("LayerNorm", [], saves, None), (small.kind, small.dropped, small.last, small.x))
        recipe = lean.pack(y)
        self.assertEqual((1, "LayerNorm"), (small.uses, recipe.kind))
        again = lean.pack(y[1:])
        self.assertEqual((2, [True]), (small.uses, runs))
        self.assertTrue(same(y, lean.unpack(recipe)))
        self.assertEqual((1, [True, False]), (small.uses, runs))  # without a graph
        self.assertIsNotNone(small.y)
        self.assertTrue(same(y[1:], lean.unpack(again)))
        self.assertEqual((None, 2), (small.y, len(runs)))
        tanh = nn.Tanh()
        z = lean.call(tanh, tanh.forward, x)
        small = lean.made[z.grad_fn]
        self.assertEqual(([0], 1), (small.dropped, small.last))
        z.sum().backward()
        self.assertEqual(({}, None), (small.values, small.y))

    def test_writes_to_its_input(self):
        """A module that did not when its block was recorded."""
        lean, x = _again.Lean(_again.IN_PLACE, 1), leaf(3) * 2
        with self.assertRaisesRegex(Error, "^Tanh writes to its input and did not when its block was recorded"):
            lean.call(nn.Tanh(), lambda x: x.mul_(2).tanh(), x)
        relu = nn.ReLU(inplace=True)
        x = leaf(3) * 2
        self.assertIs(x, lean.call(relu, relu.forward, x))  # its input cannot be made again: it runs as it is
        self.assertEqual({}, lean.made)


class Noisy(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x)


class Writing(nn.Module):
    def forward(self, x):
        return x.mul_(2).tanh()


class Viewing(nn.Module):
    def forward(self, x):
        return x.view_as(x)


class Fickle(nn.Module):
    """Its second passes are other functions."""

    how = "other"

    def forward(self, x):
        if not _again.state.again:
            return x.tanh()
        if self.how == "fails":
            raise ArithmeticError("again")
        return (x + 1).tanh() if self.how == "other" else x.tanh().tanh()


class Refused(Compared):
    """Blocks and parts that cannot be made again: recorded steps find out, and nothing changes."""

    def run_all(self, act):
        """Trains with blocks of an activation. Yields the runtime of every plan."""
        want = train(stack(functools.partial(Block, act=act), 2), one_pass, RECORDED + 2)
        for name in ("lean", "whole"):
            model = stack(functools.partial(Block, act=act), 2)
            with planned(model, name) as rt:
                self.compare(want, train(model, one_pass, RECORDED + 2, rt))
                yield name, rt, [u for u in rt._planner.units.list if u.parent is None], model

    def test_parts_that_only_look_cheap(self):
        for act in (Noisy, Writing, Viewing):
            for name, rt, units, model in self.run_all(act):
                self.assertEqual([{b.act} for b in model.blocks], [u.not_cheap for u in units])
                self.assertEqual([(True, True)] * 2, [(u.whole, u.lean) for u in units])  # the rest of a block is as good
                self.assertEqual({"recompute cheap parts" if name == "lean" else "recompute"}, set(choices(rt).values()))

    def test_other_functions(self):
        for how, lean, whole in (
            ("other", "it makes other bits", r"its second forward pass makes other values \(2 of \d+ tensors, the first is torch.float32 \[3, 4, 16\]\)"),
            ("fails", "ArithmeticError: again", r"its second forward pass failed \(ArithmeticError: again\)"),
            ("more", "it makes other bits|Fickle saved 1 tensors and other ones", r"its second forward pass saves (\d+) tensors and the first saved \d+"),
        ):
            with mock.patch.object(Fickle, "how", how):
                for name, rt, units, model in self.run_all(Fickle):
                    self.assertEqual([False] * 2, [u.whole for u in units])
                    for u in units:
                        self.assertRegex(u.why, whole)
                    if how != "fails":  # where the whole check of a block ends
                        self.assertRegex(rt._planner._refused["Fickle"], lean)
                        self.assertEqual(["Fickle"], list(rt._planner._refused))


class Records(unittest.TestCase):
    """A record of a step, by itself."""

    def profile(self, least=1, **more):
        budget = mock.Mock(needs=lambda: [1, 2], readings=3)
        return _profile.Profile(CPU, mock.Mock(pack=lambda t: Kept(t, None)), set(), least, budget, {}, **more)

    def test_room(self):
        """A second pass takes a quarter more than what it makes."""
        self.assertEqual([True, False, True, True, False], [_profile.fits(*x) for x in ((0, 0), (4, 4), (4, 5), (100, 125), (100, 124))])

    def test_parts(self):
        block = _profile.Unit("block", nn.Tanh(), None)
        part = _profile.Unit("part", nn.Tanh(), block)
        self.assertEqual(([part], [], block), (block.parts, part.parts, part.parent))

    def test_numbers(self):
        """Those of storages that are gone are not given again."""
        p, seen = self.profile(), set()
        for _ in range(50):
            seen.add(p.number(_again.storage_of(torch.zeros(1000))))
        self.assertEqual((50, 50), (len(seen), len(p.numbered)))
        x = torch.zeros(3)
        weak = p.numbered[p.number(_again.storage_of(x))]
        self.assertIs(weak, p.numbered[p.number(_again.storage_of(x[1:]))])
        p.stack.append("call")
        p.close()
        self.assertEqual(([1, 2], [], {}, _again.IN_PLACE, None), (p.needs, p.stack, p.numbered, p.holder, p.step))
        with self.assertRaisesRegex(Error, "needed after its step"):
            p.unpack("a handle")
        self.assertIs(x, p.unpack(Kept(x, None)))

    def test_outside(self):
        """What is saved there is taken and given back once; what a block saved first stays, and what is small is not counted."""
        p, weight = self.profile(least=16), nn.Parameter(torch.zeros(8))
        x, small, of_block, little = torch.zeros(8), torch.zeros(3), torch.zeros(8), torch.zeros(2)
        number = lambda t: p.number(_again.storage_of(t))
        p.first[number(of_block)] = p.little[number(little)] = "call"
        held = [p.pack_outside(t) for t in (x, x[2:], small, of_block, little, weight)]
        self.assertEqual([("take", number(x), 3)], [(kind, what, mark) for (kind, what, _), mark in zip(p.ops, p.marks)])
        self.assertEqual([number(x), 0, 0, 0, 0, 0], [s for _, s in held])
        self.assertEqual({number(of_block), number(little)}, p.shared)
        self.assertEqual({number(little): "call", number(small): None}, p.little)
        for h in held[:2] * 2:
            p.unpack_outside(h)
        self.assertEqual(["take", "give"], [kind for kind, _, _ in p.ops])
        self.assertEqual(32, p.most_outside())

    def test_compiled(self):
        """Bytes that compiled blocks save beside what calls are given."""
        p = self.profile()
        compiled, plain = (mock.Mock(unit=mock.Mock(compiled=c), inputs=i) for c, i in ((True, {}), (False, {3: 9})))
        p.calls, p.first, p.bytes = [compiled, plain], {1: compiled, 2: plain, 3: compiled, 4: None}, {1: 10, 2: 20, 3: 40, 4: 80}
        self.assertEqual(10, p.in_compiled())
        self.assertEqual(0, self.profile().largest())

    def test_sizes(self):
        """A storage counts once. What is offloaded is away, and what autograd is done with is not."""
        p = self.profile()
        call = _profile.Call(p, _profile.Unit("block", nn.Tanh(), None), None, 0)
        saves = []
        away = Handle.__new__(Handle)
        away.record = mock.Mock(memory=None)
        for storage, bytes, held in ((1, 10, Kept(torch.zeros(1), None)), (2, 20, away), (2, 20, away), (3, 40, None)):
            saved = _profile.Saved(call, held)
            saves.append(saved)
            entry = _profile.Entry(saved)
            entry.storage, entry.bytes = storage, bytes
            call.entries.append(entry)
            call.all.append((call, len(call.entries) - 1))
        del saved, saves[3:]
        self.assertEqual((70, 20), p.sizes(call))
        self.assertIsNone(call.value(3))


class Bits(unittest.TestCase):
    def test_same(self):
        nan = torch.tensor([1.0, float("nan")])
        self.assertTrue(_bits.same(nan, nan.clone()))
        self.assertFalse(_bits.same(nan, torch.tensor([2.0, float("nan")])))
        for a, b in ((torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(2, dtype=torch.int32)), (torch.zeros(2), torch.ones(2))):
            self.assertFalse(_bits.same(a, b))
        self.assertTrue(_bits.same(torch.zeros(2, device="meta"), torch.ones(2, device="meta")))
        c = torch.randn(3, dtype=torch.complex64)
        self.assertTrue(_bits.same(c.conj(), c.conj().resolve_conj()))
        self.assertTrue(_bits.equal(c, None) and _bits.equal(c, c.clone()) and not _bits.equal(c, c + 1))

    def test_near(self):
        a = torch.tensor([1.0, 1000.0])
        digits = torch.finfo(torch.float32).eps ** 0.5
        for off, want in ((0.0, True), (0.9 * digits, True), (1.1 * digits, False)):
            self.assertEqual(want, _bits.near(a, a + torch.tensor([1000 * off, 0.0])))
        for b in (a.double(), a[:1], torch.tensor([float("nan"), 1.0])):
            self.assertFalse(_bits.near(a, b))
        self.assertFalse(_bits.near(torch.tensor([1]), torch.tensor([2])))

    def test_distance(self):
        a, b = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
        self.assertAlmostEqual(5 / 13, _bits.distance([a, b], [a * 2, b]))
        self.assertAlmostEqual(13 / 13, _bits.distance([a, b], [a * 0, b * 2]))
        self.assertEqual(float("inf"), _bits.distance([a], [b]))
        self.assertEqual(5.0, _bits.distance([a * 0], [a]))

    def test_digests(self):
        """Of any view, in pieces of any size: equal where tensors are, and different where one bit is."""
        r = random.Random(3)
        for most in (7, 64, 1 << 20):
            d = _bits.Digests(CPU, 0)
            d._most = most
            d._by = torch.randint(-(2**62), 2**62, (max(most, 256),), generator=torch.Generator().manual_seed(1))
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool):
                t = torch.randn(6, 5, 4).to(dtype)
                for v in (t, t.transpose(0, 2), t[1:, ::2], t[:, None].expand(6, 3, 5, 4), t[0, 0, 0]):
                    flat = sum((p.reshape(-1).tolist() for p in _bits.pieces(v, most)), [])
                    self.assertEqual([x for x in (v[:, :1] if v.dim() == 4 else v).reshape(-1).tolist()], flat)
                    self.assertTrue(all(p.numel() <= most for p in _bits.pieces(v, most)))
                    one, other = d.of(v), d.of(v.clone() if v.dim() != 4 else v)
                    self.assertTrue(one.same(other) and one.near(other))
                    changed = v.clone()
                    at = tuple(r.randrange(n) for n in v.shape)
                    changed[at] = ~changed[at] if dtype is torch.bool else changed[at] + 1
                    self.assertFalse(d.of(v.contiguous()).same(d.of(changed)))
                    self.assertFalse(one.same(d.of(v[None])) or one.near(d.of(v[None])))
        self.assertEqual(_bits.Digest((torch.Size([2]), torch.float32), None, None), d.of(torch.zeros(2, device="meta")))
        self.assertEqual([1 << 10, 1 << 12, 1 << 22], [_bits.Digests(CPU, n)._most for n in (0, 1 << 20, 1 << 40)])

    def test_seeds(self):
        self.assertEqual([True, True, False, False, False], [_bits.seed(t) for t in (torch.tensor(3), torch.tensor([1, 2]), torch.tensor([1, 2, 3]), torch.tensor(1.0), torch.tensor(1j))])


class Settings(unittest.TestCase):
    """How a function was compiled, and how it is compiled again."""

    def made(self, callback, dynamic=None, known=True):
        self = types.SimpleNamespace(callback=callback, _dynamic=dynamic)

        def get_compiler_config():
            return self

        code = compile("def made(): pass", "/x/" + _compiled._dynamo if known else "elsewhere.py", "exec")
        there = {}
        exec(code, there)
        made = there["made"]
        made.get_compiler_config, made._torchdynamo_orig_callable = get_compiler_config, "original"
        return made

    def wrapped(self, backend, *names):
        for name in names:
            backend = types.SimpleNamespace(**{name: backend})
        return backend

    def test_backends(self):
        backend = lambda graph, inputs: None
        new, old = "_torchdynamo_orig_backend", "_torchdynamo_orig_callable"
        for names in ((new,), (new, new), (old,), (old, new)):
            self.assertEqual((backend, True), _compiled._settings(self.made(self.wrapped(backend, *names), True)))
        for made, sentence in ((lambda: None, "how it was compiled"), (self.made(self.wrapped(backend, new), known=False), "how it was compiled"), (self.made(backend), "the backend that it was compiled with"), (self.made(self.wrapped("text", new)), "the backend")):
            with self.assertRaisesRegex(Error, sentence):
                _compiled._settings(made)
        captures = lambda graph, inputs: None
        captures.compiler_name = "cudagraphs"
        with self.assertRaisesRegex(Error, "CUDA graphs"):
            _compiled._settings(self.made(self.wrapped(captures, new)))

    def test_inductor(self):
        inductor = types.ModuleType("torch._inductor")
        for given, usual, want in (({}, True, True), ({}, False, False), ({"triton.cudagraphs": True}, False, True), ({"triton.cudagraphs": False}, True, False)):
            inductor.config = types.SimpleNamespace(triton=types.SimpleNamespace(cudagraphs=usual))
            with mock.patch.dict("sys.modules", {"torch._inductor": inductor}):
                self.assertIs(want, _compiled._captures(types.SimpleNamespace(compiler_name="inductor", config=given)))
        self.assertFalse(_compiled._captures(lambda: None))

    def test_again(self):
        """With the budget while it compiles, once for a backend and a budget, and bound as before."""
        patched, compiled = [], []

        @contextlib.contextmanager
        def patch(**what):
            patched.append(what)
            yield
            patched.append("over")

        functorch = types.ModuleType("torch._functorch")
        functorch.config = types.SimpleNamespace(activation_memory_budget=1.0, patch=patch)
        one, two = (lambda graph, inputs: patched.append((graph, inputs)) or "made"), (lambda graph, inputs: None)
        wrap = self.wrapped
        dynamo_compile = lambda f, backend, dynamic: compiled.append((f, backend, dynamic)) or "again"
        with mock.patch.dict("sys.modules", {"torch._functorch": functorch}), mock.patch.object(_compiled, "_backends", []), mock.patch.object(torch, "compile", dynamo_compile, create=True):
            self.assertEqual("again", _compiled.with_budget(self.made(wrap(one, "_torchdynamo_orig_backend"), False), 0.5))
            (f, backend, dynamic), = compiled
            self.assertEqual(("original", False), (f, dynamic))
            self.assertEqual("made", backend("graph", "inputs"))
            self.assertEqual([{"activation_memory_budget": 0.5}, ("graph", "inputs"), "over"], patched)
            self.assertIs(backend, _compiled._with(one, 0.5))
            others = [_compiled._with(one, 0.3), _compiled._with(two, 0.5)]
            self.assertEqual(3, len({id(b) for b in (backend, *others)}))
            with mock.patch.object(torch, "compile", lambda f, **_: lambda me, x: (me, x), create=True):
                bound = _compiled.with_budget(types.MethodType(self.made(wrap(one, "_torchdynamo_orig_backend")), self), 0.5)
                self.assertEqual((self, 3), bound(3))
            del functorch.config.activation_memory_budget
            with self.assertRaisesRegex(Error, "no activation_memory_budget"):
                _compiled._with(one, 0.5)

    def test_more_graphs(self):
        """As many more for each budget, once, unless the user changes the limit again; by the names that there are."""
        for names in (("recompile_limit", "accumulated_recompile_limit"), ("cache_size_limit", "accumulated_cache_size_limit")):
            config = types.SimpleNamespace(**dict(zip(names, (8, 64))))
            with mock.patch.dict("sys.modules", {"torch._dynamo.config": config}), mock.patch.object(_compiled, "_raised", {}):
                for _ in range(2):
                    _compiled.allow_more_graphs()
                    self.assertEqual([48, 384], [getattr(config, n) for n in names])
                setattr(config, names[0], 10)
                _compiled.allow_more_graphs()
                self.assertEqual([60, 384], [getattr(config, n) for n in names])
        with mock.patch.dict("sys.modules", {"torch._dynamo.config": None}):
            _compiled.allow_more_graphs()

    def test_who_calls(self):
        """A frame of torch.compile that is at work; of one that is disabled the callback is None."""
        for body, want in (("callback = print", True), ("callback = None", False), ("self = type('S', (), {'callback': print})", True), ("self = type('S', (), {'callback': None})", False), ("", False)):
            there = {"f": _compiled.in_compiled}
            exec(compile(f"def call():\n    {body or 'pass'}\n    return f()", "/x/" + _compiled._dynamo, "exec"), there)
            self.assertIs(want, there["call"]())
        self.assertFalse(_compiled.in_compiled())

    def test_forms(self):
        m = nn.Linear(2, 2)
        self.assertIsNone(_compiled.call_of(m))
        m._compiled_call_impl = print
        self.assertIs(print, _compiled.call_of(m))
        m = nn.Linear(2, 2)
        made = lambda x: x
        made._torchdynamo_orig_callable = made
        m.forward = made
        self.assertIs(made, _compiled.call_of(m))
        m.forward = types.MethodType(made, m)
        self.assertIs(m.forward, _compiled.call_of(m))
        made._torchdynamo_disable = True
        self.assertIsNone(_compiled.call_of(m))
        wrapper = nn.Identity()
        wrapper._orig_mod = nn.Linear(2, 2)
        self.assertTrue(_compiled.is_compiled(wrapper))
        self.assertEqual((nn.Linear, nn.Identity), (_compiled.kind(wrapper), _compiled.kind(nn.Identity())))

    def test_side_effects(self):
        """One more backward pass would be noticed by hooks, and by what is sharded."""
        self.assertEqual("", _smaller.side_effects(nn.Sequential(nn.Linear(2, 2))))
        m = nn.Sequential(nn.Linear(2, 2))
        m[0].register_full_backward_hook(lambda *_: None)
        self.assertEqual("it has hooks in its backward pass", _smaller.side_effects(m))
        m = nn.Sequential(nn.Linear(2, 2))
        m[0].weight.register_hook(lambda g: None)
        self.assertEqual("it has hooks in its backward pass", _smaller.side_effects(m))
        with mock.patch.object(_smaller, "is_sharded", lambda m: isinstance(m, nn.Linear)):
            self.assertEqual("it is sharded", _smaller.side_effects(nn.Sequential(nn.Linear(2, 2))))

        class Mine(nn.Parameter):
            pass

        m = nn.Linear(2, 2)
        m.weight = Mine(torch.zeros(2, 2))
        self.assertEqual("it is sharded", _smaller.side_effects(m))


class Interface(unittest.TestCase):
    """The C interface, with a library that is played."""

    def library(self, **calls):
        lib = _library.Library.__new__(_library.Library)
        lib._pid, lib._trouble, lib._handle = _library.os.getpid(), [], 5
        lib._returned, lib._held, lib._number, lib._usage = _library._Ids(), _library._Ids(), ctypes.c_uint64(), _library._Held()
        lib._buffer = bytearray()
        lib._grow(2)
        lib._so = types.SimpleNamespace(stowage_error=lambda: b"it failed", **calls)
        return lib

    @staticmethod
    def fill(ids, numbers, more=0):
        ids = getattr(ids, "_obj", ids)
        ids.count, ids.more = len(numbers), more
        for i, n in enumerate(numbers):
            ids.id[i] = n

    def test_lists_that_are_long(self):
        """More than one structure has room for."""
        rest = [[4, 5], [6]]

        def more(handle, ids):
            self.assertEqual(5, handle)
            now = rest.pop(0)
            self.fill(ids, now, len(rest))
            return 0

        def release(handle, group, ids):
            self.assertEqual((5, 8), (handle, group))
            self.fill(ids, [1, 2, 3], 3)
            return 0

        lib = self.library(stowage_release=release, stowage_more=more)
        self.assertEqual([1, 2, 3, 4, 5, 6], lib.release(8))
        lib = self.library(stowage_release=lambda handle, group, ids: 0)
        self.assertEqual([], lib.release(8))
        for many in (0, 1):
            lib = self.library(stowage_load=lambda handle, group, held, ids: self.fill(held, [7, 9], many) or 0)
            held, returned = lib.load(3)
            self.assertEqual((True, bool(many), []), (7 in held, 8 in held, returned))

    def test_storages(self):
        """Any number of them, in the order and the fields of stowage.h."""
        got = []

        def save(handle, name, count, at, number, ids):
            got[:] = [struct for struct in _library.struct.iter_unpack("=6Q", ctypes.string_at(at, 48 * count))]
            number._obj.value = 77
            self.assertEqual(b"name", name)
            return 0

        lib = self.library(stowage_save=save)
        for n in (1, 2, 3, 9):
            storages = [(i, 10 * i, 100 * i, i + 1, i + 2, i % 2) for i in range(n)]
            self.assertEqual((77, []), lib.save(b"name", storages))
            self.assertEqual(storages, got)

    def test_codes(self):
        lib = self.library(stowage_usage=lambda handle, u: setattr(u._obj, "least", 55) or 0, stowage_check=lambda handle, stream: code)
        for code, kind in ((_library.OVERFLOW, Overflow), (_library.TOO_SMALL, TooSmall), (1, Error), (9, Error)):
            with self.assertRaisesRegex(Error, "^it failed$") as raised:
                lib.check(0)
            self.assertIs(kind, type(raised.exception))
            if kind is TooSmall:
                self.assertEqual(55, raised.exception.least)
        code = 0
        lib.check(0)
        code, lib._so.stowage_error = 9, lambda: None
        with self.assertRaisesRegex(Error, "the library failed with code 9"):
            lib.check(0)
        first = MemoryError("there is none")
        lib._trouble += [first, KeyError()]
        with self.assertRaisesRegex(Error, "no memory to reload a saved tensor: there is none; lower the budget") as raised:
            lib.check(0)
        self.assertIs(first, raised.exception.__cause__)
        self.assertEqual([], lib._trouble)

    def test_text_that_is_long(self):
        text = b'{"a": "' + b"x" * 9000 + b'"}'

        def stats(handle, buffer, capacity, need):
            need._obj.value = len(text) + 1
            if capacity > len(text):
                buffer.value = text
            return 0

        self.assertEqual({"a": "x" * 9000}, self.library(stowage_stats=stats).stats())

    def test_closed_and_forked(self):
        closed = []
        lib = self.library(stowage_close=lambda handle: closed.append(handle) or 0)
        lib._pid += 1
        with self.assertRaisesRegex(Error, "forked after the runtime was opened"):
            lib.check_open()
        lib.close()
        self.assertEqual([], closed)
        lib._pid -= 1
        lib._handle = 5
        lib.close(), lib.close()
        self.assertEqual([5], closed)
        for call in (lambda: lib.begin("", 0), lambda: lib.end(False), lambda: lib.save(b"", []), lambda: lib.load(1), lambda: lib.rows(1), lambda: lib.release(1), lambda: lib.limit(1), lib.usage, lambda: lib.check(0), lib.stats, lambda: lib.choose({}), lambda: lib.trace(None)):
            with self.assertRaisesRegex(Error, "this runtime is closed"):
                call()

    def test_arguments(self):
        said = []
        note = lambda name: lambda *a: said.append((name, *(x for x in a if not hasattr(x, "_obj")))) or 0
        lib = self.library(**{f"stowage_{name}": note(name) for name in ("begin", "end", "limit", "check", "trace", "rows")})
        lib.begin("key", 7), lib.end(True), lib.limit(9), lib.check(8), lib.trace(None), lib.trace("file"), lib.rows(4)
        self.assertEqual([("begin", 5, b"key", 7), ("end", 5, True), ("limit", 5, 9), ("check", 5, 8), ("trace", 5, None), ("trace", 5, b"file"), ("rows", 5, 4)], said)

        def usage(handle, u):
            for i, name in enumerate(_library.Usage._fields):
                setattr(u._obj, name, i)
            return 0

        self.assertEqual((0, 1, 2, 3, 4, 5), self.library(stowage_usage=usage).usage())


class Holders(unittest.TestCase):
    """Who holds memory."""

    def test_parts(self):
        class Shard(torch.Tensor):
            @staticmethod
            def __new__(cls, local):
                t = torch.Tensor._make_subclass(cls, torch.zeros(1))
                t._local_tensor = local
                return t

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                raise AssertionError("its memory is that of its parts")

        class Wrapper(Shard):
            @staticmethod
            def __new__(cls, a, b):
                t = torch.Tensor._make_subclass(cls, torch.zeros(1))
                t.a, t.b = a, b
                return t

            def __tensor_flatten__(self):
                return ["a", "b"], None

        x, y = torch.zeros(3), torch.zeros(4)
        coo, csr = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
        parts = lambda t: [p.data_ptr() for p in _explain._parts(t, CPU)]
        for t, want in ((None, []), (x, [x]), (torch.zeros(2, device="meta"), []), (Shard(x), [x]), (Wrapper(x, Shard(y)), [x, y]), (coo, [coo._indices(), coo._values()]), (csr, [csr.crow_indices(), csr.col_indices(), csr.values()])):
            self.assertEqual([p.data_ptr() for p in want], parts(t))

    def test_devices(self):
        find = _explain._find_device
        with mock.patch.multiple(torch.cuda, is_initialized=lambda: False, current_device=lambda: 2):
            self.assertEqual((CPU, torch.device("meta"), CPU), (find([], None), find([nn.Linear(2, 2, device="meta")], None), find([], "cpu")))
            self.assertEqual(torch.device("cuda"), find([], "cuda"))
        with mock.patch.multiple(torch.cuda, is_initialized=lambda: True, current_device=lambda: 2):
            self.assertEqual((torch.device("cuda", 2), torch.device("cuda", 2), GPU), (find([], None), find([], "cuda"), find([], GPU)))

    def test_sizes_in_sentences(self):
        size = lambda text: _explain._size_in(text, "tried to allocate {}")
        self.assertEqual((3 << 30, 1536, 12, None), (size("Tried to allocate 3.00 GiB (GPU"), size("tried to allocate 1.5 KiB"), size("tried to allocate 12 bytes"), size("nothing")))


class Counting(unittest.TestCase):
    """State that modules keep."""

    def test_attributes(self):
        m = nn.Sequential(nn.Linear(2, 2))
        m[0].count, m[0].name, m.seen, m[0].table, m.some = 3, "x", [1], {"a": 1}, {5}
        state = _units.Attributes(m.modules())
        self.assertEqual("", state.changed())
        for change, name in ((lambda: setattr(m[0], "count", 4), "count"), (lambda: setattr(m[0], "name", "y"), "name"), (lambda: m.seen.append(2), "seen"), (lambda: m[0].table.update(b=2), "table"), (lambda: m.some.clear(), "some"), (lambda: delattr(m[0], "count"), "count")):
            change()
            self.assertEqual(name, state.changed())
            state.restore()
            self.assertEqual("", state.changed())
        self.assertEqual((3, "x", [1], {"a": 1}, {5}), (m[0].count, m[0].name, m.seen, m[0].table, m.some))
        m.eval()  # modes are no state
        self.assertEqual("", state.changed())

    def test_batch_norms(self):
        m = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), nn.Linear(3, 3))
        want = copy.deepcopy(m.state_dict())
        mean = m[0].running_mean
        with contextlib.suppress(KeyError), _units.Uncounted(m):
            m(torch.randn(4, 3))
            self.assertIsNot(mean, m[0].running_mean)
            raise KeyError
        self.assertIs(mean, m[0].running_mean)
        for name, t in m.state_dict().items():
            self.assertTrue(same(want[name], t), name)
        m(torch.randn(4, 3))
        self.assertFalse(same(want["0.running_mean"], m[0].running_mean))
        self.assertEqual(set(m.modules()), set(_units.modules(m)))
        m.append(m[0])
        self.assertEqual(5, len(list(_units.modules(m))))


if __name__ == "__main__":
    unittest.main()
