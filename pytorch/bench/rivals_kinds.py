"""The kinds of pytorch/bench/torch_rivals.py: ways to run the same step in less memory. Each kind has
modules of its own around the same parameters, so that neither its hooks nor its compiled
blocks slow down another."""

import contextlib
import copy
import functools
import gc
import statistics
import time

import torch
from torch.utils.checkpoint import checkpoint

import stowage
from stowage._library import Library

MIB = 1 << 20
SEED = 7


class Unsupported(Exception):
    """A kind that this release of PyTorch or this device does not have."""


def keeps(value):
    """Reports whether an object that is no module keeps tensors of a pass in attributes, as a dispatcher of tokens does."""
    own = getattr(value, "__dict__", {}) if not isinstance(value, (torch.nn.Module, torch.Tensor, type)) and not callable(value) else {}
    return any(isinstance(v, torch.Tensor) and not isinstance(v, torch.nn.Parameter) for v in own.values())


def twin(module, seen=None):
    """Returns a module like the given one, with its parameters and buffers, and hooks, child
    modules and objects that keep tensors of its own: what one kind leaves must not count against another."""
    seen = {} if seen is None else seen
    if module in seen:
        return seen[module]
    new = seen[module] = copy.copy(module)
    for name, value in module.__dict__.items():
        if "_hooks" in name or name == "_modules":
            new.__dict__[name] = copy.copy(value)
        elif keeps(value):
            new.__dict__[name] = seen.setdefault(id(value), copy.copy(value))
    for name, child in module._modules.items():
        new._modules[name] = None if child is None else twin(child, seen)
    return new


