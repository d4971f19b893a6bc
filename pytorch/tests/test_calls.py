"""What one step tells the library, call by call, and what it does with the answers. The library here does nothing by
itself: a case says what it returns."""

import ctypes
import dataclasses
import threading
import unittest
import weakref
from unittest import mock

from common import DEVICE, torch
from stowage import _again, _step
from stowage._errors import Error
from stowage._managed import Following, Passes, Units
from stowage._measured import Cast, Choice
from stowage._plan import Plan
from stowage._profile import Unit
from stowage._record import Handle, Kept, Rows, Weak, storage_at, storage_of
from stowage._step import Step, Ticket, any_alive, first_made
from torch import nn
from zoo import leaf

CPU = torch.device("cpu")


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


class Calls:
    """A library that notes its calls. A case may set what the next ones return: memory of which storages."""

    def __init__(self):
        self.log, self.last, self.returned, self.held, self.berths = [], 0, [], (), {}
        self.fail = None

    def _said(self, *call):
        self.log.append(call)
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
        self.log.append(("rows", id))
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
        self.calls.log.append("before")

    def after_call(self):
        self.calls.log.append("after")

    def saved(self, id, bytes):
        self.calls.log.append(("saved", id, bytes))

    def released(self, ids):
        self.calls.log.append(("released", *ids))

    def end(self):
        self.calls.log.append("measured")

    def mark(self):
        self.marks += 1
        return self.marks


def new(outside=None, least=1, moves=lambda name: name != "stays", weights=(), budget=False):
    """Returns a step, and its library."""
    calls = Calls()
    return Step(calls, CPU, least, moves, outside, set(weights), set(), [], Noted(calls) if budget else None), calls


