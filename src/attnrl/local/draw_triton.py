"""Drawing tokens in one or two kernels.

From plain softmax the logits are read once, and a second time only where the token lies. For top-p nothing is sorted:
the smallest kept logit is found by halving what it can be until one token is left, each time by one reading of the row,
which the L2 holds.

Shapes: R rows, V vocabulary, C chunks of the vocabulary, L looks: columns of the output.
The token is the one `draw.py` defines: the cumulated distribution, in vocabulary order, inverted at one uniform number.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# The kernels' parameters are Triton values, which have no Python types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnrl.attention.early import early, follow

CHUNK = 4096


@triton.jit(do_not_specialize=["C"])
def _chunk_stats(LOGITS, TOPS, SUMS, V, pitch, inverse, C, B: tl.constexpr, EARLY: tl.constexpr = False):
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    v = chunk * B + tl.arange(0, B)
    x = tl.load(LOGITS + row * pitch + v, mask=v < V, other=-float("inf")).to(tl.float32) * inverse
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(top == -float("inf"), 0.0, top)), 0)
    tl.store(TOPS + row * C + chunk, top)
    tl.store(SUMS + row * C + chunk, total)


@triton.jit(do_not_specialize=["C"])
def _find(
    LOGITS, TOPS, SUMS, UNIFORM, COLUMN, TOKENS, LENGTHS, IDS, LOGPROBS, V, pitch, inverse, C, out_pitch,
    B: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(COLUMN)
    c = tl.arange(0, BC)
    tops = tl.load(TOPS + row * C + c, mask=c < C, other=-float("inf"))
    top = tl.max(tops, 0)
    weights = tl.load(SUMS + row * C + c, mask=c < C, other=0.0) * tl.exp(tops - top)
    weights = tl.where((c < C) & (tops != -float("inf")), weights, 0.0)  # NaN stays: it must be seen
    total = tl.sum(weights, 0)
    goal = tl.load(UNIFORM + row * out_pitch + column) * total
    upto = tl.cumsum(weights, 0)
    chunk = tl.min(tl.where((upto > goal) & (weights > 0.0), c, BC), 0)
    last = tl.max(tl.where(weights > 0.0, c, 0), 0)
    chunk = tl.where(chunk == BC, last, chunk)
    goal = goal - tl.sum(tl.where(c < chunk, weights, 0.0), 0)
    v = tl.arange(0, B)
    base = LOGITS + row * pitch + chunk.to(tl.int64) * B
    x = tl.load(base + v, mask=chunk * B + v < V, other=-float("inf")).to(tl.float32) * inverse
    p = tl.exp(x - top)
    found = tl.min(tl.where((tl.cumsum(p, 0) > goal) & (p > 0.0), v, B), 0)
    # Two sums of the same numbers differ by rounding: past the chunk's end, its last possible token is meant.
    found = tl.where(found == B, tl.max(tl.where(p > 0.0, v, 0), 0), found)
    chosen = tl.load(base + found).to(tl.float32) * inverse
    token = (chunk * B + found).to(tl.int64)
    tl.store(TOKENS + row, token)
    tl.store(LENGTHS + row, tl.load(LENGTHS + row) + 1)
    tl.store(IDS + row * out_pitch + column, token)
    tl.store(LOGPROBS + row * out_pitch + column, chosen - top - tl.log(total))


@triton.jit
def _ordered(x, HALF: tl.constexpr):
    """Integers in the order of the floats: of 16 bits where every float is a bfloat16, of 32 else."""
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, ~bits, bits | -2147483648)
    if HALF:
        return (order >> 16) & 0xFFFF
    return order ^ -2147483648  # as signed numbers


@triton.jit
def _logits(base, start, v, V):
    return tl.load(base + start + v, mask=start + v < V, other=-float("inf")).to(tl.float32)


@triton.jit
def _from(base, V, bound, top, inverse, B: tl.constexpr, HALF: tl.constexpr):
    """How much lies at or above the bound, relative to the top, and of how many tokens."""
    v = tl.arange(0, B)
    mass = tl.zeros([B], tl.float32)
    count = tl.zeros([B], tl.int32)
    for start in range(0, V, B):
        x = _logits(base, start, v, V)
        here = (_ordered(x, HALF) >= bound) & (start + v < V)
        mass += tl.where(here, tl.exp((x - top) * inverse), 0.0)
        count += here.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(count, 0)


@triton.jit
def _above(base, V, low, last, top, inverse, B: tl.constexpr, HALF: tl.constexpr):
    """How much lies above the last, and the weight of one from low to it: they are all the same."""
    v = tl.arange(0, B)
    above = tl.zeros([B], tl.float32)
    each = tl.zeros([B], tl.float32)
    for start in range(0, V, B):
        x = _logits(base, start, v, V)
        order = _ordered(x, HALF)
        p = tl.exp((x - top) * inverse)
        above += tl.where(order > last, p, 0.0)
        each = tl.maximum(each, tl.where((order >= low) & (order <= last), p, 0.0))
    return tl.sum(above, 0), tl.max(each, 0)


@triton.jit
def _nucleus(
    LOGITS, UNIFORM, COLUMN, TOKENS, LENGTHS, IDS, LOGPROBS, V, pitch, inverse, top_p, out_pitch,
    B: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(COLUMN)
    base = LOGITS + row * pitch
    v = tl.arange(0, B)
    tops = tl.full([B], -float("inf"), tl.float32)
    for start in range(0, V, B):
        x = _logits(base, start, v, V)
        tops = tl.maximum(tops, x)
    top = tl.max(tops, 0)
    mass = tl.zeros([B], tl.float32)
    for start in range(0, V, B):
        x = _logits(base, start, v, V)
        mass += tl.exp((x - top) * inverse)
    total = tl.sum(mass, 0)
    goal = top_p * total

    # The smallest kept logit lies from low to last, halved until that holds one token or one value. All below `least`
    # are together less than what may be left out, however many they are.
    least = top + tl.log(0.25 * (1.0 - top_p) * total / V) / inverse
    finite = (least > -float("inf")) & (least < float("inf"))
    low = tl.where(finite, _ordered(least, HALF), 0 if HALF else -2147483648).to(tl.int64)
    last = tl.where(finite, _ordered(top, HALF), 0xFFFF if HALF else 2147483647).to(tl.int64)
    from_low = V
    above_last = 0
    while (low < last) & (from_low - above_last > 1):
        middle = (low + last + 1) >> 1
        reached, count = _from(base, V, middle.to(tl.int32), top, inverse, B, HALF)
        enough = reached >= goal
        low = tl.where(enough, middle, low)
        from_low = tl.where(enough, count, from_low)
        last = tl.where(enough, last, middle - 1)
        above_last = tl.where(enough, above_last, count)
    low = low.to(tl.int32)
    last = last.to(tl.int32)

    # Above them all stay; of equals, the first ones, as many as the goal asks for.
    over, one = _above(base, V, low, last, top, inverse, B, HALF)
    equals = tl.maximum(tl.ceil((goal - over) / one), 1.0).to(tl.int32)
    equals = tl.minimum(equals, from_low - above_last)  # the quotient may be rounded up past them

    kept = over + one * equals
    goal = tl.load(UNIFORM + row * out_pitch + column) * kept
    before = 0.0
    seen = 0
    token = -1
    possible = 0
    for start in range(0, V, B):
        x = _logits(base, start, v, V)
        order = _ordered(x, HALF)
        equal = ((order >= low) & (order <= last)).to(tl.int32)
        stays = (order > last) | ((equal > 0) & (seen + tl.cumsum(equal, 0) <= equals))
        p = tl.where(stays & (start + v < V), tl.exp((x - top) * inverse), 0.0)
        found = tl.min(tl.where((before + tl.cumsum(p, 0) > goal) & (p > 0.0), start + v, V), 0)
        token = tl.where((token < 0) & (found < V), found, token)
        possible = tl.maximum(possible, tl.max(tl.where(p > 0.0, start + v, 0), 0))
        before += tl.sum(p, 0)
        seen += tl.sum(equal, 0)
    token = tl.where(token < 0, possible, token)  # the goal was rounded up to the whole
    chosen = tl.load(base + token).to(tl.float32)
    tl.store(TOKENS + row, token.to(tl.int64))
    tl.store(LENGTHS + row, tl.load(LENGTHS + row) + 1)
    tl.store(IDS + row * out_pitch + column, token.to(tl.int64))
    tl.store(LOGPROBS + row * out_pitch + column, (chosen - top) * inverse - tl.log(before))


def draw_into(
    logits_RV: Tensor,
    uniform_RL: Tensor,
    column_1: Tensor,
    tokens_R: Tensor,
    lengths_R: Tensor,
    ids_RL: Tensor,
    logprobs_RL: Tensor,
    temperature: float,
    top_p: float = 1.0,
) -> None:
    """Draws one token a row at `uniform_RL[:, column]`; writes it, its log-prob and the row's new length in place."""
    rows, vocabulary = logits_RV.shape
    inverse = 1.0 / temperature
    assert uniform_RL.stride(0) == ids_RL.stride(0) == logprobs_RL.stride(0)
    if top_p < 1:
        block = min(8192, triton.next_power_of_2(vocabulary))
        _nucleus[(rows,)](
            logits_RV, uniform_RL, column_1, tokens_R, lengths_R, ids_RL, logprobs_RL, vocabulary, logits_RV.stride(0),
            inverse, top_p, ids_RL.stride(0), block, logits_RV.dtype == torch.bfloat16, num_warps=16,
            **early(logits_RV.device),
        )  # fmt: skip
        return
    chunks = triton.cdiv(vocabulary, CHUNK)
    tops_RC, sums_RC = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits_RV.device)
    _chunk_stats[(rows, chunks)](
        logits_RV, tops_RC, sums_RC, vocabulary, logits_RV.stride(0), inverse, chunks, CHUNK, num_warps=4,
        **early(logits_RV.device),
    )  # fmt: skip
    _find[(rows,)](
        logits_RV, tops_RC, sums_RC, uniform_RL, column_1, tokens_R, lengths_R, ids_RL, logprobs_RL, vocabulary,
        logits_RV.stride(0), inverse, chunks, ids_RL.stride(0), CHUNK, triton.next_power_of_2(chunks), num_warps=8,
        **early(logits_RV.device),
    )  # fmt: skip
