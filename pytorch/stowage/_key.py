"""What is known of the steps under one key of a runtime with a budget."""

from __future__ import annotations

from typing import Dict, List, Optional, Set, Tuple

from ._errors import TooSmall
from ._plan import Measured, Plan
from ._profile import Profile, Unit
from ._ranks import Facts


class Key:
    """What is known of the steps under one key."""

    def __init__(self) -> None:
        self.recorded = 0  # steps
        self.measured: List[Measured] = []
        self.total = 0  # limit of everything beyond the base, for plans that only recompute
        self.limit = 0  # of saved tensors, for plans that also offload
        self.flat = 0  # the same, as recorded steps tell without any caution
        self.peak = 0  # of the last step of the stage
        self.over = 0  # the most that a step under a plan exceeded the budget by; later plans leave as much
        self.kept = 0  # the limit that the library learnt in steps that offload
        self.outside = 0  # bytes that are saved outside of units
        self.base = 0  # bytes that are held when a step begins, that the limit goes with
        self.watched = 0  # steps of a settled plan whose peak is read
        self.largest = 0  # bytes that one call of a unit saves
        self.most = 0  # bytes that the last recorded step held beyond its base, if everything is kept
        self.plan: Optional[Plan] = None
        self.last_resort = False  # it recomputes everything that it can, and forecasts say that this is too little
        self.fitted = False  # a step under a plan kept to the budget
        self.no_offload = False  # no plan that offloads keeps to it, by forecasts
        self.version = 0  # of the plan
        self.stage = "recompute"  # then "offload", "compare" and "settled"
        self.steps = 0  # in this stage
        self.followed = 0  # steps that followed a plan
        self.times: List[float] = []  # seconds of the last steps of this stage
        self.passes: Dict[Unit, int] = {}  # nanoseconds of second passes in the last one of them, at least
        self.cheap: Dict[Unit, Dict[str, int]] = {}  # the same of cheap parts, by kind, in all calls
        self.retimed = False  # the plan was made from such times
        self.other: Optional[Tuple[Plan, int]] = None  # the plan that only recomputes, and its limit
        self.turns: Dict[bool, List[float]] = {}  # seconds of steps, by whether they offload
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
