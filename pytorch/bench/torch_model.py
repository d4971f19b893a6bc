"""The models of `stowage train` in PyTorch, as one writes them there: products by
F.linear, attention with an explicit softmax (PyTorch 1.13 has no other on a CPU), a
loop over experts, autograd, torch.optim.AdamW. pytorch/bench/torch_train.py compares both.

Parameters are a dictionary with the names of the checkpoint; an expert's matrices are
stacked, and taken apart by unbind, whose backward pass is one copy.
"""

import math
import re

import torch
import torch.nn.functional as F

MTP_FACTOR = 0.1  # of the losses of all further heads together


def rms_norm(x, w, epsilon):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * w


def turn(x, cos, sin):
    """Rotary positions: x is [batch, seq, heads, width], the halves of a head turn."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def swiglu(h):
    a, b = h.chunk(2, -1)
    return F.silu(a) * b


def stacked(tensors):
    """The tensors of a checkpoint with those of a layer's experts as one."""
    out, parts = {}, {}
    for name, t in tensors.items():
        m = re.fullmatch(r"(.*\.experts\.)(\d+)\.(.*)", name)
        if m:
            parts.setdefault(m[1] + m[3], {})[int(m[2])] = t
        else:
            out[name] = t
    for name, p in parts.items():
        out[name] = torch.stack([p[i] for i in range(len(p))])
    return out


