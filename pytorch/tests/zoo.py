"""Things that people do with autograd. Each case gets a maker of groups, builds its
tensors from the global seed, does its own backward pass, and returns what must be equal
bit for bit with and without the runtime."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def grads(loss, *tensors):
    loss.backward()
    return [loss] + [t.grad for t in tensors]


@case
def linear(g):
    m = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    x = torch.randn(50, 32)
    for name, part in zip("abcab", m):
        with g(name):
            x = part(x)
    return grads(x.square().mean(), *m.parameters())


@case
def attention(g):
    w, x = [leaf(64, 64) for _ in range(4)], torch.randn(2, 33, 64)
    with g("a"):
        q, k, v = (F.linear(x, w[i]).view(2, 33, 4, 16).transpose(1, 2) for i in range(3))
    with g("core_attn"):
        p = F.dropout((q @ k.transpose(-1, -2) / 4).softmax(-1), 0.2)
        y = (p @ v).transpose(1, 2).reshape(2, 33, 64)
    with g("b"):
        y = F.linear(y, w[3])
    return grads(y.pow(2).sum(), *w)


class Mixture(nn.Module):
    def __init__(self, width=16, experts=4, top=2):
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, width)) for _ in range(experts))

    def forward(self, x, g):
        with g("router"):
            p = self.router(x).softmax(-1)
            weight, chosen = p.topk(self.top, -1)
        out = torch.zeros_like(x)
        for i, e in enumerate(self.experts):
            token, slot = (chosen == i).nonzero(as_tuple=True)
            with g("expert_fc1"):
                h = e[0](x[token])
            with g("moe_act"):
                h = e[2](e[1](h)) * weight[token, slot, None]
            out = out.index_add(0, token, h)
        return out


@case
def mixture(g):
    m, x = Mixture(), leaf(40, 16)
    return grads(m(m(x, g), g).square().sum(), x, *m.parameters())


@case
def convolution(g):
    m = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, stride=2, groups=2)])
    x = torch.randn(2, 3, 12, 12)
    with g("a"):
        x = F.max_pool2d(F.relu(m[1](m[0](x))), 2)
    with g("b"):
        x = m[2](x)
    return grads(x.pow(2).sum(), *m.parameters()) + list(m.buffers())


@case
def in_place(g):
    w = [leaf(24, 24) for _ in range(3)]
    x = torch.randn(10, 24)
    with g("a"):
        x = F.relu(F.linear(x, w[0]), inplace=True)
    with g("b"):
        x = F.linear(x, w[1]).sigmoid_()
        y = x.clone()
        y[:, :4] += 1
        y.mul_(2)
    with g("c"):
        x = F.linear(y, w[2]).add_(1)
    return grads(x.square().mean(), *w)


@case
def views(g):
    w, x = leaf(30, 90), torch.randn(20, 30)
    with g("a"):
        y = x @ w
        a, b, c = y.split(30, -1)
        d = y.view(20, 3, 30).permute(1, 0, 2)[1]
    with g("b"):
        z = a * b + c.exp() * d + y[:, ::3] * y[:, 1::3] + y.narrow(1, 5, 30).square()
        z = z * torch.as_strided(y, (20, 30), (90, 2), 7)
    return grads(z.sum(), w)


@case
def not_contiguous(g):
    w, x = leaf(17, 33), torch.randn(33, 21).t()
    with g("a"):
        y = (x @ w.t()).t()
        z = y.exp() * y[::2].repeat_interleave(2, 0)[:17].flip(0)
    with g("b"):
        z = z.t() * z.t().sin()
    return grads(z.sum(), w)


@case
def parts_that_are_no_views(g):
    """Tensors that share a storage and not its version: some are saved before others are written."""
    w, x = leaf(30, 60), torch.randn(20, 30)
    a, b = torch.unsafe_chunk(x @ w, 2, -1)
    with g("a"):
        a.sigmoid_()
    with g("b"):
        b.tanh_()
    return grads((a * b).sum(), w)


@case
def views_of_parts(g):
    w, x = leaf(30, 60), torch.randn(20, 30)
    a, b = torch.unsafe_chunk(x @ w, 2, -1)
    with g("a"):
        a = a.sigmoid_().view(20, 5, 6).square()
    with g("b"):
        b = b.tanh_().view(20, 5, 6).square()
    return grads((a * b).sum(), w)


@case
def parts_without_gradients(g):
    w, x = leaf(20, 30), torch.randn(20, 60)
    a, b = torch.unsafe_chunk(x, 2, -1)
    with g("a"):
        y = a.exp_() * w
    with g("b"):
        z = b.sigmoid_() * w
    return grads((y * z).sum(), w)


@case
def expanded(g):
    w, b = leaf(1, 25), leaf(12, 1)
    with g("a"):
        y = w.expand(12, 25) * b.expand(12, 25).exp()
        y = y * torch.randn(12, 1).expand(12, 25)
    with g("b"):
        y = y * y.mean(0, keepdim=True).expand(12, 25)
        y = y.unfold(1, 5, 2).square() * y[:1].expand(11, 12, 25).sum()
    return grads(y.sum(), w, b)


@case
def dropout(g):
    w, x = leaf(40, 40), torch.randn(30, 40)
    with g("a"):
        x = F.dropout(F.linear(x, w), 0.5)
    with g("b"):
        x = F.dropout(F.linear(x, w).relu(), 0.3)
    return grads(x.sum(), w) + [torch.rand(4)]


@case
def autocast(g):
    m, x = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), torch.randn(20, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with g("a"):
            x = m[1](m[0](x))
        with g("b"):
            x = m[2](x)
    return grads(x.float().square().sum(), *m.parameters())


@case
def complex_numbers(g):
    w = leaf(12, 12, dtype=torch.complex64)
    with g("a"):
        y = w @ w.conj().t()
        z = torch.fft.fft(y) * y.conj()
    with g("b"):
        z = (z.imag * z.conj().real).exp() * torch.view_as_real(z)[..., 0]
    return grads(z.clamp(-5, 5).sum(), w)


@case
def shared_storage(g):
    w, x = [leaf(28, 28) for _ in range(4)], torch.randn(15, 28)
    with g("a"):
        h = F.linear(x, w[0]).relu()
    outs = []
    for name, m in zip(("b", "c", "moe_act"), w[1:]):
        with g(name):
            outs.append(F.linear(h, m) * h)
    return grads(sum(outs).square().sum(), *w)


@case
def embedding(g):
    e, w = leaf(50, 24), leaf(24, 50)
    tokens = torch.randint(0, 50, (6, 9))
    with g("a"):
        h = F.layer_norm(F.embedding(tokens, e), (24,))
    with g("b"):
        logits = h @ w
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    return grads(loss, e, w)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        out = x * x * y
        ctx.save_for_backward(x, y, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, y, out = ctx.saved_tensors
        return grad * 2 * x * y, grad * out / y


@case
def custom_function(g):
    w, v = leaf(20, 20), leaf(20, 20)
    with g("a"):
        h = w.exp()
        y = Cube.apply(h, v.exp())
    with g("b"):
        y = Cube.apply(y, h)
    return grads(y.log().sum(), w, v)


@case
def twice_differentiated(g):
    w, x = leaf(14, 14), leaf(9, 14)
    with g("a"):
        y = torch.tanh(x @ w)
    with g("b"):
        y = (y * y @ w).sigmoid()
    gx, = torch.autograd.grad(y.sum(), x, create_graph=True)
    with g("c"):
        penalty = gx.square().sum()
    penalty.backward()
    return [penalty, w.grad, x.grad]


@case
def twice_backward(g):
    w, x = leaf(22, 22), torch.randn(11, 22)
    with g("a"):
        y = torch.tanh(x @ w)
    with g("b"):
        y = (y @ w).exp()
    y.sum().backward(retain_graph=True)
    first = w.grad.clone()
    y.square().sum().backward(retain_graph=True)
    y.sin().sum().backward()
    return [first, w.grad]


@case
def accumulated(g):
    m = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    losses = []
    for _ in range(3):
        with g("a"):
            h = m[1](m[0](torch.randn(12, 16)))
        with g("b"):
            losses.append(m[2](h).square().mean())
        losses[-1].backward()
    return losses + [p.grad for p in m.parameters()]


@case
def interleaved(g):
    """Two microbatches forward before the first backward pass, as pipelines do."""
    m, losses = [leaf(16, 16) for _ in range(3)], []
    for _ in range(2):
        x = torch.randn(12, 16)
        for name, w in zip("abc", m):
            with g(name):
                x = torch.tanh(x @ w)
        losses.append(x.sum())
    for loss in losses:
        loss.backward()
    return losses + [w.grad for w in m]


def checkpointed(g, reentrant):
    m = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4))
    x = leaf(10, 24)

    def part(i, t):
        with g("b"):
            return m[i](t).square()

    y = x
    for i in range(4):
        with g("a"):
            y = checkpoint(part, i, y, use_reentrant=reentrant) * y
    return grads(y.sum(), x, *m.parameters())


@case
def checkpointed_reentrant(g):
    return checkpointed(g, True)


@case
def checkpointed_by_hooks(g):
    return checkpointed(g, False)


@case
def nested_groups(g):
    w, x = [leaf(18, 18) for _ in range(5)], torch.randn(7, 18)
    with g("a"):
        x = torch.tanh(x @ w[0])
        with g("b"):
            x = torch.tanh(x @ w[1])
            with g("a"):
                x = torch.sin(x @ w[2])
        x = (x @ w[3]).exp()
    x = torch.tanh(x @ w[4])
    return grads(x.sum(), *w)


@case
def part_of_the_graph(g):
    """Only one of two branches is differentiated; the other dies unused."""
    w, v = leaf(19, 19), leaf(19, 19)
    with g("a"):
        y = torch.exp(w @ v)
        dead = torch.sin(y @ y).tanh()
    del dead
    with g("b"):
        z = torch.tanh(y)
    gw, = torch.autograd.grad(z.sum(), w)
    return [gw]


@case
def odd_tensors(g):
    w, i = leaf(6, 5), torch.tensor([[0, 1, 1], [2, 0, 2]])
    with g("a"):
        sparse = torch.sparse_coo_tensor(i, torch.ones(3), (2, 6))
        y = torch.sparse.mm(sparse, w)
        z = torch.exp(y) + torch.empty(0, 5).exp().sum() + w.sum().exp() * 1e-9
        z = z.double() * 3 + w.half().float().sum()
    with g("b"):
        z = torch.where(z > 0, z, z * 2).masked_fill(z > 10, 1.0)
    return grads(z.sum(), w)


@case
def python_numbers(g):
    """Autograd saves them as tensors of double precision that do not make others double."""
    w, total = leaf(13, 13), 0
    for i in range(20):
        with g("abc"[i % 3]):
            total = torch.tanh(total + 0.3 * (w[i % 13] * i).mean())
    return grads(total, w)


@case
def negatives(g):
    """The imaginary part of a conjugate is the same memory with a mark, and so is the conjugate."""
    w, x = leaf(12, 5), leaf(12, 5, 2)
    with g("a"):
        y = torch.view_as_complex(x * 0.7).conj()
        z = y.imag * w
    with g("b"):
        z = z * y.imag + (y * y.conj()).real * y.real.exp()
    return grads(z.sum(), w, x)
