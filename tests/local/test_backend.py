"""The three parts see one policy, and a checkpoint restores it exactly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attnrl.config import load_config
from attnrl.data.task_tokenizer import task_tokenizer
from attnrl.errors import ConfigError, MissingFileError
from attnrl.local.backend import STATE, LocalBackend, build, build_learner
from attnrl.local.models import add_lora, load_tokenizer, pick_device, prepare_model
from attnrl.policy.logprobs import pack_logprobs
from attnrl.policy.packing import pack
from attnrl.types import Request, Rollout, Sample, Sampling, ScoreRequest, Scoring, Step, as_floats, as_ids

KINDS: dict[str, Any] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
UPDATE = {"lr": 1e-3, "minibatches": 2, "microbatch_tokens": 64, "kl_weight": 0.01}
CONFIG = load_config("", {f"update.{key}": value for key, value in UPDATE.items()} | {"engine.local.device": "cpu"})
LORA = load_config("", {"model.lora_rank": 4, "model.lora_targets": ["q_proj", "down_proj"]}).model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return task_tokenizer()


def tiny(tokenizer: PreTrainedTokenizerFast, kind: str = "qwen2", dtype: torch.dtype = torch.float32) -> Any:
    config, model = KINDS[kind]
    torch.manual_seed(0)
    made = model(
        config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=kind != "llama",
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return prepare_model(made.to(dtype))


def trainable(model: Any, tokenizer: Any, optimizer: str = "adamw") -> LocalBackend:
    config = CONFIG.model_copy(update={"update": CONFIG.update.model_copy(update={"optimizer": optimizer})})
    return LocalBackend(model, tokenizer, learner=build_learner(config, model))


def draw(
    backend: LocalBackend, count: int = 8, seed: int = 0, temperature: float = 1.0
) -> tuple[list[Request], list[Rollout]]:
    rng = np.random.default_rng(seed)
    requests = [
        Request(as_ids(rng.integers(4, 60, int(rng.integers(3, 20)))), max_tokens=int(rng.integers(4, 24)), seed=i)
        for i in range(count)
    ]
    return requests, backend.generate(requests, Sampling(temperature=temperature))


def samples_of(requests: list[Request], rollouts: list[Rollout]) -> list[Sample]:
    return [
        Sample(
            r.context, o.ids, as_floats(np.random.default_rng(i).normal(size=len(o.ids))), o.logprobs, uid=str(i // 2)
        )
        for i, (r, o) in enumerate(zip(requests, rollouts, strict=True))
    ]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_learner_and_scorer_agree_on_log_probs(
    tokenizer: PreTrainedTokenizerFast, kind: str, temperature: float
) -> None:
    """Trunks, and branches that continue them; within 1e-4 per token, in float32."""
    backend = LocalBackend(tiny(tokenizer, kind), tokenizer)
    requests, rollouts = draw(backend, temperature=temperature)
    long = [(r, o) for r, o in zip(requests, rollouts, strict=True) if len(o.ids) > 2]
    branches = [Request(np.concatenate([r.context, o.ids[:2]]), max_tokens=12, seed=90) for r, o in long]
    requests = requests + branches
    rollouts = rollouts + backend.generate(branches, Sampling(temperature=temperature))
    samples = samples_of(requests, rollouts)
    packed = pack(samples, range(len(samples)), "cpu")
    learner = pack_logprobs(backend.model, packed, temperature=temperature)
    torch.testing.assert_close(learner, packed.behaviour_N, atol=1e-4, rtol=0)
    asked = [ScoreRequest(s.prompt, s.response, (Step(0, len(s.response)),)) for s in samples]
    scores = np.concatenate([s.logprobs for s in backend.score(asked, Scoring(temperature=temperature))])
    np.testing.assert_allclose(scores, packed.behaviour_N.numpy(), atol=1e-4)


@pytest.mark.parametrize("right", [True, False])
def test_scores_come_from_the_learners_forward_where_it_is_right(
    tokenizer: PreTrainedTokenizerFast, right: bool, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    backend = trainable(tiny(tokenizer), tokenizer)
    asked = [ScoreRequest(as_ids([4, 5, 6]), as_ids(range(10, 30)), (Step(0, 10), Step(10, 20)))]
    [wanted] = backend.score(asked, Scoring(delta=1))
    lengths = []

    def give_kernels(to: LocalBackend) -> None:
        """A forward that stands for kernels that no CPU has."""

        def hidden(ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
            lengths.append(len(ids_T))
            out = to.model.base_model(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False)
            return out.last_hidden_state[0] * (1.0 if right else 1.1)

        assert to.learner is not None
        to.learner.decoders = {id(to.model): SimpleNamespace(hidden=hidden)}  # type: ignore[dict-item]

    give_kernels(backend)
    for _ in range(2):
        [found] = backend.score(asked, Scoring(delta=1))
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-6)
        np.testing.assert_allclose(found.fci, wanted.fci, atol=1e-6)
    assert lengths[1:] == ([23, 23] if right else [])  # looked at once, then used or left
    assert sum("scoring runs unfused" in str(w.message) for w in recwarn) == (0 if right else 1)
    backend.save(tmp_path)
    resumed = trainable(tiny(tokenizer), tokenizer)
    give_kernels(resumed)
    resumed.load(tmp_path)
    lengths.clear()
    resumed.score(asked, Scoring(delta=1))
    assert len(lengths) == (2 if right else 0)  # looked at and used; or left, as before
    assert backend.learner is not None
    backend.learner.decoders = {}  # it found its kernels wrong
    lengths.clear()
    backend.score(asked, Scoring(delta=1))
    assert not lengths


def test_first_update_is_on_policy_then_versions_rise(tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny(tokenizer)
    whole = load_config("", {"update.lr": 1e-3, "update.minibatches": 1, "update.kl_weight": 0.01})
    backend = LocalBackend(model, tokenizer, learner=build_learner(whole, model))
    requests, rollouts = draw(backend)
    metrics = backend.update(samples_of(requests, rollouts))
    assert metrics["policy/behaviour_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["policy/clip_fraction"] == 0.0
    assert backend.version == 1
    assert {o.version for o in rollouts} == {0}
    assert {o.version for o in draw(backend)[1]} == {1}


@pytest.mark.parametrize(
    ("dtype", "lora", "optimizer"),
    [
        (torch.float32, False, "adamw"),
        (torch.bfloat16, False, "adamw"),
        (torch.float32, True, "adamw"),
        (torch.bfloat16, False, "adamw_offloaded"),
        (torch.bfloat16, False, "adamw_8bit"),
    ],
    ids=["float32", "bfloat16", "lora", "offloaded", "8bit"],
)
def test_a_loaded_checkpoint_continues_bit_for_bit(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, dtype: torch.dtype, lora: bool, optimizer: str
) -> None:
    def build() -> LocalBackend:
        model = tiny(tokenizer, dtype=dtype)
        if lora:
            model = add_lora(model, LORA, seed=5)
        return trainable(model, tokenizer, optimizer)

    def go_on(backend: LocalBackend, iterations: int) -> list[dict[str, float]]:
        return [backend.update(samples_of(*draw(backend, seed=backend.version))) for _ in range(iterations)]

    straight = build()
    go_on(straight, 1)
    straight.save(tmp_path)
    expected = go_on(straight, 2)

    resumed = build()
    places = [p.data_ptr() for p in resumed.model.parameters()]
    resumed.load(tmp_path)
    assert resumed.version == 1
    assert places == [p.data_ptr() for p in resumed.model.parameters()]
    (tmp_path / STATE).unlink()  # nothing is read from it later
    assert go_on(resumed, 2) == expected
    assert same(weights(resumed.model), weights(straight.model))
    assert not same(weights(straight.model), weights(build().model))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_checkpoint_is_a_hugging_face_model(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, lora: bool) -> None:
    model = tiny(tokenizer)
    if lora:
        model = add_lora(model, LORA, seed=0)
    backend = trainable(model, tokenizer)
    requests, rollouts = draw(backend)
    backend.update(samples_of(requests, rollouts))
    backend.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    samples = samples_of(*draw(backend))
    for sample in samples:
        ids = torch.tensor(np.concatenate([sample.prompt, sample.response])[None].astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(loaded(ids).logits[0].float(), -1)[len(sample.prompt) - 1 : -1]
        found = logprobs.gather(-1, ids[0, len(sample.prompt) :, None])[:, 0]
        np.testing.assert_allclose(found.numpy(), sample.logprobs, atol=1e-4)
    reloaded = load_tokenizer(tmp_path / "model")
    again = build(CONFIG, model=str(tmp_path / "model"), tokenizer=reloaded, learn=False)
    assert reloaded.encode("How many lamps are there?") == tokenizer.encode("How many lamps are there?")
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(draw(again)[1], draw(backend)[1], strict=True))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_checkpoint_that_is_cut_short_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, lora: bool, share: float
) -> None:
    model = add_lora(tiny(tokenizer), LORA, seed=0) if lora else tiny(tokenizer)
    backend = trainable(model, tokenizer)
    backend.update(samples_of(*draw(backend)))
    backend.save(tmp_path)
    weights = "adapter/adapter_model.safetensors" if lora else "model/model.safetensors"
    for name in ("learner.pt", weights):
        file = tmp_path / name
        whole = file.read_bytes()
        file.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(MissingFileError, match=rf"{tmp_path}/{name.split('/')[0]} is missing or cut short; remove"):
            backend.load(tmp_path)
        file.write_bytes(whole)
    backend.load(tmp_path)


def test_evaluation_needs_no_learner(tokenizer: PreTrainedTokenizerFast) -> None:
    backend = LocalBackend(tiny(tokenizer), tokenizer)
    assert backend.learner is None
    with pytest.raises(ConfigError, match="without a learner"):
        backend.update([])


def test_missing_paths_are_named_before_anything_loads(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        build(CONFIG, model=str(tmp_path / "nowhere"), tokenizer=tokenizer)
    with pytest.raises(MissingFileError, match=r"config\.json"):
        build(CONFIG, model=str(tmp_path), tokenizer=tokenizer)
    backend = LocalBackend(tiny(tokenizer), tokenizer)
    with pytest.raises(MissingFileError, match="no checkpoint"):
        backend.load(tmp_path)
    with pytest.raises(MissingFileError, match="no directory"):
        backend.save(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not 'gpu'"):
        pick_device("gpu")


def test_a_gpu_that_is_too_old_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (7, 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    with pytest.warns(UserWarning, match=r"Tesla T4 has compute capability 7\.5; .* need 8\.0"):
        assert pick_device().type == "cpu"
    with pytest.raises(ConfigError, match=r"'cuda', but Tesla T4 has compute capability 7\.5"):
        pick_device("cuda")
    with pytest.raises(ConfigError, match="1 CUDA device"):
        pick_device("cuda:1")
    capability = (8, 6)
    assert (pick_device().type, pick_device("cuda:0").index) == ("cuda", 0)


def test_a_config_becomes_a_backend(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    LocalBackend(tiny(tokenizer), tokenizer).export(tmp_path)
    flags = {"engine.local.device": "cpu", "engine.local.rows": 3, "update.lr": 2e-4, "update.dual_clip": 3.0}
    config = load_config("attnrl_1p5b", {**flags, "model.lora_rank": 2, "sampling.temperature": 0.8, "run.seed": 7})
    backend = build(config, model=str(tmp_path), tokenizer=tokenizer)
    assert backend.learner is not None
    learner = backend.learner
    assert (learner.options.lr, learner.options.dual_clip, learner.passes.temperature, learner.seed) == (
        2e-4,
        3.0,
        0.8,
        7,
    )
    assert backend.sampler.rows == 3
    adapters = {n for n, p in backend.model.named_parameters() if p.requires_grad}
    assert adapters
    assert all("lora" in name for name in adapters)
    assert backend.update(samples_of(*draw(backend)))["policy/updates"] == 2
