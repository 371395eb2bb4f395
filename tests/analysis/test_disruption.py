"""The choice of steps and the statistics of the disruption experiment, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attnrl.analysis.disruption import Trial, by_position, choose_steps, contrast, effects
from attnrl.analysis.intervals import wilson
from attnrl.types import Step


def steps(n: int, thinking: int | None = None) -> list[Step]:
    return [Step(10 * k, 10 * k + 10, thinking is None or k < thinking) for k in range(n)]


def test_each_type_takes_its_step() -> None:
    # eleven steps, the last has nothing after it: ten to choose from, two of them the highest fifth
    fci = [9, 0, 8, 1, 1, 1, 1, 1, 1, 0, 99]
    entropy = [0, 0, 0, 0, 0, 7, 0, 0, 6, 0, 99]
    found = [choose_steps(fci, entropy, steps(11), np.random.default_rng(seed)) for seed in range(60)]
    assert {c["fci_top"] for c in found} == {0, 2}
    assert {c["fci_rest"] for c in found} == {1, 3, 4, 5, 6, 7, 8, 9}
    assert {c["entropy_top"] for c in found} == {5, 8}
    assert {(c["fci_top"], c["matched"]) for c in found} == {(0, 1), (2, 1)}


def test_too_few_steps_of_thinking() -> None:
    flat = [1.0] * 9
    assert choose_steps(flat, flat, steps(5), np.random.default_rng(0)) == {}
    assert choose_steps(flat, flat, steps(9, thinking=4), np.random.default_rng(0)) == {}
    assert choose_steps(flat, flat, steps(9, thinking=5), np.random.default_rng(0))
    assert choose_steps([math.nan] * 9, flat, steps(9), np.random.default_rng(0)) == {}


def trial(response: int, kind: str, intact: bool, disrupted: bool, position: float = 0.1) -> Trial:
    return Trial(f"q{response // 2}", response, kind, 0, position, True, intact, disrupted)


def test_effects_by_hand() -> None:
    trials = [trial(i, "fci_top", True, i % 4 == 0) for i in range(40)]
    trials += [trial(i, "fci_rest", True, i % 4 != 0) for i in range(40)]
    top, rest = effects(trials)
    assert (top.trials, top.intact, top.disrupted, top.drop, top.normalized) == (40, 1.0, 0.25, 0.75, 0.25)
    assert rest.drop == pytest.approx(0.25)
    assert top.drop_low < 0.75 < top.drop_high
    points, low, high = contrast(trials, "fci_top", "fci_rest")
    assert points == pytest.approx(0.5)
    assert low < 0.5 < high
    assert math.isnan(contrast(trials, "fci_top", "matched")[0])


def test_responses_of_one_prompt_are_one_draw() -> None:
    """Two responses that always agree carry the evidence of one: whole prompts are resampled."""
    alike = [trial(i, "fci_top", True, (i // 2) % 2 == 0) for i in range(40)]
    (effect,) = effects(alike)
    apart = [Trial(f"q{t.response}", *[getattr(t, n) for n in Trial.__slots__[1:]]) for t in alike]
    (independent,) = effects(apart)
    width, narrow = (e.disrupted_high - e.disrupted_low for e in (effect, independent))
    assert width == pytest.approx(narrow * 2**0.5, rel=0.15)


def test_five_bins() -> None:
    trials = [trial(i, "fci_top", True, i < 2, position) for i, position in enumerate([0.0, 0.19, 0.2, 0.99, 1.0])]
    assert [(n, None if math.isnan(a) else a) for n, a, _, _ in by_position(trials)] == [
        *((2, 1.0), (1, 0.0), (0, None), (0, None), (2, 0.0))
    ]


def test_an_interval_holds_its_share_to_the_last_digit() -> None:
    # a figure draws share - low and high - share; rounding made 0 of 3 and 4 of 4, among many, fall below 0
    bounds = {(right, n): wilson(right, n) for n in range(1, 80) for right in (0, n)}
    assert all(low <= right / n <= high for (right, n), (low, high) in bounds.items())
    assert bounds[0, 3][0] == 0.0
    assert bounds[4, 4][1] == 1.0
