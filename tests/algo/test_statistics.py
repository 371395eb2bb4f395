"""The curves of the paper's figures, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from attnrl.algo.advantages import tree
from attnrl.algo.samples import with_signal
from attnrl.algo.statistics import (
    forest_statistics,
    generation_statistics,
    group_statistics,
    sample_statistics,
    solve_ratios,
)
from attnrl.types import Group, Sample, as_floats, as_ids


def test_solve_ratios_leave_prompts_without_responses_out(build):
    rows = [build.group(*rewards).trunks if rewards else () for rewards in ((1, 1), (), (1, 0), (0,))]
    assert solve_ratios("x", rows) == {
        "x/solve_all": pytest.approx(1 / 3),
        "x/solve_none": pytest.approx(1 / 3),
        "x/valid": pytest.approx(1 / 3),
    }
    assert solve_ratios("x", []) == {}


def test_right_decides_who_is_solved_and_spread_who_is_valid(build):
    """Rewards of 0.9 and 0.7 are both right, and there is something to learn; three times 0.2 teaches nothing."""
    rows = [build.group(0.9, 0.7).trunks, build.group(0.2, 0.2, 0.2).trunks]
    assert solve_ratios("x", rows) == {"x/solve_all": 0.5, "x/solve_none": 0.5, "x/valid": 0.5}


def test_groups(build):
    trunks = tuple(build.trunk(4, r, starts=(2,), fci=[1, y], entropy=[0, 1, 0, 1]) for r, y in [(1, 2), (0, 5)])
    metrics = group_statistics([Group(build.prompt(), trunks)])
    assert metrics["trunks/accuracy"] == 0.5
    assert metrics["trunks/steps"] == 2
    assert metrics["trunks/valid"] == 1.0
    assert metrics["score/fci_mean"] == pytest.approx((1 + 2 + 1 + 5) / 4)
    assert metrics["score/fci_max"] == 5
    assert metrics["score/entropy"] == 0.5


def test_forests(build):
    mixed = build.forest(build.tree(8, 1.0, (2, 1, 1.0), (4, 1, 0.0)), build.tree(3, 0.0))
    easy = build.forest(build.tree(4, 1.0, (1, 1, 1.0)))
    alone = build.forest(build.tree(4, 1.0))
    metrics = forest_statistics([mixed, easy, alone])
    assert metrics["trees/count"] == 2
    assert metrics["trees/leaves"] == 3 + 1 + 2 + 1
    assert metrics["branches/accuracy"] == pytest.approx(2 / 3)
    assert (metrics["branches/solve_all"], metrics["branches/valid"]) == (0.5, 0.5)
    assert (metrics["both/solve_all"], metrics["both/valid"]) == (0.5, 0.5)
    assert metrics["branches/point_share"] == pytest.approx((2 / 8 + 4 / 8 + 1 / 4) / 3)
    assert metrics["branches/easy_solve_all"] == 1.0


def test_generation(build):
    rollouts = [build.rollout(2), build.rollout(4, finish="length")]
    metrics = generation_statistics(rollouts)
    assert (metrics["generate/rollouts"], metrics["generate/tokens"], metrics["generate/length"]) == (2, 6, 3)
    assert metrics["generate/truncated_share"] == 0.5
    assert metrics["generate/surprisal"] == pytest.approx((0 + 0.1 + 0 + 0.1 + 0.2 + 0.3) / 6)


def test_samples(build):
    """Two prompts, one of them of one outcome: 8 of 14 tokens are valid."""
    mixed = build.forest(build.tree(3, 1.0), build.tree(5, 0.0))
    same = build.forest(build.tree(2, 1.0), build.tree(4, 1.0))
    every = [s for f in (mixed, same) for s in tree(f, np.random.default_rng(0))]
    metrics = sample_statistics(every, with_signal(every))
    assert metrics["train/samples"] == metrics["train/valid_samples"] == 2
    assert metrics["train/valid_share"] == 0.5
    assert metrics["train/valid_tokens"] == 8
    assert metrics["train/valid_token_share"] == pytest.approx(8 / 14)
    assert metrics["train/response_tokens"] == 8


def test_tokens_that_carry_no_loss_are_not_valid():
    """SPO's chain trains unsure tokens only: the others do not count."""
    mask = np.array([True, False, False])
    sample = Sample(as_ids([1]), as_ids([1, 2, 3]), as_floats([1, 1, 1]), as_floats([0, 0, 0]), "q", mask)
    assert sample_statistics([sample], [sample])["train/valid_tokens"] == 1
