"""Plays a caller of libstowage.so that knows nothing but stowage.h: memory is ctypes'.

Its one argument is the library. It ends with zero if everything is as the header says.
"""

import ctypes
import json
import os
import sys
import tempfile
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p

OK, USAGE, FAILED, FORKED, OVERFLOW, TOO_SMALL = 0, 1, 2, 3, 4, 5
CAPACITY, STORAGES = 510, 1 << 20


class Ids(ctypes.Structure):
    _fields_ = [("count", c_uint64), ("more", c_uint64), ("id", c_uint64 * CAPACITY)]


class Storage(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in ("id", "address", "bytes", "rows", "row_bytes", "stay")]


class Held(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in ("saved", "rows", "own", "limit", "least", "recording")]


Provide = ctypes.CFUNCTYPE(c_uint64, c_void_p, c_uint64, c_uint64)

lib = ctypes.CDLL(sys.argv[1])
lib.stowage_error.restype = c_char_p
lib.stowage_version.restype = c_char_p
for name, types in {
    "open": [c_char_p, Provide, c_void_p, POINTER(c_uint64)],
    "close": [c_uint64],
    "begin": [c_uint64, c_char_p, c_uint64],
    "end": [c_uint64, c_int, POINTER(Ids)],
    "save": [c_uint64, c_char_p, c_uint64, POINTER(Storage), POINTER(c_uint64), POINTER(Ids)],
    "load": [c_uint64, c_uint64, POINTER(Ids), POINTER(Ids)],
    "rows": [c_uint64, c_uint64, POINTER(c_uint64)],
    "release": [c_uint64, c_uint64, POINTER(Ids)],
    "more": [c_uint64, POINTER(Ids)],
    "limit": [c_uint64, c_uint64],
    "usage": [c_uint64, POINTER(Held)],
    "check": [c_uint64, c_uint64],
    "stats": [c_uint64, c_char_p, c_size_t, POINTER(c_size_t)],
    "choose": [c_uint64, c_char_p, c_char_p, c_size_t, POINTER(c_size_t)],
    "trace": [c_uint64, c_char_p],
}.items():
    f = getattr(lib, "stowage_" + name)
    f.argtypes, f.restype = types, c_int


def error():
    return lib.stowage_error().decode()


def expect(got, want, what, says=""):
    if got != want or says and says not in error():
        sys.exit(f"{what}: code {got}, want {want}; {error()!r}, want {says!r} in it")


class Caller:
    """A runtime with its memory."""

    def __init__(self, config):
        self.memory, self.all_returned, self.provided = {}, [], 0
        self.provide = Provide(self.provides)
        self.rt, self.returned = c_uint64(), Ids()
        expect(lib.stowage_open(json.dumps(config).encode(), self.provide, None, byref(self.rt)), OK, "open")

    def provides(self, _, id, size):
        if id not in self.memory:
            raise KeyError(id)  # which ctypes makes a zero of
        self.provided += 1
        block = (ctypes.c_ubyte * size)()
        self.memory[id].append(block)
        return ctypes.addressof(block)

    def frees(self):
        ids = list(self.returned.id[: self.returned.count])
        while self.returned.more:
            expect(lib.stowage_more(self.rt, byref(self.returned)), OK, "more")
            ids += self.returned.id[: self.returned.count]
        for id in ids:
            block = self.memory[id].pop(0)
            ctypes.memset(block, 0xDB, len(block))
        self.all_returned += ids

    def save(self, name, ids, size):
        storages = (Storage * len(ids))()
        for s, id in zip(storages, ids):
            block = (ctypes.c_ubyte * size)()
            ctypes.memset(block, id % 250 + 1, size)
            self.memory[id] = [block]
            s.id, s.address, s.bytes = id, ctypes.addressof(block), size
        group = c_uint64()
        expect(lib.stowage_save(self.rt, name, len(ids), storages, byref(group), byref(self.returned)), OK, "save")
        self.frees()
        return group.value

    def load(self, group, ids, size):
        held = type(self.returned)()
        expect(lib.stowage_load(self.rt, group, byref(held), byref(self.returned)), OK, "load")
        self.frees()
        for id in ids:
            if bytes(self.memory[id][-1]) != bytes([id % 250 + 1]) * size:
                sys.exit(f"storage {id} came back changed")

    def step(self, count):
        expect(lib.stowage_begin(self.rt, b"step", 0), OK, "begin")
        self.all_returned, groups = [], []
        for g in range(3):
            ids = list(range(1 + g * count, 1 + (g + 1) * count))
            groups.append((self.save(b"mlp", ids, 100), ids))
        for group, ids in reversed(groups):
            self.load(group, ids, 100)
            expect(lib.stowage_release(self.rt, group, byref(self.returned)), OK, "release")
            self.frees()
        expect(lib.stowage_end(self.rt, 0, byref(self.returned)), OK, "end")
        self.frees()
        if any(self.memory.values()):
            sys.exit("memory was not left")

    def close(self):
        expect(lib.stowage_close(self.rt), OK, "close")


