"""Stowage around the forward-backward functions of Megatron-LM.

    rt = stowage.Runtime(budget="60GiB")
    forward_backward = stowage.integrations.megatron.wrap(get_forward_backward_func(), rt)

Megatron-LM runs all microbatches between two updates, and the whole schedule of a
pipeline, in one function. wrap() returns a function that is called like it.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Mapping, Optional

from .._errors import Error
from .._runtime import Runtime
from ._steps import is_attached


def wrap(forward_backward: Callable[..., Any], runtime: Runtime, *, groups: Optional[Mapping[str, str]] = None) -> Callable[..., Any]:
    """Returns a forward-backward function that runs as one step of a runtime. It passes
    evaluation (forward_only) through, and attaches the model of its first call unless that
    is attached. The key of a step is the number and shape of its microbatches.

    Under FullCudaGraphWrapper, wrap the function inside of it.
    """
    if not callable(forward_backward):
        raise Error(f"expected what get_forward_backward_func() returns, got {forward_backward!r}")
    if not isinstance(runtime, Runtime):
        raise Error(f"expected a stowage.Runtime, got {type(runtime).__name__}")
    if type(forward_backward).__name__ == "FullCudaGraphWrapper":
        raise Error("FullCudaGraphWrapper replays a graph that no step can see; give it wrap(get_forward_backward_func(), runtime)")

    @functools.wraps(forward_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("forward_only"):
            return forward_backward(*args, **kwargs)
        missing = [name for name in ("model", "num_microbatches", "seq_length", "micro_batch_size") if name not in kwargs]
        if missing:
            raise Error(f"the forward-backward function is called without {missing[0]}=; call it with keywords, as Megatron-LM does, or install a newer megatron-core: pip install -U 'megatron-core>=0.6'")
        model = kwargs["model"]
        for chunk in model if isinstance(model, (list, tuple)) else [model]:
            if not is_attached(runtime, chunk):
                runtime.attach(chunk, groups)
        with runtime.step(_key(kwargs)):
            return forward_backward(*args, **kwargs)

    return run


def _key(kwargs: Mapping[str, Any]) -> str:
    key = f"{kwargs['num_microbatches']} of {kwargs['micro_batch_size']} x {kwargs['seq_length']}"
    decoder = kwargs.get("decoder_seq_length")
    return key if decoder is None or decoder == kwargs["seq_length"] else f"{key}, {decoder}"
