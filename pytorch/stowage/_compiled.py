"""What torch.compile made of modules.

A compiled block is a unit like others, and its inside is the compiler's matter: whatever is
wrapped in there would end its graph. This file recognises the forms in which users compile,
and whether a compiled function is what calls.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch


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
