"""What a second forward pass reads besides its arguments and weights: data that modules and the objects that a block is
given have as attributes, with generators, and hooks. A second pass finds them as they were when the first one began, and leaves no trace in them."""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, deque
from itertools import chain, islice, repeat, takewhile
from operator import is_not, not_
from typing import Any, Collection, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch

from ._record import version_of
from ._surroundings import Draws, is_generator
from ._units import LONG, Place, at, containers, counting, numbers, only_counts, other, own, single
from ._written import check_versions

# What has no parts.
_single = frozenset({*numbers, complex, bytes, type(None), torch.dtype, torch.device, torch.Size})
_tensors = frozenset({torch.Tensor, torch.nn.Parameter})
_data = _single | _tensors | {tuple, *containers}
# What has attributes and is no data.
_code = frozenset({type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType})

# So many objects inside of each other are looked at, and so many of a block.
DEEP, MOST = 4, 256

# Where modules have hooks of forward passes, and where all share them.
_hooks = sorted(name for name in own if name.startswith("_forward"))
_global_hooks = [hooks for name, hooks in vars(torch.nn.modules.module).items() if name.startswith("_global_forward")]

# What a module has while it is wrapped (_managed.py). Plans that take turns change it from step to step.
OURS = frozenset({"forward", "_compiled_call_impl", "__getstate__", "_replicate_for_data_parallel"})

_absent: Any = object()  # stands for what a container does not have
_left: Any = object()  # and for results, which stay what they are


class Slots:
    """The attributes of an object without a dictionary, as one."""

    __slots__ = ("_of", "_names")

    def __init__(self, of: Any) -> None:
        self._of, self._names = of, [name for c in type(of).__mro__ for name in _names(c) if not name.startswith("__")]

    def copy(self) -> Dict[str, Any]:
        return {name: getattr(self._of, name) for name in self._names if hasattr(self._of, name)}

    def __len__(self) -> int:
        return len(self.copy())

    def values(self) -> Any:
        return self.copy().values()

    def __setitem__(self, name: str, x: Any) -> None:
        object.__setattr__(self._of, name, x)  # of frozen ones, too

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._of, name)


def _names(c: type) -> Sequence[str]:
    names = c.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


