"""Wrong use of forecasts, and their notes. SPEC S6.4."""

import contextlib
import pathlib
import tempfile
import threading
import unittest
import warnings

from blocks import Block, Stack, stack
from common import stowage, torch
from stowage import _explain, _trace
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


class Copies(unittest.TestCase):
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
