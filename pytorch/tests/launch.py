"""Starts one process for each rank of a test. None outlives its time, or another that failed."""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from common import torch

# Whether there is FSDP2 for the CPU: that of PyTorch 2.6 asks a stream of the CPU for events, which it has not.
FSDP2 = (pathlib.Path(torch.__file__).parent / "distributed" / "fsdp" / "_fully_shard").is_dir() and not torch.__version__.startswith("2.6.")
HERE = pathlib.Path(__file__).resolve().parent


def run_ranks(test, script, case, ranks, device="cpu", seconds=600):
    """Runs `python3 script case RANK RANKS FOLDER` for every rank, and returns what each of them
    printed. A rank that fails or takes too long fails the test."""
    if not torch.distributed.is_available():
        test.skipTest("this PyTorch has no torch.distributed")
    env = dict(os.environ, STOWAGE_DEVICE=device)
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        out = [files.enter_context(open(f"{folder}/rank-{r}.txt", "w+")) for r in range(ranks)]
        all = [
            subprocess.Popen([sys.executable, str(HERE / script), case, str(r), str(ranks), folder], env=env, stdout=f, stderr=subprocess.STDOUT)
            for r, f in enumerate(out)
        ]
        end = time.monotonic() + seconds
        try:
            while any(p.poll() is None for p in all) and not any(p.returncode for p in all) and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.5 if any(p.returncode for p in all) else 0)  # the others say why
        finally:
            for p in all:
                if p.poll() is None:
                    p.kill()
                p.wait()
        said = []
        for f in out:
            f.seek(0)
            said.append(f.read())
        for p in all:
            test.assertEqual(0, p.returncode, f"{case} on {device}, after at most {seconds} s:\n" + "\n".join(t[-3000:] for t in said))
        return said
