"""What a step holds at every moment, and plans that keep to it. SPEC S8.6."""

import contextlib
import unittest

from blocks import Block, Layer, one_pass, stack, train
from common import runtime, torch
from stowage._plan import Choice, best
from stowage._planned import RECORDED
from torch import nn


class Activated(nn.Module):
    """A block whose result is saved by itself, and by the next one as its input."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.up(x))


class Unwritten(torch.autograd.Function):
    """Saves a seed that nothing reads, as attention does if it drops nothing."""

    seeds = 0

    @staticmethod
    def forward(ctx, x):
        Unwritten.seeds += 1
        ctx.save_for_backward(x, torch.tensor(Unwritten.seeds))
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Seeded(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + Unwritten.apply(torch.tanh(self.up(x)))


class Moments(unittest.TestCase):
    @contextlib.contextmanager
    def recorded(self, make, blocks=4):
        """Opens a runtime, and gives it and what its recorded steps measured: with blocks as
        units, and with their parts."""
        model = stack(make, blocks)
        with runtime("budget", budget="1GiB") as rt:
            rt.attach(model)
            train(model, one_pass, RECORDED, rt)
            yield rt, rt._planner.keys[""].measured

    def test_what_the_next_block_needs_stays(self):
        with self.recorded(Activated) as (_, (blocks, *_)):
            for part in blocks.parts.values():
                self.assertEqual((0, 0), (part.lean, part.rest), part.unit.name)
                self.assertGreater(part.inputs, 0)

    def test_seeds_that_nothing_reads(self):
        with self.recorded(Seeded) as (rt, _):
            self.assertEqual({True}, {u.whole for u in rt._planner.units.list if u.parent is None}, rt._planner.notes())

    def test_everything_kept_is_what_was_measured(self):
        for make in (Block, Layer):
            with self.recorded(make) as (_, divisions):
                for m in divisions:
                    self.assertEqual(max(m._profile.needs), m.most_held({}))

    def test_dropping_takes_less(self):
        """The more blocks are recomputed, the less is held at once, and never less than what must be."""
        for make in (Block, Layer):
            with self.recorded(make, 6) as (rt, (m, *_)):
                before = m.most_held({})
                units = [u for u in rt._planner.units.list if u.parent is None and u.whole]
                self.assertEqual(6, len(units))
                for n in range(1, 7):
                    held = m.most_held({u: Choice(whole=True) for u in units[:n]})
                    self.assertLessEqual(held, before)
                    before = held
                self.assertLess(before, m.most_held({}))
                self.assertGreaterEqual(before, sum(p.inputs for p in m.parts.values()))

    def test_plans_keep_to_the_limit(self):
        for make in (Block, Layer):
            with self.recorded(make, 6) as (rt, divisions):
                most, chosen = divisions[0].most_held({}), set()
                for percent in range(100, 70, -5):
                    plan = best(divisions, rt._library.choose, most * percent // 100, False, everything=True)
                    held = [m.most_held(plan.choices) for m in divisions if {p.unit for p in m.parts.values()} == set(plan.saved)]
                    self.assertLessEqual(held[0], most * percent // 100)
                    chosen.update(str(c) for c in plan.choices.values())
                self.assertTrue(chosen & {"recompute", "recompute cheap parts"}, chosen)


if __name__ == "__main__":
    unittest.main()
