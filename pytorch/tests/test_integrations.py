"""Stowage in the training loops of other frameworks. SPEC S6.4.

Small stand-ins of the frameworks (frameworks.py) run everywhere. STOWAGE_FRAMEWORKS names
folders that are searched for the real ones, which then run the same cases:

    STOWAGE_FRAMEWORKS=transformers/src:accelerate/src python3 -m unittest test_integrations
"""

import importlib
import pickle
import sys
import tempfile
import unittest
from unittest import mock

from common import same, stowage, torch
from torch import nn

import frameworks
from stowage.integrations import accelerate, huggingface, lightning, megatron

OPTIONS = {"policy": {"mlp": "offload"}, "device": "cpu"}
BATCHES, EVERY = 9, 4  # in an epoch; the last accumulation has one microbatch
KEYS = ["4", "4", "1"]


class Broken(Exception):
    pass


class Net(nn.Module):
    """Two layers. It breaks in the forward pass whose number is given, and notes which steps
    were under way in passes for evaluation."""

    def __init__(self, breaks=0):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))}) for _ in range(2))
        self.breaks, self.passes, self.in_steps = breaks, 0, []
        self.runtime = lambda: None

    def forward(self, x, y=None, **_):
        if self.training:
            self.passes += 1
            if self.passes == self.breaks:
                raise Broken
        else:
            self.in_steps.append(under_way(self.runtime()))
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return {"loss": (x - y).pow(2).mean(), "logits": x}


class Optimizer(torch.optim.SGD):
    """Notes steps that were under way when it was called."""

    def __init__(self, net):
        super().__init__(net.parameters(), 0.1)
        self.in_steps, self.net = [], net

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.in_steps.append(under_way(self.net.runtime()))
        super().step()
        return loss


def under_way(runtime):
    return runtime is not None and runtime._step is not None


class Data(torch.utils.data.Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(5)
        self.rows = torch.randn(n, 2, 16, generator=g)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"x": self.rows[i, 0], "y": self.rows[i, 1]}


class Endless(torch.utils.data.IterableDataset):
    """Has fewer batches than anybody was told."""

    def __init__(self, n):
        self.data = Data(n)

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


class Case(unittest.TestCase):
    def setUp(self):
        self.addCleanup(self.close)
        self.keys, self.ends = [], []
        begin, end = stowage.Runtime.begin_step, stowage.Runtime.end_step

        def begin_step(rt, key=""):
            self.keys.append(key)
            begin(rt, key)

        def end_step(rt, error=None):
            self.ends.append(error)
            end(rt, error)

        for name, fn in (("begin_step", begin_step), ("end_step", end_step)):
            patch = mock.patch.object(stowage.Runtime, name, fn)
            patch.start()
            self.addCleanup(patch.stop)

    def close(self):
        for rt in list(stowage._runtime._open.values()):
            rt.close()

    def ended(self, steps, failed=0):
        """Nothing is left of the steps, and training moved something."""
        rt = steps.runtime
        self.assertFalse(under_way(rt))
        self.assertEqual(len(self.keys), len(self.ends))
        self.assertEqual(failed, sum(e is not None for e in self.ends))
        x = torch.ones(4, 4, requires_grad=True)
        moved = rt.stats()["summary"]["counts"]["OutBytes"]
        x.exp().sum().backward()  # outside of steps: no hook is left
        self.assertEqual(moved, rt.stats()["summary"]["counts"]["OutBytes"])
        if not failed:
            self.assertGreater(moved, 0)

    def equal(self, a, b):
        for p, q in zip(a.parameters(), b.parameters()):
            self.assertTrue(same(p, q))


class Both:
    """What is asked of attach() and callback() alike."""

    def test_missing(self):
        with mock.patch.dict(sys.modules, {self.package: None}), self.assertRaisesRegex(stowage.Error, "cannot be imported.*pip install '" + self.package.split(".")[0]):
            self.make(Net(), **OPTIONS)

    def test_runtime_or_options(self):
        with self.assertRaisesRegex(stowage.Error, "a runtime or the arguments"):
            self.make(Net())
        with stowage.Runtime(**OPTIONS) as rt, self.assertRaisesRegex(stowage.Error, "a runtime or the arguments"):
            self.make(Net(), runtime=rt, budget="1GiB")

    def test_a_runtime_of_the_user(self):
        net = Net()
        with stowage.Runtime(**OPTIONS) as rt:
            attached = rt.attach(net.layers[0], {"mlp": "mlp"})  # the user's choice stays
            steps = self.run_once(net, runtime=rt)
            self.assertIs(rt, steps.runtime)
            self.assertEqual([attached], rt._attached)
            self.ended(steps)

    def test_groups(self):
        with self.assertRaisesRegex(stowage.Error, "matches no module"):
            self.run_once(Net(), groups={"*.nothing": "mlp"}, **OPTIONS)

    def test_key(self):
        self.run_once(Net(), key=lambda *_: "short", **OPTIONS)
        self.assertEqual([k + " short" for k in self.expected()], self.keys)


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

    def test_too_old(self):
        with mock.patch.object(self.pl, "Callback", create=True):
            del self.pl.Callback
            with self.assertRaisesRegex(stowage.Error, "no Callback: it is too old.*pip install -U 'lightning>="):
                lightning.callback(**OPTIONS)


