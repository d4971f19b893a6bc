"""The runtime: a budget or a policy, a model, steps."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import weakref
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, MutableMapping, Optional, Sequence, Set, TypeVar, Union, cast

import torch

from . import _config, _explain, _memory, _report, _rerun
from ._attach import NAMES, Attachment, matches
from ._budget import Budget
from ._config import Size
from ._errors import Error, TooSmall
from ._explanation import Explanation
from ._key import Key
from ._library import Library
from ._managed import Following, Recording
from ._planned import Planner
from ._ranks import check_setting
from ._record import Rows, Weak, storage_of
from ._step import InGroup, Step, any_alive

_Function = TypeVar("_Function", bound=Callable[..., Any])

# There is one runtime for a device: two would each use the whole budget.
_open: MutableMapping[str, Runtime] = weakref.WeakValueDictionary()


@atexit.register
def _close_all() -> None:
    """Closes runtimes while PyTorch and the device still work."""
    for rt in list(_open.values()):
        with contextlib.suppress(Exception):
            rt.close()


def _in_child() -> None:
    """Makes a forked child, such as a DataLoader's worker, pass everything through: it may
    use autograd in the middle of its parent's step."""
    for rt in list(_open.values()):
        if rt._step is not None:
            rt._step.disown()
        if rt._now is not None:
            rt._now.thread = -1


os.register_at_fork(after_in_child=_in_child)

# Smaller storages are not worth a copy: 1 MiB takes 19 µs at 55 GB/s.
LEAST_CUDA = 1 << 20

# The group of tensors that are saved outside of all groups.
OTHER = "other"


