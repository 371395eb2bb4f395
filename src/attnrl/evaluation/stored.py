"""Responses from a file, graded without a model.

One row per response, in parquet, json or jsonl(.gz), with the columns
  response   the text; required (or `responses`, a list of texts to one problem)
  gold       right answer, or a list of alternatives (also called answer, answers, ground_truth)
  benchmark  name of its table row; by default the file's name
  problem    the problem's text: rows with the same benchmark and problem are samples of one problem
  row        its number in the benchmark, from 1, instead of the text (or `id`, any label)
  finish     "stop" or "length" (cut off by the length limit); optional
  tokens     its length; optional
All columns that are not among these reach the reward.
Without `gold`, the benchmark must be one of the known ones and `row` or `problem` must say which problem it is. Without
problem, row and id, every line is a problem of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from attnrl.data.benchmarks import BENCHMARKS
from attnrl.data.files import Row, iterate_rows
from attnrl.data.records import Record, other_columns
from attnrl.errors import DataError
from attnrl.evaluation.results import Response
from attnrl.types import Attempt, Finish, Grade

GOLD = ("gold", "answers", "answer", "ground_truth")
VERDICT = ("reward", "right", "rule", "error", "sample")  # what responses.jsonl says of a response besides
COLUMNS = frozenset((*GOLD, *VERDICT, "response", "responses", "benchmark", "problem", "row", "id", "finish", "tokens"))
Place = tuple[str, int, int]  # benchmark, row (from 1), sample
LoadBenchmark = Callable[[str], Sequence[Record]]


def grade_stored(path: Path, grade: Grade, load: LoadBenchmark) -> list[Response]:
    """The graded responses of a file; reward or verdict columns of the file are not looked at.

    `load` gives the records of a known benchmark, for rows without gold.
    """
    stored = read_stored(path, load)
    verdicts = grade([attempt for _, attempt in stored])
    return [Response.of(*place, attempt, v) for (place, attempt), v in zip(stored, verdicts, strict=True)]


def read_stored(path: Path, load: LoadBenchmark) -> list[tuple[Place, Attempt]]:
    """The responses of a file, not yet graded, each with its place and matched with its problem and gold."""
    loaded: dict[str, Sequence[Record]] = {}
    numbers: dict[tuple[str, Any], int] = {}  # (benchmark, problem or label) -> row
    golds: dict[tuple[str, int], tuple[str, ...]] = {}
    stored: list[tuple[Place, Attempt]] = []
    samples: Counter[tuple[str, int]] = Counter()
    for line in iterate_rows(path, "train"):
        columns = line.columns
        benchmark = str(columns.get("benchmark") or path.name.split(".")[0])
        problem, gold = str(columns.get("problem") or ""), _gold(line)
        others = other_columns(columns, COLUMNS)
        if gold is None:
            record, row = _look_up(line, benchmark, problem, loaded, load)
            problem, gold, others = record.problem, record.answers, record.info | others
        elif columns.get("row") is not None:
            row = _number(line)
        else:
            row = numbers.setdefault((benchmark, problem or columns.get("id") or line.where), len(numbers) + 1)
        key = (benchmark, row)
        if golds.setdefault(key, gold) != gold:
            raise DataError(
                f"{line.where}: gold {gold} differs from {golds[key]} in an earlier row of the same problem"
            )
        for text in _texts(line):
            attempt = Attempt(problem, gold, text, _finish(line), int(columns.get("tokens") or 0), others)
            stored.append(((*key, samples[key]), attempt))
            samples[key] += 1
    if not stored:
        raise DataError(f"{path}: no responses in it")
    return stored


def _number(line: Row) -> int:
    row = line.columns["row"]
    if isinstance(row, bool) or not isinstance(row, int) or row < 1:
        raise DataError(f"{line.where}: row is {row!r}; rows are whole numbers, counted from 1")
    return row


def _finish(line: Row) -> Finish | None:
    finish = line.columns.get("finish")
    if finish not in (None, "stop", "length"):
        raise DataError(f"{line.where}: finish is {finish!r}; must be 'stop' or 'length', or left out")
    return cast("Finish | None", finish)


def _texts(line: Row) -> list[str]:
    value = line.columns.get("response", line.columns.get("responses"))
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{line.where}: no text in the column response; columns are {', '.join(line.columns)}")
    return texts


def _gold(line: Row) -> tuple[str, ...] | None:
    value = next((line.columns[key] for key in GOLD if line.columns.get(key) is not None), None)
    if value is None:
        return None
    golds = tuple(str(entry) for entry in (value if isinstance(value, list) else [value]) if entry is not None)
    if not golds or not all(entry.strip() for entry in golds):
        raise DataError(f"{line.where}: gold is empty; give the right answer, or remove the row")
    return golds


def _look_up(
    line: Row, benchmark: str, problem: str, loaded: dict[str, Sequence[Record]], load: LoadBenchmark
) -> tuple[Record, int]:
    """The record and row number of a response without gold."""
    if benchmark not in BENCHMARKS:
        raise DataError(
            f"{line.where}: no gold, and {benchmark!r} is no known benchmark ({', '.join(BENCHMARKS)}); add the column "
            "gold, or name the benchmark and its row or problem"
        )
    if benchmark not in loaded:
        loaded[benchmark] = load(benchmark)
    records = loaded[benchmark]
    if line.columns.get("row") is not None:
        row = _number(line)
        if row > len(records):
            raise DataError(f"{line.where}: row is {row}; {benchmark} has rows 1 to {len(records)}")
        return records[row - 1], row
    words = problem.split()
    for number, record in enumerate(records, start=1):
        if words and record.problem.split() == words:
            return record, number
    raise DataError(f"{line.where}: no gold, and its problem is not in {benchmark}; add the column gold or row")
