"""Blocks that cannot be recomputed are found, and later ones raise errors. SPEC S8.6."""

import contextlib
import itertools
import random
import unittest
from unittest import mock

from blocks import Attention, Block, Compared, answer, choices, one_pass, planned, stack, train, why
from common import DEVICE, stowage, torch
from stowage import _again, _before, _plan, _profile
from stowage._again import STOPS
from stowage._bits import Digests
from stowage._measured import KEEP, Choice
from stowage._planned import RECORDED
from torch import nn
from torch.utils import checkpoint

SETTLED = RECORDED + 1
RECOMPUTED = {"recompute", "recompute, offload inputs"}


class Planned(Compared):
    def under(self, model, step=one_pass, pick="whole", steps=RECORDED + 2, **more):
        """Trains with and without a plan. It returns what the plan does."""
        want = train(model, step, steps)
        with planned(model, pick, **more) as rt:
            self.compare(want, train(model, step, steps, rt))
            return choices(rt), why(rt)


class Fused(Planned):
    def test_dropout_as_one_operator(self):
        """On a GPU dropout is one operator, which saves its mask: what it made is made again."""

        class Drops(Block):
            def forward(self, x):
                h, _ = torch.native_dropout(nn.functional.gelu(self.up(x)), 0.25, True)
                return x + self.down(h)

        model = stack(Drops)
        want = train(model, one_pass, RECORDED + 2)
        with planned(model, "lean") as rt:
            self.compare(want, train(model, one_pass, RECORDED + 2, rt))
            self.assertEqual({"recompute cheap parts"}, set(choices(rt).values()))
            self.assertEqual([], rt._planner.notes())
            part = next(iter(rt._planner.keys[""].measured[0].parts.values()))
            self.assertEqual(3 * 4 * model.blocks[0].up.out_features * 4, part.lean)  # what down() reads


class Drops(Block):
    """Saves a mask last, which is there only after the second product, and what the next block needs, too."""

    def forward(self, x):
        y, _ = torch.native_dropout(self.down(self.act(self.up(self.norm(x)))), 0.25, True)
        return torch.relu(x + y)


class Earlier(Planned):
    """Second passes that end before the last tensors, which are kept."""

    @contextlib.contextmanager
    def ends(self, first):
        """Lets second passes end after so many tensors; a negative number counts from the end."""
        end = lambda m, call, loose: (first % len(call.all), 0.5) if abs(first) < len(call.all) else None
        with mock.patch.object(_plan, "EARLY", True), mock.patch.object(_plan.Measured, "_end_of", end):
            yield

    def test_every_end(self):
        model = stack(Drops)
        want = train(model, one_pass, RECORDED + 2)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        for first in range(1, 12):
            for pick in ("whole", "whole, offload"):
                with self.subTest(first=first, pick=pick), self.ends(first), planned(model, pick) as rt:
                    model.load_state_dict(state)
                    self.compare(want, train(model, one_pass, RECORDED + 2, rt))
                    self.assertEqual(4, len(choices(rt)))

    def test_what_it_leaves_out(self):
        """The product before the mask runs once, and what stays is counted."""
        ran, model = [], stack(Drops)
        for block in model.blocks:
            block.down.register_forward_hook(lambda *_: ran.append(1))
        with self.ends(-2), planned(model, "whole") as rt:
            train(model, one_pass, RECORDED, rt)
            ran.clear()
            train(model, one_pass, 1, rt)
            plan, m = rt._planner.keys[""].plan, next(m for m in rt._planner.keys[""].measured if m.ends)
            self.assertTrue(m.made(plan))
            self.assertFalse(any(other.made(plan) for other in rt._planner.keys[""].measured if other is not m))
            self.assertEqual({True}, {c.first > 0 for c in plan.choices.values()})
            self.assertEqual(4 if STOPS else 8, len(ran))
            for part in m.parts.values():
                self.assertEqual(3 * 4 * 8, part.tail)  # the mask
                self.assertEqual(part.tail, part.dropped(Choice(whole=True)) - part.dropped(plan.choices[part.unit]))
            call, p = next(iter(m.parts)), m._profile
            self.assertEqual(len(call.all), len(p.holding[call]))
            p.again[call], p.holding[call] = (100, 99), [(10 * i, i) for i in range(len(call.all))]
            first = plan.choices[call.unit].first
            self.assertEqual((10 * (first - 1), first - 1), m._second_passes()(call))
            self.assertEqual((100, 99), rt._planner.keys[""].measured[0]._second_passes()(call))

    def test_where_it_ends(self):
        """Where most bytes are freed in a given time, and nearly all of them."""
        model = stack(Drops)
        with planned(model, "whole") as rt:
            train(model, one_pass, RECORDED, rt)
            m = rt._planner.keys[""].measured[0]
            call = next(iter(m.parts))
            n, loose = len(call.all), m._part(call)[1]
            self.assertEqual(n + 1, len(m._profile.saves[call]))

            def end(*took):
                m._stamps, m._profile.saves[call] = [float(t) for t in took], list(range(n + 1))
                return m._end_of(call, loose)

            mask = n - 2  # then comes what the next block needs
            self.assertEqual((mask, 0.5), end(0, *[10] * mask, 15, 20))
            self.assertEqual((mask + 1, 0.75), end(0, *[15] * mask, 15, 20))
            self.assertIsNone(end(0, *[19] * mask, 19, 20))
            self.assertIsNone(end(*[0] * n, 20))


