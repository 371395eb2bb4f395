"""FCI on a GPU: one weighted column sum of the attention matrix per layer, without the matrix.

Shapes: T tokens of a pack, H query heads, K key/value heads, D head size, S steps of the pack, B key blocks.
With w_q = 1/|step(q)| folded into the row log-sum-exp, the sum over q of w_q * P[q, t] is
    sum over q of exp2(scale * log2(e) * <q, t> - (log2(e) * lse_q - log2(w_q))),
one product, one fused multiply-add, one exponential and one addition per pair. The product is taken as K Q^T, so that
the sum over queries runs along the registers of a thread and costs no exchange between warps.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to run the column-sum kernel: this module's, or that of `fci_hopper` (4 warps always)."""

    keys: int = 128  # keys of a program
    queries: int = 64  # queries of one loop turn
    warps: int = 8
    stages: int = 3
    registers: int = 0  # limit per thread, so that two programs fit a multiprocessor; 0: none
    precision: str = "ieee"  # of products of float32 inputs
    kernel: Literal["triton", "gluon"] = "triton"


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """What one launch of a column-sum kernel reads, and `sums_HP`, which it writes."""

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    bias_HP: torch.Tensor  # log2(w_q) - log2(e) * log-sum-exp, rows longer than the tokens: kernels read ahead
    qmin_T: torch.Tensor
    table: torch.Tensor  # `plan.key_blocks`
    sums_HP: torch.Tensor
    scale2: float  # softmax scale times log2(e)
    window: int | None
    softcap: float | None


@triton.jit
def _log2_scores(s, scale2, softcap, SOFTCAP: tl.constexpr):
    """Products as the model's softmax sees them, times log2(e), which scale2 already holds."""
    if SOFTCAP:
        # tanh(z) = 1 - 2 / (exp(2 z) + 1)
        e = tl.exp2(s * (2.0 * scale2 / softcap))
        return (1.0 - 2.0 / (e + 1.0)) * (softcap * 1.4426950408889634)
    else:
        return s * scale2


