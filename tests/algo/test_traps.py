"""Mistakes seen in released code of tree-based RL. Each test fails on its trap, shown beside it.

Elsewhere: padding rows that carry KL loss (tests/local), truncated answers counted as right, a verifier's exception
scored as "wrong" for a whole batch (tests/test_iteration.py), resume state (tests/test_trainer.py).
"""

from __future__ import annotations

import signal
from contextlib import contextmanager

import numpy as np
import pytest

from attnrl.algo.adaptive import all_trees, attention, mean_fci
from attnrl.algo.advantages import ESTIMATORS, tree
from attnrl.algo.branching import RULES
from attnrl.algo.forest import Plan, branch_requests, plan, plant, whole_responses
from attnrl.algo.samples import with_signal
from attnrl.algo.steps import SEGMENTERS, blank_lines
from attnrl.types import Group, Prompt, Rollout, Verdict, as_floats, as_ids, content_hash


@contextmanager
def within(seconds: int):
    """Fails a block that has not ended by then, so that an endless loop is a failure and no hang."""

    def give_up(number, frame):
        raise AssertionError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class TestOneStepResponses:
    """Trap: `while len(points) < N: draw a step other than the first`, endless on a response of one step."""

    @pytest.mark.parametrize("tokens", [1, 2, 50])
    @pytest.mark.parametrize("name", sorted(RULES))
    def test_every_rule_ends(self, build, name, tokens):
        trunk = build.trunk(tokens, 1.0, fci=[3.0])
        with within(5):
            points = RULES[name](build.prompt(), trunk, np.random.default_rng(0))
        if name in ("fci", "random_steps", "every_step"):
            assert points == ()  # a rule of steps has nowhere to branch
        assert all(0 < p < tokens for p in points)

    @pytest.mark.parametrize("mode", ["paper", "released"])
    def test_fci_ends_where_every_step_is_the_answer_or_nothing_keeps_the_gap(self, build, mode):
        answer = build.trunk(9, 1.0, starts=(3, 6), fci=[1, 1, 1], thinking=0)
        close = build.trunk(9, 1.0, starts=(3, 6), fci=[1, 1, 1])
        with within(5):
            assert RULES["fci"](build.prompt(), answer, np.random.default_rng(0), mode=mode) == ()
            far = RULES["fci"](build.prompt(), close, np.random.default_rng(0), mode=mode, min_gap_tokens=512)
        assert far == (() if mode == "paper" else (3, 6))

    @pytest.mark.parametrize("name", sorted(SEGMENTERS))
    @pytest.mark.parametrize("texts", [[], [""], ["\n\n"], ["a"], ["\n"] * 50])
    def test_every_segmenter_ends(self, name, texts):
        with within(5):
            steps = SEGMENTERS[name](texts)
        assert sum(s.tokens for s in steps) == len(texts)

    @pytest.mark.parametrize("name", sorted(ESTIMATORS))
    def test_the_whole_way_to_samples(self, build, name):
        """A group of one-step trunks: no branches, no mean FCI, and samples all the same."""
        group = Group(build.prompt(), tuple(build.trunk(n, r, fci=[2.0]) for n, r in [(4, 1.0), (1, 0.0)]))
        with within(5):
            planned = plan(group, rule=RULES["fci"], budget=all_trees, trunks=2, rng=np.random.default_rng(0))
            assert branch_requests(planned, width=2, max_tokens=8, rng=np.random.default_rng(0)) == []
            samples = ESTIMATORS[name](plant(planned, [], [], width=2), np.random.default_rng(0))
        assert mean_fci(group) == 0.0
        assert [s.has_signal for s in samples] == [True, True]


class TestIdentity:
    """Trap: groups keyed by an optional column of the data set, such as `index` in `extra_info`. Where the column is
    missing all prompts share one key: one group, one baseline, one filter decision. Where two data sets are mixed,
    equal indices meet.
    """

    def prompts(self):
        """Two problems without any optional field, as a bare file of questions gives them."""
        return [Prompt(uid=content_hash(text), ids=as_ids([i]), answers=("1",)) for i, text in enumerate(["a?", "b?"])]

    def test_two_prompts_without_optional_fields_are_two_groups(self, build):
        easy, mixed = self.prompts()
        forests = [
            build.forest(build.tree(2, 1.0), build.tree(2, 1.0)),
            build.forest(build.tree(2, 1.0), build.tree(2, 0.0)),
        ]
        forests = [type(f)(p, f.trees) for f, p in zip(forests, (easy, mixed), strict=True)]
        samples = [s for f in forests for s in tree(f, np.random.default_rng(0))]
        # the trap: one group of four, V(root) = 3/4, and every sample "has signal"
        assert [s.advantages[0] for s in samples] == [0.0, 0.0, 1.0, -1.0]
        assert {s.uid for s in with_signal(samples, "prompts")} == {mixed.uid}

    def test_identity_is_the_content(self):
        first, second = self.prompts()
        again = Prompt(uid=content_hash("a?"), ids=as_ids([0]), answers=("1",), source="another file")
        assert first.uid == again.uid != second.uid

    def test_the_filter_decides_by_prompt(self, build):
        low, high = self.prompts()
        groups = [
            Group(p, tuple(build.trunk(4, 1.0, starts=(2,), fci=[0, y]) for _ in range(2)))
            for p, y in ((low, 1.0), (high, 3.0))
        ]
        kept = attention(groups, {}).mask
        assert [g.prompt.uid for g, keep in zip(groups, kept, strict=True) if keep] == [high.uid]


