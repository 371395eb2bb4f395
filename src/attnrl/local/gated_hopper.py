"""silu(x gate^T) * (x up^T) of many tokens for Hopper GPUs, in one kernel scheduled by hand in Gluon.

cuBLAS writes the products of gate and up, twice what is wanted, for another kernel to read again. Here a warpgroup
multiplies 64 tokens with the same columns of both side by side, so that each thread holds a gate and its up, and only
what is wanted leaves. Two warpgroups share the weights of a tile, the second a stage or two behind the first. A warp of
its own has the copy engine bring tiles.

A decode step has few tiles for many multiprocessors: 140 of 128 columns on 132 take as long as 264. So a tile may have
a few columns more, and 132 tiles of 136 columns are one turn (`tiling`).

Shapes: T tokens, K inputs, N outputs, M = 2 N rows of weights: gate's, then up's.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from attnrl.attention.early import early
from attnrl.attention.gluon_parts import copy_in, copy_out, new_barriers, on_hopper, sync, view

MANY = 128  # tokens from which on this kernel is the faster one
ROWS = gl.constexpr(64)  # tokens of a warpgroup
DEEP = gl.constexpr(64)  # inputs of a stage: as wide as its swizzle
REGISTERS = gl.constexpr(40)  # of the copying warp's threads; those that multiply share the rest
# Columns of a tile, and columns beyond them, by how many stages shared memory holds.
TILES = {(128, 0): 4, (128, 8): 3, (128, 16): 3, (64, 0): 6, (64, 8): 5, (64, 16): 5}


@gluon.jit
def _tile(turn, tokens, columns, SPAN: gl.constexpr, GROUP: gl.constexpr):
    """First token and column of the tile of this program's turn: GROUP tiles of tokens for each of columns in turn.

    What programs read at the same time then stays in the cache.
    """
    index = turn * gl.num_programs(0) + gl.program_id(0)
    band = GROUP * gl.cdiv(columns, SPAN)
    first = index // band * GROUP
    high = gl.minimum(gl.cdiv(tokens, 2 * ROWS) - first, GROUP)
    return (first + index % band % high) * (2 * ROWS), index % band // high * SPAN


@gluon.jit
def _weights(sources, rings, full, n, k, slot, columns, SPAN: gl.constexpr):
    """Start the copies of a stage's weights: of gate's columns and of up's, and of those beyond the tile's width."""
    _, wide_from, more_from = sources
    wide = rings[1]
    here = full.index(slot)
    STAGES: gl.constexpr = wide.shape[0]
    WIDE: gl.constexpr = wide.shape[1] // 2
    EXTRA: gl.constexpr = SPAN - WIDE
    mbarrier.expect(here, (2 * ROWS + 2 * SPAN) * DEEP * 2)
    halves = view(wide, wide.dtype, [2 * STAGES, WIDE, DEEP], wide.layout)
    for w in gl.static_range(2):
        copy_in(wide_from, [n + w * columns, k * DEEP], here, halves.index(slot * 2 + w))
    if EXTRA > 0:
        more = rings[2]
        few = view(more, more.dtype, [2 * STAGES, EXTRA, DEEP], more.layout)
        for w in gl.static_range(2):
            copy_in(more_from, [n + WIDE + w * columns, k * DEEP], here, few.index(slot * 2 + w))


@gluon.jit
def _tokens(sources, rings, full, t, k, slot):
    """Start the copies of a stage's tokens, 64 for each warpgroup."""
    for w in gl.static_range(2):
        copy_in(sources[0], [t + w * ROWS, k * DEEP], full.index(slot), rings[0].index(slot * 2 + w))


