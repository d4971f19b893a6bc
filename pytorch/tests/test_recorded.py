"""What recorded steps find out about each block, in small cases."""

import itertools
import unittest
from unittest import mock

from blocks import Block, stack
from common import DEVICE, runtime, torch
from stowage import _profile
from stowage._sparing import check_sparingly
from test_reports import Thing

CPU = torch.device("cpu")


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


class Graphs(unittest.TestCase):
    def test_retained_by_another_pass(self):
        """A retained graph says nothing of the one that is used next."""
        models, now = [stack(Block, 2), stack(Block, 2)], [1]
        with runtime("budget", budget="64MiB") as rt, mock.patch.object(_profile, "in_backward", lambda: now[0]):
            for model in models:
                rt.attach(model)
            with rt.step():
                a, b = (model(torch.randn(5, 8)).square().mean() for model in models)
                a.backward(retain_graph=True)
                now[0] = 2
                b.backward()
            units = rt._planner.units.list
            self.assertEqual([True, True, False, False], [u.retained for u in units], [u.name for u in units])


class Sparing(unittest.TestCase):
    """Second passes that are compared by digests, with a profile that is played."""

    def check(self, saved, passes, agreed=None, room=10**6, weights=()):
        """Tries a call that saved these tensors, whose passes make those. Returns the profile, the call and what was decided."""
        passes, ticks, held = iter(passes), itertools.count(100), itertools.count(1)
        call = Thing()
        call.value = lambda i: saved[i]
        call.all = [(call, i) for i in range(len(saved))]
        p = mock.Mock(device=CPU, agreed=agreed, holding={}, again={}, dropping={}, saves={}, whole_times={}, ran=[])
        p.sizes.return_value, p.room.return_value = (800, 0), room
        p.own.side_effect = lambda call: [i not in weights for i in range(len(saved))]
        p.clock.stamp.side_effect = lambda: next(ticks)
        p.budget.pass_now.side_effect = lambda: (next(held), 0)
        figures = iter([(7, 3), (5, 1)])

        def second(call, keep=True, each=lambda t: None):
            made = next(passes)
            p.ran.append((len(made), keep))
            for t in made:
                each(t)
            return made if keep else []

        p.second = second
        p.budget.second_pass.side_effect = lambda run: (run(), *next(figures))
        check_sparingly(p, call)
        (decided,) = p.decide.call_args_list
        return p, call, decided[0][1:]

    def test_figures(self):
        a, b = torch.randn(3, 4), torch.randn(5)
        p, call, decided = self.check([a, b], [[a, b]] * 4)
        self.assertEqual((2, [], False), decided)
        self.assertEqual(((7, 3), 5), (p.again[call], p.dropping[call]))
        self.assertEqual([(1, 0), (2, 0)], p.holding[call])
        self.assertEqual(([100, 101, 102], (100, 103)), (p.saves[call], p.whole_times[call]))
        self.assertEqual([(2, True), (2, False), (2, False), (2, False)], p.ran)
        p.clock.fill.assert_called_once_with()

    def test_verdicts(self):
        a, b = torch.randn(3, 4), torch.randn(5)
        other, kind = torch.randn(3, 4), ((3, 4), torch.float32)
        near, nearer = a * (1 + 1e-6), a * (1 + 2e-6)
        for name, saved, passes, ran, decided, more in (
            ("equal", [a, b], [[a, b]] * 9, 4, (2, [], False), {}),
            ("other values", [a, b], [[other, b]] * 9, 6, (2, [kind], False), {}),
            ("other values, without room", [a, b], [[other, b]] * 9, 4, (2, [kind], False), {"room": 104}),
            ("other values, with just enough room", [a, b], [[other, b]] * 9, 6, (2, [kind], False), {"room": 105}),
            ("other values, and ranks that agree", [a, b], [[other, b]] * 9, 4, (2, [kind], False), {"agreed": set()}),
            ("near, and from pass to pass", [a, b], [[near, b]] * 2 + [[nearer, b]] * 9, 4, (2, [kind], True), {}),
            ("near, and late", [a, b], [[near, b]] * 4 + [[nearer, b]] * 9, 5, (2, [kind], True), {}),
            ("far, and from pass to pass", [a, b], [[other, b]] * 2 + [[a, b]] * 9, 6, (2, [kind], False), {}),
            ("one is near and another is far", [a, a], [[near, other]] * 2 + [[nearer, a]] * 9, 6, (2, [kind, kind], False), {}),
            ("one is near and another stays", [a, a], [[near, near]] * 2 + [[near, nearer]] * 9, 4, (2, [kind, kind], True), {}),
            ("weights do not count", [a, b], [[other, b]] * 9, 4, (2, [], False), {"weights": {0}}),
            ("seeds do not count", [a, torch.tensor([1])], [[a, torch.tensor([2])]] * 9, 4, (2, [], False), {}),
            ("gone", [None, b], [[other, b]] * 9, 4, (2, [], False), {}),
            ("fewer", [a, b], [[other]] * 9, 4, (1, [], False), {}),
            ("more", [a], [[other, b]] * 9, 4, (2, [], False), {}),
        ):
            with self.subTest(name):
                p, call, said = self.check(saved, passes, **more)
                self.assertEqual((decided, ran), (said, len(p.ran)))


if __name__ == "__main__":
    unittest.main()
