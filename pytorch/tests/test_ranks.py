"""Plans of several ranks: they recompute the same blocks, whatever their budgets and speeds, and
none waits for another that failed. SPEC S8.6."""

import unittest
from unittest import mock

from common import DEVICE, runtime, stowage, torch
from launch import FSDP2, run_ranks
from stowage import _planned, _ranks


@unittest.skipUnless(DEVICE == "cpu", "ranks of this test compute on the CPU")
class Ranks(unittest.TestCase):
    def check(self, case, lines=1):
        for said in run_ranks(self, "ranks_planned.py", case, 2):
            self.assertEqual(lines, said.count(": equal"), said)

    def test_results_are_those_of_steps_without_it(self):
        self.check("budgets,speeds,accumulation,collectives,alone", 7)

    def test_buffers_that_are_broadcast(self):
        self.check("broadcasts", 3)

    def test_failures_and_disagreement(self):
        self.check("too_small,keys,rows,again,unequal", 10)

    @unittest.skipUnless(FSDP2, "this PyTorch has no fully_shard, or none for the CPU")
    def test_fsdp2(self):
        self.check("fsdp", 6)


class Setting(unittest.TestCase):
    def test_wrong_values(self):
        for given in (3, "all", [0, 1], torch):
            with self.subTest(given=given), self.assertRaisesRegex(stowage.Error, "^ranks: expected True, False or a process group"):
                stowage.Runtime(budget="1GiB", device=DEVICE, ranks=given, library=self.fail)  # nothing is opened

    def test_own_errors(self):
        """A rank raises its own error, and not a sentence about it."""
        own = ArithmeticError("mine")
        with self.assertRaises(ArithmeticError) as raised:
            _ranks.Ranks(False, (), torch.device("cpu")).fail([_ranks.failure_of(own)], own)
        self.assertIs(own, raised.exception)

    def test_models_that_decide(self):
        """Those that are attached now, and not those that were."""
        first, second, seen = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), []
        found = lambda setting, models, device: seen.append(list(models)) or mock.Mock(several=False, count=1)
        with runtime("budget") as rt, mock.patch.object(_planned, "Ranks", found):
            ask = lambda: [rt._planner.ranks for _ in range(2)]
            ask()
            attached = rt.attach(first)
            ask()
            rt.attach(second)
            ask()
            attached.detach()
            ask()
        self.assertEqual([[], [first], [first, second], [second]], seen)

    def test_without_a_process_group(self):
        model = torch.nn.Linear(4, 4)
        for given in (None, False):
            with runtime("budget", ranks=given) as rt:
                rt.attach(model)
                with rt.step():
                    model(torch.randn(4, 4)).sum().backward()
        with runtime("budget", ranks=True) as rt, self.assertRaisesRegex(stowage.Error, "there is no process group; call"):
            with rt.step():
                pass


if __name__ == "__main__":
    unittest.main()