class TestRowsAfterRepetition:
    """Trap: requests are repeated `width` times, then the prefix length of row i is read from row i of the table
    before repetition. Equal lengths hide it; here all trunks and points differ.
    """

    @pytest.fixture
    def planned(self, build):
        trunks = tuple(build.trunk(n, 1.0, first=f) for n, f in [(4, 0), (9, 100), (6, 200)])
        return Plan(Group(build.prompt(), trunks), ((1, 3), (7,), (2, 5)))

    def rollouts(self, count):
        return [Rollout(as_ids([500 + i]), as_floats([-0.5 - i]), "stop", 1) for i in range(count)]

    def test_each_branch_has_the_prefix_of_its_own_trunk(self, planned):
        width, rollouts = 3, self.rollouts(15)
        prefixes = [[0], [0, 1, 2], [100, 101, 102, 103, 104, 105, 106], [200, 201], [200, 201, 202, 203, 204]]
        right = [[*prefixes[i // width], 500 + i] for i in range(15)]
        trap = [[*prefixes[i % 5], 500 + i] for i in range(15)]  # row i of the table before repetition
        found = [r.tolist() for r in whole_responses(planned, rollouts, width=width)]
        assert found == right != trap

    def test_lengths_and_limits_follow_the_same_row(self, planned):
        requests = branch_requests(planned, width=3, max_tokens=10, rng=np.random.default_rng(0))
        left = [r.max_tokens for r in requests]
        assert left == [9] * 3 + [7] * 3 + [3] * 3 + [8] * 3 + [5] * 3
        assert [len(r.context) - 2 + r.max_tokens for r in requests] == [10] * 15

    def test_samples_align_ids_log_probs_and_advantages(self, planned):
        verdicts = [Verdict(float(i % 3 == 0), "number") for i in range(15)]
        forest = plant(planned, self.rollouts(15), verdicts, width=3)
        samples = tree(forest, np.random.default_rng(0))
        tails = [s for s in samples if s.response[-1] >= 500]
        assert [int(s.response[-1]) for s in tails] == [500 + i for i in range(15)]
        assert [float(s.logprobs[-1]) for s in tails] == [-0.5 - i for i in range(15)]
        assert [float(s.advantages[-1]) > 0 for s in tails] == [i % 3 == 0 for i in range(15)]
        assert all(len(s.response) == len(s.logprobs) == len(s.advantages) for s in samples)


class TestEndOfThinking:
    """Trap: `</think>` is several tokens for this tokenizer, so its last sub-token `>` is searched for instead. The
    first `>` of the response, a comparison or an arrow, then ends the thinking.
    """

    TEXTS = ("So", " x", " >", " 3", ".\n\n", "f", ": A", " -", ">", " B", ".\n\n", "</", "think", ">", "\n\n", "x = 4")

    def test_comparisons_and_arrows_do_not_end_the_thinking(self):
        steps = blank_lines(self.TEXTS)
        trap = [s.stop <= self.TEXTS.index(">") for s in steps]
        thinking = [s.thinking for s in steps]
        assert thinking == [True, True, False, False] != trap

    def test_the_step_counts_from_where_the_mark_begins(self):
        """Trap: found by its last sub-token, a mark split by the segmenter leaves its first half in the thinking."""
        steps = SEGMENTERS["every_n_tokens"](self.TEXTS, tokens=4)  # the mark is tokens 11 to 13: steps 2 and 3
        trap = [s.stop <= 13 for s in steps]
        thinking = [s.thinking for s in steps]
        assert thinking == [True, True, False, False] != trap

    def test_the_answer_is_then_no_branch_point(self, build):
        steps = blank_lines(self.TEXTS)
        bounds = [s.start for s in steps][1:]
        trunk = build.trunk(16, 1.0, starts=bounds, fci=[9, 1, 9, 9], thinking=11)
        assert trunk.steps == steps
        assert RULES["fci"](build.prompt(), trunk, np.random.default_rng(0)) == (5,)
