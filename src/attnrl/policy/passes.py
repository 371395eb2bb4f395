"""Passes of the model over packed microbatches, as the section [update] states them: the same on one device and on
every rank of a cluster.

Shapes: N loss tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from attnrl.algo.minibatches import plan_minibatches
from attnrl.attention.paths import can_share
from attnrl.config import UpdateConfig
from attnrl.policy.logprobs import Fused, pack_logprobs, token_logprobs
from attnrl.policy.objective import LossSums, Objective, loss_sums
from attnrl.policy.packing import Pack, input_length
from attnrl.types import Sample


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """How log-probs and losses of a microbatch are computed. Models are Hugging Face's own, without a wrapper."""

    options: UpdateConfig
    objective: Objective
    temperature: float = 1.0  # of the sampler: log-probs are those of the distribution drawn from

    def shares(self, model: Any) -> bool:
        """Whether prefixes that samples share are run over once."""
        return self.options.share_prefixes and can_share(model)

    def logprobs(self, model: Any, pack: Pack, *, fused: Fused | None = None) -> Tensor:
        """Log-probs of the loss tokens, without gradient. [N]"""
        chunk = self.options.logit_chunk_tokens
        return pack_logprobs(model, pack, temperature=self.temperature, chunk=chunk, fused=fused)

    def loss(
        self,
        model: Any,
        pack: Pack,
        *,
        reference_N: Tensor | None = None,
        old_N: Tensor | None = None,
        fused: Fused | None = None,
    ) -> LossSums:
        """Eq. 1 summed over the loss tokens, inside `pack_attention`; `backward` too belongs there.

        `reference_N`, `old_N`: log-probs of the frozen policy, and of the learner before the update.
        """
        new_N, entropy_N = token_logprobs(
            model,
            pack,
            temperature=self.temperature,
            chunk=self.options.logit_chunk_tokens,
            entropy_gradient=self.options.entropy_weight != 0,
            fused=fused,
        )
        return loss_sums(
            new_N,
            entropy_N,
            advantages_N=pack.advantages_N,
            behaviour_N=pack.behaviour_N,
            counts=pack.counts,
            objective=self.objective,
            reference_N=reference_N,
            old_N=old_N,
        )


def minibatches(samples: Sequence[Sample], options: UpdateConfig, *, seed: int, version: int) -> list[list[int]]:
    """The samples of each optimizer step, those without a loss token left out.

    Their order depends on (seed, version) alone, so a resumed run repeats it.
    """
    rows = [i for i, sample in enumerate(samples) if input_length(sample) > 0]
    plan = plan_minibatches(
        [samples[i].uid for i in rows],
        minibatches=options.minibatches,
        samples=options.minibatch_samples,
        rng=np.random.default_rng([seed, version]),
    )
    return [[rows[i] for i in part] for part in plan]
