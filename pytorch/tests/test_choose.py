"""The library's own choices for a step that is described to it. SPEC S6.4."""

import unittest

from common import stowage  # noqa: F401  finds the package
from stowage._errors import Error, TooSmall
from stowage._library import Library


def described(blocks, limit, size=1 << 20, each=1000000):
    """A step of equal blocks: forward, then backward, each block with one storage."""
    ops = [{"op": "save", "unit": i, "microbatch": 0, "storages": [i], "at": (i + 1) * each} for i in range(blocks)]
    at = blocks * each
    for i in reversed(range(blocks)):
        ops.append({"op": "load", "unit": i, "microbatch": 0, "at": at})
        at += 2 * each
        ops.append({"op": "release", "unit": i, "microbatch": 0, "at": at})
    units = [{"name": "block", "layer": i, "offload": True, "recompute_ns": each} for i in range(blocks)]
    links = {"out": 10e9, "in": 10e9}
    return {"limit": limit, "storages": [size] * blocks, "units": units, "ops": ops, "span": at, "offload": True, "recompute": True, "links": links}


class Choose(unittest.TestCase):
    def setUp(self):
        self.calls = Library({"device": "cpu"}, lambda *_: 0)
        self.addCleanup(self.calls.close)

    def test_choices(self):
        got = self.calls.choose(described(800, 800 << 20))  # the answer is longer than the first room for it
        self.assertTrue(got["nothing"])
        self.assertEqual(["keep"] * 800, got["choices"])
        got = self.calls.choose(described(24, 10 << 20))
        self.assertEqual(24, len(got["choices"]))
        self.assertIn("offload", got["choices"])
        self.assertEqual("keep", got["choices"][-1])
        self.assertLessEqual(got["peak"], 10 << 20)
        self.assertEqual(24 << 20, got["before_peak"])

    def test_a_limit_that_is_too_small(self):
        with self.assertRaises(TooSmall) as e:
            self.calls.choose(described(4, 1000))
        self.assertGreaterEqual(e.exception.least, 1 << 20)
        self.calls.choose(described(4, e.exception.least))

    def test_wrong_requests(self):
        with self.assertRaisesRegex(Error, "unknown key"):
            self.calls.choose({**described(4, 1000), "size": 1})
        self.calls.close()
        with self.assertRaisesRegex(Error, "is closed"):
            self.calls.choose(described(4, 1000))


if __name__ == "__main__":
    unittest.main()
