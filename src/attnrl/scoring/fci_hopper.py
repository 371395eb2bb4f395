"""The column sum of `fci_triton` for Hopper GPUs, scheduled by hand in Gluon: half precision, head size 128.

It computes the same sums and is faster for three reasons: keys stay in registers, so that products read only queries
from shared memory; the copy engine brings queries in tiles ahead of their use; and a block of keys is two halves, so
that one half is exponentiated while the tensor cores multiply the other.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# The kernel's parameters are Triton values, which have no Python types.

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnrl.attention.gluon_parts import copy_in, on_hopper
from attnrl.scoring.fci_triton import Layer, Tile

HEAD = 128  # with 64 the exponentials take longer than the products, and the schedule gains nothing
WARPS = 4


@gluon.jit
def _fetch(queries, ring, arrived, turn, turns, row, column, STAGES: gl.constexpr):
    """Start the copy of the queries of one turn into its slot of the ring."""
    slot = turn % STAGES
    live = turn < turns
    mbarrier.expect(arrived.index(slot), ring.shape[1] * ring.shape[2] * 2, pred=live)
    at = [row + turn * ring.shape[1], column]
    copy_in(queries, at, arrived.index(slot), ring.index(slot), pred=live)


@gluon.jit
def _add(total, s, bias, query, key, qmin, scale2, window, EARLY: gl.constexpr, WINDOW: gl.constexpr):
    """total + w_q * P[q, t] summed over the queries that a thread holds: [keys, 8], no exchange between threads."""
    p = gl.exp2(s * scale2 + bias[None, :])
    if EARLY:
        p = gl.where(query[None, :] >= qmin[:, None], p, 0.0)
    if WINDOW:
        p = gl.where(query[None, :] - key[:, None] < window, p, 0.0)
    return total + gl.sum(gl.reshape(p, [s.shape[0], s.shape[1] // 8, 8]), 1)


@gluon.jit
def _half(K, QMIN, k_start, k_stop, stride, N: gl.constexpr, D: gl.constexpr, mma: gl.constexpr):
    """Half of a block: the keys [N, D], where they stand, and the first query that counts for each."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    row = k_start + gl.arange(0, N, layout=gl.SliceLayout(1, wide))
    part = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
    k = gl.load(K + row[:, None] * stride + part[None, :], mask=(row < k_stop)[:, None], other=0.0)
    key = k_start + gl.arange(0, N, layout=gl.SliceLayout(1, mma))
    return k, key, gl.load(QMIN + key, mask=key < k_stop, other=2147483647)


@gluon.jit
def _block(row, M: gl.constexpr):
    """Keys, queries and turns of a block: how many, from which on every key counts, from which on some no longer."""
    q_lo = gl.multiple_of(gl.load(row + 2), 16)
    q_stop = gl.load(row + 5)
    turns = gl.cdiv(gl.maximum(q_stop - q_lo, 0), M)
    head = gl.minimum(gl.cdiv(gl.maximum(gl.load(row + 3) - q_lo, 0), M), turns)
    tail = gl.maximum((gl.load(row + 4) - q_lo) // M, head)
    return gl.load(row), gl.load(row + 1), q_lo, q_stop, turns, head, tail


@gluon.jit
def _store(OUT, total, key, k_stop, mma: gl.constexpr):
    sums = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, mma))
    gl.store(OUT + key, sums, mask=key < k_stop)


