"""Every step, tree and prompt says why; the reasons agree with what the rule does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.algo.branching import candidates, fci
from attnrl.algo.reasons import (
    PROMPT_REASONS,
    STEP_REASONS,
    TREE_REASONS,
    declared_by,
    explain,
    kind_of,
    step_reasons,
)
from attnrl.algo.rules import RULES
from attnrl.types import Rollout, Scores, Step, Tree, Trunk, Verdict, as_floats, as_ids


def cut_off(tree: Tree) -> Tree:
    trunk = tree.trunk
    return replace(tree, trunk=replace(trunk, rollout=replace(trunk.rollout, finish="length")))


class TestSteps:
    def test_each_reason_by_hand(self, build):
        # ten steps of one token; candidates 1..8, step 9 is the answer. delta 2: steps 8 and 9 have fewer than two
        # followers. Candidates' scores 9 1 8 7 1 1 1 0: quantile 0.6 of eight is position 4.2 of the sorted scores
        # (0 1 1 1 1 7 8 9), 1 + 0.2 * 6 = 2.2. So C = {1, 3, 4}; two points: 1 and 3; step 4 comes too late.
        trunk = build.trunk(10, 1.0, starts=range(1, 10), fci=[5, 9, 1, 8, 7, 1, 1, 1, 0, 0], thinking=9)
        points = fci(build.prompt(), trunk, np.random.default_rng(0), points=2, top_fraction=0.4)
        assert points == (1, 3)
        found = step_reasons(trunk, points, delta=2, top_fraction=0.4)
        assert [kind_of(r) for r in found] == [
            *("first", "point", "low", "point", "later", "low", "low", "low", "near_end", "answer")
        ]
        assert found[8] == "near_end: 1 of 2 steps follow"

    def test_the_gap_is_a_reason(self, build):
        trunk = build.trunk(10, 1.0, starts=range(1, 10), fci=[0, 9, 9, 9, 9, 1, 1, 1, 0, 0])
        points = fci(build.prompt(), trunk, np.random.default_rng(0), points=2, top_fraction=0.4, min_gap_tokens=3)
        assert points == (3, 6)  # 1 and 2 are too near the start, 4 too near 3, 6 fills up
        found = [kind_of(r) for r in step_reasons(trunk, points, delta=2, top_fraction=0.4, min_gap_tokens=3)]
        assert found == ["first", "gap", "gap", "point", "gap", "low", "point", "low", "near_end", "near_end"]

    def test_a_rule_without_fci(self, build):
        trunk = build.trunk(6, 1.0, starts=(2, 4), fci=[np.nan] * 3)
        assert step_reasons(trunk, (3,), by_fci=False) == ("first", "point", "rule")
        assert step_reasons(trunk, (3,)) == ("first", "point", "unscored")

    def test_a_rule_that_reads_fci_in_its_own_way_is_not_explained_by_the_quantile(self, build):
        trunk = build.trunk(6, 1.0, starts=(1, 2, 3, 4, 5), fci=[0, 1, 9, 2, 3, 0])
        mine = {"by_quantile": False, "delta": 2, "top_fraction": 0.3}
        assert step_reasons(trunk, (1,), **mine) == (
            *("first", "point", "rule", "rule", "near_end: 1 of 2 steps follow", "near_end: 0 of 2 steps follow"),
        )
        assert kind_of(step_reasons(trunk, (1,), delta=2, top_fraction=0.3)[2]) == "later"  # by Eq. 7

    def test_what_rules_declare(self):
        declared = {name: declared_by(partial(rule)) for name, rule in RULES.items()}
        assert [name for name, said in declared.items() if said["by_quantile"]] == ["fci"]
        assert {name for name, said in declared.items() if "fci" in said["reads"]} == {
            "fci",
            "fci_residual",
            "fci_ratio",
            "fci_mean",
        }
        assert declared_by(lambda prompt, trunk, rng: ())["reads"] == ["entropy", "fci", "logprobs"]

    @given(st.lists(st.integers(0, 9), min_size=1, max_size=14), st.integers(1, 3), st.integers(0, 4), st.data())
    def test_they_agree_with_the_rule(self, scores, points, gap, data):
        """A step the rule took is a point; one it may never take says first or answer."""
        tokens = len(scores)
        end = data.draw(st.integers(1, tokens))
        steps = tuple(Step(i, i + 1, thinking=i < end) for i in range(tokens))
        rollout = Rollout(as_ids(range(tokens)), as_floats(np.zeros(tokens)), "stop", 0)
        trunk = Trunk(rollout, Verdict(1.0, "x"), steps, Scores(rollout.logprobs, rollout.logprobs, as_floats(scores)))
        options = {"top_fraction": 0.3, "min_gap_tokens": gap}
        chosen = fci(None, trunk, np.random.default_rng(0), points=points, **options)
        kinds = [kind_of(r) for r in step_reasons(trunk, chosen, delta=1, **options)]
        assert [k for k, kind in enumerate(kinds) if kind == "point"] == list(chosen)
        assert {k for k, kind in enumerate(kinds) if kind not in ("first", "answer")} == set(candidates(steps))
        assert set(kinds) <= set(STEP_REASONS)


class TestTrees:
    def test_each_reason(self, build):
        forest = build.forest(
            build.tree(8, 1.0, (3, 4, 0.0)),
            Tree(build.trunk(8, 1.0, starts=(4,), fci=[1, 1])),  # could, but was not chosen
            Tree(build.trunk(8, 1.0)),  # one step
            cut_off(Tree(build.trunk(8, 0.0))),
            Tree(build.trunk(8, 1.0, starts=(4,), fci=[1, 1])),  # planned, its branches were errors
        )
        found = explain(forest, planned=[(3,), (), (), (), (4,)], taught=True)
        assert found.prompt == "taught"
        assert found.trees == (
            "branched",
            "budget: 1 of 5 branched",
            "no_candidate: 1 step",
            "no_candidate: 1 step, and the trunk was cut off",
            "error: 1 points were planned",
        )
        assert explain(forest, planned=[(3,), (), (), (), ()], taught=True, chosen={0, 4}).trees[4] == (
            "rule: no place fits"
        )
        assert explain(forest, planned=None, taught=True, branching=False).trees[1] == "no_rule"
        assert {kind_of(r) for r in found.trees} <= set(TREE_REASONS)

    def test_a_dropped_prompt(self, build):
        forest = build.forest(build.tree(5, 1.0), build.tree(5, 1.0))
        found = explain(forest, planned=None, taught=False, dropped="mean FCI 0.012 under 0.015")
        assert found.prompt == "filtered: mean FCI 0.012 under 0.015"
        assert found.trees == ("filtered", "filtered")


@pytest.mark.parametrize(
    ("rewards", "finish", "expected"),
    [
        ((1.0, 1.0), "stop", "all_right: 2 responses"),
        ((0.0, 0.0), "stop", "all_wrong: 2 responses"),
        ((0.0, 0.0), "length", "all_cut_off: 2 responses"),
        ((1.0, 0.0), "stop", "no_signal: 1 of 2 right"),
    ],
)
def test_a_prompt_that_taught_nothing(build, rewards, finish, expected):
    trees = [build.tree(5, r) for r in rewards]
    forest = build.forest(*(cut_off(t) if finish == "length" else t for t in trees))
    assert explain(forest, planned=None, taught=False).prompt == expected
    assert kind_of(expected) in PROMPT_REASONS


def test_a_prompt_without_trees(build):
    assert explain(build.forest(), planned=None, taught=False).prompt == "error"
