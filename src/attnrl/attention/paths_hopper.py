"""Attention of packed queries along paths for Hopper GPUs, scheduled by hand in Gluon.

A path's keys and values lie in pages (`paths`, as `paths_triton.paths`) or end to end (`packed`).

Half precision, head sizes 64 and 128, no window. Two warpgroups read each key and value of a tile once from shared
memory, each for 64 queries of one of two heads of a group; a warp of its own has the copy engine bring tiles ahead of
their use. While the tensor cores multiply the scores of a tile and the values of the tile before, the exponentials of
another are computed. A program takes one item after the other, so that the next one's first tiles come meanwhile.

Shapes: T packed queries, S keys end to end, H query heads, K key/value heads, G = H / K, D head size, M pages of the
longest path, J paths, B query blocks, BN keys of a tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnrl.attention import pages
from attnrl.attention.gluon_parts import copy_in, new_barriers, on_hopper, sync, view
from attnrl.attention.triton_parts import LOG2E

PAGE = gl.constexpr(pages.PAGE)
ROWS = gl.constexpr(64)  # queries of a warpgroup
HALF = gl.constexpr(64)  # columns of a copy: as wide as its swizzle
LN2 = gl.constexpr(1 / LOG2E)
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
REGISTERS = gl.constexpr(40)  # of the copying warp's threads; those that multiply share the rest


@gluon.jit
def _nth(turn):
    """The item of this program's turn: there and back again, as items get shorter."""
    return turn * gl.num_programs(0) + gl.program_id(0) + (turn & 1) * (gl.num_programs(0) - 1 - 2 * gl.program_id(0))


@gluon.jit
def _block(BLOCKS, item, items, WIDE: gl.constexpr):
    """First packed query, queries, position of the first and path of an item's block; behind the last item nothing."""
    row = BLOCKS + item // WIDE * 4
    here = item < items
    return (
        gl.load(row, mask=here, other=0),
        gl.load(row + 1, mask=here, other=0),
        gl.load(row + 2, mask=here, other=0),
        gl.load(row + 3, mask=here, other=0),
    )


@gluon.jit
def _heads(item, G: gl.constexpr, WIDE: gl.constexpr):
    """The key/value head of an item, its first head, and whether it has a second."""
    pairs: gl.constexpr = (G + 1) // 2
    kv = item % WIDE // pairs
    nth = item % pairs * 2
    return kv, kv * G + nth, nth + 1 < G


@gluon.jit
def _boxes(ring, LONG: gl.constexpr):
    """A ring's tiles [BN, D] as the boxes [LONG, 64] that they are made of: by slot, half of the columns, rows."""
    boxes: gl.constexpr = ring.shape[0] * ring.shape[1] * ring.shape[2] // (LONG * HALF)
    return view(ring, ring.dtype, [boxes, LONG, HALF], ring.layout)


