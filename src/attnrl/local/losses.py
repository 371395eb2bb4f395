"""The update's loss (Eq. 1) as pure functions of per-token tensors.

Shapes: N loss tokens of a microbatch, from any number of samples. Every function returns sums or per-token values,
never a mean: the mean runs over all loss tokens of the whole minibatch, so only the learner can divide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnrl.errors import ConfigError

LOG_LIMIT = 20.0  # exp(20) = 5e8: beyond it a log-ratio only overflows, and its token is clipped anyway


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The knobs of Eq. 1.

    >>> LossOptions().clip_high
    0.28
    """

    clip_low: float = 0.2  # ratio is held above 1 - clip_low for negative advantages
    clip_high: float = 0.28  # ratio is held below 1 + clip_high for positive advantages
    kl_weight: float = 0.001  # beta: weight of the k3 KL to the frozen reference; 0: no reference model
    dual_clip: float | None = None  # with A < 0 the loss is at most dual_clip * |A|; released code: 3
    importance_cap: float | None = None  # cap of the truncated importance weight; None: off
    entropy_weight: float = 0.0  # weight of the entropy bonus

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(f"clip_low must lie in [0, 1], not {self.clip_low}")
        if self.clip_high < 0:
            raise ConfigError(f"clip_high must be at least 0, not {self.clip_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip must be greater than 1, not {self.dual_clip}")
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise ConfigError(f"importance_cap must be greater than 0, not {self.importance_cap}")
        if self.kl_weight < 0:
            raise ConfigError(f"kl_weight must be at least 0, not {self.kl_weight}")


def k3(log_ratio_N: Tensor) -> Tensor:
    """exp(d) - d - 1 per token: an estimate of KL(new || ref) that is never negative, for d = ref - new. [N]

    Deviation: d is held within +-20, so that one broken token cannot overflow the whole sum.
    """
    d_N = log_ratio_N.clamp(-LOG_LIMIT, LOG_LIMIT)
    return torch.expm1(d_N) - d_N


def importance_weights(old_N: Tensor, sampler_N: Tensor, cap: float) -> Tensor:
    """min(exp(old - sampler), cap) per token, without gradient: corrects the gap between sampler and learner. [N]"""
    return (old_N - sampler_N).clamp(-LOG_LIMIT, LOG_LIMIT).exp().clamp(max=cap).detach()


def policy_loss(new_N: Tensor, old_N: Tensor, advantages_N: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The clipped surrogate as a loss, and the probability ratio, per token. ([N], [N])

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(new - old); with `dual_clip` c and A < 0 at most c |A|.

    Paper: Eq. 1, first term.
    Deviation: the log-ratio is held within +-20, see `k3`.
    """
    ratio_N = (new_N - old_N).clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    clipped_N = ratio_N.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    if options.dual_clip is not None:
        bound_N = -options.dual_clip * advantages_N
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, bound_N), loss_N)
    return loss_N, ratio_N


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Sums over the loss tokens of a microbatch, on the device; they add up to the minibatch."""

    loss: Tensor  # carries the gradient
    sums: dict[str, Tensor]  # detached, one scalar per metric
    ratio_max: Tensor


def loss_sums(
    new_N: Tensor,
    entropy_N: Tensor,
    *,
    advantages_N: Tensor,
    behaviour_N: Tensor,
    options: LossOptions,
    reference_N: Tensor | None = None,
    old_N: Tensor | None = None,
) -> LossSums:
    """Eq. 1 summed over the tokens: clipped surrogate, plus weighted k3 KL, minus weighted entropy.

    The ratio runs against the behaviour log-probs that came with each token. With `importance_cap`, it runs against
    `old_N` (the learner at the start of the update) and each token is weighted with min(exp(old - behaviour), cap).

    Paper: Eq. 1.
    """
    base_N = behaviour_N
    weights_N = torch.ones_like(behaviour_N)
    if options.importance_cap is not None:
        assert old_N is not None, "truncated importance weights need the learner's log-probs before the update"
        base_N, weights_N = old_N, importance_weights(old_N, behaviour_N, options.importance_cap)
    policy_N, ratio_N = policy_loss(new_N, base_N, advantages_N, options)
    total_N = policy_N * weights_N
    kl_N = torch.zeros_like(new_N)
    if reference_N is not None:
        kl_N = k3(reference_N - new_N)
        total_N = total_N + options.kl_weight * kl_N
    if options.entropy_weight:
        total_N = total_N - options.entropy_weight * entropy_N
    with torch.no_grad():
        up_N, down_N = advantages_N > 0, advantages_N < 0
        dual_N = down_N & (ratio_N > (options.dual_clip or float("inf")))
        sums = {
            "loss": total_N.detach().sum(),
            "surrogate": policy_N.detach().sum(),
            "kl": kl_N.detach().sum(),
            "behaviour_kl": k3(new_N - behaviour_N).sum(),
            "entropy": entropy_N.detach().sum(),
            "clip_high": (up_N & (ratio_N > 1 + options.clip_high)).float().sum(),
            "clip_low": (down_N & (ratio_N < 1 - options.clip_low)).float().sum(),
            "dual_clip": dual_N.float().sum(),
            "importance_weight": weights_N.sum(),
        }
        ratio_max = ratio_N.max()
    return LossSums(total_N.sum(), sums, ratio_max)
