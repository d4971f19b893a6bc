"""Random programs: operations, views, groups in groups, microbatches, branches that die,
backward passes in the middle and of gradients, exceptions, rows; beside the same program
without the runtime."""

import contextlib
import os
import random
import unittest

from common import plain, runtime, same, stowage, torch, under
from stowage import _rerun
from torch.utils.checkpoint import checkpoint
from zoo import leaf

SEEDS = int(os.environ.get("STOWAGE_SEEDS", 60))

# Of so many live rows; programs save each many times.
MASKS = [(torch.arange(12) < live)[:, None] for live in range(13)]


class Stopped(Exception):
    pass


def operations(r, pool):
    """One operation on tensors of 12 x 12; results stay near 1."""
    x, y = r.choice(pool), r.choice(pool)
    return r.choice((
        lambda: torch.tanh(x @ y),
        lambda: torch.sigmoid(x) * y,
        lambda: torch.exp(-x.square()),
        lambda: (x.t() + y).softmax(-1),
        lambda: torch.cat((x[:5], y[5:])).sin(),
        lambda: x.view(3, 4, 12).transpose(0, 1).reshape(12, 12) * y[:, :1].expand(12, 12),
        lambda: torch.as_strided(x.clone(), (12, 12), (1, 12)).cos(),
        lambda: x.clone().mul_(0.5).tanh_(),
        lambda: torch.nn.functional.dropout(x, 0.3) * x.detach(),
        lambda: torch.nn.functional.layer_norm(x, (12,)),
    ))()


class Keeps(torch.autograd.Function):
    """Its backward pass keeps what it is given, to be read when others were done with."""

    @staticmethod
    def forward(ctx, x, mask, kept):
        ctx.save_for_backward(x)
        ctx.mask, ctx.kept = mask, kept
        return x * 0.5

    @staticmethod
    def backward(ctx, grad):
        ctx.kept.append((ctx.saved_tensors[0].detach(), ctx.mask))
        return grad * 0.5, None, None


def rows(r, pool, stash, kept):
    """An operation on a buffer of which some rows are live. Others are as large as no
    result is, and no result has them: where they are zero the gradients are the same."""
    x, y, live, name = r.choice(pool), r.choice(pool), r.randint(0, 12), r.choice(("expert_fc1", "expert_fc1", "moe_act"))
    mask, count = MASKS[live], torch.tensor(live)
    masked = lambda t: torch.where(mask, t, torch.zeros(()))

    def buffer(x):
        return stash(torch.where(mask, x, torch.tensor(1e3)).contiguous(), count, name)

    def counted_again(same):
        """What was saved with few rows is saved with all."""
        b = buffer(x)
        z = masked(b * y)
        count.fill_(12)
        return z + stash(b, count if same else torch.tensor(12), name) * y * 1e-3

    def written():
        """The count, before anything is saved."""
        b = buffer(x)
        count.fill_(live // 2)
        return masked(b * y)

    return r.choice((
        lambda: masked(buffer(x) @ y).tanh(),
        lambda: masked(buffer(x) * buffer(y)).sin(),
        lambda: masked(buffer(x).view(2, 6, 12)[1].cos().repeat(2, 1) * buffer(y).t()[:, :1].t()[:, :1]) if live > 6 else masked(buffer(x).exp()),
        lambda: masked(buffer(x).add_(1.0) * y),
        lambda: masked(buffer(x).detach() * y),
        lambda: counted_again(True),
        lambda: counted_again(False),
        written,
        lambda: masked(Keeps.apply(buffer(x), mask, kept)),
        lambda: masked(Keeps.apply(buffer(x) * y, mask, kept) + Keeps.apply(buffer(y), mask, kept)),
        lambda: checkpoint(lambda t: masked(buffer(t) * buffer(t.sin())), x * 1.0, use_reentrant=False),
    ))()


def read(kept, results):
    results.extend(torch.where(mask, t, torch.zeros(())) for t, mask in kept)
    kept.clear()


def program(seed, stash=None):
    """With stash some operations are on rows."""

    def case(g):
        r = random.Random(seed)
        weights = [leaf(12, 12) for _ in range(3)]
        pool, results, kept = list(weights), [], []

        def block(depth):
            for _ in range(r.randint(1, 5)):
                what = r.random()
                if what < 0.25 and depth < 3:
                    with contextlib.suppress(Stopped), g(r.choice("abc")):
                        block(depth + 1)
                        if r.random() < 0.1:
                            raise Stopped
                elif what < 0.35:
                    loss = torch.stack([t.sum() for t in r.sample(pool, min(3, len(pool)))]).sum()
                    if loss.requires_grad:
                        twice = stash is not None and r.random() < 0.4
                        grads = torch.autograd.grad(loss, weights, retain_graph=True, create_graph=twice, allow_unused=True)
                        results.extend(t.detach().clone() for t in grads if t is not None)
                        loss = sum(t.sin().sum() for t in grads if t is not None and t.requires_grad)
                        if twice and torch.is_tensor(loss):
                            loss.backward(retain_graph=True)
                elif what < 0.45 and len(pool) > 5:
                    pool.pop(r.randrange(3, len(pool)))
                elif stash is not None and what < 0.75:
                    pool.append(rows(r, pool, stash, kept))
                else:
                    pool.append(operations(r, pool))

        for _ in range(r.randint(1, 3)):  # microbatches
            block(0)
            if r.random() < 0.7:
                torch.stack([t.sum() for t in pool[-3:]]).sum().backward(retain_graph=True)
            if r.random() < 0.4:
                del pool[3:]
            if r.random() < 0.2:
                read(kept, results)
        read(kept, results)
        return results + [w.grad for w in weights if w.grad is not None] + [torch.rand(2)]

    return case


class Random(unittest.TestCase):
    def test_programs(self):
        for kind in ("offload", "limit", "fake-a", "fake-b"):
            with runtime(kind) as rt:
                for seed in range(SEEDS):
                    case = program(seed)
                    want = plain(case, seed)
                    for turn in range(2):
                        with self.subTest(kind=kind, seed=seed, turn=turn):
                            got = under(rt, case, seed, key=str(seed))
                            self.assertEqual(len(want), len(got))
                            for a, b in zip(want, got):
                                self.assertTrue(same(a, b))

    def test_programs_with_rows(self):
        policy = {"a": "offload", "b": "keep", "expert_fc1": "stash", "moe_act": "offload"}
        only = {"expert_fc1": "stash"}
        for kind, settings in (
            ("counts", {"policy": policy}),
            ("live", {"policy": only, "live": 0.1}),
            ("all", {"policy": only, "live": 1.0}),
            ("limit", {"saved_limit": "16KiB"}),
            ("fake-a", {"policy": policy}),
            ("fake-b", {"policy": only}),
        ):
            with runtime(kind, **settings) as rt:
                for seed in range(SEEDS):
                    want = plain(program(seed, lambda x, *_: x), seed)
                    for turn in range(2):
                        with self.subTest(kind=kind, seed=seed, turn=turn):
                            got = again(rt, program(seed, rt.stash), seed)
                            for a, b in zip(want, got, strict=True):
                                self.assertTrue(same(a, b))


def again(rt, case, seed):
    """Two keys for all programs: plans are made from others than those that follow them."""
    for _ in range(_rerun.TRIES):
        with contextlib.suppress(stowage.Overflow):
            return under(rt, case, seed, key=str(seed % 2))
    raise AssertionError(f"it lacks room {_rerun.TRIES} times")


if __name__ == "__main__":
    unittest.main()
