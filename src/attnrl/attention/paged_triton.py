"""Attention over pages in Triton: one token a row (decode) and many queries a path (prefill).

Shapes: R rows, T packed queries, H query heads, K key/value heads, G = H / K, D and E head sizes of keys and values,
S splits of a row, M pages of the longest row, B query blocks.

Decode reads each key once for the G heads of its group and for all rows of an item, and each row's own length only:
`pages.Items` cuts the rows into pieces of about equal size, so that one long row or eight keep all multiprocessors
busy. Pieces of a row are joined by a second kernel, which rows of one piece do not need.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnrl.attention.early import early, fetch, follow, pass_on, wait
from attnrl.attention.fitting import launch
from attnrl.attention.pages import EARLY_ROWS, PAGE, SHARED_QUERIES

LOG2E = 1.4426950408889634
# Gluon is experimental: only the Triton versions that compile our kernels are trusted with it.
GLUON = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 10)
Tile = tuple[int, int, int]  # keys a turn, warps, stages
WARP_OUTPUTS = 2048  # numbers of a result that one warp can hold beside its tiles


@triton.jit
def _tile(POOL, slot_n, real_n, D: tl.constexpr, BD: tl.constexpr, MASK: tl.constexpr):
    d = tl.arange(0, BD)
    place = slot_n[:, None] * D + d
    if MASK:
        return tl.load(POOL + place, mask=real_n[:, None] & (d < D), other=0.0)
    elif D == BD:
        return tl.load(POOL + place)
    else:
        return tl.load(POOL + place, mask=d < D, other=0.0)


@triton.jit
def _with_sink(total, top2, sinks):
    """The softmax's sum with the sinks' logits in it; `top2`: the highest score, times log2(e)."""
    base = tl.where(top2 == -float("inf"), 0.0, top2)
    return total + tl.exp2(sinks.to(tl.float32) * 1.4426950408889634 - base)


@triton.jit
def _turn(
    q, KEYS, VALUES, slot_n, real_n, seen_mn, top, total, acc, scale2, inner2,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values, added to the softmax so far; without MASK every query sees all of it."""
    k = _tile(KEYS, slot_n, real_n, D, BD, MASK)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if inner2 is not None:
        x = 1.0 - 2.0 / (tl.exp2(x * inner2) + 1.0)  # the tanh of the score over the soft-cap
    if MASK:
        x = tl.where(seen_mn, x, -float("inf"))
    new_top = tl.maximum(top, tl.max(x, 1))
    base = new_top * scale2
    if MASK:
        base = tl.where(new_top == -float("inf"), 0.0, base)
    p = tl.exp2(x * scale2 - base[:, None])
    keep = tl.exp2(top * scale2 - base)
    total = total * keep + tl.sum(p, 1)
    v = _tile(VALUES, slot_n, real_n, E, BE, MASK)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _log_sum(top, total, scale2):
    return tl.where(total > 0.0, top * scale2 + tl.log2(tl.where(total > 0.0, total, 1.0)), -float("inf"))


