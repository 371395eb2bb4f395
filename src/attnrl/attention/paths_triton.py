"""Attention of packed queries along paths of pages in Triton: what prefill runs on.

Shapes: T packed queries, H query heads, K key/value heads, G = H / K, D and E head sizes of keys and values, M pages of
the longest path, J paths, B query blocks, BN keys of a tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnrl.attention.fitting import launch
from attnrl.attention.pages import PAGE
from attnrl.attention.triton_parts import precision, scales, turn, with_sink

Tile = tuple[int, int, int]  # keys a turn, warps, stages


@triton.jit(do_not_specialize=["table_pitch", "window"])
def _paths(
    Q, KEYS, VALUES, TABLE, BLOCKS, OUT, scale2, q_pitch, out_pitch, table_pitch, window,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    inner2=None, SINKS=None,
):  # fmt: skip
    block = BLOCKS + tl.program_id(1) * 4
    head = tl.program_id(0)
    kv = head // G
    first = tl.load(block).to(tl.int64)  # of the packed queries
    count = tl.load(block + 1)
    position = tl.load(block + 2)  # of the first query on its path
    table = TABLE + tl.load(block + 3).to(tl.int64) * table_pitch
    m = tl.arange(0, BM)
    real_m = m < count
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    q_place = (first + m)[:, None] * q_pitch + head * D + d
    q = tl.load(Q + q_place, mask=real_m[:, None] & (d < D), other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BE], tl.float32)
    start = 0
    clear = (position + 1) // BN * BN  # keys before this are seen by every query
    if WINDOW:
        start = tl.maximum(0, (position + 1 - window) // BN * BN)
        clear = start
    end = position + count
    for at in range(start, clear, BN):
        n = at + tl.arange(0, BN)
        slot = (tl.load(table + n // PAGE).to(tl.int64) * K + kv) * PAGE + n % PAGE
        top, total, acc = turn(
            q, KEYS, VALUES, slot, None, None, top, total, acc, scale2, inner2, D, E, BD, BE, False, PRECISION
        )
    for at in range(clear, end, BN):
        n = at + tl.arange(0, BN)
        here = n < end
        slot = (tl.load(table + n // PAGE, mask=here, other=0).to(tl.int64) * K + kv) * PAGE + n % PAGE
        seen = here & (n <= (position + m)[:, None])
        if WINDOW:
            seen = seen & (n > (position + m)[:, None] - window)
        top, total, acc = turn(
            q, KEYS, VALUES, slot, here, seen, top, total, acc, scale2, inner2, D, E, BD, BE, True, PRECISION
        )
    if SINKS is not None:
        total = with_sink(total, top * scale2, tl.load(SINKS + head))
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = (first + m)[:, None] * out_pitch + head * E + e
    tl.store(OUT + place, out.to(OUT.dtype.element_ty), mask=real_m[:, None] & (e < E))


def down_from(tile: Tile) -> list[Tile]:
    """The tile and those with fewer keys a turn, then with one stage."""
    keys, warps, stages = tile
    return [tile, *((n, warps, stages) for n in (32, 16) if n < keys), (16, warps, 1)]


def paths(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_JM: Tensor,
    blocks_B4: Tensor,
    block: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    tile: Tile = (64, 4, 3),
) -> Tensor:
    """Causal attention of packed queries along their paths of pages: [T, H * E].

    A block is (first packed query, queries, position of the first, path); it has at most `block` queries.
    """
    tokens, heads, dim = q_THD.shape
    kv_heads, value_dim = keys.shape[1], values.shape[3]
    out_TW = q_THD.new_empty(tokens, heads * value_dim)
    wide, wide_value = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    scale2, inner2 = scales(scale, softcap)

    def with_tile(tile: Tile) -> None:
        _paths[(heads, blocks_B4.shape[0])](
            q_THD, keys, values, table_JM, blocks_B4, out_TW, scale2, q_THD.stride(0), out_TW.stride(0),
            table_JM.stride(0), window or 0, kv_heads, heads // kv_heads, dim, value_dim, wide, wide_value, block,
            tile[0], PAGE, window is not None, precision(q_THD.dtype), inner2, sinks_H, num_warps=tile[1],
            num_stages=tile[2],
        )  # fmt: skip

    launch((q_THD.device, q_THD.dtype, wide, wide_value, block), down_from(tile), with_tile)
    return out_TW
