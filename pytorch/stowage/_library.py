"""The C interface (stowage.h) through ctypes: the library, its structures and codes.

Calls that may ask for memory keep the GIL (PyDLL): they take microseconds and call back on
the same thread. All other calls release it: they may wait for the device, which may wait
for work that another thread has yet to issue, or for another thread's call that is asking
for memory. Nothing here knows tensors.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import struct
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, Callable, Container, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ._errors import Error, Overflow, TooSmall

ABI = 4
IDS = 510
OK, OVERFLOW, TOO_SMALL = 0, 4, 5

# id, address, bytes, rows, row_bytes, stay
Storage = Tuple[int, int, int, int, int, int]
_STORAGE = struct.Struct("=6Q")
_NONE: List[int] = []

Provide = ctypes.CFUNCTYPE(c_uint64, c_void_p, c_uint64, c_uint64)


class Usage(NamedTuple):
    """What the library holds, in bytes; stowage.h documents the fields."""

    saved: int
    rows: int
    own: int
    limit: int
    least: int
    recording: int


class _Ids(ctypes.Structure):
    _fields_ = [("count", c_uint64), ("more", c_uint64), ("id", c_uint64 * IDS)]


class _Held(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in Usage._fields]


_SIGNATURES: Dict[str, List[Any]] = {
    "stowage_open": [c_char_p, Provide, c_void_p, POINTER(c_uint64)],
    "stowage_close": [c_uint64],
    "stowage_begin": [c_uint64, c_char_p, c_uint64],
    "stowage_end": [c_uint64, c_int, POINTER(_Ids)],
    "stowage_save": [c_uint64, c_char_p, c_uint64, c_void_p, POINTER(c_uint64), POINTER(_Ids)],
    "stowage_load": [c_uint64, c_uint64, POINTER(_Ids), POINTER(_Ids)],
    "stowage_rows": [c_uint64, c_uint64, POINTER(c_uint64)],
    "stowage_release": [c_uint64, c_uint64, POINTER(_Ids)],
    "stowage_more": [c_uint64, POINTER(_Ids)],
    "stowage_limit": [c_uint64, c_uint64],
    "stowage_usage": [c_uint64, POINTER(_Held)],
    "stowage_check": [c_uint64, c_uint64],
    "stowage_stats": [c_uint64, c_void_p, c_size_t, POINTER(c_size_t)],
    "stowage_choose": [c_uint64, c_char_p, c_void_p, c_size_t, POINTER(c_size_t)],
    "stowage_gpu": [c_char_p, c_void_p, c_size_t, POINTER(c_size_t)],
    "stowage_trace": [c_uint64, c_char_p],
}


# These may ask for memory and are short; a step makes one of these calls at a time.
_WITH_GIL = ("stowage_save", "stowage_load", "stowage_release", "stowage_rows", "stowage_usage")


def path() -> str:
    """Returns STOWAGE_LIBRARY, or the library of the wheel."""
    given = os.environ.get("STOWAGE_LIBRARY")
    return given or str(pathlib.Path(__file__).with_name("libstowage.so"))


def _open_library() -> ctypes.PyDLL:
    where = path()
    try:
        so = ctypes.PyDLL(where)
    except OSError as e:
        raise Error(f"cannot load the library ({e}); build it with `make wheel`, or set STOWAGE_LIBRARY to libstowage.so") from None
    if not hasattr(so, "stowage_abi"):
        raise Error(f"{where} is not Stowage's library; set STOWAGE_LIBRARY to libstowage.so, or build it with `make wheel`")
    so.stowage_abi.restype = c_int
    if so.stowage_abi() != ABI:
        raise Error(f"expected interface {ABI} in {where}, got {so.stowage_abi()}; install the library and this package from one version")
    so.stowage_version.restype = c_char_p
    so.stowage_error.restype = c_char_p
    free = ctypes.CDLL(where)  # the same library, called without the GIL
    for name, types in _SIGNATURES.items():
        f = getattr(so if name in _WITH_GIL else free, name)
        f.argtypes, f.restype = types, c_int
        setattr(so, name, f)
    return so


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


class Library:
    """One runtime of the library. Calls must not overlap; the caller sees to it.

    provide is called during save, load and release; the call raises what it raises.
    """

    def __init__(self, config: Dict[str, Any], provide: Callable[[int, int], int]) -> None:
        self._pid = os.getpid()
        self._so = _open_library()
        self._returned, self._held, self._number, self._usage = _Ids(), _Ids(), c_uint64(), _Held()
        self._buffer = bytearray()
        self._grow(64)
        # The callback must not hold self, which would keep it alive for ever.
        trouble: List[BaseException] = []
        self._trouble = trouble

        def call_back(_: object, storage: int, size: int) -> int:
            try:
                return provide(storage, size)
            except BaseException as e:  # exceptions must not cross the library
                trouble.append(e)
                return 0

        self._callback = Provide(call_back)
        handle = c_uint64()
        self._handle = 0
        self._check(self._so.stowage_open(json.dumps(config).encode(), self._callback, None, byref(handle)))
        self._handle = handle.value

    def _grow(self, storages: int) -> None:
        self._buffer = bytearray(_STORAGE.size * storages)
        self._storages = ctypes.addressof((ctypes.c_char * len(self._buffer)).from_buffer(self._buffer))

    def _check(self, code: int) -> None:
        if self._trouble:
            e = self._trouble[0]
            self._trouble.clear()
            raise Error(f"no memory to reload a saved tensor: {e}; lower the budget, or make the batch smaller") from e
        if code == OK:
            return
        sentence = (self._so.stowage_error() or b"").decode(errors="replace") or f"the library failed with code {code}"
        if code == TOO_SMALL:
            raise TooSmall(sentence, self.usage().least)
        raise (Overflow if code == OVERFLOW else Error)(sentence)

    def check_open(self) -> None:
        """Raises an error in a child of fork, whose copy of the library lost its threads, and
        after close()."""
        if os.getpid() != self._pid:
            raise Error("this process was forked after the runtime was opened; start processes that use stowage with multiprocessing's \"spawn\"")
        if not self._handle:
            raise Error("this runtime is closed; open another with stowage.Runtime(...)")

    def _take_returned(self) -> List[int]:
        r = self._returned
        if not r.count:
            return _NONE
        ids: List[int] = r.id[: r.count]
        while r.more:
            self._check(self._so.stowage_more(self._handle, byref(r)))
            ids += r.id[: r.count]
        return ids

    def begin(self, key: str, stream: int) -> None:
        self.check_open()
        self._check(self._so.stowage_begin(self._handle, key.encode(), stream))

    def end(self, failed: bool) -> List[int]:
        self.check_open()
        self._check(self._so.stowage_end(self._handle, failed, byref(self._returned)))
        return self._take_returned()

    def save(self, name: bytes, storages: Sequence[Storage]) -> Tuple[int, List[int]]:
        self.check_open()
        count = len(storages)
        if count * _STORAGE.size > len(self._buffer):
            self._grow(2 * count)
        at, buffer, pack = 0, self._buffer, _STORAGE.pack_into
        for s in storages:
            pack(buffer, at, *s)
            at += 48
        self._check(self._so.stowage_save(self._handle, name, count, self._storages, byref(self._number), byref(self._returned)))
        return self._number.value, self._take_returned()

    def load(self, group: int) -> Tuple[Container[int], List[int]]:
        """Returns the storages of the group that a copy may still read, and those whose memory
        is returned."""
        self.check_open()
        held = self._held
        self._check(self._so.stowage_load(self._handle, group, byref(held), byref(self._returned)))
        return _Everything() if held.more else held.id[: held.count], self._take_returned()

    def rows(self, storage: int) -> int:
        """Returns the address of a storage's berth, or 0 if it has none."""
        self.check_open()
        self._check(self._so.stowage_rows(self._handle, storage, byref(self._number)))
        return self._number.value

    def release(self, group: int) -> List[int]:
        self.check_open()
        self._check(self._so.stowage_release(self._handle, group, byref(self._returned)))
        return self._take_returned()

    def limit(self, bytes: int) -> None:
        """Changes the saved limit for the next plan and the next step."""
        self.check_open()
        self._check(self._so.stowage_limit(self._handle, bytes))

    def usage(self) -> Usage:
        self.check_open()
        u = self._usage
        self._check(self._so.stowage_usage(self._handle, byref(u)))
        return Usage(u.saved, u.rows, u.own, u.limit, u.least, u.recording)

    def check(self, stream: int) -> None:
        self.check_open()
        self._check(self._so.stowage_check(self._handle, stream))

    def stats(self) -> Dict[str, Any]:
        self.check_open()
        return self._read(self._so.stowage_stats, self._handle)

    def choose(self, request: Dict[str, Any]) -> Dict[str, Any]:
        """Returns what to do with what a described step saves; stowage.h documents both sides.
        It takes up to a second or so. It raises TooSmall if nothing keeps to the limit."""
        self.check_open()
        return self._read(self._so.stowage_choose, self._handle, json.dumps(request, separators=(",", ":")).encode())

    def gpu(self, name: str) -> Dict[str, Any]:
        """Returns the figures of a GPU by its name, or from the JSON of a file."""
        return self._read(self._so.stowage_gpu, name.encode())

    def _read(self, call: Callable[..., int], *arguments: Any) -> Dict[str, Any]:
        """Returns what a call writes as JSON."""
        capacity, need = 4096, c_size_t()
        while True:
            text = ctypes.create_string_buffer(capacity)
            self._check(call(*arguments, text, capacity, byref(need)))
            if need.value <= capacity:
                read: Dict[str, Any] = json.loads(text.value)
                return read
            capacity = need.value

    def trace(self, file: Optional[str]) -> None:
        self.check_open()
        self._check(self._so.stowage_trace(self._handle, None if file is None else os.fsencode(file)))

    def close(self) -> None:
        handle, self._handle = self._handle, 0
        if handle and os.getpid() == self._pid:
            self._check(self._so.stowage_close(handle))

    def version(self) -> str:
        return (self._so.stowage_version() or b"").decode()
