"""What modules and arguments have besides weights: all of it is had again in a second pass, and nothing of that pass stays."""

import dataclasses
import random
import types
import unittest
from unittest import mock

from common import DEVICE, torch
from stowage import _again, _before, _written
from stowage._before import DEEP, MOST, Before, Known, Numbers, Slots
from stowage._errors import Error
from stowage._surroundings import Draws
from stowage._units import LONG, Attributes
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

Space = types.SimpleNamespace


def setUpModule():
    if DEVICE != "cpu":
        raise unittest.SkipTest("it is all on the CPU")


class One:
    __slots__ = "a"


class Two(One):
    __slots__ = ("b", "c", "__weakref__")


@dataclasses.dataclass(frozen=True)
class Frozen:
    __slots__ = ("a", "b")
    a: int
    b: float


def any_number(draw):
    return draw.choice([lambda: draw.randrange(1000, 9999), draw.random, lambda: bool(draw.randrange(2)), lambda: None, lambda: f"s{draw.randrange(99)}", lambda: complex(draw.random()), lambda: b"b%d" % draw.randrange(99), lambda: torch.zeros(1), lambda: torch.float16, lambda: (1, draw.random())])()


def any_data(draw, deep, pure):
    if not deep:
        return any_number(draw)
    inner = lambda: any_data(draw, deep - 1 - draw.randrange(2) * (deep > 1), pure) if draw.random() < 0.6 else any_number(draw)
    plain = lambda: {f"n{i}": any_number(draw) for i in range(draw.randrange(1, 4))}
    kinds = [lambda: [inner() for _ in range(draw.randrange(4))], lambda: {f"k{i}": inner() for i in range(draw.randrange(4))}, lambda: {draw.randrange(99) for _ in range(draw.randrange(4))}, lambda: (inner(), inner()), lambda: Space(**plain())]
    if not pure:
        kinds += [lambda: slotted(draw), lambda: Space(x=inner(), y=inner())]
    return draw.choice(kinds)()


def slotted(draw):
    x = Two()
    x.a, x.b = any_number(draw), any_number(draw)
    return x


def attributes(x):
    return x.__dict__ if hasattr(x, "__dict__") else {name: getattr(x, name) for name in ("a", "b", "c") if hasattr(x, name)}


def seen(x):
    """Returns what is there: containers and tensors by their numbers, too."""
    if isinstance(x, (list, tuple)):
        return type(x).__name__, id(x), [seen(y) for y in x]
    if isinstance(x, dict):
        return "dict", id(x), {k: seen(y) for k, y in x.items()}
    if isinstance(x, set):
        return "set", id(x), sorted(x)
    if isinstance(x, (Space, One)):
        return type(x).__name__, id(x), {k: seen(y) for k, y in attributes(x).items()}
    return id(x) if isinstance(x, torch.Tensor) else x


def inside(x):
    """Yields all containers and objects."""
    if isinstance(x, (list, dict, set, tuple, Space, One)):
        yield x
        for y in x if isinstance(x, (list, tuple)) else x.values() if isinstance(x, dict) else attributes(x).values() if not isinstance(x, set) else ():
            yield from inside(y)


def change(draw, roots, held):
    """Changes one container or object. What it had is held, so that nothing else has its number."""
    x = draw.choice([y for root in roots for y in inside(root) if not isinstance(y, tuple)] or [[]])
    held += list(inside(x)) + [x]
    if isinstance(x, list):
        draw.choice([lambda: x.append(any_number(draw)), lambda: x and x.pop(), lambda: x.__setitem__(slice(None), [any_number(draw)] * len(x)), lambda: x.insert(0, [1]), x.clear])()
    elif isinstance(x, set):
        draw.choice([lambda: x.add(1000), x.clear, lambda: x and x.pop()])()
    elif isinstance(x, dict):
        plain = [k for k, y in x.items() if not isinstance(y, (Space, One))]
        draw.choice([lambda: x.update(new=any_number(draw)), lambda: x.update(other=[1]), lambda: plain and x.pop(plain[0]), lambda: plain and x.update({plain[-1]: any_number(draw)})])()
    else:
        plain = [k for k, y in attributes(x).items() if not isinstance(y, (Space, One))]
        draw.choice([lambda: setattr(x, "c", any_number(draw)), lambda: plain and delattr(x, plain[0]), lambda: plain and setattr(x, plain[-1], any_number(draw))])()


