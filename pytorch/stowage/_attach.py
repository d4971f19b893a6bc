"""Groups of a model's modules: which module's saved tensors go into which group.

A group begins when the forward pass of its module begins and ends with it; of nested
modules the innermost counts. The names are those of the field, so that a policy that
`stowage plan` found can be used as it is.
"""

from __future__ import annotations

import fnmatch
import inspect
import re
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

import torch

from ._config import group_name
from ._errors import Error
from ._record import storage_of

# Module names of Hugging Face's Llama, Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss and of
# Megatron-LM. The first pattern that matches gives the group. What an expert itself saves
# (the product of gate and input, and what its last matrix reads) is moe_act.
KNOWN: List[Tuple[str, str]] = [
    # norms before attention and before the feed-forward part
    ("*.input_layernorm", "attn_norm"),
    ("*.post_attention_layernorm", "mlp_norm"),
    ("*.pre_mlp_layernorm", "mlp_norm"),
    # attention: projections in, the rest of it, projection out
    ("*.self_attn.[qkv]_proj", "qkv_linear"),
    ("*.self_attn.q_a_proj", "qkv_linear"),
    ("*.self_attn.kv_a_proj_with_mqa", "qkv_linear"),
    ("*.self_attn.q_b_proj", "mla_up_proj"),
    ("*.self_attn.kv_b_proj", "mla_up_proj"),
    ("*.self_attn.o_proj", "attn_proj"),
    ("*.self_attn", "core_attn"),
    ("*.self_attention.linear_qkv", "qkv_linear"),
    ("*.self_attention.linear_q_proj", "qkv_linear"),
    ("*.self_attention.linear_q_down_proj", "qkv_linear"),
    ("*.self_attention.linear_kv_down_proj", "qkv_linear"),
    ("*.self_attention.linear_q_up_proj", "mla_up_proj"),
    ("*.self_attention.linear_kv_up_proj", "mla_up_proj"),
    ("*.self_attention.linear_proj", "attn_proj"),
    ("*.self_attention", "core_attn"),
    # mixtures
    ("*.shared_experts", "shared_experts"),
    ("*.shared_expert", "shared_experts"),
    ("*.block_sparse_moe.gate", "router"),
    ("*.mlp.gate", "router"),
    ("*.mlp.router", "router"),
    ("*.experts.*.w[13]", "expert_fc1"),
    ("*.experts.*.gate_proj", "expert_fc1"),
    ("*.experts.*.up_proj", "expert_fc1"),
    ("*.experts.linear_fc1", "expert_fc1"),
    ("*.local_experts.*.linear_fc1", "expert_fc1"),
    ("*.experts", "moe_act"),
    ("*.local_experts", "moe_act"),
    # dense feed-forward parts, and state spaces
    ("*.mlp", "mlp"),
    ("*.mixer.in_proj", "mamba_in"),
    ("*.mixer", "mamba_scan"),
]
# With these, the names are the modules that can be offloaded by the table of modules
# (memory/module.go): a policy may name them although no pattern gives them.
NAMES = sorted({group for _, group in KNOWN} | {"fused_group_mlp", "gdp_qkv"})

_always: Dict[str, Any] = {"always_call": True} if "always_call" in inspect.signature(torch.nn.Module.register_forward_hook).parameters else {}
# Containers are never called; their children are.
_containers = (torch.nn.ModuleList, torch.nn.ModuleDict)
_plain = (torch.Tensor, torch.nn.Parameter)


def matches(model: torch.nn.Module, groups: Optional[Mapping[str, str]], needed: bool = True, known: bool = True) -> Dict[torch.nn.Module, str]:
    """Returns the group of each module that has one: by the given patterns, or else by known
    names if these are to be used. It raises an error if a pattern matches no module, and if
    groups are needed and there are none."""
    if not isinstance(model, torch.nn.Module):
        raise Error(f"attach: expected a torch.nn.Module, got {type(model).__name__}")
    if groups is not None and not isinstance(groups, Mapping):
        raise Error(f"expected a dictionary as groups, got {groups!r}; give one such as {{\"*.mlp\": \"mlp\"}}, for modules of {listed(model)}")
    if groups is not None and not groups:
        raise Error(f"groups={{}} is empty; give patterns for modules of {listed(model)}, or no groups for a well-known model")
    if groups is None and not known:
        return {}
    for p in groups or ():
        if not isinstance(p, str):
            raise Error(f"groups: expected patterns of names as keys, got {p!r}; give one of {listed(model)} in quotes")
    patterns = KNOWN if groups is None else [(p, group_name(g)) for p, g in groups.items()]
    found: Dict[torch.nn.Module, str] = {}
    used: Set[str] = set()
    for name, module in model.named_modules():
        # In a layer that is attached alone, names have no prefix.
        fits = [i for i, (p, _) in enumerate(patterns) if fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase("." + name, p)]
        used.update(patterns[i][0] for i in fits)
        for m in called(module) if fits else ():
            found.setdefault(m, patterns[fits[0]][1])
    missed = [] if groups is None else [p for p in groups if p not in used]
    if missed:
        raise Error(f"groups: {missed[0]!r} matches no module; the modules are {listed(model)}")
    if not found and needed:
        raise Error(f"attach: no module has a known name; give groups={{pattern: group}} for modules of {listed(model)}")
    return found


