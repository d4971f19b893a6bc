"""How traced steps are counted: storages that live, times of operators, and what is done as on a GPU."""

import types
import unittest
from unittest import mock

from common import DEVICE, torch
from stowage import _trace
from stowage._budget import largest
from stowage._errors import Error
from stowage._trace import GAP, LOSS, Kernels, Live, Operators, Place, Rates
from torch import nn
from zoo import leaf

CPU, META = torch.device("cpu"), torch.device("meta")
RATES = Rates(1e7, 1e6)


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all on the CPU")


class Storages(unittest.TestCase):
    def test_lives(self):
        """Bytes that are alive, and of them those that autograd holds, after each operator; who saved what, and until when."""
        weight, x, y = torch.ones(5), torch.ones(10), torch.ones(20)
        live = Live(CPU, {_trace.storage_of(weight)._cdata})
        self.assertIsNone(live.of(weight))
        self.assertIsNone(live.of(torch.ones(3, device="meta")))
        self.assertIsNone(live.of(torch.eye(3).to_sparse()))
        made = live.of(x)
        self.assertIs(made, live.of(x[2:]))
        self.assertEqual((40, 0), (live.now, made.born))
        live.look()
        live.of(y)
        live.module, live.where = "norm", "the forward pass of norm"
        live.look()
        self.assertEqual((120, 2, "the forward pass of norm"), (live.peak, live.peak_at, live.peak_where))
        one, two = live.pack(x), live.pack(x[1:])
        live.module = "other"
        three = live.pack(y)
        self.assertEqual((120, 120, ["norm", "other"]), (live.saved, live.saved_peak, [m.module for m in live.all]))
        live.look()
        self.assertEqual([(40, 0), (120, 0), (0, 120)], live.needs)
        self.assertEqual("the backward pass of other", live.unpack(three) is not None and live.where)
        self.assertTrue(torch.equal(y, live.unpack(three)))
        del three
        self.assertEqual((40, True, False), (live.saved, live.all[1].saved_at(3), live.all[1].saved_at(4)))
        live.look()
        del one
        self.assertEqual(40, live.saved)
        self.assertTrue(live.all[0].saved_at(live.time))
        self.assertFalse(live.all[0].saved_at(1))
        del two
        self.assertEqual(0, live.saved)
        del x
        live.look()
        self.assertEqual((80, 120, 120), (live.now, live.peak, live.saved_peak))
        again = live.pack(y)
        self.assertEqual((80, 2), (live.saved, len(live.all)))
        del again
        live.look()
        self.assertEqual(80, live.held_of([_trace.storage_of(y)._cdata, 12345]))
        live.peak_at = 0
        self.assertEqual(0, live.held_of([_trace.storage_of(y)._cdata]))

    def test_what_is_no_memory_of_the_step(self):
        """Leaves that take gradients, and numbers of Python."""
        live = Live(CPU, set())
        for t in (leaf(4), torch.tensor(3.0)):
            handle = live.pack(t)
            self.assertEqual((None, 0), (handle.made, live.saved))
            self.assertIs(t, live.unpack(handle))
            self.assertEqual("", live.where)
        number = torch.tensor(3.0)
        live.of(number)
        self.assertIsNotNone(live.pack(number).made)

    def test_few_needs_are_kept(self):
        live = Live(CPU, set())
        for i in range(4097):
            live.now, live.saved = (i * 37) % 101, (i * 53) % 103
            live.look()
        self.assertLess(len(live.needs), 110)
        self.assertEqual(live.needs, largest(live.needs))


