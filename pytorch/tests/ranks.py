"""Models for test_together.py, and what one rank of several runs:

    python3 ranks.py fsdp|ddp RANK RANKS FOLDER

It compares a model with the plug-in to the same model without it, prints a line for each
setting, and exits with 0 if all of them are equal.
"""

import contextlib
import datetime
import re
import sys

from common import DEVICE, runtime, same, stowage, torch
from stowage._record import Kept, storage_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

W, ROWS, STEPS = 64, 64, 3  # a result is 16 KiB


class Block(nn.Module):
    """Its frozen matrix is saved as a view of a parameter, and as one that has lost its base."""

    def __init__(self, again=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(W), nn.Linear(W, 2 * W), nn.Linear(2 * W, W)
        self.frozen, self.again = nn.Linear(W, W).requires_grad_(False), again

    def part(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        y = checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)
        y = torch.tanh(self.frozen(y))
        return x + torch.sin(F.linear(y, self.frozen.weight.detach()))


class Net(nn.Module):
    def __init__(self, again=False, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList([Block(again) for _ in range(blocks)])
        self.head = nn.Linear(W, W)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# What is compiled has groups around it, not within.
AROUND = {"*blocks.[0-9]": "a", "*head": "c"}
GROUPS = {"*blocks.*.norm": "b", "*blocks.*": "a", "*head": "c"}


def eager(fn):
    """Not for torch.compile, where there is one."""
    return torch.compiler.disable(fn) if hasattr(torch, "compile") else fn


class Watch:
    """Counts what a step's hooks do with parameters and with the rest. Which storages are a
    parameter's it sees itself, when a sharded module begins: gathered ones are there by then,
    and keep their storages when their memory is freed."""

    def __init__(self, model):
        self.parameters, self.kept, self.moved, self.passed = set(), 0, 0, 0
        look = eager(self.look)
        for m in model.modules():
            if m is model or hasattr(m, "unshard"):
                m.register_forward_pre_hook(look)

    def look(self, module, _):
        for p in module.parameters():
            p = getattr(p, "_local_tensor", p)
            self.parameters.add(storage_of(p)._cdata)

    @contextlib.contextmanager
    def step(self, rt):
        with rt.step():
            pack, unpack = rt._step.pack, rt._step.unpack

            def watch(t):
                h = pack(t)
                moves, weight = type(h) is not Kept, storage_of(t)._cdata in self.parameters
                self.kept += weight
                self.moved += moves and not weight
                self.passed += not moves and not weight
                if moves and weight:
                    raise AssertionError(f"a parameter of {list(t.shape)} is moved")
                return h

            with torch.autograd.graph.saved_tensors_hooks(eager(watch), unpack):
                yield


def rank():
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def steps(model, step, sync=lambda model, last: contextlib.nullcontext(), batches=2):
    """Gradients of all steps, of as many batches each; parameters differ from step to step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    torch.manual_seed(7 + rank())
    got = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with step():
            for i in range(batches):
                with sync(model, i == batches - 1):
                    model(torch.randn(ROWS, W)).square().mean().backward()
        for p in model.parameters():
            if p.grad is not None:
                g = getattr(p.grad, "_local_tensor", p.grad)
                got.append(g.detach().clone())
        optimizer.step()
    return got


def moved(rt):
    """Bytes of the last step."""
    return rt.stats()["summary"]["counts"]["OutBytes"]


def settings(kind, make, groups, **more):
    """Settings with a saved limit: a quarter more than the least that the first step needs."""
    if kind != "limit":
        return {}
    model = make()
    with runtime("limit", saved_limit="1KiB") as rt:
        rt.attach(model, groups)
        try:
            steps(model, rt.step, **more)
        except stowage.Error as e:
            return {"saved_limit": int(re.search(r"\((\d+) bytes\)", str(e))[1]) * 5 // 4}
    raise AssertionError("a step went by in 1 KiB")


def compare(what, make, sync, recomputes=False, groups=GROUPS, kinds=("offload", "limit", "fake-2")):
    """One setting under each kind of runtime. What a backward pass recomputes may pass."""
    want = steps(make(), contextlib.nullcontext, sync)
    assert want and all(g.isfinite().all() for g in want)
    for kind in kinds:
        model = make()
        with runtime(kind, **settings(kind, make, groups, sync=sync)) as rt:
            rt.attach(model, groups)
            watch = Watch(model)
            got = steps(model, lambda: watch.step(rt), sync)
            if rt.stats():
                assert moved(rt) > 0, f"{what}, {kind}: nothing left"
        assert len(want) == len(got)
        for a, b in zip(want, got):
            assert same(a, b), f"{what}, {kind}: gradients differ"
        assert watch.kept > 0 and watch.moved > 0, f"{what}, {kind}: {watch.kept} parameters kept, {watch.moved} moved"
        assert recomputes or watch.passed == 0, f"{what}, {kind}: {watch.passed} tensors are taken for parameters"
        print(f"{what}, {kind}: equal, {watch.kept} parameters kept, {watch.moved} tensors in groups, {watch.passed} passed", flush=True)


def ddp():
    def make(again):
        torch.manual_seed(3)
        return nn.parallel.DistributedDataParallel(Net(again))

    @contextlib.contextmanager
    def sync(model, last):
        with contextlib.nullcontext() if last else model.no_sync():
            yield

    for again in (False, True):
        compare(f"ddp checkpoints={again}", lambda: make(again), sync, again)


def fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(DEVICE, (torch.distributed.get_world_size(),))

    def make(again, reshard, low, compiled=False):
        torch.manual_seed(3)
        model = Net(again)
        if compiled:
            torch._dynamo.reset()  # each of these models is one more of the same code
            model.blocks = nn.ModuleList([torch.compile(b, backend="aot_eager") for b in model.blocks])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        for m in model.modules():
            if DEVICE == "cpu" and hasattr(m, "set_force_sum_reduction_for_comms"):
                m.set_force_sum_reduction_for_comms(True)  # gloo has no average
        return model

    @contextlib.contextmanager
    def sync(model, last):
        model.set_requires_gradient_sync(last)
        yield

    for again, reshard, low in ((False, True, False), (False, False, False), (True, True, False), (False, True, True), (True, True, True)):
        compare(f"fsdp checkpoints={again} reshard={reshard} bfloat16={low}", lambda: make(again, reshard, low), sync, again)
    for reshard in (True, False):
        compare(f"fsdp compiled reshard={reshard}", lambda: make(False, reshard, False, True), sync, False, AROUND, ("offload", "fake-2"))


def main(case, rank, ranks, folder):
    dist = torch.distributed
    if DEVICE != "cpu":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "gloo" if DEVICE == "cpu" else "nccl", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks), timeout=datetime.timedelta(minutes=10)
    )
    try:
        {"ddp": ddp, "fsdp": fsdp}[case]()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
