"""The engine on one machine: a sampler, the scorer and a learner around one model in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from attnrl.attention.head import check_head
from attnrl.attention.paths import check_attention
from attnrl.config import Config
from attnrl.data.texts import stop_token_ids
from attnrl.errors import ConfigError, MissingFileError, reading
from attnrl.local.learn import gives_logits
from attnrl.local.learner import Learner
from attnrl.local.models import add_lora, is_lora, load_weights, plain, quiet
from attnrl.local.sampler import Sampler
from attnrl.local.vllm_sampler import VllmSampler
from attnrl.policy.metrics import peak_memory
from attnrl.scoring import ScoreReport, score
from attnrl.scoring.fci import Body
from attnrl.types import Request, Rollout, Sample, Sampling, ScoreRequest, Scores, Scoring

MODEL, ADAPTER, STATE = "model", "adapter", "learner.pt"  # what `save` writes into a checkpoint


class Draws(Protocol):
    """What takes the sampler's place in the engine: draws from the weights it was last shown."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, version: int) -> list[Rollout]: ...

    def sync(self) -> None:
        """The weights have changed."""

    def rest(self) -> None:
        """The learner needs the memory: give back what the next call can make again."""

    def metrics(self) -> dict[str, float]:
        """Of the time since it was last asked."""

    def close(self) -> None: ...


class LocalBackend:
    """One policy on one machine, CPU or one CUDA device.

    Without a learner it samples and scores only: evaluation needs neither optimizer nor reference.

    A checkpoint holds `model/` (Hugging Face format with tokenizer, loadable as it is), `learner.pt` (optimizer,
    counters, random states) and with LoRA `adapter/` (peft format; `model/` is then the merged model).

    Metrics of `update` are those of `UpdateMetrics` and
    train/fused                whether the learner's own kernels ran
    train/recomputed_layers    layers that ran again in backward, mean over microbatches
    train/layer_token_bytes    with update.gradient_checkpointing = "auto": what one layer keeps per token, measured
    Those of `metrics`, of the time since it was last asked:
    score/overhead             time of scoring with FCI over time without, minus 1
    score/seconds, score/tokens, score/packs, score/attention_KIND and score/fci_KIND (1: that implementation ran)
    generate/sampler_own, generate/fused, ...    how the sampler drew: `local/stats.py`, `local/vllm_sampler.py`
    device/peak_memory_gb      most device memory held, GB (CUDA only)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        sampler: Draws | None = None,
        learner: Learner | None = None,
        score_tokens: int = 16384,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.version = 0
        self.device = next(model.parameters()).device
        stop_ids = stop_token_ids(model.generation_config, tokenizer)
        self.sampler: Draws = sampler or Sampler(plain(model), stop_ids=stop_ids)
        self.learner = learner
        self.score_tokens = score_tokens  # per scoring forward; changes no result
        self.scored = ScoreReport()  # since the last call of `metrics`
        self._fused: bool | None = None  # whether the learner's forward gives the model's logits, once looked at

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout per request, in order, drawn by the current policy and marked with its version."""
        return self.sampler.generate(requests, sampling, version=self.version)

    def score(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
        """Log-probs, entropy and FCI of finished responses, from one forward pass each. Paper: Eq. 4-6."""
        asked: dict[str, Any] = asdict(scoring)
        how: dict[str, Any] = {"token_budget": self.score_tokens, "report": self.scored, "body": self._body()}
        return score(plain(self.model), requests, **asked, **how)

    def _body(self) -> Body | None:
        """The learner's fused forward, where there is one and it gives the model's own logits."""
        decoder = None if self.learner is None else self.learner.decoders.get(id(self.model))
        if decoder is None:
            return None
        if self._fused is None:
            self._fused = gives_logits(plain(self.model), decoder)
        return decoder.hidden if self._fused else None

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One pass over the samples in minibatches; returns metrics and raises the version. Paper: Eq. 1."""
        if self.learner is None:
            raise ConfigError("this engine was built without a learner: it can sample and score, not train")
        self.sampler.rest()
        metrics = self.learner.update(samples, version=self.version)
        self.version += 1
        self.sampler.sync()
        return metrics

    def metrics(self) -> dict[str, float]:
        """Metrics of what sampler, scorer and device did since the last call of this; they start anew."""
        metrics = self.scored.metrics() | self.sampler.metrics()
        self.scored = ScoreReport()
        if held := peak_memory(self.device):
            metrics["device/peak_memory_gb"] = held
        return metrics

    def close(self) -> None:
        """Frees the sampler's cache and processes."""
        self.sampler.close()

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
            "scores_unfused": self._fused is False,
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }
        torch.save(state, path / STATE)

    def load(self, path: Path) -> None:
        """Restore exactly what `save` wrote; tensors of the model keep their place in memory."""
        for name in (MODEL, STATE, *([ADAPTER] if is_lora(self.model) else [])):
            if not (path / name).exists():
                raise MissingFileError(f"{path} is no checkpoint of this backend: {name} is missing")
        # an offloaded optimizer fills the host's memory: what it copies is not to lie there a second time
        mapped = self.learner is not None and self.learner.optimizer.kind == "adamw_offloaded"
        with reading(path / STATE, path, OSError, RuntimeError):  # by where the file ends
            state = torch.load(path / STATE, map_location="cpu", weights_only=True, mmap=mapped)
        if self.learner is not None and state["learner"] is None:
            raise ConfigError(f"{path} was saved without a learner: start a new run from {path / MODEL} instead")
        if is_lora(self.model):
            self._load_adapter(path / ADAPTER)
        else:
            self._load_weights(path / MODEL)
        if self.learner is not None:
            self.learner.load_state_dict(state["learner"])
        self.version = state["version"]
        self._fused = False if state.get("scores_unfused") else self._fused  # as the run that is resumed
        self.sampler.sync()
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
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM

        with quiet(), reading(path, path.parent, SafetensorError):
            saved = AutoModelForCausalLM.from_pretrained(path, dtype=next(self.model.parameters()).dtype)
        self.model.load_state_dict(saved.state_dict())

    def _load_adapter(self, path: Path) -> None:
        from peft import set_peft_model_state_dict
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        with reading(path, path.parent, SafetensorError):
            saved = load_file(path / "adapter_model.safetensors")
        set_peft_model_state_dict(self.model, saved)


