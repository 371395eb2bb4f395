"""Hiding a step: with nothing hidden the draw is the sampler's own; with it, that of a dense mask over the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attnrl.config import load_config
from attnrl.launch.data import evaluation_prompts, evaluation_records
from attnrl.launch.models import load_tokenizer, model_path
from attnrl.local.backend import LocalBackend, build
from attnrl.local.disrupt import continue_without, padded
from attnrl.types import Ids, Prompt, Request, Sampling


@pytest.fixture(scope="module")
def demo() -> tuple[LocalBackend, Any, list[Prompt]]:
    config = load_config("demo", {"evaluation.tasks": 6})
    path = model_path("demo")
    tokenizer = load_tokenizer(path)
    prompts = evaluation_prompts(config, evaluation_records(config), tokenizer)["tasks"]
    return build(config, model=path, tokenizer=tokenizer, learn=False), tokenizer, prompts


def test_with_nothing_hidden_it_is_the_samplers_draw(demo: tuple[LocalBackend, Any, list[Prompt]]) -> None:
    """Of every length, greedy and drawn, in batches of any size."""
    backend, tokenizer, prompts = demo
    for sampling in (Sampling(0.0), Sampling(1.0)):
        whole = backend.generate([Request(p.ids, 120, 7 + i) for i, p in enumerate(prompts)], sampling)
        contexts = [
            np.concatenate([p.ids, r.ids[: 5 * i]]) for i, (p, r) in enumerate(zip(prompts, whole, strict=True))
        ]
        requests = [Request(c, 60 + i, 100 + i) for i, c in enumerate(contexts)]
        expected = backend.generate(requests, sampling)
        for rows in (2, 64):
            found = continue_without(backend.model, tokenizer, requests, [None] * len(requests), sampling, rows)
            assert [r.ids.tolist() for r in found] == [r.ids.tolist() for r in expected]
            assert [r.finish for r in found] == [r.finish for r in expected]
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def dense_logprobs(model: Any, context: Ids, drawn: Ids, span: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Log-probs of the drawn tokens from one forward over everything, the mask written out as a matrix."""
    ids = torch.from_numpy(np.concatenate([context, drawn]).astype(np.int64))[None]
    length = ids.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    allowed[len(context) :, span[0] : span[1]] = False  # later text does not see the step
    mask = torch.zeros(1, 1, length, length).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]
    table = torch.log_softmax(logits.float(), dim=-1)[len(context) - 1 : -1]
    return table.gather(1, torch.from_numpy(drawn.astype(np.int64))[:, None])[:, 0].numpy()


def test_what_is_hidden_is_hidden_exactly(demo: tuple[LocalBackend, Any, list[Prompt]]) -> None:
    backend, tokenizer, prompts = demo
    whole = backend.generate([Request(p.ids, 120, i) for i, p in enumerate(prompts)], Sampling(1.0))
    requests, spans = [], []
    for i, (prompt, rollout) in enumerate(zip(prompts, whole, strict=True)):
        stop = 12 + 3 * i
        requests.append(Request(np.concatenate([prompt.ids, rollout.ids[:stop]]), 40, i))
        spans.append((len(prompt.ids) + stop - 9, len(prompt.ids) + stop))
    found = continue_without(backend.model, tokenizer, requests, spans, Sampling(1.0), rows=4)
    plain = continue_without(backend.model, tokenizer, requests, [None] * 6, Sampling(1.0), rows=4)
    assert [r.ids.tolist() for r in found] != [r.ids.tolist() for r in plain]  # the step mattered
    for request, span, rollout in zip(requests, spans, found, strict=True):
        exact = dense_logprobs(backend.model, request.context, rollout.ids, span)
        np.testing.assert_allclose(rollout.logprobs, exact, atol=1e-4)


def test_padding_and_hidden_places_by_hand() -> None:
    requests = [Request(np.array([5, 6, 7], dtype=np.int32), 1, 0), Request(np.array([8], dtype=np.int32), 1, 0)]
    ids, seen, later = padded(requests, [(1, 3), None])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert seen.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert later.tolist() == [[1, 0, 0], [0, 0, 1]]