def wrong(caller):
    """Wrong use is told, and does not end the process."""
    rt, returned, n = caller.rt, caller.returned, c_uint64()
    expect(lib.stowage_open(b'{"device": "cpu", "bugdet": 1}', caller.provide, None, byref(n)), USAGE, "an unknown key", "bugdet")
    expect(lib.stowage_open(None, caller.provide, None, byref(n)), USAGE, "no configuration", "without")
    expect(lib.stowage_open(b"{}", Provide(), None, byref(n)), USAGE, "no callback", "without")
    expect(lib.stowage_begin(12345, b"step", 0), USAGE, "a wrong handle", "12345 is no runtime")
    expect(lib.stowage_end(rt, 0, byref(returned)), USAGE, "end outside", "begin one first")
    expect(lib.stowage_begin(rt, b"step", 0), OK, "begin")
    expect(lib.stowage_load(rt, 99, byref(returned), byref(returned)), USAGE, "no such group", "99")
    some = (Storage * 3)()
    for count in (STORAGES + 1, 1 << 40, 1 << 62, (1 << 64) - 1):
        expect(lib.stowage_save(rt, b"mlp", count, some, byref(n), byref(returned)), USAGE, f"{count} storages", "at most 1048576")
    most = (Storage * STORAGES)()
    expect(lib.stowage_save(rt, b"mlp", STORAGES, most, byref(n), byref(returned)), USAGE, "as many as there may be, without numbers", "give an id")
    expect(lib.stowage_save(rt, b"mlp", 3, None, byref(n), byref(returned)), USAGE, "no storages", "storages is NULL")
    nowhere = ctypes.cast(1 << 20, POINTER(Storage))
    expect(lib.stowage_save(rt, b"mlp", 3, nowhere, byref(n), byref(returned)), USAGE, "storages in no memory", "right pointer and count")
    expect(lib.stowage_rows(rt, 7, byref(n)), USAGE, "no rows", "storage 7")
    expect(lib.stowage_check(rt, 0), USAGE, "check inside", "end it first")
    expect(lib.stowage_end(rt, 1, byref(returned)), OK, "end")


