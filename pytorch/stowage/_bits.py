"""Comparisons of tensors: equal bit for bit, equal but for rounding, and how far apart."""

from __future__ import annotations

import math
from typing import Optional, Sequence

import torch

_plain = (torch.Tensor, torch.nn.Parameter)


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Reports whether two tensors differ by no more than the order of additions does: half of
    the digits are equal."""
    if same(a, b):
        return True
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
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
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if type(a) not in _plain or type(b) not in _plain or a.layout is not torch.strided or a.is_meta:
        return True  # a shard or a sparse tensor: what comes of it is compared. Meta tensors have no bits
    a, b = a.detach(), b.detach()
    return bool(torch.equal(a, b) or torch.equal(_bits(a), _bits(b)))


def _bits(t: torch.Tensor) -> torch.Tensor:
    """Returns the bits of a tensor as whole numbers."""
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
