"""The models of pytorch/bench/torch_rivals.py, written as their users write them: plain modules,
nothing fused, no word of Stowage. A case is a model, a step that returns its loss, and the
names of the blocks that a user would checkpoint or compile one by one."""

import contextlib
import importlib

import torch
import torch.nn.functional as F
from torch import nn
from torch_models import attend


class Case:
    """A model to measure. step(model) runs the forward pass of the given model, which has the
    parameters of this one, and returns the loss."""

    def __init__(self, model, step, blocks=None, groups=None, compiles=True, what="", core=None):
        self.model, self.step, self.what = model, step, what
        self.blocks = find_blocks(model) if blocks is None else blocks
        self.groups = groups  # for attach(); None takes the names that the plug-in knows
        self.compiles = compiles  # whether torch.compile of its blocks is worth its time
        self.core = core  # what a selective checkpoint recomputes of a block, if its checkpoints are PyTorch's older ones


def find_blocks(model):
    """Returns the names of the repeated blocks: the children of the list that has the most
    parameters among lists of modules of one class."""
    best, most = [], 0
    for name, module in model.named_modules():
        children = list(module.named_children())
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(children) < 2 or len({type(c) for _, c in children}) > 1:
            continue
        size = sum(p.numel() for p in module.parameters())
        if size > most:  # of nested lists the outermost is found first and wins
            best, most = [f"{name}.{child}".lstrip(".") for child, _ in children], size
    return best


def by_block(names):
    return {name: "block" for name in names}


class Attention(nn.Module):
    """Causal attention of a GPT, or an encoder's with dropout."""

    def __init__(self, width, heads, causal=True, dropout=0.0, **kw):
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv, self.o_proj = nn.Linear(width, 3 * width, **kw), nn.Linear(width, width, **kw)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v, self.causal, self.dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    """A layer of a GPT or, with dropout, of a vision transformer."""

    def __init__(self, width, heads, causal=True, dropout=0.0, **kw):
        super().__init__()
        drop = [nn.Dropout(dropout)] if dropout else []
        self.input_layernorm = nn.LayerNorm(width, **kw)
        self.self_attn = Attention(width, heads, causal, dropout, **kw)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.post_attention_layernorm = nn.LayerNorm(width, **kw)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, **kw), nn.GELU(), *drop, nn.Linear(4 * width, width, **kw), *drop)

    def forward(self, x):
        x = x + self.drop(self.self_attn(self.input_layernorm(x)))
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, layers, width, heads, **kw):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width, **kw), nn.Embedding(length, width, **kw)
        self.blocks = nn.ModuleList(Layer(width, heads, **kw) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, **kw), nn.Linear(width, vocabulary, bias=False, **kw)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    """In single precision and step by step, as Hugging Face's models have it."""

    def __init__(self, width, **kw):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, **kw))

    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class GroupedAttention(nn.Module):
    """Rotary attention whose keys and values serve several heads each."""

    def __init__(self, width, heads, kv, **kw):
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, width // heads
        make = lambda n, m: nn.Linear(n, m, bias=False, **kw)
        self.q_proj, self.k_proj, self.v_proj = make(width, width), make(width, kv * self.size), make(width, kv * self.size)
        self.o_proj = make(width, width)

    def forward(self, x, cos, sin):
        b, n, d = x.shape
        split = lambda y, heads: y.view(b, n, heads, self.size).transpose(1, 2)
        q, k, v = split(self.q_proj(x), self.heads), split(self.k_proj(x), self.kv), split(self.v_proj(x), self.kv)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        repeat = lambda y: y[:, :, None].expand(b, self.kv, self.heads // self.kv, n, self.size).reshape(b, self.heads, n, self.size)
        return self.o_proj(attend(q, repeat(k), repeat(v)).transpose(1, 2).reshape(b, n, d))


class SwiGLU(nn.Module):
    def __init__(self, width, inner, **kw):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False, **kw), nn.Linear(width, inner, bias=False, **kw)
        self.down_proj = nn.Linear(inner, width, bias=False, **kw)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Two of the experts for each token, one expert after the other, each with the rows that
    the host reads off the routing."""

    def __init__(self, width, inner, experts, **kw):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False, **kw)
        self.experts = nn.ModuleList(SwiGLU(width, inner, **kw) for _ in range(experts))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(self.gate(rows).float().softmax(-1), 2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            out.index_add_(0, token, expert(rows[token]) * weights[token, place, None])
        return out.view_as(x)


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, kv, inner, experts, **kw):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(width, **kw), GroupedAttention(width, heads, kv, **kw)
        self.post_attention_layernorm = RMSNorm(width, **kw)
        self.mlp = Experts(width, inner, experts, **kw) if experts else SwiGLU(width, inner, **kw)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """With experts it is a mixture."""

    def __init__(self, vocabulary, layers, width, heads, kv, inner, experts=0, **kw):
        super().__init__()
        self.embed, self.size = nn.Embedding(vocabulary, width, **kw), width // heads
        self.layers = nn.ModuleList(DecoderLayer(width, heads, kv, inner, experts, **kw) for _ in range(layers))
        self.norm, self.head = RMSNorm(width, **kw), nn.Linear(width, vocabulary, bias=False, **kw)

    def forward(self, ids):
        x = self.embed(ids)
        turn = torch.arange(0, self.size, 2, device=ids.device) / self.size
        angle = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), 10000.0**-turn)
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self, image, patch, layers, width, heads, dropout, classes, **kw):
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch, **kw)
        self.position = nn.Parameter(torch.randn(1, (image // patch) ** 2, width, **kw) * 0.02)
        self.blocks = nn.ModuleList(Layer(width, heads, False, dropout, **kw) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, **kw), nn.Linear(width, classes, **kw)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Residual(nn.Module):
    """Two convolutions around a shortcut; a stride halves the image."""

    def __init__(self, before, width, stride, **kw):
        super().__init__()
        conv = lambda n, size, stride: nn.Conv2d(n, width, size, stride, size // 2, bias=False, **kw)
        self.conv1, self.norm1 = conv(before, 3, stride), nn.BatchNorm2d(width, **kw)
        self.conv2, self.norm2 = conv(width, 3, 1), nn.BatchNorm2d(width, **kw)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Identity() if before == width and stride == 1 else nn.Sequential(conv(before, 1, stride), nn.BatchNorm2d(width, **kw))

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.short(x))


class ConvNet(nn.Module):
    def __init__(self, widths, each, classes, **kw):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 7, 2, 3, bias=False, **kw), nn.BatchNorm2d(widths[0], **kw), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        blocks, before = [], widths[0]
        for stage, width in enumerate(widths):
            for i in range(each):
                blocks.append(Residual(before, width, 2 if stage and not i else 1, **kw))
                before = width
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(before, classes, **kw)

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def mixed(device):
    """Returns a context of bf16 autocast on a GPU; on the CPU, where it is slow, of nothing."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


