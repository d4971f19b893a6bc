"""Forecasts: what a training step will hold on a GPU, before one is there. plan() traces the
step without values (_trace.py), and asks the solver about it as a budget does (_plan.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import textwrap
import threading
from typing import Any, Callable, Dict, Iterator, List, Mapping, NoReturn, Optional, Sequence, Tuple, Union

import torch

from . import _config
from ._again import Refused
from ._budget import MARGIN, Need, largest, least_for, limit_for
from ._clock import Clock
from ._config import Size
from ._errors import Error, TooSmall
from ._explanation import HOLDERS, WIDTH, Saved, by_module, shorten
from ._inputs import IN_PLACE
from ._key import REFINED
from ._library import Library
from ._managed import Following, Recording, Units, check_keep
from ._plan import Measured, Plan, best, measured, notes, summary
from ._planned import WORTH
from ._profile import Profile
from ._report import human, plan_lines
from ._runtime import LEAST_CUDA
from ._surroundings import Draws
from ._trace import Kernels, Live, Operators, Place, Rates, as_on_gpu, by_default, copy_of, first, like, step, storages

# cuBLAS has a workspace for each thread that calls it, which PyTorch's allocator holds: 32 MiB
# on an H100 and later, for the forward and for the backward pass.
WORKSPACES = 2 * 32 << 20

# Optimisers update all weights on a GPU at once by default since PyTorch 2.0.
FOREACH = int(torch.__version__.split(".")[0]) >= 2

# Host memory that plans may use, if nobody says how much there is.
ANY_HOST = 1 << 49

Optimizer = Union[None, str, torch.optim.Optimizer, Callable[[List[torch.nn.Parameter]], torch.optim.Optimizer]]

Choose = Callable[[Dict[str, Any]], Dict[str, Any]]


@dataclasses.dataclass
class Planned:
    """What a budget would do. Sizes are in bytes.

    budget     device memory that the step may hold
    peak       that it would hold
    step_ns    how long the step would take
    choices    names of blocks, by what would happen to what they save
    recomputed_ns, offloaded   time and bytes of that
    saved, kept   the most that is saved at once, and that stays on the device
    """

    budget: int
    peak: int
    step_ns: int
    choices: Dict[str, List[str]]
    recomputed_ns: int
    offloaded: int
    saved: int
    kept: int


@dataclasses.dataclass
class Forecast:
    """What a training step would hold. Sizes are in bytes; None is not known.

    model      its class
    held       bytes by holder at the peak; their sum is peak
    saved      the part of saved tensors by module, largest first; its sum is held["saved"]
    peak       the most that is held at once if everything is kept, the optimiser's step included
    where      when that is
    saved_peak the most that saved tensors hold at once
    modules    bytes that each module saves in a step, by name; the model itself by its class. A
               storage counts for the first that saves it
    gradients  of the whole model
    gpu        name of the GPU
    memory, usable   its memory, and what is left of that for PyTorch
    step_ns    how long forward and backward pass would take on it
    budget     what was asked for
    plan       what that budget would do; None if it is too small
    least      what the smallest budget that can be kept would do
    notes      sentences
    """

    model: str
    held: Dict[str, int]
    saved: List[Saved]
    peak: int
    where: str
    saved_peak: int
    modules: Dict[str, int]
    gradients: int
    gpu: Optional[str] = None
    memory: Optional[int] = None
    usable: Optional[int] = None
    step_ns: Optional[int] = None
    budget: Optional[int] = None
    plan: Optional[Planned] = None
    least: Optional[Planned] = None
    notes: List[str] = dataclasses.field(default_factory=list)

    @property
    def fits(self) -> Optional[bool]:
        """Whether the GPU, or the budget, has room for the step if everything is kept."""
        room = self.room
        return None if room is None else self.peak <= room

    @property
    def room(self) -> Optional[int]:
        return self.budget if self.budget is not None else self.usable

    def to_dict(self) -> Dict[str, Any]:
        """Returns everything as numbers, strings, lists and dictionaries."""
        return {**dataclasses.asdict(self), "saved": [{"module": s.module, "bytes": s.bytes} for s in self.saved], "fits": self.fits, "verdict": self.verdict()}

    def to_json(self) -> str:
        """Returns the same as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def verdict(self) -> str:
        """Returns a sentence that says whether the step fits, and what to do."""
        room, least = self.room, self.least
        if room is None:
            return f"a step takes {human(self.peak)}; give gpu= to know whether it fits"
        what = f"the budget of {human(room)}" if self.budget is not None else f"the {human(room)} that PyTorch can have"
        if self.peak <= room:
            return f"it fits: {human(room - self.peak)} of {what} are left"
        do = "shard the model, or make the batch smaller"
        if self.plan is not None:
            return f"it does not fit if everything is kept ({human(self.peak - room)} more than {what}), and stowage.Runtime(budget={_written(room)}) would hold it"
        if least is None and self.saved_peak and self.held["weights"] + self.gradients + self.held["optimizer"] < room:
            return f"it does not fit if everything is kept ({human(self.peak - room)} more than {what}); a budget may hold it by offloading, which is not forecast; otherwise {do}"
        if least is None:
            return f"it does not fit: it takes {human(self.peak - room)} more than {what}; {do}"
        if self.usable is not None and least.budget <= self.usable:
            return f"it does not fit in {what}; the smallest budget that can be kept is {human(least.budget)} ({least.budget} bytes)"
        return f"no budget would fit: a step needs at least {human(least.budget)}; {do}"

    def __str__(self) -> str:
        on = f" on {self.gpu}" if self.gpu else ""
        lines = [f"a training step of {self.model}{on} at its peak, {self.where}:", *self._rows()]
        for p, label in ((self.plan, "a budget"), (self.least, "the smallest budget")):
            if p is not None:
                longer = f" ({100 * p.step_ns / self.step_ns - 100:+.1f}%)" if self.step_ns else ""
                lines += [f"{label} of {human(p.budget)}: the peak of all is {human(p.peak)}, the step takes about {p.step_ns / 1e6:.1f} ms{longer}", *plan_lines(vars(p))]
        for sentence in [self.verdict(), *(f"note: {n}" for n in self.notes)]:
            lines += textwrap.wrap(sentence, WIDTH, subsequent_indent="  ")
        return "\n".join(lines)

    __repr__ = __str__

    def _rows(self) -> List[str]:
        whole = self.memory or self.peak
        rows: List[Tuple[str, str, str]] = []

        def row(label: str, n: Optional[int]) -> None:
            if n is not None:
                rows.append((shorten(label, 60), human(n), f"{100 * n / whole:.1f}%"))

        for name, words in HOLDERS.items():
            row(words, self.held[name])
            for label, n in by_module(self.saved) if name == "saved" else ():
                row("  " + label, n)
        row("together", self.peak)
        row("the device", self.memory)
        row("  that PyTorch can have", self.usable)
        wide, sizes = (max(len(r[i]) for r in rows) for i in (0, 1))
        lines = [f"  {label.ljust(wide)}  {size.rjust(sizes)}  {share.rjust(6)}".rstrip() for label, size, share in rows]
        if self.step_ns:
            lines.append(f"  the step takes about {self.step_ns / 1e6:.1f} ms, without the optimiser's")
        return lines


