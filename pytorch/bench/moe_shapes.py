"""The models of pytorch/bench/torch_moe.py: their configurations, what Stowage reads from
these, their parameters and their operations. It needs no PyTorch."""

import math

# The keys of a Hugging Face config.json, which Stowage reads.
DECODER = {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "head_dim": 128, "max_position_embeddings": 4096, "tie_word_embeddings": False}
MODELS = {
    "wide8": {**DECODER, "model_type": "mixtral", "num_key_value_heads": 16, "intermediate_size": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    "small64": {**DECODER, "model_type": "mixtral", "num_key_value_heads": 4, "intermediate_size": 1024, "num_local_experts": 64, "num_experts_per_tok": 6},
    "deepseek": {
        **DECODER, "model_type": "deepseek_v3", "num_hidden_layers": 6, "first_k_dense_replace": 2, "intermediate_size": 8192, "moe_intermediate_size": 1024,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_layer_freq": 1, "q_lora_rank": 1024, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
    "dense": {**DECODER, "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
}
TINY = {
    "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 96, "moe_intermediate_size": 48,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
}


def tiny(name):
    return {k: TINY.get(k, v) for k, v in MODELS[name].items()}


def describe(c):
    """What a checkpoint of Stowage says about a model of this configuration: the layers, and
    what is set for all of them."""
    layers = []
    for i in range(c["num_hidden_layers"]):
        if "kv_lora_rank" in c:
            l = {"mla": {"heads": c["num_attention_heads"], "q_rank": c["q_lora_rank"], "kv_rank": c["kv_lora_rank"], "nope": c["qk_nope_head_dim"], "rope": c["qk_rope_head_dim"], "v": c["v_head_dim"]}}
        else:
            l = {"attention": {"heads": c["num_attention_heads"], "kv_heads": c["num_key_value_heads"], "head_dim": c["head_dim"]}}
        if "num_local_experts" in c:
            l["moe"] = {"experts": c["num_local_experts"], "top_k": c["num_experts_per_tok"], "width": c["intermediate_size"]}
        elif i >= c.get("first_k_dense_replace", math.inf):
            width = c["moe_intermediate_size"]
            l["moe"] = {"experts": c["n_routed_experts"], "top_k": c["num_experts_per_tok"], "width": width, "shared_width": c["n_shared_experts"] * width, "sigmoid": True, "bias": True}
        else:
            l["dense"] = {"width": c["intermediate_size"]}
        layers.append(l)
    routing = {"Normalise": True, "Factor": 1, "Balance": 0 if "scoring_func" in c else 0.01, "BiasRate": 0.001}
    return {"hidden": c["hidden_size"], "vocab": c["vocab_size"], "tied": False, "layers": layers}, {"Epsilon": 1e-5, "Theta": 10000, "Routing": routing}


def within(want, got):
    """Reports whether all that is wanted is in what was got."""
    if isinstance(want, dict):
        return all(within(v, got.get(k, 0)) for k, v in want.items())
    if isinstance(want, list):
        return len(want) == len(got) and all(within(a, b) for a, b in zip(want, got))
    return want == got or (isinstance(want, float) and abs(want - got) <= 1e-6 * abs(want))


def shapes(about):
    """The parameters by name, an expert's matrices stacked."""
    h = about["hidden"]
    out = {"embedding.word_embeddings.weight": (about["vocab"], h), "output_layer.weight": (about["vocab"], h), "decoder.final_layernorm.weight": (h,)}
    for i, l in enumerate(about["layers"]):
        at = f"layers.{i}."
        s = {"input_layernorm.weight": (h,), "pre_mlp_layernorm.weight": (h,)}
        if "mla" in l:
            a = l["mla"]
            s |= {
                "self_attention.linear_q_down_proj.weight": (a["q_rank"], h), "self_attention.q_layernorm.weight": (a["q_rank"],),
                "self_attention.linear_q_up_proj.weight": (a["heads"] * (a["nope"] + a["rope"]), a["q_rank"]),
                "self_attention.linear_kv_down_proj.weight": (a["kv_rank"] + a["rope"], h), "self_attention.kv_layernorm.weight": (a["kv_rank"],),
                "self_attention.linear_kv_up_proj.weight": (a["heads"] * (a["nope"] + a["v"]), a["kv_rank"]),
                "self_attention.linear_proj.weight": (h, a["heads"] * a["v"]),
            }
        else:
            a = l["attention"]
            s |= {"self_attention.linear_qkv.weight": ((a["heads"] + 2 * a["kv_heads"]) * a["head_dim"], h), "self_attention.linear_proj.weight": (h, a["heads"] * a["head_dim"])}
        if "moe" in l:
            m = l["moe"]
            s |= {"mlp.router.weight": (m["experts"], h), "mlp.experts.linear_fc1.weight": (m["experts"], 2 * m["width"], h), "mlp.experts.linear_fc2.weight": (m["experts"], h, m["width"])}
            if m.get("shared_width"):
                s |= {"mlp.shared_experts.linear_fc1.weight": (2 * m["shared_width"], h), "mlp.shared_experts.linear_fc2.weight": (h, m["shared_width"])}
            if m.get("bias"):
                s["mlp.router.expert_bias"] = (m["experts"],)
        else:
            s |= {"mlp.linear_fc1.weight": (2 * l["dense"]["width"], h), "mlp.linear_fc2.weight": (h, l["dense"]["width"])}
        out |= {at + n: v for n, v in s.items()}
    return out


def work(about, seq):
    """Parameters, and FLOPs of a token's forward and backward pass: the products of the
    parameters that it meets, and of causal attention with half of the sequence."""
    total = active = 0
    for name, shape in shapes(about).items():
        n = math.prod(shape)
        total += 0 if name.endswith("expert_bias") else n
        if len(shape) == 1 or name.startswith("embedding"):
            continue
        if len(shape) == 3:
            m = about["layers"][int(name.split(".")[1])]["moe"]
            n = n * m["top_k"] // m["experts"]
        active += n
    flops = 6 * active
    for l in about["layers"]:
        a = l.get("mla")
        width = a["heads"] * (a["nope"] + a["rope"] + a["v"]) if a else 2 * l["attention"]["heads"] * l["attention"]["head_dim"]
        flops += 3 * 2 * width * seq // 2
    return total, flops
