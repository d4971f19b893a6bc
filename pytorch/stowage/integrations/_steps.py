"""What the integrations share: a runtime that is opened when training begins, and a step
that lasts from the first microbatch after an update to the last one before the next.

    closed --pass_begins--> open --pass_begins--> open ...
    open --update or end--> closed        the passes are over
    open --abandon--> closed              a pass failed, or the rest of them does not come

Nothing is held between microbatches, so a step may also end early: the passes that are
left are a step of their own.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Dict, Mapping, Optional

import torch

from .._attach import Attachment
from .._errors import Error
from .._runtime import Runtime


def load(module: str, install: str) -> Any:
    """Imports a module of a framework. The error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise Error(f"{module} cannot be imported ({e}); install it with: pip install '{install}'") from None


def must_have(thing: object, names: str, install: str) -> None:
    """Raises an error if an object of a framework lacks one of the names, which are separated
    by spaces."""
    missing = [name for name in names.split() if not hasattr(thing, name)]
    if missing:
        raise Error(f"this {type(thing).__name__} has no {missing[0]}: it is too old, or not what was expected; install a newer one with: pip install -U '{install}'")


def is_attached(runtime: Runtime, model: torch.nn.Module) -> bool:
    """Reports whether a model or a part of it is attached: the user chose the groups then."""
    parts = set(model.modules())
    return any(a.model in parts for a in runtime._attached)


class Steps:
    """The steps of a training loop, and the runtime that they use.

    runtime  the runtime; None until training begins if the options of one were given
    """

    def __init__(self, runtime: Optional[Runtime], options: Mapping[str, Any], groups: Optional[Mapping[str, str]]) -> None:
        if (runtime is None) == (not options):
            raise Error("expected a runtime or the arguments of one, such as budget=\"60GiB\", and not both")
        self.runtime = runtime
        self._options: Dict[str, Any] = dict(options)
        self._groups = groups
        self._attached: Optional[Attachment] = None
        self._open: Optional[Runtime] = None  # the runtime that has a step of ours
        self._left = 0  # microbatches of it that are still to come

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def attach(self, model: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer], device: Optional[torch.device] = None) -> None:
        """Opens the runtime if that was left to us, and attaches the model unless it is."""
        if self.runtime is None:
            given = {} if device is None else {"device": device}
            self.runtime = Runtime(**{**given, **self._options})
        if self._attached is not None and self._attached.model is model and self._attached.optimizer is optimizer:
            return
        self.detach()
        if not is_attached(self.runtime, model):
            self._attached = self.runtime.attach(model, self._groups, optimizer)

    def detach(self) -> None:
        """Detaches the model that attach() attached."""
        self.abandon()
        if self._attached is not None:
            self._attached.detach()
            self._attached = None

    def pass_begins(self, passes: int, key: str = "") -> None:
        """Begins a step unless one is under way. Passes are those to come, this one included."""
        if self._open is None:
            if self.runtime is None:
                raise Error("training began without attach(); attach the model first")
            self.runtime.begin_step(f"{passes} {key}".rstrip())
            self._open, self._left = self.runtime, passes
        self._left -= 1

    def pass_ends(self, update: bool) -> None:
        """Ends the step if an update follows, or if no pass is left."""
        if update or self._left <= 0:
            self.end()

    def end(self) -> None:
        """Ends the step that is under way, if there is one."""
        runtime, self._open = self._open, None
        if runtime is not None:
            runtime.end_step()

    def abandon(self, error: Optional[BaseException] = None) -> None:
        """Abandons the step that is under way, if there is one. It may raise an error that says
        more than the given one."""
        runtime, self._open = self._open, None
        if runtime is None or runtime._now is None and runtime._step is None:
            return  # the runtime was closed meanwhile
        if error is not None:
            runtime.end_step(error)
            return
        with contextlib.suppress(Exception):
            runtime.end_step(Error("the step was abandoned"))
