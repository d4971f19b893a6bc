"""Steps that end badly, threads, processes, evaluation, leaks. SPEC S6.4."""

import gc
import os
import threading
import unittest
from unittest import mock

from common import DEVICE, plain, runtime, same, stowage, torch, under
from stowage._record import Group, Handle, Kept, Record, Weak, storage_of
from torch import nn
from zoo import CASES, leaf

KINDS = ("offload", "limit", "fake-1")


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Broken(Exception):
    pass


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Broken


class Exceptions(unittest.TestCase):
    def tearDown(self):
        """No handle is left in a cycle through autograd, which the collector cannot see."""
        gc.collect()
        self.assertEqual([], [o for o in gc.get_objects() if isinstance(o, Handle)])

    def clean(self, rt):
        """The next steps are as if nothing had happened."""
        case = CASES["shared_storage"]
        for a, b in zip(plain(case), under(rt, case, key="next")):
            self.assertTrue(same(a, b))

    def test_in_the_forward_pass(self):
        for kind in KINDS:
            with self.subTest(kind), runtime(kind) as rt:
                for turn in range(3):
                    with self.assertRaises(Broken), rt.step():
                        with rt.group("a"):
                            y = (leaf(50, 50) @ leaf(50, 50)).exp()
                            with rt.group("b"):
                                y = y.sin()
                                raise Broken
                    self.clean(rt)

    def test_in_the_backward_pass(self):
        for kind in KINDS:
            with self.subTest(kind), runtime(kind) as rt:
                for turn in range(3):
                    with self.assertRaises(Broken), rt.step():
                        w = leaf(50, 50)
                        with rt.group("a"):
                            y = (w @ w).exp()
                        y = Breaks.apply(y)
                        with rt.group("b"):
                            y = y.sin().exp()
                        y.sum().backward()
                    self.clean(rt)

    def test_caught_inside_of_the_step(self):
        """What a failed group saved stays usable, and later groups are groups."""
        for kind in KINDS:
            with self.subTest(kind), runtime(kind) as rt:
                model = nn.ModuleDict({"one": nn.Linear(30, 30), "two": FailsOnce()})
                outer = nn.Sequential(model["one"], model["two"])
                rt.attach(outer, {"": "a", "0": "b", "1": "c"})
                x = torch.randn(20, 30)
                outer[1].fail = False
                want = torch.autograd.grad(outer(x).sum(), list(outer.parameters()))
                for turn in range(3):
                    outer[1].fail = True
                    with rt.step():
                        with self.assertRaises(Broken):
                            outer(x)
                        got = torch.autograd.grad(outer(x).sum(), list(outer.parameters()))
                        self.assertEqual([], rt._step.stack)
                    for a, b in zip(want, got):
                        self.assertTrue(same(a, b))

    def test_modified_in_place(self):
        """Hooks switch autograd's own check off; it must not be lost. What had left already
        is as it was saved: then there is nothing to complain of, and the gradient is right."""

        def case(g, early, late):
            x = leaf(40, 40)
            with g("a"):
                y = x.exp()
                z = y * 2
                if early:
                    y.add_(1)
            if late:
                y.add_(1)
            z.sum().backward()
            return [x.grad]

        want, = plain(lambda g: case(g, False, False))
        for kind in KINDS + ("keep",):
            for late in (False, True):
                with self.subTest(kind=kind, late=late), runtime(kind) as rt:
                    try:
                        got, = under(rt, lambda g: case(g, not late, late))
                    except stowage.Error as e:
                        self.assertIn("inplace operation", str(e))
                        self.assertRegex(str(e), r"is at (version \d+|a later version), and version \d+ was saved; ")
                    else:
                        self.assertTrue(late and kind != "keep" and same(want, got))

    def test_without_memory_to_provide(self):
        with runtime("offload") as rt:
            with self.assertRaisesRegex(stowage.Error, "no memory to reload a saved tensor"), rt.step():
                with rt.group("a"):
                    y = leaf(40, 40).exp()
                for name in "bc":
                    with rt.group(name):
                        y = y.exp()

                def provide(*_):
                    raise MemoryError("there is none")

                rt._step.provide = provide
                y.sum().backward()
            self.clean(rt)

    def test_while_a_step_ends(self):
        """The library's step ends, too, so that the next one can begin. Both are counted."""
        for kind, what in (("offload", "release_dead"), ("budget", "release_dead"), ("budget", "end")):
            with self.subTest(kind, what=what), runtime(kind) as rt:
                with self.assertRaisesRegex(Broken, "^of its end$"), rt.step():
                    with rt.group("a"):
                        leaf(40, 40).exp().sum().backward()
                    ends = rt._step if what == "release_dead" else rt._budget
                    setattr(ends, what, mock.Mock(side_effect=Broken("of its end")))
                delattr(ends, what)
                self.clean(rt)
                self.assertEqual(2, rt.stats()["steps"])


class FailsOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.fail = nn.Linear(30, 30), True

    def forward(self, x):
        y = self.inner(x).exp()
        if self.fail:
            self.fail = False
            raise Broken
        return y.sin()


class Between(unittest.TestCase):
    def test_evaluation_between_steps_and_inside(self):
        m = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20))
        x = torch.randn(10, 20)
        with runtime() as rt:
            rt.attach(m, {"*": "a"})
            for _ in range(3):
                with rt.step():
                    with torch.no_grad():
                        m(x)
                    with rt.group("b"):
                        loss = m(x).sum()
                    with torch.inference_mode():
                        m(x)
                    loss.backward()
                with torch.no_grad():
                    m(x)
                m(x).sum().backward()  # outside of steps nothing is done
            self.assertEqual(3, rt.stats()["steps"])

    def test_a_tensor_is_needed_after_its_step(self):
        for kind in KINDS:
            with self.subTest(kind), runtime(kind) as rt:
                with rt.step():
                    with rt.group("a"):
                        y = leaf(50, 50).exp().sum()
                with self.assertRaisesRegex(RuntimeError, r"call backward\(\) inside of"):
                    y.backward()

    def test_a_storage_is_saved_again_while_its_group_dies(self):
        """The group that had it is released only once the open group is saved, too: a backward pass inside of
        the group calls the library before that."""

        def case(g):
            x = leaf(40, 40)
            y = x * 2
            with g("a"):
                first = y.sin()
            with g("b"):
                other = (x * 3).sin()
            del first
            with g("c"):
                again = y.cos()
                other.sum().backward()
            again.sum().backward()
            return [x.grad]

        for kind in ("offload", "limit", *(f"fake-{i}" for i in range(8))):
            with self.subTest(kind), runtime(kind) as rt:
                for _ in range(3):
                    self.assertTrue(same(plain(case)[0], under(rt, case)[0]))

    def test_parameters_and_views_of_them_pass(self):
        with runtime() as rt:
            m = nn.Linear(30, 30)
            frozen = nn.Linear(30, 30).requires_grad_(False)
            rt.attach(nn.ModuleList([m, frozen]), {"?": "a"})
            seen = []
            with rt.step():
                step, pack = rt._step, rt._step.pack

                def watch(t):
                    h = pack(t)
                    seen.append((t.data_ptr(), type(h) is Kept))
                    return h

                with torch.autograd.graph.saved_tensors_hooks(watch, step.unpack):
                    frozen(m(leaf(5, 30).clone())).sum().backward()
            weights = {p.data_ptr() for p in list(m.parameters()) + list(frozen.parameters())}
            self.assertEqual(2, sum(at in weights for at, _ in seen))
            for at, kept in seen:
                self.assertEqual(at in weights, kept)

    def test_least(self):
        for least, moved in ((0, True), (9999, True), (10001, False)):
            with runtime(least=least) as rt:
                for _ in range(2):
                    with rt.step():
                        x = leaf(50, 50)
                        for name in "abc":
                            with rt.group(name):
                                x = x.exp()
                        x.sum().backward()
                self.assertEqual(moved, rt.stats()["summary"]["counts"]["OutBytes"] > 0)


