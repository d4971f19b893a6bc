"""Parts of explanations on their own: names, sizes in sentences, and what of a device is known."""

import types
import unittest
import weakref
from unittest import mock

from common import DEVICE, torch
from noted import new
from stowage import _explain, _memory
from stowage._explain import _Scene
from stowage._explanation import Explanation
from stowage._record import storage_of, version_of
from stowage._step import InGroup
from torch import nn


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all on the CPU")


class Reasons(unittest.TestCase):
    def test_memory_that_ran_out(self):
        """The sentence of the exception, of a cause of it, or of what a hook raised."""
        out = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

        def caused(by, depth):
            for _ in range(depth):
                e = ValueError("other")
                e.__cause__ = by
                by = e
            return by

        for e, raised, want in (
            (out, None, str(out)), (caused(out, 1), None, str(out)), (caused(out, 7), None, str(out)), (caused(out, 8), None, ""), (ValueError(str(out)), None, ""), (RuntimeError("other"), None, ""), (None, None, ""),
            (ValueError(), "no memory to reload a saved tensor: 5 bytes", "no memory to reload a saved tensor: 5 bytes"), (out, "another sentence", str(out)), (_explain._OUT_OF_MEMORY("any words"), None, "any words"),
        ):
            self.assertEqual(want, _explain._out_of_memory(e, raised))

    def test_sizes(self):
        for text, want in (("Tried to allocate 2.00 GiB. GPU 0", 2 << 30), ("tried to allocate 512 bytes", 512), ("you tried to allocate 1.5 KiB", 1536), ("tried to allocate 3 MiB", 3 << 20), ("tried to allocate much", None)):
            self.assertEqual(want, _explain._size_in(text, "tried to allocate {}"))

    def test_names(self):
        a, b = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
        self.assertEqual(["Sequential", "0"], list(_explain._names_of([a]).values()))
        self.assertEqual(["Sequential", "Sequential.0", "Linear"], list(_explain._names_of([a, b]).values()))
        names = _explain._names_of([a])
        for place, want in ((None, "outside of groups"), (("group", None), "group"), (("group", weakref.ref(a[0])), "0"), (("group", weakref.ref(b)), "Linear"), (("group", weakref.ref(nn.Tanh())), "group")):
            self.assertEqual(want, _explain._name(place, names))


class Ledgers(unittest.TestCase):
    def test_what_has_no_memory(self):
        ledger = _explain.Ledger([(0, 50), (100, 20)], torch.device("cpu"))
        self.assertEqual(0, ledger.take("weights", [torch.empty(0), None]))
        self.assertEqual(0, sum(ledger.held.values()))
        of = lambda at: types.SimpleNamespace(data_ptr=lambda: at, nbytes=lambda: 8)
        self.assertEqual([0, 0, 20, 0, 0], [ledger.take_storage("weights", of(at)) for at in (50, 99, 119, 100, 120)])  # none behind a block, and none twice


