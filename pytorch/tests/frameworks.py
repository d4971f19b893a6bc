"""Stand-ins of the frameworks that the integrations are for: their loops, with calls in the
order of the real ones, and nothing else. They take the arguments that the tests give to
both. STOWAGE_FRAMEWORKS names folders in which the real ones are looked for first.
"""

import contextlib
import functools
import importlib
import math
import os
import sys
import types
from unittest import mock

import torch

FOLDERS = [os.path.abspath(p) for p in os.environ.get("STOWAGE_FRAMEWORKS", "").split(os.pathsep) if p]
sys.path[:0] = FOLDERS


def use(test, name):
    """Returns a framework: the real one if a folder has it, or else a stand-in for the time
    of a test."""
    if is_real(name):
        return importlib.import_module(name)
    loaded = {n: None for n in sys.modules if n.split(".")[0] == name.split(".")[0]}
    stand_in = STAND_INS[name]()
    parent, _, child = name.rpartition(".")
    if parent:
        loaded[parent] = module(parent, __path__=[], **{child: stand_in})
    loaded[name] = stand_in
    patch = mock.patch.dict(sys.modules, loaded)
    patch.start()
    test.addCleanup(patch.stop)
    return stand_in


def is_real(name):
    return any(os.path.isdir(os.path.join(folder, *name.split("."))) for folder in FOLDERS)


def module(name, **names):
    m = types.ModuleType(name)
    m.__dict__.update(names)
    return m


def loader(data, size):
    return torch.utils.data.DataLoader(data, batch_size=size)


# accelerate


class Accelerator:
    def __init__(self, gradient_accumulation_steps=1, cpu=True):
        self.gradient_accumulation_steps, self.sync_gradients, self.step = gradient_accumulation_steps, True, 0
        self.device = torch.device("cpu")
        self.end_of_data = False

    def prepare(self, *things):
        made = [self.prepare_one(t) for t in things]
        return made[0] if len(made) == 1 else tuple(made)

    def prepare_one(self, thing):
        if isinstance(thing, torch.optim.Optimizer):
            return AcceleratedOptimizer(self, thing)
        return Loader(self, thing) if isinstance(thing, torch.utils.data.DataLoader) else thing

    def unwrap_model(self, model):
        return model

    @contextlib.contextmanager
    def accumulate(self, *models):
        if self.end_of_data:
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.gradient_accumulation_steps == 0
        yield

    def backward(self, loss):
        (loss / self.gradient_accumulation_steps).backward()


class AcceleratedOptimizer(torch.optim.Optimizer):
    def __init__(self, accelerator, optimizer):
        self.accelerator, self.optimizer = accelerator, optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self):
        if self.accelerator.sync_gradients:
            self.optimizer.step()

    def zero_grad(self):
        if self.accelerator.sync_gradients:
            self.optimizer.zero_grad(set_to_none=True)


class Loader:
    def __init__(self, accelerator, data):
        self.accelerator, self.data = accelerator, data

    def __iter__(self):
        """Reads one batch ahead, so that the last one is known as such."""
        batches, self.accelerator.end_of_data = iter(self.data), False
        batch = next(batches, None)
        while batch is not None:
            after = next(batches, None)
            self.accelerator.end_of_data = after is None
            yield batch
            batch = after
        self.accelerator.end_of_data = False


# transformers

EVENTS = "train_begin epoch_begin step_begin substep_end pre_optimizer_step optimizer_step step_end epoch_end train_end evaluate save log"


class TrainerCallback:
    pass


for event in EVENTS.split():
    setattr(TrainerCallback, "on_" + event, lambda self, args, state, control, **kwargs: None)


class TrainingArguments:
    def __init__(self, **given):
        self.max_steps, self.num_train_epochs, self.eval_steps, self.device = -1, 3, None, torch.device("cpu")
        self.__dict__.update(given)