def spread(k, n):
    """Returns k of the numbers below n, spread evenly."""
    return [i for i in range(n) if i * k // n != (i + 1) * k // n]


def smallest(peak, n, target, none, tried=()):
    """Returns the smallest k up to n with peak(k) <= target, or None. Peaks fall about evenly
    from `none`, which is that of k = 0 and does not fit; a peak of None does not fit, either.
    Those that were tried cost nothing."""
    fits = lambda k: (peak(k) or target + 1) <= target
    if not n or not fits(n):
        return None
    low, high = 0, n  # low does not fit, high does
    while True:
        for k in sorted(tried):
            if low < k < high:
                low, high = (low, k) if fits(k) else (k, high)
        if high - low <= 1:
            return high
        slope = (((peak(low) if low else none) or 0) - peak(high)) / (high - low)  # of a block
        guess = high - int((target - peak(high)) / slope) if slope > 0 else (low + high) // 2
        k = min(max(guess, low + 1), high - 1)
        low, high = (low, k) if fits(k) else (k, high)


def storage(t):
    return t.untyped_storage() if hasattr(t, "untyped_storage") else t.storage()


def memory_of(tensors):
    """Returns the bytes of the tensors' storages, each counted once."""
    return sum({storage(t).data_ptr(): storage(t).nbytes() for t in tensors}.values())


def count_saved(run, model):
    """Returns the bytes of storages that autograd saves in a step beside parameters and
    buffers."""
    known = {storage(t).data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept = []

    def pack(t):
        if storage(t).data_ptr() not in known:
            kept.append(t.detach())  # alive, so that no address is used again
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = run()
    n = memory_of(kept)
    kept.clear()
    loss.backward()
    return n


class Bench:
    """What all kinds of one model share: the case, its gradients and how to measure a step."""

    def __init__(self, case, device):
        self.case, self.device, self.cuda = case, device, device == "cuda"
        self.parameters = [p for p in case.model.parameters() if p.requires_grad]
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.gradients = [p.grad for p in self.parameters]
        self.fixed = memory_of([*case.model.parameters(), *case.model.buffers(), *self.gradients])
        self.wanted = {}  # by name of the kind: its gradients, on the host

    def clear(self):
        torch._foreach_zero_(self.gradients)

    def sync(self):
        if self.cuda:
            torch.cuda.synchronize()

    def forget(self):
        """Frees what nobody needs. What is left is not looked at again before each step."""
        gc.unfreeze()  # modules that are gone by now, too
        gc.collect()
        gc.freeze()
        if self.cuda:
            torch.cuda.empty_cache()

    def keep_gradients(self, name):
        """Remembers the gradients as they are now, in pinned memory: on the device they would
        count against budgets."""
        if name not in self.wanted:
            self.wanted[name] = [torch.empty(g.shape, dtype=g.dtype, device="cpu", pin_memory=self.cuda) for g in self.gradients]
        for w, g in zip(self.wanted[name], self.gradients):
            w.copy_(g)

    def difference(self, name):
        """Returns how far the gradients are from those remembered: 0.0 if each bit is equal,
        otherwise the norm of the difference by the norm of those remembered."""
        differ = torch.zeros((), dtype=torch.bool, device=self.device)
        for a, b in self.pairs(name):
            whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
            differ |= (a.view(whole) != b.view(whole)).any()
        if not differ:
            return 0.0
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for a, b in self.pairs(name):
            squares += torch.stack([(a.double() - b.double()).square().sum(), a.double().square().sum()])
        return max((squares[0] / squares[1]).sqrt().item(), 1e-300)

    def pairs(self, name, part=8 << 20):
        """Yields gradients, those remembered and those of now, in parts on the device."""
        for w, g in zip(self.wanted[name], self.gradients):
            w, g = w.reshape(-1), g.reshape(-1)
            for i in range(0, len(g), part):
                yield w[i : i + part].to(self.device, non_blocking=True), g[i : i + part]


class Kind:
    """One way to run a step, with its times and its peak."""

    family, compiled, ours, like = "eager", False, False, "eager"
    exact = True  # its gradients must be equal, if it is ours

    def __init__(self, bench, name):
        self.bench, self.name = bench, name
        self.model, self.rt = bench.case.model, None
        self.peak = 0
        self.times, self.error, self.unexpected = [], None, False
        self.probe = None  # time of the step that found the peak, in ms
        self.against = None  # the ratio to eager in the same turns
        self.differs = None  # from the gradients of the kind that it is like
        self.target = None  # the peak that it must keep to
        self.tag = ""  # beside its mark in the picture
        self.report = None  # of the runtime, if it has one

    def loss(self):
        return self.bench.case.step(self.model)

    def inside(self):
        return contextlib.nullcontext() if self.rt is None else self.rt.step()

    def run(self):
        self.bench.clear()
        with self.inside():
            self.loss().backward()

    def step(self):
        """Runs a step and returns its time in ms."""
        bench = self.bench
        torch.manual_seed(SEED)
        gc.collect()  # cycles of the step before would hold memory
        bench.sync()
        if bench.cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        self.run()
        bench.sync()
        took = (time.perf_counter() - begin) * 1e3
        self.note(took, torch.cuda.max_memory_allocated() + self.own() if bench.cuda else 0)
        return took

    def note(self, took, peak):
        """Notes the time and the peak of a step."""
        self.peak = max(self.peak, peak)

    def own(self):
        """Returns the device memory that the runtime itself holds."""
        return self.rt.stats()["memory"]["kind"][0]["current"] if self.rt is not None else 0

    def tried(self, what):
        """Calls what. An error becomes this kind's sentence; then it returns None."""
        if self.error is not None:
            return None
        try:
            return what()
        except Exception as e:
            self.error = sentence(e)
            self.unexpected = not expected(e)
        self.bench.forget()  # the exception held the step's tensors
        return None

    def count(self):
        """Counts the peak where there is no allocator to ask: weights, gradients and what is
        saved."""
        if not self.bench.cuda:
            torch.manual_seed(SEED)
            self.bench.clear()
            self.peak = self.bench.fixed + count_saved(self.loss, self.model)

    def leave(self):
        """Lets go of the modules: some keep tensors of their last step, which would count against
        others. A later step has new ones."""

    def rest(self):
        """Does so, and gives the allocator's memory back."""

    def median(self):
        return statistics.median(self.times) if self.times else self.probe

    def close(self):
        pass


def out_of_memory(e):
    return isinstance(e, getattr(torch.cuda, "OutOfMemoryError", MemoryError)) or "out of memory" in str(e)


def expected(e):
    """Reports whether an error belongs to the result: no kind fits all memory."""
    return isinstance(e, (Unsupported, stowage.BudgetError, MemoryError)) or out_of_memory(e)


def sentence(e):
    first = (str(e) or type(e).__name__).strip().splitlines()[0]
    return "out of memory" if out_of_memory(e) else first if isinstance(e, (Unsupported, stowage.Error)) else f"{type(e).__name__}: {first}"


class Patched(Kind):
    """A kind whose blocks, or some of them, have another forward()."""

    def __init__(self, bench, name):
        super().__init__(bench, name)
        self.build()

    def build(self):
        self.model = twin(self.bench.case.model)
        modules = dict(self.model.named_modules())
        self.blocks = [modules[n] for n in self.bench.case.blocks]


# Kept by a selective checkpoint: matrix products, convolutions and attention.
KEPT = [
    "mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_mm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_flash_attention_forward", "_efficient_attention_forward",
]  # fmt: skip


def selective():
    try:
        from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts
    except ImportError:
        raise Unsupported("this PyTorch has no selective checkpoints") from None
    kept = [getattr(torch.ops.aten, name).default for name in KEPT if hasattr(torch.ops.aten, name)]
    return {"context_fn": functools.partial(contexts, kept)}


def reentrant(forward):
    """Returns a forward pass with PyTorch's older checkpoint around it, as Megatron-LM has it. Arguments are
    passed by position: others would get no gradients."""

    def run(*args, **kwargs):
        n, names = len(args), tuple(kwargs)  # the graph holds the function: it must hold no tensors
        return checkpoint(lambda *all: forward(*all[:n], **dict(zip(names, all[n:]))), *args, *kwargs.values(), use_reentrant=True)

    return run


def checkpointed(block, older=False, **settings):
    """Makes a checkpoint around a block, or around what it was compiled to."""
    name = "forward" if getattr(block, "_compiled_call_impl", None) is None else "_compiled_call_impl"
    forward = getattr(block, name)
    setattr(block, name, reentrant(forward) if older else functools.partial(checkpoint, forward, use_reentrant=False, **settings))


class Checkpoint(Patched):
    """Checkpoints of k blocks, which may be compiled."""

    def __init__(self, bench, k, family="checkpoint", backend=None):
        n = len(bench.case.blocks)
        super().__init__(bench, f"{family} of {k} of {n} blocks")
        self.family, self.compiled, self.k, self.tag = family, backend is not None, k, f"{k}"
        self.like = "compile 1.0" if self.compiled else "eager"
        if backend is not None:
            compile_blocks(self.blocks, backend)
        self.patch()

    def patch(self):
        core, older = self.bench.case.core, self.bench.case.core is not None
        settings = selective() if self.family == "selective" and not older else {}
        for i in spread(self.k, len(self.blocks)):
            block = self.blocks[i]
            checkpointed(block.get_submodule(core) if self.family == "selective" and older else block, older, **settings)

    def step(self):
        if self.model is None:
            self.build()
            self.patch()
        return super().step()

    def leave(self):
        if not self.compiled:
            self.model = self.blocks = None

    def rest(self):
        if not self.compiled:
            self.leave()
            gc.collect()
            if self.bench.cuda:
                torch.cuda.empty_cache()


_backends = []  # PyTorch compares with those of other models, and must find them alive


def inductor(budget, dynamic=False):
    """Returns what compiles a module with a value of activation_memory_budget. Each has a backend
    and so graphs of its own, and values can be compared in one process."""
    if not hasattr(torch.nn.Module, "compile"):
        raise Unsupported("this PyTorch has no torch.compile for modules")
    from torch._dynamo import config as limits
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    if budget < 1 and not hasattr(config, "activation_memory_budget"):
        raise Unsupported("this PyTorch has no activation_memory_budget")
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(limits, name):
            setattr(limits, name, 256)  # one entry for each kind and shape

    def compiler(graph, inputs):
        with config.patch(activation_memory_budget=budget) if budget < 1 else contextlib.nullcontext():
            return compile_fx(graph, inputs)

    _backends.append(compiler)
    # All blocks of a class share one graph, in all kinds. Without dynamic=False a second model
    # with the same blocks would get graphs for any size, which are slower.
    return lambda module: module.compile(backend=compiler, dynamic=dynamic)


def compile_blocks(blocks, backend):
    for block in blocks:
        backend(block)


class Compiled(Patched):
    family, compiled, like = "compile", True, "compile 1.0"

    def __init__(self, bench, budget, backend):
        super().__init__(bench, f"compile {budget}")
        self.budget, self.tag = budget, f"{budget:g}"
        compile_blocks(self.blocks, backend)


class OnCPU(Kind):
    """PyTorch's own offload, which waits for every copy."""

    family = "save_on_cpu"

    def __init__(self, bench):
        super().__init__(bench, "save_on_cpu, pinned")

    def inside(self):
        return torch.autograd.graph.save_on_cpu(pin_memory=self.bench.cuda)


class Shared(Library):
    """A library that outlives its runtime: to pin host memory takes seconds, and the next runtime finds it
    pinned. Each has keys of its own, so that it records and plans as in a new process."""

    now = None
    runtimes = 0

    def __init__(self, config, provide):
        self.provide = provide
        super().__init__(config, lambda storage, size: self.provide(storage, size))

    @classmethod
    def lend(cls, config, provide):
        if cls.now is None:
            cls.now = cls(config, provide)
        cls.runtimes += 1
        cls.now.provide = provide
        cls.now.limit(config["saved_limit"])
        return cls.now

    def begin(self, key, stream):
        super().begin(f"{self.runtimes} {key}", stream)

    def close(self):
        """Does nothing for a runtime."""
        self.provide = None

    @classmethod
    def end_all(cls):
        """Closes it."""
        library, cls.now = cls.now, None
        if library is not None:
            Library.close(library)


class Stowed(Patched):
    """Stowage under a budget. The runtime is open from open() to close(), because a device has
    one at a time."""

    family, ours = "stowage", True

    def __init__(self, bench, name, budget, groups="known", backend=None, checkpoints=0, least=None, exact=True):
        super().__init__(bench, name)
        self.exact = exact
        self.budget, self.least, self.groups, self.compiled = budget, least, groups, backend is not None
        self.recorded = 0  # peak of the steps that are recorded
        self.history = []  # of each step: its stage, what its plan keeps, its time and its peak
        self.seconds = 0.0, 0.0  # to settle its plan, and for its turns with others
        self.like = "compile 1.0" if self.compiled else "eager"
        if backend is not None:
            compile_blocks(self.blocks, backend)
        for i in spread(checkpoints, len(self.blocks)):
            checkpointed(self.blocks[i])

    def open(self):
        case = self.bench.case
        by_block = {name: "block" for name in case.blocks}
        self.rt = stowage.Runtime(budget=self.budget, least=self.least, device=self.bench.device, exact=self.exact, library=Shared.lend)
        if self.compiled:  # the hooks of groups would end its graphs
            self.rt.attach(self.model)
        elif self.groups == "blocks":
            self.rt.attach(self.model, groups=by_block)
        elif case.groups is not None:
            self.rt.attach(self.model, groups=case.groups)
        else:
            try:
                self.rt.attach(self.model)
            except stowage.Error:  # no name that it knows
                self.rt.attach(self.model, groups=by_block)

    def settle(self, steps, until=float("inf")):
        """Runs the steps in which the runtime records, measures and plans, at most so many or until then, and one
        more once its plan is settled; the library alone needs few."""
        self.open()
        for _ in range(steps):
            self.probe = self.step()
            if self.history[-1]["stage"] == "settled" or self.history[-1]["stage"] == "library" and len(self.history) > 5 or len(self.history) > 4 and time.perf_counter() > until:
                break

    def step(self):
        plans = self.rt.stats().get("plans") or {}
        plan = next(iter(plans.values()), {"stage": "library" if self.history else "recorded"})
        self.history.append({"stage": plan["stage"], "kept_mib": round(plan.get("kept", 0) / MIB, 1)})
        return super().step()

    def note(self, took, peak):
        if self.bench.cuda:  # the runtime begins new peaks in steps that it measures
            peak = max(peak, (self.rt.stats().get("budget") or {}).get("last", 0))
        self.history[-1].update(ms=round(took, 2), peak_mib=round(peak / MIB, 1))
        if self.history[-1]["stage"] == "recorded":
            self.recorded = max(self.recorded, peak)
        else:
            self.peak = max(self.peak, peak)

    def count(self):
        """Reads what the runtime says, and its peak where no allocator knows it."""
        if self.rt is not None:
            self.report = self.rt.report()
            # Steps that the runtime measures begin new peaks, which the allocator then forgets.
            read = self.rt.stats().get("budget") or {}
            self.peak = max(self.peak, read.get("planned" if self.bench.cuda else "peak", 0))

    def close(self):
        if self.rt is not None:
            self.rt.close()
            self.rt = None
            if self.error is not None:
                Shared.end_all()
        self.model = self.blocks = None  # which keep tensors of their last step
        self.bench.forget()
