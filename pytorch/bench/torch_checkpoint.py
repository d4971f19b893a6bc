"""What a checkpoint of `stowage train` has and the text that it stands in: used by
pytorch/bench/torch_train.py and torch_moe.py."""

import gzip
import hashlib
import json
import pathlib
import struct
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]


def read_safetensors(path):
    data = bytearray(path.read_bytes())
    size, = struct.unpack_from("<Q", data)
    for name, t in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        if t["dtype"] != "F32":
            sys.exit(f"{name} in {path} is {t['dtype']}; F32 is expected")
        begin, end = t["data_offsets"]
        yield name, torch.frombuffer(data, dtype=torch.float32, count=(end - begin) // 4, offset=8 + size + begin).view(t["shape"])


class Text:
    """The windows of the sample in the order of train/data."""

    def __init__(self, state):
        self.state, self.bytes = state, gzip.decompress((ROOT / "train/internal/data/sample/opticks.txt.gz").read_bytes())
        if "sha256" in state and hashlib.sha256(self.bytes).hexdigest() != state["sha256"]:
            sys.exit("the program was trained on another text than the sample of this tree; build it from this tree")
        cut = len(self.bytes) - state["targets"]
        self.windows = max(1, (cut - state["seq"] + 1) // state["seq"])
        self.offsets = cut - self.windows * state["seq"] + 1

    def microbatch(self, step, i):
        """Rows of inputs and targets, of all replicas' microbatches the i-th."""
        s = self.state
        first = (step * s["ranks"] * s["microbatches"] + i) * s["micro"]
        windows = torch.tensor([list(self.window(first + k)) for k in range(s["micro"])])
        return [windows[:, k:k + s["seq"]].contiguous() for k in range(1 + s["targets"])]

    def window(self, sequence):
        s = self.state
        epoch, i = divmod(sequence, self.windows)
        key = mix(mix(s["seed"]) + epoch)
        begin = mix(key) % self.offsets + permute(i, self.windows, key) * s["seq"]
        return self.bytes[begin:begin + s["seq"] + s["targets"]]


WORD = (1 << 64) - 1


def mix(x):
    x = x + 0x9E3779B97F4A7C15 & WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def permute(i, n, key):
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for r in range(8):
            left, right = right, left ^ mix(key + mix(right + (r << 32)) & WORD) & mask
        i = left << half | right
        if i < n:
            return i