class Megatron(Case):
    def setUp(self):
        super().setUp()
        self.forward_backward = frameworks.forward_backward(self)
        begin = stowage.Runtime.step
        patch = mock.patch.object(stowage.Runtime, "step", lambda rt, key="": self.keys.append(key) or begin(rt, key))
        patch.start()
        self.addCleanup(patch.stop)

    def call(self, function, net, n=EVERY, **more):
        def forward_step(data, model):
            batch = next(data)
            return model(**batch)["loss"], lambda loss: (loss, {"loss": loss.detach()})

        data = iter(torch.utils.data.DataLoader(Data(2 * n), batch_size=2))
        return function(forward_step_func=forward_step, data_iterator=data, model=[net], num_microbatches=n, seq_length=8, micro_batch_size=2, **more)

    def gradients(self, net):
        return [p.grad for p in net.parameters()]

    def test_same_gradients(self):
        plain, net = frameworks.megatron_model(Net()), frameworks.megatron_model(Net())
        with stowage.Runtime(**OPTIONS) as rt:
            net.runtime = lambda: rt
            function = megatron.wrap(self.forward_backward, rt)
            for n in (EVERY, EVERY, 2):
                a, b = self.call(self.forward_backward, plain, n), self.call(function, net, n)
                self.assertEqual(n, len(a))
                for x, y in zip(a, b):
                    self.assertTrue(same(x["loss"], y["loss"]))
                for x, y in zip(self.gradients(plain), self.gradients(net)):
                    self.assertTrue(same(x, y))
            self.assertEqual(["4 of 2 x 8", "4 of 2 x 8", "2 of 2 x 8"], self.keys)
            self.assertEqual(1, len(rt._attached))
            self.assertGreater(rt.stats()["summary"]["counts"]["OutBytes"], 0)

    def test_evaluation_passes_through(self):
        net = frameworks.megatron_model(Net())
        with stowage.Runtime(**OPTIONS) as rt:
            net.runtime = lambda: rt
            self.call(megatron.wrap(self.forward_backward, rt), net.eval(), forward_only=True)
            self.assertEqual(([False] * EVERY, [], []), (net.in_steps, self.keys, rt._attached))

    def test_exceptions(self):
        net = frameworks.megatron_model(Net(breaks=3))
        with stowage.Runtime(**OPTIONS) as rt:
            function = megatron.wrap(self.forward_backward, rt)
            with self.assertRaises(Broken):
                self.call(function, net)
            self.assertFalse(under_way(rt))
            self.call(function, net)

    def test_key(self):
        with stowage.Runtime(**OPTIONS) as rt:
            function = megatron.wrap(self.forward_backward, rt, groups={"*mlp": "mlp"})
            self.call(function, frameworks.megatron_model(Net()), decoder_seq_length=3)
            self.assertEqual(["4 of 2 x 8, 3"], self.keys)

    def test_wrong_use(self):
        with stowage.Runtime(**OPTIONS) as rt:
            with self.assertRaisesRegex(stowage.Error, "get_forward_backward_func"):
                megatron.wrap(None, rt)
            with self.assertRaisesRegex(stowage.Error, "expected a stowage.Runtime"):
                megatron.wrap(self.forward_backward, Net())
            with self.assertRaisesRegex(stowage.Error, "FullCudaGraphWrapper"):
                megatron.wrap(type("FullCudaGraphWrapper", (), {"__call__": print})(), rt)
            with self.assertRaisesRegex(stowage.Error, "without num_microbatches="):
                megatron.wrap(self.forward_backward, rt)(model=[Net()])


@unittest.skipUnless(frameworks.FOLDERS, "STOWAGE_FRAMEWORKS is not set; name folders with the sources of transformers, accelerate, lightning or megatron there to run these cases against them")
class Real(unittest.TestCase):
    def test_real_frameworks_were_used(self):
        used = [name for name in frameworks.NAMES if frameworks.is_real(name)]
        self.assertTrue(used, f"{frameworks.FOLDERS} have none of {frameworks.NAMES}")
        for name in used:
            with self.subTest(name):
                file = importlib.import_module(name).__file__
                self.assertTrue(any(file.startswith(folder) for folder in frameworks.FOLDERS), file)


if __name__ == "__main__":
    unittest.main()
