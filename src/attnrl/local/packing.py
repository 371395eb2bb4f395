"""Samples to packed microbatches: rows laid end to end, no padding between them.

Shapes: T tokens of a pack, N of them predict a loss token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnrl.types import Sample


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One microbatch: sequences laid end to end, and which positions predict a token that carries loss.

    Position `source_N[i]` of the pack predicts the token `targets_N[i]`, so no logits of other positions are needed.
    """

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64, from 0 in each sequence
    lengths: tuple[int, ...]  # of the sequences; they add up to T
    source_N: Tensor  # int64, into T
    targets_N: Tensor  # int64
    advantages_N: Tensor  # float32
    behaviour_N: Tensor  # float32, log-probs of the policy that drew each token
    rows: tuple[int, ...]  # which samples, in order
    counts: tuple[int, ...]  # loss tokens of each of these samples

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

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


def fill_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped so that each group's lengths add up to at most `budget`; first fit, longest first.

    A length over the budget gets a group of its own: a sequence is never cut.

    >>> fill_bins([5, 3, 4, 9], budget=8)
    [[3], [0, 1], [2]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        length = lengths[index]
        fits = next((b for b, left in enumerate(room) if left >= length), None)
        if fits is None:
            bins.append([index])
            room.append(budget - length)
        else:
            bins[fits].append(index)
            room[fits] -= length
    return bins


def pack(samples: Sequence[Sample], rows: Sequence[int], device: torch.device | str, *, multiple: int = 1) -> Pack:
    """The samples `rows`, end to end, on the device.

    With `multiple` > 1 a last sequence without loss fills the pack up to a multiple of that many tokens: few
    different shapes reach the device. It is a sequence of its own, so it changes neither loss nor gradient.
    """
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    advantages: list[np.ndarray] = []
    behaviour: list[np.ndarray] = []
    start = 0
    for row in rows:
        sample = samples[row]
        offsets = loss_positions(sample)
        length = input_length(sample)
        ids.append(np.concatenate([sample.prompt, sample.response])[:length])
        positions.append(np.arange(length))
        sources.append(start + len(sample.prompt) + offsets - 1)
        targets.append(sample.response[offsets])
        advantages.append(sample.advantages[offsets])
        behaviour.append(sample.logprobs[offsets])
        start += length
    lengths = [len(p) for p in positions]
    if filler := -start % multiple:
        ids.append(np.zeros(filler, dtype=np.int64))
        positions.append(np.arange(filler))
        lengths.append(filler)

    def tensor(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device=device, dtype=dtype, non_blocking=True)

    return Pack(
        ids_T=tensor(ids, torch.int64),
        positions_T=tensor(positions, torch.int64),
        lengths=tuple(lengths),
        source_N=tensor(sources, torch.int64),
        targets_N=tensor(targets, torch.int64),
        advantages_N=tensor(advantages, torch.float32),
        behaviour_N=tensor(behaviour, torch.float32),
        rows=tuple(rows),
        counts=tuple(len(t) for t in targets),
    )


def plan_minibatches(
    uids: Sequence[str], *, prompts: int | None, samples: int | None, rng: np.random.Generator
) -> list[list[int]]:
    """Sample indices of each minibatch, shuffled by `rng`: at most `prompts` prompts or `samples` samples each.

    All samples of a prompt (same uid) share a minibatch when minibatches are counted in prompts. With neither limit,
    everything is one minibatch.

    Deviation: the minibatches are of even size (40 prompts at 32 a minibatch: 20 and 20, not 32 and 8), so that no
    update is made from a small remainder.
    """
    if samples is not None:
        units = [[i] for i in range(len(uids))]
        size = samples
    else:
        groups: dict[str, list[int]] = {}
        for i, uid in enumerate(uids):
            groups.setdefault(uid, []).append(i)
        units = list(groups.values())
        size = prompts or len(units)
    if not units:
        return []
    order = rng.permutation(len(units))
    parts = np.array_split(order, -(-len(units) // size))
    return [[i for unit in part for i in units[unit]] for part in parts]
