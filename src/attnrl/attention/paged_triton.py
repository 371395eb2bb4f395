"""Attention of one token a row over its pages in Triton: what a decode step runs on.

Shapes: R rows, H query heads, K key/value heads, G = H / K, D and E head sizes of keys and values, S splits of a row,
M pages of the longest row, I items.

Each key is read once for the G heads of its group and for all rows of an item, and each row's own length only:
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
from attnrl.attention.triton_parts import log_sum, precision, scales, turn, with_sink

WARP_OUTPUTS = 2048  # numbers of a result that one warp can hold beside its tiles


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


@triton.jit
def _ask(KEYS, VALUES, page, kv, K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr):
    """Asks for the keys and values of a page."""
    slot = (page.to(tl.int64) * K + kv) * PAGE + tl.arange(0, PAGE)
    fetch(KEYS + slot * D, D * (KEYS.dtype.element_ty.primitive_bitwidth // 8))
    fetch(VALUES + slot * E, E * (VALUES.dtype.element_ty.primitive_bitwidth // 8))


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
    start, stop, split = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
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
        _ask(KEYS, VALUES, page, kv, K, D, E, PAGE)
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
        top, total, acc = turn(
            q, KEYS, VALUES, slot, None, None, top, total, acc, scale2, inner2, D, E, BD, BE, False, PRECISION
        )
    for at in tl.range(clear, end, PAGE, num_stages=None if WINDOW else 1):
        n = at + place_n
        here = n < end
        slot = (tl.load(table + at // PAGE).to(tl.int64) * K + kv) * PAGE + place_n
        seen = here & (n <= newest_m[:, None])
        if WINDOW:
            seen = seen & (n > newest_m[:, None] - window)
        top, total, acc = turn(
            q, KEYS, VALUES, slot, here, seen, top, total, acc, scale2, inner2, D, E, BD, BE, True, PRECISION
        )
    if SINKS is not None and DIRECT:
        total = with_sink(total, top * scale2, tl.load(SINKS + head_m))
    pass_on(EARLY)  # not before: what starts meanwhile takes the place of pieces
    out = acc * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    inside = real_m[:, None] & (e < E)
    if DIRECT:
        place = row_m[:, None] * out_pitch + head_m[:, None] * E + e
        tl.store(OUT + place, out.to(OUT.dtype.element_ty), mask=inside)
    else:
        part = (row_m * splits + split) * H + head_m
        tl.store(PART + part[:, None] * E + e, out, mask=inside)
        tl.store(LSE + part, log_sum(top, total, scale2), mask=real_m)


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
        total = with_sink(total, top, tl.load(SINKS + head))
    out = acc / tl.maximum(total, 1e-30)
    tl.store(OUT + row * out_pitch + head * E + e, out.to(OUT.dtype.element_ty), mask=e < E)


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
    scale2, inner2 = scales(scale, softcap)
    starts = early(q_RHD.device) if rows <= EARLY_ROWS and shared_I5 is None else {}

    def read(items: Tensor, high: int) -> None:
        def with_stages(stages: int) -> None:
            _decode[(items.shape[0], kv_heads)](
                q_RHD, keys, values, table_RM, lengths_R, items, out_RW, part, lse, scale2, q_RHD.stride(0),
                out_RW.stride(0), table_RM.stride(0), window or 0, splits, heads, kv_heads, groups, dim, value_dim,
                wide, wide_value, high, PAGE, direct, window is not None, precision(q_RHD.dtype),
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
