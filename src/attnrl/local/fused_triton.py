"""The elementwise parts of a decoder layer, each in one kernel.

Shapes: T tokens, P positions, W width, H query heads, K key/value heads, D head size, F inner width of the
feed-forward part.
Every value that transformers' own modules round to the model's dtype is rounded here too, so both agree up to the
rounding of sums.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnrl.attention.early import early, follow
from attnrl.attention.pages import PAGE


@triton.jit
def _add_norm(
    X, Y, WEIGHT, SUM, NORMED, eps, W, pitch, BW: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr = False
):
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64) * W
    w = tl.arange(0, BW)
    here = w < W
    x = tl.load(X + row + w, mask=here, other=0.0)
    if PARTS:
        y = tl.zeros([BW], tl.float32)
        for part in tl.static_range(PARTS):
            y += tl.load(Y + part * pitch + row + w, mask=here, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + y.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(SUM + row + w, x, mask=here)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / W + eps)
    weight = tl.load(WEIGHT + w, mask=here, other=0.0)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(NORMED + row + w, normed.to(x.dtype), mask=here)


def add_norm(x_TW: Tensor, y: Tensor | None, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, its root-mean-square norm); without y, x itself and its norm. y is [T, W], or parts of it [S, T, W]."""
    tokens, width = x_TW.shape
    normed_TW = torch.empty_like(x_TW)
    sum_TW = x_TW if y is None else torch.empty_like(x_TW)
    parts = 0 if y is None else 1 if y.dim() == 2 else len(y)
    block = triton.next_power_of_2(width)
    _add_norm[(tokens,)](
        x_TW, x_TW if y is None else y, weight_W, sum_TW, normed_TW, eps, width, x_TW.numel(), block, parts,
        num_warps=min(8, max(1, block // 512)), **early(x_TW.device),
    )  # fmt: skip
    return sum_TW, normed_TW


@triton.jit
def _projected(X, BIAS, place, here, pitch, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Outputs of a linear module, of which X may hold parts, in float32; rounded where the module rounds."""
    x = tl.load(X + place, mask=here, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(X + part * pitch + place, mask=here, other=0.0)
    if BIAS is not None:
        x += tl.load(BIAS + place, mask=here, other=0.0).to(tl.float32)
    return x.to(dtype).to(tl.float32)


@triton.jit
def _rotated(
    x1, x2, half, WEIGHT, i, low, eps, c1, c2, s1, s2, D: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr
):
    """Both halves of x * cos + rotate_half(x) * sin, x normed first if asked; rounded where transformers rounds."""
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        w1 = tl.load(WEIGHT + i, mask=low, other=0.0).to(tl.float32)
        w2 = tl.load(WEIGHT + half + i, mask=low, other=0.0).to(tl.float32)
        x1 = ((x1 * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
        x2 = ((x2 * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    y1 = (x1 * c1).to(dtype).to(tl.float32) + (-x2 * s1).to(dtype).to(tl.float32)
    y2 = (x2 * c2).to(dtype).to(tl.float32) + (x1 * s2).to(dtype).to(tl.float32)
    return y1.to(dtype), y2.to(dtype)


@triton.jit
def _rotate_store(
    Q, KNEW, VNEW, Q_BIAS, K_BIAS, V_BIAS, COS, SIN, POSITIONS, SLOTS, OUT, KEYS, VALUES, QNORM, KNORM, eps, q_pitch,
    k_pitch, v_pitch, out_pitch, pitch,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    BHALF: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # where it goes was written long before the kernel before this one
    turn = tl.load(POSITIONS + token) * D
    slot = tl.load(SLOTS + token)
    half: tl.constexpr = D // 2
    i = tl.arange(0, BHALF)[None, :]
    low = i < half
    dtype = OUT.dtype.element_ty
    c1 = tl.load(COS + turn + i, mask=low, other=0.0).to(tl.float32)
    c2 = tl.load(COS + turn + half + i, mask=low, other=0.0).to(tl.float32)
    s1 = tl.load(SIN + turn + i, mask=low, other=0.0).to(tl.float32)
    s2 = tl.load(SIN + turn + half + i, mask=low, other=0.0).to(tl.float32)
    follow(EARLY)

    h = tl.arange(0, BH)[:, None]
    here = (h < H) & low
    q = h * D + i
    x1 = _projected(Q + token * q_pitch, Q_BIAS, q, here, pitch, PARTS, dtype)
    x2 = _projected(Q + token * q_pitch, Q_BIAS, q + half, here, pitch, PARTS, dtype)
    y1, y2 = _rotated(x1, x2, half, QNORM, i, low, eps, c1, c2, s1, s2, D, NORM, dtype)
    tl.store(OUT + token * out_pitch + q, y1, mask=here)
    tl.store(OUT + token * out_pitch + q + half, y2, mask=here)

    kv = tl.arange(0, BK)[:, None]
    there = (kv < K) & low
    k = kv * D + i
    x1 = _projected(KNEW + token * k_pitch, K_BIAS, k, there, pitch, PARTS, dtype)
    x2 = _projected(KNEW + token * k_pitch, K_BIAS, k + half, there, pitch, PARTS, dtype)
    y1, y2 = _rotated(x1, x2, half, KNORM, i, low, eps, c1, c2, s1, s2, D, NORM, dtype)
    place = (slot // PAGE * K + kv) * PAGE + slot % PAGE
    tl.store(KEYS + place * D + i, y1, mask=there)
    tl.store(KEYS + place * D + half + i, y2, mask=there)

    d = tl.arange(0, BD)[None, :]
    inside = (kv < K) & (d < D)
    v = _projected(VNEW + token * v_pitch, V_BIAS, kv * D + d, inside, pitch, PARTS, dtype)
    tl.store(VALUES + place * D + d, v.to(dtype), mask=inside)


Projections = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


def rotate_store(
    qkv: Projections,
    biases: Projections | None,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """The queries rotated, [T, X]; rotated keys and the values are stored in their slots. `norms` come before.

    The projections are [T, X], and then queries are rotated in place, or parts of them [S, T, X], to which `biases` are
    to be added.
    """
    q, k, v = qkv
    kv_heads, dim = keys.shape[1], keys.shape[3]
    heads = q.shape[-1] // dim
    parts = 1 if q.dim() == 2 else len(q)
    out_TX = q if q.dim() == 2 else torch.empty(q.shape[1:], dtype=keys.dtype, device=q.device)
    q_norm, k_norm, eps = (out_TX, out_TX, 0.0) if norms is None else norms
    _rotate_store[(len(out_TX),)](
        *qkv, *(biases or (None,) * 3), cos_PD, sin_PD, positions_T, slots_T, out_TX, keys, values, q_norm, k_norm, eps,
        q.stride(-2), k.stride(-2), v.stride(-2), out_TX.stride(0), q.stride(0), heads, kv_heads, dim,
        triton.next_power_of_2(heads), triton.next_power_of_2(kv_heads), triton.next_power_of_2(dim),
        triton.next_power_of_2(dim // 2), PAGE, norms is not None, parts,
        num_warps=max(1, triton.next_power_of_2(heads) // 16), **early(q.device),
    )  # fmt: skip
    return out_TX


@triton.jit
def _gate(GATE, UP, OUT, F, gate_pitch, up_pitch, B: tl.constexpr, EARLY: tl.constexpr = False):
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * B + tl.arange(0, B)
    here = f < F
    gate = tl.load(GATE + row * gate_pitch + f, mask=here, other=0.0)
    up = tl.load(UP + row * up_pitch + f, mask=here, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(OUT + row * F + f, (active * up).to(gate.dtype), mask=here)


def gate(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up."""
    tokens, width = gate_TF.shape
    out_TF = torch.empty(tokens, width, dtype=gate_TF.dtype, device=gate_TF.device)
    block = min(2048, triton.next_power_of_2(width))
    _gate[(tokens, triton.cdiv(width, block))](
        gate_TF, up_TF, out_TF, width, gate_TF.stride(0), up_TF.stride(0), block, num_warps=4, **early(gate_TF.device)
    )
    return out_TF
