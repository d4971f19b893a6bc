"""One training step without a GPU: what it holds, and how long it would take on one.

A copy of the model runs a forward and a backward pass on the meta device, where tensors have
shapes and no values. Every operator is seen: the storages that it makes, and the bytes and
operations that it takes. A storage is alive until PyTorch frees it:

    bytes alive = weights + saved tensors + everything else     after every operator

Meta tensors are no GPU's, so two things that PyTorch does on a GPU are done here by name:
autocast, and the kernels that save other tensors there (attention and dropout).
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._again import hooks
from ._budget import Need, largest
from ._errors import Error
from ._record import Weak, storage_of
from ._surroundings import autocasts

_plain = (torch.Tensor, torch.nn.Parameter)

# The time in which a kernel starts and ends, in seconds.
GAP = 3e-6

# Matrix products of 32-bit numbers reach this part of their rate in bf16, and half of it as
# TF32: 1/15 on an H100 and 1/16 on an A100, by their data sheets.
FULL_PRECISION = 1 / 16

# What runs outside of all modules.
LOSS = "the loss"


class Rates(NamedTuple):
    """What a GPU does in a second: operations of products in bf16, bytes of its memory."""

    products: float
    hbm: float


# Copies


def tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Returns parameters, buffers, and tensors that modules have as attributes."""

    def inside(x: Any, depth: int) -> Iterator[torch.Tensor]:
        if isinstance(x, torch.Tensor):
            yield x
        elif depth and isinstance(x, (list, tuple, dict)):
            for y in x.values() if isinstance(x, dict) else x:
                yield from inside(y, depth - 1)

    for m in model.modules():
        for name, x in m.__dict__.items():
            if name != "_modules":
                yield from inside(x, 2)