class Times(unittest.TestCase):
    def took(self, run, dtype=torch.bfloat16, tf32=False, rates=RATES):
        self.addCleanup(setattr, torch.backends.cuda.matmul, "allow_tf32", torch.backends.cuda.matmul.allow_tf32)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        operators = Operators(rates, None)
        with torch.no_grad(), operators:
            run(lambda *shape: torch.empty(shape, dtype=dtype, device="meta"))
        return operators.seconds

    def test_products_and_others(self):
        """The larger of operations and bytes, and a gap; views take nothing."""
        def expect(operations, bytes, full=1.0):
            return max(operations / (RATES.products * full), bytes / RATES.hbm) + GAP

        n, k, m, b = 300, 500, 700, 3
        for dtype, tf32, full, size in ((torch.bfloat16, False, 1.0, 2), (torch.float32, False, 1 / 16, 4), (torch.float32, True, 0.5, 4), (torch.bfloat16, True, 1.0, 2)):
            took = lambda run: self.took(run, dtype, tf32)
            for run, operations, elements in (
                (lambda new: torch.mm(new(n, k), new(k, m)), 2 * n * k * m, n * k + k * m + n * m), (lambda new: torch.bmm(new(b, n, k), new(b, k, m)), 2 * b * n * k * m, b * (n * k + k * m + n * m)),
                (lambda new: torch.baddbmm(new(b, n, m), new(b, n, k), new(b, k, m)), 2 * b * n * k * m, b * (n * k + k * m + 2 * n * m)), (lambda new: torch.addmm(new(m), new(n, k), new(k, m)), 2 * n * k * m, n * k + k * m + m + n * m),
                (lambda new: torch.mv(new(n, k), new(k)), 2 * n * k, n * k + k + n), (lambda new: torch.nn.functional.conv2d(new(2, 3, 8, 8), new(5, 3, 3, 3), padding=1), 2 * 2 * 5 * 64 * 27, 2 * 3 * 64 + 5 * 27 + 2 * 5 * 64),
                (lambda new: new(n, k).add_(new(n, k)), 0, 3 * n * k), (lambda new: new(n, k).sigmoid(), 0, 2 * n * k), (lambda new: torch.cat([new(n), new(m)]), 0, 2 * (n + m)),
            ):
                self.assertAlmostEqual(expect(operations, elements * size, full), took(run), places=9)
        for run in (lambda new: new(n, k).t(), lambda new: new(n, k).view(-1), lambda new: torch.empty_like(new(n, k)), lambda new: new(n, k).new_empty(3)):
            self.assertEqual(0.0, self.took(run))
        self.assertEqual(0.0, self.took(lambda new: new(n, k).sigmoid(), rates=None))

    def test_gradients_of_convolutions(self):
        operators, new = Operators(RATES, None), lambda *shape: torch.empty(shape, device="meta")
        grad, x, w = new(2, 5, 8, 8), new(2, 3, 8, 8), new(5, 3, 3, 3)
        operators._add("convolution_backward", [grad, x, w], [torch.empty_like(x), torch.empty_like(w)])
        bytes = 4 * (grad.numel() + 2 * x.numel() + 2 * w.numel())
        self.assertAlmostEqual(max(4 * grad.numel() * 27 / (RATES.products / 16), bytes / RATES.hbm) + GAP, operators.seconds)

    def test_gradients_that_meta_tensors_lack(self):
        """They are like what they are gradients of."""
        grad, x, w = torch.empty(2, 5, 8, 8), torch.empty(2, 3, 8, 8), torch.empty(5, 3, 3, 3)
        func = types.SimpleNamespace(__name__="convolution_backward")
        made = _trace._gradients(func, (grad, x, w, [5], [True, False, True]))
        self.assertEqual([x.shape, None, (5,)], [None if t is None else t.shape for t in made])
        made = _trace._gradients(func, (grad, x, w, [5], [False, True, True]))
        self.assertEqual([None, w.shape, (5,)], [None if t is None else t.shape for t in made])

        def func(name, *arguments, returns=1):
            schema = types.SimpleNamespace(returns=[0] * returns, arguments=[types.SimpleNamespace(name=n) for n in arguments])
            return types.SimpleNamespace(__name__=name, _schema=schema)

        for f, args, want in (
            (func("glu_backward", "grad_output", "self"), (grad, x), x.shape), (func("glu_backward", "grad_output", "input", "dim"), (grad, w, 1), w.shape), (func("glu_backward", "grad_output", "self"), (grad, 3), None),
            (func("glu", "grad_output", "self"), (grad, x), None), (func("glu_backward", "grad_output", "self", returns=2), (grad, x), None), (types.SimpleNamespace(__name__="glu_backward"), (grad, x), None),
        ):
            made = _trace._gradients(f, args)
            self.assertEqual(want, None if made is None else made.shape)