class Anything(unittest.TestCase):
    def test_in_modules_and_arguments(self):
        for seed in range(400):
            draw, held = random.Random(seed), []
            module, pure = nn.Linear(2, 2), seed % 2 == 0
            own = set(vars(module))
            root = {f"x{i}": any_data(draw, draw.randrange(3 if pure else 4), pure) for i in range(3)}
            if pure:
                vars(module).update(root)
                root = lambda: {k: x for k, x in vars(module).items() if k not in own}
                before = Before([module])
            else:
                given = [Space(**root), slotted(draw)]
                root = lambda: {i: x for i, x in enumerate(given)}
                before = Before((), given)
            with self.subTest(seed=seed):
                held += inside(root())
                then = seen(root())[2]
                self.assertTrue(before.same(before.modules))
                for _ in range(draw.randrange(4)):
                    change(draw, root().values(), held)
                if pure and draw.random() < 0.5:
                    module.new = any_number(draw)
                if pure and draw.random() < 0.3:
                    first = next(k for k in root())
                    if not isinstance(vars(module)[first], (Space, One)):
                        held.append(vars(module)[first])
                        delattr(module, first)
                now = seen(root())[2]
                self.assertEqual(now == then, before.same(before.modules))
                with before:
                    self.assertEqual(then, seen(root())[2])
                    for _ in range(draw.randrange(3)):
                        change(draw, root().values(), held)
                    if pure and draw.random() < 0.5:
                        module.during = any_number(draw)
                self.assertEqual(now, seen(root())[2])

    def test_equal_is_not_the_same(self):
        """A list, a tuple with one, or an object that only equals what was there."""

        class Equal:
            __hash__ = None

            def __eq__(self, other):
                return True

        for x, y in (([1, 2], [1, 2]), (([1],), ([1],)), ({"a": 1}, {"a": 1}), (Equal(), Equal()), (torch.ones(2), torch.ones(2))):
            module = nn.ReLU()
            module.x = x
            before = Before([module])
            module.x = y
            self.assertFalse(before.same([module]))
        module.x = (1, 2.0)
        before = Before([module])
        module.x = (1, 1.0 + 1)
        self.assertTrue(before.same([module]))  # which is as good

    def test_what_is_the_same(self):
        """All that a second pass may read, each changed alone."""
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh())
        first, norm, last = module
        last.register_buffer("other", torch.zeros(2))
        first.register_buffer("table", torch.zeros(2))
        first.scale, first.many, first.tensor, first.noise = 1.0, [1, {2: 3}], torch.zeros(2), random.Random(1)
        inside = [module, first, norm, last]

        def hook(*_):
            return None

        for name, act in (
            ("nothing", lambda: None), ("a number", lambda: setattr(first, "scale", 2.0)), ("what is in a list", lambda: first.many.append(1)), ("what is deeper", lambda: first.many[1].clear()),
            ("a tensor", lambda: first.tensor.add_(1)), ("another tensor", lambda: setattr(first, "tensor", torch.zeros(2))), ("a buffer", lambda: first.table.add_(1)), ("another buffer", lambda: first._buffers.update(table=torch.zeros(2))),
            ("a generator", first.noise.random), ("a hook", lambda: first.register_forward_hook(hook)), ("a hook of a list", lambda: module.register_forward_pre_hook(hook)), ("a new attribute", lambda: setattr(norm, "new", 1)), ("a running mean", lambda: norm.running_mean.add_(1)), ("a weight", lambda: first.weight.data.add_(1)),
        ):
            before = Before(inside)
            act()
            self.assertEqual(name in ("nothing", "a running mean", "a weight"), before.same(inside), name)
            self.assertEqual(name == "a tensor", before.written(), name)
            if name in ("a tensor", "a buffer"):
                with self.assertRaisesRegex(Error, "modified by an inplace operation"):
                    before.check()
            else:
                before.check()
        before = Before(inside)
        self.assertFalse(before.same(inside[:2]))
        handle = register_module_forward_hook(hook)
        self.assertFalse(before.same(inside))
        with before:
            self.assertFalse(nn.modules.module._global_forward_hooks)
        self.assertTrue(nn.modules.module._global_forward_hooks)
        handle.remove()
        self.assertTrue(before.same(inside))
        self.assertTrue(Before((), [1]).same(()))

    def test_generators(self):
        """They go on where they were when the second pass is over."""
        try:
            import numpy
        except ImportError:
            self.skipTest("there is no NumPy")
        for make, roll in ((lambda: random.Random(1), lambda g: g.random()), (lambda: torch.Generator().manual_seed(1), lambda g: float(torch.rand((), generator=g))), (lambda: numpy.random.RandomState(1), lambda g: g.rand()), (lambda: numpy.random.default_rng(1), lambda g: g.random()), (lambda: numpy.random.Generator(numpy.random.MT19937(1)), lambda g: g.random())):
            given, other = Space(noise=make()), make()
            before = Before((), [given])
            want = [roll(other) for _ in range(4)]
            got = [roll(given.noise)]
            with before:
                self.assertEqual(want[:2], [roll(given.noise) for _ in range(2)])
            self.assertEqual(want, got + [roll(given.noise) for _ in range(3)])
            draws = Draws([given], False)
            self.assertEqual("", draws.drawn())
            roll(given.noise)
            self.assertEqual("a generator", draws.drawn())
            draws.set()
            self.assertEqual("", draws.drawn())

    def test_how_much_is_looked_at(self):
        def nested(n):
            x = inner = [0]
            for _ in range(n):
                x = [x]
            return x, inner

        for n in range(1, 8):
            x, inner = nested(n)
            before = Before((), [x])
            inner[0] = 1
            self.assertEqual(n >= DEEP, before.same(()), n)
        for n in (LONG - 1, LONG, LONG + 1):
            x = [0] * n
            before = Before((), [x])
            x[0] = 1
            self.assertEqual(n > LONG, before.same(()), n)
        for n in (MOST - 1, MOST):
            many = [[0] for _ in range(n)] + [[0]]
            before = Before((), many)
            many[-1][0] = 1
            self.assertEqual(n >= MOST, before.same(()), n)

    def test_functions_are_no_data(self):
        """What they count stays counted."""

        def count():
            count.calls += 1

        class Counter:
            calls = 0

        count.calls = 0
        before = Before((), [count, Counter, {"f": count}])
        count()
        with before:
            count()
            Counter.calls = 3
        self.assertEqual((2, 3), (count.calls, Counter.calls))

    def test_results_stay(self):
        """What a block puts somewhere is the first pass's, and the rest of the place is as it was. A second pass finds no other results that lead to
        a graph, and those that do not as they were."""

        def made(x, graph=True):
            return torch.full((1,), x, requires_grad=graph) * 1

        module = nn.ReLU()
        module.out, module.scale, module.all, module.last = made(0.0), 1, [made(0.0), 2], made(0.0, False)
        sets = [(vars(module), "out"), (module.all, 0), (module.all, 7), (vars(module), "later"), (vars(module), "last")]
        before = Before([module], (), sets)
        module.out, module.all[0] = made(1.0), made(1.0)
        self.assertTrue(before.same([module]))
        self.assertFalse(before.written())
        module.scale, module.all[1] = 3, 4
        out, first, last, module.last = module.out, module.all[0], module.last, made(1.0, False)
        self.assertFalse(before.same([module]))
        now = module.last
        with before:
            self.assertEqual((1, 2), (module.scale, module.all[1]))
            self.assertIs(out, module.out)
            self.assertIs(first, module.all[0])
            self.assertIs(last, module.last)
            module.out, module.all[0], module.last = made(5.0), made(5.0), made(5.0, False)
        self.assertEqual((3, 4), (module.scale, module.all[1]))
        self.assertIs(out, module.out)
        self.assertIs(first, module.all[0])
        self.assertIs(now, module.last)

    def test_slots(self):
        x, frozen = Two(), Frozen(1, 2.0)
        x.a, x.b = 1, 2
        slots = Slots(x)
        self.assertEqual(({"b": 2, "a": 1}, 2, [2, 1]), (slots.copy(), len(slots), list(slots.values())))
        slots["c"] = 3
        del slots["a"]
        self.assertEqual({"b": 2, "c": 3}, slots.copy())
        Slots(frozen)["a"] = 5
        self.assertEqual(Frozen(5, 2.0), frozen)