def copy_of(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Returns a copy of a model on another device. Tensors that share a storage share one
    again. On the meta device no values are copied."""
    memo: Dict[int, Any] = {}
    made: Dict[int, torch.Tensor] = {}
    for t in tensors_of(model):
        if id(t) in memo:
            continue
        if torch.nn.parameter.is_lazy(t):
            raise Error("plan: the model has parameters without sizes, such as those of nn.LazyLinear; run the model once first, or give their sizes")
        if type(t) not in _plain or t.layout is not torch.strided:
            raise Error(f"plan: the model has a {type(t).__name__} among its tensors, whose size on a device is not known; give the model before it is sharded, quantised or wrapped")
        memory = storage_of(t)
        if memory._cdata not in made:
            flat = torch.empty(memory.nbytes() // t.element_size(), dtype=t.dtype, device=device)
            if device.type != "meta":
                flat.copy_(torch.empty(0, dtype=t.dtype, device=t.device).set_(memory, 0, flat.shape, (1,)))
            made[memory._cdata] = flat
        base = made[memory._cdata]
        if base.dtype != t.dtype:
            base = base.view(t.dtype)
        new = base.as_strided(t.size(), t.stride(), t.storage_offset())
        memo[id(t)] = torch.nn.Parameter(new, t.requires_grad) if type(t) is torch.nn.Parameter else new.requires_grad_(t.requires_grad and t.is_leaf)
    try:
        return copy.deepcopy(model, memo)
    except Exception as e:
        raise Error(f"plan: the model cannot be copied ({first(e)}); give one without such attributes, for example before it is wrapped") from None


def like(x: Any, device: torch.device) -> Any:
    """Returns an example with its tensors on another device."""

    def one(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        if device.type == "meta":
            new = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)
        else:
            new = t.detach().to(device).clone()
        return new.requires_grad_(t.requires_grad)

    return _pytree.tree_map(one, x)


def first(e: BaseException) -> str:
    """Returns what an exception says, in one line."""
    text = (str(e).splitlines() or [""])[0].split(". This could be because")[0]
    return f"{type(e).__name__}: {text[:200]}"


# Memory


class Made:
    """A storage that the step made, or was given."""

    __slots__ = ("weak", "number", "bytes", "born", "handles", "module", "since", "until")

    def __init__(self, memory: Any, born: int) -> None:
        self.weak: Optional[Weak] = Weak(memory)
        self.number, self.bytes, self.born = memory._cdata, memory.nbytes(), born
        self.handles = 0  # that autograd holds
        self.module = ""  # that saved it first
        self.since = self.until = -1  # when it was saved

    def saved_at(self, time: int) -> bool:
        return 0 <= self.since <= time and (self.handles > 0 or time <= self.until)


class Handle:
    """What autograd holds instead of a saved tensor."""

    __slots__ = ("tensor", "made", "live")

    def __init__(self, t: torch.Tensor, made: Optional[Made], live: Live) -> None:
        self.tensor, self.made, self.live = t if t.is_leaf else t.detach(), made, live

    def __del__(self) -> None:
        if self.made is not None:
            self.live.drop(self.made)


class Live:
    """The storages that are alive, weights left out. Times are numbers of operators."""

    def __init__(self, device: torch.device, weights: Set[int]) -> None:
        self.device, self.weights = device, weights
        self.time = self.now = self.saved = self.peak = self.peak_at = self.saved_peak = 0
        self.where = self.peak_where = ""
        self.module = LOSS  # what runs
        self.all: List[Made] = []  # ever saved
        self.needs: List[Need] = []
        self._by: Dict[int, Made] = {}
        self._loose: Dict[int, Made] = {}  # those that autograd does not hold, and that may be freed

    def of(self, t: torch.Tensor) -> Optional[Made]:
        """Returns the storage of a tensor, unless it is a weight's or on another device."""
        if t.device != self.device or type(t) not in _plain or t.layout is not torch.strided:
            return None
        memory = storage_of(t)
        if memory._cdata in self.weights:
            return None
        made = self._by.get(memory._cdata)
        if made is None:
            made = self._by[memory._cdata] = self._loose[memory._cdata] = Made(memory, self.time)
            self.now += made.bytes
        return made

    def look(self) -> None:
        """Notes what is alive after an operator."""
        self.time += 1
        expired = torch.UntypedStorage._expired
        for m in list(self._loose.values()):
            if m.weak is not None and expired(m.weak.of):
                self.now -= m.bytes
                m.weak = None
                del self._by[m.number], self._loose[m.number]
        if self.now > self.peak:
            self.peak, self.peak_at, self.peak_where = self.now, self.time, self.where
        self.needs.append((self.now - self.saved, self.saved))
        if len(self.needs) > 4096:
            self.needs = largest(self.needs)

    def pack(self, t: torch.Tensor) -> Handle:
        number = not t.dim() and storage_of(t)._cdata not in self._by  # of Python, which is on the CPU
        made = None if t.is_leaf and t.requires_grad or number else self.of(t)
        if made is not None:
            if not made.handles:
                self._loose.pop(made.number, None)
                self.saved += made.bytes
                self.saved_peak = max(self.saved_peak, self.saved)
            if made.since < 0:
                made.module, made.since = self.module, self.time
                self.all.append(made)
            made.handles += 1
        return Handle(t, made, self)

    def unpack(self, h: Handle) -> torch.Tensor:
        if h.made is not None:
            self.where = f"the backward pass of {h.made.module}"
        return h.tensor

    def held_of(self, numbers: Iterable[int]) -> int:
        """Returns the bytes of those of these storages that there were at the peak."""
        found = (self._by.get(n) for n in numbers)
        return sum(m.bytes for m in found if m is not None and m.born <= self.peak_at)

    def drop(self, made: Made) -> None:
        made.handles -= 1
        if not made.handles:
            self.saved -= made.bytes
            made.until = self.time
            self._loose[made.number] = made


# Operators

_products = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_grouped_mm", "_scaled_mm", "_int_mm"}


class Operators(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operator. It notes what is alive, and adds up the time that a GPU would take."""

    def __init__(self, rates: Optional[Rates], live: Optional[Live]) -> None:
        super().__init__()
        self.rates, self.live, self.seconds = rates, live, 0.0
        self._full = FULL_PRECISION
        with contextlib.suppress(Exception):  # if the program uses another of its settings
            self._full = 0.5 if torch.backends.cuda.matmul.allow_tf32 else FULL_PRECISION

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _name(func) == "detach" and not isinstance(args[0], torch.Tensor):
            return torch.tensor(args[0], device="cpu")  # a Python number that autograd saved
        try:
            out = func(*args, **kwargs)
        except NotImplementedError:
            out = _gradients(func, args)
            if out is None:
                raise
        if type(out) in (float, int, bool, complex) and _name(func) == "detach":
            out = torch.tensor(out, dtype=args[0].dtype, device="cpu")
        given = [t for t in _pytree.tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        got = [t for t in _pytree.tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        if self.live is not None:
            for t in got:
                self.live.of(t)
            self.live.look()
        if self.rates is not None and got:
            self._add(_name(func), given, got)
        return out

    def _add(self, name: str, given: List[torch.Tensor], got: List[torch.Tensor]) -> None:
        if not name.endswith("_") and any(_shares(got[0], t) for t in given):
            return  # a view
        if name.startswith("empty") or name.startswith("new_empty"):
            return
        operations = 0.0
        if name in _products:
            operations = 2.0 * got[0].numel() * next(t.shape[-1] for t in given[-2:])
        elif name == "convolution":
            operations = 2.0 * got[0].numel() * given[1][0].numel()
        elif name == "convolution_backward":
            operations = 4.0 * given[0].numel() * given[2][0].numel()
        self.add(operations, sum(t.numel() * t.element_size() for t in given + got), got[0].dtype)

    def add(self, operations: float, bytes: float, dtype: torch.dtype) -> None:
        """Adds the time of a kernel."""
        if self.rates is None:
            return
        speed = self.rates.products
        if dtype in (torch.float32, torch.float64):
            speed *= self._full
        self.seconds += max(operations / speed, bytes / self.rates.hbm) + GAP


def _name(func: Any) -> str:
    """Returns the name of an operator without its overload."""
    return str(getattr(func, "overloadpacket", func).__name__)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(storage_of(a)._cdata == storage_of(b)._cdata)


def _gradients(func: Any, args: Any) -> Any:
    """Returns what a backward operator makes that this PyTorch does not have for meta tensors,
    or None: gradients are like what they are gradients of."""
    name = _name(func)
    if name == "convolution_backward":
        grad, x, weight, mask = args[0], args[1], args[2], args[-1]
        sizes = (x.shape, weight.shape, (grad.shape[1],))
        return tuple(grad.new_empty(size) if wanted else None for size, wanted in zip(sizes, mask))
    if "_backward" not in name or not hasattr(func, "_schema") or len(func._schema.returns) != 1:
        return None
    for x, argument in zip(args, func._schema.arguments):
        if argument.name in ("self", "input") and isinstance(x, torch.Tensor):
            return torch.empty_like(x)
    return None


# What PyTorch does on a GPU and not on the meta device

_lower = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "bmm", "addr",
    "chain_matmul", "multi_dot", "einsum", "prelu", "scaled_dot_product_attention", "gru", "lstm", "gru_cell", "lstm_cell", "rnn_tanh", "rnn_relu", "rnn_tanh_cell", "rnn_relu_cell",
}  # fmt: skip
_full = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "norm", "frobenius_norm", "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "nll_loss_nd", "cross_entropy_loss", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist",
    "renorm", "logsumexp", "prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum",
}  # fmt: skip


class Kernels(TorchFunctionMode):  # type: ignore[misc]
    """Does what PyTorch would do on a GPU: autocast casts, and fused attention and dropout
    save what they save there."""

    def __init__(self, device: torch.device, operators: Operators, fused: bool) -> None:
        super().__init__()
        self.device, self._operators, self._fused = device, operators, fused
        self.cast: Dict[int, torch.Tensor] = {}  # weights that autocast has cast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":  # an attribute
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        if torch.is_autocast_enabled() and (name in _lower or name in _full):
            to = autocasts()[0][1] if name in _lower else torch.float32
            args, kwargs = _pytree.tree_map(lambda x: self._cast(x, to), (args, kwargs))
        if self._fused:
            if name == "dropout" and len(args) == 3 and args[2] and 0 < args[1] < 1:
                return torch.native_dropout(args[0], args[1], True)[0]
            if name == "scaled_dot_product_attention":
                return self._attention(func, *args, **kwargs)
        if self.device.type == "meta":
            if name == "cuda":
                return args[0]
            args, kwargs = tuple(self._moved(x) for x in args), {k: self._moved(x) if k == "device" else x for k, x in kwargs.items()}
        return func(*args, **kwargs)

    def _backward(self, loss: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None) -> None:
        """Runs a backward pass. What runs inside of it, second forward passes for example, meets these
        kernels, too."""
        with self:
            torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)

    def _moved(self, x: Any) -> Any:
        """Returns the meta device for a GPU."""
        cuda = type(x) is torch.device and x.type == "cuda" or type(x) is str and x.split(":")[0] == "cuda"
        return self.device if cuda else x

    def _cast(self, x: Any, to: torch.dtype) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype in (to, torch.float64) or x.device != self.device:
            return x
        if not (x.is_leaf and x.requires_grad and x.dtype is torch.float32):
            return x.to(to)
        if id(x) not in self.cast:  # autocast casts a weight once
            self.cast[id(x)] = x.to(to)
        return self.cast[id(x)]

    def _attention(self, func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **more: Any) -> Any:
        if query.dim() != 4 or query.element_size() > 4 or max(query.shape[-1], value.shape[-1]) > 256:
            return func(query, key, value, attn_mask, dropout_p, is_causal, **more)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        return _Attention.apply(self._operators, is_causal, attn_mask, query, key, value)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Saves what fused attention saves: its inputs, its output, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, operators: Operators, causal: bool, mask: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, _ = q.shape
        out = q.new_empty((batch, rows, heads, v.shape[-1])).transpose(1, 2)  # as the kernels lay it out
        sums = q.new_empty((batch, heads, rows), dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums, *([] if mask is None else [mask]))
        ctx.operators = operators
        ctx.cost = 2.0 * batch * heads * rows * k.shape[-2] * (q.shape[-1] + v.shape[-1]) / (2 if causal else 1)
        operators.add(ctx.cost, 2.0 * (q.numel() + k.numel()) * q.element_size(), q.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v = ctx.saved_tensors[:3]
        ctx.operators.add(2.5 * ctx.cost, 4.0 * (q.numel() + k.numel()) * q.element_size(), q.dtype)
        return (None, None, None, *(torch.empty_like(t) for t in (q, k, v)))


def by_default(device: torch.device) -> Any:
    """Makes tensors on a device where none is named, if that is not the CPU for the caller."""
    return contextlib.nullcontext() if torch.empty(0).device.type == "cpu" else device


@contextlib.contextmanager
def as_on_gpu(kernels: Kernels) -> Iterator[None]:
    """Makes PyTorch's functions call these kernels, and autocast work without a GPU."""
    autocast, names = torch.autocast, ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    # Functions in Python are not to be seen as a whole, but what they call. PyTorch hides a mode from
    # what it sees, so that a backward pass would run without these kernels.
    checks = {(of, n): getattr(of, n) for of in (torch.nn.functional, torch.autograd) for n in names if hasattr(of, n)}
    init, leave = autocast.__init__, autocast.__exit__

    def begin(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type not in ("cuda", "meta"):
            return init(self, device_type, dtype, enabled, cache_enabled)  # type: ignore[no-any-return]
        init(self, "cuda", torch.float16, False, cache_enabled)
        self._enabled, self.fast_dtype = enabled, dtype or autocasts()[0][1]

    def end(self: Any, *error: Any) -> Any:
        left = leave(self, *error)
        if not torch.is_autocast_enabled():
            kernels.cast.clear()
        return left

    try:
        for of, n in checks:
            setattr(of, n, lambda *_: False)
        autocast.__init__, autocast.__exit__ = begin, end
        with by_default(kernels.device), kernels:
            yield
    finally:
        autocast.__init__, autocast.__exit__ = init, leave
        for (of, n), check in checks.items():
            setattr(of, n, check)


# Steps


class Place:
    """Where a step is: the modules that run, and the pass."""

    def __init__(self, model: torch.nn.Module, live: Optional[Live]) -> None:
        self._live, self.stack = live, []  # type: Optional[Live], List[str]
        self.outside = LOSS  # what runs outside of all modules
        self.kinds: Dict[str, str] = {}
        self._hooks: List[Any] = []
        for name, m in model.named_modules():
            name = name or type(model).__name__
            self.kinds[name] = type(m).__name__
            self._hooks.append(m.register_forward_pre_hook(lambda *_, name=name: self._move(name)))
            self._hooks.append(m.register_forward_hook(lambda *_: self._move(None)))

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for h in self._hooks:
            h.remove()

    def _move(self, name: Optional[str]) -> None:
        self.stack.append(name) if name is not None else self.stack.pop()
        if self._live is not None:
            self._live.module = self.stack[-1] if self.stack else LOSS
            self._live.where = f"the forward pass of {self.stack[-1]}" if self.stack else self.outside

    def here(self) -> str:
        return f"{self.stack[-1]} ({self.kinds[self.stack[-1]]})" if self.stack else self.outside


def step(model: torch.nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], torch.Tensor], autocast: Optional[torch.dtype], operators: Operators, kernels: Kernels, place: Place, pack: Any, unpack: Any) -> None:
    """Runs one forward and backward pass. It raises an Error that says which module cannot."""
    on = torch.autocast("cuda", dtype=autocast) if autocast is not None else contextlib.nullcontext()
    try:
        # Autocast stays on, so that what a checkpoint runs again is cast again.
        with operators, hooks(pack, unpack), torch.enable_grad(), on:
            value = loss(model(*args, **kwargs))
            kernels.cast.clear()
            place.stack.clear()
            place.outside = "the backward pass"
            if operators.live is not None:
                operators.live.where = place.outside
            torch.autograd.backward(value)
    except Error:
        raise
    except Exception as e:
        device = kernels.device.type
        do = "check the example, or give device=\"cpu\" to run it there with values" if device == "meta" else "check that the example is what the model takes"
        raise Error(f"plan: {place.here()} cannot run on the {device} device ({first(e)}); {do}") from None


def storages(tensors: Iterable[torch.Tensor], device: Optional[torch.device] = None) -> Dict[int, int]:
    """Returns the bytes of the storages of tensors, by their numbers."""
    return {storage_of(t)._cdata: storage_of(t).nbytes() for t in tensors if device is None or t.device == device}
