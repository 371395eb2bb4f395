"""The sampler over real transformers models, against plain forwards of the same model."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attnrl.errors import ConfigError, DataError, TrainingError
from attnrl.local.draw import kept_tokens
from attnrl.local.sampler import Sampler
from attnrl.local.stats import length_bucket
from attnrl.types import Request, Rollout, Sampling, as_ids

VOCABULARY = 61
STOPS = (3, 4)
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 9}),
    "gemma2": (  # soft-caps, and windows in every other layer
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "head_dim": 8,
            "sliding_window": 9,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 1.0,
            "initializer_range": 0.2,
        },
    ),
    "gpt_oss": (  # attention sinks, and windows in every other layer
        GptOssConfig,
        GptOssForCausalLM,
        {"head_dim": 8, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def build(kind: str, **changes: Any) -> Any:
    """A tiny model with grouped K/V heads and weights large enough for peaked, context-dependent distributions."""
    config, model_class, extra = KINDS[kind]
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.25,
    }
    return model_class(config(**{**settings, **extra, **changes})).eval()


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.fixture(scope="module")
def qwen2() -> Any:
    return build("qwen2")


def forest_requests() -> list[Request]:
    """Trunks from three prompts and branches that keep part of a response, at several points, in mixed order."""
    rng = np.random.default_rng(0)
    requests = []
    for prompt_length in (1, 7, 20):
        trunk = as_ids(rng.integers(0, VOCABULARY, prompt_length + 12))
        for kept in (0, 0, 5, 12, 0, 5, 12):
            seed = int(rng.integers(2**60))
            requests.append(Request(trunk[: prompt_length + kept], int(rng.integers(3, 26)), seed))
    return [requests[i] for i in rng.permutation(len(requests))]


def plain_logprobs(model: Any, request: Request, rollout: Rollout, sampling: Sampling) -> np.ndarray:
    """Log-probs of the rollout from one full forward, truncation included."""
    ids = torch.from_numpy(np.concatenate([request.context, rollout.ids])).long()
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, len(request.context) - 1 : -1].float() / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        logits = logits.masked_fill(~kept_tokens(logits, sampling), -torch.inf)
    drawn = torch.from_numpy(rollout.ids).long()[:, None]
    return torch.log_softmax(logits, -1).gather(1, drawn)[:, 0].numpy()


def assert_well_formed(request: Request, rollout: Rollout, version: int) -> None:
    assert (rollout.ids.dtype, rollout.logprobs.dtype) == (np.int32, np.float32)
    assert len(rollout.ids) == len(rollout.logprobs)
    assert rollout.version == version
    stops = np.isin(rollout.ids, STOPS)
    assert not stops[:-1].any()
    assert stops[-1] == (rollout.finish == "stop")
    if rollout.finish == "length":
        assert len(rollout.ids) == request.max_tokens


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=1.3, top_p=0.8, top_k=9)]
)
def test_logprobs_equal_a_plain_forward_for_trunks_and_branches(model: Any, sampling: Sampling) -> None:
    requests = forest_requests()
    rollouts = Sampler(model, stop_ids=STOPS, rows=8).generate(requests, sampling, version=3)
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for request, rollout in zip(requests, rollouts, strict=True):
        assert_well_formed(request, rollout, version=3)
        expected = plain_logprobs(model, request, rollout, sampling)
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4)


def test_the_same_tokens_for_any_number_of_rows(model: Any) -> None:
    """One row, refilled rows, all at once; looks after every step or every few; prefill in pieces; alone."""
    requests = forest_requests() + forest_requests()[:5]
    settings = [
        {"rows": 1},
        {"rows": 7},
        {"rows": 64},
        {"rows": 5, "prefill_tokens": 10},
        {"rows": 64, "paged": True, "check_every": 16},
        {"rows": 5, "paged": True, "check_every": 3, "prefill_tokens": 10},
    ]
    runs = [Sampler(model, stop_ids=STOPS, **s).generate(requests, Sampling(), version=0) for s in settings]
    alone = Sampler(model, stop_ids=STOPS)
    runs.append([alone.generate([request], Sampling(), version=0)[0] for request in requests])
    for run in runs[1:]:
        for first, other in zip(runs[0], run, strict=True):
            assert first.ids.tolist() == other.ids.tolist()
            assert first.finish == other.finish
            np.testing.assert_allclose(first.logprobs, other.logprobs, atol=1e-4)


def test_rows_of_very_different_lengths_are_put_in_order_without_a_trace(qwen2: Any) -> None:
    """Short and long contexts alternate, so that rows are re-ordered by length before they run."""
    rng = np.random.default_rng(0)
    contexts = [as_ids(np.append([5 + i], rng.integers(0, VOCABULARY, (3, 90)[i % 2]))) for i in range(56)]
    requests = [Request(context, 6, seed) for seed, context in enumerate(contexts)]
    rollouts = Sampler(qwen2, stop_ids=STOPS, rows=56).generate(requests, Sampling(), version=0)
    for request, rollout in zip(requests, rollouts, strict=True):
        assert_well_formed(request, rollout, version=0)
        np.testing.assert_allclose(rollout.logprobs, plain_logprobs(qwen2, request, rollout, Sampling()), atol=1e-4)
    one_by_one = Sampler(qwen2, stop_ids=STOPS, rows=1).generate(requests, Sampling(), version=0)
    assert [r.ids.tolist() for r in rollouts] == [r.ids.tolist() for r in one_by_one]


def test_every_draw_follows_the_seed(qwen2: Any) -> None:
    context = as_ids([5, 6, 7])
    requests = [Request(context, 12, seed) for seed in (1, 2, 1, -1, 2**64 - 1)]
    a, b, c, d, e = Sampler(qwen2, stop_ids=()).generate(requests, Sampling(), version=0)
    assert a.ids.tolist() == c.ids.tolist() != b.ids.tolist()
    assert d.ids.tolist() == e.ids.tolist()  # seeds count modulo 2^64


def test_shared_context_tokens_are_computed_once(qwen2: Any) -> None:
    """Two trunks and branches of one prompt: the 9 tokens of the longest context, and 2 where another trunk differs."""
    longest = as_ids([5, 6, 7, 8, 9, 10, 11, 12, 13])
    contexts = [longest[:4], longest[:4], longest, longest[:7], as_ids([5, 6, 7, 8, 20, 21]), longest]
    requests = [Request(context, 4, i) for i, context in enumerate(contexts)]
    for rows in (1, 2, 8):
        sampler = Sampler(qwen2, stop_ids=(), rows=rows)
        sampler.generate(requests, Sampling(), version=0)
        assert sampler.stats.prefilled_tokens == 9 + 2
        assert sampler.stats.saved_tokens == sum(map(len, contexts)) - 11
        assert sampler.stats.drawn_tokens == 24


def test_finished_rows_do_not_cost(qwen2: Any) -> None:
    """On CPU a step runs exactly the rows that need it: each request costs its tokens less the one of the prefill."""
    requests = [Request(as_ids([5, 6]), n, n) for n in (1, 2, 9, 30)]
    sampler = Sampler(qwen2, stop_ids=(), rows=3)
    rollouts = sampler.generate(requests, Sampling(), version=0)
    assert [len(r.ids) for r in rollouts] == [1, 2, 9, 30]
    assert sampler.stats.row_steps == sum(n - 1 for n in (1, 2, 9, 30))
    assert sampler.stats.rows == 3
    assert sampler.metrics()["generate/idle_share"] == 0


def test_metrics_are_of_all_calls_since_the_last_time(qwen2: Any) -> None:
    """Over pages: four steps of eight rows, of which one draws; then three, of which two draw."""
    sampler = Sampler(qwen2, stop_ids=(), paged=True, check_every=4)
    assert sampler.metrics() == {}
    context = as_ids([5, 6, 7])
    sampler.generate([Request(context, 5, 0)], Sampling(), version=0)
    sampler.generate([Request(context, 4, 1), Request(as_ids([5, 6, 7, 8]), 4, 2)], Sampling(), version=0)
    found = sampler.metrics()
    assert found["generate/idle_share"] == 1 - (4 + 2 * 3) / (4 * 8 + 3 * 8)
    assert found["generate/shared_context"] == 3 / (3 + 3 + 4)
    assert found["generate/cache_gb"] == sampler.stats.cache_peak_bytes / 1e9 > 0
    assert found["generate/prefilled_tokens"] == 3 + 4
    assert found["generate/sampler_own"] == 1
    assert not any(found[f"generate/{name}"] for name in ("fused", "captured", "put_back"))
    assert sampler.metrics() == {}


@pytest.mark.parametrize("paged", [False, True])
def test_metrics_do_not_tell_what_calls_came_before(qwen2: Any, paged: bool) -> None:
    """A resumed run writes the metrics of the whole one, although its sampler has not drawn before."""
    small = [Request(as_ids([5, 6, i]), 9, i) for i in range(3)]
    large = [Request(as_ids(np.arange(90 + i) % VOCABULARY), 140, i) for i in range(20)]
    fresh, used = (Sampler(qwen2, stop_ids=(), paged=paged, check_every=4) for _ in range(2))
    used.generate(large, Sampling(), version=0)
    used.metrics()
    for sampler in (fresh, used):
        sampler.generate(small, Sampling(), version=0)
    assert used.stats.cache_bytes > fresh.stats.cache_bytes
    assert used.metrics() == fresh.metrics()


def test_the_cache_grows_with_the_rows_and_is_kept_between_calls(qwen2: Any) -> None:
    sampler = Sampler(qwen2, stop_ids=(), rows=2)
    request = Request(as_ids(np.arange(60)), 150, 1)
    [rollout] = sampler.generate([request], Sampling(), version=0)  # 128 positions at first
    np.testing.assert_allclose(rollout.logprobs, plain_logprobs(qwen2, request, rollout, Sampling()), atol=1e-4)
    held = sampler.stats.cache_bytes
    position = 2 * 2 * (8 + 8) * 4  # layers, heads, key and value, float32
    assert held == 1 * length_bucket(211) * position
    assert sampler.stats.cache_peak_bytes == 1 * (60 + 150 - 1) * position  # the last token is never stored
    [again] = sampler.generate([request], Sampling(), version=1)
    assert again.ids.tolist() == rollout.ids.tolist()
    sampler.close()
    [after] = sampler.generate([Request(request.context, 3, 1)], Sampling(), version=1)
    assert after.ids.tolist() == rollout.ids[:3].tolist()
    assert sampler.stats.cache_bytes < held


def test_rows_are_limited_by_the_memory_of_the_cache(qwen2: Any) -> None:
    requests = [Request(as_ids([5, 6]), 20, seed) for seed in range(9)]
    wide = Sampler(qwen2, stop_ids=STOPS)
    narrow = Sampler(qwen2, stop_ids=STOPS, cache_bytes=3 * 128 * 2 * 2 * 16 * 4 + 1)
    expected = [r.ids.tolist() for r in wide.generate(requests, Sampling(), version=0)]
    assert [r.ids.tolist() for r in narrow.generate(requests, Sampling(), version=0)] == expected
    assert (wide.stats.rows, narrow.stats.rows) == (9, 3)


def test_new_weights_are_seen_and_the_model_is_left_as_it_was() -> None:
    model = build("qwen2").train()
    model.model.norm.eval()
    before = model.config._attn_implementation
    sampler = Sampler(model, stop_ids=())
    request = Request(as_ids([5, 6, 7]), 20, 1)
    [old] = sampler.generate([request], Sampling(), version=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    [new] = sampler.generate([request], Sampling(), version=1)
    assert old.ids.tolist() != new.ids.tolist()
    assert model.training
    assert not model.model.norm.training
    assert model.config._attn_implementation == before
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    model.eval()
    np.testing.assert_allclose(new.logprobs, plain_logprobs(model, request, new, Sampling()), atol=1e-4)


def test_greedy_takes_the_likeliest_token_with_log_prob_zero(qwen2: Any) -> None:
    request = Request(as_ids([5, 6, 7]), 10, 1)
    [rollout] = Sampler(qwen2, stop_ids=()).generate([request], Sampling(temperature=0), version=0)
    context = request.context.tolist()
    for token in rollout.ids.tolist():
        with torch.no_grad():
            assert token == int(qwen2(input_ids=torch.tensor([context])).logits[0, -1].argmax())
        context.append(token)
    assert not rollout.logprobs.any()


def test_bfloat16_logprobs_are_close_to_a_plain_forward() -> None:
    model = build("qwen2", initializer_range=0.1).bfloat16()
    requests = forest_requests()[:8]
    rollouts = Sampler(model, stop_ids=STOPS).generate(requests, Sampling(), version=0)
    for request, rollout in zip(requests, rollouts, strict=True):
        expected = plain_logprobs(model, request, rollout, Sampling())
        np.testing.assert_allclose(rollout.logprobs, expected, atol=0.05)


def test_a_model_with_adapters_draws_with_them() -> None:
    peft = pytest.importorskip("peft", reason="needs attnrl[lora]")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    sampler = Sampler(model, stop_ids=STOPS)
    requests = forest_requests()[:6]
    bare = sampler.generate(requests, Sampling(), version=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
    rollouts = sampler.generate(requests, Sampling(), version=0)
    assert any(a.ids.tolist() != b.ids.tolist() for a, b in zip(bare, rollouts, strict=True))
    model.eval()
    for request, rollout in zip(requests, rollouts, strict=True):
        expected = plain_logprobs(model, request, rollout, Sampling())
        np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("paged", [False, True])
def test_layers_with_a_config_of_their_own_are_cached_too(qwen2: Any, paged: bool) -> None:
    """As sub-models of a composite model have; the model's own config is not the one its layers read."""
    requests = forest_requests()[:6]
    wanted = Sampler(qwen2, stop_ids=STOPS, paged=paged).generate(requests, Sampling(), version=0)
    model = copy.deepcopy(qwen2)
    for layer in model.model.layers:
        layer.self_attn.config = copy.deepcopy(model.config)
    found = Sampler(model, stop_ids=STOPS, paged=paged).generate(requests, Sampling(), version=0)
    for a, b in zip(wanted, found, strict=True):
        assert np.array_equal(a.ids, b.ids)
        assert np.array_equal(a.logprobs, b.logprobs)
    assert {layer.self_attn.config._attn_implementation for layer in model.model.layers} == {"sdpa"}


