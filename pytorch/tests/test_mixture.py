"""The peak of steps of a mixture of experts, whose sizes follow the routing, with an allocator that counts real
tensors. SPEC S8.6."""

import contextlib
import functools
import itertools
import sys
import types
import unittest
from unittest import mock

import torch.nn.functional as F
from common import DEVICE, PLUGIN, runtime, torch
from stowage._plan import Plan
from stowage._planned import RECORDED
from stowage._profile import Profile
from stowage._record import storage_of
from test_peaks import Allocator
from torch.utils.checkpoint import checkpoint
from torch.utils._pytree import tree_flatten

sys.path.insert(0, str(PLUGIN / "bench"))

import rivals_models

TOKENS, VOCABULARY = (4, 33), 500


class Sparing(Allocator):
    """The same for many small operators: it looks for what was freed only where there may be a new peak."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = {storage_of(t)._cdata: t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)}
        new = [t for s, t in made.items() if s not in self.storages]
        if self.now + sum(storage_of(t).nbytes() for t in new) > min(self.high, self.most):
            self.allocated()
        for t in new:
            self.add(t)
        return out


def attend(q, k, v):
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v  # not every CPU has kernels of attention for bf16


@unittest.skipUnless(DEVICE == "cpu", "the allocator counts tensors of the CPU")
@mock.patch.object(rivals_models, "attend", attend)
class Mixture(unittest.TestCase):
    @staticmethod
    def model():
        torch.manual_seed(1)
        model = rivals_models.Llama(VOCABULARY, 3, 32, 2, 1, 56, 3, dtype=torch.bfloat16)
        ids, memory = torch.randint(VOCABULARY, TOKENS), Sparing(model)
        memory.add(ids)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            memory.add(p.grad)
        return model, ids, memory

    @staticmethod
    def step(model, ids, memory, rt=None):
        """Runs a step. Returns its peak."""
        memory.most = memory.allocated()
        with contextlib.nullcontext() if rt is None else rt.step():
            logits = model(ids[:, :-1])
            F.cross_entropy(logits.view(-1, VOCABULARY).float(), ids[:, 1:].reshape(-1)).backward()
        return memory.most

    @contextlib.contextmanager
    def recorded(self, least):
        """Yields what is known of steps of a mixture, and a function that returns the peak of a step that
        follows a plan."""
        model, ids, memory = self.model()
        step = lambda: self.step(model, ids, memory, rt)
        with memory, runtime("budget", budget="1GiB", memory=memory, least=least) as rt:
            rt.attach(model)
            for _ in range(RECORDED):
                step()
            known = rt._planner.keys[""]

            def follow(plan):
                known.plan = plan
                rt._planner._rewrap()
                return step()

            with mock.patch.object(rt._planner, "_advance"):
                yield known, follow

    def test_storages_that_were_freed(self):
        """What is offloaded while a step is recorded is freed, and other storages come where it was. They are
        not taken for it, or layers that are alike would seem to save less than others."""
        profile = types.SimpleNamespace(numbered={})
        numbers = [Profile.number(profile, storage_of(torch.empty(64))) for _ in range(50)]
        self.assertEqual(50, len(set(numbers)))
        t = torch.empty(64)
        self.assertEqual(Profile.number(profile, storage_of(t)), Profile.number(profile, storage_of(t[1:])))

    def test_what_choices_free(self):
        """The account knows it to the byte: also what stays for cheap parts alone, and small tensors."""
        for least in (256, 4096):
            self.free(least)

    def free(self, least):
        with self.recorded(least) as (known, follow):
            for m in known.measured:
                nothing = follow(self.plan(m, {}))
                for part in m.parts.values():
                    u, sorts = part.unit, m._sorts(part.unit)
                    can = [m._leanest(u, of, False) for n in range(1, len(sorts) + 1) for of in itertools.combinations(sorts, n)]
                    can += [m._again_whole(u)] * (m._can_whole(u) and not m.ends)
                    for c in can if u.name.startswith("layers.1") else ():
                        freed = nothing - follow(self.plan(m, {u: c}))
                        with self.subTest(least=least, fine=m._fine, ends=m.ends, unit=u.name, choice=str(c), kept=sorted(c.kept)):
                            self.assertEqual(part.dropped(c) + part.light * c.whole, freed)

    def test_budgets_that_checkpoints_keep(self):
        """They do not end a run, whichever tensors are too small to be moved: recomputing a block frees these, too."""
        for least in (1024, 4096):
            with self.subTest(least=least):
                model, ids, memory = self.model()
                with memory:
                    for block in model.layers:
                        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
                    for _ in range(2):
                        peak = self.step(model, ids, memory)
                    for block in model.layers:
                        del block.forward
                    budget = peak + peak // 64
                    with runtime("budget", budget=budget, memory=memory, least=least) as rt:
                        rt.attach(model)
                        peaks = [self.step(model, ids, memory, rt) for _ in range(RECORDED + 4)]
                self.assertLessEqual(max(peaks[RECORDED:]), budget)

    @staticmethod
    def plan(m, choices):
        plan = Plan(choices, {}, {}, {}, {"again_ns": m.again(choices), "step_ns": 10**9, "peak": 0})
        m.count(plan)
        return plan

    def test_a_plan_that_recomputes_less(self):
        """It holds no more than the one before and the room that there was. What cheap parts alone need
        counts, too: the sums before norms, which autograd does not save; and so do small tensors."""
        with self.recorded(4096) as (known, follow):
            for m in known.measured:
                m._whole, m._lean = dict.fromkeys(m._whole, 1000), dict.fromkeys(m._lean, 10)
                units = dict.fromkeys(part.unit for part in m.parts.values())
                whole = {u: m._again_whole(u) for u in units if m._can_whole(u)}
                lean = {u: m._leanest(u, m._sorts(u), False) for u in units if u.lean and m._sorts(u)}
                for choices in (whole, lean):
                    plan = self.plan(m, choices)
                    before, last = follow(plan), choices
                    drops = sum(part.dropped(choices[part.unit]) for part in m.parts.values() if part.unit in choices)
                    for room in range(0, drops, drops // 16):
                        less = m.relaxed(plan, room)
                        if less.choices != last:
                            last, peak = less.choices, follow(less)
                            with self.subTest(fine=m._fine, ends=m.ends, room=room, choices={u.name: str(c) for u, c in last.items()}):
                                self.assertLessEqual(peak - before, room)


if __name__ == "__main__":
    unittest.main()