class Threads(unittest.TestCase):
    def test_a_second_thread_passes_through(self):
        with runtime() as rt:
            m, x = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30)), torch.randn(9, 30)
            rt.attach(m, {"?": "a"})
            want = torch.autograd.grad(m(x).sum(), list(m.parameters()))
            got = []

            def other():
                with rt.group("b"):
                    got.append(torch.autograd.grad(m(x).sum(), list(m.parameters())))

            with rt.step():
                with rt.group("b"):
                    y = m(x)
                    threads = [threading.Thread(target=other) for _ in range(3)]
                    for t in threads:
                        t.start()
                    for t in threads:
                        t.join()
                got.append(torch.autograd.grad(y.sum(), list(m.parameters())))
            self.assertEqual(4, len(got))
            for g in got:
                for a, b in zip(want, g):
                    self.assertTrue(same(a, b))

    def test_a_step_in_a_second_thread_is_refused(self):
        with runtime() as rt:
            raised = []

            def other():
                try:
                    with rt.step():
                        pass
                except stowage.Error as e:
                    raised.append(str(e))

            with rt.step():
                t = threading.Thread(target=other)
                t.start()
                t.join()
            self.assertIn("another thread", raised[0])

    def test_backward_in_a_second_thread(self):
        case_w = leaf(30, 30)
        with runtime() as rt, rt.step():
            y = case_w
            for name in "abc":
                with rt.group(name):
                    y = torch.tanh(y @ case_w)
            t = threading.Thread(target=lambda: y.sum().backward())
            t.start()
            t.join()
        got = case_w.grad
        case_w.grad = None
        y = case_w
        for _ in "abc":
            y = torch.tanh(y @ case_w)
        y.sum().backward()
        self.assertTrue(same(got, case_w.grad))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        w = torch.full((4,), float(i), requires_grad=True)
        y = w.clone()
        out = (y * y).sum()  # a worker may use autograd; it must not use the runtime
        try:
            out.backward()
        except RuntimeError as e:  # PyTorch 2 allows no backward pass in a child of a process that had one
            if "Autograd-and-Fork" not in str(e):
                raise
            return 2 * w.detach()
        return w.grad


class Processes(unittest.TestCase):
    @unittest.skipUnless(DEVICE == "cpu", "a forked process cannot use CUDA")
    def test_workers_that_are_forked(self):
        with runtime() as rt:
            loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork")
            for _ in range(2):
                w, total = leaf(4, 50), 0.0
                with rt.step():
                    with rt.group("b"):  # the workers begin inside of a group
                        batches = iter(loader)
                    for batch in batches:
                        with rt.group("a"):
                            total = total + (batch @ w).square().sum()
                    total.backward()
                # Row i of all batches is 2i in every column: the gradient is 2 X'X w.
                ones = torch.ones(4, 4) * sum((2.0 * i) ** 2 for i in range(12))
                self.assertTrue(torch.allclose(w.grad, 2 * ones @ w.detach(), rtol=1e-4, atol=1e-2))

    def test_a_forked_process_is_refused(self):
        with runtime() as rt:
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                said = b"nothing was raised"
                try:
                    with rt.step():
                        pass
                except stowage.Error as e:
                    said = str(e).encode()
                os.write(write, said)
                os._exit(0)
            os.waitpid(pid, 0)
            self.assertIn("spawn", os.read(read, 1000).decode())
            os.close(read), os.close(write)
            under(rt, CASES["linear"])  # this one goes on

    def test_ddp_on_one_rank(self):
        import tempfile

        import torch.distributed as dist

        if not dist.is_available():
            self.skipTest("this PyTorch has no torch.distributed")
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            try:
                x, got = torch.randn(16, 30), []
                for with_it in (False, True):
                    torch.manual_seed(3)
                    m = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(30, 40), nn.GELU(), nn.Linear(40, 30)))
                    with runtime() as rt:
                        rt.attach(m, {"*.module.?": "a", "*.1": "b"} if with_it else {"*.0": "a"})
                        for _ in range(3):
                            m.zero_grad()
                            if with_it:
                                with rt.step():
                                    m(x).square().sum().backward()
                            else:
                                m(x).square().sum().backward()
                    got.append([p.grad for p in m.parameters()])
                for a, b in zip(*got):
                    self.assertTrue(same(a, b))
            finally:
                dist.destroy_process_group()


