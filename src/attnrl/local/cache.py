"""The K/V cache of the sampler and the attention that reads and writes it, through transformers' attention interface.

Shapes: R rows, L cached positions, H query heads, K key/value heads, G = H / K, D head size, V vocabulary,
T packed tokens of a prefill, P tokens the prefill can attend to (carried and packed), N attention jobs of a batch,
Q queries of a job, S keys of a job.

`attention` below is registered under a name of its own. In `sampling_mode(model)` every attention layer calls it, and
it lets the plan that `attending(plan)` set do the work: `DecodeAttention` for one token a row, `PrefillAttention` for
packed contexts, `ProbeAttention` to learn the shapes. transformers builds no mask for an implementation it does not
know and is told to keep no cache, so nothing is concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnrl.attention.pages import Ints, LayerShape
from attnrl.errors import ConfigError

NAME = "attnrl_sampler"
ROW_BLOCK = 16  # rows that attend over one span on CPU
QUERY_BLOCK = 512  # longest run of queries in one attention job: bounds the mask of a long context

Blocks = tuple[
    tuple[int, int, int], ...
]  # (first row, row after the last, positions they attend over), all rows in order


class AttentionPlan(Protocol):
    """What an attention layer is to do while a plan is open."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """The attention output [B, T, H, D] for q [B, H, T, D] and k, v [B, K, T, D]."""
        ...


_PLAN: ContextVar[AttentionPlan] = ContextVar("attnrl_attention_plan")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: hands the layer's q, k, v to the open plan."""
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"the model's attention uses `{name}`, which the local sampler does not compute")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx
    return _PLAN.get().attend(layer, query, key, value, scale, sliding_window), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """Within it the model is in eval mode, keeps no gradients and attends through `attention`; restored afterwards."""
    config: Any = model.config
    before = config._attn_implementation
    training = [module for module in model.modules() if module.training]
    config._attn_implementation = NAME
    for module in training:
        module.training = False
    # With a mask, the memory-efficient kernel is the fused one; cuDNN would build a plan for every new shape.
    cuda = next(model.parameters()).device.type == "cuda"
    kernels = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if cuda else nullcontext()
    try:
        with torch.no_grad(), kernels:
            yield
    finally:
        config._attn_implementation = before
        for module in training:
            module.training = True


@contextmanager
def attending(plan: AttentionPlan) -> Iterator[None]:
    """Within it, attention layers follow the plan."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


class ProbeAttention:
    """Learns the layers' shapes and dtype from one forward over one token."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.dtype = torch.float32

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        if layer in self.shapes:
            raise ConfigError(f"the model runs attention layer {layer} twice in one pass; the local sampler cannot")
        self.shapes[layer] = LayerShape(k.shape[1], k.shape[3], v.shape[3])
        self.dtype = k.dtype
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2)

    def layers(self) -> tuple[LayerShape, ...]:
        if sorted(self.shapes) != list(range(len(self.shapes))) or not self.shapes:
            raise ConfigError(
                "the model does not run its attention through transformers' attention interface, so the local sampler "
                "cannot cache it; use a decoder-only model with `_supports_attention_backend`"
            )
        return tuple(self.shapes[layer] for layer in range(len(self.shapes)))


class KVCache:
    """Keys and values of up to `rows` running rows: per layer [R, K, L, D], zeros at first.

    Zeros and not whatever memory held: a masked position still meets a product, and NaN times 0 is NaN.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], rows: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = tuple(shapes)
        self.rows = rows
        self.capacity = capacity
        self.keys = [torch.zeros(rows, s.kv_heads, capacity, s.key_dim, dtype=dtype, device=device) for s in shapes]
        self.values = [torch.zeros(rows, s.kv_heads, capacity, s.value_dim, dtype=dtype, device=device) for s in shapes]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.keys + self.values)

    def grown(self, capacity: int, rows: int, used: int) -> KVCache:
        """A cache of another capacity that holds the first `used` positions of this one's first `rows` rows."""
        like = self.keys[0]
        bigger = KVCache(self.shapes, self.rows, capacity, like.dtype, like.device)
        for old, new in zip(self.keys + self.values, bigger.keys + bigger.values, strict=True):
            new[:rows, :, :used] = old[:rows, :, :used]
        return bigger

    def move(self, source: Ints, target: Ints, used: int) -> None:
        """Copies the first `used` positions of rows `source` to rows `target`."""
        device = self.keys[0].device
        src, dst = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
        for tensor in self.keys + self.values:
            tensor[dst, :, :used] = tensor[src, :, :used]

    def fill(self, rows: Ints, positions: Ints, tokens: Ints, keys: list[Tensor], values: list[Tensor]) -> None:
        """Writes token `tokens[i]` of the prefilled keys and values [P, K, D] to (rows[i], positions[i])."""
        device = self.keys[0].device
        row, position, token = (torch.from_numpy(a).to(device) for a in (rows, positions, tokens))
        for cached, fresh in zip(self.keys + self.values, keys + values, strict=True):
            cached[row, :, position] = fresh[token]


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where allowed and -inf elsewhere, in the dtype attention computes with."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