def _kind(x: object) -> str:
    """Returns the name of a value's type with its article."""
    name = type(x).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def _written(n: int) -> str:
    """Returns a size as an argument: in GiB or MiB if it is a whole number of them."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if n % unit == 0:
            return f'"{n // unit}{name}"'
    return str(n)


Forecast.__module__ = Planned.__module__ = "stowage"  # the name under which users import them


def plan(
    model: torch.nn.Module,
    example: Any,
    *,
    gpu: Optional[str] = None,
    budget: Optional[Size] = None,
    optimizer: Optimizer = "adamw",
    loss: Optional[Callable[[Any], torch.Tensor]] = None,
    autocast: Optional[torch.dtype] = None,
    keep: Sequence[str] = (),
    host: Optional[Size] = None,
    device: str = "meta",
) -> Forecast:
    """Returns what a training step of a model will hold; print it. Neither a GPU nor memory for
    the model is needed: a copy without values runs the step. The model is not changed.

    model      any nn.Module, on any device, the meta device too
    example    what is passed to it: a tensor, a tuple of arguments, a dictionary of keyword
               arguments, or a function that returns one of these. Shapes and types count
    gpu        the name of a GPU such as "h100", or a JSON file with its figures: says what fits,
               and how long it takes
    budget     device memory, such as "70GiB", of which the forecast says what a Runtime with it
               would do. By default all that PyTorch can have on the GPU
    optimizer  a class of torch.optim by name, an optimiser of the model, a function that makes
               one from a list of parameters, or None
    loss       makes the loss from what the model returns. By default its attribute or key
               "loss", or else the sum of it
    autocast   torch.bfloat16 or torch.float16 if the step runs under autocast
    keep       patterns of the names of modules that are never recomputed
    host       the most pinned host memory to offload to; by default any amount
    device     "cpu" for models that look at values, which have to be there
    """
    if not isinstance(model, torch.nn.Module):
        raise Error(f"plan: expected an nn.Module as model, got {_kind(model)}; give the model itself")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise Error(f"plan: expected torch.bfloat16, torch.float16 or None as autocast, got {autocast!r}")
    if device not in ("meta", "cpu"):
        raise Error(f"plan: expected \"meta\" or \"cpu\" as device, got {device!r}; gpu= names the GPU of the forecast")
    if loss is not None and not callable(loss):
        raise Error(f"plan: expected a function as loss, got {_kind(loss)}; give one such as loss=lambda out: out.mean()")
    keep = _config.patterns(keep, "keep")
    most = ANY_HOST if host is None else max(_config.size(host, "host"), 1)
    size = None if budget is None else _config.size(budget, "budget")
    if gpu is None and size is not None:
        raise Error("plan: a budget needs the rates of a GPU; give gpu=\"h100\", or leave budget out")
    model = getattr(model, "_orig_mod", model)
    with _library() as library, _unchanged():
        figures = None if gpu is None else _figures(library, gpu)
        if figures is not None and size is not None and size > figures["memory"]:
            raise Error(f"plan: a budget of {human(size)} is more than the {human(figures['memory'])} of {figures['name']}; give at most that")
        check_keep(model, keep)
        tracer = _Tracer(model, example, torch.device(device), figures, loss, autocast)
        forecast, live = tracer.forecast(optimizer)
        if figures is not None:
            forecast.gpu, forecast.memory, forecast.usable, forecast.budget = figures["name"], figures["memory"], figures["usable"], size
            links = {name: figures[name] for name in ("out", "in", "both")}
            tracer.plans(forecast, live, keep, lambda request: library.choose({**request, "links": links, "host": most}))
        return forecast


@contextlib.contextmanager
def _library() -> Iterator[Library]:
    library = Library({"device": "cpu"}, lambda *_: 0)
    try:
        yield library
    finally:
        library.close()


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """Restores the states of random numbers. Those of GPUs are never used."""
    others, numbers = Draws(()), torch.get_rng_state()
    try:
        yield
    finally:
        others.set()
        torch.set_rng_state(numbers)


def _figures(library: Library, gpu: object) -> Dict[str, Any]:
    """Returns the figures of a GPU by its name, or those of a JSON file."""
    if not isinstance(gpu, str) or not gpu or "\0" in gpu:
        raise Error(f"plan: expected the name of a GPU such as \"h100\", got {gpu!r}")
    if not gpu.endswith(".json"):
        return library.gpu(gpu)
    try:
        with open(os.path.expanduser(gpu), encoding="utf-8") as f:
            text = f.read(1 << 20)
    except (OSError, UnicodeDecodeError) as e:
        why = (e.strerror or str(e)).lower() if isinstance(e, OSError) else "it is not UTF-8"
        raise Error(f"plan: cannot read {gpu}: {why}; give the name of a GPU such as \"h100\", or a JSON file with its figures") from None
    if not text.lstrip().startswith("{"):
        raise Error(f"plan: {gpu} is not a JSON object with the figures of a GPU; give the name of a GPU such as \"h100\", or a file that is one")
    try:
        return library.gpu(text)
    except Error as e:
        raise Error(f"plan: {gpu}: {str(e).replace('stowage: ', '', 1)}") from None


def _arguments(example: Any) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
    if callable(example) and not isinstance(example, (torch.Tensor, Mapping)):
        try:
            example = example()
        except Exception as e:
            raise Error(f"plan: the function given as example failed ({first(e)}); give one that returns what is passed to the model") from e
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    if isinstance(example, Mapping):
        return (), {str(name): x for name, x in example.items()}
    raise Error(f"plan: expected a tensor, a tuple, a dictionary or a function as example, got {_kind(example)}; give what is passed to the model")


def _default_loss(said: List[str], out: Any) -> torch.Tensor:
    found = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    tensors = [t for t in torch.utils._pytree.tree_flatten(dict(out) if isinstance(out, Mapping) else out)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    if not tensors:
        raise Error("plan: nothing that the model returns takes a gradient; give loss=, a function of what it returns")
    if len(tensors) == 1 and not tensors[0].dim():
        return tensors[0]
    said[:] = ["the sum of what the model returns was taken as loss; give loss= to count what yours holds"]
    total = sum(t.sum() for t in tensors)
    assert isinstance(total, torch.Tensor)
    return total


class _Tracer:
    """Traces steps of copies of one model."""

    def __init__(self, model: torch.nn.Module, example: Any, device: torch.device, figures: Optional[Dict[str, Any]], loss: Optional[Callable[[Any], torch.Tensor]], autocast: Optional[torch.dtype]) -> None:
        self.model, self.device, self.autocast = model, device, autocast
        self.example = _arguments(example)
        self.rates = None if figures is None else Rates(figures["products"], figures["hbm"])
        self.said: List[str] = []
        self.loss = loss or (lambda out: _default_loss(self.said, out))
        if device.type != "meta" and any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
            raise Error("plan: the model is on the meta device and has no values; leave device out, or give a model that has them")

    def run(self, model: torch.nn.Module, operators: Operators, pack: Any, unpack: Any) -> None:
        args, kwargs = like(self.example, self.device)
        if operators.live is not None:
            for t in torch.utils._pytree.tree_flatten((args, kwargs))[0]:
                if isinstance(t, torch.Tensor):
                    operators.live.of(t)
        kernels, place = Kernels(self.device, operators, self.rates is not None), Place(model, operators.live)
        with as_on_gpu(kernels), place:
            step(model, args, kwargs, self._checked, self.autocast, operators, kernels, place, pack, unpack)

    def _checked(self, out: Any) -> torch.Tensor:
        value = self.loss(out)
        if not isinstance(value, torch.Tensor) or not value.requires_grad or value.numel() != 1:
            what = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) and value.requires_grad else "something that takes no gradient"
            raise Error(f"plan: the loss is {what}; give loss=, a function that makes one number of what the model returns")
        return value

    # Without policies

    def forecast(self, optimizer: Optimizer) -> Tuple[Forecast, Live]:
        model = copy_of(self.model, self.device)
        weights = storages([*model.parameters(), *model.buffers()])
        live = Live(self.device, set(weights))
        operators = Operators(self.rates, live)
        self.run(model, operators, live.pack, live.unpack)
        gradients = storages(p.grad for p in model.parameters() if p.grad is not None)
        passes = {"weights": sum(weights.values()), "gradients": live.held_of(gradients), "saved": 0, "optimizer": 0, "other": 0}
        saved: Dict[str, int] = {}
        modules: Dict[str, int] = {}
        for m in live.all:
            modules[m.module] = modules.get(m.module, 0) + m.bytes
            if m.saved_at(live.peak_at):
                saved[m.module] = saved.get(m.module, 0) + m.bytes
        passes["saved"] = sum(saved.values())
        passes["other"] = live.peak - passes["saved"] - passes["gradients"]
        # The optimiser's step has all gradients and nothing that is saved.
        updating = Live(self.device, {*weights, *gradients})
        state = self._update(model, optimizer, updating)
        passes["optimizer"] = state
        update = {"weights": passes["weights"], "gradients": sum(gradients.values()), "optimizer": state, "saved": 0, "other": updating.peak}
        where = live.peak_where
        if sum(update.values()) > sum(passes.values()):
            passes, saved, where = {**update}, {}, "the optimiser's step"
        if self.rates is not None:
            passes["other"] += WORKSPACES
        notes = [*self.said] + ([] if self.model.training else ["the model is in evaluation mode; call model.train() before plan() if it trains"])
        by = sorted((Saved(name, "", n) for name, n in saved.items()), key=lambda s: -s.bytes)
        step_ns = int(1e9 * operators.seconds) if self.rates is not None else None
        held = {name: passes[name] for name in HOLDERS}
        made = Forecast(type(self.model).__name__, held, by, sum(held.values()), where, live.saved_peak, modules, sum(gradients.values()), step_ns=step_ns, notes=notes + self.notes)
        self.base = passes["weights"] + state + (WORKSPACES if self.rates is not None else 0)
        self.floor = sum(update.values()) + (WORKSPACES if self.rates is not None else 0)
        return made, live

    def _update(self, model: torch.nn.Module, given: Optimizer, live: Live) -> int:
        """Runs an optimiser twice, and returns the bytes of its state. What its second step
        makes is noted."""
        self.notes: List[str] = []
        if given is None:
            return 0
        for foreach in (True, False) if self.rates is not None and FOREACH else (None,):
            with by_default(torch.device("cpu")):  # an optimiser reads how many steps it made, and some their settings
                made = self._optimizer(model, given)
            for group in made.param_groups:
                if group.get("fused"):
                    group["fused"], group["foreach"] = None, False  # it has no temporaries
                elif "foreach" in group and group["foreach"] is None:
                    group["foreach"] = foreach
            try:
                with by_default(torch.device("cpu")):
                    made.step()
                    state = storages((x for of in made.state.values() for x in of.values() if isinstance(x, torch.Tensor)), self.device)
                    live.weights |= set(state)
                    with Operators(None, live):
                        made.step()
                return sum(state.values())
            except NotImplementedError as e:
                if foreach:
                    self.notes = ["this PyTorch cannot trace temporaries of optimisers that update all weights at once (foreach=True)"]
                    continue
                self._cannot(made, e)
            except Exception as e:
                self._cannot(made, e)
        return 0

    def _cannot(self, made: torch.optim.Optimizer, e: Exception) -> NoReturn:
        raise Error(f"plan: {type(made).__name__} cannot run on the {self.device.type} device ({first(e)}); give optimizer=None, and add its state yourself")

    def _optimizer(self, model: torch.nn.Module, given: Optimizer) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        if isinstance(given, torch.optim.Optimizer):
            copies = {id(p): q for p, q in zip(self.model.parameters(), model.parameters())}
            groups = []
            for g in given.param_groups:
                if any(id(p) not in copies for p in g["params"]):
                    raise Error("plan: the optimiser has parameters that the model does not have; give an optimiser of this model")
                groups.append({**g, "params": [copies[id(p)] for p in g["params"]]})
            make: Any = lambda _: type(given)(groups, **{k: v for k, v in given.defaults.items() if k == "lr"})
        elif isinstance(given, str):
            classes = {n.lower(): c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer}
            if given.lower() not in classes:
                raise Error(f"plan: expected one of {', '.join(sorted(classes))} as optimizer, got {given!r}{_config.near(given.lower(), classes)}")
            make = lambda params: classes[given.lower()](params, lr=1e-3)
        elif callable(given):
            make = given
        else:
            raise Error(f"plan: expected a name such as \"adamw\", an optimiser, a function that makes one or None as optimizer, got {_kind(given)}")
        if not trained:
            raise Error("plan: no parameter of the model takes a gradient; set requires_grad on those that are trained")
        try:
            made = make(trained)
        except Error:
            raise
        except Exception as e:
            raise Error(f"plan: the optimiser cannot be made from the parameters ({type(e).__name__}: {str(e)[:200]}); give its name, such as \"adamw\"") from None
        if not isinstance(made, torch.optim.Optimizer):
            raise Error(f"plan: expected the function to make an optimiser, got {_kind(made)}")
        return made

    # With policies

    def plans(self, forecast: Forecast, live: Live, keep: Sequence[str], choose: Choose) -> None:
        """Adds what the budget and the smallest budget would do."""
        model = copy_of(self.model, self.device)
        scene = _Scene(model)
        scene.units.find(model, keep)
        if not scene.units.list:
            forecast.notes.append("the model has no blocks that repeat, so a budget can only offload; that is not forecast")
            return
        profile = self._record(scene)
        divisions = measured(profile, scene.units.list)
        assert forecast.step_ns is not None
        for m in divisions:
            m.calibrate(forecast.step_ns, 0)
        forecast.notes += notes(scene.units.list, scene.refused)
        needs = largest(live.needs)
        room = forecast.room
        assert room is not None
        if forecast.budget is not None or forecast.peak > room:
            forecast.plan = self._planned(scene, room, limit_for(room, self.base, needs), needs, divisions, choose)
        try:
            best(divisions, choose, 1)
        except TooSmall as e:
            least = max(least_for(self.base, needs, e.least), self.floor + self.floor // MARGIN)
            forecast.least = self._planned(scene, least, max(limit_for(least, self.base, needs), e.least), needs, divisions, choose)

    def _planned(self, scene: _Scene, size: int, limit: int, needs: Sequence[Need], divisions: Sequence[Measured], choose: Choose) -> Optional[Planned]:
        """Returns what a budget would do. Like a runtime it follows a plan that recomputes, and
        changes the limit of saved tensors until the peak is close below the budget. Then it
        takes a plan that offloads as well, if that is faster."""
        slack, found, kept = size // 128, None, 0  # type: int, Optional[Planned], int
        for _ in range(1 + REFINED):
            try:
                plan = best(divisions, choose, max(limit, 1), False)
            except TooSmall:
                break
            peak = max(self._follow(scene, plan), self.floor)
            if peak <= size and (found is None or plan.answer["step_ns"] <= found.step_ns):
                found, kept = Planned(size, peak, plan.answer["step_ns"], **summary(plan)), limit - size // 64
            if size - 2 * slack <= peak <= size or not plan.choices:
                break
            limit += size - peak - slack if peak > size else 3 * (size - peak - slack) // 4
        with contextlib.suppress(TooSmall):
            plan = best(divisions, choose, max(kept if found is not None else limit, 1))
            if found is None:
                peak = max([self.floor] + [self.base + other + min(saved, plan.answer["peak"]) for other, saved in needs])
            else:
                peak = max(found.peak + plan.answer["peak"] - found.kept, self.floor)
            if peak <= size and (found is None or plan.expected < WORTH * found.step_ns):
                found = Planned(size, peak, plan.answer["step_ns"], **summary(plan))
        return found

    def _follow(self, scene: _Scene, plan: Plan) -> int:
        """Returns the peak of a step that follows a plan without offloading."""
        scene.model.zero_grad(set_to_none=True)
        scene.units.rewrap([plan])
        live = Live(self.device, scene.weights)
        scene._now = Following(plan, self.device, LEAST_CUDA, None, scene.refused)
        self.run(scene.model, Operators(None, live), live.pack, live.unpack)
        return self.base + live.peak

    def _record(self, scene: _Scene) -> Profile:
        """Runs a step as a recorded one, with times of the GPU."""
        operators = Operators(self.rates, None)
        profile = Profile(self.device, scene, scene.weights, LEAST_CUDA, scene, scene.refused)
        profile.clock = _Time(operators)
        profile.now = profile.clock.stamp()
        scene.units.wrap_all()
        scene._now = Recording(scene, profile)
        self.run(scene.model, operators, profile.pack_outside, profile.unpack_outside)
        profile.close()
        return profile


class _Scene:
    """A copy of a model, that stands for the runtime, the step and the budget, too."""

    pack, unpack = staticmethod(IN_PLACE.pack), staticmethod(IN_PLACE.unpack)

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.units = model, Units(self)
        self.weights = set(storages([*model.parameters(), *model.buffers()]))
        self._now: Union[None, Recording, Following] = None
        self.thread, self.quiet = threading.get_ident(), False
        self.refused = Refused()

    def on_other_stream(self) -> bool:
        return False

    def room(self) -> int:
        return 1 << 60

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    # Memory is counted by operators (Live), and not read.

    readings = 0

    def mark(self) -> int:
        return 0

    def reserve(self, bytes: int) -> int:
        return 0

    def begin_backward(self, number: Optional[int], again: int) -> None: ...

    def needs(self) -> List[int]:
        return []

    def held_beyond(self) -> int:
        return 0

    def second_pass(self, run: Callable[[], Any]) -> Tuple[Any, int, int]:
        return run(), 0, 0

    def pass_now(self) -> Tuple[int, int]:
        return 0, 0


class _Time(Clock):
    """The time that a GPU would take for the operators so far."""

    def __init__(self, operators: Operators) -> None:
        super().__init__(torch.device("cpu"))
        self._operators = operators

    def stamp(self) -> int:
        self._stamps.append(self._operators.seconds)
        return len(self._stamps) - 1
