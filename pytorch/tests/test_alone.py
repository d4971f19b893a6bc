"""Parts of the package on their own, where a whole step would hide what they do. The GPU and other libraries are played."""

import contextlib
import types
import unittest
import weakref
from unittest import mock

from common import DEVICE, same, stowage, torch
from played import GPU, Played
from stowage import _memory, _rerun, _runtime, _surroundings
from stowage._clock import FILL, Clock, Stopwatch
from stowage._errors import Error, Overflow
from stowage._inputs import IN_PLACE, Inputs
from stowage._managed import Following
from stowage._plan import Plan
from torch import nn
from torch.utils import _pytree
from zoo import leaf

CPU = torch.device("cpu")


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


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
        """After some steps on a stream of its own, without gradients, and from the state before them."""
        with Played() as gpu:
            graph, rt, model, total, calls, x = self.graph(gpu)
            # Every step finds no gradients, so that a replay writes them and does not add to them.
            self.assertEqual([(graph.inputs[0].data_ptr(), None, True)] * (_rerun.WARM + 1), calls)
            self.assertEqual(["key"] * (_rerun.WARM + 1), rt.log)
            self.assertEqual(1, total)  # each time back, and the capture, which is played here
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
                    ((5, 2.0), r"captured with a tensor and called with 5 in its place; give a tensor of torch.float32 \[3, 2\]"),
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
                self.assertLess(clock.behind()[0], 1)
                self.assertEqual([("synchronize", GPU)], gpu.said())
            for passed, idle in (((True, True, False), True), ((True, False, False), False), ((True, False), False)):  # when the host made the next stamp
                events = [mock.Mock(**{"query.return_value": p}) for p in (*passed, False)]
                with mock.patch.object(torch.cuda, "Event", side_effect=events):
                    clock = Clock(GPU)
                    for _ in events:
                        clock.stamp()
                    self.assertEqual(idle, clock.behind()[1], passed)
            gpu.said()
            Stopwatch(GPU).seconds()
            self.assertEqual([("synchronize", GPU)] * 2, gpu.said())
            Stopwatch(CPU).seconds(), Clock(CPU).fill()
            self.assertEqual([], gpu.said())
        clock = Clock(CPU)
        with mock.patch("time.perf_counter", side_effect=[5.0, 7.0, 6.5]):
            clock.stamp(), clock.stamp(), clock.stamp()
        self.assertEqual(([0.0, 2.0, 1.5], (float("inf"), False)), (clock.read(), clock.behind()))
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
        attached = [types.SimpleNamespace(model=m, optimizer=o) for m, o in ((None, None), (on_meta, None), (model, optimizer), (model, None))]
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
        self.assertEqual(40, _memory._new_bytes(torch.zeros(10)[4:6], CPU, set()))  # which keeps all of it

    def test_arguments_of_a_call(self):
        """They come back as they were given: in place, named or not, the same where they were the same, without history."""
        leaf = torch.ones(3, requires_grad=True)
        made, plain = leaf * 2, torch.zeros(3)
        for args, kwargs in (((made, plain, 5, made), {}), ((made,), {"b": plain, "c": made, "d": None}), (([made, (plain,)], {"x": made}), {"y": "text"}), ((), {"only": leaf}), ((), {})):
            inputs = Inputs(IN_PLACE, args, kwargs)
            self.assertEqual([], [x for x in inputs.objects if isinstance(x, torch.Tensor)])
            again, named = inputs.again()
            given, got = (_pytree.tree_flatten((list(args), kwargs))[0], _pytree.tree_flatten((list(again), named))[0])
            self.assertEqual((list(kwargs), len(args), len(given)), (list(named), len(again), len(got)))
            for i, (a, b) in enumerate(zip(given, got)):
                if not isinstance(a, torch.Tensor):
                    self.assertEqual(a, b)
                    continue
                self.assertTrue(same(a, b) and b.is_leaf and a.requires_grad == b.requires_grad and a.data_ptr() == b.data_ptr())
                self.assertEqual([x is a for x in given], [x is b for x in got])
        holder = types.SimpleNamespace(pack=mock.Mock(side_effect=lambda t: t), unpack=mock.Mock(side_effect=lambda h: h))
        Inputs(holder, (made, plain, made), {"x": plain}).again()
        self.assertEqual((2, 2), (holder.pack.call_count, holder.unpack.call_count))  # each tensor is held once
        one = Inputs(IN_PLACE, (plain, object), {})
        self.assertEqual([object], one.objects)
        plain.add_(1)
        with self.assertRaisesRegex(Error, "modified"):
            one.again()

    def test_a_step_closes_all_its_calls(self):
        """Those whose backward pass did not run, whether or not others are gone."""
        step, closed = Following(Plan({}, {}, {}, {}, {}), CPU, 0, None), []

        class Call:
            def close(self):
                closed.append(self)

        calls = [Call() for _ in range(3)]
        step.calls = [weakref.ref(c) for c in (calls[0], Call(), calls[1], calls[2])]
        step.close()
        self.assertEqual(calls, closed)

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
            s.gpu, s.cache = (on, torch.float16), not there

            def autocast(device, **how):
                entered.append((device, how["enabled"], how["dtype"], how["cache_enabled"]))
                return contextlib.nullcontext()

            with mock.patch.object(torch, "autocast", autocast), mock.patch.object(torch.cuda, "is_available", lambda: there), mock.patch.object(_surroundings, "default_devices", lambda: ("other",)):
                with s._again():
                    pass
            self.assertEqual([("cuda", on, torch.float16, not there)] * (there or on) + [("cpu", False, torch.bfloat16, not there)], entered)

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

    def test_weights_of_modes(self):
        """Plain weights are what they were, for a while. Shards, which what is gathered takes the places of, are left alone."""

        class Shard(nn.Parameter):
            pass

        for then, now, back in ((nn.Parameter, nn.Parameter, True), (Shard, nn.Parameter, False), (nn.Parameter, Shard, False)):
            linear = nn.Linear(2, 2, bias=False)
            was, other = (kind(torch.zeros(2, 2)) for kind in (then, now))
            linear._parameters["weight"] = was
            modes = [_surroundings.mode_of(linear)]
            linear._parameters["weight"] = other
            with _surroundings.modes_again(modes):
                self.assertIs(was if back else other, linear.weight)
            self.assertIs(other, linear.weight)
