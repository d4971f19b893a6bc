"""Buffers of which only some rows are live: rt.stash, runs again, graphs. SPEC S6.4."""

import gc
import threading
import unittest

from common import DEVICE, runtime, same, stowage, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import leaf


class Rows(unittest.TestCase):
    """A buffer of 512 rows of which few are live, in four layers."""

    ROOM, WIDTH, LAYERS = 512, 64, 4

    def net(self, rt, live):
        torch.manual_seed(5)
        weights = [leaf(self.WIDTH, self.WIDTH) for _ in range(self.LAYERS)]
        count = torch.tensor(live)
        x = torch.randn(self.ROOM, self.WIDTH)
        mask = (torch.arange(self.ROOM) < live)[:, None]
        x = torch.where(mask, x, torch.zeros(()))
        for w in weights:
            x = x @ w
            if rt is not None:
                x = rt.stash(x, rows=count)
            x = F.dropout(torch.tanh(x) * x, 0.1)
        # The state of the generator tells whether a rerun got the same numbers.
        x.sum().backward()
        return [w.grad for w in weights] + [torch.rand(3)]

    def equal(self, want, got):
        for a, b in zip(want, got, strict=True):
            self.assertTrue(same(a, b))

    def test_live_rows_come_back(self):
        with runtime("offload", policy={"expert_fc1": "stash"}) as rt:
            for live in (100, 0, 1, 90, 17, 16):
                with rt.step():
                    got = self.net(rt, live)
                self.equal(self.net(None, live), got)
            self.assertGreater(rt.stats()["room"], 0)

    def test_report(self):
        """A row says what is stashed, with the room of its buffers; the step that counts keeps
        them, and so does the last one of every step. Steps that lacked room are counted apart."""
        with runtime("offload", policy={"expert_fc1": "stash"}) as rt:
            with rt.step():
                self.net(rt, 10)
            self.assertRegex(rt.report(), r"(?m)^1 step; the last one:\n.*\nexpert_fc1 +4 +512.0 KiB +live rows +4 keep$")
            self.assertEqual(0, rt.stats()["overflows"])
            rt.run(lambda: self.net(rt, 400))
            text = rt.report()
            self.assertRegex(text, r"(?m)^expert_fc1 +4 +512.0 KiB +live rows +1 keep, 3 stash$")
            self.assertIn("3 steps, reruns included (1 overflow); the last one:", text)

    def test_rows_that_are_not_live_are_zero(self):
        """Even where a buffer has not-a-numbers behind them, which a product with zero would
        keep, and rows of steps before. Tensors that are not worth a place are as they were."""
        with runtime("offload", policy={"expert_fc1": "stash"}) as rt:
            for live in (300, 299, 20, 0, 250):
                weights, total = [leaf(self.WIDTH, 8) for _ in range(self.LAYERS)], 0.0
                mask, want = (torch.arange(self.ROOM) < live)[:, None], []
                with rt.step():
                    for w in weights:
                        x = torch.where(mask, torch.randn(self.ROOM, self.WIDTH), torch.tensor(float("nan")))
                        y = rt.stash(x, rows=torch.tensor(live)) @ w
                        total = total + torch.where(mask, y, torch.zeros(())).sum()
                        want.append(x[:live].t() @ torch.ones(live, 8))
                    total.backward()
                if live != 300:  # not the step that counts
                    for w, g in zip(weights[:3], want):
                        self.assertTrue(torch.allclose(w.grad, g, atol=1e-3))

    def test_policies_of_rows(self):
        """Only "stash" looks at rows; a group that is not named is kept."""
        for choice, want in (("stash", (True, False)), ("offload", (False, True)), ("keep", (False, False)), (None, (False, False))):
            policy = {"a": "offload"} if choice is None else {"a": "offload", "expert_fc1": choice}
            with self.subTest(choice), runtime("offload", policy=policy) as rt:
                for _ in range(3):
                    with rt.step():
                        got = self.net(rt, 30)
                    self.equal(self.net(None, 30), got)
                stats = rt.stats()
                self.assertEqual(want, (stats["room"] > 0, stats["summary"]["counts"]["OutBytes"] > 0))

    def test_what_is_held_after_its_step(self):
        """The next step writes there: who keeps such a tensor is told."""
        kept = []

        class Keeps(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 1

            @staticmethod
            def backward(ctx, grad):
                kept.append(ctx.saved_tensors[0][:2])
                return grad

        def step(rt, fails=lambda: None):
            with rt.step():
                x = leaf(self.ROOM, self.WIDTH)
                for i in range(self.LAYERS):
                    x = Keeps.apply(rt.stash(x.exp(), rows=torch.tensor(7)))
                x.sum().backward()
                fails()

        with runtime("offload", policy={"expert_fc1": "stash"}) as rt:
            step(rt)  # counts
            for _ in range(2):  # as long as it is
                with self.assertRaisesRegex(stowage.Error, r"held after its step.*clone\(\)"):
                    step(rt)
            kept.clear()
            step_fails = lambda: 1 // 0
            with self.assertRaises(ZeroDivisionError):
                step(rt, step_fails)
            with self.assertRaisesRegex(stowage.Error, "held after its step"):  # by the step that failed
                step(rt)
            kept.clear()
            keeps = Keeps.backward
            Keeps.backward = staticmethod(lambda ctx, grad: (ctx.saved_tensors, grad)[1])
            step(rt)
            Keeps.backward = keeps
            with self.assertRaises(stowage.Error):
                step(rt)
            sums = [t.sum() for t in kept]
        # The runtime is closed; its memory is not gone as long as somebody has it.
        for t, s in zip(kept, sums):
            self.assertTrue(same(t.sum(), s))

    def test_microbatches_share_a_place(self):
        """What one backward pass is done with, the next forward pass may use; a tensor that
        is still read keeps its place until then."""
        with runtime("offload", policy={"expert_fc1": "stash"}) as rt:
            rooms = []
            for turn in range(3):
                for live in (60, 60):
                    with rt.step():
                        got = [self.net(rt, live) for _ in range(3)]
                    for g in got:
                        self.equal(self.net(None, live), g)
                rooms.append(rt.stats()["room"])
            self.assertEqual(1, len(set(rooms)))
            self.assertLess(rooms[0], 3 * 80 * self.WIDTH * 4)  # three tensors are worth a place

    def test_overflow_is_raised_and_run_again(self):
        with runtime("offload", policy={"expert_fc1": "stash"}, live=0.001) as rt:
            with self.assertRaisesRegex(stowage.Overflow, "run the step again"), rt.step():
                self.net(rt, 100)
            tries = []

            def fn(live):
                tries.append(live)
                return self.net(rt, live)

            self.equal(self.net(None, 100), rt.run(fn, 100))
            self.equal(self.net(None, 400), rt.run(fn, 400))
            self.assertEqual([100, 400, 400], tries)

    def test_state_is_put_back(self):
        """Accumulated gradients, buffers, random numbers and restore= are those of one run."""
        got = []
        for with_it in (False, True):
            torch.manual_seed(7)
            total = torch.zeros(())
            m = nn.Sequential(nn.Linear(self.WIDTH, self.WIDTH), nn.BatchNorm1d(self.WIDTH), nn.Dropout(0.3))
            with runtime("offload", policy={"expert_fc1": "stash"}, live=0.001) as rt:
                rt.attach(m, {"0": "b"})
                calls = []

                def fn(x):
                    calls.append(1)
                    h = m[0](x)
                    h = rt.stash(h, rows=torch.tensor(self.ROOM)) if with_it else h
                    loss = m[2](m[1](h * h)).square().sum()
                    loss.backward()
                    total.add_(loss.detach())

                for _ in range(2):
                    rt.run(fn, torch.randn(self.ROOM, self.WIDTH), restore=[total])
                self.assertEqual(3 if with_it else 2, len(calls))
            got.append([p.grad for p in m.parameters()] + list(m.buffers()) + [torch.rand(2), total])
        self.equal(*got)

    @unittest.skipUnless(DEVICE == "cuda", "STOWAGE_DEVICE is not cuda")
    def test_captured(self):
        """A graph of one's own and rt.graph: other rows at every replay, and more than ever."""
        for own in (False, True):
            torch.manual_seed(9)
            weights = [leaf(self.WIDTH, self.WIDTH) for _ in range(self.LAYERS)]

            def fn(x, count, rt=None):
                mask = (torch.arange(self.ROOM) < count)[:, None]
                for w in weights:
                    x = torch.tanh(torch.where(mask, x, x * float("nan")) @ w)
                    x = rt.stash(x, rows=count) if rt is not None else x
                    x = x * x
                loss = torch.where(mask, x, torch.zeros(())).sum()
                return torch.autograd.grad(loss, weights)

            def batch(n):
                return torch.randn(self.ROOM, self.WIDTH), torch.tensor(n)

            with self.subTest(own=own), runtime("offload", policy={"expert_fc1": "stash"}) as rt:
                if own:
                    x, count = batch(50)
                    for _ in range(2):
                        with rt.step("g"):
                            fn(x, count, rt)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph), rt.step("g"):
                        out = fn(x, count, rt)

                    def call(now, n):
                        x.copy_(now), count.copy_(n)
                        for _ in range(2):
                            graph.replay()
                            try:
                                rt.check()
                                return out
                            except stowage.Overflow:
                                pass
                        raise AssertionError("it lacks room twice")

                else:
                    call = rt.graph(lambda x, count: fn(x, count, rt), *batch(50))
                for live in (50, 10, 300, 0, 512, 7):
                    now = batch(live)
                    self.equal(fn(*now), [g.clone() for g in call(*now)])
                self.assertGreater(rt.stats()["overflows"], 0)

    @unittest.skipUnless(DEVICE == "cpu", "STOWAGE_DEVICE is not cpu")
    def test_on_the_cpu_a_graph_is_a_step(self):
        with runtime("offload", policy={"expert_fc1": "stash"}) as rt:
            step = rt.graph(lambda live: self.net(rt, live), 5)
            self.equal(self.net(None, 9), step(9))
            self.equal(self.net(None, 11), step(11))

    def test_outside_of_a_step_nothing_is_done(self):
        with runtime("offload") as rt:
            x = leaf(4, 4)
            self.assertIs(x, rt.stash(x, rows=torch.tensor(2)))
            with rt.step(), torch.no_grad():
                self.assertIs(x, rt.stash(x, rows=torch.tensor(2)))

    def test_a_step_that_failed(self):
        """What it lacked is not lacking in the next one; and a run after it is run again."""
        with runtime("offload", policy={"expert_fc1": "stash"}) as rt:
            for live in (400, 50, 512):
                with self.assertRaises(ZeroDivisionError), rt.step():
                    self.net(rt, live)
                    1 / 0
                with rt.step():
                    self.net(rt, live)
            rt.check()
        with runtime("offload", policy={"expert_fc1": "stash"}) as rt:
            with self.assertRaises(ZeroDivisionError), rt.step():
                self.net(rt, 5)
                1 / 0
            rt.check()
            self.equal(self.net(None, 300), rt.run(lambda: self.net(rt, 300)))


