"""The Backend on one machine: sampler, scorer and learner around one model in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import Progress, TaskID

from attnrl import scoring
from attnrl.algo.branching import needs_fci
from attnrl.config import Config
from attnrl.errors import ConfigError, MissingFileError
from attnrl.local.learner import Learner, LearnerOptions
from attnrl.local.losses import LossOptions
from attnrl.local.models import LoraOptions, add_lora, is_lora, load_model, plain, quiet, stop_token_ids
from attnrl.local.sampler import Sampler
from attnrl.scoring.entropy import check_head
from attnrl.scoring.packed import check_model
from attnrl.types import Request, Rollout, Sample, Sampling, ScoreRequest, Scores

MODEL, ADAPTER, STATE = "model", "adapter", "learner.pt"  # what `save` writes into a checkpoint


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How the engine samples and scores; none of it but `delta` and `key_reduce` changes a result."""

    rows: int = 256  # responses drawn at the same time
    delta: int = 4  # steps between a step and the text whose attention counts (Eq. 5)
    key_reduce: Literal["mean", "sum"] = "mean"
    temperature: float = 1.0  # of the sampler: scores are those of the distribution drawn from
    score_tokens: int = 16384  # tokens per scoring forward
    fci: bool = True  # False: log-probs and entropy only, for rules that do not look at attention
    progress: bool = False  # bars while sampling, scoring and updating
    release_sampler: bool = False  # give the sampler's cache back before each update, to save device memory


