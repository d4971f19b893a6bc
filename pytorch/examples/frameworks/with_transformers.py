#!/usr/bin/env python3
"""Trainer of transformers under a budget; lines that use Stowage are numbered.

    pip install 'transformers[torch]'
    python3 pytorch/examples/frameworks/with_transformers.py
"""

import argparse
import tempfile

import transformers
from small import Decoder, Text

from stowage.integrations import huggingface  # 1


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--budget", default="12MiB", help="device memory for everything (default 12MiB, for a CPU)")
    p.add_argument("--steps", type=int, default=10)
    options = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=8, gradient_accumulation_steps=4, save_strategy="no", report_to=[]
        )
        trainer = transformers.Trainer(Decoder(), args, train_dataset=Text(32 * options.steps))
        steps = huggingface.attach(trainer, budget=options.budget, least="4KiB")  # 2
        trainer.train()
        print(steps.runtime.report())


if __name__ == "__main__":
    main()
