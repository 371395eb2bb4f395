"""What layers beside attention carry from token to token (recurrent, state space, convolution), for each running row.

A state is as large after one token as after thousands and cannot be cut back, so no two contexts share one: a context
is prefilled by itself, once for all rows that begin with it. Attention keeps its keys and values itself.

Shapes: R rows, N of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import DynamicCache

from attnrl.attention.decoder import body_of
from attnrl.attention.interface import AttentionPlan, Layer, attending
from attnrl.errors import ConfigError

OLDEST = (5, 14)  # transformers whose caches keep states as `states` finds them


class Memory(DynamicCache):  # type: ignore[misc]  # transformers has no types for it
    """The states of R rows, in their order: tensors [R, ...], by layer. Empty at first, and filled by a forward."""

    def __init__(self, model: nn.Module) -> None:
        version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
        if version < OLDEST:
            raise ConfigError(
                f"{type(model).__name__} carries a state from token to token: it is drawn from with transformers "
                f"{OLDEST[0]}.{OLDEST[1]} or newer, not {transformers.__version__}; pip install -U transformers"
            )
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

    def room(self, rows: int) -> Memory:
        """The same layers with room for so many rows, which hold nothing yet."""
        return self._with(lambda state: state.new_zeros(rows, *state.shape[1:]))

    def first(self, rows: int) -> Memory:
        """The first rows of these: what a forward keeps there is kept here, in place."""
        return self._with(lambda state: state[:rows])

    def _with(self, made: Callable[[Tensor], Tensor]) -> Memory:
        other = copy(self)
        other.layers = [copy(layer) for layer in self.layers]
        for layer in other.layers:
            for name in ("conv_states", "recurrent_states"):
                states = getattr(layer, name, {})
                if states:
                    setattr(layer, name, {i: None if state is None else made(state) for i, state in states.items()})
        return other

    def put(self, rows_N: Tensor, one: Memory) -> None:
        """These rows become what the one row of `one` is."""
        for (states, index), (others, _) in zip(self.states(), one.states(), strict=True):
            states[index][rows_N] = others[index]

    def move(self, source_N: Tensor, target_N: Tensor) -> None:
        """Row `target_N[i]` becomes what row `source_N[i]` was."""
        for states, index in self.states() if len(source_N) else ():
            states[index][target_N] = states[index][source_N]


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
