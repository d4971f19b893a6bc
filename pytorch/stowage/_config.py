"""Arguments: sizes, policies and names of groups. They are checked before the library sees
them, so that an error uses the words of the caller."""

from __future__ import annotations

import difflib
import re
from typing import Any, Dict, Iterable, List, Mapping, Union

import torch

from ._errors import Error

Size = Union[int, str]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[_letter] = _UNITS[_letter + "IB"] = 1024**_power
    _UNITS[_letter + "B"] = 1000**_power

CHOICES = ("keep", "offload", "stash")


def size(value: Size, what: str) -> int:
    """Returns the bytes of a size such as 1024, "64KiB", "1.5 GB" or "60G", which means 60GiB."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise Error(f"expected a size as {what}, got {value}, which is negative")
        if value >= 1 << 63:
            raise Error(f"expected a size as {what}, got {value}, which is too large")
        return value
    m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?(?:i?B)?)\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    if m is None or m[2].upper() not in _UNITS:
        raise Error(f"expected {what} in bytes or as a size such as \"60GiB\", got {value!r}")
    n = float(m[1]) * _UNITS[m[2].upper()]  # perhaps infinite
    if n >= 1 << 63:
        raise Error(f"expected a size as {what}, got {value!r}, which is too large")
    return int(n)


def near(name: str, known: Iterable[str]) -> str:
    """Returns a hint for a misspelt name, as the end of a sentence."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def switch(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise Error(f"expected True or False as {what}, got {value!r}")
    return value


def patterns(value: object, what: str) -> List[str]:
    """Returns patterns of names."""
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(p, str) for p in value):
        raise Error(f"{what}: expected a list of patterns, got {value!r}; give {what}={[value] if isinstance(value, str) else ['layers.0*']!r}")
    return list(value)


def is_text(value: object) -> bool:
    """Reports whether a value is a string that the library can be told."""
    if not isinstance(value, str) or "\0" in value or "\x02" in value:  # which has a meaning there
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a character
        return False
    return True


def group_name(name: Any) -> str:
    if not name or not is_text(name):
        raise Error(f"expected the name of a group such as \"moe_act\", got {name!r}")
    return str(name)


def tensors(value: Any, what: str) -> List[torch.Tensor]:
    """Returns tensors of a list, or of whatever yields them."""
    given = list(value) if isinstance(value, Iterable) and not isinstance(value, torch.Tensor) else [None]
    if not all(isinstance(t, torch.Tensor) for t in given):
        raise Error(f"{what}: expected a list of tensors as restore, got {type(value).__name__}; give those that the step changes, such as restore=[count]")
    return given


def policy(given: Mapping[str, str]) -> Dict[str, str]:
    if not isinstance(given, Mapping):
        raise Error(f"expected a dictionary as policy, such as {{\"moe_act\": \"offload\"}}, got {given!r}")
    for name, choice in given.items():
        group_name(name)
        if choice == "recompute":
            raise Error(f"policy {name!r}: the runtime does not recompute; call torch.utils.checkpoint.checkpoint there and remove {name!r}")
        if choice not in CHOICES:
            raise Error(f"policy {name!r}: expected one of {', '.join(CHOICES)}, got {choice!r}{near(str(choice), CHOICES)}")
    return dict(given)


def share(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise Error(f"expected {what} as a share of rows from 0 to 1, such as 0.5, got {value!r}")
    return float(value)


def rank(value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or len(text) > 9:
        raise Error(f"expected rank as 0, 1, 2 and so on, got {value!r}; correct it, or set RANK")
    return int(text)
