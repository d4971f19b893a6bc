"""Forward passes that run again: what they saved is made anew when the backward pass asks.

Whole   one call of a block. It keeps the inputs; everything that autograd saves inside is
        dropped, and a second forward pass makes it again.
Lean    one call of a block that keeps its products and drops what is cheap to make again:
        outputs of norms and activations (Small), and of a few operators that autograd's
        own graph says how to repeat (Recipe).

A second pass has the random numbers, the autocast state and the inputs of the first, so it
makes the same bits. It ends as soon as everything that is needed is there. Nothing is
guessed: a pass that saves other things than the first is an error.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any, Callable, Container, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
import torch.utils.checkpoint  # which PyTorch does not import by itself
from torch.utils import _pytree

from ._before import Before, Numbers, known
from ._bits import seed
from ._errors import AFTER_STEP, Error
from ._inputs import IN_PLACE, Holder, Inputs
from ._record import Kept, is_dense, storage_of, version_of
from ._surroundings import AS_IT_IS, Mode, Random, Surroundings, mode_of, modes_again
from ._units import Buffers, Uncounted, counting, means, modules
from ._view import View
from ._written import check_versions

hooks = torch.autograd.graph.saved_tensors_hooks
# Before this function existed, an exception in a hook could not end a forward pass.
STOPS = hasattr(torch.utils.checkpoint, "set_checkpoint_early_stop")


def raised(e: BaseException) -> str:
    """Returns the sentence of an Error that a hook raised, or nothing. PyTorch 1.13 turns what
    a hook raises into another exception, with a list of places after it."""
    before, after, text = "Error: ", "\n\nAt:\n", str(e)
    return text[len(before) : text.index(after)] if type(e) is RuntimeError and text.startswith(before) and after in text else ""


class _Stop(BaseException):
    """Ends a second forward pass, whatever errors that handles."""


class State(threading.local):
    """What this thread is doing."""

    lean: Optional[Lean] = None  # the call of a block whose cheap parts are dropped
    again = 0  # depth of second forward passes
    whole: Tuple[Any, ...] = ()  # the units of calls that are recomputed and in their first pass


state = State()


# The shape and the type of what a forward pass saved.
Shape = Tuple[torch.Size, torch.dtype]


_nested = torch.Size()  # whose parts have shapes of their own


def shapes_of(tensors: Iterable[torch.Tensor]) -> List[Shape]:
    return [(t.shape if not t.is_nested else _nested, t.dtype) for t in tensors]


def cast_weight(t: torch.Tensor) -> Any:
    """Returns the weight that a tensor is a cast of, or None."""
    base = t._base if t._is_view() else t
    if base is None or base.grad_fn is None or base.grad_fn.name() != "ToCopyBackward0":
        return None
    return getattr(base.grad_fn.next_functions[0][0], "variable", None)


def collect(forward: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any, need: int, each: Optional[Callable[[torch.Tensor], Any]] = None, among: Optional[Sequence[torch.nn.Module]] = None, then: Mapping[int, Buffers] = {}) -> Tuple[List[torch.Tensor], Any]:
    """Runs a forward pass and returns what it saves, at most so many tensors, and its output
    if it ran to its end. If it needs nothing, it keeps nothing. Each is called for every tensor.
    The norms that count are among the given modules, or in the module. Those that read their running means have them as they were then."""
    saved: List[torch.Tensor] = []
    last = need if STOPS else -1

    def pack(t: torch.Tensor) -> None:
        if each is not None:
            each(t)
        if need == 0:
            return
        saved.append(t if t.is_leaf else t.detach())
        if len(saved) == last:
            raise _Stop

    out = None
    state.again += 1
    lean, state.lean = state.lean, None
    try:
        with torch.enable_grad(), hooks(pack, _no_unpack), Uncounted(module, among, then):
            out = forward(*args, **kwargs)
    except _Stop:
        pass
    finally:
        state.again -= 1
        state.lean = lean
    # A module may keep a tensor of this pass, whose graph holds the hook: it must hold no more.
    made = list(saved)
    saved.clear()
    return made, out


def _no_unpack(_: Any) -> torch.Tensor:
    raise Error("a backward pass runs inside of a forward pass that is recomputed; keep this module")


class Whole:
    """One call of a block that is recomputed, but for what it saves after the first tensors if
    their number is given."""

    __slots__ = ("module", "forward", "inputs", "around", "random", "shapes", "weights", "modes", "norms", "means", "before", "given", "values", "timed", "holder", "first", "__weakref__")

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, device: torch.device, holder: Holder, timed: Optional[Callable[[Callable[[], None]], None]] = None, first: int = 0, before: Any = None) -> None:
        self.module: Any = module
        self.forward, self.timed, self.holder, self.first = forward, timed, holder, first
        self.inputs: Any = Inputs(holder, args, kwargs)
        self.before, objects = before, self.inputs.objects
        self.given: Any = Before((), objects) if objects else AS_IT_IS
        self.means = means(before.readers) if before is not None and before.readers else {}
        self.around, self.random = Surroundings(), Random(device)
        self.shapes: List[Shape] = []
        self.weights: Dict[int, Tuple[torch.Tensor, int]] = {}  # and their versions, by id: tensors are slow keys
        self.modes: List[Mode] = []
        self.norms: Optional[List[torch.nn.Module]] = None  # modules that count, once the forward pass is over
        self.values: Dict[int, torch.Tensor] = {}

    def pack(self, t: torch.Tensor) -> Any:
        shapes = self.shapes
        i = len(shapes)
        if i and i == self.first:
            return self.holder.pack(t)
        dtype = t.dtype
        shapes.append((t.shape if not t.is_nested else _nested, dtype))
        if not dtype.is_floating_point and seed(t):  # it is not compared with the one that a second pass makes
            return IN_PLACE.pack(t)
        base: Any = t._base if t._is_view() else t
        if base.is_leaf and (type(base) is torch.nn.Parameter or base.requires_grad):
            self.note(base)  # it may be no weight of the block
        return i

    def note(self, t: torch.Tensor) -> None:
        if id(t) not in self.weights:
            self.weights[id(t)] = t, version_of(t)

    def end(self) -> None:
        """Ends the forward pass: weights must not change until the second one, nor running means in which nothing is counted."""
        modes, note = self.modes, self.note
        self.norms = []
        for m in self.before.modules:
            own, training = m._parameters, m.training
            modes.append((m, training, type(m), dict(own) if own else None))
            if own:
                for p in own.values():
                    if p is not None:
                        note(p)
            if m._buffers and isinstance(m, counting):
                self.norms.append(m)
                for p in m._buffers.values() if not training else ():
                    if p is not None:
                        note(p)

    def unpack(self, i: Any) -> torch.Tensor:
        if type(i) is not int:
            return self.holder.unpack(i)
        t = self.values.pop(i, None)
        if t is None:
            if self.inputs is None:
                raise Error(AFTER_STEP)
            self.run() if self.timed is None else self.timed(self.run)
            t = self.values.pop(i)
        return t

    def close(self) -> None:
        """Ends the step. A module that keeps its output would lead to itself, which the collector does not see."""
        self.module = self.inputs = self.norms = self.before = self.given = None
        self.forward, self.timed, self.modes, self.weights, self.values = _no_unpack, None, [], {}, {}
        self.means = {}

    def run(self) -> None:
        check_versions(self.weights.values())
        for before in (self.before, self.given):
            if before is not AS_IT_IS:
                before.check()
        args, kwargs = self.inputs.again()
        now = Random(self.random.device)
        self.random.set()
        try:
            with self.before, self.given, self.around.again(), modes_again(self.modes):
                saved, _ = collect(self.forward, self.module, args, kwargs, len(self.shapes), among=self.norms, then=self.means)
        finally:
            now.set()
        check_versions(self.weights.values())  # a block may write to its weights, which autograd saved before
        if self.first and not STOPS:
            del saved[self.first :]
        check(self.module, self.shapes, shapes_of(saved))
        self.values = dict(enumerate(saved))


def check(module: torch.nn.Module, want: Sequence[Shape], got: Sequence[Shape]) -> None:
    """Raises an error if a second forward pass saved other things than the first."""
    if want != got:
        raise Error(
            f"{type(module).__name__} saved {len(want)} tensors and other ones when it was run again, so it cannot be recomputed; "
            "it may depend on something besides its arguments and PyTorch's random numbers: give keep=[its name] to attach()"
        )


INPUT = object()  # stands for what a cheap module was given


class Small:
    """One call of a norm or an activation: a function of one tensor, without random numbers. If
    there is a recipe for its input, the input is not held, and the call is of its kind. The module is not held: if it
    keeps its output, that leads here, which the collector does not see."""

    __slots__ = ("module", "kind", "numbers", "holder", "least", "x", "held", "before", "grad", "around", "mode", "weights", "dropped", "last", "values", "y", "uses", "version")

    def __init__(self, module: torch.nn.Module, x: torch.Tensor, holder: Holder, least: int, before: Optional[Recipe] = None, numbers: Dict[str, Any] = {}) -> None:
        self.module, self.numbers, self.holder, self.before = weakref.ref(module), numbers, holder, before
        self.kind = before.kind if before is not None else type(module).__name__
        self.least = least  # smaller storages stay: statistics, scales
        self.x: Optional[torch.Tensor] = x  # while the forward pass runs
        self.held: Any = None
        self.grad = x.requires_grad
        self.around, self.mode = Surroundings(), mode_of(module)[1:]
        self.weights = [(p, version_of(p)) for p in module._parameters.values() if p is not None]
        self.dropped: List[int] = []  # which of the tensors that the pass saves
        self.last = 0  # how many it saves
        self.values: Dict[int, torch.Tensor] = {}
        self.y: Optional[torch.Tensor] = None
        self.uses = 0  # of its result, that are to come
        self.version = 0  # of its result

    def pack(self, t: torch.Tensor) -> Any:
        i = self.last
        self.last += 1
        if t is self.x and self.before is None:
            return INPUT
        if t.is_leaf and t.requires_grad or not is_dense(t):
            return IN_PLACE.pack(t)
        memory, x = storage_of(t), self.x
        if x is not None and self.before is None and memory._cdata == storage_of(x)._cdata and version_of(t) == version_of(x):
            return View(t)
        if memory.nbytes() < self.least:
            return IN_PLACE.pack(t)
        self.dropped.append(i)
        return i

    def unpack(self, h: Any) -> torch.Tensor:
        if type(h) is int:
            t = self.values.pop(h, None)
            if t is None:
                timed = self.holder.timed if type(self.holder) is Lean else None
                self.run() if timed is None else timed(self.kind, self.run)
                t = self.values.pop(h)
                self.used(0)
            return t
        if h is INPUT:
            x = self.input()
            return x if x.is_leaf else x.detach()
        if type(h) is View:
            return h.of(self.input())
        return IN_PLACE.unpack(h)

    def hold(self) -> None:
        """Ends the forward pass: from now on the input is held like what autograd saves."""
        if self.x is not None:
            self.held, self.x = self.holder.pack(self.x) if self.before is None else None, None

    def input(self) -> torch.Tensor:
        if self.x is None and self.before is not None:
            return self.before.value()
        return self.x if self.x is not None else self.holder.unpack(self.held)

    def output(self) -> torch.Tensor:
        if self.y is None:
            self.run()
        assert self.y is not None
        return self.y

    def used(self, n: int = 1) -> None:
        """Notes that the result was used, and frees it if it was for the last time: autograd would do so."""
        self.uses -= n
        if self.uses <= 0:
            self.y = None

    def run(self) -> None:
        check_versions(self.weights)
        x, module = self.input().detach(), self.module()
        if module is None:
            raise Error(AFTER_STEP)
        with self.around.again(), Numbers(module, self.numbers), modes_again([(module, *self.mode)]), _beside(module) if overwrites(module) else AS_IT_IS:
            if not self.dropped:
                state.again += 1
                try:
                    with torch.no_grad(), Uncounted(module):
                        self.y = module.forward(x)
                finally:
                    state.again -= 1
                return
            x.requires_grad_(self.grad)
            saved, y = collect(module.forward, module, (x,), {}, -1)
        check(module, [(x.shape, x.dtype)] * self.last, [(x.shape, x.dtype)] * len(saved))
        self.values = {i: saved[i] for i in self.dropped}
        self.y = y.detach()


def overwrites(module: torch.nn.Module) -> bool:
    """Reports whether a cheap module writes its result over its input, and could do otherwise."""
    return type(module) is torch.nn.ReLU and module.inplace


# Modules of which autograd saves no input, as recorded steps found: results, as of a sigmoid, or casts.
by_result: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def _beside(module: Any) -> Any:
    """Lets a module that writes over its input write its result beside it for a while."""
    module.inplace = False
    try:
        yield
    finally:
        module.inplace = True


def _gelu(node: Any) -> torch.Tensor:
    return torch.nn.functional.gelu(node._saved_self.detach(), approximate=node._saved_approximate)


def _silu(node: Any) -> torch.Tensor:
    return torch.nn.functional.silu(node._saved_self.detach())


def _mul(node: Any) -> torch.Tensor:
    return torch.mul(node._saved_self.detach(), node._saved_other.detach())


# How to repeat an operator from what autograd saved for it.
_repeat: Dict[str, Callable[[Any], torch.Tensor]] = {"GeluBackward0": _gelu, "SiluBackward0": _silu, "MulBackward0": _mul}
# These, and operators that are repeated from what others made.
_known = {*_repeat, "NativeDropoutBackward0", "ToCopyBackward0"}


def _small_of(make: Any) -> Optional[Small]:
    """Returns the call whose result a maker needs, if any."""
    if isinstance(make, functools.partial):
        return next((s for s in map(_small_of, make.args) if s is not None), None)
    owner = getattr(make, "__self__", None)
    return owner if type(owner) is Small else None


def _factors(make: Any, made: Made) -> List[Small]:
    """Returns the calls whose results a maker multiplies: it asks autograd for them, as the node of the product does."""
    if not isinstance(make, functools.partial):
        return []
    if make.func is _mul:
        return [small for f, _ in make.args[0].next_functions for small in [made.get(f)] if small is not None]
    return [small for arg in make.args for small in _factors(arg, made)]


def nodes_of(make: Any) -> List[Any]:
    """Returns the nodes that a maker asks for what autograd saved."""
    if isinstance(make, functools.partial):
        return [node for arg in make.args for node in nodes_of(arg)]
    return [make] if hasattr(make, "next_functions") else []


def made_by(out: Any) -> Iterator[Any]:
    """Yields the nodes that made what a call returns, and that may be repeated."""
    for x in _pytree.tree_flatten(out)[0]:
        if isinstance(x, torch.Tensor):
            node = (x._base if x._is_view() else x).grad_fn
            if node is not None and node.name() in _known:
                yield node


class Recipe:
    """How to make a tensor again: the output of an operator, and which view of it."""

    __slots__ = ("kind", "make", "small", "base", "view")

    def __init__(self, kind: str, make: Callable[[], torch.Tensor], base: torch.Tensor, t: torch.Tensor) -> None:
        self.kind, self.make = kind, make
        self.small = _small_of(make)
        # A second result has the strides that an operator gives it; those of the first must be them.
        self.base = (base.dtype, base.size(), base.stride(), base.storage_offset())
        self.view = View(t)

    def value(self) -> torch.Tensor:
        with torch.no_grad():
            made = self.make()
        if (made.dtype, made.size(), made.stride(), made.storage_offset()) != self.base:
            raise Error("an operator gave another shape when it was repeated; give recompute=False to Runtime()")
        return self.view.of(made)


# What the kind of an operator ends with whose result was written over: by itself, or by others without a history.
WRITTEN = " in place"


class Refused(Dict[str, str]):
    """Kinds of cheap tensors that are kept, and why; and those that were tried and made the same bits."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: Set[str] = set()


