"""The plan of a step: for every block keep, offload, recompute its cheap parts or all of it.

Two recorded steps (_profile.py) become a description of a step that the library's solver
understands: storages, units, the order of saves and loads, and times. Its answer becomes
the choices that later steps follow.
"""

from __future__ import annotations

import collections
import statistics
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ._errors import TooSmall
from ._profile import Call, Profile, Unit


# A backward pass computes about twice as much as its forward pass.
BACKWARD = 2

# Times that differ by less are taken for equal, in nanoseconds.
NOTICED = 5_000_000

# The solver is asked so often for a plan that leaves little of a limit.
TRIES = 6


class Choice(NamedTuple):
    """What happens to what a block saves."""

    lean: bool = False  # cheap parts are recomputed
    whole: bool = False  # all of it is recomputed
    offload: bool = False  # what is kept, inputs included, is offloaded
    budget: float = 0.0  # of a compiled block: how it is compiled again, which recomputes cheap parts

    def __str__(self) -> str:
        lean = f"compile with activation_memory_budget={self.budget:g}" if self.budget else "recompute cheap parts"
        words = ["recompute"] if self.whole else [lean] if self.lean else []
        if self.offload:
            words.append("offload inputs" if self.whole else "offload")
        return ", ".join(words) or "keep"


KEEP = Choice()


class Part(NamedTuple):
    """What one call of a unit saves, in bytes."""

    unit: Unit
    number: int
    lean: int
    rest: int
    inputs: int
    cached: int  # bytes of lean or rest that stay until the forward pass is over

    def dropped(self, c: Choice) -> int:
        """Returns the bytes that do not stay."""
        return self.lean + self.rest if c.whole else self.lean if c.lean else 0


class Plan(NamedTuple):
    """The choices for a step, and what is expected of them."""

    choices: Dict[Unit, Choice]
    saved: Dict[Unit, int]  # bytes of one call that stay
    again: Dict[Unit, int]  # bytes of one call that a second pass makes
    answer: Dict[str, Any]

    @property
    def offloads(self) -> bool:
        return any(c.offload for c in self.choices.values())


def summary(plan: Optional[Plan]) -> Dict[str, Any]:
    """Returns what a plan does and is expected to take."""
    choices: Dict[str, List[str]] = {}
    for u, c in plan.choices.items() if plan is not None else ():
        choices.setdefault(str(c), []).append(u.name)
    answer = plan.answer if plan is not None else {}
    names = {"recomputed_ns": "again_ns", "offloaded": "moved", "saved": "before_peak", "kept": "peak"}
    return {"choices": choices, **{name: answer.get(key, 0) for name, key in names.items()}}


def notes(units: Iterable[Unit], refused: Mapping[str, str]) -> List[str]:
    """Returns why blocks are never recomputed."""
    why: Dict[str, List[str]] = {}
    for u in units:
        if u.why:
            why.setdefault(u.why, []).append(u.name)
    blocks = [f"{n[0] if len(n) == 1 else f'{n[0]} and {len(n) - 1} more'} cannot be recomputed: {reason}" for reason, n in why.items()]
    return blocks + [f"outputs of {kind} are not recomputed as cheap parts: {reason}" for kind, reason in refused.items()]


