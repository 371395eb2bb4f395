"""What layers beside attention carry from token to token (recurrent, state space, convolution), for each running row.

A state is as large after one token as after thousands and cannot be cut back, so no two contexts share one: a context
is prefilled by itself, once for all rows that begin with it. Attention keeps its keys and values itself.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from attnrl.attention.decoder import body_of
from attnrl.attention.interface import AttentionPlan, Layer, attending
from attnrl.attention.pages import Ints


class Memory(DynamicCache):  # type: ignore[misc]  # transformers has no types for it
    """The states of R rows, in their order: tensors [R, ...], by layer. Empty at first, and filled by a forward."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = body_of(model).config
        super().__init__(config=config.get_text_config(decoder=True))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The newest keys and values alone: the attention plan has those before."""
        return key_states, value_states

    def states(self) -> Iterator[tuple[dict[int, Any], int]]:
        """Where each state is kept."""
        for layer in self.layers:
            for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                yield from ((states, index) for index in states if states[index] is not None)

    @property
    def nbytes(self) -> int:
        return sum(states[index].nbytes for states, index in self.states())

    def take(self, rows: Ints) -> None:
        """Row i becomes what row `rows[i]` was."""
        for states, index in self.states():
            states[index] = states[index][torch.from_numpy(rows).to(states[index].device)]

    def move(self, source: Ints, target: Ints, count: int) -> None:
        """Row `target[i]` becomes what row `source[i]` was; the first `count` rows stay."""
        for states, index in self.states():
            state = states[index]
            if len(source):
                old, new = (torch.from_numpy(rows).to(state.device) for rows in (source, target))
                state[new] = state[old]
            states[index] = state[:count]

    def append(self, *more: Memory) -> None:
        """The rows of these behind its own, in their order."""
        for parts in zip(self.states(), *(one.states() for one in more), strict=True):
            states, index = parts[0]
            states[index] = torch.cat([part[i] for part, i in parts])


class InOrder:
    """A plan that numbers attention layers in the order they run, since not every layer has attention of its own."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan, self.calls = plan, 0

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls += 1
        return self.plan.attend(replace(layer, index=self.calls - 1), q, k, v)


def logits(model: Any, plan: AttentionPlan, memory: Memory | None, **given: Any) -> Tensor:
    """The model's logits while it attends by the plan; states are read from `memory`, and kept there."""
    with attending(model, plan if memory is None else InOrder(plan)):
        found: Tensor = model(**given, past_key_values=memory, use_cache=memory is not None).logits
    return found
