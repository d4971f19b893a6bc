"""What is known of the steps under one key of a runtime with a budget."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Set, Tuple

from ._errors import TooSmall
from ._plan import Measured, Plan
from ._profile import Profile, Unit, fits
from ._ranks import Facts

# In the first steps of a stage, so many, the measured peak changes the plan.
REFINED = 3

# Plans leave this part of the budget, because no two steps are quite alike. Plans that compile blocks again leave nothing
# once two steps held the same: what compiled blocks save is known to the byte.
SLACK = 128

# Once steps were measured, plans that offload leave this part for copies that are late.
LATE = 64

# The device waits for the host if it is busy for less than this part of a step, and for fewer seconds, when the
# host is done with it: there are always some kernels left.
BEHIND = 1 / 24, 3e-3

# It waits for the host now and then if it is busy for less than this part of a step.
NEAR = 1 / 6


class Key:
    """What is known of the steps under one key."""

    def __init__(self) -> None:
        self.recorded = 0  # steps
        self.measured: List[Measured] = []
        self.total = 0  # limit of everything beyond the base, for plans that only recompute
        self.limit = 0  # of saved tensors, for plans that also offload
        self.flat = 0  # the same, as recorded steps tell without any caution
        self.peak = 0  # of the last step of the stage
        self.before = 0  # the peak of the step before that
        self.squeezed = False  # the plan was changed once more, because steps held the same
        self.over = 0  # the most that a step under a plan exceeded the budget by; later plans leave as much
        self.kept = 0  # the limit that the library learnt in steps that offload
        self.outside = 0  # bytes that are saved outside of units
        self.base = 0  # bytes that are held when a step begins, that the limit goes with
        self.watched = 0  # steps of a settled plan whose peak is read
        self.largest = 0  # bytes that one call of a unit saves
        self.in_compiled = 0  # bytes that compiled blocks save beside what they are given, in the last recorded step
        self.most = 0  # bytes that the last recorded step held beyond its base, if everything is kept
        self.plan: Optional[Plan] = None
        self.last_resort = False  # it recomputes everything that it can, and forecasts say that this is too little
        self.fitted = False  # a step under a plan kept to the budget
        self.no_offload = False  # no plan that offloads keeps to it, by forecasts
        self.version = 0  # of the plan
        self.stage = "recompute"  # perhaps with a "contest" in between; then "offload", "compare" and "settled"
        self.steps = 0  # in this stage
        self.followed = 0  # steps that followed a plan
        self.times: List[float] = []  # seconds of the last steps of this stage
        self.passes: Dict[Unit, int] = {}  # nanoseconds of second passes in the last one of them, at least
        self.cheap: Dict[Unit, Dict[str, int]] = {}  # the same of cheap parts, by kind, in all calls
        self.retimed = False  # the plan was made from such times
        # Seconds for which the device was still busy when the host was done with the last of them, and whether it was idle before.
        self.behind, self.idle = float("inf"), False
        self.contest: Any = None  # plans that take turns
        self.other: Optional[Tuple[Plan, int]] = None  # the plan that only recomputes, and its limit
        self.turns: Dict[bool, List[float]] = {}  # seconds of steps, by whether they offload
        self.held: Optional[Tuple[Plan, int]] = None  # the last plan that the library could follow, and its limit
        self.lowered = 0  # times that the library needed more than the limit of a plan
        self.by_library = False  # rows are stashed: the library alone plans
        self.last: Optional[Facts] = None  # of the last step, that nothing was decided from
        self.profile: Optional[Profile] = None  # of the last step, if it was recorded
        self.agreed: Set[Tuple[str, int, str]] = set()  # second passes that all ranks try
        self.room = 0  # of the budget when the last recorded step began
        self.small: Optional[TooSmall] = None  # why the library could not follow the plan
        self.lacks = 0  # bytes that it lacked
        self.begun = 0  # steps after the plan was settled

    def state(self) -> Tuple[int, str, int]:
        """Returns what is the same on all ranks that run the same steps."""
        return self.recorded, "recorded" if self.plan is None else self.stage, self.steps

    def plan_key(self, key: str) -> str:
        """Returns the key under which the library knows steps that follow the plan."""
        return f"{key}\x01{self.version}"

    def change(self, size: int, peak: int, measures: bool) -> int:
        """Returns by how much the limit should change for the peak to be near the budget. Early
        in a stage it may rise, and once more if steps held the same: until squeezed is set."""
        slack, plan = size // SLACK, self.plan
        assert plan is not None
        if peak > size:
            return size - peak - slack
        if self.stage == "offload" and self.lowered:
            return 0  # the library needed more at a limit that is little larger
        if self.stage == "offload" and self.steps < REFINED and not self.over and self.kept - size // LATE > self.limit + size // LATE:
            # The library keeps to its limit, but what stays beside it grows with the limit, too.
            return max(min(self.kept - size // LATE - self.limit, size - peak - size // LATE), 0)
        if not plan.choices or self.other is not None or not measures or self.stage == "contest":
            return 0
        if self.steps < REFINED and peak < size - slack - slack // 4:
            room = max(self.left(size, peak), 0)
            return room if self.stage == "recompute" else max(min(room // 2, max(self.flat, self.kept) - size // LATE - self.limit), 0)
        steady = peak == self.before and not self.over and any(c.budget for c in plan.choices.values())
        if self.stage == "recompute" and self.steps > REFINED and steady and not self.squeezed:
            return size - peak
        return 0

    def left(self, size: int, peak: int) -> int:
        """Returns what a step left of a budget, without a part for steps that differ."""
        return size - peak - size // SLACK - self.over

    def fits(self, less: int, units: Mapping[str, Tuple[Optional[bool], Optional[bool]]]) -> FrozenSet[Tuple[str, int, str]]:
        """Returns the second passes for which there was room in the recorded step, and is if there is so much less now."""
        found = set()
        for (name, number), (need, room, away) in (self.profile.rooms.items() if self.profile is not None else ()):
            whole, lean = units.get(name, (False, False))
            for what, can, free in (("whole", whole, room - away), ("lean", lean, room - away), ("sparingly", whole, room)):
                if can is not False and fits(need, free - less):
                    found.add((name, number, what))
        return frozenset(found)

    def count_hooks(self, seconds: float) -> None:
        """Lets what recomputing takes of the host count in plans, if the device waited for it in a step of so many seconds."""
        if self.idle and self.behind < min(BEHIND[0] * seconds, BEHIND[1]):
            for m in self.measured:
                m.count_hooks()

    def waits(self, seconds: float) -> bool:
        """Reports whether the device waited for the host now and then in a step of so many seconds."""
        return self.behind < NEAR * seconds

    def division(self, plan: Plan) -> Optional[Measured]:
        """Returns the division into units that a plan was made for."""
        return next((m for m in self.measured if m.made(plan)), None)

    def less(self, plan: Plan, room: int) -> Plan:
        """Returns a plan that recomputes less than one which left so many bytes, or that one."""
        m = self.division(plan)
        return plan if m is None else m.relaxed(plan, room)

    def back(self) -> Plan:
        """Returns the last plan that the library could follow, once, with its limit as the limit from now on."""
        assert self.held is not None
        (plan, self.limit), self.held = self.held, None
        return plan

    def retime(self) -> None:
        """Gives the times of the last step to those who plan."""
        for m in self.measured:
            m.retime(self.passes, self.cheap)
        self.passes, self.cheap = {}, {}

    def strongest(self) -> Tuple[int, int, Optional[Plan]]:
        """Returns the plan that recomputes everything that it can, and the least and the most that it may hold, for a
        budget that no plan keeps to: forecasts count the most, and a checkpoint of every block may fit."""
        found: Tuple[int, int, Optional[Plan]] = (0, 0, None)
        for m in self.measured:
            plan = m.strongest(m.request(self.total, False, True)[0])
            least = m.most_held(plan.choices, perhaps=True)
            if plan.choices and (found[2] is None or least < found[0]):
                found = least, m.most_counted(plan.choices), plan
        return found

    def fallback(self) -> Optional[Plan]:
        """Returns the plan to go on with if none keeps to the budget. It returns None if nothing can be recomputed,
        or if there is too little memory for what remains and no step did fit."""
        light = max((sum(part.light for part in m.parts.values()) for m in self.measured), default=0)
        if self.flat + light <= 0 and not self.fitted:
            return None
        now = self.plan if self.fitted and self.plan is not None and not self.plan.offloads else None
        return self.strongest()[2] or now
