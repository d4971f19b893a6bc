"""What plans that offload nothing hold of memory at every moment of a step."""

from __future__ import annotations

from typing import Callable, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from ._measured import KEEP, Blocks, Choice
from ._profile import Call, Unit

Choices = Mapping[Unit, Choice]


class Held(Blocks):
    """What the last recorded step says, and what choices hold."""

    def _top(self, call: Call) -> Call:
        while call.parent is not None and not self._divides(call.unit):
            call = call.parent
        return call

    def _second_passes(self) -> Callable[[Call], Tuple[int, int]]:
        """Returns a function: the most that the second pass of a call holds, and what it leaves.
        Calls that were not tried take as much as those that are alike."""
        alike: Dict[type, Tuple[int, int]] = {}
        tried = dict(self._profile.again)
        for call, (most, left) in self._profile.again.items():
            first, held = self._again_whole(call.unit).first, self._profile.holding.get(call, [])
            if 0 < first <= len(held):  # it ends there
                most, left = tried[call] = min(most, held[first - 1][0]), min(left, held[first - 1][1])
            before = alike.get(call.unit.kind, (0, 0))
            alike[call.unit.kind] = max(most, before[0]), max(left, before[1])
        return lambda call: tried[call] if call in tried else alike.get(call.unit.kind, (0, 0))

    def most_held(self, choices: Choices, perhaps: bool = False) -> int:
        """Returns the most that a step holds beyond its base if nothing is offloaded: what the
        recorded step held at every moment, without what is dropped then, and perhaps without
        what only a recorded step holds."""
        return max(n for n, _ in self._moments(choices, perhaps))

    def fullest(self, choices: Choices) -> Tuple[int, Optional[Unit]]:
        """Returns the same, and the unit whose second pass runs then, if one does."""
        return max(self._moments(choices), key=lambda moment: moment[0])

    def _moments(self, choices: Choices, perhaps: bool = False) -> Iterator[Tuple[int, Optional[Unit]]]:
        """Yields what a step holds at every moment, and the unit whose second pass runs then, if one does."""
        p = self._profile
        if self._most is None:  # the same for all choices
            marks = [0, *p.marks, len(p.needs)]
            self._most = self._second_passes(), [max(p.needs[a:b], default=0) for a, b in zip(marks, marks[1:])]
        again, needs = self._most
        yield needs[0], None
        dropped = cached = more = 0
        begun: Set[Call] = set()
        running: List[Call] = []
        for i, (kind, what, _) in enumerate(p.ops):
            if kind == "begin" and what in self.parts:
                running.append(what)
            elif kind == "save" and what in self.parts:
                running.remove(what)
                part, c = self.parts[what], choices.get(what.unit, KEEP)
                dropped += self.dropped(part, choices) + part.light * c.whole + part.extra * perhaps
                cached += part.cast(c).passes
            elif kind == "give":
                cached = 0  # the backward pass began
            elif kind == "load":
                cached, call = 0, self._top(what)
                if call in self.parts and call not in begun:
                    begun.add(call)
                    part, c = self.parts[call], choices.get(call.unit, KEEP)
                    more = part.beside(c)
                    if c.whole:
                        peak, left = again(call)
                        yield p.held_then[i] - dropped + peak, call.unit
                        more = max(left - part.dropped(c) - part.light, 0)
                    dropped -= self.dropped(part, choices) + part.light * c.whole + part.extra * perhaps
            need = needs[i + 1]
            for call in running:
                if call in p.dropping and choices.get(call.unit, KEEP).whole:  # it holds less than one that is kept
                    need = min(need, p.held_before[call] + p.dropping[call] + self.parts[call].tail)
            yield need - dropped + cached + more, None

    def most_counted(self, choices: Choices) -> int:
        """Returns the larger of what a step holds and what it saves: where nobody counts what second passes
        hold, that is what they save."""
        return max(self.most_held(choices), self.most_kept(choices))

    def most_kept(self, choices: Choices) -> int:
        """Returns the most bytes that are saved at once if nothing is offloaded."""
        now = most = 0
        open: Optional[Call] = None
        begun: Set[Call] = set()
        for kind, what, _ in self._profile.ops:
            if kind in ("take", "give"):
                now += self._profile.bytes[what] * (1 if kind == "take" else -1)
            elif kind == "save" and what in self.parts:
                part = self.parts[what]
                now += part.lean + part.rest + part.inputs - self.dropped(part, choices)
            elif kind == "load":
                call = self._top(what)
                if call in self.parts and call not in begun:
                    begun.add(call)
                    if open is not None:
                        now -= self.parts[open].lean + self.parts[open].rest + self.parts[open].inputs
                    now, open = now + self.dropped(self.parts[call], choices), call
            most = max(most, now)
        return most
