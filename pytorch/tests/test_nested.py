"""Plans beside what else people do in a step, and what plans leave behind. SPEC S8.6."""

import contextlib
import copy
import gc
import inspect
import io
import pickle
import threading
import unittest
import weakref
from unittest import mock

from blocks import Block, Compared, Layer, any_plan, choices, force, one_pass, planned, refused, stack, train
from common import rng_state, runtime, same, set_rng_state, stowage, torch
from stowage import _again
from stowage._managed import Following
from stowage._measured import Cast
from stowage._planned import RECORDED
from torch import nn
from torch.utils.checkpoint import checkpoint

SETTLED = RECORDED + 1
EVERY = ["lean", "whole", "1", "2"]


def in_a_thread(model, i):
    """Like one_pass, with the backward pass in a thread of its own, as on a GPU."""
    loss = model(torch.randn(3, 4, 8)).square().mean()
    t = threading.Thread(target=loss.backward)
    t.start()
    t.join()
    return loss


class Simple(nn.Module):
    """A block that autocast on the CPU accepts."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Fails(Block):
    mode = None

    def forward(self, x):
        if self.mode == "again" and _again.state.again:  # which may end before this pass does
            raise ValueError("it fails")
        y = super().forward(x)
        if self.mode == "forward":
            raise ValueError("it fails")
        if self.mode == "backward":
            y.register_hook(self.fail)
        return y

    def fail(self, grad):
        raise ValueError("it fails")


class Planned(Compared):
    def every_plan(self, model, step=one_pass, fine=(False,), plans=EVERY, steps=RECORDED + 2, but=()):
        want = train(model, step, steps)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        for parts in fine:
            for name in plans:
                with self.subTest(plan=name, fine=parts):
                    model.load_state_dict(state)
                    with planned(model, any_plan(name) if name.isdigit() else name, parts) as rt:
                        self.compare(want, train(model, step, steps, rt))
                        self.assertEqual({}, refused(rt, but))

    def assert_clean(self, model):
        for m in model.modules():
            self.assertEqual([], [name for name in m.__dict__ if "stowage" in name or name == "forward"], type(m))
            self.assertEqual(0, len(m._forward_hooks) + len(m._forward_pre_hooks))


class Nested(Planned):
    def test_checkpoints_around_blocks(self):
        for reentrant in (False, True):
            def step(model, i):
                x = model.first(torch.randn(3, 4, 8))
                for block in model.blocks:
                    x = checkpoint(block, x, use_reentrant=reentrant)
                loss = model.last(x).square().mean()
                # The backward pass of a GPU runs in a thread of its own.
                t = threading.Thread(target=loss.backward)
                t.start()
                t.join()
                return loss

            with self.subTest(reentrant=reentrant):
                self.every_plan(stack(Layer, 2), step, (True,), ["lean", "whole", "1"], but=["torch.utils.checkpoint recomputes it"])

    def test_checkpoints_inside_of_blocks(self):
        class Inside(Block):
            reentrant = False

            def forward(self, x):
                return x + checkpoint(lambda t: self.down(torch.dropout(self.act(self.up(t)), 0.2, True)), self.norm(x), use_reentrant=self.reentrant)

        class Reentrant(Inside):
            reentrant = True

        for block in (Inside, Reentrant):
            with self.subTest(block=block.__name__):
                self.every_plan(stack(block), in_a_thread, plans=["lean", "whole", "1"])

    def test_autocast(self):
        def step(model, i):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(3, 4, 8)).float().square().mean()
                if i % 2:
                    loss.backward()
            if not i % 2:
                loss.backward()
            return loss

        self.every_plan(stack(Simple), step)

    def test_evaluation_before_backward(self):
        """Second passes are made in the modes of the first ones, inside of blocks too."""

        def step(model, i):
            loss = model(torch.randn(3, 4, 8)).square().mean()
            model.eval()
            loss.backward()
            model.train()
            return loss

        self.every_plan(stack(Layer, 2), step, (False,), ["whole"])

    def test_evaluation(self):
        def step(model, i):
            x = torch.randn(3, 4, 8)
            with torch.no_grad():
                before = model(x)
            loss = model(x).square().mean()
            with torch.inference_mode():
                during = model(x).clone()
            model.eval()
            loss = loss + model(x).mean()
            model.train()
            loss.backward()
            return loss, before, during.sum().item() * torch.ones(1)

        model = stack(Layer, 2)
        self.every_plan(model, step, (False, True), ["lean", "whole", "1"], but=["its second forward pass"])  # in the mode of another call

    def test_backward_twice(self):
        def step(model, i):
            x = torch.randn(3, 4, 8).requires_grad_()
            y = model(x)
            g, = torch.autograd.grad(y.sum(), x, retain_graph=True)
            y.square().mean().backward(retain_graph=True)
            y.sin().sum().backward()
            return g, x.grad

        self.every_plan(stack(Layer, 2), step, (False, True), steps=RECORDED + 3)

    def test_differentiated_twice(self):
        def step(model, i):
            x = torch.randn(3, 4, 8).requires_grad_()
            g, = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            g.square().sum().backward()
            return g, x.grad

        self.every_plan(stack(Layer, 2), step, (False, True))

    def test_microbatches(self):
        def step(model, i):
            losses = []
            for k in range(3):
                losses.append(model(torch.randn(3, 4, 8)).square().mean())
                if k % 2:
                    losses[-1].backward()
            losses[0].backward()
            losses[2].backward()
            return losses

        self.every_plan(stack(Layer, 2), step, (False, True))

    def test_blocks_that_are_not_called_or_often(self):
        def step(model, i):
            x = model.first(torch.randn(3, 4, 8))
            for k in ([0, 0, 2, 0, 3], [2, 1, 1], [3, 3, 3])[i % 3]:
                x = model.blocks[k](x)
            loss = model.last(x).square().mean()
            loss.backward()
            return loss

        self.every_plan(stack(), step, steps=8)

    def test_one_layer_that_is_called_again_and_again(self):
        """It is a block then, and otherwise the library plans alone."""

        class Model(nn.Module):
            def __init__(self, times):
                super().__init__()
                self.layer, self.last, self.times = Layer(), nn.Linear(8, 1), times

            def forward(self, x):
                for _ in range(self.times):
                    x = self.layer(x)
                return self.last(x)

        def microbatches(model, i):
            return [one_pass(model, i) for _ in range(2)]

        for times, step in ((4, one_pass), (1, one_pass), (1, microbatches)):
            torch.manual_seed(1)
            model = Model(times)
            want = train(model, step, SETTLED + 1)
            with self.subTest(times=times), planned(model) as rt:
                self.compare(want, train(model, step, SETTLED + 1, rt))
                self.assertEqual(times == 1, rt._planner.keys[""].by_library)
                self.assertEqual({"layer": "recompute"} if times > 1 else {}, choices(rt) if times > 1 else {})

    def test_other_mode_before_the_backward_pass(self):
        """A second pass trains if the first did, and what is made again too."""

        class Trains(Block):
            def __init__(self):
                super().__init__()
                self.batch, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

            def forward(self, x):
                return self.drop(super().forward(self.batch(x)))

        def step(model, i):
            model.train(i % 2 == 0 or i < SETTLED)
            loss = model(torch.randn(3, 4, 8)).square().mean()
            if i >= SETTLED:
                model.train(i % 2 != 0)
            loss.backward()
            return loss

        self.every_plan(stack(Trains), step, steps=SETTLED + 2)

    def test_frozen_blocks(self):
        model = stack(Layer, 3)
        model.first.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        model.blocks[2].requires_grad_(False)
        self.every_plan(model, fine=(False, True))

    def test_without_backward(self):
        def step(model, i):
            loss = model(torch.randn(3, 4, 8)).square().mean()
            if i != 3:
                loss.backward()
            return loss

        self.every_plan(stack(), step, steps=6)

    def test_keys_in_turns(self):
        model = stack(Layer, 2)

        def turns(rt):
            torch.manual_seed(2)
            out = []
            for i in range(2 * SETTLED + 4):
                model.zero_grad(set_to_none=True)
                with rt.step("ab"[i % 2]) if rt is not None else contextlib.nullcontext():
                    loss = one_pass_of(model, (2, 5)[i % 2])
                out.append([loss, *(p.grad.clone() for p in model.parameters())])
            return out

        want = turns(None)
        with planned(model) as rt:
            plans = iter([force(rt, lambda _: "whole") or rt._library.choose, force(rt, lambda _: "lean, offload") or rt._library.choose])
            of = {}

            def choose(request):
                sizes = sum(request["storages"])
                if request["offload"] and sizes not in of:
                    of[sizes] = next(plans)
                return of.get(sizes, rt_choose)(request)

            rt_choose = rt._library.choose
            rt._library.choose = choose
            self.compare(want, turns(rt))
            self.assertEqual({"recompute"}, set(choices(rt, "a").values()))
            self.assertEqual({"recompute cheap parts, offload"}, set(choices(rt, "b").values()))

    def test_threads(self):
        """Another thread uses the model in the middle of a step."""
        model = stack(Layer, 2)
        x = torch.randn(3, 4, 8)
        model.eval()
        y = model(x)
        want = torch.autograd.grad(y.sum(), list(model.parameters()))
        got = []

        def step(model, i):
            loss = model(x).square().mean()
            t = threading.Thread(target=lambda: got.append(torch.autograd.grad(model(x).sum(), list(model.parameters()))))
            t.start()
            t.join()
            loss.backward()
            return loss

        for name in ("lean", "whole", "whole, offload"):
            with self.subTest(plan=name), planned(model, name) as rt:
                for i in range(SETTLED + 1):
                    with rt.step():
                        step(model, i)
                    self.assertTrue(all(same(a, b) for a, b in zip(want, got.pop())))


def one_pass_of(model, n):
    loss = model(torch.randn(n, 4, 8)).square().mean()
    loss.backward()
    return loss


class Failures(Planned):
    def test_exceptions(self):
        for where in ("forward", "backward", "again"):
            for name in ("whole", "whole, offload", "lean, offload"):
                if where == "again" and name == "lean, offload":
                    continue
                with self.subTest(where=where, plan=name):
                    model = stack(Fails)
                    want = train(model, one_pass, 6)
                    with planned(model, name) as rt:
                        got = train_with_failures(model, where, rt, self)
                        self.compare(want, got)

    def test_exceptions_that_are_caught_inside_of_the_step(self):
        """Later passes of the step are planned as if nothing had happened."""
        model = stack(Fails, 3)
        for name in ("lean", "offload", "lean, offload", "whole, offload"):
            with self.subTest(plan=name), planned(model, name, kind="budget") as rt:
                train(model, one_pass, SETTLED, rt)
                model.blocks[1].mode = "forward"
                with rt.step():
                    with self.assertRaises(ValueError):
                        one_pass(model, 0)
                    model.blocks[1].mode = None
                    self.assertIsNone(_again.state.lean)
                    if "offload" in name:
                        self.assertEqual(([], None), (rt._step.stack, rt._step.name))
                    one_pass(model, 0)

    def test_reservations_of_blocks_that_fail(self):
        """Nothing stays reserved for a block that raised, and no error of the library is lost."""
        model = stack(Fails, 2)
        with planned(model, "offload", kind="budget") as rt:
            train(model, one_pass, SETTLED, rt)
            plan, block = rt._planner.keys[""].plan, model.blocks[1]
            plan.cast.update({u: Cast(64, 32) for u in plan.choices})
            error = stowage.Error("it fails")
            with self.assertRaisesRegex(stowage.Error, "it fails"), rt.step():
                step, x = rt._step, model.first(torch.randn(3, 4, 8))
                block.mode = "forward"
                with self.assertRaises(ValueError):
                    block(x)
                self.assertEqual(({}, []), (step.reserved, step.passing))
                block.mode, reserve = None, step.reserve
                with mock.patch.object(step, "reserve", side_effect=[reserve(64), error]), self.assertRaises(stowage.Error):
                    block(x)
                self.assertEqual(({}, []), (step.reserved, step.passing))
                y = block(x)
                self.assertEqual((2, 1), (len(step.reserved), len(step.passing)))
                y.sum().backward()
                self.assertEqual((1, []), (len(step.reserved), step.passing))
                with mock.patch.object(step.calls, "release", side_effect=error), mock.patch.object(Following, "held", return_value=x.detach()):
                    block(x)

    def test_passes_that_fail(self):
        """A forward pass that raises after some blocks, and is caught, keeps nothing reserved: neither do passes whose results
        are dropped. Gradients of the pass after them are those of a step without them."""
        model = stack(Fails, 4)
        x = torch.randn(3, 4, 8)
        with planned(model, "offload", kind="budget") as rt:
            train(model, one_pass, SETTLED, rt)
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            want = [p.grad for p in model.parameters()]
            model.zero_grad(set_to_none=True)
            plan = rt._planner.keys[""].plan
            plan.cast.update({u: Cast(64, 32) for u in plan.choices})
            with rt.step():
                step, counts = rt._step, []
                for _ in range(3):
                    with contextlib.suppress(ValueError):
                        model.blocks[3].mode = "forward"
                        model(x)
                    model.blocks[3].mode = None
                    model(x)
                    step.reserve(8)
                    counts.append((len(step.reserved), len(step.passing)))
                self.assertEqual([(1, 0), (2, 0), (3, 0)], counts)
                model(x).square().mean().backward()
        self.assertTrue(all(same(a, p.grad) for a, p in zip(want, model.parameters())))

    def test_recorded_passes_that_fail(self):
        """They are not taken for what steps save: a plan made from such a step keeps to its budget, too."""
        model = stack(Fails, 4)
        with planned(model, "keep", kind="budget") as rt:
            for fails in (False, True):
                with rt.step():
                    if fails:
                        with self.assertRaises(ValueError):
                            model.blocks[3].mode = "forward"
                            one_pass(model, 0)
                        model.blocks[3].mode = None
                    one_pass(model, 0)
            for m in rt._planner.keys[""].measured:
                self.assertEqual(sorted(f"blocks.{i}" for i in range(4)), sorted(part.unit.name for part in m.parts.values() if part.unit.parent is None))

    def test_a_backward_pass_whose_release_fails(self):
        """The next one does not release again what was released."""
        with runtime("budget") as rt, rt.step():
            step = rt._step
            step.passing, step.ending = [step.reserve(64), step.reserve(64)], [step.reserve(64)]
            first, failed, last = *step.passing, *step.ending
            release = step.calls.release
            with mock.patch.object(step.calls, "release", side_effect=[release(first), stowage.Error("it fails")]), self.assertRaises(stowage.Error):
                step.begin_backward(None, 0)
            step.begin_backward(None, 0)
            self.assertEqual(([failed], [], []), (list(step.reserved), step.passing, step.ending))

    def test_end_step_in_planned_steps(self):
        model = stack()
        want = train(model, one_pass, 4)
        for name in ("whole", "whole, offload"):
            model = stack()
            with self.subTest(plan=name), planned(model, name) as rt:
                class Begun:
                    def __enter__(self):
                        rt.begin_step()

                    def __exit__(self, *e):
                        rt.end_step(e[1])

                class Wrapper:
                    step = staticmethod(lambda key: Begun())

                self.compare(want, train(model, one_pass, 4, Wrapper))
                with self.assertRaisesRegex(stowage.Error, "no step to end"):
                    rt.end_step()


def train_with_failures(model, where, rt, case):
    """Trains, with a step that fails before every other one."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    out = []
    for i in range(6):
        state = rng_state()
        if i >= SETTLED or where != "again":
            model.blocks[1].mode = where
            with case.assertRaisesRegex(Exception, "it fails"), rt.step():
                one_pass(model, i)
            model.blocks[1].mode = None
            case.assertIsNone(rt._now)
        set_rng_state(state)
        optimizer.zero_grad(set_to_none=True)
        with rt.step():
            loss = one_pass(model, i)
        out.append([t.detach().clone() for t in [loss, *(p.grad for p in model.parameters()), rng_state()]])
        optimizer.step()
    return out


