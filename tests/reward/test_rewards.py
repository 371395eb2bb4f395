"""Rewards by name, their sum, the truncation rule, errors and metrics: numbers worked out by hand."""

from __future__ import annotations

import pytest

from attnrl.errors import ConfigError, TrainingError
from attnrl.reward import build_rewards
from attnrl.types import Attempt

RIGHT = Attempt("1+1?", ("2",), r"\boxed{2}", "stop", tokens=40)
WRONG = Attempt("1+1?", ("2",), r"\boxed{3}", "stop", tokens=90)
CUT = Attempt("1+1?", ("2",), r"\boxed{2} and", "length", tokens=100)
NO_GOLD = Attempt("1+1?", ("",), r"\boxed{2}", "stop", tokens=10)


def test_math_alone_is_the_verifier_s_verdict() -> None:
    with build_rewards([("math", 1.0, {})]) as rewards:
        verdicts = rewards.grade([RIGHT, WRONG, Attempt("", ("0.5",), "none")])
    assert [(v.reward, v.rule, v.answer, v.error, v.right) for v in verdicts] == [
        (1.0, "string", "2", None, True),
        (0.0, "number", "3", None, False),
        (0.0, "no_answer", None, None, False),
    ]
    assert [v.parts for v in verdicts] == [{"math": 1.0}, {"math": 0.0}, {"math": 0.0}]


def test_rewards_add_up_by_weight_and_the_first_says_what_is_right() -> None:
    entries = [("math", 2.0, {}), ("overlong", 0.5, {"buffer": 20})]
    with build_rewards(entries, knobs={"max_response_tokens": 100, "unknown": 1}) as rewards:
        verdicts = rewards.grade([RIGHT, WRONG, CUT])
        # 2*1 + 0.5*0; 2*0 + 0.5*-(90-80)/20; truncated: 2*0 + 0.5*-1
        assert [v.reward for v in verdicts] == [2.0, -0.25, -0.5]
        assert [v.right for v in verdicts] == [True, False, False]
        assert [v.rule for v in verdicts] == ["string", "number", "truncated"]
        assert [v.parts for v in verdicts] == [
            {"math": 1.0, "overlong": 0.0},
            {"math": 0.0, "overlong": -0.5},
            {"math": 0.0, "overlong": -1.0},
        ]
        metrics = rewards.metrics()
        assert metrics["reward/math"] == pytest.approx(1 / 3)
        assert metrics["reward/overlong"] == pytest.approx(-0.5)
        assert (metrics["reward/math_errors"], metrics["reward/overlong_errors"]) == (0.0, 0.0)
        assert metrics["seconds/reward_math"] >= 0
        assert rewards.metrics() == {}, "they start anew"


def test_right_is_not_the_sum_but_what_the_first_entry_says() -> None:
    with build_rewards([("format", 1.0, {"tags": ["answer"]}), ("math", 1.0, {})]) as rewards:
        (verdict,) = rewards.grade([RIGHT])
    assert (verdict.reward, verdict.right, verdict.rule) == (1.0, False, "format")


def test_a_cut_off_response_earns_nothing_from_what_judges_answers_unless_asked_for() -> None:
    with build_rewards([("math", 1.0, {}), ("format", 1.0, {"tags": ["answer"]})]) as rewards:
        (verdict,) = rewards.grade([CUT])
        assert (verdict.reward, verdict.rule, verdict.answer, verdict.error) == (0.0, "truncated", None, None)
    with build_rewards([("math", 1.0, {})], grade_truncated=True) as rewards:
        assert [v.reward for v in rewards.grade([CUT])] == [1.0]
    unknown = Attempt("1+1?", ("2",), r"\boxed{2}", None)
    with build_rewards([("math", 1.0, {})]) as rewards:
        assert [v.reward for v in rewards.grade([unknown, CUT, RIGHT])] == [1.0, 0.0, 1.0]


def test_errors_are_counted_by_kind_and_too_many_stop_the_run() -> None:
    with build_rewards([("math", 1.0, {})], max_error_share=0.5) as rewards:
        verdicts = rewards.grade([RIGHT, NO_GOLD])
        assert [v.error for v in verdicts] == [None, "empty_gold"]
        metrics = rewards.metrics()
        assert (metrics["reward/math"], metrics["reward/math_errors"]) == (1.0, 1.0), "an error is no evidence"
        assert metrics["reward/error_empty_gold"] == 1.0
        with pytest.raises(TrainingError, match=r"2 of 3 rewards .*max_error_share = 0.5; .*\(2 times\): empty_gold"):
            rewards.grade([RIGHT, NO_GOLD, NO_GOLD])
    with build_rewards([("math", 1.0, {})], max_error_share=1.0) as rewards:
        assert [v.error for v in rewards.grade([NO_GOLD])] == ["empty_gold"]


def test_an_error_of_any_reward_is_an_error_of_the_attempt() -> None:
    unknown_length = Attempt("1+1?", ("2",), r"\boxed{2}")
    entries = [("math", 1.0, {}), ("overlong", 1.0, {"max_response_tokens": 10})]
    with build_rewards(entries, max_error_share=1.0) as rewards:
        (verdict,) = rewards.grade([unknown_length])
    assert (verdict.error, verdict.right) == ("no_tokens", True)


