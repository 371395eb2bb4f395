"""The update does not depend on how it is cut, and equals a naive loop over samples and tokens."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attnrl.config import ModelConfig, UpdateConfig
from attnrl.errors import ConfigError, TrainingError
from attnrl.local import learner as learner_module
from attnrl.local.learner import Learner
from attnrl.local.models import add_lora, lora_layers, prepare_model
from attnrl.policy import passes as passes_module
from attnrl.progress import watched
from attnrl.types import Sample, as_floats, as_ids

VOCABULARY = 37
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
KINDS: dict[str, Any] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "gpt_oss": (  # attention sinks and experts; no windows, so that prefixes are shared
        GptOssConfig,
        GptOssForCausalLM,
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    ),
}


TWO: dict[str, Any] = {"minibatches": 2}


def section(**keys: Any) -> UpdateConfig:
    """An [update] section for tiny models: everything in one minibatch, no reference, activations kept."""
    small: dict[str, Any] = {"kl_weight": 0.0, "minibatches": 1, "gradient_checkpointing": "none"}
    return UpdateConfig(**{**small, **keys})


def tiny(kind: str = "qwen2", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    config, model, extra = KINDS[kind]
    torch.manual_seed(seed)
    made = model(config(**SHAPE, **extra)).to(dtype)
    with torch.no_grad():  # far from the uniform start, so that ratios and KL are not near 0
        for parameter in made.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return prepare_model(made)


def batch(count: int = 9, seed: int = 0, prompts: int = 3) -> list[Sample]:
    """Samples as trees give them: one prompt per uid, and some responses that repeat the start of an earlier one."""
    rng = np.random.default_rng(seed)
    heads = [as_ids(rng.integers(0, VOCABULARY, int(rng.integers(2, 9)))) for _ in range(prompts)]
    samples: list[Sample] = []
    for i in range(count):
        t = int(rng.integers(3, 20))
        response = rng.integers(0, VOCABULARY, t)
        if i >= prompts and i % 2:
            trunk = samples[i - prompts].response
            kept = min(t - 1, len(trunk) // 2)
            response[:kept] = trunk[:kept]
        samples.append(
            Sample(
                prompt=heads[i % prompts],
                response=as_ids(response),
                advantages=as_floats(rng.normal(size=t)),
                logprobs=as_floats(-4 + rng.normal(size=t)),
                uid=str(i % prompts),
                mask=rng.random(t) < 0.7 if i % 4 == 1 else None,
            )
        )
    return samples


def level(samples: list[Sample], value: float | None = None) -> list[Sample]:
    """The samples with one advantage for all of their tokens: that of the first, or a value."""
    values = [s.advantages[0] if value is None else value for s in samples]
    return [
        dataclasses.replace(s, advantages=as_floats([v] * len(s.response)))
        for s, v in zip(samples, values, strict=True)
    ]


def spoiled(samples: list[Sample]) -> list[Sample]:
    """The samples with no number for one token's advantage."""
    first, *others = samples
    return [dataclasses.replace(first, advantages=as_floats([np.nan, *first.advantages[1:]])), *others]


def naive_gradients(model: Any, reference: Any, samples: list[Sample], o: UpdateConfig, temperature: float) -> Any:
    """Loss and gradients from the model's own forward, sample by sample and token by token, no packing."""
    model.zero_grad()
    terms: list[torch.Tensor] = []
    for s in samples:
        ids = torch.tensor(np.concatenate([s.prompt, s.response])[None].astype(np.int64))
        new = torch.log_softmax(model(ids).logits[0].float() / temperature, -1)
        with torch.no_grad():
            ref = torch.log_softmax(reference(ids).logits[0].float() / temperature, -1)
        for t in range(len(s.response)):
            if s.mask is not None and not s.mask[t]:
                continue
            at, token = len(s.prompt) + t - 1, int(s.response[t])
            ratio = torch.exp(new[at, token] - float(s.logprobs[t]))
            a = float(s.advantages[t])
            gain = torch.min(ratio * a, ratio.clamp(1 - o.clip_low, 1 + o.clip_high) * a)
            if o.dual_clip is not None and a < 0:
                gain = torch.max(gain, torch.tensor(o.dual_clip * a))
            d = ref[at, token] - new[at, token]
            terms.append(-gain + o.kl_weight * (torch.exp(d) - d - 1))
    loss = torch.stack(terms).mean()
    loss.backward()
    return loss.item(), gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=tolerance, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("options", [section(kl_weight=0.1), section(kl_weight=0.001, dual_clip=3.0)])