def build(config: Config, *, model: str, tokenizer: Any, learn: bool = True) -> LocalBackend:
    """The engine that a config describes; `model` is a directory or hub name.

    The frozen reference of the KL term is a copy of the weights it starts from (for LoRA the base without adapters),
    so `model` is the starting model also where a checkpoint is loaded next.
    """
    local = config.engine.local
    if local.threads is not None:
        torch.set_num_threads(local.threads)
    how = {"device": local.device, "dtype": config.model.dtype}
    policy = load_weights(model, **how, float32_logits=local.float32_logits)
    if learn:
        check_attention(policy)
        check_head(policy)
        if config.model.lora_rank:
            policy = add_lora(policy, config.model, seed=config.run.seed)
    return LocalBackend(
        policy,
        tokenizer,
        sampler=build_sampler(config, policy, tokenizer),
        learner=build_learner(config, policy) if learn else None,
        score_tokens=config.update.microbatch_tokens,
    )


def build_sampler(config: Config, model: Any, tokenizer: Any) -> Draws:
    """The sampler that `engine.local.sampler` names; auto is our own, which docs/performance.md compares with vLLM."""
    local, stop_ids = config.engine.local, stop_token_ids(model.generation_config, tokenizer)
    if local.sampler == "vllm":
        training = config.data.max_prompt_tokens + config.sampling.max_response_tokens
        evaluating = config.evaluation.max_prompt_tokens + config.evaluation.max_response_tokens
        most = getattr(model.config, "max_position_embeddings", None) or training
        longest = max(training, min(evaluating, most))
        return VllmSampler(model, stop_ids=stop_ids, longest=longest, rows=local.rows)
    return Sampler(plain(model), stop_ids=stop_ids, rows=local.rows)


def build_learner(config: Config, model: Any) -> Learner:
    """The learner of the [update] section, with temperature and seed from theirs."""
    needs_copy = config.update.kl_weight > 0 and not is_lora(model)
    reference = copy.deepcopy(model).requires_grad_(False) if needs_copy else None
    return Learner(
        model, reference, options=config.update, temperature=config.sampling.temperature, seed=config.run.seed
    )
