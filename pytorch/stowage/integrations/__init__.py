"""Stowage in the training loops of other frameworks.

    huggingface  Trainer of transformers, and trainers derived from it
    accelerate   loops with accelerator.accumulate()
    lightning    a callback for Lightning's Trainer
    megatron     the forward-backward functions of Megatron-LM

Each module can be imported without its framework, which it loads when it is used.
"""