class Copies(Planned):
    def check_plain(self, model):
        for m in model.modules():
            self.assertEqual([], [name for name in m.__dict__ if "stowage" in name])
            f = m.__dict__.get("forward")
            self.assertNotIn("stowage", type(f).__module__ or "")
            self.assertIs(m, getattr(f, "__self__", m))

    def test_copies_are_plain(self):
        model = stack(lambda: Block(act=lambda: nn.ReLU(inplace=True)))
        model.blocks[0].forward = model.blocks[0].forward  # as others replace it
        for name in ("lean", "whole", "whole, offload"):
            with self.subTest(plan=name), planned(model, name) as rt:
                train(model, one_pass, SETTLED, rt)
                self.assertTrue(any(type(m.__dict__.get("forward")).__name__ == "Wrapped" for m in model.modules()))
                held = io.BytesIO()
                whole = {"weights_only": False} if "weights_only" in inspect.signature(torch.load).parameters else {}
                torch.save(model.blocks[1], held)
                held.seek(0)
                loaded = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(held, **whole)]
                for m in loaded:
                    self.check_plain(m)
                x = torch.randn(2, 4, 8)
                self.assertTrue(same(model(x), loaded[0](x)))
                self.assertTrue(same(model(x), loaded[1](x)))
                self.assertTrue(same(model.blocks[1](x), loaded[2](x)))
                with torch.no_grad():  # a copy has weights of its own
                    loaded[0].blocks[0].up.weight.zero_()
                    loaded[1].blocks[0].up.weight.zero_()
                self.assertTrue(same(loaded[0](x), loaded[1](x)))
                self.assertFalse(same(model(x), loaded[0](x)))
                self.assertEqual(set(stack().state_dict()), set(model.state_dict()))
            self.check_plain(model)
            self.assertIn("forward", model.blocks[0].__dict__)  # which is the user's

    def test_detach_and_attach(self):
        model = stack()
        with runtime("fake-a", policy=None, budget="1GiB") as rt:
            force(rt, lambda _: "whole")
            for _ in range(3):
                a = rt.attach(model)
                train(model, one_pass, SETTLED, rt)
                self.assertTrue(choices(rt))
                a.detach()
                self.assert_clean(model)
                train(model, one_pass, 1, rt)

    def test_close_in_the_middle(self):
        for name in ("keep", "whole", "whole, offload"):
            for steps in (0, SETTLED):
                for backward in (False, True):
                    with self.subTest(plan=name, steps=steps, backward=backward):
                        model = stack()
                        with planned(model, name, kind="budget") as rt:
                            train(model, one_pass, steps, rt)
                            with contextlib.suppress(stowage.Error), rt.step():
                                loss = model(torch.randn(3, 4, 8)).sum()
                                rt.close()
                                if backward:
                                    loss.backward()
                            self.assert_clean(model)
                            with self.assertRaisesRegex(stowage.Error, "closed"):
                                train(model, one_pass, 1, rt)
                        self.assert_clean(model)


