"""The curves of the paper's figures, by hand."""

from __future__ import annotations

from dataclasses import replace

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


def cut_off(trunk):
    return replace(trunk, rollout=replace(trunk.rollout, finish="length"))


def test_groups(build):
    trunks = [build.trunk(4, r, starts=(2,), fci=[1, y], entropy=[0, 1, 0, 1]) for r, y in [(1, 2), (0.25, 5)]]
    alone = build.trunk(2, 1.0, fci=[3], entropy=[2, 2])
    groups = [Group(build.prompt(), (trunks[0], cut_off(trunks[1]))), Group(build.prompt(), (alone,))]
    assert group_statistics(groups) == {
        "trunks/accuracy": pytest.approx(2 / 3),
        "trunks/reward": pytest.approx(2.25 / 3),
        "trunks/steps": pytest.approx(5 / 3),
        "trunks/truncated_share": pytest.approx(1 / 3),
        "trunks/solve_all": 0.5,
        "trunks/solve_none": 0.0,
        "trunks/valid": 0.5,
        "score/fci_mean": pytest.approx((1 + 2 + 1 + 5 + 3) / 5),
        "score/fci_max": 5.0,
        "score/entropy": pytest.approx((2 + 2 + 2 + 2) / 10),
    }
    assert group_statistics([]) == {}


def test_scores_that_are_not_numbers_are_left_out(build):
    def trunk(fci, entropy):
        return build.trunk(2, 1.0, starts=(1,), fci=fci, entropy=entropy)

    nan = np.nan
    half = group_statistics([Group(build.prompt(), (trunk([nan, 2], [nan, 1]), trunk([4, nan], [nan, nan])))])
    assert (half["score/fci_mean"], half["score/fci_max"], half["score/entropy"]) == (3.0, 4.0, 1.0)
    none = group_statistics([Group(build.prompt(), (trunk([nan, nan], [nan, nan]),))])
    assert not [name for name in none if name.startswith("score/")]
    assert none["trunks/accuracy"] == 1.0


def test_forests(build):
    mixed = build.forest(build.tree(8, 1.0, (2, 1, 1.0), (4, 1, 0.0)), build.tree(3, 0.0))
    easy = build.forest(build.tree(4, 1.0, (1, 1, 1.0)))
    lost = build.forest(build.tree(4, 1.0, (3, 1, 1.0), (3, 1, 0.0)), build.tree(4, 1.0))  # easy, and not all right
    hard = build.forest(build.tree(4, 0.0, (2, 1, 0.0)))
    alone = build.forest(build.tree(4, 1.0))
    assert forest_statistics([mixed, easy, lost, hard, alone]) == {
        "trees/count": 4.0,
        "trees/leaves": 4.0 + 2 + 4 + 2 + 1,
        "branches/solve_all": 0.25,
        "branches/solve_none": 0.25,
        "branches/valid": 0.5,
        "both/solve_all": 0.25,
        "both/solve_none": 0.25,
        "both/valid": 0.5,
        "branches/accuracy": pytest.approx(3 / 6),
        "branches/point_share": pytest.approx((2 / 8 + 4 / 8 + 1 / 4 + 3 / 4 + 3 / 4 + 2 / 4) / 6),
        "branches/easy_solve_all": 0.5,
    }
    assert forest_statistics([alone]) == {"trees/count": 0.0, "trees/leaves": 1.0}
    assert "branches/easy_solve_all" not in forest_statistics([mixed, hard])


def test_generation(build):
    rollouts = [build.rollout(2), build.rollout(4, finish="length"), build.rollout(3)]
    assert generation_statistics(rollouts) == {
        "generate/rollouts": 3.0,
        "generate/tokens": 9.0,
        "generate/length": 3.0,
        "generate/truncated_share": pytest.approx(1 / 3),
        "generate/surprisal": pytest.approx((0 + 0.1 + 0 + 0.1 + 0.2 + 0.3 + 0 + 0.1 + 0.2) / 9),
    }
    assert generation_statistics([]) == {}


def test_samples(build):
    """Two prompts, one of them of one outcome: 8 of 14 tokens are valid."""
    mixed = build.forest(build.tree(3, 1.0), build.tree(5, 0.0))
    same = build.forest(build.tree(2, 1.0), build.tree(4, 1.0))
    every = [s for f in (mixed, same) for s in tree(f, np.random.default_rng(0))]
    assert sample_statistics(every, with_signal(every)) == {
        "train/samples": 2.0,
        "train/valid_samples": 2.0,
        "train/valid_share": 0.5,
        "train/valid_tokens": 8.0,
        "train/valid_token_share": pytest.approx(8 / 14),
        "train/response_tokens": 8.0,
    }
    kept = sample_statistics(every, every)
    assert (kept["train/samples"], kept["train/valid_samples"], kept["train/response_tokens"]) == (4, 2, 14)
    assert set(sample_statistics([], []).values()) == {0.0}


def test_tokens_without_advantage_are_not_valid():
    sample = Sample(as_ids([1]), as_ids([1, 2, 3]), as_floats([0, -1, 0]), as_floats([0, 0, 0]), "q")
    metrics = sample_statistics([sample], [sample])
    assert (metrics["train/valid_tokens"], metrics["train/valid_token_share"]) == (1, pytest.approx(1 / 3))
    one = Sample(as_ids([1]), as_ids([1]), as_floats([1]), as_floats([0]), "q")
    whole = sample_statistics([one], [one])
    assert (whole["train/valid_share"], whole["train/valid_token_share"]) == (1.0, 1.0)


def test_tokens_that_carry_no_loss_are_not_valid():
    """SPO's chain trains unsure tokens only: the others do not count."""
    mask = np.array([True, False, False])
    sample = Sample(as_ids([1]), as_ids([1, 2, 3]), as_floats([1, 1, 1]), as_floats([0, 0, 0]), "q", mask)
    assert sample_statistics([sample], [sample])["train/valid_tokens"] == 1
