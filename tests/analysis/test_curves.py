from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from attnrl.analysis.curves import axes, benchmarks, clean, curves, headline, thinned
from attnrl.analysis.records import RunRecord


def record(metrics: list[dict[str, float]]) -> RunRecord:
    config = {"about": "x", "model": {"path": "m"}, "run": {"iterations": 9, "seed": 4}}
    return RunRecord("r", Path(), config, {}, metrics, ())


def test_axes_count_tokens_where_no_total_was_logged() -> None:
    rows = [{"iteration": i, "generate/tokens": 10.0, "seconds/iteration": 0.5} for i in (1, 2, 3)]
    assert axes(rows) == {"iteration": [1, 2, 3], "tokens": [10, 20, 30], "seconds": [0.5, 1.0, 1.5]}


@given(st.integers(1, 300), st.integers(2, 50), st.sets(st.integers(0, 299)))
def test_thinning_keeps_ends_and_evaluations(rows: int, limit: int, evaluated: set[int]) -> None:
    metrics = [{"iteration": float(i)} | ({"eval/t/pass@1": 0.5} if i in evaluated else {}) for i in range(rows)]
    kept = thinned(metrics, limit)
    assert kept == sorted(set(kept))
    assert {0, rows - 1} | {i for i in evaluated if i < rows} <= set(kept)
    assert len(kept) <= limit + len(evaluated) or rows <= limit
    spaced = [i for i in kept if i not in evaluated]
    assert len(spaced) <= limit


@given(st.floats(allow_nan=True, allow_infinity=True, width=64))
def test_clean_keeps_five_digits(value: float) -> None:
    found = clean(value)
    if not math.isfinite(value):
        assert found is None
    else:
        assert found is not None
        assert abs(found - value) <= 1e-4 * abs(value)


def test_evaluations_stand_apart_from_curves() -> None:
    rows = [
        {
            "iteration": 0.0,
            "eval/t/pass@1": 0.25,
            "eval/t/pass@1_low": 0.2,
            "eval/t/pass@1_high": 0.3,
            "eval/t/mean_tokens": 8,
        },
        {"iteration": 1.0, "policy/kl": float("nan"), "seconds/iteration": 2.0, "train/valid_tokens": 5.0},
        {"iteration": 2.0, "policy/kl": 0.5, "seconds/iteration": 2.0, "train/valid_tokens": 7.0}
        | {"eval/t/pass@1": 0.5, "eval/a/b/pass@1": 1.0, "eval/t/pass@4": 0.75, "generate/total_tokens": 99.0},
    ]
    run = record(rows)
    assert benchmarks(run) == ["a/b", "t"]
    drawn = curves(run, 400)
    assert drawn["metrics"]["policy/kl"] == [None, None, 0.5]
    assert [key for key in drawn["metrics"] if key.startswith("eval/")] == ["eval/t/pass@4"]
    held = drawn["held_out"][1]
    assert held["x"] == {"iteration": [0, 2], "tokens": [0, 99], "seconds": [0, 4]}
    assert (held["accuracy"], held["low"], held["high"]) == ([0.25, 0.5], [0.2, None], [0.3, None])
    assert (held["length"], held["truncated"]) == ([8, None], [None, None])
    top = headline(run)
    assert (top["iterations"], top["planned"], top["seconds"], top["valid_tokens"]) == (2, 9, 4, 12)
    assert (top["generated_tokens"], top["model"], top["seed"]) == (99, "m", 4)


def test_the_average_comes_first() -> None:
    assert benchmarks(record([{"iteration": 0, "eval/aime24/pass@1": 0.1, "eval/average/pass@1": 0.1}])) == [
        "average",
        "aime24",
    ]
