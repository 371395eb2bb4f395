"""Drawing tokens: hand-computed truncations and draws, a plain-integer generator, and a naive reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl.errors import ConfigError
from attnrl.local import draw as draws
from attnrl.local.draw import check_sampling, draw, invert_cdf, kept_tokens, stream_of, uniforms
from attnrl.types import Sampling

WORD = (1 << 64) - 1


def plain_uniform(seed: int, index: int) -> float:
    """The same generator in Python's unbounded integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    start = mix((seed + gamma) & WORD)
    return (mix((start + (index + 1) * gamma) & WORD) >> 40) / (1 << 24)


def reference(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The sampling distribution in float64, token by token."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    total = sum(weights.values())
    kept, mass = [], 0.0
    for i in order:
        if mass >= sampling.top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    probs = np.zeros(len(scaled))
    for i in kept:
        probs[i] = weights[i] / sum(weights[j] for j in kept)
    return probs


def logits_of(probs: list[float]) -> torch.Tensor:
    return torch.tensor([probs]).log()


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**31))
def test_uniforms_equal_the_generator_in_plain_integers(seed: int, index: int) -> None:
    got = uniforms(torch.tensor([stream_of(seed)]), torch.tensor([index]))
    assert float(got[0]) == plain_uniform(seed, index)


def test_neighbouring_streams_are_uniform_and_uncorrelated() -> None:
    streams = torch.tensor([stream_of(seed) for seed in range(400)])
    grid = torch.stack([uniforms(streams, torch.full_like(streams, t)) for t in range(400)]).double()
    counts = torch.histc(grid.float(), bins=64, min=0, max=1)
    expected = grid.numel() / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 30 < chi_square < 110  # 63 degrees of freedom: beyond both ends with probability below 1e-3
    centred = grid - 0.5
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(float(shifted.mean()) * 12) < 5 / math.sqrt(shifted.numel())


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.24, 1), (0.26, 2), (0.74, 2), (0.76, 4), (1 - 2**-24, 4)])
def test_inverse_cdf_by_hand(uniform: float, token: int) -> None:
    """Bounds at 0.25 and 0.75; tokens 0, 3 and 5 are impossible, at the very ends too."""
    probs = torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25, 0.0]])
    assert int(invert_cdf(probs, torch.tensor([uniform]))[0]) == token


def test_probabilities_that_do_not_sum_to_one_are_renormalised() -> None:
    probs = torch.tensor([[0.25, 0.5, 0.25]]) * 0.999
    uniform = torch.tensor([1 - 2**-24])
    assert int(invert_cdf(probs, uniform)[0]) == 2
    # The cumulative 0.74925 is 0.75 of the total: 0.7499 lies below the bound only if it counts in shares of the total.
    assert int(invert_cdf(probs, torch.tensor([0.7499]))[0]) == 1
    assert int(invert_cdf(probs, torch.tensor([0.7501]))[0]) == 2


def test_top_k_by_hand() -> None:
    logits = logits_of([0.1, 0.4, 0.2, 0.3])
    assert kept_tokens(logits, Sampling(top_k=2)).tolist() == [[False, True, False, True]]
    ids, logprobs = draw(logits.repeat(2, 1), torch.tensor([0.57, 0.58]), Sampling(top_k=2))
    assert ids.tolist() == [1, 3]  # the bound lies at 4/7 = 0.5714
    np.testing.assert_allclose(logprobs.numpy(), np.log([4 / 7, 3 / 7]), atol=1e-6)


def test_top_p_by_hand() -> None:
    logits = logits_of([0.1, 0.4, 0.2, 0.3])
    assert kept_tokens(logits, Sampling(top_p=0.39)).tolist() == [[False, True, False, False]]
    assert kept_tokens(logits, Sampling(top_p=0.41)).tolist() == [[False, True, False, True]]
    assert kept_tokens(logits, Sampling(top_p=0.75)).tolist() == [[False, True, True, True]]
    ids, logprobs = draw(logits, torch.tensor([0.0]), Sampling(top_p=0.39))
    assert ids.tolist() == [1]
    assert float(logprobs[0]) == 0.0  # the only token left


