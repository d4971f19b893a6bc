"""Steps that can be run again, and steps in CUDA graphs.

A step with more rows than room is run again from the state it began in: the same random
numbers, gradients and buffers. The library has made more room by then, as much as the
step asked for, so one more run is enough unless its rows differ.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from ._errors import Error, Overflow

TRIES = 4


class State:
    """What a step changes, to put it back."""

    def __init__(self, runtime: Any, restore: Sequence[torch.Tensor], gradients: bool) -> None:
        self.device = runtime.device
        self.random = torch.get_rng_state()
        self.random_cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self.copies: List[Tuple[torch.Tensor, torch.Tensor]] = []
        self.gradients: List[Tuple[torch.Tensor, Optional[torch.Tensor]]] = []
        self.keep(restore)
        for a in runtime._attached:
            self.keep(a.model.buffers())
            for p in a.model.parameters() if gradients else ():
                self.gradients.append((p, p.grad))
                if p.grad is not None:
                    self.keep([p.grad])

    def keep(self, tensors: Any) -> None:
        self.copies += [(t, t.detach().clone()) for t in tensors]

    def back(self) -> None:
        torch.set_rng_state(self.random)
        if self.random_cuda is not None:
            torch.cuda.set_rng_state(self.random_cuda, self.device)
        for p, g in self.gradients:
            p.grad = g
        with torch.no_grad():
            for t, copy in self.copies:
                t.copy_(copy)


def run(runtime: Any, fn: Callable[..., Any], args: Sequence[Any], key: str, restore: Sequence[torch.Tensor]) -> Any:
    # Only rows can lack room: without them nothing is run again, and nothing copied.
    state = State(runtime, restore, True) if runtime._overflows else None
    for _ in range(TRIES):
        try:
            with runtime.step(key):
                out = fn(*args)
            return out
        except Overflow as e:
            last = e
            state.back()
    raise Error(scant(last)) from last


def scant(last: Overflow) -> str:
    return f"rows lacked room {TRIES} times; give Runtime(live=1), or counts that do not grow from run to run ({last})"


class Graph:
    """A captured step. Arguments that are tensors are copied into those it was captured
    with; what it returns, and gradients, are the same memory at every call."""

    def __init__(self, runtime: Any, fn: Callable[..., Any], args: Sequence[Any], key: str, restore: Sequence[torch.Tensor]) -> None:
        self._runtime, self._restore = runtime, list(restore)
        self.inputs = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
        stream, current = torch.cuda.Stream(runtime.device), torch.cuda.current_stream(runtime.device)
        state = State(runtime, restore, False)  # not gradients: what there is of them is forgotten
        self._forget()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Libraries set themselves up at first use, which a capture does not allow; the
            # first step is recorded and the second follows its plan.
            for _ in range(3):
                run(runtime, fn, self.inputs, key, restore)
                self._forget()
        current.wait_stream(stream)
        state.back()
        self._forget()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            with runtime.step(key):
                self.out = fn(*self.inputs)

    def _forget(self) -> None:
        """Gradients that exist would be added to at every replay."""
        for a in self._runtime._attached:
            for p in a.model.parameters():
                p.grad = None
        for t in self.inputs:
            if isinstance(t, torch.Tensor):
                t.grad = None

    def __call__(self, *args: Any) -> Any:
        if len(args) != len(self.inputs):
            raise Error(f"the graph was captured with {len(self.inputs)} arguments and is called with {len(args)}")
        with torch.no_grad():
            for static, now in zip(self.inputs, args):
                if not isinstance(static, torch.Tensor):
                    if now != static:
                        raise Error(f"the graph was captured with the argument {static!r} and is called with {now!r}; only tensors may change")
                elif static is not now:
                    if static.shape != now.shape or static.dtype != now.dtype:
                        raise Error(f"the graph was captured with {static.dtype} {list(static.shape)} and is called with {now.dtype} {list(now.shape)}")
                    static.copy_(now)
        runtime = self._runtime
        if not runtime._overflows:
            self._graph.replay()
            return self.out
        # Gradients are written, not added to, by a replay.
        state = State(runtime, self._restore, False)
        for _ in range(TRIES):
            self._graph.replay()
            try:
                runtime.check()
                return self.out
            except Overflow as e:
                last = e
                state.back()
        raise Error(scant(last)) from last
