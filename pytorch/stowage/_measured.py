"""What recorded steps say of every block: what it saves, in bytes, and how long its passes take.

Sorts are cheap parts that are chosen together: those that free about as many bytes in a given
time. Second passes may end before the last tensors that a block saves.
"""

from __future__ import annotations

import collections
import math
import statistics
import types
from typing import Any, Callable, Dict, FrozenSet, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from ._profile import Call, Profile, Unit


# A backward pass computes about twice as much as its forward pass.
BACKWARD = 2

# Times that differ by less are taken for equal, in nanoseconds.
NOTICED = 5_000_000

# Cheap parts are chosen separately if one kind frees so many times the bytes of another in
# the same time; there are at most so many sorts.
UNLIKE = 1.25
SORTS = 2

# What recomputing takes of the host for each tensor that a block saves, in nanoseconds: cheap parts, and
# all of it beside its second pass. It counts only if the device waits for the host.
HOOK_LEAN = 15_000
HOOK_WHOLE = 4_000

# The kind of weights that are cast again.
CAST = "ToCopyBackward0"

# A second pass that ends earlier keeps at most TAIL of what it would have made, and takes at most
# EARLIER of the time.
TAIL = 1 / 8
EARLIER = 15 / 16


class Choice(NamedTuple):
    """What happens to what a block saves."""

    lean: bool = False  # cheap parts are recomputed
    whole: bool = False  # all of it is recomputed
    offload: bool = False  # what is kept, inputs included, is offloaded
    budget: float = 0.0  # of a compiled block: how it is compiled again, which recomputes cheap parts
    kept: FrozenSet[str] = frozenset()  # kinds of cheap parts that are not recomputed
    first: int = 0  # if all of it is recomputed: only the first tensors that it saves, so many

    def __str__(self) -> str:
        lean = f"compile with activation_memory_budget={self.budget:g}" if self.budget else "recompute cheap parts"
        words = ["recompute"] if self.whole else [lean] if self.lean else []
        if self.offload:
            words.append("offload inputs" if self.whole else "offload")
        return ", ".join(words) or "keep"


KEEP = Choice()


class Cast(NamedTuple):
    """Bytes of a call that are never moved: weights that autocast casts."""

    stays: int = 0  # until the backward pass of the call
    passes: int = 0  # until the forward pass is over: autocast keeps what is dropped


class Part(NamedTuple):
    """What one call of a unit saves, in bytes."""

    unit: Unit
    number: int
    lean: int
    rest: int
    inputs: int
    cached: int  # bytes of lean or rest that stay until the forward pass is over
    kinds: Dict[str, int]  # bytes of lean by kind
    tail: int  # bytes of lean or rest that a second pass which ends earlier does not make
    fixed: int = 0  # bytes of all these that are never moved
    little: int = 0  # bytes of storages that are too small to be counted in these
    light: int = 0  # bytes of those that are dropped if all of it is recomputed
    smaller: Mapping[float, int] = types.MappingProxyType({})  # bytes that a compiled block no longer saves, by the budget that it is compiled again with
    extra: int = 0  # bytes that perhaps only the recorded step held, to try second passes: inputs that nobody saves
    most: int = 0  # bytes that recomputing all of it frees at most
    gross: Mapping[str, int] = types.MappingProxyType({})  # bytes of cheap parts by kind, without what is held in their place
    passing: Mapping[str, Tuple[int, int]] = types.MappingProxyType({})  # bytes that cheap parts of a kind hold while they are made again: all results that nobody saves, and the most of all else
    others: Tuple[Tuple[str, int, FrozenSet[Unit]], ...] = ()  # cheap parts that are made again from what other units save, which they stay with if these are recomputed

    def dropped(self, c: Choice) -> int:
        """Returns the bytes that do not stay."""
        if c.whole:
            return self.lean + self.rest - (self.tail if c.first else 0)
        if c.budget:
            return self.smaller.get(c.budget, 0)
        return self.lean - sum(self.kinds.get(kind, 0) for kind in c.kept) if c.lean else 0

    def back(self, c: Choice, to: Choice) -> int:
        """Returns by how much a call holds more at most if its choice becomes another: the most that the first may
        drop, less the least that the other drops."""
        perhaps = sum(n for kind, n, _ in self.others if to.lean and kind not in to.kept)  # other units may be recomputed
        less = max(self.dropped(to) - perhaps, 0) + self.little * to.whole
        if c.whole:
            return self.most + self.little - (self.tail if c.first else 0) - less
        if not c.lean or c.budget or to.budget:
            return self.dropped(c) - less
        stay = to.kept if to.lean else self.gross.keys()
        return sum(n for kind, n in self.gross.items() if kind in stay - c.kept)  # what is dropped instead is there in its backward pass

    def beside(self, c: Choice) -> int:
        """Returns the bytes that a backward pass holds at most beside what comes back."""
        if not c.lean or c.budget:
            return 0
        of = [both for kind, both in self.passing.items() if kind not in c.kept]
        return sum(results for results, _ in of) + max((most for _, most in of), default=0)

    def cast(self, c: Choice) -> Cast:
        """Returns what is not moved, and is no part of what a call is counted to keep or to move."""
        if c.whole:
            return Cast(min(self.fixed, self.tail) if c.offload and c.first else 0, min(self.cached, self.dropped(c)))
        again = self.kinds.get(CAST, 0) if c.lean and CAST not in c.kept else 0
        return Cast(max(self.fixed - again, 0) if c.offload else 0, min(self.cached, again))


