"""Stowage for PyTorch: train any model in less device memory.

    import stowage

    rt = stowage.Runtime(budget="70GiB")
    rt.attach(model)
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
from ._errors import BudgetError, Error, Overflow
from ._explain import explain
from ._explanation import Explanation
from ._forecast import Forecast, Planned, plan
from ._runtime import Runtime
from ._version import version

__all__ = ["Attachment", "BudgetError", "Error", "Explanation", "Forecast", "Overflow", "Planned", "Runtime", "explain", "plan"]
__version__ = version()
