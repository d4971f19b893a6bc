"""Errors. Every error of this package is an Error."""

from __future__ import annotations

from typing import Dict, TypeVar

_E = TypeVar("_E", bound=BaseException)


class Error(RuntimeError):
    """Wrong use, or a device or machine that failed. Its sentence says what to do."""


class Overflow(Error):
    """A step had more rows than room. There is more room now: run the step again from the
    same state, as Runtime.run does."""


class BudgetError(Error):
    """The budget is too small, whatever is offloaded.

    budget  the budget in bytes
    least   the smallest budget that would do, as far as it is known
    held    bytes by what holds them: "weights", "gradients", "optimizer" and so on
    """

    def __init__(self, sentence: str, budget: int, least: int, held: Dict[str, int]) -> None:
        super().__init__(sentence)
        self.budget, self.least, self.held = budget, least, held


class TooSmall(Error):
    """Nothing keeps to the limit on saved tensors; least is the smallest limit that would do."""

    def __init__(self, sentence: str, least: int = 0) -> None:
        super().__init__(sentence)
        self.least = least


def forget(e: _E) -> _E:
    """Returns an error that is kept, without the frames that it came through: one of them may hold the error, a
    cycle, and with it the frames of the user and all tensors there until the collector comes."""
    e.__traceback__ = e.__context__ = e.__cause__ = None
    return e


AFTER_STEP = "a saved tensor is needed after its step; call backward() inside of `with rt.step():`"

for _e in (Error, Overflow, BudgetError):
    _e.__module__ = "stowage"  # the name under which users import them
