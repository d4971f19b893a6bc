"""Steps under a budget: recorded ones, and those that follow a plan.

Modules are wrapped only where a plan does something: their forward method is replaced on
the instance. Everything else runs as if the runtime were not there.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import threading
import types
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from . import _units
from ._again import RECOMPUTED, Keeps, Lean, Refused, Whole, hooks, made_by, state
from ._attach import listed
from ._clock import Clock
from ._compiled import in_compiled, with_budget
from ._errors import Error
from ._inputs import IN_PLACE, Holder
from ._measured import KEEP, Cast, Choice
from ._plan import Plan
from ._profile import Profile, Unit
from ._record import is_dense
from ._step import InGroup, Ticket, first_made, in_backward
from ._surroundings import in_checkpoint, innermost


class Wrapped:
    """Takes the place of a module's forward method."""

    __slots__ = ("module", "forward", "run", "attribute", "had")

    def __init__(self, module: torch.nn.Module, run: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        self.module, self.run = module, run
        # A compiled module is called through this attribute, and its forward method is traced.
        self.attribute = "_compiled_call_impl" if getattr(module, "_compiled_call_impl", None) is not None else "forward"
        self.forward = getattr(module, self.attribute)
        self.had = self.attribute in module.__dict__
        module.__dict__.update({self.attribute: self, "__getstate__": self.state, "_replicate_for_data_parallel": self.replica})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.forward, args, kwargs)

    def remove(self) -> None:
        if self.module.__dict__.get(self.attribute) is self:
            self.remove_from(self.module.__dict__)

    def remove_from(self, attributes: Dict[str, Any]) -> None:
        """Makes the attributes of the module, or of a copy, what they are without this."""
        for name in ("__getstate__", "_replicate_for_data_parallel", self.attribute):
            attributes.pop(name, None)
        if self.had:
            attributes[self.attribute] = self.forward

    # A copy of the module is a plain one: copy.copy() and others ask for its state, and nn.DataParallel for replicas.

    def state(self) -> Any:
        of: Any = type(self.module)
        state = of.__getstate__(self.module) if hasattr(of, "__getstate__") else self.module.__dict__  # which every class has since Python 3.11
        if isinstance(state, dict) and state.get(self.attribute) is self:
            state = dict(state)
            self.remove_from(state)
        return state

    def replica(self) -> torch.nn.Module:
        made: torch.nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        self.remove_from(made.__dict__)
        return made

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        """Returns the method of a copy, for classes that copy their attributes themselves."""
        other = memo.get(id(self.module))
        if other is None or self.had:
            return copy.deepcopy(self.forward, memo)
        return types.MethodType(type(other).forward, other)


def check_keep(model: torch.nn.Module, keep: Sequence[str]) -> None:
    """Raises an error if a pattern matches no module."""
    for p in keep:
        if not any(fnmatch.fnmatchcase(name, p) for name, _ in model.named_modules()):
            raise Error(f"keep: {p!r} matches no module; the modules are {listed(model)}")


