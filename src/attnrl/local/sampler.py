"""The local sampler: rollouts from any token context, for any Hugging Face decoder-only model.

Requests wait in lexicographic order of their contexts, so that trunks of one prompt and branches of one trunk are
prefilled together and each shared token once (`prefill.py`). Running rows draw one token a step (`decode.py`). A
finished row leaves the batch, the last row moves into its place, and waiting requests are admitted behind. What is
drawn for a request depends on its context, its seed, the sampling and the weights alone, up to the rounding of matrix
products of another size.

Shapes: R rows, C steps between two looks from the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attnrl.errors import ConfigError, DataError
from attnrl.local.cache import (
    Blocks,
    KVCache,
    LayerShape,
    ProbeAttention,
    attending,
    bytes_per_token,
    row_blocks,
    sampling_mode,
)
from attnrl.local.decode import Decoder
from attnrl.local.draw import check_sampling, draw, uniforms
from attnrl.local.prefill import Carry, lexicographic, prefill
from attnrl.local.rows import RowTable
from attnrl.scoring.packed import lone_from
from attnrl.types import Request, Rollout, Sampling, as_ids

_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(slots=True)
class SamplerStats:
    """What the last call of `generate` did."""

    requests: int = 0
    rows: int = 0  # most rows that could run at once
    drawn_tokens: int = 0
    prefilled_tokens: int = 0  # context tokens the model ran over
    saved_tokens: int = 0  # context tokens it did not, since another request shares them
    prefills: int = 0  # forward passes over contexts
    steps: int = 0  # decode steps
    row_steps: int = 0  # rows of all decode steps: drawn tokens and idle or finished rows
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    cache_bytes: int = 0
    cuda_graph: bool = False  # decode steps were replayed CUDA graphs
    cuda_graphs_captured: int = 0  # of this call

    @property
    def tokens_per_second(self) -> float:
        return self.drawn_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, float]:
        """All counts by name, with tokens_per_second."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def length_bucket(tokens: int) -> int:
    """`tokens` rounded up to a multiple of a quarter of its power of two, at least 128: few shapes, at most 25 % spare.

    >>> [length_bucket(n) for n in (1, 129, 513, 1025)]
    [128, 256, 640, 1280]
    """
    grain = max(128, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // grain) * grain


def row_bucket(rows: int, most: int) -> int:
    """`rows` rounded up to a power of two, at least 8, at most `most`.

    >>> [row_bucket(n, 48) for n in (1, 9, 33)]
    [8, 16, 48]
    """
    return min(most, max(8, 1 << (rows - 1).bit_length()))


class Sampler:
    """Draws rollouts from a model. Weights may change between calls; the model object stays the same.

    `rows`: most requests that run at once (default 256 on CPU, 1024 on CUDA), fewer where `cache_bytes` (default 4
    GiB on CPU, half the free memory on CUDA) would not hold them at full length. `check_every`: decode steps between
    two looks for finished rows (default 1 on CPU, 16 on CUDA, where a look waits for the device); more than 1 also
    fixes the shapes of steps to a few sizes. `cuda_graphs`: replay decode steps as CUDA graphs (default: on CUDA).
    None of these changes what is drawn. Cache and graphs are kept between calls; `release()` frees them.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop_ids: Sequence[int],
        rows: int | None = None,
        progress: bool = False,
        cuda_graphs: bool | None = None,
        check_every: int | None = None,
        cache_bytes: int | None = None,
        prefill_tokens: int | None = None,
    ) -> None:
        parameter = next(model.parameters())
        self.model = model
        self.device: torch.device = parameter.device
        cuda = self.device.type == "cuda"
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.rows = (1024 if cuda else 256) if rows is None else rows
        self.progress = progress
        self.check_every = (16 if cuda else 1) if check_every is None else check_every
        self.prefill_tokens = (32768 if cuda else 8192) if prefill_tokens is None else prefill_tokens
        for name, value in (
            ("rows", self.rows),
            ("check_every", self.check_every),
            ("prefill_tokens", self.prefill_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{name} = {value}: must be at least 1")
        if cuda_graphs and not cuda:
            raise ConfigError(f"cuda_graphs = true, but the model is on {self.device}; leave it unset")
        self._cache_bytes = cache_bytes
        self._stops_V = self._stop_table(stop_ids)
        graphs = cuda if cuda_graphs is None else cuda_graphs
        self._decoder = Decoder(model, self.device, check_every=self.check_every, cuda_graphs=graphs)
        self.stats = SamplerStats()
        self._shared_tokens = self._context_tokens = 0  # since the last call of `metrics`
        self._layers, self._dtype = self._probe_model()

    def metrics(self) -> dict[str, float]:
        """generate/shared_context: share of context tokens that another request had already run over, since the last
        call of this.
        """
        share = self._shared_tokens / max(1, self._context_tokens)
        self._shared_tokens = self._context_tokens = 0
        return {"generate/shared_context": share}

    def sync(self) -> None:
        """The weights have changed: nothing to do, they are read from the model itself and no cache outlives a call."""

    def rest(self) -> None:
        """The learner works next: the cache stays, where it fits beside it."""

    def close(self) -> None:
        """The sampler is not used any more."""
        self.release()

    def release(self) -> None:
        """Frees the cache and the graphs; the next call allocates them again."""
        self._decoder.use_cache(None)

    def generate(self, requests: Sequence[Request], sampling: Sampling, *, version: int) -> list[Rollout]:
        """One rollout per request, in order, marked with the policy version."""
        check_sampling(sampling)
        self._check_requests(requests)
        self.stats = stats = SamplerStats(requests=len(requests))
        if not requests:
            return []
        begin = time.perf_counter()
        captured = self._decoder.captured
        with sampling_mode(self.model), self._progress_bar(len(requests)) as bar:
            self._decoder.weights_may_have_moved()
            table = self._run(requests, sampling, bar)
        stats.seconds = time.perf_counter() - begin
        stats.drawn_tokens = int(table.lengths_of.sum())
        self._shared_tokens += stats.saved_tokens
        self._context_tokens += stats.saved_tokens + stats.prefilled_tokens
        stats.cuda_graph = self._decoder.cuda_graphs
        stats.cuda_graphs_captured = self._decoder.captured - captured
        return [table.rollout(i, version) for i in range(len(requests))]

    def _run(self, requests: Sequence[Request], sampling: Sampling, bar: Progress) -> RowTable:
        longest = max(len(r.context) + r.max_tokens for r in requests)
        rows = self._rows_for(longest, len(requests))
        self.stats.rows = rows
        if self._decoder.cache is not None and self._decoder.cache.rows < rows:
            self.release()
        table = RowTable(requests, rows)
        waiting = lexicographic([as_ids(r.context) for r in requests])
        refill = max(1, rows // 8)  # admitting one by one would run a prefill for every step
        carry: Carry | None = None
        task = bar.tasks[0].id
        begin, drawn = time.perf_counter(), 0
        while waiting or table.count:
            while waiting and (rows - table.count >= refill or not table.count):
                carry, taken = self._admit(table, requests, waiting[: rows - table.count], carry, sampling, longest)
                drawn += taken
                del waiting[:taken]
            if table.count:
                drawn += self._advance(table, sampling, longest)
            if self.progress:
                rate = drawn / (time.perf_counter() - begin)
                bar.update(task, completed=table.finished, rate=f"{rate:,.0f} tokens/s")
        return table

    def _admit(
        self,
        table: RowTable,
        requests: Sequence[Request],
        candidates: list[int],
        carry: Carry | None,
        sampling: Sampling,
        longest: int,
    ) -> tuple[Carry, int]:
        """Prefills as many candidates as fit into one forward, draws their first token, lets the unfinished run."""
        begin = time.perf_counter()
        contexts = [as_ids(requests[i].context) for i in candidates]
        done = prefill(self.model, contexts, carry, self.prefill_tokens, self.device)
        taken = len(done.plan.paths)
        chosen = np.array(candidates[:taken], np.int64)
        streams = torch.from_numpy(table.streams[chosen]).to(self.device)
        ids, logprobs = draw(done.logits_NV, uniforms(streams, torch.zeros_like(streams)), sampling)
        first = ids.cpu().numpy()
        nothing = np.zeros(taken, np.int64)
        ended = table.record(chosen, nothing, first[:, None], logprobs.cpu().numpy()[:, None], self._stops_V)
        goes_on = np.flatnonzero(~ended)
        if len(goes_on):
            paths = [done.plan.paths[i] for i in goes_on]
            lengths = np.array([len(path) for path in paths], np.int64)
            places = table.append(chosen[goes_on], first[goes_on], lengths)
            cache = self._cache_for(table, int(lengths.max()) + self.check_every, longest)
            positions = np.concatenate([np.arange(n) for n in lengths])
            cache.fill(np.repeat(places, lengths), positions, np.concatenate(paths), done.keys, done.values)
            self._tidy(table, cache)
            self._place(table)
        self.stats.prefills += bool(len(done.plan.tokens))
        self.stats.prefilled_tokens += len(done.plan.tokens)
        self.stats.saved_tokens += sum(map(len, contexts[:taken])) - len(done.plan.tokens)
        self.stats.prefill_seconds += time.perf_counter() - begin
        return done.carry, taken

    def _advance(self, table: RowTable, sampling: Sampling, longest: int) -> int:
        """Draws up to `check_every` tokens for each running row and lets ended rows go; returns the tokens kept."""
        running = table.count
        active = slice(0, running)
        left = table.limits[table.request[active]] - table.drawn[active]
        steps = min(self.check_every, int(left.max()))
        needed = int(table.length[active].max()) + steps
        cache = self._cache_for(table, needed, longest)
        if self.check_every > 1:
            blocks: Blocks = ((0, row_bucket(running, cache.rows), min(cache.capacity, length_bucket(needed))),)
        else:
            blocks = row_blocks(table.length[active], cache.capacity)
        ids_RC, logprobs_RC = self._decoder.run(steps, running, blocks, sampling)
        before = int(table.lengths_of.sum())
        request = table.request[active].copy()
        ended = table.record(request, table.drawn[active], ids_RC, logprobs_RC, self._stops_V)
        drawn_by_ended = int(table.lengths_of.sum()) - before - int(table.drawn[active][ended].sum())
        table.token[active] = ids_RC[:, -1]
        table.length[active] += steps
        table.drawn[active] += steps
        self.stats.steps += steps
        self.stats.row_steps += steps * blocks[-1][1]
        if ended.any():
            source, target = table.remove(ended)
            if len(source):
                cache.move(source, target, int(table.length[: table.count].max()))
            self._place(table)
        return drawn_by_ended + steps * int((~ended).sum())

    def _tidy(self, table: RowTable, cache: KVCache) -> None:
        """Puts rows of similar length side by side where that saves a good part of the coming steps' attention."""
        lengths = table.length[: table.count]
        order = np.argsort(-lengths, kind="stable")
        pairs = [row_blocks(n, cache.capacity) for n in (lengths, lengths[order])]
        now, tidied = (sum((b - a) * span for a, b, span in blocks) for blocks in pairs)
        if self.check_every == 1 and now > 1.2 * tidied:
            moved = np.flatnonzero(order != np.arange(table.count))
            cache.move(order[moved], moved, int(lengths.max()))
            table.move(order[moved], moved)

    def _place(self, table: RowTable) -> None:
        active = slice(0, table.count)
        streams = table.streams[table.request[active]]
        self._decoder.place(table.token[active], table.length[active], streams, table.drawn[active])

    def _cache_for(self, table: RowTable, needed: int, longest: int) -> KVCache:
        """The cache, grown if `needed` positions do not fit: by half at least, to no more than the call can need."""
        cache = self._decoder.cache
        most = length_bucket(longest + self.check_every)
        if cache is None:
            cache = KVCache(self._layers, self.stats.rows, length_bucket(needed), self._dtype, self.device)
        elif cache.capacity < needed:
            capacity = min(most, length_bucket(max(needed, cache.capacity * 3 // 2)))
            used = min(cache.capacity, int(table.length[: table.count].max()))
            cache = cache.grown(capacity, table.count, used)
        if cache is not self._decoder.cache:
            self._decoder.use_cache(cache)
            self._place(table)
        self.stats.cache_bytes = cache.nbytes
        return cache

    def _rows_for(self, longest: int, requests: int) -> int:
        """How many rows may run at once: each must have room for the longest request."""
        per_row = length_bucket(longest + self.check_every) * bytes_per_token(self._layers, self._dtype)
        budget = self._cache_bytes
        if budget is None and self.device.type == "cuda":
            own = 0 if self._decoder.cache is None else self._decoder.cache.nbytes
            budget = (torch.cuda.mem_get_info(self.device)[0] + own) // 2
        fitting = max(1, (4 << 30 if budget is None else budget) // per_row)
        wanted = row_bucket(requests, self.rows) if self.check_every > 1 else min(requests, self.rows)
        return min(wanted, fitting)

    def _progress_bar(self, requests: int) -> Progress:
        columns = (
            TextColumn("sampling"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not self.progress)
        bar.add_task("sampling", total=requests, rate="")
        return bar

    def _stop_table(self, stop_ids: Sequence[int]) -> NDArray[np.bool_]:
        table = np.zeros(self.vocabulary, np.bool_)
        for stop in stop_ids:
            if not 0 <= stop < self.vocabulary:
                raise ConfigError(f"stop id {stop} is outside the model's vocabulary of {self.vocabulary} tokens")
            table[stop] = True
        return table

    def _probe_model(self) -> tuple[tuple[LayerShape, ...], torch.dtype]:
        """Shapes and dtype of the cache, from one forward over one token; raises where the model cannot be cached."""
        types = set(getattr(self.model.config, "layer_types", None) or ()) - _LAYER_TYPES
        if types:
            raise ConfigError(f"the local sampler cannot cache layers of type {', '.join(sorted(types))}")
        probe = ProbeAttention()
        with sampling_mode(self.model), attending(probe):
            one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            self.model(input_ids=one, position_ids=one, use_cache=False)
        return probe.layers(), probe.dtype

    def _check_requests(self, requests: Sequence[Request]) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        rope = lone_from(self.model)
        for i, request in enumerate(requests):
            context = request.context
            if request.max_tokens < 1:
                raise ConfigError(f"request {i}: max_tokens = {request.max_tokens}: must be at least 1")
            if len(context) == 0:
                raise DataError(f"request {i}: empty context: give it at least one token, such as the start token")
            if int(np.min(context)) < 0 or int(np.max(context)) >= self.vocabulary:
                worst = int(np.min(context)) if int(np.min(context)) < 0 else int(np.max(context))
                raise DataError(
                    f"request {i}: token id {worst} is outside the model's vocabulary of {self.vocabulary} tokens: "
                    "tokenize with the model's own tokenizer"
                )
            if limit is not None and len(context) + request.max_tokens > limit:
                raise ConfigError(
                    f"request {i}: {len(context)} context tokens and max_tokens = {request.max_tokens} exceed the "
                    f"model's max_position_embeddings = {limit}: lower the response limit"
                )
            if rope is not None and len(context) + request.max_tokens > rope:
                raise ConfigError(
                    f"request {i}: {len(context)} context tokens and max_tokens = {request.max_tokens} exceed {rope}, "
                    "where the model's rotary embedding changes for a whole batch: lower the response limit"
                )
