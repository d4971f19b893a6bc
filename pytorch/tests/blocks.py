"""Models of blocks, runtimes whose plans a test chooses, and training to compare."""

import contextlib
import copy
import random
import unittest

import torch
from common import rng_state, runtime, same
from stowage._errors import TooSmall
from stowage._planned import RECORDED
from torch import nn

# What a plan may say about the three parts of what a block saves.
PLANS = {
    "keep": {},
    "lean": {"lean": "recompute"},
    "whole": {"lean": "recompute", "rest": "recompute"},
    "offload": {"rest": "offload", "inputs": "offload"},
    "lean, offload": {"lean": "recompute", "rest": "offload", "inputs": "offload"},
    "whole, offload": {"lean": "recompute", "rest": "recompute", "inputs": "offload"},
}


def answer(request, choices, step_ns=0):
    numbers = dict.fromkeys(("before_ns", "peak", "before_peak", "moved", "again_ns", "waiting_ns", "tried"), 0)
    return {"choices": choices, "step_ns": step_ns, "nothing": False, "notes": [], **numbers}


def force(rt, pick, fine=False):
    """Makes the runtime follow pick(layer), the name of a plan, for every block; with fine
    its parts are blocks, too. What cannot be is kept."""

    def choose(request):
        if not request["offload"]:
            raise TooSmall("only plans that offload are asked for")
        choices = []
        for unit in request["units"]:
            want = PLANS[pick(unit["layer"])].get(unit["name"].split()[0], "keep")
            can = {"keep": True, "offload": unit["offload"], "recompute": unit["recompute_ns"] > 0}
            choices.append(want if can[want] else "keep")
        layers = len({unit["layer"] for unit in request["units"]})
        return answer(request, choices, -layers if fine else layers)

    rt._library.choose = choose


@contextlib.contextmanager
def planned(model, pick="whole", fine=False, kind="fake-a", **more):
    """Opens a runtime in which a model follows one plan from the third step on."""
    if kind.startswith("fake"):
        more.setdefault("policy", None)
    more.setdefault("budget", "1GiB")
    keep = more.pop("keep", ())
    with runtime(kind, **more) as rt:
        force(rt, pick if callable(pick) else lambda _: pick, fine)
        rt.attach(model, keep=keep)
        yield rt


@contextlib.contextmanager
def recorded(model):
    """Opens a runtime that has recorded steps of a model and keeps everything. Yields it and what they measured."""
    with runtime("budget", budget="1GiB") as rt:
        rt.attach(model)
        train(model, one_pass, RECORDED, rt)
        yield rt, rt._planner.keys[""].measured


def any_plan(seed):
    r, names = random.Random(seed), {}
    return lambda layer: names.setdefault(layer, r.choice(list(PLANS)))


def choices(rt, key=""):
    """What the plan of a key does with every block, by name."""
    plan = rt._planner.keys[key].plan
    return {u.name: str(c) for u, c in plan.choices.items()}


def why(rt):
    return {u.name: u.why for u in rt._planner.units.list if u.why}


def refused(rt, but=()):
    """Returns the reasons for which blocks and cheap parts are not recomputed, with these left out."""
    reasons = {**why(rt), **rt._planner._refused}
    return {name: reason for name, reason in reasons.items() if not any(b in reason for b in but)}


def train(model, step, steps=4, rt=None, key=""):
    """Trains for some steps. It returns, of every step, the result of step(model, number), the
    gradients, the buffers and the state of the random numbers."""
    torch.manual_seed(3)
    model = copy.deepcopy(model) if rt is None else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    out = []
    for i in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with rt.step(key) if rt is not None else contextlib.nullcontext():
            got = step(model, i)
        got = [got] if torch.is_tensor(got) else list(got)
        out.append([t.detach().clone() for t in [*got, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers(), rng_state()]])
        optimizer.step()
    return out


class Block(nn.Module):
    """A norm, two matrices and a residual."""

    def __init__(self, width=8, act=nn.GELU):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), act(), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        p = q @ k.transpose(-1, -2)
        if mask is not None:
            p = p.masked_fill(mask, -1e4)
        return self.out(self.drop(p.softmax(-1)) @ v)


class Layer(nn.Module):
    """A transformer's layer: its parts are blocks, too."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x, mask=None):
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.mlp(x)


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, *blocks, width=8):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(width, width), nn.ModuleList(blocks), nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stack(make=Block, count=4, seed=1, width=8):
    torch.manual_seed(seed)
    return Stack(*(make() for _ in range(count)), width=width)


def one_pass(model, i):
    loss = model(torch.randn(3, 4, 8)).square().mean()
    loss.backward()
    return loss


class Compared(unittest.TestCase):
    def compare(self, want, got):
        """Compares what train() returned, bit for bit."""
        self.assertEqual(len(want), len(got))
        for i, (a, b) in enumerate(zip(want, got)):
            self.assertEqual(len(a), len(b))
            for j, (x, y) in enumerate(zip(a, b)):
                self.assertTrue(same(x, y), f"step {i}, tensor {j} of {len(a)}")
