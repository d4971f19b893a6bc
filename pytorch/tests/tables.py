"""Tables of what was decided, in testdata."""

import os
import pathlib
import unittest

FOLDER = pathlib.Path(__file__).resolve().parent / "testdata"


class Table(unittest.TestCase):
    maxDiff = 2000

    def compare(self, name, lines):
        path = FOLDER / f"{name}.txt"
        if os.environ.get("STOWAGE_UPDATE"):
            path.write_text("\n".join(lines) + "\n")
        want = path.read_text().splitlines()
        for i, (a, b) in enumerate(zip(want, lines)):
            self.assertEqual(a, b, f"line {i + 1} of {path.name}")
        self.assertEqual(len(want), len(lines))
