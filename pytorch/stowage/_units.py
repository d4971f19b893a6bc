"""Units: the parts of a model that a plan decides about, found without being named.

A block is one of several modules of the same class that hold most of a model, such as the
layers of a transformer or the stages of a convolution network. If there are few of them,
their own parts (attention, feed-forward) are blocks too, so that a plan can choose finely.

A cheap module has no matrices: a norm or an activation. What it makes can be made again
from its input in little time.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import sys
import types
import weakref
from typing import Any, Counter, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch

from ._compiled import is_compiled, kind
from ._record import version_of

# With fewer blocks than this, the parts of blocks are blocks themselves.
FEW = 16

# A model is in one of its modules if that has at least this part of its weights, tables left out.
NEARLY = 0.9

# A module that has so many modules of one class in lists is not one block.
MANY = 3

_lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
# Modules that draw random numbers, wait for other ranks, or only hand their input on.
_never_cheap = ("drop", "sync", "identity", "sequential", "parametri")


def has_matrix(module: torch.nn.Module) -> bool:
    return any(p.dim() >= 2 for p in module.parameters())


def is_leaf(module: torch.nn.Module) -> bool:
    """Reports whether a module is one operator, or nearly so. Recurrent ones are many."""
    return next(module.children(), None) is None and not isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase))


def blocks(model: torch.nn.Module) -> List[torch.nn.Module]:
    """Returns the blocks of a model, in the order in which they were added to it."""
    found = list(_repeated(model)) or alone(model)
    if not found or len(found) >= FEW:
        return found
    out: List[torch.nn.Module] = []
    for block in found:
        out.append(block)
        parts = [] if is_compiled(block) else list(_parts(block))
        if len(parts) > 1:
            out += parts
    return out


def _repeated(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    below = [m for m in _outside_of_compiled(model) if not is_leaf(m) and m is not model]
    count: Counter[type] = collections.Counter(map(kind, below))
    stages = {kind(m) for m in below if count[kind(m)] > 1 and _is_called(m) and _is_stage(m)}
    seen: Set[torch.nn.Module] = set()

    def walk(module: torch.nn.Module, top: bool) -> Iterator[torch.nn.Module]:
        if module in seen:
            return
        seen.add(module)
        if not top and not is_leaf(module) and count[kind(module)] > 1 and kind(module) not in stages and _is_called(module) and not _holds_blocks(module) and has_matrix(module):
            yield module
            return
        if is_compiled(module):
            return
        for child in module.children():
            yield from walk(child, False)

    return walk(model, True)


def alone(model: torch.nn.Module) -> List[torch.nn.Module]:
    """Returns the innermost module that has nearly all of a model, if any. It may be a layer that is called again and
    again, and is a block then."""

    def size(m: torch.nn.Module) -> int:
        tables = {p for t in m.modules() if isinstance(t, torch.nn.Embedding) for p in t.parameters()}
        return sum(p.numel() for p in m.parameters() if p not in tables)

    found: List[torch.nn.Module] = []
    least, todo = size(model) * NEARLY, [*model.children()] if not is_compiled(model) else []
    while todo:
        m = todo.pop()
        if not is_leaf(m) and not is_compiled(m) and 0 < least <= size(m):
            found, todo = [m] if _is_called(m) else found, [*m.children()]
    return found


def hidden(model: torch.nn.Module) -> List[torch.nn.Module]:
    """Returns the compiled modules that have blocks inside, which cannot be units."""
    units = set(blocks(model))
    return [m for m in _outside_of_compiled(model) if is_compiled(m) and m not in units and any(True for c in m.children() for _ in _repeated(c))]


def _outside_of_compiled(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    yield module
    if not is_compiled(module):
        for child in module.children():
            yield from _outside_of_compiled(child)


def _is_called(module: torch.nn.Module) -> bool:
    return not isinstance(module, _lists)


def _holds_blocks(module: torch.nn.Module) -> bool:
    """Reports whether a module has blocks inside, which are better units: others of its class,
    such as a wrapper around a model whose layers are wrapped too, or those of a chain."""
    if not is_compiled(module) and any(type(m) is type(module) for m in module.modules() if m is not module and not is_leaf(m)):
        return True
    if not isinstance(module, torch.nn.Sequential):
        return False
    return any(not is_leaf(m) for m in module.children())


def _is_stage(module: torch.nn.Module) -> bool:
    """Reports whether a module is there several times and is many blocks all the same, which are better units: an
    encoder and a decoder of one class, a stage of a vision transformer. Most of it is in lists of modules of
    one class. Experts are no blocks: they run beside each other, and a layer of them is one."""
    if is_compiled(module):
        return False
    inner: Dict[torch.nn.Module, None] = {}

    def walk(m: torch.nn.Module) -> None:
        for name, child in m.named_children():
            if "expert" in name.lower() or is_compiled(child):
                continue
            of = list(child.children())
            if isinstance(child, (*_lists, torch.nn.Sequential)) and len({kind(c) for c in of}) == 1 and not any(is_leaf(c) for c in of):
                inner.update(dict.fromkeys(c for c in of if has_matrix(c)))
            else:
                walk(child)

    walk(module)
    tables = {p for m in module.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    all, blocks = ({p: p.numel() for m in of for p in m.parameters() if p not in tables} for of in ([module], inner))
    return len(inner) >= MANY and 2 * sum(blocks.values()) > sum(all.values())


def _parts(block: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Returns the parts of a block that have matrices and parts of their own. Of a part with the core of an
    attention, which has no matrices and saves most if it is not fused, the core alone is one. A fused core saves
    little beside its inputs, so that there the projections are recomputed with the whole block or not at all."""
    for child in block.children():
        if isinstance(child, _lists):
            continue
        if not is_leaf(child) and has_matrix(child) and not is_compiled(child):
            core = [m for m in child.children() if "attention" in type(m).__name__.lower() and not is_leaf(m) and not has_matrix(m) and not is_compiled(m)]
            yield core[0] if len(core) == 1 else child


