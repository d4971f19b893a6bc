"""Weights and buffers that must not be written between two forward passes of a block, and what DDP writes all the same.

DDP copies the buffers of rank 0 to all ranks before every forward pass. Before a second one, with no backward pass in
between, that changes versions and no values.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, Iterable, Tuple

import torch

from ._errors import Error
from ._record import modified, version_of

# So many versions of a buffer are remembered.
VERSIONS = 64

# What DDP wrote, by the number of a buffer: the versions before and after.
_broadcast: Dict[int, Tuple[Any, Dict[int, int]]] = {}


class Broadcasts:
    """Takes the place of a DDP module's method that writes buffers, and notes what it writes."""

    def __init__(self, ddp: torch.nn.Module) -> None:
        self._ddp = ddp
        ddp.__dict__["_sync_buffers"] = self

    def __call__(self) -> None:
        ddp: Any = self._ddp
        before = [(b, version_of(b)) for b in ddp.module.buffers()]
        type(ddp)._sync_buffers(ddp)
        for b, version in before:
            if version_of(b) != version:
                versions = _written(b)
                versions[version] = version_of(b)
                if len(versions) > VERSIONS:
                    del versions[min(versions)]
                _broadcast[id(b)] = weakref.ref(b), versions

    def remove(self) -> None:
        self._ddp.__dict__.pop("_sync_buffers", None)
        for b in self._ddp.buffers():
            _broadcast.pop(id(b), None)


def _written(t: torch.Tensor) -> Dict[int, int]:
    weak, versions = _broadcast.get(id(t), (None, {}))  # type: Any, Dict[int, int]
    return versions if weak is not None and weak() is t else {}  # another tensor may have had the number


def _only_broadcast(t: torch.Tensor, version: int) -> bool:
    """Reports whether nobody but DDP wrote to a tensor since it had a version."""
    versions = _written(t)
    while version in versions:
        version = versions[version]
    return version == version_of(t)


def check_versions(weights: Iterable[Tuple[torch.Tensor, int]]) -> None:
    """Raises an error if a weight or a buffer was written since."""
    for p, version in weights:
        if version_of(p) != version and not _only_broadcast(p, version):
            ranks = torch.distributed.is_available() and torch.distributed.is_initialized() and not p.requires_grad
            do = "; if DDP wrote it before another forward pass, give broadcast_buffers=False to DDP, or attach() what DDP returned" if ranks else ""
            raise Error(modified(p.dtype, p.shape, version, p._version) + do)
