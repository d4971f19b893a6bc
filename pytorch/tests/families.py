"""Small modules with the names that well-known models have. Only names matter here."""

import torch
from torch import nn

W = 12


def lin(n=W, m=W):
    return nn.Linear(n, m, bias=False)


class Runs(nn.Module):
    """Calls its parts in order; containers within, part by part."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name.replace("__", ""), part)

    def forward(self, x):
        def call(m, x):
            if isinstance(m, nn.ModuleList):
                for c in m:
                    x = call(c, x)
                return x
            return m(x)

        for part in self.children():
            x = torch.tanh(call(part, x)) + x
        return x


def model(layer, inner="model", layers="layers"):
    return Runs(embed_tokens=lin(), **{inner: Runs(**{layers: nn.ModuleList(layer() for _ in range(2)), "norm": nn.LayerNorm(W)})}, lm_head=lin())


def attention():
    return Runs(q_proj=lin(), k_proj=lin(), v_proj=lin(), o_proj=lin())


def gated():
    return Runs(gate_proj=lin(), up_proj=lin(), down_proj=lin(), act_fn=nn.SiLU())


def hf(mlp):
    return model(lambda: Runs(input_layernorm=nn.LayerNorm(W), self_attn=attention(), post_attention_layernorm=nn.LayerNorm(W), mlp=mlp()))


def llama():
    return hf(gated)


def mixtral():
    expert = lambda: Runs(w1=lin(), w3=lin(), act_fn=nn.SiLU(), w2=lin())
    return model(lambda: Runs(input_layernorm=nn.LayerNorm(W), self_attn=attention(), post_attention_layernorm=nn.LayerNorm(W),
                              block_sparse_moe=Runs(gate=lin(), experts=nn.ModuleList(expert() for _ in range(3)))))


def qwen3_moe():
    return hf(lambda: Runs(gate=lin(), experts=nn.ModuleList(gated() for _ in range(3))))


def deepseek_v3():
    mla = lambda: Runs(q_a_proj=lin(), q_a_layernorm=nn.LayerNorm(W), q_b_proj=lin(), kv_a_proj_with_mqa=lin(), kv_a_layernorm=nn.LayerNorm(W), kv_b_proj=lin(), o_proj=lin())
    mlp = lambda: Runs(gate=lin(), experts=nn.ModuleList(gated() for _ in range(3)), shared_experts=gated())
    return model(lambda: Runs(input_layernorm=nn.LayerNorm(W), self_attn=mla(), post_attention_layernorm=nn.LayerNorm(W), mlp=mlp()))


def gpt_oss():
    return hf(lambda: Runs(router=lin(), experts=Runs(fused=lin())))


def megatron():
    att = lambda: Runs(linear_qkv=lin(), core_attention=nn.Tanh(), linear_proj=lin())
    mlp = lambda: Runs(router=lin(), experts=Runs(linear_fc1=lin(), linear_fc2=lin()), shared_experts=Runs(linear_fc1=lin(), linear_fc2=lin()))
    return model(lambda: Runs(input_layernorm=nn.LayerNorm(W), self_attention=att(), pre_mlp_layernorm=nn.LayerNorm(W), mlp=mlp()), "decoder")


DENSE = {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp"}
MIXED = DENSE | {"router", "moe_act"}
FAMILIES = {
    llama: DENSE,
    mixtral: (MIXED | {"expert_fc1"}) - {"mlp"},
    qwen3_moe: MIXED | {"expert_fc1"},
    deepseek_v3: MIXED | {"expert_fc1", "shared_experts", "mla_up_proj"},
    gpt_oss: MIXED,
    megatron: MIXED | {"expert_fc1", "shared_experts"},
}