class Units:
    """The units of the attached models, and their wrappers."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.list: List[Unit] = []
        self._found = 0  # models so far
        self.cheap: List[torch.nn.Module] = []
        self.hidden: Dict[torch.nn.Module, str] = {}  # compiled modules that have blocks inside, and their names
        self._wrapped: Dict[torch.nn.Module, Wrapped] = {}

    def find(self, model: torch.nn.Module, keep: Sequence[str] = ()) -> None:
        check_keep(model, keep)
        self.unwrap()  # a wrapped module does not look compiled
        names = {m: name for name, m in model.named_modules()}
        parents: Dict[torch.nn.Module, Unit] = {}
        known = {u.module for u in self.list}
        named = {m for m, name in names.items() if any(fnmatch.fnmatchcase(name, p) for p in keep)}
        inside = {inner for m in named for inner in m.modules()}
        taken = {u.name for u in self.list}  # ranks know units by their names
        self._found += 1
        self.hidden.update((m, names[m] or type(m).__name__) for m in _units.hidden(model))
        for m in _units.blocks(model):
            if m in known:
                continue
            u = Unit(names[m] if names[m] not in taken else f"{names[m]} of model {self._found}", m, parents.get(m))
            for inner in m.modules():
                parents[inner] = u
            if m in inside or any(inner in named for inner in m.modules()):
                u.whole = u.lean = False
                u.why = "keep= names it, or a part of it"
            self.list.append(u)
            if u.parent is None:
                self.cheap += _units.cheap(m)

    @property
    def is_alone(self) -> bool:
        """Whether there is no block but one with its parts, which is one only if it is called again and again."""
        return sum(u.parent is None for u in self.list) == 1

    def forget(self, model: Optional[torch.nn.Module]) -> None:
        self.unwrap()
        inside = set(model.modules()) if model is not None else set()
        self.list = [u for u in self.list if u.module not in inside]
        self.cheap = [m for m in self.cheap if m not in inside]
        self.hidden = {m: name for m, name in self.hidden.items() if m not in inside}

    def wrap_all(self) -> None:
        self.wrap(self.list, True)

    def wrap(self, units: Iterable[Unit], cheap: bool) -> None:
        """Wraps these units and, if so, cheap modules. Others are as they were."""
        units = list(units)
        want = {u.module: u for u in units}
        if cheap:
            inside = {m for u in units for m in u.module.modules()}
            dear = {m for u in self.list for m in u.not_cheap}
            small = [m for m in self.cheap if m in inside and m not in dear and m not in want]
        else:
            small = []
        for m in [m for m in self._wrapped if m not in want and m not in small]:
            self._wrapped.pop(m).remove()
        for m, u in want.items():
            if m not in self._wrapped:
                self._wrapped[m] = Wrapped(m, self._unit(u))
        for m in small:
            if m not in self._wrapped:
                self._wrapped[m] = Wrapped(m, _small(m))

    def rewrap(self, plans: Iterable[Optional[Plan]]) -> None:
        """Wraps what these plans need. A step that is recorded wraps the rest."""
        units: Dict[Unit, None] = {}
        cheap = False
        for plan in plans:
            if plan is not None:
                cheap = cheap or any(c.lean for c in plan.choices.values())
                # If anything is offloaded, the library is told of the others, too.
                units.update(dict.fromkeys([*plan.saved, *plan.choices] if plan.offloads else plan.choices))
                units.update(dict.fromkeys(u for u in plan.saved if u.parent in plan.choices))
        self.wrap(units, cheap)

    def unwrap(self) -> None:
        self.wrap((), False)

    def _unit(self, u: Unit) -> Callable[[Callable[..., Any], Any, Any], Any]:
        runtime = self._runtime

        def run(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            now = runtime._now
            if now is None or state.again or not torch.is_grad_enabled() or now.thread != threading.get_ident() or in_backward() != -1:
                return forward(*args, **kwargs)  # in a backward pass a checkpoint runs it again
            if type(now) is Following and not state.whole and innermost(True) is not None and in_checkpoint():
                return forward(*args, **kwargs)  # so that it saves as many tensors then
            return now.forward(u, forward, args, kwargs)

        return run


def _small(module: torch.nn.Module) -> Callable[[Callable[..., Any], Any, Any], Any]:
    def run(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        lean = state.lean
        if lean is None or state.again or kwargs or len(args) != 1 or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        x = args[0]
        if type(x) is not torch.Tensor or not x.requires_grad or not is_dense(x) or in_checkpoint(_lean):  # which counts what is saved
            return forward(x)
        return lean.call(module, forward, x)

    return run


class Recording:
    """A step that is recorded, on top of a step that tells the library everything."""

    def __init__(self, step: Any, profile: Profile) -> None:
        self.thread, self.step, self.profile = step.thread, step, profile

    def forward(self, u: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        step = self.step
        if step.on_other_stream():
            return forward(*args, **kwargs)
        if in_checkpoint():  # which counts what is saved, now and when it runs the block again
            u.whole, u.lean, u.left_alone = False, False, True
            u.why = "torch.utils.checkpoint recomputes it"
            return forward(*args, **kwargs)
        if in_compiled():
            u.whole, u.lean, u.left_alone = False, False, True
            u.why = "it is inside of a function that is compiled, whose graph ends there; attach what torch.compile returned, or compile blocks"
            return forward(*args, **kwargs)
        return self.profile.forward(u, forward, args, kwargs)


class Passes:
    """The times of second passes in a step that follows a plan."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._stamps: List[Tuple[Unit, int, int]] = []
        self._cheap: List[Tuple[Unit, str, int, int]] = []
        self._inside = False  # a cheap part is made, perhaps from another one

    def timed(self, u: Unit) -> Callable[[Callable[[], None]], None]:
        def run(second: Callable[[], None]) -> None:
            begin = self._clock.stamp()
            second()
            self._stamps.append((u, begin, self._clock.stamp()))

        return run

    def cheap(self, u: Unit) -> Callable[[str, Callable[[], Any]], Any]:
        def run(kind: str, make: Callable[[], Any]) -> Any:
            if self._inside:
                return make()
            self._inside, begin = True, self._clock.stamp()
            try:
                return make()
            finally:
                self._inside = False
                self._cheap.append((u, kind, begin, self._clock.stamp()))

        return run

    def read(self) -> Tuple[Dict[Unit, int], Dict[Unit, Dict[str, int]], Tuple[float, bool]]:
        """Returns the shortest second pass of each unit, and how long its cheap parts take by kind, in all
        calls, in nanoseconds. It waits for the device, and returns for how many seconds, and whether it was idle, too."""
        behind, seconds = self._clock.behind(), self._clock.read()

        def took(begin: int, end: int) -> int:
            return max(int(1e9 * (seconds[end] - seconds[begin])), 1)

        passes: Dict[Unit, int] = {}
        for u, begin, end in self._stamps:
            passes[u] = min(passes.get(u, took(begin, end)), took(begin, end))
        cheap: Dict[Unit, Dict[str, int]] = {}
        for u, kind, begin, end in self._cheap:
            of = cheap.setdefault(u, {})
            of[kind] = of.get(kind, 0) + took(begin, end)
        return passes, cheap, behind


