"""What a step keeps of a saved tensor: records of storages, groups of records, and the
handles that autograd holds instead of tensors.

A record is one storage, however many tensors view it. Its life cycle:
 1. pending   autograd saved it in a group that is still open; its memory is the tensor's
 2. saved     its group was ended; the library may copy it
 3. returned  the library no longer reads the memory, which goes back to PyTorch
 4. provided  it has memory again, which the library asked for to reload it
 5. dropped   its last handle is dead, or the step is over
A record that is never moved goes from 2 to 5. A record with rows is never provided memory:
it is used in its berth, through a storage that is made when it is first asked for.

Handles hold their group and their record. Nothing else holds a group once it is ended, so
nobody needs a group that dies; it is released at the next call.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, List, Optional, Tuple

import torch

if hasattr(torch.Tensor, "untyped_storage"):
    storage_of = torch.Tensor.untyped_storage
else:
    storage_of = torch.Tensor._storage

_plain = (torch.Tensor, torch.nn.Parameter)
_strided = torch.strided


def is_dense(t: torch.Tensor) -> bool:
    """Reports whether a tensor is one of PyTorch's own with a size and strides: not sparse, nested, or of another class."""
    return type(t) in _plain and t.layout is _strided and not t.is_nested


# The innermost group in which a tensor was saved, and the module that the group belongs to.
# It is weak: a module that keeps its output would be a cycle that the collector does not see.
Place = Tuple[str, Optional["weakref.ref[torch.nn.Module]"]]


class Kept:
    """A saved tensor that stays: itself, its version, and where it was saved. Hooks switch off
    autograd's own check of versions, so it is done here; a tensor with a history would be a
    reference cycle."""

    __slots__ = ("tensor", "version", "place", "__weakref__")

    def __init__(self, t: torch.Tensor, place: Optional[Place]) -> None:
        self.tensor, self.version, self.place = t if t.is_leaf else t.detach(), version_of(t), place


class Weak:
    """Names a storage without keeping its memory: as long as this lives, no other storage
    has its number. (PyTorch's own class, in torch.multiprocessing, takes several times as
    long to make.)"""

    __slots__ = ("of", "_free")

    def __init__(self, storage: Any, free: Any = torch.UntypedStorage._free_weak_ref) -> None:
        self.of, self._free = storage._weak_ref(), free

    def storage(self) -> Any:
        """Returns the storage, or None once it is freed."""
        return torch.UntypedStorage._new_with_weak_ptr(self.of)

    def __del__(self) -> None:
        self._free(self.of)


class Record:
    __slots__ = ("id", "memory", "berth", "before", "address", "bytes", "watch", "version", "number", "weak", "rows", "spoiled", "place", "__weakref__")

    def __init__(self, id: int, t: torch.Tensor, memory: Any, address: int, rows: Optional[Rows], place: Optional[Place]) -> None:
        self.id, self.memory, self.address, self.bytes = id, memory, address, memory.nbytes()
        self.berth = 0  # address of its live rows, or 0
        self.before: List[Any] = []  # memory that was replaced and is not returned yet, oldest first
        # An alias without history: a history would hold the node that holds the handle.
        self.watch: Optional[torch.Tensor] = t.detach()
        self.version: int = t._version
        self.number: int = memory._cdata
        self.weak: Optional[Weak] = None
        self.rows = rows
        self.spoiled = False
        self.place = place

    def check_version(self) -> None:
        """Notes a write in place since autograd saved it."""
        if self.watch is not None and self.watch._version != self.version:
            self.spoiled = True

    def drop_memory(self) -> None:
        self.check_version()
        if self.watch is not None:
            # If the storage is saved again, its number leads to this record.
            self.weak, self.watch = Weak(self.memory), None
        self.memory = None

    def memory_returned(self) -> None:
        """The library no longer reads the oldest memory of this record."""
        if self.before:
            self.before.pop(0)
        else:
            self.drop_memory()

    def provide(self, memory: Any) -> None:
        # The library may ask for memory before it returns the memory before.
        if self.memory is not None:
            self.before.append(self.memory)
            self.drop_memory()
        self.memory = memory

    def is_storage(self, memory: Any, version: int, rows: Optional[Rows]) -> bool:
        """Reports whether this is the record of a storage, with the same rows if it has any:
        rows that only another count calls live may be gone."""
        return bool(memory._cdata == self.number) and version == self.version and (self.rows is None or self.rows is rows)


class Rows:
    """A storage of which only so many rows, counted on the device, are live."""

    __slots__ = ("count", "version", "row_bytes", "name", "alone", "weak")

    def __init__(self, count: torch.Tensor, row_bytes: int, name: str, alone: bool, weak: Weak) -> None:
        self.count, self.row_bytes, self.name, self.weak = count, row_bytes, name, weak
        self.version = version_of(count)
        self.alone = alone  # only live rows are kept; otherwise the storage is moved as a whole

    def same(self, other: Rows) -> bool:
        """Reports whether both call the same rows of the same storage live."""
        return (
            self.weak.of == other.weak.of and self.count.data_ptr() == other.count.data_ptr() and self.version == other.version
            and self.row_bytes == other.row_bytes and self.name == other.name
        )


def version_of(t: torch.Tensor) -> int:
    try:
        version: int = t._version
        return version
    except RuntimeError:
        return 0  # inference tensors have no version


class _Memory:
    """Device memory that is not PyTorch's, in the form that PyTorch accepts."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def storage_at(address: int, size: int, device: torch.device) -> Any:
    """Returns a storage of the library's memory."""
    if device.type == "cuda":
        return storage_of(torch.as_tensor(_Memory(address, size), device=device))
    return storage_of(torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8))


class Group:
    __slots__ = ("step", "name", "number", "ids", "loaded")

    def __init__(self, step: Any, name: str) -> None:
        self.step, self.name = step, name
        self.number: Optional[int] = None  # until it is ended
        self.ids: List[int] = []
        self.loaded = False

    def __del__(self) -> None:
        # This may run at any moment, also during a call of the library: it only makes a note.
        if self.number is not None:
            self.step.dead.append((self.number, self.ids))


class Handle:
    __slots__ = ("group", "record", "dtype", "size", "stride", "offset")

    def __init__(self, group: Group, record: Record, t: torch.Tensor, offset: int) -> None:
        self.group, self.record, self.offset = group, record, offset
        self.dtype, self.size, self.stride = t.dtype, t.size(), t.stride()


def is_held(t: torch.Tensor) -> bool:
    """Reports whether moving a tensor would free nothing: it is a parameter, frozen or not,
    another leaf that takes a gradient, a view of one, or autocast's copy of one. Or that it would
    be wrong, because others write to its storage and change no version: a graph of
    make_graphed_callables at every replay, and those that have other parts of the storage without
    being views of it, as the gates of a recurrent cell have (torch.unsafe_chunk)."""
    base = t._base if t._is_view() else t
    if base.numel() * base.element_size() < storage_of(t).nbytes():
        return True
    if base.is_leaf:
        return bool(base.requires_grad) or type(base) is not torch.Tensor
    node: Any = base.grad_fn
    name = node.name()
    if name != "ToCopyBackward0":
        return str(name) == "GraphedBackward"
    (source, _), *_ = node.next_functions
    return source is not None and str(source.name()) == "torch::autograd::AccumulateGrad"


def modified(dtype: torch.dtype, size: torch.Size, saved: int, now: Optional[int]) -> str:
    """Returns the error for a write in place. Of an offloaded tensor only the write is known,
    not the version."""
    later = f"at version {now}" if now is not None else "at a later version"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)}] is {later}, and version {saved} was saved; use an operation that is not in place"
    )
