"""Samples to packed microbatches: rows laid end to end, or their shared prefixes laid out once; no padding between.

Shapes: T tokens of a pack, N loss tokens of its samples, U predictions (position and target) they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnrl.attention.trie import Runs, bins_by_budget, fill_shared_bins, make_trie
from attnrl.types import Ids, Sample, as_ids


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One microbatch: sequences laid end to end, and which positions predict a token that carries loss.

    Position `source_U[i]` of the pack predicts the token `targets_U[i]`, so no logits of other positions are needed.
    `runs` says how the sequences lie in the pack. With shared prefixes, loss tokens of several samples may come from
    one prediction: `expand_N` says which.
    """

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each sequence
    lengths: tuple[int, ...]  # of the sequences; without shared prefixes they add up to T
    source_U: Tensor  # int64, into T
    targets_U: Tensor  # int64
    advantages_N: Tensor  # float32
    behaviour_N: Tensor  # float32, log-probs of the policy that drew each token
    rows: tuple[int, ...]  # which samples, in order
    counts: tuple[int, ...]  # loss tokens of each of these samples
    runs: Runs
    expand_N: Tensor | None = None  # int64, into U; None: one prediction per loss token, in order

    @property
    def tokens(self) -> int:
        """T: what the model runs over."""
        return len(self.ids_T)

    @property
    def loss_tokens(self) -> int:
        return sum(self.counts)


def loss_positions(sample: Sample) -> np.ndarray:
    """Response offsets of the tokens that carry loss, ascending; empty for a sample to leave out. [N]"""
    if sample.mask is None:
        return np.arange(len(sample.response))
    return np.flatnonzero(sample.mask)


def input_length(sample: Sample) -> int:
    """Tokens the model has to read: all before the last loss token. What follows it cannot change the loss."""
    positions = loss_positions(sample)
    return len(sample.prompt) + int(positions[-1]) if len(positions) else 0


def input_ids(sample: Sample) -> Ids:
    """The tokens the model reads of a sample."""
    return as_ids(np.concatenate([sample.prompt, sample.response])[: input_length(sample)])


def microbatches(
    samples: Sequence[Sample], rows: Sequence[int], budget: int, *, share: bool, lone: int | None = None
) -> list[list[int]]:
    """The samples `rows` in microbatches of at most `budget` tokens to run over, those that share a prefix together
    where it is to be run over once. A sample longer than the budget, or than `lone`, has one of its own.
    """
    lengths = [input_length(samples[row]) for row in rows]
    if share and (lone is None or max(lengths, default=0) <= lone):
        bins = fill_shared_bins([input_ids(samples[row]) for row in rows], budget)
    else:
        bins = bins_by_budget(lengths, budget, lone)
    return [[rows[i] for i in part] for part in bins]


def pack(
    samples: Sequence[Sample],
    rows: Sequence[int],
    device: torch.device | str,
    *,
    share_prefixes: bool = False,
) -> Pack:
    """The samples `rows` on the device, end to end, or sorted with each shared prefix laid out once."""
    sequences = [input_ids(samples[row]).astype(np.int64) for row in rows]
    trie = make_trie(sequences, share=share_prefixes)
    rows = [rows[i] for i in trie.order]
    chosen = [samples[row] for row in rows]
    offsets = [loss_positions(sample) for sample in chosen]
    paths = zip(trie.paths, chosen, offsets, strict=True)
    source = np.concatenate([path[len(sample.prompt) + at - 1] for path, sample, at in paths])
    targets = np.concatenate([s.response[at] for s, at in zip(chosen, offsets, strict=True)]).astype(np.int64)
    expand = None
    if share_prefixes:
        pairs, expand = np.unique(source << 32 | targets, return_inverse=True)
        source, targets = pairs >> 32, pairs & 0xFFFFFFFF

    def tensor(array: NDArray[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype, non_blocking=True)

    def values(name: str) -> Tensor:
        parts = [getattr(s, name)[at] for s, at in zip(chosen, offsets, strict=True)]
        return tensor(np.concatenate(parts), torch.float32)

    return Pack(
        ids_T=tensor(trie.ids_T),
        positions_T=tensor(trie.positions_T),
        lengths=tuple(map(len, trie.paths)),
        source_U=tensor(source),
        targets_U=tensor(targets),
        advantages_N=values("advantages"),
        behaviour_N=values("logprobs"),
        rows=tuple(rows),
        counts=tuple(map(len, offsets)),
        runs=trie.runs(device),
        expand_N=None if expand is None else tensor(expand),
    )
