"""What a second forward pass must find as the first one had it: autocast, default devices,
modes of modules, and random numbers."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from operator import is_not
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
import torch.utils.checkpoint  # which PyTorch does not import by itself

# Whether autocast is on, and to which type.
Autocast = Tuple[bool, torch.dtype]

if hasattr(torch, "get_autocast_dtype"):  # since PyTorch 2.4

    def autocasts() -> Tuple[Autocast, Autocast]:
        """Returns the autocast of GPUs and that of the CPU."""
        return (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")), (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))

else:

    def autocasts() -> Tuple[Autocast, Autocast]:
        """Returns the autocast of GPUs and that of the CPU."""
        return (torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()), (torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype())


def default_devices() -> Tuple[torch.device, ...]:
    """Returns the devices of torch.set_default_device() and of `with device`, the innermost last."""
    n = torch._C._len_torch_function_stack()
    modes = [torch._C._get_function_stack_at(i) for i in range(n)] if n else ()
    return tuple(mode.device for mode in modes if type(mode).__name__ == "DeviceContext")


AS_IT_IS = contextlib.nullcontext()


class Surroundings:
    """The autocast state, the default type and the default device of a forward pass, to be had again in the second.
    A backward pass has no default device: PyTorch hides it from what calls the engine."""

    __slots__ = ("gpu", "cpu", "cache", "devices", "dtype")

    def __init__(self) -> None:
        self.gpu, self.cpu = autocasts()
        self.cache = torch.is_autocast_cache_enabled()
        self.devices, self.dtype = default_devices(), torch.get_default_dtype()

    def caches(self) -> bool:
        """Reports whether what is cast stays until the outermost autocast ends."""
        return bool(self.cache and (self.gpu[0] or self.cpu[0]))

    def same(self) -> bool:
        """Reports whether the thread has them now."""
        return autocasts() == (self.gpu, self.cpu) and default_devices() == self.devices and torch.get_default_dtype() is self.dtype

    def again(self) -> Any:
        """Returns a context that has them."""
        return AS_IT_IS if self.same() else self._again()

    @contextlib.contextmanager
    def _again(self) -> Any:
        now, want = default_devices(), self.devices
        more: Any = want[len(now) :] if want[: len(now)] == now else want[-1:] or (torch.device("cpu"),)
        with contextlib.ExitStack() as stack:
            for device in more:
                stack.enter_context(device)
            if torch.cuda.is_available() or self.gpu[0]:
                stack.enter_context(torch.autocast("cuda", enabled=self.gpu[0], dtype=self.gpu[1], cache_enabled=self.cache))
            stack.enter_context(torch.autocast("cpu", enabled=self.cpu[0], dtype=self.cpu[1], cache_enabled=self.cache))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            yield


_plain = (torch.Tensor, torch.nn.Parameter)


# A module, whether it was training, its class, and its weights or None. Others may take their places before the backward
# pass: functional_call does so for one call. (Shards change places with what is gathered of them. They are left alone.)
Mode = Tuple[torch.nn.Module, bool, type, Optional[Dict[str, Any]]]


def mode_of(m: torch.nn.Module) -> Mode:
    return m, m.training, type(m), dict(m._parameters) if m._parameters else None


def modes_again(modes: Iterable[Mode]) -> Any:
    """Returns a context in which modules are what they were: model.eval() may come before the backward pass."""
    other = [(m, training, kind, weights) for m, training, kind, weights in modes if m.training is not training or m.__class__ is not kind or weights is not None and any(map(is_not, weights.values(), m._parameters.values()))]
    return _switched(other) if other else AS_IT_IS


def _others(m: torch.nn.Module, weights: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """Returns the weights that have other ones in their places."""
    now = m._parameters  # which has no get() in a scripted module
    return {name: p for name, p in (weights or {}).items() if name in now and now[name] is not p and type(p) in _plain and type(now[name]) in _plain}


@contextlib.contextmanager
def _switched(modes: Sequence[Mode]) -> Any:
    now = [(mode_of(m), _others(m, weights)) for m, _, _, weights in modes]
    for (m, training, kind, _), (_, others) in zip(modes, now):
        m.training, m.__class__ = training, kind
        m._parameters.update(others)
    try:
        yield
    finally:
        for (m, training, kind, weights), others in now:
            m.training, m.__class__ = training, kind
            m._parameters.update((name, (weights or {})[name]) for name in others)


class Random:
    """The state of the random numbers on the CPU and on one GPU."""

    __slots__ = ("device", "cpu", "gpu")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)

    def same(self, other: Random) -> bool:
        return bool(torch.equal(self.cpu, other.cpu)) and (self.gpu is None or other.gpu is None or bool(torch.equal(self.gpu, other.gpu)))


class Draws:
    """The state of random numbers that are not PyTorch's own: Python's and NumPy's, which all share, and those of generators
    that objects are or have as attributes. They cannot be had again, because nobody knows all of them."""

    __slots__ = ("_found",)

    def __init__(self, owners: Iterable[Any], shared: bool = True) -> None:
        # A name, how to read the state, how to set it, and what it is.
        found: List[Tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [("Python's random numbers", random.getstate, random.setstate)] if shared else []
        numpy = getattr(sys.modules.get("numpy"), "random", None)
        if numpy is not None and shared:
            found.append(("NumPy's random numbers", numpy.get_state, numpy.set_state))
        for g in {id(x): x for o in owners for x in (o, *getattr(o, "__dict__", {}).values())}.values():
            if isinstance(g, torch.Generator):
                found.append(("a generator", g.get_state, g.set_state))
            elif isinstance(g, random.Random):
                found.append(("a generator", g.getstate, g.setstate))
            elif numpy is not None and isinstance(g, numpy.RandomState):
                found.append(("a generator", g.get_state, g.set_state))
            elif numpy is not None and isinstance(g, numpy.Generator):
                found.append(("a generator", functools.partial(getattr, g.bit_generator, "state"), functools.partial(setattr, g.bit_generator, "state")))
        self._found = [(name, get, set, get()) for name, get, set in found]

    def drawn(self) -> str:
        """Returns what was drawn from since, or nothing."""
        return next((name for name, get, _, before in self._found if not _equal(get(), before)), "")

    def set(self) -> None:
        for _, get, set, before in self._found:
            if not _equal(get(), before):
                set(before)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(map(_equal, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


def is_generator(x: Any) -> bool:
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    return isinstance(x, (torch.Generator, random.Random)) or numpy is not None and isinstance(x, (numpy.RandomState, numpy.Generator))


def named_generators(modules: Iterable[Any]) -> List[Any]:
    """Returns the generators that methods of modules know by name: of their files, or of the functions that they are in."""
    kinds = {kind: None for m in modules for kind in type(m).__mro__ if not kind.__module__.startswith(("torch.", "builtins"))}
    functions = [f for kind in kinds for f in vars(kind).values() if isinstance(f, types.FunctionType)]
    found = [f.__globals__.get(name) for f in functions for name in f.__code__.co_names]
    for f in functions:
        for cell in f.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                found.append(cell.cell_contents)
    return [x for x in found if is_generator(x) and x is not torch.default_generator]


_checkpoint = vars(torch.utils.checkpoint)


def in_checkpoint(inside: Any = None) -> bool:
    """Reports whether torch.utils.checkpoint is running what calls this; if some code is given, only inside of that."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not inside:
        if frame.f_globals is _checkpoint:
            return True
        frame = frame.f_back
    return False


# The innermost hooks of saved tensors: None if there are none, as there are in every checkpoint. Not every version of PyTorch tells.
innermost: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ())