def nulls(caller):
    """A pointer that is missing is the caller's mistake, and is found before any work is done."""
    rt, returned, n, group = caller.rt, caller.returned, c_uint64(), c_uint64()
    expect(lib.stowage_open(b'{"device": "cpu"}', caller.provide, None, None), USAGE, "no place for the runtime", "without")
    expect(lib.stowage_begin(rt, None, 0), USAGE, "no key", "key is NULL")
    expect(lib.stowage_begin(rt, b"step", 0), OK, "begin after that")
    block = (ctypes.c_ubyte * 64)()
    storage = Storage(9, ctypes.addressof(block), 64)
    caller.memory[9] = [block]
    expect(lib.stowage_save(rt, b"mlp", 1, byref(storage), None, byref(returned)), USAGE, "no place for the number", "group is NULL")
    expect(lib.stowage_save(rt, None, 1, byref(storage), byref(group), byref(returned)), USAGE, "no name", "name is NULL")
    expect(lib.stowage_load(rt, 1, byref(Ids()), byref(returned)), USAGE, "a group of a refused save", "not one of this step")
    expect(lib.stowage_save(rt, b"mlp", 1, byref(storage), byref(group), None), OK, "save without a list")
    if group.value != 1:
        sys.exit(f"the first group has number {group.value}")
    expect(lib.stowage_load(rt, group, None, byref(returned)), USAGE, "no list of those held", "held is NULL")
    if caller.provided:
        sys.exit("a refused load asked for memory")
    expect(lib.stowage_more(rt, None), USAGE, "no list for more", "returned is NULL")
    expect(lib.stowage_more(rt, byref(returned)), OK, "more")
    if returned.id[: returned.count] != [9]:
        sys.exit(f"a save without a list returned {returned.id[:returned.count]}")
    caller.frees()
    expect(lib.stowage_load(rt, group, byref(Ids()), byref(returned)), OK, "load")
    expect(lib.stowage_rows(rt, 7, None), USAGE, "no place for the address", "address is NULL")
    expect(lib.stowage_usage(rt, None), USAGE, "no place for the usage", "held is NULL")
    expect(lib.stowage_stats(rt, None, 0, None), USAGE, "no place for the size", "need is NULL")
    text, need = ctypes.create_string_buffer(1 << 16), c_size_t()
    expect(lib.stowage_stats(rt, text, (1 << 64) - 1, byref(need)), OK, "stats with any capacity")
    json.loads(text.value)
    expect(lib.stowage_end(rt, 1, byref(returned)), OK, "end")
    caller.frees()
    caller.provided = 0


def lists():
    """Lists that are too short say how much is missing, and stowage_more has the rest."""
    caller, held, returned, count = Caller({"device": "cpu"}), Ids(), Ids(), 2 * CAPACITY + 30
    expect(lib.stowage_begin(caller.rt, b"step", 0), OK, "begin")
    ids = list(range(1, count + 1))
    group = caller.save(b"mlp", ids, 8)
    again = (Storage * count)()
    for s, id in zip(again, ids):
        s.id, s.address, s.bytes = id, 1, 8  # of one that was saved before only the id is read
    expect(lib.stowage_save(caller.rt, b"mlp", count, again, byref(c_uint64()), byref(returned)), OK, "save again")
    expect(lib.stowage_load(caller.rt, group, byref(held), byref(returned)), OK, "load")
    if (held.count, held.more) != (CAPACITY, count - CAPACITY) or returned.count or returned.more:
        sys.exit(f"a load holds {held.count} storages and {held.more} more")
    expect(lib.stowage_end(caller.rt, 0, byref(returned)), OK, "end")
    got = []
    for left in (count - CAPACITY, 30, 0):
        if returned.more != left:
            sys.exit(f"{returned.more} more are returned; want {left}")
        got += returned.id[: returned.count]
        expect(lib.stowage_more(caller.rt, byref(returned)), OK, "more")
    if sorted(got) != ids or returned.count or returned.more:
        sys.exit(f"{len(got)} storages were listed, {len(set(got))} of them different")
    caller.close()


def released():
    """A group that was released is gone, whether it was loaded, offloaded or kept."""
    for choice in ("keep", "offload"):
        for loads in (0, 1):
            caller = Caller({"device": "cpu", "policy": {"mlp": choice}})
            for _ in range(2):
                expect(lib.stowage_begin(caller.rt, b"step", 0), OK, "begin")
                groups = [caller.save(b"mlp", [i], 64) for i in range(1, 4)]
                for group in groups[:2]:
                    if loads:
                        caller.load(group, [group], 64)
                    expect(lib.stowage_release(caller.rt, group, byref(caller.returned)), OK, "release")
                    caller.frees()
                    what = f"of a group of {choice}, loaded {loads} times"
                    expect(lib.stowage_release(caller.rt, group, byref(caller.returned)), USAGE, f"a second release {what}", "was released")
                    expect(lib.stowage_load(caller.rt, group, byref(Ids()), byref(caller.returned)), USAGE, f"a load after the release {what}", "was released")
                expect(lib.stowage_end(caller.rt, 0, byref(caller.returned)), OK, "end")
                caller.frees()
                if any(caller.memory.values()):
                    sys.exit("memory was not left")
            caller.close()