class Cheap(unittest.TestCase):
    """Numbers of norms and activations."""

    def test_known(self):
        norm = nn.LayerNorm(4)
        self.assertIsNone(_before.known(norm))
        _before.know(norm)
        self.assertEqual({"training": True, "eps": norm.eps, "elementwise_affine": True}, _before.known(norm))
        norm.eval()
        self.assertIsNone(_before.known(norm))
        _before.know(norm)
        self.assertIs(False, _before.known(norm)["training"])
        norm.train()
        norm.eps = 1.0
        self.assertIsNone(_before.known(norm))
        _before.know(norm)  # it changes from call to call, and does not count
        self.assertEqual({"training": True, "elementwise_affine": True}, _before.known(norm))
        norm.eps = 2.0
        self.assertIsNotNone(_before.known(norm))

    def test_new_attributes(self):
        norm = nn.LayerNorm(4)
        known = Known(norm)
        self.assertTrue(known.has(norm))
        norm.tensor = torch.zeros(1)
        self.assertTrue(known.has(norm))
        norm.noise = 0.5
        self.assertFalse(known.has(norm))
        known.add(norm)
        self.assertTrue(known.has(norm))
        del norm.eps
        self.assertFalse(known.has(norm))

    def test_numbers_for_a_while(self):
        norm = nn.LayerNorm(4)
        then = {"eps": 0.5, "training": False}
        with self.assertRaises(KeyError), Numbers(norm, then):
            self.assertEqual((0.5, False), (norm.eps, norm.training))
            raise KeyError
        self.assertEqual((1e-5, True), (norm.eps, norm.training))
        with Numbers(norm, {"eps": 1e-5}):
            norm.eps = 3.0
        self.assertEqual(3.0, norm.eps)
        del norm.eps  # since its forward pass
        for deletes in (False, True):
            with Numbers(norm, then):
                self.assertEqual(0.5, norm.eps)
                if deletes:
                    del norm.eps
            self.assertEqual((False, True), (hasattr(norm, "eps"), norm.training))

    def test_written_over(self):
        """Whether a module writes over its input, and how it does not for a while."""

        class Other(nn.ReLU):
            pass

        for module, want in ((nn.ReLU(inplace=True), True), (nn.ReLU(), False), (Other(inplace=True), False), (nn.SiLU(inplace=True), False)):
            self.assertIs(want, _again.overwrites(module), module)
        relu = nn.ReLU(inplace=True)
        with self.assertRaises(KeyError), _again._beside(relu):
            self.assertFalse(relu.inplace)
            raise KeyError
        self.assertTrue(relu.inplace)

    def test_views_have_no_history(self):
        x = torch.ones(2, 2, requires_grad=True) * 2
        for t in (x, x[1:]):
            self.assertFalse(_again.View(t).of(x).requires_grad)