def cheap(module: torch.nn.Module) -> List[torch.nn.Module]:
    """Returns the cheap modules below a module, compiled ones left out."""
    out: Dict[torch.nn.Module, None] = {}

    def walk(m: torch.nn.Module) -> None:
        if is_compiled(m):
            return
        if is_leaf(m):
            if not has_matrix(m) and not any(w in type(m).__name__.lower() for w in _never_cheap):
                out[m] = None
        for child in m.children():
            walk(child)

    walk(module)
    return list(out)


numbers = (int, float, bool, str)
# Containers whose data is put back.
containers = frozenset({list, dict, set, collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque})
_noted = (*numbers, type(None), torch.Tensor, torch.nn.Parameter)
own = frozenset(torch.nn.Module().__dict__)
_code = (type, types.FunctionType, types.MethodType, types.ModuleType)

# What longer containers have is not looked at, only how many.
LONG = 64


class Attributes:
    """The numbers, tensors and containers that objects have as attributes: the modules of a block, or what it is
    given. A block that changes them keeps state between its calls."""

    __slots__ = ("_places", "_containers")

    def __init__(self, owners: Iterable[Any]) -> None:
        self._places: List[Tuple[str, Any, Any, Any, int]] = []  # a name, a container and a key in it, what is there, and its version
        self._containers: List[Any] = []  # a name, what has it, a container, and a copy of that
        for o in owners:
            for name, x in o.__dict__.items():
                if name in own and isinstance(o, torch.nn.Module):
                    continue
                if type(x) in _noted:
                    self._note(name, o.__dict__, name, x)
                elif type(x) in containers:
                    self._containers.append((name, o.__dict__, x, x.copy()))
                    if len(x) <= LONG and type(x) is not set:
                        for key, y in x.items() if isinstance(x, dict) else enumerate(x):
                            self._note(name, x, key, y)

    def _note(self, name: str, container: Any, key: Any, x: Any) -> None:
        if type(x) in _noted:
            self._places.append((name, container, key, x, version_of(x) if isinstance(x, torch.Tensor) else 0))

    def changed(self) -> str:
        """Returns the name of a number that is different now, or of a container with more or less in it, or nothing."""
        for name, _, now, before in self._containers:
            if len(now) != len(before):
                return str(name)
        return next((name for name, container, key, x, _ in self._places if type(x) in numbers and other(at(container, key), x)), "")

    def written(self) -> str:
        """Returns the name of a tensor that was written in place, or nothing."""
        return next((name for name, container, key, x, version in self._places if isinstance(x, torch.Tensor) and version_of(x) != version), "")

    def replaced(self) -> List[Place]:
        """Returns where there are other tensors now. They may be results, which anybody may read, as losses are."""
        return [(container, key) for _, container, key, x, _ in self._places if type(x) not in numbers and at(container, key) is not x]

    def counted(self) -> List[Place]:
        """Returns where there are other numbers now, and containers with more or less in them."""
        grown = [(of, name) for name, of, now, before in self._containers if len(now) != len(before)]
        return grown + [(container, key) for _, container, key, x, _ in self._places if type(x) in numbers and other(at(container, key), x)]

    def restore(self) -> None:
        for _, _, now, before in self._containers:
            if len(now) != len(before):
                now.clear()
                now.extend(before) if isinstance(now, (list, collections.deque)) else now.update(before)
        for _, container, key, x, _ in self._places:
            if at(container, key) is not x:
                container[key] = x