@triton.jit
def _span(newest_m, start, stop, window, PAGE: tl.constexpr, WINDOW: tl.constexpr):
    """Of an item: its first token, the first of a page that not every row sees the whole of, and its end."""
    end = tl.minimum(stop, tl.max(newest_m, 0) + 1)
    shortest = tl.min(newest_m, 0) + 1
    clear = start + tl.maximum(tl.minimum(end, shortest) - start, 0) // PAGE * PAGE
    if WINDOW:
        start = tl.maximum(start, (shortest - window) // PAGE * PAGE)
        clear = start
    return start, clear, end


# Numbers that change from call to call must not make Triton compile once more.
@triton.jit(do_not_specialize=["table_pitch", "window", "splits"])
def _decode(
    Q, KEYS, VALUES, TABLE, LENGTHS, ITEMS, OUT, PART, LSE, scale2, q_pitch, out_pitch, table_pitch, window, splits,
    H: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, PAGE: tl.constexpr, DIRECT: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr = False, inner2=None, SINKS=None,
):  # fmt: skip
    item = ITEMS + tl.program_id(0) * 5
    kv = tl.program_id(1)
    rows = tl.load(item + 1)
    if rows == 0:  # it makes room for others: it need not wait, since some do
        return
    first = tl.load(item).to(tl.int64)
    start = tl.load(item + 2)
    stop = tl.load(item + 3)
    split = tl.load(item + 4)
    m = tl.arange(0, BM)
    real_m = m < rows * G
    row_m = first + tl.where(real_m, m // G, 0)
    head_m = kv * G + m % G
    newest_m = tl.load(LENGTHS + row_m).to(tl.int32)  # the newest token's position
    start, clear, end = _span(newest_m, start, stop, window, PAGE, WINDOW)
    table = TABLE + first * table_pitch
    place_n = tl.arange(0, PAGE)
    page = tl.load(table + start // PAGE, mask=start < clear, other=0)
    if EARLY and not WINDOW and D % 8 == 0 and E % 8 == 0:
        slot = (page.to(tl.int64) * K + kv) * PAGE + place_n
        fetch(KEYS + slot * D, D * (KEYS.dtype.element_ty.primitive_bitwidth // 8))
        fetch(VALUES + slot * E, E * (VALUES.dtype.element_ty.primitive_bitwidth // 8))
    wait(EARLY)
    d = tl.arange(0, BD)
    e = tl.arange(0, BE)
    q = tl.load(Q + row_m[:, None] * q_pitch + head_m[:, None] * D + d, mask=real_m[:, None] & (d < D), other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BE], tl.float32)
    for at in range(start, clear, PAGE):
        slot = (page.to(tl.int64) * K + kv) * PAGE + place_n
        # The next page's number is brought a turn early: its keys can be asked for without waiting for it.
        page = tl.load(table + at // PAGE + 1, mask=at + PAGE < clear, other=0)
        top, total, acc = _turn(
            q, KEYS, VALUES, slot, None, None, top, total, acc, scale2, inner2, D, E, BD, BE, False, PRECISION
        )
    for at in tl.range(clear, end, PAGE, num_stages=None if WINDOW else 1):
        n = at + place_n
        here = n < end
        slot = (tl.load(table + at // PAGE).to(tl.int64) * K + kv) * PAGE + place_n
        seen = here & (n <= newest_m[:, None])
        if WINDOW:
            seen = seen & (n > newest_m[:, None] - window)
        top, total, acc = _turn(
            q, KEYS, VALUES, slot, here, seen, top, total, acc, scale2, inner2, D, E, BD, BE, True, PRECISION
        )
    if SINKS is not None and DIRECT:
        total = _with_sink(total, top * scale2, tl.load(SINKS + head_m))
    pass_on(EARLY)  # not before: what starts meanwhile takes the place of pieces
    out = acc * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    inside = real_m[:, None] & (e < E)
    if DIRECT:
        place = row_m[:, None] * out_pitch + head_m[:, None] * E + e
        tl.store(OUT + place, out.to(OUT.dtype.element_ty), mask=inside)
    else:
        part = (row_m * splits + split) * H + head_m
        tl.store(PART + part[:, None] * E + e, out, mask=inside)
        tl.store(LSE + part, _log_sum(top, total, scale2), mask=real_m)


@triton.jit(do_not_specialize=["splits"])
def _join(
    PART, LSE, SPLITS, OUT, out_pitch, splits,
    H: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr, EARLY: tl.constexpr = False,
    SINKS=None,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    count = tl.load(SPLITS + row)  # as the host wrote it
    follow(EARLY)
    e = tl.arange(0, BE)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([BE], tl.float32)
    for at in range(0, count, BS):
        s = at + tl.arange(0, BS)
        part = (row * splits + s) * H + head
        lse = tl.load(LSE + part, mask=s < count, other=-float("inf"))
        x = tl.load(PART + part[:, None] * E + e, mask=(s < count)[:, None] & (e < E), other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp2(lse - base)
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weight, 0)
        acc = acc * keep + tl.sum(x * weight[:, None], 0)
        top = new_top
    if SINKS is not None:
        total = _with_sink(total, top, tl.load(SINKS + head))
    out = acc / tl.maximum(total, 1e-30)
    tl.store(OUT + row * out_pitch + head * E + e, out.to(OUT.dtype.element_ty), mask=e < E)


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
        top, total, acc = _turn(
            q, KEYS, VALUES, slot, None, None, top, total, acc, scale2, inner2, D, E, BD, BE, False, PRECISION
        )
    for at in range(clear, end, BN):
        n = at + tl.arange(0, BN)
        here = n < end
        slot = (tl.load(table + n // PAGE, mask=here, other=0).to(tl.int64) * K + kv) * PAGE + n % PAGE
        seen = here & (n <= (position + m)[:, None])
        if WINDOW:
            seen = seen & (n > (position + m)[:, None] - window)
        top, total, acc = _turn(
            q, KEYS, VALUES, slot, here, seen, top, total, acc, scale2, inner2, D, E, BD, BE, True, PRECISION
        )
    if SINKS is not None:
        total = _with_sink(total, top * scale2, tl.load(SINKS + head))
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = (first + m)[:, None] * out_pitch + head * E + e
    tl.store(OUT + place, out.to(OUT.dtype.element_ty), mask=real_m[:, None] & (e < E))


@cache
def _side(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Kernels launched within it run beside those launched after it, until `_together`; also in a captured graph."""
    side = _side(device)
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def _together(device: torch.device) -> None:
    side = _side(device)
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)


def _scales(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """What turns products into scores times log2(e), and of a soft-cap what comes before its tanh."""
    if softcap is None:
        return scale * LOG2E, None
    return softcap * LOG2E, 2 * LOG2E * scale / softcap


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def down_from(tile: Tile) -> list[Tile]:
    """The tile and those with fewer keys a turn, then with one stage."""
    keys, warps, stages = tile
    return [tile, *((n, warps, stages) for n in (32, 16) if n < keys), (16, warps, 1)]


# A plain launch: it is the first of a captured step, which has no kernel before it to follow.
@triton.jit(do_not_specialize=["rows", "table_pitch", "last"])
def _places(TABLE, LENGTHS, SLOTS, POSITIONS, rows, table_pitch, last, BR: tl.constexpr, PAGE: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    here = r < rows
    length = tl.load(LENGTHS + r, mask=here, other=0)
    page = tl.load(TABLE + r.to(tl.int64) * table_pitch + length // PAGE, mask=here, other=0)
    tl.store(SLOTS + r, page.to(tl.int64) * PAGE + length % PAGE, mask=here)
    tl.store(POSITIONS + r, tl.minimum(length, last), mask=here)


def places(table_RM: Tensor, lengths_R: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Slot and position of each row's new token; see `paged.places`."""
    rows = len(lengths_R)
    slots_R, positions_R = torch.empty_like(lengths_R), torch.empty_like(lengths_R)
    _places[(triton.cdiv(rows, 128),)](
        table_RM, lengths_R, slots_R, positions_R, rows, table_RM.stride(0), last, 128, PAGE, num_warps=4
    )
    return slots_R, positions_R


def decode(
    q_RHD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_RM: Tensor,
    lengths_R: Tensor,
    single_I5: Tensor,
    shared_I5: Tensor | None,
    splits_R: Tensor | None,
    scratch: tuple[Tensor, Tensor] | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    tile: tuple[int, int] = (1, 3),
) -> Tensor:
    """Attention of one query a row over its pages: [R, H * E]. Without `splits_R` every row is one item.

    `scratch` holds the pieces, [R, S, H, E] and [R, S, H] in float32. `tile`: warps, at least, and stages.
    """
    rows, heads, dim = q_RHD.shape
    kv_heads, value_dim = keys.shape[1], values.shape[3]
    groups = heads // kv_heads
    out_RW = q_RHD.new_empty(rows, heads * value_dim)
    direct = splits_R is None
    part, lse = (out_RW, out_RW) if scratch is None else scratch
    splits = 1 if scratch is None else part.shape[1]
    wide, wide_value = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    queries = max(16, triton.next_power_of_2(groups))
    tall = max(queries, SHARED_QUERIES)
    scale2, inner2 = _scales(scale, softcap)
    starts = early(q_RHD.device) if rows <= EARLY_ROWS and shared_I5 is None else {}

    def read(items: Tensor, high: int) -> None:
        def with_stages(stages: int) -> None:
            _decode[(items.shape[0], kv_heads)](
                q_RHD, keys, values, table_RM, lengths_R, items, out_RW, part, lse, scale2, q_RHD.stride(0),
                out_RW.stride(0), table_RM.stride(0), window or 0, splits, heads, kv_heads, groups, dim, value_dim,
                wide, wide_value, high, PAGE, direct, window is not None, _precision(q_RHD.dtype),
                inner2=inner2, SINKS=sinks_H,
                num_warps=max(tile[0], min(8, high * wide_value // WARP_OUTPUTS)), num_stages=stages, **starts,
            )  # fmt: skip

        launch((q_RHD.device, q_RHD.dtype, wide, wide_value, high), range(tile[1], 0, -1), with_stages)

    if shared_I5 is None:
        read(single_I5, queries)
    else:
        with _aside(q_RHD.device):
            read(single_I5, queries)
        read(shared_I5, tall)
        _together(q_RHD.device)
    if splits_R is not None:
        _join[(rows, heads)](
            part, lse, splits_R, out_RW, out_RW.stride(0), splits, heads, value_dim, wide_value, 8, SINKS=sinks_H,
            num_warps=1, **starts,
        )  # fmt: skip
    return out_RW


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
    scale2, inner2 = _scales(scale, softcap)

    def with_tile(tile: Tile) -> None:
        _paths[(heads, blocks_B4.shape[0])](
            q_THD, keys, values, table_JM, blocks_B4, out_TW, scale2, q_THD.stride(0), out_TW.stride(0),
            table_JM.stride(0), window or 0, kv_heads, heads // kv_heads, dim, value_dim, wide, wide_value, block,
            tile[0], PAGE, window is not None, _precision(q_THD.dtype), inner2, sinks_H, num_warps=tile[1],
            num_stages=tile[2],
        )  # fmt: skip

    launch((q_THD.device, q_THD.dtype, wide, wide_value, block), down_from(tile), with_tile)
    return out_TW
