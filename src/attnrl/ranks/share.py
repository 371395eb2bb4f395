"""Who computes what: requests and microbatches shared out over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from attnrl.policy.packing import input_length, microbatches
from attnrl.types import Sample

T = TypeVar("T")


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for each rank: as many for each, up to one, and about the same cost.

    >>> deal([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    >>> deal([7], 2)
    [[0], []]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        fewest = min(map(len, shares))
        rank = min((r for r in range(ranks) if len(shares[r]) == fewest), key=lambda r: load[r])
        shares[rank].append(index)
        load[rank] += costs[index]
    return shares


def in_order(shares: Sequence[Sequence[int]], answers: Sequence[Sequence[T]]) -> list[T]:
    """What ranks answered to their shares, by index.

    >>> in_order([[0, 2], [1]], ["ac", "b"])
    ['a', 'b', 'c']
    """
    found = dict(pair for both in zip(shares, answers, strict=True) for pair in zip(*both, strict=True))
    return [found[index] for index in sorted(found)]


def share_packs(
    samples: Sequence[Sample], rows: Sequence[int], ranks: int, budget: int, *, share: bool
) -> list[list[list[Sample]]]:
    """For each rank its microbatches of the samples `rows`: at most `budget` tokens each, samples that share a prefix
    together, and as many for each rank, up to one. With fewer full microbatches than ranks, they are made smaller.
    """
    lengths = {row: input_length(samples[row]) for row in rows}
    budget = max(1, min(budget, -(-sum(lengths.values()) // ranks)))
    packs = microbatches(samples, rows, budget, share=share)
    costs = [sum(lengths[row] for row in pack) for pack in packs]
    return [[[samples[row] for row in packs[i]] for i in mine] for mine in deal(costs, ranks)]