class Graphed(torch.autograd.Function):
    """Its node has the name of those of make_graphed_callables."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


class Told(unittest.TestCase):
    def test_a_step(self):
        """Groups are told of when they end, loaded once when they are needed, and released by the next call after
        their handles died; a budget reads the peak around every call."""
        for budget in (False, True):
            step, calls = new(budget=budget)
            a, b = torch.randn(4, 4) + 0, torch.randn(8) + 0
            with _step.InGroup(step, "g"):
                one, two, three = step.pack(a), step.pack(a[1:]), step.pack(b)
                self.assertEqual([], calls.taken())
                with _step.InGroup(step, "inner"):
                    four = step.pack(b)
                five = step.pack(b)
            got = calls.taken()
            with _step.InGroup(step, "next"):
                six = step.pack(a)
            got += calls.taken()
            self.assertTrue(torch.equal(a[1:], step.unpack(two)))
            self.assertTrue(torch.equal(a, step.unpack(one)))
            del one, two
            step.unpack(four)
            del three  # its group is released by the next call
            step.unpack(four)
            got += calls.taken()
            del four, five, six
            step.end(False)
            got += calls.taken()
            around = lambda *calls: [*(["before"] if budget else []), *calls, *(["after"] if budget else [])]
            noted = lambda *what: [what] if budget else []
            want = [
                *around(*noted("saved", 1, 64), *noted("saved", 2, 32), ("save", "g", (1, 64, False, False), (2, 32, False, False))),
                *around(*noted("saved", 2, 32), ("save", "inner", (2, 32, False, False))),
                *around(*noted("saved", 2, 32), ("save", "g", (2, 32, False, False))),
                *around(*noted("saved", 1, 64), ("save", "next", (1, 64, False, False))),
                *around(("load", 1)),
                *around(("load", 2)),
                *around(("release", 1), *noted("released", 1, 2)),
                ("release", 2), *noted("released", 2), ("release", 3), *noted("released", 2), ("release", 4), *noted("released", 1),
                *(["measured"] if budget else []), ("end", False),
            ]
            self.assertEqual(want, got)
            self.assertTrue(step.over)

    def test_pieces_of_a_group(self):
        """A group that saves much is told of in pieces; what is outside of groups by the number of tensors."""
        step, calls = new()
        with mock.patch.object(_step, "PIECE", 96), _step.InGroup(step, "g"):
            step.pack(torch.zeros(8) + 1), step.pack(torch.zeros(8) + 1)
            self.assertEqual([], calls.taken())
            step.pack(torch.zeros(8) + 1)
            self.assertEqual([("save", "g", *((i, 32, False, False) for i in (1, 2, 3)))], calls.taken())
            self.assertEqual(0, step.waiting)
        self.assertEqual([("release", 1)], calls.taken() or step.release_dead() or calls.taken())
        step, calls = new(outside="other")
        held = [step.pack(torch.zeros(8) + 1) for _ in range(_step.MANY - 1)]
        self.assertEqual([], calls.taken())
        held.append(step.pack(torch.zeros(8) + 1))
        self.assertEqual([("save", "other", *((i + 1, 32, False, False) for i in range(_step.MANY)))], calls.taken())
        with _step.InGroup(step, "g"):  # a group has as many as it likes
            held += [step.pack(torch.zeros(8) + 1) for _ in range(_step.MANY + 1)]
            self.assertEqual([], calls.taken())

    def test_names(self):
        """The innermost group counts. One that stays is as if it were not there, and so is what is outside."""
        step, calls = new()
        x = torch.zeros(8) + 1
        self.assertIs(Kept, type(step.pack(x)))
        with _step.InGroup(step, "g"):
            with _step.InGroup(step, "stays"):
                kept = step.pack(x)
                self.assertIs(Kept, type(kept))
                self.assertEqual("stays", kept.place[0])
            handle = step.pack(x)
            self.assertEqual("g", handle.record.place[0])
        self.assertIs(Kept, type(step.pack(x)))
        self.assertIsNone(step.place)
        with _step.InGroup(step, "stays"):
            with _step.InGroup(step, "g"):
                pass
            self.assertIs(Kept, type(step.pack(x)))
        self.assertEqual({"g", "stays"}, step.seen)
        step, calls = new(outside="other")
        with _step.InGroup(step, "g"):
            pass
        self.assertEqual("other", step.name)
        with _step.InGroup(step, "stays"):
            handle = step.pack(x)
        self.assertEqual(("other", "stays"), (handle.group.name, handle.record.place[0]))
        calls.taken()
        handle = step.pack(torch.zeros(8) + 1)
        module = nn.Linear(2, 2)
        step.begin_group("g", module)
        self.assertEqual("other", calls.taken()[0][1])
        self.assertIs(module, step.place[1]())
        self.assertTrue(step.inside(module))
        step.begin_group("g", self)
        self.assertIsNone(step.place[1])
        step.end_group(module)  # with those inside that an exception left open
        self.assertEqual(([], None, "other"), (step.stack, step.place, step.name))
        self.assertFalse(step.inside(module))
        step.begin_group("g", module)
        step.end_group(self)  # which has none
        self.assertEqual("g", step.name)

    def test_other_threads_and_streams(self):
        """Nothing is saved there, and groups there are none."""

        def elsewhere(*fs):
            t = threading.Thread(target=lambda: [f() for f in fs])
            t.start()
            t.join()

        step, calls = new()
        x = torch.zeros(8) + 1
        got = []
        elsewhere(lambda: step.begin_group("there", self))
        self.assertEqual(([], set(), None), (step.stack, step.seen, step.name))
        step.begin_group("here", self)
        elsewhere(lambda: step.end_group(self), lambda: got.append(step.pack(x)))
        self.assertEqual("here", step.name)
        self.assertIs(Kept, type(got[0]))
        self.assertFalse(step.on_other_stream())
        step.cuda, step.stream, step.torch_stream = 0, 7, object()
        entered = mock.MagicMock()
        with mock.patch.object(_step, "_raw_stream", lambda device: 7 + (device != 0)), mock.patch.object(torch.cuda, "stream", entered):
            self.assertFalse(step.on_other_stream())
            handle = step.pack(x)
            self.assertIs(Handle, type(handle))
            step.flush()
            step.provide(handle.record.id, 32)
            entered.assert_not_called()
            with mock.patch.object(_step, "_raw_stream", lambda device: 8):
                self.assertTrue(step.on_other_stream())
                self.assertIs(Kept, type(step.pack(x)))
                step.begin_group("other stream", step)
                self.assertFalse(step.inside(step))
                at = step.provide(handle.record.id, 64)
                entered.assert_called_once_with(step.torch_stream)
                self.assertEqual((at, 64), (handle.record.memory.data_ptr(), handle.record.memory.nbytes()))
            self.assertIn("other stream", step.seen)
        step.disown()
        self.assertIs(Kept, type(step.pack(x)))
        with mock.patch.object(torch.cuda, "current_stream", lambda device: mock.Mock(cuda_stream=5 + device.index)):
            step = Step(calls, torch.device("cuda", 1), 1, bool, None, set(), set(), [])
        self.assertEqual((1, 6), (step.cuda, step.stream))
        with mock.patch.object(_step, "_raw_stream", lambda device: 6):
            step.begin_group("g", self)
            self.assertIs(Kept, type(step.pack(torch.zeros(8) + 1)))  # of the CPU

    def test_what_is_not_moved(self):
        """Tensors that cannot be, are no plain memory of the device, are small, or are held by others."""
        step, calls = new(least=32, weights=())
        weight = nn.Parameter(torch.zeros(8))
        big = torch.zeros(16) + 1
        with torch.inference_mode():
            inference = torch.zeros(8)

        class Mine(torch.Tensor):
            pass

        kept = {
            "small": torch.zeros(7) + 1,
            "sparse": torch.eye(8).to_sparse(),
            "meta": torch.zeros(8, device="meta"),
            "quantized": torch.quantize_per_tensor(torch.zeros(64), 1.0, 0, torch.quint8),
            "inference": inference,
            "of a class": (torch.zeros(8) + 1).as_subclass(Mine),
            "weight": weight,
            "view of a weight": weight[2:],
            "frozen weight": nn.Parameter(torch.zeros(8), False),
            "cast of a weight": weight.double(),
            "graphed": Graphed.apply(torch.zeros(8, requires_grad=True)),
            "leaf": torch.zeros(8, requires_grad=True),
            "conjugate": torch.zeros(8, dtype=torch.complex64).conj(),
            "negative": torch.zeros(8, dtype=torch.complex64).conj().imag,
            "part of a storage": torch.unsafe_chunk(torch.zeros(16, requires_grad=True) + 1, 2)[0],
            "empty": torch.zeros(0),
        }
        with _step.InGroup(step, "g"):
            for name, t in kept.items():
                with self.subTest(name):
                    if name == "empty":
                        step.least = 0
                    h = step.pack(t)
                    self.assertIs(Kept, type(h))
                    self.assertIs(step.unpack(h) if t.is_leaf else h.tensor, h.tensor)
            step.least = 32
            self.assertIs(Handle, type(step.pack(torch.zeros(8) + 1)))
            self.assertIs(Handle, type(step.pack((weight * 2).double())))
            self.assertIs(Handle, type(step.pack((weight * 2)[:2])))
            self.assertIs(Handle, type(step.pack(big[4:5])))  # its storage counts
            step.weights.add(storage_of(big)._cdata)
            self.assertIs(Handle, type(step.pack(big[4:5])))  # one that has a record
            other = torch.zeros(16) + 1
            step.weights.add(storage_of(other)._cdata)
            self.assertIs(Kept, type(step.pack(other)))
            step.over = True
            self.assertIs(Kept, type(step.pack(torch.zeros(8) + 1)))
            step.over = False
            with mock.patch.object(_step, "in_backward", lambda: 0):
                self.assertIs(Kept, type(step.pack(torch.zeros(8) + 1)))
        step, calls = new()
        with _step.InGroup(step, "g"):  # numbers: they calculate otherwise than their copies
            self.assertIs(Kept, type(step.pack(torch.tensor(2.0))))
            self.assertIs(Kept, type(step.pack(torch.tensor(2j, dtype=torch.complex128))))
            self.assertIs(Handle, type(step.pack(torch.tensor(2.0, requires_grad=True) * 2)))
            self.assertIs(Handle, type(step.pack(torch.tensor([2.0]))))
            self.assertIs(Handle, type(step.pack(torch.zeros(5)[2])))

    def test_least(self):
        """The least size is one byte: a storage of none has no memory to move."""
        self.assertEqual((1, 1, 5), tuple(new(least=n)[0].least for n in (0, 1, 5)))

    def test_handles_are_views_again(self):
        """Of any shape, strides and offset, and of another type than the storage's first tensor."""
        step, calls = new()
        base = torch.randn(6, 8) + 0
        views = [base, base.t(), base[2:, 1:5], base[:, ::2], base[3], base[0, 0], base[:, None].expand(6, 3, 8), base.view(torch.int32), base[1:].view(-1)[3:]]
        with _step.InGroup(step, "g"):
            handles = [step.pack(v) for v in views]
        self.assertEqual([("save", "g", (1, 192, False, False))], calls.taken())
        self.assertEqual([base.data_ptr()], calls.addresses)
        want = [(v.clone(), v.size(), v.stride(), v.storage_offset()) for v in views]
        # The library takes the memory and gives other memory back.
        copy = bytes((base.view(torch.uint8).reshape(-1)).tolist())
        calls.returned = [1]
        with _step.InGroup(step, "h"):
            step.pack(torch.zeros(8) + 1)
        self.assertIsNone(handles[0].record.memory)
        at = step.provide(1, 192)
        ctypes.memmove(at, copy, 192)
        for (v, size, stride, offset), h in zip(want, handles):
            got = step.unpack(h)
            self.assertTrue(torch.equal(v, got))
            self.assertEqual((size, stride, offset, at), (got.size(), got.stride(), got.storage_offset(), got.data_ptr() - offset * 4))

    def test_writes_in_place(self):
        """Between two saves they make another record. After the last one they are an error, unless the memory was
        taken before; those that come before the group ends make the storage stay."""
        step, calls = new()
        x = torch.zeros(8) + 1
        with _step.InGroup(step, "g"):
            first = step.pack(x)
            x.add_(1)
            second = step.pack(x)
        self.assertEqual([("save", "g", (1, 32, False, True), (2, 32, False, False))], calls.taken())
        with self.assertRaisesRegex(Error, r"modified by an inplace operation: \[torch.float32 \[8\]\] is at a later version, and version 0 was saved"):
            step.unpack(first)
        self.assertIn("version 0 was saved", step.raised)
        self.assertEqual(2.0, step.unpack(second)[0])
        for taken in (False, True):  # before the library returned it, or while it has it
            z = torch.zeros(8) + 1
            with _step.InGroup(step, "g"):
                third = step.pack(z)
            z.add_(1)
            step.take_back([third.record.id] if taken else [])
            with self.assertRaisesRegex(Error, "version 0 was saved"):
                step.unpack(third)
        step, calls = new()
        step.ids = 2
        y = torch.zeros(8) + 1
        with _step.InGroup(step, "g"):
            taken = step.pack(y)
        calls.returned = [3]
        with _step.InGroup(step, "h"):
            late = step.pack(torch.zeros(8) + 1)
        y.add_(1)
        step.provide(3, 32)
        step.unpack(taken)
        kept = step.pack(y)
        self.assertIs(Kept, type(kept))
        y.add_(1)
        with self.assertRaisesRegex(Error, "is at version 2, and version 1 was saved"):
            step.unpack(kept)

    def test_memory_that_comes_and_goes(self):
        """The library may ask for memory before it returns what it had, twice even: the oldest is returned first."""
        step, calls = new()
        x = torch.zeros(8) + 1
        with _step.InGroup(step, "g"):
            handle = step.pack(x)
        record = handle.record
        old = storage_of(x)._cdata
        one = step.provide(1, 32)
        self.assertEqual((one, 1), (record.memory.data_ptr(), len(record.before)))
        self.assertEqual(old, record.before[0]._cdata)
        x.add_(1)  # it was copied
        two = step.provide(1, 32)
        self.assertEqual([old, one], [record.before[0]._cdata, record.before[1].data_ptr()])
        calls.held = (1,)
        step.unpack(handle)
        self.assertIn(1, step.records)  # copies may still read it
        step.take_back([1])
        self.assertEqual([one], [m.data_ptr() for m in record.before])
        step.take_back([1])
        self.assertEqual(([], two), (record.before, record.memory.data_ptr()))
        step.take_back([1, 99])
        self.assertIsNone(record.memory)
        three = step.provide(1, 32)
        self.assertEqual(([], three), (record.before, record.memory.data_ptr()))
        step.take_back([1])
        self.assertIsNone(record.memory)
        self.assertEqual(old, record.weak.of)  # no other storage has its number
        with self.assertRaisesRegex(Error, "storage 1 of group 'g' was not reloaded; abandon the step"):
            step.unpack(handle)

    def test_records_that_are_loaded(self):
        """Handles alone hold them from then on, unless memory was replaced or a copy reads it. A storage that is saved
        again has another record."""
        for held, provided, stays in (((), 0, False), ((1,), 0, True), ((), 1, True)):
            step, calls = new()
            x = torch.zeros(8) + 1
            with _step.InGroup(step, "g"):
                handle = step.pack(x)
            for _ in range(provided):
                step.provide(1, 32)
            calls.held = held
            step.unpack(handle)
            self.assertEqual(stays, 1 in step.records)
            self.assertEqual({}, step.at)
            with _step.InGroup(step, "h"):
                again = step.pack(x)
            self.assertEqual(2, again.record.id)
            record = weakref.ref(handle.record)
            del handle
            self.assertEqual(stays, record() is not None)

    def test_an_open_group_is_needed(self):
        """It is told of, and then loaded."""
        step, calls = new()
        with _step.InGroup(step, "g"):
            handle = step.pack(torch.zeros(8) + 1)
            step.unpack(handle)
            self.assertEqual([("save", "g", (1, 32, False, False)), ("load", 1)], calls.taken())
            self.assertIs(Handle, type(step.pack(torch.zeros(8) + 1)))  # a forward pass may go on here
            step.unpack(handle)
            self.assertEqual([], calls.taken())
        self.assertEqual([("save", "g", (2, 32, False, False))], calls.taken())

    def test_what_a_backward_pass_saves(self):
        """It is needed at once, and stays. PyTorch 1.13 does not tell where one runs: there, the first tensor that is
        asked for outside of groups begins it."""
        for knows in (False, True):
            step, calls = new(outside="other")
            with mock.patch.object(_step, "_knows_backward", knows):
                handle = step.pack(torch.zeros(8) + 1)
                step.unpack(handle)
                self.assertIs(Handle if knows else Kept, type(step.pack(torch.zeros(8) + 1)))

    def test_memory_is_returned_at_a_load(self):
        step, calls = new(budget=True)
        for quiet in (False, True):
            with _step.InGroup(step, "g"):
                handle, other = step.pack(torch.zeros(8) + 1), step.pack(torch.zeros(8) + 1)
            calls.taken()
            step.quiet, calls.returned = quiet, [other.record.id]
            step.unpack(handle)
            load = ("load", handle.group.number)
            self.assertEqual([load] if quiet else ["before", load, "after"], calls.taken())
            self.assertEqual((False, True), (handle.record.memory is None, other.record.memory is None))

    def test_a_budget_that_is_not_measured(self):
        calls = Calls()
        budget = Noted(calls)
        budget.measuring = False
        step = Step(calls, CPU, 1, bool, None, set(), set(), [], budget)
        with _step.InGroup(step, "g"):
            handle = step.pack(torch.zeros(8) + 1)
        step.unpack(handle)
        with _step.InGroup(step, "g"):
            step.pack(torch.zeros(8) + 1)
            pending = step.pack(torch.zeros(8) + 1)
            step.end(False)
        self.assertEqual([("save", "g", (1, 32, False, False)), ("load", 1), "measured", ("end", False)], calls.taken())
        self.assertEqual(({}, None, 0, []), (step.pending, step.open, step.waiting, step.saves))

    def test_groups_that_die(self):
        """Without being told of they are not released. While a group is pending none is, nor while times are taken."""
        step, calls = new()
        x = torch.zeros(8) + 1
        with _step.InGroup(step, "g"):
            handle = step.pack(x)
        with _step.InGroup(step, "h"):
            other = step.pack(torch.zeros(8) + 1)
        calls.taken()
        del handle
        step.quiet = True
        step.unpack(other)
        self.assertEqual([("load", 2)], calls.taken())
        step.unpack(other)
        self.assertEqual([], calls.taken())
        step.quiet = False
        with _step.InGroup(step, "i"):
            again = step.pack(x)
            self.assertEqual(1, again.record.id)
            step.unpack(other)
            self.assertEqual([], calls.taken())
        self.assertEqual([("save", "i", (1, 32, False, False)), ("release", 1)], calls.taken())
        step.unpack(again)
        self.assertEqual([("load", 3)], calls.taken())
        with _step.InGroup(step, "j"):
            step.pack(torch.zeros(8) + 1)
        self.assertEqual([("save", "j", (3, 32, False, False))], calls.taken())
        y = torch.zeros(8) + 1
        for id in (4, 5):  # the library forgot the first
            with _step.InGroup(step, "k"):
                handle = step.pack(y)
            self.assertEqual(id, handle.record.id)
            del handle
            step.release_dead()

    def test_errors(self):
        """What the library raises is noted, and what the user's code raised says more."""
        step, calls = new()
        for failed in (False, True):
            step.begin_group("g", self)
            handle = step.pack(torch.zeros(8) + 1)
            calls.fail = Error("the library failed")
            if failed:
                step.end_group(self, True)
            else:
                with self.assertRaisesRegex(Error, "^the library failed$"):
                    step.end_group(self)
                step.end_group(self)
            self.assertEqual([], step.stack)
            self.assertEqual("the library failed", step.raised)
        step.end(True)
        self.assertEqual(("end", True), calls.taken()[-1])
        with self.assertRaisesRegex(Error, "needed after its step"):
            step.unpack(handle)
        step, calls = new(budget=True)
        with _step.InGroup(step, "g"):
            handle = step.pack(torch.zeros(8) + 1)
        calls.taken()
        record = handle.record
        step.provide(1, 32)
        calls.fail = Error("at its end")
        with self.assertRaisesRegex(Error, "at its end"):
            step.end(False)
        self.assertEqual(["measured", ("end", False)], calls.taken())
        self.assertEqual((None, [], {}, {}, {}), (record.memory, record.before, step.records, step.at, step.rows))
        step, calls = new(budget=True)
        step.end(True)
        self.assertEqual([("end", True)], calls.taken())  # a failed step is not measured

    def test_marks(self):
        step, calls = new()
        with _step.InGroup(step, "g"):
            handle = step.pack(torch.zeros(8) + 1)
            self.assertEqual(0, step.mark())
            self.assertEqual([("save", "g", (1, 32, False, False))], calls.taken())
        step, calls = new(budget=True)
        self.assertEqual((1, 2), (step.mark(), step.mark()))

    def test_saves_that_died(self):
        """The list of what was saved stays as short as what lives, twice over."""
        with mock.patch.object(_step, "SAVES", 8):
            step, calls = new()
            for _ in range(7):
                step.pack(torch.zeros(8))
            self.assertEqual(7, len(step.saves))
            alive = step.pack(torch.zeros(8))
            self.assertEqual(([alive], 8), ([w() for w in step.saves], step.most_saves))
            held = [step.pack(torch.zeros(8)) for _ in range(7)]
            self.assertEqual((8, 16), (len(step.saves), step.most_saves))
            step.begin_group("g", self)
            held += [step.pack(torch.zeros(8) + 1) for _ in range(8)]
            self.assertEqual((16, 32), (len(step.saves), step.most_saves))
            del held[:7]  # those that are kept; records live as long as the step may need them
            step.drop_dead_saves()
            self.assertEqual((9, 18), (len(step.saves), step.most_saves))


