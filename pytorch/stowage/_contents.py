"""What weights, buffers and arrays of modules have, by which writes are seen that change no version: those through .data or by NumPy."""

from __future__ import annotations

import contextlib
import sys
import zlib
from typing import Any, Iterable, List, Tuple

import torch

from ._bits import as_numbers
from ._record import is_dense, storage_of
from ._units import counting, own

# Tensors of so many elements are copied, and larger ones summed up. Arrays of more bytes are not looked at.
COPIED, MOST = 1 << 16, 1 << 26


class Contents:
    """What modules have at one moment, but for the running means of norms."""

    __slots__ = ("_then",)

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._then: List[Tuple[str, Any, Any]] = []  # why a block cannot be recomputed if it writes there, what has it, and what that has
        for m in modules:
            self._add("it writes to its weights", m._parameters.values())
            if not isinstance(m, counting):
                self._add("it changes its buffers", m._buffers.values())
            for name, x in m.__dict__.items():
                if name not in own:
                    self._add(f"it writes to its attribute {name!r}", (x,))

    def _add(self, why: str, all: Iterable[Any]) -> None:
        array: Any = getattr(sys.modules.get("numpy"), "ndarray", ())
        for x in all:
            dense = isinstance(x, torch.Tensor) and is_dense(x) and not x.is_meta and not x.is_quantized and storage_of(x).nbytes()
            if dense or isinstance(x, array) and not x.dtype.hasobject and x.nbytes <= MOST:
                with contextlib.suppress(RuntimeError):  # a type that has no views
                    self._then.append((why, x, _contents(x)))

    def written(self) -> str:
        """Returns what was written, or nothing."""
        return next((why for why, x, then in self._then if not _same(_contents(x), then)), "")


def _contents(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x.shape, zlib.crc32(x.tobytes())
    with torch.no_grad():
        return as_numbers(x).clone() if x.numel() <= COPIED else as_numbers(x).sum()


def _same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)
