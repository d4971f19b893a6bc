"""What one step tells the library, call by call, and what it does with the answers. The library here does nothing by
itself: a case says what it returns."""

import ctypes
import threading
import unittest
import weakref
from unittest import mock

from common import DEVICE, torch
from noted import CPU, Calls, Graphed, Noted, new, release_dead
from stowage import _step
from stowage._errors import Error
from stowage._record import Handle, Kept, storage_of
from stowage._step import Step
from torch import nn


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


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
        self.assertEqual([("release", 1)], calls.taken() or release_dead(step) or calls.taken())
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

    def test_a_record_that_is_gone(self):
        """Others of its group are let go of when they are loaded all the same."""
        step, calls = new()
        with _step.InGroup(step, "g"):
            handles = [step.pack(torch.zeros(4) + i) for i in range(3)]
        del step.records[1]
        step.unpack(handles[2])
        self.assertEqual({}, step.records)

    def test_an_address_that_another_storage_has(self):
        """A record that is forgotten does not take the place of the newer one with it."""
        step, calls = new()
        with _step.InGroup(step, "g"):
            one, two = step.pack(torch.zeros(4) + 1), step.pack(torch.zeros(4) + 2)
        old, other = one.record, two.record
        at = old.address
        step.at[at] = other
        step.forget([old.id, 77])
        self.assertIs(other, step.at[at])
        step.at[at] = old
        step.forget([old.id])
        self.assertNotIn(at, step.at)

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
            release_dead(step)

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

    def test_errors_before_its_end(self):
        """The library's step is ended as a failed one, or the next could not begin. The first error says more."""
        for what, also in (("release", None), ("release", Error("neither")), ("measured", None)):
            step, calls = new(budget=True)
            with _step.InGroup(step, "g"):
                handle = step.pack(torch.zeros(8) + 1)
            record = handle.record
            if what == "release":
                del handle
                calls.fail = Error("no")
            else:
                step.whole.end = mock.Mock(side_effect=Error("no"))
            calls.taken()
            end = mock.Mock(side_effect=also)
            with mock.patch.object(calls, "end", end), self.assertRaisesRegex(Error, "^no$"):
                step.end(False)
            self.assertEqual(([mock.call(True)], True, None, {}), (end.mock_calls, step.over, record.memory, step.records))

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
