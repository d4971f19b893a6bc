"""Records, bits, settings, the interface of the library and who holds memory, each on its own. The GPU and other libraries are played."""

import collections
import contextlib
import copy
import ctypes
import random
import types
import unittest
from unittest import mock

from common import DEVICE, same, torch
from played import GPU
from stowage import _again, _bits, _compiled, _explain, _library, _profile, _smaller, _units
from stowage._errors import Error, Overflow, TooSmall
from stowage._hooks import after_step
from stowage._record import Handle, Kept
from torch import nn

CPU = torch.device("cpu")


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all played on the CPU")


class Records(unittest.TestCase):
    """A record of a step, by itself."""

    def profile(self, least=1, **more):
        budget = mock.Mock(needs=lambda: [1, 2], readings=3)
        return _profile.Profile(CPU, mock.Mock(pack=lambda t: Kept(t, None)), set(), least, budget, {}, **more)

    def test_room(self):
        """A second pass takes a quarter more than what it makes."""
        self.assertEqual([True, False, True, True, False], [_profile.fits(*x) for x in ((0, 0), (4, 4), (4, 5), (100, 125), (100, 124))])

    def test_parts(self):
        block = _profile.Unit("block", nn.Tanh(), None)
        part = _profile.Unit("part", nn.Tanh(), block)
        self.assertEqual(([part], [], block), (block.parts, part.parts, part.parent))

    def test_numbers(self):
        """Those of storages that are gone are not given again."""
        p, seen = self.profile(), set()
        for _ in range(50):
            seen.add(p.number(_again.storage_of(torch.zeros(1000))))
        self.assertEqual((50, 50), (len(seen), len(p.numbered)))
        x = torch.zeros(3)
        weak = p.numbered[p.number(_again.storage_of(x))]
        self.assertIs(weak, p.numbered[p.number(_again.storage_of(x[1:]))])
        p.stack.append("call")
        p.close()
        self.assertEqual(([1, 2], [], {}, _again.IN_PLACE, None), (p.needs, p.stack, p.numbered, p.holder, p.step))
        with self.assertRaisesRegex(Error, "needed after its step"):
            after_step("a handle")
        self.assertIs(x, after_step(Kept(x, None)))

    def test_outside(self):
        """What is saved there is taken and given back once; what a block saved first stays, and what is small is not counted."""
        p, weight = self.profile(least=16), nn.Parameter(torch.zeros(8))
        x, small, of_block, little = torch.zeros(8), torch.zeros(3), torch.zeros(8), torch.zeros(2)
        number = lambda t: p.number(_again.storage_of(t))
        p.first[number(of_block)] = p.little[number(little)] = "call"
        held = [p.pack_outside(t) for t in (x, x[2:], small, of_block, little, weight)]
        self.assertEqual([("take", number(x), 3)], [(kind, what, mark) for (kind, what, _), mark in zip(p.ops, p.marks)])
        self.assertEqual([number(x), 0, 0, 0, 0, 0], [s for _, s in held])
        self.assertEqual({number(of_block), number(little)}, p.shared)
        self.assertEqual({number(little): "call", number(small): None}, p.little)
        for h in held[:2] * 2:
            p.unpack_outside(h)
        self.assertEqual(["take", "give"], [kind for kind, _, _ in p.ops])
        self.assertEqual(32, p.most_outside())
        p.weights.add(_again.storage_of(weight)._cdata)  # of which products save views
        self.assertEqual(0, p.pack_outside(weight[:4])[1])
        self.assertEqual(32, p.most_outside())

    def test_compiled(self):
        """Bytes that compiled blocks save beside what calls are given."""
        p = self.profile()
        compiled, plain = (mock.Mock(unit=mock.Mock(compiled=c), inputs=i) for c, i in ((True, {}), (False, {3: 9})))
        p.calls, p.first, p.bytes = [compiled, plain], {1: compiled, 2: plain, 3: compiled, 4: None}, {1: 10, 2: 20, 3: 40, 4: 80}
        self.assertEqual(10, p.in_compiled())
        self.assertEqual(0, self.profile().largest())

    def test_sizes(self):
        """A storage counts once. What is offloaded is away, and what autograd is done with is not."""
        p = self.profile()
        call = _profile.Call(p, _profile.Unit("block", nn.Tanh(), None), None, 0)
        saves = []
        away = Handle.__new__(Handle)
        away.record = mock.Mock(memory=None)
        for storage, bytes, held in ((1, 10, Kept(torch.zeros(1), None)), (2, 20, away), (2, 20, away), (3, 40, None)):
            saved = _profile.Saved(held)
            saves.append(saved)
            entry = _profile.Entry(saved)
            entry.storage, entry.bytes = storage, bytes
            call.entries.append(entry)
            call.all.append((call, len(call.entries) - 1))
        del saved, saves[3:]
        self.assertEqual((70, 20), p.sizes(call))
        self.assertIsNone(call.value(3))


