"""One step: what autograd saves goes into records, records into groups, groups to the
library; and comes back when autograd asks. _record.py has their life cycle."""

from __future__ import annotations

import collections
import gc
import threading
from typing import Any, Callable, Deque, Dict, Iterable, List, Optional, Set, Tuple, Union

import torch

from ._errors import Error
from ._record import Group, Handle, Kept, Record, Rows, Weak, is_held, keep, modified, storage_at, storage_of, version_of

get_ident = threading.get_ident
# The number of the running backward pass, -1 outside of one; PyTorch 1.13 does not tell.
_backward = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_told = hasattr(torch._C, "_current_graph_task_id")
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_plain = (torch.Tensor, torch.nn.Parameter)
_strided = torch.strided


class InGroup:
    """The body of `with rt.group(name):`. A class costs a third of a generator."""

    __slots__ = ("step", "name")

    def __init__(self, step: Optional[Step], name: str) -> None:
        self.step, self.name = step, name

    def __enter__(self) -> None:
        if self.step is not None:
            self.step.enter(self.name, self)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.step is not None:
            self.step.leave(self, kind is not None)


# Tensors outside of groups are told so many at a time.
MANY = 16

# And no group waits for more bytes than these: PyTorch has allocated them before the library
# hears of them, so that its account is behind by as much.
PIECE = 64 << 20