def counted(module, runs):
    """Makes a module note its forward passes, and lets it run in a block. Returns its forward method."""
    forward = module.forward
    module.forward = lambda x: runs.append(1) or forward(x)
    _before.know(module)
    return module.forward


class Sorts(Planned):
    """Kinds of cheap parts that free unlike many bytes in a given time are chosen separately."""

    def test_each_alone(self):
        model = stack(Block)
        want = train(model, one_pass, RECORDED + 2)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        for pick in ({"lean"}, {"lean 2"}, {"lean", "lean 2"}):
            for offload in (False, True):
                with self.subTest(pick=pick, offload=offload), mock.patch.object(_plan.Measured, "_shares_of_kinds", lambda m: {Block: {"LayerNorm": 0.8, "GELU": 0.2}}), mock.patch.object(_plan.Measured, "exchanged", lambda m, plan, *_: plan), mock.patch.object(_plan.Measured, "relaxed", lambda m, plan, _: plan), mock.patch.object(_plan.Measured, "retime", lambda m, *_: None), planned(model, "keep") as rt:
                    model.load_state_dict(state)
                    answers = lambda request: ["recompute" if unit["name"] in pick else "offload" if offload and unit["offload"] else "keep" for unit in request["units"]]
                    rt._library.choose = lambda request: answer(request, answers(request))
                    recipes = []
                    with mock.patch.object(_again.Lean, "pack", lambda lean, t, pack=_again.Lean.pack: recipes.append(pack(lean, t)) or recipes[-1]):
                        self.compare(want, train(model, one_pass, RECORDED + 2, rt))
                    known = rt._planner.keys[""]
                    m = known.measured[0]
                    self.assertEqual([{"GELU"}, {"LayerNorm"}], m._kinds[Block])
                    kept = {"GELU", "LayerNorm"} - {kind for name, kind in (("lean", "GELU"), ("lean 2", "LayerNorm")) if name in pick}
                    self.assertEqual({frozenset(kept)}, {c.kept for c in known.plan.choices.values()})
                    self.assertEqual({"GELU", "LayerNorm"} - kept, {r.kind for r in recipes if type(r) is _again.Recipe})
                    sizes = {"LayerNorm": 3 * 4 * (8 + 2) * 4, "GELU": 3 * 4 * 16 * 4}
                    for part in m.parts.values():
                        self.assertEqual(sizes, part.kinds)
                        self.assertEqual(sum(n for kind, n in sizes.items() if kind not in kept), part.dropped(known.plan.choices[part.unit]))

    def test_results_are_freed(self):
        """A result that is made again is there as long as it is needed, and not until the block is over."""
        for make in (nn.GELU, nn.Sigmoid, lambda: nn.LayerNorm(8)):
            act, runs, lean = make(), [], _again.Lean(_again.IN_PLACE, 1)
            forward = counted(act, runs)
            x, w = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
            with _again.hooks(lean.pack, lean.unpack):
                y = lean.call(act, forward, x * 1)
                loss = (torch.native_dropout(y, 0.5, True)[0] * w.exp()).sum() + (y * w).sum()
            small = lean.made[y.grad_fn]
            loss.backward(retain_graph=True)
            self.assertEqual(([1, 1], None, {}), (runs, small.y, small.values))
            want = x.grad.clone()
            loss.backward()
            self.assertTrue(torch.equal(2 * want, x.grad))

    def test_a_factor_is_made_once(self):
        """A product that is made again, as of SwiGLU, and its own gradient share the activation."""
        act, runs, lean = nn.SiLU(), [], _again.Lean(_again.IN_PLACE, 1)
        forward = counted(act, runs)
        x, up, down = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        with _again.hooks(lean.pack, lean.unpack):
            y = lean.call(act, forward, x * 1)
            loss = (y * (up * 1) @ down).sum()
        small = lean.made[y.grad_fn]
        got = torch.autograd.grad(loss, (x, up, down))
        self.assertEqual(([1, 1], None, {}), (runs, small.y, small.values))
        want = torch.autograd.grad((act(x) * up @ down).sum(), (x, up, down))
        self.assertTrue(all(map(torch.equal, want, got)))

    def test_merged(self):
        model = stack(Block)
        for shares, wanted in (({"LayerNorm": 0.34, "GELU": 0.66}, [{"LayerNorm", "GELU"}]), ({"LayerNorm": 0.1, "GELU": 0.9}, [{"LayerNorm"}, {"GELU"}]), ({}, [{"LayerNorm", "GELU"}])):
            with mock.patch.object(_plan.Measured, "_shares_of_kinds", lambda m: {Block: shares} if shares else {}), planned(model, "keep") as rt:
                train(model, one_pass, RECORDED, rt)
                m = rt._planner.keys[""].measured[0]
                self.assertEqual(wanted, m._kinds[Block])
                u = rt._planner.units.list[0]
                m._lean[u] = 1000
                self.assertEqual(1000, sum(s.took for s in m._sorts(u)))
                self.assertEqual([int(1000 * (1 - sum(shares.get(k, 0.0) for k in kept))) for kept in (["LayerNorm"], ["GELU"])], [m.again({u: Choice(lean=True, kept=frozenset(kept))}) for kept in (["LayerNorm"], ["GELU"])])

    def test_a_first_block_with_fewer(self):
        """The norm of a block whose input needs no gradient cannot be chosen, and those of the others can."""

        class Bare(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(Block() for _ in range(4))

            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return x

        model = Bare()
        with planned(model, "lean") as rt:
            train(model, one_pass, RECORDED, rt)
            for m in rt._planner.keys[""].measured:
                self.assertEqual([{"GELU"}, {"GELU", "LayerNorm"}, {"GELU", "LayerNorm"}, {"GELU", "LayerNorm"}], [set(part.kinds) for part in m.parts.values()])
                request, names = m.request(1 << 30, False)
                taken = {kind: sorted((op.get("unit"), op.get("microbatch"), op.get("storage")) for op in request["ops"] if op["op"] == kind) for kind in ("load", "release", "take", "give")}
                self.assertEqual(taken["load"], taken["release"])  # all is over with the step
                self.assertEqual(taken["take"], taken["give"])
                for pick in itertools.product((False, True), repeat=len(m._kinds[Block])):
                    said = ["recompute" if what in [f"lean {i + 1}" if i else "lean" for i, yes in enumerate(pick) if yes] else "keep" for _, what in names]
                    plan = m.plan(names, answer(request, said))
                    bytes = sum(request["storages"][op["storages"][0]] for op in request["ops"] if op["op"] == "save" and said[op["unit"]] == "recompute")
                    self.assertEqual(bytes, sum(part.dropped(plan.choices.get(part.unit, KEEP)) for part in m.parts.values()), pick)

    def test_less_is_recomputed(self):
        """Where a plan leaves room, the sort that frees least in its time is kept first."""
        model = stack(Block)
        with mock.patch.object(_plan.Measured, "_shares_of_kinds", lambda m: {Block: {"LayerNorm": 0.8, "GELU": 0.2}}), planned(model, "lean") as rt:
            train(model, one_pass, RECORDED, rt)
            known = rt._planner.keys[""]
            m, plan = known.measured[0], known.plan
            m._whole, m._lean = dict.fromkeys(m._whole, 10**7), dict.fromkeys(m._lean, 10**6)
            plan = plan._replace(answer={**plan.answer, "step_ns": 10**9})
            less = m.relaxed(plan, 3 * 4 * (8 + 2) * 4)
            self.assertEqual([frozenset(), frozenset(), frozenset(), frozenset({"LayerNorm"})], sorted((c.kept for c in less.choices.values()), key=len))
            self.assertAlmostEqual(10**9 - 8 * 10**5, less.answer["step_ns"], delta=2)


@unittest.skipUnless(hasattr(torch, "set_default_device"), "this PyTorch has no default device")
class Devices(Planned):
    def test_a_default_device(self):
        """Second passes have that of the first, though PyTorch hides it from what a backward pass runs."""
        seen = []

        class Looks(Block):
            def forward(self, x):
                seen.append(torch.empty(0).device.type)
                return super().forward(x)

        def step(model, i):
            x = torch.randn(3, 4, 8)
            for outside in (False, True):
                with torch.device(DEVICE), torch.device("meta"):
                    loss = model(x).square().mean()
                    None if outside else loss.backward()
                loss.backward() if outside else None
            return loss

        for pick in ("whole", "lean"):
            seen.clear()
            self.assertEqual(4, len(self.under(stack(Looks), step, pick)[0]))
            self.assertGreater(len(seen), 2 * 4 * 2 * (RECORDED + 2))
            self.assertEqual({"meta"}, set(seen))


class Refused(Planned):
    """Blocks whose second forward pass is not the first again."""

    def refused(self, block, reason, pick="whole"):
        done, reasons = self.under(stack(block), pick=pick)
        self.assertEqual({}, {name: c for name, c in done.items() if c in RECOMPUTED})
        self.assertEqual(4, len(reasons))
        for why in reasons.values():
            self.assertRegex(why, reason)

    def test_writes_to_its_input(self):
        class Writes(Block):
            def forward(self, x):
                return self.down(self.up(x.add_(1.0)))

        self.refused(Writes, "writes to its input")

    def test_draws_from_python(self):
        class Draws(Block):
            def forward(self, x):
                return super().forward(x) * random.choice((1.0, 2.0))

        random.seed(1)
        model = stack(Draws)
        with planned(model) as rt:
            train(model, one_pass, SETTLED, rt)
            self.assertFalse(RECOMPUTED & set(choices(rt).values()))
            self.assertEqual({"it draws from Python's random numbers"}, set(why(rt).values()))

    def test_changes_buffers(self):
        class Counts(Block):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.zeros(()))

            def forward(self, x):
                self.count += 1
                return super().forward(x)

        class Replaces(Counts):
            def forward(self, x):
                self.count = self.count + 1
                return Block.forward(self, x)

        self.refused(Counts, "changes its buffers")
        self.refused(Replaces, "changes its buffers")

    def test_keeps_numbers(self):
        """Some results depend on them, in later steps."""

        class Counts(Block):
            def __init__(self):
                super().__init__()
                self.calls = 0

            def forward(self, x):
                self.calls += 1
                return super().forward(x) * (2.0 if self.calls == RECORDED + 2 else 1.0)

        class Lists(Block):
            def __init__(self):
                super().__init__()
                self.losses = []

            def forward(self, x):
                self.losses.append(1.0)
                return super().forward(x) * (1.0 + len(self.losses) // 3)

        self.refused(Counts, "changes its attribute 'calls'")
        self.refused(Lists, "changes its attribute 'losses'")

    def test_caches_are_no_state(self):
        """What the first call alone sets does no harm."""

        class Caches(Block):
            longest, table = 0, None

            def forward(self, x):
                if self.longest < x.shape[1]:
                    self.longest, self.table = x.shape[1], torch.arange(float(x.shape[1]))[:, None]
                return super().forward(x + self.table)

        done, reasons = self.under(stack(Caches))
        self.assertEqual({}, reasons)
        self.assertEqual({"recompute"}, set(done.values()))

    def test_depends_on_what_is_outside(self):
        calls = []

        class Depends(Block):
            def forward(self, x):
                calls.append(1)
                return super().forward(x * len(calls))

        model = stack(Depends)
        with planned(model) as rt:
            train(model, one_pass, SETTLED, rt)
            self.assertFalse(RECOMPUTED & set(choices(rt).values()))
            self.assertRegex(rt._planner.notes()[0], "blocks.0 and 3 more cannot be recomputed: its second forward pass makes other values")

    def test_little_room(self):
        """Second passes are compared by digests then, with the same verdicts."""
        calls, noise = [], [torch.Generator("cpu").manual_seed(1)]  # where nobody looks

        class Depends(Block):
            def forward(self, x):
                calls.append(1)
                return super().forward(x * len(calls))

        class Varies(Block):  # as kernels do that add in any order
            def forward(self, x):
                return super().forward(x * (1 + 1e-6 * torch.rand(x.shape, generator=noise[0], device="cpu").to(x.device)))

        class Draws(Block):
            def forward(self, x):
                return super().forward(x * torch.rand(x.shape, generator=noise[0], device="cpu").to(x.device))

        other = "its second forward pass makes other values"
        for make, reason in ((Block, ""), (Attention, ""), (Varies, ""), (Depends, other), (Draws, other)):
            model = stack(make)
            with self.subTest(make.__name__), mock.patch.object(_profile, "fits", side_effect=itertools.cycle([False, True])), planned(model) as rt:
                train(model, one_pass, SETTLED, rt)
                self.assertEqual([not reason] * 4, [u.whole for u in rt._planner.units.list])
                self.assertTrue(all(reason in u.why and bool(u.why) == bool(reason) for u in rt._planner.units.list), why(rt))

    def test_digests(self):
        """Equal of equal tensors, whatever their strides, and of no others."""
        digests, t = Digests(torch.device(DEVICE), 0), torch.randn(3, 50, 70, device=DEVICE)
        ones = [t, t.half(), t.transpose(0, 2), t.chunk(2, -1)[1], t[:, :1].expand(3, 50, 70), torch.view_as_complex(torch.stack([t, t], -1)), t > 0, t.double(), t[:0], t[0, 0, 0], t.flip(0), t.contiguous().view(3, 70, 50)]
        for i, a in enumerate(ones):
            if 0 not in a.stride():  # elements in the same memory are one
                self.assertTrue(digests.of(a).same(digests.of(torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a))), i)
                self.assertTrue(digests.of(a).same(digests.of(a.contiguous())), i)
            self.assertEqual([i], [j for j, b in enumerate(ones) if digests.of(a).same(digests.of(b))])
            if a.numel() and 0 not in a.stride():
                b = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a)
                b[(-1,) * b.dim()] = a[(-1,) * a.dim()].logical_not()
                self.assertFalse(digests.of(a).same(digests.of(b)), i)

    def test_input_that_is_written_later(self):
        """Plain PyTorch allows it if autograd does not save the input."""

        class Adds(Block):
            def forward(self, x):
                return super().forward(x + 1)

        def step(model, i):
            x = model.first(torch.randn(3, 4, 8))
            for block in model.blocks:
                y = block(x)
                x.zero_()
                x = y
            loss = model.last(x).square().mean()
            loss.backward()
            return loss

        done, reasons = self.under(stack(Adds), step)
        self.assertEqual(({}, 4), (done, len(reasons)))

    def test_a_second_pass_ends_early(self):
        """As soon as it has saved everything, where PyTorch can."""
        ends = []

        class Noted(Block):
            def forward(self, x):
                y = super().forward(x)
                ends.append(1)
                return y

        model = stack(Noted)
        with planned(model) as rt:
            train(model, one_pass, SETTLED, rt)
            ends.clear()
            with rt.step():
                one_pass(model, 0)
        self.assertEqual(4 if hasattr(checkpoint, "set_checkpoint_early_stop") else 8, len(ends))

    def test_backward_inside_of_forward(self):
        class Inner(Block):
            def forward(self, x):
                with torch.enable_grad():
                    w = x.detach().requires_grad_()
                    g, = torch.autograd.grad(super().forward(w).square().sum(), w)
                return super().forward(x) + g

        done, reasons = self.under(stack(Inner))
        self.assertEqual({}, done)
        self.assertEqual(4, len(reasons))

    def test_kept_by_name(self):
        done, reasons = self.under(stack(), keep=["blocks.[01]"])
        self.assertEqual({"blocks.2": "recompute", "blocks.3": "recompute"}, done)
        self.assertEqual({"keep= names it, or a part of it"}, set(reasons.values()))

    def test_what_inference_made(self):
        class Biased(Block):
            def forward(self, x, bias):
                return super().forward(x) + bias

        def step(model, i):
            with torch.inference_mode():
                bias = torch.randn(8)
            x = model.first(torch.randn(3, 4, 8))
            for block in model.blocks:
                x = block(x, bias)
            loss = model.last(x).square().mean()
            loss.backward()
            return loss

        for pick in ("whole", "whole, offload"):
            with self.subTest(pick=pick):
                self.under(stack(Biased), step, pick)


