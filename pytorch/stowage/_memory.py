"""Memory of the device as PyTorch counts it, and what of it the model holds.

On a GPU the caching allocator has exact statistics. On the CPU there are none, so that
weights, buffers, gradients and the optimiser's state of attached models are counted.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Protocol, Set, Tuple

import torch

from ._record import storage_of


class Memory(Protocol):
    """Bytes that PyTorch holds on one device, saved tensors included."""

    includes_saved: bool  # saved tensors are part of allocated() and peak()

    def allocated(self) -> int:
        """Returns the bytes that are held now."""

    def peak(self) -> int:
        """Returns the most that was held since the last reset()."""

    def reset(self) -> None:
        """Begins a new peak."""


class CudaMemory:
    """The statistics of PyTorch's caching allocator: bytes of tensors, as
    torch.cuda.max_memory_allocated() counts them."""

    includes_saved = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _statistic(self, which: str) -> int:
        stats: Dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats["allocated_bytes"]["all"][which]) if stats else 0

    def allocated(self) -> int:
        return self._statistic("current")

    def peak(self) -> int:
        return self._statistic("peak")

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class CountedMemory:
    """What can be counted on the CPU: tensors of attached models and their optimisers."""

    includes_saved = False

    def __init__(self, attached: List[Any]) -> None:
        self._attached = attached

    def allocated(self) -> int:
        return sum(held_by(self._attached, torch.device("cpu")).values())

    def peak(self) -> int:
        return self.allocated()

    def reset(self) -> None:
        pass


class Picture(NamedTuple):
    """A device's memory at one moment, in bytes; None stands for what nobody counts.

        allocated blocks + pending + free blocks = reserved
        reserved + what is held elsewhere + free = total
    """

    blocks: Optional[List[Tuple[int, int]]] = None  # allocated: addresses, in order, and bytes
    reserved: Optional[int] = None  # by the caching allocator
    pending: int = 0  # freed, and in use on another stream
    largest: Optional[int] = None  # free block of the caching allocator
    free: Optional[int] = None  # of the device
    total: Optional[int] = None  # of the device


def picture_of(device: torch.device) -> Picture:
    """Returns the memory of a device. It allocates none, and starts no GPU."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return Picture()
    blocks: List[Tuple[int, int]] = []
    reserved = pending = largest = 0
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != device.index:
            continue
        reserved += segment["total_size"]
        at = segment["address"]
        for block in segment["blocks"]:
            at, size, state = block.get("address", at), block["size"], block["state"]
            if state == "active_allocated":
                blocks.append((at, size))
            elif state == "inactive":
                largest = max(largest, size)
            else:
                pending += size
            at += size
    free = total = None
    if not torch.cuda.is_current_stream_capturing():
        free, total = torch.cuda.mem_get_info(device)
    return Picture(sorted(blocks), reserved, pending, largest, free, total)


def held_by(attached: Iterable[Any], device: torch.device) -> Dict[str, int]:
    """Returns the bytes that attached models and their optimisers hold on a device, by kind.
    A storage counts once."""
    held: Dict[str, int] = {"weights": 0, "gradients": 0, "optimizer": 0}
    seen: Set[int] = set()
    for a in attached:
        if a.model is None:
            continue
        parameters = list(a.model.parameters())
        for kind, tensors in (
            ("weights", [*parameters, *a.model.buffers()]),
            ("gradients", [p.grad for p in parameters if p.grad is not None]),
            ("optimizer", list(_state_of(a.optimizer))),
        ):
            held[kind] += sum(_new_bytes(t, device, seen) for t in tensors)
    return held


def gradients_to_come(attached: Iterable[Any], device: torch.device) -> int:
    """Returns the bytes of gradients that a backward pass makes: those that are not there."""
    n, seen = 0, set()  # type: int, Set[int]
    for a in attached:
        if a.model is not None:
            n += sum(_new_bytes(p, device, seen) for p in a.model.parameters() if p.requires_grad and p.grad is None)
    return n


def _state_of(optimizer: Any) -> Iterator[torch.Tensor]:
    states = optimizer.state.values() if optimizer is not None else ()
    for state in states:
        for x in state.values() if isinstance(state, dict) else ():
            if isinstance(x, torch.Tensor):
                yield x


def _new_bytes(t: torch.Tensor, device: torch.device, seen: Set[int]) -> int:
    t = getattr(t, "_local_tensor", t)  # the shard of a DTensor
    if t.device != device or t.layout is not torch.strided:
        return 0
    if type(t) not in (torch.Tensor, torch.nn.Parameter):  # a subclass may have no storage
        return int(t.numel()) * int(t.element_size())
    storage = storage_of(t)
    if storage._cdata in seen:
        return 0
    seen.add(storage._cdata)
    return int(storage.nbytes())
