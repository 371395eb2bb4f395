"""The policy update (Eq. 1): minibatches, packed microbatches, one optimizer step each.

Shapes: N loss tokens of a microbatch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrl.attention.decoder import lone_from
from attnrl.attention.paths import HALF_ROUNDING, ROUNDING
from attnrl.config import UpdateConfig
from attnrl.errors import ConfigError
from attnrl.local.learn import LearningDecoder, gradient_gap, learning_decoder
from attnrl.local.models import is_lora, plain, without_adapters
from attnrl.local.optimizer import MasterAdamW
from attnrl.local.recompute import Recompute
from attnrl.policy.logprobs import pack_attention
from attnrl.policy.metrics import UpdateMetrics
from attnrl.policy.objective import objective
from attnrl.policy.packing import Pack, microbatches, pack
from attnrl.policy.passes import Passes, minibatches
from attnrl.policy.rates import Counters, learning_rate
from attnrl.progress import tell
from attnrl.types import Sample, as_floats, as_ids

LOOK = 512  # tokens of a prompt, and drawn after it, over which gradients are compared: no layer runs again there


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
        self.passes = Passes(options, objective(options), temperature)
        self.seed = seed
        self.model = model
        self.hf = plain(model)
        self.reference = reference
        if self.options.kl_weight > 0 and reference is None and not is_lora(model):
            raise ConfigError("kl_weight is above 0 but there is no reference model; pass one or set kl_weight = 0")
        self.device = next(model.parameters()).device
        self.recompute = Recompute(self.hf, options.gradient_checkpointing)
        self.optimizer = MasterAdamW(
            model.parameters(),
            kind=self.options.optimizer,
            betas=self.options.betas,
            weight_decay=self.options.weight_decay,
            clip_norm=self.options.max_grad_norm,
        )
        self.shares_prefixes = self.passes.shares(self.hf)
        self.decoders = self._decoders() if options.fused else {}
        self.checked = not self.shares_prefixes and not self.decoders
        self.left: set[str] = set()  # of "shared" prefixes and "fused" kernels, what was found not to be exact
        self.counters = Counters()

    def update(self, samples: Sequence[Sample], *, version: int) -> dict[str, float]:
        """One pass over the samples; the metrics of `UpdateMetrics` and `Recompute`, and whether kernels are fused.

        Paper: Eq. 1.
        """
        rows = minibatches(samples, self.options, seed=self.seed, version=version)
        how: dict[str, Any] = {"share": self.shares_prefixes, "lone": lone_from(self.hf)}
        planned = [microbatches(samples, part, self.options.microbatch_tokens, **how) for part in rows]
        if planned and not self.checked and not self._ways_are_exact(samples, planned[0][0]):
            return self.update(samples, version=version)
        old = self._old_logprobs(samples, planned)
        metrics = UpdateMetrics()
        for done, packs in enumerate(planned):
            tell("update: minibatches", done, len(planned))
            self._minibatch(samples, packs, old, metrics)
        more = self.recompute.metrics() | {"train/fused": float(id(self.model) in self.decoders)}
        return metrics.summary(lr=self.learning_rate(), samples=sum(map(len, rows))) | more

    def learning_rate(self) -> float:
        """Of the next update; it depends on the number of updates made alone, so a resumed run goes on with it."""
        return learning_rate(self.options, self.counters.updates)

    def accumulate(self, samples: Sequence[Sample], packs: Sequence[Sequence[int]]) -> UpdateMetrics:
        """Gradients of one minibatch given as microbatches of sample indices, left in the optimizer's masters.

        Each microbatch adds its sum over the loss tokens (or samples) of the whole minibatch, so neither the cut into
        microbatches nor their order matters.
        """
        return self._accumulate(samples, packs, {})

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "left": sorted(self.left), **asdict(self.counters)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._leave(state.get("left", ()))
        self.counters = Counters(**{name: state[name] for name in asdict(self.counters)})

    def _pack(self, samples: Sequence[Sample], rows: Sequence[int]) -> Pack:
        return pack(samples, rows, self.device, share_prefixes=self.shares_prefixes)

    def _decoders(self) -> dict[int, LearningDecoder]:
        """The fused forwards of policy and reference, of those that it fits, by the identity of the model."""
        models = [model for model in (self.model, self.reference) if model is not None]
        found = {id(model): learning_decoder(model, self.recompute.run) for model in models}
        return {key: decoder for key, decoder in found.items() if decoder is not None}

    def _logprobs(self, model: Any, microbatch: Pack, *, fused: bool = True) -> Tensor:
        decoder = self.decoders.get(id(model)) if fused else None
        return self.passes.logprobs(plain(model), microbatch, fused=decoder)

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
            one = pack([_surprising(samples[rows[0]], self.hf)], [0], self.device)
            gaps["fused kernels changed log-probs"] = self._gap(apart, want_N, fused=True)
            compared = self.hf, self.decoders[id(self.model)], one, self.passes.temperature
            gaps["fused kernels changed gradients"] = gradient_gap(*compared, self._rounding())
        wrong = [what for what, gap in gaps.items() if not gap <= self._rounding()]  # also where it is not a number
        for what in wrong:
            message = f"{what} by {gaps[what]:.3f} on this device; updates go on without them"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self._leave(what.split()[0] for what in wrong)
        return not wrong

    def _leave(self, ways: Iterable[str]) -> None:
        """Goes on without these; a resumed run does too."""
        self.left |= set(ways)
        self.shares_prefixes &= "shared" not in self.left
        self.decoders = {} if "fused" in self.left else self.decoders

    def _gap(self, microbatch: Pack, want_N: Tensor, *, fused: bool) -> float:
        return float((self._logprobs(self.model, microbatch, fused=fused) - want_N).abs().mean())

    def _rounding(self) -> float:
        """Of log-probs the mean gap in nats that rounding explains, of gradients the relative one."""
        return ROUNDING.get(next(self.model.parameters()).dtype, HALF_ROUNDING)

    def _old_logprobs(self, samples: Sequence[Sample], minibatches: list[list[list[int]]]) -> dict[int, Tensor]:
        """The learner's log-probs before the first step, by sample; empty unless importance weights need them."""
        old: dict[int, Tensor] = {}
        if not self.passes.objective.needs_old:
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
        here = self._accumulate(samples, packs, old)
        norm = self.optimizer.gradient_norm()
        finite = bool(torch.isfinite(norm)) and math.isfinite(here.total("loss"))
        if finite:
            self.optimizer.step(self.learning_rate(), norm)
        else:
            self.optimizer.zero_grad()
        metrics.add_step(here, norm.item() if finite else math.nan, self.counters, self.options.max_bad_updates)

    def _accumulate(
        self, samples: Sequence[Sample], packs: Sequence[Sequence[int]], old: dict[int, Tensor]
    ) -> UpdateMetrics:
        self.optimizer.zero_grad()
        laid_out = [self._pack(samples, rows) for rows in packs]
        units = sum(self.passes.objective.units(m.counts) for m in laid_out)
        fused = self.decoders.get(id(self.model))
        metrics = UpdateMetrics()
        for microbatch in laid_out:
            reference_N = self._reference_logprobs(microbatch)
            old_N = torch.cat([old[row] for row in microbatch.rows]) if old else None
            with self.recompute.open(self._run_again(microbatch), microbatch), pack_attention(self.hf, microbatch):
                sums = self.passes.loss(self.hf, microbatch, reference_N=reference_N, old_N=old_N, fused=fused)
                (sums.loss / units).backward()
            metrics.add_microbatch(sums, microbatch)
        return metrics

    def _run_again(self, microbatch: Pack) -> int:
        return self.recompute.wanted(
            microbatch,
            lambda: self._logprobs(self.model, microbatch),
            coming=self.optimizer.coming_bytes(),
            chunk=self.options.logit_chunk_tokens,
        )


def _surprising(sample: Sample, model: Any) -> Sample:
    """The last tokens of the prompt and as many as may be drawn evenly from the vocabulary: where a model is sure of a
    text, its gradients hang on the last bits of 1 - p, and over few tokens two right ways differ by as much as they
    round at each.

    >>> from types import SimpleNamespace as Some
    >>> model = Some(config=Some(max_position_embeddings=4096), get_input_embeddings=lambda: Some(num_embeddings=9))
    >>> ids, zero = as_ids(range(2000)), as_floats([0.0])
    >>> one = _surprising(Sample(ids, ids[:1], zero, zero, "q"), model)
    >>> (int(one.prompt[-1]), len(one.prompt), len(one.response), set(one.response) == set(range(9)))
    (1999, 512, 512, True)
    """
    tokens = min(LOOK, (getattr(model.config, "max_position_embeddings", None) or 2 * LOOK) // 2)
    drawn = np.random.default_rng(0).integers(model.get_input_embeddings().num_embeddings, size=tokens)
    nothing = as_floats(np.zeros(tokens))
    return Sample(sample.prompt[-tokens:], as_ids(drawn), nothing, nothing, sample.uid)
