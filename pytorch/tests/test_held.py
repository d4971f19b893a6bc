"""What steps under any plan hold, beside what is forecast, on random models. SPEC S8.6."""

import collections
import contextlib
import random
import unittest
from unittest import mock

import blocks
from blocks import recorded, stack
from common import DEVICE, runtime, torch
from stowage import _step
from stowage._key import SLACK
from stowage._measured import CAST, KEEP, Choice
from stowage._plan import Plan
from stowage._planned import RECORDED
from test_peaks import Allocator
from torch import nn
from torch.nn import functional as F

WIDTH = 32


class Op(nn.Module):
    """Something that a model does with a tensor [batch, 8, WIDTH], as modules or as functions, inside of a module that has no more."""

    def __init__(self, draw):
        super().__init__()
        self.of = draw.choice(
            [
                nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(8), nn.GroupNorm(4, 8), nn.GELU(), nn.SiLU(), nn.ReLU(), nn.Sigmoid(), nn.Softplus(), nn.Dropout(0.2),
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)), Gated(),
                F.gelu, F.silu, torch.tanh, torch.exp, lambda x: x * torch.sigmoid(x), lambda x: F.dropout(F.gelu(x), 0.1), lambda x: x + x, lambda x: x.double().float(),
                lambda x: (x * x).mean(-1, keepdim=True).add(1).rsqrt() * x,
            ]
        )

    def forward(self, x):
        return self.of(x)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Part(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.ops, self.skips = nn.Sequential(*(Op(draw) for _ in range(draw.randrange(1, 5)))), draw.random() < 0.5

    def forward(self, x):
        return x + self.ops(x) if self.skips else self.ops(x)


class Block(nn.Module):
    """Ends with an activation, perhaps, which the next block can make again from what this one saves."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.parts, self.linear = nn.ModuleList(Part(draw) for _ in range(draw.randrange(1, 4))), nn.Linear(WIDTH, WIDTH)
        self.skips, self.last = draw.random() < 0.4, draw.choice([None, F.gelu, F.silu, torch.sigmoid, lambda x: F.dropout(F.silu(x), 0.1)])

    def forward(self, x):
        y = self.linear(x)
        for part in self.parts:
            y = part(y)
        y = x + y if self.skips else y
        return y if self.last is None else self.last(y)


class Model(nn.Module):
    """The last blocks are given what the first ones were, perhaps, as in a U-Net."""

    def __init__(self, seed):
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(seed) for _ in range(4)), nn.Linear(WIDTH, 8)
        self.across = seed % 3 == 0

    def forward(self, x):
        x, before = self.first(x), []
        for i, block in enumerate(self.blocks):
            if self.across and i < 2:
                before.append(x)
            x = block(x + before.pop() if self.across and i > 1 else x)
        return self.head(x)


class Convolutions(nn.Module):
    """Blocks of norms, activations and convolutions, in the order of U-Nets."""

    class Block(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norms, self.convs = nn.ModuleList(norm() for _ in range(2)), nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
            self.act, self.drop = nn.SiLU(), nn.Dropout(0.1)

        def forward(self, x):
            y = self.convs[0](self.act(self.norms[0](x)))
            return x + self.convs[1](self.drop(self.act(self.norms[1](y))))

    def __init__(self, norm):
        super().__init__()
        self.first, self.blocks, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.ModuleList(self.Block(norm) for _ in range(4)), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def drawn(m, draw):
    """Returns choices of a division, any of those that a plan could have and others."""
    choices = {}
    for u in {part.unit: None for part in m.parts.values()}:
        can, sorts = [KEEP] + [m._again_whole(u)] * m._can_whole(u), m._sorts(u)
        if sorts:
            kinds = sorted({kind for part in m.parts.values() if part.unit is u for kind in part.kinds})
            can += [m._leanest(u, sorts[: draw.randrange(len(sorts)) + 1], False), Choice(lean=True, kept=frozenset(draw.sample(kinds, draw.randrange(len(kinds) + 1))))]
        choices[u] = draw.choice(can)
    return choices


@unittest.skipUnless(DEVICE == "cpu", "the allocator counts tensors of the CPU")
class Bounds(unittest.TestCase):
    def check(self, model, x, seed, cast=None, plans=6):
        """Follows random plans, and what they are relaxed to. Cast says whether autocast is on in the forward pass alone ("forward") or
        in the step."""
        memory, draw = Allocator(model), random.Random(seed)

        def step():
            casts = torch.autocast("cpu", torch.bfloat16) if cast else contextlib.nullcontext()
            with casts:
                loss = model(x).float().square().mean()
                if cast == "step":
                    loss.backward()
            if cast != "step":
                loss.backward()
            model.zero_grad(set_to_none=True)

        with memory, mock.patch.object(_step, "PIECE", 16384), runtime("budget", budget="1GiB", memory=memory) as rt:
            rt.attach(model)
            for _ in range(RECORDED + 1):
                with rt.step():
                    step()
            known = rt._planner.keys[""]

            def follow(m, choices):
                plan = Plan(choices, {}, {}, {}, {"again_ns": m.again(choices), "step_ns": 10**12, "before_ns": 0, "peak": 0, "before_peak": 0, "moved": 0})
                m.count(plan)
                known.plan, known.stage = plan, "settled"
                rt._planner._rewrap()
                memory.most = memory.allocated()
                with rt.step():
                    step()
                return plan, memory.most - known.base

            m = known.measured[0]
            most = m.most_held({})
            self.assertLessEqual(follow(m, {})[1], most + most // SLACK, "everything is kept")
            for _ in range(plans):
                m = draw.choice(known.measured)
                plan, held = follow(m, drawn(m, draw))
                what = {u.name: (str(c), sorted(c.kept)) for u, c in plan.choices.items() if c != KEEP}
                self.assertLessEqual(held, m.most_held(plan.choices) + most // SLACK, f"forecast of {what}")
                room = draw.randrange(most // 3)
                less = m.relaxed(plan, room)
                if less is not plan:
                    _, now = follow(m, less.choices)
                    self.assertLessEqual(now, held + room + most // SLACK, f"{what} was relaxed to {({u.name: (str(c), sorted(c.kept)) for u, c in less.choices.items()})}")

    def test_random_models(self):
        for seed in range(10):
            for cast in (None, "forward", "step") if seed < 3 else (None,):
                with self.subTest(seed=seed, cast=cast):
                    torch.manual_seed(seed)
                    model = Model(seed)
                    if cast and torch.__version__ < "2":  # which does not cast for norms on the CPU
                        continue
                    self.check(model, torch.randn(16, 8, WIDTH), seed, cast)

    def test_convolutions(self):
        for norm in (lambda: nn.GroupNorm(4, 16), lambda: nn.BatchNorm2d(16)):
            torch.manual_seed(1)
            self.check(Convolutions(norm), torch.randn(2, 3, 16, 16), 1, plans=10)


class Cached(unittest.TestCase):
    def test_until_the_backward_pass_begins(self):
        """Autocast keeps what it cast until then, whether or not anything is saved outside of blocks."""
        with recorded(stack(blocks.Block, 3)) as (_, (m, *_)):
            p = m._profile
            for outside in (True, False):
                if not outside:
                    kept = [(op, mark) for op, mark in zip(p.ops, p.marks) if op[0] not in ("take", "give")]
                    p.ops[:], p.marks[:], p.held_then, m._most = [op for op, _ in kept], [mark for _, mark in kept], collections.defaultdict(int), None
                choices, moments = {part.unit: Choice(lean=True) for part in m.parts.values()}, []
                for cached in (0, 8):
                    for call, part in m.parts.items():
                        m.parts[call] = part._replace(cached=cached, kinds={**part.kinds, CAST: 8})
                    moments.append([n for n, _ in m._moments(choices)])
                backward = 1 + [kind for kind, _, _ in p.ops].index("load")  # the first is that of the beginning
                self.assertEqual(moments[0][backward:], moments[1][backward:])
                self.assertEqual(24, max(b - a for a, b in zip(*moments)))


if __name__ == "__main__":
    unittest.main()
