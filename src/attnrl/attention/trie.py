"""Sequences laid out for one forward pass: end to end, or with each shared prefix once; and how many fit into one.

All samples of a prompt start with it, and branches repeat their trunk up to the branch point. Sorted, each sequence
adds only what the one before it has not: its run. So a single walk finds the trie, and the last sequence of one pass
(carried, with its keys and values) is enough to share with the next, wherever the passes are cut.

Shapes: T tokens laid out, P carried tokens and those, S tokens of all paths (each sequence in full), J paths, B query
blocks, I key blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
QUERY_BLOCK, KEY_BLOCK = 64, 128  # queries, and keys, of one block


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """What path attention needs: how many tokens of each run are new, how long its path is, where the path lies.

    A run's queries are its new tokens, the last of its path.
    """

    fresh: tuple[int, ...]  # they add up to T
    lengths: tuple[int, ...]  # they add up to S
    paths_S: Tensor | None = None  # int64, into T; None: nothing is shared, paths lie end to end
    _made: dict[tuple[str, torch.device], tuple[Tensor, ...]] = field(default_factory=dict)

    def ends(self, device: torch.device) -> tuple[Tensor, ...]:
        """Cumulative new tokens and lengths, from 0, [runs + 1] each, int32, on the device."""
        return self._kept("ends", device, lambda: [_summed(self.fresh), _summed(self.lengths)])

    def blocks(self, device: torch.device) -> tuple[Tensor, ...]:
        """The first key of each path [J], `path_blocks`, `key_blocks` and `block_slots`, int32, on the device."""
        both = self.fresh, self.lengths
        tables = (path_blocks, key_blocks)
        return self._kept(
            "blocks",
            device,
            lambda: [_summed(self.lengths)[:-1], *(table(*both) for table in tables), block_slots(self.fresh)],
        )

    def _kept(self, name: str, device: torch.device, make: Callable[[], list[Array]]) -> tuple[Tensor, ...]:
        if (name, device) not in self._made:
            made = (torch.from_numpy(array.astype(np.int32)).to(device) for array in make())
            self._made[name, device] = tuple(made)
        return self._made[name, device]


def _summed(counts: Sequence[int]) -> Array:
    return np.cumsum([0, *counts])


def query_blocks(first: int, start: int, stop: int, path: int) -> Array:
    """Blocks of the packed queries from `first` on, at positions `start` to `stop` of a path: [B, 4].

    >>> query_blocks(10, 100, 170, 3).tolist()
    [[10, 64, 100, 3], [74, 6, 164, 3]]
    """
    starts = np.arange(start, stop, QUERY_BLOCK)
    counts = np.minimum(QUERY_BLOCK, stop - starts)
    return np.stack([first + starts - start, counts, starts, np.full(len(starts), path)], 1)


def path_blocks(fresh: Sequence[int], lengths: Sequence[int]) -> Array:
    """The query blocks of all runs, those with the most keys first: [B, 4].

    >>> path_blocks([2, 70], [100, 70]).tolist()
    [[0, 2, 98, 0], [66, 6, 64, 1], [2, 64, 0, 1]]
    """
    runs = enumerate(zip(_summed(fresh), fresh, lengths, strict=False))
    blocks = np.concatenate([query_blocks(first, length - new, length, i) for i, (first, new, length) in runs])
    return blocks[np.argsort(-blocks[:, 2], kind="stable")]


def key_blocks(fresh: Sequence[int], lengths: Sequence[int]) -> Array:
    """Blocks of keys, those that the most queries see first: [I, 6].

    Of each: its first key among those of all paths, that key's position, and of its path's queries the first, that
    one's position, their number, and the slot of the first.

    >>> key_blocks([2, 70], [130, 70]).tolist()
    [[130, 0, 2, 0, 70, 64], [0, 0, 0, 128, 2, 0], [128, 128, 0, 128, 2, 0]]
    """
    rows = []
    runs = zip(_summed(lengths), _summed(fresh), _slot_starts(fresh), fresh, lengths, strict=False)
    for key, first, slot, new, length in runs:
        at = np.arange(0, length, KEY_BLOCK)
        about = (np.full(len(at), n) for n in (first, length - new, new, slot))
        rows.append(np.stack([key + at, at, *about], 1))
    blocks = np.concatenate(rows)
    seeing = blocks[:, 4] - np.maximum(blocks[:, 1] - blocks[:, 3], 0)
    return blocks[np.argsort(-seeing, kind="stable")]


def block_slots(fresh: Sequence[int]) -> Array:
    """Where each query stands when every run begins with a block of its own: [T].

    >>> block_slots([2, 65, 1]).tolist() == [0, 1, *range(64, 129), 192]
    True
    """
    starts = zip(_slot_starts(fresh), fresh, strict=False)
    return np.concatenate([slot + np.arange(new) for slot, new in starts])


def _slot_starts(fresh: Sequence[int]) -> Array:
    return _summed([-(-new // QUERY_BLOCK) * QUERY_BLOCK for new in fresh])


def apart(lengths: Sequence[int]) -> Runs:
    """The runs of sequences that lie end to end."""
    counts = tuple(int(n) for n in lengths)
    return Runs(counts, counts)


@dataclass(frozen=True, slots=True, eq=False)
class Trie:
    """Sequences laid out for one forward pass."""

    order: tuple[int, ...]  # which of the given sequences
    ids_T: Array
    positions_T: Array
    paths: tuple[Array, ...]  # the tokens of each sequence in that order, into P
    fresh: tuple[int, ...]  # how many of them it adds; the last of its path
    carried: int = 0  # tokens before T that have run already

    def runs(self, device: torch.device | str) -> Runs:
        """What path attention needs, on the device; a sequence without new tokens has no run."""
        assert not self.carried, "path attention has no keys of carried tokens"
        kept = [i for i, count in enumerate(self.fresh) if count]
        fresh, lengths = tuple(self.fresh[i] for i in kept), tuple(len(self.paths[i]) for i in kept)
        if fresh == lengths:
            return Runs(fresh, lengths)
        return Runs(fresh, lengths, torch.from_numpy(np.concatenate([self.paths[i] for i in kept])).to(device))

    @property
    def ends(self) -> list[int]:
        """The last token of each run, into T."""
        return [int(path[-1]) - self.carried for path, new in zip(self.paths, self.fresh, strict=True) if new]

    @property
    def run_of(self) -> list[int]:
        """Which run each sequence ends with, from 1; 0: with the carried sequence."""
        return [int(n) for n in np.cumsum(np.array(self.fresh) > 0)]


def sorted_rows(sequences: Sequence[Array]) -> list[int]:
    """Indices in lexicographic order, a prefix before what continues it.

    >>> sorted_rows([np.array([1, 2]), np.array([1]), np.array([0, 9])])
    [2, 1, 0]
    """
    keys = [np.asarray(s).astype(">u4").tobytes() for s in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def common_prefix(a: Array, b: Array) -> int:
    """Length of the longest common prefix.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    shortest = min(len(a), len(b))
    differs = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(differs[0]) if len(differs) else shortest