class Step:
    """The hooks of one step. pack runs on the step's thread, unpack on autograd's."""

    def __init__(self, library: Any, device: torch.device, least: int, moves: Callable[[str], bool], outside: Optional[str], weights: Set[int], seen: Set[str], held: List[Weak]) -> None:
        self.calls, self.device, self.least = library, device, max(1, least)
        self.moves, self.weights, self.seen, self.held = moves, weights, seen, held
        self.cuda = device.index if device.type == "cuda" else -1
        self.torch_stream = torch.cuda.current_stream(device) if self.cuda >= 0 else None
        self.stream: int = self.torch_stream.cuda_stream if self.torch_stream is not None else 0
        self.thread = get_ident()
        self.over = False
        self.used_rows = False
        self.raised: Optional[str] = None
        self.lock = threading.Lock()  # autograd has a thread a device
        self.dead: Deque[Tuple[int, List[int]]] = collections.deque()
        self.stack: List[Tuple[str, object]] = []
        # Of the innermost group, if the library is to know what it saves. Once something
        # may leave it is told of all that is saved, in a group outside of all others too:
        # what stays tells it when memory is wanted, and so when a copy is to be over.
        self.outside = self.name = outside
        self.open: Optional[Group] = None
        self.pending: Dict[int, Record] = {}  # of the open group
        self.waiting = 0  # bytes of those
        self.records: Dict[int, Record] = {}  # whose memory the library may read or ask for
        self.at: Dict[int, Record] = {}  # by address
        self.rows: Dict[int, Rows] = {}  # by address
        # Storages of the library's memory, by record. Held, since autograd adds to a gradient in
        # place if nobody else has its storage, and one may be what a backward pass unpacked.
        self.views: Dict[int, Any] = {}
        self.ids = 0

    # Groups

    def enter(self, name: str, owner: object) -> None:
        if get_ident() != self.thread:
            return
        self.seen.add(name)
        if self.cuda >= 0 and _raw_stream(self.cuda) != self.stream:
            return  # nothing is saved there; and a capture there must not see the library's copies
        if self.open is not None:
            self.flush()
        self.stack.append((name, owner))
        self.name = name if self.moves(name) else self.outside

    def leave(self, owner: object, failed: bool = False) -> None:
        """Leaves the innermost group of an owner, and those within that an exception
        left behind. What a failed group saved is told too: who catches the exception may
        go on, and storages of it may be away for another group."""
        if get_ident() != self.thread or not any(o is owner for _, o in self.stack):
            return
        if self.open is not None:
            try:
                self.flush()
            except Error:
                if not failed:  # what was raised first says more
                    raise
        while self.stack.pop()[1] is not owner:
            pass
        name = self.stack[-1][0] if self.stack else None
        self.name = name if name is not None and self.moves(name) else self.outside

    def inside(self, owner: object) -> bool:
        return any(o is owner for _, o in self.stack)

    def disown(self) -> None:
        """From now on every tensor passes through."""
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
            r.look()
            rows = r.rows
            if rows is None:
                storages.append((id, r.address, r.bytes, 0, 0, r.spoiled))
            else:
                storages.append((id, r.address, r.bytes, rows.count.data_ptr(), rows.row_bytes, r.spoiled))
        self.records.update(pending)
        group.ids = list(pending)
        try:
            with self.lock:
                group.number, gone = self.calls.save(group.name.encode(), storages)
                self.left(gone)
                self.bury()
        except Error as e:
            self.note(e)
            raise

    # What autograd saves

    def pack(self, t: torch.Tensor) -> Union[Kept, Handle]:
        name = self.name
        if name is None and not self.rows:
            return keep(t)
        if type(t) not in _plain or t.layout is not _strided or t.device != self.device or t.is_quantized:
            return keep(t)
        memory = storage_of(t)
        if memory.nbytes() < self.least:
            return keep(t)
        if get_ident() != self.thread or self.over or _backward() != -1:
            return keep(t)
        if self.cuda >= 0 and _raw_stream(self.cuda) != self.stream or t.is_conj() or t.is_neg():
            return keep(t)
        offset = t.storage_offset()
        address = t.data_ptr() - offset * t.element_size()
        rows = self.rows.get(address)
        if rows is not None:
            if rows.weak.of != memory._cdata:
                rows = None  # freed, and its address is another's
            elif self.moves(rows.name):
                name = rows.name
        if name is None:
            if self.open is not None:  # of rows, outside of groups
                self.flush()
            return keep(t)
        if self.open is not None and self.open.name != name:
            self.flush()  # which may bury the record that this storage had
        record = self.at.get(address)
        if record is None or not record.is_storage(memory, t._version, rows):
            record = self.record(t, memory, address, rows)
            if record is None:
                return keep(t)
        group = self.open
        if group is None:
            self.open = group = Group(self, name)
        self.pending[record.id] = record
        self.waiting += record.bytes
        handle = Handle(group, record, t, offset)
        if self.waiting >= PIECE or record.rows is not None or name is self.outside and len(self.pending) >= MANY:
            self.flush()  # rows come back one tensor at a time
        return handle

    def record(self, t: torch.Tensor, memory: Any, address: int, rows: Optional[Rows]) -> Optional[Record]:
        if address == 0 or memory._cdata in self.weights or is_held(t):
            return None
        if memory.data_ptr() != address:
            return None  # memory that is resized or mapped behind the tensor's back
        if rows is not None and (not rows.alone or rows.version != version_of(rows.count)):
            rows = None
        self.used_rows |= rows is not None
        self.ids += 1
        record = self.at[address] = Record(self.ids, t, memory, address, rows)
        return record

    # What it asks for again

    def unpack(self, h: Union[Kept, Handle]) -> torch.Tensor:
        try:
            return self.tensor(h)
        except Error as e:
            self.note(e)
            raise

    def note(self, e: Error) -> None:
        """PyTorch 1.13 makes another exception of what a hook raises: its sentence is kept.
        Kept itself, it would hold frames that hold the graph that holds this step, and no
        collector sees that."""
        self.raised = str(e)

    def tensor(self, h: Union[Kept, Handle]) -> torch.Tensor:
        if type(h) is tuple:
            t, version = h
            if t._version != version:
                raise Error(modified(t.dtype, t.size(), version, t._version))
            return t
        group, record = h.group, h.record
        if self.over:
            raise Error("a tensor is needed after its step; call backward() inside of `with rt.step():`")
        if group is self.open:
            self.flush()  # the forward pass is over, and the library may have moved a part
        if not group.loaded and group.number is not None or self.dead:
            self.load(group)
        if record.watch is not None:
            record.look()
        if record.spoiled:
            raise Error(modified(h.dtype, h.size, record.version, None))
        memory = record.memory
        if memory is None:
            if not record.berth:
                raise Error(f"storage {record.id} of group {group.name!r} did not come back; give the step up")
            with self.lock:
                memory = self.views.get(record.id)
                if memory is None:
                    memory = self.views[record.id] = storage_at(record.berth, record.bytes, self.device)
        return torch.empty(0, dtype=h.dtype, device=self.device).set_(memory, h.offset, h.size, h.stride)

    def load(self, group: Group) -> None:
        with self.lock:
            self.bury()
            if not self.stack and not _told:
                self.name = None  # a backward pass: what it saves itself is needed at once
            if group.loaded or group.number is None:
                return
            held, gone = self.calls.load(group.number)
            group.loaded = True
            self.left(gone)
            self.forget(group.ids)
            # Only handles hold them from now on: autograd frees them node by node.
            for id in group.ids:
                record = self.records.get(id)
                if record is None:
                    continue
                if record.rows is not None and record.memory is None:
                    record.berth = self.calls.rows(id)
                if not record.before and id not in held:
                    del self.records[id]

    def lend(self, id: int, size: int) -> int:
        """Memory for a storage that comes back, of the allocator's pool of the step's stream."""
        if self.cuda >= 0 and _raw_stream(self.cuda) != self.stream:
            with torch.cuda.stream(self.torch_stream):
                t = torch.empty(size, dtype=torch.uint8, device=self.device)
        else:
            t = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.records[id].lend(storage_of(t))
        return t.data_ptr()

    def left(self, ids: List[int]) -> None:
        for id in ids:
            record = self.records.get(id)
            if record is not None:
                record.leave()

    def bury(self) -> None:
        """Releases groups whose handles are all dead, unless what is pending may have a
        record of theirs: it is to be saved again before it can be done with. Rows that somebody
        still reads where the library has them wait: the next ones would be written there."""
        waiting = []
        while self.dead and not self.pending:
            number, ids = self.dead.popleft()
            if self.views and self.viewed(ids):
                waiting.append((number, ids))
                continue
            self.left(self.calls.release(number))
            self.forget(ids)
        self.dead.extend(waiting)

    def viewed(self, ids: Iterable[int]) -> bool:
        """Whether somebody else has one of them; those that nobody has are let go."""
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

    def outlive(self) -> None:
        """Tensors of rows that somebody still has are no longer this step's."""
        self.viewed(list(self.views))
        self.held += map(Weak, self.views.values())
        self.views = {}

    def forget(self, ids: List[int]) -> None:
        """A storage that is saved again from now on, by the next microbatch say, is another
        record: the library may have done with this one."""
        for id in ids:
            record = self.records.get(id)
            if record is not None and self.at.get(record.address) is record:
                del self.at[record.address]

    def end(self, failed: bool) -> None:
        self.over = True
        self.name, self.stack = None, []
        self.abandon()
        with self.lock:
            try:
                if not failed:
                    self.bury()
                self.calls.end(failed)
            finally:
                for record in self.records.values():
                    record.before.clear()
                    record.let_go()
                self.records, self.at, self.rows = {}, {}, {}
        self.outlive()
        if not failed and still(self.held):
            raise Error("a stashed tensor is still held after its step, where the next one will be written; clone() what a backward pass keeps")


def still(held: List[Weak]) -> bool:
    """Whether somebody has one of these storages; the others are forgotten."""
    if any(w.storage() is not None for w in held):
        gc.collect()  # it may be garbage
    held[:] = [w for w in held if w.storage() is not None]
    return bool(held)