def reentry():
    """A callback that calls its own runtime is told so, instead of waiting for itself; it may
    call another one."""
    other, heard = Caller({"device": "cpu", "policy": {"mlp": "offload"}}), []

    class Restless(Caller):
        def provides(self, context, id, size):
            rt, returned, held, n = self.rt, Ids(), Held(), c_uint64()
            heard.extend((
                lib.stowage_begin(rt, b"step", 0),
                lib.stowage_end(rt, 0, byref(returned)),
                lib.stowage_save(rt, b"mlp", 0, None, byref(n), byref(returned)),
                lib.stowage_load(rt, 1, byref(returned), byref(returned)),
                lib.stowage_rows(rt, 1, byref(n)),
                lib.stowage_release(rt, 1, byref(returned)),
                lib.stowage_more(rt, byref(returned)),
                lib.stowage_limit(rt, 5),
                lib.stowage_usage(rt, byref(held)),
                lib.stowage_check(rt, 0),
                lib.stowage_stats(rt, None, 0, byref(c_size_t())),
                lib.stowage_choose(rt, b"{}", None, 0, byref(c_size_t())),
                lib.stowage_trace(rt, None),
                lib.stowage_close(rt),
            ))
            if "its own runtime" not in error():
                sys.exit(f"a callback that calls its own runtime is told {error()!r}")
            other.step(2)
            return super().provides(context, id, size)

    caller = Restless({"device": "cpu", "policy": {"mlp": "offload"}})
    caller.step(3)
    if not heard or set(heard) != {USAGE}:
        sys.exit(f"calls inside of the callback: {heard}")
    caller.close()
    other.close()


def wild():
    """Memory that is not there loses the device, not the process, however large it is."""
    for size in (64, 32 << 20):
        caller, group = Caller({"device": "cpu", "policy": {"mlp": "offload"}}), c_uint64()
        expect(lib.stowage_begin(caller.rt, b"step", 0), OK, "begin")
        storage = Storage(1, 1 << 20, size)
        save = lib.stowage_save(caller.rt, b"mlp", 1, byref(storage), byref(group), byref(caller.returned))
        end = lib.stowage_end(caller.rt, 0, byref(caller.returned))
        if FAILED not in (save, end) or "memory" not in error():
            sys.exit(f"{size} bytes that are not there: save {save}, end {end}, {error()!r}")
        lib.stowage_close(caller.rt)


def many():
    """Runtimes are cheap: only the first of a device measures it."""
    all = [Caller({"device": "cpu", "policy": {"mlp": "offload"}, "host": 1 << 20}) for _ in range(300)]
    for caller in all:
        caller.step(2)
    for caller in all:
        caller.close()


def rows():
    """Live rows are where the library says, with zeros behind them; too many are told."""
    caller = Caller({"device": "cpu", "live": 0.25})
    size, at, group, count = 24 * 400, c_uint64(), c_uint64(), ctypes.c_int64()
    raw = (ctypes.c_ubyte * (size + 16))()
    block = (ctypes.c_ubyte * size).from_buffer(raw, -ctypes.addressof(raw) % 16)
    for i, (live, code) in enumerate(((90, OK), (0, OK), (300, OVERFLOW), (300, OK), (401, USAGE), (400, OVERFLOW), (400, OK))):
        # Of each key the first step: a later one knows that what is needed at once may stay.
        expect(lib.stowage_begin(caller.rt, b"rows %d" % i, 0), OK, "begin")
        ctypes.memset(block, 7, size)
        count.value = live
        storage = Storage(5, ctypes.addressof(block), size, ctypes.addressof(count), 24, 0)
        expect(lib.stowage_save(caller.rt, b"moe", 1, byref(storage), byref(group), byref(caller.returned)), OK, "save")
        if list(caller.returned.id[: caller.returned.count]) != [5]:
            sys.exit("rows were not left")
        ctypes.memset(block, 0xDB, size)
        expect(lib.stowage_load(caller.rt, group, byref(Ids()), byref(caller.returned)), OK, "load")
        expect(lib.stowage_rows(caller.rt, 5, byref(at)), OK, "rows")
        if code == OK and ctypes.string_at(at.value, size) != bytes([7]) * (24 * live) + bytes(24 * (400 - live)):
            sys.exit(f"{live} rows are not there")
        expect(lib.stowage_release(caller.rt, group, byref(caller.returned)), OK, "release")
        expect(lib.stowage_end(caller.rt, 0, byref(caller.returned)), OK, "end")
        expect(lib.stowage_check(caller.rt, 0), code, f"check of {live} rows")
    caller.close()


