"""What a recorded step notes of each tensor that autograd saves."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, List, Optional

import torch

from ._again import Small
from ._hooks import Saved

if TYPE_CHECKING:
    from ._profile import Call

# Marks nodes that made results of calls with these calls.
MADE_BY = "stowage made by"


class Entry:
    """One tensor that autograd saved in a call."""

    __slots__ = ("saved", "bytes", "storage", "recipe", "small", "place", "cached", "kind", "around", "outer", "sources", "passing")

    def __init__(self, saved: Saved) -> None:
        self.saved, self.bytes, self.storage = weakref.ref(saved), 0, 0
        self.recipe: Any = None
        self.small: Optional[Small] = None
        self.place = -1  # among what the small call saved, if it can be dropped
        self.cached = False  # a cast weight, which autocast holds until the forward pass is over
        self.kind = ""  # of a cheap tensor, as in Recipe
        self.around = ""  # the same if the block around the part is one unit: a norm of the block may make it
        self.outer = False  # it is made again from what the block around the part has
        self.passing = 0  # bytes that making it again holds beside it
        self.sources: List[Call] = []  # other calls, with those around them, that it is made again from what they save

    def value(self) -> torch.Tensor:
        """Makes a cheap tensor again."""
        if self.small is not None:
            return self.small.unpack(self.place)
        made: torch.Tensor = self.recipe.value()
        return made
