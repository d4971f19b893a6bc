"""What a second forward pass must find as the first one had it: autocast, default devices,
modes of modules, and random numbers."""

from __future__ import annotations

import contextlib
from typing import Any, Sequence, Tuple

import torch

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


class Surroundings:
    """The autocast state and the default device of a forward pass, to be had again in the second.
    A backward pass has no default device: PyTorch hides it from what calls the engine."""

    __slots__ = ("gpu", "cpu", "cache", "devices")

    def __init__(self) -> None:
        self.gpu, self.cpu = autocasts()
        self.cache = torch.is_autocast_cache_enabled()
        self.devices = default_devices()

    def caches(self) -> bool:
        """Reports whether what is cast stays until the outermost autocast ends."""
        return bool(self.cache and (self.gpu[0] or self.cpu[0]))

    def same(self) -> bool:
        """Reports whether the thread has them now."""
        return autocasts() == (self.gpu, self.cpu) and default_devices() == self.devices

    def again(self) -> Any:
        """Returns a context that has them."""
        return contextlib.nullcontext() if self.same() else self._again()

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
            yield


# A module, and whether it was training.
Mode = Tuple[torch.nn.Module, bool]


def modes_again(modes: Sequence[Mode]) -> Any:
    """Returns a context in which modules train if they did: model.eval() may come before the backward pass."""
    other = [m for m, training in modes if m.training != training]
    return _switched(other) if other else contextlib.nullcontext()


@contextlib.contextmanager
def _switched(modules: Sequence[torch.nn.Module]) -> Any:
    for m in modules:
        m.training = not m.training
    try:
        yield
    finally:
        for m in modules:
            m.training = not m.training


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
