"""The models of bench/torch_plugin.py: a stack of expert layers whose row counts are on
the device, and a dense decoder. Nothing here knows the plug-in but for a function that
is told which tensors have rows."""

import torch
import torch.nn.functional as F
from torch import nn

grouped = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def experts_mm(x, w, offs):
    """Rows up to offs[i] belong to expert i; rows behind the last are not touched."""
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
        g, u = ctx.saved_tensors[0].chunk(2, -1)
        dh = torch.empty_like(ctx.saved_tensors[0])
        dg, du = dh.chunk(2, -1)
        s = torch.sigmoid(g)
        torch.mul(s, g, out=du)
        dg.copy_((1 - s).mul_(g).add_(1).mul_(s).mul_(u).mul_(grad))
        du.mul_(grad)
        return dh


class Experts(nn.Module):
    """Gated experts on rows that are sorted by expert: x + (silu(g) * u) @ down."""

    def __init__(self, hidden, width, experts, dtype, device):
        super().__init__()
        make = lambda *shape: nn.Parameter(torch.randn(*shape, dtype=dtype, device=device) * shape[-2] ** -0.5)
        self.up, self.down = make(experts, hidden, 2 * width), make(experts, width, hidden)

    def forward(self, x, offs, live):
        x = live(x)
        h = live(experts_mm(x, self.up, offs))
        return x + experts_mm(live(SwiGLU.apply(h)), self.down, offs)


class Mixture(nn.Module):
    def __init__(self, layers, hidden, width, experts, dtype, device):
        super().__init__()
        self.layers = nn.ModuleList(Experts(hidden, width, experts, dtype, device) for _ in range(layers))

    def forward(self, x, offs, live=lambda t: t, inside=None):
        for i, layer in enumerate(self.layers):
            if inside is None:
                x = layer(x, offs, live)
            else:
                with inside(i):
                    x = layer(x, offs, live)
        return x


def mixture_loss(x, count):
    """Rows behind the count are undefined; they have no part in the loss."""
    mask = (torch.arange(len(x), device=x.device) < count)[:, None]
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device)).float().square().sum() / (count * x.shape[1])


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
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.full((n, n), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
            y = (q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5 + mask).softmax(-1) @ v
        x = x + self.o_proj(y.transpose(1, 2).reshape(b, n, d))
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