class Blocks(unittest.TestCase):
    """Attributes that a block changes itself."""

    def test_attributes(self):
        module = nn.ReLU()
        module.number, module.text, module.none, module.tensor, module.many, module.table, module.names = 1, "a", None, torch.zeros(1), [1, torch.zeros(1)], {"a": 1}, {1}
        for name, act, changed, written, replaced in (
            ("nothing", lambda: None, "", "", 0), ("a number", lambda: setattr(module, "number", 2), "number", "", 0), ("text", lambda: setattr(module, "text", "b"), "text", "", 0),
            ("none", lambda: setattr(module, "none", torch.zeros(1)), "", "", 1), ("a tensor", lambda: setattr(module, "tensor", torch.ones(1)), "", "", 1), ("a list", lambda: module.many.append(1), "many", "", 0),
            ("in a list", lambda: module.many.__setitem__(0, 7), "many", "", 0), ("a tensor in a list", lambda: module.many.__setitem__(1, None), "", "", 1), ("a dictionary", lambda: module.table.update(a=3), "table", "", 0),
            ("a new key", lambda: module.table.update(b=3), "table", "", 0), ("a set", lambda: module.names.add(2), "names", "", 0), ("its own", lambda: module.eval(), "", "", 0),
            ("gone", lambda: delattr(module, "number"), "number", "", 0),
        ):
            state = {k: x.copy() if isinstance(x, (list, dict, set)) else x for k, x in vars(module).items()}
            before = Attributes([module])
            act()
            self.assertEqual((changed, written, replaced), (before.changed(), before.written(), len(before.replaced())), name)
            before.restore()
            module.train()
            self.assertEqual({k: x for k, x in state.items()}, dict(vars(module)), name)
        before = Attributes([module])
        module.many[1].add_(1)
        self.assertEqual(("many", ""), (before.written(), before.changed()))
        before = Attributes([module])
        module.tensor.add_(1)
        self.assertEqual("tensor", before.written())
        for n in (LONG, LONG + 1):
            module.long = [0] * n
            before = Attributes([module])
            module.long[3] = 1
            self.assertEqual("long" if n <= LONG else "", before.changed())


