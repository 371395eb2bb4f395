"""silu(x gate^T) * (x up^T) of many tokens for Hopper GPUs, in one kernel scheduled by hand in Gluon.

cuBLAS writes the products of gate and up, twice what is wanted, for another kernel to read again. Here a warpgroup
multiplies 64 tokens with the same columns of both side by side, so that each thread holds a gate and its up, and only
what is wanted leaves. Two warpgroups share the weights of a tile, the second two stages behind the first. A warp of its
own has the copy engine bring tiles.

Shapes: T tokens, K inputs, N outputs, M = 2 N rows of weights: gate's, then up's.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
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

MANY = 384  # tokens from which on this kernel is the faster one, where there are tiles for all multiprocessors
STAGES = {128: 4, 64: 6}  # as many as shared memory holds, by columns of gate, and as many of up, of a tile
ROWS = gl.constexpr(64)  # tokens of a warpgroup
DEEP = gl.constexpr(64)  # inputs of a stage: as wide as its swizzle
REGISTERS = gl.constexpr(40)  # of the copying warp's threads; those that multiply share the rest


@gluon.jit
def _tile(turn, tokens, columns, WIDE: gl.constexpr, GROUP: gl.constexpr):
    """First token and column of the tile of this program's turn: GROUP tiles of tokens for each of columns in turn.

    What programs read at the same time then stays in the cache.
    """
    index = turn * gl.num_programs(0) + gl.program_id(0)
    band = GROUP * gl.cdiv(columns, WIDE)
    first = index // band * GROUP
    high = gl.minimum(gl.cdiv(tokens, 2 * ROWS) - first, GROUP)
    return (first + index % band % high) * (2 * ROWS), index % band // high * WIDE


@gluon.jit
def _bring_weights(weights_from, ring, full, n, k, slot, columns):
    """Start the copies of a stage's weights, gate's columns and up's; its tokens count in the same barrier."""
    STAGES: gl.constexpr = ring.shape[0]
    WIDE: gl.constexpr = ring.shape[1] // 2
    halves = view(ring, ring.dtype, [2 * STAGES, WIDE, DEEP], ring.layout)
    mbarrier.expect(full.index(slot), (2 * ROWS + 2 * WIDE) * DEEP * 2)
    for w in gl.static_range(2):
        copy_in(weights_from, [n + w * columns, k * DEEP], full.index(slot), halves.index(slot * 2 + w))


@gluon.jit
def _bring_tokens(tokens_from, ring, full, t, k, slot):
    """Start the copies of a stage's tokens, 64 for each warpgroup."""
    for w in gl.static_range(2):
        copy_in(tokens_from, [t + w * ROWS, k * DEEP], full.index(slot), ring.index(slot * 2 + w))