class Sort(NamedTuple):
    """Cheap parts of a unit that are chosen together."""

    name: str  # in questions for the solver
    kinds: FrozenSet[str]
    took: int  # nanoseconds


class Blocks:
    """Bytes and times of the last recorded step, for one division into units and, if there is
    one, with a budget with which compiled blocks may be compiled again. Second passes that end
    earlier are another division."""

    def __init__(self, profile: Profile, fine: bool, budget: float = 0.0, ends: bool = False, but: FrozenSet[Unit] = frozenset()) -> None:
        self._profile, self._fine, self._budget = profile, fine, budget
        self._but = but  # blocks that are units as they are, though others are divided into their parts
        self._stamps = profile.clock.read()
        self._whole, self._lean = self._shortest()
        self._shares = self._shares_of_kinds()
        self._smaller = {b: self._compiled_smaller(b) for b in profile.smaller}
        self._drops = {b: self._dropped_smaller(b) for b in profile.smaller}
        for u in {call.unit for call in profile.calls if call.unit.compiled}:
            self._lean[u] = self._smaller.get(budget, {}).get(u.kind, (0.0, 0))[1]
        self._pace, self._middle = 1.0, None  # type: float, Optional[int]
        self._most: Optional[Tuple[Callable[[Call], Tuple[int, int]], List[int]]] = None  # what moments have whatever is chosen
        self._others: Set[int] = set()  # storages of the last request that stand for everything else
        self.parts: Dict[Call, Part] = {}
        self._retimed = False  # times are those of steps under a plan
        self._hooks: Dict[Unit, int] = {}  # tensors that a call saves, if the host's time counts
        self._users: Dict[int, List[Call]] = {}  # by storage: the calls that it is an argument of
        for call in profile.calls:
            for s in call.inputs:
                self._users.setdefault(s, []).append(call)
        # How many tensors a second pass makes that ends earlier, and its part of the time. Calls that save
        # as many speak for each other.
        alike: Dict[Tuple[object, int], Tuple[int, float]] = {}
        # Of calls without a backward pass, as of a forward pass that failed, nobody knows how long they held what they saved.
        calls = [c for c in profile.calls if (c.parent is None or self._divides(c.unit)) and c.was_checked]
        for call in calls:
            self.parts[call], loose = self._part(call)
            end = self._end_of(call, loose) if ends else None
            if end is not None:
                alike.setdefault((self._like(call.unit), len(call.all)), end)
        said: Dict[Unit, Set[Optional[Tuple[int, float]]]] = {}
        for call in calls:
            said.setdefault(call.unit, set()).add(alike.get((self._like(call.unit), len(call.all))))
        self._ends = {u: end for u, of in said.items() if len(of) == 1 for end in of if end is not None}
        for call in calls:
            if call.unit in self._ends:
                first = self._ends[call.unit][0]
                self.parts[call] = self.parts[call]._replace(tail=self._tail(call, self._part(call)[1], first), light=self._light(call, first))
        self._kinds = self._sorted()
        self._cheap = {part.unit for part in self.parts.values() if part.lean}  # units with cheap parts, of their own or of parts inside

    @property
    def ends(self) -> bool:
        """Whether there are second passes that end earlier."""
        return bool(self._ends)

    def like(self, other: Blocks) -> bool:
        """Reports whether another division has the same units."""
        return (self._fine, self._budget, self._but) == (other._fine, other._budget, other._but)

    def _divides(self, u: Unit) -> bool:
        """Reports whether the block that a unit is, or is a part of, is divided into its parts."""
        if self._but:
            while u.parent is not None:
                u = u.parent
        return self._fine and u not in self._but

    def _like(self, u: Unit) -> object:
        """Returns what units have in common that speak for each other here: their kind, and whether they are divided."""
        return (u.kind, self._divides(u)) if self._but else u.kind

    def _tail(self, call: Call, loose: Mapping[int, int], first: int) -> int:
        """Returns the bytes that stay if a second pass makes the first tensors alone."""
        return sum(loose[s] for s in {c.entries[i].storage for c, i in call.all[first:]} if s in loose)

    def _light(self, call: Call, first: int = 0) -> int:
        """Returns the bytes of storages too small to be moved that are dropped if all of a call is recomputed, or
        the first tensors alone."""
        p, mine = self._profile, self._own(call)
        entries = [c.entries[i] for c, i in call.all]
        bytes = {e.storage: e.bytes for e in entries[: first or len(entries)] if 0 < e.bytes < p.least and not e.cached}
        for s in [e.storage for e in entries[first:] if first]:
            bytes.pop(s, None)
        own = (s for s in bytes if p.little.get(s) in mine and s not in p.shared and s not in call.inputs and all(self._inside(user, mine) for user in self._users.get(s, ())))
        return sum(bytes[s] for s in own)

    def _extra(self, call: Call, mine: List[Call]) -> int:
        """Returns the bytes of inputs that nobody saves, of a call and of cheap modules in it. Nobody else is given them; somebody
        may hold them all the same."""
        p, bytes = self._profile, dict(call.inputs)
        for c in mine:
            bytes.update((s, n) for s, (n, _) in c.held.items())
        return sum(n for s, n in bytes.items() if s not in p.first and s not in p.little and s not in p.weights and all(self._inside(user, mine) for user in self._users.get(s, ())))

    def _end_of(self, call: Call, loose: Mapping[int, int]) -> Optional[Tuple[int, float]]:
        """Returns where a second pass would best end, as in _ends, if it is not the end. What is saved last
        may be small and take long, such as the mask of a dropout after a product, or stay in any case,
        as the input of the next block."""
        stamps, total, n = self._profile.saves.get(call, []), sum(loose.values()), len(call.all)
        if call.unit.compiled or not total or len(stamps) != n + 1:
            return None
        took = [self._took(stamps[0], s) for s in stamps]
        ends = [(i, total - self._tail(call, loose, i)) for i in range(1, n) if 0 < took[i] <= EARLIER * took[n]]
        best = max(((bytes / took[i], i) for i, bytes in ends if bytes >= (1 - TAIL) * total), default=None)
        return (best[1], took[best[1]] / took[n]) if best is not None and best[0] > total / took[n] else None

    def _shares_of_kinds(self) -> Dict[object, Dict[str, float]]:
        """Returns, by unit, the part of the time of its cheap parts that each kind of them takes. A kind of unit
        has those of the unit with the most kinds: a first block may have fewer."""
        p, out, least = self._profile, {}, {}  # type: Profile, Dict[object, Dict[str, float]], Dict[object, Tuple[int, int]]
        for call in p.calls:
            took: Dict[str, int] = collections.defaultdict(int)
            for c in self._own(call) if self._timed(call) else ():
                stamps = p.kinds.get(c, [])
                for (_, begin), (kind, end) in zip(stamps, stamps[1:]):
                    took[kind] += self._took(begin, end)
            total = sum(took.values())
            for key in (call.unit, self._like(call.unit)):
                if total and (-len(took), total) < least.get(key, (0, 0)):
                    least[key] = -len(took), total
                    out[key] = {kind: t / total for kind, t in took.items()}
        return out

    def _shares_of(self, u: Unit) -> Dict[str, float]:
        return self._shares.get(u) or self._shares.get(self._like(u)) or {}

    def _sorted(self) -> Dict[object, List[FrozenSet[str]]]:
        """Returns, by kind of unit, its kinds of cheap parts, sorted by the bytes that they free in a given time."""
        bytes: Dict[object, Dict[str, int]] = {}
        for part in self.parts.values():
            of = bytes.setdefault(self._like(part.unit), {})
            of.update((k, max(n, of.get(k, 0))) for k, n in part.kinds.items() if n)
        out: Dict[object, List[FrozenSet[str]]] = {}
        for kind, of in bytes.items():
            shares = self._shares.get(kind, {})
            sorts = sorted(((n, shares.get(k, 0.0), frozenset([k])) for k, n in of.items()), key=lambda s: s[0] / (s[1] or 1e-9), reverse=True)
            if sorts and not all(k in shares for k in of):
                sorts = [(1, 1.0, frozenset(of))]
            while len(sorts) > 1:
                unlike, i = min((a[0] * b[1] / max(b[0] * a[1], 1e-9), i) for i, (a, b) in enumerate(zip(sorts, sorts[1:])))
                if unlike >= UNLIKE and len(sorts) <= SORTS:
                    break
                a, b = sorts[i : i + 2]
                sorts[i : i + 2] = [(a[0] + b[0], a[1] + b[1], a[2] | b[2])]
            out[kind] = [kinds for _, _, kinds in sorts]
        return out

    def _sorts(self, u: Unit) -> List[Sort]:
        """Returns the cheap parts of a unit that are cheap, compared with all of it: many small ones are
        not. Otherwise they are a part of the rest."""
        shares, most = self._shares_of(u), self._whole.get(u, 0) + NOTICED
        sorts = []
        for i, kinds in enumerate(self._kinds.get(self._like(u), [])):
            took = int(self._lean.get(u, 0) * (math.fsum(shares.get(k, 0.0) for k in kinds) if shares else 1.0)) + HOOK_LEAN * self._hooks.get(u, 0)
            if took <= most or not u.whole:
                sorts.append(Sort(f"lean {i + 1}" if i else "lean", kinds, took))
        return sorts

    def _leanest(self, u: Unit, sorts: Iterable[Sort], offload: bool) -> Choice:
        """Returns the choice that recomputes these cheap parts."""
        kinds = {k for s in sorts for k in s.kinds}
        known = {k for of in self._kinds.get(self._like(u), []) for k in of} | set(self._shares_of(u))
        return Choice(True, False, offload, self._budget if u.compiled else 0.0, frozenset() if u.compiled else frozenset(known - kinds))

    def _again_whole(self, u: Unit) -> Choice:
        return Choice(whole=True, first=self._ends.get(u, (0, 1.0))[0])

    def _own(self, call: Call) -> List[Call]:
        """Returns the calls that count as part of this one."""
        if self._divides(call.unit):
            return [call]
        return list(dict.fromkeys([call] + [c for c, _ in call.all]))

    def _can_lean(self, calls: Iterable[Call]) -> bool:
        said = [c.unit.lean for c in calls]
        return True in said and False not in said

    def _timed(self, call: Call) -> bool:
        """Reports whether all cheap tensors of a call were made again, and there are some."""
        cheap = [c in self._profile.lean_times for c in self._own(call) if any(e.recipe is not None or e.small is not None for e in c.entries)]
        return bool(cheap) and all(cheap)

    def _shortest(self) -> Tuple[Dict[Unit, int], Dict[Unit, int]]:
        """Returns how long second passes took, whole and lean, in nanoseconds."""
        times, stamps = self._profile, self._stamps

        def cost(a: int, b: int) -> int:
            return max(int(1e9 * (stamps[b] - stamps[a])), 1)

        whole: Dict[Unit, int] = {}
        lean: Dict[Unit, int] = {}
        for call in times.calls:
            u = call.unit
            if call in times.whole_times:
                t = cost(*times.whole_times[call])
                whole[u] = min(whole.get(u, t), t)
            if self._timed(call):
                t = sum(cost(*times.lean_times[c]) for c in self._own(call) if c in times.lean_times)
                lean[u] = min(lean.get(u, t), t)
        for table in (whole, lean):
            alike: Dict[type, List[int]] = {}
            for u, t in table.items():
                alike.setdefault(u.kind, []).append(t)
            for call in times.calls:  # what was not tried takes as long as what is alike
                u = call.unit
                if u not in table and u.kind in alike:
                    table[u] = int(statistics.median(alike[u.kind]))
        # A first pass that is recorded waits for copies, so it says little of a unit that is like no other:
        # it takes no longer than others do for as many bytes.
        sizes = {call: sum(c.entries[i].bytes for c, i in call.all) for call in times.calls}
        paces = [whole[call.unit] / sizes[call] for call in times.whole_times if sizes[call]]
        for call in times.calls:
            took = cost(call.began, call.ended)
            whole.setdefault(call.unit, min(took, max(int(statistics.median(paces) * sizes[call]), 1)) if paces else took)
            lean.setdefault(call.unit, 0)
        return whole, lean

    def _compiled_smaller(self, budget: float) -> Dict[type, Tuple[float, int]]:
        """Returns, by kind, the share of what compiled blocks save that they save no longer if
        they are compiled with a budget, and how much longer that takes, in nanoseconds."""
        p, shares = self._profile, {}  # type: Profile, Dict[type, float]
        before: Dict[type, int] = {}
        after: Dict[type, int] = {}
        for call, s in p.smaller[budget].items():
            kind = call.unit.kind
            if (kind, budget) not in p.not_smaller:
                shares[kind] = min(s.share, shares.get(kind, 1.0))
                for table, stamps in ((before, s.before), (after, s.after)):
                    table[kind] = min(self._took(*stamps), table.get(kind, self._took(*stamps)))
        return {kind: (share, max(after[kind] - before[kind], 1)) for kind, share in shares.items()}

    def _saves(self, call: Call) -> int:
        return sum({e.storage: e.bytes for e in (c.entries[i] for c, i in call.all)}.values())

    def _dropped_smaller(self, budget: float) -> Dict[Tuple[type, int], int]:
        """Returns the bytes that compiled blocks save no longer, by kind and by what a call saves."""
        drops: Dict[Tuple[type, int], int] = {}
        for call, s in self._profile.smaller[budget].items():
            alike = call.unit.kind, self._saves(call)
            drops[alike] = min(s.dropped, drops.get(alike, s.dropped))
        return drops

    def _again_smaller(self, u: Unit) -> List[Choice]:
        """Returns the choices that compile a block again."""
        return [Choice(True, budget=b) for b, of in self._smaller.items() if u.compiled and of.get(u.kind, (0.0, 0))[0] > 0]

    def _part(self, call: Call) -> Tuple[Part, Dict[int, int]]:
        """Returns what a call saves, and the bytes of what does not stay if all of it is recomputed, by storage."""
        p = self._profile
        mine = self._own(call)
        lean_only: Dict[int, bool] = {}
        kinds: Dict[int, str] = {}
        held: Dict[int, Tuple[int, Set[str]]] = {}
        little: Dict[int, int] = {}
        sources: Dict[int, Set[Unit]] = {}
        can, fine = self._can_lean(mine), self._divides(call.unit)
        for c in mine:
            for s, (n, needing) in c.held.items():
                held[s] = n, needing | held.get(s, (0, set()))[1]
            little.update((e.storage, e.bytes) for e in c.entries if 0 < e.bytes < p.least)
            for e in c.entries:
                if e.bytes >= p.least and e.storage in p.first and p.first[e.storage] in mine:
                    sort = e.kind if fine or e.small is not None else e.around
                    cheap = can and (e.small is not None or e.recipe is not None and sort != "") and not (fine and e.outer) and kinds.setdefault(e.storage, sort) == sort
                    lean_only[e.storage] = lean_only.get(e.storage, True) and cheap
                    sources.setdefault(e.storage, set()).update(of.unit for of in e.sources if of not in mine)
        # What another call saves or is given stays, too.
        others = {s for s in lean_only if s in p.shared or not all(self._inside(user, mine) for user in self._users.get(s, ()))}
        cast = {e.storage for c in mine for e in c.entries if e.cached and e.storage in lean_only}
        if p.casts_stay:
            others |= cast
        droppable = {s for s, only in lean_only.items() if only and s not in held and s not in others}
        by_kind: Dict[str, int] = collections.defaultdict(int)
        for s in droppable:
            by_kind[kinds[s]] += p.bytes[s]
        gross = dict(by_kind)
        # An input that nobody saves is held in place of what is dropped.
        for n, needing in (of for s, of in held.items() if s not in p.first):
            for kind in needing & set(by_kind):
                by_kind[kind] = max(by_kind[kind] - n, 0)
        lean = sum(by_kind.values())
        rest = sum(p.bytes[s] for s in lean_only) - lean
        # Inputs stay if the block is recomputed. Those that nobody saves are counted in place of
        # as many bytes of the rest, so that the sum is right while the block is kept.
        stay = {s: n for s, n in call.inputs.items() if n >= p.least and s not in p.weights and (s not in p.first or p.first[s] in mine)}
        stay.update({s: p.bytes[s] for s in others})
        inputs = min(sum(stay.values()), rest)
        cached = cast - stay.keys()
        rest -= inputs
        smaller: Dict[float, int] = {}
        if call.unit.compiled:  # which has no cheap parts of its own
            alike = call.unit.kind, self._saves(call)
            smaller = {b: min(self._drops[b].get(alike, int(of[call.unit.kind][0] * rest)), rest) for b, of in self._smaller.items() if call.unit.kind in of and call.unit.whole is not False}
            lean = smaller.get(self._budget, 0)
            rest -= lean
            by_kind = gross = {"": lean}
        most = sum(p.bytes[s] for s in lean_only if s not in call.inputs)
        fixed = sum(p.bytes[s] for s in lean_only if s in p.fixed)
        passing: Dict[str, Tuple[int, int]] = {}
        for s, n, kind in (result for c in mine for result in c.results if can):
            results, other = passing.get(kind, (0, 0))
            passing[kind] = results + n * (s not in p.first and s not in p.little), other
        times = collections.Counter(e.storage for c in mine for e in c.entries)  # what is saved twice is made twice, perhaps for one operator
        for e in (e for c in mine for e in c.entries if can):
            for kind in dict.fromkeys(filter(None, (e.kind, e.around))):
                results, other = passing.get(kind, (0, 0))
                passing[kind] = results, max(other, e.passing + (times[e.storage] > 1) * e.bytes)
        away = tuple((kinds[s], p.bytes[s], frozenset(sources[s])) for s in sorted(droppable) if sources[s])
        part = Part(call.unit, call.number, lean, rest, inputs, sum(p.bytes[s] for s in cached), by_kind, 0, fixed, sum(little.values()), self._light(call), smaller, self._extra(call, mine), most, gross, passing, away)
        return part, {s: p.bytes[s] for s in lean_only if s not in stay}

    @staticmethod
    def dropped(part: Part, choices: Mapping[Unit, Choice]) -> int:
        """Returns the bytes of a call that do not stay with the choices for all units."""
        c = choices.get(part.unit, KEEP)
        if not (part.others and c.lean):
            return part.dropped(c)
        stay = sum(n for kind, n, units in part.others if kind not in c.kept and any(choices.get(u, KEEP).whole for u in units))
        return max(part.dropped(c) - stay, 0)

    @staticmethod
    def _inside(user: Optional[Call], mine: List[Call]) -> bool:
        while user is not None and user not in mine:
            user = user.parent
        return user is not None

    def _took(self, begin: int, end: int) -> int:
        return int(max(0.0, self._stamps[end] - self._stamps[begin]) * 1e9)

    def _times(self) -> Iterator[Tuple[str, Any, int]]:
        """Returns what happened with the time of the step's own work, in nanoseconds.

        A recorded step waits for copies and for the host, so its own times say little. Forward
        passes take as long as second passes did, and backward passes twice as long. The rest,
        before and after the blocks, is known once steps under a plan were timed."""
        now, last, open = 0, 0, None
        forward: Dict[Call, int] = {}
        for kind, what, stamp in self._profile.ops:
            if kind == "save" and what in self.parts:
                inside = sum(forward.get(c, 0) for c in dict.fromkeys(c for c, _ in what.all) if c is not what)
                forward[what] = self._whole[what.unit]
                now += max(int(self._pace * (forward[what] - inside)), 0)
                last = stamp
            elif kind == "load":
                if open is None:
                    now += self._took(last, what.loaded) if self._middle is None else self._middle
                else:
                    now += self._backward(open)
                open = what
            yield kind, what, now
        now += self._backward(open) if open is not None else self._middle or 0
        yield "end", None, now

    def _backward(self, call: Call) -> int:
        inside = sum(self._whole.get(c.unit, 0) for c in dict.fromkeys(c for c, _ in call.all) if c is not call) if self._divides(call.unit) else 0
        return int(self._pace * BACKWARD * max(self._whole.get(call.unit, 0) - inside, 0))

    def retime(self, took: Mapping[Unit, int], cheap: Mapping[Unit, Mapping[str, int]] = types.MappingProxyType({})) -> None:
        """Learns how long passes take in steps under a plan, in nanoseconds, and cheap parts by kind, in all
        calls of a unit. In a recorded step the device waits for the host, so that its clocks are higher, and
        copies are under way. Units that were not timed take longer by as much as those that are alike, or as all."""
        factors: Dict[type, List[float]] = {}
        for u, t in took.items():
            if u in self._whole:
                factors.setdefault(u.kind, []).append(t / self._whole[u])
        before = self._retimed  # what is not timed is no longer as it was recorded
        usual = statistics.median(f for of in factors.values() for f in of) if factors else 1.0
        cheap_usual = self._retime_cheap(cheap, 1.0 if before else usual)
        if not factors and not before:
            usual = cheap_usual
        for u in self._whole:
            factor = statistics.median(factors[u.kind]) if u.kind in factors else usual
            self._whole[u] = took.get(u, max(int(factor * self._whole[u]), 1))
        self._retimed = before or bool(factors or cheap)

    def _retime_cheap(self, took: Mapping[Unit, Mapping[str, int]], otherwise: float) -> float:
        """Does the same for cheap parts alone, by a factor if none was timed. It returns the usual factor."""
        calls = collections.Counter(call.unit for call in self._profile.calls)
        before = {u: {kind: share * self._lean[u] for kind, share in self._shares_of(u).items()} for u in self._lean}
        factors: Dict[Tuple[type, str], List[float]] = {}
        for u, of in took.items():
            for kind, t in of.items():
                if before.get(u, {}).get(kind):
                    factors.setdefault((u.kind, kind), []).append(t / calls[u] / before[u][kind])
        usual = statistics.median(f for of in factors.values() for f in of) if factors else otherwise
        widest: Dict[object, Unit] = {}  # the unit of each kind that has the most kinds of cheap parts
        for u, shares in before.items():
            if not shares:
                self._lean[u] = int(usual * self._lean[u])
                continue
            now = {kind: t * (statistics.median(factors[u.kind, kind]) if (u.kind, kind) in factors else usual) for kind, t in shares.items()}
            total = sum(now.values())
            if total > 0:
                self._lean[u], self._shares[u] = int(total), {kind: t / total for kind, t in now.items()}
                if self._like(u) not in widest or len(shares) > len(before[widest[self._like(u)]]):
                    widest[self._like(u)] = u
        self._shares.update({kind: self._shares[u] for kind, u in widest.items()})
        self._kinds = self._sorted()
        return usual

    def again(self, choices: Mapping[Unit, Choice]) -> int:
        """Returns how long the second passes of a step take, in nanoseconds."""
        return sum(self._took_again(part.unit, choices.get(part.unit, KEEP)) for part in self.parts.values())

    def _took_again(self, u: Unit, c: Choice) -> int:
        hooks = self._hooks.get(u, 0)
        if c.whole:
            return self._second(u, c.first) + HOOK_WHOLE * hooks
        if c.budget and c.budget != self._budget:
            took, own = (self._smaller.get(b, {}).get(u.kind, (0.0, 0))[1] for b in (c.budget, self._budget))
            return int(took * self._lean[u] / own) if own else took  # times may be those of steps under a plan
        shares = self._shares_of(u)
        return int(self._lean.get(u, 0) * (1 - math.fsum(shares.get(k, 0.0) for k in c.kept))) + HOOK_LEAN * hooks if c.lean else 0

    def count_hooks(self) -> None:
        """Lets what recomputing takes of the host count from now on."""
        for call in self.parts:
            if not call.unit.compiled:
                self._hooks[call.unit] = max(len(call.all), self._hooks.get(call.unit, 0))

    def _second(self, u: Unit, first: int) -> int:
        """Returns how long a second pass takes that makes the first tensors, or all."""
        return int(self._whole.get(u, 0) * (self._ends[u][1] if first and u in self._ends else 1.0))

    def all_of(self, u: Unit, c: Choice, took: int) -> int:
        """Returns how long a second pass would have taken that makes everything, if that of a choice took so long."""
        return int(took / self._ends[u][1]) if c.first and u in self._ends else took

    def calibrate(self, step: int, again: int) -> None:
        """Makes the times agree with a step that was timed, so much of it in second passes."""
        self._pace, self._middle = 1.0, 0
        *_, (_, _, blocks) = self._times()
        own = max(step - again, 1)
        if blocks > own:
            self._pace = own / blocks
        else:
            self._middle = own - blocks
