"""Random programs: operations, views, groups in groups, microbatches, branches that die,
backward passes in the middle, exceptions; beside the same program without the runtime."""

import contextlib
import os
import random
import unittest

from common import plain, runtime, same, torch, under
from zoo import leaf

SEEDS = int(os.environ.get("STOWAGE_SEEDS", 60))


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


def program(seed):
    def case(g):
        r = random.Random(seed)
        weights = [leaf(12, 12) for _ in range(3)]
        pool, results = list(weights), []

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
                        grads = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
                        results.extend(t for t in grads if t is not None)
                elif what < 0.45 and len(pool) > 5:
                    pool.pop(r.randrange(3, len(pool)))
                else:
                    pool.append(operations(r, pool))

        for _ in range(r.randint(1, 3)):  # microbatches
            block(0)
            if r.random() < 0.7:
                torch.stack([t.sum() for t in pool[-3:]]).sum().backward(retain_graph=True)
            if r.random() < 0.4:
                del pool[3:]
        return results + [w.grad for w in weights if w.grad is not None] + [torch.rand(2)]

    return case


class Random(unittest.TestCase):
    def test_programs(self):
        for kind in ("offload", "budget", "fake-a", "fake-b"):
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


if __name__ == "__main__":
    unittest.main()