class Model:
    def __init__(self, about, settings, tensors, seq):
        self.about, self.settings, self.seq = about, settings, seq
        self.epsilon, self.tables, self.masks = settings["Epsilon"], {}, {}
        self.w, self.bias = {}, {}
        for name, t in stacked(tensors).items():
            if name.endswith("expert_bias"):
                self.bias[name] = t.clone()
            else:  # a vector is a column there
                self.w[name] = (t[:, 0] if t.shape[1] == 1 else t).clone().requires_grad_()
        self.load = {name: torch.zeros_like(b) for name, b in self.bias.items()}

    def groups(self, decay):
        """Parameter groups of the optimiser: vectors and taps do not decay."""
        plain = {n for n, p in self.w.items() if p.dim() == 1 or n.endswith("conv1d.weight")}
        return [
            {"params": [p for n, p in self.w.items() if n not in plain], "weight_decay": decay},
            {"params": [p for n, p in self.w.items() if n in plain], "weight_decay": 0.0},
        ]

    def loss(self, rows, total):
        """The loss to differentiate for one microbatch of a step of so many tokens, and
        the sums to report: those of each head, and the auxiliary one. rows[k] is
        [batch, seq], the tokens k places on."""
        self.aux = torch.zeros(())
        h = F.embedding(rows[0], self.w["embedding.word_embeddings.weight"])
        for i, l in enumerate(self.about["layers"]):
            h = self.layer(h, l, f"layers.{i}.", f"layers.{i}.")
        sums = [self.head(h, "decoder.final_layernorm.weight", rows[1])]
        mtp = self.about.get("mtp")
        for k in range(mtp["depth"] if mtp else 0):
            h = self.further(h, k, mtp["layers"][0], rows[1 + k])
            sums.append(self.head(h, f"mtp.{k}.final_layernorm.weight", rows[2 + k]))
        loss = sums[0] / total + self.aux * (rows[0].numel() / total)
        for s in sums[1:]:
            loss = loss + MTP_FACTOR / mtp["depth"] / total * s
        return loss, [s.detach() / total for s in sums], self.aux.detach()

    def head(self, h, norm, targets):
        name = "embedding.word_embeddings.weight" if self.about["tied"] else "output_layer.weight"
        logits = F.linear(rms_norm(h, self.w[norm], self.epsilon), self.w[name])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def further(self, h, k, layer, tokens):
        at = f"mtp.{k}."
        e = F.embedding(tokens, self.w["embedding.word_embeddings.weight"])
        both = torch.cat((rms_norm(e, self.w[at + "enorm.weight"], self.epsilon), rms_norm(h, self.w[at + "hnorm.weight"], self.epsilon)), -1)
        return self.layer(F.linear(both, self.w[at + "eh_proj.weight"]), layer, at + "mtp_model_layer.", at + "layers.0.")

    def layer(self, x, l, at, router):
        n = lambda name: rms_norm(x, self.w[at + name + ".weight"], self.epsilon)
        if "attention" in l:
            x = x + self.attention(n("input_layernorm"), l["attention"], at + "self_attention.")
        elif "mla" in l:
            x = x + self.latent(n("input_layernorm"), l["mla"], at + "self_attention.")
        elif "mamba" in l:
            x = x + self.mamba(n("norm"), l["mamba"], at + "mixer.")
        if "dense" in l:
            x = x + self.gated(n("pre_mlp_layernorm"), at + "mlp.")
        elif "moe" in l:
            x = x + self.mixture(n("pre_mlp_layernorm"), l["moe"], at + "mlp.", router + "mlp.router.expert_bias")
        return x

    def gated(self, x, at):
        return F.linear(swiglu(F.linear(x, self.w[at + "linear_fc1.weight"])), self.w[at + "linear_fc2.weight"])

    def table(self, width):
        if width not in self.tables:
            place, pair = torch.arange(self.seq, dtype=torch.float64), torch.arange(0, width, 2, dtype=torch.float64)
            angle = place[:, None] * self.settings["Theta"] ** (-pair / width)
            self.tables[width] = angle.cos().float()[:, None], angle.sin().float()[:, None]
        return self.tables[width]

    def mask(self, group):
        if group not in self.masks:
            self.masks[group] = torch.full((self.seq, self.seq), -math.inf).triu(1).repeat(group, 1)
        return self.masks[group]

    def attend(self, q, k, v):
        """Each key head serves the query heads of its group, taken as longer sequences."""
        b, s, heads, d = q.shape
        kv, width = k.shape[2], v.shape[3]
        group = heads // kv
        q = q.view(b, s, kv, group, d).permute(0, 2, 3, 1, 4).reshape(b * kv, group * s, d)
        k = k.permute(0, 2, 3, 1).reshape(b * kv, d, s)
        v = v.transpose(1, 2).reshape(b * kv, s, width)
        p = torch.baddbmm(self.mask(group), q, k, alpha=1 / math.sqrt(d)).softmax(-1)
        return torch.bmm(p, v).view(b, kv, group, s, width).permute(0, 3, 1, 2, 4).reshape(b, s, heads * width)

    def attention(self, x, a, at):
        b, s, _ = x.shape
        heads, kv, d = a["heads"], a["kv_heads"], a["head_dim"]
        qkv = F.linear(x, self.w[at + "linear_qkv.weight"]).view(b, s, heads + 2 * kv, d)
        q, k, v = qkv.split((heads, kv, kv), 2)
        if a.get("qk_norm"):
            q = rms_norm(q, self.w[at + "q_layernorm.weight"], self.epsilon)
            k = rms_norm(k, self.w[at + "k_layernorm.weight"], self.epsilon)
        if a.get("rotary"):
            cos, sin = self.table(d)
            q, k = turn(q, cos, sin), turn(k, cos, sin)
        return F.linear(self.attend(q, k, v), self.w[at + "linear_proj.weight"])

    def latent(self, x, a, at):
        b, s, _ = x.shape
        heads, nope, rope = a["heads"], a["nope"], a["rope"]

        def norm(t, name):
            return rms_norm(t, self.w[at + name], self.epsilon) if a["latent_norm"] else t

        if a["q_rank"]:
            q = F.linear(norm(F.linear(x, self.w[at + "linear_q_down_proj.weight"]), "q_layernorm.weight"), self.w[at + "linear_q_up_proj.weight"])
        else:
            q = F.linear(x, self.w[at + "linear_q_proj.weight"])
        down, key = F.linear(x, self.w[at + "linear_kv_down_proj.weight"]).split((a["kv_rank"], rope), -1)
        up = F.linear(norm(down, "kv_layernorm.weight"), self.w[at + "linear_kv_up_proj.weight"]).view(b, s, heads, nope + a["v"])
        cos, sin = self.table(rope)
        plain, turned = q.view(b, s, heads, nope + rope).split((nope, rope), -1)
        k, v = up.split((nope, a["v"]), -1)
        key = turn(key.view(b, s, 1, rope), cos, sin).expand(b, s, heads, rope)
        o = self.attend(torch.cat((plain, turn(turned, cos, sin)), -1), torch.cat((k, key), -1), v)
        return F.linear(o, self.w[at + "linear_proj.weight"])

    def mamba(self, x, m, at):
        """Mamba-2 as attention without a softmax over the whole sequence."""
        b, s, _ = x.shape
        inner, heads, groups, state = m["inner"], m["heads"], m["groups"], m["state"]
        mixed = inner + 2 * groups * state
        z, xbc, dt = F.linear(x, self.w[at + "in_proj.weight"]).split((inner, mixed, heads), -1)
        taps = self.w[at + "conv1d.weight"]
        xbc = F.conv1d(F.pad(xbc.transpose(1, 2), (taps.shape[1] - 1, 0)), taps[:, None], self.w[at + "conv1d.bias"], groups=mixed)
        u, bs, cs = F.silu(xbc).transpose(1, 2).split((inner, groups * state, groups * state), -1)
        u = u.reshape(b, s, heads, -1).transpose(1, 2)
        dt = F.softplus(dt + self.w[at + "dt_bias"]).transpose(1, 2)  # [batch, heads, seq]
        sums = (dt * -self.w[at + "A_log"].exp()[:, None]).cumsum(-1)
        decay = (sums[..., None] - sums[..., None, :] + self.mask(1)).exp()
        pairs = torch.einsum("btgn,bsgn->bgts", cs.view(b, s, groups, state), bs.view(b, s, groups, state))
        pairs = pairs.repeat_interleave(heads // groups, 1) * decay * dt[..., None, :]
        y = pairs @ u + self.w[at + "D"][:, None, None] * u
        v = y.transpose(1, 2).reshape(b, s, inner) * F.silu(z)
        v = rms_norm(v.view(b, s, groups, -1), 1, self.epsilon).view(b, s, inner) * self.w[at + "norm.weight"]
        return F.linear(v, self.w[at + "out_proj.weight"])

    def mixture(self, x, m, at, bias):
        r, flat = self.settings["Routing"], x.flatten(0, 1)
        tokens, experts, top = len(flat), m["experts"], m["top_k"]
        logits = F.linear(flat, self.w[at + "router.weight"])
        scores = logits.sigmoid() if m.get("sigmoid") else logits.softmax(-1)
        chosen = (scores.detach() + self.bias[bias] if bias in self.bias else scores).topk(top, -1).indices
        weight = scores.gather(1, chosen)
        if r["Normalise"]:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        count = chosen.flatten().bincount(minlength=experts)
        if bias in self.load:
            self.load[bias] += count
        if r["Balance"]:
            share = scores / (scores.sum(-1, keepdim=True) + 1e-20) if m.get("sigmoid") else scores
            self.aux = self.aux + r["Balance"] * experts * (count / (tokens * top) * share.mean(0)).sum()
        y = self.routed(flat, chosen, weight * r["Factor"], count, at)
        if m.get("shared_width"):
            shared = self.gated(flat, at + "shared_experts.")
            if m.get("shared_gate"):
                shared = shared * F.linear(flat, self.w[at + "shared_experts.gate_weight"]).sigmoid()
            y = y + shared
        return y.view_as(x)

    def routed(self, x, chosen, weight, count, at):
        """Rows sorted by expert, a product of each expert, and the sum for each token."""
        order = chosen.flatten().argsort(stable=True)
        token = order // chosen.shape[1]
        parts = zip(
            x.index_select(0, token).split(count.tolist()), weight.flatten().index_select(0, order)[:, None].split(count.tolist()),
            self.w[at + "experts.linear_fc1.weight"].unbind(), self.w[at + "experts.linear_fc2.weight"].unbind(),
        )
        rows = torch.cat([F.linear(swiglu(F.linear(h, fc1)) * w, fc2) for h, w, fc1, fc2 in parts])
        return torch.zeros_like(x).index_add(0, token, rows)

    def rebalance(self):
        """Moves the routers' biases towards experts that were chosen too seldom."""
        for name, load in self.load.items():
            self.bias[name] += self.settings["Routing"]["BiasRate"] * (load.mean() - load).sign()
            load.zero_()