class Following:
    """A step that follows a plan. The step is None if nothing is offloaded."""

    def __init__(self, plan: Plan, device: torch.device, least: int, step: Any, refused: Optional[Refused] = None, passes: Optional[Passes] = None) -> None:
        self.thread, self.passes = threading.get_ident(), passes
        self.calls: List[weakref.ref[Any]] = []  # which are open
        self.leans = any(c.lean for c in plan.choices.values())
        self.plan, self.device, self.least, self.step, self.refused = plan, device, least, step, Refused() if refused is None else refused

    def forward(self, u: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if u.left_alone or state.whole and (u.parent is None or u in state.whole):
            return forward(*args, **kwargs)  # what it saves is made again with the call around it
        choice = self.plan.choices.get(u, KEEP)
        if self.step is not None:
            return self.told(u, choice, forward, args, kwargs)
        return self.held(u, choice, IN_PLACE, forward, args, kwargs)

    def close(self) -> None:
        """Ends the step, for calls whose backward pass did not run."""
        for weak in self.calls:
            call = weak()
            if call is not None:
                call.close()

    def held(self, u: Unit, choice: Choice, holder: Holder, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit whose tensors a holder keeps, as far as they are kept."""
        if choice.whole:
            return self.whole(u, choice, holder, forward, args, kwargs)
        if choice.budget:
            if choice.budget not in u.smaller:
                u.smaller[choice.budget] = with_budget(forward, choice.budget)
            forward = u.smaller[choice.budget]
        elif choice.lean:
            return self.lean(u, choice, holder, forward, args, kwargs)
        if not choice.offload:
            return self.kept(u, forward, args, kwargs)
        with hooks(holder.pack, holder.unpack):
            return forward(*args, **kwargs)

    def kept(self, u: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit that keeps everything. What happens to its block is not for it."""
        block = KEEP if u.parent is None or u not in self.plan.saved else self.plan.choices.get(u.parent, KEEP)
        if block.whole or not (block.lean or block.offload):
            return forward(*args, **kwargs)
        before, state.lean = state.lean, None
        try:
            with hooks(IN_PLACE.pack, IN_PLACE.unpack):
                return forward(*args, **kwargs)
        finally:
            state.lean = before

    def whole(self, u: Unit, choice: Choice, holder: Holder, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        call = Whole(u.module, forward, args, kwargs, self.device, holder, None if self.passes is None else self.passes.timed(u), choice.first, u.state())
        self.calls.append(weakref.ref(call))
        before, state.lean, state.whole = (state.lean, state.whole), None, (*state.whole, u)
        try:
            with hooks(call.pack, call.unpack):
                out = forward(*args, **kwargs)
        finally:
            state.lean, state.whole = before
        call.end()
        if self.leans:
            for node in made_by(out):
                node.metadata[RECOMPUTED] = True
        return out

    def lean(self, u: Unit, choice: Choice, holder: Holder, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        lean = Lean(holder, self.least, Keeps(self.refused, choice.kept), None if self.passes is None else self.passes.cheap(u))
        self.calls.append(weakref.ref(lean))
        before, state.lean = state.lean, lean
        try:
            with hooks(lean.pack, lean.unpack):
                return forward(*args, **kwargs)
        finally:
            state.lean = before
            lean.made.clear()  # a node must not lead to itself

    def told(self, u: Unit, choice: Choice, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a unit in a step of the library, which is told what the unit keeps."""
        step, plan = self.step, self.plan
        if step.on_other_stream():
            return self.held(u, choice, IN_PLACE, forward, args, kwargs)
        # What a unit keeps is counted before it runs: there must be room for it by then.
        cast = plan.cast.get(u, Cast())
        kept = cast.stays if choice.offload else plan.saved.get(u, 0)
        ticket: Optional[int] = None
        reserved: List[int] = []
        try:
            if kept:
                reserved.append(step.reserve(kept))
                ticket = reserved[0]
            if cast.passes:
                step.passing.append(step.reserve(cast.passes))
                reserved.append(step.passing[-1])
            with InGroup(step if choice.offload else None, "block"):
                out = self.held(u, choice, step if choice.offload else IN_PLACE, forward, args, kwargs)
        except BaseException:
            for n in reserved:
                if n in step.passing:
                    step.passing.remove(n)
                if n in step.reserved:
                    with contextlib.suppress(Error):  # the first exception says more
                        step.unreserve(n)
            raise
        first, again = first_made(out), plan.again.get(u, 0)
        if first is None and ticket is not None:  # there will be no backward pass
            step.unreserve(ticket)
        if first is not None and (ticket is not None or again):

            def begin(_: torch.Tensor, held: Ticket = Ticket(step, reserved)) -> None:
                step.begin_backward(ticket, again)

            first.register_hook(begin)
        return out


_lean = Following.lean.__code__