@gluon.jit
def _bring(source, boxes, arrived, slot, rows, column, PARTS: gl.constexpr, D: gl.constexpr):
    """Start the copies of a tile's parts, from `column` on, into their slot of the ring."""
    mbarrier.expect(arrived, PARTS * boxes.shape[1] * D * 2)
    for half in gl.static_range(D // HALF):
        for i in gl.static_range(PARTS):
            box = boxes.index((slot * (D // HALF) + half) * PARTS + i)
            copy_in(source, [rows[i], column + half * HALF], arrived, box)


@gluon.jit
def _produce(
    sources, rings, barriers, TABLE, BLOCKS, table_pitch, items, turns, K: gl.constexpr, G: gl.constexpr,
    WIDE: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    """The warp that has the copy engine bring queries, and every tile of keys and values in turn."""
    queries, keys, values = sources
    q, k, v = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = barriers
    STAGES: gl.constexpr = k.shape[0]
    BN: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    LONG: gl.constexpr = keys.block_type.shape[0]
    PARTS: gl.constexpr = BN // LONG
    k_boxes = _boxes(k, LONG)
    v_boxes = _boxes(v, LONG)
    done = 0  # tiles of earlier items
    first, count, position, path = _block(BLOCKS, _nth(0), items, WIDE)
    for turn in range(turns):
        kv, head, _second = _heads(_nth(turn), G, WIDE)
        table = TABLE + path.to(gl.int64) * table_pitch
        start = 0 if PAGED else gl.load(table)
        column = 0 if PAGED else kv * D
        begin = first
        end = position + count
        tiles = gl.cdiv(end, BN)
        first, count, position, path = _block(BLOCKS, _nth(turn + 1), items, WIDE)
        for tile in range(tiles):
            slot = (done + tile) % STAGES
            free = ((done + tile) // STAGES & 1) ^ 1
            rows = ()
            for i in gl.static_range(PARTS):
                nth = tile * PARTS + i
                if PAGED:
                    rows += ((gl.load(table + nth, mask=nth * PAGE < end, other=0) * K + kv) * PAGE,)
                else:
                    rows += (start + nth * LONG,)
            mbarrier.wait(k_empty.index(slot), free)
            _bring(keys, k_boxes, k_full.index(slot), slot, rows, column, PARTS, D)
            if tile == 0:
                for w in gl.static_range(2):
                    mbarrier.wait(q_empty.index(w), (turn & 1) ^ 1)
                    mbarrier.expect(q_full.index(w), ROWS * D * 2)
                    copy_in(queries, [begin, (head + w) * D], q_full.index(w), q.index(w))
            mbarrier.wait(v_empty.index(slot), free)
            _bring(values, v_boxes, v_full.index(slot), slot, rows, column, PARTS, D)
        done += tiles


@gluon.jit
def _weigh(s, top, total, scale2, query, key, MASK: gl.constexpr):
    """exp2 of the scores, the new maximum, what earlier sums are worth by it, and the sums that a thread holds."""
    if MASK:
        s = gl.where(key[None, :] <= query[:, None], s, -float("inf"))
    new = gl.maximum(top, gl.max(s, 1))
    base = new * scale2
    x = gl.exp2(s * scale2 - base[:, None])
    keep = gl.exp2(top * scale2 - base)
    share = gl.sum(gl.reshape(x, [s.shape[0], s.shape[1] // 8, 8]), 1)
    worth = gl.convert_layout(keep, gl.SliceLayout(1, share.type.layout))
    return x, new, keep, total * worth[:, None] + share


@gluon.jit
def _clear(boxes, slot, at, end, PARTS: gl.constexpr, D: gl.constexpr):
    """Zero the values of a tile past `end`: what is not of the path may be NaN, and NaN times 0 is NaN.

    Both warpgroups do so, each before its own product: they write the same.
    """
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, PAGE, layout=gl.SliceLayout(1, wide))
    for i in gl.static_range(PARTS):
        if at + (i + 1) * PAGE > end:
            for half in gl.static_range(D // HALF):
                box = boxes.index((slot * (D // HALF) + half) * PARTS + i)
                x = box.load(wide)
                box.store(gl.where((at + i * PAGE + row < end)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    sync()


@gluon.jit
def _idle(barriers, done, tiles, swaps, w: gl.constexpr, STAGES: gl.constexpr):
    """A warpgroup without a head of its own gives queries and tiles back at once, and the baton when it comes."""
    _, q_empty, k_full, k_empty, v_full, v_empty, baton = barriers
    mbarrier.arrive(q_empty.index(w))
    for tile in range(tiles):
        slot = (done + tile) % STAGES
        phase = (done + tile) // STAGES & 1
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.arrive(k_empty.index(slot))
        if tile > 0:
            mbarrier.wait(baton.index(w), (swaps + tile - 1 & 1) ^ (1 - w))
            mbarrier.arrive(baton.index(1 - w))
        mbarrier.wait(v_full.index(slot), phase)
        mbarrier.arrive(v_empty.index(slot))


@gluon.jit
def _first_scores(rings, barriers, zero, done, w: gl.constexpr):
    """Scores of an item's first tile, with which nothing can overlap."""
    q, k, _ = rings
    _, _, k_full, k_empty, _, _, _ = barriers
    STAGES: gl.constexpr = k.shape[0]
    slot = done % STAGES
    mbarrier.wait(k_full.index(slot), done // STAGES & 1)
    product = warpgroup_mma(q.index(w), k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(k_empty.index(slot))
    return s


@gluon.jit
def _attend(rings, barriers, position, end, scale2, done, tiles, swaps, w: gl.constexpr):
    """Attention of 64 queries, the first of them at `position`, over all tiles up to `end`: [64, D] and log-sum-exp."""
    q, k, v = rings
    _, q_empty, k_full, k_empty, v_full, v_empty, baton = barriers
    STAGES: gl.constexpr = k.shape[0]
    BN: gl.constexpr = k.shape[1]
    D: gl.constexpr = k.shape[2]
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    o_row: gl.constexpr = gl.SliceLayout(1, o_mma)
    query = position + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_mma))
    key = gl.arange(0, BN, layout=gl.SliceLayout(0, s_mma))
    zero = gl.zeros([ROWS, BN], gl.float32, s_mma)
    total = gl.sum(gl.reshape(zero, [ROWS, BN // 8, 8]), 1)
    top = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, s_mma))
    o = gl.zeros([ROWS, D], gl.float32, o_mma)

    slot = done % STAGES
    s = _first_scores(rings, barriers, zero, done, w)
    x, top, keep, total = _weigh(s, top, total, scale2, query, key, True)
    p = gl.convert_layout(x.to(k.dtype), operand)
    mbarrier.wait(v_full.index(slot), done // STAGES & 1)
    clear = gl.maximum((position + 1) // BN, 1)  # every query sees all keys of the tiles before this one
    for masked in gl.static_range(2):
        start = clear if masked else 1
        stop = tiles if masked else clear
        for tile in range(start, stop):
            use = done + tile
            slot = use % STAGES
            before = (use - 1) % STAGES
            mbarrier.wait(baton.index(w), (swaps + tile - 1 & 1) ^ (1 - w))
            mbarrier.wait(k_full.index(slot), use // STAGES & 1)
            product = warpgroup_mma(q.index(w), k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            sums = warpgroup_mma(p, v.index(before), o, is_async=True)
            mbarrier.arrive(baton.index(1 - w))  # the other's products come while the exponentials are computed here
            s = warpgroup_mma_wait(1, deps=[product])
            mbarrier.arrive(k_empty.index(slot))
            x, top, keep, total = _weigh(s, top, total, scale2, query, tile * BN + key, masked == 1)
            ahead = gl.convert_layout(x.to(k.dtype), operand)
            # Waited for a turn early: the compiler moves no exponentials behind this, where nothing would overlap.
            mbarrier.wait(v_full.index(slot), use // STAGES & 1)
            o, p = warpgroup_mma_wait(0, deps=[sums, p])
            mbarrier.arrive(v_empty.index(before))
            o = o * gl.convert_layout(keep, o_row)[:, None]
            p = ahead

    mbarrier.arrive(q_empty.index(w))
    slot = (done + tiles - 1) % STAGES
    if end % BN != 0:
        _clear(_boxes(v, PAGE), slot, (tiles - 1) * BN, end, BN // PAGE, D)
    sums = warpgroup_mma(p, v.index(slot), o, is_async=True)
    whole = gl.sum(total, 1)
    norm = gl.convert_layout(1.0 / whole, o_row)
    lse = (top * scale2 + gl.log2(gl.convert_layout(whole, top.type.layout))) * LN2
    o = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(v_empty.index(slot))
    return (o * norm[:, None]).to(k.dtype), lse


@gluon.jit
def _consume(
    rings, staged, barriers, BLOCKS, outs, scale2, items, turns, G: gl.constexpr, WIDE: gl.constexpr, w: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 queries of one head of every item of this program."""
    STAGES: gl.constexpr = rings[1].shape[0]
    BN: gl.constexpr = rings[1].shape[1]
    D: gl.constexpr = rings[1].shape[2]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    e = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
    OUT, LSE, out_pitch, lse_pitch = outs
    mine = staged.index(w)
    q_full = barriers[0]
    done = 0  # tiles of earlier items
    next_first, next_count, next_position, _path = _block(BLOCKS, _nth(0), items, WIDE)
    for turn in range(turns):
        _kv, head, second = _heads(_nth(turn), G, WIDE)
        first = next_first
        count = next_count
        position = next_position
        end = position + count
        tiles = gl.cdiv(end, BN)
        next_first, next_count, next_position, _path = _block(BLOCKS, _nth(turn + 1), items, WIDE)
        mbarrier.wait(q_full.index(w), turn & 1)
        if second if w else count > 0:
            x, lse = _attend(rings, barriers, position, end, scale2, done, tiles, done - turn, w)
            mine.store(x)
            if LSE is not None:
                row = gl.arange(0, ROWS, layout=lse.type.layout)
                gl.store(LSE + (head + w) * lse_pitch + first + row, lse, mask=row < count)
            place = (first.to(gl.int64) + m)[:, None] * gl.multiple_of(out_pitch, 16) + ((head + w) * D + e)[None, :]
            gl.store(OUT + place, mine.load(wide), mask=(m < count)[:, None])
        else:
            _idle(barriers, done, tiles, done - turn, w, STAGES)
        done += tiles


@gluon.jit(do_not_specialize=["table_pitch", "lse_pitch", "items"])
def _paths(
    queries, keys, values, TABLE, BLOCKS, OUT, LSE, scale2, out_pitch, table_pitch, lse_pitch, items,
    K: gl.constexpr, G: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """An item is a block of queries and two heads of a group, the last of an odd group alone.

    TABLE: a path's pages; with an LSE to write, where its keys start.
    """
    D: gl.constexpr = queries.block_type.shape[1]
    WIDE: gl.constexpr = K * ((G + 1) // 2)  # items of a block
    element: gl.constexpr = queries.dtype
    q = gl.allocate_shared_memory(element, [2, ROWS, D], queries.layout)
    k = gl.allocate_shared_memory(element, [STAGES, BN, D], keys.layout)
    v = gl.allocate_shared_memory(element, [STAGES, BN, D], values.layout)
    staged = gl.allocate_shared_memory(element, [2, ROWS, D], queries.layout)  # results on their way out
    rings = (q, k, v)
    sources = (queries, keys, values)
    # Queries, keys, values: arrived, and read by all who read them; then the baton that the two warpgroups pass.
    barriers = (
        new_barriers(2, 1), new_barriers(2, 1), new_barriers(STAGES, 1), new_barriers(STAGES, 2),
        new_barriers(STAGES, 1), new_barriers(STAGES, 2), new_barriers(2, 1),
    )  # fmt: skip
    fence_async_shared()
    turns = items // gl.num_programs(0)
    turns += (_nth(turns) < items).to(gl.int32)
    outs = (OUT, LSE, out_pitch, lse_pitch)
    gl.warp_specialize(
        [
            (_consume, (rings, staged, barriers, BLOCKS, outs, scale2, items, turns, G, WIDE, 0)),
            (_consume, (rings, staged, barriers, BLOCKS, outs, scale2, items, turns, G, WIDE, 1)),
            (
                _produce,
                (sources, rings, barriers, TABLE, BLOCKS, table_pitch, items, turns, K, G, WIDE, LSE is None),
            ),
        ],
        [4, 1],
        [252 - REGISTERS // 2, REGISTERS],
    )


def _suits(q_THD: Tensor, kv_heads: int) -> bool:
    """Whether this kernel can run for these queries."""
    return (
        on_hopper(q_THD)
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.shape[0] > 0
        and q_THD.shape[1] > kv_heads
        and q_THD.shape[2] in (64, 128)
        and pages.rows_readable(q_THD)
    )


def fits(q_THD: Tensor, keys: Tensor, values: Tensor, window: int | None) -> bool:
    """Whether `paths` can run on these tensors."""
    return window is None and keys.shape == values.shape and _suits(q_THD, keys.shape[1])


def packed_fits(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> bool:
    """Whether `packed` can run on these tensors."""
    alike = all(
        x.dtype == q_THD.dtype and x.shape[2] == q_THD.shape[2] and pages.rows_readable(x) for x in (k_SKD, v_SKD)
    )
    return alike and k_SKD.shape == v_SKD.shape and _suits(q_THD, k_SKD.shape[1])


def _launch(
    q_THD: Tensor,
    boxes: list[TensorDescriptor],
    table: Tensor,
    blocks_B4: Tensor,
    out: Tensor,
    lse_HT: Tensor | None,
    kv_heads: int,
    scale: float,
    programs: int | None,
    tile: tuple[int, int],
) -> None:
    """Write `out`, and `lse_HT` where keys lie end to end."""
    assert tile[1] > 1, "values of a tile are waited for before those of the one before are given back"
    tokens, heads, dim = q_THD.shape
    groups = heads // kv_heads
    queries = TensorDescriptor(q_THD, [tokens, heads * dim], [q_THD.stride(0), 1], [ROWS.value, dim], LAYOUT)
    items = kv_heads * ((groups + 1) // 2) * blocks_B4.shape[0]
    programs = programs or torch.cuda.get_device_properties(q_THD.device).multi_processor_count
    _paths[(min(items, programs),)](
        queries, *boxes, table, blocks_B4, out, lse_HT, scale * LOG2E, out.stride(0), table.stride(0),
        None if lse_HT is None else lse_HT.stride(0), items,
        K=kv_heads, G=groups, BN=tile[0], STAGES=tile[1], num_warps=4,
    )  # fmt: skip


def paths(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_JM: Tensor,
    blocks_B4: Tensor,
    *,
    scale: float,
    programs: int | None = None,
    tile: tuple[int, int] = (128, 2),
) -> Tensor:
    """Causal attention of packed queries along their paths of pages, as `paths_triton.paths`: [T, H * D].

    Blocks have at most 64 queries and get shorter. `programs`: as many as multiprocessors; `tile`: keys, stages.
    """
    tokens, heads, dim = q_THD.shape
    rows = keys.shape[0] * keys.shape[1] * pages.PAGE
    box = [pages.PAGE, HALF.value]
    boxes = [TensorDescriptor(x, [rows, dim], [dim, 1], box, LAYOUT) for x in (keys, values)]
    out_TW = q_THD.new_empty(tokens, heads * dim)
    _launch(q_THD, boxes, table_JM, blocks_B4, out_TW, None, keys.shape[1], scale, programs, tile)
    return out_TW


def packed(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    starts_J: Tensor,
    blocks_B4: Tensor,
    *,
    scale: float,
    programs: int | None = None,
    tile: tuple[int, int] = (128, 2),
) -> tuple[Tensor, Tensor]:
    """Causal attention of packed queries along paths whose keys lie end to end: [T, H, D], and log-sum-exp [H, T].

    `starts_J`: the row of a path's first key; blocks, `programs` and `tile` as for `paths`.
    """
    tokens, heads, dim = q_THD.shape
    rows, kv_heads = k_SKD.shape[:2]
    box = [tile[0], HALF.value]
    boxes = [TensorDescriptor(x, [rows, kv_heads * dim], [x.stride(0), 1], box, LAYOUT) for x in (k_SKD, v_SKD)]
    out_THD = q_THD.new_empty(tokens, heads, dim)
    lse_HT = q_THD.new_empty(heads, tokens, dtype=torch.float32)
    _launch(q_THD, boxes, starts_J, blocks_B4, out_THD, lse_HT, kv_heads, scale, programs, tile)
    return out_THD, lse_HT