class Counted(unittest.TestCase):
    """Bytes that the library only counts."""

    def test_blocks(self):
        """What a block reserved is loaded when its backward pass begins, and free when the next one does."""
        for budget in (False, True):
            step, calls = new(budget=budget)
            around = lambda *calls: [*(["before"] if budget else []), *calls, *(["after"] if budget else [])]
            noted = lambda *what: [what] if budget else []
            with _step.InGroup(step, "g"):
                handle = step.pack(torch.zeros(8) + 1)
                one = step.reserve(100)
            self.assertEqual([*around(*noted("saved", 1, 32), ("save", "g", (1, 32, False, False))), *around(*noted("saved", 2, 100), ("save", "kept", (2, 100, False, True)))], calls.taken())
            two, three = step.reserve(200), step.reserve(300)
            self.assertEqual((2, 3, 4), (one, two, three))
            calls.taken()
            step.begin_backward(three, 0)
            self.assertEqual(around(("load", 4)), calls.taken())
            step.begin_backward(two, 50)
            want = [*around(("release", 4), *noted("released", 4), ("load", 3)), *around(*noted("saved", 5, 50), ("save", "kept", (5, 50, False, True))), ("load", 5)]
            self.assertEqual(want, calls.taken())
            step.begin_backward(None, 0)
            self.assertEqual(around(("release", 3), *noted("released", 3), ("release", 5), *noted("released", 5)), calls.taken())
            step.begin_backward(two, 0)  # which is free
            self.assertEqual(around(), calls.taken())
            step.unreserve(one)
            self.assertEqual(around(("release", 2), *noted("released", 2)), calls.taken())
            self.assertEqual({}, step.reserved)
            passing = step.reserve(70)
            step.passing.append(passing)
            calls.taken()
            calls.returned = [1]
            step.begin_backward(None, 0)
            self.assertEqual(around(("release", 6), *noted("released", 6)), calls.taken())
            self.assertIsNone(handle.record.memory)  # what the library returned then
            step.over = True
            step.begin_backward(None, 60)
            self.assertEqual([], calls.taken())

    def test_memory_is_returned_at_any_call(self):
        step, calls = new()
        handles = []
        for _ in range(4):
            with _step.InGroup(step, "g"):
                handles.append(step.pack(torch.zeros(8) + 1))
        with _step.InGroup(step, "dies"):
            step.pack(torch.zeros(8) + 1)
        calls.taken()
        calls.returned = [1]
        number = step.reserve(10)
        self.assertEqual([("save", "kept", (6, 10, False, True)), ("release", 5)], calls.taken())
        calls.returned = [2]
        step.begin_backward(number, 0)
        calls.returned = [3]
        with mock.patch.object(step, "reserve", lambda n: 77):
            step.begin_backward(None, 0)
            calls.returned = [4]
            step.begin_backward(None, 1)
        self.assertEqual([None] * 4, [h.record.memory for h in handles])
        self.assertEqual([77], step.ending)

    def test_calls_that_are_forgotten(self):
        """What they reserved is free at the next call, unless their backward pass began."""
        step, calls = new()
        numbers = [step.reserve(10 * i) for i in (1, 2, 3, 4)]
        tickets = [Ticket(step, [n]) for n in numbers]
        step.begin_backward(numbers[0], 0)
        step.passing.append(numbers[1])
        calls.taken()
        del tickets[:3]
        self.assertEqual([], calls.taken())  # only a note
        step.reserve(99)
        *released, saved = calls.taken()
        self.assertEqual(([("release", 2), ("release", 3)], ("save", "kept", (5, 99, False, True))), (sorted(released), saved))
        self.assertEqual(([1], [], [1, 4, 5]), (step.ending, step.passing, sorted(step.reserved)))
        step.begin_backward(None, 0)
        self.assertEqual([("release", 1)], calls.taken())
        tickets.clear()
        step.end(False)
        self.assertEqual([("release", 4), ("end", False)], calls.taken())

    def test_one_fails(self):
        """None is released twice."""
        step, calls = new()
        numbers = [step.reserve(10) for _ in range(3)]
        step.passing += numbers
        calls.taken()
        calls.fail = Error("no")
        with self.assertRaises(Error):
            step.begin_backward(None, 0)
        step.begin_backward(None, 0)
        self.assertEqual([("release", 1), ("release", 2), ("release", 3)], calls.taken())