def limits():
    """A limit that no plan keeps to has a code of its own, and the least is told."""
    caller, held = Caller({"device": "cpu", "saved_limit": 1 << 20}), Held()
    caller.step(4)
    for limit in (650, 400):  # four storages of 100 bytes, each counted as 512, are loaded at a time
        expect(lib.stowage_limit(caller.rt, limit), OK, "limit")
        expect(lib.stowage_begin(caller.rt, b"step", 0), TOO_SMALL, f"a limit of {limit}", "too small")
        expect(lib.stowage_usage(caller.rt, byref(held)), OK, "usage")
        if held.limit != limit or held.least <= limit or held.recording or held.saved:
            sys.exit(f"a limit of {limit} bytes: {held.limit}, at least {held.least}")
    expect(lib.stowage_limit(caller.rt, held.least), OK, "limit")
    caller.step(4)
    expect(lib.stowage_limit(caller.rt, 0), USAGE, "no limit", "positive")
    caller.close()


def choices():
    """A step that the caller describes is answered with choices, or with the least limit."""
    caller, held, need = Caller({"device": "cpu"}), Held(), c_size_t()
    blocks = range(4)
    ops = [{"op": "save", "unit": i, "storages": [i], "at": 1000 * i} for i in blocks]
    for i in reversed(blocks):
        ops += [{"op": op, "unit": i, "at": 10000 - 1000 * i} for op in ("load", "release")]
    request = {
        "limit": 250, "storages": [100] * 4, "ops": ops, "span": 11000, "offload": True, "recompute": False,
        "units": [{"name": "block", "layer": i, "offload": True, "recompute_ns": 0} for i in blocks],
    }  # fmt: skip
    text = json.dumps(request).encode()
    expect(lib.stowage_choose(caller.rt, None, None, 0, byref(need)), USAGE, "no request", "request is NULL")
    expect(lib.stowage_choose(caller.rt, text, None, 0, None), USAGE, "no place for the size", "need is NULL")
    expect(lib.stowage_choose(caller.rt, b"{", None, 0, byref(need)), USAGE, "half a request", "ends too early")
    expect(lib.stowage_choose(caller.rt, text, None, 0, byref(need)), OK, "choose")
    answer = ctypes.create_string_buffer(need.value)
    expect(lib.stowage_choose(caller.rt, text, answer, need.value, byref(need)), OK, "choose")
    got = json.loads(answer.value)
    if got["choices"][0] != "offload" or got["choices"][3] != "keep" or got["peak"] > 250 or got["before_peak"] != 400 or got["nothing"]:
        sys.exit(f"four blocks of 100 bytes in 250: {got}")
    text = json.dumps({**request, "limit": 50}).encode()
    expect(lib.stowage_choose(caller.rt, text, None, 0, byref(need)), TOO_SMALL, "a limit of 50", "too small")
    expect(lib.stowage_usage(caller.rt, byref(held)), OK, "usage")
    if held.least < 100 or held.limit:
        sys.exit(f"a limit of 50 bytes: at least {held.least}")
    caller.close()


def gpus():
    """The figures of a GPU are read by name, or from their JSON."""
    need = c_size_t()
    expect(lib.stowage_gpu(None, None, 0, byref(need)), USAGE, "no GPU", "the name of a GPU")
    expect(lib.stowage_gpu(b"h100", None, 0, None), USAGE, "no place for the size", "a place")
    expect(lib.stowage_gpu(b"h1000", None, 0, byref(need)), USAGE, "a wrong name", "choose from a100")
    expect(lib.stowage_gpu(b"{}", None, 0, byref(need)), USAGE, "no figures", '"name" is missing')

    def read(gpu):
        expect(lib.stowage_gpu(gpu, None, 0, byref(need)), OK, "the size")
        text = ctypes.create_string_buffer(need.value)
        expect(lib.stowage_gpu(gpu, text, need.value, byref(need)), OK, "the figures")
        return json.loads(text.value)

    got = read(b"NVIDIA H100-80GB")
    if got["name"] != "h100" or not 80e9 < got["usable"] < got["memory"] or not 2e14 < got["products"] < 1e15 or not 5e10 < got["out"] < got["both"]:
        sys.exit(f"an H100: {got}")
    got = read(b'{"name": "mine", "memory_bytes": 1000, "usable_bytes": 900, "flops": {"bf16": 2}, "hbm": 3, "host_out": 4, "host_in": 5}')
    if (got["name"], got["usable"], got["out"], got["both"]) != ("mine", 900, 4, 9):
        sys.exit(f"figures as JSON: {got}")