class Bits(unittest.TestCase):
    def test_same(self):
        nan = torch.tensor([1.0, float("nan")])
        self.assertTrue(_bits.same(nan, nan.clone()))
        self.assertFalse(_bits.same(nan, torch.tensor([2.0, float("nan")])))
        for a, b in ((torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(2, dtype=torch.int32)), (torch.zeros(2), torch.ones(2))):
            self.assertFalse(_bits.same(a, b))
        self.assertTrue(_bits.same(torch.zeros(2, device="meta"), torch.ones(2, device="meta")))
        c = torch.randn(3, dtype=torch.complex64)
        self.assertTrue(_bits.same(c.conj(), c.conj().resolve_conj()))
        self.assertTrue(_bits.equal(c, None) and _bits.equal(c, c.clone()) and not _bits.equal(c, c + 1))

    def test_near(self):
        a = torch.tensor([1.0, 1000.0])
        digits = torch.finfo(torch.float32).eps ** 0.5
        for off, want in ((0.0, True), (0.9 * digits, True), (1.1 * digits, False)):
            self.assertEqual(want, _bits.near(a, a + torch.tensor([1000 * off, 0.0])))
        for b in (a.double(), a[:1], torch.tensor([float("nan"), 1.0])):
            self.assertFalse(_bits.near(a, b))
        self.assertFalse(_bits.near(torch.tensor([1]), torch.tensor([2])))

    def test_distance(self):
        a, b = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
        self.assertAlmostEqual(5 / 13, _bits.distance([a, b], [a * 2, b]))
        self.assertAlmostEqual(13 / 13, _bits.distance([a, b], [a * 0, b * 2]))
        self.assertEqual(float("inf"), _bits.distance([a], [b]))
        self.assertEqual(5.0, _bits.distance([a * 0], [a]))

    def test_digests(self):
        """Of any view, in pieces of any size: equal where tensors are, and different where one bit is."""
        r = random.Random(3)
        for most in (7, 64, 1 << 20):
            d = _bits.Digests(CPU, 0)
            d._most = most
            d._by = torch.randint(-(2**62), 2**62, (max(most, 256),), generator=torch.Generator().manual_seed(1))
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool):
                t = torch.randn(6, 5, 4).to(dtype)
                for v in (t, t.transpose(0, 2), t[1:, ::2], t[:, None].expand(6, 3, 5, 4), t[:, None].expand(6, 2, 5, 4), t[0, 0, 0]):
                    flat = sum((p.reshape(-1).tolist() for p in _bits.pieces(v, most)), [])
                    self.assertEqual([x for x in (v[:, :1] if v.dim() == 4 else v).reshape(-1).tolist()], flat)
                    self.assertTrue(all(p.numel() <= most for p in _bits.pieces(v, most)))
                    one, other = d.of(v), d.of(v.clone() if v.dim() != 4 else v)
                    self.assertTrue(one.same(other) and one.near(other))
                    changed = v.clone()
                    at = tuple(r.randrange(n) for n in v.shape)
                    changed[at] = ~changed[at] if dtype is torch.bool else changed[at] + 1
                    self.assertFalse(d.of(v.contiguous()).same(d.of(changed)))
                    self.assertFalse(one.same(d.of(v[None])) or one.near(d.of(v[None])))
        self.assertEqual(_bits.Digest((torch.Size([2]), torch.float32), None, None), d.of(torch.zeros(2, device="meta")))
        self.assertEqual([1 << 10, 1 << 12, 1 << 22], [_bits.Digests(CPU, n)._most for n in (0, 1 << 20, 1 << 40)])

    def test_seeds(self):
        self.assertEqual([True, True, False, False, False], [_bits.seed(t) for t in (torch.tensor(3), torch.tensor([1, 2]), torch.tensor([1, 2, 3]), torch.tensor(1.0), torch.tensor(1j))])