class OfRows(unittest.TestCase):
    def rows(self, step, x, count, name="rows", alone=True):
        step.rows[x.data_ptr()] = Rows(count, x[0].numel() * 4, name, alone, Weak(storage_of(x)))

    def test_a_step(self):
        """Each tensor is a group by itself, under its own name. It is used in its berth, through one storage, which
        is released once nobody reads it."""
        step, calls = new()
        x, y, count = torch.randn(4, 4) + 0, torch.randn(4, 4) + 0, torch.tensor(2)
        self.rows(step, x, count), self.rows(step, y, count, "stays")
        with _step.InGroup(step, "g"):
            plain = step.pack(torch.zeros(8) + 1)
            one = step.pack(x)
            self.assertEqual([("save", "g", (1, 32, False, False)), ("save", "rows", (2, 64, 16, False))], calls.taken()[:2])
            two = step.pack(y)  # of a name that stays: of the group that it is in
            self.assertEqual("g", two.group.name)
        self.assertEqual([("save", "g", (3, 64, 16, False))], calls.taken())
        self.assertTrue(step.used_rows)
        berth = torch.zeros(64, dtype=torch.uint8)
        calls.berths[2] = berth.data_ptr()
        step.take_back([2])
        got, again = step.unpack(one), step.unpack(one)
        self.assertEqual([("load", 2), ("rows", 2)], calls.taken())
        self.assertEqual((berth.data_ptr(),) * 2, (got.data_ptr(), again.data_ptr()))
        self.assertEqual(storage_of(got)._cdata, storage_of(again)._cdata)
        self.assertEqual((64, torch.Size([4, 4])), (storage_of(got).nbytes(), got.shape))
        del one, again
        step.release_dead()
        self.assertEqual([], calls.taken())  # somebody reads it
        self.assertEqual([(2, [2])], list(step.dead))
        del got
        step.release_dead()
        self.assertEqual([("release", 2)], calls.taken())
        self.assertEqual({}, step.views)
        self.assertEqual(y.data_ptr(), step.unpack(two).data_ptr())

    def test_outside_of_groups(self):
        step, calls = new()
        x, count = torch.randn(4, 4) + 0, torch.tensor(2)
        self.rows(step, x, count)
        one = step.pack(x)
        self.assertEqual([("save", "rows", (1, 64, 16, False))], calls.taken())
        self.assertIs(Kept, type(step.pack(torch.zeros(8) + 1)))
        again = step.pack(x)
        self.assertEqual(1, again.record.id)
        step, calls = new()
        self.rows(step, x, count, alone=False)
        one = step.pack(x)  # a group, of all rows
        self.assertEqual([], calls.taken())
        self.assertIs(Kept, type(step.pack(torch.zeros(8) + 1)))
        self.assertEqual([("save", "rows", (1, 64, False, False))], calls.taken())

    def test_berths_of_some(self):
        """One of a dead group is read; others of it and of other groups never were."""
        step, calls = new()
        x, berth = torch.randn(4, 4) + 0, torch.zeros(64, dtype=torch.uint8)
        self.rows(step, x, torch.tensor(2))
        with _step.InGroup(step, "g"):
            plain = step.pack(torch.zeros(8) + 1)
            one = step.pack(x)
        calls.berths[2] = berth.data_ptr()
        step.take_back([2])
        got = step.unpack(one)
        calls.taken()
        self.assertFalse(step.viewed([1]))
        self.assertTrue(step.viewed([1, 2]))
        del plain
        step.release_dead()
        self.assertEqual([("release", 1)], calls.taken())
        del got
        self.assertFalse(step.viewed([1, 2]))

    def test_equal_rows(self):
        x, count = torch.randn(4, 4) + 0, torch.tensor(2)
        weak = Weak(storage_of(x))
        one = Rows(count, 16, "a", True, weak)
        self.assertTrue(one.same(Rows(count, 16, "a", True, Weak(storage_of(x)))))
        for other in (
            Rows(torch.tensor(2), 16, "a", True, weak), Rows(count, 8, "a", True, weak), Rows(count, 16, "b", True, weak),
            Rows(count, 16, "a", True, Weak(storage_of(torch.randn(4, 4)))),
        ):
            self.assertFalse(one.same(other))
        count.add_(0)
        self.assertFalse(one.same(Rows(count, 16, "a", True, weak)))

    def test_which_are_no_rows(self):
        """If not they alone are kept, if their count changed, or if another storage has the address."""
        for what in ("whole", "count", "address"):
            with self.subTest(what):
                step, calls = new()
                x, count = torch.randn(4, 4) + 0, torch.tensor(2)
                self.rows(step, x, count, alone=what != "whole")
                if what == "count":
                    count.add_(1)
                if what == "address":
                    step.rows[x.data_ptr()] = Rows(count, 16, "rows", True, Weak(storage_of(torch.zeros(4, 4))))
                with _step.InGroup(step, "g"):
                    handle = step.pack(x)
                self.assertEqual([("save", "g" if what == "address" else "rows", (1, 64, False, False))], calls.taken())
                self.assertFalse(step.used_rows)

    def test_rows_of_another_count(self):
        """Rows that only another count calls live may be gone: it is another record."""
        step, calls = new()
        x, count = torch.randn(4, 4) + 0, torch.tensor(2)
        self.rows(step, x, count)
        one = step.pack(x)
        self.rows(step, x, torch.tensor(3))
        two = step.pack(x)
        self.assertEqual((1, 2), (one.record.id, two.record.id))

    def test_what_is_held_after_the_step(self):
        step, calls = new()
        x, count = torch.randn(4, 4) + 0, torch.tensor(2)
        self.rows(step, x, count)
        calls.returned = [1]
        one = step.pack(x)
        berth = torch.zeros(64, dtype=torch.uint8)
        calls.berths[1] = berth.data_ptr()
        got = step.unpack(one)
        with self.assertRaisesRegex(Error, "a stashed tensor is still held after its step"):
            step.end(False)
        self.assertEqual((1, {}), (len(step.held), step.views))
        self.assertTrue(any_alive(step.held))
        del got, one
        self.assertFalse(any_alive(step.held))
        self.assertEqual([], step.held)
        for failed in (False, True):
            step, calls = new()
            self.rows(step, x, count)
            calls.returned = [1]
            one = step.pack(x)
            calls.berths[1] = berth.data_ptr()
            got = step.unpack(one) if failed else step.unpack(one).clone()
            step.end(failed)  # the user has an error already
            self.assertEqual(failed, bool(step.held))

    def test_held_in_a_cycle(self):
        """What only the collector has to find is not held."""
        held = [Weak(storage_of(torch.zeros(4)))]
        self.assertFalse(any_alive(held))
        cycle = [torch.zeros(4)]
        cycle.append(cycle)
        held = [Weak(storage_of(cycle[0]))]
        del cycle
        self.assertFalse(any_alive(held))


