"""Plans that take turns. Where the device waits for the host, a step takes as long as the host does, of which forecasts know little:
the fastest plans by forecast are followed in turns, and the one whose steps are fastest stays."""

from __future__ import annotations

import contextlib
from typing import Dict, List, Optional, Sequence, Tuple

from ._errors import TooSmall
from ._key import Key
from ._plan import Choose, Measured, Plan, best
from ._profile import Unit

# So many plans take turns at most beside the one that is followed, and each so often; the first turn of each does not count.
PLANS = 3
TURNS = 10

# Plans whose second passes take longer than the shortest ones by this part of a step take no turns.
FAR = 1 / 6

# A plan that only recomputes takes the place of another if it takes less by this part of a step.
WORTH_AGAIN = 0.002


class Entrant:
    """A plan that takes turns."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.before: Optional[Plan] = None  # what it was before its first turn, which kept to the budget
        self.fixed = False  # it is what it was before its first turn, and stays so
        self.times: List[float] = []  # seconds of its steps


class Contest:
    """Plans that take turns, and how long their steps took."""

    def __init__(self, plans: Sequence[Plan], exceeded: int = 0) -> None:
        self.exceeded = exceeded  # bytes by which steps before it were over the budget at most
        self._entrants = [Entrant(plan) for plan in plans]
        self._turn = 0

    @property
    def _next(self) -> Entrant:
        return self._entrants[self._turn % len(self._entrants)]

    @property
    def now(self) -> Plan:
        """The plan whose turn it is."""
        return self._next.plan

    @property
    def over(self) -> bool:
        return len(self._entrants) == 1 or all(len(e.times) >= TURNS for e in self._entrants)

    def note(self, seconds: float) -> None:
        """Notes how long the step took that followed the plan of now."""
        self._next.times.append(seconds)
        self._turn += 1

    @property
    def first(self) -> bool:
        """Whether the plan of now has its first turn and may be changed after it."""
        return not self._next.times and not self._next.fixed

    def change(self, plan: Plan) -> None:
        """Puts another plan in the place of the plan of now, which kept to the budget."""
        e = self._next
        if plan is not e.plan:
            e.plan, e.before = plan, e.plan

    def drop(self) -> None:
        """Takes the plan of now out, because it held too much, unless it is the last. If it was changed after its first turn,
        the plan before takes its place, from its first turn on."""
        e = self._next
        if e.before is not None:
            e.plan, e.before, e.fixed, e.times = e.before, None, True, []
        elif len(self._entrants) > 1:
            self._turn %= len(self._entrants)
            del self._entrants[self._turn]

    def fastest(self) -> Plan:
        return min(self._entrants, key=lambda e: undisturbed(e.times[1:])).plan


def undisturbed(times: Sequence[float]) -> float:
    """Returns what a quarter of the times are below: what disturbs a host only adds to them, and often to more than half of them."""
    return sorted(times)[len(times) // 4] if times else float("inf")


def divided(measured: Sequence[Measured]) -> List[Measured]:
    """Returns divisions in which the last blocks have their parts as units and the first blocks are units as they are: what the
    last blocks save is needed first, so that less of it must be recomputed. Second passes that end earlier keep more, as in other divisions."""
    ends, profile = sorted({False, *(m.ends for m in measured)}), measured[0]._profile
    blocks: Dict[Unit, None] = dict.fromkeys(call.unit for call in profile.calls if call.parent is None)
    first = [u for u in blocks if u.parts]  # in the order of their calls
    return [Measured(profile, True, ends=end, but=frozenset(first[:n])) for end in ends for n in sorted({len(first) * i // 4 for i in (1, 2, 3)} - {0})]


def contenders(known: Key, plan: Plan, choose: Choose, seconds: float) -> List[Plan]:
    """Returns the plan and others that only recompute and may be faster, of which the first is the fastest by forecast. Divisions that
    they are made for are known from now on."""
    passes, cheap = known.passes, known.cheap
    known.retime()
    more = divided(known.measured)
    for m in more:
        m.retime(passes, cheap)
    found: List[Tuple[int, Measured, Plan]] = []
    limit = known.total
    hooks = [dict(m._hooks) for m in known.measured]
    for m in [*known.measured, *more]:
        m.count_hooks()
        others: List[Plan] = [plan] if m.made(plan) else []
        if not others:
            with contextlib.suppress(TooSmall):
                others.append(best([m], choose, limit, False, everything=True))
            changed = m.like_plan(plan, limit) if m in more else None
            others += [changed] if changed is not None else []
        for other in sorted(others, key=lambda p: m.again(p.choices))[:1]:
            if all(other.choices != p.choices for _, _, p in found):
                found.append((m.again(other.choices), m, other))
    least = min((took for took, _, _ in found), default=0)
    found = sorted((of for of in found if of[2] is plan or of[0] <= least + FAR * 1e9 * seconds), key=lambda of: (of[0], of[2] is not plan))
    found = found[:PLANS] + [of for of in found[PLANS:] if of[2] is plan]
    if not known.idle:  # the step waited for the device: hooks counted to choose among plans, and no longer
        for m, before in zip(known.measured, hooks):
            m._hooks = before
    known.measured += [m for _, m, _ in found if m in more]
    return [p for _, _, p in found] or [plan]


def faster(known: Key, plan: Plan, choose: Choose, seconds: float) -> Plan:
    """Returns a plan that only recomputes and is faster than one by the times of steps under it, or that one."""
    made_for = known.division(plan)
    known.retime()
    known.count_hooks(seconds)
    if made_for is None:
        return plan
    found, least = plan, made_for.again(plan.choices) - int(WORTH_AGAIN * 1e9 * seconds)
    for m in known.measured:
        try:
            other = best([m], choose, known.total, False, everything=True)
        except TooSmall:
            continue
        if m.again(other.choices) < least:
            found, least = other, m.again(other.choices)
    return found
