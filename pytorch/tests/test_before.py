"""Data that a block or its arguments have and that changes between the passes, which begins after the recorded steps."""

import contextlib
import copy
import dataclasses
import random
import types
import unittest
import weakref
from unittest import mock

import torch
from blocks import Block, Compared, choices, one_pass, planned, stack, train, why
from common import stowage
from stowage import _before
from torch import nn

LATE = 4  # the step in which something begins


class Case(Compared):
    def late(self, make, step, plans=("whole", "whole, offload"), steps=LATE + 2, kind="recompute"):
        """Compares steps in which something begins late."""
        for plan in plans:
            with self.subTest(plan=plan):
                torch.manual_seed(1)
                want = train(make(), step, steps)
                torch.manual_seed(1)
                model = make()
                with planned(model, plan) as rt:
                    self.compare(want, train(model, step, steps, rt))
                    self.assertEqual({True}, {c.startswith(kind) for c in choices(rt).values()})


def train_as_it_is(model, step, plan):
    """Trains a model that cannot be copied. Returns the steps, and the choices of the plan if there is one."""
    with planned(model, plan) if plan else contextlib.nullcontext() as rt, mock.patch.object(copy, "deepcopy", lambda x: x):
        return train(model, step, LATE + 2, rt), choices(rt) if plan else {}


class Given(nn.Module):
    """A model that gives an object to its blocks. Between the passes of late steps the object changes."""

    def __init__(self, made, read):
        super().__init__()
        self.made = made

        class Reads(Block):
            def forward(self, x, object):
                return super().forward((x + read(object)).tanh())

        self.blocks = nn.ModuleList(Reads() for _ in range(2))

    def forward(self, x):
        object = self.made()
        for block in self.blocks:
            x = block(x, object)
        return x, object


@dataclasses.dataclass
class Slotted:
    __slots__ = ("scale",)
    scale: float


def space(**attributes):
    return types.SimpleNamespace(**attributes)


def changes(change):
    def step(model, i):
        out, object = model(torch.randn(3, 4, 8))
        if i >= LATE:
            change(object)
        loss = out.square().mean()
        loss.backward()
        return loss

    return step


class Arguments(Case):
    def check(self, made, read, change):
        self.late(lambda: Given(made, read), changes(change))

    def test_numbers(self):
        self.check(lambda: space(scale=1.5), lambda o: o.scale, lambda o: setattr(o, "scale", 3.0))

    def test_tensors(self):
        self.check(lambda: space(scale=torch.full((8,), 1.5)), lambda o: o.scale, lambda o: setattr(o, "scale", torch.ones(8)))

    def test_inside_of_objects(self):
        self.check(lambda: space(inner=space(scales=[1.5])), lambda o: o.inner.scales[-1], lambda o: o.inner.scales.append(3.0))

    def test_new_attributes(self):
        self.check(lambda: space(), lambda o: getattr(o, "scale", 1.5), lambda o: setattr(o, "scale", 3.0))

    def test_slots(self):
        self.check(lambda: Slotted(1.5), lambda o: o.scale, lambda o: setattr(o, "scale", 3.0))

    def test_classes_of_containers(self):
        class Table(dict):
            pass

        self.check(lambda: Table(scale=1.5, names={"a"}), lambda o: o["scale"] + len(o["names"]), lambda o: (o.update(scale=3.0), o["names"].add("b")))

    def test_tensors_that_are_written(self):
        """They are not what they were, and an error says so; if recorded steps do it, the block is kept."""
        write = lambda o: o.scale.fill_(3.0)
        made, read = lambda: space(scale=torch.full((8,), 1.5)), lambda o: o.scale
        for plan in ("whole", "whole, offload"):
            model = Given(made, read)
            with planned(model, plan) as rt, self.assertRaisesRegex(stowage.Error, r"modified by an inplace operation: \[torch.float32 \[8\]\]"):
                train(model, changes(write), LATE + 1, rt)
        model = Given(made, read)

        def step(model, i):
            return changes(write)(model, LATE)

        want = train(model, step, 4)
        with planned(model, "whole") as rt:
            self.compare(want, train(model, step, 4, rt))
            self.assertEqual({"a tensor that it or an argument has is written before it could run again"}, set(why(rt).values()))


