"""The runtime as people use it: a budget or a policy, a model, steps."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, MutableMapping, Optional, Sequence, Union

import torch

from . import _config, _report, _rerun
from ._attach import NAMES, Attachment, matches
from ._config import Size
from ._errors import Error
from ._library import Library
from ._record import Rows, Weak, storage_of
from ._step import InGroup, Step, still

# One runtime owns a device's budget; two would each think they had all of it.
_open: MutableMapping[str, Runtime] = weakref.WeakValueDictionary()


@atexit.register
def _close_all() -> None:
    """While PyTorch and the device are still there."""
    for rt in list(_open.values()):
        with contextlib.suppress(Exception):
            rt.close()


def _in_child() -> None:
    """A forked child, a DataLoader's worker say, may be in the middle of its parent's step:
    it may use autograd, of which nothing is saved here."""
    for rt in list(_open.values()):
        if rt._step is not None:
            rt._step.disown()


os.register_at_fork(after_in_child=_in_child)

# Below this a copy costs more than the memory is worth: 1 MiB is 19 µs at 55 GB/s.
LEAST_CUDA = 1 << 20

# The group of what is saved outside of all groups.
OTHER = "other"


class Runtime:
    """Moves what autograd saves out of device memory and back, one step at a time.

    budget   device memory that saved activations may take: the runtime chooses what moves
    policy   or: {"moe_act": "offload", "expert_fc1": "stash", "core_attn": "keep"} by group
    device   of the tensors; the current GPU, or the CPU where there is none
    host     pinned host memory to use at most; what the machine leaves
    least    smaller storages stay (1 MiB on a GPU, 0 on the CPU)
    live     share of stashed rows that are live, such as 0.5: room is made for so many from
             the first step on. Without it the first step counts them, and nothing leaves
    """

    def __init__(
        self,
        budget: Optional[Size] = None,
        policy: Optional[Mapping[str, str]] = None,
        *,
        device: Union[None, str, torch.device] = None,
        host: Optional[Size] = None,
        least: Optional[Size] = None,
        live: Optional[float] = None,
        rank: Optional[int] = None,
        log: bool = False,
        library: Callable[..., Any] = Library,
    ) -> None:
        self._library: Any = None
        if budget is None and policy is None:
            raise Error("neither a budget nor a policy; give budget=\"60GiB\" or policy={\"moe_act\": \"offload\"}")
        if budget is not None and policy is not None:
            raise Error("a budget and a policy; give one of them: a budget chooses the policy itself")
        if isinstance(budget, Mapping):
            raise Error(f"budget={budget!r} is no size; write policy={budget!r}")
        self.device = _device(device)
        self.policy = None if policy is None else _config.policy(policy)
        moving = {name for name, choice in (self.policy or {}).items() if choice != "keep"}
        leaves = self.policy is None or "offload" in self.policy.values()
        self._moves: Callable[[str], bool] = (lambda _: True) if leaves else moving.__contains__
        self._outside = OTHER if leaves else None
        self._least = _config.size((LEAST_CUDA if self.device.type == "cuda" else 0) if least is None else least, "least")
        self._step: Optional[Step] = None
        self._attached: List[Attachment] = []
        self._weights: set = set()
        self._seen: set = set()
        self._stashed: set = set()  # names that stash() was called with
        self._held: List[Weak] = []  # tensors of the library's memory that outlived their steps
        self._complete = False
        config: Dict[str, Any] = {"device": self.device.type, "least": self._least, "log": bool(log)}
        config["rank"] = _config.rank(os.environ.get("RANK", 0) if rank is None else rank)
        if self.device.type == "cuda":
            config["ordinal"] = self.device.index
            config["stream"] = torch.cuda.current_stream(self.device).cuda_stream
        if self.policy is not None:
            config["policy"] = self.policy
        else:
            config["budget"] = self._budget(budget)
        if host is not None:
            config["host"] = _config.size(host, "host")
        if live is not None:
            config["live"] = _config.share(live, "live")
        # Without a share the first step counts its rows: it cannot have too little room.
        self._overflows = live is not None
        other = _open.get(str(self.device))
        if other is not None and other._library is not None:
            other._library.here()  # in a forked process that is not the way out
            raise Error(f"there is a runtime on {self.device} already; close() it first, or use it for every model")
        self._library = library(config, _lender(weakref.ref(self)))
        _open[str(self.device)] = self

    @staticmethod
    def _budget(budget: Any) -> int:
        n = _config.size(budget, "budget")
        if n == 0:
            raise Error("budget=0 leaves no memory for saved activations; give what they may take, such as \"60GiB\"")
        return n

    # Models and groups

    def attach(self, model: torch.nn.Module, groups: Optional[Mapping[str, str]] = None) -> Attachment:
        """Gives modules groups by patterns of their names (fnmatch); without patterns the
        names of well-known models are looked for."""
        self._here()
        if self._step is not None:
            raise Error("attach() inside of a step; call it before `with rt.step():`")
        found = matches(model, groups)
        known = set(found.values()) | {name for a in self._attached for name in a.names} | self._seen | set(NAMES) | {OTHER}
        for name in self.policy or {}:
            # Another one may be used in group(): that shows when the first step ends.
            hint = "" if name in known else _config.near(name, known)
            if hint:
                raise Error(f"policy names the group {name!r}, which this model does not have (it has {', '.join(sorted(set(found.values())))}){hint}")
        a = Attachment(self, model, found)
        self._attached.append(a)
        return a

    def _detached(self, a: Attachment) -> None:
        self._attached = [b for b in self._attached if b is not a]

    def group(self, name: str) -> ContextManager[None]:
        """What autograd saves inside goes into this group; outside of a step it does nothing."""
        return InGroup(self._step, _config.group_name(name))

    def stash(self, x: torch.Tensor, rows: torch.Tensor, name: str = "expert_fc1") -> torch.Tensor:
        """Returns x, a buffer of which only the first rows are live: a number known only on
        the device (int64, no dimensions). Where autograd saves x in a group that is stashed,
        only live rows are kept, and in the backward pass the others are zero, or as they
        were. A backward pass must not write to it. If rows is written before x is saved, all
        of x is kept. Under "offload" and "keep" x is like any other tensor of the group."""
        _config.group_name(name)
        if not isinstance(x, torch.Tensor):
            raise Error(f"stash: x is no tensor ({type(x).__name__}); give the buffer itself, rows as its first dimension")
        if not isinstance(rows, torch.Tensor):
            raise Error(f"stash: rows={rows!r} is no tensor; give the number on the device, such as torch.tensor(3, device=x.device)")
        step = self._step
        if step is None or not torch.is_grad_enabled():
            return x  # a model is evaluated on other devices too, and when the runtime is closed
        if rows.dtype != torch.int64 or rows.dim() != 0 or rows.device != x.device:
            raise Error(f"stash: rows must be an int64 tensor without dimensions on {x.device}; it is {rows.dtype} {list(rows.shape)} on {rows.device}: give rows.long(), rows.sum() or rows[0]")
        if x.device != self.device or x.dim() == 0:
            raise Error(f"stash: x must be on {self.device} with rows as its first dimension; it is {list(x.shape)} on {x.device}")
        if not x.is_contiguous():
            raise Error("stash: x must be contiguous; give x.contiguous()")
        if x.numel() * x.element_size() != storage_of(x).nbytes() or x.data_ptr() % 16 and x.numel():
            raise Error("stash: x is a part of its storage, or begins at an odd address; give x.clone()")
        step.seen.add(name)
        self._stashed.add(name)
        if x.numel():
            stash = self.policy is None or self.policy.get(name) == "stash"
            new, old = Rows(rows, x.numel() // x.shape[0] * x.element_size(), name, stash, Weak(storage_of(x))), step.rows.get(x.data_ptr())
            if old is None or not new.same(old):
                step.rows[x.data_ptr()] = new
        return x

    # Steps

    @contextlib.contextmanager
    def step(self, key: str = "") -> Iterator[None]:
        """Forward and backward passes. Steps with the same key do the same things: the
        first is recorded, later ones follow the plan that was made from it."""
        self._here()
        if not isinstance(key, str) or "\0" in key:
            raise Error(f"step: key={key!r} is no name; give a string such as \"long\"")
        if self._step is not None:
            where = "" if self._step.thread == threading.get_ident() else " in another thread"
            raise Error(f"a step is under way{where}; leave it before the next one begins")
        self._refresh()
        _eager()
        step = Step(self._library, self.device, self._least, self._moves, self._outside, self._weights, self._seen, self._held)
        self._library.begin(key, step.stream)
        self._step = step
        try:
            with torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack):
                yield
            self._step = None
            step.end(False)
        except BaseException as e:
            self._step = None
            with contextlib.suppress(Exception):  # what was raised first says more
                if not step.over:
                    step.end(True)
                self._settle(step)  # or the next step would lack what this one did
            if step.raised is not None and type(e) is RuntimeError:
                raise Error(step.raised) from None
            raise
        self._settle(step)
        self._once()

    def _settle(self, step: Step) -> None:
        """Makes room for the rows of a step that is over; replays of a graph do it themselves."""
        if step.used_rows:
            self._overflows = True
            if not _capturing(self.device):
                self._library.check(step.stream)

    def _refresh(self) -> None:
        """Parameters and buffers may have other storages since the last step."""
        self._weights.clear()
        for a in self._attached:
            self._weights.update(a.weights())

    def _once(self) -> None:
        """A policy for a group that the first step did not have is a misspelt name."""
        if self._complete or self.policy is None:
            return
        self._complete = True
        for name, choice in self.policy.items():
            if choice != "keep" and name not in self._seen and name != OTHER:
                hint = "" if name in NAMES else _config.near(name, self._seen)
                raise Error(f"policy names the group {name!r}, which the first step did not have (it had {', '.join(sorted(self._seen)) or 'none'}); use it in attach(), group() or stash(), or leave it out{hint}")

    def run(self, fn: Callable[..., Any], *args: Any, key: str = "", restore: Sequence[torch.Tensor] = ()) -> Any:
        """A step that calls fn(*args), and again from the same state if it had more rows
        than room.

        Random numbers, gradients and buffers of attached models, and the tensors of
        restore are put back first; fn must not change anything else."""
        self._callable(fn, "run")
        return _rerun.run(self, fn, args, key, restore)

    def graph(self, fn: Callable[..., Any], *args: Any, key: str = "graph", restore: Sequence[torch.Tensor] = ()) -> Callable[..., Any]:
        """Captures a step that calls fn(*args) into a CUDA graph; the result is called like
        fn and replays it. On the CPU it is run() each time."""
        self._callable(fn, "graph")
        if self.device.type != "cuda":
            return lambda *now: self.run(fn, *now, key=key, restore=restore)
        return _rerun.Graph(self, fn, args, key, restore)

    @staticmethod
    def _callable(fn: object, what: str) -> None:
        if not callable(fn):
            raise Error(f"{what}: {fn!r} cannot be called; give the function of a step")

    def check(self) -> None:
        """Raises Overflow if the steps so far, or the replay of a graph, had more rows than
        room; waits for the stream. Steps outside of graphs do it themselves."""
        self._here()
        self._library.check(torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0)

    # What happened

    def stats(self) -> Dict[str, Any]:
        """Figures of all steps so far."""
        self._here()
        return self._library.stats()

    def report(self) -> str:
        """The same as a table."""
        never = [name for name, choice in (self.policy or {}).items() if choice == "stash" and name not in self._stashed]
        notes = [f"the group {name!r} is to be stashed, and rt.stash(x, rows=count, name={name!r}) was not called: it is kept" for name in never]
        return _report.table(self.stats(), notes)

    def trace(self, path: Union[None, str, "os.PathLike[str]"]) -> None:
        """Writes events of later steps to a file for `stowage report`; None ends it."""
        self._here()
        self._library.trace(None if path is None else os.fspath(path))

    def close(self) -> None:
        """Ends the runtime; a step under way is given up."""
        library, step = self._library, getattr(self, "_step", None)
        self._library = self._step = None
        if step is not None:
            step.outlive()
        for a in list(getattr(self, "_attached", [])):
            a.detach()
        # Memory that somebody still reads is not given back.
        if library is not None and not still(getattr(self, "_held", [])):
            library.close()

    def _here(self) -> None:
        if self._library is None:
            raise Error("this runtime is closed; open another with stowage.Runtime(...)")
        self._library.here()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _device(given: Union[None, str, torch.device]) -> torch.device:
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        d = torch.device(given)
    except (RuntimeError, TypeError):
        raise Error(f"device={given!r} is none; give \"cuda\", \"cuda:1\" or \"cpu\"") from None
    if d.type == "cuda":
        if not torch.cuda.is_available():
            raise Error("device=\"cuda\", and PyTorch finds no GPU; use device=\"cpu\" to try it")
        torch.cuda.init()
        return torch.device("cuda", torch.cuda.current_device() if d.index is None else d.index)
    if d.type != "cpu":
        raise Error(f"device={given!r} is neither a GPU of NVIDIA nor the CPU; give \"cuda\" or \"cpu\"")
    return torch.device("cpu")


def _eager() -> None:
    """torch.compile leaves this package alone: hooks are called wherever its graphs end, and
    traced they would be compiled again at every step. Nothing is done until it is loaded."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    skipped = getattr(rules, "SKIP_DIRS", None)
    if skipped is not None and not any(__file__.startswith(d) for d in skipped):
        rules.add(__package__)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _lender(runtime: "weakref.ref[Runtime]") -> Callable[[int, int], int]:
    def lend(storage: int, size: int) -> int:
        rt = runtime()
        step = rt._step if rt is not None else None
        if step is None:
            raise Error("the library asked for memory outside of a step")
        return step.lend(storage, size)

    return lend
