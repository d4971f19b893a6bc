"""Plays a GPU for tests on the CPU."""

import contextlib
import functools
from unittest import mock

from common import torch

GPU = torch.device("cuda", 1)


class Played:
    """Plays torch.cuda for a while, and notes what it is asked."""

    def __init__(self):
        self.log, self.state, self.replayed = [], torch.zeros(4), lambda: None

    def __enter__(self):
        note = lambda name, result=None: lambda *a, **k: self.log.append((name, *a, *k.values())) or (result(*a) if callable(result) else result)

        @contextlib.contextmanager
        def inside(name, *given, **more):
            self.log.append((name, *given, *more.values()))
            yield
            self.log.append((f"end of {name}",))

        class Stream:
            def __init__(stream, name):
                stream.name, stream.cuda_stream = name, 9

            def wait_stream(stream, other):
                self.log.append((f"{stream.name} waits for {other.name}",))

        class Graph:
            def replay(_):
                self.log.append(("replay",))
                self.replayed()

        self.patch = mock.patch.multiple(
            torch.cuda, get_rng_state=note("get random", lambda *_: self.state.clone()), set_rng_state=note("set random"), synchronize=note("synchronize"), _sleep=note("sleep"),
            device=functools.partial(inside, "device"), stream=lambda s: inside(f"stream {s.name}"), graph=lambda g, stream: inside(f"capture on {stream.name}"), CUDAGraph=Graph,
            Stream=lambda device: Stream("side"), current_stream=lambda device=None: Stream("main"), reset_peak_memory_stats=note("reset"),
            memory_stats_as_nested_dict=lambda device: {"allocated_bytes": {"all": {"current": 5, "peak": 7}}} if device == GPU else {},
        )
        self.patch.__enter__()
        return self

    def __exit__(self, *error):
        self.patch.__exit__(*error)

    def said(self):
        log, self.log = self.log, []
        return log
