"""What people ask for: groups by names, budgets, figures; and wrong use, which is
answered with what to do. SPEC S6.4."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from common import DEVICE, PLUGIN, runtime, same, stowage, torch
from families import FAMILIES, W
from stowage import _attach, _config
from torch import nn
from zoo import leaf


class Version(unittest.TestCase):
    def test_of_the_package_and_the_library(self):
        with runtime("offload") as rt:
            self.assertEqual(stowage.__version__, rt._library.version())


class Attach(unittest.TestCase):
    def test_well_known_names(self):
        for family, names in FAMILIES.items():
            with self.subTest(family.__name__):
                torch.manual_seed(2)
                m, x = family(), torch.randn(6, W)
                want = torch.autograd.grad(m(x).sum(), list(m.parameters()))
                with runtime("offload", policy={n: "offload" for n in names}) as rt:
                    rt._complete = False  # the first step must have all these groups
                    handle = rt.attach(m)
                    self.assertEqual(sorted(names), handle.names)
                    for _ in range(3):
                        with rt.step():
                            got = torch.autograd.grad(m(x).sum(), list(m.parameters()))
                        for a, b in zip(want, got):
                            self.assertTrue(same(a, b))
                    groups = {g["name"]: g for g in rt.stats()["summary"]["groups"]}
                    self.assertLessEqual(set(groups), names | {"other"})
                    self.assertGreater(groups["core_attn"]["bytes"], 0)
                    handle.detach()
                    with rt.step():
                        torch.autograd.grad(m(x).sum(), list(m.parameters()))
                    self.assertEqual([], [h for c in m.modules() for h in list(c._forward_hooks) + list(c._forward_pre_hooks)])

    def test_one_layer_alone(self):
        layer = FAMILIES and next(iter(FAMILIES))().model.layers[0]
        self.assertEqual({"core_attn", "qkv_linear", "attn_proj", "attn_norm", "mlp_norm", "mlp"}, set(_attach.matches(layer, None).values()))

    def test_containers_are_not_called_but_their_children(self):
        m = nn.ModuleList([nn.ModuleList([nn.Linear(3, 3), nn.Tanh()]), nn.Linear(3, 3)])
        found = _attach.matches(m, {"0": "a"})
        self.assertEqual({m[0][0]: "a", m[0][1]: "a"}, found)

    def test_the_first_pattern_and_the_innermost_module_win(self):
        m = nn.Sequential(nn.Sequential(nn.Linear(9, 9), nn.Tanh()), nn.Tanh())
        with runtime("offload") as rt:
            rt.attach(m, {"0": "a", "0.1": "b", "?": "c"})
            seen = []
            m[0][0].register_forward_hook(lambda *_: seen.append(rt._step.stack[-1][0]))
            m[0][1].register_forward_pre_hook(lambda *_: seen.append(rt._step.stack[-1][0]))
            m[1].register_forward_pre_hook(lambda *_: seen.append(rt._step.stack[-1][0]))
            with rt.step():
                m(torch.randn(4, 9)).sum().backward()
            self.assertEqual(["a", "b", "c"], seen)


class Wrong(unittest.TestCase):
    def raises(self, *parts):
        return self.assertRaisesRegex(stowage.Error, "(?s)" + ".*".join(parts))

    def test_opening(self):
        R = lambda *a, **k: stowage.Runtime(*a, device=k.pop("device", "cpu"), **k)
        for bad, parts in (
            (lambda: R(), ["expected a budget or a policy, got neither", "budget=", "policy="]),
            (lambda: R("1GiB", {"a": "keep"}), ["budget and policy both decide", "give one"]),
            (lambda: R({"a": "keep"}), ["expected a size as budget", "write policy={'a': 'keep'}"]),
            (lambda: R(10**30), ["too large"]),
            (lambda: R(1 << 63), ["got 9223372036854775808, which is too large"]),
            (lambda: R("8388608TiB"), ["got '8388608TiB', which is too large"]),
            (lambda: R("9" * 400), ["999', which is too large"]),
            (lambda: R("9999999999999TiB"), ["got '9999999999999TiB', which is too large"]),
            (lambda: R(policy={}, recompute=False), ["recompute=False is for a budget", "beside policy; leave it out"]),
            (lambda: R(saved_limit=1, exact=False), ["exact=False is for a budget", "beside saved_limit"]),
            (lambda: R(policy={}, ranks=False), ["ranks=False is for a budget"]),
            (lambda: R(policy={"\ud800": "keep"}), ["expected the name of a group"]),
            (lambda: R(policy={}, rank="a"), ["expected rank", "got 'a'"]),
            (lambda: R(policy={}, rank=-1), ["expected rank", "got -1"]),
            (lambda: R("60 gigs"), ["expected budget", "60GiB", "got '60 gigs'"]),
            (lambda: R(-1), ["negative"]),
            (lambda: R(1.5), ["got 1.5"]),
            (lambda: R(True), ["got True"]),
            (lambda: R(0), ["budget=0"]),
            (lambda: R(saved_limit=0), ["saved_limit=0"]),
            (lambda: R(saved_limit="much"), ["expected saved_limit", "got 'much'"]),
            (lambda: R("1GiB", saved_limit="1GiB"), ["budget and saved_limit both decide", "give one"]),
            (lambda: R(policy={"moe_act": "ofload"}), ["expected one of keep, offload, stash, got 'ofload'", "did you mean 'offload'"]),
            (lambda: R(policy={"moe_act": "recompute"}), ["torch.utils.checkpoint"]),
            (lambda: R(policy={"": "keep"}), ["expected the name of a group", "got ''"]),
            (lambda: R(policy=["moe_act"]), ["expected a dictionary as policy"]),
            (lambda: R(policy={}, least="small"), ["expected least", "got 'small'"]),
            (lambda: R(policy={}, host="?"), ["expected host"]),
            (lambda: R(policy={}, live=1.5), ["expected live as a share of rows", "got 1.5"]),
            (lambda: R(policy={}, live="half"), ["expected live", "got 'half'"]),
            (lambda: R(policy={}, live=float("nan")), ["expected live", "got nan"]),
            (lambda: R("1GiB", recompute="no"), ["expected True or False as recompute, got 'no'"]),
            (lambda: R("1GiB", log="no"), ["expected True or False as log, got 'no'"]),
            (lambda: R(policy={}, device="tpu"), ["expected a device", "got 'tpu'"]),
            (lambda: R(policy={}, device="meta"), ["expected an NVIDIA GPU", "got 'meta'"]),
        ):
            with self.raises(*parts):
                bad()
        if not torch.cuda.is_available():
            with self.raises("no GPU", 'device="cpu"'):
                R(policy={}, device="cuda")

    def test_groups(self):
        m = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        with runtime("offload", policy={"moe_akt": "offload"}) as rt:
            with self.raises("'moe_akt'", "did you mean 'moe_act'"):
                rt.attach(m, {"0": "moe_act"})
            with self.raises("'experts' matches no module; the modules are 0, 1$"):
                rt.attach(m, {"experts": "moe_act"})
            with self.raises("no module has a known name", "groups=", "modules of 0, 1$"):
                rt.attach(m)
            with self.raises(r"expected a dictionary as groups, got \['0'\]", "modules of 0, 1$"):
                rt.attach(m, ["0"])
            with self.raises("expected a torch.nn.Module, got list"):
                rt.attach([m], {"0": "a"})
            with self.raises("expected the name of a group"), rt.group(""):
                pass
            rt._complete = False
            with self.raises("names 'moe_akt' and the first step had no such group", "it had b"), rt.step():
                with rt.group("b"):
                    pass
            with rt.step():  # it is said once
                with self.raises("inside of a step"):
                    rt.attach(m, {"0": "a"})

    def test_what_is_outside_of_groups_is_one_too(self):
        m = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh())
        with stowage.Runtime(policy={"other": "offload"}, device=DEVICE, least=0) as rt:
            rt.attach(m, {"3": "router"})
            for _ in range(3):
                with rt.step():
                    m(torch.randn(40, 40)).sum().backward()
            groups = {g["name"]: g["bytes"] for g in rt.stats()["summary"]["groups"]}
            self.assertEqual({"other", "router"}, set(groups))

    def test_two_at_once(self):
        with runtime() as rt:
            with self.raises("a runtime on .* already", r"close\(\)"):
                stowage.Runtime(policy={}, device=DEVICE)
            with rt.step(), self.raises("a step is under way"), rt.step():
                pass
            with rt.step():
                pass
        with runtime():  # closed: another one may be opened
            pass

    def test_closed(self):
        with runtime() as rt:
            pass
        for use in (rt.stats, rt.report, rt.check, lambda: rt.trace("x"), lambda: rt.attach(nn.Linear(2, 2), {"": "a"}), lambda: rt.run(print)):
            with self.raises("is closed"):
                use()
        rt.close()
        with runtime() as rt:
            with self.raises("is closed"), rt.step():
                rt.close()

    def test_a_library_that_is_not_there(self):
        before = os.environ.get("STOWAGE_LIBRARY")
        os.environ["STOWAGE_LIBRARY"] = "/nowhere/libstowage.so"
        try:
            with self.raises("cannot load the library", "make wheel"):
                stowage.Runtime(policy={}, device="cpu")
            os.environ["STOWAGE_LIBRARY"] = "libc.so.6"
            with self.raises("libc.so.6 is not Stowage's library"):
                stowage.Runtime(policy={}, device="cpu")
        finally:
            del os.environ["STOWAGE_LIBRARY"]
            if before:
                os.environ["STOWAGE_LIBRARY"] = before

    def test_rows(self):
        with runtime() as rt, rt.step():
            x, n = leaf(8, 4), torch.tensor(3)
            for bad, parts in (
                (lambda: rt.stash(x, n.int()), ["expected rows as an int64", r"rows.long\(\)"]),
                (lambda: rt.stash(torch.ones(()), n), ["rows as its first dimension"]),
                (lambda: rt.stash(x, rows=3), ["expected a tensor as rows, got 3", r"torch.tensor\(3"]),
                (lambda: rt.stash([x], n), ["expected a tensor as x, got list"]),
                (lambda: rt.stash(x, n[None]), ["without dimensions"]),
                (lambda: rt.stash(x.t(), n), ["x is not contiguous", r"x.contiguous\(\)"]),
                (lambda: rt.stash(x[1:], n), ["a part of its storage", r"clone\(\)"]),
                (lambda: rt.stash(x[:7], n), ["a part of its storage"]),  # the eighth would be a dead row
            ):
                with self.raises(*parts):
                    bad()
        with runtime() as rt, self.raises("expected a tensor as x"):  # outside of steps too
            rt.stash([x], n)

    def test_calls(self):
        with runtime() as rt:
            for bad, parts in (
                (lambda: rt.step(5).__enter__(), ["expected a string as key, got 5"]),
                (lambda: rt.step("a\0b").__enter__(), ["expected a string as key"]),
                (lambda: rt.step("\ud800").__enter__(), ["expected a string as key"]),
                (lambda: rt.run(print, restore=torch.ones(1)), ["run: expected a list of tensors as restore, got Tensor"]),
                (lambda: rt.graph(print, restore=["a"]), ["graph: expected a list of tensors as restore"]),
                (lambda: rt.end_step("boom"), ["end_step: expected the exception", "got 'boom'"]),
                (lambda: rt.end_step(ValueError), ["end_step: expected the exception"]),
                (lambda: rt.trace(""), ["trace: expected a path or None, got ''"]),
                (lambda: rt.trace(3), ["trace: expected a path or None, got 3"]),
                (lambda: rt.trace("a\0b"), ["trace: expected a path"]),
                (lambda: rt.trace("/nowhere/x"), ["cannot write the trace /nowhere/x: no such file or directory"]),
                (lambda: rt.attach(nn.Linear(2, 2), {0: "a"}), ["expected patterns of names as keys, got 0"]),
                (lambda: rt.stash(torch.eye(2).to_sparse(), torch.tensor(1)), ["give a dense tensor"]),
                (lambda: rt.run(5), ["run: expected a function, got 5"]),
                (lambda: rt.graph(5), ["graph: expected a function, got 5"]),
                (lambda: rt.attach(nn.Linear(2, 2), {}), ["groups={} is empty"]),
                (lambda: rt.attach(nn.LazyLinear(2), {"*": "a"}), ["a parameter of LazyLinear has no shape yet", "run a batch"]),
            ):
                with self.raises(*parts):
                    bad()
            self.assertEqual("no step yet", rt.report())
        x = torch.ones(2, 2)  # a model with both in it is evaluated when the runtime is closed
        with rt.group("a"):
            self.assertIs(x, rt.stash(x, torch.tensor(1)))

    def test_a_step_is_entered_once(self):
        with runtime() as rt:
            step = rt.step()
            with step:
                pass
            with self.raises("begun before", r"rt.step\(\) for each step"), step:
                pass
            step = rt.step()
            with self.raises("begun before"), step, step:
                pass
            with rt.step():  # nothing is left of them
                pass

    def test_a_function_of_which_each_call_is_a_step(self):
        with runtime() as rt:
            @rt.step("long")
            def train(a, *, b):
                """Adds."""
                self.assertIsNotNone(rt._step)
                return a + b

            self.assertEqual(("train", "Adds."), (train.__name__, train.__doc__))
            self.assertEqual([3, 7], [train(1, b=2), train(3, b=4)])
            self.assertEqual(2, rt.stats()["steps"])

    def test_a_backward_pass_after_its_step(self):
        for given in ({"budget": "1GiB"}, {"budget": "1GiB", "recompute": False}, {"saved_limit": "1GiB"}):
            m = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]).to(DEVICE)
            with stowage.Runtime(device=DEVICE, least=0, **given) as rt:
                rt.attach(m, {"0": "a"})
                with rt.step():
                    y = m(torch.randn(4, 8, device=DEVICE)).sum()
                with self.assertRaisesRegex(RuntimeError, "needed after its step; call backward"):
                    y.backward()
                del y

    def test_what_stays_is_there_after_its_step(self):
        """Tensors that are too small to move, of attached modules and of others."""
        for given in ({"budget": "1GiB"}, {"budget": "1GiB", "recompute": False}, {"saved_limit": "1GiB"}):
            m, other = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]).to(DEVICE), nn.Linear(8, 8).to(DEVICE)
            with stowage.Runtime(device=DEVICE, least=1 << 20, **given) as rt:
                rt.attach(m, {"*": "a"} if "saved_limit" in given else None)
                for i in range(4):
                    with self.subTest(given, step=i):
                        x = torch.randn(4, 8, device=DEVICE)
                        want = torch.autograd.grad(m(x).sum() + other(x).exp().sum(), [m[0][0].weight, other.weight])
                        with rt.step():
                            m(x).sum().backward()
                            losses = m(x).sum(), other(x).exp().sum()
                        got = [torch.autograd.grad(y, w.weight)[0] for y, w in zip(losses, (m[0][0], other))]
                        self.assertTrue(all(map(torch.equal, want, got)))

    def test_a_limit_that_is_too_small(self):
        with stowage.Runtime(saved_limit=3000, device=DEVICE, least=0) as rt:
            with self.raises("a saved limit of 2.93 KiB is too small: this step needs .* bytes"):
                for _ in range(3):
                    with rt.step():
                        w = leaf(60, 60)
                        ((w @ w).exp() @ w).sum().backward()

    def test_stash_without_stash(self):
        with runtime("offload", policy={"mlp": "stash"}) as rt:
            rt.attach(nn.Linear(4, 4), {"": "mlp"})
            with rt.step():
                pass
            self.assertIn("note: group 'mlp' is kept because rt.stash(x, rows=count, name='mlp') was never called", rt.report())

    def test_sizes(self):
        for text, bytes in (("0", 0), ("12", 12), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("60GB", 60 * 10**9), ("60G", 60 << 30), ("1 kib", 1024), (" 2 TiB ", 2 << 40), (7, 7)):
            self.assertEqual(bytes, _config.size(text, "x"))
        for text in ("", "GiB", "1iB", "1e9", "-1", "1GiBB", None, 1.0):
            with self.raises("expected (x|a size as x)"):
                _config.size(text, "x")


class Figures(unittest.TestCase):
    def steps(self, rt, n=4):
        for _ in range(n):
            with rt.step():
                y = leaf(128, 128)
                for i in range(6):
                    with rt.group("abc"[i % 3]):
                        y = torch.tanh(y) * 1.0
                y.sum().backward()

    def test_offload(self):
        """Six results of 64 KiB are saved; the last ones are needed at once, and may stay."""
        with runtime("offload", least="1KiB") as rt:
            self.steps(rt)
            s = rt.stats()["summary"]
            self.assertEqual(6 * 65536, sum(g["bytes"] for g in s["groups"]))
            self.assertGreaterEqual(s["counts"]["OutBytes"], 4 * 65536)
            # One that is needed again before it is gone need not come back.
            self.assertLessEqual(s["counts"]["InBytes"], s["counts"]["OutBytes"])
            self.assertGreaterEqual(s["counts"]["InBytes"], 2 * 65536)
            self.assertLess(s["device_peak"], 6 * 65536)
            self.assertGreaterEqual(s["host_peak"], 4 * 65536)
            text = rt.report()
            for word in ("a ", "b ", "c ", "offload", "128.0 KiB", "4 steps"):
                self.assertIn(word, text)

    def test_keep_touches_nothing(self):
        with runtime("keep") as rt:
            self.steps(rt)
            self.assertEqual(0, sum(g["bytes"] for g in rt.stats()["summary"]["groups"]))

    def test_a_saved_limit_is_kept(self):
        with runtime("limit", saved_limit=4 * 65536) as rt:
            self.steps(rt, 6)
            s = rt.stats()["summary"]
            self.assertLessEqual(s["device_peak"], 4 * 65536)
            self.assertGreater(s["counts"]["OutBytes"], 0)
            self.assertIn("limit 256.0 KiB", rt.report())

    def test_examples_do_as_they_say(self):
        """Each command of their first lines, with fewer steps or layers: the budgets named are enough."""
        paths = sorted((PLUGIN / "examples").glob("*.py"))
        self.assertTrue(paths)
        for path in paths:
            commands = [line.split() for line in path.read_text().split('"""')[1].splitlines() if "python3 pytorch/examples/" in line]
            self.assertTrue(commands)
            less = ["--steps", "2"] if '"--steps"' in path.read_text() else ["--layers", "2"]
            for command in commands:
                with self.subTest(" ".join(command)):
                    # On a GPU other kernels save other tensors.
                    env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), CUDA_VISIBLE_DEVICES="")
                    done = subprocess.run([sys.executable, "-B", str(path), *command[2:], *less], env=env, capture_output=True, text=True, timeout=900)
                    self.assertEqual(0, done.returncode, done.stderr)

    def test_from_another_thread(self):
        """Somebody who looks while memory is provided, which lets other threads run, waits and
        is not waited for. In a process of its own: a hang would be one of all threads."""
        code = """
import threading, time
from common import runtime, torch

empty = torch.empty
def slow(*shape, **more):
    time.sleep(0.002)
    return empty(*shape, **more)
torch.empty = slow
with runtime("offload") as rt:
    x, over = torch.ones(64, 64, requires_grad=True), threading.Event()
    def look():
        while not over.is_set():
            rt.stats()
    looks = threading.Thread(target=look)
    looks.start()
    for _ in range(20):
        with rt.step():
            with rt.group("a"):
                y = x.sin().cos()
            y.sum().backward()
    over.set()
    looks.join()
    print(rt.stats()["steps"])
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, timeout=60)
        self.assertEqual(("20\n", ""), (done.stdout, done.stderr))

    def test_trace(self):
        with tempfile.TemporaryDirectory() as folder, runtime("offload") as rt:
            file = pathlib.Path(folder) / "rank-0.trace"
            rt.trace(file)
            self.steps(rt)
            rt.trace(None)
            size = file.stat().st_size
            self.assertGreater(size, 100)
            self.steps(rt)
            self.assertEqual(size, file.stat().st_size)
            with self.assertRaisesRegex(stowage.Error, "nowhere"):
                rt.trace("/nowhere/x")


if __name__ == "__main__":
    unittest.main()
