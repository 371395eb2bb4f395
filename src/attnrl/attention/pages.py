"""Keys and values in pages of a few tokens, so that a row holds what it needs and shared beginnings are stored once.

Shapes: N pages, K key/value heads, D head size, R rows, M pages of the longest row.
A slot is a token's place in the pool: page * PAGE + place in the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE = 32  # tokens; half a page is lost per row, and what two rows share is counted in whole pages

Ints = NDArray[np.int64]
Pages = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's keys and values for one token."""

    kv_heads: int
    key_dim: int
    value_dim: int


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Cache bytes of one token of one row, over all layers."""
    return sum(s.kv_heads * (s.key_dim + s.value_dim) for s in shapes) * int(dtype.itemsize)


def rows_readable(x_THD: Tensor) -> bool:
    """Whether the copy engine can read these rows: heads end to end, rows as far apart as they like."""
    row, *inner = x_THD.stride()
    return inner == [x_THD.shape[2], 1] and row % 8 == 0 and bool(x_THD.data_ptr() % 16 == 0)


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens.

    >>> pages_for(0), pages_for(1), pages_for(32), pages_for(33)
    (0, 1, 1, 2)
    """
    return -(-tokens // PAGE)


class PagePool:
    """Pages of keys and values, per layer [N, K, PAGE, D], each counted by the rows that hold it.

    Page 0 is nobody's: idle rows write there. Memory is taken as it comes: readers look at written slots only.
    """

    def __init__(self, shapes: Sequence[LayerShape], pages: int, dtype: torch.dtype, device: torch.device) -> None:
        assert pages >= 2
        self.shapes = tuple(shapes)
        self.pages = pages
        self.device = device
        self.keys = [torch.empty(pages, s.kv_heads, PAGE, s.key_dim, dtype=dtype, device=device) for s in shapes]
        self.values = [torch.empty(pages, s.kv_heads, PAGE, s.value_dim, dtype=dtype, device=device) for s in shapes]
        self.page_bytes = PAGE * bytes_per_token(shapes, dtype)
        self._holders = np.zeros(pages, np.int32)
        self._free = list(range(pages - 1, 0, -1))
        self.peak = 0  # most pages held at once

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def used(self) -> int:
        return self.pages - 1 - len(self._free)

    def take(self, count: int) -> Pages:
        """`count` pages of one's own."""
        assert count <= len(self._free), "the caller makes room first"
        if not count:
            return np.zeros(0, np.int32)
        taken = np.array(self._free[: -count - 1 : -1], np.int32)
        del self._free[-count:]
        self._holders[taken] = 1
        self.peak = max(self.peak, self.used)
        return taken

    def share(self, pages: Pages) -> Pages:
        """The same pages, held once more."""
        assert (self._holders[pages] > 0).all()
        self._holders[pages] += 1
        return pages.copy()

    def drop(self, pages: Pages) -> None:
        """Lets go of pages; those that nobody else holds become free."""
        self._holders[pages] -= 1
        left = self._holders[pages]
        assert (left >= 0).all()
        self._free.extend(pages[left == 0].tolist())

    def store(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Writes the keys and values of T tokens into their slots."""
        page, place = slots_T // PAGE, slots_T % PAGE
        self.keys[layer][page, :, place] = k_TKD
        self.values[layer][page, :, place] = v_TKD

    def copy(self, layer: int, source: Tensor, target: Tensor) -> None:
        """Copies the tokens in slots `source` to slots `target`."""
        for pool in (self.keys[layer], self.values[layer]):
            pool[target // PAGE, :, target % PAGE] = pool[source // PAGE, :, source % PAGE]


def sent(array: NDArray[Any] | list[int], device: torch.device) -> Tensor:
    """The array on the device. The host waits for nothing that runs there: it may prepare the next pass meanwhile."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda" and tensor.numel():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def slots_of(pages: Pages, positions: Ints) -> Ints:
    """The slots of a row's tokens at these positions.

    >>> slots_of(np.array([7, 3], np.int32), np.array([0, 31, 32]))
    array([224, 255,  96])
    """
    slots: Ints = pages[positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    return slots


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Decode attention cut into pieces of about equal size.

    An item is (first row, rows, first token, token after the last, split): keys and values of `rows` neighbouring rows
    that share these pages, read once for all of them. The row's last item ends at its newest token, wherever that is.
    """

    single_I5: NDArray[np.int32]
    shared_I5: NDArray[np.int32]
    splits_R: NDArray[np.int32]  # items of each row


ENDLESS = 1 << 30  # the end of a row's last item: it grows with the row
MIN_SHARED = 8  # pages that rows must have in common to be read together
EARLY_ROWS = 64  # up to which the attention of rows that share nothing starts early
SHARED_QUERIES = 32  # queries of an item whose pages several rows share


def shared_rows(groups: int) -> int:
    """Most rows whose shared pages one item reads, for G query heads a key/value head.

    >>> shared_rows(6), shared_rows(1), shared_rows(64)
    (5, 32, 1)
    """
    return max(1, SHARED_QUERIES // groups)


def common_pages(table_RM: Pages, pages_R: Ints) -> Ints:
    """How many leading pages each row has in common with the next, [R - 1].

    >>> common_pages(np.array([[1, 2, 3], [1, 2, 4], [5, 2, 0]], np.int32), np.array([3, 3, 2]))
    array([2, 0])
    """
    if len(table_RM) < 2:
        return np.zeros(0, np.int64)
    differ = table_RM[:-1] != table_RM[1:]
    differ |= np.arange(table_RM.shape[1]) >= np.minimum(pages_R[:-1], pages_R[1:])[:, None]
    padded = np.concatenate([differ, np.ones((len(differ), 1), np.bool_)], axis=1)
    first: Ints = padded.argmax(axis=1)
    return first


def groups_of(common: Ints, rows: int, most: int) -> list[tuple[int, int, int]]:
    """(first row, rows, shared pages) over all rows in order; at most `most` rows are read together.

    >>> groups_of(np.array([9, 9, 0, 3]), 5, 8)
    [(0, 3, 9), (3, 1, 0), (4, 1, 0)]
    """
    groups, start = [], 0
    while start < rows:
        stop, shared = start + 1, 0
        while most > 1 and stop < rows and stop - start < most and common[stop - 1] >= MIN_SHARED:
            here = int(common[stop - 1])
            if shared and here < shared // 2:  # a far shorter beginning would cost the others more than it saves
                break
            shared = min(shared, here) if shared else here
            stop += 1
        groups.append((start, stop - start, shared))
        start = stop
    return groups


def piece(lengths_R: Ints, pieces: int, least: int) -> int:
    """The fewest tokens a piece, in whole pages and at least `least`, of which rows of these lengths take at most so
    many pieces; `cut` gives each row one.

    >>> piece(np.array([4096] * 64), 396, 256), piece(np.array([9000, 300]), 10, 256), piece(np.array([70, 40]), 1, 32)
    (608, 928, 96)
    """
    low, high = pages_for(least), max(pages_for(least), pages_for(int(lengths_R.max())))
    while low < high:
        middle = (low + high) // 2
        if int((lengths_R // (middle * PAGE)).clip(1).sum()) <= pieces:
            high = middle
        else:
            low = middle + 1
    return low * PAGE


def cut(groups: list[tuple[int, int, int]], lengths_R: Ints, chunk: int) -> Items:
    """The items of rows of these lengths (the newest token included), `chunk` tokens each, in whole pages.

    >>> items = cut([(0, 2, 8), (2, 1, 0)], np.array([300, 260, 10]), 256)
    >>> items.shared_I5.tolist(), items.single_I5.tolist()[:1], items.splits_R.tolist()
    ([[0, 2, 0, 256, 0]], [[0, 1, 256, 1073741824, 1]], [2, 2, 1])
    """
    chunk = pages_for(chunk) * PAGE
    single: list[tuple[int, int, int, int, int]] = []
    shared_items: list[tuple[int, int, int, int, int]] = []
    splits_R = np.zeros(len(lengths_R), np.int32)
    for first, rows, pages in groups:
        own = pages * PAGE
        starts = range(0, own, chunk)
        shared_items += [(first, rows, s, min(s + chunk, own), i) for i, s in enumerate(starts)]
        for row in range(first, first + rows):
            length, split = int(lengths_R[row]), len(starts)
            count = max(1, (length - own) // chunk)
            each = pages_for(-(-(length - own) // count)) * PAGE
            for start in range(own, max(length, own + 1), each):
                end = start + each
                single.append((row, 1, start, end if end < length else ENDLESS, split))
                split += 1
            splits_R[row] = split
    single_I5, shared_I5 = (np.array(items, np.int32).reshape(-1, 5) for items in (single, shared_items))
    return Items(single_I5, shared_I5, splits_R)