class Keeps:
    """The kinds of cheap tensors that a block keeps under a plan."""

    __slots__ = ("refused", "kept")

    def __init__(self, refused: Refused, kept: Container[str]) -> None:
        self.refused, self.kept = refused, kept

    def __contains__(self, kind: object) -> bool:
        return kind in self.refused or kind in self.kept or str(kind).endswith(WRITTEN) and kind not in self.refused.tried


# Marks nodes that made results of calls that are recomputed as a whole: to repeat them would recompute the call too early.
RECOMPUTED = "stowage recomputes"

# What is needed to make a tensor again: its kind, and a function that does it.
Maker = Tuple[str, Callable[[], torch.Tensor]]


def _after(name: str, kind: str) -> str:
    return f"{name} of {kind}" if kind.split(" of ")[-1] in _repeat else kind


# The norms and activations of a block, by the nodes that made their outputs. None has those that are kept.
Made = Dict[Any, Optional[Small]]


def maker(node: Any, made: Made, depth: int = 0) -> Optional[Maker]:
    """Returns how to make the output of an operator again: of a norm or activation, of an
    operator that can be repeated, or of dropout after these. It returns None if it cannot be.
    What needs a norm or activation first is of its kind."""
    if node in made:
        small = made[node]
        return None if small is None else (small.kind, small.output)
    if RECOMPUTED in node.metadata:
        return None
    name = node.name()
    if name == "MulBackward0":
        if len(node.next_functions) != 2 or any(f is None for f, _ in node.next_functions):
            return None  # autograd saved one factor alone
    elif name == "NativeDropoutBackward0":
        before = node.next_functions[0][0]
        source = maker(before, made, depth + 1) if before is not None and depth < 2 else None
        return None if source is None else (_after(name, source[0]), functools.partial(_dropout, node, source[1]))
    elif name not in _repeat:
        return None
    return name, functools.partial(_repeat[name], node)


