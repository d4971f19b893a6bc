"""One step: what autograd saves goes into records, records into groups, groups to the
library, and back when autograd asks for it. _record.py documents the life cycle."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import threading
import weakref
from typing import Any, Callable, Deque, Dict, Iterable, List, Mapping, Optional, Set, Tuple, Union

import torch
from torch.utils import _pytree

from ._budget import Budget
from ._errors import AFTER_STEP, Error
from ._record import Group, Handle, Kept, Place, Record, Rows, Weak, is_held, modified, storage_at, storage_of, version_of

get_ident = threading.get_ident
# Returns the number of the running backward pass, -1 outside of one. PyTorch 1.13 has none.
in_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_knows_backward = hasattr(torch._C, "_current_graph_task_id")
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
_plain = (torch.Tensor, torch.nn.Parameter)
_strided = torch.strided
Ref = Union["weakref.ref[Kept]", "weakref.ref[Record]"]


class InGroup:
    """The context of `with rt.group(name):`. A class takes a third of a generator's time."""

    __slots__ = ("step", "name")

    def __init__(self, step: Optional[Step], name: str) -> None:
        self.step, self.name = step, name

    def __enter__(self) -> None:
        if self.step is not None:
            self.step.begin_group(self.name, self)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.step is not None:
            self.step.end_group(self, kind is not None)


def first_made(out: Any) -> Optional[torch.Tensor]:
    """Returns the first tensor of a result that has a backward pass: in containers of any class, data classes too."""
    todo, seen = [out], {}  # type: List[Any], Dict[int, Any]
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor):
            if x.grad_fn is not None:
                return x
        elif id(x) not in seen:  # it may lead to itself
            seen[id(x)] = x
            todo.extend(reversed(list(_inside(x))))
    return None


def _inside(x: Any) -> Iterable[Any]:
    if isinstance(x, Mapping):
        return x.values()
    if isinstance(x, (tuple, list, collections.deque)):
        return x
    if dataclasses.is_dataclass(x):
        return (getattr(x, f.name, None) for f in dataclasses.fields(x))
    registered = _pytree.SUPPORTED_NODES.get(type(x))
    of: Iterable[Any] = registered.flatten_fn(x)[0] if registered is not None else ()
    return of


class Ticket:
    """What is reserved for a call of a block. A hook of its output holds it: if autograd forgets the call without a
    backward pass, because an exception ended the forward pass or nobody wanted gradients, it is free."""

    __slots__ = ("step", "numbers")

    def __init__(self, step: Step, numbers: List[int]) -> None:
        self.step, self.numbers = step, numbers

    def __del__(self) -> None:
        # This may run at any moment, also during a call of the library: it only makes a note.
        self.step.unused.extend(self.numbers)


# The library is told of tensors outside of groups when there are so many.
MANY = 16

# It is told of a group at the latest when it has saved so many bytes: until then PyTorch has
# allocated them and the library does not count them.
PIECE = 64 << 20


# The list of what a step saved is cleared of what is dead when it has so many entries.
SAVES = 4096


