#!/usr/bin/env python3
"""A loop with accelerate under a budget; lines that use Stowage are numbered.

    pip install accelerate
    python3 pytorch/examples/frameworks/with_accelerate.py
"""

import argparse

import torch
from accelerate import Accelerator
from small import Decoder, Text

from stowage.integrations import accelerate  # 1


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--budget", default="12MiB", help="device memory for everything (default 12MiB, for a CPU)")
    p.add_argument("--steps", type=int, default=10)
    options = p.parse_args(argv)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = Decoder()
    data = torch.utils.data.DataLoader(Text(32 * options.steps), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), data)
    steps = accelerate.attach(accelerator, model, optimizer, budget=options.budget, least="4KiB")  # 2
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    print(steps.runtime.report())


if __name__ == "__main__":
    main()