class Runtime:
    """Keeps what autograd saves within device memory, one step at a time: some of it is
    offloaded and reloaded, some is recomputed, the rest stays.

    Give one of the first three:

    budget       device memory that this process may hold at its peak: weights, gradients,
                 optimiser, temporaries, saved tensors and stashed rows. The runtime chooses
                 what to offload and what to recompute, from measurements of the first steps
    policy       or choices by group: {"moe_act": "offload", "expert_fc1": "stash"}
    saved_limit  or a limit on the device memory of saved tensors; berths do not count
    device       the device of the tensors; by default the current GPU, or else the CPU
    host         the most pinned host memory to use; by default what the machine has free
    least        the size below which storages are never moved (by default 1 MiB on a GPU,
                 0 on the CPU)
    live         the share of stashed rows that is live, such as 0.5. The first step then has
                 berths for this share. Without it the first step counts rows and stashes none
    recompute    False if a budget may only offload
    exact        False if a budget may compile compiled blocks again so that they save less, even
                 if PyTorch then rounds differently
    ranks        which ranks agree on what is recomputed under a budget, because a second
                 forward pass may issue collectives: True for all, False for none, or a
                 process group. By default the ranks of an attached model agree if it is
                 wrapped in DistributedDataParallel, sharded by fully_shard() or has DTensors
                 as parameters. They must attach the same models and run the same steps, with
                 the same keys in the same order; budgets may differ. What one rank must
                 recompute all of them do, and a budget that is too small for one is an
                 error on all of them, when their next step begins
    rank, log    the rank in traces and messages; whether warnings go to standard error
    """

    def __init__(
        self,
        budget: Optional[Size] = None,
        policy: Optional[Mapping[str, str]] = None,
        *,
        saved_limit: Optional[Size] = None,
        device: Union[None, str, torch.device] = None,
        host: Optional[Size] = None,
        least: Optional[Size] = None,
        live: Optional[float] = None,
        recompute: bool = True,
        exact: bool = True,
        ranks: Any = None,
        rank: Optional[int] = None,
        log: bool = False,
        library: Callable[..., Any] = Library,
        memory: Optional[_memory.Memory] = None,
    ) -> None:
        self._library: Any = None
        given = [name for name, x in (("budget", budget), ("policy", policy), ("saved_limit", saved_limit)) if x is not None]
        if not given:
            raise Error("expected a budget or a policy, got neither; give budget=\"60GiB\" or policy={\"moe_act\": \"offload\"}")
        if len(given) > 1:
            raise Error(f"{' and '.join(given)} both decide what is moved; give one of them")
        if isinstance(budget, Mapping):
            raise Error(f"expected a size as budget, got {budget!r}; write policy={budget!r}")
        recompute, exact, ranks = _config.switch(recompute, "recompute"), _config.switch(exact, "exact"), check_setting(ranks)
        for name, given_value, usual in (("recompute", recompute, True), ("exact", exact, True), ("ranks", ranks, None)):
            if budget is None and given_value is not usual:
                raise Error(f"{name}={given_value!r} is for a budget, and changes nothing beside {given[0]}; leave it out")
        self.device = _device(device)
        self.policy = None if policy is None else _config.policy(policy)
        moving = {name for name, choice in (self.policy or {}).items() if choice != "keep"}
        leaves = self.policy is None or "offload" in self.policy.values()
        self._moves: Callable[[str], bool] = (lambda _: True) if leaves else moving.__contains__
        self._outside = OTHER if leaves else None
        self._least = _config.size((LEAST_CUDA if self.device.type == "cuda" else 0) if least is None else least, "least")
        self._step: Optional[Step] = None
        self._begun: Optional[ContextManager[None]] = None  # what begin_step() entered
        self._attached: List[Attachment] = []
        self._weights: Set[int] = set()
        self._seen: Set[str] = set()
        self._stashed: Set[str] = set()  # names that stash() was called with
        self._held: List[Weak] = []  # storages of berths that outlived their steps
        self._complete = False
        self._now: Union[None, Recording, Following] = None  # what a step under a budget does
        config: Dict[str, Any] = {"device": self.device.type, "least": self._least, "log": _config.switch(log, "log")}
        config["rank"] = _config.rank(os.environ.get("RANK", 0) if rank is None else rank)
        if self.device.type == "cuda":
            config["ordinal"] = self.device.index
            config["stream"] = torch.cuda.current_stream(self.device).cuda_stream
        size = None if budget is None else self._size(budget, "budget")
        if self.policy is not None:
            config["policy"] = self.policy
        else:
            config["saved_limit"] = size if size is not None else self._size(saved_limit, "saved_limit")
        if host is not None:
            config["host"] = _config.size(host, "host")
        if live is not None:
            config["live"] = _config.share(live, "live")
        # Without a share the first step counts its rows, and cannot overflow.
        self._overflows = live is not None
        other = _open.get(str(self.device))
        if other is not None and other._library is not None:
            other._library.check_open()  # a forked process gets another error
            raise Error(f"there is a runtime on {self.device} already; close() it first, or use it for every model")
        self._library = library(config, _provider(weakref.ref(self)))
        self._budget = None if size is None else self._make_budget(size, memory)
        self._planner = None if self._budget is None or not recompute else Planner(self, self._budget, ranks, exact)
        _open[str(self.device)] = self

    @staticmethod
    def _size(given: Any, what: str) -> int:
        n = _config.size(given, what)
        if n == 0:
            raise Error(f"{what}=0 leaves no memory; give a size such as \"60GiB\"")
        return n

    def _make_budget(self, size: int, memory: Optional[_memory.Memory]) -> Budget:
        attached, device = self._attached, self.device
        if memory is None:
            memory = _memory.CudaMemory(device) if device.type == "cuda" else _memory.CountedMemory(attached)
        return Budget(size, memory, self._library, lambda: _memory.held_by(attached, device), lambda: _memory.gradients_to_come(attached, device))

    # Models and groups

    def attach(self, model: torch.nn.Module, groups: Optional[Mapping[str, str]] = None, optimizer: Optional[torch.optim.Optimizer] = None, *, keep: Sequence[str] = ()) -> Attachment:
        """Makes a model known. Under a budget its blocks are found without being named; keep has
        patterns of the names of blocks that are never recomputed (fnmatch), such as
        "layers.0*". Plans that were made for other models before are forgotten.

        With groups, modules are assigned to groups by patterns of their names. A policy and a
        saved limit need that; without patterns they use the names of well-known models. On the CPU, the state of the given optimiser counts
        against a budget; on a GPU, the allocator counts it in any case. Errors name it."""
        self._check_open()
        if self._now is not None or self._step is not None:
            raise Error("attach() is called inside of a step; call it before `with rt.step():`")
        keep = _config.patterns(keep, "keep")
        if optimizer is not None and not hasattr(optimizer, "state"):
            raise Error(f"attach: expected an optimiser, got {type(optimizer).__name__}; give the one that updates this model, or leave it out")
        found = matches(model, groups, self._budget is None, self._planner is None)
        if any(map(torch.nn.parameter.is_lazy, model.parameters())):
            raise Error(f"attach: a parameter of {type(model).__name__} has no shape yet, as those of LazyLinear; run a batch through the model before")
        known = set(found.values()) | {name for a in self._attached for name in a.names} | self._seen | set(NAMES) | {OTHER}
        for name in self.policy or {}:
            # A name may be used in group() only: that shows when the first step ends.
            hint = "" if name in known else _config.near(name, known)
            if hint:
                raise Error(f"the policy names {name!r} and this model has no such group (it has {', '.join(sorted(set(found.values())))}){hint}")
        if self._planner is not None:
            self._planner.units.find(model, keep)
        a = Attachment(self, model, found, optimizer)
        self._attached.append(a)
        if self._planner is not None:
            self._planner.changed()
        return a

    def _detached(self, a: Attachment) -> None:
        self._attached[:] = [b for b in self._attached if b is not a]
        if self._planner is not None:
            self._planner.units.forget(a.model)
            self._planner.changed()

    def group(self, name: str) -> ContextManager[None]:
        """Puts what autograd saves inside into this group. Outside of a step it does nothing."""
        return InGroup(self._step, _config.group_name(name))

    def stash(self, x: torch.Tensor, rows: torch.Tensor, name: str = "expert_fc1") -> torch.Tensor:
        """Returns x, a buffer of which only the first rows are live; rows is their number, which
        only the device knows (int64, no dimensions). If autograd saves x in a group that is
        stashed, only live rows are kept, and in the backward pass the others are zero or
        unchanged. A backward pass must not write to x. If rows is written to before x is saved,
        all of x is kept. Under "offload" and "keep" x is like any other tensor of the group."""
        _config.group_name(name)
        if not isinstance(x, torch.Tensor):
            raise Error(f"stash: expected a tensor as x, got {type(x).__name__}; give the buffer itself, with rows as its first dimension")
        if not isinstance(rows, torch.Tensor):
            raise Error(f"stash: expected a tensor as rows, got {rows!r}; give the number on the device, such as torch.tensor(3, device=x.device)")
        if x.layout != torch.strided:
            raise Error(f"stash: x is {x.layout}; give a dense tensor, with rows as its first dimension")
        step = self._step
        if step is None or not torch.is_grad_enabled():
            return x  # evaluation: possibly on another device, or after close()
        if rows.dtype != torch.int64 or rows.dim() != 0 or rows.device != x.device:
            raise Error(f"stash: expected rows as an int64 tensor without dimensions on {x.device}, got {rows.dtype} {list(rows.shape)} on {rows.device}; give rows.long(), rows.sum() or rows[0]")
        if x.device != self.device or x.dim() == 0:
            raise Error(f"stash: expected x on {self.device} with rows as its first dimension, got {list(x.shape)} on {x.device}")
        if not x.is_contiguous():
            raise Error("stash: x is not contiguous; give x.contiguous()")
        if x.numel() * x.element_size() != storage_of(x).nbytes() or x.data_ptr() % 16 and x.numel():
            raise Error("stash: x is only a part of its storage, or its address is not a multiple of 16; give x.clone()")
        step.seen.add(name)
        self._stashed.add(name)
        if x.numel():
            stash = self.policy is None or self.policy.get(name) == "stash"
            new, old = Rows(rows, x.numel() // x.shape[0] * x.element_size(), name, stash, Weak(storage_of(x))), step.rows.get(x.data_ptr())
            if old is None or not new.same(old):
                step.rows[x.data_ptr()] = new
        return x

    # Steps

    def step(self, key: str = "") -> _Once:
        """Runs forward and backward passes as one step. Steps with the same key do the same
        work: the first ones are recorded, later ones follow the plan that was made from them.
        Each call of a function under @rt.step() is a step."""
        return _Once(lambda: self._run_step(key))

    @contextlib.contextmanager
    def _run_step(self, key: str) -> Iterator[None]:
        self._check_open()
        if not _config.is_text(key):
            raise Error(f"step: expected a string as key, got {key!r}; give one such as \"long\"")
        if self._now is not None or self._step is not None:
            under_way: Any = self._now or self._step
            where = "" if under_way.thread == threading.get_ident() else " in another thread"
            raise Error(f"a step is under way{where}; end it before the next one begins")
        _leave_eager()
        planner = self._planner
        if planner is not None and _capturing(self.device):
            planner.check_capture(key)
            planner = None
        known = planner.begin(key) if planner is not None else None
        if planner is not None and known is not None and known.plan is not None:
            with planner.follow(key, known):
                yield
        else:
            with self._tell(key, planner, known):
                yield

    @contextlib.contextmanager
    def _tell(self, key: str, planner: Optional[Planner], known: Optional[Key]) -> Iterator[None]:
        """Runs a step in which the library is told of everything that is saved. If a planner
        has to know the step, it is recorded."""
        self._refresh()
        budget = None if self._budget is None or _capturing(self.device) else self._budget
        if budget is not None:
            budget.begin(key, planner.spare(known) if planner is not None and known is not None else 0)
        step = Step(self._library, self.device, self._least, self._moves, self._outside, self._weights, self._seen, self._held, budget)
        try:
            # A recorded step follows no plan of the library.
            self._library.begin(key if known is None else f"{key}\x02{known.recorded}", step.stream)
        except TooSmall as e:
            raise self._explain(e) from None
        self._step, profile = step, None
        try:
            profile = planner.record(known, step) if planner is not None and known is not None else None
            hooks = torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack) if profile is None else profile.hooks(profile.pack_outside, profile.unpack_outside)
            with hooks:
                yield
            self._step = self._now = None
            try:
                step.end(False)
            except TooSmall as e:
                if profile is None:
                    raise self._explain(e) from None
                self._explain(e)  # recomputing may fit
            if budget is not None and profile is None:
                budget.check()
        except BaseException as e:
            self._step = self._now = None
            _explain.add_to_error(e, self, step)
            with contextlib.suppress(Exception):  # the first exception says more
                if not step.over:
                    step.end(True)
                self._check_rows(step)  # or the next step would lack room, too
            if profile is not None:
                profile.close()
            if step.raised is not None and type(e) is RuntimeError:
                raise Error(step.raised) from None
            raise
        try:
            self._check_rows(step)
        except BaseException:
            if profile is not None:
                profile.close()  # or a graph that is kept would hold what the step saved
            raise
        self._check_policy()
        if planner is not None and known is not None and profile is not None:
            planner.learn(key, known, step, profile)

    def begin_step(self, key: str = "") -> None:
        """Begins a step like step(), for training loops that call one function before the
        passes and another after them. The same thread must call end_step(), whatever happens."""
        step = self.step(key)
        step.__enter__()
        self._begun = step

    def end_step(self, error: Optional[BaseException] = None) -> None:
        """Ends the step that begin_step() began, or abandons it if there is an error. It may
        raise another error in place of that one, which says more; it does not raise that one."""
        if error is not None and not isinstance(error, BaseException):
            raise Error(f"end_step: expected the exception that ended the passes or nothing, got {error!r}; give the exception itself")
        step, under_way = self._begun, self._now or self._step
        if step is None or under_way is None:
            raise Error("end_step() has no step to end; call begin_step() before the passes")
        if under_way.thread != threading.get_ident():
            raise Error("end_step() is called in another thread than begin_step(); call both in one")
        self._begun = None
        step.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    def _explain(self, e: TooSmall) -> Error:
        """Turns an error about the saved limit into one about the budget, if there is one."""
        return Error(str(e)) if self._budget is None else self._budget.explain(e)

    def _check_rows(self, step: Step) -> None:
        """Makes berths for the rows of a step that is over; after a replay, check() does it."""
        if step.used_rows:
            self._overflows = True
            if not _capturing(self.device):
                self._library.check(step.stream)

    def _refresh(self) -> None:
        """Reads the storages of parameters and buffers, which may be others than before."""
        self._weights.clear()
        for a in self._attached:
            self._weights.update(a.weights())

    def _check_policy(self) -> None:
        """Raises an error after the first step if the policy names a group that it did not have."""
        if self._complete or self.policy is None:
            return
        self._complete = True
        for name, choice in self.policy.items():
            if choice != "keep" and name not in self._seen and name != OTHER:
                hint = "" if name in NAMES else _config.near(name, self._seen)
                raise Error(f"the policy names {name!r} and the first step had no such group (it had {', '.join(sorted(self._seen)) or 'none'}); use it in attach(), group() or stash(), or remove it{hint}")

    def run(self, fn: Callable[..., Any], *args: Any, key: str = "", restore: Sequence[torch.Tensor] = ()) -> Any:
        """Runs a step that calls fn(*args), and runs it again from the same state if it had
        more rows than room.

        Before that it restores random numbers, the gradients and buffers of attached models,
        and the tensors in restore. fn must not change anything else."""
        self._callable(fn, "run")
        restore = _config.tensors(restore, "run")
        return _rerun.run(self, fn, args, key, restore)

    def graph(self, fn: Callable[..., Any], *args: Any, key: str = "graph", restore: Sequence[torch.Tensor] = ()) -> Callable[..., Any]:
        """Captures a step that calls fn(*args) into a CUDA graph. The result is called like fn
        and replays the graph. On the CPU every call runs the step; see run()."""
        self._callable(fn, "graph")
        restore = _config.tensors(restore, "graph")
        if self._planner is not None:
            self._planner.leave(key)  # a capture follows a plan of the library
        if self.device.type != "cuda":
            return lambda *now: self.run(fn, *now, key=key, restore=restore)
        return _rerun.Graph(self, fn, args, key, restore)

    @staticmethod
    def _callable(fn: object, what: str) -> None:
        if not callable(fn):
            raise Error(f"{what}: expected a function, got {fn!r}; give the function of a step")

    def check(self) -> None:
        """Raises Overflow if the steps so far, or the replays of a graph, had more rows than
        room. It waits for the stream. Steps outside of graphs check this themselves."""
        self._check_open()
        self._library.check(torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0)

    # What happened

    def stats(self) -> Dict[str, Any]:
        """Returns statistics of all steps so far."""
        self._check_open()
        stats: Dict[str, Any] = self._library.stats()
        b = self._budget
        if b is not None:
            if self._planner is not None:
                stats["plans"] = self._planner.stats()
            stats["budget"] = {"size": b.size, "other": b.other, "peak": b.peak, "planned": b.planned, "last": b.step_peak, "outside": b.outside}
        return stats

    def report(self) -> str:
        """Returns the statistics as a table."""
        never = [name for name, choice in (self.policy or {}).items() if choice == "stash" and name not in self._stashed]
        notes = [f"group {name!r} is kept because rt.stash(x, rows=count, name={name!r}) was never called" for name in never]
        if self._planner is not None:
            notes += self._planner.notes()
        return _report.table(self.stats(), notes)

    def explain(self) -> Explanation:
        """Returns who holds the memory of the device now; print it. An exception that leaves a
        step because memory ran out carries the same."""
        return _explain.of_runtime(self)

    def trace(self, path: Union[None, str, "os.PathLike[str]"]) -> None:
        """Writes events of later steps to a file for `stowage report`; None ends it."""
        self._check_open()
        name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if path is not None and (not name or "\0" in name):
            raise Error(f"trace: expected a path or None, got {path!r}; give one such as \"rank-0.trace\"")
        self._library.trace(None if path is None else name)

    def close(self) -> None:
        """Closes the runtime. A step that is under way is abandoned."""
        if getattr(self, "_begun", None) is not None:
            with contextlib.suppress(Exception):
                self.end_step(Error("the runtime is closed"))
        library, step = self._library, getattr(self, "_step", None)
        self._library = self._step = None
        if step is not None:
            step.keep_views()
        for a in list(getattr(self, "_attached", [])):
            a.detach()
        # Berths that somebody still reads are not freed.
        if library is not None and not any_alive(getattr(self, "_held", [])):
            library.close()

    def _check_open(self) -> None:
        if self._library is None:
            raise Error("this runtime is closed; open another with stowage.Runtime(...)")
        self._library.check_open()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class _Once:
    """A step that is entered once: what runs it cannot begin anew."""

    def __init__(self, new: Callable[[], ContextManager[None]]) -> None:
        self._new = new
        self._entered: Optional[ContextManager[None]] = None

    def __enter__(self) -> None:
        if self._entered is not None:
            raise Error("this step was begun before; call rt.step() for each step")
        self._entered = self._new()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> Optional[bool]:
        assert self._entered is not None
        return self._entered.__exit__(*error)

    def __call__(self, fn: _Function) -> _Function:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._new():
                return fn(*args, **kwargs)

        return cast(_Function, run)