class Written(unittest.TestCase):
    """Buffers that DDP writes before every forward pass."""

    def test_versions(self):
        b, other = torch.zeros(3), torch.zeros(3)

        class DDP(nn.Module):
            def _sync_buffers(self):
                b.add_(1)

        ddp = DDP()
        ddp.module = nn.Module()
        ddp.module.register_buffer("b", b)
        ddp.module.register_buffer("other", other)
        told = _written.Broadcasts(ddp)
        self.addCleanup(told.remove)
        first = b._version
        for _ in range(3):
            ddp._sync_buffers()
        _written.check_versions([(b, first), (b, first + 2), (b, b._version), (other, other._version)])
        other.add_(1)
        for t, version in ((other, 0), (b, first - 1)):
            with self.assertRaisesRegex(Error, "modified by an inplace operation"):
                _written.check_versions([(t, version)])
        with self.assertRaises(Error) as raised:
            _written.check_versions([(other, 0)])
        self.assertNotIn("DDP", str(raised.exception))
        with mock.patch.object(torch.distributed, "is_initialized", return_value=True):
            for t, said in ((other, True), (nn.Parameter(torch.zeros(1)), False)):
                with self.assertRaises(Error) as raised:
                    _written.check_versions([(t, -1)])
                self.assertEqual(said, "broadcast_buffers=False" in str(raised.exception))
        b.add_(1)
        with self.assertRaisesRegex(Error, "modified by an inplace operation"):
            _written.check_versions([(b, first)])
        for _ in range(_written.VERSIONS + 5):
            ddp._sync_buffers()
        versions = _written._written(b)
        self.assertEqual((_written.VERSIONS, b._version - _written.VERSIONS), (len(versions), min(versions)))
        _written._broadcast[id(other)] = _written._broadcast[id(b)]
        self.assertEqual({}, _written._written(other))  # that of another tensor, which is gone
        del _written._broadcast[id(other)]
        told.remove()
        self.assertEqual(({}, False), (_written._written(b), "_sync_buffers" in vars(ddp)))


if __name__ == "__main__":
    unittest.main()
