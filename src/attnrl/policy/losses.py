"""Losses by name (`update.loss`), as pure functions of per-token tensors.

A loss is a function `(new_N, old_N, advantages_N, counts_S, *, ...)` that returns a TokenLoss or a bare tensor [N].
`old_N` are the log-probs the ratio runs against, without gradient. It returns values per token, never a mean: the mean
runs over the whole minibatch, so only the learner can divide. Keyword-only parameters are its options
(`update.loss_options`); those named like a key of [update] get that key's value.

Shapes: N loss tokens of a microbatch, S samples they come from, whole and in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import torch
from annotated_types import Gt, Lt
from torch import Tensor

LOG_LIMIT = 20.0  # exp(20) = 5e8: beyond it a log-ratio only overflows, and its token is clipped anyway

Positive = Annotated[float, Gt(0)]
Low = Annotated[float, Gt(0), Lt(1)]
Loss = Callable[..., Any]
SomeLoss = TypeVar("SomeLoss", bound=Loss)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """What a loss says of each token."""

    loss_N: Tensor  # carries the gradient
    marks: dict[str, Tensor] = field(default_factory=dict)  # bool [N] each; their share is the metric policy/NAME


def mean_over_samples(loss: SomeLoss) -> SomeLoss:
    """Declares that the minibatch is a mean over samples of the mean over each one's tokens; otherwise one mean over
    all tokens."""
    loss.mean_over_samples = True  # type: ignore[attr-defined]
    return loss


def ratio(new_N: Tensor, old_N: Tensor) -> Tensor:
    """exp(new - old): how much likelier the policy makes each token now. [N]

    Deviation: the log-ratio is held within +-20, so that one broken token cannot overflow the whole sum.
    """
    return (new_N - old_N).clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, *, low: float, high: float) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and which tokens were held on either side."""
    held_N = ratio_N.clamp(1 - low, 1 + high)
    loss_N = -torch.minimum(ratio_N * advantages_N, held_N * advantages_N)
    marks = {
        "clip_high": (advantages_N > 0) & (ratio_N > 1 + high),
        "clip_low": (advantages_N < 0) & (ratio_N < 1 - low),
    }
    return TokenLoss(loss_N, marks)


def clip(
    new_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    counts_S: Tensor,
    *,
    clip_low: Low,
    clip_high: Positive,
    dual_clip: Annotated[float, Gt(1)] | None,
) -> TokenLoss:
    """The clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(new - old).

    With `dual_clip` c and A < 0 the loss is at most c |A|.

    Paper: Eq. 1, first term.
    """
    ratio_N = ratio(new_N, old_N)
    found = clipped_surrogate(ratio_N, advantages_N, low=clip_low, high=clip_high)
    if dual_clip is None:
        return found
    down_N = advantages_N < 0
    loss_N = torch.where(down_N, torch.minimum(found.loss_N, -dual_clip * advantages_N), found.loss_N)
    return TokenLoss(loss_N, {**found.marks, "dual_clip": down_N & (ratio_N > dual_clip)})


def cispo(new_N: Tensor, old_N: Tensor, advantages_N: Tensor, counts_S: Tensor, *, cap: Positive = 5.0) -> TokenLoss:
    """-stop(min(r, cap)) A log p: the clipped ratio is a weight, so that no token loses its gradient.

    Paper: CISPO (arXiv 2506.13585). Deviation: an upper bound only, on the ratio itself.
    """
    ratio_N = ratio(new_N.detach(), old_N)
    return TokenLoss(-ratio_N.clamp(max=cap) * advantages_N * new_N, {"clip_high": ratio_N > cap})


@mean_over_samples
def gspo(
    new_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    counts_S: Tensor,
    *,
    low: Low = 3e-4,
    high: Positive = 4e-4,
) -> TokenLoss:
    """The clipped surrogate of one ratio a sample, exp(mean log-ratio of its tokens), within 1 - low and 1 + high.

    Every token has its sample's ratio as value and its own log-prob's gradient: stop(s / p) p. With one advantage a
    sample that is the sequence-level loss; ours differ from token to token.

    Paper: GSPO-token (arXiv 2507.18071).
    """
    log_ratio_N = (new_N - old_N).detach().clamp(-LOG_LIMIT, LOG_LIMIT).double()
    mean_S = torch.segment_reduce(log_ratio_N, "mean", lengths=counts_S)
    sample_N = mean_S.exp().to(new_N.dtype).repeat_interleave(counts_S)
    ratio_N = sample_N * (new_N - new_N.detach()).exp()
    return clipped_surrogate(ratio_N, advantages_N, low=low, high=high)


LOSSES: dict[str, Loss] = {"clip": clip, "cispo": cispo, "gspo": gspo}
