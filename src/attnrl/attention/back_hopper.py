"""Gradients of attention along paths (`paths_hopper.packed`) for Hopper GPUs, scheduled by hand in Gluon.

Two kernels, and every number is summed in a fixed order: `_queries_back` goes over the keys of 64 queries, one head of
a group for each of two warpgroups; `_keys_back` goes over the queries of 128 keys, 64 for each warpgroup, with scores
turned so that what a thread holds is what the next product reads. A warp of its own has the copy engine bring tiles.

With P the softmax of the scores, O the output and g its gradient: delta = rowsum(g O), dS = P (g V^T - delta),
dV = P^T g, dK = scale dS^T Q, dQ = scale dS K.

Shapes: T packed queries, S keys of all paths, H query heads, K key/value heads, G = H / K, D head size, J paths, B
query blocks, I key blocks.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
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

from attnrl.attention.gluon_parts import copy_in, new_barriers
from attnrl.attention.triton_parts import LOG2E

ROWS = gl.constexpr(64)  # queries or keys of a warpgroup
TILE = gl.constexpr(128)  # keys that a block of queries meets at a time
REGISTERS = gl.constexpr(24)  # of the copying warp's threads; those that multiply share the rest


@triton.jit
def _row_sums(
    OUT, GRAD, LSE, SLOTS, STATS, scale, T, pitch, out_pitch, grad_pitch, H: tl.constexpr, D: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """For each head and slot, what is added to the query's scores before they are exponents, and -delta: [H, 2, slots].

    A run's queries stand from a slot on whose place the copy engine can read from.
    """
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    d = tl.arange(0, D)
    here = (h < H)[:, None]
    out = tl.load(OUT + t * out_pitch + h[:, None] * D + d[None, :], mask=here, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + t * grad_pitch + h[:, None] * D + d[None, :], mask=here, other=0.0).to(tl.float32)
    lse = tl.load(LSE + h.to(tl.int64) * T + t, mask=h < H, other=0.0)
    place = STATS + h.to(tl.int64) * 2 * pitch + tl.load(SLOTS + t)
    tl.store(place, -lse / scale, mask=h < H)
    tl.store(place + pitch, -tl.sum(out * grad, 1), mask=h < H)


@gluon.jit
def _queries_produce(sources, rings, barriers, first, head, row, kv, tiles, second):
    """The warp that has the copy engine bring queries and their gradients, and every tile of keys and values."""
    queries, grads, keys, values = sources
    q, g, k, v = rings
    q_full, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = k.shape[0]
    D: gl.constexpr = k.shape[2]
    for w in gl.static_range(2):
        if second if w else True:
            mbarrier.expect(q_full.index(w), 2 * ROWS * D * 2)
            copy_in(queries, [first, (head + w) * D], q_full.index(w), q.index(w))
            copy_in(grads, [first, (head + w) * D], q_full.index(w), g.index(w))
    for tile in range(tiles):
        slot = tile % STAGES
        free = (tile // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), free)
        mbarrier.expect(k_full.index(slot), TILE * D * 2)
        copy_in(keys, [row + tile * TILE, kv * D], k_full.index(slot), k.index(slot))
        mbarrier.wait(v_empty.index(slot), free)
        mbarrier.expect(v_full.index(slot), TILE * D * 2)
        copy_in(values, [row + tile * TILE, kv * D], v_full.index(slot), v.index(slot))


@gluon.jit
def _queries_consume(rings, barriers, STATS, OUT, about, pitch, scale2, scale, heads, w: gl.constexpr):
    """A warpgroup: 64 queries of one head over all their keys."""
    first, slot_of, count, position, head, tiles, second = about
    q, g, k, v = rings
    q_full, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = k.shape[0]
    D: gl.constexpr = k.shape[2]
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_mma))
    key = gl.arange(0, TILE, layout=gl.SliceLayout(0, s_mma))
    zero = gl.zeros([ROWS, TILE], gl.float32, s_mma)
    if second if w else True:
        place = STATS + (head + w).to(gl.int64) * 2 * pitch + slot_of + m
        less = gl.load(place, mask=m < count, other=-float("inf")) * scale2
        delta = gl.load(place + pitch, mask=m < count, other=0.0)
        dq = gl.zeros([ROWS, D], gl.float32, o_mma)
        mbarrier.wait(q_full.index(w), 0)
        clear = gl.minimum((position + 1) // TILE, tiles)  # every query sees all keys of the tiles before this one
        for masked in gl.static_range(2):
            start = clear if masked else 0
            stop = tiles if masked else clear
            for tile in range(start, stop):
                slot = tile % STAGES
                phase = tile // STAGES & 1
                mbarrier.wait(k_full.index(slot), phase)
                scores = warpgroup_mma(q.index(w), k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(slot), phase)
                gains = warpgroup_mma(g.index(w), v.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(1, deps=[scores])
                p = gl.exp2(s * scale2 + less[:, None])
                if masked:
                    p = gl.where((tile * TILE + key)[None, :] <= (position + m)[:, None], p, 0.0)
                dp = warpgroup_mma_wait(0, deps=[gains])
                mbarrier.arrive(v_empty.index(slot))
                ds = gl.convert_layout((p * (dp + delta[:, None])).to(k.dtype), operand)
                sums = warpgroup_mma(ds, k.index(slot), dq, is_async=True)
                dq, ds = warpgroup_mma_wait(0, deps=[sums, ds])
                mbarrier.arrive(k_empty.index(slot))
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        n = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
        e = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
        mine = q.index(w)  # read for the last time: results leave through it
        mine.store((dq * scale).to(k.dtype))
        to = ((first.to(gl.int64) + n)[:, None] * heads + head + w) * D + e[None, :]
        gl.store(OUT + to, mine.load(wide), mask=(n < count)[:, None])
    else:
        for tile in range(tiles):
            slot = tile % STAGES
            phase = tile // STAGES & 1
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.arrive(k_empty.index(slot))
            mbarrier.wait(v_full.index(slot), phase)
            mbarrier.arrive(v_empty.index(slot))


@gluon.jit(do_not_specialize=["pitch"])
def _queries_back(
    queries, grads, keys, values, STARTS, BLOCKS, SLOTS, STATS, DQ, scale2, scale, pitch, heads,
    G: gl.constexpr, WIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program is a block of queries and two heads of a group, the last of an odd group alone."""
    D: gl.constexpr = queries.block_type.shape[1]
    element: gl.constexpr = queries.dtype
    pairs: gl.constexpr = (G + 1) // 2
    block = BLOCKS + gl.program_id(0) // WIDE * 4
    first = gl.load(block)
    slot_of = gl.load(SLOTS + first)
    count = gl.load(block + 1)
    position = gl.load(block + 2)
    row = gl.load(STARTS + gl.load(block + 3))
    kv = gl.program_id(0) % WIDE // pairs
    nth = gl.program_id(0) % pairs * 2
    head = kv * G + nth
    second = nth + 1 < G
    tiles = gl.cdiv(position + count, TILE)
    q = gl.allocate_shared_memory(element, [2, ROWS, D], queries.layout)
    g = gl.allocate_shared_memory(element, [2, ROWS, D], queries.layout)
    k = gl.allocate_shared_memory(element, [STAGES, TILE, D], keys.layout)
    v = gl.allocate_shared_memory(element, [STAGES, TILE, D], keys.layout)
    rings = (q, g, k, v)
    sources = (queries, grads, keys, values)
    barriers = (
        new_barriers(2, 1), new_barriers(STAGES, 1), new_barriers(STAGES, 2), new_barriers(STAGES, 1),
        new_barriers(STAGES, 2),
    )  # fmt: skip
    fence_async_shared()
    about = (first, slot_of, count, position, head, tiles, second)
    gl.warp_specialize(
        [
            (
                _queries_consume,
                (rings, barriers, STATS, DQ, about, pitch, scale2, scale, heads, 0),
            ),
            (
                _queries_consume,
                (rings, barriers, STATS, DQ, about, pitch, scale2, scale, heads, 1),
            ),
            (_queries_produce, (sources, rings, barriers, first, head, row, kv, tiles, second)),
        ],
        [4, 1],
        [252 - REGISTERS // 2, REGISTERS],
    )


@gluon.jit
def _keys_produce(sources, rings, barriers, row, column, first, slot_of, head, blocks, HEADS: gl.constexpr):
    """The warp that has the copy engine bring keys and values, and every block of queries and gradients in turn."""
    queries, grads, stats, keys, values = sources
    q, g, less, delta, k, v = rings
    k_full, full, empty = barriers
    STAGES: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[2]
    mbarrier.expect(k_full.index(0), 4 * ROWS * D * 2)
    for w in gl.static_range(2):
        copy_in(keys, [row + w * ROWS, column], k_full.index(0), k.index(w))
        copy_in(values, [row + w * ROWS, column], k_full.index(0), v.index(w))
    for use in range(HEADS * blocks):
        slot = use % STAGES
        mbarrier.wait(empty.index(slot), (use // STAGES & 1) ^ 1)
        at = use % blocks * ROWS
        here = head + use // blocks
        arrived = full.index(slot)
        mbarrier.expect(arrived, 2 * ROWS * D * 2 + 2 * ROWS * 4)
        copy_in(queries, [first + at, here * D], arrived, q.index(slot))
        copy_in(stats, [here * 2, slot_of + at], arrived, less.index(slot))
        copy_in(stats, [here * 2 + 1, slot_of + at], arrived, delta.index(slot))
        copy_in(grads, [first + at, here * D], arrived, g.index(slot))


@gluon.jit
def _keys_consume(
    rings, barriers, DK, DV, to, about, scale2, scale, K: gl.constexpr, HEADS: gl.constexpr, w: gl.constexpr
):  # fmt: skip
    """A warpgroup: 64 keys over all queries that see them, of all heads of this part. Scores are [keys, queries].

    `about`: keys left in the path, the position of the first query less that of the first key, how many queries there
    are and in how many blocks.
    """
    keys_left, behind, fresh, blocks = about
    q, g, less, delta, k, v = rings
    k_full, full, empty = barriers
    STAGES: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[2]
    s_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    o_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_mma, 2)
    key = w * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_mma))
    n = gl.arange(0, ROWS, layout=gl.SliceLayout(0, s_mma))
    zero = gl.zeros([ROWS, ROWS], gl.float32, s_mma)
    dk = gl.zeros([ROWS, D], gl.float32, o_mma)
    dv = gl.zeros([ROWS, D], gl.float32, o_mma)
    mbarrier.wait(k_full.index(0), 0)
    seen = w * ROWS + ROWS - 1 - behind  # the first query that sees all keys of this warpgroup
    for use in range(HEADS * blocks):
        slot = use % STAGES
        phase = use // STAGES & 1
        at = use % blocks * ROWS
        mbarrier.wait(full.index(slot), phase)
        shifts = zero + less.index(slot).load(s_mma)
        scores = warpgroup_mma(k.index(w), q.index(slot).permute((1, 0)), shifts, is_async=True)
        shifts = zero + delta.index(slot).load(s_mma)
        gains = warpgroup_mma(v.index(w), g.index(slot).permute((1, 0)), shifts, is_async=True)
        s = warpgroup_mma_wait(1, deps=[scores])
        p = gl.exp2(s * scale2)
        if (at < seen) | (at + ROWS > fresh):
            query = at + n
            p = gl.where((key[:, None] <= (behind + query)[None, :]) & (query < fresh)[None, :], p, 0.0)
        weights = gl.convert_layout(p.to(k.dtype), operand)
        v_sums = warpgroup_mma(weights, g.index(slot), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[gains])
        ds = gl.convert_layout((p * dp).to(k.dtype), operand)
        k_sums = warpgroup_mma(ds, q.index(slot), dk, is_async=True)
        dv, dk, weights, ds = warpgroup_mma_wait(0, deps=[v_sums, k_sums, weights, ds])
        mbarrier.arrive(empty.index(slot))
    m = w * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_mma))
    e = gl.arange(0, D, layout=gl.SliceLayout(0, o_mma))
    place = to + m[:, None] * (K * D) + e[None, :]
    gl.store(DK + place, (dk * scale).to(DK.dtype.element_ty), mask=(m < keys_left)[:, None])
    gl.store(DV + place, dv.to(DV.dtype.element_ty), mask=(m < keys_left)[:, None])


