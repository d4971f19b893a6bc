"""What one rank of several runs for test_ranks.py: steps under budgets that differ by rank.

    python3 ranks_planned.py CASE RANK RANKS FOLDER

Every case compares with the same steps without the plug-in, bit for bit, and prints a line
for what it found equal.
"""

import contextlib
import copy
import datetime
import sys
import time
from unittest import mock

from blocks import planned
from common import DEVICE, runtime, same, stowage, torch
from stowage import _contest, _planned
from stowage._again import state
from stowage._ranks import CHECKED
from torch import nn

dist = torch.distributed
W, ROWS, BLOCKS = 32, 256, 12
EACH = ROWS * W * 4  # bytes of one result
STEPS = 22  # all stages, and some steps after them


class Block(nn.Module):
    """Its forward pass may need the other ranks, as one that gathers parameters does."""

    order = None  # which blocks issued a collective, in order

    def __init__(self, number, gathers=False):
        super().__init__()
        self.number, self.gathers = number, gathers
        self.norm, self.up, self.down = nn.LayerNorm(W), nn.Linear(W, 2 * W), nn.Linear(2 * W, W)

    def forward(self, x):
        if self.gathers:
            # The number that is summed is the block's: in another order the sum is another.
            seen = torch.full((1,), float(self.number + 1))
            dist.all_reduce(seen)
            if Block.order is not None:
                Block.order.append(self.number)
            x = x + (seen / dist.get_world_size() - self.number)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, gathers=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block(i, gathers) for i in range(BLOCKS)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def net(gathers=False):
    torch.manual_seed(3)
    return Net(gathers)


def wrapped(gathers=False):
    return nn.parallel.DistributedDataParallel(net(gathers))


def rank():
    return dist.get_rank()


def train(model, step, batches=1, sync=None, slow=0.0, count=STEPS, before=None, after=None):
    """Losses, and parameters after all steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(7 + rank())
    got = []
    for n in range(count):
        optimizer.zero_grad(set_to_none=True)
        if before is not None:
            before(n)
        with step():
            for i in range(batches):
                with sync(model, i == batches - 1) if sync is not None else contextlib.nullcontext():
                    loss = model(torch.randn(ROWS, W)).square().mean()
                    loss.backward()
            time.sleep(slow)
        got.append(loss.detach().clone())
        optimizer.step()
        if after is not None:
            after()
    return got + [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def weights(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def budget_for(share):
    """A budget for weights, gradients, momentum and a share of what blocks save: two inputs and
    a result that is twice as large. With half of it some blocks must be recomputed."""
    return 3 * weights(net()) + int(share * BLOCKS * 4 * EACH)


def equal(what, want, got):
    assert len(want) == len(got)
    for i, (a, b) in enumerate(zip(want, got)):
        assert same(a, b), f"{what}: result {i} differs"
    print(f"{what}: equal", flush=True)


def plan_of(rt, key=""):
    return rt.stats()["plans"][key]


def recomputed(rt):
    """Names of the blocks that are recomputed, all of them."""
    return sorted(name for choice, names in plan_of(rt)["choices"].items() if choice.split(",")[0] == "recompute" for name in names)


class Agreed:
    """After every step: fails unless all ranks recompute the same blocks, and collects these."""

    def __init__(self, rt):
        self.rt, self.names, self.stages = rt, set(), set()

    def __call__(self):
        mine, all = (recomputed(self.rt), plan_of(self.rt)["stage"]), [None] * dist.get_world_size()
        dist.all_gather_object(all, mine)
        assert all == [mine] * len(all), f"ranks recompute {all}"
        self.names.update(mine[0])
        self.stages.add(mine[1])


def compare(what, make, share, ranks=None, **more):
    want = train(make(), contextlib.nullcontext, **more)
    model = make()
    with runtime("budget", budget=budget_for(share), ranks=ranks) as rt:
        rt.attach(model)
        agreed = Agreed(rt)
        got = train(model, rt.step, after=agreed, **more)
        assert rt._planner.ranks.several, f"{what}: ranks do not agree by default"
        assert agreed.names or "offload" in agreed.stages, f"{what}: nothing is recomputed: {plan_of(rt)}"
        assert plan_of(rt)["stage"] == "settled", plan_of(rt)
    equal(what, want, got)


def by_rank(*values):
    return values[rank()]


def budgets():
    """The first rank holds everything, and the second little of it."""
    for share in (0.5, 0.3):  # the latter cannot do without offloading
        compare(f"ddp, budgets for all and {share} of it", wrapped, by_rank(10.0, share))


def speeds():
    compare("ddp, different speeds", wrapped, by_rank(0.5, 0.6), slow=by_rank(0.0, 0.01))


def accumulation():
    compare("ddp, no_sync", wrapped, by_rank(10.0, 0.5), batches=3, sync=lambda model, last: contextlib.nullcontext() if last else model.no_sync())


def collectives():
    """Blocks that need each other's ranks, in a model that says nothing of them."""
    Block.order = []
    compare("collectives in blocks", lambda: net(True), by_rank(10.0, 0.5), ranks=True)
    all = [None] * 2
    dist.all_gather_object(all, Block.order)
    assert all[0] == all[1]
    Block.order = []
    compare("collectives in blocks under ddp", lambda: wrapped(True), by_rank(10.0, 0.5), ranks=dist.group.WORLD)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(W, 2 * W), nn.Linear(2 * W, W)
        self.register_buffer("shift", torch.randn(W))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) + self.shift


