"""Blocks that cannot be recomputed are found, and later ones raise errors. SPEC S8.6."""

import random
import unittest

from blocks import Block, Compared, choices, one_pass, planned, stack, train, why
from common import DEVICE, stowage, torch
from stowage._planned import RECORDED
from torch import nn
from torch.utils import checkpoint

SETTLED = RECORDED + 1
RECOMPUTED = {"recompute", "recompute, offload inputs"}


class Planned(Compared):
    def under(self, model, step=one_pass, pick="whole", steps=RECORDED + 2, **more):
        """Trains with and without a plan. It returns what the plan does."""
        want = train(model, step, steps)
        with planned(model, pick, **more) as rt:
            self.compare(want, train(model, step, steps, rt))
            return choices(rt), why(rt)


class Fused(Planned):
    def test_dropout_as_one_operator(self):
        """On a GPU dropout is one operator, which saves its mask: what it made is made again."""

        class Drops(Block):
            def forward(self, x):
                h, _ = torch.native_dropout(nn.functional.gelu(self.up(x)), 0.25, True)
                return x + self.down(h)

        model = stack(Drops)
        want = train(model, one_pass, RECORDED + 2)
        with planned(model, "lean") as rt:
            self.compare(want, train(model, one_pass, RECORDED + 2, rt))
            self.assertEqual({"recompute cheap parts"}, set(choices(rt).values()))
            self.assertEqual([], rt._planner.notes())
            part = next(iter(rt._planner.keys[""].measured[0].parts.values()))
            self.assertEqual(3 * 4 * model.blocks[0].up.out_features * 4, part.lean)  # what down() reads


@unittest.skipUnless(hasattr(torch, "set_default_device"), "this PyTorch has no default device")
class Devices(Planned):
    def test_a_default_device(self):
        """Second passes have that of the first, though PyTorch hides it from what a backward pass runs."""
        seen = []

        class Looks(Block):
            def forward(self, x):
                seen.append(torch.empty(0).device.type)
                return super().forward(x)

        def step(model, i):
            x = torch.randn(3, 4, 8)
            for outside in (False, True):
                with torch.device(DEVICE), torch.device("meta"):
                    loss = model(x).square().mean()
                    None if outside else loss.backward()
                loss.backward() if outside else None
            return loss

        for pick in ("whole", "lean"):
            seen.clear()
            self.assertEqual(4, len(self.under(stack(Looks), step, pick)[0]))
            self.assertGreater(len(seen), 2 * 4 * 2 * (RECORDED + 2))
            self.assertEqual({"meta"}, set(seen))