class Before:
    """The data of modules and objects at one moment, but for places where a block puts results."""

    __slots__ = (
        "modules", "_dicts", "_then", "_skips", "_values", "_others", "_results", "_beside", "_counts", "_hooks", "_empty", "_tensors", "_buffers",
        "readers", "holds", "_long", "_tails", "generators", "_draws", "_seen", "_now", "_drawn",
    )

    def __init__(self, modules: Sequence[torch.nn.Module] = (), given: Iterable[Any] = (), sets: Collection[Place] = (), counts: Collection[Place] = ()) -> None:
        self.modules = modules
        # Dictionaries without results, what they had, and how many of the first names every module has: what comes after these
        # is compared all at once. And others.
        self._dicts: List[Dict[Any, Any]] = []
        self._then: List[Dict[Any, Any]] = []
        self._skips: List[int] = []
        self._others: List[Tuple[Any, Any]] = []
        self._results: List[Any] = []  # those of others that have results
        self._hooks: List[Any] = []  # of modules
        self.generators: List[Any] = []
        self._long: List[Tuple[Any, int]] = []  # containers that are not looked at, and how many they had
        self._tails: List[List[Any]] = []  # what was put at their ends since
        self._tensors: List[Tuple[torch.Tensor, int]] = []  # and their versions
        self._buffers: List[Tuple[torch.Tensor, int]] = []
        self.readers = [m for m in modules if isinstance(m, counting) and not only_counts(type(m))]  # of running means
        self.holds = False  # a result without a graph, which the next call replaces
        self._now: List[Tuple[Any, Any]] = []
        results: Dict[int, List[Any]] = {}
        for container, key in sets:
            results.setdefault(id(container), []).append(key)
        self._seen: Set[int] = {id(x) for container, key in sets for x in [at(container, key)] if _has_graph(x)}
        for m in modules:
            self._add(m.__dict__, results)
            for name, x in m.__dict__.items():
                if type(x) not in _single and name not in own and not callable(x):
                    self._note(x, DEEP, True, results)
            if m._buffers and not isinstance(m, counting):
                if isinstance(m._buffers, dict):  # a script's are not
                    self._add(m._buffers, results)
                self._buffers += [(b, version_of(b)) for b in m._buffers.values() if b is not None]
            self._hooks += [m.__dict__[name] for name in _hooks]
        for x in given:
            self._note(x, DEEP, False, results)
        noted = set(map(id, self._results))  # of other objects nothing is compared, and a second pass leaves no trace in them either
        self._beside = list({id(container): container for container, _ in (*sets, *counts) if id(container) not in noted}.values())
        # But for numbers that calls change there.
        self._counts = [(container, key, x) for container, key in counts for x in [at(container, key)] if type(x) in numbers]
        self._hooks += _global_hooks if modules else ()
        self._empty = [not hooks for hooks in self._hooks]
        self._others += [(hooks, hooks.copy()) for hooks in self._hooks if hooks]
        self._draws: Any = Draws(self.generators, False) if self.generators else None
        self._values = self._all(self._then)

    def _all(self, of: Iterable[Dict[Any, Any]]) -> List[Any]:
        """Returns the names and what dictionaries have, the first of each left out."""
        parts: Any = (list(of), map(dict.values, of))
        return [x for part in parts for x in chain.from_iterable(map(islice, part, self._skips, repeat(None)))]

    def _add(self, container: Any, results: Dict[int, List[Any]]) -> None:
        then = container.copy()
        for key in results.get(id(container), ()):
            x = at(then, key)
            if _has_graph(x):
                then[key] = _left
            self.holds |= isinstance(x, torch.Tensor) and not _has_graph(x)
        if id(container) in results:
            self._results.append(container)
        if type(container) is not dict or id(container) in results:
            self._others.append((container, then))
            return
        self._dicts.append(container)
        self._then.append(then)
        self._skips.append(sum(1 for _ in takewhile(own.__contains__, container)))

    def _note(self, x: Any, deep: int, pure: bool, results: Dict[int, List[Any]]) -> None:
        """Notes what is in a container or an object; if pure, only in one of nothing but data."""
        kind = type(x)
        if kind in _single or kind in _code or id(x) in self._seen or len(self._seen) >= MOST:
            return
        self._seen.add(id(x))
        if kind in _tensors:
            self._tensors.append((x, version_of(x)))
            return
        if not deep or isinstance(x, (torch.nn.Module, type, torch.Tensor)):
            return
        if is_generator(x):
            self.generators.append(x)
            return
        container: Any
        if isinstance(x, (tuple, list, set, dict, deque)):
            if len(x) > LONG:
                if kind in containers and isinstance(x, (list, dict)):
                    self._long.append((x, len(x)))
                return
            container = x
        elif type(getattr(x, "__dict__", None)) is dict:
            container = x.__dict__
        elif any(map(_names, kind.__mro__)):
            container = Slots(x)
        else:
            return
        values = list(container if isinstance(container, (tuple, list, set, deque)) else container.values())
        if pure and any(type(y) not in _data and not _is_data(y) for y in values):
            return
        if not isinstance(x, tuple):
            self._add(container, results)
        for y in values:
            self._note(y, deep - 1, pure, results)

    def same(self, modules: Sequence[torch.nn.Module]) -> bool:
        """Reports whether all is as it was, and of the same modules."""
        return (
            self.modules == modules
            and not self._differing()
            and not any(other(at(container, key), x) for container, key, x in self._counts)
            and not self.written()
            and (self._draws is None or not self._draws.drawn())
            and all(version_of(t) == version for t, version in self._buffers)
            and (not self._long or all(len(x) == n for x, n in self._long))
        )

    def _differing(self) -> List[Tuple[Any, Any]]:
        """Returns the containers that have something else now, and what they had."""
        now, found = self._all(self._dicts), []  # type: List[Any], List[Tuple[Any, Any]]
        if len(now) != len(self._values) or any(map(is_not, now, self._values)):
            found = [place for place in zip(self._dicts, self._then) if _differs(*place)]
            if not found:  # what is there now is as good
                self._then = [container.copy() for container in self._dicts]
                self._values = now
        if self._others:
            found += [place for place in self._others if _differs(*place)]
        if list(map(not_, self._hooks)) != self._empty:
            found += [(hooks, {}) for hooks, empty in zip(self._hooks, self._empty) if empty and hooks]
        return found

    def check(self) -> None:
        """Raises an error if a tensor or a buffer was written since."""
        check_versions(self._tensors)
        check_versions(self._buffers)

    def written(self) -> bool:
        """Reports whether a tensor that is no buffer was written since."""
        return any(version_of(t) != version for t, version in self._tensors)

    def __enter__(self) -> None:
        differ = self._differing()
        parts = (x for of in self._beside if type(of) is dict for x in of.values() if type(x) in containers)
        self._now = [(container, container.copy()) for container in (*(container for container, _ in differ), *self._results, *self._beside, *parts)]
        for container, then in differ:
            _put(container, then)
        for container, key, x in self._counts:
            if type(at(container, key)) in numbers:
                container[key] = x
        self._tails = [_cut(x, n) for x, n in self._long]
        if self._draws is not None:
            self._drawn = Draws(self.generators, False)
            self._draws.set()

    def __exit__(self, *_: object) -> None:
        if self._draws is not None:
            self._drawn.set()
        now, self._now = self._now, []
        for container, then in self._differing() + now:
            _put(container, then, True)  # a pass that ended early may have left anything
        tails, self._tails = self._tails, []
        for (x, n), tail in zip(self._long, tails):
            _cut(x, n)
            x.extend(tail) if isinstance(x, list) else x.update(tail)


