"""Bytes that are saved at the end of a forward pass, beside what the plan expects. SPEC S8.6."""

import unittest

from blocks import Block, Layer, choices, one_pass, planned, stack, train
from common import torch
from stowage._planned import RECORDED
from stowage._record import Weak, storage_of
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


class Counted(unittest.TestCase):
    def saved(self, model, pick, fine):
        """Returns the bytes that the blocks of a model keep, counted and expected."""
        with planned(model, pick, fine, kind="budget") as rt:
            train(model, one_pass, RECORDED + 1, rt)
            model.zero_grad(set_to_none=True)
            with rt.step():
                x = given = torch.randn(3, 4, 8)
                with Counter() as counter:
                    x = model.first(x)
                    for block in model.blocks:
                        x = block(x)
                alive = counter.alive()
                for t in [given, x, *model.parameters()]:
                    alive.pop(storage_of(t)._cdata, None)
                counted = sum(alive.values())
            plan = rt._planner.keys[""].plan
            return counted, sum(plan.saved.values()), choices(rt)

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


if __name__ == "__main__":
    unittest.main()