def numbers(device, on_gpu):
    return on_gpu if device == "cuda" else "fp32"


def text(model, vocabulary, batch, length, device, autocast, **more):
    ids = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(1)).to(device)

    def step(m):
        with mixed(device) if autocast else contextlib.nullcontext():
            logits = m(ids[:, :-1])
            return F.cross_entropy(logits.view(-1, vocabulary).float(), ids[:, 1:].reshape(-1))

    return Case(model, step, **more)


def pictures(model, classes, batch, image, device, **more):
    x = torch.randn(batch, 3, image, image, generator=torch.Generator().manual_seed(1)).to(device)
    y = torch.randint(classes, (batch,), generator=torch.Generator().manual_seed(2)).to(device)
    if device == "cuda":
        x = x.contiguous(memory_format=torch.channels_last)

    def step(m):
        with mixed(device):
            return F.cross_entropy(m(x).float(), y)

    return Case(model, step, **more)


def gpt(small, device, layers=24, width=2048, batch=16):
    vocabulary, length, heads = 50304, 1024, width // 128
    if small:
        vocabulary, length, layers, width, heads, batch = 97, 16, 4, 32, 2, 2
    model = GPT(vocabulary, length, layers, width, heads, device=device)
    return text(model, vocabulary, batch, length, device, True, what=f"{layers} layers of {width}, {batch} x {length} tokens, {numbers(device, 'bf16 autocast')}")


def gpt_wide(small, device, layers=10):
    return gpt(small, device, layers=layers, width=4096, batch=8)


def llama(small, device, layers=20, inner=8192, experts=0, compiles=True):
    vocabulary, batch, length, width, heads, kv = 32000, 8, 2048, 2048, 16, 4
    if small:
        vocabulary, batch, length, layers, width, heads, kv, inner = 97, 2, 16, 4, 32, 4, 2, 48
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Llama(vocabulary, layers, width, heads, kv, inner, experts, device=device, dtype=dtype)
    kind = f"top 2 of {experts} experts" if experts else "dense"
    return text(model, vocabulary, batch, length, device, False, compiles=compiles, what=f"{layers} layers of {width}, {kind}, {batch} x {length} tokens, {numbers(device, 'bf16 weights')}")


def mixture(small, device, layers=10):
    return llama(small, device, layers=layers, inner=3584, experts=8, compiles=False)


def vit(small, device, layers=16):
    image, patch, width, heads, classes, batch = 256, 16, 1536, 12, 1000, 64
    if small:
        image, patch, layers, width, heads, classes, batch = 16, 4, 4, 32, 2, 10, 2
    model = ViT(image, patch, layers, width, heads, 0.1, classes, device=device)
    return pictures(model, classes, batch, image, device, what=f"{layers} layers of {width}, {batch} images of {image} x {image}, dropout 0.1, {numbers(device, 'bf16 autocast')}")


def conv(small, device):
    widths, each, classes, batch, image = (128, 256, 512, 1024), 4, 1000, 256, 224
    if small:
        widths, each, classes, batch, image = (8, 16), 2, 10, 2, 32
    model = ConvNet(widths, each, classes, device=device)
    if device == "cuda":
        model = model.to(memory_format=torch.channels_last)
    case = pictures(model, classes, batch, image, device, what=f"{len(widths) * each} blocks of {widths[0]} to {widths[-1]} channels, {batch} images of {image} x {image}, {numbers(device, 'bf16 autocast')}")
    case.groups = by_block(case.blocks)
    return case


def imported(name):
    """Returns the case of a user's function, given as module:function, which returns a model, a
    step(model) that returns the loss and, if they are in more than one list, the names of the blocks."""
    module, _, function = name.partition(":")
    model, step, *blocks = getattr(importlib.import_module(module), function)()
    return Case(model, step, *blocks, what=f"from {name}")


MODELS = {"gpt": gpt, "gpt-wide": gpt_wide, "llama": llama, "mixture": mixture, "vit": vit, "conv": conv}