class Returns(torch.autograd.Function):
    """A gradient that is what was saved: autograd may add to a gradient where it is."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return (x * saved).sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


class Garbage(torch.autograd.Function):
    """What was saved is held by nobody, but not yet freed."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return (x * saved).sum()

    @staticmethod
    def backward(ctx, grad):
        loop = [ctx.saved_tensors[0]]
        loop.append(loop)
        return grad * loop[0], None


class Uses(unittest.TestCase):
    """Layers that use a stashed buffer in many ways, beside the same without the plug-in."""

    ROOM, WIDTH, LIVE, LAYERS = 64, 16, 10, 4

    def layers(self, stash, layer, backward=lambda loss, weights: loss.backward()):
        """Gradients, where rows that are not live must not matter: they are 3 or 0."""
        torch.manual_seed(5)
        weights = [leaf(self.WIDTH, self.WIDTH) for _ in range(self.LAYERS)]
        mask = (torch.arange(self.ROOM) < self.LIVE)[:, None]
        x, count = torch.randn(self.ROOM, self.WIDTH, requires_grad=True), torch.tensor(self.LIVE)
        for w in weights:
            buffer = lambda x, w=w: torch.where(mask, x @ w, torch.tensor(3.0))
            x = torch.where(mask, layer(stash, buffer, x, count, w).sin(), torch.zeros(()))
        more = backward(x.sum(), weights)
        return [w.grad for w in weights] + list(more or ())

    def compare(self, *what):
        want = self.layers(lambda x, rows: x, *what)
        for settings in ({"policy": {"expert_fc1": "stash"}}, {"policy": {"expert_fc1": "stash"}, "live": 1}, {"saved_limit": "96KiB"}, {"policy": {"expert_fc1": "offload"}}):
            with self.subTest(**settings), runtime("limit" if "saved_limit" in settings else "", **settings) as rt:
                for _ in range(3):
                    with rt.step():
                        got = self.layers(rt.stash, *what)
                    for a, b in zip(want, got, strict=True):
                        self.assertTrue(same(a, b))

    def product(self, stash, buffer, x, count, w):
        b = stash(buffer(x), count)
        return b[:, :8].repeat(1, 2) * b.sin() * w.sum()

    def test_two_backward_passes(self):
        def backward(loss, weights):
            loss.backward(retain_graph=True)
            first = [w.grad.clone() for w in weights]
            loss.square().backward()
            return first

        self.compare(self.product, backward)

    def test_gradients_of_gradients(self):
        def backward(loss, weights):
            grads = torch.autograd.grad(loss, weights, create_graph=True)
            sum(g.square().sum() for g in grads).backward()
            return [g.detach() for g in grads]

        self.compare(self.product, backward)

    def test_checkpoints(self):
        for reentrant in (True, False):
            self.compare(lambda stash, buffer, x, count, w: checkpoint(lambda x: self.product(stash, buffer, x, count, w), x, use_reentrant=reentrant))

    def test_two_counts(self):
        """What another count, or another number in the same one, calls live is not lost."""

        def layer(stash, buffer, x, count, w, again):
            b = buffer(x).detach()  # the gradient of w.sum() is that of all its rows
            few = torch.tensor(2)
            z = (stash(b, few)[:2] * w.sum()).sum()
            few.fill_(self.ROOM)
            return z + stash(b, few if again else torch.tensor(self.ROOM)) * w.sum() + buffer(x)

        for again in (False, True):
            self.compare(lambda *a: layer(*a, again))

    def test_a_count_that_is_written(self):
        """Between stash() and the operation that saves."""

        def layer(stash, buffer, x, count, w):
            count = count.clone()
            b = stash(buffer(x), count)
            count.fill_(1)
            return b * w.sum()

        self.compare(layer)

    def test_the_same_twice_is_kept_once(self):
        with runtime("", policy={"expert_fc1": "stash"}, live=1) as rt, rt.step():
            b, counts = leaf(8, 4) * 1, torch.tensor([3, 4])
            z = rt.stash(b, counts[0]).sin() * rt.stash(b, counts[0]).cos()
            self.assertEqual(1, sum(r.rows is not None for r in rt._step.records.values()))
            z.sum().backward()

    def test_written_after_it_was_saved(self):
        """Where autograd would raise, the copy is right or the same is raised."""
        for live in (None, 1):
            with runtime("", policy={"expert_fc1": "stash"}, live=live) as rt:
                for _ in range(3):
                    torch.manual_seed(1)
                    x = leaf(8, 4)
                    try:
                        with rt.step():
                            b = rt.stash(x * 1, torch.tensor(8))
                            y = b * b
                            b.add_(1)
                            y.sum().backward()
                        self.assertTrue(same(x.grad, x.detach() + x.detach()))
                    except stowage.Error as e:
                        self.assertIn("modified by an inplace operation", str(e))

    def test_a_gradient_that_is_what_was_saved(self):
        def layer(stash, buffer, x, count, w):
            b = stash(buffer(x).detach(), count)
            h = w.sum() * (b != 3)
            return buffer(x) + Returns.apply(h, b) * 0 + Returns.apply(h, stash(b * 2, count)) * 0

        def backward(loss, weights):
            loss.backward(retain_graph=True)
            loss.backward()

        self.compare(layer, backward)

    def test_garbage_is_not_held(self):
        def layer(stash, buffer, x, count, w):
            b = stash(buffer(x).detach(), count)
            return buffer(x) * Garbage.apply(w.sum() * (b != 3), b)

        self.compare(layer)

    def test_in_another_thread(self):
        def layer(stash, buffer, x, count, w):
            out = []
            t = threading.Thread(target=lambda: out.append(self.product(stash, buffer, x, count, w)))
            t.start()
            t.join()
            return out[0] + stash(buffer(x), count).sin()

        self.compare(layer)

    def test_nothing_is_left(self):
        """Of steps without a backward pass, and of those that fail."""
        kinds = (stowage._record.Record, stowage._record.Handle, stowage._record.Group, stowage._step.Step)

        def stops(loss, weights):
            loss.backward(retain_graph=True)
            1 / 0

        with runtime("", policy={"expert_fc1": "stash"}) as rt:
            for backward in (lambda *_: None, stops, lambda loss, _: loss.backward()):
                for _ in range(3):
                    try:
                        with rt.step():
                            self.layers(rt.stash, self.product, backward)
                    except (ZeroDivisionError, AttributeError):
                        pass
                    self.assertEqual([], [o for o in gc.get_objects() if type(o) in kinds])


if __name__ == "__main__":
    unittest.main()
