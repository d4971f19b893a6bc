"""Wrong use of forecasts, and their notes. SPEC S6.4."""

import contextlib
import json
import pathlib
import tempfile
import threading
import types
import unittest
import warnings
from unittest import mock

from blocks import Block, Stack, stack
from common import stowage, torch
from stowage import _explain, _forecast, _trace
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import Mixture


class WrongUse(unittest.TestCase):
    def test_one_sentence_says_what_to_do(self):
        model, x = stack(Block, 2), torch.randn(2, 8)

        class Looks(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Mixture()

            def forward(self, x):
                return self.inner(x, lambda _: contextlib.nullcontext())

        def fails():
            raise ValueError("no data\nhere")

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is a new feature
            lazy = nn.LazyLinear(3)

        class Sparse(nn.Linear):
            def __init__(self):
                super().__init__(8, 8)
                self.register_buffer("mask", torch.eye(8).to_sparse())

        class Locked(nn.Linear):
            def __init__(self):
                super().__init__(8, 8)
                self.lock = threading.Lock()

        cases = {
            "give the model itself": lambda: stowage.plan(3, x),
            "give what is passed to the model": lambda: stowage.plan(model, 3),
            "choose from a100": lambda: stowage.plan(model, x, gpu="h1000"),
            "the name of a GPU such as": lambda: stowage.plan(model, x, gpu=100),
            "cannot read nothing.json": lambda: stowage.plan(model, x, gpu="nothing.json"),
            r"^plan: the function given as example failed \(ValueError: no data\); ": lambda: stowage.plan(model, fails),
            "^plan: .*LazyLinear.*run the model once": lambda: stowage.plan(lazy, x),
            "^plan: .*before it is sharded": lambda: stowage.plan(Sparse(), x),
            "^plan: the model cannot be copied": lambda: stowage.plan(Locked(), x),
            "give gpu=": lambda: stowage.plan(model, x, budget="1GiB"),
            "as a size such as": lambda: stowage.plan(model, x, gpu="h100", budget="much"),
            "did you mean 'adamw'": lambda: stowage.plan(model, x, optimizer="admw"),
            "a function that makes one or None": lambda: stowage.plan(model, x, optimizer=3),
            "to make an optimiser, got an int": lambda: stowage.plan(model, x, optimizer=lambda _: 3),
            "give an optimiser of this model": lambda: stowage.plan(model, x, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1)),
            "expected a function as loss, got an int": lambda: stowage.plan(model, x, loss=3),
            "makes one number": lambda: stowage.plan(model, x, loss=lambda out: out),
            "nothing that the model returns takes a gradient": lambda: stowage.plan(nn.Identity(), x),
            "or None as autocast": lambda: stowage.plan(model, x, autocast=torch.int8),
            "gpu= names the GPU": lambda: stowage.plan(model, x, device="cuda"),
            "a list of patterns": lambda: stowage.plan(model, x, keep="first"),
            "keep: 'other' matches no module": lambda: stowage.plan(model, x, keep=["other"]),
            "expected a list of patterns, got \\[1\\]": lambda: stowage.plan(model, x, keep=[1]),
            "host, got -1, which is negative": lambda: stowage.plan(model, x, host=-1),
            "900.0 GiB is more than the .* of h100": lambda: stowage.plan(model, x, gpu="h100", budget="900GiB"),
            "matches no module": lambda: stowage.plan(model, x, gpu="h100", keep=["none"]),
            "has no values": lambda: stowage.plan(nn.Linear(2, 2, device="meta"), x, device="cpu"),
            r"^plan: first \(Linear\) cannot run on the meta device .*check the example, or give device=\"cpu\"": lambda: stowage.plan(model, torch.randn(2, 9)),
            "check that the example": lambda: stowage.plan(model, torch.randn(2, 9), device="cpu"),
            r"inner \(Mixture\) cannot run on the meta device .*give device=\"cpu\"": lambda: stowage.plan(Looks(), torch.randn(4, 16)),
        }
        for want, wrong in cases.items():
            with self.subTest(want), self.assertRaisesRegex(stowage.Error, want) as e:
                wrong()
            self.assertNotIn("\n", str(e.exception))
        with self.assertRaises(stowage.Error) as e:
            stowage.plan(model, fails)
        self.assertIsInstance(e.exception.__cause__, ValueError)
        self.assertEqual("ValueError: ", _trace.first(ValueError()))
        got = stowage.plan(Looks(), torch.randn(40, 16), device="cpu")
        self.assertTrue(any(name.startswith("inner.experts") for name in got.modules))

    def test_files_of_gpus(self):
        model, x = stack(Block, 2), torch.randn(2, 8)
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "mine.json")
            for text in ("", "[1", "h100", "x" * 600_000):
                file.write_text(text)
                with self.subTest(text[:10]), self.assertRaises(stowage.Error) as e:
                    stowage.plan(model, x, gpu=str(file))
                self.assertEqual(f"plan: {file} is not a JSON object with the figures of a GPU; give the name of a GPU such as \"h100\", or a file that is one", str(e.exception))
            for text in ("{", '{"memory": 3}', "{}", "\n {}"):
                file.write_text(text)
                with self.subTest(text), self.assertRaises(stowage.Error) as e:
                    stowage.plan(model, x, gpu=str(file))
                self.assertTrue(str(e.exception).startswith(f"plan: {file}: "), e.exception)
                self.assertNotIn("\n", str(e.exception))

    def test_a_model_without_blocks_that_does_not_fit(self):
        model, x = nn.Sequential(nn.Linear(8, 8, device="meta"), nn.Tanh()), torch.empty(1 << 20, 8, device="meta")
        got = stowage.plan(model, x, gpu="h100", budget="80MiB")
        self.assertIn("it does not fit if everything is kept (", got.verdict())
        self.assertIn("a budget may hold it by offloading, which is not forecast", got.verdict())
        got = stowage.plan(model, x, gpu="h100", budget=1)
        self.assertNotIn("offloading", got.verdict())
        self.assertIn("shard the model", got.verdict())

    def test_a_model_that_is_checkpointed_takes_as_long_under_any_budget(self):
        class Checkpointed(Stack):
            def forward(self, x):
                x = self.first(x)
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=False)
                return self.last(x)

        got = stowage.plan(Checkpointed(*(Block(64) for _ in range(3)), width=64), torch.randn(4096, 64), gpu="h100", budget="1GiB")
        self.assertGreater(got.step_ns, 0)
        self.assertEqual([got.step_ns] * 2, [got.plan.step_ns, got.least.step_ns])

    def test_notes(self):
        got = stowage.plan(nn.Linear(4, 4).eval(), torch.randn(2, 4), gpu="h100")
        for want in ("the sum of what the model returns", "evaluation mode", "no blocks that repeat"):
            self.assertTrue(any(want in n for n in got.notes), want)
        self.assertIn("give gpu=", str(stowage.plan(nn.Linear(4, 4), torch.randn(2, 4))))


