"""Models that remember beside attention: each sequence alone gives what the model's own forward gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, NOT_SAMPLED, VOCABULARY, remembering
from fci_oracle import of_family, random_case

from attnrl.attention.decoder import lone_from, remembers
from attnrl.attention.paths import can_share, packed_attention
from attnrl.config import UpdateConfig
from attnrl.errors import ConfigError
from attnrl.local.fused import decoder_layers
from attnrl.local.learner import Learner
from attnrl.local.sampler import Sampler
from attnrl.policy.objective import loss_sums, objective
from attnrl.policy.packing import loss_positions, microbatches
from attnrl.scoring import fci, score
from attnrl.types import Request, Sample, Sampling, ScoreRequest, as_floats, as_ids

SAMPLED = sorted(set(FAMILIES) - NOT_SAMPLED)


def samples(count: int = 5) -> list[Sample]:
    """Of two prompts, with responses that begin alike, one with a mask."""
    rng = np.random.default_rng(0)
    heads, stem = [as_ids(rng.integers(3, VOCABULARY, n)) for n in (3, 11)], rng.integers(3, VOCABULARY, 4)
    found = []
    for i in range(count):
        response = np.concatenate([stem, rng.integers(3, VOCABULARY, 3 + 4 * i)])
        values = as_floats(rng.normal(size=len(response))), as_floats(rng.normal(size=len(response)) - 4)
        mask = rng.random(len(response)) < 0.6 if i == 1 else None
        found.append(Sample(heads[i % 2], as_ids(response), *values, str(i % 2), mask))
    return found


def plain_gradients(model: Any, batch: list[Sample], options: UpdateConfig) -> dict[str, torch.Tensor]:
    """Of the loss over all loss tokens, by the model's own forward over one sample after the other."""
    model.zero_grad()
    made = objective(options)
    units = sum(len(loss_positions(s)) for s in batch)
    for s in batch:
        ids_T = torch.from_numpy(np.concatenate([s.prompt, s.response]).astype(np.int64))
        at_N = loss_positions(s)
        logits_NV = model(input_ids=ids_T[None], use_cache=False).logits[0, len(s.prompt) - 1 + at_N]
        logprobs_NV = torch.log_softmax(logits_NV, -1)
        new_N = logprobs_NV.gather(-1, torch.from_numpy(s.response[at_N].astype(np.int64))[:, None])[:, 0]
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1).detach()
        given = (torch.from_numpy(getattr(s, name)[at_N]) for name in ("advantages", "logprobs"))
        names = dict(zip(("advantages_N", "behaviour_N"), given, strict=True))
        (loss_sums(new_N, entropy_N, **names, counts=[len(at_N)], objective=made).loss / units).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_fci_is_that_of_the_models_own_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `output_attentions` returns misses layers of some families, so the model's own softmax is listened to."""
    model = remembering(family)
    rows, spans = zip(*(random_case(np.random.default_rng(seed), 30 + seed) for seed in range(3)), strict=True)
    found = fci(model, list(rows), list(spans), delta=2, reduce="none")
    softmax = torch.nn.functional.softmax
    for ids, steps, got_LHS in zip(rows, spans, found, strict=True):
        seen: list[torch.Tensor] = []

        def heard(x: torch.Tensor, *args: Any, seen: Any = seen, **given: Any) -> torch.Tensor:
            out = softmax(x, *args, **given)
            if out.ndim == 4 and out.shape[-2:] == (len(ids), len(ids)):  # noqa: B023
                seen.append(out[0].double())
            return out

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(torch.nn.functional, "softmax", heard)
            model(input_ids=torch.tensor([ids]), use_cache=False)
        want_LHS = np.zeros(got_LHS.shape)
        for k, (a, b) in enumerate(steps):
            for c, d in steps[k + 2 :]:
                want_LHS[:, :, k] += torch.stack(seen)[:, :, c:d, a:b].mean((2, 3)).numpy()
        np.testing.assert_allclose(got_LHS, want_LHS, atol=1e-5)
        assert got_LHS.max() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_are_those_of_one_sample_after_the_other(family: str) -> None:
    model, batch = remembering(family), samples()
    options = UpdateConfig(kl_weight=0.0, minibatches=1, gradient_checkpointing="none")
    want = plain_gradients(model, batch, options)
    cut = microbatches(batch, range(5), 10_000, share=False, lone=lone_from(model))
    assert sorted(cut) == [[i] for i in range(5)]
    for again in ("none", "all"):
        learner = Learner(model, options=options.model_copy(update={"gradient_checkpointing": again}))
        learner.accumulate(batch, cut)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == want.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, want[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert learner.update(batch, version=0)["train/recomputed_layers"] == model.config.num_hidden_layers


@pytest.mark.parametrize("family", SAMPLED)
def test_drawn_tokens_have_the_scorers_logprobs_for_any_batch_size(family: str) -> None:
    """Rows end at different times, begin while others run, and some share a context."""
    model = remembering(family)
    rng = np.random.default_rng(0)
    contexts = [as_ids(rng.integers(3, VOCABULARY, n)) for n in (1, 2, 17, 9)]
    requests = [Request(contexts[i % 4], max_tokens=3 + 4 * i, seed=i) for i in range(8)]
    how = Sampling(temperature=0.8)
    one, few, many = (
        Sampler(model, stop_ids=[2], rows=n, paged=True).generate(requests, how, version=0) for n in (1, 3, 8)
    )
    asked = [ScoreRequest(r.context, x.ids, ()) for r, x in zip(requests, one, strict=True)]
    for scores, *drawn in zip(score(model, asked, temperature=0.8, fci=False), one, few, many, strict=True):
        for rollout in drawn:
            assert np.array_equal(rollout.ids, drawn[0].ids)
            np.testing.assert_allclose(rollout.logprobs, scores.logprobs, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_pack_no_shared_prefix_no_fused_forward(family: str) -> None:
    model = remembering(family)
    assert (remembers(model), lone_from(model), can_share(model)) == (True, 0, False)
    assert decoder_layers(model.base_model) is None
    with pytest.raises(ConfigError, match="6 tokens cannot share a pack: this model's layers carry a state"):
        packed_attention(model, [5, 6]).__enter__()


@pytest.mark.parametrize("family", sorted(NOT_SAMPLED))
def test_states_that_lie_elsewhere_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="keeps what it remembers where the local sampler does not find it"):
        Sampler(remembering(family), stop_ids=[2])


def test_states_in_another_order_than_the_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnrl.local.memory.Memory.take", lambda memory, rows: None)
    model = remembering("lfm2")
    with pytest.raises((ConfigError, RuntimeError)):
        Sampler(model, stop_ids=[2])


@pytest.mark.parametrize("family", ["mamba", "gptj"])
def test_attention_that_nobody_sees_is_refused(family: str) -> None:
    keys = {"gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}, "mamba": {"state_size": 8}}
    model = of_family(family, **keys[family])
    with pytest.raises(ConfigError, match="does not use transformers' attention interface"):
        fci(model, [5, 6, 7], [(1, 2), (2, 3)], delta=1)


def test_attention_of_another_kind_is_refused() -> None:
    """A model whose own attention does what it does not tell, here a scale."""
    model = remembering("lfm2")
    attention = model.model.layers[1].self_attn
    told = attention.forward

    def forward(*args: Any, **given: Any) -> Any:
        attention.scaling = 0.35 if model.config._attn_implementation == "eager" else 0.9
        return told(*args, **given)

    attention.forward = forward
    with pytest.raises(ConfigError, match="log-probs differ by"):
        fci(model, [5, 6, 7], [(1, 2), (2, 3)], delta=1)
