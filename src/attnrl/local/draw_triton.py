"""Drawing tokens in one or two kernels.

From plain softmax the logits are read once, and a second time only where the token lies. For top-p nothing is sorted:
the smallest kept logit is found by cutting what it can be in four until one value is left, each time by one reading of
the row.

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
def _ordered(x):
    """32-bit integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits ^ -2147483648, bits)


@triton.jit
def _float(order):
    """The float of an integer of `_ordered`."""
    return tl.where(order < 0, ~(order ^ -2147483648), order).to(tl.float32, bitcast=True)


@triton.jit
def _logits(base, start, v, V):
    return tl.load(base + start + v, mask=start + v < V, other=-float("inf")).to(tl.float32)


@triton.jit
def _top_and_total(base, V, inverse, B: tl.constexpr):
    """The largest logit, and the weights of all relative to it."""
    v = tl.arange(0, B)
    tops = tl.full([B], -float("inf"), tl.float32)
    mass = tl.zeros([B], tl.float32)
    for start in range(0, V, B):
        x = _logits(base, start, v, V)
        higher = tl.maximum(tops, x)
        from_higher = tl.where(higher == -float("inf"), 0.0, higher)
        mass = mass * tl.exp((tops - from_higher) * inverse) + tl.exp((x - from_higher) * inverse)
        tops = higher
    top = tl.max(tops, 0)
    return top, tl.sum(mass * tl.exp((tops - top) * inverse), 0)


@triton.jit
def _bound(low, last, share):
    """The integer of the float at that share of the way; above low, so that the search goes on."""
    bottom = _float(low)
    return tl.minimum(tl.maximum(_ordered(bottom + share * (_float(last) - bottom)), low + 1), last)


@triton.jit
def _masses(base, V, first, second, third, low, last, top, inverse, B: tl.constexpr):
    """How much lies at or above each of three bounds, and the smallest and the largest logit from low to last."""
    v = tl.arange(0, B)
    at_first = tl.zeros([B], tl.float32)
    at_second = tl.zeros([B], tl.float32)
    at_third = tl.zeros([B], tl.float32)
    smallest = tl.full([B], 2147483647, tl.int32)
    largest = tl.full([B], -2147483648, tl.int32)
    for start in range(0, V, B):
        x = _logits(base, start, v, V)
        order = _ordered(x)
        p = tl.exp((x - top) * inverse)
        at_first += tl.where(order >= first, p, 0.0)
        at_second += tl.where(order >= second, p, 0.0)
        at_third += tl.where(order >= third, p, 0.0)
        here = (order >= low) & (order <= last)
        smallest = tl.minimum(smallest, tl.where(here, order, 2147483647))
        largest = tl.maximum(largest, tl.where(here, order, -2147483648))
    sums = tl.sum(at_first, 0), tl.sum(at_second, 0), tl.sum(at_third, 0)
    return sums[0], sums[1], sums[2], tl.min(smallest, 0), tl.max(largest, 0)


@triton.jit
def _smallest_kept(base, V, top, total, top_p, inverse, B: tl.constexpr):
    """Where the smallest kept logit lies, as integers from low to last, cut in four until that holds one value; how
    much lies at or above low, and how much above last.
    """
    goal = top_p * total
    # All below `least` are together less than what may be left out, or than rounding, however many they are.
    least = top + tl.log(0.25 * tl.maximum(1.0 - top_p, 1e-7) * total / V) / inverse
    real = total == total  # else there is nothing to search, and NaN must be seen
    low = tl.where(real, _ordered(least), -2147483648)
    last = tl.where(real, _ordered(top), -2147483648)
    at_low = total
    over = 0.0
    while low < last:
        first, second, third = _bound(low, last, 0.25), _bound(low, last, 0.5), _bound(low, last, 0.75)
        at_first, at_second, at_third, smallest, largest = _masses(
            base, V, first, second, third, low, last, top, inverse, B
        )
        if at_third >= goal:
            low, at_low = third, at_third
        elif at_second >= goal:
            low, at_low, last, over = second, at_second, third - 1, at_third
        elif at_first >= goal:
            low, at_low, last, over = first, at_first, second - 1, at_second
        else:
            last, over = first - 1, at_first
        low, last = tl.maximum(low, smallest), tl.minimum(last, largest)
    return low, last, at_low, over


@triton.jit
def _nucleus(
    LOGITS, UNIFORM, COLUMN, TOKENS, LENGTHS, IDS, LOGPROBS, V, pitch, inverse, top_p, out_pitch,
    B: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(COLUMN)
    base = LOGITS + row * pitch
    top, total = _top_and_total(base, V, inverse, B)
    low, last, at_low, over = _smallest_kept(base, V, top, total, top_p, inverse, B)

    # Above last all stay; of equals at it, the first ones, as many as the goal asks for.
    one = tl.exp((_float(last) - top) * inverse)
    equals = tl.maximum(tl.ceil((top_p * total - over) / one), 1.0).to(tl.int32)
    kept = tl.minimum(over + one * equals, at_low)  # the quotient may be rounded up past them
    goal = tl.load(UNIFORM + row * out_pitch + column) * kept
    before = 0.0
    seen = 0
    token = -1
    possible = 0
    v = tl.arange(0, B)
    for start in range(0, V, B):
        x = _logits(base, start, v, V)
        order = _ordered(x)
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
        block = min(4096, triton.next_power_of_2(vocabulary))
        _nucleus[(rows,)](
            logits_RV, uniform_RL, column_1, tokens_R, lengths_R, ids_RL, logprobs_RL, vocabulary, logits_RV.stride(0),
            inverse, top_p, ids_RL.stride(0), block, num_warps=16, **early(logits_RV.device),
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