class Later(Planned):
    """Blocks that begin to misbehave once they are recomputed."""

    def raises(self, block, change, pick="whole", what="cannot be recomputed"):
        model = stack(block)
        with mock.patch.object(_plan, "EARLY", False), planned(model, pick) as rt:
            train(model, one_pass, SETTLED, rt)
            self.assertTrue(choices(rt))
            change(model)
            with self.assertRaisesRegex(stowage.Error, what):
                train(model, one_pass, 1, rt)
            self.assertIsNone(rt._now)
            for b in model.blocks:
                b.mode = None
            train(model, one_pass, 2, rt)

    def test_other_tensors(self):
        class Other(Block):
            mode = None

            def forward(self, x):
                x = super().forward(x)
                if self.mode:
                    passes.append(1)
                    x = x.reshape(-1).sin().reshape(x.shape) if len(passes) % 2 else x.sin().cos()  # also where passes end early
                return x

        passes = []
        self.raises(Other, lambda model: setattr(model.blocks[2], "mode", 1))

    def test_writes_to_its_input(self):
        class Writes(Block):
            mode = None

            def forward(self, x):
                if self.mode:
                    x = x.add_(1.0)
                return super().forward(x)

        for pick in ("whole", "whole, offload"):
            self.raises(Writes, lambda model: setattr(model.blocks[0], "mode", 1), pick, "modified by an inplace operation")

    def test_cheap_module_that_writes(self):
        class Act(nn.Module):
            def forward(self, x):
                return x.mul_(2.0) if on else nn.functional.gelu(x)

        on = []
        model = stack(lambda: Block(act=Act))
        with planned(model, "lean") as rt:
            train(model, one_pass, SETTLED, rt)
            on.append(1)
            with self.assertRaisesRegex(stowage.Error, "Act writes to its input"):
                train(model, one_pass, 1, rt)

    def test_weights_that_change_before_the_backward_pass(self):
        model = stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)))
        for cast in (False, True):
            with self.subTest(cast=cast), planned(model) as rt:
                train(model, one_pass, SETTLED, rt)
                self.assertEqual("recompute", choices(rt).get("blocks.1"))
                with self.assertRaisesRegex(stowage.Error, "modified by an inplace operation"), rt.step():
                    with torch.autocast("cpu", enabled=cast):
                        loss = model(torch.randn(3, 4, 8)).float().square().mean()
                    with torch.no_grad():
                        model.blocks[1][2].weight.mul_(2.0)
                    loss.backward()

    def test_buffers_that_change_before_the_backward_pass(self):
        """All but the running means of a norm that counts in them: a second pass does not read those."""

        class Scaled(Block):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.ones(8))
                self.over = nn.BatchNorm1d(4)

            def forward(self, x):
                return super().forward(self.over(x) * self.scale)

        for name, training, fails in (("scale", True, True), ("over.running_mean", True, False), ("over.running_mean", False, True)):
            model = stack(Scaled)
            model.train(training)
            with self.subTest(name=name, training=training), planned(model) as rt:
                train(model, one_pass, SETTLED, rt)
                self.assertEqual("recompute", choices(rt).get("blocks.1"))
                with self.assertRaisesRegex(stowage.Error, "modified by an inplace operation") if fails else contextlib.nullcontext(), rt.step():
                    loss = model(torch.randn(3, 4, 8)).square().mean()
                    model.blocks[1].get_buffer(name).mul_(2.0).add_(1.0)
                    loss.backward()

    def test_weights_of_others_that_change_before_the_backward_pass(self):
        other = torch.randn(8, 8, requires_grad=True)

        class Uses(Block):
            def forward(self, x):
                return super().forward(x) @ other

        model = stack(Uses)
        with planned(model) as rt:
            train(model, one_pass, SETTLED, rt)
            with self.assertRaisesRegex(stowage.Error, "modified by an inplace operation"), rt.step():
                loss = model(torch.randn(3, 4, 8)).square().mean()
                with torch.no_grad():
                    other.mul_(2.0)
                loss.backward()


if __name__ == "__main__":
    unittest.main()
