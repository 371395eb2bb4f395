"""Matrix products of few tokens with a layer's weights, about as fast as the weights can be read.

Shapes: T tokens (at most `FEW`), K inputs and N outputs of a linear module, S parts of K that are summed apart.
Such a product reads every weight once and computes next to nothing. An output of 1,536 columns makes too few tiles to
keep every multiprocessor reading, so K is cut into parts, whose sums the next kernel adds in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnrl.attention.early import early, fetch, follow

FEW = 64  # tokens up to which these kernels were measured to be the faster ones
PROGRAMS = 96  # of a product summed in parts, about: 72 and 128 were slower on a GPU of 132 multiprocessors
AHEAD = 128  # weights of a row that a program asks for before its tokens are there
GATED = (64, 64, 5)  # tile of gate and up: columns, inputs a turn, stages at most
SUMMED = (64, 128, 6)  # of a product summed in parts
SPARE_BYTES = 8192  # of shared memory, for what Triton lays there beside the tiles


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that tiles of one program may fill."""
    if device.type != "cuda":
        return 96 * 1024
    known: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 64 * 1024)
    return known - SPARE_BYTES


def fits(x_TK: Tensor) -> bool:
    """Whether these kernels are for such an input: few tokens, half precision."""
    return len(x_TK) <= FEW and x_TK.dtype in (torch.bfloat16, torch.float16)


@triton.jit
def _product(
    X, WEIGHT, OUT, T, N, K, x_pitch, S: tl.constexpr, GATED: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr = False,
    AHEAD: tl.constexpr = 0,
):  # fmt: skip
    n, t, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BT), tl.arange(0, BK)
    part = tl.program_id(1)
    span = tl.cdiv(tl.cdiv(K, BK), S) * BK
    sums = tl.zeros([BN, BT], tl.float32)
    ups = tl.zeros([BN, BT], tl.float32)
    rows = WEIGHT + n[:, None].to(tl.int64) * K + k[None, :]
    tokens = X + t[None, :] * x_pitch + k[:, None]
    if EARLY and AHEAD:
        mine = tl.minimum(n, N - 1).to(tl.int64) * K + tl.minimum(part * span, K - AHEAD)
        fetch(WEIGHT + mine, AHEAD * 2)
        if GATED:
            fetch(WEIGHT + N.to(tl.int64) * K + mine, AHEAD * 2)
    follow(EARLY)
    for at in range(part * span, tl.minimum(part * span + span, K), BK):
        here = (n < N)[:, None] if EVEN else (n < N)[:, None] & (at + k < K)[None, :]
        live = (t < T)[None, :] if EVEN else (t < T)[None, :] & (at + k < K)[:, None]
        x = tl.load(tokens + at, mask=live, other=0.0)
        w = tl.load(rows + at, mask=here, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(w, x, sums, input_precision="ieee")
        if GATED:
            up = tl.load(rows + N.to(tl.int64) * K + at, mask=here, other=0.0, eviction_policy="evict_first")
            ups = tl.dot(up, x, ups, input_precision="ieee")
    if GATED:  # rounded where the modules round
        dtype = OUT.dtype.element_ty
        gate = sums.to(dtype).to(tl.float32)
        sums = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * ups.to(dtype).to(tl.float32)
    out = OUT + (part.to(tl.int64) * T + t[None, :]) * N + n[:, None]
    tl.store(out, sums.to(OUT.dtype.element_ty), mask=(n < N)[:, None] & (t < T)[None, :])


def _run(
    x_TK: Tensor, weight_NK: Tensor, out: Tensor, parts: int, gated: bool, tile: tuple[int, int, int], room: int
) -> Tensor:
    """Fills `out` in tiles of (columns, inputs a turn, stages at most); `room`: bytes that a program's tiles fill."""
    tokens, width = x_TK.shape
    columns, turn, most = tile
    block = max(16, triton.next_power_of_2(tokens))
    stages = min(most, room // ((columns * (1 + gated) + block) * turn * x_TK.element_size()))
    _product[(triton.cdiv(out.shape[-1], columns), parts)](
        x_TK, weight_NK, out, tokens, out.shape[-1], width, x_TK.stride(0), parts, gated, block, columns, turn,
        width % turn == 0, num_warps=4, num_stages=max(2, stages),
        AHEAD=AHEAD if width >= AHEAD and width % 8 == weight_NK.data_ptr() % 16 == 0 else 0, **early(x_TK.device),
    )  # fmt: skip
    return out


def gated(x_TK: Tensor, weight_MK: Tensor, tile: tuple[int, int, int] = GATED) -> Tensor:
    """silu(x gate^T) * (x up^T), [T, N], for gate's N rows and then up's."""
    out_TN = x_TK.new_empty(len(x_TK), len(weight_MK) // 2)
    room = shared_bytes(x_TK.device) * tile[0] // 128  # of 64 columns two programs on a multiprocessor
    return _run(x_TK, weight_MK, out_TN, 1, True, tile, room)


def parts_of(weight_NK: Tensor) -> int:
    """Parts in which a product with these weights is summed; all have work."""
    columns, turn, _ = SUMMED
    rows, width = weight_NK.shape
    turns = triton.cdiv(width, turn)
    parts = min(8, turns, max(1, round(PROGRAMS / triton.cdiv(rows, columns))))
    return int(triton.cdiv(turns, triton.cdiv(turns, parts)))


def summed_apart(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Parts [S, T, N] in float32 that add up to x weight^T."""
    parts = parts_of(weight_NK)
    out_STN = x_TK.new_empty(parts, len(x_TK), len(weight_NK), dtype=torch.float32)
    return _run(x_TK, weight_NK, out_STN, parts, False, SUMMED, shared_bytes(x_TK.device))
