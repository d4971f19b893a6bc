"""The models of pytorch/bench/torch_moe.py, as one writes them for speed in PyTorch: SDPA,
products over experts by torch._grouped_mm with counts that stay on the device, and
permutations whose gradient is a gather. Layers are modules of one class, so that
torch.compile compiles each kind of layer once. A PyTorch that lacks SDPA or the grouped
product takes plain operators.

Passes read copies of the parameters in bf16 on a GPU; the parameters themselves, their
gradients and the moments are fp32, as in `stowage train --bf16`.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch_model import stacked, swiglu, turn

GROUPED = hasattr(torch, "_grouped_mm")
SDPA = hasattr(F, "scaled_dot_product_attention")


class Spread(torch.autograd.Function):
    """Rows of x in the order of experts: row i is that of the token of choice order[i]."""

    @staticmethod
    def forward(ctx, x, order, inverse, top):
        ctx.save_for_backward(inverse)
        ctx.top = top
        return x.index_select(0, order // top)

    @staticmethod
    def backward(ctx, g):
        (inverse,) = ctx.saved_tensors
        return g.index_select(0, inverse).view(-1, ctx.top, g.shape[1]).sum(1), None, None, None


class Collect(torch.autograd.Function):
    """The sum of each token's rows: the transpose of Spread."""

    @staticmethod
    def forward(ctx, rows, order, inverse, top):
        ctx.save_for_backward(order)
        ctx.top = top
        return rows.index_select(0, inverse).view(-1, top, rows.shape[1]).sum(1)

    @staticmethod
    def backward(ctx, g):
        (order,) = ctx.saved_tensors
        return g.index_select(0, order // ctx.top), None, None, None


def norm(x, w, epsilon):
    if hasattr(F, "rms_norm"):
        return F.rms_norm(x, (x.shape[-1],), w, epsilon)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * w


def attend(q, k, v):
    """Causal attention of [batch, seq, heads, width]; a key head may serve several query heads."""
    b, s, heads, d = q.shape
    group = heads // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if SDPA:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, **({"enable_gqa": True} if group > 1 else {}))
    else:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mask = torch.full((s, s), -math.inf, device=q.device, dtype=q.dtype).triu(1)
        o = (q @ k.transpose(2, 3) / math.sqrt(d) + mask).softmax(-1) @ v
    return o.transpose(1, 2).reshape(b, s, -1)


def grouped(x, w, ends):
    """Products of the rows of each expert with its matrix; rows of expert e end at ends[e]."""
    if GROUPED and x.is_cuda:
        return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
    cuts = ends.tolist()
    return torch.cat([F.linear(x[a:b], m) for a, b, m in zip([0] + cuts, cuts, w.unbind())])


class Layer(nn.Module):
    """One layer. Its parameters have the tails of their names in the checkpoint, with
    underscores for dots."""

    def __init__(self, about, settings, tensors):
        super().__init__()
        self.about, self.settings, self.epsilon = about, settings, settings["Epsilon"]
        for name, t in tensors.items():
            self.register_parameter(name.replace(".", "_"), t)

    def forward(self, x, cos, sin, bias):
        """Gives the layer's output, the loss that balances experts, and the rows of each."""
        a, aux, count = self.about, None, None
        h = norm(x, self.input_layernorm_weight, self.epsilon)
        x = x + (self.latent(h, a["mla"], cos, sin) if "mla" in a else self.attention(h, a["attention"], cos, sin))
        h = norm(x, self.pre_mlp_layernorm_weight, self.epsilon)
        if "moe" in a:
            y, aux, count = self.mixture(h, a["moe"], bias)
            return x + y, aux, count
        return x + F.linear(swiglu(F.linear(h, self.mlp_linear_fc1_weight)), self.mlp_linear_fc2_weight), aux, count

    def attention(self, x, a, cos, sin):
        b, s, _ = x.shape
        heads, kv = a["heads"], a["kv_heads"]
        q, k, v = F.linear(x, self.self_attention_linear_qkv_weight).view(b, s, heads + 2 * kv, -1).split((heads, kv, kv), 2)
        q, k = turn(q, cos, sin).to(x.dtype), turn(k, cos, sin).to(x.dtype)
        return F.linear(attend(q, k, v), self.self_attention_linear_proj_weight)

    def latent(self, x, a, cos, sin):
        b, s, _ = x.shape
        heads, nope, rope, at = a["heads"], a["nope"], a["rope"], "self_attention_"
        w = lambda name: getattr(self, at + name)
        if a["q_rank"]:
            q = F.linear(norm(F.linear(x, w("linear_q_down_proj_weight")), w("q_layernorm_weight"), self.epsilon), w("linear_q_up_proj_weight"))
        else:
            q = F.linear(x, w("linear_q_proj_weight"))
        down, key = F.linear(x, w("linear_kv_down_proj_weight")).split((a["kv_rank"], rope), -1)
        up = F.linear(norm(down, w("kv_layernorm_weight"), self.epsilon), w("linear_kv_up_proj_weight")).view(b, s, heads, nope + a["v"])
        plain, turned = q.view(b, s, heads, nope + rope).split((nope, rope), -1)
        k, v = up.split((nope, a["v"]), -1)
        key = turn(key.view(b, s, 1, rope), cos, sin).to(x.dtype).expand(b, s, heads, rope)
        o = attend(torch.cat((plain, turn(turned, cos, sin).to(x.dtype)), -1), torch.cat((k, key), -1), v)
        return F.linear(o, w("linear_proj_weight"))

    def mixture(self, x, m, bias):
        r, flat = self.settings["Routing"], x.flatten(0, 1)
        tokens, experts, top = len(flat), m["experts"], m["top_k"]
        logits = F.linear(flat, self.mlp_router_weight).float()
        scores = logits.sigmoid() if m.get("sigmoid") else logits.softmax(-1)
        chosen = (scores if bias is None else scores.detach() + bias).topk(top, -1, sorted=False).indices
        weight = scores.gather(1, chosen)
        if r["Normalise"]:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        flags = chosen.flatten()[None] <= torch.arange(experts, device=x.device)[:, None]
        ends = flags.sum(1, dtype=torch.int32)
        count = torch.diff(ends, prepend=ends.new_zeros(1))
        aux = None
        if r["Balance"]:
            share = scores / (scores.sum(-1, keepdim=True) + 1e-20) if m.get("sigmoid") else scores
            aux = r["Balance"] * experts * (count / (tokens * top) * share.mean(0)).sum()
        order = chosen.flatten().to(torch.uint8 if experts <= 256 else torch.int16).argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        rows = Spread.apply(flat, order, inverse, top)
        weight = (weight * r["Factor"]).flatten().index_select(0, order)[:, None]
        h = (swiglu(grouped(rows, self.mlp_experts_linear_fc1_weight, ends)) * weight).to(x.dtype)
        y = Collect.apply(grouped(h, self.mlp_experts_linear_fc2_weight, ends), order, inverse, top)
        if m.get("shared_width"):
            y = y + F.linear(swiglu(F.linear(flat, self.mlp_shared_experts_linear_fc1_weight)), self.mlp_shared_experts_linear_fc2_weight)
        return y.view_as(x), aux, count


def head(h, w, output, targets, epsilon):
    logits = F.linear(norm(h, w, epsilon), output)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Model:
    """A model with its parameters in fp32 (main), the copies that passes read, and sums of
    gradients in fp32. Without copies (on a CPU) both are the same."""

    def __init__(self, about, settings, tensors, seq, device, copies):
        self.about, self.settings, self.seq, self.device = about, settings, seq, device
        self.main, self.bias = {}, {}
        for name, t in stacked(tensors).items():
            if name.endswith("expert_bias"):
                self.bias[name] = t.clone().to(device)[:, 0] if t.dim() == 2 else t.clone().to(device)
            else:
                self.main[name] = (t[:, 0] if t.dim() == 2 and t.shape[1] == 1 else t).clone().to(device)
        self.copies = copies
        self.w = {n: nn.Parameter(t.to(torch.bfloat16) if copies else t) for n, t in self.main.items()}
        self.grads = {n: torch.zeros_like(t) for n, t in self.main.items()}
        self.first, self.ways = True, {}  # whether gradients replace the sums; layers, head and sum of gradients by mode
        for n, p in self.w.items():
            if hasattr(p, "register_post_accumulate_grad_hook"):
                p.register_post_accumulate_grad_hook(lambda p, g=self.grads[n]: self.take(p, g))
        self.use("eager")
        a = about["layers"][0]
        width = a["mla"]["rope"] if "mla" in a else a["attention"]["head_dim"]
        pair = torch.arange(0, width, 2, dtype=torch.float64)
        angle = torch.arange(seq, dtype=torch.float64)[:, None] * settings["Theta"] ** (-pair / width)
        self.cos, self.sin = (t.float()[:, None].to(device) for t in (angle.cos(), angle.sin()))
        self.load = {n: torch.zeros_like(b) for n, b in self.bias.items()}

    def take(self, p, g):
        """Adds a gradient to the sums and frees it."""
        if self.first:
            g.copy_(p.grad)
        else:
            self.add(g.view(-1), p.grad.view(-1))
        p.grad = None

    def use(self, mode):
        """Lets passes run eagerly, or compiled in a mode of torch.compile. All modes share the parameters."""
        if mode not in self.ways:
            layers, top, add = [], head, lambda g, p: g.add_(p)
            for i, l in enumerate(self.about["layers"]):
                at = f"layers.{i}."
                layers.append(Layer(l, self.settings, {n[len(at):]: p for n, p in self.w.items() if n.startswith(at)}))
            if mode != "eager":
                for l in layers:
                    l.compile(dynamic=False, mode=mode)
                top = torch.compile(head, dynamic=False, mode=mode)
                add = torch.compile(add, dynamic=True)  # PyTorch's own kernel for two formats is slow
            self.ways[mode] = layers, top, add
        self.layers, self.head, self.add = self.ways[mode]

    def groups(self, decay):
        """Parameter groups of the optimiser: vectors do not decay."""
        return [
            {"params": [p for p in self.main.values() if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in self.main.values() if p.dim() == 1], "weight_decay": 0.0},
        ]

    def backward(self, rows, targets, total, first):
        """The gradients of one microbatch are added to the sums, or replace them. Gives the
        loss and the auxiliary one, on the device."""
        self.first = first
        h, extra = F.embedding(rows, self.w["embedding.word_embeddings.weight"]), []
        for i, layer in enumerate(self.layers):
            name = f"layers.{i}.mlp.router.expert_bias"
            h, aux, count = layer(h, self.cos, self.sin, self.bias.get(name))
            if aux is not None:
                extra.append(aux)
            if name in self.load:
                self.load[name] += count
        output = self.w["embedding.word_embeddings.weight" if self.about["tied"] else "output_layer.weight"]
        sums = self.head(h, self.w["decoder.final_layernorm.weight"], output, targets, self.epsilon)
        loss = sums / total
        if extra:
            loss = loss + sum(extra) * (rows.numel() / total)
        loss.backward()
        for n, p in self.w.items():
            if p.grad is not None:  # this PyTorch has no hook behind the sum
                self.take(p, self.grads[n])
        return sums.detach() / total, sum(e.detach() for e in extra) if extra else torch.zeros(())

    @property
    def epsilon(self):
        return self.settings["Epsilon"]

    def update(self):
        """Copies the parameters for the next step's passes and moves the routers' biases."""
        with torch.no_grad():
            if self.copies:
                torch._foreach_copy_(list(self.w.values()), list(self.main.values()))
            for name, load in self.load.items():
                self.bias[name] += self.settings["Routing"]["BiasRate"] * (load.mean() - load).sign()
                load.zero_()
