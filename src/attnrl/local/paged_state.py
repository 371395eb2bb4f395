"""The device's side of rows that hold pages: their state, and the pieces into which a step's attention is cut.

Shapes: R rows of the step, C steps between two looks from the host, M pages of the longest row, I items of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnrl.attention.paged import PagedDecode, has_kernels, places, starts_early
from attnrl.attention.pages import (
    EARLY_ROWS,
    PAGE,
    Ints,
    LayerShape,
    PagePool,
    Pages,
    common_pages,
    cut,
    groups_of,
    piece,
    sent,
    shared_rows,
)
from attnrl.local.draw import uniforms
from attnrl.local.memory import Memory
from attnrl.local.rows import RowTable
from attnrl.local.stats import length_bucket, step_rows

PROGRAMS = 528  # pieces of attention that keep all multiprocessors of a large GPU busy, a few each
ROOM = 6  # pieces that a multiprocessor holds at once, at head size 128 in half precision
MIN_CHUNK = 256  # tokens of the shortest piece
REPLAN = 8  # looks after which the pieces are cut anew, since rows have grown


def room(device: torch.device) -> int:
    """Pieces of attention that the device holds at once, where they start early; else 0."""
    return ROOM * torch.cuda.get_device_properties(device).multi_processor_count if starts_early(device) else 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a captured step depends on, besides the sampling."""

    rows: int
    single: int  # items
    shared: int
    splits: int  # pieces that a row may have; 1: the pieces need no joining


class PagedState:
    """Room for `rows` rows of `columns` pages. Captured steps hold its addresses: they go when it goes."""

    def __init__(self, model: Any, layers: Sequence[LayerShape], rows: int, columns: int, check_every: int) -> None:
        device = self.device = next(model.parameters()).device
        self.check_every = check_every
        config = model.config.get_text_config()
        self._group_size = max(1, int(config.num_attention_heads) // min(layer.kv_heads for layer in layers))
        self._kv_heads = max(layer.kv_heads for layer in layers)
        self._value_dim = max(layer.value_dim for layer in layers)
        self.table_RM = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.tokens_R, self.lengths_R = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.request_R, self._newest_N = torch.zeros(2, 0, dtype=torch.int64, device=device)
        self.uniform_RC, self.logprobs_RC = torch.zeros(2, rows, check_every, dtype=torch.float32, device=device)
        self.ids_RC = torch.zeros(rows, check_every, dtype=torch.int64, device=device)
        self.column_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._room = room(device)
        self._most_items = 4 * rows + 2 * max(PROGRAMS, self._room)
        self._single_I5, self._shared_I5 = torch.zeros(2, self._most_items, 5, dtype=torch.int32, device=device)
        self._splits_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self.scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.shape = Shape(0, 0, 0, 1)
        self.memory: Memory | None = None  # of a model that remembers, from its first prefill on
        self.spared = 0  # tokens that rows need not hold, since their neighbour does
        self.look = 0  # 0: the rows are others than at the last look

    def open(self, requests: int) -> None:
        """Starts a call of so many requests."""
        self._newest_N = torch.zeros(requests, dtype=torch.int64, device=self.device)
        self.look = 0

    def drawn(self, request_R: Tensor, tokens_R: Tensor) -> None:
        """Keeps the newest tokens of these requests: the host knows them later."""
        self._newest_N.index_copy_(0, request_R, tokens_R)

    def remember(self, rows: Ints, memory: Memory) -> None:
        """These rows go on from where `memory`'s one row is."""
        if self.memory is None:
            self.memory = memory.room(len(self.table_RM))
        self.memory.put(sent(rows, self.device), memory)

    def place(self, table: RowTable, pages_RM: Pages, held_R: Ints) -> None:
        """Sets the state from the host's: the running rows and the pages that each holds."""
        running, device = table.count, self.device
        rows = step_rows(running)
        columns = int(held_R.max())
        self.table_RM[:running, :columns] = sent(pages_RM[:, :columns], device)
        self.table_RM[running:rows] = 0
        self.request_R = sent(table.request[:running], device)
        self.tokens_R[:running] = self._newest_N[self.request_R]
        self.lengths_R[:running], streams_R, drawn_R = sent(table.state(), device)
        self.lengths_R[running:rows] = 0
        coming_RC = drawn_R[:, None] + torch.arange(self.check_every, device=device)
        self.uniform_RC[:running] = uniforms(streams_R[:, None], coming_RC)
        self.column_1.zero_()
        if self.look % REPLAN == 0 or rows != self.shape.rows:
            self._plan_items(rows, table.length[:running] + 1, pages_RM, held_R)
        self.look += 1

    def _plan_items(self, rows: int, lengths: Ints, pages_RM: Pages, held_R: Ints) -> None:
        """Cuts the attention of the coming steps into pieces of about equal size."""
        common = common_pages(pages_RM[:, : int(held_R.max())], held_R)
        self.spared = PAGE * int(common.sum())
        if not has_kernels(self.device):
            self.shape = Shape(rows, 0, 0, 1)
            return
        groups = groups_of(common, len(lengths), shared_rows(self._group_size))
        spared = sum((count - 1) * shared * PAGE for _, count, shared in groups)
        work = (int(lengths.sum()) - spared) * self._kv_heads
        chunk = max(MIN_CHUNK, -(-work // (PROGRAMS * 64)) * 64)
        if self._room and rows <= EARLY_ROWS and not spared:
            # Started early, fewer pieces than there is room for are dealt out unevenly.
            chunk = min(chunk, piece(lengths, self._room // self._kv_heads, MIN_CHUNK))
        items = cut(groups, lengths, chunk)
        while max(len(items.single_I5), len(items.shared_I5)) > self._most_items:
            chunk *= 2
            items = cut(groups, lengths, chunk)
        splits = 1 << (int(items.splits_R.max()) - 1).bit_length()
        single = min(self._most_items, length_bucket(max(rows, len(items.single_I5))))
        shared = min(self._most_items, length_bucket(len(items.shared_I5))) if len(items.shared_I5) else 0
        self.shape = Shape(rows, single, shared, splits)
        self._single_I5[:single] = 0
        self._single_I5[: len(items.single_I5)] = sent(items.single_I5, self.device)
        self._shared_I5[:shared] = 0
        self._shared_I5[: len(items.shared_I5)] = sent(items.shared_I5, self.device)
        self._splits_R[:rows] = 0
        self._splits_R[: len(lengths)] = sent(items.splits_R, self.device)

    def attention(self, pool: PagePool, last: int) -> PagedDecode:
        """The step's attention, over the state as it is on the device; no row stands behind position `last`."""
        shape = self.shape
        rows = shape.rows
        lengths_R = self.lengths_R[:rows]
        table_RM = self.table_RM[:rows]
        placed = places(table_RM, lengths_R, last)
        scratch, splits_R = None, None
        if shape.splits > 1:
            splits_R = self._splits_R[:rows]
            scratch = self.scratch.get((rows, shape.splits))
            if scratch is None:
                size = (rows, shape.splits, self._group_size * self._kv_heads, self._value_dim)
                part = torch.empty(size, dtype=torch.float32, device=self.device)
                scratch = self.scratch[rows, shape.splits] = (part, torch.empty_like(part[..., 0]))
        shared_I5 = self._shared_I5[: shape.shared] if shape.shared else None
        single_I5 = self._single_I5[: shape.single]
        return PagedDecode(pool, table_RM, lengths_R, *placed, single_I5, shared_I5, splits_R, scratch)
