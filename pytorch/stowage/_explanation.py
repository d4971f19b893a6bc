"""An explanation of a device's memory: numbers, a table of them, and the budget that would
fit. It holds no tensors."""

from __future__ import annotations

import re
import textwrap
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ._report import human

# The table is no wider than this.
WIDTH = 100

# So many lines for modules; equal layers share one.
LINES = 12

HOLDERS = {
    "weights": "weights and buffers",
    "gradients": "gradients",
    "optimizer": "optimiser state",
    "saved": "saved tensors",
    "other": "temporaries and others",
}


class Saved(NamedTuple):
    """What one module saved that is on the device."""

    module: str
    group: str
    bytes: int


class Explanation:
    """Who holds a device's memory at one moment. Sizes are in bytes, None if unknown.

    device     its name
    held       bytes by holder; their sum is allocated
    allocated  by PyTorch; on the CPU the sum of what is held
    saved      the part of saved tensors by module, largest first; its sum is held["saved"]
    offloaded  saved tensors that are in host memory
    unused     reserved by the caching allocator and not allocated
    largest    its largest free block
    pending    freed, and waiting for another stream
    runtime    the runtime's own
    elsewhere  other processes, and what this one holds outside of PyTorch
    free       of the device
    total      of the device
    failed     memory ran out
    asked      bytes that were asked for when memory ran out
    then       bytes that were allocated when memory ran out; some may be freed since
    budget     of the runtime
    stays      weights, gradients (those to come too), optimiser and the runtime's own
    least      the smallest budget for the steps that were measured
    most       the largest budget that this process can have beside others, and beside fragments
               if memory ran out
    notes      sentences
    """

    def __init__(self) -> None:
        self.device = ""
        self.held: Dict[str, int] = {name: 0 for name in HOLDERS}
        self.saved: List[Saved] = []
        self.allocated = self.offloaded = self.pending = self.runtime = self.stays = 0
        self.counted = False  # by an allocator
        self.failed = False
        self.unused: Optional[int] = None
        self.largest: Optional[int] = None
        self.elsewhere: Optional[int] = None
        self.free: Optional[int] = None
        self.total: Optional[int] = None
        self.asked: Optional[int] = None
        self.then: Optional[int] = None
        self.budget: Optional[int] = None
        self.least: Optional[int] = None
        self.most: Optional[int] = None
        self.notes: List[str] = []

    def to_dict(self) -> Dict[str, Any]:
        """Returns everything as numbers, strings, lists and dictionaries."""
        d: Dict[str, Any] = dict(vars(self), held=dict(self.held), notes=list(self.notes), advice=self.advice())
        d["saved"] = [s._asdict() for s in self.saved]
        return d

    def advice(self) -> str:
        """Returns a sentence about the budget that would fit."""
        would = "would have fitted" if self.failed else "would fit"
        has = f"; this runtime has {human(self.budget)}" if self.budget is not None else ""
        do = "shard the model, or make the batch smaller"
        least, most = self.least, self.most
        if most is not None and self.stays > most:
            return f"no budget {would}: weights, gradients and optimiser state take {human(self.stays)}, and this process can have {human(most)}; {do}"
        if most is not None and least is not None and least > most:
            return f"no budget {would}: a step needs at least {human(least)}, and this process can have {human(most)}; {do}"
        if self.failed and most is not None and self.budget is not None and self.budget <= most:
            if (self.then or 0) + (self.asked or 0) + self.runtime <= self.budget:
                return f"the budget of {human(self.budget)} was kept, but no free block was large enough; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            return f"the step exceeded its budget of {human(self.budget)}, of which the runtime cannot lower all; {do}"
        if most is not None and least is not None:
            return f"a budget between {human(least)} and {human(most)} {would}{has}"
        if most is not None:
            return f"this process can have a budget of {human(most)}; the smallest that {would} is not known before a step was measured under one{has}"
        if least is not None:
            return f"a step needs a budget of {human(least)} or more{has}; how much this process can have is not known"
        return f"which budget {would} is not known: no step was measured under one"

    def __str__(self) -> str:
        when = "now"
        if self.failed:
            when = "when memory ran out" if self.asked is None else f"when {human(self.asked)} more did not fit"
        rows = self._rows()
        wide, sizes = (max(len(r[i]) for r in rows) for i in (0, 1))
        lines = [f"memory of {self.device or 'a device'} {when}:"]
        lines += [f"  {label.ljust(wide)}  {size.rjust(sizes)}  {share.rjust(6)}".rstrip() for label, size, share in rows]
        for sentence in [self.advice(), *(f"note: {n}" for n in self.notes)]:
            lines += textwrap.wrap(sentence, WIDTH, subsequent_indent="  ")
        return "\n".join(lines)

    __repr__ = __str__

    def _rows(self) -> List[Tuple[str, str, str]]:
        """Returns label, size and share of each line."""
        whole = self.total if self.total is not None else self.allocated
        rows: List[Tuple[str, str, str]] = []

        def row(label: str, n: Optional[int]) -> None:
            if n is not None:
                rows.append((shorten(label, 60), human(n), f"{100 * n / whole:.1f}%" if whole else ""))

        for name, words in HOLDERS.items():
            if name == "other" and not self.counted:
                continue  # nobody counts temporaries
            row(words, self.held[name])
            for label, n in by_module(self.saved) if name == "saved" else ():
                row("  " + label, n)
        row("allocated" if self.counted else "together", self.allocated)
        row("reserved and not allocated", self.unused)
        row("  the largest free block", self.largest)
        row("  freed, but in use on another stream", self.pending or None)
        row("the runtime's own", self.runtime or None)
        row("other processes, CUDA, NCCL", self.elsewhere)
        row("free", self.free)
        row("the device", self.total)
        if self.offloaded:
            rows.append(("saved tensors in host memory", human(self.offloaded), ""))
        return rows


def by_module(saved: Sequence[Saved]) -> List[Tuple[str, int]]:
    """Returns labels and bytes, equal layers together."""
    alike: Dict[str, List[Saved]] = {}
    for s in saved:
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", s.module), []).append(s)
    lines = []
    for pattern, some in alike.items():
        label = some[0].module if len(some) == 1 else f"{pattern} ({len(some)} modules)"
        lines.append((label, sum(s.bytes for s in some)))
    lines.sort(key=lambda line: -line[1])
    if len(lines) > LINES:
        rest = lines[LINES - 1 :]
        lines[LINES - 1 :] = [(f"{len(rest)} more", sum(n for _, n in rest))]
    return lines


def shorten(text: str, most: int) -> str:
    half = most // 2 - 1
    return text if len(text) <= most else text[:half] + ".." + text[-half:]


Explanation.__module__ = "stowage"  # the name under which users import it
