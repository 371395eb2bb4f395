"""The plain way of benchmarks/iteration.py does the work it is timed for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from attnrl import scoring
from attnrl.types import Sample, ScoreRequest, Step, as_floats, as_ids

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import plain


def tiny() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=50, num_key_value_heads=2, **shape)).eval()


def test_dense_fci_is_fci() -> None:
    rng, model = np.random.default_rng(0), tiny()
    steps = tuple(Step(a, b) for a, b in ((0, 3), (3, 9), (9, 11), (11, 18), (18, 25), (25, 26), (26, 33)))
    request = ScoreRequest(as_ids(rng.integers(0, 50, 6)), as_ids(rng.integers(0, 50, 33)), steps)
    (ours,) = scoring.score(model, [request], delta=2)
    assert ours.fci[0] > ours.fci[-3] > 0
    np.testing.assert_allclose(plain.dense_fci(model, request, 2), ours.fci, atol=1e-6)


def test_padded_groups_hold_every_sample_within_the_budget_and_padding_changes_no_log_prob() -> None:
    rng, model = np.random.default_rng(1), tiny()
    samples = [
        Sample(
            as_ids(rng.integers(0, 50, 4)),
            as_ids(rng.integers(0, 50, n)),
            as_floats(np.ones(n)),
            as_floats(-np.ones(n)),
            str(n),
        )
        for n in (3, 17, 9, 12, 5, 20)
    ]
    groups = plain.padded_groups(samples, 48)
    assert sorted(s.uid for group in groups for s in group) == sorted(s.uid for s in samples)
    for group in groups:
        assert len(group) * max(len(s.prompt) + len(s.response) for s in group) <= 48
    rows = [np.concatenate([s.prompt, s.response]) for s in max(groups, key=len)]
    ids, mask, _ = plain.padded(rows, torch.device("cpu"))
    together = plain.token_logprobs(model, ids, mask)
    for i, row in enumerate(rows):
        (alone,) = plain.token_logprobs(model, *plain.padded([row], torch.device("cpu"))[:2])
        assert together[i, : len(row) - 1].tolist() == pytest.approx(alone.tolist(), abs=1e-5)
