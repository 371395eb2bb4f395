"""A model's forward in float32 with its weights as they are: what its half-precision forwards are roundings of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROWS = 4096  # of a weight that are held in float32 at a time


class InFloat32(TorchFunctionMode):  # type: ignore[misc]  # it has no types
    """Within it embeddings and linear modules give float32, and so does all that is computed from them.

    Weights are widened a few rows at a time, so a model that fills its GPU can still be asked.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        return out.float() if func is F.embedding else out


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = input.float()
    out = torch.cat([x @ rows.float().T for rows in weight.split(ROWS)], -1)
    return out if bias is None else out + bias.float()


def widens(model: nn.Module) -> bool:
    """Whether its weights are plain numbers that can be widened, not packed ones."""
    return all(weight.is_floating_point() and weight.element_size() > 1 for weight in model.parameters())