def _has_graph(x: Any) -> bool:
    """Reports whether something leads to a graph, which nobody should hold. What does not may be what the next call reads."""
    return isinstance(x, torch.Tensor) and x.grad_fn is not None


def _cut(x: Any, n: int) -> List[Any]:
    """Takes what was put last out of a list or a dictionary, which then has so many at most. Returns it."""
    if isinstance(x, list):
        last = x[n:]
        del x[n:]
        return last
    return [x.popitem() for _ in range(len(x) - n)][::-1]


def _is_data(x: Any) -> bool:
    """Reports whether an object is a number or a generator, or has nothing but data."""
    if single(x) or is_generator(x):
        return True
    attributes = getattr(x, "__dict__", None)
    return type(attributes) is dict and type(x) not in _code and not isinstance(x, (torch.nn.Module, type)) and all(type(y) in _data or single(y) or is_generator(y) for y in attributes.values())


def _differs(container: Any, then: Any) -> bool:
    if isinstance(container, set):
        return bool(container != then)
    if isinstance(container, (list, deque)):
        return len(container) != len(then) or any(map(is_not, container, then)) and any(x is not y and y is not _left and not _equal(x, y) for x, y in zip(container, then))
    now, then = ({name: x for name, x in of.copy().items() if name not in OURS} for of in (container, then))
    return now.keys() != then.keys() or any(x is not then[name] and then[name] is not _left and not _equal(x, then[name]) for name, x in now.items())


def _equal(x: Any, y: Any) -> bool:
    """Reports whether two things are as good as the same."""
    if type(x) is tuple and type(y) is tuple:
        return len(x) == len(y) and all(map(_equal, x, y))
    return type(x) is type(y) and type(x) in _single and bool(x == y)


def _put(container: Any, then: Any, all: bool = False) -> None:
    """Puts data that is not what it was where it was, and if so everything else too."""
    if isinstance(container, set):
        container.clear()
        container.update(then)
        return
    if isinstance(container, (list, deque)):
        values = [x if x is not _left else at(container, i) for i, x in enumerate(then)]
        container.clear()
        container.extend(values)
        return
    now, all = container.copy(), all or type(container) is OrderedDict
    for key in {**now, **then}:
        x, y = now.get(key, _absent), then.get(key, _absent)
        if x is y or y is _left or not all and any(z is not _absent and type(z) not in _data and not single(z) for z in (x, y)):
            continue
        if y is _absent:
            del container[key]
        else:
            container[key] = y


class Known:
    """The numbers and names that a cheap module had in recorded steps."""

    __slots__ = ("same", "_names", "_size")

    def __init__(self, module: torch.nn.Module) -> None:
        self.same = numbers_of(module)
        self._names, self._size = set(self.same), len(module.__dict__)

    def add(self, module: torch.nn.Module) -> None:
        """Notes another call. What others change from call to call does not count."""
        now = numbers_of(module)
        self._names |= set(now)
        self.same = {name: x for name, x in self.same.items() if now.get(name, _absent) == x}

    def has(self, module: torch.nn.Module) -> bool:
        attributes = module.__dict__
        if not self.same.items() <= attributes.items():
            return False
        if len(attributes) != self._size:
            if not numbers_of(module).keys() <= self._names:
                return False
            self._size = len(attributes)
        return True


_known: weakref.WeakKeyDictionary[torch.nn.Module, Dict[bool, Known]] = weakref.WeakKeyDictionary()


def numbers_of(module: torch.nn.Module) -> Dict[str, Any]:
    """Returns the numbers and names that a module has as attributes, whether it trains among them."""
    return {name: x for name, x in module.__dict__.items() if type(x) in numbers}


def know(module: torch.nn.Module) -> None:
    """Notes that a cheap module was tried in a recorded step, as it is."""
    of = _known.setdefault(module, {})
    if module.training in of:
        of[module.training].add(module)
    else:
        of[module.training] = Known(module)


def known(module: torch.nn.Module) -> Optional[Dict[str, Any]]:
    """Returns the numbers of a cheap module if they are those of a recorded step, or None: it may draw random numbers now."""
    found = _known.get(module, _nothing).get(module.training)
    return found.same if found is not None and found.has(module) else None


_nothing: Dict[bool, Known] = {}


class Numbers:
    """Gives a module the numbers that it had for a while."""

    __slots__ = ("_attributes", "_then", "_now")

    def __init__(self, module: torch.nn.Module, then: Dict[str, Any]) -> None:
        self._attributes, self._then = module.__dict__, then
        self._now: Dict[str, Any] = {}

    def __enter__(self) -> None:
        if not self._then.items() <= self._attributes.items():
            self._now = {name: self._attributes.get(name, _absent) for name in self._then}
            self._attributes.update(self._then)

    def __exit__(self, *_: object) -> None:
        for name, x in self._now.items():
            if x is _absent:
                self._attributes.pop(name, None)
            else:
                self._attributes[name] = x