def broadcasts():
    """DDP writes buffers before every forward pass, and two come before one backward pass. Another write is noticed."""

    def twice(model, step, after=lambda: None):
        torch.manual_seed(7 + rank())
        for _ in range(6):
            model.zero_grad(set_to_none=True)
            with step():
                loss = sum(model(torch.randn(ROWS, W)).square().mean() for _ in range(2))
                after()
                loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Sequential(Shifted(), nn.Linear(W, W)) for _ in range(3)))
    ddp = nn.parallel.DistributedDataParallel
    want = twice(ddp(copy.deepcopy(plain)), contextlib.nullcontext)
    for what in ("what DDP returned", "what DDP was given", "another write"):
        model = ddp(copy.deepcopy(plain))
        with planned(model if what != "what DDP was given" else model.module, "whole", ranks=False) as rt:
            if what != "another write":
                equal(f"ddp, two forward passes, attached {what}", want, twice(model, rt.step))
                assert len(recomputed(rt)) == (3 if what == "what DDP returned" else 0), recomputed(rt)
                continue
            try:
                twice(model, rt.step, lambda: [b.mul_(1) for b in model.buffers()])
            except stowage.Error as e:
                assert str(e).endswith("give broadcast_buffers=False to DDP, or attach() what DDP returned"), e
                equal(f"ddp, two forward passes, {what}", (), ())
        assert "_sync_buffers" not in model.__dict__


def alone():
    """Without agreement every rank recomputes what it must."""
    want = train(wrapped(), contextlib.nullcontext)
    model = wrapped()
    with runtime("budget", budget=budget_for(by_rank(10.0, 0.5)), ranks=False) as rt:
        rt.attach(model)
        names = set()
        got = train(model, rt.step, after=lambda: names.update(recomputed(rt)))
        assert bool(names) == (rank() == 1), names
    equal("ddp, no agreement", want, got)


def fails(what, pattern, budget, before=None, step=None, **more):
    """Both ranks raise an error in the same step."""
    model, steps = wrapped(), []
    with runtime("budget", budget=budget, **more) as rt:
        rt.attach(model)
        try:
            train(model, step(rt) if step is not None else rt.step, before=lambda n: (steps.append(n), before(n) if before is not None else None), count=3 * CHECKED)
        except stowage.Error as e:
            all = [None] * 2
            dist.all_gather_object(all, (len(steps), str(e), type(e).__name__))
            assert all[0][0] == all[1][0] and all[0][2] == all[1][2], all
            assert pattern in all[0][1] and pattern in all[1][1], all
            print(f"{what}: both failed alike: equal", flush=True)
            return steps[-1], str(e), type(e)
    raise AssertionError(f"{what}: no error")


def too_small():
    """For one rank: before the first step, by what must be saved, and after the plan settled."""
    n, sentence, kind = fails("too small for weights", "is too small", by_rank(budget_for(10.0), 1000))
    assert n == 0 and kind is stowage.BudgetError and sentence.startswith("rank 1 of 2: ") == (rank() == 0), sentence
    n, sentence, kind = fails("too small for saved tensors", "is too small", budget_for(by_rank(10.0, -0.1)))
    assert kind is stowage.BudgetError and n <= 3, (n, sentence)
    held = []
    n, sentence, kind = fails("exceeded later", "is too small", budget_for(0.5), **later(held))
    assert kind is stowage.BudgetError and n > STEPS, (n, sentence)


def later(held):
    """A rank that holds more than its budget after some steps."""
    from stowage._memory import CountedMemory

    class Memory(CountedMemory):
        def allocated(self):
            return super().allocated() + sum(held)

    def before(n):
        if n == STEPS and rank() == 1:
            held.append(1 << 30)

    class Late(list):
        pass

    attached = Late()
    memory = Memory(attached)

    def step(rt):
        attached[:] = rt._attached
        return rt.step

    return {"before": before, "memory": memory, "step": step}


