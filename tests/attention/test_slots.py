"""Prefill over a trie with a carry, and the K/V cache, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl.attention.interface import Layer
from attnrl.attention.pages import LayerShape, bytes_per_token
from attnrl.attention.prefill import QUERY_BLOCK, PrefillAttention
from attnrl.attention.slots import DecodeAttention, KVCache
from attnrl.attention.trie import continue_trie, make_trie, sorted_rows
from attnrl.types import as_ids

CPU = torch.device("cpu")
SCORING = {  # of four heads
    "plain": {},
    "capped": {"softcap": 0.8},
    "sinks": {"sinks_H": torch.tensor([-2.0, 0.0, 1.0, 3.0])},
    "both": {"softcap": 0.8, "sinks_H": torch.tensor([-2.0, 0.0, 1.0, 3.0])},
}
CONTEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Plain causal attention of q [T, H, D] over k, v [T, K, D] in float64: [T, H, D]."""
    window, softcap, sinks_H = layer.window, layer.softcap, layer.sinks_H
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1).double(), v.repeat_interleave(groups, 1).double()
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * layer.scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    weights = scores.masked_fill(~allowed, -torch.inf).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + (0 if sinks_H is None else sinks_H.exp()[:, None, None]))
    return torch.einsum("hqk,khd->qhd", weights, v)


@settings(max_examples=25, deadline=None)
@given(CONTEXTS, st.sampled_from([None, 1, 3]), st.sampled_from(list(SCORING)), st.integers(0, 1000))
def test_trie_attention_equals_dense_attention_of_each_context(
    lists: list[list[int]], window: int | None, kind: str, seed: int
) -> None:
    layer = Layer(0, 0.3, window, **SCORING[kind])
    contexts = [as_ids(lists[i]) for i in sorted_rows([as_ids(c) for c in lists])]
    carried = contexts[0]
    trie = continue_trie(contexts, carried, 1000)
    rng = torch.Generator().manual_seed(seed)
    total = len(carried) + len(trie.ids_T)
    q = torch.randn(total, 4, 8, generator=rng)
    k, v = torch.randn(total, 2, 8, generator=rng), torch.randn(total, 2, 6, generator=rng)
    if not len(trie.ids_T):
        return
    n = len(carried)
    attention = PrefillAttention(trie, ([k[:n]], [v[:n]]), CPU)
    packed = (x[n:].transpose(0, 1)[None] for x in (q, k, v))
    out = attention.attend(layer, *packed)[0]
    assert torch.equal(attention.keys[0], k)
    for path in trie.paths:
        expected = dense(q[path], k[path], v[path], layer)
        own = path >= n
        np.testing.assert_allclose(out[path[own] - n].numpy(), expected[torch.from_numpy(own)].numpy(), atol=1e-5)


def test_a_context_longer_than_a_query_block_is_attended_in_blocks() -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 1100, 8, generator=rng) for _ in range(3))
    attention = PrefillAttention(make_trie([np.arange(1100)]), None, CPU)
    assert max(batch.query_NQ.shape[1] for batch in attention.batches) == QUERY_BLOCK
    out = attention.attend(Layer(0, 0.3), q, k, v)[0]
    expected = dense(*(x[0].transpose(0, 1) for x in (q, k, v)), Layer(0, 0.3))
    np.testing.assert_allclose(out.numpy(), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(SCORING))
def test_decode_attention_equals_dense_attention_row_by_row(window: int | None, dtype: torch.dtype, kind: str) -> None:
    """Rows of lengths 0, 3 and 9 in one step; what stands past a row's length does not count."""
    rng = torch.Generator().manual_seed(1)
    cache = KVCache([LayerShape(2, 8, 6)], rows=4, capacity=16, dtype=dtype, device=CPU)
    lengths = torch.tensor([0, 3, 9])
    keys, values = torch.randn(3, 2, 10, 8, generator=rng), torch.randn(3, 2, 10, 6, generator=rng)
    cache.keys[0][:3, :, :10], cache.values[0][:3, :, :10] = 100 * keys, 100 * values  # stale
    for row, length in enumerate(lengths.tolist()):
        cache.keys[0][row, :, :length] = keys[row, :, :length]
        cache.values[0][row, :, :length] = values[row, :, :length]
    layer = Layer(0, 0.3, window, **SCORING[kind])
    q = torch.randn(3, 4, 1, 8, generator=rng).to(dtype)
    k = torch.stack([keys[r, :, n] for r, n in enumerate(lengths)])[:, :, None].to(dtype)
    v = torch.stack([values[r, :, n] for r, n in enumerate(lengths)])[:, :, None].to(dtype)
    blocks = ((0, 2, 4), (2, 3, 12)) if window else ((0, 3, 12),)
    out = DecodeAttention(cache, lengths, blocks).attend(layer, q, k, v)
    for row, length in enumerate(lengths.tolist()):
        queries = torch.zeros(length + 1, 4, 8, dtype=dtype)
        queries[-1] = q[row, :, 0]
        seen = [x[row, :, : length + 1].to(dtype).transpose(0, 1) for x in (keys, values)]
        expected = dense(queries, *seen, layer)[-1]
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        np.testing.assert_allclose(out[row, 0].float().numpy(), expected.numpy(), atol=tolerance)
        assert torch.equal(cache.keys[0][row, :, length], k[row, :, 0])
    assert not cache.keys[0][3].any()


def test_rows_move_and_the_cache_grows_without_losing_a_token() -> None:
    shapes = [LayerShape(2, 4, 4), LayerShape(1, 4, 2)]
    cache = KVCache(shapes, rows=3, capacity=5, dtype=torch.float32, device=CPU)
    keys = [torch.arange(24.0).view(3, 2, 4), torch.arange(12.0).view(3, 1, 4)]
    values = [-keys[0], torch.arange(6.0).view(3, 1, 2)]
    cache.fill(np.array([2, 2, 0]), np.array([0, 1, 4]), np.array([1, 0, 2]), keys, values)
    assert cache.keys[0][2, :, 1].tolist() == keys[0][0].tolist()
    assert cache.values[1][0, :, 4].tolist() == values[1][2].tolist()
    cache.move(np.array([2]), np.array([1]), used=2)
    assert torch.equal(cache.keys[0][1, :, :2], cache.keys[0][2, :, :2])
    bigger = cache.grown(8, rows=2, used=5)
    assert bigger.capacity == 8
    for old, new in zip(cache.keys + cache.values, bigger.keys + bigger.values, strict=True):
        assert torch.equal(new[:2, :, :5], old[:2])
        assert not new[:, :, 5:].any()
    assert bytes_per_token(shapes, torch.float32) == (2 * 8 + 6) * 4
    assert cache.nbytes == 3 * 5 * bytes_per_token(shapes, torch.float32)
