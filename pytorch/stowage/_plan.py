"""The plan of a step: for every block keep, offload, recompute its cheap parts or all of it.

What recorded steps measured (_measured.py) becomes a description of a step that the library's
solver understands: storages, units, the order of saves and loads, and times. Its answer
becomes the choices that later steps follow.
"""

from __future__ import annotations

import collections
import itertools
import math
from typing import Any, Callable, Container, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ._again import STOPS
from ._errors import TooSmall, forget
from ._held import Held
from ._measured import CAST, KEEP, Cast, Choice, Part
from ._profile import Call, Profile, Unit


# Kernels beside copies take longer by about this part of the time of the copies.
BESIDE = 1 / 20

# The solver is asked so often for a plan that leaves little of a limit.
TRIES = 6

# And so often because an answer offloads a half of what units save.
HALVES = 4

# Questions whose answers are improved here, or asked again, take this part of the solver's usual search.
BRIEF = 1 / 16

# About so many events are counted to find a better plan, and so many changes that free memory
# are looked at beside each of twice as many that take less time.
EXCHANGES = 100_000
PAIRS = 64

# Whether second passes may end earlier.
EARLY = STOPS


# Answers a question, or raises TooSmall.
Choose = Callable[[Dict[str, Any]], Dict[str, Any]]


class Plan(NamedTuple):
    """The choices for a step, and what is expected of them."""

    choices: Dict[Unit, Choice]
    saved: Dict[Unit, int]  # bytes of one call that stay
    again: Dict[Unit, int]  # bytes of one call that a second pass makes
    cast: Dict[Unit, Cast]  # of one call: what the library would not hear of
    answer: Dict[str, Any]

    @property
    def expected(self) -> float:
        """How long a step takes, in nanoseconds. The solver counts that kernels beside copies are slower (drag); its forecast leaves it out."""
        return float(self.answer["step_ns"] + BESIDE * self.answer.get("copying_ns", 0))

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