def keys():
    """Ranks whose steps have other keys, or that fail alone, do not wait for each other."""
    fails("different keys", "different keys", budget_for(0.5), step=lambda rt: lambda: rt.step(by_rank("short", "long")))
    model = wrapped()
    want = train(wrapped(), contextlib.nullcontext, count=STEPS + 3)
    with runtime("budget", budget=budget_for(by_rank(10.0, 0.5))) as rt:
        rt.attach(model)
        for _ in range(3):  # one rank fails in a step, and goes on
            with contextlib.suppress(ZeroDivisionError), rt.step():
                model.module(torch.randn(ROWS, W)).sum()
                rank() == 1 and 1 / 0
        agreed = Agreed(rt)
        got = train(model, rt.step, count=STEPS + 3, after=agreed)
        assert agreed.names
    equal("a step that failed on one rank", want, got)


def rows():
    """A rank whose steps stash rows, or whose model has no blocks, leaves plans to the library."""
    for what, model, stash in (("rows", net(), rank() == 1), ("no blocks", by_rank(nn.Sequential(nn.Linear(W, W)), net()), False)):
        with runtime("budget", budget=budget_for(10.0), ranks=True) as rt:
            rt.attach(model)
            for _ in range(5):
                with rt.step():
                    x = torch.randn(ROWS, W, requires_grad=True)
                    y = rt.stash(torch.tanh(x) * 1.0, rows=torch.tensor(3)) if stash else x
                    model(y * y).sum().backward()
            assert rt._planner.keys[""].by_library
        print(f"{what}: equal", flush=True)


@contextlib.contextmanager
def planning_again(make):
    """When plans are made again, the first rank finds no other, and the second has what make(planner, division, plan)
    returns, whatever it takes. Yields a list of whether the plan was changed."""
    real, done = _planned.Planner._plan_again, []

    def plan_again(planner, key, known, plan, seconds):
        best = lambda divisions, *_, **__: plan if rank() == 0 else make(planner, divisions[0], plan)
        with mock.patch.object(_contest, "best", best), mock.patch.object(_contest, "WORTH_AGAIN", by_rank(0.0, -1e3)):
            done.append(real(planner, key, known, plan, seconds))
        return done[-1]

    with mock.patch.object(_planned.Planner, "_plan_again", plan_again):
        yield done


def again():
    """One rank finds a faster plan after steps were timed, or fails then: so do all."""

    def every(planner, division, plan):
        found = plan._replace(choices={u: division._again_whole(u) for u in planner.units.list if u.parent is None})
        division.count(found)
        return found

    def none(*_):
        raise stowage.Error("there is no such plan")

    with planning_again(every) as done, runtime("budget", budget=budget_for(by_rank(10.0, 0.6))) as rt:
        model = wrapped()
        rt.attach(model)
        agreed = Agreed(rt)
        train(model, rt.step, after=agreed)
        assert done == [True] and len(agreed.names) == BLOCKS, (done, agreed.names)
        print("a plan that is made again: equal", flush=True)
    with planning_again(none) as done:
        fails("a plan that cannot be made again", "there is no such plan", budget_for(0.5))
        assert not done, done


def unequal():
    """A second pass that makes other values on one rank is run on none."""

    class Odd(Block):
        def forward(self, x):
            return super().forward(x * 2.0 if rank() == 1 and self.number == 2 and state.again else x)

    def make():
        model = net()
        for block in model.blocks:
            block.__class__ = Odd
        return nn.parallel.DistributedDataParallel(model)

    with runtime("budget", budget=budget_for(0.5)) as rt:
        model = make()
        rt.attach(model)
        agreed = Agreed(rt)
        train(model, rt.step, count=6, after=agreed)
        assert agreed.names and "module.blocks.2" not in agreed.names, agreed.names
        assert "module.blocks.2 cannot be recomputed" in rt.report(), rt.report()
    print("other values on one rank: equal", flush=True)


def fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))

    def make(reshard, inner):
        model = net()
        for block in model.blocks:
            if inner:
                fully_shard(block.up, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        for m in model.modules():
            if DEVICE == "cpu" and hasattr(m, "set_force_sum_reduction_for_comms"):
                m.set_force_sum_reduction_for_comms(True)  # gloo has no average
        return model

    @contextlib.contextmanager
    def sync(model, last):
        model.set_requires_gradient_sync(last)
        yield

    for reshard, inner in ((True, False), (False, False), (True, True)):
        for batches in (1, 2):
            compare(f"fsdp reshard={reshard} inner={inner} batches={batches}", lambda: make(reshard, inner), by_rank(10.0, 0.5), batches=batches, sync=sync)


def main(case, rank, ranks, folder):
    if DEVICE != "cpu":
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "gloo" if DEVICE == "cpu" else "nccl", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks), timeout=datetime.timedelta(minutes=10)
    )
    try:
        for name in case.split(","):
            globals()[name]()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