@gluon.jit
def _produce(sources, rings, barriers, sizes, SPAN: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr):
    """The warp that has the copy engine bring tokens and weights, stage after stage.

    EARLY: the first weights come while the kernel before this one still computes the tokens.
    """
    full, empty = barriers
    tokens, columns, steps, turns = sizes
    STAGES: gl.constexpr = rings[1].shape[0]
    if EARLY:
        t, n = _tile(0, tokens, columns, SPAN, GROUP)
        for first in gl.static_range(STAGES):
            _weights(sources, rings, full, n, first, first, columns, SPAN)
        gdc_wait()
        for first in gl.static_range(STAGES):
            _tokens(sources, rings, full, t, first, first)
    for turn in range(turns):
        t, n = _tile(turn, tokens, columns, SPAN, GROUP)
        begun = gl.maximum(STAGES - turn * STAGES, 0) if EARLY else 0
        for k in range(begun, steps):
            use = turn * steps + k
            slot = use % STAGES
            for w in gl.static_range(2):
                mbarrier.wait(empty.index(w * STAGES + slot), (use // STAGES & 1) ^ 1)
            _weights(sources, rings, full, n, k, slot, columns, SPAN)
            _tokens(sources, rings, full, t, k, slot)


@gluon.jit
def _silu(x):
    """x / (1 + exp(-x)), by the GPU's approximations: rounded to half precision nearly always the same."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
        " rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _activated(sums, element: gl.constexpr):
    """silu(gate) * up of sums [64, 2 N] that hold gate's columns and then up's, rounded where the modules round."""
    gate, up = gl.split(gl.permute(gl.reshape(sums, [ROWS, 2, sums.shape[1] // 2]), [0, 2, 1]))
    active = _silu(gate.to(element).to(gl.float32)).to(element)
    return (active.to(gl.float32) * up.to(element).to(gl.float32)).to(element)


@gluon.jit
def _consume(
    to, OUT, rings, staged, barriers, sizes, SPAN: gl.constexpr, GROUP: gl.constexpr, LEAD: gl.constexpr,
    w: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 tokens of every tile of this program."""
    x = rings[0]
    wide = rings[1]
    full, empty = barriers
    tokens, columns, steps, turns = sizes
    STAGES: gl.constexpr = wide.shape[0]
    WIDE: gl.constexpr = wide.shape[1] // 2
    EXTRA: gl.constexpr = SPAN - WIDE
    element: gl.constexpr = x.dtype
    mine = staged.index(w)
    sums = gl.zeros([ROWS, 2 * WIDE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * WIDE, 16]))
    if EXTRA > 0:
        few: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * EXTRA, 16])
        extra = gl.zeros([ROWS, 2 * EXTRA], gl.float32, few)
    if w > 0 and LEAD > 0:
        mbarrier.wait(empty.index(LEAD - 1), 0)
    for turn in range(turns):
        t, n = _tile(turn, tokens, columns, SPAN, GROUP)
        for k in range(steps):
            use = turn * steps + k
            slot = use % STAGES
            mbarrier.wait(full.index(slot), use // STAGES & 1)
            mine_of_slot = x.index(slot * 2 + w)
            sums = warpgroup_mma(mine_of_slot, wide.index(slot).permute((1, 0)), sums, use_acc=k > 0, is_async=True)
            if EXTRA > 0:
                columns_beyond = rings[2].index(slot).permute((1, 0))
                extra = warpgroup_mma(mine_of_slot, columns_beyond, extra, use_acc=k > 0, is_async=True)
                sums, extra = warpgroup_mma_wait(2, deps=[sums, extra])  # those of the stage before are done
            else:
                sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(empty.index(w * STAGES + (use + STAGES - 1) % STAGES), pred=k > 0)
        if EXTRA > 0:
            sums, extra = warpgroup_mma_wait(0, deps=[sums, extra])
        else:
            sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(w * STAGES + (turn * steps + steps - 1) % STAGES))
        out = _activated(sums, element)
        tma.store_wait(0)  # the tile before has left
        sync()
        mine.store(out)
        fence_async_shared()
        sync()
        copy_out(to, [t + w * ROWS, n], mine)
        if EXTRA > 0:
            beyond = _activated(extra, element)
            row = t + w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, beyond.type.layout))
            column = n + WIDE + gl.arange(0, EXTRA, gl.SliceLayout(0, beyond.type.layout))
            inside = (row < tokens)[:, None] & (column < columns)[None, :]
            gl.store(OUT + row[:, None] * columns + column[None, :], beyond, mask=inside)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens"])
