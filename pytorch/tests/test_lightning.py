"""Stowage in Trainer of Lightning. SPEC S6.4."""

import pickle
import types
import unittest
from unittest import mock

from common import stowage, torch

import frameworks
from integrations import BATCHES, EVERY, OPTIONS, Both, Broken, Case, Data, Endless, Net, Optimizer, under_way
from stowage.integrations import lightning


class Lightning(Both, Case):
    package = "lightning.pytorch"

    def setUp(self):
        super().setUp()
        self.pl = frameworks.use(self, self.package)

    def module(self, net, manual=False, skips=-1):
        class Module(self.pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.net, self.automatic_optimization = net, not manual

            def on_train_batch_start(self, batch, batch_idx):
                return -1 if batch_idx == skips else None

            def training_step(self, batch, batch_idx):
                loss = self.net(**batch)["loss"]
                if manual:
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()
                return loss

            def validation_step(self, batch, batch_idx):
                self.net(**batch)

            def configure_optimizers(self):
                self.optimizer = Optimizer(self.net)
                return self.optimizer

        return Module()

    def fit(self, net, callbacks=(), data=None, every=EVERY, epochs=1, **more):
        module = self.module(net, **more)
        quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
        trainer = self.pl.Trainer(accumulate_grad_batches=every, max_epochs=epochs, val_check_interval=3 if data is None else 1.0, callbacks=list(callbacks), **quiet)
        train, validate = (torch.utils.data.DataLoader(d, batch_size=2) for d in (data or Data(2 * BATCHES), Data(6)))
        trainer.fit(module, train, validate)
        return module

    def make(self, net, **more):
        steps = lightning.callback(**more)
        net.runtime = lambda: steps.runtime
        return steps

    def run_once(self, net, **more):
        steps = self.make(net, **more)
        self.fit(net, [steps])
        return steps

    def expected(self):
        """Validation after every third batch divides accumulations."""
        return ["4", "1", "4", "2", "1"]

    def test_same_results_and_one_step_an_update(self):
        plain, net = Net(), Net()
        self.fit(plain, epochs=2)
        steps = self.make(net, **OPTIONS)
        module = self.fit(net, [steps], epochs=2)
        self.equal(plain, net)
        self.assertEqual(self.expected() * 2, self.keys)
        self.assertTrue(net.in_steps)
        self.assertNotIn(True, net.in_steps)  # validation
        self.assertEqual(6, len(module.optimizer.in_steps))
        self.assertNotIn(True, module.optimizer.in_steps)
        self.ended(steps)

    def test_data_of_unknown_length(self):
        nets = [Net(), Net()]
        self.fit(nets[0], data=Endless(12))
        steps = self.make(nets[1], **OPTIONS)
        self.fit(nets[1], [steps], data=Endless(12))
        self.equal(*nets)
        self.assertEqual(["4", "4"], self.keys)
        self.ended(steps)

    def test_manual_optimization(self):
        nets = [Net(), Net()]
        self.fit(nets[0], manual=True, every=1)
        steps = self.make(nets[1], **OPTIONS)
        self.fit(nets[1], [steps], manual=True, every=1)
        self.equal(*nets)
        self.assertEqual(["1"] * BATCHES, self.keys)
        self.ended(steps)

    def test_rest_of_an_epoch_skipped(self):
        steps = self.make(Net(), **OPTIONS)
        self.fit(Net(), [steps], skips=5)
        self.assertFalse(under_way(steps.runtime))
        self.assertEqual(len(self.keys), len(self.ends))

    def test_exceptions(self):
        net = Net(breaks=6)
        steps = self.make(net, **OPTIONS)
        with self.assertRaises(Broken):
            self.fit(net, [steps])
        self.ended(steps, failed=1)
        self.fit(net, [steps])
        self.assertFalse(under_way(steps.runtime))

    def test_in_another_process(self):
        steps = pickle.loads(pickle.dumps(lightning.callback(groups={"*.mlp": "mlp"}, **OPTIONS)))
        self.assertIsInstance(steps, self.pl.Callback)
        net = Net()
        self.fit(net, [steps])
        self.ended(steps)

    def test_passes_to_the_next_update(self):
        """Those of an epoch's end are fewer, if it is known where that is."""
        for every, last, want in ((1, 5, [1, 1, 1, 1, 1]), (3, 5, [3, 2, 1, 2, 1]), (4, float("inf"), [4, 3, 2, 1, 4]), (4, 2, [2, 1])):
            for automatic in (True, False):
                trainer, module = types.SimpleNamespace(accumulate_grad_batches=every, num_training_batches=last), types.SimpleNamespace(automatic_optimization=automatic)
                self.assertEqual(want if automatic else [1] * len(want), [lightning._passes(trainer, module, i) for i in range(len(want))])

    def test_too_old(self):
        with mock.patch.object(self.pl, "Callback", create=True):
            del self.pl.Callback
            with self.assertRaisesRegex(stowage.Error, "no Callback: it is too old.*pip install -U 'lightning>="):
                lightning.callback(**OPTIONS)


if __name__ == "__main__":
    unittest.main()
