"""The policy update (Eq. 1): minibatches, packed microbatches, one optimizer step each.

Shapes: N loss tokens of a microbatch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrl.algo.minibatches import plan_minibatches
from attnrl.attention.paths import can_share
from attnrl.attention.trie import bins_by_budget, fill_shared_bins
from attnrl.config import UpdateConfig
from attnrl.errors import ConfigError, TrainingError
from attnrl.local.learn import LearningDecoder, gradient_gap, learning_decoder
from attnrl.local.logprobs import pack_logprobs, packed_hidden, token_logprobs
from attnrl.local.models import is_lora, plain, without_adapters
from attnrl.local.optimizer import MasterAdamW
from attnrl.local.packing import Pack, input_ids, input_length, pack
from attnrl.policy.objective import LossSums, loss_sums, objective
from attnrl.policy.rates import learning_rate
from attnrl.types import Sample

ROUNDING = {
    torch.float32: 1e-3
}  # mean gap of log-probs, nats, and relative one of gradients that rounding explains ...
HALF_ROUNDING = 0.1  # ... and in half precision; a wrong mask on a trained model makes several times as much
Progress = Callable[[int, int], None]  # minibatches done, minibatches of this call


class Learner:
    """One policy, its frozen reference and its optimizer. `update` is one pass over the samples."""

    def __init__(
        self,
        model: Any,
        reference: Any | None = None,
        *,
        options: UpdateConfig,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        """`reference`: a frozen model of the same vocabulary. It is not needed with a KL weight of 0, nor for a LoRA
        policy, whose reference is the base without adapters. `temperature` is the sampler's: log-probs are those of
        the distribution drawn from. `seed` is that of the order of samples.
        """
        self.options = options
        self.objective = objective(options)
        self.temperature = temperature
        self.seed = seed
        self.model = model
        self.reference = reference
        if self.options.kl_weight > 0 and reference is None and not is_lora(model):
            raise ConfigError("kl_weight is above 0 but there is no reference model; pass one or set kl_weight = 0")
        self.device = next(model.parameters()).device
        if self.options.gradient_checkpointing:
            hf = plain(model)
            hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = MasterAdamW(
            model.parameters(),
            betas=self.options.betas,
            weight_decay=self.options.weight_decay,
            clip_norm=self.options.max_grad_norm,
        )
        self.shares_prefixes = self.options.share_prefixes and can_share(plain(model))
        self.decoders = self._decoders() if options.fused else {}
        self.checked = not self.shares_prefixes and not self.decoders
        self.updates = 0  # optimizer steps made
        self.skipped = 0  # updates left out for a non-finite loss or gradient, in all
        self.skipped_in_a_row = 0

    def update(self, samples: Sequence[Sample], *, version: int, progress: Progress | None = None) -> dict[str, float]:
        """One pass over the samples; the metrics of `UpdateMetrics`.

        The order of the samples depends on (seed, version) alone, so a resumed run repeats it.

        Paper: Eq. 1.
        """
        rows = [i for i, sample in enumerate(samples) if input_length(sample) > 0]
        rng = np.random.default_rng([self.seed, version])
        plan = plan_minibatches(
            [samples[i].uid for i in rows],
            minibatches=self.options.minibatches,
            samples=self.options.minibatch_samples,
            rng=rng,
        )
        minibatches = [self._packs(samples, [rows[i] for i in part]) for part in plan]
        if minibatches and not self.checked and not self._ways_are_exact(samples, minibatches[0][0]):
            return self.update(samples, version=version, progress=progress)
        old = self._old_logprobs(samples, minibatches)
        metrics = UpdateMetrics()
        for done, packs in enumerate(minibatches, start=1):
            self._minibatch(samples, packs, old, metrics)
            if progress is not None:
                progress(done, len(minibatches))
        return metrics.summary(lr=self.learning_rate(), samples=len(rows))

    def learning_rate(self) -> float:
        """Of the next update; it depends on the number of updates made alone, so a resumed run goes on with it."""
        return learning_rate(self.options, self.updates)

    def accumulate(self, samples: Sequence[Sample], packs: Sequence[Sequence[int]]) -> UpdateMetrics:
        """Gradients of one minibatch given as microbatches of sample indices, left in the optimizer's masters.

        Each microbatch adds its sum over the loss tokens (or samples) of the whole minibatch, so neither the cut into
        microbatches nor their order matters.
        """
        metrics = UpdateMetrics()
        self._accumulate(samples, packs, {}, metrics)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        counters = {"updates": self.updates, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        return {"optimizer": self.optimizer.state_dict(), **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        self.skipped = state["skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]

    def _packs(self, samples: Sequence[Sample], rows: Sequence[int]) -> list[list[int]]:
        budget = self.options.microbatch_tokens
        if self.shares_prefixes:
            bins = fill_shared_bins([input_ids(samples[i]) for i in rows], budget)
        else:
            bins = bins_by_budget([input_length(samples[i]) for i in rows], budget)
        return [[rows[i] for i in part] for part in bins]

    def _pack(self, samples: Sequence[Sample], rows: Sequence[int]) -> Pack:
        return pack(samples, rows, self.device, share_prefixes=self.shares_prefixes)

    def _decoders(self) -> dict[int, LearningDecoder]:
        """The fused forwards of policy and reference by the identity of the model; empty where it fits neither."""
        models = [model for model in (self.model, self.reference) if model is not None]
        found = {id(model): learning_decoder(model) for model in models}
        decoders = {key: decoder for key, decoder in found.items() if decoder is not None}
        if len(decoders) < len(models):
            warnings.warn(f"update.fused does not fit {type(self.model).__name__} on {self.device.type}", stacklevel=3)
        return decoders

    def _logprobs(self, model: Any, microbatch: Pack, *, fused: bool = True) -> Tensor:
        chunk = self.options.logit_chunk_tokens
        decoder = self.decoders.get(id(model)) if fused else None
        return pack_logprobs(model, microbatch, temperature=self.temperature, chunk=chunk, fused=decoder)

    def _ways_are_exact(self, samples: Sequence[Sample], rows: Sequence[int]) -> bool:
        """Whether shared prefixes and fused kernels give the plain way's numbers on this learner's first microbatch.

        Kernels differ in how they mask fewer queries than keys; a wrong one would train on nonsense without a sign.
        What is not exact is said and left off. A model whose log-probs are not finite in the plain way says nothing:
        it is looked at again next time.
        """
        shared = self._pack(samples, rows)
        apart = pack(samples, shared.rows, self.device)
        want_N = self._logprobs(self.model, apart, fused=False)
        if not torch.isfinite(want_N).all():
            return True
        self.checked = True
        gaps = {}
        if self.shares_prefixes:
            gaps["shared prefixes changed log-probs"] = self._gap(shared, want_N, fused=False)
        if self.decoders:
            one = pack(samples, [min(rows, key=lambda row: input_length(samples[row]))], self.device)
            gaps["fused kernels changed log-probs"] = self._gap(apart, want_N, fused=True)
            decoder = self.decoders[id(self.model)]
            gaps["fused kernels changed gradients"] = gradient_gap(self.model, decoder, one, self.temperature)
        wrong = [what for what, gap in gaps.items() if not gap <= self._rounding()]  # also where it is not a number
        for what in wrong:
            message = f"{what} by {gaps[what]:.3f} on this device; updates go on without them"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self.shares_prefixes &= not any(what.startswith("shared") for what in wrong)
        self.decoders = {} if any(what.startswith("fused") for what in wrong) else self.decoders
        return not wrong

    def _gap(self, microbatch: Pack, want_N: Tensor, *, fused: bool) -> float:
        return float((self._logprobs(self.model, microbatch, fused=fused) - want_N).abs().mean())

    def _rounding(self) -> float:
        return ROUNDING.get(next(self.model.parameters()).dtype, HALF_ROUNDING)

    def _old_logprobs(self, samples: Sequence[Sample], minibatches: list[list[list[int]]]) -> dict[int, Tensor]:
        """The learner's log-probs before the first step, by sample; empty unless importance weights need them."""
        old: dict[int, Tensor] = {}
        if not self.objective.needs_old:
            return old
        for rows in (rows for packs in minibatches for rows in packs):
            microbatch = self._pack(samples, rows)
            parts = self._logprobs(self.model, microbatch).split(list(microbatch.counts))
            old.update(zip(microbatch.rows, parts, strict=True))
        return old

    def _reference_logprobs(self, microbatch: Pack) -> Tensor | None:
        if self.options.kl_weight == 0:
            return None
        if self.reference is not None:
            return self._logprobs(self.reference, microbatch)
        with without_adapters(self.model):
            return self._logprobs(self.model, microbatch)

    def _minibatch(
        self, samples: Sequence[Sample], packs: list[list[int]], old: dict[int, Tensor], metrics: UpdateMetrics
    ) -> None:
        """One optimizer step, or none where loss or gradient is not finite."""
        here = UpdateMetrics()
        self._accumulate(samples, packs, old, here)
        norm = self.optimizer.gradient_norm()
        finite = bool(torch.isfinite(norm)) and math.isfinite(here.total("loss"))
        if finite:
            self.optimizer.step(self.learning_rate(), norm)
            self.updates += 1
            self.skipped_in_a_row = 0
            metrics.add(here, norm.item())
            return
        self.optimizer.zero_grad()
        self.skipped += 1
        self.skipped_in_a_row += 1
        metrics.skipped += 1
        if self.skipped_in_a_row >= self.options.max_bad_updates:
            raise TrainingError(
                f"{self.skipped_in_a_row} updates in a row had a non-finite loss or gradient norm; "
                "resume from an earlier checkpoint with a lower lr or float32"
            )

    def _accumulate(
        self, samples: Sequence[Sample], packs: Sequence[Sequence[int]], old: dict[int, Tensor], metrics: UpdateMetrics
    ) -> None:
        options = self.options
        self.optimizer.zero_grad()
        microbatches = [self._pack(samples, rows) for rows in packs]
        units = sum(self.objective.units(m.counts) for m in microbatches)
        mode = _training_mode(self.model) if options.gradient_checkpointing else nullcontext()
        for microbatch in microbatches:
            reference_N = self._reference_logprobs(microbatch)
            old_N = torch.cat([old[row] for row in microbatch.rows]) if old else None
            fused = self.decoders.get(id(self.model))
            with mode, packed_hidden(self.model, microbatch, fused) as hidden_TD:
                new_N, entropy_N = token_logprobs(
                    self.model,
                    hidden_TD,
                    microbatch,
                    temperature=self.temperature,
                    chunk=options.logit_chunk_tokens,
                    entropy_gradient=options.entropy_weight != 0,
                    fused=fused,
                )
                sums = loss_sums(
                    new_N,
                    entropy_N,
                    advantages_N=microbatch.advantages_N,
                    behaviour_N=microbatch.behaviour_N,
                    counts=microbatch.counts,
                    objective=self.objective,
                    reference_N=reference_N,
                    old_N=old_N,
                )
                (sums.loss / units).backward()
            metrics.add_microbatch(sums, microbatch)