class Blocks(unittest.TestCase):
    """What a step that follows a plan tells the library of a block."""

    def follow(self, choice, saved=0, again=0, cast=Cast(), budget=False):
        step, calls = new()
        u = Unit("block", nn.Tanh(), None)
        answer = {"peak": 0}
        plan = Plan({u: choice}, {u: saved} if saved else {}, {u: again} if again else {}, {u: cast} if any(cast) else {}, answer)
        return Following(plan, CPU, 1, step), u, step, calls

    def test_what_is_counted(self):
        """What a block keeps is counted before it runs, with what autocast casts; its backward pass frees it. What a second pass
        takes is counted while it runs."""
        for choice, saved, again, cast, first in (
            (Choice(), 100, 0, Cast(), [("save", "kept", (1, 100, False, True))]),
            (Choice(), 0, 0, Cast(), []),
            (Choice(offload=True), 100, 0, Cast(), []),
            (Choice(offload=True), 100, 0, Cast(7, 0), [("save", "kept", (1, 7, False, True))]),
            (Choice(whole=True), 100, 60, Cast(), [("save", "kept", (1, 100, False, True))]),
            (Choice(whole=True), 0, 60, Cast(), []),
            (Choice(whole=True), 100, 0, Cast(7, 9), [("save", "kept", (1, 100, False, True)), ("save", "kept", (2, 9, False, True))]),
            (Choice(whole=True, offload=True), 100, 60, Cast(0, 9), [("save", "kept", (1, 9, False, True))]),
        ):
            with self.subTest(choice=str(choice), saved=saved, again=again, cast=cast):
                now, u, step, calls = self.follow(choice, saved, again, cast)
                x = leaf(4) * 2
                y = now.forward(u, u.module.forward, (x,), {})
                said = calls.taken()
                self.assertEqual(first, said[: len(first)])
                moved = [call for call in said[len(first) :]]
                self.assertEqual([("save", "block", (len(first) + 1, 16, False, False))] if choice.offload else [], moved)
                self.assertEqual([len(first)] if cast.passes else [], step.passing)
                y.sum().backward()
                kept = saved if not choice.offload else cast.stays
                want = [("release", len(first))] if cast.passes else []
                want += [("load", 1)] if kept else []
                group = len(first) + len(moved)
                want += [("save", "kept", (group + 1, again, False, True)), ("load", group + 1)] if again else []
                want += [("load", len(first) + 1)] if moved else []
                self.assertEqual(want, [call for call in calls.taken() if call[0] != "release" or call in want])
                self.assertEqual([1] * bool(kept) + [group + 1] * bool(again), step.ending)

    def test_no_backward_pass(self):
        """Nothing stays reserved if the block fails, or if nobody can ask for its gradient."""
        now, u, step, calls = self.follow(Choice(), 100)
        now.forward(u, u.module.forward, (torch.zeros(3),), {})
        self.assertEqual([("save", "kept", (1, 100, False, True)), ("release", 1)], calls.taken())
        for choice in (Choice(whole=True), Choice(whole=True, offload=True)):
            now, u, step, calls = self.follow(choice, 100, 50, Cast(3, 9))

            def fail(x):
                raise KeyError("of the block")

            with self.assertRaisesRegex(KeyError, "of the block"):
                now.forward(u, fail, (leaf(3),), {})
            self.assertEqual(([], {}, [], "release"), (step.passing, step.reserved, step.stack, calls.log[-1][0]))
            calls.fail = Error("no")
            with self.assertRaisesRegex(Error, "no"):
                now.forward(u, fail, (leaf(3),), {})
        now, u, step, calls = self.follow(Choice(), 100)
        y = now.forward(u, u.module.forward, (leaf(3),), {})
        del y
        step.reserve(5)
        self.assertIn(("release", 1), calls.taken())

    def test_elsewhere(self):
        """On another stream the library is told nothing; a block that something else recomputes is left alone."""
        now, u, step, calls = self.follow(Choice(offload=True), 100, 50, Cast(3, 9))
        with mock.patch.object(step, "on_other_stream", lambda: True):
            y = now.forward(u, u.module.forward, (leaf(3) * 2,), {})
        y.sum().backward()
        self.assertEqual([], calls.taken())
        u.left_alone = True
        now.forward(u, u.module.forward, (leaf(3) * 2,), {})
        self.assertEqual([], calls.taken())

    def test_parts_of_a_block(self):
        """A part that keeps everything is not offloaded, made lean or recomputed with its block, if the plan counts it."""
        for block, counted, own in ((Choice(offload=True), True, True), (Choice(lean=True), True, True), (Choice(whole=True, offload=True), True, False), (Choice(), True, False), (Choice(offload=True), False, False)):
            outer = Unit("block", nn.Tanh(), None)
            part = Unit("part", nn.Tanh(), outer)
            plan = Plan({outer: block}, {part: 5} if counted else {}, {}, {}, {})
            now, packed = Following(plan, CPU, 1, None), []
            _again.state.lean = marker = object()
            try:
                with _again.hooks(lambda t: packed.append(t), lambda t: t):
                    now.forward(part, lambda x: self.assertIs(None if own else marker, _again.state.lean) or x.tanh(), (leaf(3),), {})
                self.assertIs(marker, _again.state.lean)
            finally:
                _again.state.lean = None
            self.assertEqual(0 if own else 1, len(packed))

    def test_who_is_wrapped(self):
        """What a plan needs: blocks that it changes, all that it counts if it offloads, parts of blocks that it changes,
        cheap modules in those. Everything else is as it was."""
        model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(3))
        rt = mock.Mock(_now=None)
        units = Units(rt)
        us = [Unit(str(i), m, None) for i, m in enumerate(model)]
        part = Unit("part", model[0][0], us[0])
        units.list, units.cheap = [*us, part], [m[1] for m in model]
        wrapped = lambda: sorted(name for name, m in model.named_modules() if "forward" in m.__dict__)
        plan = lambda choices, saved=(): Plan(choices, dict.fromkeys(saved, 1), {}, {}, {})
        for plans, want in (
            ([None], []),
            ([plan({us[1]: Choice(whole=True)}, us)], ["1"]),
            ([plan({us[1]: Choice(lean=True)}, us)], ["1", "1.1"]),
            ([plan({us[1]: Choice(offload=True)}, us)], ["0", "1", "2"]),
            ([plan({us[0]: Choice(whole=True)}, [part])], ["0", "0.0"]),
            ([plan({us[1]: Choice(whole=True)}, [part])], ["1"]),
            ([plan({us[1]: Choice(whole=True)}), None, plan({us[2]: Choice(lean=True)})], ["1", "1.1", "2", "2.1"]),
            ([], []),
        ):
            units.rewrap(plans)
            self.assertEqual(want, wrapped())
        us[1].not_cheap.add(model[1][1])
        units.wrap_all()
        self.assertEqual(["0", "0.0", "0.1", "1", "2", "2.1"], wrapped())
        units.forget(nn.ModuleList([model[0]]))
        self.assertEqual(([], us[1:], [model[1][1], model[2][1]]), (wrapped(), units.list, units.cheap))
        units.forget(None)
        self.assertTrue(units.list)

    def test_times(self):
        """The shortest second pass of a unit, and all of its cheap parts; those inside of others are counted once."""
        passes, now = Passes(CPU), iter(range(100))
        a, b = Unit("a", nn.Tanh(), None), Unit("b", nn.Tanh(), None)
        stamps = [0.0, 5.0, 6.0, 8.0, 10.0, 13.0, 20.0, 21.0]
        with mock.patch("time.perf_counter", side_effect=stamps):
            for u in (a, a, b):
                passes.timed(u)(lambda: None)
            inner = lambda: passes.cheap(a)("inner", lambda: 3)
            self.assertEqual(3, passes.cheap(a)("norm", inner))
        with mock.patch("time.perf_counter", side_effect=[30.0, 32.0, 40.0, 40.0]):
            passes.cheap(a)("norm", lambda: None)
            with self.assertRaises(KeyError):
                passes.cheap(b)("act", lambda: {}[0])
        self.assertFalse(passes._inside)
        self.assertEqual(({a: 2 * 10**9, b: 3 * 10**9}, {a: {"norm": 3 * 10**9}, b: {"act": 1}}, float("inf")), passes.read())


