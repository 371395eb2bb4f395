"""What the vLLM sampler does around vLLM, over a stand-in with vLLM's rules; the real one: `test_vllm_itself.py`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnrl.errors import ConfigError, TrainingError
from attnrl.local.vllm_sampler import VllmSampler, check_range
from attnrl.types import Request, Sampling, as_ids

STOP = 3


class Engine:
    """Like `vllm.LLM`: weights are gone after a deep sleep, cached prefixes are found by salt until they are cleared.

    A drawn token is the first weight of the model, as loaded; the prefix cache remembers it per (salt, context).
    """

    built: list[Engine]
    failures: Any

    def __init__(self, **settings: Any) -> None:
        self.settings, self.asleep, self.weights, self.prefixes = settings, False, None, {}
        self.log: list[str] = []
        type(self).built.append(self)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert not self.asleep
        assert method == "reload_weights"
        self.weights = int(dict(kwargs["weights_iterator"])["model.norm.weight"][0])
        self.log.append(f"load {self.weights}")

    def reset_prefix_cache(self) -> bool:
        self.prefixes.clear()
        return True

    def sleep(self, level: int) -> None:
        assert level == 2
        self.asleep, self.weights = True, None
        self.log.append("sleep")

    def wake_up(self) -> None:
        self.asleep = False

    def generate(self, prompts: list[dict[str, Any]], params: list[Any], use_tqdm: bool) -> list[Any]:
        if next(type(self).failures, False):
            raise RuntimeError("CUDA error: the engine is gone")
        assert not self.asleep
        assert self.weights is not None
        outputs = []
        for prompt, param in zip(prompts, params, strict=True):
            key = (prompt["cache_salt"], tuple(prompt["prompt_token_ids"]))
            token = self.prefixes.setdefault(key, self.weights)
            ids = [token] * (param.max_tokens - 1) + [STOP if param.max_tokens < 4 else token]
            logprobs = [{i: SimpleNamespace(logprob=-0.5)} for i in ids]
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)]))
        return outputs


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in's log-probs are nobody's."""
    own = VllmSampler._try
    monkeypatch.setattr(VllmSampler, "_try", lambda sampler: None)
    return own


@pytest.fixture
def library() -> Any:
    fresh = type("Fresh", (Engine,), {"built": [], "failures": iter(())})
    return SimpleNamespace(LLM=fresh, SamplingParams=lambda **values: SimpleNamespace(**values), __version__="0.26.0")


@pytest.fixture
def model() -> Any:
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def set_weight(model: Any, value: int) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] = value


REQUESTS = [Request(as_ids([5, 6]), 3, 1), Request(as_ids([5]), 4, 2)]


def test_answers_become_rollouts(model: Any, library: Any) -> None:
    set_weight(model, 9)
    sampler = VllmSampler(model, stop_ids=[STOP], longest=64, rows=32, library=library)
    first, second = sampler.generate(REQUESTS, Sampling(0.7, 0.9), version=4)
    assert (first.ids.tolist(), first.finish, first.version) == ([9, 9, STOP], "stop", 4)
    assert (second.ids.tolist(), second.finish) == ([9, 9, 9, 9], "length")
    assert first.logprobs.tolist() == [-0.5] * 3
    assert (first.ids.dtype, first.logprobs.dtype) == (np.int32, np.float32)
    [greedy] = sampler.generate(REQUESTS[:1], Sampling(temperature=0), version=4)
    assert not greedy.logprobs.any()
    [engine] = library.LLM.built
    settings = engine.settings
    assert (settings["max_model_len"], settings["max_num_seqs"], settings["dtype"]) == (64, 32, "float32")
    assert settings["logprobs_mode"] == "processed_logprobs"
    assert sampler.generate([], Sampling(), version=4) == []


def test_every_new_policy_is_shown_and_no_old_prefix_is_found(model: Any, library: Any) -> None:
    """Also where the weights change without a new version, as when a checkpoint is loaded."""
    sampler = VllmSampler(model, stop_ids=[STOP], longest=64, library=library)
    for weight in (7, 8, 9):
        set_weight(model, weight)
        sampler.sync()
        for _ in range(2):
            rollouts = sampler.generate(REQUESTS, Sampling(), version=0)
            assert rollouts[1].ids.tolist() == [weight] * 4
    [engine] = library.LLM.built
    assert engine.log == ["load 7", "load 8", "load 9"]  # once a policy, not once a call