@gluon.jit
def _column_sums(
    queries, K, BIAS, QMIN, TABLE, OUT, scale2, window, pitch, head_rows, head_columns, skt, skh, G: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """OUT[h, t] = sum over q of w_q * P[q, t] for 2 N keys and one head; TABLE as in `plan.key_blocks`."""
    M: gl.constexpr = queries.block_type.shape[0]
    D: gl.constexpr = queries.block_type.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    h = gl.program_id(0)
    k_start, k_stop, q_lo, q_stop, turns, head, tail = _block(TABLE + gl.program_id(1) * 6, M)

    # Every load is on its way before the first is waited for.
    K += (h // G) * skh
    k0, key0, qmin0 = _half(K, QMIN, k_start, k_stop, skt, N, D, mma)
    k1, key1, qmin1 = _half(K, QMIN, k_start + N, k_stop, skt, N, D, mma)
    offs = gl.arange(0, M, layout=gl.SliceLayout(0, mma))
    BIAS += gl.multiple_of(h * pitch + q_lo, 16)
    bias_ahead = gl.load(BIAS + offs)  # a turn ahead: its latency is long beside a turn
    ring = gl.allocate_shared_memory(K.dtype.element_ty, [STAGES, M, D], queries.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    first = q_lo + h * head_rows
    for i in gl.static_range(STAGES):
        _fetch(queries, ring, arrived, i, turns, first, h * head_columns, STAGES)

    k0 = gl.convert_layout(k0, operand)
    k1 = gl.convert_layout(k1, operand)
    zero = gl.zeros([N, M], gl.float32, mma)
    sum0 = gl.sum(gl.reshape(zero, [N, M // 8, 8]), 1)
    sum1 = sum0
    for phase in gl.static_range(3):  # where some key does not count yet, where every key counts, where some ends
        start = 0 if phase == 0 else (head if phase == 1 else tail)
        stop = head if phase == 0 else (tail if phase == 1 else turns)
        for turn in range(start, stop):
            slot = turn % STAGES
            query = q_lo + turn * M + offs
            bias = bias_ahead
            bias_ahead = gl.load(BIAS + (turn + 1) * M + offs)
            if phase != 1:
                bias = gl.where(query < q_stop, bias, -float("inf"))
            mbarrier.wait(arrived.index(slot), (turn // STAGES) & 1)
            q = ring.index(slot).permute((1, 0))
            product0 = warpgroup_mma(k0, q, zero, use_acc=False, is_async=True)
            product1 = warpgroup_mma(k1, q, zero, use_acc=False, is_async=True)
            s0 = warpgroup_mma_wait(1, deps=[product0])
            sum0 = _add(sum0, s0, bias, query, key0, qmin0, scale2, window, phase == 0, WINDOW and phase != 1)
            s1 = warpgroup_mma_wait(0, deps=[product1])
            _fetch(queries, ring, arrived, turn + STAGES, turns, first, h * head_columns, STAGES)
            sum1 = _add(sum1, s1, bias, query, key1, qmin1, scale2, window, phase == 0, WINDOW and phase != 1)
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(arrived.index(i))
    _store(OUT + h * pitch, sum0, key0, k_stop, mma)
    _store(OUT + h * pitch, sum1, key1, k_stop, mma)


def fits(q_THD: torch.Tensor, k_TKD: torch.Tensor, softcap: float | None) -> bool:
    """Whether this kernel can run on these tensors."""
    sizes = (*q_THD.stride()[:2], *k_TKD.stride()[:2])
    return (
        on_hopper(q_THD)
        and softcap is None
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.shape[-1] == HEAD
        and all(size % 8 == 0 for size in sizes)
        and q_THD.data_ptr() % 16 == 0
        and (q_THD.stride(1) < q_THD.stride(0) or q_THD.stride(1) % q_THD.stride(0) == 0)
    )


def launch(layer: Layer, tile: Tile) -> None:
    """Column sums of one layer; rows of `bias_HP` must go on for two turns after the last token."""
    assert layer.softcap is None, "see `fits`"
    q_THD, k_TKD = layer.q_THD, layer.k_TKD
    total, heads, head = q_THD.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    step, across = q_THD.stride(0), q_THD.stride(1)
    # Heads of a token side by side are columns of one matrix; heads one after the other are its rows.
    beside = across < step
    shape = [total, (heads - 1) * across + head] if beside else [(heads - 1) * (across // step) + total, head]
    _column_sums[(heads, len(layer.table))](
        TensorDescriptor(q_THD, shape, [step, 1], [tile.queries, head], layout),
        k_TKD,
        layer.bias_HP,
        layer.qmin_T,
        layer.table,
        layer.sums_HP,
        layer.scale2,
        layer.window or 0,
        layer.bias_HP.stride(0),
        0 if beside else across // step,
        across if beside else 0,
        *k_TKD.stride()[:2],
        G=heads // k_TKD.shape[1],
        N=tile.keys // 2,
        STAGES=tile.stages,
        WINDOW=layer.window is not None,
        num_warps=WARPS,
    )