class _training_mode:
    """The model in train mode while open: transformers checkpoints layers only then. Dropout stays off (p = 0)."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.model.train()

    def __exit__(self, *_: object) -> None:
        self.model.eval()


class UpdateMetrics:
    """What one call of `Learner.update` reports.

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

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.ratio_max: Tensor | None = None
        self.norms: list[float] = []
        self.skipped = 0
        self.tokens = 0
        self.units = 0
        self.forward_tokens = 0
        self.path_tokens = 0
        self.microbatches = 0

    def add_microbatch(self, sums: LossSums, microbatch: Pack) -> None:
        self._add_sums(sums.sums, sums.ratio_max)
        self.tokens += microbatch.loss_tokens
        self.units += sums.units
        self.forward_tokens += microbatch.tokens
        self.path_tokens += sum(microbatch.lengths)
        self.microbatches += 1

    def add(self, other: UpdateMetrics, norm: float) -> None:
        """Take in the microbatches of one finished update."""
        if other.ratio_max is not None:
            self._add_sums(other.sums, other.ratio_max)
        self.tokens += other.tokens
        self.units += other.units
        self.forward_tokens += other.forward_tokens
        self.path_tokens += other.path_tokens
        self.microbatches += other.microbatches
        self.norms.append(norm)

    def _add_sums(self, sums: dict[str, Tensor], ratio_max: Tensor) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.ratio_max = ratio_max if self.ratio_max is None else torch.maximum(self.ratio_max, ratio_max)

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
