"""Path attention with a carry: contexts packed as a trie into one row, some of their tokens run over already.

Runs of similar size attend together, padded: contexts are short, and run by run would be many small products.

Shapes: T packed tokens, P carried and packed tokens, H query heads, K key/value heads, D and E head sizes of keys and
values, N attention jobs of a batch, Q queries of a job, S keys of a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnrl.attention.interface import Layer
from attnrl.attention.pages import Ints
from attnrl.attention.scores import additive, fused
from attnrl.attention.trie import Trie

QUERY_BLOCK = 512  # longest run of queries in one attention job: bounds the mask of a long context


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Queries `start`..`stop` of the packed tokens and the tokens they see: `path` ends with the queries themselves.

    `path` indexes the carried tokens and then the packed ones; its length is the last query's position plus one.
    """

    start: int
    stop: int
    path: Ints  # [S]


@dataclass(frozen=True, slots=True, eq=False)
class _JobBatch:
    """Jobs padded to one size: indices of queries and keys, and positions of the queries (padding: position 0)."""

    query_NQ: Tensor
    key_NS: Tensor
    position_NQ: Tensor
    valid: Tensor  # indices of real queries in N * Q
    target: Tensor  # the packed tokens they are


class PrefillAttention:
    """Contexts packed as a trie into one row: every token stands once, and attends along its own path to the root.

    After the forward `keys` and `values` hold, per layer, the carried and the packed tokens: [P, K, D].
    """

    def __init__(self, trie: Trie, carried: tuple[list[Tensor], list[Tensor]] | None, device: torch.device) -> None:
        budget = 1 << (22 if device.type == "cpu" else 26)
        self.batches = [_padded(batch, device) for batch in _batched(_jobs(trie), budget)]
        self.carried = carried
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention output [1, T, H, E] for q [1, H, T, D], k [1, K, T, D] and v [1, K, T, E]."""
        assert layer.index == len(self.keys), "layers run in order"
        keys_PKD, values_PKD = k[0].transpose(0, 1), v[0].transpose(0, 1)
        if self.carried is not None:
            keys_PKD = torch.cat([self.carried[0][layer.index], keys_PKD])
            values_PKD = torch.cat([self.carried[1][layer.index], values_PKD])
        self.keys.append(keys_PKD)
        self.values.append(values_PKD)
        queries_THD = q[0].transpose(0, 1)
        out_THD = queries_THD.new_empty(*queries_THD.shape[:2], v.shape[3])
        for batch in self.batches:
            out_NQHD = _attend_jobs(batch, queries_THD, keys_PKD, values_PKD, layer)
            out_THD[batch.target] = out_NQHD.flatten(0, 1)[batch.valid]
        return out_THD[None]


def _attend_jobs(batch: _JobBatch, queries_THD: Tensor, keys_PKD: Tensor, values_PKD: Tensor, layer: Layer) -> Tensor:
    """Attention of a batch of jobs: [N, Q, H, D]. Keys are repeated for their query heads: prefill is cheap."""
    positions_S = torch.arange(batch.key_NS.shape[1], device=batch.key_NS.device)
    allowed_NQS = positions_S <= batch.position_NQ[:, :, None]
    if layer.window is not None:
        allowed_NQS &= positions_S > batch.position_NQ[:, :, None] - layer.window
    groups = queries_THD.shape[1] // keys_PKD.shape[1]
    q_NHQD = queries_THD[batch.query_NQ].transpose(1, 2)
    k_NHSD = keys_PKD[batch.key_NS].transpose(1, 2).repeat_interleave(groups, dim=1)
    v_NHSD = values_PKD[batch.key_NS].transpose(1, 2).repeat_interleave(groups, dim=1)
    mask_N1QS = additive(allowed_NQS, queries_THD.dtype)[:, None]
    return fused(q_NHQD, k_NHSD, v_NHSD, mask_N1QS, layer).transpose(1, 2)


def _jobs(trie: Trie) -> list[Job]:
    """The runs of a trie, none longer than `QUERY_BLOCK`."""
    jobs: list[Job] = []
    stop = 0
    for path, new in zip(trie.paths, trie.fresh, strict=True):
        first, stop = stop, stop + new
        for start in range(first, stop, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, stop)
            jobs.append(Job(start, end, path[: len(path) - (stop - end)]))
    return jobs


def _batched(jobs: list[Job], budget: int) -> Iterator[list[Job]]:
    """Jobs of similar size together, at most `budget` query-key pairs a batch, padding included; larger ones alone."""
    jobs.sort(key=lambda job: (len(job.path), job.stop - job.start))
    batch: list[Job] = []
    queries = 0
    for job in jobs:
        widest = max(queries, job.stop - job.start)
        full = (len(batch) + 1) * widest * len(job.path) > budget
        if batch and (full or len(job.path) > 1.25 * len(batch[0].path) + 16):
            yield batch
            batch, widest = [], job.stop - job.start
        batch.append(job)
        queries = widest
    if batch:
        yield batch


def _padded(jobs: Sequence[Job], device: torch.device) -> _JobBatch:
    """The batch's index tensors. Padded queries (token 0, position 0) are dropped; padded keys lie past every query."""
    wide = max(job.stop - job.start for job in jobs)
    long = max(len(job.path) for job in jobs)
    query, position = np.zeros((2, len(jobs), wide), np.int64)
    key = np.zeros((len(jobs), long), np.int64)
    valid: list[Ints] = []
    for n, job in enumerate(jobs):
        count = job.stop - job.start
        query[n, :count] = np.arange(job.start, job.stop)
        position[n, :count] = np.arange(len(job.path) - count, len(job.path))
        key[n, : len(job.path)] = job.path
        valid.append(n * wide + np.arange(count))
    flat = np.concatenate(valid)
    tensors = (query, key, position, flat, query.reshape(-1)[flat])
    return _JobBatch(*(torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in tensors))