def make_trie(sequences: Sequence[Array], *, share: bool = True) -> Trie:
    """The sequences, sorted, with every shared prefix laid out once; or in their order, end to end.

    >>> trie = make_trie([np.array([7, 8, 9]), np.array([7, 8, 5]), np.array([7, 8])])
    >>> trie.ids_T.tolist(), trie.fresh, [p.tolist() for p in trie.paths]
    ([7, 8, 5, 9], (2, 1, 1), [[0, 1], [0, 1, 2], [0, 1, 3]])
    """
    order = sorted_rows(sequences) if share else range(len(sequences))
    return _walk(sequences, order, np.zeros(0, np.int64), None, share=share)


def continue_trie(contexts: Sequence[Array], carried: Array | None, budget: int) -> Trie:
    """As many of the sorted contexts as add at most `budget` tokens to each other and to the carried one; at least one.

    >>> rows = [np.array([7, 8]), np.array([7, 8, 5]), np.array([7, 9, 9])]
    >>> trie = continue_trie(rows, np.array([7, 8]), 2)
    >>> trie.ids_T.tolist(), trie.fresh, [p.tolist() for p in trie.paths], trie.ends, trie.run_of
    ([5], (0, 1), [[0, 1], [0, 1, 2]], [0], [0, 1])
    """
    before = np.zeros(0, np.int64) if carried is None else carried
    return _walk(contexts, range(len(contexts)), before, budget, share=True)


def _walk(rows: Sequence[Array], order: Sequence[int], before: Array, budget: int | None, *, share: bool) -> Trie:
    """Row after row, each adding what it has not in common with the one before it."""
    carried = len(before)
    ids: list[Array] = []
    positions: list[Array] = []
    paths: list[Array] = []
    fresh: list[int] = []
    path, used = np.arange(carried), carried
    for index in order:
        row = np.asarray(rows[index]).astype(np.int64)
        kept = common_prefix(before, row) if share else 0
        new = len(row) - kept
        if paths and budget is not None and used - carried + new > budget:
            break
        assert new or kept == len(before), "rows are sorted"
        path = np.concatenate([path[:kept], np.arange(used, used + new)])
        ids.append(row[kept:])
        positions.append(np.arange(kept, len(row)))
        paths.append(path)
        fresh.append(new)
        before, used = row, used + new
    taken = tuple(order[: len(paths)])
    return Trie(taken, np.concatenate(ids), np.concatenate(positions), tuple(paths), tuple(fresh), carried)


def bins_by_budget(lengths: Sequence[int], budget: int, lone: int | None = None) -> list[list[int]]:
    """Indices grouped into packs of at most `budget` tokens, longest first.

    A sequence longer than the budget, or than `lone`, has a pack of its own.

    >>> bins_by_budget([3, 9, 5, 4], 8)
    [[1], [2, 0], [3]]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lone is not None and lengths[index] > lone:
            bins.append([index])
            room.append(0)
            continue
        fits = next((b for b, left in enumerate(room) if left >= lengths[index]), None)
        if fits is None:
            bins.append([index])
            room.append(budget - lengths[index])
        else:
            bins[fits].append(index)
            room[fits] -= lengths[index]
    return bins


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