def test_it_sleeps_while_the_learner_works(model: Any, library: Any) -> None:
    set_weight(model, 7)
    sampler = VllmSampler(model, stop_ids=[STOP], longest=64, library=library)
    sampler._sleeps = True  # as on a CUDA device
    sampler.rest()  # before it was built: nothing to do
    sampler.generate(REQUESTS, Sampling(), version=0)
    sampler.rest()
    sampler.rest()
    set_weight(model, 8)  # nobody calls sync: the weights are gone anyway
    assert sampler.generate(REQUESTS, Sampling(), version=1)[1].ids.tolist() == [8] * 4
    [engine] = library.LLM.built
    assert engine.log == ["load 7", "sleep", "load 8"]
    metrics = sampler.metrics()
    assert metrics["generate/vllm_seconds"] >= metrics["generate/vllm_sync_seconds"] > 0
    assert sampler.metrics() == dict.fromkeys(metrics, 0.0) | {"generate/sampler_vllm": 1.0}
    sampler.close()


def test_a_dead_engine_is_built_again_and_the_call_is_redone(model: Any, library: Any) -> None:
    set_weight(model, 7)
    sampler = VllmSampler(model, stop_ids=[STOP], longest=64, library=library)
    library.LLM.failures = iter([False, True])
    sampler.generate(REQUESTS, Sampling(), version=0)
    with pytest.warns(UserWarning, match=r"vLLM died .*gone"):
        rollouts = sampler.generate(REQUESTS, Sampling(), version=0)
    assert rollouts[1].ids.tolist() == [7] * 4
    assert [engine.log for engine in library.LLM.built] == [["load 7"], ["load 7"]]
    assert sampler.metrics()["generate/vllm_restarts"] == 1
    library.LLM.failures = itertools.repeat(True)
    with pytest.warns(UserWarning, match="vLLM died"), pytest.raises(TrainingError, match="failed 2 times"):
        sampler.generate(REQUESTS, Sampling(), version=0)


def test_what_it_cannot_do_is_said_before_it_starts(model: Any, library: Any) -> None:
    with pytest.raises(ConfigError, match=r"vLLM 0\.25\.1 is outside .* at least 0\.26"):
        check_range(model, "0.25.1")
    with pytest.raises(ConfigError, match=r"below 0\.33"):
        check_range(model, "0.33.0rc1")
    model.peft_config, model.get_base_model = {}, lambda: model
    with pytest.raises(ConfigError, match="adapters"):
        check_range(model, "0.26.0")
    del model.peft_config
    sampler = VllmSampler(model, stop_ids=[STOP], longest=8, library=library)
    with pytest.raises(ConfigError, match="request 1: 5 context tokens and max_tokens = 4 exceed the 8"):
        sampler.generate([REQUESTS[0], Request(as_ids([1, 2, 3, 4, 5]), 4, 1)], Sampling(), version=0)
    assert not library.LLM.built


def test_log_probs_that_are_not_the_models_are_refused_at_the_first_call(
    model: Any, library: Any, untried: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmSampler, "_try", untried)
    set_weight(model, 7)
    sampler = VllmSampler(model, stop_ids=[STOP], longest=64, library=library)
    with pytest.raises(ConfigError, match=r"from LlamaForCausalLM by log-probs that differ by 3\.\d+ nats .* \"own\""):
        sampler.generate(REQUESTS, Sampling(), version=0)


def test_a_model_that_vllm_does_not_know_is_named(model: Any, library: Any) -> None:
    def fails(**settings: Any) -> None:
        raise ValueError("architectures ['LlamaForCausalLM'] are not supported")

    library.LLM = fails
    sampler = VllmSampler(model, stop_ids=[STOP], longest=64, library=library)
    with pytest.raises(ConfigError, match=r"did not start with LlamaForCausalLM \(architectures .* \"own\""):
        sampler.generate(REQUESTS, Sampling(), version=0)


def test_a_missing_vllm_names_the_extra(model: Any) -> None:
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"attnrl\[vllm\]"):
            VllmSampler(model, stop_ids=[STOP], longest=8)
    else:
        pytest.skip("vLLM is installed here")
