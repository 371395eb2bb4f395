"""The scorer against full logits, and the parts it is made of."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from fci_oracle import longrope_model, of_family, random_case, tiny
from hypothesis import given
from hypothesis import strategies as st

from attnrl.algo.intervals import rank_correlation
from attnrl.attention.trie import bins_by_budget
from attnrl.errors import ConfigError, DataError
from attnrl.scoring import ScoreReport, fci, score
from attnrl.scoring.entropy import stats_of
from attnrl.types import ScoreRequest, Scores, Step, as_ids


def request(rng: np.random.Generator, length: int) -> ScoreRequest:
    ids, spans = random_case(rng, length)
    prompt = spans[0][0]
    return ScoreRequest(
        as_ids(ids[:prompt]), as_ids(ids[prompt:]), tuple(Step(a - prompt, b - prompt) for a, b in spans)
    )


def full_logits(model: torch.nn.Module, row: ScoreRequest, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    ids = torch.from_numpy(np.concatenate([row.prompt, row.response])).long()[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1].double() / temperature
    log_p = logits.log_softmax(-1)
    taken = log_p.gather(-1, torch.tensor(row.response.tolist())[:, None])[:, 0]
    return taken.numpy(), -(log_p.exp() * log_p).sum(-1).numpy()


@pytest.mark.parametrize("name", ["qwen2", "llama", "gemma2_window_softcap", "gpt_oss_window_sinks"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_full_logits_and_fci_alone(name: str, temperature: float) -> None:
    model, rng = tiny(name), np.random.default_rng(2)
    rows = [request(rng, n) for n in (25, 60, 6, 41)]
    report = ScoreReport()
    got = score(model, rows, temperature=temperature, token_budget=70, chunk=7, report=report)
    for row, scores in zip(rows, got, strict=True):
        logprobs, entropy = full_logits(model, row, temperature)
        assert np.abs(scores.logprobs - logprobs).max() < 5e-5
        assert np.abs(scores.entropy - entropy).max() < 5e-5
        spans = [(len(row.prompt) + s.start, len(row.prompt) + s.stop) for s in row.steps]
        alone = fci(model, np.concatenate([row.prompt, row.response]), spans)
        assert np.allclose(scores.fci, alone, rtol=0, atol=1e-6)
        assert (scores.logprobs.dtype, scores.entropy.dtype, scores.fci.dtype) == (np.float32,) * 3
    assert (report.packs, report.tokens) == (2, 132)
    assert 0 < report.fci_seconds < report.seconds
    assert report.metrics()["score/overhead"] == pytest.approx(
        report.seconds / (report.seconds - report.fci_seconds) - 1
    )
    assert report.metrics()["score/fci_torch_blocks"] == 1.0
    assert report.metrics()["score/attention_torch_blocks" if "window" in name else "score/attention_sdpa_per_sequence"]


@given(st.integers(0, 10**6), st.integers(1, 200))
def test_bins_hold_every_index_once_within_the_budget(seed: int, budget: int) -> None:
    lengths = [int(n) for n in np.random.default_rng(seed).integers(1, 90, 12)]
    bins = bins_by_budget(lengths, budget)
    assert sorted(i for members in bins for i in members) == list(range(12))
    assert all(len(members) == 1 or sum(lengths[i] for i in members) <= budget for members in bins)
    firsts = [lengths[members[0]] for members in bins]
    assert firsts == sorted(firsts, reverse=True)


def test_token_budget_does_not_change_scores() -> None:
    model, rng = tiny("qwen3"), np.random.default_rng(4)
    rows = [request(rng, int(n)) for n in rng.integers(3, 50, 9)]
    one_by_one, together = (score(model, rows, token_budget=budget) for budget in (1, 10_000))
    for a, b in zip(one_by_one, together, strict=True):
        for name in ("logprobs", "entropy", "fci"):
            assert np.allclose(getattr(a, name), getattr(b, name), rtol=0, atol=2e-5)


def test_mode_is_restored_and_fci_can_be_left_out() -> None:
    model, row = tiny("qwen2").train(), request(np.random.default_rng(0), 30)
    report = ScoreReport()
    (plain,) = score(model, [row], fci=False, report=report)
    assert model.training
    assert not plain.fci.any()
    assert report.fci_kinds == {"off"}
    assert report.overhead == 0
    (scored,) = score(model.eval(), [row])
    assert not model.training
    assert scored.fci.any()
    assert np.array_equal(scored.logprobs, plain.logprobs)
    assert not any(p.grad is not None for p in model.parameters())


def test_errors_and_no_requests() -> None:
    model = tiny("qwen2")
    assert score(model, []) == []
    row = request(np.random.default_rng(0), 9)
    with pytest.raises(DataError, match="request 1"):
        score(model, [row, ScoreRequest(row.prompt, as_ids([]), ())])


def test_one_step_response_scores_zero() -> None:
    (got,) = score(tiny("qwen2"), [ScoreRequest(as_ids([5, 6]), as_ids([7, 8, 9]), (Step(0, 3),))])
    assert isinstance(got, Scores)
    assert got.fci.tolist() == [0.0]


def test_rank_correlation_by_hand() -> None:
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
    got = rank_correlation(np.array([0.1, 0.5, 0.5, 0.9]), np.arange(4))
    assert got == pytest.approx(4.5 / np.sqrt(4.5 * 5.0))
    assert np.isnan(rank_correlation(np.ones(3), np.arange(3)))


def test_tokens_that_cannot_occur_add_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[0.0, float("-inf"), np.log(3.0)]])
    logprobs, entropy = stats_of(logits.clone(), torch.tensor([2]), 1.0)
    assert logprobs.item() == pytest.approx(np.log(0.75))
    assert entropy.item() == pytest.approx(-0.25 * np.log(0.25) - 0.75 * np.log(0.75))


def test_rope_that_depends_on_length_is_scored_as_if_alone() -> None:
    model, rng = longrope_model(), np.random.default_rng(0)
    rows = [request(rng, n) for n in (14, 40, 12, 30)]
    report = ScoreReport()
    for row, scores in zip(rows, score(model, rows, delta=1, report=report), strict=True):
        logprobs, entropy = full_logits(model, row, 1.0)
        assert np.abs(scores.logprobs - logprobs).max() < 5e-5
        assert np.abs(scores.entropy - entropy).max() < 5e-5
    assert report.packs == 3, "the two short ones share a pack, each long one is alone"


def test_bad_requests_are_named_before_anything_runs() -> None:
    model, rng = tiny("qwen2"), np.random.default_rng(0)
    good = [request(rng, n) for n in (30, 50)]
    ran: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: ran.append(1))
    bad_step = ScoreRequest(as_ids([3, 4]), as_ids([5, 6, 7]), (Step(0, 2), Step(1, 3)))
    with pytest.raises(DataError, match=r"request 1: step \(1, 3\) must be non-empty, after .* \(ends at 2\)"):
        score(model, [good[0], bad_step, good[1]], token_budget=8)
    with pytest.raises(DataError, match=r"request 0: step \(2, 9\).* within the 3 response tokens"):
        score(model, [ScoreRequest(as_ids([3]), as_ids([5, 6, 7]), (Step(2, 9),))])
    with pytest.raises(DataError, match="response of request 2: token id 61 is outside the model's vocabulary of 61"):
        score(model, [*good, ScoreRequest(as_ids([3]), as_ids([61]), (Step(0, 1),))])
    with pytest.raises(DataError, match="temperature must be above 0"):
        score(model, good, temperature=0.0)
    handle.remove()
    assert not ran
    assert score(model, []) == []


def test_a_head_with_a_transform_is_refused() -> None:
    model = of_family("modernbert-decoder", cls_token_id=1, sep_token_id=2)
    with pytest.raises(ConfigError, match="does more than project"):
        score(model, [ScoreRequest(as_ids([3, 4]), as_ids([5, 6]), (Step(0, 2),))])


def test_modules_keep_their_own_training_flag() -> None:
    model = tiny("llama").train()
    model.model.layers[0].eval()
    score(model, [request(np.random.default_rng(0), 20)])
    assert model.training
    assert model.model.layers[1].training
    assert not model.model.layers[0].training


LONG = """
import resource
import numpy as np, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from attnrl.local.models import prepare_model
from attnrl.scoring import score
from attnrl.types import ScoreRequest, Step, as_ids

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6

torch.set_num_threads(1)
shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
model = prepare_model(Qwen2ForCausalLM(Qwen2Config(vocab_size=151_936, tie_word_embeddings=True, **shape)))
ids = as_ids(np.random.default_rng(0).integers(1, 1000, 1500))
before = peak()
(found,) = score(model, [ScoreRequest(ids[:20], ids, tuple(Step(a, a + 20) for a in range(0, 1500, 20)))])
assert found.logprobs.shape == found.entropy.shape == (1500,) and (found.logprobs < 0).all()
print(peak() - before)
"""


def test_memory_does_not_grow_by_the_logits_of_every_chunk() -> None:
    """1,500 tokens of a vocabulary as real models have it: their logits are 0.9 GB, those of a chunk 33 MB."""
    answer = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=True)
    assert float(answer.stdout) < 0.5
