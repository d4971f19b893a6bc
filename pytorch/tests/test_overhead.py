"""What a saved tensor costs in Python. Times are printed, and a quiet machine takes less than
15 µs. How fast this machine is decides nothing: the bounds are on how many functions are called.
With the library's own work times are copies, on the CPU, and waiting for them."""

import statistics
import sys
import time
import unittest

from common import runtime, torch
from zoo import leaf

TENSORS, GROUP = 100, 5


def step(group):
    """Each exp saves its result."""
    x = leaf(64)
    y = x
    for _ in range(TENSORS // GROUP):
        with group("a"):
            for _ in range(GROUP):
                y = torch.exp(y)
    y.sum().backward()


class Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def measure(run, rounds=6):
    """The best of some rounds, by the clock of this thread: others use the machine too."""
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return min(times) * 1e6


def calls(run):
    """How many functions a run calls in this thread, Python's and C's."""
    n = 0

    def count(_, event, __):
        nonlocal n
        n += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return n


def per_tensor(what, **settings):
    """Prints the time that a saved tensor takes and returns the calls."""
    nothing = Nothing()
    with runtime("offload", **settings) as rt:

        def with_it():
            with rt.step():
                step(rt.group)

        def without():
            step(lambda _: nothing)

        for _ in range(5):
            with_it()
        rounds = [(measure(with_it), measure(without)) for _ in range(3)]
        n = (calls(with_it) - calls(without)) / TENSORS
        print(f"{what}: {statistics.median(a - b for a, b in rounds) / TENSORS:.1f} µs and {n:.1f} calls a saved tensor", flush=True)
        return n


class Instant:
    """A library that does nothing: everything is offloaded at once and reloaded when asked for."""

    def __init__(self, config, provide):
        self.provide, self.groups = provide, []

    def check_open(self):
        pass

    def begin(self, key, stream):
        self.groups = [[]]

    def save(self, name, storages):
        ids = [s[0] for s in storages]
        self.groups.append([(s[0], s[2]) for s in storages])
        return len(self.groups) - 1, ids

    def load(self, group):
        for id, size in self.groups[group]:
            self.provide(id, size)
        return (), []

    def release(self, group):
        return []

    def end(self, failed):
        return []

    def close(self):
        pass


class Overhead(unittest.TestCase):
    def test_calls_a_saved_tensor(self):
        for what, bound, settings in (
            ("kept by policy", 25, {"policy": {"a": "keep"}}),
            ("too small to move", 25, {"policy": {"a": "offload"}, "least": "1MiB"}),
            ("moved by a library that takes no time", 80, {"policy": {"a": "offload"}, "library": Instant}),
        ):
            self.assertLess(per_tensor(what, **settings), bound, what)

    def test_with_the_library(self):
        for what, settings in (("the limit holds", {"policy": None, "saved_limit": "1GiB"}), ("moved", {"policy": {"a": "offload"}})):
            per_tensor(f"{what}, with the library, in groups of {GROUP}", **settings)


if __name__ == "__main__":
    unittest.main()
