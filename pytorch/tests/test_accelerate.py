"""Stowage in loops with accelerate. SPEC S6.4."""

import unittest

from common import stowage, torch

import frameworks
from integrations import BATCHES, EVERY, OPTIONS, Both, Broken, Case, Data, Net, Optimizer, under_way
from stowage.integrations import accelerate


class Accelerate(Both, Case):
    package = "accelerate"

    def setUp(self):
        super().setUp()
        self.framework = frameworks.use(self, self.package)

    def parts(self, net):
        accelerator = self.framework.Accelerator(cpu=True, gradient_accumulation_steps=EVERY)
        data = torch.utils.data.DataLoader(Data(2 * BATCHES), batch_size=2)
        return (accelerator, *accelerator.prepare(net, Optimizer(net), data))

    def make(self, net, parts=None, **more):
        accelerator, model, optimizer, _ = parts or self.parts(net)
        steps = accelerate.attach(accelerator, model, optimizer, **more)
        net.runtime = lambda: steps.runtime
        return steps

    def train(self, accelerator, model, optimizer, data, backward=1):
        for batch in data:
            with accelerator.accumulate(model):
                for _ in range(backward):
                    accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()

    def run_once(self, net, **more):
        parts = self.parts(net)
        steps = self.make(net, parts, **more)
        self.train(*parts)
        return steps

    def expected(self):
        return ["4", "4", "4"]  # nobody knows that the last one is shorter

    def test_same_results_and_one_step_an_update(self):
        for backward in (1, 2):
            with self.subTest(backward=backward):
                plain, net = Net(), Net()
                self.train(*self.parts(plain), backward=backward)
                parts = self.parts(net)
                steps = self.make(net, parts, **OPTIONS)
                self.train(*parts, backward=backward)
                self.equal(plain, net)
                self.assertEqual(["4", "4", "4"], self.keys)
                self.assertEqual([False] * 3, parts[2].optimizer.in_steps)
                self.ended(steps)
            self.close()
            self.keys.clear()
            self.ends.clear()

    def test_without_optimizer(self):
        """A step ends with accumulate(), after updates."""
        net = Net()
        accelerator, model, optimizer, data = self.parts(net)
        steps = accelerate.attach(accelerator, model, **OPTIONS)
        net.runtime = lambda: steps.runtime
        self.train(accelerator, model, optimizer, data)
        self.assertEqual([True] * 3, optimizer.optimizer.in_steps)
        self.assertEqual(["4", "4", "4"], self.keys)
        self.ended(steps)

    def test_exceptions(self):
        net = Net(breaks=6)
        parts = self.parts(net)
        steps = self.make(net, parts, **OPTIONS)
        with self.assertRaises(Broken):
            self.train(*parts)
        self.ended(steps, failed=1)
        self.train(*parts)
        self.assertFalse(under_way(steps.runtime))

    def test_left_in_the_middle(self):
        net = Net()
        parts = self.parts(net)
        steps = self.make(net, parts, **OPTIONS)
        self.train(*parts[:3], [next(iter(parts[3]))])
        self.assertTrue(under_way(steps.runtime))
        steps.end()
        self.ended(steps)

    def test_a_scheduler_that_is_made_later(self):
        net = Net()
        parts = self.parts(net)
        steps = self.make(net, parts, **OPTIONS)
        scheduler = torch.optim.lr_scheduler.LambdaLR(parts[2], lambda n: 0.5**n)
        self.train(*parts)
        scheduler.step()
        self.assertEqual([0.05], scheduler.get_last_lr())
        self.ended(steps)

    def test_wrong_use(self):
        net = Net()
        parts = self.parts(net)
        with self.assertRaisesRegex(stowage.Error, "expected an accelerate.Accelerator, got Net"):
            accelerate.attach(net, net, **OPTIONS)
        with self.assertRaisesRegex(stowage.Error, "expected an optimiser"):
            accelerate.attach(parts[0], net, net, **OPTIONS)
        self.make(net, parts, **OPTIONS)
        with self.assertRaisesRegex(stowage.Error, "already"):
            self.make(net, parts, **OPTIONS)


if __name__ == "__main__":
    unittest.main()
