"""When the integrations begin and end steps, with a runtime that notes what it is told."""

import unittest

from common import stowage
from stowage.integrations._steps import Steps
from torch import nn


class Noting:
    """Stands for a runtime."""

    def __init__(self):
        self.said, self._attached, self._now, self._step, self.fails = [], [], None, None, None

    def begin_step(self, key):
        self.said.append(key)
        self._now = key

    def end_step(self, error=None):
        self.said.append("end" if error is None else error)
        self._now = None
        if self.fails is not None:
            raise self.fails

    def attach(self, model, groups, optimizer):
        a = Attached(self, model, optimizer)
        self._attached.append(a)
        return a


class Attached:
    def __init__(self, runtime, model, optimizer):
        self.runtime, self.model, self.optimizer = runtime, model, optimizer

    def detach(self):
        self.runtime._attached.remove(self)


class Integration(unittest.TestCase):
    def setUp(self):
        self.runtime = Noting()
        self.steps = Steps(self.runtime, {}, None)

    def passes(self, *updates, of=None, key=""):
        for i, update in enumerate(updates):
            self.steps.pass_begins((len(updates) if of is None else of) - i, key)
            self.steps.pass_ends(update)

    def test_passes(self):
        """A step ends with the last of its passes, or before it with an update; the passes that are left are a step of their own."""
        self.passes(False, False, True)
        self.assertEqual(["3", "end"], self.runtime.said)
        self.passes(False, False)  # the update comes later
        self.assertEqual(["3", "end", "2", "end"], self.runtime.said)
        self.passes(True, False, False, key="long")
        self.assertEqual(["3 long", "end", "2 long", "end"], self.runtime.said[4:])
        self.passes(False, of=3)
        self.assertTrue(self.steps.is_open)
        self.steps.end()
        self.steps.end()
        self.assertEqual(["3", "end"], self.runtime.said[8:])
        self.assertFalse(self.steps.is_open)

    def test_abandoned(self):
        """A step that is abandoned ends once, with its error; the runtime's error counts if there is one. One that nobody misses
        ends without, and so does one of a runtime that was closed."""
        error = ValueError("x")
        self.passes(False, of=2)
        self.steps.abandon(error)
        self.steps.abandon(error)
        self.assertEqual(["2", error], self.runtime.said)
        self.runtime.fails = stowage.Error("more")
        self.passes(False, of=2)
        with self.assertRaisesRegex(stowage.Error, "more"):
            self.steps.abandon(error)
        self.assertFalse(self.steps.is_open)
        self.passes(False, of=2)
        self.steps.abandon()
        self.assertEqual("the step was abandoned", str(self.runtime.said[-1]))
        self.passes(False, of=2)
        self.runtime._now = None
        self.steps.abandon(error)
        self.assertEqual("2", self.runtime.said[-1])
        self.runtime.fails = None
        self.passes(False, True)  # the next step begins anew
        self.assertEqual(["2", "end"], self.runtime.said[-2:])

    def test_attached(self):
        """A model is attached once, and not if the user has attached it or a part of it."""
        model, other = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
        with self.assertRaisesRegex(stowage.Error, "attach the model first"):
            Steps(None, {"budget": 1}, None).pass_begins(1)
        for given in ((None, {}), (self.runtime, {"budget": 1})):
            with self.assertRaisesRegex(stowage.Error, "and not both"):
                Steps(*given, None)
        models = lambda: [(a.model, a.optimizer) for a in self.runtime._attached]
        for _ in range(2):
            self.steps.attach(model, None)
            self.assertEqual([(model, None)], models())
        first = self.runtime._attached[0]
        self.steps.attach(model, None)
        self.assertIs(first, self.runtime._attached[0])
        self.steps.attach(model, "another")
        self.assertEqual([(model, "another")], models())
        self.passes(False, of=2)
        self.steps.attach(other, None)
        self.assertEqual(([(other, None)], False), (models(), self.steps.is_open))
        self.steps.detach()
        self.assertEqual([], models())
        self.runtime.attach(model[0], None, None)
        self.steps.attach(model, None)
        self.assertEqual([(model[0], None)], models())


if __name__ == "__main__":
    unittest.main()