class Settings(unittest.TestCase):
    """How a function was compiled, and how it is compiled again."""

    def made(self, callback, dynamic=None, known=True):
        self = types.SimpleNamespace(callback=callback, _dynamic=dynamic)

        def get_compiler_config():
            return self

        code = compile("def made(): pass", "/x/" + _compiled._dynamo if known else "elsewhere.py", "exec")
        there = {}
        exec(code, there)
        made = there["made"]
        made.get_compiler_config, made._torchdynamo_orig_callable = get_compiler_config, "original"
        return made

    def wrapped(self, backend, *names):
        for name in names:
            backend = types.SimpleNamespace(**{name: backend})
        return backend

    def test_backends(self):
        backend = lambda graph, inputs: None
        new, old = "_torchdynamo_orig_backend", "_torchdynamo_orig_callable"
        for names in ((new,), (new, new), (old,), (old, new)):
            self.assertEqual((backend, True), _compiled._settings(self.made(self.wrapped(backend, *names), True)))
        for made, sentence in ((lambda: None, "how it was compiled"), (self.made(self.wrapped(backend, new), known=False), "how it was compiled"), (self.made(backend), "the backend that it was compiled with"), (self.made(self.wrapped("text", new)), "the backend")):
            with self.assertRaisesRegex(Error, sentence):
                _compiled._settings(made)
        captures = lambda graph, inputs: None
        captures.compiler_name = "cudagraphs"
        with self.assertRaisesRegex(Error, "CUDA graphs"):
            _compiled._settings(self.made(self.wrapped(captures, new)))

    def test_inductor(self):
        inductor = types.ModuleType("torch._inductor")
        for given, usual, want in (({}, True, True), ({}, False, False), ({"triton.cudagraphs": True}, False, True), ({"triton.cudagraphs": False}, True, False)):
            inductor.config = types.SimpleNamespace(triton=types.SimpleNamespace(cudagraphs=usual))
            with mock.patch.dict("sys.modules", {"torch._inductor": inductor}):
                self.assertIs(want, _compiled._captures(types.SimpleNamespace(compiler_name="inductor", config=given)))
        self.assertFalse(_compiled._captures(lambda: None))

    def test_again(self):
        """With the budget while it compiles, once for a backend and a budget, and bound as before."""
        patched, compiled = [], []

        @contextlib.contextmanager
        def patch(**what):
            patched.append(what)
            yield
            patched.append("over")

        functorch = types.ModuleType("torch._functorch")
        functorch.config = types.SimpleNamespace(activation_memory_budget=1.0, patch=patch)
        one, two = (lambda graph, inputs: patched.append((graph, inputs)) or "made"), (lambda graph, inputs: None)
        wrap = self.wrapped
        dynamo_compile = lambda f, backend, dynamic: compiled.append((f, backend, dynamic)) or "again"
        with mock.patch.dict("sys.modules", {"torch._functorch": functorch}), mock.patch.object(_compiled, "_backends", []), mock.patch.object(torch, "compile", dynamo_compile, create=True):
            self.assertEqual("again", _compiled.with_budget(self.made(wrap(one, "_torchdynamo_orig_backend"), False), 0.5))
            (f, backend, dynamic), = compiled
            self.assertEqual(("original", False), (f, dynamic))
            self.assertEqual("made", backend("graph", "inputs"))
            self.assertEqual([{"activation_memory_budget": 0.5}, ("graph", "inputs"), "over"], patched)
            self.assertIs(backend, _compiled._with(one, 0.5))
            others = [_compiled._with(one, 0.3), _compiled._with(two, 0.5)]
            self.assertEqual(3, len({id(b) for b in (backend, *others)}))
            with mock.patch.object(torch, "compile", lambda f, **_: lambda me, x: (me, x), create=True):
                bound = _compiled.with_budget(types.MethodType(self.made(wrap(one, "_torchdynamo_orig_backend")), self), 0.5)
                self.assertEqual((self, 3), bound(3))
            del functorch.config.activation_memory_budget
            with self.assertRaisesRegex(Error, "no activation_memory_budget"):
                _compiled._with(one, 0.5)

    def test_more_graphs(self):
        """As many more for each budget, once, unless the user changes the limit again; by the names that there are."""
        for names in (("recompile_limit", "accumulated_recompile_limit"), ("cache_size_limit", "accumulated_cache_size_limit")):
            config = types.SimpleNamespace(**dict(zip(names, (8, 64))))
            with mock.patch.dict("sys.modules", {"torch._dynamo.config": config}), mock.patch.object(_compiled, "_raised", {}):
                for _ in range(2):
                    _compiled.allow_more_graphs()
                    self.assertEqual([48, 384], [getattr(config, n) for n in names])
                setattr(config, names[0], 10)
                _compiled.allow_more_graphs()
                self.assertEqual([60, 384], [getattr(config, n) for n in names])
        with mock.patch.dict("sys.modules", {"torch._dynamo.config": None}):
            _compiled.allow_more_graphs()

    def test_who_calls(self):
        """A frame of torch.compile that is at work; of one that is disabled the callback is None."""
        for body, want in (("callback = print", True), ("callback = None", False), ("self = type('S', (), {'callback': print})", True), ("self = type('S', (), {'callback': None})", False), ("", False)):
            there = {"f": _compiled.in_compiled}
            exec(compile(f"def call():\n    {body or 'pass'}\n    return f()", "/x/" + _compiled._dynamo, "exec"), there)
            self.assertIs(want, there["call"]())
        self.assertFalse(_compiled.in_compiled())

    def test_forms(self):
        m = nn.Linear(2, 2)
        self.assertIsNone(_compiled.call_of(m))
        m._compiled_call_impl = print
        self.assertIs(print, _compiled.call_of(m))
        m = nn.Linear(2, 2)
        made = lambda x: x
        made._torchdynamo_orig_callable = made
        m.forward = made
        self.assertIs(made, _compiled.call_of(m))
        m.forward = types.MethodType(made, m)
        self.assertIs(m.forward, _compiled.call_of(m))
        made._torchdynamo_disable = True
        self.assertIsNone(_compiled.call_of(m))
        wrapper = nn.Identity()
        wrapper._orig_mod = nn.Linear(2, 2)
        self.assertTrue(_compiled.is_compiled(wrapper))
        self.assertEqual((nn.Linear, nn.Identity), (_compiled.kind(wrapper), _compiled.kind(nn.Identity())))

    def test_side_effects(self):
        """One more backward pass would be noticed by hooks, and by what is sharded."""
        self.assertEqual("", _smaller.side_effects(nn.Sequential(nn.Linear(2, 2))))
        m = nn.Sequential(nn.Linear(2, 2))
        m[0].register_full_backward_hook(lambda *_: None)
        self.assertEqual("it has hooks in its backward pass", _smaller.side_effects(m))
        m = nn.Sequential(nn.Linear(2, 2))
        m[0].weight.register_hook(lambda g: None)
        self.assertEqual("it has hooks in its backward pass", _smaller.side_effects(m))
        with mock.patch.object(_smaller, "is_sharded", lambda m: isinstance(m, nn.Linear)):
            self.assertEqual("it is sharded", _smaller.side_effects(nn.Sequential(nn.Linear(2, 2))))

        class Mine(nn.Parameter):
            pass

        m = nn.Linear(2, 2)
        m.weight = Mine(torch.zeros(2, 2))
        self.assertEqual("it is sharded", _smaller.side_effects(m))