def threads(caller):
    """A sentence belongs to the thread whose call failed."""
    expect(lib.stowage_begin(777, b"", 0), USAGE, "a wrong handle", "777")
    heard = []

    def other():
        heard.append(error())
        heard.append(lib.stowage_begin(888, b"", 0))
        heard.append(error())
        mine = Caller({"device": "cpu", "policy": {"mlp": "offload"}})
        for _ in range(5):
            mine.step(4)
        mine.close()
        heard.append("done")

    all = [threading.Thread(target=other) for _ in range(4)]
    for t in all:
        t.start()
    for _ in range(5):
        caller.step(4)
    for t in all:
        t.join()
    if "777" not in error() or len(heard) != 16 or heard.count("") != 4 or heard.count("done") != 4 or not any("888" in str(x) for x in heard):
        sys.exit(f"sentences of threads: {error()!r}, {heard}")


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sentences(caller):
    """The sentence of a failure takes the place of the one before."""
    config = b'{"device": "cpu", "%s": 1}' % (b"x" * 4000)

    def fail(times):
        for _ in range(times):
            lib.stowage_open(config, caller.provide, None, byref(c_uint64()))

    fail(2000)
    before = resident()
    fail(10000)
    if resident() - before > 20 << 20:  # of 40 MB of sentences
        sys.exit(f"sentences of failures take {(resident() - before) >> 20} MiB")


def fork(caller):
    child = os.fork()
    if child == 0:
        code = lib.stowage_check(caller.rt, 0)
        new = lib.stowage_open(b'{"device": "cpu"}', caller.provide, None, byref(c_uint64()))
        os._exit(0 if code == new == FORKED and "spawn" in error() and lib.stowage_version() == b"" else 1)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit("a child of fork was not turned away")


def figures(caller):
    need, text = c_size_t(), ctypes.create_string_buffer(8)
    expect(lib.stowage_stats(caller.rt, text, 8, byref(need)), OK, "stats")
    if len(text.value) != 7 or need.value < 100:
        sys.exit(f"{text.value} of {need.value} bytes")
    expect(lib.stowage_stats(caller.rt, None, 0, byref(need)), OK, "stats")
    text = ctypes.create_string_buffer(need.value)
    expect(lib.stowage_stats(caller.rt, text, need.value, byref(need)), OK, "stats")
    if json.loads(text.value)["steps"] < 5:
        sys.exit(text.value.decode())
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a.trace")
        expect(lib.stowage_trace(caller.rt, path.encode()), OK, "trace")
        caller.step(2)
        expect(lib.stowage_trace(caller.rt, None), OK, "trace")
        if os.path.getsize(path) == 0:
            sys.exit("the trace is empty")


def main():
    if lib.stowage_abi() != 4 or not lib.stowage_version():
        sys.exit("another interface")
    caller = Caller({"device": "cpu", "policy": {"mlp": "offload"}})
    wrong(caller)
    nulls(caller)
    for count in (3, 3, 700, 3):
        caller.step(count)
    if caller.provided == 0 or len(caller.all_returned) <= 9:
        sys.exit(f"{caller.provided} storages were reloaded")
    lists()
    released()
    reentry()
    wild()
    many()
    rows()
    limits()
    choices()
    gpus()
    threads(caller)
    figures(caller)
    if os.path.exists("/proc/self/statm"):
        sentences(caller)
    fork(caller)
    caller.step(3)
    caller.close()
    expect(lib.stowage_close(caller.rt), USAGE, "closed twice", "was closed")
    print("as the header says")


main()
