"""A budget for the whole process: how much of it is left for saved tensors.

A budget is what PyTorch's allocator and the runtime itself may hold on the device at
their peak. The library knows a limit on saved tensors alone, the saved limit. This file
derives one from the other:

    everything else + min(saved limit, saved tensors) <= budget     at all times of a step

Everything else is weights, gradients, optimiser, temporaries and berths. In a measured
step the allocator's peak is read between every two calls of the library. What exceeds the
bytes that the library counts as saved on the device at that time is everything else. The
bytes of all saved tensors, offloaded ones included, are known as well: where there are
few of them, as at the end of a backward pass, the limit does not matter.

One part of everything else is there when a step begins (the base): it changes with the
optimiser's state and with berths, and is read at every step. The rest (the extra) is
measured twice for every base, and again if the budget was exceeded.

Only measured steps reset the allocator's peak, and steps that begin above the budget.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterable, List, Optional, Protocol, Sequence, Tuple, TypeVar

from ._errors import BudgetError, TooSmall
from ._library import Usage
from ._memory import Memory
from ._report import human

# In the first step of a key, of which nothing is known, saved tensors get at most one part
# in so many of what weights, optimiser and gradients leave, and less if temporaries take
# more than the rest.
FIRST_SHARE = 2

# A limit leaves budget / MARGIN unused, so that a small change between steps needs no
# other plan.
MARGIN = 256

# The library counts storages in multiples of so many bytes.
ALIGN = 256

# So many different bases are remembered for a key.
BASES = 8

# A limit is raised after so many steps under which a higher one would have done: bases may
# take turns, as with gradient accumulation, and every new limit needs a new plan.
PATIENCE = 8


class Limited(Protocol):
    """What a budget needs of the library."""

    def limit(self, bytes: int) -> None:
        """Changes the saved limit."""

    def usage(self) -> Usage:
        """Returns what the library holds."""


# Bytes beyond base and saved tensors, and bytes of all saved tensors, at one time.
Need = Tuple[int, int]

_T = TypeVar("_T")


class Extra:
    """What steps that begin with a base hold beside it and saved tensors."""

    __slots__ = ("base", "needs", "measured")

    def __init__(self, base: int, needs: List[Need]) -> None:
        self.base, self.needs, self.measured = base, needs, 0

    def most(self) -> int:
        return max((bytes for bytes, _ in self.needs), default=0)


def largest(needs: Iterable[Need]) -> List[Need]:
    """Returns the needs that no other need exceeds in both numbers."""
    kept: List[Need] = []
    for need in sorted(needs, reverse=True):
        if not kept or need[1] > kept[-1][1]:
            kept.append(need)
    return kept


def limit_for(size: int, base: int, needs: Sequence[Need]) -> int:
    """Returns what a budget leaves for saved tensors beside a base and these needs. It is
    negative if there is too little memory without them."""
    most = max((saved for _, saved in needs), default=0)
    limit = size - base
    for bytes, saved in needs:
        room = size - base - bytes - size // MARGIN
        if saved > room or 2 * saved >= most:  # where little is saved, the limit does not matter
            limit = min(limit, room)
    return limit


def least_for(base: int, needs: Sequence[Need], saved: int) -> int:
    """Returns the smallest budget that leaves saved tensors what they need at least."""
    least = max([base] + [base + bytes + min(saved, all) for bytes, all in needs])
    return least + least // (MARGIN - 1) + 1


class Known:
    """What is known of the steps under one key."""

    __slots__ = ("extras", "limit", "waited")

    def __init__(self) -> None:
        self.extras: List[Extra] = []  # the last one measured is the last
        self.limit = 0  # the saved limit of the last step
        self.waited = 0  # steps under which a higher limit would have done


class Budget:
    """Keeps the saved limit of a library so that the process keeps to a budget."""

    def __init__(self, size: int, memory: Memory, library: Limited, held: Callable[[], Dict[str, int]], to_come: Callable[[], int]) -> None:
        self.size, self._memory, self._library = size, memory, library
        self._held, self._to_come = held, to_come
        self._keys: Dict[str, Known] = {}
        self._known, self._extra = Known(), Extra(0, [])  # of the step under way
        self._began = 0  # bytes held when it began
        self._most = 0  # bytes of everything else in it
        self._needs: List[Need] = []  # of it, if it is measured
        self._groups: Dict[int, List[int]] = {}  # by storage: its groups and bytes
        self._all = 0  # bytes of those
        self._all_then = 0  # the same after the library's last call
        self._saved = 0  # bytes that the library counted as saved after its last call
        self._saved_least = 0  # the smallest saved limit, if a plan failed
        self._peak = 0  # the allocator's peak when it began
        self._before = 0  # bytes that were held when a second pass began
        self.measuring = False
        self.other = 0  # bytes of everything else at its peak, in the last step
        self.peak = 0  # of the process, as far as it was read
        self.step_peak = 0  # the same in the last step
        self.planned = 0  # the same in steps under a plan
        self.asked = 0  # the limit of saved tensors that a plan was last made for
        self.outside = 0  # peak before the last step that began above the budget

    def exceeded(self) -> Optional[BudgetError]:
        """Returns an error if the budget is exceeded now, before a step."""
        self._began = self._memory.allocated() + self._library.usage().own
        return self._too_small(self._began, 0) if self._began >= self.size else None

    def begin(self, key: str, spare: int = 0, alone: bool = True) -> None:
        """Sets the saved limit of a step, which leaves so many bytes to spare if it can, and
        decides whether to measure it. It raises an error if the budget is exceeded before the
        step and no other rank would wait for this one."""
        self._began = self._memory.allocated() + self._library.usage().own
        self._peak = self._read_peak()
        self.step_peak = 0
        known = self._keys.get(key, Known())
        if self._began >= self.size and alone:
            raise self._too_small(self._began, 0)
        if self._peak > self.size:
            # What came before, an optimiser's temporaries for example, must not hide this step.
            self.outside = self._peak
            self._memory.reset()
            self._peak = self._began
        if not known.extras:
            room = self.size - self._began - self._to_come()
            known.limit = max(room // FIRST_SHARE, 1)
            self._extra = Extra(self._began, [])
        else:
            self._extra = self._find(known)
            known.limit = self._derive(known, known.limit)
        self._known, self._keys[key] = known, known
        self._library.limit(max(known.limit - spare, known.limit // 8, 1))
        self.measuring = self._extra.measured < 2
        self._most, self._needs, self._groups, self._all = self._began, [], {}, 0
        if self.measuring:
            self.after_call()

    def _find(self, known: Known) -> Extra:
        """Returns what is known of steps that begin like this one."""
        near = [x for x in known.extras if abs(x.base - self._began) <= self.size // MARGIN]
        return near[-1] if near else Extra(self._began, known.extras[-1].needs)

    def _derive(self, known: Known, before: int) -> int:
        """Returns the saved limit: the one before if it fits, and leaves little unused or did
        not for long."""
        self.other = self._began + self._extra.most()
        margin = self.size // MARGIN
        limit = self._limit(margin)
        if not before or before > self._limit(0):
            known.waited = 0
            return limit
        known.waited = known.waited + 1 if before < limit - 4 * margin else 0
        if known.waited <= PATIENCE:
            return before
        known.waited = 0
        return limit

    def _limit(self, margin: int) -> int:
        """Returns the highest limit that leaves a margin at all times of a step."""
        limit = self.size
        for bytes, saved in self._extra.needs:
            room = self.size - self._began - bytes - margin
            if saved > room:
                limit = min(limit, room)
        return max(limit, 1)

    def saved(self, id: int, bytes: int) -> None:
        """Notes that a group saves a storage. Only measured steps call it."""
        entry = self._groups.setdefault(id, [0, -(-bytes // ALIGN) * ALIGN])
        if not entry[0]:
            self._all += entry[1]
        entry[0] += 1

    def released(self, ids: Iterable[int]) -> None:
        """Notes that a group is released. Only measured steps call it."""
        for id in ids:
            entry = self._groups.get(id)
            if entry is not None and entry[0]:
                entry[0] -= 1
                if not entry[0]:
                    self._all -= entry[1]

    def before_call(self) -> None:
        """Reads the peak since the last call of the library. Only measured steps call it."""
        other = self._read_peak() - self._saved
        self._most = max(self._most, other)
        self._needs.append((other - self._began, self._all_then))

    def after_call(self) -> None:
        """Begins a new peak, in which the library counts other bytes as saved."""
        usage = self._library.usage()
        self._saved = usage.saved + usage.rows if self._memory.includes_saved else 0
        self._all_then = self._all
        self._memory.reset()
        known = self._known
        if not known.extras:  # a first step adapts as it goes
            limit = max(self.size - self._most - self.size // MARGIN, 1)
            if limit < known.limit:
                known.limit = limit
                self._library.limit(limit)

    def _read_peak(self) -> int:
        usage = self._library.usage()
        peak = self._memory.peak() + usage.own
        whole = peak if self._memory.includes_saved else peak + usage.saved + usage.rows
        self.peak, self.step_peak = max(self.peak, whole), max(self.step_peak, whole)
        return peak

    # Steps whose plan was made outside of the library

    @property
    def measures(self) -> bool:
        """Whether the peak of a step is measured, and not counted."""
        return self._memory.includes_saved

    def room(self) -> int:
        """Returns what is left of the budget now."""
        usage = self._library.usage()
        saved = 0 if self._memory.includes_saved else usage.saved + usage.rows
        return self.size - self._memory.allocated() - saved - usage.own

    @property
    def base(self) -> int:
        """Bytes that were held when the last step began."""
        return self._began

    def held_now(self) -> int:
        """Returns what is held now, between steps."""
        return self._memory.allocated() + self._library.usage().own

    def needs(self) -> List[int]:
        """Returns what a measured step held at most between every two readings, beyond its base
        and as if nothing was offloaded."""
        return [bytes + saved for bytes, saved in self._needs]

    @property
    def readings(self) -> int:
        """How often the peak of a measured step was read so far."""
        return len(self._needs)

    def mark(self) -> int:
        """Reads the peak of a measured step. Returns the number of readings so far."""
        if self.measuring:
            self.before_call()
            self.after_call()
        return len(self._needs)

    def held_beyond(self) -> int:
        """Returns what a measured step holds now, beyond its base and as if nothing was offloaded."""
        return self._memory.allocated() + self._library.usage().own - self._began - self._saved + self._all

    def second_pass(self, run: Callable[[], _T]) -> Tuple[_T, int, int]:
        """Runs a second pass. Returns its result, the most that it held, and what it left."""
        self._read_peak()
        self._memory.reset()
        self._before = self._memory.allocated()
        made = run()
        return (made, *self.pass_now())

    def pass_now(self) -> Tuple[int, int]:
        """Returns the most that a second pass held so far, and what it holds now."""
        return self._memory.peak() - self._before, self._memory.allocated() - self._before

    def pause(self) -> None:
        """Begins work in a step that later steps do not have."""
        if self.measuring:
            self.before_call()

    def resume(self) -> None:
        """Ends that work: what it took is no need of the step."""
        self._read_peak()
        if self.measuring:
            self.after_call()

    def limit_of(self, key: str) -> int:
        """Returns what saved tensors get in steps under a key that were measured. It is negative
        if there is too little memory without them."""
        return limit_for(self.size, self._began, self._keys[key].extras[-1].needs)

    def expect(self, key: str, limit: int) -> None:
        """Begins steps under a key with a saved limit. They are measured as others are."""
        known = self._keys.setdefault(key, Known())
        if not known.extras:
            known.extras = [Extra(0, [(self.size - self._began - max(limit, 1) - self.size // MARGIN, self.size)])]

    def learnt(self, key: str) -> int:
        """Returns the saved limit of the next step under a key, from steps that were measured. It is no
        more than they saved: of more nothing is known."""
        known = self._keys[key]
        return min(known.limit, max((saved for _, saved in known.extras[-1].needs), default=0)) if known.extras else 0

    def watch(self, exactly: bool, alone: bool = True) -> None:
        """Begins a step of which the library is not told. It raises an error if the budget is
        exceeded before the step and no other rank would wait for this one."""
        self._began = self._memory.allocated() + self._library.usage().own
        self.step_peak = 0
        if self._began >= self.size and alone:
            raise self._too_small(self._began, 0)
        before = self._read_peak()
        if exactly or before > self.size:
            self.outside = before if before > self.size else self.outside
            self._memory.reset()
        self.step_peak = 0

    def watched(self, saved: Optional[int]) -> int:
        """Returns the peak of the step that ends. Saved is what it was expected to save, for
        memory that does not count saved tensors."""
        before = self.peak
        self._read_peak()
        if saved is not None and not self._memory.includes_saved:
            # Gradients take the place of saved tensors one by one.
            self.step_peak = max(self.step_peak, self._began + saved)
            self.peak = max(before, self.step_peak)
        if self.step_peak > self.size:
            self._memory.reset()  # what comes after the step is not blamed for it
        return self.step_peak

    def end(self) -> None:
        """Learns from a step, before the library ends it and makes a plan from it."""
        if not self.measuring:
            peak = self._read_peak()
            if peak > self.size and peak > self._peak:
                self._extra.measured = 0  # something changed: measure the next steps
            return
        self.before_call()
        known, extra = self._known, self._extra
        before = 0 if not known.extras else known.limit
        extra.base, extra.needs, extra.measured = self._began, largest(self._needs), extra.measured + 1
        known.extras = ([x for x in known.extras if x is not extra] + [extra])[-BASES:]
        known.limit = self._derive(known, 0 if extra.measured == 1 else before)
        self._library.limit(known.limit)

    def check(self) -> None:
        """Raises an error if a measured step held more than the budget beside saved tensors."""
        if self.measuring and self.other > self.size:
            raise self._too_small(self.other, 0)

    def explain(self, e: TooSmall) -> BudgetError:
        """Returns the error for a saved limit that no plan keeps to, in terms of the budget."""
        self._saved_least = e.least
        error, lacks = self._too_small(self.other, e.least), e.least - self.asked
        if not self.asked or error.least > self.size:
            return error
        # What was measured would fit; a plan needs more than that.
        held = dict(error.held)
        held["second forward passes, copies and others"] = max(self.size + max(lacks, 1) - sum(held.values()), 0)
        return self._error(self.size + max(lacks, 1), held)

    def outgrown(self, peak: int) -> BudgetError:
        """Returns the error for a budget that a step exceeded, by what the step held at its peak."""
        return self._too_small(peak, 0)

    def least(self) -> Optional[int]:
        """Returns the smallest budget for steps like the last one, as far as it is known: None
        before one was measured."""
        if not self._extra.measured:
            return None
        return self._least(self._began + self._extra.most(), self._saved_least)

    def _least(self, other: int, saved: int) -> int:
        """Returns the smallest budget under which the limit is what saved tensors need at least."""
        return max(least_for(self._began, self._extra.needs, saved), other + other // (MARGIN - 1) + 1)

    def _too_small(self, other: int, saved: int) -> BudgetError:
        held = {what: n for what, n in self._held().items() if n}
        to_come = self._to_come()
        if other > self._began and to_come <= other - sum(held.values()):
            held["gradients"] = held.get("gradients", 0) + to_come  # that a step makes
        rest = other - sum(held.values())
        if rest > 0:
            held["temporaries and others"] = rest
        if saved:
            held["saved tensors that must be on the device at once"] = saved
        least = self._least(other, saved)
        return self._error(least, held)

    def _error(self, least: int, held: Dict[str, int]) -> BudgetError:
        parts = ", ".join(f"{what} {human(n)}" for what, n in held.items())
        return BudgetError(
            f"a budget of {human(self.size)} is too small: this step needs at least {human(least)} ({least} bytes): {parts}; raise the budget, shard the model, or make the batch smaller",
            self.size, least, held,
        )
