"""Stowage in Trainer of transformers. SPEC S6.4."""

import sys
import tempfile
import unittest

from common import stowage

import frameworks
from integrations import BATCHES, EVERY, KEYS, OPTIONS, Both, Broken, Case, Data, Endless, Net, Optimizer, under_way
from stowage.integrations import huggingface


class HuggingFace(Both, Case):
    package = "transformers"

    def setUp(self):
        super().setUp()
        self.hf = frameworks.use(self, self.package)
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def trainer(self, net, data=None, callbacks=(), **more):
        options = dict(
            output_dir=self.folder, use_cpu=True, remove_unused_columns=False, label_names=["y"], report_to=[], disable_tqdm=True, log_level="error",
            per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=EVERY, num_train_epochs=1,
            eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, logging_steps=1,
        )
        args = self.hf.TrainingArguments(**{**options, **more})
        return self.hf.Trainer(net, args, train_dataset=data or Data(2 * BATCHES), eval_dataset=Data(6), optimizers=(Optimizer(net), None), callbacks=list(callbacks))

    def make(self, net, trainer=None, **more):
        steps = huggingface.attach(trainer or self.trainer(net), **more)
        net.runtime = lambda: steps.runtime
        return steps

    def run_once(self, net, **more):
        trainer = self.trainer(net)
        steps = self.make(net, trainer, **more)
        trainer.train()
        return steps

    def expected(self, epochs=1):
        """Releases before 4.57 do not say how many microbatches there are, and stop earlier."""
        return KEYS * epochs if has_number(self.hf) else ["4"] * (2 * epochs)

    def stopper(self, fn):
        kind = type("Stopper", (self.hf.TrainerCallback,), {"on_substep_end": lambda self, args, state, control, **_: fn(control)})
        return kind()

    def test_same_results_and_one_step_an_update(self):
        plain, net = Net(), Net()
        self.trainer(plain, num_train_epochs=2).train()
        trainer = self.trainer(net, num_train_epochs=2)
        steps = self.make(net, trainer, **OPTIONS)
        trainer.train()
        self.equal(plain, net)
        self.assertEqual(self.expected(epochs=2), self.keys)
        self.assertTrue(net.in_steps)
        self.assertNotIn(True, net.in_steps)  # evaluation
        self.assertEqual([False] * len(self.keys), trainer.optimizer.optimizer.in_steps)
        self.ended(steps)

    def test_exceptions(self):
        """In a pass, and between two."""

        def interrupt(control):
            raise KeyboardInterrupt

        for net, callbacks, error in ((Net(breaks=6), (), Broken), (Net(), [self.stopper(interrupt)], KeyboardInterrupt)):
            with self.subTest(error.__name__):
                trainer = self.trainer(net, callbacks=callbacks)
                steps = self.make(net, trainer, **OPTIONS)
                with self.assertRaises(error):
                    trainer.train()
                self.ended(steps, failed=1)
                for c in callbacks:
                    c.__class__.on_substep_end = lambda *_, **__: None
                trainer.train()
                self.assertFalse(under_way(steps.runtime))
            self.close()
            self.keys.clear()
            self.ends.clear()

    def test_a_run_that_is_begun_again(self):
        """With a smaller batch, for example, after memory ran out outside of a pass: the step that was left open is abandoned."""
        net = Net()
        trainer = self.trainer(net)
        steps = self.make(net, trainer, **OPTIONS)
        callback = huggingface._Callback(trainer, steps)
        for _ in range(2):
            callback.on_train_begin(trainer.args, None, None, model=net, optimizer=None)
            self.assertEqual((False, False), (steps.is_open, under_way(steps.runtime)))
            steps.pass_begins(4)
        steps.abandon()
        self.keys.clear()
        self.ends.clear()

    def test_stopped_within_an_accumulation(self):
        def stop(control):
            control.should_training_stop = True

        net = Net()
        trainer = self.trainer(net, callbacks=[self.stopper(stop)], eval_strategy="epoch")
        steps = self.make(net, trainer, **OPTIONS)
        trainer.train()
        self.assertEqual(["4"], self.keys)
        self.assertNotIn(True, net.in_steps)
        self.assertFalse(under_way(steps.runtime))

    def test_data_that_ends_early(self):
        """The last accumulation is never complete, and its gradients are not used."""
        nets = [Net(), Net()]
        for net in nets:
            trainer = self.trainer(net, Endless(12), max_steps=5)
            if net is nets[1]:
                steps = self.make(net, trainer, **OPTIONS)
            trainer.train()
        self.equal(*nets)
        self.assertFalse(under_way(steps.runtime))
        self.assertEqual(["4", "2" if has_number(self.hf) else "4"], self.keys[:2])

    def test_wrong_use(self):
        with self.assertRaisesRegex(stowage.Error, "expected a transformers.Trainer, got Net"):
            huggingface.attach(Net(), **OPTIONS)
        trainer = self.trainer(Net())
        self.make(Net(), trainer, **OPTIONS)
        with self.assertRaisesRegex(stowage.Error, "already"):
            self.make(Net(), trainer, **OPTIONS)
        old = self.trainer(Net())
        del old.accelerator
        with self.assertRaisesRegex(stowage.Error, "no accelerator: it is too old.*pip install -U 'transformers>="):
            huggingface.attach(old, **OPTIONS)


def has_number(hf):
    """Reports whether trainers know how many microbatches an accumulation has."""
    with open(sys.modules[hf.Trainer.__module__].__file__) as f:
        return "current_gradient_accumulation_steps" in f.read()


if __name__ == "__main__":
    unittest.main()