def test_the_same_reward_twice_has_two_names() -> None:
    entries = [("format", 1.0, {"tags": ["a"]}), ("format", 1.0, {"tags": ["b"]})]
    with build_rewards(entries) as rewards:
        (verdict,) = rewards.grade([Attempt("", (), "<b>x</b>")])
    assert verdict.parts == {"format": 0.0, "format_2": 1.0}


def test_no_attempts_no_verdicts() -> None:
    with build_rewards([("math", 1.0, {})]) as rewards:
        assert rewards.grade([]) == []


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "name at least one reward"),
        ([("math", 0.0, {}), ("exact", 0, {})], "every weight is 0"),
        (
            [("maths", 1.0, {})],
            r"reward 1 \(maths\): unknown name 'maths'.*; known: math, exact, format, overlong, gym",
        ),
        ([("math", 1.0, {}), ("exact", 1.0, {"hole": 1})], r"reward 2 \(exact\): .*no option 'hole'.*; it has: whole"),
        ([("overlong", 1.0, {})], r"overlong\): .*needs the option 'max_response_tokens'"),
        ([("overlong", 1.0, {"max_response_tokens": 10, "buffer": 11})], "buffer = 11: must be within 1 and"),
        ([("format", 1.0, {"tags": "think"})], "option tags = 'think': input should be a list"),
        ([("nowhere.at_all:judge", 1.0, {})], r"cannot import 'nowhere.at_all:judge': .* where the command is run"),
    ],
)
def test_what_cannot_be_built_is_said_before_work_starts(entries: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_rewards(entries)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)],
)
def test_overlong_is_dapo_s_penalty(tokens: int, penalty: float) -> None:
    with build_rewards([("overlong", 1.0, {})], knobs={"max_response_tokens": 20480}) as rewards:
        (verdict,) = rewards.grade([Attempt("", (), "x", "length", tokens=tokens)])
    assert verdict.reward == pytest.approx(penalty, abs=1e-12)


@pytest.mark.parametrize(
    ("response", "opened", "reward"),
    [
        ("<think>a</think> so <answer>4</answer>", False, 1.0),
        ("a</think><answer>4</answer>", True, 1.0),
        ("a</think><answer>4</answer>", False, 0.0),
        ("<think>a</think><answer>4</answer>", True, 0.0),
        ("<think>a</think><answer> </answer>", False, 0.0),
        ("</think><answer>4</answer>", True, 0.0),
        ("<answer>4</answer><think>a</think>", False, 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", False, 0.0),
        ("<think>a<think>b</think></think><answer>4</answer>", False, 0.0),
        ("<think>a</think><answer>4", False, 0.0),
        ("4", False, 0.0),
    ],
)
def test_format_wants_each_tag_once_in_order_with_text_inside(response: str, opened: bool, reward: float) -> None:
    with build_rewards([("format", 1.0, {"opened": opened})]) as rewards:
        assert [v.reward for v in rewards.grade([Attempt("", (), response)])] == [reward]


def test_exact_compares_spelling_of_the_extracted_or_the_whole_answer() -> None:
    attempts = [
        Attempt("", ("Paris", "paris, France"), r"So \boxed{ Paris }"),
        Attempt("", ("paris",), r"\boxed{Paris}"),
        Attempt("", ("2",), r"\boxed{2.0}"),
        Attempt("", ("2",), "hm"),
        Attempt("", (" ",), r"\boxed{2}"),
    ]
    with build_rewards([("exact", 1.0, {})]) as rewards:
        verdicts = rewards.grade(attempts)
    assert [v.reward for v in verdicts] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [v.rule for v in verdicts] == ["string", "string", "string", "no_answer", "empty_gold"]
    assert [v.error for v in verdicts] == [None, None, None, None, "empty_gold"]
    with build_rewards([("exact", 1.0, {"whole": True, "ignore_case": True})]) as rewards:
        whole = [Attempt("", ("yes",), "<think>no</think>\nYES\n"), Attempt("", ("yes",), "Well, yes")]
        assert [v.reward for v in rewards.grade(whole)] == [1.0, 0.0]


def test_parts_of_verdicts_are_metrics_of_their_own_and_start_anew(tmp_path, monkeypatch):
    """Means over the attempts that were judged: 1 and 3 of part `a`, an error left out."""
    code = (
        "from attnrl.types import Verdict\n"
        "def parted(attempts):\n"
        "    return [Verdict(float(a.row['n']), 'r', error=a.row['error'], parts={'a': a.row['n'] * 1.0}) "
        "for a in attempts]\n"
    )
    (tmp_path / "parted_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"n": 1, "error": None}, {"n": 3, "error": None}, {"n": 50, "error": "down: no service"}]
    with build_rewards([("parted_rewards:parted", 1.0, {})], workers=1) as rewards:
        rewards.grade([Attempt("", ("1",), "x", row=row) for row in rows])
        metrics = rewards.metrics()
        assert metrics.pop("seconds/reward_parted") >= 0
        assert metrics == {
            "reward/parted": 2.0, "reward/parted.a": 2.0, "reward/parted_errors": 1.0, "reward/error_down": 1.0,
        }  # fmt: skip
        assert rewards.metrics() == {}


def test_an_option_that_build_rewards_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no option 'timeout'; did you mean 'timeout_s'\?; it has: grade_truncated,"):
        build_rewards([("math", 1.0, {})], timeout=1.0)
