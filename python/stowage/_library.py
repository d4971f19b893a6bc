"""The C interface (stowage.h) by ctypes: the library, its structures and codes.

The GIL stays held during calls of a backward pass and those that ask for memory (PyDLL):
they take microseconds, and call back on the same thread. All others let go of it: they may
wait for the device, which may wait for what another thread has yet to issue, or for a call
of another thread that is lent memory just now. Nothing here knows tensors.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import struct
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, Callable, Container, Dict, List, Optional, Sequence, Tuple

from ._errors import Error, Overflow

ABI = 2
LEFT = 510
OK, OVERFLOW, FORKED = 0, 4, 3

# id, address, bytes, rows, row_bytes, stay
Storage = Tuple[int, int, int, int, int, int]
_STORAGE = struct.Struct("=6Q")
_NONE: List[int] = []

Lend = ctypes.CFUNCTYPE(c_uint64, c_void_p, c_uint64, c_uint64)


class _Left(ctypes.Structure):
    _fields_ = [("count", c_uint64), ("more", c_uint64), ("id", c_uint64 * LEFT)]


_SIGNATURES: Dict[str, List[Any]] = {
    "stowage_open": [c_char_p, Lend, c_void_p, POINTER(c_uint64)],
    "stowage_close": [c_uint64],
    "stowage_begin": [c_uint64, c_char_p, c_uint64],
    "stowage_end": [c_uint64, c_int, POINTER(_Left)],
    "stowage_save": [c_uint64, c_char_p, c_uint64, c_void_p, POINTER(c_uint64), POINTER(_Left)],
    "stowage_load": [c_uint64, c_uint64, POINTER(_Left), POINTER(_Left)],
    "stowage_rows": [c_uint64, c_uint64, POINTER(c_uint64)],
    "stowage_release": [c_uint64, c_uint64, POINTER(_Left)],
    "stowage_more": [c_uint64, POINTER(_Left)],
    "stowage_check": [c_uint64, c_uint64],
    "stowage_stats": [c_uint64, c_void_p, c_size_t, POINTER(c_size_t)],
    "stowage_trace": [c_uint64, c_char_p],
}


# These ask for memory; the step lets one of them in at a time.
_ASK = ("stowage_save", "stowage_load", "stowage_release", "stowage_rows")


def path() -> str:
    """STOWAGE_LIBRARY, or the library of the wheel."""
    given = os.environ.get("STOWAGE_LIBRARY")
    return given or str(pathlib.Path(__file__).with_name("libstowage.so"))


def _open_library() -> ctypes.PyDLL:
    where = path()
    try:
        so = ctypes.PyDLL(where)
    except OSError as e:
        raise Error(f"the library cannot be loaded ({e}); build it with `make wheel`, or set STOWAGE_LIBRARY to libstowage.so") from None
    if not hasattr(so, "stowage_abi"):
        raise Error(f"{where} is another library; set STOWAGE_LIBRARY to libstowage.so, or build it with `make wheel`")
    so.stowage_abi.restype = c_int
    if so.stowage_abi() != ABI:
        raise Error(f"{where} has interface {so.stowage_abi()} and this package wants {ABI}; install both from one version")
    so.stowage_version.restype = c_char_p
    so.stowage_error.restype = c_char_p
    free = ctypes.CDLL(where)  # the same library, called without the GIL
    for name, types in _SIGNATURES.items():
        f = getattr(so if name in _ASK else free, name)
        f.argtypes, f.restype = types, c_int
        setattr(so, name, f)
    return so


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


class Library:
    """One runtime of the library. Calls must follow each other; the caller sees to it.

    lend is called during save, load and release; what it raises is raised by the call.
    """

    def __init__(self, config: Dict[str, Any], lend: Callable[[int, int], int]) -> None:
        self._pid = os.getpid()
        self._so = _open_library()
        self._left, self._held, self._number = _Left(), _Left(), c_uint64()
        self._room = bytearray()
        self._grow(64)
        # A callback that held self would keep it for ever.
        trouble: List[BaseException] = []
        self._trouble = trouble

        def call_back(_: object, storage: int, size: int) -> int:
            try:
                return lend(storage, size)
            except BaseException as e:  # it must not cross the library; the call raises it
                trouble.append(e)
                return 0

        self._callback = Lend(call_back)
        handle = c_uint64()
        self._handle = 0
        self._must(self._so.stowage_open(json.dumps(config).encode(), self._callback, None, byref(handle)))
        self._handle = handle.value

    def _grow(self, storages: int) -> None:
        self._room = bytearray(_STORAGE.size * storages)
        self._storages = ctypes.addressof((ctypes.c_char * len(self._room)).from_buffer(self._room))

    def _must(self, code: int) -> None:
        if self._trouble:
            e = self._trouble[0]
            self._trouble.clear()
            raise Error(f"no memory for what comes back: {e}; lower what the step keeps, or the batch") from e
        if code == OK:
            return
        sentence = (self._so.stowage_error() or b"").decode(errors="replace") or f"the library failed with code {code}"
        raise (Overflow if code == OVERFLOW else Error)(sentence)

    def here(self) -> None:
        """Refuses a child of fork, whose copy of the library has lost its threads."""
        if os.getpid() != self._pid:
            raise Error("this process was forked after the runtime was opened; start processes that use stowage with multiprocessing's \"spawn\"")
        if not self._handle:
            raise Error("this runtime is closed; open another with stowage.Runtime(...)")

    def _gone(self) -> List[int]:
        left = self._left
        if not left.count:
            return _NONE
        ids = left.id[: left.count]
        while left.more:
            self._must(self._so.stowage_more(self._handle, byref(left)))
            ids += left.id[: left.count]
        return ids

    def begin(self, key: str, stream: int) -> None:
        self.here()
        self._must(self._so.stowage_begin(self._handle, key.encode(), stream))

    def end(self, failed: bool) -> List[int]:
        self.here()
        self._must(self._so.stowage_end(self._handle, failed, byref(self._left)))
        return self._gone()

    def save(self, name: bytes, storages: Sequence[Storage]) -> Tuple[int, List[int]]:
        self.here()
        count = len(storages)
        if count * _STORAGE.size > len(self._room):
            self._grow(2 * count)
        at, room, pack = 0, self._room, _STORAGE.pack_into
        for s in storages:
            pack(room, at, *s)
            at += 48
        self._must(self._so.stowage_save(self._handle, name, count, self._storages, byref(self._number), byref(self._left)))
        return self._number.value, self._gone()

    def load(self, group: int) -> Tuple[Container[int], List[int]]:
        """Storages of the group that a copy may still read, and those that were left."""
        self.here()
        held = self._held
        self._must(self._so.stowage_load(self._handle, group, byref(held), byref(self._left)))
        return _Everything() if held.more else held.id[: held.count], self._gone()

    def rows(self, storage: int) -> int:
        """Where a storage with rows is, if it was left; otherwise 0."""
        self.here()
        self._must(self._so.stowage_rows(self._handle, storage, byref(self._number)))
        return self._number.value

    def release(self, group: int) -> List[int]:
        self.here()
        self._must(self._so.stowage_release(self._handle, group, byref(self._left)))
        return self._gone()

    def check(self, stream: int) -> None:
        self.here()
        self._must(self._so.stowage_check(self._handle, stream))

    def stats(self) -> Dict[str, Any]:
        self.here()
        room, need = 4096, c_size_t()
        while True:
            text = ctypes.create_string_buffer(room)
            self._must(self._so.stowage_stats(self._handle, text, room, byref(need)))
            if need.value <= room:
                return json.loads(text.value)
            room = need.value

    def trace(self, file: Optional[str]) -> None:
        self.here()
        self._must(self._so.stowage_trace(self._handle, None if file is None else os.fsencode(file)))

    def close(self) -> None:
        handle, self._handle = self._handle, 0
        if handle and os.getpid() == self._pid:
            self._must(self._so.stowage_close(handle))

    def version(self) -> str:
        return (self._so.stowage_version() or b"").decode()