class Modules(Case):
    def check(self, forward, first, then, plans=("whole", "whole, offload")):
        class Reads(Block):
            def __init__(self):
                super().__init__()
                self.drop = nn.Dropout(0.1)
                first(self)

            def forward(self, x):
                return super().forward(forward(self, x))

        def step(model, i):
            for block in model.blocks:
                first(block)
            loss = model(torch.randn(3, 4, 8)).square().mean()
            for block in model.blocks if i >= LATE else ():
                then(block)
            loss.backward()
            return loss

        self.late(lambda: stack(Reads, 2), step, plans)

    def test_numbers(self):
        self.check(lambda b, x: x * b.scale, lambda b: setattr(b, "scale", 1.5), lambda b: setattr(b, "scale", 3.0))

    def test_dropout(self):
        self.check(lambda b, x: b.drop(x), lambda b: setattr(b.drop, "p", 0.1), lambda b: setattr(b.drop, "p", 0.6))

    def test_names_of_what_is_the_same(self):
        """A name that another takes the place of counts, though what it has is the same."""
        self.check(lambda b, x: x * (2.0 if "warm" in b.mode else 3.0), lambda b: setattr(b, "mode", {"warm": True}), lambda b: (b.mode.clear(), b.mode.update(cold=True)))
        self.check(lambda b, x: x * (2.0 if hasattr(b, "warm") else 3.0), lambda b: (b.__dict__.pop("cold", 0), setattr(b, "warm", True)), lambda b: (b.__dict__.pop("warm"), setattr(b, "cold", True)))

    def test_containers_and_objects(self):
        self.check(lambda b, x: x * b.own["scale"], lambda b: setattr(b, "own", {"scale": 1.5}), lambda b: b.own.update(scale=3.0))
        self.check(lambda b, x: x * b.own.scale, lambda b: setattr(b, "own", space(scale=1.5)), lambda b: setattr(b.own, "scale", 3.0))

    def test_hooks(self):
        """Those of the first pass run in the second, and no others."""

        def put(block):
            remove(block)
            block.up.register_forward_hook(lambda m, args, out: out + 1.0)
            block.norm.register_forward_pre_hook(lambda m, args: (args[0] - 0.5,))

        def remove(block):
            block.up._forward_hooks.clear()
            block.norm._forward_pre_hooks.clear()

        def put_others(block):
            remove_others(block)
            if hasattr(block.up, "_forward_hooks_with_kwargs"):
                block.up.register_forward_hook(lambda m, args, kwargs, out: out + 1.0, with_kwargs=True)
            handles.append(nn.modules.module.register_module_forward_hook(lambda m, args, out: out + 0.5 if type(m) is nn.Linear else None))

        def remove_others(block):
            block.up._forward_hooks.clear()
            while handles:
                handles.pop().remove()

        handles = []
        self.addCleanup(lambda: [handle.remove() for handle in handles])
        for a, b in ((put, remove), (put_others, remove_others)):
            self.check(lambda b, x: x, b, a)
            self.check(lambda b, x: x, a, b)

    def test_generators(self):
        """Blocks begin to draw from what they have. The second pass draws the same, and nobody else notices."""

        class Draws(Block):
            def __init__(self):
                super().__init__()
                self.own, self.others, self.on = torch.Generator().manual_seed(3), [random.Random(4)], False

            def forward(self, x):
                return super().forward(x * torch.rand(8, generator=self.own) * self.others[0].random() if self.on else x)

        def step(model, i):
            for block in model.blocks:
                block.on = i >= LATE
            return one_pass(model, i)

        for plan in ("whole", "whole, offload"):
            (want, _), (got, rt) = ((train_as_it_is(model, step, plan)) for model, plan in ((stack(Draws, 2), None), (stack(Draws, 2), plan)))
            self.compare(want, got)
            self.assertEqual({True}, {c.startswith("recompute") for c in rt.values()})

    def test_buffers_that_are_replaced(self):
        def first(b):
            b._buffers["scale"] = torch.full((8,), 1.5)

        self.check(lambda b, x: (x + b._buffers["scale"]).tanh(), first, lambda b: b._buffers.update(scale=torch.ones(8)))

    def test_what_a_block_changes_itself(self):
        """Once a call, and the second pass has what the first one had."""

        class Counts(Block):
            def __init__(self):
                super().__init__()
                self.calls, self.mean, self.seen, self.on = 0, torch.zeros(()), [], False

            def forward(self, x):
                if self.on:
                    self.calls += 1
                    self.seen.append(float(x.detach().sum()))
                    self.mean = 0.9 * self.mean + x.detach().mean()
                return super().forward(x) * (1 + self.calls + self.mean + len(self.seen))

        def step(model, i):
            for block in model.blocks:
                block.on = i >= LATE
            return [one_pass(model, i), *(torch.tensor([b.calls, b.mean, *b.seen]) for b in model.blocks)]

        self.late(lambda: stack(Counts, 2), step)

    def test_what_a_block_writes_itself(self):
        class Counts(Block):
            def __init__(self):
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x):
                if on:
                    self.calls += 1
                return super().forward(x) * (1 + self.calls.clone())

        on, model = [], stack(Counts, 2)
        with planned(model) as rt:
            train(model, one_pass, LATE, rt)
            on.append(1)
            with self.assertRaisesRegex(stowage.Error, "modified by an inplace operation"):
                train(model, one_pass, 1, rt)
            on.clear()
            train(model, one_pass, 2, rt)

    def test_buffers_written_in_recorded_steps(self):
        """Between the passes, by others than DDP: such a block is kept."""

        class Adds(Block):
            def __init__(self):
                super().__init__()
                self.register_buffer("bias", torch.zeros(8))

            def forward(self, x):
                return super().forward(x) + self.bias

        def step(model, i):
            loss = model(torch.randn(3, 4, 8)).square().mean()
            for block in model.blocks:
                block.bias.add_(1.0)
            loss.backward()
            return loss

        model = stack(Adds, 2)
        want = train(model, step)
        with planned(model) as rt:
            self.compare(want, train(model, step, rt=rt))
            self.assertEqual({"its buffers are written before it could run again; if DDP does it, attach() what DDP returned"}, set(why(rt).values()))

    def test_results_are_not_held(self):
        """Those of the last call are freed when the next one puts its own in their place."""

        class Keeps(Block):
            def forward(self, x):
                self.out = super().forward(x)
                return self.out

        model = stack(Keeps, 2)
        with planned(model) as rt:
            train(model, one_pass, LATE, rt)
            last = weakref.ref(model.blocks[0].out)
            with rt.step():
                loss = model(torch.randn(3, 4, 8)).sum()
                self.assertIsNone(last())
                loss.backward()

    def test_what_is_as_good(self):
        """Numbers and tuples of numbers that a block makes anew at every call, and wrappers of plans that take turns, are
        noted once."""
        module = nn.Linear(2, 2)
        module.scale, module.shape = float("1.5"), tuple([2, 3])
        before = _before.Before([module])
        for change, same in (
            (lambda: setattr(module, "scale", float("1.5")), True),
            (lambda: setattr(module, "shape", tuple([2, 3])), True),
            (lambda: module.__dict__.update(forward=print), True),
            (lambda: module.__dict__.update(forward=repr), True),
            (lambda: module.__dict__.pop("forward"), True),
            (lambda: setattr(module, "shape", (2, 4)), False),
            (lambda: setattr(module, "shape", (2, 3.0)), False),
            (lambda: setattr(module, "shape", (2, 3, 4)), False),
            (lambda: setattr(module, "shape", (2, 3)), True),
            (lambda: setattr(module, "scale", 2.5), False),
            (lambda: setattr(module, "scale", 1.5), True),
        ):
            change()
            self.assertEqual(same, before.same([module]))
            self.assertEqual(same, not before._differing())
            if same:  # what is as good is not looked at again
                self.assertEqual(list(map(id, before._all(before._dicts))), list(map(id, before._values)))
        module.__dict__["forward"] = print
        with before:
            module.scale = None
        self.assertEqual((1.5, print), (module.scale, module.__dict__["forward"]))

    def test_what_a_pass_that_ends_early_leaves(self):
        """A block makes an object for a while and drops it when it is done, where a second pass never comes. It is
        dropped all the same, with the tensor that it has, and the next call finds what the last one found."""

        class Manager:
            def __init__(self, x):
                self.x, self.hook = x, print  # no data

        class Manages(Block):
            def __init__(self):
                super().__init__()
                self.manager = None

            def forward(self, x):
                self.manager = Manager(x)
                x = super().forward(self.manager.x)
                self.manager = None
                return x

        model = stack(Manages, 2)
        with planned(model) as rt:
            train(model, one_pass, LATE, rt)
            self.assertEqual({"recompute"}, set(choices(rt).values()))
            self.assertEqual([None, None], [block.manager for block in model.blocks])
            units = [u for u in rt._planner.units.list if u.parent is None]
            before = [u._before for u in units]
            train(model, one_pass, 1, rt)
            self.assertEqual(before, [u._before for u in units])

    def test_what_is_deep_or_much(self):
        """Objects inside of each other are looked at to a depth, those that have themselves once, and so many in all."""
        module, inner = nn.Linear(2, 2), [0]
        module.deep = [[[[inner]]]]
        module.deep[0].append(module.deep)
        last = module.deep[0][0][0]
        before = _before.Before([module])
        inner[0], module.deep[0][0][0] = 1, [inner, 5]
        with before:
            self.assertEqual((1, [inner]), (inner[0], module.deep[0][0][0]))
            self.assertIs(last, module.deep[0][0][0])
        self.assertEqual([inner, 5], module.deep[0][0][0])
        module.much, module.long = [[[i] for i in range(60)] for _ in range(6)], [0] * (_before.LONG + 1)
        before = _before.Before([module])
        module.long[0] = 1
        for many in module.much:
            many[:] = [[-1]]
        with before:
            self.assertEqual(([60] * 4, 1, 1), ([len(many) for many in module.much[:4]], len(module.much[5]), module.long[0]))

    def test_results_in_objects_of_modules(self):
        """They stay those of the first pass, whose graph is the step's. Those of a second pass would hold its graph, and so its input, until
        the next step. Blocks that keep a result in no object are as they were."""

        class Dispatcher:
            def __init__(self):
                self.module, self.routing, self.sent = nn.Linear(2, 2), None, 0

        class Sends(Block):
            def __init__(self):
                super().__init__()
                self.dispatcher = Dispatcher()

            def forward(self, x):
                seen.append(x)
                self.dispatcher.routing, self.dispatcher.sent = x.sum(-1).exp(), self.dispatcher.sent + 1
                made.append(self.dispatcher.routing)
                return super().forward(x) * self.dispatcher.routing.detach()[..., None]

        seen, made = [], []
        model = stack(Sends, 2)
        with planned(model) as rt:
            train(model, one_pass, LATE, rt)
            self.assertEqual({"recompute"}, set(choices(rt).values()))
            seen.clear()
            made.clear()
            sent = [b.dispatcher.sent for b in model.blocks]
            x = torch.randn(3, 4, 8)
            with rt.step():
                model(x).sum().backward()
            self.assertEqual(4, len(made))  # two passes of two blocks
            for i, block in enumerate(model.blocks):
                self.assertIs(made[i], block.dispatcher.routing)
                self.assertEqual(sent[i] + 1, block.dispatcher.sent)
            inputs = [weakref.ref(t) for t in seen[2:]]
            seen.clear()
            made.clear()
            self.assertEqual([None, None], [t() for t in inputs])

    def test_numbers_in_objects_of_modules(self):
        """A schedule that counts calls counts no second passes, in recorded steps and others, whatever else its object has. A second pass
        finds the number of the first."""

        class Schedule:
            def __init__(self, **more):
                self.calls, self.often = 0, [0]
                self.__dict__.update(more)

        class Scheduled(Block):
            def __init__(self, more):
                super().__init__()
                self.schedule = Schedule(**more)

            def forward(self, x):
                s = self.schedule
                s.calls, s.often[0] = s.calls + 1, s.often[0] + 1
                return super().forward(x * (1 + s.calls // 5 + s.often[0] // 6))

        for more in ({}, {"module": nn.Linear(2, 2)}):
            with self.subTest(more=more):
                self.late(lambda: stack(lambda: Scheduled(more), 2), one_pass, steps=12)

    def test_lists_in_objects_of_modules(self):
        """What a call adds to them is there once, whoever made the list, and whatever else its object has."""

        class Log:
            def __init__(self):
                self.module, self.losses, self.seen = nn.Linear(2, 2), [], set()

        class Logs(Block):
            def __init__(self):
                super().__init__()
                self.log = Log()

            def forward(self, x):
                y = super().forward(x)
                self.log.losses.append(y.mean())
                self.log.seen.add(len(self.log.seen))
                return y

        def step(model, i):
            for block in model.blocks:
                block.log.losses = []
            loss = one_pass(model, i)
            self.assertEqual([(1, i + 1)] * 2, [(len(block.log.losses), len(block.log.seen)) for block in model.blocks])
            return loss

        self.late(lambda: stack(Logs, 2), step)

    def test_objects_of_one_step(self):
        """Nothing holds them, nor what blocks put into them, once a module has another."""

        class Context:
            def __init__(self):
                self.module, self.out = nn.Linear(2, 2), None

        class Puts(Block):
            def forward(self, x):
                self.context.out = super().forward(x)
                return self.context.out

        def step(model, i):
            for block in model.blocks:
                block.context = Context()
            loss = one_pass(model, i)
            made.extend((i, weakref.ref(x)) for block in model.blocks for x in (block.context, block.context.out))
            return loss

        made, model = [], stack(Puts, 2)
        with planned(model) as rt:
            train(model, step, LATE, rt)
            self.assertEqual({LATE - 1}, {i for i, x in made if x() is not None})

    def test_tensors_that_calls_write_in_objects_of_modules(self):
        class Counts(Block):
            def forward(self, x):
                self.counts.tensor += 1
                return super().forward(x)

        for more in ({}, {"module": nn.Linear(2, 2)}):
            model = stack(Counts, 2)
            for block in model.blocks:
                block.counts = space(tensor=torch.zeros(()), **more)
            with planned(model) as rt:
                train(model, one_pass, LATE, rt)
                self.assertEqual({"it writes to its attribute 'tensor'"}, set(why(rt).values()))
            self.assertEqual([LATE] * 2, [block.counts.tensor for block in model.blocks])

    def test_numbers_that_tensors_replace(self):
        class Keeps(Block):
            def __init__(self):
                super().__init__()
                self.last = 0.0

            def forward(self, x):
                self.last = super().forward(x)
                return self.last

        self.late(lambda: stack(Keeps, 2), one_pass)

    def test_what_is_no_data(self):
        """What a framework keeps in objects of its own stays as it is."""

        class Framework:
            def __init__(self):
                self.module, self.calls = nn.Linear(2, 2), 0

        module = nn.Linear(2, 2)
        module.state, module.hook, module.made = Framework(), lambda: None, None
        module.long, module.own = list(range(1000)), (1, [2])
        before = _before.Before([module])
        state, module.state.calls, module.own[1][:] = module.state, 1, [3]
        module.state = Framework()
        with before:
            self.assertEqual((0, [2]), (module.state.calls, module.own[1]))
            self.assertIsNot(state, module.state)
            self.assertEqual(1, state.calls)
            module.hook.new = 1
            module.new, module.own[1][:] = 5, [4]
            module.made = module.more = Framework()  # as a pass may that ends early
        self.assertEqual(([3], False, None, False), (module.own[1], hasattr(module, "new"), module.made, hasattr(module, "more")))


class Cheap(Case):
    def test_numbers_that_change_between_the_passes(self):
        class Leaky(nn.Module):
            slope = 0.1

            def forward(self, x):
                return torch.where(x > 0, x, self.slope * x) * torch.tanh(x)

        def step(model, i):
            for block in model.blocks:
                block.norm.eps, block.act.slope = 1e-3, 0.1
            loss = model(torch.randn(3, 4, 8)).square().mean()
            for block in model.blocks if i >= LATE else ():
                block.norm.eps, block.act.slope = 1.0, 0.7
            loss.backward()
            return loss

        self.late(lambda: stack(lambda: Block(act=Leaky), 2), step, ("lean", "lean, offload"), kind="recompute cheap")

    def test_random_numbers_that_begin_late(self):
        """By a number, or because the module trains: such a call is kept."""

        class Noise(nn.Module):
            scale = 0.0

            def forward(self, x):
                x = torch.tanh(x) * x
                return x if not self.training else x * (1 + self.scale * torch.randn_like(x))

        def by_number(model, i):
            for block in model.blocks if i >= LATE else ():
                block.act.scale = 0.5
            return one_pass(model, i)

        def by_mode(model, i):
            for block in model.blocks:
                block.act.train(i >= LATE)
            return one_pass(model, i)

        for step in (by_number, by_mode):
            self.late(lambda: stack(lambda: Block(act=Noise), 2), step, ("lean", "lean, offload"), kind="recompute cheap")

    def test_numbers_that_hooks_count(self):
        """They do not make a norm another one."""
        model = stack(Block, 2)
        for block in model.blocks:
            block.norm.calls = 0
            block.norm.register_forward_hook(lambda m, *_: setattr(m, "calls", m.calls + 1))
        with planned(model, "lean") as rt:
            train(model, one_pass, LATE, rt)
            self.assertIsNotNone(_before.known(model.blocks[0].norm))
            model.blocks[0].norm.eps = 1.0
            self.assertIsNone(_before.known(model.blocks[0].norm))


if __name__ == "__main__":
    unittest.main()
