"""The models of pytorch/bench/torch_plugin.py: a stack of mixture-of-experts layers whose row counts
are on the device, and a dense decoder. The models know of the plug-in only a function that
they call for tensors with rows, with the name of the module that saves them."""

import torch
import torch.nn.functional as F
from torch import nn

grouped = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def experts_mm(x, w, offs):
    """Multiplies rows by their experts' matrices: rows up to offs[i] belong to expert i. Rows
    behind the last are not touched."""
    if grouped is not None and x.is_cuda:
        return grouped(x, w, offs=offs)
    ends = offs.tolist()  # on a CPU nothing is waited for
    parts = [x[a:b] @ w[i] for i, (a, b) in enumerate(zip([0] + ends, ends))]
    return torch.cat(parts + [torch.zeros(len(x) - ends[-1], w.shape[2], dtype=x.dtype, device=x.device)])


class SwiGLU(torch.autograd.Function):
    """silu(g) * u of the halves of h, saving h alone, as fused kernels do."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        g, u = h.chunk(2, -1)
        return F.silu(g).mul_(u)

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        g, u = h.chunk(2, -1)
        dh = torch.empty_like(h)
        dg, du = dh.chunk(2, -1)
        s = torch.sigmoid(g)
        torch.mul(s, g, out=du)
        torch.mul(s, du, out=dg).neg_().add_(s).add_(du).mul_(u).mul_(grad)  # s (1 + g (1 - s)) u
        du.mul_(grad)
        return dh


class Routing:
    """The rows of the experts' buffers: every token has k rows, each of another expert, and
    rows are sorted by expert. Rows behind the live ones are copies of token 0."""

    def __init__(self, tokens, k, experts, room, device):
        rows = tokens * k
        torch.manual_seed(1)
        share = torch.rand(experts) + 0.5
        counts = (share / share.sum() * rows / 16).floor().long() * 16  # experts begin at multiples of 16 rows
        counts[-1] += rows - counts.sum()
        # Dealt out in turns: an expert with no more rows than there are tokens has none twice.
        token = torch.cat([part[torch.randperm(len(part))] for part in (torch.arange(rows) % tokens).split(counts.tolist())])
        self.rows, self.k = rows, k
        self.source = F.pad(token, (0, room - rows)).to(device)  # the token of a row
        self.places = token.argsort(stable=True).view(tokens, k).t().contiguous().to(device)  # the rows of a token
        self.offs = counts.cumsum(0).to(torch.int32).to(device)
        self.count = torch.tensor(rows, dtype=torch.int64, device=device)

    def spread(self, x):
        return x.index_select(0, self.source)

    def gather(self, rows):
        """Sums of a token's rows, in one order."""
        out = rows.index_select(0, self.places[0]).float()
        for place in self.places[1:]:
            out += rows.index_select(0, place)
        return out.to(rows.dtype)


class Move(torch.autograd.Function):
    """Dispatches in the forward pass and combines in the backward pass, which is its
    transpose."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None


class MoE(nn.Module):
    """A layer of gated experts: tokens are dispatched into buffers, and summed up again."""

    def __init__(self, hidden, width, experts, dtype, device):
        super().__init__()
        make = lambda *shape: nn.Parameter(torch.randn(*shape, dtype=dtype, device=device) * shape[-2] ** -0.5)
        self.up, self.down = make(experts, hidden, 2 * width), make(experts, width, hidden)

    def forward(self, x, routing, live):
        y = live(Move.apply(F.layer_norm(x, x.shape[-1:]), routing.spread, routing.gather), "expert_fc1")
        y = live(experts_mm(y, self.up, routing.offs), "moe_act")
        y = live(SwiGLU.apply(y), "expert_fc2")
        return x + Move.apply(experts_mm(y, self.down, routing.offs), routing.gather, routing.spread) / routing.k


class Mixture(nn.Module):
    def __init__(self, layers, hidden, width, experts, dtype, device):
        super().__init__()
        self.layers = nn.ModuleList(MoE(hidden, width, experts, dtype, device) for _ in range(layers))

    def forward(self, x, routing, live=lambda t, name: t, inside=None):
        for i, layer in enumerate(self.layers):
            if inside is None:
                x = layer(x, routing, live)
            else:
                with inside(i):
                    x = layer(x, routing, live)
        return x


def attend(q, k, v, causal=True, dropout=0.0):
    """Returns attention of (batch, heads, tokens, size), written out where PyTorch has none."""
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        n = q.shape[-2]
        scores = scores + torch.full((n, n), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    return F.dropout(scores.softmax(-1), dropout) @ v


class Block(nn.Module):
    """A decoder layer, with the names that Llama has."""

    def __init__(self, hidden, heads, dtype, device):
        super().__init__()
        lin = lambda n, m: nn.Linear(n, m, bias=False, dtype=dtype, device=device)
        self.heads = heads
        self.input_layernorm = nn.LayerNorm(hidden, dtype=dtype, device=device)
        self.qkv, self.o_proj = lin(hidden, 3 * hidden), lin(hidden, hidden)
        self.post_attention_layernorm = nn.LayerNorm(hidden, dtype=dtype, device=device)
        self.gate_up, self.down = lin(hidden, 8 * hidden), lin(4 * hidden, hidden)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.input_layernorm(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.o_proj(attend(q, k, v).transpose(1, 2).reshape(b, n, d))
        g, u = self.gate_up(self.post_attention_layernorm(x)).chunk(2, -1)
        return x + self.down(F.silu(g) * u)


class Decoder(nn.Module):
    def __init__(self, layers, hidden, heads, dtype, device):
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, heads, dtype, device) for _ in range(layers))

    def forward(self, x, inside=None):
        for i, layer in enumerate(self.layers):
            if inside is None:
                x = layer(x)
            else:
                with inside(i):
                    x = layer(x)
        return x
