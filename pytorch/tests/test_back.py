"""Plans that offload, and those before them, if the library needs more than their limit. SPEC S8.6."""

import unittest
from unittest import mock

from blocks import Block, one_pass, stack, train
from common import runtime
from stowage._errors import TooSmall
from stowage._measured import Choice
from stowage._planned import RECORDED
from stowage._ranks import Facts


class Back(unittest.TestCase):
    def test_back_to_a_plan_that_held(self):
        """If a larger limit was too large and no plan is found for a smaller one, the last plan that the library could follow is followed again."""
        with runtime("budget", budget="1GiB") as rt:
            model = stack(Block, 4)
            rt.attach(model)
            train(model, one_pass, RECORDED, rt)
            planner, known = rt._planner, rt._planner.keys[""]
            u = next(iter(known.measured[0].parts.values())).unit
            plans = [known.plan._replace(choices={u: choice}) for choice in (Choice(offload=True), Choice(True, offload=True))]
            for back in (True, False):
                known.plan, known.stage, known.steps, known.limit, known.lowered, known.held, known.last_resort = plans[0], "offload", 0, 9000, 0, None, False
                small = TooSmall("a limit is too small", 10**9)
                solved = [(plans[1], None), (None, small)]
                with mock.patch.object(planner, "_solve", lambda *_: solved.pop(0)):
                    for change, lacks in ((500, 0), (0, 700)):
                        facts = Facts("", None, learnt=True, change=change, lacks=lacks)
                        known.held = known.held if back else None
                        planner._advance("", known, facts, [facts])
                self.assertEqual((back, not back), (known.plan is plans[0] and known.limit == 9000, known.last_resort))
                self.assertIsNone(known.held, "it is gone back to once")


if __name__ == "__main__":
    unittest.main()
