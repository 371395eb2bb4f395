"""Hand-labelled hard cases: half of them right answers in unusual form, half near misses that a lax grader accepts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from attnrl.verify import Verifier

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "hard_cases.jsonl").read_text(encoding="utf-8").splitlines()
    if line.strip()
]

# right, but not understood: a chain of equivalences, digits that go on, x for x_1 and x_2
REFUSED = {"fresh_interval_06", "fresh_approx_03", "names_11"}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, bool]:
    with Verifier(workers=1) as verifier:
        graded = verifier.grade([(case["response"], case["gold"]) for case in CASES])
    return {case["id"]: bool(verdict.reward) for case, verdict in zip(CASES, graded, strict=True)}


def test_no_near_miss_is_accepted(verdicts: dict[str, bool]) -> None:
    assert [case["id"] for case in CASES if verdicts[case["id"]] and not case["expected"]] == []


def test_every_right_answer_but_the_known_ones_is_accepted(verdicts: dict[str, bool]) -> None:
    refused = {case["id"] for case in CASES if case["expected"] and not verdicts[case["id"]]}
    assert refused == REFUSED


def test_the_cases_are_balanced_and_have_names_of_their_own() -> None:
    expected = Counter(case["expected"] for case in CASES)
    assert len({case["id"] for case in CASES}) == len(CASES)
    assert expected[False] >= len(CASES) / 2 >= 150
