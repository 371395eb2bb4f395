"""Prefill: the contexts of a batch of requests as one packed trie, so that no shared token is computed twice.

Contexts come in lexicographic order, and the keys and values of the last one ("the carry") are kept for the next batch.

Shapes: P carried and packed tokens, N contexts, V vocabulary, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnrl.attention.prefill import PrefillAttention
from attnrl.attention.trie import Trie, continue_trie
from attnrl.local.memory import Memory, logits
from attnrl.types import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """The last context of a prefill, with its keys and values per layer [P, K, D] and its next-token logits [V]."""

    context: Ids
    keys: list[Tensor]
    values: list[Tensor]
    logits_V: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """What a prefill leaves: the contexts it took, their logits, and per layer the paths' keys and values [P, K, D]."""

    trie: Trie
    logits_NV: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    carry: Carry


def prefill(
    model: Any,
    contexts: Sequence[Ids],
    carry: Carry | None,
    budget: int,
    device: torch.device,
    memory: Memory | None = None,
) -> Prefilled:
    """Runs the model once over the new tokens of as many sorted contexts as fit into `budget`.

    `memory` takes the states after them: then they are all alike, and nothing is carried.
    """
    trie = continue_trie(contexts, None if carry is None else carry.context, budget)
    if len(trie.ids_T):
        carried = None if carry is None else (carry.keys, carry.values)
        attention = PrefillAttention(trie, carried, device)
        fresh_1NV = logits(
            model,
            attention,
            memory,
            input_ids=torch.from_numpy(trie.ids_T)[None].to(device),
            position_ids=torch.from_numpy(trie.positions_T)[None].to(device),
            logits_to_keep=torch.tensor(trie.ends, device=device),
        )
        keys, values = attention.keys, attention.values
        first = torch.zeros_like(fresh_1NV[0, :1]) if carry is None else carry.logits_V[None]
        logits_NV = torch.cat([first, fresh_1NV[0]])
    else:
        assert carry is not None
        keys, values, logits_NV = carry.keys, carry.values, carry.logits_V[None]
    last = torch.from_numpy(trie.paths[-1]).to(device)
    kept = Carry(
        context=contexts[len(trie.paths) - 1],
        keys=[k[last] for k in keys],
        values=[v[last] for v in values],
        logits_V=logits_NV[trie.run_of[-1]].clone(),
    )
    chosen = logits_NV[torch.tensor(trie.run_of, device=device)]
    return Prefilled(trie, chosen, keys, values, kept)