@gluon.jit
def _produce(sources, rings, barriers, sizes, GROUP: gl.constexpr, EARLY: gl.constexpr):
    """The warp that has the copy engine bring tokens and weights, stage after stage.

    EARLY: the first weights come while the kernel before this one still computes the tokens.
    """
    tokens_from, weights_from = sources
    x, weights = rings
    full, empty = barriers
    tokens, columns, steps, turns = sizes
    STAGES: gl.constexpr = weights.shape[0]
    WIDE: gl.constexpr = weights.shape[1] // 2
    if EARLY:
        t, n = _tile(0, tokens, columns, WIDE, GROUP)
        for first in gl.static_range(STAGES):
            _bring_weights(weights_from, weights, full, n, first, first, columns)
        gdc_wait()
        for first in gl.static_range(STAGES):
            _bring_tokens(tokens_from, x, full, t, first, first)
    for turn in range(turns):
        t, n = _tile(turn, tokens, columns, WIDE, GROUP)
        # by arithmetic: Gluon takes a number that is set before a loop, and again in it, for a constant
        begun = gl.maximum(STAGES - turn * STAGES, 0) if EARLY else 0
        for k in range(begun, steps):
            use = turn * steps + k
            slot = use % STAGES
            for w in gl.static_range(2):
                mbarrier.wait(empty.index(w * STAGES + slot), (use // STAGES & 1) ^ 1)
            _bring_weights(weights_from, weights, full, n, k, slot, columns)
            _bring_tokens(tokens_from, x, full, t, k, slot)


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
def _consume(to, rings, staged, barriers, sizes, GROUP: gl.constexpr, LEAD: gl.constexpr, w: gl.constexpr):
    """A warpgroup: 64 tokens of every tile of this program."""
    x, weights = rings
    full, empty = barriers
    tokens, columns, steps, turns = sizes
    STAGES: gl.constexpr = weights.shape[0]
    WIDE: gl.constexpr = weights.shape[1] // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * WIDE, 16])
    element: gl.constexpr = x.dtype
    mine = staged.index(w)
    sums = gl.zeros([ROWS, 2 * WIDE], gl.float32, mma)
    if w > 0 and LEAD > 0:
        mbarrier.wait(empty.index(LEAD - 1), 0)
    for turn in range(turns):
        t, n = _tile(turn, tokens, columns, WIDE, GROUP)
        for k in range(steps):
            use = turn * steps + k
            slot = use % STAGES
            mbarrier.wait(full.index(slot), use // STAGES & 1)
            columns_of_slot = weights.index(slot).permute((1, 0))
            sums = warpgroup_mma(x.index(slot * 2 + w), columns_of_slot, sums, use_acc=k > 0, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])  # that of the stage before is done
            mbarrier.arrive(empty.index(w * STAGES + (use + STAGES - 1) % STAGES), pred=k > 0)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(w * STAGES + (turn * steps + steps - 1) % STAGES))
        gate, up = gl.split(gl.permute(gl.reshape(sums, [ROWS, 2, WIDE]), [0, 2, 1]))
        active = _silu(gate.to(element).to(gl.float32)).to(element)  # rounded where the modules round
        out = (active.to(gl.float32) * up.to(element).to(gl.float32)).to(element)
        tma.store_wait(0)  # the tile before has left
        sync()
        mine.store(out)
        fence_async_shared()
        sync()
        copy_out(to, [t + w * ROWS, n], mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens"])
def _gated(
    tokens_from, weights_from, to, tokens, columns, steps, STAGES: gl.constexpr, GROUP: gl.constexpr,
    LEAD: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """A tile is 128 tokens and WIDE columns; a program takes one after the other."""
    element: gl.constexpr = tokens_from.dtype
    WIDE: gl.constexpr = weights_from.block_type.shape[0]
    x = gl.allocate_shared_memory(element, [2 * STAGES, ROWS, DEEP], tokens_from.layout)
    weights = gl.allocate_shared_memory(element, [STAGES, 2 * WIDE, DEEP], weights_from.layout)
    staged = gl.allocate_shared_memory(element, [2, ROWS, WIDE], to.layout)  # results on their way out
    rings = (x, weights)
    barriers = (new_barriers(STAGES, 1), new_barriers(2 * STAGES, 1))  # arrived; read, by each warpgroup
    fence_async_shared()
    tiles = gl.cdiv(tokens, 2 * ROWS) * gl.cdiv(columns, WIDE)
    turns = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    sizes = (tokens, columns, steps, turns)
    gl.warp_specialize(
        [
            (_consume, (to, rings, staged, barriers, sizes, GROUP, LEAD, 0)),
            (_consume, (to, rings, staged, barriers, sizes, GROUP, LEAD, 1)),
            (_produce, ((tokens_from, weights_from), rings, barriers, sizes, GROUP, EARLY)),
        ],
        [4, 1],
        [252 - REGISTERS // 2, REGISTERS],
    )


def fits(x_TK: Tensor, weight_MK: Tensor) -> bool:
    """Whether this kernel is for such an input: many tokens, half precision, on a Hopper GPU."""
    return (
        on_hopper(x_TK)
        and len(x_TK) >= MANY
        and -(-len(x_TK) // 128) * (len(weight_MK) // 128) >= _multiprocessors(x_TK)
        and x_TK.dtype in (torch.bfloat16, torch.float16)
        and weight_MK.dtype == x_TK.dtype
        and x_TK.shape[1] >= max(STAGES.values()) * DEEP.value
        and len(weight_MK) % 16 == 0
        and all(x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (x_TK, weight_MK))
    )


def _multiprocessors(x: Tensor) -> int:
    count: int = torch.cuda.get_device_properties(x.device).multi_processor_count
    return count


def width(x_TK: Tensor, weight_MK: Tensor) -> int:
    """Columns of a tile for these tokens and weights, on their device."""
    return best_width(len(x_TK), len(weight_MK) // 2, _multiprocessors(x_TK))


def best_width(tokens: int, columns: int, programs: int) -> int:
    """128, or 64 where a last turn of few tiles would leave most programs idle.

    Half as wide, a tile takes more than half as long, by a sixth or so, and a turn of few of them is short: 38, 51 and
    101 us for 42, 59 and 104 with 384, 512 and 1,024 tokens, 8,960 columns and 1,536 inputs on an H200.

    >>> [best_width(tokens, 8960, 132) for tokens in (384, 512, 640, 768, 896, 1024, 16384)]
    [64, 64, 128, 64, 128, 64, 128]
    """
    high = -(-tokens // 128)
    turns = -(-high * -(-columns // 128) // programs)
    return 64 if high * -(-columns // 64) * 7 < 6 * 2 * turns * programs else 128


def gated(
    x_TK: Tensor, weight_MK: Tensor, *, wide: int, programs: int | None = None, order: tuple[int, int] = (32, 2)
) -> Tensor:
    """silu(x gate^T) * (x up^T), [T, N], for gate's N rows and then up's.

    `wide`: columns of a tile; `programs`: as many as multiprocessors; `order`: tiles of tokens in a group, stages
    between the two warpgroups.
    """
    tokens, inputs = x_TK.shape
    columns = len(weight_MK) // 2
    group, lead = order
    out_TN = x_TK.new_empty(tokens, columns)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows, deep = ROWS.value, DEEP.value
    programs = programs or _multiprocessors(x_TK)
    tiles = triton.cdiv(tokens, 2 * rows) * triton.cdiv(columns, wide)
    _gated[(min(tiles, programs),)](
        TensorDescriptor(x_TK, [tokens, inputs], [x_TK.stride(0), 1], [rows, deep], layout),
        TensorDescriptor(weight_MK, [2 * columns, inputs], [weight_MK.stride(0), 1], [wide, deep], layout),
        TensorDescriptor(out_TN, [tokens, columns], [columns, 1], [rows, wide], layout),
        tokens,
        columns,
        triton.cdiv(inputs, deep),
        STAGES=STAGES[wide],
        GROUP=group,
        LEAD=lead,
        num_warps=4,
        **early(x_TK.device),
    )
    return out_TN