def test_loss_and_gradients_equal_a_naive_loop(kind: str, options: UpdateConfig) -> None:
    """Advantages differ from token to token as in AttnRL; GRPO is the same loss with one value per sample."""
    model, reference = tiny(kind), tiny(kind, seed=1)
    samples = batch()
    samples[:3] = level(samples[:3])  # GRPO rows among them
    expected_loss, expected = naive_gradients(model, reference, samples, options, temperature=0.7)
    learner = Learner(model, reference, options=options, temperature=0.7)
    metrics = learner.accumulate(samples, [list(range(9))])
    assert metrics.forward_tokens < 0.9 * metrics.path_tokens  # shared prefixes ran once
    assert metrics.total("loss") / metrics.tokens == pytest.approx(expected_loss, abs=1e-5)
    close(gradients(model), expected)


@pytest.mark.parametrize(
    ("microbatches", "settings"),
    [
        ([[i] for i in range(9)], {}),
        ([[8, 2, 5], [0, 1], [7, 3, 6, 4]], {}),
        ([list(range(9))], {"share_prefixes": False}),
        ([[0, 1, 2, 3], [4, 5, 6, 7, 8]], {"share_prefixes": False, "logit_chunk_tokens": 5}),
        ([[0, 1, 2, 3, 4], [5, 6, 7, 8]], {"gradient_checkpointing": "all", "logit_chunk_tokens": 7}),
    ],
    ids=["one by one", "other order", "nothing shared", "nothing shared, chunked", "checkpointed"],
)
@pytest.mark.parametrize("loss", ["clip", "cispo", "gspo"])
def test_cut_and_order_do_not_matter(microbatches: list[list[int]], settings: dict[str, Any], loss: str) -> None:
    samples, reference = batch(), tiny(seed=1)
    keys: dict[str, Any] = {"loss": loss, "kl_weight": 0.1, "entropy_weight": 0.01}
    if loss == "gspo":  # wide enough that not every sample is clipped
        keys["loss_options"] = {"low": 0.9, "high": 9.0}
    results = []
    for packs, extra in (([list(range(9))], {}), (microbatches, settings)):
        model = tiny()
        learner = Learner(model, reference, options=section(**keys, **extra))
        metrics = learner.accumulate(samples, packs)
        results.append((metrics.total("loss") / metrics.units, gradients(model)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    close(results[0][1], results[1][1])


def test_token_mean_is_global_not_per_microbatch() -> None:
    """One long and one short sample: a mean of microbatch means would weigh the short one's tokens more."""
    samples = [s for s in batch(9) if s.mask is None]
    long = max(samples, key=lambda s: len(s.response))
    short = min(samples, key=lambda s: len(s.response))
    model = tiny()
    learner = Learner(model, options=section())
    found, counts = [], []
    for packs in ([[0], [1]], [[0]], [[1]]):
        counts.append(learner.accumulate([long, short], packs).tokens)
        found.append(gradients(model)["model.embed_tokens.weight"])
    assert counts[1] > 1.5 * counts[2]
    torch.testing.assert_close(found[0] * counts[0], found[1] * counts[1] + found[2] * counts[2], atol=1e-4, rtol=1e-4)
    assert (found[0] - (found[1] + found[2]) / 2).abs().max() > 1e-3


def test_update_counts_and_masked_out_samples() -> None:
    samples = batch(8, prompts=4)
    nothing = np.zeros(len(samples[0].response), bool)
    samples[0] = dataclasses.replace(samples[0], mask=nothing)
    options = section(minibatches=2, microbatch_tokens=40, lr=1e-3)
    metrics = Learner(tiny(), options=options).update(samples, version=0)
    tokens = sum(len(s.response) if s.mask is None else int(s.mask.sum()) for s in samples)
    assert metrics["policy/updates"] == 2
    assert metrics["train/samples"] == 7
    assert metrics["train/tokens"] == tokens
    assert metrics["train/microbatches"] > 2
    assert Learner(tiny(), options=options).update(samples[:1], version=0)["policy/updates"] == 0


def test_trap_rows_without_loss_tokens_carry_no_kl() -> None:
    """A row whose every token is masked out, and what follows a row's last loss token: neither loss nor gradient."""
    samples, reference = batch(), tiny(seed=1)
    nothing = dataclasses.replace(samples[0], mask=np.zeros(len(samples[0].response), bool))
    first = np.arange(len(samples[2].response)) < 2
    cut = dataclasses.replace(samples[2], mask=first)
    gone = Sample(cut.prompt, cut.response[:2], cut.advantages[:2], cut.logprobs[:2], uid=cut.uid)
    results = []
    for rows in ([samples[1], cut, nothing], [samples[1], gone]):
        model = tiny()
        metrics = Learner(model, reference, options=section(lr=1e-3, kl_weight=0.5)).update(rows, version=0)
        results.append((metrics, [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert results[0][0]["policy/kl"] > 0
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_reference_kl_starts_at_zero_and_grows() -> None:
    model = tiny()
    learner = Learner(model, copy.deepcopy(model), options=section(lr=1e-2, kl_weight=0.001))
    samples = batch()
    assert learner.update(samples, version=0)["policy/kl"] == pytest.approx(0.0, abs=1e-7)
    assert learner.update(samples, version=1)["policy/kl"] > 1e-4


def test_positive_advantage_raises_the_log_prob() -> None:
    samples = [
        Sample(s.prompt, s.response, np.ones_like(s.advantages), np.full_like(s.logprobs, -3.0), uid=s.uid)
        for s in batch(3)
    ]
    learner = Learner(tiny(), options=section(lr=1e-3, clip_high=100.0))
    surrogates = [learner.update(samples, version=v)["policy/surrogate"] for v in range(4)]
    assert surrogates == sorted(surrogates, reverse=True)


def test_importance_weights_use_the_learner_before_the_update() -> None:
    """Two minibatches: in both the ratio starts from the policy of version 0, and behaviour only sets the weight."""
    samples = batch(6, prompts=2)
    options = section(importance_cap=2.0, minibatches=2, lr=1e-9)
    metrics = Learner(tiny(), options=options).update(samples, version=0)
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert 0 < metrics["policy/importance_weight"] <= 2.0
    assert metrics["policy/behaviour_kl"] > 0.01


def test_warmup_of_the_learning_rate() -> None:
    options = section(lr=4e-4, lr_warmup_updates=4)
    learner = Learner(tiny(), options=options)
    rates = [learner.update(batch(), version=v)["policy/lr"] for v in range(5)]
    assert rates == pytest.approx([2e-4, 3e-4, 4e-4, 4e-4, 4e-4])


def test_non_finite_updates_are_skipped_counted_and_end_training() -> None:
    model = tiny()
    options = section(max_bad_updates=2)
    learner = Learner(model, options=options)
    good, bad = batch(3), spoiled(batch(3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert learner.update(bad, version=0)["policy/skipped_updates"] == 1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert learner.update(good, version=1)["policy/updates"] == 1
    learner.update(bad, version=2)
    with pytest.raises(TrainingError, match="2 updates in a row"):
        learner.update(bad, version=3)
    assert learner.counters.skipped == 3


def test_bfloat16_keeps_float32_masters_and_tensors_in_place() -> None:
    """A learning rate below bfloat16's resolution must still add up over updates; float32 shows the direction."""
    model = tiny(dtype=torch.bfloat16)
    learner = Learner(model, options=section(lr=2e-5, clip_high=100.0, clip_low=0.999, weight_decay=0.0))
    places = [p.data_ptr() for p in model.parameters()]
    weight = model.model.layers[0].mlp.gate_proj.weight
    start = weight.detach().clone()
    learner.update(batch(), version=0)
    moved_once = (weight != start).float().mean().item()
    for version in range(1, 30):
        learner.update(batch(), version=version)
    assert learner.optimizer.masters[0].dtype == torch.float32
    assert (weight != start).float().mean().item() > max(0.3, 3 * moved_once)
    assert places == [p.data_ptr() for p in model.parameters()]


def test_lora_trains_adapters_against_the_base() -> None:
    base = tiny()
    before = {k: v.clone() for k, v in base.state_dict().items()}
    model = add_lora(base, ModelConfig(lora_rank=4, lora_alpha=8, lora_targets=("q_proj", "v_proj")), seed=0)
    learner = Learner(model, options=section(lr=1e-2, kl_weight=0.1))
    samples = batch()
    assert learner.update(samples, version=0)["policy/kl"] == pytest.approx(0.0, abs=1e-7)
    learner.update(samples, version=1)
    assert learner.update(samples, version=2)["policy/kl"] > 1e-6
    after = model.get_base_model().state_dict()
    frozen = {k.replace(".base_layer", ""): v for k, v in after.items() if "lora" not in k}
    assert all(torch.equal(frozen[k], v) for k, v in before.items())


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            ["q_projj"],
            r"no layer 'q_projj'; did you mean 'q_proj'\?; it has .*q_proj, k_proj, v_proj, o_proj",
        ),
        (["q_proj", "v_projj"], r"no layer 'v_projj'; did you mean 'v_proj'"),  # the other one would train alone
        (["mlp"], r"no layer 'mlp'; it has"),  # a block, not a layer
        (["proj"], r"no layer 'proj'"),  # whole names, not their ends
        ([], r"no layer"),
    ],
)
def test_a_lora_target_that_the_model_does_not_have_is_named_with_those_it_has(targets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.lora_targets: .*{said}"):
        add_lora(tiny(), ModelConfig(lora_rank=4, lora_targets=targets), seed=0)


def test_default_lora_targets_are_those_that_the_model_has_of_them() -> None:
    """Also a part of a name, as peft takes it, and one layer once."""
    model = tiny()
    names = {id(layer): name for name, layer in model.named_modules()}
    seven = [names[id(layer)].rpartition(".")[2] for layer in lora_layers(model, ModelConfig(lora_rank=4))]
    assert sorted(set(seven)) == sorted(ModelConfig().lora_targets)
    some = lora_layers(model, ModelConfig(lora_targets=("self_attn.q_proj", "q_proj")))
    assert sorted(names[id(layer)] for layer in some) == sorted(n for n in names.values() if n.endswith(".q_proj"))
    for layer in model.model.layers:
        del layer.mlp.gate_proj
    assert len(lora_layers(model, ModelConfig(lora_rank=4))) == len(seven) * 6 // 7


def test_lora_adapters_follow_the_seed() -> None:
    def adapters(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(int(torch.randint(1000, ()).item()))  # what the global generator does is no matter
        model = add_lora(tiny(), ModelConfig(lora_rank=4, lora_targets=("q_proj",)), seed=seed)
        return [p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name]

    first, again, other = adapters(1), adapters(1), adapters(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_attention_that_masks_wrongly_is_found_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: runs that see only the first keys of their path, as a mask aligned to the first key gives."""
    honest = torch.Tensor.tril
    monkeypatch.setattr(torch.Tensor, "tril", lambda mask, _: honest(mask, 0))
    options = section(lr=1e-3)
    found, apart = tiny(), tiny()
    learner = Learner(found, options=options)
    with pytest.warns(RuntimeWarning, match="shared prefixes"):
        metrics = learner.update(batch(), version=0)
    assert metrics["train/forward_tokens"] == metrics["train/path_tokens"]
    Learner(apart, options=section(lr=1e-3, share_prefixes=False)).update(batch(), version=0)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), apart.parameters(), strict=True))


def test_shared_prefixes_that_give_no_number_are_found_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN is no small gap: a planted kernel fault that breaks log-probs only where prefixes are shared."""
    honest = passes_module.pack_logprobs

    def broken(model: Any, pack: Any, **options: Any) -> torch.Tensor:
        return honest(model, pack, **options) * (1.0 if pack.runs.paths_S is None else float("nan"))

    monkeypatch.setattr(passes_module, "pack_logprobs", broken)
    found, apart = tiny(), tiny()
    learner = Learner(found, options=section(lr=1e-3))
    with pytest.warns(RuntimeWarning, match="shared prefixes changed log-probs by nan"):
        metrics = learner.update(batch(), version=0)
    assert not learner.shares_prefixes
    resumed = Learner(tiny(), options=section(lr=1e-3))
    assert resumed.shares_prefixes
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert not resumed.shares_prefixes, "a resumed run goes on as it was"
    old = copy.deepcopy(learner.state_dict())
    del old["left"]  # of a checkpoint from before this was kept
    Learner(tiny(), options=section(lr=1e-3)).load_state_dict(old)
    assert metrics["train/forward_tokens"] == metrics["train/path_tokens"]
    Learner(apart, options=section(lr=1e-3, share_prefixes=False)).update(batch(), version=0)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), apart.parameters(), strict=True))


def test_a_model_without_numbers_is_not_blamed_on_shared_prefixes(recwarn: pytest.WarningsRecorder) -> None:
    """Log-probs that are not finite either way: the update is skipped, and sharing is looked at when they are."""
    model = tiny()
    learner = Learner(model, options=section(lr=1e-3))
    weight = model.model.norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    assert learner.update(batch(), version=0)["policy/skipped_updates"] == 1
    assert (learner.shares_prefixes, learner.checked) == (True, False)
    with torch.no_grad():
        weight.copy_(kept)
    assert learner.update(batch(), version=1)["policy/updates"] == 1
    assert (learner.shares_prefixes, learner.checked) == (True, True)
    assert not [w for w in recwarn if "shared prefixes" in str(w.message)]


def test_updates_on_several_threads_are_repeatable() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        results = []
        for _ in range(3):
            model = tiny()
            Learner(model, options=section(lr=1e-3)).update(batch(120), version=0)
            results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_kl_weight_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="kl_weight"):
        Learner(tiny(), options=section(kl_weight=0.1))


def token_terms(model: Any, samples: list[Sample]) -> list[tuple[float, float, float]]:
    """(log-ratio to the sampler, advantage, entropy) of every loss token, from the model's own forward."""
    terms = []
    for s in samples:
        ids = torch.tensor(np.concatenate([s.prompt, s.response])[None].astype(np.int64))
        with torch.no_grad():
            logits = torch.log_softmax(model(ids).logits[0].float(), -1)
        for t in range(len(s.response)):
            if s.mask is None or s.mask[t]:
                row = logits[len(s.prompt) + t - 1]
                entropy = -(row.exp() * row).sum().item()
                terms.append((row[int(s.response[t])].item() - float(s.logprobs[t]), float(s.advantages[t]), entropy))
    return terms


def test_metrics_equal_a_loop_over_tokens() -> None:
    """One update over everything; the second half of the batch has advantage 0, which carries loss and counts."""
    samples = batch()
    samples[5:] = level(samples[5:], 0.0)
    terms = token_terms(tiny(), samples)
    n = len(terms)
    ratios = [np.exp(log) for log, _, _ in terms]
    high = sum(a > 0 and r > 1.28 for r, (_, a, _) in zip(ratios, terms, strict=True))
    low = sum(a < 0 and r < 0.8 for r, (_, a, _) in zip(ratios, terms, strict=True))
    dual = sum(a < 0 and r > 3.0 for r, (_, a, _) in zip(ratios, terms, strict=True))
    assert min(high, low, dual) > 0
    learner = Learner(tiny(), options=section(dual_clip=3.0, microbatch_tokens=50))
    metrics = learner.update(samples, version=0)
    expected = {
        "policy/clip_high": high / n,
        "policy/clip_low": low / n,
        "policy/clip_fraction": (high + low) / n,
        "policy/dual_clip": dual / n,
        "policy/ratio_max": max(ratios),
        "policy/entropy": float(np.mean([e for _, _, e in terms])),
        "policy/behaviour_kl": float(np.mean([np.expm1(log) - log for log, _, _ in terms])),
        "policy/importance_weight": 1.0,
        "policy/kl": 0.0,
        "train/tokens": n,
        "train/samples": 9,
        "train/path_tokens": sum(
            len(s.prompt) + (len(s.response) if s.mask is None else int(np.flatnonzero(s.mask)[-1]) + 1) - 1
            for s in samples
        ),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4), name
    assert metrics["policy/loss"] == metrics["policy/surrogate"]


def test_metrics_of_several_updates_are_means_over_tokens_and_updates() -> None:
    """At a rate of nearly 0 two minibatches see the same policy, so their metrics must add up to those of one."""
    samples = batch(8, prompts=4)
    whole = Learner(tiny(), options=section(lr=1e-12, entropy_weight=0.1)).update(samples, version=0)
    parts = Learner(tiny(), options=section(lr=1e-12, entropy_weight=0.1, **TWO)).update(samples, version=0)
    for name in ("loss", "surrogate", "entropy", "behaviour_kl", "clip_fraction", "ratio_max"):
        assert parts[f"policy/{name}"] == pytest.approx(whole[f"policy/{name}"], rel=1e-4), name
    assert (whole["policy/updates"], parts["policy/updates"]) == (1, 2)
    assert parts["train/tokens"] == whole["train/tokens"]
    assert parts["policy/grad_norm"] > whole["policy/grad_norm"]  # a mean, not the last or the sum of squares


def test_the_entropy_bonus_raises_entropy() -> None:
    samples = [dataclasses.replace(s, advantages=np.zeros_like(s.advantages)) for s in batch()]
    learner = Learner(tiny(), options=section(lr=3e-3, entropy_weight=1.0))
    entropies = [learner.update(samples, version=v)["policy/entropy"] for v in range(6)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.05


def test_advantages_of_zero_teach_nothing_without_kl_and_bonus() -> None:
    model = tiny()
    before = [p.detach().clone() for p in model.parameters()]
    samples = [dataclasses.replace(s, advantages=np.zeros_like(s.advantages)) for s in batch()]
    metrics = Learner(model, options=section(lr=1e-2, weight_decay=0.0)).update(samples, version=0)
    assert metrics["policy/grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_microbatches_stay_within_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 tokens a forward, also where prefixes are shared; every sample is in one of them."""
    seen: list[Any] = []
    honest = learner_module.pack_attention
    monkeypatch.setattr(learner_module, "pack_attention", lambda model, pack: seen.append(pack) or honest(model, pack))
    for share in (True, False):
        seen.clear()
        Learner(tiny(), options=section(microbatch_tokens=40, share_prefixes=share)).update(batch(12), version=0)
        assert len(seen) > 2
        assert max(p.tokens for p in seen) <= 40
        assert sorted(row for p in seen for row in p.rows) == list(range(12))


def test_order_follows_seed_and_version_alone() -> None:
    def after(seed: int, version: int, used: int = 0) -> torch.Tensor:
        model = tiny()
        learner = Learner(model, options=section(lr=1e-3, **TWO), seed=seed)
        torch.manual_seed(used)
        learner.update(batch(12, prompts=6), version=version)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first = after(0, 0)
    assert torch.equal(first, after(0, 0, used=7))
    assert not torch.equal(first, after(1, 0))
    assert not torch.equal(first, after(0, 1))


def test_progress_counts_minibatches() -> None:
    seen: list[tuple[str, int, int]] = []
    learner = Learner(tiny(), options=section(**TWO))
    with watched(lambda *told: seen.append(told)):
        learner.update(batch(8, prompts=4), version=0)
    assert seen == [("update: minibatches", 0, 2), ("update: minibatches", 1, 2)]


@pytest.mark.parametrize(
    ("schedule", "optimizer"), [("linear", "adamw"), ("cosine", "adamw_offloaded"), ("linear", "adamw_8bit")]
)
def test_a_resumed_learner_goes_on_exactly(schedule: str, optimizer: str) -> None:
    """Weights, rate, counters and metrics of updates 3 to 6 are those of a learner that never stopped."""
    options = section(lr=3e-3, optimizer=optimizer, lr_schedule=schedule, lr_warmup_updates=2, lr_decay_updates=7)
    whole, first, second = tiny(), tiny(), tiny(seed=5)
    straight = Learner(whole, options=options)
    history = [straight.update(batch(seed=v), version=v) for v in range(6)]
    before = Learner(first, options=options)
    for v in range(3):
        before.update(batch(seed=v), version=v)
    second.load_state_dict(first.state_dict())
    resumed = Learner(second, options=options)
    resumed.load_state_dict(copy.deepcopy(before.state_dict()))
    assert [resumed.update(batch(seed=v), version=v) for v in range(3, 6)] == history[3:]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    assert resumed.counters.updates == straight.counters.updates == 6
    left = {"linear": 1 / 5, "cosine": 0.5 * (1 - np.cos(np.pi / 5))}[schedule]  # of the five updates after the rise
    assert history[-1]["policy/lr"] == pytest.approx(3e-3 * left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_learns_the_same_to_the_bit(dtype: torch.dtype) -> None:
    """Microbatches, clipping and LoRA's frozen weights included; tensors keep their place."""
    found = []
    for optimizer in ("adamw", "adamw_offloaded"):
        models = [tiny(dtype=dtype), add_lora(tiny(dtype=dtype), ModelConfig(lora_rank=4), seed=0)]
        for model in models:
            places = [p.data_ptr() for p in model.parameters()]
            options = section(lr=3e-3, optimizer=optimizer, microbatch_tokens=30, max_grad_norm=0.1, **TWO)
            learner = Learner(model, options=options)
            metrics = [learner.update(batch(seed=v), version=v) for v in range(3)]
            assert metrics[0]["train/microbatches"] > 2
            assert places == [p.data_ptr() for p in model.parameters()]
            found.append((metrics, [p.detach().clone() for p in model.parameters()]))
    for plain, away in zip(found[:2], found[2:], strict=True):
        assert plain[0] == away[0]
        assert all(torch.equal(a, b) for a, b in zip(plain[1], away[1], strict=True))


def test_a_resumed_learner_keeps_its_count_of_bad_updates() -> None:
    bad = spoiled(batch(3))
    first = Learner(tiny(), options=section(max_bad_updates=2))
    first.update(bad, version=0)
    resumed = Learner(tiny(), options=section(max_bad_updates=2))
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(TrainingError, match="2 updates in a row"):
        resumed.update(bad, version=1)


def test_masked_importance_weights_reach_the_update() -> None:
    """Behaviour far off the policy: nearly every weight lies outside of the bounds, and the truncated ones do not."""
    samples = batch(6, prompts=2)
    masked = Learner(tiny(), options=section(importance_mask=(0.5, 2.0), lr=1e-9)).update(samples, version=0)
    terms = token_terms(tiny(), samples)
    weights = [np.exp(log) for log, _, _ in terms]
    kept = [w if 0.5 <= w <= 2.0 else 0.0 for w in weights]
    assert 0 < sum(w > 0 for w in kept) < len(kept)
    assert masked["policy/importance_weight"] == pytest.approx(np.mean(kept), rel=1e-4)
    loss = -np.mean([w * a for w, (_, a, _) in zip(kept, terms, strict=True)])
    assert masked["policy/loss"] == pytest.approx(loss, abs=1e-5)


def test_gspo_divides_by_samples() -> None:
    """Policy and sampler agree, so every ratio is 1 and the loss is minus the mean of the samples' mean advantages."""
    model = tiny()
    samples = [s for s in batch() if s.mask is None]
    exact = []
    for s in samples:
        logs = [log for log, _, _ in token_terms(model, [dataclasses.replace(s, logprobs=np.zeros_like(s.logprobs))])]
        exact.append(dataclasses.replace(s, logprobs=as_floats(logs)))
    options = section(loss="gspo", loss_options={"low": 0.1, "high": 0.1}, microbatch_tokens=40)
    metrics = Learner(model, options=options).update(exact, version=0)
    assert metrics["policy/loss"] == pytest.approx(-np.mean([s.advantages.mean() for s in exact]), abs=1e-4)
    assert metrics["policy/surrogate"] == pytest.approx(
        -np.mean(np.concatenate([s.advantages for s in exact])), abs=1e-4
    )
