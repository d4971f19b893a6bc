"""Which view of a storage a tensor is."""

from __future__ import annotations

import torch

from ._record import storage_of


class View:
    """Which view of a storage a tensor is. A conjugate, and a negative as the imaginary part of one, is the same memory
    with a mark."""

    __slots__ = ("dtype", "size", "stride", "offset", "marks")

    def __init__(self, t: torch.Tensor) -> None:
        self.dtype, self.size, self.stride, self.offset = t.dtype, t.size(), t.stride(), t.storage_offset()
        self.marks = t.is_conj(), t.is_neg()

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """Returns the same view of the storage of another tensor."""
        t = t.detach()
        if t.dtype != self.dtype or t.size() != self.size or t.stride() != self.stride or t.storage_offset() != self.offset:
            t = torch.empty(0, dtype=self.dtype, device=t.device).set_(storage_of(t), self.offset, self.size, self.stride)
        if (t.is_conj(), t.is_neg()) == self.marks:
            return t
        t = t.conj() if t.is_conj() != self.marks[0] else t
        return torch._neg_view(t) if t.is_neg() != self.marks[1] else t
