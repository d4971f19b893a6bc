"""Stowage for PyTorch: saved activations of any model in less device memory.

    import stowage

    rt = stowage.Runtime(budget="60GiB")
    rt.attach(model, groups={"*.mlp.experts": "expert_fc1", "*.self_attn": "core_attn"})
    for batch in data:
        with rt.step():
            loss = model(batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

Gradients are the same, bit for bit. The library is loaded when the first Runtime is
opened; a process that is forked after that cannot use it.
"""

from ._attach import Attachment
from ._errors import Error, Overflow
from ._runtime import Runtime

__all__ = ["Attachment", "Error", "Overflow", "Runtime"]
__version__ = "0.1.0"
