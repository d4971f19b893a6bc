"""Blocks, their parts and cheap modules of random models, line by line, as in test_tables.py.

    STOWAGE_UPDATE=1 python3 -m unittest pytorch/tests/test_trees.py
"""

import random
import unittest

from common import DEVICE, torch
from stowage import _units
from tables import Table
from torch import nn


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all on the CPU")


class Tree(nn.Module):
    pass


CLASSES = [type(name, (Tree,), {}) for name in ("Layer", "Mlp", "SelfAttention", "CoreAttention", "Stage", "Wrapper")]


class Random:
    """Builds models: layers in lists, stages, chains, experts, shared modules, and some that are compiled."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.recipes = {c: [self.any_leaf() for _ in range(self.draw.randrange(3))] for c in CLASSES}
        self.made = []

    def any_leaf(self):
        return self.draw.choice([lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4), lambda: nn.GELU(), lambda: nn.Dropout(0.1), lambda: nn.Embedding(50, 4), lambda: nn.Identity(), lambda: nn.LSTM(4, 4), lambda: nn.BatchNorm1d(4), lambda: nn.SyncBatchNorm(4), lambda: nn.Conv1d(4, 4, 1)])

    def module(self, deep):
        draw = self.draw
        if not deep or draw.random() < 0.15:
            return self.any_leaf()()
        if self.made and draw.random() < 0.08:
            return draw.choice(self.made)
        kind = draw.random()
        if kind < 0.2:
            c = draw.choice(CLASSES)
            return draw.choice([nn.ModuleList, nn.ModuleList, lambda of: nn.Sequential(*of)])([self.of_class(c, deep - 1) for _ in range(draw.choice([1, 2, 3, 4, _units.FEW - 1, _units.FEW]))])
        if kind < 0.3:
            return nn.ModuleDict({f"d{i}": self.module(deep - 1) for i in range(draw.randrange(1, 3))})
        if kind < 0.4:
            return nn.Sequential(*(self.module(deep - 1) for _ in range(draw.randrange(1, 4))))
        return self.of_class(draw.choice(CLASSES), deep - 1)

    def of_class(self, c, deep):
        m = c()
        for i, make in enumerate(self.recipes[c]):
            m.add_module(f"m{i}", make())
        for name in self.draw.sample(["a", "b", "experts", "attention"], self.draw.randrange(3 if deep else 1)):
            m.add_module(name, self.module(deep))
        if self.draw.random() < 0.06:
            m._compiled_call_impl = lambda *_: None
        self.made.append(m)
        return m


class Trees(Table):
    def test_as_they_were(self):
        lines = []
        for seed in range(160):
            r = Random(seed)
            model = r.of_class(CLASSES[-1], 3)
            r.made.remove(model)
            for i in range(r.draw.randrange(1, 4)):
                model.add_module(f"x{i}", r.module(3))
            name = {m: n for n, m in model.named_modules()}
            blocks = _units.blocks(model)
            lines.append(f"{seed} blocks {[name[m] for m in blocks]} alone {[name[m] for m in _units.alone(model)]} hidden {[name[m] for m in _units.hidden(model)]} cheap {[name[m] for m in _units.cheap(model)]}")
        self.compare("trees", lines)

    def test_all_modules(self):
        """Each once, those that are shared too."""
        for seed in range(20):
            model = Random(seed).of_class(CLASSES[-1], 3)
            found = _units.modules(model)
            self.assertIs(model, found[0])
            self.assertEqual((len(found), set(model.modules())), (len(set(found)), set(found)))


if __name__ == "__main__":
    unittest.main()