class DecodeAttention:
    """One token a row: writes its key and value at the row's length, attends to all positions up to there.

    Queries of one K/V head are taken together ([R, K, G, D]) instead of repeating keys and values G times.
    Masks depend on lengths and window alone, so the first layer of a step builds them for all.
    Each block of rows attends over a span of its own, longer than any of its lengths.
    """

    def __init__(self, cache: KVCache, lengths_R: Tensor, blocks: Blocks) -> None:
        self.cache = cache
        self.lengths_R = lengths_R
        self.blocks = blocks
        self.span = max(span for _, _, span in blocks)
        self._masks: dict[int | None, Tensor] = {}
        self._slots: dict[int, Tensor] = {}

    def _mask_R11L(self, window: int | None, dtype: torch.dtype) -> Tensor:
        mask = self._masks.get(window)
        if mask is None:
            positions_L = torch.arange(self.span, device=self.lengths_R.device)
            newest_R1 = self.lengths_R[:, None]
            allowed_RL = positions_L <= newest_R1
            if window is not None:
                allowed_RL &= positions_L > newest_R1 - window
            mask = self._masks[window] = _additive(allowed_RL, dtype)[:, None, None]
        return mask

    def _slots_RK(self, kv_heads: int) -> Tensor:
        """Where each row's new key goes in the cache flattened to [R * K * L, D]."""
        slots = self._slots.get(kv_heads)
        if slots is None:
            heads = torch.arange(self.lengths_R.shape[0] * kv_heads, device=self.lengths_R.device)
            first = heads * self.cache.capacity
            slots = self._slots[kv_heads] = (first.view(-1, kv_heads) + self.lengths_R[:, None]).view(-1)
        return slots

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        rows, heads, _, dim = q.shape
        kv_heads = k.shape[1]
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        slots = self._slots_RK(kv_heads)
        keys.view(-1, dim).index_copy_(0, slots, k.reshape(-1, dim))
        values.view(-1, v.shape[3]).index_copy_(0, slots, v.reshape(-1, v.shape[3]))
        q_RKGD = q.reshape(rows, kv_heads, heads // kv_heads, dim)
        mask = self._mask_R11L(window, q.dtype)
        parts = [
            _attend_rows(q_RKGD[a:b], keys[a:b, :, :span], values[a:b, :, :span], mask[a:b, :, :, :span], scaling)
            for a, b, span in self.blocks
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(rows, 1, heads, v.shape[3])


def row_blocks(lengths_R: Ints, capacity: int) -> Blocks:
    """Blocks of `ROW_BLOCK` rows with spans just over their longest length; neighbours with the same span are joined.

    >>> row_blocks(np.array([40] * 16 + [9] * 33), 128)
    ((0, 16, 48), (16, 49, 16))
    """
    blocks: list[tuple[int, int, int]] = []
    for start in range(0, len(lengths_R), ROW_BLOCK):
        stop = min(start + ROW_BLOCK, len(lengths_R))
        span = min(capacity, (int(lengths_R[start:stop].max()) // 16 + 1) * 16)
        if blocks and blocks[-1][2] == span:
            start = blocks.pop()[0]
        blocks.append((start, stop, span))
    return tuple(blocks)


def _attend_rows(q_RKGD: Tensor, k_RKLD: Tensor, v_RKLD: Tensor, mask_R11L: Tensor, scaling: float) -> Tensor:
    """Attention of G queries for each row and K/V head: [R, K, G, D]."""
    if q_RKGD.device.type != "cpu" or q_RKGD.dtype != torch.float32:
        return F.scaled_dot_product_attention(q_RKGD, k_RKLD, v_RKLD, attn_mask=mask_R11L, scale=scaling)
    # On CPU the fused kernel is made for many queries: for the one to eight here, two batched products and a softmax
    # take a half to two thirds of its time.
    rows, kv_heads, groups, _ = q_RKGD.shape
    scores = torch.bmm(q_RKGD.flatten(0, 1).mul(scaling), k_RKLD.flatten(0, 1).transpose(1, 2))
    weights = torch.softmax(scores.view(rows, kv_heads, groups, -1).add_(mask_R11L), dim=-1)
    return torch.bmm(weights.flatten(0, 1), v_RKLD.flatten(0, 1)).view(rows, kv_heads, groups, -1)


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

    def __init__(
        self, jobs: Sequence[Job], carried: tuple[list[Tensor], list[Tensor]] | None, device: torch.device
    ) -> None:
        budget = 1 << (22 if device.type == "cpu" else 26)
        self.batches = [_padded(batch, device) for batch in _batched(jobs, budget)]
        self.carried = carried
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        assert layer == len(self.keys), "layers run in order"
        keys_PKD, values_PKD = k[0].transpose(0, 1), v[0].transpose(0, 1)
        if self.carried is not None:
            keys_PKD = torch.cat([self.carried[0][layer], keys_PKD])
            values_PKD = torch.cat([self.carried[1][layer], values_PKD])
        self.keys.append(keys_PKD)
        self.values.append(values_PKD)
        queries_THD = q[0].transpose(0, 1)
        out_THD = queries_THD.new_empty(*queries_THD.shape[:2], v.shape[3])
        for batch in self.batches:
            out_NQHD = _attend_jobs(batch, queries_THD, keys_PKD, values_PKD, scaling, window)
            out_THD[batch.target] = out_NQHD.flatten(0, 1)[batch.valid]
        return out_THD[None]


def _attend_jobs(
    batch: _JobBatch, queries_THD: Tensor, keys_PKD: Tensor, values_PKD: Tensor, scaling: float, window: int | None
) -> Tensor:
    """Attention of a batch of jobs: [N, Q, H, D]. Keys are repeated for their query heads: prefill is cheap."""
    positions_S = torch.arange(batch.key_NS.shape[1], device=batch.key_NS.device)
    allowed_NQS = positions_S <= batch.position_NQ[:, :, None]
    if window is not None:
        allowed_NQS &= positions_S > batch.position_NQ[:, :, None] - window
    groups = queries_THD.shape[1] // keys_PKD.shape[1]
    q_NHQD = queries_THD[batch.query_NQ].transpose(1, 2)
    k_NHSD = keys_PKD[batch.key_NS].transpose(1, 2).repeat_interleave(groups, dim=1)
    v_NHSD = values_PKD[batch.key_NS].transpose(1, 2).repeat_interleave(groups, dim=1)
    mask_N1QS = _additive(allowed_NQS, queries_THD.dtype)[:, None]
    out_NHQD = F.scaled_dot_product_attention(q_NHQD, k_NHSD, v_NHSD, attn_mask=mask_N1QS, scale=scaling)
    return out_NHQD.transpose(1, 2)


def _batched(jobs: Sequence[Job], budget: int) -> Iterator[list[Job]]:
    """Jobs of similar size together, at most `budget` query-key pairs a batch, padding included; larger ones alone."""
    blocks: list[Job] = []
    for job in jobs:
        ends = [*range(job.start + QUERY_BLOCK, job.stop, QUERY_BLOCK), job.stop]
        begins = [job.start, *ends[:-1]]
        blocks += [Job(b, e, job.path[: len(job.path) - (job.stop - e)]) for b, e in zip(begins, ends, strict=True)]
    blocks.sort(key=lambda job: (len(job.path), job.stop - job.start))
    batch: list[Job] = []
    queries = 0
    for job in blocks:
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
