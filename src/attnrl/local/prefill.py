"""Prefill: the contexts of a batch of requests as one packed trie, so that no shared token is computed twice.

Contexts come in lexicographic order. Then the longest prefix that a context shares with any earlier one is the one it
shares with the one just before it; so a single walk finds the trie, and keeping the keys and values of the last context
("the carry") is enough to share with the next batch, wherever the batches are cut.

Shapes: T packed tokens, P carried and packed tokens, V vocabulary, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrl.attention.pages import Ints
from attnrl.local.cache import Job, PrefillAttention, attending
from attnrl.types import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """The last context of a prefill, with its keys and values per layer [P, K, D] and its next-token logits [V]."""

    context: Ids
    keys: list[Tensor]
    values: list[Tensor]
    logits_V: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPlan:
    """The packed tokens of the first `len(paths)` contexts, and where each context finds its own.

    `shared[i]` counts the leading tokens that context i has in common with the one before it.
    `paths[i]` are the tokens of context i, counted over carried and packed tokens; `logits[i]` is 0 where the
    next-token logits are the carried ones and j + 1 where they are those of packed token `ends[j]`.
    """

    tokens: Ints  # [T]
    positions: Ints  # [T]
    jobs: list[Job]
    ends: list[int]
    paths: list[Ints]
    logits: list[int]
    shared: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """What a prefill leaves: per context its path and logits, and per layer the paths' keys and values [P, K, D]."""

    plan: PrefillPlan
    logits_NV: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    carry: Carry


def shared_prefix(a: Ids, b: Ids) -> int:
    """How many leading tokens a and b have in common.

    >>> shared_prefix(np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32))
    2
    """
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def lexicographic(contexts: Sequence[Ids]) -> list[int]:
    """The order in which the contexts are sorted token by token, a prefix before what it begins.

    >>> lexicographic([np.array([2], np.int32), np.array([1, 300], np.int32), np.array([1], np.int32)])
    [2, 1, 0]
    """
    keys = [context.astype(">u4").tobytes() for context in contexts]
    return sorted(range(len(keys)), key=keys.__getitem__)


def plan_prefill(contexts: Sequence[Ids], carried: Ids | None, budget: int) -> PrefillPlan:
    """The plan for as many of the sorted contexts as fit into `budget` packed tokens, at least one."""
    previous = np.zeros(0, np.int32) if carried is None else carried
    offset = len(previous)
    path: Ints = np.arange(offset)
    plan = PrefillPlan(np.zeros(0, np.int64), np.zeros(0, np.int64), [], [], [], [], [])
    tokens: list[Ids] = []
    positions: list[Ints] = []
    packed = 0
    for context in contexts:
        shared = shared_prefix(previous, context)
        new = len(context) - shared
        if plan.paths and packed + new > budget:
            break
        assert new or shared == len(previous), "contexts are sorted"
        if new:
            path = np.concatenate([path[:shared], offset + np.arange(packed, packed + new)])
            plan.jobs.append(Job(packed, packed + new, path))
            packed += new
            plan.ends.append(packed - 1)
            tokens.append(context[shared:])
            positions.append(np.arange(shared, len(context)))
        plan.paths.append(path)
        plan.logits.append(len(plan.ends))
        plan.shared.append(shared)
        previous = context
    if not tokens:
        return plan
    flat = np.concatenate(tokens).astype(np.int64)
    return PrefillPlan(flat, np.concatenate(positions), plan.jobs, plan.ends, plan.paths, plan.logits, plan.shared)


def prefill(model: Any, contexts: Sequence[Ids], carry: Carry | None, budget: int, device: torch.device) -> Prefilled:
    """Runs the model once over the new tokens of as many sorted contexts as fit into `budget`."""
    plan = plan_prefill(contexts, None if carry is None else carry.context, budget)
    if len(plan.tokens):
        carried = None if carry is None else (carry.keys, carry.values)
        attention = PrefillAttention(plan.jobs, carried, device)
        with attending(attention):
            fresh_1NV = model(
                input_ids=torch.from_numpy(plan.tokens)[None].to(device),
                position_ids=torch.from_numpy(plan.positions)[None].to(device),
                logits_to_keep=torch.tensor(plan.ends, device=device),
                use_cache=False,
            ).logits
        keys, values = attention.keys, attention.values
        first = torch.zeros_like(fresh_1NV[0, :1]) if carry is None else carry.logits_V[None]
        logits_NV = torch.cat([first, fresh_1NV[0]])
    else:
        assert carry is not None
        keys, values, logits_NV = carry.keys, carry.values, carry.logits_V[None]
    last = torch.from_numpy(plan.paths[-1]).to(device)
    kept = Carry(
        context=contexts[len(plan.paths) - 1],
        keys=[k[last] for k in keys],
        values=[v[last] for v in values],
        logits_V=logits_NV[plan.logits[-1]].clone(),
    )
    chosen = logits_NV[torch.tensor(plan.logits, device=device)]
    return Prefilled(plan, chosen, keys, values, kept)