class Trainer:
    def __init__(self, model, args, train_dataset, eval_dataset=None, optimizers=(None, None), callbacks=()):
        self.model, self.args, self.data, self.eval_data = model, args, train_dataset, eval_dataset
        self.optimizer, self.callbacks = optimizers[0] or torch.optim.AdamW(model.parameters()), list(callbacks)
        self.accelerator = Accelerator()
        self.control = types.SimpleNamespace(should_training_stop=False)
        self.state = types.SimpleNamespace(global_step=0)

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def tell(self, event):
        for c in self.callbacks:
            getattr(c, "on_" + event)(self.args, self.state, self.control, model=self.model, optimizer=self.optimizer)

    def train(self):
        self.control.should_training_stop = False
        self.optimizer, args = self.accelerator.prepare(getattr(self.optimizer, "optimizer", self.optimizer)), self.args
        data = loader(self.data, args.per_device_train_batch_size)
        known = not isinstance(self.data, torch.utils.data.IterableDataset)
        batches = len(data) if known else args.max_steps * args.gradient_accumulation_steps
        self.tell("train_begin")
        for _ in range(args.num_train_epochs):
            self.tell("epoch_begin")
            self.epoch(iter(data), batches)
            self.tell("epoch_end")
            if self.control.should_training_stop:
                break
        self.tell("train_end")

    def epoch(self, data, batches):
        every, number = self.args.gradient_accumulation_steps, 0
        for _ in range(math.ceil(batches / every)):
            some = [b for b in (next(data, None) for _ in range(every)) if b is not None]
            self.current_gradient_accumulation_steps = len(some)
            for inputs in some:
                number += 1
                update = number % every == 0 or number == batches
                self.accelerator.sync_gradients = update
                if number % every == 1 or every == 1:
                    self.tell("step_begin")
                self.training_step(self.model, inputs, None)
                if update:
                    self.update()
                else:
                    self.tell("substep_end")
                if self.control.should_training_stop:
                    return
        if number < batches:
            self.control.should_training_stop = True

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = model(**inputs)["loss"] / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def update(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.tell("pre_optimizer_step")
        self.optimizer.step()
        self.tell("optimizer_step")
        self.model.zero_grad()
        self.state.global_step += 1
        self.tell("step_end")
        self.tell("log")
        if self.args.eval_steps and self.state.global_step % self.args.eval_steps == 0:
            self.evaluate()
            torch.save(self.model.state_dict(), os.path.join(self.args.output_dir, "model"))
            self.tell("save")
        if self.state.global_step == self.args.max_steps:
            self.control.should_training_stop = True

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            for batch in loader(self.eval_data, self.args.per_device_eval_batch_size):
                self.model(**batch)
        self.tell("evaluate")


# Lightning

HOOKS = "fit_start train_start train_epoch_start train_batch_start before_zero_grad after_backward before_optimizer_step train_batch_end validation_start validation_end train_epoch_end train_end exception"


class Callback:
    def teardown(self, trainer, pl_module, stage):
        pass


for hook in HOOKS.split():
    setattr(Callback, "on_" + hook, lambda self, *args: None)


class LightningModule(torch.nn.Module):
    automatic_optimization = True

    def optimizers(self):
        return self.trainer.optimizers[0]

    def manual_backward(self, loss):
        loss.backward()


class LightningTrainer:
    def __init__(self, accumulate_grad_batches=1, max_epochs=1, val_check_interval=1.0, callbacks=(), **_):
        self.accumulate_grad_batches, self.max_epochs, self.val_check_interval = accumulate_grad_batches, max_epochs, val_check_interval
        self.callbacks = list(callbacks)
        self.strategy = types.SimpleNamespace(root_device=torch.device("cpu"))

    def tell(self, hook, *args):
        for c in self.callbacks:
            getattr(c, "on_" + hook)(self, self.module, *args)

    def fit(self, module, train, validate=()):
        self.module, module.trainer, self.optimizers = module, self, [module.configure_optimizers()]
        self.num_training_batches = float("inf") if isinstance(train.dataset, torch.utils.data.IterableDataset) else len(train)
        try:
            self.tell("fit_start")
            self.tell("train_start")
            for _ in range(self.max_epochs):
                self.tell("train_epoch_start")
                self.epoch(train, validate)
                self.tell("train_epoch_end")
            self.tell("train_end")
        except BaseException as e:
            self.tell("exception", e)
            raise
        finally:
            for c in self.callbacks:
                c.teardown(self, module, "fit")

    def epoch(self, train, validate):
        batches = iter(train)
        batch, number = next(batches, None), 0
        while batch is not None:
            after = next(batches, None)
            self.tell("train_batch_start", batch, number)
            if getattr(self.module, "on_train_batch_start", lambda *_: None)(batch, number) == -1:
                return
            update = (number + 1) % self.accumulate_grad_batches == 0 or after is None
            self.batch(batch, number, update)
            self.tell("train_batch_end", None, batch, number)
            number, batch = number + 1, after
            every = self.val_check_interval
            if number % every == 0 if isinstance(every, int) else after is None:
                self.validate(validate)

    def batch(self, batch, number, update):
        def closure():
            with torch.enable_grad():
                loss = self.module.training_step(batch, number) / self.accumulate_grad_batches
                if number % self.accumulate_grad_batches == 0:
                    self.optimizers[0].zero_grad(set_to_none=True)
                loss.backward()
            self.tell("after_backward")
            if update:
                self.tell("before_optimizer_step", self.optimizers[0])

        if not self.module.automatic_optimization:
            self.module.training_step(batch, number)
        elif update:
            self.optimizers[0].step(closure)
        else:
            closure()

    def validate(self, data):
        self.tell("validation_start")
        self.module.eval()
        with torch.no_grad():
            for number, batch in enumerate(data):
                self.module.validation_step(batch, number)
        self.module.train()
        self.tell("validation_end")


# Megatron-LM


def forward_backward_no_pipelining(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, decoder_seq_length=None, forward_only=False, **_):
    model = model[0] if isinstance(model, list) else model
    results = []
    for _ in range(num_microbatches):
        with torch.set_grad_enabled(not forward_only):
            output, loss_func = forward_step_func(data_iterator, model)
            loss, reduced = loss_func(output)
        if not forward_only:
            (loss / num_microbatches).backward()
        results.append(reduced)
    return results


def forward_backward(test):
    """Returns the function for a pipeline of one stage. The real one counts tokens in a
    tensor on a GPU, which is put on the CPU here."""
    if not is_real("megatron.core"):
        return forward_backward_no_pipelining
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    on_cpu = types.SimpleNamespace(**{n: getattr(torch, n) for n in dir(torch)})
    on_cpu.zeros = lambda *args, **kwargs: torch.zeros(*args, **{**kwargs, "device": "cpu"})
    patch = mock.patch.object(schedules, "torch", on_cpu)
    patch.start()
    test.addCleanup(patch.stop)
    one = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = types.SimpleNamespace(tp=one, cp=one, pp=one, dp=one)
    return functools.partial(schedules.forward_backward_no_pipelining, pg_collection=groups)


def megatron_model(net):
    """Gives a model the configuration that the real function reads."""
    if is_real("megatron.core"):
        parallel = importlib.import_module("megatron.core.model_parallel_config")
        enums = importlib.import_module("megatron.core.enums")
        net.config, net.model_type = parallel.ModelParallelConfig(), enums.ModelType.encoder_or_decoder
        net.set_input_tensor = lambda tensor: None
    return net


STAND_INS = {
    "accelerate": lambda: module("accelerate", Accelerator=Accelerator),
    "transformers": lambda: module("transformers", Trainer=Trainer, TrainingArguments=TrainingArguments, TrainerCallback=TrainerCallback),
    "lightning.pytorch": lambda: module("lightning.pytorch", Trainer=LightningTrainer, Callback=Callback, LightningModule=LightningModule),
}
NAMES = [*STAND_INS, "megatron.core"]
