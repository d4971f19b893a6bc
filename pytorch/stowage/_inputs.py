"""What a call is given, held until its backward pass: in place, or offloaded."""

from __future__ import annotations

from typing import Any, Dict, List, Protocol, Tuple

import torch
from torch.utils import _pytree

from ._errors import Error
from ._record import Kept, modified, version_of


_single = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})


class Holder(Protocol):
    """Keeps tensors until a backward pass: in place, or offloaded."""

    def pack(self, t: torch.Tensor) -> Any: ...

    def unpack(self, h: Any) -> torch.Tensor: ...


class InPlace:
    """Keeps tensors where they are."""

    @staticmethod
    def pack(t: torch.Tensor) -> Any:
        return Kept(t, None)

    @staticmethod
    def unpack(h: Any) -> torch.Tensor:
        t: torch.Tensor = h.tensor
        if version_of(t) != h.version:
            raise Error(modified(t.dtype, t.size(), h.version, t._version))
        return t


IN_PLACE = InPlace()


class Inputs:
    """The arguments of a call, with tensors held by a holder."""

    __slots__ = ("_names", "_tree", "_leaves", "_held", "_holder")

    def __init__(self, holder: Holder, args: Any, kwargs: Any) -> None:
        leaves, self._names, self._tree = [*args, *kwargs.values()], tuple(kwargs), None
        for x in leaves:
            if type(x) in _pytree.SUPPORTED_NODES or isinstance(x, tuple):  # a tree takes many times as long
                leaves, self._tree = _pytree.tree_flatten((args, kwargs))
                break
        self._holder = holder
        # A tensor that is given twice is the same tensor again, which some modules look at.
        self._held: Dict[int, Tuple[Any, bool]] = {}
        self._leaves: List[Tuple[int, Any]] = []
        for x in leaves:
            if not isinstance(x, torch.Tensor):
                self._leaves.append((0, x))
                continue
            n = id(x)
            if n not in self._held:
                self._held[n] = holder.pack(x), x.requires_grad
            self._leaves.append((n, None))

    @property
    def objects(self) -> List[Any]:
        """What may have attributes."""
        return [x for n, x in self._leaves if not n and type(x) not in _single]

    def again(self) -> Any:
        """Returns the arguments as tensors without history."""
        made = {}
        for n, (held, grad) in self._held.items():
            made[n] = self._holder.unpack(held).detach()
            if grad:
                made[n].requires_grad_()
        leaves = [made[n] if n else x for n, x in self._leaves]
        if self._tree is not None:
            return _pytree.tree_unflatten(leaves, self._tree)
        first = len(leaves) - len(self._names)
        return leaves[:first], dict(zip(self._names, leaves[first:]))