def _device(given: Union[None, str, torch.device]) -> torch.device:
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        d = torch.device(given)
    except (RuntimeError, TypeError):
        raise Error(f"expected a device such as \"cuda\", \"cuda:1\" or \"cpu\", got {given!r}") from None
    if d.type == "cuda":
        if not torch.cuda.is_available():
            raise Error("PyTorch finds no GPU for device=\"cuda\"; use device=\"cpu\" to try it")
        torch.cuda.init()
        return torch.device("cuda", torch.cuda.current_device() if d.index is None else d.index)
    if d.type != "cpu":
        raise Error(f"expected an NVIDIA GPU or the CPU, got {given!r}; give device=\"cuda\" or \"cpu\"")
    return torch.device("cpu")


def _leave_eager() -> None:
    """Makes torch.compile leave this package alone: hooks are called wherever its graphs end,
    and would be traced and compiled again at every step. It does nothing until torch.compile
    is loaded."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    skipped = getattr(rules, "SKIP_DIRS", None)
    if skipped is not None and not any(__file__.startswith(d) for d in skipped):
        rules.add(__package__)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _provider(runtime: "weakref.ref[Runtime]") -> Callable[[int, int], int]:
    def provide(storage: int, size: int) -> int:
        rt = runtime()
        step = rt._step if rt is not None else None
        if step is None:
            raise Error("the library asked for memory outside of a step")
        return step.provide(storage, size)

    return provide
