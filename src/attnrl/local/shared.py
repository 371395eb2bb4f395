"""Attention over sequences that share prefixes: each shared token is in the batch once. Exact and differentiable.

All samples of a prompt start with it, and branches repeat their trunk up to the branch point. Sorted, each sequence
adds only what the one before it has not: its run. The queries of a run see the keys of its whole path. Every other
layer of the model then works on each distinct token once.

Shapes: T distinct tokens, K tokens of all paths (each sequence in full), H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from attnrl.errors import ConfigError
from attnrl.scoring.packed import check_model

IMPLEMENTATION = "attnrl_shared_prefixes"
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """One run per sequence: how many of its tokens are new, how long its path is, and where the path's tokens lie."""

    fresh: tuple[int, ...]  # they add up to T
    lengths: tuple[int, ...]  # they add up to K
    paths_K: Tensor  # int64, into T
    fresh_ends: Tensor  # int32, cumulative, from 0
    length_ends: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """Sequences laid out for one forward pass."""

    order: tuple[int, ...]  # which of the given sequences
    ids_T: Array
    positions_T: Array
    paths: tuple[Array, ...]  # of each sequence in that order, into T
    fresh: tuple[int, ...]

    def runs(self, device: torch.device | str) -> Runs:
        """What attention needs, on the device; a sequence without new tokens has no run."""
        kept = [i for i, count in enumerate(self.fresh) if count]
        fresh = tuple(self.fresh[i] for i in kept)
        lengths = tuple(len(self.paths[i]) for i in kept)

        def ends(counts: tuple[int, ...]) -> Tensor:
            return torch.tensor([0, *counts]).cumsum(0).to(device=device, dtype=torch.int32)

        paths = torch.from_numpy(np.concatenate([self.paths[i] for i in kept])).to(device)
        return Runs(fresh, lengths, paths, ends(fresh), ends(lengths))


def sorted_rows(sequences: Sequence[Array]) -> list[int]:
    """Indices in lexicographic order, a prefix before what continues it.

    >>> sorted_rows([np.array([1, 2]), np.array([1]), np.array([0, 9])])
    [2, 1, 0]
    """
    keys = [np.asarray(s).astype(">u4").tobytes() for s in sequences]
    return sorted(range(len(sequences)), key=lambda i: (keys[i], i))


def common_prefix(a: Array, b: Array) -> int:
    """Length of the longest common prefix.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    shortest = min(len(a), len(b))
    differs = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(differs[0]) if len(differs) else shortest


def make_trie(sequences: Sequence[Array]) -> Trie:
    """The sequences with every shared prefix laid out once.

    >>> trie = make_trie([np.array([7, 8, 9]), np.array([7, 8, 5]), np.array([7, 8])])
    >>> trie.ids_T.tolist(), trie.fresh, [p.tolist() for p in trie.paths]
    ([7, 8, 5, 9], (2, 1, 1), [[0, 1], [0, 1, 2], [0, 1, 3]])
    """
    order = sorted_rows(sequences)
    ids: list[Array] = []
    positions: list[Array] = []
    paths: list[Array] = []
    fresh: list[int] = []
    before, path, used = np.zeros(0, np.int64), np.zeros(0, np.int64), 0
    for index in order:
        row = np.asarray(sequences[index]).astype(np.int64)
        kept = common_prefix(before, row)
        new = len(row) - kept
        path = np.concatenate([path[:kept], np.arange(used, used + new)])
        ids.append(row[kept:])
        positions.append(np.arange(kept, len(row)))
        paths.append(path)
        fresh.append(new)
        before, used = row, used + new
    return Trie(tuple(order), np.concatenate(ids), np.concatenate(positions), tuple(paths), tuple(fresh))


def end_to_end(sequences: Sequence[Array]) -> Trie:
    """The sequences in their order, nothing shared."""
    ends = np.cumsum([0, *map(len, sequences)])
    paths = tuple(np.arange(a, b) for a, b in itertools.pairwise(ends))
    positions = np.concatenate([np.arange(len(s)) for s in sequences])
    order = tuple(range(len(sequences)))
    return Trie(order, np.concatenate(list(sequences)), positions, paths, tuple(map(len, sequences)))


def fill_shared_bins(sequences: Sequence[Array], budget: int) -> list[list[int]]:
    """Indices grouped so that each group has at most `budget` distinct tokens (and 4 times that many in all paths).

    Groups are runs of the sorted order, so that what shares a prefix stays together. A sequence over the budget gets a
    group of its own.
    """
    bins: list[list[int]] = []
    distinct = total = 0
    before = np.zeros(0, np.int64)
    for index in sorted_rows(sequences):
        row = sequences[index]
        new = len(row) - common_prefix(before, row)
        if bins and distinct + new <= budget and total + len(row) <= 4 * budget:
            bins[-1].append(index)
            distinct, total = distinct + new, total + len(row)
        else:
            bins.append([index])
            distinct = total = len(row)
        before = row
    return bins


# Keyed by config identity, not by thread: recomputation under gradient checkpointing runs on autograd's own thread.
_ACTIVE: dict[int, Runs] = {}


def can_share(model: nn.Module) -> bool:
    """Whether every layer of the model attends fully and without a soft cap, so that prefixes can be shared."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None:
            continue
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - {"full_attention"} or getattr(config, "attn_logit_softcapping", None):
            return False
        if not kinds and getattr(config, "sliding_window", None):
            return False
    return True


