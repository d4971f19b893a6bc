"""Agreement between ranks about plans.

What one rank recomputes all of them must: a second forward pass may issue collectives, for
parameters that are sharded for example, and a collective waits for all ranks. So ranks
exchange what they know before they decide, and decide from the same facts. An exchange is
the first thing in a step, before anything can fail in it: a step that failed on one rank
is a fact like others. A step whose plan is settled has none, except one in CHECKED.

Every rank must run the same steps: as many of them, with the same keys in the same order.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Tuple

import torch

from ._attach import is_sharded
from ._errors import BudgetError, Error

# One in so many settled steps begins with an exchange, in which ranks tell whether they
# exceeded their budgets.
CHECKED = 32


class Failure(NamedTuple):
    """An error of one rank, in a form that can be sent."""

    sentence: str
    budget: Optional[Tuple[int, int, Dict[str, int]]] = None  # of a BudgetError: the budget, the least, what is held


class Facts(NamedTuple):
    """What a rank knows when a step begins: of the last step under this key, and of now."""

    key: str
    state: Any  # of the plan; all ranks have the same
    failure: Optional[Failure] = None  # the step cannot begin
    learnt: bool = False  # the last step ended well
    by_library: bool = False  # it has rows or no blocks: the library alone plans
    fits: Optional[FrozenSet[Tuple[str, int, str]]] = None  # second passes for which there is room, if a step was recorded
    units: Dict[str, Tuple[Optional[bool], Optional[bool]]] = {}  # which blocks can be recomputed, all of them or cheap parts
    change: int = 0  # of the limit of saved tensors, wanted
    lacks: int = 0  # bytes that the library lacked
    seconds: float = 0.0  # of the shortest of the last steps


def check_setting(given: Any) -> Any:
    """Returns the argument ranks= of a runtime. It raises an error if it is none."""
    if given is None or isinstance(given, bool):
        return given
    groups = getattr(torch.distributed, "ProcessGroup", None) if torch.distributed.is_available() else None
    if groups is None or not isinstance(given, groups):
        raise Error(f"ranks: expected True, False or a process group that has this rank, got {given!r}; give ranks=True for all ranks, or nothing")
    return given


class Ranks:
    """The ranks that agree with this one."""

    def __init__(self, setting: Any, models: Iterable[torch.nn.Module], device: torch.device) -> None:
        self._device, self._group = device, None  # type: torch.device, Any
        self.count = 1
        if setting is False:
            return
        dist: Any = torch.distributed
        ready = dist.is_available() and dist.is_initialized()
        if setting is not None and not ready:
            raise Error("ranks: there is no process group; call torch.distributed.init_process_group() before the first step, or leave ranks out")
        if not ready:
            return
        if setting is None:
            groups = [g for model in models for g in groups_of(model)]
            if not groups:
                return
            one = groups[0] if all(g is groups[0] for g in groups) else None
            self._group = one
        elif setting is not True:
            self._group = setting
        self.count = int(dist.get_world_size(self._group))

    @property
    def several(self) -> bool:
        return self.count > 1

    def gather(self, mine: Any) -> List[Any]:
        """Returns what every rank has here."""
        if not self.several:
            return [mine]
        all: List[Any] = [None] * self.count
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            torch.distributed.all_gather_object(all, mine, group=self._group)
        return all

    def facts(self, mine: Facts, error: Optional[BaseException] = None) -> List[Facts]:
        """Returns the facts of every rank. It raises an error on all of them if one cannot begin
        its step, or if they do not run the same steps."""
        all: List[Facts] = self.gather(mine)
        if any(f.key != mine.key for f in all):
            raise Error(f"ranks run steps under different keys ({_by_rank(repr(f.key) for f in all)}); give the same keys in the same order on all of them, or ranks=False if no block has collectives")
        if any(f.state != mine.state for f in all):
            raise Error(f"ranks have run different steps ({_by_rank(f.state for f in all)}); attach and detach models at the same time on all of them, or give ranks=False if no block has collectives")
        self.fail([f.failure for f in all], error)
        return all

    def fail(self, all: List[Optional[Failure]], mine: Optional[BaseException]) -> None:
        """Raises an error on all ranks if one of them has one: a rank's own, or the first."""
        if isinstance(mine, BudgetError):  # another one: frames here hold this one, and it would hold them
            raise BudgetError(str(mine), mine.budget, mine.least, mine.held)
        if mine is not None:
            raise mine
        for rank, failure in enumerate(all):
            if failure is None:
                continue
            sentence = failure.sentence if not self.several else f"rank {rank} of {self.count}: {failure.sentence}"
            if failure.budget is not None:
                raise BudgetError(sentence, *failure.budget)
            raise Error(sentence)


def failure_of(e: BaseException) -> Failure:
    if isinstance(e, BudgetError):
        return Failure(str(e), (e.budget, e.least, dict(e.held)))
    return Failure(str(e) if isinstance(e, Error) else f"{type(e).__name__}: {e}")


def groups_of(model: torch.nn.Module) -> List[Any]:
    """Returns the process groups in which the ranks of a model must agree; None is the default
    group. It has none if nothing of the model is distributed."""
    found: List[Any] = []
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            found.append(getattr(module, "process_group", None))
        found += [_group_of(p.device_mesh) for p in module.parameters(recurse=False) if hasattr(p, "device_mesh")]  # of a DTensor
    if not found and any(is_sharded(m) for m in model.modules()):
        found.append(None)
    return found


def _group_of(mesh: Any) -> Any:
    """Returns the process group of a mesh. With several dimensions it is the default group."""
    return mesh.get_group() if mesh.ndim == 1 else None


def _by_rank(values: Iterable[Any]) -> str:
    return ", ".join(f"rank {r}: {v}" for r, v in enumerate(values))
