"""Who holds device memory at a moment, for people: explain().

Every allocated block has one holder, the first in this order that has a tensor in it:
weights, gradients, optimiser, saved tensors. What is left is temporaries and others, tensors
in variables among them:

    sum of all holders = allocated

Saved tensors are those of steps, which list what their hooks saved. Those of a graph that
was made outside of a step are known to PyTorch alone: reading them would call hooks of
others, which may load or recompute. Nothing here asks the garbage collector, which also
finds tensors that autograd's threads may free meanwhile. Nothing allocates device memory
or keeps a tensor, and what cannot be read becomes a note.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch

from . import _memory
from ._explanation import Explanation, Saved
from ._record import Place, Record, storage_of
from ._report import human

_plain = (torch.Tensor, torch.nn.Parameter)
# Reading the address of a tensor that is copied at its first write would copy it.
_copied_later: Callable[[Any], bool] = getattr(torch._C, "_is_cow_tensor", lambda _: False)
_plainly: Callable[[], Any] = getattr(torch._C, "DisableTorchFunction", contextlib.nullcontext)
_OUT_OF_MEMORY: Any = getattr(torch.cuda, "OutOfMemoryError", ())
# What PyTorch's allocator for CPUs and this package say when memory runs out.
_SENTENCES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "no memory to reload a saved tensor")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def explain(
    model: Union[None, torch.nn.Module, Sequence[torch.nn.Module]] = None,
    optimizer: Union[None, torch.optim.Optimizer, Sequence[torch.optim.Optimizer]] = None,
    device: Union[None, str, torch.device] = None,
) -> Explanation:
    """Returns who holds the memory of a device now; print it, or read to_dict(). The names of
    modules are those of the model. Without a device it is the model's, or else the current
    GPU, or the CPU. It never raises an error: what it cannot know it says."""
    return _Scene(model, optimizer).explanation(lambda scene: _find_device(scene.models, device))


def of_runtime(runtime: Any, step: Any = None, failed: str = "") -> Explanation:
    """Returns who holds the memory of a runtime's device; failed is the sentence of the error
    if memory ran out in a step."""
    attached = list(runtime._attached)
    scene = _Scene([a.model for a in attached], [a.optimizer for a in attached])
    scene.runtime, scene.step, scene.failed = runtime, step if step is not None else runtime._step, failed
    return scene.explanation(lambda _: runtime.device)


def add_to_error(e: BaseException, runtime: Any, step: Any) -> None:
    """Adds an explanation to an exception that leaves a step because memory ran out. It must
    be called before the step ends: until then the frames of the exception hold the graph,
    and the graph holds what is saved."""
    try:
        sentence = _out_of_memory(e, step.raised if step is not None else None)
        if not sentence:
            return
        text = str(of_runtime(runtime, step, sentence))
        if step is not None and step.raised is not None:
            step.raised += "\n" + text
        if hasattr(e, "add_note"):
            e.add_note(text)
        else:
            e.args = (f"{e}\n{text}",)
    except BaseException:
        pass  # the first exception says more, and the step must end


def _out_of_memory(e: Optional[BaseException], raised: Optional[str]) -> str:
    """Returns the sentence with which memory ran out; it is empty if the reason is another."""
    if raised is not None and any(s in raised for s in _SENTENCES):
        return raised
    for _ in range(8):  # a cause may have a cause
        if e is None:
            break
        text = str(e)
        if isinstance(e, _OUT_OF_MEMORY) or isinstance(e, RuntimeError) and any(s in text for s in _SENTENCES):
            return text
        e = e.__cause__
    return ""


class Ledger:
    """Bytes by holder. A block is counted once. Without a list of blocks, on the CPU, every
    storage is a block."""

    def __init__(self, blocks: Optional[List[Tuple[int, int]]], device: torch.device) -> None:
        self._blocks, self._device = blocks, device
        self.counted = blocks is not None  # by an allocator
        self._starts = [at for at, _ in blocks or ()]
        self._taken: Set[int] = set()
        self.held: Dict[str, int] = {name: 0 for name in ("weights", "gradients", "optimizer", "saved")}
        self.unread = 0  # tensors that could not be read

    def total(self) -> int:
        return sum(self.held.values()) if self._blocks is None else sum(size for _, size in self._blocks)

    def exclude(self, address: int) -> None:
        """Leaves out memory that is not PyTorch's."""
        self._taken.add(address)

    def take(self, holder: str, tensors: Iterable[Any]) -> int:
        """Counts the blocks of tensors that nobody has taken yet, and returns their bytes."""
        n = 0
        for t in tensors:
            try:
                n += sum(self.take_storage(holder, storage_of(part)) for part in _parts(t, self._device))
            except Exception:
                self.unread += 1
        return n

    def take_storage(self, holder: str, storage: Any) -> int:
        at, size = int(storage.data_ptr()), int(storage.nbytes())
        if not at or not size:
            return 0
        if self._blocks is not None:
            i = bisect.bisect_right(self._starts, at) - 1
            if i < 0 or at >= sum(self._blocks[i]):
                return 0  # not the allocator's: a berth, or another process's
            at, size = self._blocks[i]
        if at in self._taken:
            return 0
        self._taken.add(at)
        self.held[holder] += size
        return size


