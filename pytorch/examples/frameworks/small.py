"""A small decoder and its text, for the examples in this folder. Its modules have names that
Stowage knows; the text is this file, so that nothing is downloaded."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        h = self.input_layernorm(x)
        x = x + self.self_attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, width=64, layers=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, tokens):
        n = tokens.shape[1] - 1
        mask = torch.full((n, n), float("-inf"), device=tokens.device).triu(1)
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, mask)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())}


class Text(torch.utils.data.Dataset):
    """Pieces of 65 bytes."""

    def __init__(self, pieces):
        self.bytes, self.pieces = list(open(__file__, "rb").read()), pieces

    def __len__(self):
        return self.pieces

    def __getitem__(self, i):
        at = i * 31 % (len(self.bytes) - 65)
        return {"tokens": torch.tensor(self.bytes[at : at + 65])}