def _dropout(node: Any, source: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Repeats dropout with the mask of the first time. The backward pass has the same formula."""
    p, x = node._saved_p, source()
    # Not every version of PyTorch shows whether it trained. The bits are compared in any case.
    scale = 1.0 if getattr(node, "_saved_train", True) is False else 0.0 if p == 1 else 1.0 / (1.0 - p)
    out: torch.Tensor = torch.ops.aten.native_dropout_backward(x, node._saved_result1, scale)
    return out


def _cast(node: Any, base: torch.Tensor, made: Made) -> Optional[Maker]:
    """Returns how to cast again: the output of an operator, or a parameter."""
    before, dtype = node.next_functions[0][0], base.dtype
    if before is None:
        return None
    weight = getattr(before, "variable", None)  # of a node that adds to a gradient
    if weight is not None:
        if type(weight) is not torch.nn.Parameter or weight.device != base.device or weight.size() != base.size():
            return None
        held = Kept(weight, None)
        return node.name(), lambda: IN_PLACE.unpack(held).detach().to(dtype)
    source = maker(before, made)
    return None if source is None else (_after(node.name(), source[0]), functools.partial(_to, source[1], dtype))


def _to(source: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return source().to(dtype)


def recipe(t: torch.Tensor, made: Made, refused: Container[str] = ()) -> Optional[Recipe]:
    """Returns how a tensor can be made again, or None. Kinds that were tried and made other
    bits are refused."""
    base = t._base if t._is_view() else t
    node = base.grad_fn if base is not None else None
    if base is None or node is None or node not in made and node.name() not in _known:  # most tensors: this is asked for each
        return None
    if type(t) is not torch.Tensor or not is_dense(t) or type(base) is not torch.Tensor:
        return None
    found, small = maker(node, made), made.get(node)
    if small is not None and version_of(base) != small.version:
        return None  # it was written since, without a history
    if found is None and node.name() == "ToCopyBackward0":
        found = _cast(node, base, made)
    if found is not None and small is None and version_of(base) != 0:
        found = found[0] + WRITTEN, found[1]
    if found is None or found[0] in refused or storage_of(base).nbytes() != base.numel() * base.element_size():
        return None
    return Recipe(*found, base, t)


def source(module: torch.nn.Module, x: torch.Tensor, made: Made, refused: Container[str] = ()) -> Optional[Recipe]:
    """Returns how to make the input of a cheap module again that writes over it or does not save it, if it is
    one and that is possible: after a norm, for example."""
    if overwrites(module):
        return recipe(x, made, refused) if not x._is_view() else None
    return recipe(x, made, refused) if module in by_result else None


class Lean:
    """One call of a block whose cheap parts are dropped."""

    __slots__ = ("holder", "made", "least", "refused", "timed", "__weakref__")

    def __init__(self, holder: Holder, least: int, refused: Container[str] = (), timed: Optional[Callable[[str, Callable[[], Any]], Any]] = None) -> None:
        self.holder, self.least, self.refused, self.timed = holder, least, refused, timed
        self.made: Made = {}

    def pack(self, t: torch.Tensor) -> Any:
        if t.numel() * t.element_size() >= self.least:
            r = recipe(t, self.made, self.refused)
            if r is not None:
                if r.small is not None:
                    r.small.uses += 1
                for small in _factors(r.make, self.made):
                    small.uses += 1
                return r
        return self.holder.pack(t)

    def close(self) -> None:
        """Ends the step. What takes times leads to modules."""
        self.timed = None

    def unpack(self, h: Any) -> torch.Tensor:
        if type(h) is not Recipe:
            return self.holder.unpack(h)
        t: torch.Tensor = h.value() if self.timed is None else self.timed(h.kind, h.value)
        if h.small is not None:
            h.small.used()
        return t

    def call(self, module: torch.nn.Module, forward: Callable[..., Any], x: torch.Tensor) -> Any:
        """Runs a cheap module inside of the block."""
        before = source(module, x, self.made, self.refused)
        if before is None and overwrites(module):
            return forward(x)
        after_kept = before is None and self.made.get(x.grad_fn, module) is None and module in by_result  # it is of that kind, too
        numbers = known(module)
        if after_kept or before is None and type(module).__name__ in self.refused or numbers is None:
            memory = storage_of(x)._cdata
            with hooks(lambda t: (self if storage_of(t)._cdata == memory else self.holder).pack(t), self.unpack):  # its operators are kept, too
                y = forward(x)
            if type(y) is torch.Tensor and y.grad_fn is not None:
                self.made[y.grad_fn] = None
            return y
        if before is not None and before.small is not None:
            before.small.uses += 1  # whenever this one runs
        small, version = Small(module, x, self, self.least, before, numbers), version_of(x)
        with hooks(small.pack, small.unpack):
            y = forward(x)
        if version_of(x) != version and before is None:
            small.x = None  # which leads to itself now
            raise Error(f"{type(module).__name__} writes to its input and did not when its block was recorded; give keep=[the name of the block] to attach()")
        small.hold()
        if type(y) is torch.Tensor and y.grad_fn is not None and not y._is_view():
            self.made[y.grad_fn], small.version = small, version_of(y)
        return y
