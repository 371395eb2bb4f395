"""Running rows that own equal slots of one cache: what the sampler uses on a CPU.

A row's keys and values are one run of memory, so attention needs no gathering; every row pays for the longest. A look
at the device costs nothing here, so there is one after every step. On CUDA devices `batch.py` takes its place.

Shapes: R rows of the step, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from attnrl.attention.pages import Ints, bytes_per_token, sent
from attnrl.attention.slots import Blocks, DecodeAttention, KVCache, row_blocks
from attnrl.attention.trie import sorted_rows
from attnrl.local.draw import draw, uniforms
from attnrl.local.forward import Setup
from attnrl.local.memory import Memory, logits
from attnrl.local.prefill import Carry, prefill
from attnrl.local.rows import RowTable
from attnrl.local.stats import SamplerStats, length_bucket
from attnrl.types import Request, Sampling, as_ids


class SlotBatch:
    """The rows that run, their cache and their state on the device.

    The state is four int64 vectors: the newest token of each row (drawn, not yet in the cache), its position, its
    random stream, and how many tokens the row has drawn.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model, self.device = setup.model, setup.device
        self.waiting: list[int] = []
        self.table = RowTable([], 0, setup.stops_V)
        self.stats = SamplerStats()
        self._cache: KVCache | None = None
        self._memory: Memory | None = None
        self._requests: Sequence[Request] = ()
        self._carry: Carry | None = None
        self._longest = 0
        self._state_4R = torch.zeros(4, 0, dtype=torch.int64, device=self.device)

    def rest(self) -> None:
        """The learner works next: the cache is as large as the rows were long, and stays on a CPU."""
        if self.device.type == "cuda":
            self.release()

    def release(self) -> None:
        """Frees the cache."""
        self._use(None)
        self._carry = None

    def open(self, requests: Sequence[Request], stats: SamplerStats) -> None:
        """Starts a call: all requests wait."""
        self.stats, self._requests, self._carry, self._memory = stats, requests, None, None
        self._longest = max(len(r.context) + r.max_tokens for r in requests)
        rows = self.stats.rows = self._rows_for(len(requests))
        if self._cache is not None and self._cache.rows < rows:
            self.release()
        self.table = RowTable(requests, rows, self.setup.stops_V)
        self.waiting = sorted_rows([as_ids(r.context) for r in requests])

    def close(self) -> None:
        """Ends a call."""
        self._requests, self._carry, self._memory = (), None, None

    def busy(self) -> bool:
        """Whether some request has not ended."""
        return bool(self.waiting or self.table.count)

    def admit(self, sampling: Sampling) -> None:
        """Lets waiting requests run where enough rows are free."""
        rows = self.stats.rows
        refill = max(1, rows // 8)  # admitting one by one would run a prefill for every step
        begun = self.table.count
        while self.waiting and (rows - self.table.count >= refill or not self.table.count):
            taken = self._prefill(self.waiting[: rows - self.table.count], sampling)
            del self.waiting[:taken]
        if self.table.count == begun:
            return
        assert self._cache is not None, "rows were added"
        self._tidy(self._cache)
        self._place()

    def _prefill(self, candidates: list[int], sampling: Sampling) -> int:
        """Prefills as many candidates as fit into one forward, draws their first token, lets the unfinished run."""
        begin = time.perf_counter()
        table = self.table
        contexts = [as_ids(self._requests[i].context) for i in candidates]
        memory = Memory(self.model) if self.setup.state_bytes else None
        if memory is not None:
            contexts = list(takewhile(partial(np.array_equal, contexts[0]), contexts))
        done = prefill(self.model, contexts, self._carry, self.setup.prefill_tokens, self.device, memory)
        taken = len(done.trie.paths)
        chosen = np.array(candidates[:taken], np.int64)
        streams = torch.from_numpy(table.streams[chosen]).to(self.device)
        ids, logprobs = draw(done.logits_NV, uniforms(streams, torch.zeros_like(streams)), sampling)
        first = ids.cpu().numpy()
        ended = table.record(chosen, table.resumed[chosen], first[:, None], logprobs.cpu().numpy()[:, None])
        goes_on = np.flatnonzero(~ended)
        if len(goes_on):
            paths = [done.trie.paths[i] for i in goes_on]
            lengths = np.array([len(path) for path in paths], np.int64)
            rows = table.add(chosen[goes_on], lengths)
            table.token[rows] = first[goes_on]
            cache = self._cache_for(int(lengths.max()) + 1)
            positions = np.concatenate([np.arange(n) for n in lengths])
            cache.fill(np.repeat(rows, lengths), positions, np.concatenate(paths), done.keys, done.values)
            if memory is not None:
                self._memory = memory.room(self.stats.rows) if self._memory is None else self._memory
                self._memory.put(sent(rows, self.device), memory)
        self._carry = done.carry if memory is None else None
        self.stats.add_prefill(done.trie)
        self.stats.prefill_seconds += time.perf_counter() - begin
        return taken

    def advance(self, sampling: Sampling) -> None:
        """Draws a token for each running row and lets ended rows go."""
        table = self.table
        if not table.count:
            return
        lengths = table.length[: table.count]
        cache = self._cache_for(int(lengths.max()) + 1)
        ids_R, logprobs_R = self._step(cache, row_blocks(lengths, cache.capacity), sampling)
        self.stats.steps += 1
        self.stats.row_steps += table.count
        ended = table.advance(ids_R.cpu().numpy()[:, None], logprobs_R.cpu().numpy()[:, None])
        if ended.any():
            source, target = table.remove(ended)
            self._move(cache, source, target)
            self._place()

    def _step(self, cache: KVCache, blocks: Blocks, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """One token for each row and its log-prob, [R] each."""
        tokens_R, lengths_R, streams_R, drawn_R = self._state_4R[:, : self.table.count]
        attention = DecodeAttention(cache, lengths_R, blocks)
        given = {"input_ids": tokens_R[:, None], "position_ids": lengths_R[:, None]}
        memory = None if self._memory is None else self._memory.first(self.table.count)
        logits_R1V = logits(self.model, attention, memory, **given)
        ids_R, logprobs_R = draw(logits_R1V[:, -1], uniforms(streams_R, drawn_R), sampling)
        tokens_R.copy_(ids_R)
        self._state_4R[1::2, : self.table.count].add_(1)  # position and count
        return ids_R, logprobs_R

    def _use(self, cache: KVCache | None) -> None:
        self._cache = cache
        rows = 0 if cache is None else cache.rows
        if rows != self._state_4R.shape[1]:
            self._state_4R = torch.zeros(4, rows, dtype=torch.int64, device=self.device)

    def _tidy(self, cache: KVCache) -> None:
        """Puts rows of similar length side by side where that saves a good part of the coming steps' attention."""
        lengths = self.table.length[: self.table.count]
        order = np.argsort(-lengths, kind="stable")
        pairs = [row_blocks(n, cache.capacity) for n in (lengths, lengths[order])]
        now, tidied = (sum((b - a) * span for a, b, span in blocks) for blocks in pairs)
        if now > 1.2 * tidied:
            moved = np.flatnonzero(order != np.arange(self.table.count))
            self._move(cache, order[moved], moved)
            self.table.move(order[moved], moved)

    def _move(self, cache: KVCache, source: Ints, target: Ints) -> None:
        """What the rows keep follows them from `source` to `target`."""
        if len(source):
            cache.move(source, target, int(self.table.length[: self.table.count].max()))
        if self._memory is not None:
            self._memory.move(sent(source, self.device), sent(target, self.device))

    def _place(self) -> None:
        """Sets the device's state from the host's."""
        running = self.table.count
        state_4R = np.concatenate([self.table.token[None, :running], self.table.state()])
        self._state_4R[:, :running] = torch.from_numpy(state_4R).to(self.device)

    def _cache_for(self, needed: int) -> KVCache:
        """The cache, grown if `needed` positions do not fit: by half at least, to no more than the call can need."""
        cache = self._cache
        most = length_bucket(self._longest + 1)
        if cache is None:
            cache = KVCache(self.setup.layers, self.stats.rows, length_bucket(needed), self.setup.dtype, self.device)
        elif cache.capacity < needed:
            capacity = min(most, length_bucket(max(needed, cache.capacity * 3 // 2)))
            used = min(cache.capacity, int(self.table.length[: self.table.count].max()))
            cache = cache.grown(capacity, self.table.count, used)
        if cache is not self._cache:
            self._use(cache)
            self._place()
        self.stats.cache_bytes = cache.nbytes + self.stats.rows * self.setup.state_bytes
        held = self.table.count * needed * bytes_per_token(self.setup.layers, self.setup.dtype)
        self.stats.cache_peak_bytes = max(self.stats.cache_peak_bytes, held)
        return cache

    def _rows_for(self, requests: int) -> int:
        """How many rows may run at once: each must have room for the longest request."""
        per_row = length_bucket(self._longest + 1) * bytes_per_token(self.setup.layers, self.setup.dtype)
        budget = self.setup.budget(0 if self._cache is None else self._cache.nbytes)
        fitting = max(1, budget // (per_row + self.setup.state_bytes))
        return min(requests, self.setup.rows, fitting)