def _parts(t: Any, device: torch.device) -> Iterator[torch.Tensor]:
    """Returns the plain tensors on a device that a tensor is made of."""
    if t is None:
        return
    if type(t) not in _plain and type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # A subclass without memory of its own, such as DTensor.
        names = ["_local_tensor"] if hasattr(t, "_local_tensor") else t.__tensor_flatten__()[0] if hasattr(t, "__tensor_flatten__") else []
        for name in names:
            yield from _parts(getattr(t, name), device)
    elif t.device != device:
        return
    elif t.layout is torch.strided:
        if not _copied_later(t):
            yield t
    elif t.layout is torch.sparse_coo:
        yield from (t._indices(), t._values())
    elif t.layout is torch.sparse_csr:
        yield from (t.crow_indices(), t.col_indices(), t.values())


def _tensors_in(x: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Returns tensors of an optimiser's state, which may be nested."""
    if isinstance(x, torch.Tensor):
        yield x
    elif depth and isinstance(x, (dict, list, tuple)):
        for y in list(x.values()) if isinstance(x, dict) else x:
            yield from _tensors_in(y, depth - 1)


class _Attached(NamedTuple):
    model: torch.nn.Module


class _Scene:
    """What an explanation is made of."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.notes: List[str] = []
        self.models: List[torch.nn.Module] = self._those(model, torch.nn.Module, "model", "a torch.nn.Module")
        self.optimizers: List[Any] = self._those(optimizer, object, "optimizer", "an optimiser")
        self.runtime: Any = None
        self.step: Any = None  # that is under way, or failed
        self.failed = ""

    def _those(self, given: Any, kind: Any, what: str, words: str) -> List[Any]:
        several = list(given) if isinstance(given, (list, tuple)) else [given]
        wrong = [x for x in several if x is not None and not isinstance(x, kind)]
        if wrong:
            self.notes.append(f"expected {words} as {what}, got {type(wrong[0]).__name__}; it is left out")
        return [x for x in several if x is not None and isinstance(x, kind)]

    def explanation(self, device_of: Callable[[_Scene], torch.device]) -> Explanation:
        out = Explanation()
        try:
            device = device_of(self)
            out.device = str(device)
            with _plainly():  # a subclass may run anything
                picture = self._picture(device)
                self._count(out, device, picture)
                self._place(out, picture)
            self._runs_out(out)
            self._budget(out, device)
        except Exception as e:
            self.notes.append(f"the rest could not be read ({type(e).__name__}: {e})")
        out.notes += self.notes
        return out

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self.notes.append(f"{what} could not be read ({type(e).__name__}: {e})")

    def _picture(self, device: torch.device) -> _memory.Picture:
        try:
            return _memory.picture_of(device)
        except Exception as e:  # the allocator may be another one
            self.notes.append(f"the allocator cannot be read ({e}); sizes are those of tensors that Python can reach")
            return _memory.Picture()

    def _count(self, out: Explanation, device: torch.device, picture: _memory.Picture) -> None:
        ledger = Ledger(picture.blocks, device)
        for model in self.models:
            with self._noting("weights"):
                ledger.take("weights", [*model.parameters(), *model.buffers()])
        if self.step is None or self.step.thread == threading.get_ident():
            for p in (p for model in self.models for p in model.parameters()):
                ledger.take("gradients", [p.grad, getattr(p, "main_grad", None)])
        else:  # autograd's threads write them
            self.notes.append("gradients are not read while another thread is in a step")
        for optimizer in self.optimizers:
            with self._noting("the optimiser's state"):
                ledger.take("optimizer", _tensors_in(list(optimizer.state.values())))
        self._count_saved(out, ledger)
        out.allocated, out.counted = ledger.total(), ledger.counted
        out.held = dict(ledger.held, other=out.allocated - sum(ledger.held.values()))
        if ledger.unread:
            self.notes.append(f"{ledger.unread} tensors could not be read")

    def _count_saved(self, out: Explanation, ledger: Ledger) -> None:
        names = _names_of(self.models)
        saved: Dict[Tuple[str, str], int] = {}
        alive = [s for s in (weak() for weak in list(self.step.saves)) if s is not None] if self.step is not None else []
        records = [s for s in alive if isinstance(s, Record)]
        for record in records:
            if record.berth:
                ledger.exclude(record.berth)
        for s in alive:
            if isinstance(s, Record):
                n = sum(ledger.take_storage("saved", memory) for memory in [s.memory, *s.before] if memory is not None)
            else:
                n = ledger.take("saved", [s.tensor])
            if n:
                key = (_name(s.place, names), s.place[0] if s.place is not None else "")
                saved[key] = saved.get(key, 0) + n
        away = [r.bytes for r in records if r.memory is None and not r.berth]
        out.offloaded = sum(away)
        out.saved = sorted((Saved(name, group, n) for (name, group), n in saved.items()), key=lambda s: (-s.bytes, s.module))
        if not out.saved and not away and self.runtime is None:
            where = "count as temporaries and others" if ledger.counted else "are not counted"
            self.notes.append(f"saved tensors are known inside of `with rt.step():` only; others {where}")

    def _place(self, out: Explanation, picture: _memory.Picture) -> None:
        """Says what of the device is not allocated by PyTorch."""
        out.runtime = self._own()
        out.largest, out.pending, out.total, out.free = picture.largest, picture.pending, picture.total, picture.free
        if picture.reserved is not None:
            out.unused = picture.reserved - out.allocated
            if picture.total is not None and picture.free is not None:
                out.elsewhere = max(0, picture.total - picture.free - picture.reserved - out.runtime)

    def _own(self) -> int:
        """Returns the device memory that the runtime itself took. Only stats() may be called
        while another thread is in a step."""
        library = self.runtime._library if self.runtime is not None else None
        with self._noting("the runtime's own memory"):
            return int(library.stats()["memory"]["kind"][0]["current"]) if library is not None else 0
        return 0

    def _runs_out(self, out: Explanation) -> None:
        """Reads the sizes that PyTorch's error names: by now the temporaries of the pass that
        failed are freed."""
        if not self.failed:
            return
        out.failed, out.asked = True, _size_in(self.failed, r"tried to allocate {}")
        then = _size_in(self.failed, r"{} (?:already allocated|is allocated by PyTorch)")
        out.then = max(out.allocated, then or 0)
        if out.counted and out.then - out.allocated > out.then // 100:
            self.notes.append(f"about {human(out.then - out.allocated)} more were allocated when memory ran out: temporaries of the pass that failed, freed since")

    def _budget(self, out: Explanation, device: torch.device) -> None:
        budget = self.runtime._budget if self.runtime is not None else None
        to_come = _memory.gradients_to_come([_Attached(m) for m in self.models], device)
        out.stays = out.runtime + to_come + sum(out.held[what] for what in ("weights", "gradients", "optimizer"))
        if budget is not None:
            least = budget.least()
            out.budget, out.least = budget.size, None if least is None else max(least, out.stays)
        if out.free is not None and out.unused is not None:
            # Memory that was reserved and did not help when it ran out is lost to fragments.
            out.most = out.runtime + out.free + (out.allocated + out.unused if out.then is None else out.then)


def _find_device(models: List[torch.nn.Module], given: Any) -> torch.device:
    if given is None:
        given = next((getattr(p, "_local_tensor", p).device for m in models for p in m.parameters()), None)
    if given is None:
        given = "cuda" if torch.cuda.is_initialized() else "cpu"
    device = torch.device(given)
    if device.type == "cuda" and device.index is None and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _names_of(models: List[torch.nn.Module]) -> Dict[int, str]:
    names: Dict[int, str] = {}
    for model in models:
        kind = type(model).__name__
        for name, m in model.named_modules():
            names.setdefault(id(m), ".".join(filter(None, [kind if len(models) > 1 or not name else "", name])))
    return names


def _name(place: Optional[Place], names: Dict[int, str]) -> str:
    if place is None:
        return "outside of groups"
    group, weak = place
    module = weak() if weak is not None else None
    if module is None:
        return group
    return names.get(id(module), type(module).__name__)


def _size_in(text: str, pattern: str) -> Optional[int]:
    m = re.search(pattern.replace("{}", r"([\d.]+) (bytes|[KMGT]iB)"), text, re.IGNORECASE)
    return int(float(m[1]) * _UNITS.get(m[2], 1)) if m is not None else None