class Step:
    """The hooks of one step. pack runs on the step's thread, unpack on autograd's threads."""

    def __init__(self, library: Any, device: torch.device, least: int, moves: Callable[[str], bool], outside: Optional[str], weights: Set[int], seen: Set[str], held: List[Weak], budget: Optional[Budget] = None) -> None:
        self.calls, self.device, self.least = library, device, max(1, least)
        self.moves, self.weights, self.seen, self.held = moves, weights, seen, held
        self.whole = budget
        self.budget = budget if budget is not None and budget.measuring else None
        self.cuda = device.index if device.type == "cuda" else -1
        self.torch_stream = torch.cuda.current_stream(device) if self.cuda >= 0 else None
        self.stream: int = self.torch_stream.cuda_stream if self.torch_stream is not None else 0
        self.thread = get_ident()
        self.over = False
        self.used_rows = False
        self.raised: Optional[str] = None
        self.lock = threading.Lock()  # autograd has one thread per device
        self.dead: Deque[Tuple[int, List[int]]] = collections.deque()
        self.stack: List[Tuple[str, object, Place]] = []
        self.place: Optional[Place] = None  # of the innermost group
        # All that this step saved and autograd may still hold, for explain(): the collector
        # must not be asked, because what it finds cannot be touched while other threads run.
        self.saves: List[Ref] = []
        self.most_saves = SAVES
        # Name of the innermost group if the library must know what it saves. Once anything may
        # be moved, the library is told of everything that is saved, outside of groups too:
        # what stays tells it when memory is needed, and so when a copy must be over.
        self.outside = self.name = outside
        self.open: Optional[Group] = None
        self.pending: Dict[int, Record] = {}  # of the open group
        self.waiting = 0  # bytes of pending
        self.records: Dict[int, Record] = {}  # whose memory the library may read or ask for
        self.at: Dict[int, Record] = {}  # by address
        self.rows: Dict[int, Rows] = {}  # by address
        # Storages of berths, by record. They are held here because autograd adds to a gradient
        # in place if nobody else has its storage, and a gradient may be what was unpacked.
        self.views: Dict[int, Any] = {}
        self.ids = 0
        self.quiet = False  # something is tried and timed: nothing is released or measured
        self.reserved: Dict[int, int] = {}  # storages of bytes that the library only counts, by group
        self.ending: List[int] = []  # those of the block whose backward pass runs
        self.passing: List[int] = []  # those that are free when a backward pass begins
        self.unused: Deque[int] = collections.deque()  # those of calls that will have no backward pass

    # Groups

    def begin_group(self, name: str, owner: object) -> None:
        if get_ident() != self.thread:
            return
        self.seen.add(name)
        if self.cuda >= 0 and _raw_stream(self.cuda) != self.stream:
            return  # nothing is saved on other streams, and a capture there must not see our copies
        if self.open is not None:
            self.flush()
        self.place = (name, weakref.ref(owner) if isinstance(owner, torch.nn.Module) else None)
        self.stack.append((name, owner, self.place))
        self.name = name if self.moves(name) else self.outside

    def end_group(self, owner: object, failed: bool = False) -> None:
        """Ends the innermost group of an owner, and groups within it that an exception left
        open. The library is told what a failed group saved, too: the exception may be caught,
        and another group may have offloaded the same storages."""
        if get_ident() != self.thread or not any(o is owner for _, o, _ in self.stack):
            return
        if self.open is not None:
            try:
                self.flush()
            except Error:
                if not failed:  # the first exception says more
                    raise
        while self.stack.pop()[1] is not owner:
            pass
        name, _, self.place = self.stack[-1] if self.stack else (None, None, None)
        self.name = name if name is not None and self.moves(name) else self.outside

    # Bytes that the library only counts

    def on_other_stream(self) -> bool:
        return self.cuda >= 0 and _raw_stream(self.cuda) != self.stream

    def reserve(self, bytes: int) -> int:
        """Tells the library of so many saved bytes that stay where they are. It returns the
        number of their group."""
        if self.open is not None:
            self.flush()
        self.ids += 1
        with self.lock:
            if self.budget is not None:
                self.budget.before_call()
                self.budget.saved(self.ids, bytes)
            self.release_unused()
            number, returned = self.calls.save(b"kept", [(self.ids, self.ids << 8, bytes, 0, 0, 1)])
            self.reserved[number] = self.ids
            self.take_back(returned)
            self.release_dead()
            if self.budget is not None:
                self.budget.after_call()
        return int(number)

    def begin_backward(self, number: Optional[int], again: int) -> None:
        """Notes that the backward pass of a block begins: what the block before it reserved is
        free, and a second forward pass takes so many bytes."""
        if self.over:
            return
        with self.lock:
            if self.budget is not None:
                self.budget.before_call()
            for numbers in (self.passing, self.ending):
                while numbers:  # none is released again if one fails
                    self._unreserve(numbers.pop(0))
            if number in self.reserved:
                self.take_back(self.calls.load(number)[1])
                self.ending.append(number)
            if self.budget is not None:
                self.budget.after_call()
        if again:
            more = self.reserve(again)
            try:
                with self.lock:
                    self.take_back(self.calls.load(more)[1])
            except BaseException:
                with contextlib.suppress(Error):  # the first exception says more
                    self.unreserve(more)
                raise
            self.ending.append(more)

    def unreserve(self, number: int) -> None:
        """Takes back what was reserved for a block that has no backward pass."""
        with self.lock:
            if self.budget is not None:
                self.budget.before_call()
            self._unreserve(number)
            if self.budget is not None:
                self.budget.after_call()

    def release_unused(self) -> None:
        """Takes back what was reserved for calls that autograd forgot."""
        while self.unused:
            number = self.unused.popleft()
            if number in self.reserved and number not in self.ending:  # else its backward pass began
                if number in self.passing:
                    self.passing.remove(number)
                self._unreserve(number)

    def _unreserve(self, number: int) -> None:
        self.take_back(self.calls.release(number))
        id = self.reserved.pop(number)
        if self.budget is not None:
            self.budget.released([id])

    def inside(self, owner: object) -> bool:
        return any(o is owner for _, o, _ in self.stack)

    def disown(self) -> None:
        """Lets every tensor pass through from now on."""
        self.thread, self.outside, self.name, self.rows = -1, None, None, {}

    def abandon(self) -> None:
        self.open, self.pending, self.waiting = None, {}, 0

    def flush(self) -> None:
        """Tells the library what the open group saved."""
        group, pending = self.open, self.pending
        self.abandon()
        if group is None or not pending:
            return
        storages = []
        for id, r in pending.items():
            r.check_version()
            rows = r.rows
            if rows is None:
                storages.append((id, r.address, r.bytes, 0, 0, r.spoiled))
            else:
                storages.append((id, r.address, r.bytes, rows.count.data_ptr(), rows.row_bytes, r.spoiled))
        self.records.update(pending)
        group.ids = list(pending)
        try:
            with self.lock:
                if self.budget is not None:
                    self.budget.before_call()
                    for id, r in pending.items():
                        if r.rows is None:
                            self.budget.saved(id, r.bytes)
                group.number, returned = self.calls.save(group.name.encode(), storages)
                self.take_back(returned)
                self.release_dead()
                if self.budget is not None:
                    self.budget.after_call()
        except Error as e:
            self.note(e)
            raise

    def mark(self) -> int:
        """Tells the library what was saved so far, and reads the peak. Returns how often it was
        read in this step."""
        if self.open is not None:
            self.flush()
        if self.budget is None:
            return 0
        with self.lock:
            return self.budget.mark()

    # What autograd saves

    def pack(self, t: torch.Tensor) -> Union[Kept, Handle]:
        name = self.name
        if name is None and not self.rows:
            return self.keep(t)
        if type(t) not in _plain or t.layout is not _strided or t.device != self.device or t.is_nested or t.is_quantized or t.is_inference():
            return self.keep(t)
        memory = storage_of(t)
        if memory.nbytes() < self.least or memory.nbytes() <= 16 and t.dim() == 0 and t.is_leaf:
            return self.keep(t)  # a Python number is a tensor that calculates otherwise than its copy
        if get_ident() != self.thread or self.over or in_backward() != -1:
            return self.keep(t)
        if self.cuda >= 0 and _raw_stream(self.cuda) != self.stream or t.is_conj() or t.is_neg():
            return self.keep(t)
        offset, address = t.storage_offset(), memory.data_ptr()  # a tensor without elements has no address
        rows = self.rows.get(address)
        if rows is not None:
            if rows.weak.of != memory._cdata:
                rows = None  # it was freed, and another storage has its address
            elif self.moves(rows.name):
                name = rows.name
        if name is None:
            if self.open is not None:  # a group of rows outside of groups
                self.flush()
            return self.keep(t)
        if self.open is not None and self.open.name != name:
            self.flush()  # which may drop the record that this storage had
        record = self.at.get(address)
        if record is None or not record.is_storage(memory, t._version, rows):
            record = self.record(t, memory, address, rows)
            if record is None:
                return self.keep(t)
        group = self.open
        if group is None:
            self.open = group = Group(self, name)
        self.pending[record.id] = record
        self.waiting += record.bytes
        handle = Handle(group, record, t, offset)
        if self.waiting >= PIECE or record.rows is not None or name is self.outside and len(self.pending) >= MANY:
            self.flush()  # rows are loaded one tensor at a time
        return handle

    def keep(self, t: torch.Tensor) -> Kept:
        kept = Kept(t, self.place)
        self.saves.append(weakref.ref(kept))
        if len(self.saves) >= self.most_saves:
            self.drop_dead_saves()
        return kept

    def drop_dead_saves(self) -> None:
        """Keeps the list short in a step with many backward passes."""
        self.saves = [weak for weak in self.saves if weak() is not None]
        self.most_saves = max(SAVES, 2 * len(self.saves))

    def record(self, t: torch.Tensor, memory: Any, address: int, rows: Optional[Rows]) -> Optional[Record]:
        if address == 0 or memory._cdata in self.weights or is_held(t):
            return None
        if rows is not None and (not rows.alone or rows.version != version_of(rows.count)):
            rows = None
        self.used_rows |= rows is not None
        self.ids += 1
        record = self.at[address] = Record(self.ids, t, memory, address, rows, self.place)
        self.saves.append(weakref.ref(record))
        if len(self.saves) >= self.most_saves:
            self.drop_dead_saves()
        return record

    # What autograd asks for

    def unpack(self, h: Union[Kept, Handle]) -> torch.Tensor:
        try:
            return self.tensor(h)
        except Error as e:
            self.note(e)
            raise

    def note(self, e: Error) -> None:
        """Keeps the sentence of an error: PyTorch 1.13 turns what a hook raises into another
        exception. The exception itself would hold frames that hold the graph that holds this
        step, a cycle that the collector does not see."""
        self.raised = str(e)

    def tensor(self, h: Union[Kept, Handle]) -> torch.Tensor:
        if isinstance(h, Kept):
            t, version = h.tensor, h.version
            if version_of(t) != version:
                raise Error(modified(t.dtype, t.size(), version, t._version))
            return t
        group, record = h.group, h.record
        if self.over:
            raise Error(AFTER_STEP)
        if group is self.open:
            self.flush()  # its forward pass is over, and the library may have moved a part
        if not group.loaded and group.number is not None or self.dead and not self.quiet:
            self.load(group)
        if record.watch is not None:
            record.check_version()
        if record.spoiled:
            raise Error(modified(h.dtype, h.size, record.version, None))
        memory = record.memory
        if memory is None:
            if not record.berth:
                raise Error(f"storage {record.id} of group {group.name!r} was not reloaded; abandon the step")
            with self.lock:
                memory = self.views.get(record.id)
                if memory is None:
                    memory = self.views[record.id] = storage_at(record.berth, record.bytes, self.device)
        return torch.empty(0, dtype=h.dtype, device=self.device).set_(memory, h.offset, h.size, h.stride)

    def load(self, group: Group) -> None:
        with self.lock:
            budget = None if self.quiet else self.budget
            if budget is not None:
                budget.before_call()
            if not self.quiet:
                self.release_dead()
            if not self.stack and not _knows_backward:
                self.name = None  # what a backward pass saves is needed at once
            if not group.loaded and group.number is not None:
                self.load_group(group, group.number)
            if budget is not None:
                budget.after_call()

    def load_group(self, group: Group, number: int) -> None:
        held, returned = self.calls.load(number)
        group.loaded = True
        self.take_back(returned)
        self.forget(group.ids)
        # Only handles hold the records from now on: autograd frees them node by node.
        for id in group.ids:
            record = self.records.get(id)
            if record is None:
                continue
            if record.rows is not None and record.memory is None:
                record.berth = self.calls.rows(id)
            if not record.before and id not in held:
                del self.records[id]

    def provide(self, id: int, size: int) -> int:
        """Returns memory for a storage that is reloaded, from the allocator's pool of the
        step's stream."""
        if self.cuda >= 0 and _raw_stream(self.cuda) != self.stream:
            with torch.cuda.stream(self.torch_stream):
                t = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            t = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.records[id].provide(storage_of(t))
        return int(t.data_ptr())

    def take_back(self, ids: List[int]) -> None:
        """Frees memory that the library returned."""
        for id in ids:
            record = self.records.get(id)
            if record is not None:
                record.memory_returned()

    def release_dead(self) -> None:
        """Releases groups whose handles are all dead. It waits while records are pending, which
        may be of such a group: those must be saved again first. It also waits for berths that
        somebody still reads: the next rows would be written there."""
        self.release_unused()
        waiting = []
        while self.dead and not self.pending:
            number, ids = self.dead.popleft()
            if self.views and self.viewed(ids):
                waiting.append((number, ids))
                continue
            self.take_back(self.calls.release(number))
            self.forget(ids)
            if self.budget is not None:
                self.budget.released(ids)
        self.dead.extend(waiting)

    def viewed(self, ids: Iterable[int]) -> bool:
        """Reports whether somebody else reads the berth of one of these records. Storages that
        nobody else has are dropped."""
        found = False
        for id in ids:
            if id not in self.views:
                continue
            memory = self.views.pop(id)
            weak = Weak(memory)
            del memory
            memory = weak.storage()
            if memory is not None:
                self.views[id], found = memory, True
        return found

    def keep_views(self) -> None:
        """Notes tensors of berths that somebody has after the step."""
        self.held += map(Weak, self.views.values())
        self.views = {}

    def forget(self, ids: List[int]) -> None:
        """Makes another record of a storage that is saved again, by the next microbatch for
        example: the library may have released this one."""
        for id in ids:
            record = self.records.get(id)
            if record is not None and self.at.get(record.address) is record:
                del self.at[record.address]

    def end(self, failed: bool) -> None:
        self.over = True
        self.name, self.stack, self.place, self.saves = None, [], None, []
        self.abandon()
        with self.lock:
            try:
                try:
                    if not failed:
                        self.release_dead()
                        if self.whole is not None:
                            self.whole.end()
                except BaseException:
                    with contextlib.suppress(Exception):  # the first exception says more
                        self.calls.end(True)  # or the next step could not begin
                    raise
                self.calls.end(failed)
            finally:
                for record in self.records.values():
                    record.before.clear()
                    record.drop_memory()
                self.records, self.at, self.rows = {}, {}, {}
                self.keep_views()
        if not failed and any_alive(self.held):
            raise Error("a stashed tensor is still held after its step, and the next step writes to its memory; clone() what a backward pass keeps")


def any_alive(held: List[Weak]) -> bool:
    """Reports whether somebody has one of these storages. The others are forgotten."""
    if any(w.storage() is not None for w in held):
        gc.collect()  # it may be garbage
    held[:] = [w for w in held if w.storage() is not None]
    return bool(held)