class Measured(Held):
    """What the last recorded step says, the questions that it is put to the solver with, and what
    plans hold of memory."""

    def request(self, limit: int, offload: bool, everything: bool = False, never: Optional[Container[Unit]] = None, one: Container[Unit] = (), effort: float = BRIEF) -> Tuple[Dict[str, Any], List[Tuple[Unit, str]]]:
        """Returns the question for the solver, and what its units are. The limit is one of saved
        tensors or, if so, of everything that a step holds beyond its base: with the memory of second
        passes, which the solver counts whether they run or not, or without it and with units that
        are never recomputed. What some units save is one thing, inputs included, to be kept or offloaded."""
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
                whole, sorts, again = self._took_again(u, self._again_whole(u)), {s.name: s.took for s in self._sorts(u)}, 0
                if what in sorts:
                    again = max(sorts[what], 1)
                if what == "rest" and self._can_whole(u) and u not in one and not (never and u in never):
                    again = max(whole - sum(sorts.values()), whole // 2, 1)
                units.append({"name": what, "layer": layers.setdefault(u, len(layers)), "offload": offload and what not in sorts and not u.retained, "recompute_ns": again})
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
            sorts = [(s.name, sum(part.kinds.get(k, 0) for k in s.kinds)) for s in self._sorts(part.unit)]
            rest = part.rest + part.lean - sum(n for _, n in sorts)
            tail = min(part.tail, rest)
            stay = part.inputs + tail if self._can_whole(part.unit) and part.unit not in one else 0  # if the rest is recomputed
            for what, n in [*sorts, ("rest", rest + part.inputs - stay), ("inputs", stay)]:
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
                    extra = again(call)[0] - self.parts[call].dropped(self._again_whole(call.unit)) if never is None else 0
                    other(p.held_then[i] + max(extra, 0), at)
            elif kind == "end":
                end = at
                break
            other(max(p.needs[marks[i] : marks[i + 1]], default=0), at)
        if open is not None:
            each("release", open, end)
        for s in outside.values():
            ops.append({"op": "give", "storage": s, "at": end})
        request = {"limit": limit, "storages": storages, "units": units, "ops": ops, "span": max(end, 1), "offload": offload, "recompute": True, "drag": BESIDE, "effort": effort}
        return request, names

    def made(self, plan: Plan) -> bool:
        """Reports whether a plan is one of these units, compiled again with these budgets if at all."""
        first = all(c.first == self._again_whole(u).first for u, c in plan.choices.items() if c.whole)
        return first and {part.unit for part in self.parts.values()} == set(plan.saved) and {c.budget for c in plan.choices.values()} <= {0.0, *self._smaller}

    def relaxed(self, plan: Plan, room: int) -> Plan:
        """Returns a plan that recomputes less than one which left so many bytes unused, or that
        one. A step holds no more than before and what may no longer be dropped: a block that is kept
        holds no more than its second pass did."""
        calls = collections.Counter(part.unit for part in self.parts.values())
        choices = dict(plan.choices)

        def options(u: Unit, c: Choice) -> Iterator[Choice]:
            yield Choice(offload=c.offload)
            yield from (of._replace(offload=c.offload) for of in self._again_smaller(u))
            if (c.whole or c.lean) and u in self._cheap:
                sorts = self._sorts(u)
                for n in range(1, len(sorts) + 1):
                    for of in itertools.combinations(sorts, n):
                        yield self._leanest(u, of, c.offload)

        def gains() -> Iterator[Tuple[float, int, Unit, Choice]]:
            for u, c in choices.items():
                if u.parts and c.whole and self._divides(u):
                    continue  # another rank recomputes it, and its parts count on their own here
                for to in options(u, c):
                    took = (self._took_again(u, c) - self._took_again(u, to)) * calls[u]
                    if took <= 0:
                        continue
                    if (u, c, to) not in back:
                        back[u, c, to] = self._back(parts[u], c, to)
                    more = back[u, c, to]
                    if more <= room:
                        yield took / max(more, 1), more, u, to

        back: Dict[Tuple[Unit, Choice, Choice], int] = {}
        parts: Dict[Unit, List[Part]] = {}
        for part in self.parts.values():
            parts.setdefault(part.unit, []).append(part)
        while True:
            found = max(gains(), key=lambda gain: gain[:2], default=None)
            if found is None:
                break
            _, more, u, choices[u] = found
            room -= more
        choices = {u: c for u, c in choices.items() if c != KEEP}
        less = self.again(plan.choices) - self.again(choices)
        return self._changed(plan, choices, less) if less > 0 else plan

    @staticmethod
    def _back(calls: Sequence[Part], c: Choice, to: Choice) -> int:
        """Returns by how much calls may hold more with another choice: in backward passes of other calls or, where
        a second pass has everything at once, in their own, or while the forward pass runs, because autocast keeps
        what it cast until then."""
        more = [part.back(c, to) for part in calls]
        own = [part.beside(to) - part.beside(c) - n * c.whole for n, part in zip(more, calls)]
        return sum(more) + max(0, *own, sum(part.cast(to).passes - part.cast(c).passes for part in calls))

    def spared(self, plan: Plan, limit: int) -> Plan:
        """Returns a plan that casts weights again in as few blocks as hold no more than a limit: autocast keeps
        what it cast while the forward pass runs, and most may be held then."""
        if not any(part.cached and CAST in part.kinds for part in self.parts.values()):
            return plan
        casting = [u for u, c in plan.choices.items() if c.lean and not c.budget and CAST not in c.kept]

        def spare(n: int) -> Dict[Unit, Choice]:
            choices = dict(plan.choices)
            for u in casting[len(casting) - n :]:  # the last, whose backward passes are first
                c = choices[u]
                others = set(self._shares_of(u)) - c.kept - {CAST}
                choices[u] = c._replace(kept=c.kept | {CAST}) if others else Choice(offload=c.offload)
            return {u: c for u, c in choices.items() if c != KEEP}

        few, many = 0, len(casting) + 1  # so many hold no more, and more than that
        while many - few > 1:
            n = (few + many) // 2
            few, many = (n, many) if self.most_counted(spare(n)) <= limit else (few, n)
        choices = spare(few)
        less = self.again(plan.choices) - self.again(choices)
        return self._changed(plan, choices, less) if less > 0 else plan

    def mixed(self, plan: Plan, limit: int) -> Plan:
        """Returns a plan like one that holds no more than a limit, or that one if it is as fast: compiled blocks have one form, as
        with a value of activation_memory_budget for all of them, or two, of which the first blocks have the
        one that drops more."""
        units = [u for u in dict.fromkeys(part.unit for part in self.parts.values()) if u.compiled]
        has = {u: [KEEP, *self._again_smaller(u)] + [self._again_whole(u)] * self._can_whole(u) for u in units}
        least, found = self.again(plan.choices), plan.choices
        for a, b in itertools.permutations(dict.fromkeys(c for of in has.values() for c in of), 2):

            def mix(n: int) -> Dict[Unit, Choice]:
                forms = [b] * n + [a] * (len(units) - n)
                choices = {**plan.choices, **{u: c if c in has[u] else KEEP for u, c in zip(units, forms)}}
                return {u: c for u, c in choices.items() if c != KEEP}

            few, many = -1, len(units) + 1  # so many hold more, and so many hold no more if there are so many
            while many - few > 1:
                n = (few + many) // 2
                few, many = (few, n) if self.most_counted(mix(n)) <= limit else (n, many)
            if many <= len(units) and self.again(mix(many)) < least:
                least, found = self.again(mix(many)), mix(many)
        return self._changed(plan, found, self.again(plan.choices) - least) if found is not plan.choices else plan

    def exchanged(self, plan: Plan, limit: int) -> Plan:
        """Returns a plan that recomputes for less time than one that holds no more than a limit, and holds no
        more either: some units recompute less and others more. Nothing is offloaded. The solver
        counts memory coarsely, and its plans may leave much of it."""
        calls = collections.Counter(part.unit for part in self.parts.values())
        options: Dict[Unit, Dict[Choice, Tuple[int, int]]] = {}  # with nanoseconds and the bytes that they drop
        for u in calls:
            can = [KEEP] + [self._again_whole(u)] * self._can_whole(u)
            if u in self._cheap:
                sorts = self._sorts(u)
                can += [self._leanest(u, of, False) for n in range(1, len(sorts) + 1) for of in itertools.combinations(sorts, n)]
            can += [*self._again_smaller(u), plan.choices.get(u, KEEP)]
            options[u] = {c: (self._took_again(u, c) * calls[u], 0) for c in can}
        for part in self.parts.values():
            for c, (took, drops) in options[part.unit].items():
                options[part.unit][c] = took, drops + part.dropped(c)
        alike: Dict[Any, List[Unit]] = {}
        for u, of in options.items():  # measured times differ a little between equal blocks
            alike.setdefault((u.kind, tuple((c, round(20 * math.log1p(took)), drops) for c, (took, drops) in of.items())), []).append(u)
        choices = dict(plan.choices)
        least, left = self.most_counted({}) - limit, min(max(EXCHANGES // len(self._profile.ops), 20), 200)

        def moves() -> Iterator[Tuple[int, int, Tuple[Unit, ...], Choice]]:
            """Yields changes of some units of a kind: by how much longer they take and how much more they drop."""
            for units in alike.values():
                by: Dict[Choice, List[Unit]] = {}
                for u in units:
                    by.setdefault(choices.get(u, KEEP), []).append(u)
                for c, have in by.items():
                    for to, (took, drops) in options[have[0]].items():
                        longer, more = took - options[have[0]][c][0], drops - options[have[0]][c][1]
                        for n in range(1, min(len(have), 3) + 1) if to != c else ():
                            yield n * longer, n * more, tuple(have[:n] if more > 0 else have[-n:]), to

        while left > 0:
            dropped = sum(of[choices.get(u, KEEP)][1] for u, of in options.items())
            all = list(moves())
            faster = sorted((m for m in all if m[0] < 0), key=lambda m: m[0] / max(-m[1], 1))[: 2 * PAIRS]
            slower = sorted((m for m in all if m[0] > 0 and m[1] > 0), key=lambda m: m[0] / m[1])[:PAIRS]
            none: Tuple[int, int, Tuple[Unit, ...], Choice] = (0, 0, (), KEEP)
            pairs = [(a[0] + b[0], i, j) for i, a in enumerate(faster) for j, b in enumerate([none, *slower]) if a[0] + b[0] < 0 and dropped + a[1] + b[1] >= least and not set(a[2]) & set(b[2])]
            found = None
            for _, i, j in sorted(pairs)[:left]:
                changed, left = dict(choices), left - 1
                for _, _, units, to in (faster[i], [none, *slower][j]):
                    changed.update((u, to) for u in units)
                if self.most_counted(changed) <= limit:
                    found = changed
                    break
            if found is None:
                break
            choices = found
        choices = {u: c for u, c in choices.items() if c != KEEP}
        less = self.again(plan.choices) - self.again(choices)
        if less <= 0:
            return plan
        new = self._changed(plan, choices, less)
        new.answer["peak"] = self.most_kept(choices)
        return new

    def _can_whole(self, u: Unit) -> bool:
        return bool(u.whole) and not (u.parts and self._divides(u))

    def strongest(self, request: Mapping[str, Any]) -> Plan:
        """Returns the plan that recomputes everything that it can."""
        choices = {}
        for u in {part.unit: None for part in self.parts.values()}:
            if self._can_whole(u):
                choices[u] = self._again_whole(u)
            elif u in self._cheap and not u.compiled and self._sorts(u):
                choices[u] = self._leanest(u, self._sorts(u), False)
        return self._of(choices, request)

    def like_plan(self, plan: Plan, limit: int) -> Optional[Plan]:
        """Returns a plan that recomputes what one for another division does, and less where that holds no more than a limit, or None
        if there is none: the solver counts memory coarsely, and may find no plan though there is this one."""
        choices = {}
        for u in {part.unit: None for part in self.parts.values()}:
            outer: Optional[Unit] = u
            while outer is not None and not plan.choices.get(outer, KEEP).whole:
                outer = outer.parent
            if outer is not None and self._can_whole(u):
                choices[u] = self._again_whole(u)
            elif (outer is not None or plan.choices.get(u, KEEP).lean) and u in self._cheap and not u.compiled and self._sorts(u):
                choices[u] = self._leanest(u, self._sorts(u), False)
        if self.most_counted(choices) > limit:
            return None
        return self.exchanged(self._of(choices, self.request(limit, False, True)[0]), limit)

    def _of(self, choices: Dict[Unit, Choice], request: Mapping[str, Any]) -> Plan:
        """Returns a plan of choices that offload nothing."""
        again = self.again(choices)
        answer = {"again_ns": again, "step_ns": request["span"] + again, "before_ns": request["span"], "peak": self.most_kept(choices), "before_peak": self.most_kept({}), "moved": 0}
        plan = Plan(choices, {}, {}, {}, answer)
        self.count(plan)
        return plan

    def _changed(self, plan: Plan, choices: Dict[Unit, Choice], less: int) -> Plan:
        """Returns a plan with other choices, which takes less time."""
        more = sum(self.dropped(part, plan.choices) - self.dropped(part, choices) for part in self.parts.values())
        answer = {**plan.answer, "again_ns": self.again(choices), "step_ns": max(plan.answer["step_ns"] - less, 1), "peak": plan.answer["peak"] + more}
        new = Plan(choices, {}, {}, {}, answer)
        self.count(new)
        return new

    @staticmethod
    def said(names: Sequence[Tuple[Unit, str]], answer: Dict[str, Any]) -> Dict[Unit, Dict[str, str]]:
        """Returns an answer by unit."""
        said: Dict[Unit, Dict[str, str]] = {}
        for (u, what), choice in zip(names, answer["choices"]):
            said.setdefault(u, {})[what] = choice
        return said

    def halves(self, names: Sequence[Tuple[Unit, str]], answer: Dict[str, Any]) -> Set[Unit]:
        """Returns the units of which an answer offloads the inputs alone, or the rest alone. A plan has no
        such choice."""
        return {u for u, by in self.said(names, answer).items() if len({by.get(what) == "offload" for what in ("rest", "inputs") if what in by}) > 1 and by["rest"] != "recompute"}

    def whole_units(self, choose: Choose, request: Dict[str, Any], names: List[Tuple[Unit, str]], answer: Dict[str, Any]) -> Tuple[Dict[str, Any], List[Tuple[Unit, str]], Dict[str, Any]]:
        """Asks again until no unit is offloaded by half, and returns the last question, its units and
        the answer. A unit of which a half is offloaded would be offloaded as a whole, and take longer."""
        one: Set[Unit] = set()
        for _ in range(HALVES):
            more = self.halves(names, answer)
            if not more:
                break
            one |= more
            again, units = self.request(request["limit"], True, one=one)
            try:
                request, names, answer = again, units, choose(again)
            except TooSmall:  # the answer before holds no more than it says
                break
        longer, units = self.request(request["limit"], True, one=one, effort=1)
        try:
            better = choose(longer)
        except TooSmall:
            return request, names, answer
        if not self.halves(units, better) and self.plan(units, better).expected < self.plan(names, answer).expected:
            return longer, units, better
        return request, names, answer

    def plan(self, names: Sequence[Tuple[Unit, str]], answer: Dict[str, Any]) -> Plan:
        """Returns the choices that an answer means."""
        said = self.said(names, answer)
        choices: Dict[Unit, Choice] = {}
        for u, by in said.items():
            whole = by.get("rest") == "recompute"
            lean = [s for s in self._sorts(u) if by.get(s.name) == "recompute"]
            offload = by.get("inputs") == "offload" if whole else "offload" in (by.get("rest"), by.get("inputs"))
            if whole:
                choices[u] = self._again_whole(u)._replace(offload=offload)
            elif lean:
                choices[u] = self._leanest(u, lean, offload)
            elif offload:
                choices[u] = Choice(offload=True)
        plan = Plan(choices, {}, {}, {}, answer)
        self.count(plan)
        return plan

    def count(self, plan: Plan) -> None:
        """Counts the bytes that stay in a call of each unit, and those that a second pass makes."""
        plan.saved.clear()
        plan.again.clear()
        plan.cast.clear()
        for part in self.parts.values():
            u, c = part.unit, plan.choices.get(part.unit, KEEP)
            plan.saved[u] = max(plan.saved.get(u, 0), part.inputs + part.rest + part.lean - self.dropped(part, plan.choices))
            plan.again[u] = max(plan.again.get(u, 0), part.dropped(c))
            before, cast = plan.cast.get(u, Cast()), part.cast(c)
            plan.cast[u] = Cast(max(before.stays, cast.stays), max(before.passes, cast.passes))


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


def measured(profile: Profile, units: Sequence[Unit], alone: bool = True) -> List[Measured]:
    """Returns what a recorded step says, with blocks as units and, if they have parts, with
    these as units. Second passes end earlier if no other rank runs them, too: what they leave out
    may be a collective."""
    settle(units)
    fine = [False, True] if any(u.parent is not None for u in units) else [False]
    earlier = [Measured(profile, of, ends=True) for of in fine] if alone and EARLY else []
    divisions = [Measured(profile, of) for of in fine] + [m for m in earlier if m.ends]
    return divisions + [Measured(profile, False, b) for b, calls in profile.smaller.items() if calls]


def best(divisions: Sequence[Measured], choose: Choose, limit: int, offload: bool = True, everything: bool = False) -> Plan:
    """Returns the fastest plan for a limit of saved tensors or, if so, of everything that a
    step holds beyond its base. It raises TooSmall if there is none. Second passes that end earlier
    are faster, and keep more."""
    found: Optional[Plan] = None
    small: Optional[TooSmall] = None
    least = max(limit, 1)  # the solver takes no other, and says how much too little that is
    for m in sorted(divisions, key=lambda m: not m.ends):
        if found is not None and not m.ends and any(other.ends and other.like(m) for other in divisions):
            continue
        asked, counted, tried = least, 0, 0
        never: Optional[Set[Unit]] = None  # once no plan was found: units whose second pass takes too much
        here: List[Plan] = []
        while tried < (TRIES if everything else 1) or everything and not here and never is None:
            if tried == TRIES:
                asked, tried, never = least, 0, set()
            tried += 1
            effort = BRIEF if offload or everything and not (here and tried == TRIES) else 1  # the last question may take longer
            request, names = m.request(asked, offload, everything, never, effort=effort)
            try:
                answer = choose(request)
                if offload:
                    request, names, answer = m.whole_units(choose, request, names, answer)
            except TooSmall as e:
                small = forget(e) if small is None or e.least < small.least else small
                if not everything or e.least <= asked:
                    tried = TRIES
                else:
                    asked = e.least  # the plan that takes least may fit
                continue
            plan, over = m.plan(names, answer), 0
            if everything:  # the solver counts about that much, and this exactly that much
                counted, (most, second) = answer["peak"], m.fullest(plan.choices)
                over = most - limit
                answer["peak"], answer["before_peak"] = m.most_kept(plan.choices), m.most_kept({})
                if over > 0 and never is not None and second is not None and second not in never:
                    never.add(second)
                    tried -= 1
                    continue
            if over <= 0:
                here.append(plan)
            if over <= 0 and (-over <= limit // 64 or not plan.choices):
                if effort == 1 or not plan.choices:
                    break
                tried = TRIES - 1
                continue
            asked = max(min(asked, counted) - over if over > 0 else asked - over // 2, 1)
        # The solver counts too much, or too little. If it names no least it refuses such plans, as it does in tests.
        if everything and not here and (small is None or small.least > 0):
            strongest = m.strongest(m.request(least, offload, everything)[0])
            here = [strongest] if m.most_counted(strongest.choices) <= limit else []
        for plan in here:
            if everything and plan.choices:
                plan = m.spared(m.exchanged(m.mixed(plan, limit), limit), limit)
            if found is None or plan.expected < found.expected:
                found = plan
    if found is None:
        try:
            raise small or TooSmall("the plans that were tried take too much")
        finally:
            del small  # or this frame and the error hold each other, and all frames around them
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
            less = sum(m.dropped(part, plan.choices) - m.dropped(part, before) for part in m.parts.values())
            plan.answer["peak"] = max(plan.answer["peak"] - less, 0)
            return