def test_no_requests_no_rollouts(qwen2: Any) -> None:
    assert Sampler(qwen2, stop_ids=STOPS).generate([], Sampling(), version=0) == []


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (Request(as_ids([5]), 0, 1), ConfigError, "request 1: max_tokens = 0"),
        (Request(as_ids([]), 4, 1), DataError, "request 1: empty context"),
        (Request(as_ids([5, VOCABULARY]), 4, 1), DataError, f"request 1: token id {VOCABULARY} .*vocabulary of 61"),
        (Request(as_ids([5, -2]), 4, 1), DataError, "request 1: token id -2"),
        (Request(as_ids([5, 6]), 255, 1), ConfigError, "max_position_embeddings = 256"),
    ],
)
def test_a_bad_request_is_named_before_work_starts(
    qwen2: Any, request_: Request, error: type[Exception], message: str
) -> None:
    good = Request(as_ids([5]), 4, 1)
    with pytest.raises(error, match=message):
        Sampler(qwen2, stop_ids=STOPS).generate([good, request_], Sampling(), version=0)


def test_rope_that_changes_with_the_length_of_a_batch_is_limited() -> None:
    rope = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope |= {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
    sampler = Sampler(build("qwen3", rope_parameters=rope), stop_ids=STOPS)
    with pytest.raises(ConfigError, match="exceed 32, where the model's rotary embedding changes"):
        sampler.generate([Request(as_ids([5, 6]), 31, 1)], Sampling(), version=0)
    assert len(sampler.generate([Request(as_ids([5, 6]), 30, 1)], Sampling(), version=0)) == 1


def test_bad_settings_and_models_are_named(qwen2: Any) -> None:
    with pytest.raises(ConfigError, match="rows = 0"):
        Sampler(qwen2, stop_ids=STOPS, rows=0)
    with pytest.raises(ConfigError, match="prefill_tokens = 0"):
        Sampler(qwen2, stop_ids=STOPS, prefill_tokens=0)
    with pytest.raises(ConfigError, match="stop id 61"):
        Sampler(qwen2, stop_ids=[61])
    with pytest.raises(ConfigError, match="cuda_graphs"):
        Sampler(qwen2, stop_ids=STOPS, cuda_graphs=True)
    with pytest.raises(ConfigError, match="top_p"):
        Sampler(qwen2, stop_ids=STOPS).generate([], Sampling(top_p=2), version=0)


def test_weights_that_are_not_finite_stop_the_sampler() -> None:
    model = build("qwen2")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(TrainingError, match="not finite"):
        Sampler(model, stop_ids=STOPS).generate([Request(as_ids([5]), 4, 1)], Sampling(), version=0)


def test_learned_positions_work_too() -> None:
    """A model without rotary positions or grouped heads, up to its last position, while finished rows run on."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=48, initializer_range=0.25)
    model = GPT2LMHeadModel(config).eval()
    rng = np.random.default_rng(0)
    requests = [Request(as_ids(rng.integers(0, VOCABULARY, n)), 48 - n, n) for n in (40, 45, 47, 20, 2)]
    rollouts = Sampler(model, stop_ids=STOPS, paged=True, check_every=16).generate(requests, Sampling(), version=0)
    for request, rollout in zip(requests, rollouts, strict=True):
        np.testing.assert_allclose(rollout.logprobs, plain_logprobs(model, request, rollout, Sampling()), atol=1e-4)
