"""Graded responses, the report made of them, and their files.

A results directory holds
  settings.json     what was asked for; a continued evaluation must ask for the same
  responses.jsonl   one graded response a line, appended as they come
  problems.parquet  one row per problem
  results.json      the tables
  results.md        the same for readers
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from attnrl.algo.intervals import RESAMPLES, bootstrap_means, interval
from attnrl.checkpoint import finite, write_json, write_whole
from attnrl.data.benchmarks import BENCHMARKS
from attnrl.data.files import iterate_rows
from attnrl.errors import ConfigError, DataError
from attnrl.evaluation.estimates import problem_estimates, summarize
from attnrl.types import Attempt, Finish, Verdict, content_hash, counted

PROBLEMS, RESPONSES, SETTINGS = "problems.parquet", "responses.jsonl", "settings.json"
RESULTS, MARKDOWN = "results.json", "results.md"


@dataclass(frozen=True, slots=True)
class Response:
    """One graded response.

    >>> attempt = Attempt("1+1?", ("2",), "It is 2.", tokens=5)
    >>> Response.of("tasks", 1, 0, attempt, Verdict(0.9, "judge", right=False)).right
    False
    """

    benchmark: str
    row: int  # of the problem in its benchmark, counted from 1
    sample: int  # number of the response among those to the same problem, from 0
    problem: str
    gold: tuple[str, ...]
    response: str
    reward: float
    right: bool  # what the verdict says; pass@k counts it
    rule: str
    answer: str | None = None
    error: str | None = None  # of ours, kept apart from "wrong"
    finish: Finish | None = None  # None: not known
    tokens: int | None = None  # None: not known

    @classmethod
    def of(cls, benchmark: str, row: int, sample: int, attempt: Attempt, verdict: Verdict) -> Response:
        """The response of a graded attempt."""
        asked = (attempt.problem, attempt.answers, attempt.response)
        said = {name: getattr(verdict, name) for name in ("reward", "right", "rule", "answer", "error")}
        return cls(benchmark, row, sample, *asked, **said, finish=attempt.finish, tokens=attempt.tokens or None)

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=True)

    @classmethod
    def from_json(cls, line: str) -> Response:
        row = json.loads(line)
        return cls(**(row | {"gold": tuple(row["gold"])}))


@dataclass(frozen=True, repr=False)
class Report:
    """All graded responses of an evaluation and what they amount to. Not slotted: tables are computed once."""

    responses: Sequence[Response]
    ks: tuple[int, ...] | None = None  # of pass@k; None: each benchmark's own, see `own_k`
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0  # of the bootstrap
    resamples: int = RESAMPLES

    def __repr__(self) -> str:
        """In short: nobody wants to read each of thousands of responses."""
        right = {name: [r.right for rows in of.values() for r in rows] for name, of in self.groups.items()}
        found = ", ".join(f"{name} {100 * sum(known) / len(known):.1f} % right" for name, known in right.items())
        return (
            f"<Report of {counted(len(self.responses), 'response')}: {found or 'nothing'}; metrics() has the numbers>"
        )

    @cached_property
    def groups(self) -> dict[str, dict[int, list[Response]]]:
        """benchmark -> row -> responses, in order."""
        groups: dict[str, dict[int, list[Response]]] = {}
        for response in self.responses:
            groups.setdefault(response.benchmark, {}).setdefault(response.row, []).append(response)
        return {
            name: {row: sorted(rows[row], key=lambda r: r.sample) for row in sorted(rows)}
            for name, rows in groups.items()
        }

    @cached_property
    def tables(self) -> dict[str, dict[str, float]]:
        """benchmark -> its numbers (see `summarize`, and `errors`: responses that could not be graded)."""
        return {name: self._table(list(rows.values()), self.ks_of(name)) for name, rows in self.groups.items()}

    def own_k(self, benchmark: str) -> int:
        """The benchmark's own k: the number of samples the paper draws of it, or as many as every problem has."""
        fewest = min(map(len, self.groups[benchmark].values()))
        return min(fewest, BENCHMARKS[benchmark].samples) if benchmark in BENCHMARKS else fewest

    def ks_of(self, benchmark: str) -> tuple[int, ...]:
        """The k of a benchmark's numbers, 1 among them."""
        return tuple(sorted({1, *(self.ks or (self.own_k(benchmark),))}))

    def _table(self, problems: list[list[Response]], ks: tuple[int, ...]) -> dict[str, float]:
        fewest, most = min(map(len, problems)), max(ks)
        if most > fewest:
            raise ConfigError(
                f"pass@{most} cannot be estimated: benchmark {problems[0][0].benchmark} has a problem with only "
                f"{counted(fewest, 'sample')}; draw at least {most} samples or ask for a smaller k"
            )
        table = summarize(
            [[r.right for r in rows] for rows in problems],
            [[r.finish == "length" for r in rows if r.finish is not None] for rows in problems],
            [[r.tokens for r in rows if r.tokens is not None] for rows in problems],
            ks,
            seed=self.seed,
            resamples=self.resamples,
        )
        return table | {"errors": float(sum(r.error is not None for rows in problems for r in rows))}

    @cached_property
    def average(self) -> dict[str, float]:
        """The mean over benchmarks of each pass@k ("Avg."), with its interval: each benchmark's problems resampled.

        Where each benchmark has its own k, the mean over those is called pass@k.
        """
        table: dict[str, float] = {}
        for column in self.columns:
            means, centres = [], []
            for number, (name, rows) in enumerate(self.groups.items()):
                k = self.own_k(name) if column is None else column
                estimates = problem_estimates([[r.right for r in problem] for problem in rows.values()], k)
                means.append(bootstrap_means(estimates, seed=self.seed + 1000 * number, resamples=self.resamples))
                centres.append(self.tables[name][f"pass@{k}"])
            low, high = interval(np.mean(means, axis=0))
            key = f"pass@{column or 'k'}"
            table |= {key: float(np.mean(centres)), f"{key}_low": low, f"{key}_high": high}
        return table

    @property
    def columns(self) -> tuple[int | None, ...]:
        """The k of each pass@k column; None: each benchmark's own, left out where that is 1 for all of them."""
        if self.ks is not None:
            return tuple(sorted({1, *self.ks}))
        return (1, None) if any(self.own_k(name) > 1 for name in self.groups) else (1,)

    def metrics(self) -> dict[str, float]:
        """Flat `eval/BENCHMARK/NUMBER` metrics, and `eval/average/...` over several benchmarks."""
        tables = dict(self.tables)
        if len(tables) > 1:
            tables["average"] = self.average
        flat = {f"eval/{name}/{key}": value for name, table in tables.items() for key, value in table.items()}
        return {key: value for key, value in flat.items() if not math.isnan(value)}

    def problem_rows(self) -> list[dict[str, Any]]:
        """One row per problem: identity, counts and estimates."""
        rows = []
        for benchmark, problems in self.groups.items():
            for row, responses in problems.items():
                tokens = [r.tokens for r in responses if r.tokens is not None]
                numbers: dict[str, Any] = {
                    "benchmark": benchmark,
                    "row": row,
                    "uid": content_hash(responses[0].problem or f"{benchmark}:{row}"),
                    "problem": responses[0].problem,
                    "gold": list(responses[0].gold),
                    "samples": len(responses),
                    "right": sum(r.right for r in responses),
                    "truncated": sum(r.finish == "length" for r in responses),
                    "errors": sum(r.error is not None for r in responses),
                    "mean_tokens": float(np.mean(tokens)) if tokens else None,
                }
                own = self.own_k(benchmark)
                for k in self.columns:
                    numbers[f"pass@{k or 'k'}"] = problem_estimates([[r.right for r in responses]], k or own)[0]
                if None in self.columns:
                    numbers["k"] = own
                rows.append(numbers)
        return rows

    def save(self, directory: Path) -> None:
        """Write problems.parquet, results.json and results.md; each appears whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        directory.mkdir(parents=True, exist_ok=True)
        part = directory / f"{PROBLEMS}.part"
        pq.write_table(pa.Table.from_pylist(self.problem_rows()), part)
        part.replace(directory / PROBLEMS)
        results = {"settings": dict(self.settings), "benchmarks": self.tables}
        if len(self.tables) > 1:
            results["average"] = self.average
        write_json(directory / RESULTS, finite(results))
        write_whole(directory / MARKDOWN, markdown(table_rows(self)))


def load_problem_rows(path: Path) -> list[dict[str, Any]]:
    """The per-problem rows of a results directory or of its problems.parquet."""
    file = path / PROBLEMS if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{path}: no {PROBLEMS} there; give the --output directory of a finished `attnrl eval`")
    return [row.columns for row in iterate_rows(file, "")]


def table_rows(report: Report) -> list[list[str]]:
    """The table people read: header first, one row per benchmark, and the average of several."""
    ks = report.columns
    columns = [f"pass@{k or 'k'}" for k in ks] + ["k"] * (None in ks)
    header = ["benchmark", "problems", "samples", *columns, "truncated", "tokens", "errors"]
    rows = [header]
    for name, table in report.tables.items():
        samples = table["responses"] / table["problems"]
        rows.append(
            [
                name,
                f"{table['problems']:.0f}",
                f"{samples:.0f}" if samples.is_integer() else f"{samples:.1f}",
                *(percent(table, k or report.own_k(name)) for k in ks),
                *([str(report.own_k(name))] * (None in ks)),
                "-" if math.isnan(table["truncated"]) else f"{100 * table['truncated']:.1f} %",
                "-" if math.isnan(table["mean_tokens"]) else f"{table['mean_tokens']:,.0f}",
                f"{table['errors']:.0f}",
            ]
        )
    if len(report.tables) > 1:
        rows.append(
            ["Avg.", "", "", *(percent(report.average, k or "k") for k in ks), *([""] * (None in ks)), "", "", ""]
        )
    return rows


def percent(table: Mapping[str, float], k: int | str) -> str:
    low, high = table[f"pass@{k}_low"], table[f"pass@{k}_high"]
    return f"{100 * table[f'pass@{k}']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown([["a", "b"], ["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"
