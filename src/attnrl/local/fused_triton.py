"""The elementwise parts of a decoder layer, each in one kernel.

Shapes: T tokens, W width, H query heads, K key/value heads, D head size, F inner width of the feed-forward part.
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

from attnrl.attention.pages import PAGE


@triton.jit
def _add_norm(X, Y, WEIGHT, SUM, NORMED, eps, W, BW: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * W
    w = tl.arange(0, BW)
    here = w < W
    x = tl.load(X + row + w, mask=here, other=0.0)
    if ADD:
        y = tl.load(Y + row + w, mask=here, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(SUM + row + w, x, mask=here)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / W + eps)
    weight = tl.load(WEIGHT + w, mask=here, other=0.0)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(NORMED + row + w, normed.to(x.dtype), mask=here)


def add_norm(x_TW: Tensor, y_TW: Tensor | None, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, its root-mean-square norm); without y, x itself and its norm."""
    tokens, width = x_TW.shape
    normed_TW = torch.empty_like(x_TW)
    sum_TW = x_TW if y_TW is None else torch.empty_like(x_TW)
    block = triton.next_power_of_2(width)
    _add_norm[(tokens,)](
        x_TW, x_TW if y_TW is None else y_TW, weight_W, sum_TW, normed_TW, eps, width, block, y_TW is not None,
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return sum_TW, normed_TW


@triton.jit
def _rotate_half(x1, x2, c1, c2, s1, s2, dtype: tl.constexpr):
    """Both halves of x * cos + rotate_half(x) * sin, each product rounded like transformers' own."""
    a = (x1 * c1).to(dtype).to(tl.float32)
    b = (-x2 * s1).to(dtype).to(tl.float32)
    c = (x2 * c2).to(dtype).to(tl.float32)
    d = (x1 * s2).to(dtype).to(tl.float32)
    return (a + b).to(dtype), (c + d).to(dtype)


@triton.jit
def _rotate_store(
    QKV, COS, SIN, SLOTS, KEYS, VALUES, QNORM, KNORM, eps, pitch,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    BHALF: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + token)
    h = tl.arange(0, BH)[:, None]
    i = tl.arange(0, BHALF)[None, :]
    half: tl.constexpr = D // 2
    low = i < half
    base = QKV + token * pitch
    dtype = QKV.dtype.element_ty
    c1 = tl.load(COS + token * D + i, mask=low, other=0.0).to(tl.float32)
    c2 = tl.load(COS + token * D + half + i, mask=low, other=0.0).to(tl.float32)
    s1 = tl.load(SIN + token * D + i, mask=low, other=0.0).to(tl.float32)
    s2 = tl.load(SIN + token * D + half + i, mask=low, other=0.0).to(tl.float32)
    # Queries and keys lie side by side: H + K heads to rotate.
    here = (h < H + K) & low
    x1 = tl.load(base + h * D + i, mask=here, other=0.0).to(tl.float32)
    x2 = tl.load(base + h * D + half + i, mask=here, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        w1 = tl.where(h < H, tl.load(QNORM + i, mask=low, other=0.0), tl.load(KNORM + i, mask=low, other=0.0))
        w2 = tl.load(QNORM + half + i, mask=low, other=0.0)
        w2 = tl.where(h < H, w2, tl.load(KNORM + half + i, mask=low, other=0.0)).to(tl.float32)
        w1 = w1.to(tl.float32)
        x1 = ((x1 * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
        x2 = ((x2 * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    y1, y2 = _rotate_half(x1, x2, c1, c2, s1, s2, dtype)
    tl.store(base + h * D + i, y1, mask=here & (h < H))
    tl.store(base + h * D + half + i, y2, mask=here & (h < H))
    page, place = slot // PAGE, slot % PAGE
    key = ((page * K + h - H) * PAGE + place) * D + i
    tl.store(KEYS + key, y1, mask=here & (h >= H))
    tl.store(KEYS + key + half, y2, mask=here & (h >= H))
    kv = tl.arange(0, BK)[:, None]
    d = tl.arange(0, BD)[None, :]
    there = (kv < K) & (d < D)
    v = tl.load(base + (H + K + kv) * D + d, mask=there, other=0.0)
    tl.store(VALUES + ((page * K + kv) * PAGE + place) * D + d, v, mask=there)


def rotate_store(
    qkv_TX: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    slots_T: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    heads: int,
) -> None:
    """Rotates queries in place, stores rotated keys and the values in their slots; `norms` come before the rotation."""
    kv_heads, dim = keys.shape[1], keys.shape[3]
    q_norm, k_norm, eps = (qkv_TX, qkv_TX, 0.0) if norms is None else norms
    _rotate_store[(qkv_TX.shape[0],)](
        qkv_TX, cos_TD, sin_TD, slots_T, keys, values, q_norm, k_norm, eps, qkv_TX.stride(0), heads, kv_heads, dim,
        triton.next_power_of_2(heads + kv_heads), triton.next_power_of_2(kv_heads), triton.next_power_of_2(dim),
        triton.next_power_of_2(dim // 2), PAGE, norms is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gate(GATE, UP, OUT, count, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    here = at < count
    gate = tl.load(GATE + at, mask=here, other=0.0)
    up = tl.load(UP + at, mask=here, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(OUT + at, (active * up).to(gate.dtype), mask=here)


def gate(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up."""
    out_TF = torch.empty_like(gate_TF)
    count = gate_TF.numel()
    block = 1024
    _gate[(triton.cdiv(count, block),)](gate_TF, up_TF, out_TF, count, block, num_warps=4)
    return out_TF
