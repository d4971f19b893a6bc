#!/usr/bin/env python3
"""Lightning's Trainer under a budget; lines that use Stowage are numbered.

    pip install lightning
    python3 pytorch/examples/frameworks/with_lightning.py
"""

import argparse

import lightning.pytorch as pl
import torch
from small import Decoder, Text

from stowage.integrations import lightning  # 1


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Decoder()

    def training_step(self, batch, batch_idx):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--budget", default="12MiB", help="device memory for everything (default 12MiB, for a CPU)")
    p.add_argument("--steps", type=int, default=10)
    options = p.parse_args(argv)
    steps = lightning.callback(budget=options.budget, least="4KiB")  # 2
    trainer = pl.Trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=[steps], logger=False, enable_checkpointing=False, enable_model_summary=False)  # 3
    trainer.fit(Module(), torch.utils.data.DataLoader(Text(32 * options.steps), batch_size=8))
    print(steps.runtime.report())


if __name__ == "__main__":
    main()
