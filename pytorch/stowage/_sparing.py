"""Second forward passes of recorded steps where memory is tight: what was offloaded comes back when all passes are over,
and is compared with digests of what they saved.
"""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Tuple

import torch

from ._bits import Digest, Digests, seed


def check_sparingly(p: Any, call: Any) -> None:
    """Tries the second forward pass of a call of a profile. Later plans learn the same as from check_whole."""
    need, _ = p.sizes(call)
    held: List[Tuple[int, int]] = []
    p.holding[call] = held
    made, most, left = p.budget.second_pass(lambda: p.second(call, each=lambda _: held.append(p.budget.pass_now())))
    p.again[call], own = (most, left), p.own(call)
    digests = Digests(p.device, need)
    first = [digests.of(t) if i < len(own) and own[i] and not seed(t) else None for i, t in enumerate(made)]
    del made
    _, p.dropping[call], _ = p.budget.second_pass(lambda: p.second(call, keep=False))

    def varying() -> Dict[int, bool]:
        """Runs a pass. Returns the tensors that it makes otherwise than the first one did, and whether they are near."""
        seen, found = itertools.count(), {}

        def see(t: torch.Tensor) -> None:
            i = next(seen)
            before = first[i] if i < len(first) else None
            now = None if before is None else digests.of(t)
            if before is not None and now is not None and not before.same(now):
                found[i] = before.near(now)

        p.second(call, keep=False, each=see)
        return found

    others = varying()
    p.clock.fill()
    stamps = p.saves[call] = [p.clock.stamp()]
    p.second(call, keep=False, each=lambda _: stamps.append(p.clock.stamp()))
    p.whole_times[call] = (stamps[0], p.clock.stamp())
    differ: Dict[int, Digest] = {}
    for i, (c, j) in enumerate(call.all) if len(first) == len(own) else ():
        want, got = c.value(j), first[i]
        if want is not None and got is not None and not got.same(digests.of(want)):
            differ[i] = got

    def varies() -> bool:
        return any(i in others for i in differ) and all(others.get(i, True) for i in differ)

    for _ in range(0 if p.agreed is not None else 2):
        if not differ or varies() or p.dropping[call] + need // 8 > p.room():
            break
        others = varying()
    p.decide(call, len(first), [d.kind for d in differ.values()], varies())
