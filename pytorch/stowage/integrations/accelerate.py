"""Stowage in loops with accelerator.accumulate() of accelerate.

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    steps = stowage.integrations.accelerate.attach(accelerator, model, optimizer, budget="60GiB")
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

accumulate() surrounds each microbatch, its update included, and tells whether gradients
are synchronised after it, which is when the optimiser really updates. The step begins in
the first accumulate() and ends when the optimiser is called after the last. A loop without
accumulate() needs nothing from here: use `with rt.step():`.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any, Callable, Iterator, Mapping, Optional

import torch

from .._errors import Error
from .._runtime import Runtime
from ._steps import Steps, load, must_have

INSTALL = "accelerate>=0.26"


def attach(accelerator: Any, model: torch.nn.Module, optimizer: Any = None, runtime: Optional[Runtime] = None, *, groups: Optional[Mapping[str, str]] = None, key: Optional[Callable[[], str]] = None, **options: Any) -> Steps:
    """Makes accelerator.accumulate() run the passes between two updates as one step of a
    runtime. Call it after accelerator.prepare().

    optimizer  what prepare() returned for the optimiser whose step() follows the last
               backward pass. Without it a step ends with its last accumulate(), updates
               included: for loops that update more than once in one accumulate()
    runtime    a runtime; without it, options are its arguments, such as budget="60GiB"
    groups     patterns for names of modules, as in Runtime.attach()
    key        a function that adds to the key of a step, which is the number of microbatches.
               Give one if lengths differ and are few
    """
    accelerate = load("accelerate", INSTALL)
    if not isinstance(accelerator, accelerate.Accelerator):
        raise Error(f"expected an accelerate.Accelerator, got {type(accelerator).__name__}; attach other loops with Runtime.attach() and Runtime.step()")
    must_have(accelerator, "accumulate sync_gradients gradient_accumulation_steps device unwrap_model", INSTALL)
    if getattr(accelerator, "_stowage", None) is not None:
        raise Error("stowage is attached to this accelerator already; attach it once, after prepare()")
    if optimizer is not None and not callable(getattr(optimizer, "step", None)):
        raise Error(f"expected an optimiser that prepare() returned, got {type(optimizer).__name__}")
    steps = Steps(runtime, options, groups)
    steps.attach(model, optimizer, accelerator.device)
    accelerator._stowage = steps
    accelerator.accumulate = _accumulate(accelerator, accelerator.accumulate, steps, key)
    if optimizer is not None:
        # Schedulers that are made later wrap a method, and would refuse a function.
        optimizer.step = types.MethodType(_step(accelerator, optimizer.step, steps), optimizer)
    return steps


def _accumulate(accelerator: Any, original: Callable[..., Any], steps: Steps, key: Optional[Callable[[], str]]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def accumulate(*models: Any) -> Iterator[None]:
        with original(*models):
            steps.pass_begins(int(accelerator.gradient_accumulation_steps), "" if key is None or steps.is_open else str(key()))
            try:
                yield
            except BaseException as e:
                steps.abandon(e)
                raise
            steps.pass_ends(bool(accelerator.sync_gradients))

    return accumulate


def _step(accelerator: Any, original: Callable[..., Any], steps: Steps) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if accelerator.sync_gradients:
            steps.end()
        return original(*args, **kwargs)

    return step
