"""Plans of steps under a budget: how they are made, tried and settled.

The first steps of a key are recorded. Then a plan that only recomputes is followed, and
adapted until the measured peak is close to the budget. If the solver expects more of a plan
that also offloads, that one is followed for some steps, too. Then both take turns, because the
clocks of a device change, and the one whose steps are faster stays. Where the device waits for the host,
several plans that only recompute take turns before that (_contest.py).

Decisions are made from facts of all ranks that must agree (_ranks.py). A rank alone decides
when a step ends; several decide when the next one begins, which is where they exchange.
Whatever follows from the same facts is the same on all of them, further exchanges too.
"""

from __future__ import annotations

import contextlib
import statistics
import warnings
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Tuple

import torch

from . import _explain
from ._again import Refused, raised
from ._budget import Budget
from ._clock import Stopwatch
from ._compiled import BUDGETS, allow_more_graphs
from ._contest import TURNS, Contest, contenders, faster, undisturbed
from ._errors import BudgetError, Error, TooSmall, forget
from ._key import LATE, REFINED, SLACK, Key
from ._managed import Following, Passes, Recording, Units
from ._measured import KEEP
from ._plan import Plan, agree, best, measured, notes, summary
from ._profile import Profile
from ._ranks import CHECKED, Facts, Ranks, failure_of
from ._step import Step
from ._written import Broadcasts

# So many steps of a key are recorded: the first loads code, so its times are not used.
RECORDED = 2

# In the first steps of a stage the measured peak changes the plan, and the next ones settle.
# Plans that offload take longer: the library records one step and times another. TIMED steps
# of a plan are timed.
TIMED = 3
STEPS = {"recompute": REFINED + TIMED, "offload": REFINED + 2}

# A first plan that offloads leaves this part of the budget, because second passes and copies
# need memory, too. The measured peak then tells how much of it can be used.
CAUTION = 16

# The peak of settled plans that keep everything is read once in so many steps.
LOOK = 16

# A plan that offloads is tried if its forecast is shorter by this factor.
WORTH = 0.99

# A plan, or why there is none.
Solved = Tuple[Optional[Plan], Optional[Exception]]


