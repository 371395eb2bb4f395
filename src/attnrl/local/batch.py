"""Running rows that hold their keys and values in pages: what the sampler uses on a CUDA device.

A row holds the pages it needs and no more; what a prompt's trunks or a trunk's branches have in common is stored once
and read once for all of them. When pages run out, the rows admitted last are put back and prefilled again later with
what they have drawn. The step is one CUDA graph, the same for any lengths.

The host is a look ahead of the device (`flights.py`): it queues the next steps before it sees what the last ones drew.
A row that reaches its limit is known beforehand to end; one that draws a stop token runs on until the host has seen it.
Nothing waits for what is freed meanwhile, since the device does its work in the order it was queued in.

What a model remembers beside attention (`memory.py`) lies beside the pages, row by row, and is advanced in place by the
same graphs. Contexts share nothing of it: each is prefilled by itself, and no part of one is carried to the next.

Shapes: R rows of the step, C steps between two looks from the host, M pages of the longest row, I items of attention,
N contexts of a prefill, T packed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from attnrl.attention.decoder import rope_limit
from attnrl.attention.layout import lay_out
from attnrl.attention.pages import PAGE, Ints, PagePool, Pages, bytes_per_token, pages_for, sent
from attnrl.attention.trie import Trie, common_prefix, continue_trie, sorted_rows
from attnrl.local.draw import uniforms
from attnrl.local.flights import Flight, Mark, fly
from attnrl.local.forward import Forward, Setup, draw_column
from attnrl.local.graphs import Graphs
from attnrl.local.memory import Memory
from attnrl.local.paged_state import PagedState, Shape
from attnrl.local.rows import RowTable, in_gaps
from attnrl.local.stats import SamplerStats, length_bucket, step_rows
from attnrl.types import Ids, Request, Sampling, as_ids

SPARE = 8  # a pool is larger by this part than a call needs, so that one a little larger keeps it and its graphs


@dataclass(frozen=True, slots=True, eq=False)
class _Carry:
    """The last context of a prefill, held with its pages and its next-token logits for those that begin alike."""

    context: Ids
    pages: Pages
    logits_V: Tensor


class PagedBatch:
    """The rows that run, their pages and their state on the device.

    The host knows all rows (`table`, `_pages`) and sets the device's state at every look: the position of each row's
    newest token (drawn, not yet stored), the uniform numbers of the coming steps and the row's pages. The token itself
    the device has kept. Rows beyond the running ones are idle: they stand at position 0 of page 0 and draw tokens
    nobody reads, so that few graphs serve.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model, self.device = setup.model, setup.device
        self.waiting: list[int] = []
        self.table = RowTable([], 0, setup.stops_V)
        self.stats = SamplerStats()
        limits = getattr(self.model.config, "max_position_embeddings", None), rope_limit(self.model)
        self._positions = min((n for n in limits if n is not None), default=1 << 40)  # that the model has
        self._requests: Sequence[Request] = ()
        self._carry: _Carry | None = None
        self._flights: list[Flight] = []
        self.pool: PagePool | None = None
        self._graphs = Graphs(self.model, self.device, enabled=setup.cuda_graphs)
        self._forward = Forward(self.model, setup.layers, setup.dtype)
        self._make_state(0, 0)

    # A call

    def open(self, requests: Sequence[Request], stats: SamplerStats) -> None:
        """Starts a call: all requests wait."""
        if self._requests:  # the call before was broken off while it ended
            self._abandon()
        self.stats, self._requests = stats, requests
        self._graphs.weights_may_have_moved()
        wanted = self._rows_for(len(requests))
        self.waiting = sorted_rows([as_ids(r.context) for r in requests])
        self._allocate(wanted)
        self._forward.refresh(self._last_position + 1)
        stats.rows, stats.fused, stats.cuda_graph = wanted, self._forward.fused is not None, self._graphs.enabled
        self.table = RowTable(requests, wanted, self.setup.stops_V)
        self._state.open(len(requests))

    def busy(self) -> bool:
        """Whether some request has not ended, or is not known to."""
        return bool(self.waiting or self.table.count or self._flights)

    def close(self) -> None:
        """Ends a call, whole or broken off."""
        if self.pool is not None:
            self.stats.cache_peak_bytes = self.pool.peak * self.pool.page_bytes
            if self.busy() or self._carry is not None or self.pool.used:
                self._abandon()
        self.stats.cuda_graph = self._graphs.enabled
        self.stats.cuda_graphs_captured = self._graphs.take_captured()
        self._requests = ()

    def _abandon(self) -> None:
        """Forgets a call that was broken off, wherever it was: rows may hold other pages than the table says."""
        self._flights.clear()
        self.waiting, self._carry, self.table.count = [], None, 0
        self.release()

    def rest(self) -> None:
        """The learner works next: a cache that takes more than an eighth of the device's memory is given back."""
        if self.pool is not None and self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            if self._cache_bytes() > total // 8:
                self.release()
                torch.cuda.empty_cache()  # what graphs held can serve nothing else

    def release(self) -> None:
        """Frees pages, states and graphs."""
        self._graphs.clear()
        self._state.scratch.clear()
        self._state.memory = None
        self.pool = None
        self._forward.release()

    def _cache_bytes(self) -> int:
        """Of the pages, and of what rows remember."""
        return sum(held.nbytes for held in (self.pool, self._state.memory) if held is not None)

    def _rows_for(self, requests: int) -> int:
        """How many rows may run at once: what they remember takes half of the cache, hardly more if there is room."""
        most, remembered = min(requests, self.setup.rows), self.setup.memory_bytes
        if not self.setup.state_bytes:
            return most
        half, kept = self.setup.budget(self._cache_bytes()) // 2, len(self._state.table_RM)
        if kept > 8 and remembered(kept) > half + half // SPARE:
            self._graphs.clear()
            self._make_state(0, 0)
            kept = 0
        fitting = (n for n in range(most, 8, -1) if step_rows(n) <= kept or remembered(n) <= half)
        return next(fitting, min(most, 8))

    def _allocate(self, rows: int) -> None:
        """A pool for what the rows can need at most, within the budget, and the device's state for so many rows."""
        requests = [self._requests[i] for i in self.waiting]
        sizes = [len(r.context) + r.max_tokens + self.setup.check_every for r in requests]
        alike = sum(common_prefix(as_ids(a.context), as_ids(b.context)) // PAGE for a, b in pairwise(requests))
        together = sum(map(pages_for, sizes)) - alike  # of all requests, what they share held once
        sizes.sort(reverse=True)
        longest = pages_for(sizes[0])
        columns = max(pages_for(length_bucket(sizes[0])), pages_for(self.setup.check_every) + 1)
        size = self._state.table_RM.shape
        if size[0] < step_rows(rows) or size[1] < columns:
            self._graphs.clear()
            self._make_state(step_rows(rows), columns)
        per_page = PAGE * bytes_per_token(self.setup.layers, self.setup.dtype)
        most = min(together, sum(map(pages_for, sizes[:rows])))
        need = most + rows + longest + 2  # `_fitting` asks for a page to grow
        pool = self.pool
        memory_bytes = self.setup.memory_bytes(len(self._state.table_RM))
        fitting = (self.setup.budget(self._cache_bytes()) - memory_bytes) // per_page
        least = longest + 3
        enough = max(least, need if need <= fitting else fitting * 9 // 10)
        much = self.setup.state_bytes and pool is not None and pool.pages > fitting + fitting // SPARE
        if pool is None or pool.pages < enough or much:
            self.release()
            room = max(least, min(need + need // SPARE, fitting))
            pool = self.pool = PagePool(self.setup.layers, room, self.setup.dtype, self.device)
        pool.peak = 0
        self.stats.cache_bytes = pool.nbytes + memory_bytes // 2

    def _make_state(self, rows: int, columns: int) -> None:
        self._state = PagedState(self.model, self.setup.layers, rows, columns, self.setup.check_every)
        self._pages_RM = np.zeros((rows, columns), np.int32)  # the pages of each running row, and how many it holds
        self._held_R = np.zeros(rows, np.int64)
        self._last_position = min(columns * PAGE, self._positions) - 1  # of rows that run on past their end

    # Admitting requests

    def admit(self, sampling: Sampling) -> None:
        """Lets waiting requests run where enough rows and pages are free."""
        rows = self.stats.rows
        if self.table.count and rows - self.table.count < max(1, rows // 16):
            return  # admitting one by one would run a prefill for every step
        while self.waiting and self.table.count < rows:
            taken = self._prefill(self.waiting[: rows - self.table.count], sampling)
            if not taken:
                break
            del self.waiting[:taken]
        if not self.waiting:
            self._forget_carry()

    def _prefill(self, candidates: list[int], sampling: Sampling) -> int:
        """Queues the prefill of as many candidates as fit into one forward and the pool; returns how many do."""
        contexts = self._fitting(candidates)
        if not contexts:
            return 0
        begun = Mark(self.device)
        memory = Memory(self.model) if self.setup.state_bytes else None
        carried = None if self._carry is None else self._carry.context
        trie = continue_trie(contexts, carried, self.setup.prefill_tokens)
        request_N = np.array(candidates[: len(contexts)], np.int64)
        before_N = self.table.resumed[request_N]
        pages, logits_NV = self._forward_contexts(contexts, trie, memory)
        ids_N, logprobs_N = self._first_draw(logits_NV, self.table.streams[request_N], before_N, sampling)
        self._state.drawn(sent(request_N, self.device), ids_N)
        self._flights.append(fly(request_N, before_N, ids_N[:, None], logprobs_N[:, None], begun))
        self.stats.add_prefill(trie)
        rows = self.table.add(request_N, [len(path) for path in trie.paths])
        for row, held in zip(rows, pages, strict=True):
            self._pages_RM[row, : len(held)], self._held_R[row] = held, len(held)
        if memory is not None:
            self._state.remember(rows, memory)
        self._state.look = 0
        self._let_go()
        return len(contexts)

    def _fitting(self, candidates: list[int]) -> list[Ids]:
        """Contexts of the first candidates, as many as one forward and the pool hold, with a page to grow a row; of a
        model that remembers those that are alike.
        """
        pool, running = self._held(), self.table.count
        previous = np.zeros(0, np.int32) if self._carry is None else self._carry.context
        contexts: list[Ids] = []
        tokens, free = 0, pool.free - running
        for request in candidates:
            context = self.table.so_far(request, as_ids(self._requests[request].context))
            shared = common_prefix(previous, context)
            if contexts and self.setup.state_bytes and not len(contexts[0]) == len(context) == shared:
                break
            tokens += len(context) - shared
            free -= pages_for(len(context)) - shared // PAGE + 1
            if free < 0 and not contexts and not running:
                self._forget_carry()  # nothing runs and one context does not fit: the carry holds the rest
                return [context]
            if free < 0 or (contexts and tokens > self.setup.prefill_tokens):
                break
            contexts.append(context)
            previous = context
        return contexts

    def _forward_contexts(self, contexts: list[Ids], trie: Trie, memory: Memory | None) -> tuple[list[Pages], Tensor]:
        """Each context's pages, filled, and its next-token logits [N, V]. The last one becomes the carry, but of a
        model that remembers: `memory` takes the states after the contexts, which are alike.
        """
        carry = self._carry
        before = None if carry is None else (carry.context, carry.pages)
        pages, attention = lay_out(self._held(), before, contexts, trie)
        if len(trie.ids_T):
            tokens, positions, ends = (sent(a, self.device) for a in (trie.ids_T, trie.positions_T, trie.ends))
            fresh_NV = self._forward.logits(tokens, positions, attention, ends, memory)
            first = torch.zeros_like(fresh_NV[:1]) if carry is None else carry.logits_V[None]
            logits_NV = torch.cat([first, fresh_NV])
        else:
            assert carry is not None
            for layer in range(len(self.setup.layers)):
                attention.stored(layer)
            logits_NV = carry.logits_V[None]
        if memory is None:
            kept = self._held().share(pages[-1])
            self._forget_carry()
            self._carry = _Carry(contexts[-1], kept, logits_NV[trie.run_of[-1]].clone())
        return pages, logits_NV[sent(trie.run_of, self.device)]

    def _first_draw(self, logits_NV: Tensor, streams: Ints, index: Ints, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs [N] that follow the contexts."""
        count, device = len(streams), self.device
        uniform = uniforms(sent(streams, device), sent(index, device))
        tokens, lengths, ids = torch.zeros(3, count, 1, dtype=torch.int64, device=device)
        logprobs = torch.zeros(count, 1, device=device)
        column = torch.zeros(1, dtype=torch.int64, device=device)
        draw_column(logits_NV, uniform[:, None], column, tokens[:, 0], lengths[:, 0], ids, logprobs, sampling)
        return ids[:, 0], logprobs[:, 0]

    # Drawing

    def advance(self, sampling: Sampling) -> None:
        """Queues up to `check_every` tokens for each running row, and looks at what was drawn before."""
        self._make_room()
        if self.table.count:
            self._draw(self.table.steps(self.setup.check_every), sampling)
            self._let_go()
        while len(self._flights) > bool(self.table.count or self.waiting):
            self._land()

    def _land(self) -> None:
        """Waits for what was queued first, keeps what it drew, and lets ended rows go."""
        flight = self._flights.pop(0)
        self.table.record(flight.request_R, flight.drawn_R, *flight.land())
        self.stats.prefill_seconds += flight.prefill_seconds
        self._let_go()

    def _let_go(self) -> None:
        """Drops the rows that draw no more, and their pages."""
        table = self.table
        kept = table.going()
        if len(kept) == table.count:
            return
        for row in np.setdiff1d(np.arange(table.count), kept).tolist():
            self._held().drop(self._row_pages(row))
        if self._state.memory is not None:
            kept = in_gaps(kept)
            moved = np.flatnonzero(kept != np.arange(len(kept)))
            self._state.memory.move(sent(kept[moved], self.device), sent(moved, self.device))
        self._pages_RM[: len(kept)], self._held_R[: len(kept)] = self._pages_RM[kept], self._held_R[kept]
        table.keep(kept)
        self._state.look = 0

    def _make_room(self) -> None:
        """Gives every row the pages of its coming tokens; puts the last rows back where there are too few."""
        table, pool = self.table, self._held()
        while table.count:
            steps = table.steps(self.setup.check_every)
            missing_R = -(-(table.length[: table.count] + steps) // PAGE) - self._held_R[: table.count]
            missing_R = missing_R.clip(0)
            if int(missing_R.sum()) <= pool.free:
                break
            if self._carry is not None:
                self._forget_carry()
            elif self._flights:
                self._land()  # rows may have ended
            else:
                self._put_back_last()
        else:
            return
        row = np.repeat(np.arange(table.count), missing_R)
        behind = np.arange(len(row)) - np.repeat(np.cumsum(missing_R) - missing_R, missing_R)
        self._pages_RM[row, self._held_R[row] + behind] = pool.take(len(row))
        self._held_R[: table.count] += missing_R

    def _put_back_last(self) -> None:
        """The row admitted last waits again, with what it has drawn."""
        table = self.table
        assert table.count > 1, "the pool holds the longest request"
        self._held().drop(self._row_pages(table.count - 1))
        self.waiting.append(table.put_back(table.count - 1))
        contexts = [table.so_far(i, as_ids(self._requests[i].context)) for i in self.waiting]
        self.waiting = [self.waiting[i] for i in sorted_rows(contexts)]
        self.stats.put_back += 1
        self._state.look = 0

    def _row_pages(self, row: int) -> Pages:
        return self._pages_RM[row, : self._held_R[row]]

    def _draw(self, steps: int, sampling: Sampling) -> None:
        """Queues `steps` tokens for all rows."""
        self._place()
        table, state = self.table, self._state
        running, key = table.count, (state.shape, sampling)
        moving = [state.tokens_R, state.lengths_R, state.column_1]
        if state.memory is not None:
            moving += [states[index] for states, index in state.memory.first(state.shape.rows).states()]
        for _ in range(steps):
            self._graphs.step(key, self._step, moving)
        state.drawn(state.request_R, state.tokens_R[:running])
        drawn = state.ids_RC[:running, :steps], state.logprobs_RC[:running, :steps]
        self._flights.append(fly(table.request[:running], table.drawn[:running], *drawn))
        table.go(steps)
        self.stats.steps += steps
        self.stats.row_steps += steps * state.shape.rows

    def _place(self) -> None:
        """Sets the device's state from the host's."""
        table, state, pool = self.table, self._state, self._held()
        running = table.count
        state.place(table, self._pages_RM[:running], self._held_R[:running])
        if pool.used == pool.peak:
            alive = int(table.length[:running].sum()) - state.spared
            self.stats.cache_live_bytes = alive * pool.page_bytes // PAGE

    def _step(self, key: tuple[Shape, Sampling]) -> None:
        """One token for each row. Everything stays on the device, in place: the whole step can be captured."""
        shape, sampling = key
        rows, state = shape.rows, self._state
        tokens_R, lengths_R = state.tokens_R[:rows], state.lengths_R[:rows]
        attention = state.attention(self._held(), self._last_position)
        memory = None if state.memory is None else state.memory.first(rows)
        logits_RV = self._forward.logits(tokens_R, attention.positions_R, attention, None, memory)
        outputs = state.ids_RC[:rows], state.logprobs_RC[:rows]
        draw_column(logits_RV, state.uniform_RC[:rows], state.column_1, tokens_R, lengths_R, *outputs, sampling)
        state.column_1.add_(1)

    # Pages

    def _held(self) -> PagePool:
        assert self.pool is not None, "a call is open"
        return self.pool

    def _forget_carry(self) -> None:
        if self._carry is not None:
            self._held().drop(self._carry.pages)
            self._carry = None
