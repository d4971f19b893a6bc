"""What torch.compile made of modules.

A compiled block is a unit like others, and its inside is the compiler's matter: whatever is
wrapped in there would end its graph. This file recognises the forms in which users compile,
and whether a compiled function is what calls. It also compiles a block once more, with the
settings of its user and a smaller activation_memory_budget: its graph then saves less and
computes more in the backward pass.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any, Callable, Dict, List, Tuple

import torch

from ._errors import Error

# Values of activation_memory_budget that are tried, until one drops enough for all blocks, and one more.
BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.1)


def call_of(module: torch.nn.Module) -> Any:
    """Returns the compiled function through which a module is called, or None: that of
    module.compile(), torch.compile(module) or module.forward = torch.compile(...)."""
    call = getattr(module, "_compiled_call_impl", None)
    if call is not None:
        return call
    call = getattr(module, "forward", None)
    if hasattr(module, "_orig_mod"):
        return call
    made = getattr(call, "__func__", call)
    # What torch.compiler.disable() returns looks the same.
    return call if hasattr(made, "_torchdynamo_orig_callable") and not getattr(made, "_torchdynamo_disable", False) else None


def is_compiled(module: torch.nn.Module) -> bool:
    """Reports whether torch.compile was applied to the module itself."""
    return call_of(module) is not None


def kind(module: torch.nn.Module) -> type:
    """Returns the class of a module, or of the one that torch.compile wrapped."""
    return type(getattr(module, "_orig_mod", module))


_dynamo = os.path.join("torch", "_dynamo", "eval_frame.py")


def in_compiled() -> bool:
    """Reports whether a compiled function calls this, after its graph ended."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_dynamo):
            here = frame.f_locals  # of what is disabled inside, the callback is None
            return callable(here["callback"] if "callback" in here else getattr(here.get("self"), "callback", None))
        frame = frame.f_back
    return False


# Backends with a budget, by the backend of the user and the budget. Graphs belong to the
# process and are found by their backends, so these do, too.
_backends: List[Tuple[Any, float, Any]] = []


def with_budget(call: Any, budget: float) -> Callable[..., Any]:
    """Returns what torch.compile made, made anew with an activation_memory_budget. It compiles
    when it is called. It raises an Error if it is not known how the user compiled."""
    made = getattr(call, "__func__", call)
    backend, dynamic = _settings(made)
    again: Any = torch.compile(made._torchdynamo_orig_callable, backend=_with(backend, budget), dynamic=dynamic)
    bound: Callable[..., Any] = again if made is call else types.MethodType(again, call.__self__)
    return bound


def _settings(made: Any) -> Tuple[Any, Any]:
    """Returns the backend and the argument dynamic= that a function was compiled with."""
    settings = getattr(made, "get_compiler_config", None)
    if settings is None or not made.__code__.co_filename.endswith(_dynamo):
        raise Error("it is not known how it was compiled")
    context = dict(zip(settings.__code__.co_freevars, settings.__closure__ or ()))["self"].cell_contents
    backend = context.callback
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):  # the second before PyTorch 2.8
        while hasattr(backend, name):
            backend = getattr(backend, name)
    if not callable(backend) or backend is context.callback:
        raise Error("the backend that it was compiled with is not known")
    if _captures(backend):
        raise Error("it is compiled to CUDA graphs")
    return backend, context._dynamic


def _captures(backend: Any) -> bool:
    """Reports whether a backend makes CUDA graphs, by its own settings or by those of the process."""
    name = getattr(backend, "compiler_name", "")
    if name != "inductor":
        return bool(name == "cudagraphs")
    from torch._inductor import config

    return bool(backend.config.get("triton.cudagraphs", config.triton.cudagraphs))


def _with(backend: Any, budget: float) -> Any:
    from torch._functorch import config  # which is slow to load

    if not hasattr(config, "activation_memory_budget"):
        raise Error("this PyTorch has no activation_memory_budget")
    for known, value, made in _backends:
        if value == budget and known == backend:
            return made

    def compile_with_budget(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return backend(graph, inputs)

    _backends.append((backend, budget, compile_with_budget))
    return compile_with_budget


# What PyTorch's limits on the graphs of a function were raised to. A function that exceeds them
# runs as if it were not compiled.
_raised: Dict[str, int] = {}


def allow_more_graphs() -> None:
    """Lets a function have as many graphs as its user allowed, and as many more for each budget."""
    config: Any = sys.modules.get("torch._dynamo.config")
    for names in (("recompile_limit", "cache_size_limit"), ("accumulated_recompile_limit", "accumulated_cache_size_limit")):
        name = next((name for name in names if hasattr(config, name)), "")
        if name and getattr(config, name) != _raised.get(name):
            _raised[name] = getattr(config, name) * (1 + len(BUDGETS))
            setattr(config, name, _raised[name])