class Interface(unittest.TestCase):
    """The C interface, with a library that is played."""

    def played(self, **calls):
        lib = _library.Library.__new__(_library.Library)
        lib._pid, lib._trouble, lib._handle = _library.os.getpid(), [], 5
        lib._returned, lib._held, lib._number, lib._usage = _library._Ids(), _library._Ids(), ctypes.c_uint64(), _library._Held()
        lib._buffer = bytearray()
        lib._grow(2)
        lib._so = types.SimpleNamespace(stowage_error=lambda: b"it failed", **calls)
        return lib

    @staticmethod
    def fill(ids, numbers, more=0):
        ids = getattr(ids, "_obj", ids)
        ids.count, ids.more = len(numbers), more
        for i, n in enumerate(numbers):
            ids.id[i] = n

    def test_lists_that_are_long(self):
        """More than one structure has room for."""
        rest = [[4, 5], [6]]

        def more(handle, ids):
            self.assertEqual(5, handle)
            now = rest.pop(0)
            self.fill(ids, now, len(rest))
            return 0

        def release(handle, group, ids):
            self.assertEqual((5, 8), (handle, group))
            self.fill(ids, [1, 2, 3], 3)
            return 0

        lib = self.played(stowage_release=release, stowage_more=more)
        self.assertEqual([1, 2, 3, 4, 5, 6], lib.release(8))
        lib = self.played(stowage_release=lambda handle, group, ids: 0)
        self.assertEqual([], lib.release(8))
        for many in (0, 1):
            lib = self.played(stowage_load=lambda handle, group, held, ids: self.fill(held, [7, 9], many) or 0)
            held, returned = lib.load(3)
            self.assertEqual((True, bool(many), []), (7 in held, 8 in held, returned))

    def test_storages(self):
        """Any number of them, in the order and the fields of stowage.h."""
        got = []

        def save(handle, name, count, at, number, ids):
            got[:] = [struct for struct in _library.struct.iter_unpack("=6Q", ctypes.string_at(at, 48 * count))]
            number._obj.value = 77
            self.assertEqual(b"name", name)
            return 0

        lib = self.played(stowage_save=save)
        for n in (1, 2, 3, 9):
            storages = [(i, 10 * i, 100 * i, i + 1, i + 2, i % 2) for i in range(n)]
            self.assertEqual((77, []), lib.save(b"name", storages))
            self.assertEqual(storages, got)

    def test_codes(self):
        lib = self.played(stowage_usage=lambda handle, u: setattr(u._obj, "least", 55) or 0, stowage_check=lambda handle, stream: code)
        for code, kind in ((_library.OVERFLOW, Overflow), (_library.TOO_SMALL, TooSmall), (1, Error), (9, Error)):
            with self.assertRaisesRegex(Error, "^it failed$") as raised:
                lib.check(0)
            self.assertIs(kind, type(raised.exception))
            if kind is TooSmall:
                self.assertEqual(55, raised.exception.least)
        code = 0
        lib.check(0)
        code, lib._so.stowage_error = 9, lambda: None
        with self.assertRaisesRegex(Error, "the library failed with code 9"):
            lib.check(0)
        first = MemoryError("there is none")
        lib._trouble += [first, KeyError()]
        with self.assertRaisesRegex(Error, "no memory to reload a saved tensor: there is none; lower the budget") as raised:
            lib.check(0)
        self.assertIs(first, raised.exception.__cause__)
        self.assertEqual([], lib._trouble)

    def test_text_that_is_long(self):
        text = b'{"a": "' + b"x" * 9000 + b'"}'

        def stats(handle, buffer, capacity, need):
            need._obj.value = len(text) + 1
            if capacity > len(text):
                buffer.value = text
            return 0

        self.assertEqual({"a": "x" * 9000}, self.played(stowage_stats=stats).stats())

    def test_closed_and_forked(self):
        closed = []
        lib = self.played(stowage_close=lambda handle: closed.append(handle) or 0)
        lib._pid += 1
        with self.assertRaisesRegex(Error, "forked after the runtime was opened"):
            lib.check_open()
        lib.close()
        self.assertEqual([], closed)
        lib._pid -= 1
        lib._handle = 5
        lib.close(), lib.close()
        self.assertEqual([5], closed)
        for call in (lambda: lib.begin("", 0), lambda: lib.end(False), lambda: lib.save(b"", []), lambda: lib.load(1), lambda: lib.rows(1), lambda: lib.release(1), lambda: lib.limit(1), lib.usage, lambda: lib.check(0), lib.stats, lambda: lib.choose({}), lambda: lib.trace(None)):
            with self.assertRaisesRegex(Error, "this runtime is closed"):
                call()

    def test_arguments(self):
        said = []
        note = lambda name: lambda *a: said.append((name, *(x for x in a if not hasattr(x, "_obj")))) or 0
        lib = self.played(**{f"stowage_{name}": note(name) for name in ("begin", "end", "limit", "check", "trace", "rows")})
        lib.begin("key", 7), lib.end(True), lib.limit(9), lib.check(8), lib.trace(None), lib.trace("file"), lib.rows(4)
        self.assertEqual([("begin", 5, b"key", 7), ("end", 5, True), ("limit", 5, 9), ("check", 5, 8), ("trace", 5, None), ("trace", 5, b"file"), ("rows", 5, 4)], said)

        def usage(handle, u):
            for i, name in enumerate(_library.Usage._fields):
                setattr(u._obj, name, i)
            return 0

        self.assertEqual((0, 1, 2, 3, 4, 5), self.played(stowage_usage=usage).usage())


