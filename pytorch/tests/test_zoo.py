"""Gradients are equal bit for bit, whatever moved. SPEC S6.4."""

import unittest

from common import plain, runtime, same, torch, under
from zoo import CASES

KINDS = ["offload", "keep", "limit"] + [f"fake-{i}" for i in range(6)]


class Zoo(unittest.TestCase):
    def test_every_case_under_every_library(self):
        wanted = {name: plain(case) for name, case in CASES.items()}
        for kind in KINDS:
            with runtime(kind) as rt:
                for turn in range(3):  # the first step of a key is recorded, later ones are planned
                    for name, case in CASES.items():
                        with self.subTest(case=name, kind=kind, turn=turn):
                            for a, b in zip(wanted[name], under(rt, case, key=name), strict=True):
                                self.assertTrue(same(a, b))

    def test_the_comparison_sees_one_bit(self):
        t = torch.tensor([1.0, 2.0])
        self.assertTrue(same(t, t.clone()))
        self.assertFalse(same(t, torch.tensor([1.0, 2.0000002])))
        self.assertFalse(same(torch.tensor(0.0), torch.tensor(-0.0)))

    def test_things_do_move(self):
        """Without this, a runtime that passes everything through would do well above."""
        moved = set()
        with runtime("offload") as rt:
            for name, case in CASES.items():
                under(rt, case, key=name), under(rt, case, key=name)
                if rt.stats()["summary"]["counts"]["OutBytes"] > 0:
                    moved.add(name)
        self.assertGreaterEqual(len(moved), len(CASES) - 4, f"nothing moved in {set(CASES) - moved}")


if __name__ == "__main__":
    unittest.main()
