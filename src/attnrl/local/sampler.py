"""The local sampler: rollouts from any token context, for any Hugging Face decoder-only model.

Requests wait in lexicographic order of their contexts, so that trunks of one prompt and branches of one trunk are
prefilled together and each shared token once (`attention/trie.py`). Running rows draw one token a step. A finished row
leaves the batch and waiting requests are admitted behind the others. What is drawn for a request depends on its
context, its seed, the sampling and the weights alone, up to the rounding of matrix products of another size.

A batch owns what belongs together: the rows that run, their cache and their state on the device. `batch.py` keeps keys
and values in pages (CUDA), `slots.py` in equal slots (CPU). What a model remembers beside attention lies beside them
(`memory.py`), and no two contexts share it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from attnrl.attention.decoder import remembers, rope_limit, vocabulary_of
from attnrl.attention.paged import failures
from attnrl.attention.pages import LayerShape
from attnrl.attention.paths import HALF_ROUNDING, ROUNDING, check_attention
from attnrl.backend import check_requests
from attnrl.errors import ConfigError, TrainingError
from attnrl.local.batch import PagedBatch
from attnrl.local.draw import check_sampling
from attnrl.local.forward import ProbeAttention, Setup, sampling_mode
from attnrl.local.memory import Memory, logits
from attnrl.local.rows import RowTable
from attnrl.local.slots import SlotBatch
from attnrl.local.stats import SamplerStats, metrics_of
from attnrl.local.trial import logprob_gaps
from attnrl.progress import tell
from attnrl.types import Request, Rollout, Sampling

ROWS = {"cpu": 256, "cuda": 1024}  # most requests that run at once, where nothing else is said
OTHERWISE = "score it from Python (attnrl.scoring), or train another model"
POSITIONS = "the model's max_position_embeddings = {}: lower sampling.max_response_tokens"
OVER_PAGES = "{} draws from slots of one cache (slower), since it could not over pages: {}"
ROPE = "{}, where the model's rotary embedding changes for a whole batch: lower sampling.max_response_tokens"


class Batch(Protocol):
    """The rows that run, with their cache and their state on the device: `SlotBatch` or `PagedBatch`."""

    table: RowTable

    def open(self, requests: Sequence[Request], stats: SamplerStats) -> None: ...
    def busy(self) -> bool: ...
    def admit(self, sampling: Sampling) -> None: ...
    def advance(self, sampling: Sampling) -> None: ...
    def close(self) -> None: ...
    def rest(self) -> None: ...
    def release(self) -> None: ...


class Sampler:
    """Draws rollouts from a model. Weights may change between calls; the model object stays the same.

    `rows`: most requests that run at once (default 256 on CPU, 1024 on CUDA), fewer where `cache_bytes` (default 4
    GiB on CPU, half the free memory on CUDA) would not hold them at full length. `paged`: keys and values in pages
    (default: on CUDA). With pages, `check_every` decode steps lie between two looks
    for finished rows (default 16 on CUDA, 1 on CPU): a row that has ended runs on for one or two looks, and while the
    device draws, the host prepares what comes after the next one. `cuda_graphs` replays the steps (default: on CUDA).
    None of these changes what is drawn. Cache and graphs are kept between calls; `close()` frees them.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop_ids: Sequence[int],
        rows: int | None = None,
        cuda_graphs: bool | None = None,
        check_every: int | None = None,
        cache_bytes: int | None = None,
        prefill_tokens: int | None = None,
        paged: bool | None = None,
    ) -> None:
        parameter = next(model.parameters())
        self.model = model
        self._lost = f"the local sampler does not find what {type(model).__name__} remembers: {OTHERWISE}"
        self.device: torch.device = parameter.device
        cuda = self.device.type == "cuda"
        self.vocabulary = vocabulary_of(model)
        self.rows = ROWS.get(self.device.type, 256) if rows is None else rows
        look = (16 if cuda else 1) if check_every is None else check_every
        prefill = (16384 if cuda else 8192) if prefill_tokens is None else prefill_tokens
        for name, value in (("rows", self.rows), ("check_every", look), ("prefill_tokens", prefill)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: must be at least 1")
        if cuda_graphs and not cuda:
            raise ConfigError(f"cuda_graphs = true, but the model is on {self.device}; leave it unset")
        self.stats = SamplerStats()
        self._done: list[SamplerStats] = []  # calls since the last one of `metrics`
        graphs = cuda if cuda_graphs is None else cuda_graphs
        alone = remembers(model)
        memory = Memory(model) if alone else None
        shapes, stops_V = self._probe_model(memory), self._stop_table(stop_ids)
        state_bytes = 0 if memory is None else memory.nbytes
        setup = Setup(model, *shapes, stops_V, self.rows, prefill, cache_bytes, look, graphs, state_bytes)
        in_pages = cuda if paged is None else paged
        self.batch: Batch = PagedBatch(setup) if in_pages else SlotBatch(setup)
        if alone:
            self._check_states(setup)

    def metrics(self) -> dict[str, float]:
        """What was done since the last call of this, as metrics of docs/metrics.md."""
        done, self._done = self._done, []
        return metrics_of(done)

    def sync(self) -> None:
        """The weights have changed: nothing to do, they are read from the model itself and no cache outlives a call."""

    def rest(self) -> None:
        """The learner works next: a large cache is given back."""
        self.batch.rest()

    def close(self) -> None:
        """Frees the cache and the graphs; a later call allocates them again."""
        self.batch.release()

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, version: int) -> list[Rollout]:
        """One rollout per request, in order, marked with the policy version."""
        check_sampling(sampling)
        positions = getattr(self.model.config, "max_position_embeddings", None)
        check_requests(requests, self.vocabulary, {POSITIONS: positions, ROPE: rope_limit(self.model)})
        self.stats = stats = SamplerStats(requests=len(requests))
        if not requests:
            return []
        begin = time.perf_counter()
        with sampling_mode(self.model):
            table = self._run(requests, sampling)
        stats.seconds = time.perf_counter() - begin
        stats.drawn_tokens = int(table.lengths_of.sum())
        self._done.append(stats)
        return [table.rollout(i, version) for i in range(len(requests))]

    def _run(self, requests: Sequence[Request], sampling: Sampling) -> RowTable:
        batch = self.batch
        batch.open(requests, self.stats)
        try:
            while batch.busy():
                batch.admit(sampling)
                batch.advance(sampling)
                tell("generate: responses", batch.table.finished, len(requests))
        finally:
            batch.close()
        return batch.table

    def _stop_table(self, stop_ids: Sequence[int]) -> NDArray[np.bool_]:
        table = np.zeros(self.vocabulary, np.bool_)
        for stop in stop_ids:
            if not 0 <= stop < self.vocabulary:
                raise ConfigError(f"stop id {stop} is outside the model's vocabulary of {self.vocabulary} tokens")
            table[stop] = True
        return table

    def _probe_model(self, memory: Memory | None) -> tuple[tuple[LayerShape, ...], torch.dtype]:
        """Shapes and dtype of the cache, from one forward over two tokens; raises where the model cannot be cached."""
        check_attention(self.model)
        probe = ProbeAttention()
        with sampling_mode(self.model):
            two = torch.arange(2, device=self.device)[None]
            try:
                last = logits(self.model, probe, memory, input_ids=two, position_ids=two, logits_to_keep=two[0, 1:])
            except ValueError as error:
                if memory is None or isinstance(error, ConfigError):
                    raise
                raise ConfigError(self._lost) from error
        if memory is not None and not memory.nbytes:
            raise ConfigError(self._lost)
        if last.shape[1] != 1:
            name = type(self.model).__name__
            raise ConfigError(f"{name} takes no `logits_to_keep`, which the local sampler prefills with: {OTHERWISE}")
        return probe.layers(), probe.dtype

    def _check_states(self, setup: Setup) -> None:
        """Raises where a model that remembers draws by other log-probs than it has: where it keeps its states, and in
        which order its rows are, only its own code knows. Where pages alone are wrong, slots take their place.
        """
        if isinstance(self.batch, PagedBatch):
            broken: tuple[type[Exception], ...] = (TrainingError, *failures())
            try:
                wrong = self._tried()
            except broken as error:
                wrong = str(error)
            if not wrong:
                return
            warnings.warn(OVER_PAGES.format(type(self.model).__name__, wrong), stacklevel=3)
            self.batch = SlotBatch(setup)
        if wrong := self._tried():
            raise ConfigError(f"{self._lost} ({wrong})")

    def _tried(self) -> str:
        """What is wrong with log-probs of drawn tokens, empty: nothing; the trial leaves no trace."""
        longest = getattr(self.model.config, "max_position_embeddings", None)
        try:
            gap = max(logprob_gaps(self, self.model, longest))
        finally:
            self.close()
            self.metrics()
            self.stats = SamplerStats()
        allowed = ROUNDING.get(self.model.dtype, HALF_ROUNDING)
        return "" if gap <= allowed else f"log-probs of drawn tokens are wrong by {gap:.3g} nats"
