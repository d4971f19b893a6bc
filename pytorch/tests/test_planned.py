"""Steps that follow a plan: whatever it says, everything is equal bit for bit. SPEC S8.6."""

import contextlib
import os
import random
import unittest
from unittest import mock

from blocks import PLANS, Block, Compared, Layer, Stack, any_plan, choices, force, one_pass, planned, refused, stack, train
from common import DEVICE, runtime, stowage, torch
from stowage._planned import RECORDED, SLACK
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import CASES, Cube

SEEDS = int(os.environ.get("STOWAGE_SEEDS", 8))


class Exact(Compared):
    def every_plan(self, model, step=one_pass, fine=(False,), steps=RECORDED + 2, plans=tuple(PLANS), but=()):
        """Trains under every plan, with a library that moves as badly as it may. No block is refused but for these reasons: of one
        that is, everything is kept, and a second pass that goes wrong would not show."""
        want = train(model, step, steps)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        seen = set()
        for parts in fine:
            for name in plans:
                with self.subTest(plan=name, fine=parts):
                    model.load_state_dict(state)
                    with planned(model, any_plan(name) if name.isdigit() else name, parts) as rt:
                        self.compare(want, train(model, step, steps, rt))
                        self.assertEqual({}, refused(rt, but))
                        seen |= set(choices(rt).values())
        return seen

    def test_layers(self):
        model = stack(Layer, 3)
        seen = self.every_plan(model, fine=(False, True), plans=[*PLANS, "1", "2"])
        self.assertEqual({"recompute", "recompute cheap parts", "recompute, offload inputs", "recompute cheap parts, offload", "offload"}, seen)

    def test_masks_by_name(self):
        mask = torch.ones(4, 4).triu(1).bool()

        def step(model, i):
            x = model.first(torch.randn(3, 4, 8))
            for block in model.blocks:
                x = block(x, mask=mask)
            loss = model.last(x).square().mean()
            loss.backward()
            return loss

        self.every_plan(stack(Layer, 3), step, (False, True))

    @unittest.skipUnless(DEVICE == "cpu", "budgets of some KiB: the libraries of a GPU alone hold more. RealPeaks of test_budget.py has budgets there")
    def test_budgets(self):
        """The solver of the library chooses, and the library offloads."""
        model = stack(Layer, 4)
        want = train(model, one_pass, 12)
        state = {name: t.clone() for name, t in model.state_dict().items()}
        held = 2 * sum(4 * p.numel() for p in model.parameters())
        saved = measure(model)
        chosen = set()
        for share in (100, 85, 70, 50, 30, 20):
            with self.subTest(share=share):
                model.load_state_dict(state)
                with runtime("budget", budget=held + saved * share // 100) as rt:
                    rt.attach(model)
                    try:
                        self.compare(want, train(model, one_pass, 12, rt))
                        chosen.update(choices(rt).values())
                    except stowage.BudgetError:
                        self.assertLessEqual(share, 30)
        self.assertTrue(chosen, "nothing was recomputed or offloaded")

    def test_zoo(self):
        """Every case as the body of equal blocks."""
        for name in CASES:
            with self.subTest(case=name):
                self.every_plan(stack(lambda: Zoo(name), 2), steps=RECORDED + 1, plans=["whole", "lean, offload"], but=["a backward pass runs inside"])

    def test_random_models(self):
        for seed in range(SEEDS):
            with self.subTest(seed=seed):
                torch.manual_seed(seed)
                kinds = random.Random(seed).choices(list(BODIES), k=4)
                tied = nn.Linear(8, 8)
                model = Stack(*(Anything(kinds, tied) for _ in range(3)))
                self.every_plan(model, random_step, steps=RECORDED + 2, plans=["whole", str(seed)])


def measure(model):
    """Returns the bytes that one pass saves."""
    storages = {}
    weights = {p.data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (storages.update({t.storage().data_ptr(): 4 * len(t.storage())}), t)[1], lambda t: t):
        one_pass(model, 0)
    model.zero_grad(set_to_none=True)
    return sum(n for at, n in storages.items() if at not in weights)


OWN = {"twice_differentiated", "twice_backward", "accumulated", "interleaved", "part_of_the_graph"}


class TooSmallAPlan(unittest.TestCase):
    @unittest.skipUnless(DEVICE == "cpu", "budgets of some KiB: the libraries of a GPU alone hold more. RealPeaks of test_budget.py has budgets there")
    def test_the_error_names_a_larger_budget(self):
        """Also where what was measured would fit, and only a plan does not."""
        model = stack(Layer, 4)
        for budget in range(24, 60, 3):
            with runtime("budget", budget=budget << 10) as rt:
                rt.attach(model)
                try:
                    for i in range(RECORDED + 3):
                        with rt.step():
                            one_pass(model, i)
                except stowage.BudgetError as e:
                    self.assertGreater(e.least, e.budget, e)
                    self.assertEqual(budget << 10, e.budget)


class Bases(unittest.TestCase):
    """What is held between steps may grow after a plan was made."""

    def test_little_more_makes_another_plan(self):
        model = stack(Block, 3)
        with runtime("budget") as rt:
            rt.attach(model)
            train(model, one_pass, RECORDED + 1, rt)
            known, size = rt._planner.keys[""], rt._budget.size
            for grown, noticed in ((size // 200, False), (size // 100, True)):
                base = known.base
                with mock.patch.object(rt._budget, "held_now", lambda: base + grown):
                    rt._planner._rebase("", known)
                self.assertEqual(noticed, known.base == base + grown, grown)

    def test_no_other_plan_if_there_is_room(self):
        """A search takes long. Where peaks are measured, they say what is left."""
        model = stack(Block, 3)
        with runtime("budget") as rt:
            rt.attach(model)
            train(model, one_pass, RECORDED + 1, rt)
            known, size, grown = rt._planner.keys[""], rt._budget.size, rt._budget.size // 100
            for measures, stage, peak, another in (
                (True, "settled", size - grown - size // SLACK, False),
                (True, "settled", size - grown - size // SLACK + 1, True),
                (True, "settled", 0, True),  # it was not read
                (True, "recompute", size // 2, True),
                (False, "settled", size // 2, True),
            ):
                base, known.stage, known.peak = known.base, stage, peak
                with mock.patch.object(rt._budget, "held_now", lambda: base + grown), mock.patch.object(type(rt._budget), "measures", measures), mock.patch.object(rt._planner, "_adopt", return_value=True) as adopt:
                    rt._planner._rebase("", known)
                self.assertEqual((another, base + grown), (adopt.called, known.base), (measures, stage, peak))

    def test_growth_beside_a_plan_that_leaves_nothing(self):
        """The smallest growth needs another plan then, which leaves more."""
        model = stack(Block, 3)
        with runtime("budget") as rt:
            rt.attach(model)
            train(model, one_pass, RECORDED + 1, rt)
            known, size = rt._planner.keys[""], rt._budget.size
            for squeezed, peak, grown, another in ((False, size - 10, 11, False), (True, size - 10, 10, False), (True, size - 10, 11, True), (True, size, -1, False), (True, size, 0, False)):
                base, known.stage, known.peak, known.squeezed = known.base, "settled", peak, squeezed
                with mock.patch.object(rt._budget, "held_now", lambda: base + grown), mock.patch.object(rt._planner, "_adopt", return_value=True) as adopt:
                    rt._planner._rebase("", known)
                self.assertEqual((another, base + another * grown), (adopt.called, known.base), (squeezed, peak, grown))

    @unittest.skipUnless(DEVICE == "cpu", "budgets of some KiB: the libraries of a GPU alone hold more. RealPeaks of test_budget.py has budgets there")
    def test_state_of_an_optimiser(self):
        model = stack(Layer, 4)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())

        def steps(rt, n):
            peaks = []
            for i in range(n):
                model.zero_grad(set_to_none=True)
                with rt.step():
                    one_pass(model, i)
                peaks.append(rt._budget.step_peak)
            return rt.stats()["plans"][""], peaks

        with runtime("budget") as rt:
            rt.attach(model)
            saved = steps(rt, RECORDED + 1)[0]["saved"]
        budget = 2 * weights + saved + saved // 4
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
        with runtime("budget", budget=budget) as rt:
            rt.attach(model, optimizer=optimizer)
            plan, before = steps(rt, RECORDED + 2)
            self.assertEqual({}, plan["choices"])
            optimizer.step()  # makes its state
            plan, peaks = steps(rt, 4)
            self.assertNotEqual({}, plan["choices"])
            self.assertLessEqual(max(peaks), budget, before)


class Zoo(nn.Module):
    """A case of the zoo. Its leaves depend on the input, and its backward pass is that of the
    whole model, except in cases that have one of their own."""

    def __init__(self, name):
        super().__init__()
        self.name, self.linear = name, nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        case = lambda: CASES[self.name](lambda _: contextlib.nullcontext())[0]
        if self.name in OWN:
            return y.tanh() + x + case().detach().sum().tanh()
        scale = 1 + 0.01 * y.mean()
        with mock.patch("zoo.leaf", lambda *shape, dtype=torch.float32: torch.randn(*shape, dtype=dtype) * scale), mock.patch("zoo.grads", lambda loss, *_: [loss]):
            loss = case()
        return y.tanh() + x + torch.view_as_real(loss + 0j).sum().tanh()


BODIES = {}


def kind(fn):
    BODIES[fn.__name__] = fn
    return fn


class Anything(nn.Module):
    """A block of some of the things that blocks do."""

    def __init__(self, kinds, tied):
        super().__init__()
        self.kinds, self.tied = kinds, tied
        self.linear = nn.ModuleList(nn.Linear(8, 8) for _ in kinds)
        self.norm, self.batch = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.gelu, self.silu, self.relu, self.drop = nn.GELU(), nn.SiLU(), nn.ReLU(inplace=True), nn.Dropout(0.2)

    def forward(self, x, other, options, *, ids, times=1, state=None):
        for i, k in enumerate(self.kinds):
            x = BODIES[k](self, self.linear[i](x), other, options, ids, state) * times
        return {"name": "block", "unused": x.exp(), "x": x, "more": other}


@kind
def normed(m, x, other, options, ids, state):
    return m.norm(x) + x


@kind
def batch_normed(m, x, other, options, ids, state):
    return m.batch(x) * 0.5


@kind
def activated(m, x, other, options, ids, state):
    return m.gelu(x) * m.silu(x)


@kind
def in_place(m, x, other, options, ids, state):
    return m.relu(m.norm(x)) + m.relu(x * 2)


@kind
def dropped(m, x, other, options, ids, state):
    return m.drop(m.gelu(x)) + nn.functional.dropout(m.silu(x), 0.3)


@kind
def viewed(m, x, other, options, ids, state):
    a, b = x.view(12, 2, 4).unbind(1)
    return torch.cat((a * b, a.t().contiguous().t() + m.norm(x)[:, ::2]), 1)


@kind
def gathered(m, x, other, options, ids, state):
    return x[ids] + torch.where(options["mask"], x, other[0])


@kind
def given_twice(m, x, other, options, ids, state):
    return x * other[0] if other[0] is other[1] else x / 0


@kind
def from_dictionary(m, x, other, options, ids, state):
    return (x * options["scale"]).sin() + (0 if state is None else state.tanh())


@kind
def of_noise(m, x, other, options, ids, state):
    return x + torch.randn_like(x) * x.detach()


@kind
def by_hand(m, x, other, options, ids, state):
    return Cube.apply(x.tanh() + 2, other[0].cos() + 2) * 0.1


@kind
def checkpointed(m, x, other, options, ids, state):
    return checkpoint(lambda t: m.gelu(m.norm(t)), x, use_reentrant=False) + checkpoint(lambda t: m.drop(m.silu(t)), x, use_reentrant=True)


@kind
def frozen(m, x, other, options, ids, state):
    with torch.no_grad():
        y = m.norm(x).sigmoid()
    return x * y


@kind
def shared(m, x, other, options, ids, state):
    return m.tied(m.gelu(m.tied(x))) * 0.5


@kind
def cast(m, x, other, options, ids, state):
    with torch.autocast("cpu", torch.bfloat16):
        y = m.tied(m.linear[0](x))
        with torch.autocast("cpu", enabled=False):
            return m.linear[0](y.float().tanh()) + y


@kind
def complex_numbers(m, x, other, options, ids, state):
    z = torch.view_as_complex(x.view(12, 4, 2))
    return torch.view_as_real(z.conj() * z * z.conj().imag.neg()).reshape(12, 8).tanh()


@kind
def rewritten(m, x, other, options, ids, state):
    """What was saved first is needed by nobody, and may be written to."""
    y = x.sigmoid().clone()
    y * x
    y.mul_(2)
    return y * x


@kind
def strided(m, x, other, options, ids, state):
    y = x.t().contiguous().view(2, 4, 12)[1].t()
    return torch.cat((y * y.flip(0), x[:, :1].expand(12, 4) * y.roll(1, 0)), 1)


@kind
def quiet(m, x, other, options, ids, state):
    """Statistics that are read beside the graph, and evaluation in between."""
    m.eval()
    with torch.no_grad():
        y = m.drop(m.gelu(x))
    m.train()
    return m.drop(x) * y.mean().item()


def random_step(model, i):
    x = model.first(torch.randn(12, 8))
    other, ids = torch.tanh(x), torch.randperm(12)
    options = {"mask": torch.rand(12, 8) > 0.5, "scale": 0.7}
    for n, block in enumerate(model.blocks):
        out = block(x, (other, other), options, ids=ids, times=1.0 if n else 1, state=x if n == 1 else None)
        x, (other, _) = out["x"].clamp(-3, 3), out["more"]
    loss = model.last(x).square().mean()
    loss.backward()
    return loss


class Several(Compared):
    def test_models_with_equal_names(self):
        """Blocks of one that cannot be recomputed are not, whatever the other's can."""

        class Drawing(Block):
            def forward(self, x):
                return super().forward(x) * (1 + random.random())

        def steps(first, second, rt):
            random.seed(1)
            torch.manual_seed(1)
            out = []
            for _ in range(RECORDED + 2):
                first.zero_grad(), second.zero_grad()
                with rt.step() if rt is not None else contextlib.nullcontext():
                    (first(torch.randn(3, 4, 8)).square().sum() + second(torch.randn(3, 4, 8)).square().sum()).backward()
                out.append([p.grad.clone() for p in [*first.parameters(), *second.parameters()]])
            return out

        want = steps(stack(Drawing, 3), stack(Block, 3), None)
        first, second = stack(Drawing, 3), stack(Block, 3)
        with runtime("budget") as rt:
            force(rt, lambda _: "whole")
            rt.attach(first)
            rt.attach(second)
            self.compare(want, steps(first, second, rt))
            self.assertEqual({False, True}, {u.whole for u in rt._planner.units.list})

    def test_a_model_that_is_refused(self):
        model = stack(Block, 3)
        with runtime("budget") as rt:
            force(rt, lambda _: "whole")
            rt.attach(model)
            train(model, one_pass, RECORDED + 2, rt)
            wrapped = dict(rt._planner.units._wrapped)
            self.assertTrue(wrapped)
            with self.assertRaisesRegex(stowage.Error, "matches no module"):
                rt.attach(stack(Block, 2), keep=["typo*"])
            self.assertEqual(wrapped, rt._planner.units._wrapped)


if __name__ == "__main__":
    unittest.main()
