"""A library and a budget that take notes and do nothing by themselves."""

from common import torch
from stowage._step import Step

CPU = torch.device("cpu")


class Calls:
    """A library that notes its calls. A case may set what the next ones return: memory of which storages."""

    def __init__(self):
        self.log, self.last, self.returned, self.held, self.berths = [], 0, [], (), {}
        self.fail = self.step = None

    def note(self, call):
        """Notes a call: autograd has other threads, so that the step's lock must be held."""
        assert self.step is None or self.step.lock.locked(), call
        self.log.append(call)

    def _said(self, *call):
        self.note(call)
        if self.fail is not None:
            fail, self.fail = self.fail, None
            raise fail
        returned, self.returned = self.returned, []
        return returned

    def save(self, name, storages):
        self.last += 1
        self.addresses = [s[1] for s in storages]
        return self.last, self._said("save", name.decode(), *((id, bytes, bool(rows) and row_bytes, bool(stay)) for id, _, bytes, rows, row_bytes, stay in storages))

    def load(self, group):
        returned = self._said("load", group)
        return self.held, returned

    def release(self, group):
        return self._said("release", group)

    def rows(self, id):
        self.note(("rows", id))
        return self.berths.get(id, 0)

    def end(self, failed):
        return self._said("end", failed)

    def taken(self):
        """Returns the calls since the last time."""
        log, self.log = self.log, []
        return log


class Noted:
    """A budget that is measured, in the log of the library."""

    measuring = True

    def __init__(self, calls):
        self.calls, self.marks = calls, 0

    def before_call(self):
        self.calls.note("before")

    def after_call(self):
        self.calls.note("after")

    def saved(self, id, bytes):
        self.calls.note(("saved", id, bytes))

    def released(self, ids):
        self.calls.note(("released", *ids))

    def end(self):
        self.calls.note("measured")

    def mark(self):
        assert self.calls.step.lock.locked()
        self.marks += 1
        return self.marks


def new(outside=None, least=1, moves=lambda name: name != "stays", weights=(), budget=False):
    """Returns a step, and its library."""
    calls = Calls()
    calls.step = Step(calls, CPU, least, moves, outside, set(weights), set(), [], Noted(calls) if budget else None)
    return calls.step, calls


class Graphed(torch.autograd.Function):
    """Its node has the name of those of make_graphed_callables."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


def release_dead(step):
    with step.lock:
        step.release_dead()