class Rules(unittest.TestCase):
    """What forecasts say at their limits, and what they take."""

    def forecast(self, peak, budget=None, usable=None, **more):
        f = _forecast.Forecast("Net", {"weights": 10, "gradients": 0, "optimizer": 5, "saved": 0, "other": 0}, [], peak, "the loss", 1, {}, 7)
        f.budget, f.usable = budget, usable
        for name, x in more.items():
            setattr(f, name, x)
        return f

    def test_limits(self):
        planned = lambda budget: _forecast.Planned(budget, 1, 1, {}, 0, 0, 0, 0)
        for f, fits, words in (
            (self.forecast(100), None, "give gpu= to know whether it fits"), (self.forecast(100, 100), True, "it fits: 0 B of the budget of 100 B are left"), (self.forecast(101, 100, 200), False, "it does not fit if everything is kept (1 B more than the budget"),
            (self.forecast(100, None, 100), True, "it fits: 0 B of the 100 B that PyTorch can have are left"), (self.forecast(90, 100, 50), True, "it fits: 10 B of the budget"), (self.forecast(100, 50, 300, plan=planned(50)), False, "and stowage.Runtime(budget=50) would hold it"),
            (self.forecast(100, 23), False, "a budget may hold it by offloading"), (self.forecast(100, 22), False, "it does not fit: it takes 78 B more than the budget of 22 B"), (self.forecast(100, 50, saved_peak=0), False, "it does not fit: it takes 50 B more than"),
            (self.forecast(100, 50, 60, least=planned(60)), False, "the smallest budget that can be kept is 60 B (60 bytes)"), (self.forecast(100, 50, 60, least=planned(61)), False, "no budget would fit: a step needs at least 61 B"), (self.forecast(100, 50, least=planned(61)), False, "no budget would fit"),
        ):
            self.assertIs(fits, f.fits)
            self.assertIn(words, f.verdict())
            self.assertEqual({**f.to_dict()}, json.loads(f.to_json()))
        self.assertGreater(len(f.to_json().splitlines()), 10)

    def test_sizes_as_arguments(self):
        for n, want in ((3 << 30, '"3GiB"'), (1536 << 20, '"1536MiB"'), (5 << 20, '"5MiB"'), ((1 << 30) + 1, str((1 << 30) + 1)), (1024, "1024")):
            self.assertEqual(want, _forecast._written(n))

    def test_the_library_is_closed(self):
        for wrong in (False, True):
            with mock.patch.object(_forecast, "Library") as library:
                with contextlib.suppress(KeyError), _forecast._library() as made:
                    self.assertIs(library.return_value, made)
                    made.close.assert_not_called()
                    if wrong:
                        raise KeyError
                made.close.assert_called_once_with()

    def test_examples(self):
        x, y = torch.zeros(2), torch.ones(3)
        for example, want in ((x, ((x,), {})), ((x, y), ((x, y), {})), ([x, 3], ((x, 3), {})), ({"a": x}, ((), {"a": x})), (lambda: x, ((x,), {})), (lambda: {"b": 1}, ((), {"b": 1}))):
            args, kwargs = _forecast._arguments(example)
            self.assertEqual((list(map(id, want[0])), {k: id(v) for k, v in want[1].items()}), (list(map(id, args)), {k: id(v) for k, v in kwargs.items()}))

    def test_losses(self):
        a, b, plain = torch.tensor(2.0, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(3)
        space = types.SimpleNamespace
        summed = ["the sum of what the model returns was taken as loss; give loss= to count what yours holds"]
        for out, want, said in (({"loss": a, "out": b}, 2.0, []), (space(loss=a), 2.0, []), (a, 2.0, []), ((a, plain), 2.0, []), (b, 3.0, summed), ([a, b, plain], 5.0, summed), ({"loss": 3, "out": b}, 3.0, summed), ({"out": (b, b)}, 6.0, summed)):
            notes = []
            self.assertEqual((want, said), (float(_forecast._default_loss(notes, out)), notes))
        with self.assertRaisesRegex(stowage.Error, "takes a gradient"):
            _forecast._default_loss([], (plain, 3))


class Updates(unittest.TestCase):
    """Optimisers of forecasts, on their own."""

    def tracer(self, model, rates=None):
        t = _forecast._Tracer(model, torch.zeros(1), torch.device("cpu"), None, None, None)
        t.rates = rates
        return t

    def update(self, given, rates=None, model=None):
        model = nn.Linear(4, 4) if model is None else model
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        t, live = self.tracer(model, rates), _trace.Live(torch.device("cpu"), set())
        return t._update(model, given, live), t.notes, live

    def test_ways_to_update(self):
        """All weights at once, if this PyTorch does so on a GPU and can be traced; one by one if it is fused."""
        seen = []

        class Mine(torch.optim.SGD):
            def __init__(self, params, **more):
                super().__init__(params, lr=1.0)
                self.param_groups[0].update(more)

            def step(self):
                seen.append((self.param_groups[0].get("foreach"), self.param_groups[0].get("fused")))
                if self.param_groups[0].get("foreach") and self.fails:
                    raise NotImplementedError("foreach")
                for p in self.param_groups[0]["params"]:
                    self.state[p]["mine"] = self.state[p].get("mine", torch.zeros(7))

        note = ["this PyTorch cannot trace temporaries of optimisers that update all weights at once (foreach=True)"]
        for foreach, rates, more, fails, want, notes in (
            (True, "rates", {}, False, [(True, None)], []), (True, "rates", {}, True, [(True, None), (False, None)], note), (False, "rates", {}, False, [(None, None)], []), (True, None, {}, False, [(None, None)], []),
            (True, "rates", {"fused": True}, False, [(False, None)], []), (True, "rates", {"foreach": False}, True, [(False, None)], []),
        ):
            seen.clear()
            Mine.fails = fails
            with mock.patch.object(_forecast, "FOREACH", foreach):
                state, said, _ = self.update(lambda params: Mine(params, **{"foreach": None, **more}), rates)
            self.assertEqual((2 * 7 * 4, notes, want), (state, said, list(dict.fromkeys(seen))))

    def test_state_and_temporaries(self):
        """The state is what the first step makes; what the second one makes beside it is noted."""
        state, notes, live = self.update(lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9, weight_decay=0.1))
        self.assertEqual((20 * 4, []), (state, notes))
        self.assertGreater(live.peak, 0)
        self.assertEqual((0, []), self.update(None)[:2])

        class Mine(torch.optim.SGD):
            def step(self):
                for p in self.param_groups[0]["params"]:
                    if p not in self.state:
                        self.state[p]["mine"] = torch.zeros(self.n)
                    self.state[p]["mine"].add_(1)
                    torch.ones(self.temporary)

        peaks = []
        for Mine.n, Mine.temporary in ((7, 5), (1000, 5), (7, 1005)):
            state, _, live = self.update(lambda params: Mine(params, lr=1.0))
            self.assertEqual(2 * Mine.n * 4, state)
            peaks.append(live.peak)
        self.assertEqual([peaks[0], peaks[0] + 4000], peaks[1:])  # the state is no temporary

    def test_wrong_use(self):
        class Fails(torch.optim.SGD):
            def step(self):
                raise self.error

        frozen = nn.Linear(2, 2).requires_grad_(False)
        for error in (NotImplementedError("no"), ValueError("no")):
            Fails.error = error
            with self.assertRaisesRegex(stowage.Error, rf"^plan: Fails cannot run on the cpu device \({type(error).__name__}: no\); give optimizer=None"):
                self.update(lambda params: Fails(params, lr=1))
        for given, model, want in (("adam", frozen, "no parameter of the model takes a gradient"), (lambda params: 1 / 0, None, r"cannot be made from the parameters \(ZeroDivisionError: division by zero\)")):
            with self.assertRaisesRegex(stowage.Error, want):
                self.update(given, model=model)

        def sentence(params):
            raise stowage.Error("a sentence")

        with self.assertRaisesRegex(stowage.Error, "^a sentence$"):
            self.update(sentence)


