"""Comparisons of tensors: equal bit for bit, equal but for rounding, and how far apart. Digests compare tensors that
are not in memory at the same time."""

from __future__ import annotations

import math
from typing import Iterator, NamedTuple, Optional, Sequence, Tuple

import torch

_plain = (torch.Tensor, torch.nn.Parameter)


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Reports whether two tensors differ by no more than the order of additions does: half of
    the digits are equal."""
    if same(a, b):
        return True
    if a.is_nested or b.is_nested or a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
        return False
    digits = torch.finfo(a.dtype).eps ** 0.5
    a, b = a.detach().double(), b.detach().double()
    return bool((a - b).abs().max() <= digits * a.abs().max())


def distance(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """Returns the norm of the difference by the norm of what is wanted."""
    if [t.shape for t in want] != [t.shape for t in got]:
        return float("inf")
    off = math.hypot(*(_norm(a - b) for a, b in zip(want, got)))
    return off / (math.hypot(*map(_norm, want)) or 1.0)


def _norm(t: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(t, dtype=torch.float64))


_whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, not-a-numbers too."""
    if a.is_nested and b.is_nested:
        return len(a.unbind()) == len(b.unbind()) and all(map(same, a.unbind(), b.unbind()))
    if a.is_nested or b.is_nested or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if type(a) not in _plain or type(b) not in _plain or a.layout is not torch.strided or a.is_meta:
        return True  # a shard or a sparse tensor: what comes of it is compared. Meta tensors have no bits
    a, b = a.detach(), b.detach()
    return bool(torch.equal(a, b) or torch.equal(as_numbers(a), as_numbers(b)))


def as_numbers(t: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a tensor as whole numbers."""
    t = t.detach()
    t = t.resolve_conj().resolve_neg().reshape(-1)
    t = torch.view_as_real(t).contiguous() if t.is_complex() else t.contiguous()
    return t.view(_whole[t.element_size()])


def equal(got: torch.Tensor, want: Optional[torch.Tensor]) -> bool:
    """Reports whether a second pass made what the first one saved, if that is still there."""
    return want is None or same(got, want)


def seed(t: torch.Tensor) -> bool:
    """Reports whether a tensor may be the seed of an attention's dropout, or its offset. If
    nothing is dropped it was never written; otherwise another seed makes other outputs, which
    are saved and compared."""
    return t.numel() <= 2 and not t.is_floating_point() and not t.is_complex()


def pieces(t: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Returns the elements of a tensor in their order, at most so many at once, cut where its shape says. Those that
    lie in the same memory are one."""
    for d in range(t.dim()):
        if t.stride(d) == 0 and t.size(d) > 1:
            t = t.narrow(d, 0, 1)
    if t.numel() <= most:
        yield t
    elif most * t.size(0) >= t.numel():
        yield from t.split(most * t.size(0) // t.numel())
    else:
        for row in t.unbind(0):
            yield from pieces(row, most)


class Digest(NamedTuple):
    """What is known of a tensor that is gone: what it was, a sum of all its bits, and some of its elements."""

    kind: Tuple[torch.Size, torch.dtype]
    bits: Optional[torch.Tensor]  # or None of a tensor that is not compared
    some: Optional[torch.Tensor]

    def same(self, other: Digest) -> bool:
        return self.kind == other.kind and (self.bits is None or other.bits is None or torch.equal(self.bits, other.bits))

    def near(self, other: Digest) -> bool:
        """Reports whether tensors differ by no more than the order of additions does, as far as the elements tell."""
        return self.kind == other.kind and (self.some is None or other.some is None or near(self.some, other.some))


class Digests:
    """Makes digests. It takes little memory beside tensors of so many bytes in all. Each number is multiplied by
    another one, drawn at random: tensors that differ have the same sum once in 2**32 times at most. Strides do not count,
    but for those of zero."""

    def __init__(self, device: torch.device, bytes: int) -> None:
        self._most = min(max(bytes // 256, 1 << 10), 1 << 22)
        self._by = torch.randint(-(2**62), 2**62, (self._most,), generator=torch.Generator(device).manual_seed(1), device=device)

    def of(self, t: torch.Tensor) -> Digest:
        kind = torch.Size() if t.is_nested else t.shape, t.dtype
        if t.is_nested or type(t) not in _plain or t.layout is not torch.strided or t.is_meta:
            return Digest(kind, None, None)
        bits, some = torch.zeros((), dtype=torch.int64, device=t.device), []
        with torch.no_grad():
            for piece in pieces(t.detach(), self._most // (2 if t.is_complex() else 1)):
                numbers = as_numbers(piece).reshape(-1).to(torch.int64, copy=True)
                bits = bits * 0x9E3779B97F4A7C1 + numbers.mul_(self._by[: len(numbers)]).sum()
                flat = piece.reshape(-1)
                some.append(flat[:: max(len(flat) // 64, 1)].clone())
            return Digest(kind, bits, torch.cat(some))