class Holders(unittest.TestCase):
    """Who holds memory."""

    def test_parts(self):
        class Shard(torch.Tensor):
            @staticmethod
            def __new__(cls, local):
                t = torch.Tensor._make_subclass(cls, torch.zeros(1))
                t._local_tensor = local
                return t

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                raise AssertionError("its memory is that of its parts")

        class Wrapper(Shard):
            @staticmethod
            def __new__(cls, a, b):
                t = torch.Tensor._make_subclass(cls, torch.zeros(1))
                t.a, t.b = a, b
                return t

            def __tensor_flatten__(self):
                return ["a", "b"], None

        x, y = torch.zeros(3), torch.zeros(4)
        coo, csr = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
        parts = lambda t: [p.data_ptr() for p in _explain._parts(t, CPU)]
        for t, want in ((None, []), (x, [x]), (torch.zeros(2, device="meta"), []), (Shard(x), [x]), (Wrapper(x, Shard(y)), [x, y]), (coo, [coo._indices(), coo._values()]), (csr, [csr.crow_indices(), csr.col_indices(), csr.values()])):
            self.assertEqual([p.data_ptr() for p in want], parts(t))

    def test_devices(self):
        find = _explain._find_device
        with mock.patch.multiple(torch.cuda, is_initialized=lambda: False, current_device=lambda: 2):
            self.assertEqual((CPU, torch.device("meta"), CPU), (find([], None), find([nn.Linear(2, 2, device="meta")], None), find([], "cpu")))
            self.assertEqual(torch.device("cuda"), find([], "cuda"))
        with mock.patch.multiple(torch.cuda, is_initialized=lambda: True, current_device=lambda: 2):
            self.assertEqual((torch.device("cuda", 2), torch.device("cuda", 2), GPU), (find([], None), find([], "cuda"), find([], GPU)))

    def test_sizes_in_sentences(self):
        size = lambda text: _explain._size_in(text, "tried to allocate {}")
        self.assertEqual((3 << 30, 1536, 12, None), (size("Tried to allocate 3.00 GiB (GPU"), size("tried to allocate 1.5 KiB"), size("tried to allocate 12 bytes"), size("nothing")))


