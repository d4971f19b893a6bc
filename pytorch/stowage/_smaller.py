"""Compiled blocks that are compiled again to save less: what it saves, what it takes, and
whether it makes the same bits.

Both graphs run in a recorded step, forward and backward, when the backward pass of a block
begins: with the inputs and the random numbers of the block, and with any gradients.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
from torch.utils import _pytree

from ._again import hooks, state
from ._attach import is_sharded
from ._bits import distance, same
from ._compiled import with_budget
from ._errors import Error
from ._inputs import IN_PLACE
from ._record import storage_of
from ._surroundings import Random
from ._units import Uncounted

_plain = (torch.Tensor, torch.nn.Parameter)
OutOfMemory: Any = getattr(torch.cuda, "OutOfMemoryError", MemoryError)

# Two ways to round differ by less than this share, other dropout masks by more.
ROUNDING = 1 / 16


class Smaller(NamedTuple):
    """What a compiled block gives if it is compiled with a smaller budget: the bytes that it saves
    and those that it then saves no longer, and stamps at both ends of both its passes, before and
    with the budget."""

    saved: int
    dropped: int
    before: Tuple[int, int]
    after: Tuple[int, int]

    @property
    def share(self) -> float:
        return self.dropped / self.saved if self.saved else 0.0


def compare(profile: Any, call: Any) -> None:
    """Runs both passes of a compiled block as it is and as it is compiled with smaller
    budgets, until one of them and the next drop enough. A budget that fails or makes other bits is refused
    for its kind, and so are those below it."""
    unit, forward = call.unit, call.again[0]
    budgets = list(itertools.takewhile(lambda b: (unit.kind, b) not in profile.not_smaller, profile.budgets))
    if not budgets or not call.all:
        return
    why = side_effects(unit.module)
    if why:
        profile.not_smaller[unit.kind, budgets[0]] = why
        return
    try:
        want, n, _ = both_passes(profile, call, forward)
        again, _, before = both_passes(profile, call, forward)
    except OutOfMemory:
        raise
    except Exception as e:
        profile.not_smaller[unit.kind, budgets[0]] = sentence(e)
        return
    repeats = [same(*pair) for pair in zip(_all(want), _all(again))]
    del again
    enough = 0
    for b in budgets:
        if enough > 1:
            break
        try:
            if b not in unit.smaller:
                unit.smaller[b] = with_budget(forward, b)
            got, m, _ = both_passes(profile, call, unit.smaller[b])
            outputs, gradients = (near(*pair) for pair in zip(want, got))
            if outputs and not gradients:  # github.com/pytorch/pytorch/issues/190758
                raise Error("its outputs are right and its gradients are not, as if its backward pass drew other random numbers")
            if not outputs or not gradients:
                raise Error("it makes other values")
            if profile.exact and not all(same(*pair) for pair, fixed in zip(zip(_all(want), _all(got)), repeats) if fixed):
                raise Error("it makes other bits; exact=False allows that")
            del got
            _, _, after = both_passes(profile, call, unit.smaller[b])
            made = profile.smaller[b][call] = Smaller(n, max(n - m, 0), before, after)
            enough += made.share >= profile.enough
        except OutOfMemory:
            raise
        except Exception as e:
            profile.not_smaller[unit.kind, b] = sentence(e)
            break


def side_effects(module: torch.nn.Module) -> str:
    """Returns why one more backward pass of a module would be noticed, or nothing."""
    if any(is_sharded(m) for m in module.modules()) or any(type(p) is not torch.nn.Parameter for p in module.parameters()):
        return "it is sharded"  # and would reduce gradients
    if any(getattr(m, name, None) for m in module.modules() for name in ("_backward_hooks", "_backward_pre_hooks")) or any(p._backward_hooks for p in module.parameters()):
        return "it has hooks in its backward pass"
    return ""


def both_passes(profile: Any, call: Any, forward: Callable[..., Any]) -> Tuple[Tuple[List[torch.Tensor], List[torch.Tensor]], int, Tuple[int, int]]:
    """Runs a forward and a backward pass with the inputs of a call and any gradients. Returns
    outputs and gradients, the bytes that were saved beside weights, inputs and outputs, and stamps."""
    args, kwargs = call.again[1].again()
    given = [x for x in _pytree.tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    leaves = [x for x in [*given, *call.unit.module.parameters()] if x.requires_grad]
    known = {storage_of(x)._cdata for x in given if type(x) in _plain}
    saved: Dict[int, int] = {}

    def pack(t: torch.Tensor) -> Any:
        if type(t) in _plain and t.layout is torch.strided and not (t.is_leaf and t.requires_grad):
            memory = storage_of(t)
            if memory._cdata not in known and memory._cdata not in profile.weights:
                saved[memory._cdata] = memory.nbytes()
        return IN_PLACE.pack(t)

    now = Random(profile.device)
    assert call.random is not None
    call.random.set()
    state.again += 1
    try:
        with call.around.again(), torch.enable_grad(), Uncounted(call.unit.module):
            profile.clock.fill()
            begin = profile.clock.stamp()
            with hooks(pack, IN_PLACE.unpack):
                out = forward(*args, **kwargs)
            made = [t for t in _pytree.tree_flatten(out)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
            for t in made:
                saved.pop(storage_of(t)._cdata, None)  # it stays for the next block
            any_numbers = torch.Generator(profile.device).manual_seed(0)
            with torch.autocast(profile.device.type, enabled=False):
                back = [torch.randn(t.shape, generator=any_numbers, device=t.device).to(t.dtype) for t in made]
                grads = torch.autograd.grad(made, leaves, back, allow_unused=True)
            end = profile.clock.stamp()
        if not made or all(g is None for g in grads):
            raise Error("its outputs are not known, so that nothing can be compared")
    finally:
        state.again -= 1
        now.set()
    return ([t.detach() for t in made], [t.detach() for t in grads if t is not None]), sum(saved.values()), (begin, end)


def _all(made: Tuple[List[torch.Tensor], List[torch.Tensor]]) -> List[torch.Tensor]:
    return [*made[0], *made[1]]


def near(a: List[torch.Tensor], b: List[torch.Tensor]) -> bool:
    """Reports whether tensors differ by no more than rounding does, each on its own."""
    return len(a) == len(b) and all(same(x, y) or distance([x], [y]) <= ROUNDING for x, y in zip(a, b))


def sentence(e: Exception) -> str:
    text = " ".join(str(e).split())[:200]
    return text if isinstance(e, Error) else f"{type(e).__name__}: {text}"
