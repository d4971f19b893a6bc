"""Megatron-LM's own GPT mixture for pytorch/bench/torch_rivals.py, unmodified and without Transformer
Engine: experts run one after the other, so that launches take most of the time."""

import pathlib
import sys

import torch
from rivals_kinds import Unsupported
from rivals_models import Case


def core(path):
    """Imports megatron.core from a folder, and starts the one process that it wants to be in."""
    if not (pathlib.Path(path) / "megatron" / "core").is_dir():
        raise Unsupported(f"{path} has no megatron/core; clone https://github.com/NVIDIA/Megatron-LM and give --megatron-path")
    if not torch.cuda.is_available():
        raise Unsupported("Megatron-LM needs a GPU")
    sys.path.insert(0, str(path))
    try:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig
    except ImportError as e:
        raise Unsupported(f"megatron.core in {path} cannot be imported: {e}") from None
    dist = torch.distributed
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    return GPTModel, get_gpt_layer_local_spec, TransformerConfig


def megatron(path, small, device):
    GPTModel, layer_spec, TransformerConfig = core(path)
    if device != "cuda":
        raise Unsupported("Megatron-LM needs a GPU")
    layers, width, heads, inner, experts, batch, length, vocabulary = 6, 2048, 16, 2048, 8, 2, 2048, 32000
    if small:
        layers, width, heads, inner, experts, batch, length, vocabulary = 2, 64, 4, 64, 4, 2, 64, 128
    config = TransformerConfig(
        num_layers=layers, hidden_size=width, num_attention_heads=heads, ffn_hidden_size=inner,
        num_moe_experts=experts, moe_ffn_hidden_size=inner, moe_router_topk=2, moe_token_dispatcher_type="alltoall", moe_grouped_gemm=False,
        bf16=True, params_dtype=torch.bfloat16, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = GPTModel(config, layer_spec(num_experts=experts, moe_grouped_gemm=False), vocabulary, length, position_embedding_type="rope").bfloat16().cuda()
    ids = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(1)).cuda()
    places = torch.arange(length, device="cuda").expand(batch, length)

    def step(m):
        return m(ids[:, :-1].contiguous(), places, None, labels=ids[:, 1:].contiguous()).float().mean()

    what = f"megatron.core: {layers} layers of {width}, {experts} experts one after the other, {batch} x {length} tokens, bf16"
    # A layer keeps the routing of its last pass, whose graph holds what PyTorch's newer checkpoint made again
    # until the next step. Megatron-LM itself has the older kind: around a layer, or around its attention.
    blocks = [f"decoder.layers.{i}" for i in range(layers)]
    return Case(model, step, blocks=blocks, compiles=False, what=what, core="self_attention.core_attention")
