"""Copies of modules while a plan wraps them: each is a plain module with weights and attributes of its own."""

import copy
import functools
import pickle
import unittest

import torch
from blocks import Block, Compared, Stack, planned, train
from common import same
from stowage._managed import Wrapped

STEPS = 4


class Scaled(Block):
    """A block with an attribute, which a copy may change."""

    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Stated(Scaled):
    """A block that says what its copies have."""

    def __getstate__(self):
        return {**self.__dict__, "seen": True}


def replica(block):
    """Makes what nn.DataParallel makes of a module for another device: the weights are results of a copy."""
    made = block._replicate_for_data_parallel()
    for name, child in block.named_children():
        made._modules[name] = replica(child)
        setattr(made, name, made._modules[name])
    for name, p in block._parameters.items():
        setattr(made, name, None if p is None else p * 0.5)
    return made


class Copies(Compared):
    def each(self, make, change, blocks=Scaled):
        """Runs copies of blocks in steps and between them, and compares with plain models."""
        for plan in ("lean", "whole", "offload"):
            with self.subTest(plan=plan):
                torch.manual_seed(1)
                model = Stack(*(blocks() for _ in range(3)))

                def step(model, i):
                    x = model.first(torch.randn(3, 4, 8))
                    others = [make(block) for block in model.blocks]
                    for block, other in zip(model.blocks, others):
                        change(other)
                        x = block(x) + other(x)
                    loss = model.last(x).square().mean()
                    loss.backward()
                    return loss

                want = train(model, step, STEPS)
                with planned(model, plan) as rt:
                    self.compare(want, train(model, step, STEPS, rt))
                    self.assertTrue(torch.isfinite(want[-1][0]))
                    self.assertTrue(any("forward" in m.__dict__ for m in model.modules()))
                    for block in model.blocks:
                        other = make(block)
                        self.assertNotIn("forward", other.__dict__)
                        change(other)
                        x = torch.randn(2, 4, 8)
                        self.assertFalse(same(block(x), other(x)))
                for m in model.modules():
                    self.assertFalse({"forward", "__getstate__", "_replicate_for_data_parallel"} & set(m.__dict__))

    def test_a_shallow_copy(self):
        def change(block):
            block.scale = 0.5

        self.each(copy.copy, change)

    def test_a_deep_copy(self):
        def change(block):
            with torch.no_grad():
                block.up.weight.mul_(0.5)

        self.each(copy.deepcopy, change)
        self.each(lambda block: pickle.loads(pickle.dumps(block)), change)

    def test_a_replica(self):
        self.each(replica, lambda block: None)

    def test_a_state_of_its_own(self):
        def change(block):
            self.assertTrue(block.seen)
            block.scale = 0.5

        self.each(copy.copy, change, Stated)

    def test_copies_its_attributes_itself(self):
        """The copy has a method of its own, which is the module's where that has one of its own."""

        class Mine(Block):
            def __deepcopy__(self, memo):
                made = memo[id(self)] = type(self).__new__(type(self))
                made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in ("__getstate__", "_replicate_for_data_parallel")})
                return made

        own = functools.partial(lambda x: x + 1)
        for had in (False, True):
            module = Mine()
            if had:
                module.forward = own
            Wrapped(module, lambda forward, args, kwargs: forward(*args, **kwargs) * 2)
            other = copy.deepcopy(module)
            self.assertNotIsInstance(other.forward, Wrapped)
            if had:
                self.assertEqual(2, other.forward(1))
            else:
                self.assertIs(other, other.forward.__self__)

    def test_a_method_of_its_own(self):
        """A module that has another forward method has it again, and so has its copy."""
        module, own = Block(), lambda x: x + 1
        module.forward = own
        first = Wrapped(module, lambda forward, args, kwargs: forward(*args, **kwargs) * 2)
        self.assertEqual((4, False), (module.forward(1), module.forward is own))
        for other in (copy.copy(module), module._replicate_for_data_parallel()):
            self.assertIs(own, other.__dict__["forward"])
            self.assertFalse({"__getstate__", "_replicate_for_data_parallel"} & set(other.__dict__))
        second = Wrapped(module, lambda forward, args, kwargs: forward(*args, **kwargs) + 5)
        first.remove()  # which another one has the place of
        self.assertEqual(9, module.forward(1))
        second.remove()
        self.assertIs(first, module.forward)
        first.remove()
        self.assertIs(own, module.__dict__["forward"])
        self.assertFalse({"__getstate__", "_replicate_for_data_parallel"} & set(module.__dict__))


if __name__ == "__main__":
    unittest.main()
