"""Steps that can be run again, and steps in CUDA graphs.

A step with more rows than room is run again from the state in which it began: the same
random numbers, gradients and buffers. By then the library has made as much room as the
step needed, so one more run is enough unless its rows differ.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from ._errors import Error, Overflow, forget

TRIES = 4

# A step runs so often before it is captured: recorded, timed eight times at most, and once more.
WARM = 10


class State:
    """What a step changes, so that it can be put back."""

    def __init__(self, runtime: Any, tensors: Sequence[torch.Tensor], gradients: bool) -> None:
        self.device = runtime.device
        self.random = torch.get_rng_state()
        self.random_cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self.copies: List[Tuple[torch.Tensor, torch.Tensor]] = []
        self.gradients: List[Tuple[torch.Tensor, Optional[torch.Tensor]]] = []
        self.keep(tensors)
        for a in runtime._attached:
            self.keep(a.model.buffers())
            for p in a.model.parameters() if gradients else ():
                self.gradients.append((p, p.grad))
                if p.grad is not None:
                    self.keep([p.grad])

    def keep(self, tensors: Any) -> None:
        self.copies += [(t, t.detach().clone()) for t in tensors]

    def restore(self) -> None:
        torch.set_rng_state(self.random)
        if self.random_cuda is not None:
            torch.cuda.set_rng_state(self.random_cuda, self.device)
        for p, g in self.gradients:
            p.grad = g
        with torch.no_grad():
            for t, copy in self.copies:
                t.copy_(copy)


def run(runtime: Any, fn: Callable[..., Any], args: Sequence[Any], key: str, restore: Sequence[torch.Tensor]) -> Any:
    # Only rows can overflow: without them nothing is run again, and nothing is copied.
    state = State(runtime, restore, True) if runtime._overflows else None
    for _ in range(TRIES):
        try:
            with runtime.step(key):
                out = fn(*args)
            return out
        except Overflow as e:
            last = forget(e)
            assert state is not None
            state.restore()
    raise Error(too_many_reruns(last)) from last


def too_many_reruns(last: Overflow) -> str:
    return f"the step overflowed {TRIES} times; use Runtime(live=1), or counts that do not grow from run to run ({last})"


class Graph:
    """A captured step. A call copies tensors into the arguments of the capture; results and
    gradients have the same memory at every call."""

    def __init__(self, runtime: Any, fn: Callable[..., Any], args: Sequence[Any], key: str, restore: Sequence[torch.Tensor]) -> None:
        self._runtime, self._restore = runtime, list(restore)
        self.inputs = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
        stream, current = torch.cuda.Stream(runtime.device), torch.cuda.current_stream(runtime.device)
        state = State(runtime, restore, False)  # without gradients, which are dropped
        self._drop_gradients()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Libraries set themselves up at first use, which a capture does not allow. The
            # first step is recorded, and the next ones are timed under its plan until two are alike.
            for _ in range(WARM):
                run(runtime, fn, self.inputs, key, restore)
                self._drop_gradients()
        current.wait_stream(stream)
        state.restore()
        self._drop_gradients()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            with runtime.step(key):
                self.out = fn(*self.inputs)

    def _drop_gradients(self) -> None:
        """Drops gradients: every replay would add to those that exist."""
        for a in self._runtime._attached:
            for p in a.model.parameters():
                p.grad = None
        for t in self.inputs:
            if isinstance(t, torch.Tensor):
                t.grad = None

    def __call__(self, *args: Any) -> Any:
        if len(args) != len(self.inputs):
            raise Error(f"the graph was captured with {len(self.inputs)} arguments and called with {len(args)}")
        with torch.no_grad():
            for static, now in zip(self.inputs, args):
                if not isinstance(static, torch.Tensor):
                    if now != static:
                        raise Error(f"the graph was captured with the argument {static!r} and called with {now!r}; only tensors may change")
                elif static is not now:
                    if not isinstance(now, torch.Tensor):
                        raise Error(f"the graph was captured with a tensor and called with {now!r} in its place; give a tensor of {static.dtype} {list(static.shape)}")
                    if static.shape != now.shape or static.dtype != now.dtype:
                        raise Error(f"the graph was captured with {static.dtype} {list(static.shape)} and called with {now.dtype} {list(now.shape)}")
                    static.copy_(now)
        runtime = self._runtime
        if not runtime._overflows:
            self._graph.replay()
            return self.out
        # A replay writes gradients and does not add to them.
        state = State(runtime, self._restore, False)
        for _ in range(TRIES):
            self._graph.replay()
            try:
                runtime.check()
                return self.out
            except Overflow as e:
                last = forget(e)
                state.restore()
        raise Error(too_many_reruns(last)) from last