class Counting(unittest.TestCase):
    """State that modules keep."""

    def test_attributes(self):
        m = nn.Sequential(nn.Linear(2, 2))
        m[0].count, m[0].name, m.seen, m[0].table, m.some = 3, "x", [1], {"a": 1}, {5}
        state = _units.Attributes(m.modules())
        self.assertEqual("", state.changed())
        for change, name in ((lambda: setattr(m[0], "count", 4), "count"), (lambda: setattr(m[0], "name", "y"), "name"), (lambda: m.seen.append(2), "seen"), (lambda: m[0].table.update(b=2), "table"), (lambda: m.some.clear(), "some"), (lambda: delattr(m[0], "count"), "count")):
            change()
            self.assertEqual(name, state.changed())
            state.restore()
            self.assertEqual("", state.changed())
        self.assertEqual((3, "x", [1], {"a": 1}, {5}), (m[0].count, m[0].name, m.seen, m[0].table, m.some))
        m.some = collections.deque([1, 2], 5)
        state = _units.Attributes(m.modules())
        for change in (m.some.clear, lambda: m.some.append(3), lambda: m.some.__setitem__(0, 4)):
            change()
            state.restore()
            self.assertEqual(([1, 2], 5), ([*m.some], m.some.maxlen))
        state = _units.Attributes(m.modules())
        m.eval()  # modes are no state
        self.assertEqual("", state.changed())

    def test_batch_norms(self):
        m = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), nn.Linear(3, 3))
        want = copy.deepcopy(m.state_dict())
        mean = m[0].running_mean
        with contextlib.suppress(KeyError), _units.Uncounted(m):
            m(torch.randn(4, 3))
            self.assertIsNot(mean, m[0].running_mean)
            raise KeyError
        self.assertIs(mean, m[0].running_mean)
        for name, t in m.state_dict().items():
            self.assertTrue(same(want[name], t), name)
        m(torch.randn(4, 3))
        self.assertFalse(same(want["0.running_mean"], m[0].running_mean))
        self.assertEqual(set(m.modules()), set(_units.modules(m)))
        m.append(m[0])
        self.assertEqual(5, len(list(_units.modules(m))))


if __name__ == "__main__":
    unittest.main()
