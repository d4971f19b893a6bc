"""Plans of steps under a budget: how they are made, tried and settled.

The first steps of a key are recorded. Then a plan that only recomputes is followed, and
adapted until the measured peak is close to the budget. If the solver expects more of a plan
that also offloads, that one is followed for some steps, too. The one whose steps are
measured to be faster stays.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from . import _explain
from ._again import raised
from ._budget import Budget
from ._errors import Error, TooSmall
from ._managed import Following, Recording, Units
from ._plan import Measured, Plan, best, measured, recompute_also
from ._profile import Profile
from ._step import Step

# So many steps of a key are recorded: the first loads code, so its times are not used.
RECORDED = 2

# In the first steps of a stage the measured peak changes the plan, the next ones settle,
# and the last TIMED are timed. Plans that offload take longer: the library records one
# step and times another.
REFINED = 3
TIMED = 3
STEPS = {"recompute": REFINED + TIMED, "offload": REFINED + 2 + TIMED}

# A first plan leaves this part of the budget, because second passes need memory, too. The
# measured peak then tells how much of it can be used.
CAUTION = 16

# The peak of settled plans is read once in so many steps.
LOOK = 16

# A plan that offloads is tried if its forecast is shorter by this factor.
WORTH = 0.995


class Key:
    """What is known of the steps under one key."""

    def __init__(self) -> None:
        self.recorded = 0  # steps
        self.measured: List[Measured] = []
        self.limit = 0  # of saved tensors, that the plan was made for
        self.outside = 0  # bytes that are saved outside of units
        self.largest = 0  # bytes that one call of a unit saves
        self.plan: Optional[Plan] = None
        self.version = 0  # of the plan
        self.stage = "recompute"  # then "offload", then "settled"
        self.steps = 0  # in this stage
        self.followed = 0  # steps that followed a plan
        self.times: List[float] = []  # seconds of the last steps of this stage
        self.other: Optional[Tuple[Plan, int, float]] = None  # the plan before, its limit and its time
        self.lowered = 0  # times that the library needed more than the limit of a plan
        self.by_library = False  # rows are stashed: the library alone plans

    def library_key(self, key: str) -> str:
        """Returns the key under which the library knows steps that follow the plan."""
        return f"{key}\x01{self.version}"


class Planner:
    """Makes the plans of a runtime with a budget."""

    def __init__(self, runtime: Any, budget: Budget, ranks: Any) -> None:
        self._runtime, self._budget, self._ranks = runtime, budget, ranks
        self.units = Units(runtime)
        self.keys: Dict[str, Key] = {}
        self._refused: Dict[str, str] = {}  # kinds of cheap tensors that are kept, and why

    def known(self, key: str) -> Optional[Key]:
        """Returns what is known of a key whose steps are planned here, or None if the library
        alone plans them: without blocks, and with rows."""
        if not self.units.list:
            return None
        known = self.keys.setdefault(key, Key())
        return None if known.by_library else known

    def changed(self) -> None:
        """Forgets all plans, because there are other models."""
        self.units.unwrap()
        self.keys.clear()

    def stats(self) -> Dict[str, Any]:
        """Returns what was planned, by key."""
        out: Dict[str, Any] = {}
        for key, known in self.keys.items():
            plan = known.plan
            choices: Dict[str, List[str]] = {}
            for u, c in plan.choices.items() if plan is not None else ():
                choices.setdefault(str(c), []).append(u.name)
            answer = plan.answer if plan is not None else {}
            out[key] = {
                "stage": "recorded" if plan is None else known.stage, "steps": known.followed, "choices": choices,
                "recomputed_ns": answer.get("again_ns", 0), "offloaded": answer.get("moved", 0), "saved": answer.get("before_peak", 0), "kept": answer.get("peak", 0),
            }  # fmt: skip
        return out

    def notes(self) -> List[str]:
        """Returns why blocks are never recomputed."""
        why: Dict[str, List[str]] = {}
        for u in self.units.list:
            if u.why:
                why.setdefault(u.why, []).append(u.name)
        notes = [f"{_names(names)} cannot be recomputed: {reason}" for reason, names in why.items()]
        return notes + [f"outputs of {kind} are not recomputed as cheap parts: {reason}" for kind, reason in self._refused.items()]

    # Recorded steps

    def spare(self, known: Key) -> int:
        """Returns how much of the budget a recorded step leaves for second forward passes."""
        return 3 * known.largest

    def record(self, step: Step) -> Profile:
        rt = self._runtime
        profile = Profile(rt.device, step, rt._weights, rt._least, self._budget, self._refused)
        self.units.wrap_all()
        rt._now = Recording(step, profile)
        return profile

    def learn(self, key: str, known: Key, step: Step, profile: Profile) -> None:
        """Learns from a recorded step, and makes a plan once there are enough of them."""
        profile.close()
        if step.used_rows or not profile.calls:
            known.by_library = True
            self._rewrap()
            return
        known.recorded += 1
        known.largest = profile.largest()
        if known.recorded < RECORDED:
            return
        known.measured = measured(profile, self.units.list)
        # What the library does not count is part of everything else, and part of the plan.
        known.limit = max(self._budget.limit_of(key) + sum(profile.untold.values()) - self._budget.size // CAUTION, 1)
        known.outside = profile.most_outside()
        if not self._adopt(key, known, self._solve(known, False)):
            known.stage = "offload"
            if not self._adopt(key, known, self._solve(known, True)):
                known.limit += self._budget.size // CAUTION  # it is tight
                self._adopt(key, known, self._solve(known, True), needed=True)
        if known.plan is not None and not known.plan.choices and not any(self._gather(False)):
            known.stage = "settled"

    # Plans

    def _solve(self, known: Key, offload: bool) -> Tuple[Optional[Plan], Optional[TooSmall]]:
        try:
            return best(known.measured, self._runtime._library.choose, known.limit, offload), None
        except TooSmall as e:
            return None, e

    def _adopt(self, key: str, known: Key, solved: Tuple[Optional[Plan], Optional[TooSmall]], needed: bool = False) -> bool:
        """Follows a plan from the next step on, if all ranks have one. What any rank recomputes
        all of them do: a second pass of a sharded module gathers it again."""
        plan, small = solved
        all = self._gather(None if plan is None else sorted(u.name for u, c in plan.choices.items() if c.whole))
        if plan is None or any(names is None for names in all):
            if needed:
                raise self._budget.explain(small or TooSmall("")) from None
            return False
        recompute_also(plan, known.measured, {name for names in all for name in names})
        known.plan, known.version = plan, known.version + 1
        self._budget.expect(known.library_key(key), known.limit - known.outside - self._budget.size // CAUTION)
        self._rewrap()
        return True

    def _gather(self, mine: Any) -> List[Any]:
        """Returns what every rank has here."""
        if self._ranks is None:
            return [mine]
        import torch.distributed as dist

        group = None if self._ranks is True else self._ranks
        all: List[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(all, mine, group=group)
        return all

    def _rewrap(self) -> None:
        self.units.rewrap(known.plan for known in self.keys.values())

    # Steps that follow a plan

    @contextlib.contextmanager
    def follow(self, key: str, known: Key) -> Iterator[None]:
        """Runs a step that follows a plan. The library takes part only if something is
        offloaded."""
        rt, budget, step = self._runtime, self._budget, None
        if known.plan is not None and known.plan.offloads:
            rt._refresh()
            step = self._begin(key, known)
        look = known.stage != "settled" or known.followed % LOOK == 0
        if step is None and look:
            budget.watch(known.stage != "settled")
        plan = known.plan
        assert plan is not None
        clock = _Stopwatch(rt.device) if known.stage != "settled" and known.steps >= STEPS[known.stage] - TIMED else None
        rt._step, rt._now = step, Following(plan, rt.device, max(rt._least, 1), step, self._refused)
        small: Optional[TooSmall] = None
        try:
            yield
            rt._step = rt._now = None
            if step is not None:
                try:
                    step.end(False)
                except TooSmall as e:
                    small = e
            peak = budget.watched(plan.answer["peak"] if step is None else None) if look else 0
        except BaseException as e:
            rt._step = rt._now = None
            if step is not None:
                _explain.add_to_error(e, rt, step)
                with contextlib.suppress(Exception):  # the first exception says more
                    if not step.over:
                        step.end(True)
                if step.raised is not None and type(e) is RuntimeError:
                    raise Error(step.raised) from None
            if raised(e):
                raise Error(raised(e)) from None
            raise
        known.followed += 1
        if clock is not None:
            known.times.append(clock.seconds())
        self._advance(key, known, peak, small)

    def _begin(self, key: str, known: Key) -> Optional[Step]:
        """Begins a step of the library that follows a plan, or another plan if the library finds
        that this one does not fit. It returns None if that one offloads nothing."""
        rt = self._runtime
        while known.plan is not None and known.plan.offloads:
            name = known.library_key(key)
            self._budget.begin(name)
            step = Step(rt._library, rt.device, rt._least, rt._moves, None, rt._weights, rt._seen, rt._held, self._budget)
            try:
                rt._library.begin(name, step.stream)
                return step
            except TooSmall as e:
                self._lower(key, known, e)
        return None

    def _lower(self, key: str, known: Key, e: TooSmall) -> None:
        """Makes another plan because the library needs more than its limit: the one before, or
        one that keeps less."""
        known.lowered += 1
        if known.other is not None and known.lowered > 2:
            self._settle(key, known, known.other[0], known.other[1])
            return
        known.limit -= max(e.least - self._runtime._library.usage().limit, known.limit // 64) + 1
        if known.lowered > 8 or known.limit <= 0:
            raise self._budget.explain(e) from None
        if not self._adopt(key, known, self._solve(known, True), needed=known.other is None):
            assert known.other is not None
            self._settle(key, known, known.other[0], known.other[1])

    def _advance(self, key: str, known: Key, peak: int, small: Optional[TooSmall]) -> None:
        """Draws the conclusions of a step that followed a plan."""
        budget, plan = self._budget, known.plan
        assert plan is not None
        if small is not None and self._ranks is None:
            self._lower(key, known, small)
            return
        settled = known.stage == "settled"
        if settled and (self._ranks is not None or peak <= budget.size):
            return
        change = self._change(known, plan, peak)
        if any(self._gather(change != 0)):
            known.limit = max(known.limit + change, 1)
            offload = known.stage == "offload" or settled and plan.offloads
            if not self._adopt(key, known, self._solve(known, offload)) and not offload:
                known.stage, known.steps = "offload", 0
                self._adopt(key, known, self._solve(known, True), needed=True)
            known.times = []
            if known.steps < REFINED:
                known.steps += 1
            return
        known.steps = max(known.steps + 1, REFINED)
        if known.steps < STEPS[known.stage]:
            return
        took = sum(self._gather(min(known.times[-TIMED:]) if known.times else 0.0))
        if known.stage == "recompute":
            for m in known.measured:
                m.calibrate(int(1e9 * min(known.times[-TIMED:])) if known.times else plan.answer["step_ns"], plan.answer["again_ns"])
            known.other = (plan, known.limit, took)
            known.limit -= self._budget.size // 64  # copies are not always in time
            solved = self._solve(known, True)
            tried = solved[0] is not None and solved[0].offloads and 1e-9 * solved[0].answer["step_ns"] < WORTH * took
            if any(self._gather(tried)) and self._adopt(key, known, solved):
                known.stage, known.steps, known.times = "offload", 0, []
            else:
                known.stage, known.limit = "settled", known.other[1]
        elif known.other is not None and known.other[2] <= took:
            self._settle(key, known, known.other[0], known.other[1])
        else:
            known.stage = "settled"

    def _change(self, known: Key, plan: Plan, peak: int) -> int:
        """Returns by how much the limit should change for the peak to be near the budget. Early
        in a stage it may rise."""
        size = self._budget.size
        slack = size // 128
        if peak > size:
            return size - peak - slack
        if plan.choices and known.other is None and known.steps < REFINED and self._budget.measures and peak < size - 2 * slack:
            return 3 * (size - peak - slack) // 4
        return 0

    def _settle(self, key: str, known: Key, plan: Plan, limit: int) -> None:
        """Goes back to a plan that was followed before."""
        known.plan, known.limit, known.version, known.stage = plan, limit, known.version + 1, "settled"
        self._rewrap()


def _names(names: List[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class _Stopwatch:
    """The time of a step on its device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began: Any = time.perf_counter()
        if self._cuda:
            torch.cuda.synchronize(device)  # the host's head start is no part of the step
            self._began = time.perf_counter()

    def seconds(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return float(time.perf_counter() - self._began)
