"""Bytes that are saved at the end of a forward pass, beside what the plan expects. SPEC S8.6."""

import itertools
import unittest

from blocks import Block, Compared, Layer, choices, one_pass, planned, recorded, stack, train
from common import torch
from stowage._measured import BACKWARD, Choice
from stowage._plan import Plan
from stowage._planned import RECORDED
from stowage._record import Weak, storage_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Counter(TorchDispatchMode):
    """Counts the bytes of storages that operators made and that are alive."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_flatten(out)[0]:
            if isinstance(t, torch.Tensor):
                s = storage_of(t)
                if s._cdata not in self.made:
                    self.made[s._cdata] = (Weak(s), s.nbytes())
        return out

    def alive(self):
        """Returns the bytes that are alive, by storage."""
        return {at: n for at, (weak, n) in self.made.items() if weak.storage() is not None}


def counted(model, rt):
    """Returns the bytes that the blocks of a model keep in a step."""
    model.zero_grad(set_to_none=True)
    with rt.step():
        x = given = torch.randn(3, 4, 8)
        with Counter() as counter:
            x = model.first(x)
            for block in model.blocks:
                x = block(x)
        alive = counter.alive()
        for t in [given, x, *model.parameters(), *model.buffers()]:
            alive.pop(storage_of(t)._cdata, None)
        return sum(alive.values())


class Counted(unittest.TestCase):
    def saved(self, model, pick, fine):
        """Returns the bytes that the blocks of a model keep, counted and expected."""
        with planned(model, pick, fine, kind="budget") as rt:
            train(model, one_pass, RECORDED + 1, rt)
            return counted(model, rt), sum(rt._planner.keys[""].plan.saved.values()), choices(rt)

    def test_every_choice(self):
        for make in (Block, Layer):
            for fine in (False, True):
                for pick in ("keep", "lean", "whole", lambda layer: ("keep", "lean", "whole", "keep", "whole")[layer % 5], lambda layer: ("keep", "keep", "lean")[layer % 3], lambda layer: ("whole", "keep", "lean")[layer % 3]):
                    with self.subTest(block=make.__name__, fine=fine, pick=pick):
                        counted, expected, done = self.saved(stack(make, 3), pick, fine)
                        if make is Layer and any("cheap" in c for c in done.values()):
                            # What only an operator that is repeated needs is counted as kept.
                            self.assertLessEqual(counted, expected)
                            self.assertGreaterEqual(counted, expected * 0.85)
                        else:
                            self.assertEqual(expected, counted)


class Chain(nn.Module):
    """Modules one after the other around a residual."""

    def __init__(self, *chain):
        super().__init__()
        self.chain = nn.ModuleList(chain)

    def forward(self, x):
        y = x
        for module in self.chain:
            y = module(y)
        return x + y


class Times(nn.Module):
    """A product of two results of matrices."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) * self.b(x)


class Squared(nn.Module):
    """An activation that saves what it makes of its input."""

    def forward(self, x):
        return torch.relu(x).square()


def over():
    return nn.ReLU(inplace=True)


# What blocks are made of.
FORMS = {
    "conv": lambda: (nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), over()),
    "conv twice": lambda: (nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), over(), nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), over(), nn.Linear(8, 8)),
    "norm first": lambda: (nn.BatchNorm1d(4), over(), nn.Conv1d(4, 4, 3, padding=1), nn.GELU(), nn.Linear(8, 8)),
    "beside": lambda: (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
    "over and beside": lambda: (nn.Linear(8, 8), nn.LayerNorm(8), over(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
    "results": lambda: (nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
    "squared": lambda: (nn.Linear(8, 8), Squared(), nn.Linear(8, 8), nn.LayerNorm(8), Squared(), nn.Linear(8, 8)),
    "alone": lambda: (nn.Linear(8, 8), over(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
    "dropped out": lambda: (nn.Linear(8, 8), nn.LayerNorm(8), over(), nn.Dropout(0.1), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
    "product": lambda: (Times(), over(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)),
}


class Kinds(Compared):
    def test_each_alone(self):
        """Every choice of kinds of cheap parts drops what it is expected to drop, and no choice changes a result."""
        for name, form in FORMS.items():
            model = stack(lambda: Chain(*form()), 3)
            state = {of: t.clone() for of, t in model.state_dict().items()}
            want = train(model, one_pass, 2)
            with recorded(model) as (rt, (m, *_)):
                known, units = rt._planner.keys[""], [u for u in rt._planner.units.list if u.parent is None]
                kinds = sorted({kind for part in m.parts.values() for kind, n in part.kinds.items() if n})
                self.assertTrue(kinds, name)
                for n in range(len(kinds) + 1):
                    for kept in itertools.combinations(kinds, n):
                        with self.subTest(form=name, kinds=kinds, kept=kept):
                            known.plan = Plan({u: Choice(lean=True, kept=frozenset(kept)) for u in units}, {}, {}, {}, {**known.plan.answer})
                            m.count(known.plan)
                            rt._planner._rewrap()
                            self.assertEqual(sum(known.plan.saved.values()), counted(model, rt))
                            model.load_state_dict(state)
                            self.compare(want, train(model, one_pass, 2, rt))


class Passes(unittest.TestCase):
    def test_backward_passes_of_parts_add_up(self):
        """Whether blocks are one or divided, their backward passes take as long in all; a block without its parts takes what they leave."""
        with recorded(stack(Layer, 3)) as (rt, divisions):
            self.assertEqual({False, True}, {m._fine for m in divisions})
            for m in divisions:
                m._whole, m._pace = {u: 1000 if u.parent is None else 300 for u in m._whole}, 1.0
                blocks = [call.unit for call in m.parts if call.unit.parent is None]
                parts = [call.unit for call in m.parts if call.unit.parent is not None]
                got = [m._backward(call) for call in m.parts]
                self.assertEqual(int(BACKWARD * 1000) * len(blocks), sum(got))
                self.assertEqual(bool(parts), m._fine)
                for call, took in zip(m.parts, got):
                    inside = sum(u.parent is call.unit for u in parts)
                    self.assertEqual(int(BACKWARD * (m._whole[call.unit] - 300 * inside)), took)


if __name__ == "__main__":
    unittest.main()