@gluon.jit(do_not_specialize=["S"])
def _keys_back(
    queries, grads, stats, keys, values, ITEMS, DK, DV, scale2, scale, S,
    K: gl.constexpr, G: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program is a block of 128 keys with one part of the heads of a group."""
    D: gl.constexpr = queries.block_type.shape[1]
    element: gl.constexpr = queries.dtype
    HEADS: gl.constexpr = G // PARTS
    item = ITEMS + gl.program_id(0) // (K * PARTS) * 6
    row = gl.load(item)
    position = gl.load(item + 1)
    first = gl.load(item + 2)
    before = gl.load(item + 3)
    fresh = gl.load(item + 4)
    slot_of = gl.load(item + 5)
    kv = gl.program_id(0) // PARTS % K
    part = gl.program_id(0) % PARTS
    begin = gl.maximum(position - before, 0) // ROWS * ROWS  # queries before this one see none of the keys
    blocks = gl.cdiv(fresh - begin, ROWS)
    head = kv * G + part * HEADS
    to = ((part * S + row).to(gl.int64) * K + kv) * D
    k = gl.allocate_shared_memory(element, [2, ROWS, D], queries.layout)
    v = gl.allocate_shared_memory(element, [2, ROWS, D], queries.layout)
    q = gl.allocate_shared_memory(element, [STAGES, ROWS, D], queries.layout)
    g = gl.allocate_shared_memory(element, [STAGES, ROWS, D], queries.layout)
    less = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], stats.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], stats.layout)
    rings = (q, g, less, delta, k, v)
    sources = (queries, grads, stats, keys, values)
    barriers = (new_barriers(1, 1), new_barriers(STAGES, 1), new_barriers(STAGES, 2))
    fence_async_shared()
    about = (before + fresh - position, before + begin - position, fresh - begin, blocks)
    gl.warp_specialize(
        [
            (_keys_consume, (rings, barriers, DK, DV, to, about, scale2, scale, K, HEADS, 0)),
            (_keys_consume, (rings, barriers, DK, DV, to, about, scale2, scale, K, HEADS, 1)),
            (
                _keys_produce,
                (sources, rings, barriers, row, kv * D, first + begin, slot_of + begin, head, blocks, HEADS),
            ),
        ],
        [4, 1],
        [252 - REGISTERS // 2, REGISTERS],
    )


def parts_of(groups: int, programs: int, wanted: int) -> int:
    """Into how many parts the heads of a group are cut: as few as make the wanted number of programs.

    >>> [parts_of(6, 100, n) for n in (50, 150, 300, 5000)]
    [1, 2, 3, 6]
    """
    return next((n for n in range(1, groups) if groups % n == 0 and programs * n >= wanted), groups)


def back(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    starts_J: Tensor,
    blocks_B4: Tensor,
    items_I6: Tensor,
    slots_T: Tensor,
    *,
    scale: float,
    stages: tuple[int, int] = (2, 4),
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values.

    The tables are those of `Runs.blocks`.
    """
    tokens, heads, dim = q_THD.shape
    keys, kv_heads = k_SKD.shape[:2]
    groups = heads // kv_heads
    few, many = ROWS.value, TILE.value
    pitch = len(blocks_B4) * few
    stats = torch.zeros(2 * heads, pitch, dtype=torch.float32, device=q_THD.device)
    _row_sums[(tokens,)](
        out_THD, grad_THD, lse_HT, slots_T, stats, scale, tokens, pitch, out_THD.stride(0), grad_THD.stride(0), heads,
        dim, triton.next_power_of_2(heads), num_warps=4,
    )  # fmt: skip
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)

    def boxes(x: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor(x, [x.shape[0], x.shape[1] * dim], [x.stride(0), 1], [rows, dim], layout)

    pairs = kv_heads * ((groups + 1) // 2)
    queries = (boxes(q_THD, few), boxes(grad_THD, few))
    dq_THD = torch.empty(tokens, heads, dim, dtype=q_THD.dtype, device=q_THD.device)
    _queries_back[(len(blocks_B4) * pairs,)](
        *queries, boxes(k_SKD, many), boxes(v_SKD, many), starts_J, blocks_B4, slots_T, stats, dq_THD,
        scale * LOG2E, scale, pitch, heads, G=groups, WIDE=pairs, STAGES=stages[0], num_warps=4,
    )  # fmt: skip
    processors = torch.cuda.get_device_properties(q_THD.device).multi_processor_count if q_THD.is_cuda else 1
    parts = parts_of(groups, len(items_I6) * kv_heads, 4 * processors)
    dtype = q_THD.dtype if parts == 1 else torch.float32
    sums = torch.empty(2, parts, keys, kv_heads, dim, dtype=dtype, device=q_THD.device)
    _keys_back[(len(items_I6) * kv_heads * parts,)](
        *queries, TensorDescriptor(stats, [2 * heads, pitch], [pitch, 1], [1, few], plain), boxes(k_SKD, few),
        boxes(v_SKD, few), items_I6, *sums, scale * LOG2E, scale, keys, K=kv_heads, G=groups, PARTS=parts,
        STAGES=stages[1], num_warps=4,
    )  # fmt: skip
    dk_SKD, dv_SKD = sums.sum(1).to(q_THD.dtype) if parts > 1 else sums[:, 0]
    return dq_THD, dk_SKD, dv_SKD