class Refused(Planned):
    """Blocks whose second forward pass is not the first again."""

    def refused(self, block, reason, pick="whole"):
        done, reasons = self.under(stack(block), pick=pick)
        self.assertEqual({}, {name: c for name, c in done.items() if c in RECOMPUTED})
        self.assertEqual(4, len(reasons))
        for why in reasons.values():
            self.assertRegex(why, reason)

    def test_writes_to_its_input(self):
        class Writes(Block):
            def forward(self, x):
                return self.down(self.up(x.add_(1.0)))

        self.refused(Writes, "writes to its input")

    def test_draws_from_python(self):
        class Draws(Block):
            def forward(self, x):
                return super().forward(x) * random.choice((1.0, 2.0))

        random.seed(1)
        model = stack(Draws)
        with planned(model) as rt:
            train(model, one_pass, SETTLED, rt)
            self.assertFalse(RECOMPUTED & set(choices(rt).values()))
            self.assertEqual({"it draws from Python's random numbers"}, set(why(rt).values()))

    def test_changes_buffers(self):
        class Counts(Block):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.zeros(()))

            def forward(self, x):
                self.count += 1
                return super().forward(x)

        class Replaces(Counts):
            def forward(self, x):
                self.count = self.count + 1
                return Block.forward(self, x)

        self.refused(Counts, "changes its buffers")
        self.refused(Replaces, "changes its buffers")

    def test_keeps_numbers(self):
        """Some results depend on them, in later steps."""

        class Counts(Block):
            def __init__(self):
                super().__init__()
                self.calls = 0

            def forward(self, x):
                self.calls += 1
                return super().forward(x) * (2.0 if self.calls == RECORDED + 2 else 1.0)

        class Lists(Block):
            def __init__(self):
                super().__init__()
                self.losses = []

            def forward(self, x):
                self.losses.append(1.0)
                return super().forward(x) * (1.0 + len(self.losses) // 3)

        self.refused(Counts, "changes its attribute 'calls'")
        self.refused(Lists, "changes its attribute 'losses'")

    def test_caches_are_no_state(self):
        """What the first call alone sets does no harm."""

        class Caches(Block):
            longest, table = 0, None

            def forward(self, x):
                if self.longest < x.shape[1]:
                    self.longest, self.table = x.shape[1], torch.arange(float(x.shape[1]))[:, None]
                return super().forward(x + self.table)

        done, reasons = self.under(stack(Caches))
        self.assertEqual({}, reasons)
        self.assertEqual({"recompute"}, set(done.values()))

    def test_depends_on_what_is_outside(self):
        calls = []

        class Depends(Block):
            def forward(self, x):
                calls.append(1)
                return super().forward(x * len(calls))

        model = stack(Depends)
        with planned(model) as rt:
            train(model, one_pass, SETTLED, rt)
            self.assertFalse(RECOMPUTED & set(choices(rt).values()))
            self.assertRegex(rt._planner.notes()[0], "blocks.0 and 3 more cannot be recomputed: its second forward pass makes other values")

    def test_input_that_is_written_later(self):
        """Plain PyTorch allows it if autograd does not save the input."""

        class Adds(Block):
            def forward(self, x):
                return super().forward(x + 1)

        def step(model, i):
            x = model.first(torch.randn(3, 4, 8))
            for block in model.blocks:
                y = block(x)
                x.zero_()
                x = y
            loss = model.last(x).square().mean()
            loss.backward()
            return loss

        done, reasons = self.under(stack(Adds), step)
        self.assertEqual(({}, 4), (done, len(reasons)))

    def test_a_second_pass_ends_early(self):
        """As soon as it has saved everything, where PyTorch can."""
        ends = []

        class Noted(Block):
            def forward(self, x):
                y = super().forward(x)
                ends.append(1)
                return y

        model = stack(Noted)
        with planned(model) as rt:
            train(model, one_pass, SETTLED, rt)
            ends.clear()
            with rt.step():
                one_pass(model, 0)
        self.assertEqual(4 if hasattr(checkpoint, "set_checkpoint_early_stop") else 8, len(ends))

    def test_backward_inside_of_forward(self):
        class Inner(Block):
            def forward(self, x):
                with torch.enable_grad():
                    w = x.detach().requires_grad_()
                    g, = torch.autograd.grad(super().forward(w).square().sum(), w)
                return super().forward(x) + g

        done, reasons = self.under(stack(Inner))
        self.assertEqual({}, done)
        self.assertEqual(4, len(reasons))

    def test_kept_by_name(self):
        done, reasons = self.under(stack(), keep=["blocks.[01]"])
        self.assertEqual({"blocks.2": "recompute", "blocks.3": "recompute"}, done)
        self.assertEqual({"keep= names it, or a part of it"}, set(reasons.values()))

    def test_what_inference_made(self):
        class Biased(Block):
            def forward(self, x, bias):
                return super().forward(x) + bias

        def step(model, i):
            with torch.inference_mode():
                bias = torch.randn(8)
            x = model.first(torch.randn(3, 4, 8))
            for block in model.blocks:
                x = block(x, bias)
            loss = model.last(x).square().mean()
            loss.backward()
            return loss

        for pick in ("whole", "whole, offload"):
            with self.subTest(pick=pick):
                self.under(stack(Biased), step, pick)


class Later(Planned):
    """Blocks that begin to misbehave once they are recomputed."""

    def raises(self, block, change, pick="whole", what="cannot be recomputed"):
        model = stack(block)
        with planned(model, pick) as rt:
            train(model, one_pass, SETTLED, rt)
            self.assertTrue(choices(rt))
            change(model)
            with self.assertRaisesRegex(stowage.Error, what):
                train(model, one_pass, 1, rt)
            self.assertIsNone(rt._now)
            for b in model.blocks:
                b.mode = None
            train(model, one_pass, 2, rt)

    def test_other_tensors(self):
        class Other(Block):
            mode = None

            def forward(self, x):
                x = super().forward(x)
                if self.mode:
                    self.mode += 1
                    x = x[..., :8].sin() if self.mode % 2 else x.sin().cos()
                return x

        def change(model):
            model.blocks[2].mode = 1

        self.raises(Other, change)

    def test_writes_to_its_input(self):
        class Writes(Block):
            mode = None

            def forward(self, x):
                if self.mode:
                    x = x.add_(1.0)
                return super().forward(x)

        def change(model):
            model.blocks[0].mode = 1

        self.raises(Writes, change, "whole", "modified by an inplace operation")
        self.raises(Writes, change, "whole, offload", "modified by an inplace operation")

    def test_cheap_module_that_writes(self):
        class Act(nn.Module):
            mode = None

            def forward(self, x):
                return x.mul_(2.0) if self.mode else nn.functional.gelu(x)

        def change(model):
            for block in model.blocks:
                block.act.mode = 1

        model = stack(lambda: Block(act=Act))
        with planned(model, "lean") as rt:
            train(model, one_pass, SETTLED, rt)
            change(model)
            with self.assertRaisesRegex(stowage.Error, "Act writes to its input"):
                train(model, one_pass, 1, rt)

    def test_weights_that_change_before_the_backward_pass(self):
        model = stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
        for cast in (False, True):
            with self.subTest(cast=cast), planned(model) as rt:
                train(model, one_pass, SETTLED, rt)
                with self.assertRaisesRegex(stowage.Error, "modified by an inplace operation"), rt.step():
                    with torch.autocast("cpu", enabled=cast):
                        loss = model(torch.randn(3, 4, 8)).float().square().mean()
                    with torch.no_grad():
                        model.blocks[1][2].weight.mul_(2.0)
                    loss.backward()


if __name__ == "__main__":
    unittest.main()