class Copies(unittest.TestCase):
    def test_storages(self):
        """Tensors of a copy share what those of the model share, with other types too."""
        model = nn.Linear(4, 4)
        model.both = model.weight
        flat = torch.arange(8, dtype=torch.float32)
        model.register_buffer("part", flat[2:6].view(2, 2).t())
        model.register_buffer("bits", flat.view(torch.int32)[1:])
        for device in ("cpu", "meta"):
            made = _trace.copy_of(model, torch.device(device))
            self.assertIs(made.both, made.weight)
            self.assertEqual(_trace.storages(made.buffers()), {**_trace.storages([made.part])})
            for (name, a), (_, b) in zip([*model.named_buffers(), *model.named_parameters()], [*made.named_buffers(), *made.named_parameters()]):
                self.assertEqual((a.dtype, a.size(), a.stride(), a.storage_offset(), a.requires_grad, device), (b.dtype, b.size(), b.stride(), b.storage_offset(), b.requires_grad, b.device.type), name)
                self.assertNotEqual(a.data_ptr(), b.data_ptr() or 1)
                if device == "cpu":
                    self.assertTrue(torch.equal(a, b), name)
        model.register_buffer("result", model.weight * 2)
        self.assertFalse(_trace.copy_of(model, torch.device("cpu")).result.requires_grad)
        example = {"x": [torch.ones(2, 3).t().requires_grad_(), 3, "a"]}
        for device in ("cpu", "meta"):
            x, *rest = _trace.like(example, torch.device(device))["x"]
            self.assertEqual(([3, "a"], (3, 2), (1, 3), True, device), (rest, tuple(x.size()), x.stride(), x.requires_grad, x.device.type))

    def test_tensors_of_models(self):
        """Parameters, buffers and attributes are found, also in lists and dicts of lists, and no deeper."""
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        plain, listed, deep, deeper = (torch.zeros(n) for n in (5, 6, 7, 8))
        model[0].plain, model[0].listed, model[0].deep, model[0].deeper = plain, [listed], {"a": [deep]}, {"a": [[deeper]]}
        got = {id(t) for t in _trace.tensors_of(model)}
        self.assertEqual({id(t) for t in (*model.parameters(), *model.buffers(), plain, listed, deep)}, got)
        self.assertTrue(_explain.Ledger([], torch.device("cpu")).counted)
        self.assertFalse(_explain.Ledger(None, torch.device("cpu")).counted)


if __name__ == "__main__":
    unittest.main()
