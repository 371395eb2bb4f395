"""What a decoder layer's elementwise parts and its log-probs send back, each in one kernel; rotation both ways.

Shapes: T tokens, W width, H heads, D head size, F inner width of the feed-forward part, C positions, V vocabulary.
The forward kernels are those of the sampler (`fused_triton`) and of the scorer (`scoring.head_triton`).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # rows whose gradients of the norm's weight one program adds up


@triton.jit(do_not_specialize=["T"])
def _norm_back(
    X, WEIGHT, G_NORMED, G_SUM, DX, DWEIGHT, eps, T, W, BW: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr
):
    w = tl.arange(0, BW)
    here = w < W
    weight = tl.load(WEIGHT + w, mask=here, other=0.0).to(tl.float32)
    dweight = tl.zeros([BW], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for r in range(0, tl.minimum(ROWS, T - first)):
        row = (first + r) * W
        x = tl.load(X + row + w, mask=here, other=0.0).to(tl.float32)
        g = tl.load(G_NORMED + row + w, mask=here, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / W + eps)
        normed = x * scale
        dweight += g * normed
        g *= weight
        dx = scale * (g - normed * (tl.sum(g * normed, 0) / W))
        if ADD:
            dx += tl.load(G_SUM + row + w, mask=here, other=0.0).to(tl.float32)
        tl.store(DX + row + w, dx.to(DX.dtype.element_ty), mask=here)
    tl.store(DWEIGHT + tl.program_id(0) * W + w, dweight, mask=here)


def norm_back(
    x_TW: Tensor, weight_W: Tensor, eps: float, g_normed_TW: Tensor, g_sum_TW: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, from those of the norm of x and, where given, of x itself."""
    tokens, width = x_TW.shape
    programs = triton.cdiv(tokens, ROWS)
    dx_TW = torch.empty_like(x_TW)
    dweight_PW = torch.empty(programs, width, device=x_TW.device)
    block = triton.next_power_of_2(width)
    g_normed_TW = g_normed_TW.contiguous()
    summed = g_normed_TW if g_sum_TW is None else g_sum_TW.contiguous()
    _norm_back[(programs,)](
        x_TW, weight_W, g_normed_TW, summed, dx_TW, dweight_PW, eps, tokens, width, block, ROWS, g_sum_TW is not None,
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return dx_TW, dweight_PW.sum(0).to(weight_W.dtype)


@triton.jit
def _rotate(
    X, OUT, COS, SIN, H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BHALF: tl.constexpr, BACK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    i = tl.arange(0, BHALF)[None, :]
    h = tl.arange(0, BH)[:, None]
    low = i < half
    here = (h < H) & low
    dtype = X.dtype.element_ty
    c1 = tl.load(COS + token * D + i, mask=low, other=0.0).to(tl.float32)
    c2 = tl.load(COS + token * D + half + i, mask=low, other=0.0).to(tl.float32)
    s1 = tl.load(SIN + token * D + i, mask=low, other=0.0).to(tl.float32)
    s2 = tl.load(SIN + token * D + half + i, mask=low, other=0.0).to(tl.float32)
    at = token * H * D + h * D + i
    x1 = tl.load(X + at, mask=here, other=0.0).to(tl.float32)
    x2 = tl.load(X + at + half, mask=here, other=0.0).to(tl.float32)
    if BACK:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:  # rounded where transformers rounds
        y1 = (x1 * c1).to(dtype).to(tl.float32) + (-x2 * s1).to(dtype).to(tl.float32)
        y2 = (x2 * c2).to(dtype).to(tl.float32) + (x1 * s2).to(dtype).to(tl.float32)
    tl.store(OUT + at, y1.to(dtype), mask=here)
    tl.store(OUT + at + half, y2.to(dtype), mask=here)


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, back: bool = False) -> Tensor:
    """x * cos + rotate_half(x) * sin; `back`: the gradient of x from that of the result."""
    x_THD = x_THD.contiguous()
    tokens, heads, dim = x_THD.shape
    out_THD = torch.empty_like(x_THD)
    block = triton.next_power_of_2(heads)
    half = triton.next_power_of_2(dim // 2)
    _rotate[(tokens,)](x_THD, out_THD, cos_TD, sin_TD, heads, dim, block, half, back, num_warps=4)
    return out_THD


@triton.jit
def _gate_back(GATE, UP, G, count, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    here = at < count
    gate = tl.load(GATE + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(UP + at, mask=here, other=0.0).to(tl.float32)
    g = tl.load(G + at, mask=here, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(GATE + at, (g * up * s * (1.0 + gate * (1.0 - s))).to(GATE.dtype.element_ty), mask=here)
    tl.store(UP + at, (g * gate * s).to(UP.dtype.element_ty), mask=here)


def gate_back(gate_TF: Tensor, up_TF: Tensor, g_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both factors of silu(gate) * up, in the place of the factors: they are the largest of a layer.

    The factors lie without gaps.
    """
    block = 1024
    grid = (triton.cdiv(gate_TF.numel(), block),)
    _gate_back[grid](gate_TF, up_TF, g_TF.contiguous(), gate_TF.numel(), block, num_warps=4)
    return gate_TF, up_TF


@triton.jit
def _stats_back(LOGITS, TARGETS, LOGPROBS, ENTROPY, G_LOGPROB, G_ENTROPY, OUT, V, inverse, BV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    here = v < V
    target = tl.load(TARGETS + row)
    lse = tl.load(LOGITS + row * V + target).to(tl.float32) * inverse - tl.load(LOGPROBS + row)
    logprob = tl.load(LOGITS + row * V + v, mask=here, other=-float("inf")).to(tl.float32) * inverse - lse
    p = tl.exp(logprob)
    g = tl.load(G_LOGPROB + row)
    spread = tl.where(p > 0.0, p * (logprob + tl.load(ENTROPY + row)), 0.0)
    d = g * (tl.where(v == target, 1.0, 0.0) - p) - tl.load(G_ENTROPY + row) * spread
    tl.store(OUT + row * V + v, (d * inverse).to(OUT.dtype.element_ty), mask=here)


def stats_back(
    logits_CV: Tensor,
    targets_C: Tensor,
    logprobs_C: Tensor,
    entropy_C: Tensor,
    g_logprobs_C: Tensor,
    g_entropy_C: Tensor,
    *,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits, in `dtype`, from those of the targets' log-probs and of the entropies."""
    count, vocabulary = logits_CV.shape
    out_CV = torch.empty_like(logits_CV, dtype=dtype)
    block = min(4096, triton.next_power_of_2(vocabulary))
    _stats_back[(count, triton.cdiv(vocabulary, block))](
        logits_CV, targets_C, logprobs_C, entropy_C, g_logprobs_C.contiguous(), g_entropy_C.contiguous(), out_CV,
        vocabulary, 1.0 / temperature, block, num_warps=8,
    )  # fmt: skip
    return out_CV
