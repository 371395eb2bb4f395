"""Keys and values in equal slots, one a row, and the decode attention that reads them: what the sampler uses on a CPU.

Shapes: R rows, L cached positions, H query heads, K key/value heads, G = H / K, D head size, P prefilled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnrl.attention.interface import Layer
from attnrl.attention.pages import Ints, LayerShape
from attnrl.attention.scores import additive, dense, fused

ROW_BLOCK = 16  # rows that attend over one span on CPU

Blocks = tuple[
    tuple[int, int, int], ...
]  # (first row, row after the last, positions they attend over), all rows in order


class KVCache:
    """Keys and values of up to `rows` running rows: per layer [R, K, L, D], zeros at first.

    Zeros and not whatever memory held: a masked position still meets a product, and NaN times 0 is NaN.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = tuple(shapes)
        self.rows = rows
        self.capacity = capacity
        self.keys = [torch.zeros(rows, s.kv_heads, capacity, s.key_dim, dtype=dtype, device=device) for s in shapes]
        self.values = [torch.zeros(rows, s.kv_heads, capacity, s.value_dim, dtype=dtype, device=device) for s in shapes]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.keys + self.values)

    def grown(self, capacity: int, rows: int, used: int) -> KVCache:
        """A cache of another capacity that holds the first `used` positions of this one's first `rows` rows."""
        like = self.keys[0]
        bigger = KVCache(self.shapes, self.rows, capacity, like.dtype, like.device)
        for old, new in zip(self.keys + self.values, bigger.keys + bigger.values, strict=True):
            new[:rows, :, :used] = old[:rows, :, :used]
        return bigger

    def move(self, source: Ints, target: Ints, used: int) -> None:
        """Copies the first `used` positions of rows `source` to rows `target`."""
        device = self.keys[0].device
        src, dst = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
        for tensor in self.keys + self.values:
            tensor[dst, :, :used] = tensor[src, :, :used]

    def fill(self, rows: Ints, positions: Ints, tokens: Ints, keys: list[Tensor], values: list[Tensor]) -> None:
        """Writes token `tokens[i]` of the prefilled keys and values [P, K, D] to (rows[i], positions[i])."""
        device = self.keys[0].device
        row, position, token = (torch.from_numpy(a).to(device) for a in (rows, positions, tokens))
        for cached, fresh in zip(self.keys + self.values, keys + values, strict=True):
            cached[row, :, position] = fresh[token]


class DecodeAttention:
    """One token a row: writes its key and value at the row's length, attends to all positions up to there.

    Queries of one K/V head are taken together ([R, K, G, D]) instead of repeating keys and values G times.
    Masks depend on lengths and window alone, so the first layer of a step builds them for all.
    Each block of rows attends over a span of its own, longer than any of its lengths.
    """

    def __init__(self, cache: KVCache, lengths_R: Tensor, blocks: Blocks) -> None:
        self.cache = cache
        self.lengths_R = lengths_R
        self.blocks = blocks
        self.span = max(span for _, _, span in blocks)
        self._masks: dict[int | None, Tensor] = {}
        self._slots: dict[int, Tensor] = {}

    def _mask_R11L(self, window: int | None, dtype: torch.dtype) -> Tensor:
        mask = self._masks.get(window)
        if mask is None:
            positions_L = torch.arange(self.span, device=self.lengths_R.device)
            newest_R1 = self.lengths_R[:, None]
            allowed_RL = positions_L <= newest_R1
            if window is not None:
                allowed_RL &= positions_L > newest_R1 - window
            mask = self._masks[window] = additive(allowed_RL, dtype)[:, None, None]
        return mask

    def _slots_RK(self, kv_heads: int) -> Tensor:
        """Where each row's new key goes in the cache flattened to [R * K * L, D]."""
        slots = self._slots.get(kv_heads)
        if slots is None:
            heads = torch.arange(self.lengths_R.shape[0] * kv_heads, device=self.lengths_R.device)
            first = heads * self.cache.capacity
            slots = self._slots[kv_heads] = (first.view(-1, kv_heads) + self.lengths_R[:, None]).view(-1)
        return slots

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, _, dim = q.shape
        kv_heads = k.shape[1]
        keys, values = self.cache.keys[layer.index], self.cache.values[layer.index]
        slots = self._slots_RK(kv_heads)
        keys.view(-1, dim).index_copy_(0, slots, k.reshape(-1, dim))
        values.view(-1, v.shape[3]).index_copy_(0, slots, v.reshape(-1, v.shape[3]))
        q_RKGD = q.reshape(rows, kv_heads, heads // kv_heads, dim)
        mask = self._mask_R11L(layer.window, q.dtype)
        # On CPU the fused kernel is made for many queries: for the one to eight here, two batched products and a
        # softmax take a half to two thirds of its time.
        read = dense if q.device.type == "cpu" and q.dtype == torch.float32 else fused
        parts = [
            read(q_RKGD[a:b], keys[a:b, :, :span], values[a:b, :, :span], mask[a:b, :, :, :span], layer)
            for a, b, span in self.blocks
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(rows, 1, heads, v.shape[3])


def row_blocks(lengths_R: Ints, capacity: int) -> Blocks:
    """Blocks of `ROW_BLOCK` rows with spans just over their longest length; neighbours with the same span are joined.

    >>> import numpy as np
    >>> row_blocks(np.array([40] * 16 + [9] * 33), 128)
    ((0, 16, 48), (16, 49, 16))
    """
    blocks: list[tuple[int, int, int]] = []
    for start in range(0, len(lengths_R), ROW_BLOCK):
        stop = min(start + ROW_BLOCK, len(lengths_R))
        span = min(capacity, (int(lengths_R[start:stop].max()) // 16 + 1) * 16)
        if blocks and blocks[-1][2] == span:
            start = blocks.pop()[0]
        blocks.append((start, stop, span))
    return tuple(blocks)
