"""Eq. 1 as the section [update] states it: a loss by name, importance weights, KL to the reference, entropy bonus.

Shapes: N loss tokens of a microbatch, S samples they come from, whole and in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnrl.algo.parts import bind, check_call
from attnrl.algo.promises import broken
from attnrl.config import UpdateConfig, check_options
from attnrl.errors import ConfigError
from attnrl.policy.losses import LOG_LIMIT, LOSSES, TokenLoss, ratio


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """What the update minimises; `objective` makes it from a config."""

    loss: partial[Any]  # bound: (new_N, old_N, advantages_N, counts_S) -> TokenLoss or tensor
    weights: UpdateConfig  # of KL, entropy and importance

    @property
    def mean_over_samples(self) -> bool:
        """Whether the loss declares so; otherwise one mean over all loss tokens of a minibatch."""
        return getattr(self.loss.func, "mean_over_samples", False)

    @property
    def needs_old(self) -> bool:
        """Whether it wants the learner's log-probs from before the update."""
        return self.weights.importance_cap is not None or self.weights.importance_mask is not None

    def units(self, counts: Sequence[int]) -> int:
        """What the mean of the loss runs over: of samples with so many loss tokens each, the tokens or the samples."""
        return sum(count > 0 for count in counts) if self.mean_over_samples else sum(counts)


def objective(options: UpdateConfig) -> Objective:
    """The objective of an [update] section; a wrong name or option of the loss raises ConfigError."""
    try:
        loss = bind(LOSSES, options.loss, options.loss_options, knobs=dict(options))
        check_options(loss.func, options.loss_options)
        check_call(loss, "new_N", "base_N", "advantages_N", "counts_S")
    except ValueError as error:
        raise ConfigError(f"update.loss: {error}") from None
    return Objective(loss, options)


def k3(log_ratio_N: Tensor) -> Tensor:
    """exp(d) - d - 1 per token: an estimate of KL(new || ref) that is never negative, for d = ref - new. [N]

    Deviation: d is held within +-20, so that one broken token cannot overflow the whole sum.
    """
    d_N = log_ratio_N.clamp(-LOG_LIMIT, LOG_LIMIT)
    return torch.expm1(d_N) - d_N


def importance_weights(
    old_N: Tensor, sampler_N: Tensor, *, cap: float | None = None, mask: tuple[float, float] | None = None
) -> Tensor:
    """w = exp(old - sampler) per token, without gradient: corrects the gap between sampler and learner. [N]

    Truncated: min(w, cap). Masked: w within the bounds of `mask` (both included), 0 outside.
    """
    weights_N = ratio(old_N, sampler_N).detach()
    if mask is not None:
        weights_N = torch.where((weights_N >= mask[0]) & (weights_N <= mask[1]), weights_N, 0.0)
    return weights_N if cap is None else weights_N.clamp(max=cap)


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Sums over the loss tokens of a microbatch, on the device; they add up to the minibatch."""

    loss: Tensor  # carries the gradient; to be divided by the minibatch's `units`
    units: int  # loss tokens of the microbatch, or its samples where the mean runs over samples
    sums: dict[str, Tensor]  # detached, one scalar per metric
    ratio_max: Tensor


def loss_sums(
    new_N: Tensor,
    entropy_N: Tensor,
    *,
    advantages_N: Tensor,
    behaviour_N: Tensor,
    counts: Sequence[int],
    objective: Objective,
    reference_N: Tensor | None = None,
    old_N: Tensor | None = None,
) -> LossSums:
    """Eq. 1 summed over the tokens: the loss, plus weighted k3 KL, minus weighted entropy. `counts` are the loss tokens
    of each sample.

    The ratio runs against the behaviour log-probs that came with each token. With importance weights it runs against
    `old_N` (the learner at the start of the update) and each token's loss is weighted; KL and entropy are not.

    Paper: Eq. 1.
    """
    base_N, options = behaviour_N, objective.weights
    weights_N = torch.ones_like(behaviour_N)
    if objective.needs_old:
        assert old_N is not None, "importance weights need the learner's log-probs before the update"
        cap, mask = options.importance_cap, options.importance_mask
        base_N, weights_N = old_N, importance_weights(old_N, behaviour_N, cap=cap, mask=mask)
    counts_S = torch.tensor(counts, device=new_N.device)
    found = objective.loss(new_N, base_N, advantages_N, counts_S)
    policy = found if isinstance(found, TokenLoss) else TokenLoss(found)
    if not isinstance(policy.loss_N, Tensor) or policy.loss_N.shape != new_N.shape:
        got = tuple(policy.loss_N.shape) if isinstance(policy.loss_N, Tensor) else type(policy.loss_N).__name__
        want = f"must return a loss for each token, a tensor of shape {tuple(new_N.shape)}, not {got}"
        raise broken("loss", objective.loss, want, section="update")
    if new_N.requires_grad and not policy.loss_N.requires_grad:
        raise broken("loss", objective.loss, "must depend on the policy's log-probs, its first value", section="update")
    total_N = policy.loss_N * weights_N
    kl_N = torch.zeros_like(new_N)
    if reference_N is not None:
        kl_N = k3(reference_N - new_N)
        total_N = total_N + options.kl_weight * kl_N
    if options.entropy_weight:
        total_N = total_N - options.entropy_weight * entropy_N
    if objective.mean_over_samples:
        total_N = total_N / counts_S.repeat_interleave(counts_S)
    with torch.no_grad():
        sums = {
            "loss": total_N.sum(),
            "surrogate": policy.loss_N.sum(),
            "kl": kl_N.sum(),
            "behaviour_kl": k3(new_N - behaviour_N).sum(),
            "entropy": entropy_N.sum(),
            "importance_weight": weights_N.sum(),
            **{name: mark_N.float().sum() for name, mark_N in policy.marks.items()},
        }
        ratio_max = ratio(new_N, base_N).max()
    return LossSums(total_N.sum(), objective.units(counts), sums, ratio_max)