class Records(unittest.TestCase):
    def test_kept(self):
        """A leaf stays itself, so that its gradient is its own. Anything else has no history, which would be a cycle."""
        x = leaf(3)
        y = x * 2
        self.assertIs(x, Kept(x, None).tensor)
        kept = Kept(y, None)
        self.assertEqual((None, y.data_ptr(), 0), (kept.tensor.grad_fn, kept.tensor.data_ptr(), kept.version))

    def test_weak(self):
        """It frees what names the storage, and not the storage."""
        storage, freed = storage_of(torch.zeros(4)), []
        weak = Weak(storage, freed.append)
        of = weak.of
        self.assertEqual(storage._cdata, weak.storage()._cdata)
        del weak
        self.assertEqual([of], freed)
        torch.UntypedStorage._free_weak_ref(of)

    def test_memory_of_a_device(self):
        """PyTorch is given the address and the size, as bytes that may be written."""
        given = []
        with mock.patch.object(torch, "as_tensor", lambda memory, device: given.append((memory.__cuda_array_interface__, device)) or torch.zeros(4)):
            storage_at(4096, 100, torch.device("cuda", 1))
        self.assertEqual([({"shape": (100,), "typestr": "|u1", "data": (4096, False), "version": 2}, torch.device("cuda", 1))], given)


@dataclasses.dataclass
class Out:
    loss: object
    hidden: object = None


class FirstMade(unittest.TestCase):
    def test_anywhere(self):
        x = leaf(3)
        y, z = x * 2, x * 3
        for out, want in (
            (y, y), (x, None), (None, None), ((x, y, z), y), ([None, [x, (z,)]], z), ({"a": 1, "b": {"c": y}}, y),
            (Out(None, z), z), (Out(x), None), (Out((x, y), z), y), ("text", None), ({"a": x}, None), ((), None),
        ):
            self.assertIs(want, first_made(out))


if __name__ == "__main__":
    unittest.main()