class Leaks(unittest.TestCase):
    def test_a_thousand_steps(self):
        m = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)])
        x = torch.randn(64, 64)
        with runtime("offload") as rt:
            rt.attach(m, {"?": "a"})

            def steps(n):
                for i in range(n):
                    m.zero_grad(set_to_none=True)
                    try:
                        with rt.step():
                            loss = m(x).square().mean()
                            if i % 10 == 3:
                                raise Broken
                            loss.backward()
                    except Broken:
                        pass

            steps(300)
            gc.collect()
            objects, memory = len(gc.get_objects()), resident()
            steps(1000)
            gc.collect()
            self.assertLess(len(gc.get_objects()) - objects, 50)
            # One step saves 4 x 3 x 16 KiB: a leak of one tensor a step would be 16 MiB.
            self.assertLess(resident() - memory, 8 << 20)
            self.assertEqual(1300, rt.stats()["steps"])

    def test_nothing_waits_for_the_collector(self):
        """Handles, records and memory die by reference counts, node by node."""
        gc.collect()
        gc.disable()
        try:
            for kind in KINDS:
                with runtime(kind) as rt:
                    with rt.step():
                        w = leaf(20, 20)
                        y = w
                        for name in "abcabc":
                            with rt.group(name):
                                y = torch.tanh(y @ w)
                        step = rt._step
                        y.sum().backward()
                        del y
                        alive = [o for o in gc.get_objects() if isinstance(o, Handle) and o.group.step is step or isinstance(o, Group) and o.step is step]
                        self.assertEqual([], alive, kind)
                    del step
                    self.assertEqual([], [o for o in gc.get_objects() if isinstance(o, Record)], kind)
        finally:
            gc.enable()

    def test_an_output_that_stays_is_no_cycle(self):
        """exp saves its own result: held with its history it would hold itself."""
        for kind in KINDS + ("keep",):
            with runtime(kind) as rt, rt.step():
                with rt.group("a"):
                    y = leaf(30, 30).exp()
                alive = Weak(storage_of(y))
                del y
                with rt.group("b"):  # a dead group is released at the next call
                    z = leaf(30, 30).exp()
                with rt.group("c"):
                    z = z.exp()
                if kind != "fake-1":  # which may hold it until the step ends
                    self.assertIsNone(alive.storage(), kind)

    def test_a_part_without_elements(self):
        """As of an expert that gets no rows: it has no address, and its storage has one."""

        def case(g):
            x = leaf(60, 16)
            with g("a"):
                parts = (x * 2).split([60, 0])
                y = [part * part.exp() for part in reversed(parts)]
            with g("b"):
                z = [part.exp() for part in y]
            sum(part.sum() for part in z).backward()
            return [x.grad]

        for kind in (*KINDS, "fake-2", "fake-3"):
            with self.subTest(kind), runtime(kind) as rt:
                for _ in range(3):
                    self.assertTrue(same(plain(case)[0], under(rt, case)[0]))

    @unittest.skipUnless(DEVICE == "cpu", "arrays are in memory of the CPU")
    def test_storages_that_share_memory(self):
        """One is a part of the other, at the same address: they are two."""
        room = torch.rand(64, 16).numpy()

        def case(g):
            x = leaf(64, 16)
            with g("a"):
                y = x[:8] * torch.from_numpy(room[:8])
            with g("b"):
                z = x * torch.from_numpy(room)
            with g("c"):
                z = z.exp()
            (y.sum() + z.sum()).backward()
            return [x.grad]

        for kind in KINDS:
            with self.subTest(kind), runtime(kind) as rt:
                for _ in range(3):
                    self.assertTrue(same(plain(case)[0], under(rt, case)[0]))


if __name__ == "__main__":
    unittest.main()
