"""Eq. 4-6 by hand and against loops over the attention matrix that the model itself returns."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl.attention.paths import masked_scores
from attnrl.scoring.fci import fci


def small_model(seed: int | None) -> transformers.Qwen2ForCausalLM:
    """Two layers, four heads on two key heads; seed None: all weights zero, so that attention is uniform."""
    config = transformers.Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    torch.manual_seed(seed or 0)
    model = transformers.Qwen2ForCausalLM(config).eval()
    for weights in model.parameters():
        if seed is None:
            torch.nn.init.zeros_(weights)
        else:
            torch.nn.init.normal_(weights, std=0.4)  # sharp attention: heads differ
    return model


@pytest.fixture(scope="module")
def model():
    return small_model(1)


def test_eq4_by_hand():
    """Scores q k / sqrt(d); a query sees keys up to its own: rows 1; 3 : 1; 1 : 1 : 2 after the softmax."""
    q = torch.ones(1, 3, 4)
    target = torch.tensor([[0.0, 0.0, 0.0], [math.log(3), 0.0, 0.0], [0.0, 0.0, math.log(2)]])
    weights = []
    for row in range(3):
        k = target[row][None, :, None].expand(1, 3, 4) / 2  # four products of 1 * x / 2, scaled by 1 / sqrt(4): x
        weights.append(torch.softmax(masked_scores(q, k, 0, 0, 0.5, None, None), -1)[0, row])
    expected = [[1, 0, 0], [3 / 4, 1 / 4, 0], [1 / 4, 1 / 4, 1 / 2]]
    np.testing.assert_allclose(torch.stack(weights).numpy(), expected, atol=1e-6)


def test_eq5_by_hand():
    """Uniform attention, one prompt token, steps [1,3), [3,4), [4,6), delta 1: P[q, t] = 1 / (q + 1).

    Step 0 is seen by step 1 (query 3: 1/4 on each key) and step 2 (queries 4, 5: mean of 1/5 and 1/6); step 1 by
    step 2 only; nothing follows step 2.
    """
    later = (1 / 5 + 1 / 6) / 2
    scores = fci(small_model(None), list(range(6)), [(1, 3), (3, 4), (4, 6)], delta=1, reduce="none")
    assert scores.shape == (2, 4, 3)
    np.testing.assert_allclose(scores, np.broadcast_to([1 / 4 + later, later, 0], (2, 4, 3)), atol=1e-6)


def test_eq5_delta_by_hand():
    """With delta 2 only step 2 counts for step 0, and step 1 is too close to the end."""
    scores = fci(small_model(None), list(range(6)), [(1, 3), (3, 4), (4, 6)], delta=2)
    np.testing.assert_allclose(scores, [(1 / 5 + 1 / 6) / 2, 0, 0], atol=1e-6)


def test_eq6_is_the_largest_over_layers_and_heads(model):
    ids, spans = list(range(20)), [(3, 6), (6, 9), (9, 14), (14, 20)]
    heads = fci(model, ids, spans, delta=1, reduce="none")
    best = fci(model, ids, spans, delta=1)
    np.testing.assert_allclose(best, heads.max((0, 1)), atol=1e-6)
    assert heads[:, :, 0].std() > 1e-3  # heads do differ


def loops(attention_LHTT, spans, delta):
    """Eq. 5-6 in the paper's words: mean weight of step j on step k, summed over j >= k + delta, best head."""
    scores = []
    for k, (start, stop) in enumerate(spans):
        per_head = sum(
            (attention_LHTT[:, :, a:b, start:stop].mean((2, 3)) for j, (a, b) in enumerate(spans) if j >= k + delta),
            torch.zeros(attention_LHTT.shape[:2]),
        )
        scores.append(float(per_head.max()))
    return scores


@settings(max_examples=25, deadline=None)
@given(prompt=st.integers(1, 5), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=7), delta=st.integers(1, 4))
def test_fci_equals_loops_over_the_dense_matrix(model, prompt, lengths, delta):
    bounds = np.cumsum([prompt, *lengths])
    spans = [(int(a), int(b)) for a, b in pairwise(bounds)]
    ids = [int(i) for i in np.random.default_rng(len(lengths)).integers(0, 40, bounds[-1])]
    with torch.no_grad():
        dense = torch.stack(model(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]
    np.testing.assert_allclose(fci(model, ids, spans, delta=delta), loops(dense, spans, delta), atol=1e-5)