class Left(Planned):
    def test_nothing_stays_on_modules(self):
        """In-place activations are no cheap modules, which is noted while steps are recorded."""
        model = stack(lambda: Block(act=lambda: nn.ReLU(inplace=True)))
        with planned(model, "lean") as rt:
            train(model, one_pass, SETTLED, rt)
        self.assert_clean(model)

    def test_no_hooks_if_everything_is_kept(self):
        model = stack(Layer, 2)
        packed = []
        with planned(model, "keep", kind="budget") as rt:
            train(model, one_pass, SETTLED, rt)
            self.assert_clean(model)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t), rt.step():
                one_pass(model, 0)
        self.assertGreater(len(packed), 20)  # hooks of the runtime would have been called in their place

    def test_tensors_die_with_the_graph(self):
        for name in EVERY:
            for backward in (True, False):
                with self.subTest(plan=name, backward=backward):
                    model = stack(Layer, 2)
                    with planned(model, any_plan(name) if name.isdigit() else name) as rt:
                        for i in range(SETTLED + 1):
                            alive = []

                            def note(m, args, out):
                                alive.append(weakref.ref(out))

                            handles = [m.register_forward_hook(note) for m in model.modules()]
                            gc.collect()
                            gc.disable()
                            try:
                                with rt.step():
                                    loss = model(torch.randn(3, 4, 8)).square().mean()
                                    if backward:
                                        loss.backward()
                                    del loss
                                    if i >= RECORDED:
                                        self.assertEqual([], [r() is None for r in alive if r() is not None])
                                self.assertEqual([], [1 for r in alive if r() is not None], f"step {i}")
                                found = [] if i < RECORDED + 1 else [x for x in gc.get_objects() if type(x) in (_again.Whole, _again.Lean, _again.Small)]
                                self.assertEqual([], found)
                            finally:
                                gc.enable()
                                for h in handles:
                                    h.remove()


if __name__ == "__main__":
    unittest.main()