# A container and a key in it.
Place = Tuple[Any, Any]
Places = Dict[Tuple[int, Any], Place]


def helpers(inside: Iterable[torch.nn.Module]) -> List[Any]:
    """Returns the objects that modules have as attributes, such as one that sends tokens to experts."""
    found = {id(x): x for m in inside for name, x in m.__dict__.items() if name not in own and type(getattr(x, "__dict__", None)) is dict}
    return [x for x in found.values() if not isinstance(x, (torch.nn.Module, torch.Tensor, *_code))]


def remember(places: Places, more: Iterable[Place], owner: Any = None) -> None:
    """Adds places, until their owner is gone: what is in an object of one step, nobody wants any more."""
    for container, key in more:
        name, new = (id(container), key), (id(container), key) not in places
        places[name] = container, key
        if new and owner is not None:
            with contextlib.suppress(TypeError):  # it may have no weak references
                weakref.finalize(owner, functools.partial(places.pop, name, None)).atexit = False


def at(container: Any, key: Any) -> Any:
    """Returns what is at a place, or None."""
    try:
        return container[key]
    except (KeyError, IndexError):
        return None


def other(now: Any, x: Any) -> bool:
    """Reports whether there is something else now than a number. What is not a number is the same."""
    return now is not x and (type(now) is not type(x) or bool(now != x))


def single(x: Any) -> bool:
    """Reports whether something is one number of NumPy or a member of an enumeration, which nobody writes."""
    return isinstance(x, enum.Enum) or isinstance(x, getattr(sys.modules.get("numpy"), "generic", ()))


counting = torch.nn.modules.batchnorm._NormBase


def only_counts(norm: type) -> bool:
    """Reports whether norms of a class only count in their running means while they train, as those of PyTorch do and what calls
    its functions. Others may read them too."""
    forward: Any = getattr(norm, "forward", None)
    called = getattr(getattr(forward, "__code__", None), "co_names", ())
    return str(getattr(forward, "__module__", "")).startswith("torch.nn.") or any(name in called for name in ("batch_norm", "instance_norm", "super"))


Buffers = Dict[str, Optional[torch.Tensor]]


def copied(buffers: Any) -> Buffers:
    return {name: None if t is None else t.detach().clone() for name, t in buffers.items()}


def means(norms: Iterable[torch.nn.Module]) -> Dict[int, Buffers]:
    """Returns copies of the running means of those that train, by the number of what has them."""
    return {id(m._buffers): copied(m._buffers) for m in norms if m.training}


def modules(module: torch.nn.Module) -> List[torch.nn.Module]:
    """Returns a module and those below, in any order. module.modules() takes ten times as long, and this is for every
    second pass."""
    seen, found = {module}, [module]
    for m in found:  # which grows
        below = m._modules
        if below:
            for child in below.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    found.append(child)
    return found


class Uncounted:
    """Gives batch norms copies of their running means for a while, so that a second forward
    pass does not count in them twice. They are among the given modules, or in the module."""

    __slots__ = ("_held", "_then")

    def __init__(self, module: torch.nn.Module, among: Optional[Sequence[torch.nn.Module]] = None, then: Mapping[int, Buffers] = {}) -> None:
        self._then = then  # what they had before the first pass, where that is known
        self._held: List[Any] = [(m._buffers, dict(m._buffers)) for m in (modules(module) if among is None else among) if m._buffers and isinstance(m, counting)]

    def __enter__(self) -> None:
        for now, before in self._held:
            now.update(copied(self._then.get(id(now), before)))

    def __exit__(self, *_: object) -> None:
        for now, before in self._held:
            now.update(before)
