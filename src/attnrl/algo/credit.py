"""Credit: weights on the advantages of tokens, from what a scoring forward says of the samples.

A credit is any function `(samples, scores, *, ...) -> list of [T] weights`; those here are named in `CREDITS`. It sees
the samples that will be trained on, and what a scoring forward says of each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from attnrl.algo.parts import Share, reads
from attnrl.types import Floats, Sample, Scores, as_floats

Credit = Callable[[Sequence[Sample], Sequence[Scores]], list[Floats]]


def weigh(samples: Sequence[Sample], weights: Sequence[Floats]) -> list[Sample]:
    """The samples with each token's advantage multiplied by its weight."""
    return [replace(s, advantages=s.advantages * w) for s, w in zip(samples, weights, strict=True)]


@reads()
def no_credit(samples: Sequence[Sample], scores: Sequence[Scores]) -> list[Floats]:
    """Every token counts in full."""
    return [np.ones(len(s.response), np.float32) for s in samples]


@reads("entropy")
def top_entropy(samples: Sequence[Sample], scores: Sequence[Scores], *, fraction: Share = 0.2) -> list[Floats]:
    """1 on the tokens at which the policy is least sure, 0 on all others.

    Of the n loss tokens of the batch, each counted in every sample that holds it, those whose entropy is at least the
    k-th largest, k = ceil(fraction n): ties with the k-th all count, so there may be more than k, never fewer.

    Paper: arXiv 2506.01939, forking tokens. The mean of the loss still runs over all loss tokens, as there.
    """
    masks = [np.ones(len(s.response), bool) if s.mask is None else s.mask for s in samples]
    entropies = [score.entropy for score in scores]
    found = np.concatenate([e[mask] for e, mask in zip(entropies, masks, strict=True)] or [as_floats([])])
    if np.isnan(found).any():
        raise ValueError("top_entropy needs the entropy of every token that carries loss; some were not scored")
    if not len(found):
        return [np.zeros(len(s.response), np.float32) for s in samples]
    k = math.ceil(round(fraction * len(found), 9))  # 0.07 * 100 is 7.000000000000001
    bar = np.partition(found, -k)[-k]
    return [as_floats((e >= bar) & mask) for e, mask in zip(entropies, masks, strict=True)]


CREDITS: dict[str, Callable[..., list[Floats]]] = {"none": no_credit, "top_entropy": top_entropy}
