"""What autograd holds of a recorded step."""

from __future__ import annotations

from typing import Any, Callable

import torch

from ._errors import AFTER_STEP, Error
from ._inputs import IN_PLACE
from ._record import Kept


class Saved:
    """What autograd holds instead of a tensor. Nobody else holds it, so that memory is free as
    soon as autograd is done with it."""

    __slots__ = ("held", "used", "__weakref__")

    def __init__(self, held: Any) -> None:
        self.held, self.used = held, False


class Hooks:
    """The hooks of a call, or of what is outside of calls. Autograd holds them, and when the step is over they hold nothing: a
    module that keeps its output would lead to itself, which the collector does not see."""

    __slots__ = ("_pack", "_unpack")

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pack, self._unpack = pack, unpack

    def pack(self, t: torch.Tensor) -> Any:
        return self._pack(t)

    def unpack(self, h: Any) -> torch.Tensor:
        return self._unpack(h)

    def close(self) -> None:
        self._pack, self._unpack = IN_PLACE.pack, after_step


def after_step(h: Any) -> torch.Tensor:
    """Returns what was saved. After the step there is only what stayed where it was."""
    held = h.held if type(h) is Saved else h[0] if type(h) is tuple else h
    if type(held) is not Kept:
        raise Error(AFTER_STEP)
    return IN_PLACE.unpack(held)
