"""Plans, requests and planting: what is asked for, and that it comes back to the tree it was asked for."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrl.algo.adaptive import all_trees, difficulty_trees
from attnrl.algo.forest import (
    Plan,
    branch_requests,
    plan,
    plant,
    trunk_requests,
    unscored,
    untrained,
    whole_responses,
)
from attnrl.errors import AttnRLError
from attnrl.types import Group, Rollout, Verdict, as_floats, as_ids

LIMIT = 40


def middle(prompt, trunk, rng):
    """A rule for tests: the middle token, where there is an inner one."""
    tokens = len(trunk.rollout.ids)
    return (tokens // 2,) if tokens > 1 else ()


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.fixture
def group(build):
    """Three trunks of different lengths whose token ids tell them apart."""
    trunks = [build.trunk(n, r, first=f) for n, r, f in [(6, 1.0, 0), (3, 0.0, 100), (9, 0.0, 200)]]
    return Group(build.prompt(tokens=2), tuple(trunks))


@pytest.fixture
def planned(group):
    return Plan(group, ((2, 4), (), (5,)))


class TestPlan:
    def test_every_trunk(self, group):
        assert plan(group, rule=middle, budget=all_trees, trunks=3, rng=rng()).points == ((3,), (1,), (4,))

    def test_budget_sees_accuracy_and_group_size(self, group):
        seen = []
        plan(group, rule=middle, budget=lambda z, g: seen.append((z, g)) or 0, trunks=3, rng=rng())
        assert seen == [(pytest.approx(1 / 3), 3)]

    def test_difficulty_budget_branches_the_minority_first(self, group):
        # accuracy 1/3 of 3 trunks: round(exp(-1/3) * 3) = round(2.15) = 2, the right trunk and one of the others
        for seed in range(10):
            points = plan(group, rule=middle, budget=difficulty_trees, trunks=3, rng=rng(seed)).points
            assert points[0] == (3,)
            assert sum(p != () for p in points) == 2

    def test_the_budget_counts_trunks_that_were_drawn_not_those_left(self, group):
        # six drawn, three lost to errors: round(exp(-1/3) * 6) = round(4.3) = 4 trees, so all three are taken
        planned = plan(group, rule=middle, budget=difficulty_trees, trunks=6, rng=rng())
        assert planned.chosen == {0, 1, 2}
        assert all(planned.points)

    def test_same_seed_same_plan(self, group):
        points = [plan(group, rule=middle, budget=lambda z, g: 2, trunks=3, rng=rng(7)).points for _ in range(2)]
        assert points[0] == points[1]

    @pytest.mark.parametrize("bad", [0, 3, -1])
    def test_a_rule_that_leaves_the_response_is_named(self, group, bad):
        def my_rule(prompt, trunk, rng):
            return (bad,)

        for rule in (my_rule, partial(my_rule)):  # a rule with its options bound is named like itself
            with pytest.raises(AttnRLError, match=r"algo\.rule: the rule my_rule must return branch points"):
                plan(Group(group.prompt, group.trunks[1:2]), rule=rule, budget=all_trees, trunks=3, rng=rng())


class TestRequests:
    def test_trunks(self, build):
        requests = trunk_requests(build.prompt(), group=6, max_tokens=LIMIT, rng=rng())
        assert [r.context.tolist() for r in requests] == [[900, 901]] * 6
        assert [r.max_tokens for r in requests] == [LIMIT] * 6
        assert len({r.seed for r in requests}) == 6
        assert [r.tree for r in requests] == [f"q/{n}" for n in range(6)]

    def test_a_thousand_seeds_are_a_thousand(self, build):
        requests = trunk_requests(build.prompt(), group=1000, max_tokens=LIMIT, rng=rng())
        assert len({r.seed for r in requests}) == 1000
        assert max(r.seed for r in requests) > 2**62

    def test_branches_by_hand(self, planned):
        requests = branch_requests(planned, width=2, max_tokens=10, rng=rng())
        first, second, third = [900, 901, 0, 1], [900, 901, 0, 1, 2, 3], [900, 901, 200, 201, 202, 203, 204]
        assert [r.context.tolist() for r in requests] == [first, first, second, second, third, third]
        assert [r.max_tokens for r in requests] == [8, 8, 6, 6, 5, 5]  # what the prefix left of ten
        assert len({r.seed for r in requests}) == 6
        assert [r.tree for r in requests] == ["q/0", "q/0", "q/0", "q/0", "q/2", "q/2"]  # their trunk's

    def test_a_prefix_that_fills_the_limit_is_refused(self, planned):
        """Trunks from before a change of the limit: no request for zero tokens."""
        with pytest.raises(AttnRLError, match="response limit"):
            branch_requests(planned, width=2, max_tokens=5, rng=rng())

    def test_thirty_leaves(self, build):
        """Six trunks, two points each, width 2: 6 * (1 + 2 * 2) = 30 leaves."""
        trunks = tuple(build.trunk(9, 1.0, starts=(3, 6)) for _ in range(6))
        asked = Plan(Group(build.prompt(), trunks), ((3, 6),) * 6)
        assert 6 + len(branch_requests(asked, width=2, max_tokens=9, rng=rng())) == 30


def drawn(n, first=500):
    """`n` rollouts of growing length, told apart by their ids."""
    return [
        Rollout(as_ids([first + 10 * i] * (i + 1)), as_floats(-np.ones(i + 1)), "stop", version=3) for i in range(n)
    ]


class TestPlant:
    def test_whole_responses_by_hand(self, planned):
        texts = [r.tolist() for r in whole_responses(planned, drawn(3), width=1)]
        assert texts == [[0, 1, 500], [0, 1, 2, 3, 510, 510], [200, 201, 202, 203, 204, 520, 520, 520]]

    def test_branches_return_to_their_tree_and_point(self, planned):
        verdicts = [Verdict(float(i % 2), "number") for i in range(6)]
        forest = plant(planned, drawn(6), verdicts, width=2)
        assert [[b.point for b in t.branches] for t in forest.trees] == [[2, 2, 4, 4], [], [5, 5]]
        assert [[len(b.rollout.ids) for b in t.branches] for t in forest.trees] == [[1, 2, 3, 4], [], [5, 6]]
        assert [[b.reward for b in t.branches] for t in forest.trees] == [[0, 1, 0, 1], [], [0, 1]]
        assert [t.trunk for t in forest.trees] == list(planned.group.trunks)
        assert forest.prompt is planned.group.prompt

    def test_an_error_is_no_evidence(self, planned):
        verdicts = [Verdict(1.0, "number"), Verdict(0.0, "none", error="timeout"), Verdict(0.0, "number")]
        forest = plant(planned, drawn(3), verdicts, width=1)
        assert [[b.point for b in t.branches] for t in forest.trees] == [[2], [], [5]]

    def test_a_missing_rollout_is_noticed(self, planned):
        with pytest.raises(ValueError, match="zip"):
            plant(planned, drawn(5), [Verdict(1.0, "number")] * 6, width=2)


def test_a_prompt_left_out_keeps_its_trunks_and_the_reason(group):
    forest = untrained(group, "all trunks right")
    assert forest.prompt is group.prompt
    assert [(t.trunk, t.branches) for t in forest.trees] == [(trunk, ()) for trunk in group.trunks]
    assert forest.reason == "all trunks right"


def test_scores_nobody_asked_for_are_the_samplers_and_no_numbers(build):
    rollout = build.rollout(5)
    scores = unscored(rollout, build.steps(2, tokens=5))
    assert scores.logprobs is rollout.logprobs
    for missing, length in [(scores.entropy, 5), (scores.fci, 2)]:  # of the tokens, of the steps
        assert missing.dtype == np.float32
        assert missing.shape == (length,)
        assert np.isnan(missing).all()


@st.composite
def plans(draw):
    """Trunk lengths, and for each its inner points (a point may be named twice)."""
    trunks = []
    for _ in range(draw(st.integers(1, 5))):
        tokens = draw(st.integers(1, LIMIT))
        points = draw(st.lists(st.integers(1, tokens - 1), max_size=4)) if tokens > 1 else []
        trunks.append((tokens, tuple(sorted(points))))
    return trunks


@given(data=plans(), width=st.integers(1, 3))
def test_requests_are_strict_prefixes_and_ask_for_at_least_one_token(build, data, width):
    trunks = tuple(build.trunk(n, 1.0, first=1000 * i) for i, (n, _) in enumerate(data))
    prompt = build.prompt()
    asked = Plan(Group(prompt, trunks), tuple(points for _, points in data))
    requests = branch_requests(asked, width=width, max_tokens=LIMIT, rng=rng())
    expected = [
        (trunk, p) for trunk, (_, points) in zip(trunks, data, strict=True) for p in points for _ in range(width)
    ]
    assert len(requests) == len(expected)
    for request, (trunk, point) in zip(requests, expected, strict=True):
        head, kept = request.context[: len(prompt.ids)], request.context[len(prompt.ids) :]
        assert head.tolist() == prompt.ids.tolist()
        assert 0 < len(kept) == point < len(trunk.rollout.ids)
        assert kept.tolist() == trunk.rollout.ids[:point].tolist()
        assert request.max_tokens >= 1
        assert len(kept) + request.max_tokens == LIMIT
        assert request.context.dtype == np.int32


@given(data=plans(), width=st.integers(1, 3))
def test_nothing_is_lost_between_request_and_forest(build, data, width):
    trunks = tuple(build.trunk(n, 1.0, first=1000 * i) for i, (n, _) in enumerate(data))
    asked = Plan(Group(build.prompt(), trunks), tuple(points for _, points in data))
    requests = branch_requests(asked, width=width, max_tokens=LIMIT, rng=rng())
    rollouts = drawn(len(requests), first=50_000)
    wholes = whole_responses(asked, rollouts, width=width)
    forest = plant(asked, rollouts, [Verdict(1.0, "number")] * len(requests), width=width)
    branches = [(t, b) for t in forest.trees for b in t.branches]
    assert [b.rollout for _, b in branches] == rollouts
    for (t, b), whole, request in zip(branches, wholes, requests, strict=True):
        assert whole.tolist() == [*t.trunk.rollout.ids[: b.point].tolist(), *b.rollout.ids.tolist()]
        assert whole[: b.point].tolist() == request.context[2:].tolist()
