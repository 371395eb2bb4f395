"""What an update reports, summed over microbatches, minibatches and devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from attnrl.policy.objective import LossSums
from attnrl.policy.packing import Pack
from attnrl.policy.rates import Counters

COUNTS = ("tokens", "units", "forward_tokens", "path_tokens", "microbatches")


@dataclass(slots=True, eq=False)
class UpdateMetrics:
    """What one call of `update` reports.

    policy/loss                everything in Eq. 1 (and the entropy bonus), the mean that is minimised
    policy/surrogate           mean over loss tokens of the loss by name alone, before importance weights
    policy/kl                  mean k3 KL to the frozen reference; 0 without one
    policy/behaviour_kl        mean k3 KL between the policy that drew the tokens and the learner
    policy/entropy             mean entropy of the next-token distribution, nats
    policy/clip_fraction       share of loss tokens whose ratio was clipped, either side
    policy/clip_high, _low     the two sides: positive advantage over 1 + clip_high, negative under 1 - clip_low
    policy/dual_clip           share of loss tokens held by the dual clip
    policy/importance_weight   mean importance weight, truncated or masked; 1 when off
    policy/NAME                share of loss tokens that a loss of your own marks as NAME
    policy/ratio_max           largest probability ratio of a token
    policy/grad_norm           mean over updates of the gradient norm before clipping
    policy/lr                  learning rate of the next update
    policy/updates             optimizer steps made in this call
    policy/skipped_updates     updates left out for a non-finite loss or gradient norm
    train/samples              samples used
    train/tokens               tokens that carried loss
    train/path_tokens          tokens of the samples as the model reads them, prompts included
    train/forward_tokens       tokens the model ran over: path_tokens less what samples share
    train/microbatches         forward-backward passes
    """

    sums: dict[str, Tensor] = field(default_factory=dict)  # over loss tokens, on the device
    ratio_max: Tensor | None = None
    norms: list[float] = field(default_factory=list)  # of each finished optimizer step
    skipped: int = 0
    tokens: int = 0
    units: int = 0
    forward_tokens: int = 0
    path_tokens: int = 0
    microbatches: int = 0

    def add_microbatch(self, sums: LossSums, microbatch: Pack) -> None:
        path = sum(microbatch.lengths)
        counts = (microbatch.loss_tokens, sums.units, microbatch.tokens, path, 1)
        self.add(UpdateMetrics(sums.sums, sums.ratio_max, [], 0, *counts))

    def add(self, other: UpdateMetrics) -> None:
        """Take in the sums and counts of another minibatch or device; norms and skipped steps are its own."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        if other.ratio_max is not None:
            mine = self.ratio_max
            self.ratio_max = other.ratio_max if mine is None else torch.maximum(mine, other.ratio_max)
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add_step(self, here: UpdateMetrics, norm: float, counters: Counters, most: int) -> None:
        """Count one minibatch: with its sums where a step was made, as left out where the gradient norm is not finite;
        raises at `most` left out in a row."""
        if math.isfinite(norm):
            counters.made()
            self.add(here)
            self.norms.append(norm)
        else:
            self.skipped += 1
            counters.skip(most)

    def total(self, name: str) -> float:
        return float(self.sums[name]) if name in self.sums else 0.0

    def summary(self, *, lr: float, samples: int) -> dict[str, float]:
        """The metrics listed above, of all finished updates."""
        always = ("surrogate", "kl", "behaviour_kl", "entropy", "clip_high", "clip_low", "dual_clip")
        names = dict.fromkeys((*always, *(name for name in self.sums if name not in ("loss", "importance_weight"))))
        means = {f"policy/{name}": self.total(name) / max(1, self.tokens) for name in names}
        return {
            "policy/loss": self.total("loss") / max(1, self.units),
            **means,
            "policy/clip_fraction": means["policy/clip_high"] + means["policy/clip_low"],
            "policy/importance_weight": self.total("importance_weight") / self.tokens if self.tokens else 1.0,
            "policy/ratio_max": float(self.ratio_max) if self.ratio_max is not None else 1.0,
            "policy/grad_norm": float(np.mean(self.norms)) if self.norms else 0.0,
            "policy/lr": lr,
            "policy/updates": float(len(self.norms)),
            "policy/skipped_updates": float(self.skipped),
            "train/samples": float(samples),
            "train/tokens": float(self.tokens),
            "train/path_tokens": float(self.path_tokens),
            "train/forward_tokens": float(self.forward_tokens),
            "train/microbatches": float(self.microbatches),
        }


def peak_memory(device: torch.device) -> float:
    """Most device memory held since last asked, GB: metric `device/peak_memory_gb`; 0 without a GPU."""
    if device.type != "cuda":
        return 0.0
    held: float = torch.cuda.max_memory_allocated(device) / 1e9
    torch.cuda.reset_peak_memory_stats(device)
    return held
