"""What people may ask for: sizes, policies and the names of groups, checked before the
library sees them so that a mistake is explained in the words it was made in."""

from __future__ import annotations

import difflib
import re
from typing import Dict, Iterable, Mapping, Union

from ._errors import Error

Size = Union[int, str]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[_letter + "iB"] = 1024**_power
    _UNITS[_letter + "B"] = 1000**_power

CHOICES = ("keep", "offload", "stash")


def size(value: Size, what: str) -> int:
    """Bytes of 1024, "64KiB" or "1.5 GB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise Error(f"{what}={value} is negative; give bytes, or a size such as \"60GiB\"")
        if value >= 1 << 63:
            raise Error(f"{what}={value} is more than there can be; give bytes, or a size such as \"60GiB\"")
        return value
    m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*", value) if isinstance(value, str) else None
    if m is None or m[2] not in _UNITS:
        raise Error(f"{what}={value!r} is no size; give bytes, or a size such as \"60GiB\"")
    return int(float(m[1]) * _UNITS[m[2]])


def near(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name, as the end of a sentence."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def group_name(name: object) -> str:
    if not isinstance(name, str) or not name or "\0" in name:
        raise Error(f"a group cannot be called {name!r}; give a name such as \"moe_act\"")
    return name


def policy(given: Mapping[str, str]) -> Dict[str, str]:
    if not isinstance(given, Mapping):
        raise Error(f"policy={given!r} is no dictionary; give one such as {{\"moe_act\": \"offload\"}}")
    for name, choice in given.items():
        group_name(name)
        if choice == "recompute":
            raise Error(f"policy {name!r}: PyTorch recomputes by itself; call torch.utils.checkpoint.checkpoint there and leave {name!r} out")
        if choice not in CHOICES:
            raise Error(f"policy {name!r}: {choice!r} is none of {', '.join(CHOICES)}{near(str(choice), CHOICES)}")
    return dict(given)


def share(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise Error(f"{what}={value!r} is no share of rows; give a number from 0 to 1, such as 0.5")
    return float(value)


def rank(value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or len(text) > 9:
        raise Error(f"rank={value!r} is no number of a rank; give 0, 1, 2 and so on, or set RANK")
    return int(text)
