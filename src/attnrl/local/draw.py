"""Drawing tokens: a random stream per request, and the distribution that is really drawn from.

Shapes: R rows, V vocabulary.

A token is drawn by inverting the cumulative distribution, in vocabulary order, at one uniform number that depends on
(request seed, index of the token) alone. So a draw does not depend on its neighbours, the batch size or its row. Why
not Gumbel noise: it needs V hashed numbers for each token instead of one, and is no more stable, since either way a
rounding difference of size e in the logits changes a token with probability of order e. Why in vocabulary order and
not sorted by probability: two nearly equal probabilities may change places by a rounding difference, and that would
change the token with a probability as large as theirs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnrl.errors import ConfigError
from attnrl.types import Sampling

FEW = 1024  # likeliest tokens, among which top-p mostly cuts: a CPU finds them in a twentieth of the time of sorting
_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the stride of the counter
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(word: int) -> int:
    """The int64 with the same bits as the 64-bit word."""
    return word - (1 << 64) if word >> 63 else word


def _mix(word: int) -> int:
    """SplitMix64's finalizer: a bijection of 64-bit words in which every output bit depends on every input bit."""
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def stream_of(seed: int) -> int:
    """The start of a seed's random stream, as an int64. Any integer is a seed; they count modulo 2^64.

    >>> stream_of(0) != stream_of(1)
    True
    """
    return _signed(_mix((seed + _GAMMA) & _WORD))


def _shift(words: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's `>>` copies the sign bit."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(streams_R: Tensor, index_R: Tensor) -> Tensor:
    """Uniform float32 numbers in [0, 1) for token `index` of each stream: [R].

    Integer arithmetic that wraps modulo 2^64, so CPU and CUDA give the same bits. 24 bits: all that float32 can hold.

    >>> a = uniforms(torch.tensor([stream_of(5)]), torch.tensor([3]))
    >>> b = uniforms(torch.tensor([stream_of(1), stream_of(5)]), torch.tensor([9, 3]))
    >>> bool(a[0] == b[1])
    True
    """
    words = streams_R + (index_R + 1) * _signed(_GAMMA)
    words = (words ^ _shift(words, 30)) * _signed(_MIX_1)
    words = (words ^ _shift(words, 27)) * _signed(_MIX_2)
    words = words ^ _shift(words, 31)
    return _shift(words, 40).to(torch.float32) * 2.0**-24


def check_sampling(sampling: Sampling) -> None:
    """Raises ConfigError where a knob is out of range."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ConfigError(f"temperature = {sampling.temperature}: must be 0 (greedy) or a positive number")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"top_p = {sampling.top_p}: must be in (0, 1]; 1 switches it off")
    if sampling.top_k < 0:
        raise ConfigError(f"top_k = {sampling.top_k}: must be 0 (off) or a positive number of tokens")


def kept_tokens(scaled_RV: Tensor, sampling: Sampling) -> Tensor:
    """Which tokens top-k and top-p leave, from logits already divided by the temperature: bool [R, V].

    top_k keeps the k likeliest (of equals, the lowest ids); top_p then keeps, of what is left and renormalised, the
    fewest likeliest tokens whose probabilities reach top_p. The likeliest token always stays.
    """
    if scaled_RV.device.type != "cpu":  # elsewhere the host must not wait for what was found
        return _kept_by_sorting(scaled_RV, sampling)
    vocabulary = scaled_RV.shape[-1]
    count = min(sampling.top_k or vocabulary, vocabulary)
    few = min(count, FEW)
    top_RF = torch.topk(scaled_RV, few).values
    kept_R = torch.full((len(top_RF), 1), few)
    beyond_R = torch.full((len(top_RF),), few < count)
    if sampling.top_p < 1:
        if few == count:
            probs_RF = torch.softmax(top_RF, dim=-1)
        else:
            probs_RF = torch.exp(top_RF - torch.logsumexp(scaled_RV, dim=-1, keepdim=True))
        keep_RF = torch.cumsum(probs_RF, dim=-1) - probs_RF < sampling.top_p
        kept_R = keep_RF.sum(dim=-1, keepdim=True).clamp_(min=1)
        beyond_R &= keep_RF[:, -1] if count == vocabulary else True
    last_R = top_RF.gather(1, kept_R - 1)
    keep_RV, equal_RV = scaled_RV > last_R, scaled_RV == last_R
    left_R = kept_R - keep_RV.sum(dim=-1, keepdim=True)
    if bool((equal_RV.sum(dim=-1, keepdim=True) > left_R).any()):
        equal_RV &= torch.cumsum(equal_RV, dim=-1) <= left_R
    keep_RV |= equal_RV
    if bool(beyond_R.any()):
        keep_RV[beyond_R] = _kept_by_sorting(scaled_RV[beyond_R], sampling)
    return keep_RV


def _kept_by_sorting(scaled_RV: Tensor, sampling: Sampling) -> Tensor:
    sorted_RV, order_RV = torch.sort(scaled_RV, dim=-1, descending=True, stable=True)
    keep_RV = torch.ones_like(sorted_RV, dtype=torch.bool)
    if sampling.top_k:
        keep_RV[:, sampling.top_k :] = False
        sorted_RV = sorted_RV.masked_fill(~keep_RV, -torch.inf)
    if sampling.top_p < 1:
        probs_RV = torch.softmax(sorted_RV, dim=-1)
        keep_RV &= torch.cumsum(probs_RV, dim=-1) - probs_RV < sampling.top_p
    return torch.zeros_like(keep_RV).scatter_(1, order_RV, keep_RV)


def draw(logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row, int64 [R], and its log-prob under the distribution it was drawn from, float32 [R].

    That distribution is softmax(logits / temperature), cut by top-k and top-p and renormalised. At temperature 0 it is
    a point mass on the likeliest token (of equals, the lowest id), so the log-prob is 0.
    """
    logits_RV = logits_RV.float()
    if sampling.temperature == 0:
        ids_R = logits_RV.argmax(dim=-1)
        return ids_R, torch.zeros_like(uniform_R)
    scaled_RV = logits_RV if sampling.temperature == 1 else logits_RV / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        scaled_RV = scaled_RV.masked_fill(~kept_tokens(scaled_RV, sampling), -torch.inf)
    logprobs_RV = torch.log_softmax(scaled_RV, dim=-1)
    probs_RV = logprobs_RV.exp()
    ids_R = invert_cdf(probs_RV, uniform_R)
    return ids_R, logprobs_RV.gather(1, ids_R[:, None])[:, 0]


def invert_cdf(probs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """First token whose cumulated probability exceeds `uniform` of the total, int64 [R]: never an impossible one."""
    cdf_RV = torch.cumsum(probs_RV, dim=-1)
    total_R = cdf_RV[:, -1]
    # u * total may round up to the total itself: stay below it, so that some token exceeds the target.
    target_R = torch.minimum(uniform_R * total_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    ids_R = torch.searchsorted(cdf_RV, target_R[:, None], right=True)[:, 0].clamp_(max=probs_RV.shape[1] - 1)
    if probs_RV.device.type == "cpu":
        return ids_R  # a sequential sum never falls, so the token found has a positive probability
    # A parallel sum may fall by a rounding error: then the token found may be impossible.
    found_R = probs_RV.gather(1, ids_R[:, None])[:, 0]
    return torch.where(found_R > 0, ids_R, probs_RV.argmax(dim=-1))
