"""The examples for other frameworks, and which frameworks the tests used. SPEC S6.4.

Small stand-ins of the frameworks (frameworks.py) run everywhere. STOWAGE_FRAMEWORKS names
folders that are searched for the real ones, which then run the same cases:

    STOWAGE_FRAMEWORKS=transformers/src:accelerate/src python3 -m unittest test_huggingface
"""

import contextlib
import importlib
import io
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from common import PLUGIN, on_cpu, stowage, torch

import frameworks

PRETRAIN = """
import torch
from megatron.training import training
from small import Decoder, Text

forward_backward, model = training.get_forward_backward_func(schedule_pg_collection=None), Decoder()


def forward_step(data, model):
    loss = model(**next(data))["loss"]
    return loss, lambda loss: (loss, {"loss": loss.detach()})


for forward_only in (False, True, False, False):
    data = iter(torch.utils.data.DataLoader(Text(32), batch_size=8))
    forward_backward(forward_step_func=forward_step, data_iterator=data, model=[model], num_microbatches=4, seq_length=64, micro_batch_size=8, forward_only=forward_only)
"""


class Examples(unittest.TestCase):
    folder = PLUGIN / "examples" / "frameworks"

    def test_they_run(self):
        """With two updates each; the budgets that they name are enough."""
        for name in ("transformers", "accelerate", "lightning"):
            with self.subTest(name), mock.patch.object(sys, "path", [str(self.folder), *sys.path]), mock.patch.object(torch.cuda, "is_available", lambda: False), on_cpu():
                package = "lightning.pytorch" if name == "lightning" else name
                frameworks.use(self, package)
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    runpy.run_path(str(self.folder / f"with_{name}.py"))["main"](["--steps", "2"])
                self.assertIn("2 steps; the last one:", out.getvalue())
                found = re.search("budget 12.0 MiB: .* the peak of all is ([0-9.]+) MiB", out.getvalue())
                self.assertLessEqual(float(found[1]), 12)
            for rt in list(stowage._runtime._open.values()):
                rt.close()

    def test_megatron(self):
        """In a folder with as much of Megatron-LM as it touches."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "megatron" / "training").mkdir(parents=True)
            (root / "megatron" / "training" / "training.py").write_text("from frameworks import forward_backward_no_pipelining\n\n\ndef get_forward_backward_func(**_):\n    return forward_backward_no_pipelining\n")
            (root / "pretrain_gpt.py").write_text(PRETRAIN)
            path = os.pathsep.join([folder, *filter(None, sys.path)])
            env = dict(os.environ, PYTHONPATH=path, STOWAGE_BUDGET="12MiB", STOWAGE_FRAMEWORKS="", STOWAGE_DEVICE="cpu", CUDA_VISIBLE_DEVICES="")
            done = subprocess.run([sys.executable, "-B", str(self.folder / "with_megatron.py")], env=env, capture_output=True, text=True, timeout=900)
            self.assertEqual(0, done.returncode, done.stderr)
            self.assertIn(" under a plan", done.stdout)


@unittest.skipUnless(frameworks.FOLDERS, "STOWAGE_FRAMEWORKS is not set; name folders with the sources of transformers, accelerate, lightning or megatron there to run these cases against them")
class Real(unittest.TestCase):
    def test_real_frameworks_were_used(self):
        used = [name for name in frameworks.NAMES if frameworks.is_real(name)]
        self.assertTrue(used, f"{frameworks.FOLDERS} have none of {frameworks.NAMES}")
        for name in used:
            with self.subTest(name):
                file = importlib.import_module(name).__file__
                self.assertTrue(any(file.startswith(folder) for folder in frameworks.FOLDERS), file)


if __name__ == "__main__":
    unittest.main()