@contextmanager
def shared_attention(model: nn.Module, runs: Runs) -> Iterator[None]:
    """While open, each run of the batch attends causally along its path. Call `backward` inside, as gradient
    checkpointing attends again."""
    configs = check_model(model)
    AttentionInterface.register(IMPLEMENTATION, _interface)
    before = [config._attn_implementation for config in configs]
    _ACTIVE.update({id(config): runs for config in configs})
    try:
        for config in configs:
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
            _ACTIVE.pop(id(config), None)


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each attention layer; tensors are [1, heads, T, D]."""
    runs = _ACTIVE.get(id(getattr(module, "config", None)))
    odd = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if runs is None or odd or dropout or attention_mask is not None or query.shape[0] != 1:
        what = ", ".join(odd) or "an attention mask, dropout, several rows, or a call outside of the context"
        raise ConfigError(f"shared prefixes do not support {what}; set share_prefixes = false")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    # one gather for all runs: gathering run by run would make a gradient of T tokens for each
    k_KGD, v_KGD = k_TGD.index_select(0, runs.paths_K), v_TGD.index_select(0, runs.paths_K)
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256:
        return _flash(q_THD, k_KGD, v_KGD, runs, scale)[None], None
    return _run_by_run(q_THD, k_KGD, v_KGD, runs, scale)[None], None


def _flash(q_THD: Tensor, k_KGD: Tensor, v_KGD: Tensor, runs: Runs, scale: float) -> Tensor:
    """One flash kernel over all runs; with fewer queries than keys its causal mask is aligned to the last of both."""
    longest = (max(runs.fresh), max(runs.lengths))
    ends = (runs.fresh_ends, runs.length_ends)
    forward = torch.ops.aten._flash_attention_forward
    out_THD: Tensor = forward(q_THD, k_KGD, v_KGD, *ends, *longest, 0.0, True, False, scale=scale)[0]
    return out_THD


def _run_by_run(q_THD: Tensor, k_KGD: Tensor, v_KGD: Tensor, runs: Runs, scale: float) -> Tensor:
    groups = q_THD.shape[1] // k_KGD.shape[1]
    k_KHD, v_KHD = k_KGD.repeat_interleave(groups, 1), v_KGD.repeat_interleave(groups, 1)
    queries = q_THD.split(list(runs.fresh))
    keys, values = k_KHD.split(list(runs.lengths)), v_KHD.split(list(runs.lengths))
    outs = []
    for q, k, v in zip(queries, keys, values, strict=True):
        rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
        if len(q) == len(k):
            out = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scale)
        else:
            sees = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
            out = F.scaled_dot_product_attention(*rows, attn_mask=sees, scale=scale)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
