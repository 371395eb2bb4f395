"""Metrics as columns for drawing, and the numbers of the headline."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from attnrl.algo.health import complaint
from attnrl.analysis.records import RunRecord

POINTS = 750  # of one curve over all runs of a report, 400 at most a run: keeps the file small
HELD_OUT = re.compile(r"eval/(.+)/pass@1")
SHOWN_APART = re.compile(r"eval/.+/(pass@1(_low|_high)?|length|mean_tokens|truncated|truncated_share)")
Row = dict[str, float]


def axes(rows: Sequence[Row]) -> dict[str, list[float]]:
    """What can stand on the horizontal axis: iterations, tokens generated so far, seconds spent so far.

    >>> rows = [{"iteration": 0}, {"iteration": 1, "generate/total_tokens": 70, "seconds/iteration": 2.0}]
    >>> axes(rows)
    {'iteration': [0.0, 1.0], 'tokens': [0.0, 70.0], 'seconds': [0.0, 2.0]}
    """
    tokens, total = [], 0.0
    for row in rows:
        total = float(row.get("generate/total_tokens", total + row.get("generate/tokens", 0.0)))
        tokens.append(total)
    seconds = list(accumulate(float(row.get("seconds/iteration", 0.0)) for row in rows))
    return {"iteration": [float(row["iteration"]) for row in rows], "tokens": tokens, "seconds": seconds}


def thinned(rows: Sequence[Row], limit: int) -> list[int]:
    """Indices of the rows to draw: evenly spaced, with the first, the last and every evaluation among them.

    >>> thinned([{"iteration": i} for i in range(10)], 4)
    [0, 3, 6, 9]
    """
    if len(rows) <= limit:
        return list(range(len(rows)))
    spaced = {round(i * (len(rows) - 1) / (limit - 1)) for i in range(limit)}
    return sorted(spaced | {i for i, row in enumerate(rows) if any(HELD_OUT.fullmatch(key) for key in row)})


def clean(value: Any) -> float | None:
    """A number of five digits for the page; None for what cannot be drawn.

    >>> clean(0.123456789), clean(float("nan")), clean(1234567), clean("x")
    (0.12346, None, 1234567, None)
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    if value == int(value):
        return int(value)
    return round(float(value), 5 - 1 - math.floor(math.log10(abs(value))))


def curves(record: RunRecord, limit: int) -> dict[str, Any]:
    """Axes and metrics of a run as columns; evaluations apart, since they are few and have intervals."""
    chosen = thinned(record.metrics, limit)
    whole = axes(record.metrics)
    x = {name: [clean(column[i]) for i in chosen] for name, column in whole.items()}
    keys = sorted({key for row in record.metrics for key in row if not SHOWN_APART.fullmatch(key)} - {"iteration"})
    columns = {key: [clean(record.metrics[i].get(key)) for i in chosen] for key in keys}
    return {
        "x": x,
        "metrics": {key: column for key, column in columns.items() if any(v is not None for v in column)},
        "rows": len(record.metrics),
        "drawn": len(chosen),
        "held_out": [_held_out(record, name, whole) for name in benchmarks(record)],
    }


def benchmarks(record: RunRecord) -> list[str]:
    """Names of what the run was evaluated on, their average first."""
    found = (HELD_OUT.fullmatch(key) for row in record.metrics for key in row)
    return sorted({match.group(1) for match in found if match}, key=lambda name: (name != "average", name))


def _held_out(record: RunRecord, name: str, x: dict[str, list[float]]) -> dict[str, Any]:
    """The evaluations of one benchmark: accuracy with its 95 % interval, length, truncated share."""
    at = [i for i, row in enumerate(record.metrics) if f"eval/{name}/pass@1" in row]
    rows = [record.metrics[i] for i in at]

    def column(*names: str) -> list[float | None]:
        return [clean(next((row[k] for n in names if (k := f"eval/{name}/{n}") in row), None)) for row in rows]

    return {
        "benchmark": name,
        "x": {axis: [clean(values[i]) for i in at] for axis, values in x.items()},
        "accuracy": column("pass@1"),
        "low": column("pass@1_low"),
        "high": column("pass@1_high"),
        "length": column("length", "mean_tokens"),
        "truncated": column("truncated_share", "truncated"),
    }


def headline(record: RunRecord) -> dict[str, Any]:
    """What a reader wants first: what was run, what it cost; accuracy is with the evaluations."""
    x, rows = axes(record.metrics), record.metrics
    return {
        "preset": record.preset,
        "about": str(record.config.get("about", "")),
        "model": record.setting("model.path"),
        "schedule": record.setting("algo.schedule"),
        "rule": record.setting("algo.rule"),
        "estimator": record.setting("algo.estimator"),
        "seed": record.setting("run.seed"),
        "iterations": clean(x["iteration"][-1]) if rows else 0,
        "planned": record.setting("run.iterations"),
        "generated_tokens": clean(x["tokens"][-1]) if rows else 0,
        "valid_tokens": clean(sum(row.get("train/valid_tokens", 0.0) for row in rows)),
        "seconds": clean(x["seconds"][-1]) if rows else 0,
        "complaint": complaint(
            rows,
            max_response_tokens=record.setting("sampling.max_response_tokens", 0),
            delta=record.setting("algo.delta", 4),
            branching=record.branches,
        ),
    }
