"""The version of this package. The binary has the same one."""

from __future__ import annotations

import pathlib

_HERE = pathlib.Path(__file__).resolve().parent


def version() -> str:
    """Returns the version that the wheel was built with, or the one of the source tree."""
    for path in (_HERE / "VERSION", _HERE.parent.parent / "internal" / "version" / "VERSION"):
        if path.is_file():
            return path.read_text().strip()
    return "unknown"