class Planner:
    """Makes the plans of a runtime with a budget."""

    def __init__(self, runtime: Any, budget: Budget, ranks: Any, exact: bool = True) -> None:
        self._runtime, self._budget, self._setting = runtime, budget, ranks
        self._found: Optional[Ranks] = None
        self.units = Units(runtime)
        self.keys: Dict[str, Key] = {}
        self._refused = Refused()  # kinds of cheap tensors that are kept, and why
        self._exact = exact
        self._broadcasts: List[Broadcasts] = []  # of DDP modules whose buffers are written between two passes
        self._warned = False  # a step that exceeded the budget was told of
        self._not_smaller: Dict[str, str] = {}  # kinds of compiled blocks that are not compiled again, and why

    @property
    def ranks(self) -> Ranks:
        """The ranks that agree with this one. Which they are is known when models are attached."""
        if self._found is None:
            models = [a.model for a in self._runtime._attached if a.model is not None]
            self._found = Ranks(self._setting, models, self._runtime.device)
        return self._found

    def begin(self, key: str) -> Optional[Key]:
        """Begins a step: returns what is known of a key whose steps are planned here, or None if
        the library alone plans them: without blocks, and with rows. If several ranks agree, this
        is where they do."""
        if not self.units.list and not self.ranks.several:
            return None
        known = self.keys.setdefault(key, Key())
        if known.by_library:
            return None
        if self.ranks.several:
            settled = known.plan is not None and known.stage == "settled"
            known.begun = known.begun + 1 if settled else 0
            if not settled or known.begun % CHECKED == 0:
                mine, known.last = known.last or Facts(key, None), None
                error = self._budget.exceeded()
                failure = None if error is None else failure_of(error)
                self._conclude(key, known, mine._replace(state=known.state(), fits=self._fits(known), failure=failure), error)
        return None if known.by_library else known

    def _end(self, key: str, known: Key, facts: Facts) -> None:
        """Ends a step of which there are facts."""
        if not self.ranks.several:
            self._conclude(key, known, facts._replace(state=known.state()))
            return
        if known.last is not None:  # of a settled plan: the step that exceeded most
            facts = facts._replace(change=min(facts.change, known.last.change), lacks=max(facts.lacks, known.last.lacks))
        known.last = facts

    def _conclude(self, key: str, known: Key, mine: Facts, error: Optional[BudgetError] = None) -> None:
        """Draws the conclusions of a step. Every rank comes here with the same state."""
        all = self.ranks.facts(mine, error)
        tried = [set(f.fits) for f in all if f.fits is not None]
        known.agreed = set.intersection(*tried) if len(tried) == len(all) else known.agreed
        if any(f.by_library for f in all):
            known.by_library, known.plan, known.profile = True, None, None
            self._rewrap()
        elif any(not f.learnt for f in all):
            known.profile = None
        elif known.plan is None:
            self._plan(key, known, all)
        else:
            self._advance(key, known, mine, all)

    def leave(self, key: str) -> None:
        """Leaves the steps of a key to the library alone."""
        self.keys.setdefault(key, Key()).by_library = True

    def check_capture(self, key: str) -> None:
        """Raises an error if a step that is captured has a plan that the library does not know."""
        known = self.keys.get(key)
        if known is not None and not known.by_library:
            raise Error(f"steps under key {key!r} are planned with recomputation, which cannot be captured; use rt.graph(), or Runtime(recompute=False)")

    def changed(self) -> None:
        """Forgets all plans, because there are other models."""
        self.units.unwrap()
        while self._broadcasts:
            self._broadcasts.pop().remove()
        self.keys.clear()
        self._found = None

    def stats(self) -> Dict[str, Any]:
        """Returns what was planned, by key."""
        out: Dict[str, Any] = {}
        for key, known in self.keys.items():
            plan = known.plan
            out[key] = {"stage": "recorded" if plan is None else known.stage, "steps": known.followed, **summary(plan)}
        return out

    def notes(self) -> List[str]:
        """Returns why blocks are never recomputed."""
        hidden = [f"{name} is compiled as a whole, so its blocks cannot be recomputed; compile the blocks instead" for name in self.units.hidden.values()]
        return notes(self.units.list, self._refused) + hidden + [f"{what}: {why}" for what, why in self._not_smaller.items()]

    # Recorded steps

    def spare(self, known: Key) -> int:
        """Returns how much of the budget a recorded step leaves for second forward passes."""
        return 3 * known.largest

    def record(self, known: Key, step: Step) -> Profile:
        rt = self._runtime
        known.room = self._budget.room()
        budgets = BUDGETS if self._is_tight(known) and any(u.compiled for u in self.units.list) else ()
        if budgets:
            allow_more_graphs()
        enough = (known.most + self._budget.held_now() - self._budget.size) / max(known.in_compiled, 1)
        profile = Profile(rt.device, step, rt._weights, rt._least, self._budget, self._refused, known.agreed if self.ranks.several else None, budgets, self._exact, enough)
        self.units.wrap_all()
        rt._now = Recording(step, profile)
        return profile

    def _is_tight(self, known: Key) -> bool:
        """Reports whether compiled blocks are worth compiling again: the last recorded step held
        more than the budget has. Several ranks would have to agree on it, and do not."""
        return 0 < known.recorded == RECORDED - 1 and not self.ranks.several and known.most > self._budget.size - self._budget.held_now() - self._budget.size // SLACK

    def _fits(self, known: Key) -> Optional[FrozenSet[Tuple[str, int, str]]]:
        """Returns the second passes that can be tried in the next recorded step: there was room
        for them in the last one, and the room did not shrink, by an optimiser for example."""
        if known.profile is None:
            return None
        return known.fits(max(known.room - self._budget.room(), 0), {u.name: (u.whole, u.lean) for u in self.units.list})

    def learn(self, key: str, known: Key, step: Step, profile: Profile) -> None:
        """Learns from a recorded step."""
        profile.close()
        if step.used_rows or not profile.calls or self.units.is_alone and not profile.repeats():
            self._end(key, known, Facts(key, None, by_library=True))
            return
        if profile.rewritten and not self._broadcasts:
            models = [a.model for a in self._runtime._attached if a.model is not None]
            self._broadcasts = [Broadcasts(m) for model in models for m in model.modules() if isinstance(m, torch.nn.parallel.DistributedDataParallel)]
            for u in profile.rewritten if not self._broadcasts else ():
                u.whole, u.why = False, u.why or "its buffers are written before it could run again; if DDP does it, attach() what DDP returned"
        known.largest, known.profile = profile.largest(), profile
        known.most, known.base, known.in_compiled = max(profile.needs, default=0), self._budget.base, profile.in_compiled()
        self._not_smaller.update((f"{kind.__name__} is not compiled with activation_memory_budget={b:g}", why) for (kind, b), why in profile.not_smaller.items())
        # What the library does not count is part of the plan, and of everything else if that is
        # measured.
        untold = sum(profile.untold.values()) if self._budget.measures else 0
        known.flat = self._budget.limit_of(key) + untold
        known.limit = max(known.flat - self._budget.size // CAUTION, 1)
        known.total = max(self._budget.size - known.base - self._budget.size // SLACK, 1)
        known.outside = profile.most_outside()
        self._end(key, known, Facts(key, None, learnt=True, units={u.name: (u.whole, u.lean) for u in self.units.list}))

    def _plan(self, key: str, known: Key, all: List[Facts]) -> None:
        """Makes a plan once there are enough recorded steps."""
        profile, known.profile = known.profile, None
        known.recorded += 1
        if known.recorded < RECORDED:
            return
        for u in self.units.list:
            said = [f.units[u.name] for f in all if u.name in f.units]
            if not said:
                continue
            u.whole, u.lean = (None if None in of and False not in of else False not in of for of in zip(*said))
            if not u.whole and not u.why and self.ranks.several:
                u.why = "another rank cannot recompute it"

        def first() -> Plan:
            assert profile is not None
            known.measured = measured(profile, self.units.list, alone=not self.ranks.several)
            return self._best(known, False)

        known.stage, known.steps = "recompute", 0
        if not self._adopt(key, known, self._attempt(first)) and not self._hope(key, known):
            self._offload(key, known)
        assert known.plan is not None
        if not any(self.ranks.gather(bool(known.plan.choices))):
            known.stage = "settled"

    # Plans

    def _best(self, known: Key, offload: bool) -> Plan:
        self._budget.asked = known.limit if offload else known.total
        return best(known.measured, self._runtime._library.choose, self._budget.asked, offload, everything=not offload)

    def _solve(self, known: Key, offload: bool) -> Solved:
        return self._attempt(lambda: self._best(known, offload))

    def _attempt(self, make: Callable[[], Plan]) -> Solved:
        """Returns a plan, or why there is none: other ranks must hear of every exception."""
        try:
            return make(), None
        except TooSmall as e:
            return None, forget(e)
        except Exception as e:
            if not self.ranks.several:
                raise
            return None, e  # with its frames: it is raised at once, and not kept

    def _adopt(self, key: str, known: Key, solved: Solved, needed: bool = False, last: bool = False) -> bool:
        """Follows a plan from the next step on, if all ranks have one. What any rank recomputes
        all of them do. If one is needed and a rank has none, or if it is the last, it recomputes everything."""
        plan, why = solved
        if needed and any(self.ranks.gather(isinstance(why, TooSmall))):
            plan = known.fallback() or plan
            last, why = plan is not None, why if plan is None else None
        fatal = why is not None and (needed or not isinstance(why, TooSmall))
        error = self._budget.explain(why) if fatal and isinstance(why, TooSmall) else why if fatal else None
        names = None if plan is None else ([u.name for u, c in plan.choices.items() if c.whole], [u.name for u, c in plan.choices.items() if c.lean])
        all = self.ranks.gather((names, last, None if error is None else failure_of(error)))
        self.ranks.fail([failure for _, _, failure in all], error)
        if plan is None or any(names is None for names, _, _ in all):
            return False
        agree(plan, known.measured, self.units.list, *({name for names, _, _ in all for name in names[i]} for i in (0, 1)))
        known.plan, known.version, known.last_resort = plan, known.version + 1, any(last for _, last, _ in all)
        if known.last_resort:  # the measured peak tells
            known.stage, known.steps, known.other = "recompute", 0, None
        self._expect(key, known)
        self._rewrap()
        return True

    def _offload(self, key: str, known: Key) -> None:
        """Follows a plan that offloads or, if none keeps to the budget, one that recomputes everything."""
        known.stage, known.steps = "offload", 0
        if not self._adopt(key, known, self._solve(known, True)):
            known.limit += self._budget.size // CAUTION  # it is tight
            known.no_offload = True
            self._adopt(key, known, self._solve(known, True), needed=True)

    def _hope(self, key: str, known: Key) -> bool:
        """Follows the plan that recomputes everything, if it may keep to the budget though forecasts say that it does not.
        Offloading takes much longer. Reports whether it does."""
        least, most, plan = known.strongest()
        if plan is None or not all(self.ranks.gather(least <= known.total < most)):
            return False
        return self._adopt(key, known, (plan, None), last=True)

    def _exceeded(self, known: Key, mine: Facts) -> None:
        """Notes that a step exceeded the budget though everything is recomputed that can be. If no step under a plan
        kept to it the budget is too small; otherwise the steps go on, because a run must not end for that."""
        error = self._budget.outgrown(self._budget.size + known.over) if mine.change < 0 else None
        if not known.fitted:
            failures = self.ranks.gather(None if error is None else failure_of(error))
            self.ranks.fail(failures, error)
        known.stage = "settled"
        if error is not None and not self._warned:
            self._warned = True
            warnings.warn(f"stowage: {error}. Everything is recomputed that can be, and the steps go on", RuntimeWarning, stacklevel=2)

    def _expect(self, key: str, known: Key) -> None:
        limit = known.limit - self._budget.size // CAUTION
        if known.other is not None or known.kept:  # steps under a plan were measured
            limit = min(known.limit, known.kept or known.flat)
        self._budget.expect(known.plan_key(key), limit - known.outside)

    def _rewrap(self) -> None:
        self.units.rewrap(known.plan for known in self.keys.values())

    # Steps that follow a plan

    @contextlib.contextmanager
    def follow(self, key: str, known: Key) -> Iterator[None]:
        """Runs a step that follows a plan. The library takes part only if something is
        offloaded."""
        rt, budget, step = self._runtime, self._budget, None
        budget.step_peak = 0
        self._rebase(key, known)
        timed = known.stage in ("compare", "contest") or known.stage == "recompute" and known.steps >= REFINED
        clock = Stopwatch(rt.device) if timed else None  # what the library takes to begin a step is part of it
        if known.plan is not None and known.plan.offloads:
            rt._refresh()
            step = self._begin(key, known)
        known.watched -= known.watched > 0
        plan = known.plan
        assert plan is not None
        look = known.stage != "settled" or bool(plan.choices) or known.followed % LOOK == 0 or known.watched > 0
        if step is None and look:
            budget.watch(known.stage != "settled", alone=not self.ranks.several)
        passes = Passes(rt.device) if known.stage == "recompute" and known.followed else None
        now = Following(plan, rt.device, max(rt._least, 1), step, self._refused, passes)
        rt._step, rt._now = step, now
        try:
            yield
            rt._step = rt._now = None
            if step is not None:
                try:
                    step.end(False)
                except TooSmall as e:
                    self._note(known, e)
            peak = budget.watched(plan.answer["peak"] if step is None else None) if look else 0
        except BaseException as e:
            rt._step = rt._now = None
            _explain.add_to_error(e, rt, step)
            if step is not None:
                with contextlib.suppress(Exception):  # the first exception says more
                    if not step.over:
                        step.end(True)
                if step.raised is not None and type(e) is RuntimeError:
                    raise Error(step.raised) from None
            if raised(e):
                raise Error(raised(e)) from None
            raise
        finally:
            now.close()
        known.followed, known.before, known.peak, budget.planned = known.followed + 1, known.peak, peak, max(budget.planned, peak)
        known.over = max(known.over, peak - budget.size)
        if step is not None and budget.measures:
            known.kept = budget.learnt(known.plan_key(key)) + known.outside
        if passes is not None:
            made_for = known.division(plan)
            second, known.cheap, (known.behind, known.idle) = passes.read()
            known.passes = {u: t if made_for is None else made_for.all_of(u, plan.choices.get(u, KEEP), t) for u, t in second.items()}
        if clock is not None:
            known.times.append(clock.seconds())
        seconds = 0.0 if not known.times else known.times[-1] if known.stage in ("compare", "contest") else min(known.times[-TIMED:])
        self._end(key, known, Facts(key, None, learnt=True, change=known.change(self._budget.size, peak, self._budget.measures), lacks=known.lacks, seconds=seconds))

    def _rebase(self, key: str, known: Key) -> None:
        """Makes another plan if more is held between steps than when the plan was made, and steps under it did not
        leave as much: the state of an optimiser, gradients that stay. Several ranks notice it by their peaks."""
        if self.ranks.several or known.plan is None:
            return
        grown = self._budget.held_now() - known.base
        full = known.squeezed and grown > 0 and known.peak + grown > self._budget.size  # the plan leaves nothing that could grow
        if grown <= self._budget.size // SLACK and not full:
            return
        known.base, known.other, known.held, known.watched = known.base + grown, None, None, TIMED + 1
        known.limit, known.total = max(known.limit - grown, 1), max(known.total - grown, 1)
        known.flat, known.kept = known.flat - grown, max(known.kept - grown, 0)
        if known.stage == "settled" and self._budget.measures and not known.plan.offloads and known.peak and known.peak + grown <= self._budget.size - self._budget.size // SLACK:
            return  # the last step left enough for it
        known.stage = {"compare": "settled", "contest": "recompute"}.get(known.stage, known.stage)
        offload = known.stage == "offload" or known.plan.offloads
        if not self._adopt(key, known, self._solve(known, offload), needed=offload):
            known.stage, known.steps = "offload", 0
            self._adopt(key, known, self._solve(known, True), needed=True)

    def _begin(self, key: str, known: Key) -> Optional[Step]:
        """Begins a step of the library that follows a plan, or another plan if the library finds
        that this one does not fit. It returns None if that one offloads nothing."""
        rt, tries = self._runtime, 0
        while known.plan is not None and known.plan.offloads:
            name = known.plan_key(key)
            self._budget.begin(name, alone=not self.ranks.several)
            step = Step(rt._library, rt.device, rt._least, rt._moves, None, rt._weights, rt._seen, rt._held, self._budget)
            try:
                rt._library.begin(name, step.stream)
                return step
            except TooSmall as e:
                self._note(known, e)
            if not self.ranks.several:
                self._lower(key, known)
                continue
            # The others begin this step with the plan as it is. The library records this one
            # anew, as far as it keeps to its limit, and the next exchange changes the plan.
            if tries:
                return None
            tries, known.version = tries + 1, known.version + 1
            self._expect(key, known)
        return None

    def _note(self, known: Key, e: TooSmall) -> None:
        self._budget.asked = self._runtime._library.usage().limit
        known.small, known.lacks = forget(e), max(e.least - self._budget.asked, 1)

    def _lower(self, key: str, known: Key) -> None:
        """Makes another plan because the library of a rank needs more than its limit: the one
        before, one that keeps less, or the last one that it could follow."""
        small, lacks, known.small, known.lacks = known.small, known.lacks, None, 0
        known.lowered += 1
        if known.other is not None and known.lowered > 2:
            self._settle(key, known, *known.other)
            return
        if small is not None:
            known.limit -= max(lacks, known.limit // 64) + 1
        solved = self._solve(known, True) if small is None or known.lowered <= 8 and known.limit > 0 else (None, small)
        if known.other is None and known.held is not None and any(self.ranks.gather(solved[0] is None)):
            solved = known.back(), None
        if not self._adopt(key, known, solved, needed=known.other is None):
            assert known.other is not None
            self._settle(key, known, *known.other)

    def _advance(self, key: str, known: Key, mine: Facts, all: List[Facts]) -> None:
        """Draws the conclusions of a step that followed a plan."""
        plan = known.plan
        assert plan is not None
        over = any(f.change < 0 for f in all)
        if over and known.last_resort:
            if known.fitted or known.no_offload:
                self._exceeded(known, mine)
            else:
                self._offload(key, known)
            return
        known.fitted = known.fitted or not over
        if any(f.lacks for f in all):
            self._lower(key, known)
            return
        known.held = (plan, known.limit) if known.stage == "offload" and not over else known.held
        if known.stage == "contest":
            self._take_turns(key, known, over, mine.seconds)
            return
        if known.stage == "compare":
            if not any(f.change for f in all):
                return self._compare(key, known, sum(f.seconds for f in all))
            if any(self.ranks.gather(plan.offloads)):
                assert known.other is not None
                self._settle(key, known, *known.other)
                return
            known.other, known.stage = (plan, known.limit), "settled"
        settled = known.stage == "settled"
        # If nothing is offloaded where it might be, forecasts are too high: no plan fits that only recomputes.
        more = any(f.change for f in all) and min(f.change for f in all) >= 0
        if more and (known.stage == "recompute" or known.stage == "offload" and not any(self.ranks.gather(plan.offloads))):
            self._refine(key, known, mine)
            return
        if any(f.change for f in all):
            m = known.division(plan)
            if mine.change < 0 and m is not None and not plan.offloads:  # the next plan holds less than this one
                known.total = min(known.total, m.most_held(plan.choices))
            known.total = max(known.total + min(mine.change, 0), 1)
            if mine.change < 0 or known.stage != "recompute":
                known.limit = max(known.limit + mine.change, 1)
            offload = known.stage == "offload" or settled and any(self.ranks.gather(plan.offloads))
            if not self._adopt(key, known, self._solve(known, offload)) and not offload:
                known.stage, known.steps = "offload", 0
                self._adopt(key, known, self._solve(known, True), needed=True)
            known.times = []
            if known.steps < REFINED:
                known.steps += 1
            return
        if settled:
            return
        known.steps = max(known.steps + 1, REFINED)
        if known.stage == "recompute" and not known.retimed and known.steps > REFINED and self._plan_again(key, known, plan, mine.seconds):
            return
        if known.steps < STEPS[known.stage]:
            return
        if known.stage == "recompute":
            self._try_offload(key, known, plan, mine.seconds)
        elif known.other is not None:
            known.stage, known.steps, known.times, known.turns = "compare", 0, [], {False: [], True: []}
        else:
            known.stage = "settled"

    def _compare(self, key: str, known: Key, took: float) -> None:
        """Lets the plan that offloads and the one that does not take turns. The faster one stays."""
        assert known.plan is not None and known.other is not None
        offloads = known.steps % 2 == 0
        known.turns[offloads].append(took)
        known.steps += 1
        plan, limit = known.other
        waits = known.contest is not None
        offloading, recomputing = known.turns[True], known.turns[False]
        if known.steps < 2 * (TURNS if waits else TIMED):
            known.other, known.plan, known.limit = (known.plan, known.limit), plan, limit
            self._rewrap()
        elif undisturbed(offloading) < undisturbed(recomputing) if waits else statistics.median(offloading) < statistics.median(recomputing):
            known.other, known.plan, known.limit, known.stage = (known.plan, known.limit), plan, limit, "settled"
            self._rewrap()
        else:
            known.other, known.stage = (known.plan, known.limit), "settled"

    def _refine(self, key: str, known: Key, mine: Facts) -> None:
        """Recomputes less, because a plan held less than the budget, by what is no longer dropped: forecasts may be too high."""
        assert known.plan is not None
        plan: Plan = known.plan
        known.times = []
        squeezed = mine.change > 0 and known.steps > REFINED
        known.squeezed = known.squeezed or squeezed

        def less() -> Plan:
            known.retime()
            relaxed, m = known.less(plan, mine.change), known.division(plan)
            return m.mixed(relaxed, min(m.most_counted(plan.choices) + mine.change, self._budget.size - known.base)) if squeezed and m is not None else relaxed

        solved = self._attempt(less)
        if any(self.ranks.gather(solved[0] is not plan)):
            self._adopt(key, known, solved)
            known.steps += 1
        else:
            known.steps = REFINED

    def _plan_again(self, key: str, known: Key, plan: Plan, seconds: float) -> bool:
        """Follows another plan that only recomputes, if the times of steps under a plan make it faster than
        the one made from recorded steps, or several in turns. Reports whether it does."""
        choose, known.retimed = self._runtime._library.choose, True
        if not self.ranks.several and known.waits(seconds):
            known.contest = Contest(contenders(known, plan, choose, seconds), known.over)
            if known.contest.over:
                return False
            known.stage, known.steps, known.times = "contest", 0, []
            return self._adopt(key, known, (known.contest.now, None))
        solved = self._attempt(lambda: faster(known, plan, choose, seconds))
        if not any(self.ranks.gather(solved[0] is not plan)) or not self._adopt(key, known, solved):
            return False
        known.steps, known.times = REFINED - 1, []
        return True

    def _take_turns(self, key: str, known: Key, over: bool, seconds: float) -> None:
        """Lets the next plan have its turn, or the fastest one stay, which then is adapted to the budget as the first was."""
        contest = known.contest
        if over:
            contest.drop()
            known.over = contest.exceeded  # later plans need not leave what this one held
        else:
            if contest.first:  # which does not count: forecasts may be too high
                room = max(known.left(self._budget.size, known.peak), 0)
                contest.change(self._attempt(lambda: known.less(contest.now, room))[0] or contest.now)
            contest.note(seconds)
        if contest.over:
            known.stage, known.times = "recompute", []
        self._adopt(key, known, (contest.fastest() if contest.over else contest.now, None))

    def _try_offload(self, key: str, known: Key, plan: Plan, mine: float) -> None:
        """Follows a plan that offloads, if a rank expects more of it, or else the one it has."""
        known.other = (plan, known.limit)
        size = self._budget.size
        known.limit += size // (2 * CAUTION)  # the rest is for copies that are not in time
        if self._budget.measures:  # what else this plan held is what others hold, too, but perhaps at another time
            known.limit = max(known.limit, min(plan.answer["peak"] + size - known.peak - known.over - size // SLACK, known.flat) - size // LATE)

        def calibrated() -> Plan:
            made_for = known.division(plan)
            known.retime()
            again = plan.answer["again_ns"] if made_for is None else made_for.again(plan.choices)
            for m in known.measured:
                m.calibrate(int(1e9 * mine) or plan.answer["step_ns"], again)
            return self._best(known, True)

        solved = self._attempt(calibrated)
        if solved[0] is None:
            better = not isinstance(solved[1], TooSmall)  # all ranks fail then
        else:
            better = solved[0].offloads and 1e-9 * solved[0].expected < WORTH * mine
        if any(self.ranks.gather(better)) and self._adopt(key, known, solved):
            known.stage, known.steps, known.times = "offload", 0, []
        else:
            known.stage, known.limit = "settled", known.other[1]

    def _settle(self, key: str, known: Key, plan: Plan, limit: int) -> None:
        """Goes back to a plan that was followed before."""
        known.plan, known.limit, known.version, known.stage = plan, limit, known.version + 1, "settled"
        self._rewrap()