def called(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    if not isinstance(module, _containers):
        return [module]
    return [m for child in module.children() for m in called(child)]


def listed(model: torch.nn.Module, most: int = 10) -> str:
    """Lists names of modules, those of equal layers once."""
    names = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_modules() if name)
    some = list(names)[:most]
    return (", ".join(some) or "none") + (f" and {len(names) - most} more" if len(names) > most else "")


def storage_number(given: torch.Tensor) -> int:
    """Returns the number of a tensor's storage, of a shard's local one; 0 if there is none. It
    stays the same if the storage is freed and filled again; its address does not."""
    t: Any = given if type(given) in _plain else getattr(given, "_local_tensor", None)
    if type(t) not in _plain or t.layout is not torch.strided:
        return 0
    return int(storage_of(t)._cdata)


def is_sharded(module: torch.nn.Module) -> bool:
    """Reports whether fully_shard() was applied, which adds a class of this name. Importing
    that class would load all of torch.distributed."""
    return any(c.__name__ == "FSDPModule" for c in type(module).__mro__)


class Attachment:
    """A model with groups; detach() removes them again."""

    def __init__(self, runtime: Any, model: torch.nn.Module, found: Dict[torch.nn.Module, str], optimizer: Optional[torch.optim.Optimizer] = None) -> None:
        self.names = sorted(set(found.values()))
        self.model: Optional[torch.nn.Module] = model
        self.optimizer = optimizer
        self._runtime = runtime
        # Parameters and buffers of modules, by the sharded module that gathers them: they are
        # whole only while that one runs.
        self._owned: Dict[Optional[torch.nn.Module], List[Dict[str, Optional[torch.Tensor]]]] = {}
        self._collect(model, None, set())
        self._hooks: List[Any] = []
        for module in self._owned:
            if module is not None:  # fully_shard's own hook always runs before
                self._hooks.append(module.register_forward_pre_hook(self._gathered))
        for module, group in found.items():
            self._hooks.append(module.register_forward_pre_hook(self._begin(group)))
            self._hooks.append(module.register_forward_hook(self._end(), **_always))

    def _collect(self, module: torch.nn.Module, gathers: Optional[torch.nn.Module], seen: Set[torch.nn.Module]) -> None:
        if module in seen:
            return
        seen.add(module)
        gathers = module if is_sharded(module) else gathers
        self._owned.setdefault(gathers, []).extend(d for d in (module._parameters, module._buffers) if d)
        for child in module.children():
            self._collect(child, gathers, seen)

    def weights(self) -> Iterator[int]:
        """Returns the numbers of the storages that the model has now."""
        if self.model is not None and is_sharded(self.model) and self.model not in self._owned:
            raise Error("fully_shard() was called after attach(); call attach() last")
        return self._numbers(d for ds in self._owned.values() for d in ds)

    def _numbers(self, owned: Iterable[Dict[str, Optional[torch.Tensor]]]) -> Iterator[int]:
        return (storage_number(t) for d in owned for t in d.values() if t is not None)

    def _gathered(self, module: torch.nn.Module, args: Any) -> None:
        step = self._runtime._step
        if step is not None:
            step.weights.update(self._numbers(self._owned[module]))

    def _begin(self, group: str) -> Callable[..., None]:
        runtime = self._runtime

        def begin(module: torch.nn.Module, args: Any) -> None:
            step = runtime._step
            if step is None:
                return
            if step.inside(module):  # an exception left its group open
                step.end_group(module, failed=True)
            step.begin_group(group, module)

        return begin

    def _end(self) -> Callable[..., None]:
        runtime = self._runtime

        def end(module: torch.nn.Module, args: Any, out: Any) -> None:
            step = runtime._step
            if step is not None:
                step.end_group(module, failed=out is None and bool(_always))

        return end

    def detach(self) -> None:
        """Removes the groups from the model."""
        for hook in self._hooks:
            hook.remove()
        self._runtime._detached(self)
        self._hooks, self._owned, self.model = [], {}, None
