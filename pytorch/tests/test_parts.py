"""Steps that begin_step() begins and end_step() ends. SPEC S6.4."""

import gc
import threading
import unittest

from common import plain, runtime, same, stowage, torch, under
from stowage._record import Handle
from zoo import CASES, leaf


class Parts(unittest.TestCase):
    def tearDown(self):
        gc.collect()
        self.assertEqual([], [o for o in gc.get_objects() if isinstance(o, Handle)])

    def test_same_as_one_block(self):
        case = CASES["shared_storage"]
        for kind in ("offload", "limit", "budget", "fake-1"):
            with self.subTest(kind), runtime(kind) as rt:
                for _ in range(3):
                    torch.manual_seed(1)
                    rt.begin_step("k")
                    got = case(rt.group)
                    rt.end_step()
                    for a, b in zip(plain(case), got):
                        self.assertTrue(same(a, b))

    def test_nothing_is_packed_after_the_end(self):
        for error in (None, ValueError("no")):
            with self.subTest(error=error), runtime("offload") as rt:
                rt.begin_step()
                with rt.group("a"):
                    y = leaf(8, 8).exp().sin().sum()
                y.backward()
                rt.end_step(error)
                before = rt.stats()["steps"]
                leaf(8, 8).sin().sum().backward()  # outside of the step, and by itself
                self.assertEqual(1, before)
                under(rt, CASES["shared_storage"])
                self.assertEqual(2, rt.stats()["steps"])

    def test_abandoned(self):
        with runtime("offload") as rt:
            rt.begin_step()
            with rt.group("a"):
                y = leaf(8, 8).exp().sin().sum()
            rt.end_step(ValueError("no"))
            with self.assertRaisesRegex(RuntimeError, "after its step"):
                y.backward()
            under(rt, CASES["shared_storage"])

    def test_a_better_error_replaces_the_one_that_is_given(self):
        """PyTorch 1.13 turns what a hook raises into a plain RuntimeError."""
        with runtime("offload") as rt:
            rt.begin_step()
            rt._step.raised = "what really happened"
            with self.assertRaisesRegex(stowage.Error, "what really happened"):
                rt.end_step(RuntimeError("nothing is known"))
            under(rt, CASES["shared_storage"])

    def test_wrong_use(self):
        with runtime("offload") as rt:
            with self.assertRaisesRegex(stowage.Error, "call begin_step"):
                rt.end_step()
            with rt.step(), self.assertRaisesRegex(stowage.Error, "call begin_step"):
                rt.end_step()
            with rt.step(), self.assertRaisesRegex(stowage.Error, "a step is under way"):
                rt.begin_step()
            rt.begin_step()
            with self.assertRaisesRegex(stowage.Error, "a step is under way"):
                rt.begin_step()
            raised = []

            def end():
                try:
                    rt.end_step()
                except stowage.Error as e:
                    raised.append(str(e))

            thread = threading.Thread(target=end)
            thread.start()
            thread.join()
            self.assertIn("another thread", raised[0])
            rt.end_step()

    def test_close_ends_it(self):
        with runtime("offload") as rt:
            rt.begin_step()
            with rt.group("a"):
                y = leaf(8, 8).exp().sin().sum()
        del y
        z = leaf(8, 8)
        z.sin().sum().backward()  # passes through: no hook of the step is left
        with runtime("offload") as rt:
            under(rt, CASES["shared_storage"])


if __name__ == "__main__":
    unittest.main()
