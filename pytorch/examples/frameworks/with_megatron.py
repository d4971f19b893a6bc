#!/usr/bin/env python3
"""Megatron-LM under a budget; lines that use Stowage are numbered. It takes the arguments of
pretrain_gpt.py and needs Megatron-LM's folder in PYTHONPATH, GPUs, and data:

    torchrun --nproc-per-node 8 pytorch/examples/frameworks/with_megatron.py --num-layers 32 ...

The budget of a rank is in STOWAGE_BUDGET. Leave out Megatron-LM's own offloading.
"""

import functools
import os
import runpy

import megatron.training.training as training

import stowage
from stowage.integrations import megatron  # 1


def main():
    runtime = None

    def with_steps(original, *args, **kwargs):
        nonlocal runtime
        if runtime is None:  # by now the rank has chosen its GPU
            runtime = stowage.Runtime(budget=os.environ.get("STOWAGE_BUDGET", "60GiB"))  # 2
        return megatron.wrap(original(*args, **kwargs), runtime)  # 3

    # training.train() and evaluate() ask for the function by this name.
    training.get_forward_backward_func = functools.partial(with_steps, training.get_forward_backward_func)
    runpy.run_module("pretrain_gpt", run_name="__main__")
    if runtime is not None and runtime.stats()["steps"]:
        print(runtime.report())


if __name__ == "__main__":
    main()
