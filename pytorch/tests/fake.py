"""A library that behaves as badly as stowage.h allows: it reads memory as late as it
may, returns it at odd moments, asks for memory ahead of need, and holds what it need not. Memory
given back too early, or looked for in the wrong place, shows as wrong gradients. Rows
are copied at once or stay, and are not-a-numbers from their release on.

Conservation, looked at when a step ends: every memory that the library knew of was left
once, by left or by the end of the step.
"""

import ctypes
import random

from stowage._library import Usage


class Storage:
    def __init__(self, address, size):
        self.address, self.bytes = address, size
        self.copy = None  # once it has left
        self.away = False
        self.berth = None  # for rows
        self.groups = 0


class Fake:
    """Made by Fake.with_seed(...), which is given to Runtime as its library."""

    def __init__(self, seed, config, provide):
        self.random, self.config, self.provide = random.Random(seed), config, provide
        self.policy = config.get("policy")
        self.groups, self.storages, self.leaving = None, {}, []
        self.most = 0
        self.closed = False

    @classmethod
    def with_seed(cls, seed):
        return lambda config, provide: cls(seed, config, provide)

    def check_open(self):
        assert not self.closed

    def begin(self, key, stream):
        assert self.groups is None and stream == 0
        self.groups, self.storages, self.leaving, self.last = {}, {}, [], 0
        self.berths = []  # of this step, released or not: who reads late finds not-a-numbers

    def end(self, failed):
        assert self.groups is not None
        left = [i for i, s in self.storages.items() if not s.away]
        self.groups = None
        return left

    def save(self, name, storages):
        self.last = number = self.last + 1
        self.groups[number] = [s[0] for s in storages]
        assert storages and len({s[0] for s in storages}) == len(storages)
        left = []
        for id, address, size, rows, row_bytes, stay in storages:
            assert id and address and size
            s = self.storages.get(id)
            if s is None or s.berth is not None and not s.groups:
                s = self.storages[id] = Storage(address, size)
                if rows and self.random.random() < 0.7:
                    live = ctypes.c_int64.from_address(rows).value * row_bytes
                    assert 0 <= live <= size
                    s.berth, s.away = ctypes.create_string_buffer(ctypes.string_at(address, live), size + 1), True
                    self.berths.append(s.berth)
                    left.append(id)
                elif not rows and not stay and self.wants(name):
                    self.leaving.append(id)
            s.groups += 1
        return number, left + self.some()

    def wants(self, name):
        if self.policy is not None:
            return self.policy.get(name.decode()) == "offload"
        return self.random.random() < 0.5

    def rows(self, id):
        berth = self.storages[id].berth
        return 0 if berth is None else ctypes.addressof(berth)

    def some(self):
        """Copies and leaves a few of those that are to leave."""
        left = []
        while self.leaving and self.random.random() < 0.6:
            left.append(self.go(self.leaving.pop(0)))
        self.most = max(self.most, sum(s.bytes for s in self.storages.values() if s.away))
        return left

    def go(self, id):
        s = self.storages[id]
        s.copy, s.away = ctypes.string_at(s.address, s.bytes), True
        return id

    def back(self, id):
        s = self.storages[id]
        if s.away and s.berth is None:
            assert s.copy is not None  # it was released and saved again
            at = self.provide(id, s.bytes)
            ctypes.memmove(at, s.copy, s.bytes)
            s.address, s.away = at, False

    def load(self, group):
        left, held = [], []
        for id in self.groups[group]:
            if id in self.leaving:
                self.leaving.remove(id)
                if self.random.random() < 0.5:  # leaves after all, and comes back at once
                    left.append(self.go(id))
            self.back(id)
        if self.random.random() < 0.3:  # one ahead
            away = [i for i, s in self.storages.items() if s.away and s.groups and s.berth is None]
            if away:
                self.back(self.random.choice(away))
        held = [id for id in self.groups[group] if self.random.random() < 0.3]
        return held, left + self.some()

    def release(self, group):
        left = []
        for id in self.groups.pop(group):
            s = self.storages[id]
            s.groups -= 1
            if s.groups == 0:
                if id in self.leaving:
                    self.leaving.remove(id)
                if s.berth is not None:
                    ctypes.memset(s.berth, 0xFF, s.bytes)
                if not s.away:
                    s.away = True
                    left.append(id)
        return left

    def limit(self, bytes):
        self.config["saved_limit"] = bytes

    def usage(self):
        return Usage(0, 0, 0, self.config.get("saved_limit", 0), 0, 0)

    def check(self, stream):
        pass

    def stats(self):
        return {}

    def choose(self, request):
        def any_of(unit):
            free = request["offload"] and unit["offload"], request["recompute"] and unit["recompute_ns"] > 0
            return self.random.choice(["keep"] + [c for c, may in zip(("offload", "recompute"), free) if may])

        times = dict.fromkeys(("step_ns", "before_ns"), request["span"])
        rest = dict.fromkeys(("peak", "before_peak", "moved", "waiting_ns", "again_ns", "tried"), 0)
        return {"nothing": False, "choices": [any_of(u) for u in request["units"]], "notes": [], **times, **rest}

    def trace(self, path):
        pass

    def close(self):
        self.closed = True