@triton.jit
def _load_rows(X, rows, live, stride, D: tl.constexpr, BD: tl.constexpr, UPCAST: tl.constexpr):
    """Queries or keys of one head, [rows, BD], zeros where not live and beyond the head size."""
    offs_d = tl.arange(0, BD)
    x = tl.load(X + rows[:, None] * stride + offs_d[None, :], mask=live[:, None] & (offs_d < D)[None, :], other=0.0)
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def _probabilities(
    k, Q, BIAS, m, q_stop, scale2, softcap, sqt, D: tl.constexpr, BM: tl.constexpr, EDGE: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """w_q * P[q, t] for BM queries from m on, [keys, BM]; at an edge, 0 for queries at or after q_stop."""
    BD: tl.constexpr = k.shape[1]
    offs_m = m + tl.arange(0, BM)
    offs_d = tl.arange(0, BD)
    if EDGE:
        live = offs_m < q_stop
        bias = tl.load(BIAS + offs_m, mask=live, other=-float("inf"))
        q = _load_rows(Q, offs_m, live, sqt, D, BD, UPCAST)
    else:
        bias = tl.load(BIAS + m + tl.arange(0, BM))
        rows = Q + offs_m[:, None] * sqt + offs_d[None, :]
        q = tl.load(rows) if D == BD else tl.load(rows, mask=(offs_d < D)[None, :], other=0.0)
        q = q.to(tl.float32) if UPCAST else q
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    return tl.exp2(_log2_scores(s, scale2, softcap, SOFTCAP) + bias[None, :])


@triton.jit
def _column_sums(
    Q, K, BIAS, QMIN, TABLE, OUT, scale2, softcap, window, T, sqt, sqh, skt, skh, G: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """OUT[h, t] = sum over q of w_q * P[q, t] for one block of keys and one head."""
    h = tl.program_id(0)
    row = TABLE + tl.program_id(1) * 6
    k_start = tl.load(row)
    k_stop = tl.load(row + 1)
    q_lo = tl.multiple_of(tl.load(row + 2), 16)  # no key of the block counts before this query
    q_full = tl.load(row + 3)  # from here on every key counts ...
    q_tail = tl.load(row + 4)  # ... until here, where the window or the sequence ends for some key
    q_stop = tl.load(row + 5)
    Q += h * sqh
    BIAS += h * T
    offs_n = k_start + tl.arange(0, BN)
    live_n = offs_n < k_stop
    k = _load_rows(K + (h // G) * skh, offs_n, live_n, skt, D, BD, UPCAST)
    qmin = tl.load(QMIN + offs_n, mask=live_n, other=2147483647)
    acc = tl.zeros([BN], tl.float32)

    head_turns = tl.cdiv(tl.maximum(tl.minimum(q_full, q_stop) - q_lo, 0), BM)
    m_full = q_lo + head_turns * BM
    m_tail = m_full + tl.maximum(q_tail - m_full, 0) // BM * BM
    tail_turns = tl.cdiv(tl.maximum(q_stop - m_tail, 0), BM)
    for turn in tl.range(0, head_turns + tail_turns):
        m = tl.multiple_of(tl.where(turn < head_turns, q_lo + turn * BM, m_tail + (turn - head_turns) * BM), 16)
        p = _probabilities(k, Q, BIAS, m, q_stop, scale2, softcap, sqt, D, BM, True, SOFTCAP, PRECISION, UPCAST)
        offs_m = m + tl.arange(0, BM)
        seen = offs_m[None, :] >= qmin[:, None]
        if WINDOW:
            seen = seen & (offs_m[None, :] - offs_n[:, None] < window)
        acc += tl.sum(tl.where(seen, p, 0.0), 1)
    for m in tl.range(m_full, m_tail, BM):
        p = _probabilities(k, Q, BIAS, m, q_stop, scale2, softcap, sqt, D, BM, False, SOFTCAP, PRECISION, UPCAST)
        acc += tl.sum(p, 1)
    tl.store(OUT + h * T + offs_n, acc, mask=live_n)


@triton.jit(do_not_specialize=["S"])  # else Triton compiles once more where it happens to be a multiple of 16
def _step_max(
    OUT,
    STEPS,
    DIVISOR,
    BEST,
    HEADS,
    T,
    S,
    H: tl.constexpr,
    BH: tl.constexpr,
    BT: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Scores of one step: reduce its keys, then the running max over heads and layers (Eq. 6)."""
    step = tl.program_id(0)
    start = tl.load(STEPS + step * 2)
    stop = tl.load(STEPS + step * 2 + 1)  # = start where the step scores 0
    divisor = tl.load(DIVISOR + step)
    offs_h = tl.arange(0, BH)
    acc = tl.zeros([BH], tl.float32)
    for t in range(start, stop, BT):
        offs_t = t + tl.arange(0, BT)
        mask = (offs_h[:, None] < H) & (offs_t[None, :] < stop)
        acc += tl.sum(tl.load(OUT + offs_h[:, None] * T + offs_t[None, :], mask=mask, other=0.0), 1)
    acc = acc / divisor
    if KEEP:
        tl.store(HEADS + offs_h * S + step, acc, mask=offs_h < H)
    # A NaN must not vanish in the maximum: a broken model would look like one without influential steps.
    best = tl.maximum(tl.load(BEST + step), tl.max(acc, 0), propagate_nan=tl.PropagateNan.ALL)
    broken = tl.max((acc != acc).to(tl.int32), 0) > 0
    tl.store(BEST + step, tl.where(broken, float("nan"), best))


@triton.jit(do_not_specialize=["T"])
def _row_lse(
    Q, K, SPAN, LSE, scale2, softcap, window, T, sqt, sqh, skt, skh, G: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Row log-sum-exp where the attention kernel gave none: one program per query block of one sequence."""
    h = tl.program_id(0)
    row = SPAN + tl.program_id(1) * 3
    seq_start = tl.load(row)
    m = tl.load(row + 1)
    m_stop = tl.load(row + 2)
    offs_m = m + tl.arange(0, BM)
    live = offs_m < m_stop
    q = _load_rows(Q + h * sqh, offs_m, live, sqt, D, BD, UPCAST)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    first = seq_start
    if WINDOW:
        first = tl.maximum(seq_start, m - window + 1)
    for n in range(first, m_stop, BN):
        offs_n = n + tl.arange(0, BN)
        k = _load_rows(K + (h // G) * skh, offs_n, offs_n < m_stop, skt, D, BD, UPCAST)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = _log2_scores(s, scale2, softcap, SOFTCAP)
        seen = offs_n[None, :] <= offs_m[:, None]
        if WINDOW:
            seen = seen & (offs_m[:, None] - offs_n[None, :] < window)
        s = tl.where(seen, s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        # A row whose window starts later in the loop has seen nothing yet: its top is still -inf.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(s - base[:, None]), 1)
        top = new_top
    tl.store(LSE + h * T + offs_m, (top + tl.log2(total)) * 0.6931471805599453, mask=live)