def _gated(
    tokens_from, wide_from, more_from, to, OUT, tokens, columns, steps, EXTRA: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, LEAD: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """A tile is 128 tokens and WIDE + EXTRA columns; a program takes one after the other."""
    element: gl.constexpr = tokens_from.dtype
    WIDE: gl.constexpr = wide_from.block_type.shape[0]
    SPAN: gl.constexpr = WIDE + EXTRA
    x = gl.allocate_shared_memory(element, [2 * STAGES, ROWS, DEEP], tokens_from.layout)
    wide = gl.allocate_shared_memory(element, [STAGES, 2 * WIDE, DEEP], wide_from.layout)
    rings = (x, wide)
    if EXTRA > 0:
        rings += (gl.allocate_shared_memory(element, [STAGES, 2 * EXTRA, DEEP], more_from.layout),)
    staged = gl.allocate_shared_memory(element, [2, ROWS, WIDE], to.layout)  # results on their way out
    barriers = (new_barriers(STAGES, 1), new_barriers(2 * STAGES, 1))  # arrived; read, by each warpgroup
    fence_async_shared()
    tiles = gl.cdiv(tokens, 2 * ROWS) * gl.cdiv(columns, SPAN)
    turns = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    sizes = (tokens, columns, steps, turns)
    sources = (tokens_from, wide_from, more_from)
    gl.warp_specialize(
        [
            (_consume, (to, OUT, rings, staged, barriers, sizes, SPAN, GROUP, LEAD, 0)),
            (_consume, (to, OUT, rings, staged, barriers, sizes, SPAN, GROUP, LEAD, 1)),
            (_produce, (sources, rings, barriers, sizes, SPAN, GROUP, EARLY)),
        ],
        [4, 1],
        [252 - REGISTERS // 2, REGISTERS],
    )


def fits(x_TK: Tensor, weight_MK: Tensor) -> bool:
    """Whether this kernel is for such an input: many tokens, half precision, on a Hopper GPU."""
    return (
        on_hopper(x_TK)
        and len(x_TK) >= MANY
        and x_TK.dtype in (torch.bfloat16, torch.float16)
        and weight_MK.dtype == x_TK.dtype
        and x_TK.shape[1] >= max(TILES.values()) * DEEP.value
        and len(weight_MK) % 16 == 0
        and all(x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (x_TK, weight_MK))
    )


def tiling(tokens: int, columns: int, programs: int) -> tuple[int, int]:
    """Columns of a tile and columns beyond them that take the least time: turns of the programs by columns of a turn.

    >>> tiling(256, 8960, 132), tiling(512, 8960, 132), tiling(16384, 8960, 132)
    ((128, 8), (128, 8), (128, 0))
    """
    high = -(-tokens // 128)

    def taken(tile: tuple[int, int]) -> int:
        turns = -(-high * -(-columns // sum(tile)) // programs)
        return turns * (sum(tile) + 16 + (8 if tile[1] else 0))

    return min(TILES, key=taken)


def gated(
    x_TK: Tensor,
    weight_MK: Tensor,
    *,
    programs: int | None = None,
    tile: tuple[int, int] | None = None,
    order: tuple[int, int] = (32, 2),
) -> Tensor:
    """silu(x gate^T) * (x up^T), [T, N], for gate's N rows and then up's.

    `programs`: as many as multiprocessors; `tile`: of `TILES`; `order`: tiles of tokens in a group, stages between the
    two warpgroups.
    """
    tokens, inputs = x_TK.shape
    columns = len(weight_MK) // 2
    group, lead = order
    out_TN = x_TK.new_empty(tokens, columns)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows, deep = ROWS.value, DEEP.value
    programs = programs or torch.cuda.get_device_properties(x_TK.device).multi_processor_count
    wide, extra = tile or tiling(tokens, columns, programs)
    tiles = triton.cdiv(tokens, 2 * rows) * triton.cdiv(columns, wide + extra)

    def weights(high: int) -> TensorDescriptor:
        return TensorDescriptor(weight_MK, [2 * columns, inputs], [weight_MK.stride(0), 1], [high, deep], layout)

    _gated[(min(tiles, programs),)](
        TensorDescriptor(x_TK, [tokens, inputs], [x_TK.stride(0), 1], [rows, deep], layout),
        weights(wide),
        weights(extra or wide),
        TensorDescriptor(out_TN, [tokens, columns], [columns, 1], [rows, wide], layout),
        out_TN,
        tokens,
        columns,
        triton.cdiv(inputs, deep),
        EXTRA=extra,
        STAGES=TILES[wide, extra],
        GROUP=group,
        LEAD=min(lead, TILES[wide, extra] - 2),
        num_warps=4,
        **early(x_TK.device),
    )
    return out_TN
