"""What our attention kernels in Triton share: a tile of keys and values added to a softmax, and the scale of scores."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
# Gluon is experimental: only the Triton versions that compile our kernels are trusted with it.
GLUON = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 10)


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
def with_sink(total, top2, sinks):
    """The softmax's sum with the sinks' logits in it; `top2`: the highest score, times log2(e)."""
    base = tl.where(top2 == -float("inf"), 0.0, top2)
    return total + tl.exp2(sinks.to(tl.float32) * 1.4426950408889634 - base)


@triton.jit
def turn(
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
def log_sum(top, total, scale2):
    return tl.where(total > 0.0, top * scale2 + tl.log2(tl.where(total > 0.0, total, 1.0)), -float("inf"))


def scales(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """What turns products into scores times log2(e), and of a soft-cap what comes before its tanh."""
    if softcap is None:
        return scale * LOG2E, None
    return softcap * LOG2E, 2 * LOG2E * scale / softcap


def precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
