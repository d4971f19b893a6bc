"""What the tests share: the library of this tree, runtimes, and a step to compare.

    make library
    python3 -m unittest discover -s pytorch/tests
"""

import contextlib
import os
import pathlib
import sys

PLUGIN = pathlib.Path(__file__).resolve().parent.parent
if not os.environ.get("STOWAGE_INSTALLED"):  # the package of this tree, unless another is to be tested
    sys.path.insert(0, str(PLUGIN))
    os.environ.setdefault("STOWAGE_LIBRARY", str(PLUGIN.parent / "build" / "libstowage.so"))
sys.dont_write_bytecode = True
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read when PyTorch is loaded
    os.environ.setdefault(name, "1")

import torch

import stowage
from fake import Fake
from stowage import _measured

torch.set_num_threads(1)
_measured.NOTICED = 10**12  # no plan of a test depends on what the machine does besides

# STOWAGE_DEVICE=cuda runs the cases that compare results on a GPU (PyTorch 2 and later).
DEVICE = os.environ.get("STOWAGE_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)
    torch.use_deterministic_algorithms(True, warn_only=True)

ALL = {name: "offload" for name in ("a", "b", "c", "moe_act", "expert_fc1", "core_attn", "mlp", "router")}


@contextlib.contextmanager
def runtime(kind="offload", **more):
    """Opens a runtime: "offload" and "keep" by policy, "limit" with a saved limit, "budget",
    or "fake-7"."""
    if kind == "limit":
        more.setdefault("saved_limit", "1MiB")
    elif kind == "budget":
        more.setdefault("budget", "1GiB")
    else:
        more.setdefault("policy", {name: "keep" if kind == "keep" else "offload" for name in ALL})
    if kind.startswith("fake") and DEVICE == "cpu":  # it reads memory itself
        more["library"] = Fake.with_seed(kind)
    if DEVICE != "cpu":
        more.setdefault("least", 0)
    rt = stowage.Runtime(device=DEVICE, **more)
    rt._complete = True  # cases use a few of the groups
    try:
        yield rt
    finally:
        rt.close()


def on_cpu():
    """Makes tensors on the CPU for a while, whatever the device of the tests is."""
    return contextlib.nullcontext() if DEVICE == "cpu" else torch.device("cpu")


def rng_state():
    """Returns the state of the random numbers that a model on the device draws from."""
    return torch.get_rng_state() if DEVICE == "cpu" else torch.cuda.get_rng_state()


def set_rng_state(state):
    torch.set_rng_state(state) if DEVICE == "cpu" else torch.cuda.set_rng_state(state)


def allocated(*sizes):
    """Returns the bytes that tensors of so many bytes take: a GPU's are multiples of 512."""
    return sum(n if DEVICE == "cpu" else (n + 511) // 512 * 512 for n in sizes)


def plain(case, seed=1):
    """What a case gives without a runtime."""
    torch.manual_seed(seed)
    return case(lambda name: contextlib.nullcontext())


def under(rt, case, seed=1, key=""):
    torch.manual_seed(seed)
    with rt.step(key):
        return case(rt.group)


def same(a, b):
    """Equal bit for bit, not-a-numbers and signs of zeros too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    if a.is_complex():
        a, b = torch.view_as_real(a).contiguous(), torch.view_as_real(b).contiguous()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(whole), b.view(whole)) if a.dim() else same(a[None], b[None])
