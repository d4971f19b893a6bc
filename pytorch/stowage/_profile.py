"""Recorded steps: what every block saves, how long it takes, and whether it can run again.

The first two steps of a key are recorded. Everything that autograd saves is kept (or
offloaded, if there is too little room), and is counted by block. When the backward pass of
a block begins, its forward pass runs again, is timed, and must make the very bits that were
kept; so must every cheap part. What does not is never recomputed.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch.utils import _pytree

from . import _again
from ._again import Made, Recipe, Refused, Small, cast_weight, collect, hooks, made_by, nodes_of, recipe, state
from ._before import Before
from ._bits import equal, near, same, seed
from ._cheap import Recorded, buffers_of
from ._clock import Clock
from ._compiled import is_compiled, kind
from ._contents import Contents
from ._entry import MADE_BY, Entry
from ._errors import Error
from ._hooks import Hooks, Saved
from ._inputs import IN_PLACE, Holder, Inputs
from ._record import Handle, Kept, Weak, is_dense, is_held, storage_of, version_of
from ._smaller import OutOfMemory, Smaller, compare
from ._sparing import check_sparingly
from ._step import Ticket, first_made, in_backward
from ._surroundings import Draws, Mode, Random, Surroundings, mode_of, modes_again, named_generators
from ._units import Attributes, Buffers, Places, helpers, means, modules, remember


class Unit:
    """A block of a model, and what is known of it."""

    def __init__(self, name: str, module: torch.nn.Module, parent: Optional[Unit]) -> None:
        self.name, self.module, self.parent = name, module, parent
        self.kind = kind(module)  # units of a kind speak for each other
        self.compiled = is_compiled(module)
        self.smaller: Dict[float, Callable[..., Any]] = {}  # what it is compiled to with a budget
        self.parts: List[Unit] = []
        if parent is not None:
            parent.parts.append(self)
        # Whether a second forward pass, or only its cheap parts, made the same bits: None
        # until it was tried.
        self.whole: Optional[bool] = None
        self.lean: Optional[bool] = None
        self.why = ""  # it cannot be recomputed
        self.left_alone = False  # something else recomputes it
        self.retained = False  # a backward pass left what it saves: offloaded, it would come back and stay
        self.not_cheap: Set[torch.nn.Module] = set()  # modules inside that look cheap
        self.changes = 0  # calls that changed attributes; the first may fill a cache
        self.sets: Places = {}  # where its calls put tensors, which stay those of the first pass
        self.counts: Places = {}  # numbers and containers that its calls change in objects of its modules
        self._before: Optional[Before] = None

    def state(self) -> Before:
        """Returns the data that its modules have now. Most calls find what the last one found."""
        inside = modules(self.module)
        before = self._before
        if before is None or not before.same(inside):
            before = Before(inside, (), list(self.sets.values()), list(self.counts.values()))
            self._before = None if before.holds else before
        return before


class Call:
    """One call of a unit in a recorded step."""

    def __init__(self, profile: Profile, unit: Unit, parent: Optional[Call], number: int) -> None:
        self.profile, self.unit, self.parent, self.number = profile, unit, parent, number
        self.entries: List[Entry] = []
        self.all: List[Tuple[Call, int]] = []  # with those of calls inside
        self.smalls: List[Small] = []
        self.made: Made = {}
        self.small: Optional[Small] = None  # the cheap module that is running
        self.results: List[Tuple[int, int, str]] = []  # what cheap modules return: storages, their bytes, and the kinds of these
        self.held: Dict[int, Tuple[int, Set[str]]] = {}  # storages that cheap modules need as inputs: their bytes, and the kinds of these
        self.fixed = 0  # bytes that are never moved, of which the library is told as a reservation
        self.ticket: Optional[int] = None  # of that
        self.inputs: Dict[int, int] = {}  # bytes of the arguments, by storage
        self.again: Any = None
        self.around: Any = None
        self.caches = False  # autocast is on and keeps what it cast
        self.random: Optional[Random] = None
        self.means: Dict[int, Buffers] = {}  # of norms that read them
        self.modes: List[Mode] = []
        self.weights: List[Tuple[torch.Tensor, int]] = []  # and their versions
        self.buffers: List[Tuple[int, int]] = []  # their numbers and versions
        self.before: Optional[Before] = None  # what modules and arguments have when the forward pass ends
        self.given: List[Tuple[weakref.ref[torch.Tensor], int]] = []  # arguments, and their versions
        # The settings of compilers belong to a thread in some versions of PyTorch, and a backward
        # pass on a GPU has its own.
        self.context = contextvars.copy_context() if unit.compiled else None
        # Stamps of both ends of the forward pass, and of the beginning of the backward pass
        # before and after the second forward pass was tried.
        self.began = self.ended = self.loaded = self.resumed = -1
        self.was_loaded = self.was_checked = False

    def pack(self, t: torch.Tensor) -> Saved:
        p = self.profile
        saved = Saved(p.holder.pack(t))
        entry = Entry(saved)
        kept = type(saved.held) is Kept
        if is_dense(t) and t.device == p.device:
            memory = storage_of(t)
            entry.storage, entry.bytes = p.number(memory), memory.nbytes()
            small = self.small
            if entry.storage in p.weights or t.is_leaf and t.requires_grad:
                entry.bytes = 0
            elif small is not None and (small.before is not None or small.x is None or storage_of(small.x)._cdata != entry.storage):
                if entry.bytes >= p.least:
                    entry.small, entry.place, entry.kind, entry.sources = small, small.last, small.kind, p.sources(small.before)
                    small.dropped.append(small.last)
            elif entry.bytes >= p.least and not self.unit.compiled:  # the input of a cheap module, too, is dropped like what others save
                entry.recipe = recipe(t, self.made, p.refused)
                if entry.recipe is None and self.parent is not None:
                    entry.recipe = recipe(t, self.made_around(), p.refused)
                    entry.outer = entry.recipe is not None
                entry.kind = entry.recipe.kind if entry.recipe is not None else ""
                around = recipe(t, self.made_around(), p.refused) if self.parent is not None else entry.recipe
                entry.around = around.kind if around is not None else ""
                entry.sources = p.sources(entry.recipe)
                entry.cached = self.caches and cast_weight(t) is not None
            elif entry.bytes < p.least:
                entry.cached = self.caches and cast_weight(t) is not None
        if self.small is not None:
            self.small.last += 1
        i = len(self.entries)
        self.entries.append(entry)
        call: Optional[Call] = self
        while call is not None:
            call.all.append((self, i))
            call = call.parent
        p.saved(self, entry)
        if kept and entry.bytes >= p.least and entry.storage not in p.fixed:
            if is_held(t):
                p.fixed[entry.storage] = entry.bytes
                self.fixed += entry.bytes
            else:
                p.untold[entry.storage] = entry.bytes
        return saved

    def unpack(self, saved: Saved) -> torch.Tensor:
        self.profile.load(self)
        saved.used |= not self.profile.step.quiet  # and not only read to make something again
        return self.profile.holder.unpack(saved.held)

    def note_retained(self) -> None:
        """Notes whether a backward pass left what it used: autograd frees it at once unless the graph is retained."""
        self.unit.retained |= any(saved is not None and saved.used for saved in (e.saved() for e in self.entries))

    def value(self, i: int) -> Optional[torch.Tensor]:
        """Returns what was saved, or None if autograd is done with it."""
        saved = self.entries[i].saved()
        return None if saved is None else self.profile.holder.unpack(saved.held)

    def made_around(self) -> Made:
        """Returns the norms and activations of this call and of those around it."""
        return {**(self.parent.made_around() if self.parent is not None else {}), **self.made}

    def forget_cheap(self) -> None:
        """Forgets what cheap modules made again, here and around."""
        for small in self.smalls:
            small.y, small.values = None, {}
        if self.parent is not None:
            self.parent.forget_cheap()

    def forget(self) -> None:
        """Lets go of what a second pass would need."""
        self.again = self.around = self.random = self.context = self.before = None
        self.modes, self.weights, self.means = [], [], {}
        self.smalls, self.made = [], {}
        for e in self.entries:
            e.recipe, e.small = (True if x is not None else None for x in (e.recipe, e.small))  # type: ignore[assignment]


def fits(need: int, room: int) -> bool:
    """Reports whether there is room to try a second pass, which makes again what was saved and needs some more."""
    return 5 * need // 4 <= room


class Profile:
    """What is recorded of one step."""

    def __init__(self, device: torch.device, step: Any, weights: Set[int], least: int, budget: Any, refused: Refused, agreed: Optional[Set[Tuple[str, int, str]]] = None, budgets: Sequence[float] = (), exact: bool = True, enough: float = 1.0) -> None:
        self.device, self.step, self.weights, self.least, self.refused = device, step, weights, max(least, 1), refused
        # What is tried: calls for which there is room, or exactly those on which ranks agreed.
        self.agreed = agreed
        self.rooms: Dict[Tuple[str, int], Tuple[int, int, int]] = {}  # by call: the bytes it needs, the room there was, and the bytes that had to come back
        # Compiled blocks are compiled again with these budgets, until they drop enough, a share of what they save. Other
        # bits are refused if exact.
        self.budgets, self.exact, self.enough = budgets, exact, enough
        self.smaller: Dict[float, Dict[Call, Smaller]] = {b: {} for b in budgets}
        self.not_smaller: Dict[Tuple[type, float], str] = {}  # by kind and budget: why not
        self.holder: Holder = step
        # What is tried needs room now, and its memory is not that of later steps.
        self.room, self.pause, self.resume = budget.room, budget.pause, budget.resume
        self.budget = budget
        self.clock = Clock(device)
        self.stack: List[Call] = []
        self.calls: List[Call] = []
        self.made: List[Hooks] = []
        self.last: Optional[Call] = None  # whose backward pass began
        self.backward = -1  # and in which pass
        self.casts_stay = False  # autocast is on in backward passes, and keeps what it cast
        self.rewritten: Set[Unit] = set()  # whose buffers were written between the passes of a call
        self.count: Dict[Unit, int] = {}
        self.ops: List[Tuple[str, Any, int]] = []  # what happened, with the last stamp
        self.marks: List[int] = []  # by op: how often the peak was read before
        self.needs: List[int] = []  # what was held at most before each reading, with everything that was saved
        self.held_then: Dict[int, int] = {}  # the same at each load, by op
        self.again: Dict[Call, Tuple[int, int]] = {}  # the most that a second pass held, and what it left
        self.holding: Dict[Call, List[Tuple[int, int]]] = {}  # the same when it saves each tensor
        self.dropping: Dict[Call, int] = {}  # the most that a pass holds that keeps nothing
        self.held_before: Dict[Call, int] = {}  # what was held when a call began, as in needs
        self.now = self.clock.stamp()
        # Stamps at both ends of second passes.
        self.lean_times: Dict[Call, Tuple[int, int]] = {}
        self.whole_times: Dict[Call, Tuple[int, int]] = {}
        self.saves: Dict[Call, List[int]] = {}  # stamps of a second pass: where it begins, and when it saves each tensor
        self.kinds: Dict[Call, List[Tuple[str, int]]] = {}  # stamps at the end of each cheap tensor, with its kind
        self.first: Dict[int, Optional[Call]] = {}  # who saved a storage first
        self.bytes: Dict[int, int] = {}
        self.little: Dict[int, Optional[Call]] = {}  # the same of storages that are too small to be moved
        self.shared: Set[int] = set()
        self.fixed: Dict[int, int] = {}  # bytes that are never moved: cast weights
        self.untold: Dict[int, int] = {}  # bytes that the library does not count in this step
        self.returned: Set[int] = set()
        self.numbered: Dict[int, Weak] = {}

    def close(self) -> None:
        """Forgets tensors, and keeps what was counted."""
        self.needs = self.budget.needs()
        self.stack, self.numbered, self.last = [], {}, None
        while self.made:
            self.made.pop().close()
        self.holder, self.step = IN_PLACE, None
        for call in self.calls:
            call.forget()

    def hooks(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Any:
        """Returns a context of hooks that are closed with the profile."""
        made = Hooks(pack, unpack)
        self.made.append(made)
        return hooks(made.pack, made.unpack)

    def number(self, memory: Any) -> int:
        """Returns the number of a storage. No other one of this step has it: what is offloaded is freed, and
        without a reference the next storage might be where it was."""
        s: int = memory._cdata
        if s not in self.numbered:
            self.numbered[s] = Weak(memory)
        return s

    def largest(self) -> int:
        """Returns the most bytes that one call saves, with those that it saves twice counted twice."""
        return max((sum(c.entries[i].bytes for c, i in call.all) for call in self.calls), default=0)

    def in_compiled(self) -> int:
        """Returns the bytes that compiled blocks save beside what they are given."""
        given = {s for call in self.calls for s in call.inputs}
        return sum(self.bytes[s] for s, call in self.first.items() if call is not None and call.unit.compiled and s not in given)

    def most_outside(self) -> int:
        """Returns the most bytes that are saved outside of units at once."""
        now = most = 0
        for kind, what, _ in self.ops:
            if kind in ("take", "give"):
                now += self.bytes[what] if kind == "take" else -self.bytes[what]
                most = max(most, now)
        return most

    # Forward passes

    def forward(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call of a unit and records it."""
        parent = self.stack[-1] if self.stack else None
        call = Call(self, unit, parent, self.count.get(unit, 0))
        self.count[unit] = call.number + 1
        given = _pytree.tree_flatten((args, kwargs))[0]
        tensors = [x for x in given if isinstance(x, torch.Tensor) and is_dense(x) and x.device == self.device]
        call.inputs = {self.number(storage_of(x)): storage_of(x).nbytes() for x in tensors if not (x.is_leaf and x.requires_grad)}
        versions = [version_of(x) for x in tensors]
        call.again = (forward, Inputs(self.holder, args, kwargs))
        call.around, call.random = Surroundings(), Random(self.device)
        call.caches = call.around.caches()
        inside, objects = list(modules(unit.module)), [x for x in given if hasattr(x, "__dict__") and not isinstance(x, (torch.Tensor, torch.nn.Module, type))]
        data, contents = Before(inside, objects), Contents(inside if unit.whole is None else ())
        draws, call.means = Draws([*inside, *given, *data.generators, *named_generators(inside)]), means(data.readers)
        buffers = buffers_of(unit.module)
        attributes, arguments, counts = Attributes(inside), Attributes(objects), [len(x.__dict__) for x in objects]
        beside = [(x, Attributes([x])) for x in helpers(inside)]
        self.note("begin", call, self.step.mark())
        self.held_before[call] = self.budget.held_beyond()
        call.began = self.now = self.clock.stamp()
        self.stack.append(call)
        lean, state.lean = state.lean, Recorded(call)  # type: ignore[assignment]
        try:
            with self.hooks(call.pack, call.unpack):
                out = forward(*args, **kwargs)
        finally:
            state.lean = lean
            self.stack.pop()
            call.made = {}
        call.ended = self.now = self.clock.stamp()
        why = ""
        drawn, written = draws.drawn(), next(filter(None, (of.written() for of in (attributes, *(of for _, of in beside)))), "")
        if [version_of(x) for x in tensors] != versions or arguments.changed() or arguments.written() or arguments.replaced() or [len(x.__dict__) for x in objects] != counts:
            why = "it writes to its input"
        elif drawn:
            why = f"it draws from {drawn}"
        elif written:
            why = f"it writes to its attribute {written!r}"
        elif not set(buffers) <= set(buffers_of(unit.module)):  # one that a call makes for those that follow is none that it changes
            why = "it changes its buffers"
        else:
            why = contents.written()
        name = attributes.changed()
        unit.changes += bool(name)
        if unit.changes > 1 and name:
            why = why or f"it changes its attribute {name!r} at every call"
        if why:
            unit.whole, unit.why = False, why
        remember(unit.sets, attributes.replaced())
        for x, of in beside:
            remember(unit.sets, of.replaced(), x)
            remember(unit.counts, of.counted(), x)
        call.modes, call.buffers, call.before = list(map(mode_of, inside)), buffers_of(unit.module), Before(inside, objects, list(unit.sets.values()))
        call.given = [(weakref.ref(x), version) for x, version in zip(tensors, versions)]
        call.weights = [(p, version_of(p)) for m in inside for p in m._parameters.values() if p is not None]
        self.calls.append(call)
        for node in made_by(out):
            node.metadata.setdefault(MADE_BY, []).append(weakref.ref(call))
        if call.fixed:
            number = call.ticket = self.step.reserve(call.fixed)
            held, first = Ticket(self.step, [number]), first_made(out)
            if first is not None:
                first.register_hook(lambda _, held=held: None)
        self.note("save", call, self.step.mark())
        return out

    def sources(self, recipe: Optional[Recipe]) -> List[Call]:
        """Returns the calls, of those that are over, that a tensor is made again from what they save."""
        marks = [weak() for node in nodes_of(recipe.make) for weak in node.metadata.get(MADE_BY, ())] if recipe is not None else []
        return [call for call in marks if call is not None and call.profile is self]

    def note(self, kind: str, what: Any, mark: int) -> None:
        self.ops.append((kind, what, self.now))
        self.marks.append(mark)

    def saved(self, call: Call, entry: Entry) -> None:
        s = entry.storage
        if 0 < entry.bytes < self.least:
            if self.little.setdefault(s, call) is not call:
                self.shared.add(s)
        elif entry.bytes and s not in self.first:
            self.first[s], self.bytes[s] = call, entry.bytes
        elif entry.bytes and self.first[s] is not call:
            self.shared.add(s)

    def pack_outside(self, t: torch.Tensor) -> Any:
        """Keeps what is saved outside of units."""
        held = self.holder.pack(t)
        if is_dense(t) and t.device == self.device and not (t.is_leaf and t.requires_grad):
            memory = storage_of(t)
            s, n = self.number(memory), memory.nbytes()
            if self.first.get(s) is not None or self.little.get(s) is not None:
                self.shared.add(s)  # it stays, whatever happens to the block that saved it
            if n < self.least:
                self.little.setdefault(s, None)
            elif s not in self.first and s not in self.weights:
                self.first[s], self.bytes[s] = None, n
                self.note("take", s, self.budget.readings)
                return (held, s)
        return (held, 0)

    def unpack_outside(self, h: Any) -> torch.Tensor:
        held, s = h
        if s and s not in self.returned:
            self.returned.add(s)
            with contextlib.suppress(Error):  # of a runtime that was closed
                self.budget.mark()  # what autocast keeps is there until the backward pass begins
            self.note("give", s, self.budget.readings)
        return self.holder.unpack(held)

    # Backward passes

    def load(self, call: Call) -> None:
        """Notes that the backward pass of a call begins, and tries its second forward pass. What is tried may read what
        a call around it saved, whose backward pass does not begin by that."""
        if call.was_loaded or self.step.quiet:
            return
        if self.last is not None:
            self.last.note_retained()
            # Nothing tells of the last call of a pass, which is as the one before.
            call.unit.retained |= self.last.unit.retained and self.backward == in_backward()
        call.was_loaded, self.last, self.backward = True, call, in_backward()
        self.casts_stay |= call.caches and Surroundings().caches()
        call.loaded = self.now = self.clock.stamp()
        self.step.begin_backward(call.ticket, 0)
        self.pause()
        self.held_then[len(self.ops)] = self.budget.held_beyond()
        self.note("load", call, self.budget.readings)
        self.step.quiet = True
        outer: Optional[Call] = call
        while outer is not None:  # parts are inside of their block
            if not outer.was_checked:
                outer.was_checked = True
                if outer.ended < 0:
                    outer.unit.whole = outer.unit.lean = False
                    outer.unit.why = outer.unit.why or "a backward pass runs inside of its forward pass"
                else:
                    self.check(outer)
                outer.again = outer.around = outer.random = None
                outer.modes, outer.weights = [], []
            outer = outer.parent
        call.forget()
        call.resumed = self.now = self.clock.stamp()
        self.step.quiet = False
        self.resume()

    def check(self, call: Call) -> None:
        unit = call.unit
        inside = list(modules(unit.module))
        attributes, data = Attributes([*inside, *helpers(inside)]), Before(inside, call.again[1].objects)
        draws = Draws([*inside, *data.generators, *named_generators(inside)])
        if any(version_of(p) != version for p, version in call.weights):
            unit.whole, unit.why = False, "a weight of it is written in the backward pass before it could run again"
        if any(x is not None and version_of(x) != version for x, version in ((weak(), version) for weak, version in call.given)):
            unit.whole, unit.why = False, "its input is written before it could run again"
        if call.before is not None and call.before.written():
            unit.whole, unit.why = False, "a tensor that it or an argument has is written before it could run again"
        if buffers_of(unit.module) != call.buffers:
            self.rewritten.add(unit)
        data.__enter__()
        try:
            need, away = self.sizes(call)
            room, name = self.room(), (unit.name, call.number)
            self.rooms[name] = need, room, away
            if self.agreed is not None:
                whole, lean, sparingly = ((*name, what) in self.agreed for what in ("whole", "lean", "sparingly"))
            else:
                lean = fits(need, room - away)  # what is away comes back first
                whole, sparingly = (unit.whole is not False and can for can in (lean, fits(need, room)))
            if not whole and not lean:
                if sparingly:
                    check_sparingly(self, call)
                return  # another call, or a call of an equal block, is tried instead
            # What was offloaded comes back before anything is timed.
            there = [c.value(i) for c, i in call.all]
            inputs = [call.again[1].again(), [small.input() for small in call.smalls]]
            if whole:
                self.check_whole(call, there)
            if lean:
                self.check_lean(call)
            del there, inputs
            weights = sum(p.numel() * p.element_size() for p in unit.module.parameters()) if unit.compiled else 0
            if unit.compiled and unit.whole is not False and fits(need, room - away - 3 * weights):
                assert call.context is not None
                call.context.run(compare, self, call)
        except OutOfMemory:
            pass
        except Exception as e:  # nothing that is tried here may end a step
            unit.whole, unit.lean = False, False
            unit.why = unit.why or f"its second forward pass failed ({type(e).__name__}: {str(e)[:200]})"
        finally:
            data.__exit__()
            attributes.restore()
            draws.set()

    @staticmethod
    def sizes(call: Call) -> Tuple[int, int]:
        """Returns the bytes that a call saves, and those of them that were offloaded and are not back."""
        all: Dict[int, Tuple[int, bool]] = {}
        for e in (c.entries[i] for c, i in call.all):
            saved = e.saved()
            held = None if saved is None else saved.held
            all[e.storage] = e.bytes, type(held) is Handle and held.record.memory is None
        return sum(n for n, _ in all.values()), sum(n for n, away in all.values() if away)

    def repeats(self) -> bool:
        """Reports whether a unit is called again before its backward pass."""
        saved: Set[Unit] = set()
        for kind, what, _ in self.ops:
            if kind == "save":
                if what.unit in saved:
                    return True
                saved.add(what.unit)
            elif kind == "load":
                saved.discard(what.unit)
        return False

    def second(self, call: Call, keep: bool = True, each: Optional[Callable[[torch.Tensor], Any]] = None) -> List[torch.Tensor]:
        forward, inputs = call.again
        args, kwargs = inputs.again()
        now = Random(self.device)
        assert call.random is not None
        call.random.set()
        try:
            with call.around.again(), modes_again(call.modes):
                saved, _ = collect(forward, call.unit.module, args, kwargs, len(call.all) if keep else 0, each=each, then=call.means)
        finally:
            now.set()
        return saved

    def check_whole(self, call: Call, want: List[Optional[torch.Tensor]]) -> None:
        held: List[Tuple[int, int]] = []
        self.holding[call] = held
        got, most, left = self.budget.second_pass(lambda: self.second(call, each=lambda _: held.append(self.budget.pass_now())))
        self.again[call] = most, left
        count, own = len(got), self.own(call)
        others = {i: got[i] for i, mine in enumerate(own) if mine and not seed(got[i]) and not equal(got[i], want[i])} if count == len(own) else {}
        del got
        _, self.dropping[call], _ = self.budget.second_pass(lambda: self.second(call, keep=False))
        # Later passes find memory that the allocator has by now, as this one does.
        self.clock.fill()
        stamps = self.saves[call] = [self.clock.stamp()]
        self.second(call, each=lambda _: stamps.append(self.clock.stamp()))
        self.whole_times[call] = (stamps[0], self.clock.stamp())
        self.judge(call, count, others)

    def own(self, call: Call) -> List[bool]:
        return [c.entries[i].storage not in self.weights for c, i in call.all]  # running means are counted once

    def judge(self, call: Call, count: int, others: Dict[int, torch.Tensor]) -> None:
        """Decides whether a unit can be recomputed, by the number of tensors that a second pass saved and by
        those of them that differ."""
        # Kernels that add in any order differ from run to run, with and without this. Ranks
        # that agree run as many passes as others, whatever comes of them.
        varies = False
        for _ in range(1 if self.agreed is not None else 3 if others else 0):
            again = self.second(call)
            varies = len(again) == count and any(not same(t, again[i]) for i, t in others.items()) and all(near(t, again[i]) for i, t in others.items())
            if varies:
                break
        self.decide(call, count, _again.shapes_of(others.values()), varies)

    @staticmethod
    def decide(call: Call, count: int, others: Sequence[Tuple[torch.Size, torch.dtype]], varies: bool) -> None:
        unit, n = call.unit, len(call.all)
        if count != n:
            unit.whole, unit.why = False, f"its second forward pass saves {count} tensors and the first saved {n}"
        elif others and not varies:
            shape, dtype = others[0]
            unit.whole, unit.why = False, f"its second forward pass makes other values ({len(others)} of {count} tensors, the first is {dtype} {list(shape)})"
        elif unit.whole is None:
            unit.whole = True

    def check_lean(self, call: Call) -> None:
        """Makes the cheap tensors of a call again. A kind that fails or makes other bits is
        refused from the next step on, and this call does not count."""
        cheap = [(i, e) for i, e in enumerate(call.entries) if e.recipe is not None or e.small is not None]
        if not cheap:
            return
        good, got = True, []  # type: bool, List[Optional[torch.Tensor]]
        for _, e in cheap:
            try:
                t, most, left = self.budget.second_pass(e.value)
                got.append(t)
                e.passing = max(most - left, 0)
            except OutOfMemory:
                raise
            except Exception as x:
                got.append(None)
                good = self.refuse(e, f"{type(x).__name__}: {str(x)[:200]}")
        for t, (i, e) in zip(got, cheap):
            if t is not None and not equal(t, call.value(i)):
                good = self.refuse(e, "it makes other bits")
            elif t is not None:
                self.refused.tried.add(e.kind)
        del got
        call.forget_cheap()
        if good:  # all of it can be made, and is timed when there is memory for it
            self.clock.fill()
            kinds = self.kinds[call] = [("", self.clock.stamp())]
            got = []
            for _, e in cheap:
                got.append(e.value())
                kinds.append((e.kind, self.clock.stamp()))
            self.lean_times[call] = (kinds[0][1], kinds[-1][1])
            call.forget_cheap()
            call.unit.lean = True if call.unit.lean is None else call.unit.lean

    def refuse(self, e: Entry, why: str) -> bool:
        """Refuses a kind of cheap tensors. It returns false."""
        self.refused.setdefault(e.kind, why)
        return False
