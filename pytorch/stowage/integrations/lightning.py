"""A callback for Lightning's Trainer.

    steps = stowage.integrations.lightning.callback(budget="60GiB")
    trainer = lightning.Trainer(accumulate_grad_batches=4, callbacks=[steps])
    trainer.fit(module, data)
    print(steps.runtime.report())

Lightning tells callbacks when a batch begins, when the passes before an update are over,
when validation begins, which may be between two microbatches, and of exceptions.

With manual optimisation a batch is one step, updates included.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, Callable, Mapping, Optional

from .._errors import Error
from .._runtime import Runtime
from ._steps import Steps, load, must_have

INSTALL = "lightning>=2.0"
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def callback(runtime: Optional[Runtime] = None, *, groups: Optional[Mapping[str, str]] = None, key: Optional[Callable[[Any], str]] = None, **options: Any) -> Any:
    """Returns a callback that runs the passes between two updates as one step of a runtime.

    runtime  a runtime; without it, options are its arguments, such as budget="60GiB". It is
             opened when training begins and is the callback's runtime from then on
    groups   patterns for names of modules, as in Runtime.attach()
    key      a function of a step's first batch that adds to its key, which is the number of
             microbatches. Give one if lengths differ and are few
    """
    # A program may have both packages; the one that it has loaded is the one that it uses.
    package = load(next((p for p in PACKAGES if p in sys.modules), PACKAGES[0]), INSTALL)
    must_have(package, "Callback", INSTALL)
    kind = type("StowageCallback", (_Callback, package.Callback), {})
    again = functools.partial(callback, runtime, groups=groups, key=key, **options)
    return kind(Steps(runtime, options, groups), key, again)


class _Callback:
    """What Trainer calls."""

    def __init__(self, steps: Steps, key: Optional[Callable[[Any], str]], again: Callable[[], Any]) -> None:
        self._steps, self._key, self._again = steps, key, again

    def __reduce__(self) -> Any:
        """Makes another callback in a process that Lightning starts."""
        return self._again, ()

    @property
    def runtime(self) -> Optional[Runtime]:
        return self._steps.runtime

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        must_have(trainer, "accumulate_grad_batches num_training_batches optimizers strategy", INSTALL)
        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        self._steps.attach(pl_module, optimizer, trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        extra = "" if self._key is None or self._steps.is_open else str(self._key(batch))
        self._steps.pass_begins(_passes(trainer, pl_module, batch_idx), extra)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module.automatic_optimization:
            self._steps.end()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._steps.pass_ends(False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps.end()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._steps.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        with contextlib.suppress(Error):  # other callbacks must be told as well
            self._steps.abandon(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._steps.detach()


def _passes(trainer: Any, pl_module: Any, batch_idx: int) -> int:
    """Returns the number of microbatches from this one to the next update."""
    if not pl_module.automatic_optimization:
        return 1
    every = int(trainer.accumulate_grad_batches)
    passes = every - batch_idx % every
    last = trainer.num_training_batches  # infinite if nobody knows
    return passes if last == float("inf") else max(1, min(passes, int(last) - batch_idx))
