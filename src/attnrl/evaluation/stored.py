"""Responses from a file, graded without a model.

One row per response, in parquet, json or jsonl(.gz), with the columns
  response   the text; required (or `responses`, a list of texts to one problem)
  gold       right answer, or a list of alternatives (also called answer, answers, ground_truth)
  benchmark  name of its table row; by default the file's name
  problem    the problem's text: rows with the same benchmark and problem are samples of one problem
  row        its number in the benchmark, instead of the text (or `id`, any label)
  finish     "stop" or "length" (cut off by the length limit: counts as wrong); optional
  tokens     its length; optional
Without `gold`, the benchmark must be one of the known ones and `row` or `problem` must say which problem it is. Without
problem, row and id, every line is a problem of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from attnrl.data.benchmarks import BENCHMARKS
from attnrl.data.files import Row, iterate_rows
from attnrl.data.records import Record
from attnrl.errors import DataError
from attnrl.evaluation.results import Response
from attnrl.evaluation.sampling import Grade
from attnrl.types import Finish

GOLD = ("gold", "answers", "answer", "ground_truth")
LoadBenchmark = Callable[[str], Sequence[Record]]


def grade_stored(path: Path, grade: Grade, load: LoadBenchmark, *, grade_truncated: bool = False) -> list[Response]:
    """The graded responses of a file; reward or verdict columns of the file are not looked at.

    `load` gives the records of a known benchmark, for rows without gold.
    """
    responses = read_stored(path, load)
    graded = [i for i, r in enumerate(responses) if r.finish != "length" or grade_truncated]
    verdicts = grade([(responses[i].response, responses[i].gold) for i in graded])
    for i, v in zip(graded, verdicts, strict=True):
        responses[i] = replace(responses[i], reward=v.reward, rule=v.rule, answer=v.answer, error=v.error)
    return responses


def read_stored(path: Path, load: LoadBenchmark) -> list[Response]:
    """The responses of a file, each matched with its problem and gold, not yet graded (rule "truncated", reward 0)."""
    loaded: dict[str, Sequence[Record]] = {}
    numbers: dict[tuple[str, Any], int] = {}  # (benchmark, problem or label) -> row
    golds: dict[tuple[str, int], tuple[str, ...]] = {}
    responses: list[Response] = []
    samples: Counter[tuple[str, int]] = Counter()
    for line in iterate_rows(path, "train"):
        columns = line.columns
        benchmark = str(columns.get("benchmark") or path.name.split(".")[0])
        problem, gold = str(columns.get("problem") or ""), _gold(line)
        if gold is None:
            record, row = _look_up(line, benchmark, problem, loaded, load)
            problem, gold = record.problem, record.answers
        elif columns.get("row") is not None:
            row = int(columns["row"])
        else:
            row = numbers.setdefault((benchmark, problem or columns.get("id") or line.where), len(numbers))
        key = (benchmark, row)
        if golds.setdefault(key, gold) != gold:
            raise DataError(
                f"{line.where}: gold {gold} differs from {golds[key]} in an earlier row of the same problem"
            )
        for text in _texts(line):
            finish, tokens = _finish(line), columns.get("tokens")
            responses.append(
                Response(*key, samples[key], problem, gold, text, 0.0, "truncated", finish=finish, tokens=tokens)
            )
            samples[key] += 1
    if not responses:
        raise DataError(f"{path}: no responses in it")
    return responses


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
    golds = tuple(str(entry) for entry in (value if isinstance(value, list) else [value]))
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
    row = line.columns.get("row")
    if row is not None:
        if not isinstance(row, int) or not 0 <= row < len(records):
            raise DataError(f"{line.where}: row is {row!r}; {benchmark} has rows 0 to {len(records) - 1}")
        return records[row], row
    words = problem.split()
    for number, record in enumerate(records):
        if words and record.problem.split() == words:
            return record, number
    raise DataError(f"{line.where}: no gold, and its problem is not in {benchmark}; add the column gold or row")