class Scenes(unittest.TestCase):
    def test_tensors_that_cannot_be_read(self):
        scene = _Scene(None, None)
        with mock.patch.object(_explain, "Ledger") as ledger:
            ledger.return_value = mock.Mock(unread=3, held={}, counted=False, total=lambda: 0)
            scene._count(Explanation(), torch.device("cpu"), _memory.Picture())
        self.assertIn("3 tensors could not be read", scene.notes)

    def test_memory_that_is_replaced(self):
        """What the library may still read counts, beside what took its place."""
        step, _ = new()
        with InGroup(step, "g"):
            handle = step.pack(torch.zeros(8) + 1)
        handle.record.provide(storage_of(torch.zeros(8)))
        scene, out = _Scene(None, None), Explanation()
        scene.step = step
        scene._count(out, torch.device("cpu"), _memory.Picture())
        self.assertEqual((64, [64], 0), (out.held["saved"], [s.bytes for s in out.saved], out.offloaded))

    def test_what_is_given(self):
        model = nn.Linear(2, 2)
        scene = _Scene([model, None, 3], None)
        self.assertEqual(([model], [], ["expected a torch.nn.Module as model, got int; it is left out"], ""), (scene.models, scene.optimizers, scene.notes, scene.failed))
        scene = _Scene(model, (1, 2))
        self.assertEqual(([model], [1, 2], []), (scene.models, scene.optimizers, scene.notes))

    def test_an_allocator_that_cannot_be_read(self):
        """The rest is told all the same."""
        scene = _Scene(nn.Linear(2, 2), None)
        with mock.patch.object(_memory, "picture_of", side_effect=ArithmeticError("another one")):
            out = scene.explanation(lambda _: torch.device("cpu"))
        self.assertEqual(24, out.held["weights"])
        self.assertIn("the allocator cannot be read (another one); sizes are those of tensors that Python can reach", out.notes)

    def test_places_on_a_device(self):
        """As far as the allocator and the device say it."""
        for picture, unused, elsewhere in (
            (dict(), None, None), (dict(reserved=700), 600, None), (dict(reserved=700, total=1000), 600, None), (dict(reserved=700, free=200), 600, None), (dict(reserved=700, total=1000, free=200), 600, 95), (dict(reserved=700, total=800, free=200), 600, 0), (dict(total=1000, free=200), None, None),
        ):
            scene, out = _Scene(None, None), Explanation()
            out.allocated = 100
            with mock.patch.object(scene, "_own", return_value=5):
                scene._place(out, _memory.Picture(**{**picture, "largest": 3, "pending": 4}))
            self.assertEqual((unused, elsewhere, 5, 3, 4, picture.get("total"), picture.get("free")), (out.unused, out.elsewhere, out.runtime, out.largest, out.pending, out.total, out.free))

    def test_sentences_of_a_failure(self):
        for failed, counted, allocated, asked, then, notes in (
            ("", True, 100, None, None, 0), ("Tried to allocate 200 bytes (150 bytes already allocated)", True, 100, 200, 150, 1), ("Tried to allocate 200 bytes; 150 bytes is allocated by PyTorch", False, 100, 200, 150, 0),
            ("Tried to allocate 200 bytes (100 bytes already allocated)", True, 100, 200, 100, 0), ("Tried to allocate 7 bytes", True, 100, 7, 100, 0), ("Tried to allocate 7 bytes (50 bytes already allocated)", True, 100, 7, 100, 0),
            ("Tried to allocate 7 bytes (10000 bytes already allocated)", True, 9900, 7, 10000, 0), ("Tried to allocate 7 bytes (10000 bytes already allocated)", True, 9899, 7, 10000, 1),
        ):
            scene, out = _Scene(None, None), Explanation()
            scene.failed, out.counted, out.allocated = failed, counted, allocated
            scene._runs_out(out)
            self.assertEqual((bool(failed), asked, then, notes), (out.failed, out.asked, out.then, len(scene.notes)))

    def test_budgets(self):
        for least, then, want in ((None, None, (None, 5 + 60, 5 + 40 + 100 + 30)), (50, None, (65, 65, 175)), (90, 170, (90, 65, 5 + 40 + 170))):
            scene, out = _Scene(None, None), Explanation()
            scene.runtime = types.SimpleNamespace(_budget=types.SimpleNamespace(size=1000, least=lambda: least))
            out.runtime, out.held, out.free, out.unused, out.allocated, out.then = 5, {"weights": 10, "gradients": 20, "optimizer": 30, "saved": 99}, 40, 30, 100, then
            scene._budget(out, torch.device("cpu"))
            self.assertEqual((1000, *want), (out.budget, out.least, out.stays, out.most))
        scene, out = _Scene(nn.Linear(2, 2), None), Explanation()
        out.runtime, out.held = 5, {"weights": 10, "gradients": 20, "optimizer": 30}
        scene._budget(out, torch.device("cpu"))
        self.assertEqual((65 + 24, None), (out.stays, out.budget))  # with gradients to come

    def test_notes_are_added(self):
        scene, out = _Scene(None, None), Explanation()
        out.notes = ["before"]
        scene.notes = ["mine"]
        with mock.patch.object(_explain, "Explanation", return_value=out):
            got = scene.explanation(lambda _: 1 / 0)
        self.assertEqual(["before", "mine", "the rest could not be read (ZeroDivisionError: division by zero)"], got.notes)

    def test_a_step_that_fails_by_another_reason(self):
        """Its exception says nothing more, and what goes wrong here does not hide it."""
        for e, step in ((KeyError("x"), None), (KeyError("x"), types.SimpleNamespace(raised=None))):
            _explain.add_to_error(e, None, step)
            self.assertEqual(("x",), e.args)
        e = RuntimeError("DefaultCPUAllocator: not enough memory")
        with mock.patch.object(_explain, "of_runtime", side_effect=ArithmeticError):
            _explain.add_to_error(e, None, None)
        self.assertEqual(("DefaultCPUAllocator: not enough memory",), e.args)
        step = types.SimpleNamespace(raised="no memory to reload a saved tensor")
        e = RuntimeError("of a hook")
        with mock.patch.object(_explain, "of_runtime", return_value="held by") as of:
            _explain.add_to_error(e, "rt", step)
        of.assert_called_once_with("rt", step, "no memory to reload a saved tensor")
        self.assertEqual("no memory to reload a saved tensor\nheld by", step.raised)
        self.assertIn("held by", getattr(e, "__notes__", [str(e)])[0])


class Versions(unittest.TestCase):
    def test_of_tensors(self):
        x = torch.zeros(2)
        before = version_of(x)
        x.add_(1)
        self.assertEqual(before + 1, version_of(x))
        with torch.inference_mode():
            self.assertEqual(0, version_of(torch.zeros(2)))


if __name__ == "__main__":
    unittest.main()