class LocalBackend:
    """One policy on one machine, CPU or one CUDA device.

    The learner exists only with `learner` options: evaluation needs neither optimizer nor reference. The frozen
    reference of the KL term is a copy of the weights at construction (for LoRA the base without adapters), so build
    the backend from the starting model also where a checkpoint is loaded next.

    A checkpoint holds `model/` (Hugging Face format with tokenizer, loadable as it is), `learner.pt` (optimizer,
    counters, random states) and with LoRA `adapter/` (peft format; `model/` is then the merged model).

    Metrics of `update` are those of `UpdateMetrics`; those of `activity`, of the time since it was last asked:
    score/overhead             time of scoring with FCI over time without, minus 1
    score/seconds, score/tokens, score/packs, score/attention_KIND and score/fci_KIND (1: that implementation ran)
    generate/shared_context    share of context tokens that another request had already run over
    device/peak_memory_gb      most device memory held, GB (CUDA only)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        learner: LearnerOptions | None = None,
        options: BackendOptions | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.options = options or BackendOptions()
        self.version = 0
        self.device = next(model.parameters()).device
        self.sampler = Sampler(
            plain(model),
            stop_ids=stop_token_ids(model, tokenizer),
            rows=self.options.rows,
            progress=self.options.progress,
        )
        self.scored = scoring.ScoreReport()  # since the last call of `activity`
        self._shared_tokens = self._context_tokens = 0
        if learner is not None or self.options.fci:
            check_model(plain(model))
            check_head(plain(model))
        self.learner: Learner | None = None
        if learner is not None:
            needs_copy = learner.loss.kl_weight > 0 and not is_lora(model)
            reference = copy.deepcopy(model).requires_grad_(False) if needs_copy else None
            self.learner = Learner(model, reference, options=learner)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout per request, in order, drawn by the current policy and marked with its version."""
        rollouts = self.sampler.generate(requests, sampling, version=self.version)
        stats = self.sampler.stats
        self._shared_tokens += stats.saved_tokens
        self._context_tokens += stats.saved_tokens + stats.prefilled_tokens
        return rollouts

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Log-probs, entropy and FCI of finished responses, from one forward pass each. Paper: Eq. 4-6."""
        scores: list[Scores] = scoring.score(
            plain(self.model),
            requests,
            delta=self.options.delta,
            key_reduce=self.options.key_reduce,
            temperature=self.options.temperature,
            token_budget=self.options.score_tokens,
            fci=self.options.fci,
            progress=self.options.progress,
            report=self.scored,
        )
        return scores

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One pass over the samples in minibatches; returns metrics and raises the version. Paper: Eq. 1."""
        if self.learner is None:
            raise ConfigError("this backend was built without learner options: it can sample and score, not train")
        if self.options.release_sampler:
            self.sampler.release()
        with Progress(disable=not self.options.progress, transient=True) as bar:
            task = bar.add_task("updating", total=None)
            show = functools.partial(self._show, bar, task)
            metrics = self.learner.update(samples, version=self.version, progress=show)
        self.version += 1
        return metrics

    @staticmethod
    def _show(bar: Progress, task: TaskID, done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    def activity(self) -> dict[str, float]:
        """Metrics of what sampler, scorer and device did since the last call of this; they start anew."""
        metrics = {k: float(v) for k, v in self.scored.metrics().items() if not isinstance(v, str)}
        metrics["generate/shared_context"] = self._shared_tokens / max(1, self._context_tokens)
        self.scored = scoring.ScoreReport()
        self._shared_tokens = self._context_tokens = 0
        if self.device.type == "cuda":
            metrics["device/peak_memory_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            torch.cuda.reset_peak_memory_stats(self.device)
        return metrics

    def save(self, path: Path) -> None:
        """Write weights, optimizer, counters and random states into the existing directory `path`."""
        if not path.is_dir():
            raise MissingFileError(f"no directory {path} to save into")
        self.export(path / MODEL)
        if is_lora(self.model):
            self.model.save_pretrained(path / ADAPTER)
        state = {
            "version": self.version,
            "learner": None if self.learner is None else self.learner.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }
        torch.save(state, path / STATE)

    def load(self, path: Path) -> None:
        """Restore exactly what `save` wrote; tensors of the model keep their place in memory."""
        for name in (MODEL, STATE, *([ADAPTER] if is_lora(self.model) else [])):
            if not (path / name).exists():
                raise MissingFileError(f"{path} is no checkpoint of this backend: {name} is missing")
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        if self.learner is not None and state["learner"] is None:
            raise ConfigError(f"{path} was saved without a learner: start a new run from {path / MODEL} instead")
        if is_lora(self.model):
            self._load_adapter(path / ADAPTER)
        else:
            self._load_weights(path / MODEL)
        if self.learner is not None:
            self.learner.load_state_dict(state["learner"])
        self.version = state["version"]
        torch.set_rng_state(state["torch_rng"])
        if state["cuda_rng"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["cuda_rng"])

    def export(self, path: Path) -> None:
        """Write the policy as a plain Hugging Face model with its tokenizer; adapters are merged in."""
        model = self.model
        if is_lora(model):
            model = copy.deepcopy(model).merge_and_unload()
        with quiet():
            model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    def _load_weights(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        with quiet():
            saved = AutoModelForCausalLM.from_pretrained(path, dtype=next(self.model.parameters()).dtype)
        self.model.load_state_dict(saved.state_dict())

    def _load_adapter(self, path: Path) -> None:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        set_peft_model_state_dict(self.model, load_file(path / "adapter_model.safetensors"))


def load_backend(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    lora: LoraOptions | None = None,
    learner: LearnerOptions | None = None,
    options: BackendOptions | None = None,
) -> tuple[LocalBackend, Any]:
    """(backend, tokenizer) of a model directory or hub name. Without `learner` it samples and scores only."""
    loaded, tokenizer = load_model(model, device=device, dtype=dtype)
    if lora is not None:
        loaded = add_lora(loaded, lora)
    return LocalBackend(loaded, tokenizer, learner=learner, options=options), tokenizer


def learner_options(config: Config) -> LearnerOptions:
    """The `update` section of a config, with temperature and seed from theirs."""
    update = config.update
    return LearnerOptions(
        loss=LossOptions(
            clip_low=update.clip_low,
            clip_high=update.clip_high,
            kl_weight=update.kl_weight,
            dual_clip=update.dual_clip,
            importance_cap=update.importance_cap,
            entropy_weight=update.entropy_weight,
        ),
        lr=update.lr,
        lr_warmup_updates=update.lr_warmup_updates,
        betas=update.betas,
        weight_decay=update.weight_decay,
        max_grad_norm=update.max_grad_norm,
        minibatch_prompts=update.minibatch_prompts,
        minibatch_samples=update.minibatch_samples,
        microbatch_tokens=update.microbatch_tokens,
        logit_chunk_tokens=update.logit_chunk_tokens,
        share_prefixes=update.share_prefixes,
        gradient_checkpointing=update.gradient_checkpointing,
        max_bad_updates=update.max_bad_updates,
        temperature=config.sampling.temperature,
        seed=config.run.seed,
    )


def backend_from_config(config: Config, *, model: str | Path | None = None, progress: bool = False) -> LocalBackend:
    """The backend a config describes, ready to train; `model` stands in for `config.model.path`."""
    options = BackendOptions(
        rows=config.sampling.rows,
        delta=config.algo.delta,
        key_reduce=config.algo.key_reduce,
        temperature=config.sampling.temperature,
        score_tokens=config.update.microbatch_tokens,
        fci=config.algo.filter != "none" or needs_fci(config.algo.rule),
        progress=progress,
    )
    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    lora = None
    if config.model.lora_rank:
        lora = LoraOptions(
            config.model.lora_rank, config.model.lora_alpha, config.model.lora_targets, seed=config.run.seed
        )
    backend, _ = load_backend(
        model or config.model.path,
        device=config.model.device,
        dtype=config.model.dtype,
        lora=lora,
        learner=learner_options(config),
        options=options,
    )
    return backend
