"""Log-prob and entropy of rows of logits in one reading of them.

Shapes: N positions, V vocabulary.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# The kernel's parameters are Triton values, which have no Python types.

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl


@triton.jit
def _row_stats(LOGITS, TARGETS, LOGPROBS, ENTROPY, V, pitch, inverse, BV: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = LOGITS + row * pitch
    top = -float("inf")
    total = 0.0  # sum of exp(x - top)
    below = 0.0  # sum of exp(x - top) * (x - top): kept relative to the top, so that little cancels
    for start in range(0, V, BV):
        offs = start + tl.arange(0, BV)
        x = tl.load(base + offs, mask=offs < V, other=-float("inf")).to(tl.float32) * inverse
        new_top = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(top == -float("inf"), 0.0, top - new_top)
        keep = tl.where(top == -float("inf"), 0.0, tl.exp(shift))
        from_top = x - tl.where(new_top == -float("inf"), 0.0, new_top)  # no token so far: -inf, not NaN
        e = tl.exp(from_top)
        below = keep * (below + total * shift) + tl.sum(tl.where(e > 0.0, e * from_top, 0.0), 0)
        total = keep * total + tl.sum(e, 0)
        top = new_top
    target = tl.load(TARGETS + row)
    chosen = tl.load(base + target).to(tl.float32) * inverse
    log_total = tl.log(total)
    tl.store(LOGPROBS + row, chosen - top - log_total)
    tl.store(ENTROPY + row, log_total - below / total)


def row_stats(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy in nats of each row at the temperature, [N] each, in float32."""
    count, vocabulary = logits_NV.shape
    logprobs_N = torch.empty(count, device=logits_NV.device)
    entropy_N = torch.empty_like(logprobs_N)
    block = min(8192, triton.next_power_of_2(vocabulary))
    with torch.cuda.device(logits_NV.device) if logits_NV.is_cuda else nullcontext():
        _row_stats[(count,)](
            logits_NV,
            targets_N,
            logprobs_N,
            entropy_N,
            vocabulary,
            logits_NV.stride(0),
            1.0 / temperature,
            BV=block,
            num_warps=8,
        )
    return logprobs_N, entropy_N
