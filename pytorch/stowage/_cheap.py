"""Cheap modules of a recorded step: which of them can be made again by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List, Tuple

import torch

from ._again import Small, by_result, overwrites, recipe, source
from ._before import know
from ._contents import Contents
from ._record import is_dense, storage_of, version_of
from ._surroundings import Draws, Random, in_checkpoint
from ._units import Attributes, counting, only_counts

if TYPE_CHECKING:
    from ._profile import Call


class Recorded:
    """Stands for Lean while a step is recorded: cheap modules are noted, and nothing is
    dropped."""

    def __init__(self, call: Call) -> None:
        self.to = call

    def call(self, module: torch.nn.Module, forward: Callable[..., Any], x: torch.Tensor) -> Any:
        call = self.to
        if call.small is not None or module in call.unit.not_cheap:
            return forward(x)
        if in_checkpoint() or isinstance(module, counting) and not only_counts(type(module)):
            call.unit.not_cheap.add(module)
            return forward(x)
        before = source(module, x, call.made, call.profile.refused)
        if before is None and (overwrites(module) or type(module).__name__ in call.profile.refused):
            return forward(x)  # another call of the same module may be cheap
        version, drawn, draws = version_of(x), Random(call.profile.device), Draws([module])
        attributes, buffers, contents = Attributes([module]), buffers_of(module), Contents([module])
        small = call.small = Small(module, x, call.profile.holder, call.profile.least, before)
        first = len(call.entries)
        try:
            y = forward(x)
        finally:
            call.small = None
        good = (before is not None or version_of(x) == version) and Random(call.profile.device).same(drawn) and not draws.drawn()
        good = good and buffers_of(module) == buffers and not contents.written() and not (attributes.changed() or attributes.written() or attributes.replaced())
        if good and type(y) is torch.Tensor and y.grad_fn is not None and not y._is_view() and (before is not None or not shares(x, y)):
            if before is None:
                needed, found = storage_of(x), recipe(x, call.made, call.profile.refused)
                if not any(e.storage == needed._cdata for e in call.entries[first:]):
                    by_result.add(module)
                    if found is not None:
                        small.before, small.kind = found, found.kind
                        for e in call.entries[first:]:
                            if e.small is small:
                                e.kind, e.sources = found.kind, call.profile.sources(found)
                if found is None:
                    call.held.setdefault(call.profile.number(needed), (needed.nbytes(), set()))[1].add(small.kind)
            small.hold()
            if is_dense(y):
                call.results.append((call.profile.number(storage_of(y)), storage_of(y).nbytes(), small.kind))
            know(module)
            call.made[y.grad_fn], small.version = small, version_of(y)
            call.smalls.append(small)
            return y
        for entry in call.entries[first:]:
            entry.small = None
        call.unit.not_cheap.add(module)
        return y


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(storage_of(a)._cdata == storage_of(b)._cdata)


def buffers_of(module: torch.nn.Module) -> List[Tuple[int, int]]:
    """Returns the buffers and their versions, but not those that batch norms count in."""
    return [(id(b), version_of(b)) for m in module.modules() if not isinstance(m, torch.nn.modules.batchnorm._NormBase) for b in m._buffers.values() if b is not None]