class Measured:
    """What the last recorded step says, for one division into units and, if there is one, with
    a budget with which compiled blocks may be compiled again."""

    def __init__(self, profile: Profile, fine: bool, budget: float = 0.0) -> None:
        self._profile, self._fine, self._budget = profile, fine, budget
        self._stamps = profile.clock.read()
        self._whole, self._lean = self._shortest()
        self._smaller = self._shares()
        self._pace, self._middle = 1.0, None  # type: float, Optional[int]
        self._others: Set[int] = set()  # storages of the last request that stand for everything else
        self.parts: Dict[Call, Part] = {}
        self._retimed: Set[type] = set()  # kinds whose cheap parts have the times of steps under a plan
        self._users: Dict[int, List[Call]] = {}  # by storage: the calls that it is an argument of
        for call in profile.calls:
            for s in call.inputs:
                self._users.setdefault(s, []).append(call)
        calls = [c for c in profile.calls if fine or c.parent is None]
        for call in calls:
            self.parts[call] = self._part(call)

    def _own(self, call: Call) -> List[Call]:
        """Returns the calls that count as part of this one."""
        if self._fine:
            return [call]
        return list(dict.fromkeys([call] + [c for c, _ in call.all]))

    def _can_lean(self, calls: Iterable[Call]) -> bool:
        said = [c.unit.lean for c in calls]
        return True in said and False not in said

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
            t = sum(cost(*times.lean_times[c]) for c in self._own(call) if c in times.lean_times)
            if t:
                lean[u] = min(lean.get(u, t), t)
        for table in (whole, lean):
            alike: Dict[type, List[int]] = {}
            for u, t in table.items():
                alike.setdefault(u.kind, []).append(t)
            for call in times.calls:  # what was not tried takes as long as what is alike
                u = call.unit
                if u not in table and u.kind in alike:
                    table[u] = int(statistics.median(alike[u.kind]))
        for call in times.calls:
            whole.setdefault(call.unit, cost(call.began, call.ended))
            lean.setdefault(call.unit, 0)
        return whole, lean

    def _shares(self) -> Dict[type, float]:
        """Returns, by kind, the share of what compiled blocks save that they save no longer if
        they are compiled with the budget, and notes how long that takes."""
        p, shares = self._profile, {}  # type: Profile, Dict[type, float]
        before: Dict[type, int] = {}
        after: Dict[type, int] = {}
        for call, s in p.smaller.get(self._budget, {}).items():
            kind = call.unit.kind
            if (kind, self._budget) not in p.not_smaller:
                shares[kind] = min(s.share, shares.get(kind, 1.0))
                for table, stamps in ((before, s.before), (after, s.after)):
                    table[kind] = min(self._took(*stamps), table.get(kind, self._took(*stamps)))
        for u in {call.unit for call in p.calls if call.unit.compiled and call.unit.kind in shares}:
            self._lean[u] = max(after[u.kind] - before[u.kind], 1)
        return shares

    def _part(self, call: Call) -> Part:
        p = self._profile
        mine = self._own(call)
        lean_only: Dict[int, bool] = {}
        held: Set[int] = set()
        can = self._can_lean(mine)
        for c in mine:
            held |= c.held
            for e in c.entries:
                if e.bytes >= p.least and e.storage in p.first and p.first[e.storage] in mine:
                    cheap = can and (e.recipe is not None or e.small is not None)
                    lean_only[e.storage] = lean_only.get(e.storage, True) and cheap
        # What another call saves or is given stays, too.
        others = {s for s in lean_only if s in p.shared or not all(self._inside(user, mine) for user in self._users.get(s, ()))}
        droppable = {s for s, only in lean_only.items() if only and s not in held and s not in others}
        lean = sum(p.bytes[s] for s in droppable)
        rest = sum(p.bytes[s] for s in lean_only if s not in droppable)
        # Inputs stay if the block is recomputed. Those that nobody saves are counted in place of
        # as many bytes of the rest, so that the sum is right while the block is kept.
        stay = {s: n for s, n in call.inputs.items() if n >= p.least and s not in p.weights and (s not in p.first or p.first[s] in mine)}
        stay.update({s: p.bytes[s] for s in others})
        inputs = min(sum(stay.values()), rest)
        cached = {e.storage for c in mine for e in c.entries if e.cached and e.storage in lean_only and e.storage not in stay}
        rest -= inputs
        if call.unit.compiled:  # which has no cheap parts of its own
            lean = int(self._smaller.get(call.unit.kind, 0.0) * rest) if call.unit.whole is not False else 0
            rest -= lean
        return Part(call.unit, call.number, lean, rest, inputs, sum(p.bytes[s] for s in cached))

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
        if open is not None:
            now += self._backward(open)
        yield "end", None, now

    def _backward(self, call: Call) -> int:
        inside = sum(self._whole.get(c.unit, 0) for c in dict.fromkeys(c for c, _ in call.all) if c is not call) if self._fine else 0
        return int(self._pace * BACKWARD * max(self._whole.get(call.unit, 0) - inside, 0))

    def _worth(self, u: Unit) -> bool:
        """Reports whether the cheap parts of a block are cheap, compared with all of it: many small
        ones are not. Otherwise they are a part of the rest."""
        return self._lean.get(u, 0) <= self._whole.get(u, 0) + NOTICED or not u.whole

    def retime(self, took: Mapping[Unit, int]) -> None:
        """Learns how long second passes take in steps under a plan, in nanoseconds. A recorded
        step is slower: it also moves what it saves, and its memory is new. Blocks that were not
        timed, and cheap parts, are slower by as much as those that are alike."""
        factors: Dict[type, List[float]] = {}
        for u, t in took.items():
            if u in self._whole:
                factors.setdefault(u.kind, []).append(t / self._whole[u])
        for u in self._whole:
            alike = factors.get(u.kind)
            if alike is not None:
                factor = statistics.median(alike)
                self._whole[u] = took.get(u, max(int(factor * self._whole[u]), 1))
                if u.kind not in self._retimed:
                    self._lean[u] = int(min(factor, 1.0) * self._lean[u])
        self._retimed.update(factors)

    def again(self, choices: Mapping[Unit, Choice]) -> int:
        """Returns how long the second passes of a step take, in nanoseconds."""
        return sum(self._took_again(part.unit, choices.get(part.unit, KEEP)) for part in self.parts.values())

    def _took_again(self, u: Unit, c: Choice) -> int:
        return self._whole.get(u, 0) if c.whole else self._lean.get(u, 0) if c.lean else 0

    def calibrate(self, step: int, again: int) -> None:
        """Makes the times agree with a step that was timed, so much of it in second passes."""
        self._pace, self._middle = 1.0, 0
        *_, (_, _, blocks) = self._times()
        own = max(step - again, 1)
        if blocks > own:
            self._pace = own / blocks
        else:
            self._middle = own - blocks

    def request(self, limit: int, offload: bool, everything: bool = False) -> Tuple[Dict[str, Any], List[Tuple[Unit, str]]]:
        """Returns the question for the solver, and what its units are. The limit is one of saved
        tensors or, if so, of everything that a step holds beyond its base."""
        p = self._profile
        storages: List[int] = []
        names: List[Tuple[Unit, str]] = []
        place: Dict[Tuple[Unit, str], int] = {}
        units: List[Dict[str, Any]] = []
        layers: Dict[Unit, int] = {}
        ops: List[Dict[str, Any]] = []

        def storage(n: int) -> int:
            storages.append(n)
            return len(storages) - 1

        def unit(u: Unit, what: str) -> int:
            if (u, what) not in place:
                place[u, what] = len(units)
                names.append((u, what))
                whole, lean = self._whole.get(u, 0), self._lean.get(u, 0) if self._worth(u) else 0
                again = 0
                if what == "lean":
                    again = max(lean, 1)
                if what == "rest" and u.whole and not (self._fine and u.parts):
                    again = max(whole - lean, whole // 2, 1)
                units.append({"name": what, "layer": layers.setdefault(u, len(layers)), "offload": offload and what != "lean", "recompute_ns": again})
            return place[u, what]

        outside: Dict[int, int] = {}
        begun: Set[Call] = set()
        end = 0
        held = 0  # by what is saved now, if everything is kept
        again, marks = self._second_passes(), [*p.marks, len(p.needs)]
        self._others = set()

        def other(n: int, at: int) -> None:
            """Adds what the step held beside saved tensors when it held n bytes beyond its base."""
            if everything and n > held:
                s = storage(n - held)
                self._others.add(s)
                ops.append({"op": "take", "storage": s, "at": at})
                ops.append({"op": "give", "storage": s, "at": at})

        def each(kind: str, call: Call, at: int) -> None:
            nonlocal held
            part = self.parts[call]
            held += {"save": 1, "load": 0, "release": -1}[kind] * (part.lean + part.rest + part.inputs)
            lean = part.lean if self._worth(part.unit) else 0
            for what, n in (("lean", lean), ("rest", part.rest + part.lean - lean), ("inputs", part.inputs)):
                if n:
                    op: Dict[str, Any] = {"op": kind, "unit": unit(part.unit, what), "microbatch": part.number, "at": at}
                    if kind == "save":
                        op["storages"] = [storage(n)]
                    ops.append(op)

        open: Optional[Call] = None
        other(max(p.needs[: marks[0]], default=0), 0)
        for i, (kind, what, at) in enumerate(self._times()):
            if kind == "take":
                outside[what] = storage(p.bytes[what])
                held += p.bytes[what]
                ops.append({"op": "take", "storage": outside[what], "at": at})
            elif kind == "give":
                held -= p.bytes[what]
                ops.append({"op": "give", "storage": outside.pop(what), "at": at})
            elif kind == "save" and what in self.parts:
                each("save", what, at)
            elif kind == "load":
                call = self._top(what)
                if call not in begun and call in self.parts:
                    if open is not None:
                        each("release", open, at)
                    begun.add(call)
                    each("load", call, at)
                    open = call
                    other(p.held_then[i] + max(again(call)[0] - self.parts[call].lean - self.parts[call].rest, 0), at)
            elif kind == "end":
                end = at
                break
            other(max(p.needs[marks[i] : marks[i + 1]], default=0), at)
        if open is not None:
            each("release", open, end)
        for s in outside.values():
            ops.append({"op": "give", "storage": s, "at": end})
        request = {"limit": limit, "storages": storages, "units": units, "ops": ops, "span": max(end, 1), "offload": offload, "recompute": True}
        return request, names

    def _top(self, call: Call) -> Call:
        while not self._fine and call.parent is not None:
            call = call.parent
        return call

    def _second_passes(self) -> Callable[[Call], Tuple[int, int]]:
        """Returns a function: the most that the second pass of a call holds, and what it leaves.
        Calls that were not tried take as much as those that are alike."""
        alike: Dict[type, Tuple[int, int]] = {}
        for call, (most, left) in self._profile.again.items():
            before = alike.get(call.unit.kind, (0, 0))
            alike[call.unit.kind] = max(most, before[0]), max(left, before[1])
        tried = self._profile.again
        return lambda call: tried[call] if call in tried else alike.get(call.unit.kind, (0, 0))

    def most_held(self, choices: Mapping[Unit, Choice]) -> int:
        """Returns the most that a step holds beyond its base if nothing is offloaded: what the
        recorded step held at every moment, without what is dropped then."""
        p, again, marks = self._profile, self._second_passes(), [*self._profile.marks, len(self._profile.needs)]
        most = max(p.needs[: marks[0]], default=0)
        dropped = cached = more = 0
        begun: Set[Call] = set()
        running: List[Call] = []
        for i, (kind, what, _) in enumerate(p.ops):
            if kind == "begin" and what in self.parts:
                running.append(what)
            elif kind == "save" and what in self.parts:
                running.remove(what)
                part, c = self.parts[what], choices.get(what.unit, KEEP)
                dropped += part.dropped(c)
                cached += min(part.cached, part.dropped(c))
            elif kind == "give":
                cached = 0  # the backward pass began
            elif kind == "load":
                cached, call = 0, self._top(what)
                if call in self.parts and call not in begun:
                    begun.add(call)
                    part, c, more = self.parts[call], choices.get(call.unit, KEEP), 0
                    if c.whole:
                        peak, left = again(call)
                        most = max(most, p.held_then[i] - dropped + peak)
                        more = max(left - part.dropped(c), 0)
                    dropped -= part.dropped(c)
            need = max(p.needs[marks[i] : marks[i + 1]], default=0)
            for call in running:
                if call in p.dropping and choices.get(call.unit, KEEP).whole:  # it holds less than one that is kept
                    need = min(need, p.held_before[call] + p.dropping[call])
            most = max(most, need - dropped + cached + more)
        return most

    def made(self, plan: Plan) -> bool:
        """Reports whether a plan is one of these units, compiled again with this budget if at all."""
        return {part.unit for part in self.parts.values()} == set(plan.saved) and {c.budget for c in plan.choices.values()} <= {0.0, self._budget}

    def relaxed(self, plan: Plan, room: int) -> Plan:
        """Returns a plan that recomputes less than one which left so many bytes unused, or that
        one. A step holds no more than before and what is no longer dropped: a block that is kept
        holds no more than its second pass did."""
        calls = collections.Counter(part.unit for part in self.parts.values())
        choices = dict(plan.choices)

        def kinds(u: Unit, c: Choice) -> Tuple[Choice, Choice]:
            return Choice(offload=c.offload), Choice(lean=True, offload=c.offload, budget=self._budget if u.compiled else 0.0)

        def gains() -> Iterator[Tuple[float, int, Unit, Choice]]:
            for u, c in choices.items():
                if self._fine and u.parts and c.whole:
                    continue  # another rank recomputes it, and its parts count on their own here
                for to in kinds(u, c):
                    took, more = (self._took_again(u, c) - self._took_again(u, to)) * calls[u], dropped[u, c] - dropped[u, to]
                    if took > 0 and more <= room and (not to.lean or c.whole and self._worth(u) and (u.lean or u.compiled and self._smaller.get(u.kind))):
                        yield took / max(more, 1), more, u, to

        dropped: Dict[Tuple[Unit, Choice], int] = collections.defaultdict(int)
        for part in self.parts.values():
            c = choices.get(part.unit, KEEP)
            for to in {c, *kinds(part.unit, c)}:
                dropped[part.unit, to] += part.dropped(to)
        while True:
            found = max(gains(), key=lambda gain: gain[:2], default=None)
            if found is None:
                break
            _, more, u, choices[u] = found
            room -= more
        choices = {u: c for u, c in choices.items() if c != KEEP}
        less = self.again(plan.choices) - self.again(choices)
        if less <= 0:
            return plan
        more = sum(part.dropped(plan.choices.get(part.unit, KEEP)) - part.dropped(choices.get(part.unit, KEEP)) for part in self.parts.values())
        answer = {**plan.answer, "again_ns": self.again(choices), "step_ns": max(plan.answer["step_ns"] - less, 1), "peak": plan.answer["peak"] + more}
        new = Plan(choices, {}, {}, answer)
        self.count(new)
        return new

    def most_saved(self, request: Mapping[str, Any], choices: Optional[Sequence[str]] = None) -> int:
        """Returns the most bytes that are saved at once if some units are recomputed."""
        now, most = 0, 0
        saved: Dict[Tuple[int, int], int] = {}
        for op in request["ops"]:
            if "storage" in op:
                if op["storage"] not in self._others:
                    now += request["storages"][op["storage"]] * (1 if op["op"] == "take" else -1)
            else:
                call = op["unit"], op["microbatch"]
                if op["op"] == "save":
                    saved[call] = sum(request["storages"][s] for s in op["storages"])
                again = choices is not None and choices[op["unit"]] == "recompute"
                now += saved[call] * {"save": not again, "load": again, "release": -1}[op["op"]]
            most = max(most, now)
        return most

    def plan(self, names: Sequence[Tuple[Unit, str]], answer: Dict[str, Any]) -> Plan:
        """Returns the choices that an answer means."""
        said: Dict[Unit, Dict[str, str]] = {}
        for (u, what), choice in zip(names, answer["choices"]):
            said.setdefault(u, {})[what] = choice
        choices: Dict[Unit, Choice] = {}
        for u, by in said.items():
            whole = by.get("rest") == "recompute"
            lean = not whole and by.get("lean") == "recompute"
            offload = by.get("inputs") == "offload" if whole else "offload" in (by.get("rest"), by.get("inputs"))
            if whole or lean or offload:
                choices[u] = Choice(lean, whole, offload, self._budget if lean and u.compiled else 0.0)
        plan = Plan(choices, {}, {}, answer)
        self.count(plan)
        return plan

    def count(self, plan: Plan) -> None:
        """Counts the bytes that stay in a call of each unit, and those that a second pass makes."""
        plan.saved.clear()
        plan.again.clear()
        for part in self.parts.values():
            u, c = part.unit, plan.choices.get(part.unit, KEEP)
            kept = part.inputs + (0 if c.whole else part.rest + (0 if c.lean else part.lean))
            plan.saved[u] = max(plan.saved.get(u, 0), kept)
            plan.again[u] = max(plan.again.get(u, 0), part.lean + part.rest if c.whole else part.lean if c.lean else 0)


def settle(units: Iterable[Unit]) -> None:
    """Decides about units that could not be tried: equal ones speak for them."""
    units = list(units)
    for attribute in ("whole", "lean"):
        by_class: Dict[type, List[Optional[bool]]] = {}
        for u in units:
            by_class.setdefault(u.kind, []).append(getattr(u, attribute))
        for u in units:
            if getattr(u, attribute) is None:
                seen = by_class[u.kind]
                if True in seen or False in seen:  # else there was nothing to try
                    setattr(u, attribute, False not in seen)


def measured(profile: Profile, units: Sequence[Unit]) -> List[Measured]:
    """Returns what a recorded step says, with blocks as units and, if they have parts, with
    these as units."""
    settle(units)
    divisions = [Measured(profile, False)]
    if any(u.parent is not None for u in units):
        divisions.append(Measured(profile, True))
    return divisions + [Measured(profile, False, b) for b, calls in profile.smaller.items() if calls]


def best(divisions: Sequence[Measured], choose: Callable[[Dict[str, Any]], Dict[str, Any]], limit: int, offload: bool = True, everything: bool = False) -> Plan:
    """Returns the fastest plan for a limit of saved tensors or, if so, of everything that a
    step holds beyond its base. It raises TooSmall if there is none."""
    found: Optional[Plan] = None
    small: Optional[TooSmall] = None
    for m in divisions:
        asked = limit
        for _ in range(TRIES if everything else 1):
            request, names = m.request(asked, offload, everything)
            try:
                answer = choose(request)
            except TooSmall as e:
                small = e if small is None or e.least < small.least else small
                if not everything or e.least <= asked:
                    break
                asked = e.least  # the plan that takes least may fit
                continue
            plan, over = m.plan(names, answer), 0
            if everything:  # the solver counts about that much, and this exactly that much
                over = m.most_held(plan.choices) - limit
                answer["peak"], answer["before_peak"] = m.most_saved(request, answer["choices"]), m.most_saved(request)
            if over <= 0 and (found is None or answer["step_ns"] < found.answer["step_ns"]):
                found = plan
            if over <= 0 and (-over <= limit // 64 or not plan.choices):
                break
            asked = max(asked - over if over > 0 else asked - over // 2, 1)
    if found is None:
        raise small or TooSmall("the plans that were tried take too much")
    return found


def agree(plan: Plan, divisions: Sequence[Measured], units: Iterable[Unit], whole: Set[str], lean: Set[str]) -> None:
    """Changes a plan to recompute all of the units with these names, and cheap parts of those.
    Nothing inside of a unit that is recomputed is recomputed on its own."""
    before = dict(plan.choices)
    for u in units:
        c, outer = plan.choices.get(u, KEEP), u.parent
        while outer is not None and outer.name not in whole:
            outer = outer.parent
        if outer is not None:
            plan.choices.pop(u, None)
        elif u.name in whole and not c.whole:
            plan.choices[u] = Choice(False, True, c.offload)
        elif u.name in lean and not c.whole and not c.lean and not u.compiled:  # each rank chooses its own graphs
            plan.choices[u] = Choice(True, False, c.offload)
    for m in divisions:
        if m.made(plan):
            m.count(plan)
            less = sum(part.dropped(plan.choices.get(part.unit, KEEP)) - part.dropped(before.get(part.unit, KEEP)) for part in m.parts.values())
            plan.answer["peak"] = max(plan.answer["peak"] - less, 0)
            return
