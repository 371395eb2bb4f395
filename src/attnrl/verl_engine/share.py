"""Who computes what: requests and microbatches shared out over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from attnrl.attention.trie import bins_by_budget, fill_shared_bins
from attnrl.local.packing import input_ids
from attnrl.types import Sample


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


def share_requests(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of sequences for each rank, about the same number of tokens each; a rank may get none.

    >>> share_requests([9, 1, 1, 1, 6], 2)
    [[0], [4, 1, 2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: load[r])
        shares[rank].append(index)
        load[rank] += lengths[index]
    return shares


def share_packs(samples: Sequence[Sample], ranks: int, budget: int, *, shared: bool) -> list[list[list[int]]]:
    """For each rank its microbatches, as indices of samples: at most `budget` tokens each, samples that share a prefix
    together, and as many for each rank, up to one. With fewer full microbatches than ranks, they are made smaller.
    """
    sequences = [input_ids(sample) for sample in samples]
    lengths = [len(s) for s in sequences]
    budget = max(1, min(budget, -(-sum(lengths) // ranks)))
    packs = fill_shared_bins(sequences, budget) if shared else bins_by_budget(lengths, budget)
    costs = [sum(lengths[i] for i in pack) for pack in packs]
    return [[packs[i] for i in mine] for mine in deal(costs, ranks)]