class OnGPU(unittest.TestCase):
    def kernels(self, device=META, fused=True):
        self.operators = Operators(RATES, None)
        return Kernels(device, self.operators, fused)

    def test_attention(self):
        """Causal attention computes a half; its backward pass takes two and a half times as long."""
        for causal in (False, True):
            k = self.kernels()
            q, key, v = (torch.empty(2, 3, rows, width, device="meta", dtype=torch.bfloat16, requires_grad=True) for rows, width in ((40, 16), (50, 16), (50, 24)))
            saved = []
            with _trace.hooks(lambda t: saved.append((tuple(t.shape), t.dtype)) or t, lambda t: t):
                out = k._attention(None, q, key, v, is_causal=causal)
            cost = 2 * 2 * 3 * 40 * 50 * (16 + 24) / (2 if causal else 1)
            bytes = 2 * (q.numel() + key.numel()) * 2
            self.assertAlmostEqual(max(cost / 1e7, bytes / 1e6) + GAP, self.operators.seconds)
            self.assertEqual(((2, 3, 40, 24), (40 * 3 * 24, 24, 3 * 24, 1)), (tuple(out.shape), out.stride()))
            self.assertEqual([((2, 3, 40, 16), q.dtype), ((2, 3, 50, 16), q.dtype), ((2, 3, 50, 24), q.dtype), ((2, 3, 40, 24), q.dtype), ((2, 3, 40), torch.float32)], saved[:5])
            self.operators.seconds = 0.0
            grads = torch.autograd.grad(out, [q, key, v], torch.empty_like(out))
            self.assertEqual([t.shape for t in (q, key, v)], [g.shape for g in grads])
            self.assertAlmostEqual(max(2.5 * cost / 1e7, 2 * bytes / 1e6) + GAP, self.operators.seconds)

    def test_attention_that_is_not_fused(self):
        """Of other shapes, large numbers and wide heads."""
        new = lambda *shape, **more: torch.empty(*shape, device="meta", **more)
        for q, v, fused in (
            (new(2, 3, 4, 256), new(2, 3, 4, 256), True), (new(2, 3, 4, 257), new(2, 3, 4, 8), False), (new(2, 3, 4, 8), new(2, 3, 4, 257), False), (new(3, 4, 8), new(3, 4, 8), False), (new(2, 3, 4, 8, dtype=torch.float64), new(2, 3, 4, 8), False),
        ):
            asked = mock.Mock(return_value="as it is")
            out = self.kernels()._attention(asked, q, q, v, "mask" if not fused else None, 0.5, True, scale=3)
            self.assertEqual(fused, isinstance(out, torch.Tensor))
            self.assertEqual([] if fused else [mock.call(q, q, v, "mask", 0.5, True, scale=3)], asked.call_args_list)

    def test_masks(self):
        """One of truth values is of numbers on a GPU."""
        q = torch.empty(1, 1, 4, 8, device="meta", requires_grad=True)
        for mask, bytes in ((torch.empty(4, 4, dtype=torch.bool, device="meta"), 64), (torch.empty(4, 4, device="meta", dtype=torch.bfloat16), 32), (None, None)):
            saved = []
            with _trace.hooks(lambda t: saved.append(t.numel() * t.element_size()) or t, lambda t: t):
                self.kernels()._attention(None, q, q, q, mask)
            self.assertEqual([128, 128, 128, 128, 16] + ([] if bytes is None else [bytes]), saved)

    def test_casts(self):
        """Weights once, others each time; neither whole numbers nor what has more digits, nor what is elsewhere."""
        k, to = self.kernels(), torch.bfloat16
        w = nn.Parameter(torch.empty(3, device="meta"))
        self.assertIs(k._cast(w, to), k._cast(w, to))
        self.assertEqual([id(w)], list(k.cast))
        x = w * 2
        self.assertIsNot(k._cast(x, to), k._cast(x, to))
        self.assertEqual((to, 1), (k._cast(x, to).dtype, len(k.cast)))
        half = nn.Parameter(torch.empty(3, device="meta", dtype=torch.float16))
        self.assertIsNot(k._cast(half, torch.float32), k._cast(half, torch.float32))
        for other in (3, torch.empty(3, device="meta", dtype=torch.int64), torch.empty(3, device="meta", dtype=torch.float64), torch.empty(3, device="meta", dtype=to), torch.empty(3)):
            self.assertIs(other, k._cast(other, to))

    def test_autocast(self):
        """Products are of the type that autocast has, and what must be exact of 32 bits. When the outermost ends, casts are forgotten."""
        k = self.kernels()
        w = nn.Parameter(torch.empty(4, 4, device="meta"))
        with _trace.as_on_gpu(k):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = torch.mm(w, w)
                self.assertEqual((torch.bfloat16, torch.float32, torch.bfloat16), (y.dtype, y.softmax(-1).dtype, (y + y).dtype))
                with torch.autocast("cuda", enabled=False):
                    self.assertEqual(torch.float32, torch.mm(w, w).dtype)
                self.assertEqual(1, len(k.cast))
                with torch.autocast("meta", dtype=torch.float16):
                    self.assertEqual(torch.float16, torch.mm(torch.empty(4, 4, device="meta"), torch.empty(4, 4, device="meta")).dtype)
            self.assertEqual({}, k.cast)
            self.assertEqual(torch.float32, torch.mm(w, w).dtype)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                self.assertTrue(torch.is_autocast_cpu_enabled())
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            self.assertFalse(torch.is_autocast_enabled())

    def test_backward_passes(self):
        """What runs inside of them meets the kernels, too."""
        seen, k = [], self.kernels()

        class Looks(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                seen.append(torch.empty(3, device="cuda").device.type)
                return g

        x = torch.empty(3, device="meta", requires_grad=True)
        with _trace.as_on_gpu(k):
            Looks.apply(x).sum().backward()
        self.assertEqual(["meta"], seen)

    def test_dropout(self):
        for fused, p, training, many in ((True, 0.5, True, 1), (False, 0.5, True, 0), (True, 0.5, False, 0), (True, 0.0, True, 0), (True, 1.0, True, 0)):
            k = self.kernels(fused=fused)
            with mock.patch.object(torch, "native_dropout", wraps=torch.native_dropout) as called, _trace.as_on_gpu(k):
                nn.functional.dropout(torch.empty(4, 4, device="meta"), p, training)
            self.assertEqual(many, called.call_count)

    def test_devices(self):
        k = self.kernels()
        for x, want in (("cuda", META), ("cuda:1", META), (torch.device("cuda", 1), META), ("cpu", "cpu"), (CPU, CPU), ("cudas", "cudas"), (3, 3)):
            self.assertEqual(want, k._moved(x))
        with _trace.as_on_gpu(k):
            x = torch.empty(3, device="meta")
            self.assertIs(x, x.cuda())

    def test_what_is_put_back(self):
        names = [(of, n) for of in (torch.nn.functional, torch.autograd) for n in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic") if hasattr(of, n)]
        had = [getattr(of, n) for of, n in names], torch.autocast.__init__, torch.autocast.__exit__
        with self.assertRaises(KeyError), _trace.as_on_gpu(self.kernels()):
            self.assertNotEqual(had[1:], (torch.autocast.__init__, torch.autocast.__exit__))
            raise KeyError
        self.assertEqual(had, ([getattr(of, n) for of, n in names], torch.autocast.__init__, torch.autocast.__exit__))


class Places(unittest.TestCase):
    def test_where_a_step_is(self):
        live, said = Live(CPU, set()), []
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh()))
        place = Place(model, live)
        model[1][0].register_forward_hook(lambda *_: said.append((place.here(), live.module, live.where)))
        self.assertEqual((LOSS, LOSS), (place.here(), live.module))
        with place:
            model(torch.zeros(1, 4))
        self.assertEqual([(LOSS, LOSS, LOSS)], [(place.here(), live.module, live.where)])
        model[1][0].register_forward_pre_hook(lambda *_: said.append((place.here(), live.module, live.where)))
        self.assertEqual([("1 (Sequential)", "1", "the forward pass of 1")], said)  # after the part inside
        self.assertEqual({"Sequential": "Sequential", "0": "Linear", "1": "Sequential", "1.0": "Tanh"}, place.kinds)
        said.clear()
        model(torch.zeros(1, 4))  # nobody looks any more
        self.assertEqual({(LOSS, LOSS, LOSS)}, set(said))

    def run_step(self, model, loss, device=CPU, live=None, autocast=None):
        operators = Operators(None, live)
        kernels, place = Kernels(device, operators, False), Place(model, live)
        with _trace.as_on_gpu(kernels), place:
            _trace.step(model, (torch.ones(2, 4, device=device),), {}, loss, autocast, operators, kernels, place, live.pack, live.unpack)
        return place

    def test_passes(self):
        seen = []

        class Looks(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                seen.append(live.where)
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                seen.append(live.where)
                return g

        class Model(nn.Linear):
            def forward(self, x):
                return super().forward(Looks.apply(x + self.bias))

        live, model = Live(CPU, set()), Model(4, 4)
        place = self.run_step(model, lambda out: (seen.append(live.where), Looks.apply(out).sum())[1], live=live)
        self.assertEqual(["the forward pass of Model", LOSS, LOSS, "the backward pass"], seen[:4])
        self.assertIn("backward pass", seen[4])
        self.assertEqual(("the backward pass", []), (place.here(), place.stack))

    def test_errors(self):
        for device, do in ((CPU, "check that the example is what the model takes"), (META, 'check the example, or give device="cpu" to run it there with values')):
            model = nn.Sequential(nn.Linear(4, 4, device=device), nn.Linear(3, 3, device=device))
            with self.assertRaises(Error) as e:
                self.run_step(model, lambda out: out.sum(), device, Live(device, set()))
            self.assertRegex(str(e.exception), rf"^plan: 1 \(Linear\) cannot run on the {device.type} device \(RuntimeError: .*\); {do}$")

        def sentence(out):
            raise Error("a sentence")

        with self.assertRaisesRegex(Error, "^a sentence$"):
            self.run_step(nn.Linear(4, 4), sentence, live=Live(CPU, set()))

    def test_first_lines(self):
        for e, want in ((ValueError("one\ntwo"), "ValueError: one"), (KeyError(), "KeyError: "), (RuntimeError("x" * 300), "RuntimeError: " + "x" * 200), (RuntimeError("no kernel. This could be because of"), "RuntimeError: no kernel")):
            self.assertEqual(want, _trace.first(e))


if __name__ == "__main__":
    unittest.main()