def test_top_p_counts_what_top_k_left() -> None:
    """Of 0.4, 0.3 the first is 4/7 = 0.571 of what is left: enough for top_p 0.55, though not of the whole."""
    logits = logits_of([0.1, 0.4, 0.2, 0.3])
    assert kept_tokens(logits, Sampling(top_k=2, top_p=0.55)).tolist() == [[False, True, False, False]]


def test_equal_logits_keep_the_lowest_ids() -> None:
    assert kept_tokens(torch.zeros(1, 4), Sampling(top_k=2)).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("few", [1, 4, 1024])
@pytest.mark.parametrize(
    "sampling", [Sampling(top_p=0.37), Sampling(top_p=0.93), Sampling(top_k=7), Sampling(1, 0.77, 9)]
)
def test_few_of_the_likeliest_tokens_tell_which_are_kept(
    few: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by sorting them all: of rows that are peaked and flat, with equals at the cut and tokens that cannot be."""
    monkeypatch.setattr(draws, "FEW", few)
    rng = np.random.default_rng(0)
    rows = rng.normal(0, rng.choice([0.01, 1, 9], (200, 1)), (200, 31)).astype(np.float32)
    rows[::3] = rows[::3].round(1)
    rows[::7, 5:] = -np.inf
    logits = torch.from_numpy(rows)
    assert torch.equal(kept_tokens(logits, sampling), draws._kept_by_sorting(logits, sampling))


def test_temperature_sharpens_by_hand() -> None:
    """At T = 0.5 probabilities are squared: 0.2, 0.8 become 1/17, 16/17."""
    ids, logprobs = draw(logits_of([0.2, 0.8]).repeat(2, 1), torch.tensor([0.058, 0.059]), Sampling(temperature=0.5))
    assert ids.tolist() == [0, 1]  # 1/17 = 0.0588
    np.testing.assert_allclose(logprobs.numpy(), np.log([1 / 17, 16 / 17]), atol=1e-6)


def test_greedy_is_a_point_mass_on_the_lowest_of_equals() -> None:
    ids, logprobs = draw(torch.tensor([[1.0, 3.0, 3.0]]), torch.tensor([0.99]), Sampling(temperature=0))
    assert (ids.tolist(), logprobs.tolist()) == ([1], [0.0])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    st.integers(0, 12),
)
def test_draws_and_logprobs_equal_a_naive_reference(seed: int, temperature: float, top_p: float, top_k: int) -> None:
    sampling = Sampling(temperature, top_p, top_k)
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (8, 11)).astype(np.float32)
    uniform = rng.random(8).astype(np.float32)
    ids, logprobs = draw(torch.from_numpy(logits), torch.from_numpy(uniform), sampling)
    for row in range(8):
        probs = reference(logits[row], sampling)
        bounds = np.concatenate([[0.0], np.cumsum(probs)])
        token = int(ids[row])
        assert bounds[token] - 1e-5 <= uniform[row] <= bounds[token + 1] + 1e-5
        assert probs[token] > 0
        assert float(logprobs[row]) == pytest.approx(math.log(probs[token]), abs=1e-4)


def test_drawn_shares_follow_the_distribution() -> None:
    probs = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    streams = torch.tensor([stream_of(seed) for seed in range(20000)])
    logits = torch.from_numpy(np.log(probs)).float().expand(20000, -1)
    ids, _ = draw(logits, uniforms(streams, torch.zeros_like(streams)), Sampling())
    counts = np.bincount(ids.numpy(), minlength=5)
    chi_square = float(((counts - 20000 * probs) ** 2 / (20000 * probs)).sum())
    assert chi_square < 18.5  # 4 degrees of freedom: beyond it with probability below 1e-3


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = torch.linspace(-2, 2, 300).bfloat16()[None]
    ids, logprobs = draw(logits, torch.tensor([0.5]), Sampling())
    expected = torch.log_softmax(logits[0].double(), -1)[ids[0]]
    assert logprobs.dtype == torch.float32
    assert float(logprobs[0]) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(
    ("sampling", "key"),
    [
        (Sampling(temperature=-1), "temperature"),
        (Sampling(temperature=math.nan), "temperature"),
        (Sampling(top_p=0), "top_p"),
        (Sampling(top_p=1.1), "top_p"),
        (Sampling(top_k=-1), "top_k"),
    ],
)
def test_a_knob_out_of_range_is_named(sampling: Sampling, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check_sampling(sampling)
