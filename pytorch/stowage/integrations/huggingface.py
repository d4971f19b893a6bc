"""Stowage in Trainer of transformers, and in trainers derived from it.

    trainer = transformers.Trainer(model, args, train_dataset=data)
    steps = stowage.integrations.huggingface.attach(trainer, budget="60GiB")
    trainer.train()
    print(steps.runtime.report())

Trainer calls training_step() for each microbatch, and the optimiser after the last one.
Callbacks are told of both, but not of an exception, which would leave the step open. So
attach() wraps training_step() of this one object; a callback attaches the model once
Trainer has wrapped it, and ends a step that Trainer leaves before its last microbatch.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Mapping, Optional

from .._errors import Error
from .._runtime import Runtime
from ._steps import Steps, load, must_have

INSTALL = "transformers>=4.46"


def attach(trainer: Any, runtime: Optional[Runtime] = None, *, groups: Optional[Mapping[str, str]] = None, key: Optional[Callable[[Any], str]] = None, **options: Any) -> Steps:
    """Makes a trainer run each accumulation of gradients as one step of a runtime. Call it
    before train(). Evaluation, logging and saving stay outside of steps.

    runtime  a runtime; without it, options are its arguments, such as budget="60GiB". It is
             opened when training begins and is the result's runtime from then on
    groups   patterns for names of modules, as in Runtime.attach()
    key      a function of a step's first inputs that adds to its key, which is the number of
             microbatches. Give one if lengths differ and are few
    """
    transformers = load("transformers", INSTALL)
    if not isinstance(trainer, transformers.Trainer):
        raise Error(f"expected a transformers.Trainer, got {type(trainer).__name__}; attach other loops with Runtime.attach() and Runtime.step()")
    must_have(trainer, "accelerator args training_step", INSTALL)
    if getattr(trainer, "_stowage", None) is not None:
        raise Error("stowage is attached to this trainer already; attach it once, before train()")
    steps = trainer._stowage = Steps(runtime, options, groups)
    trainer.training_step = _training_step(trainer, trainer.training_step, steps, key)
    trainer.train = _train(trainer.train, steps)
    callback = type("StowageCallback", (_Callback, transformers.TrainerCallback), {})
    trainer.add_callback(callback(trainer, steps))
    return steps


def _training_step(trainer: Any, original: Callable[..., Any], steps: Steps, key: Optional[Callable[[Any], str]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        passes = getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
        steps.pass_begins(int(passes), "" if key is None or steps.is_open else str(key(inputs)))
        try:
            loss = original(model, inputs, *args, **kwargs)
        except BaseException as e:
            steps.abandon(e)
            raise
        steps.pass_ends(bool(trainer.accelerator.sync_gradients))
        return loss

    return training_step


def _train(original: Callable[..., Any], steps: Steps) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            steps.abandon()  # of an exception between two microbatches, such as Ctrl-C

    return train


class _Callback:
    """What Trainer calls around epochs."""

    def __init__(self, trainer: Any, steps: Steps) -> None:
        self._trainer, self._steps = trainer, steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.abandon()  # of a run with too large a batch, which is begun again
        self._steps.attach(kwargs.get("model", self._trainer.model), kwargs.get("optimizer", self._trainer.optimizer), args.device)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.end()
