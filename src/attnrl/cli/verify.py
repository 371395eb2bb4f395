"""attnrl verify FILE [--output FILE]

Grades a file of responses against reference answers.

Each line of the input is a JSON object with `response` (text) and `gold` (text,
or a list of alternatives); without a gold its `answers`, `answer` or
`ground_truth` is taken, the first it has. The output repeats the row's fields,
without the response, the reference as `gold`, and adds `reward`, `rule`,
`answer` (the response's) and `error`. An error (an empty gold, a worker that
cannot start) is no evidence that the answer is wrong: the summary counts it
apart. A row whose gold is null is named and counts as one.

Example:
  attnrl verify responses.jsonl --output verdicts.jsonl
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from attnrl.cli.files import check_folder, read_file
from attnrl.cli.flags import read_flags
from attnrl.config import Section, check_used, load_config
from attnrl.errors import ConfigError, DataError
from attnrl.evaluation.stored import GOLD
from attnrl.types import Verdict
from attnrl.verify import Verifier

SHORT = {"workers": "verify.workers", "timeout": "verify.timeout_s", "memory_mb": "verify.memory_mb"}


class VerifyFlags(Section):
    """The flags of `attnrl verify`."""

    file: Path
    """a file (jsonl, json, .gz, parquet) with the fields response and gold (or answers, answer, ground_truth)."""
    output: Path | None = None
    """Where the verdicts go, one JSON object a line; by default FILE with .verdicts.jsonl at its end."""
    disagreements: Path | None = None
    """Log here (JSON lines) every answer on which our rules and math-verify differ; slow: both grade everything."""


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a file, and file:line of those without a gold; DataError names where one cannot be graded."""
    named = [(row.where, _with_gold(row.where, row.columns)) for row in read_file(path)]
    return [row for _, row in named], [where for where, row in named if not golds_of(row)]


def golds_of(row: dict[str, Any]) -> list[str]:
    """The golds of a row, numbers as text; a null is none."""
    golds = row["gold"] if isinstance(row["gold"], list) else [row["gold"]]
    return [str(gold) if type(gold) in (int, float) else gold for gold in golds if gold is not None]


def _with_gold(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """The row with its reference answer named gold, whichever of its names it had; DataError where it has none."""
    name = next((name for name in GOLD if name in row), "gold")
    for key in ("response", name):
        if key not in row:
            wanted = f"looked for {', '.join(GOLD)}" if key == name else "the fields are response and gold"
            raise DataError(f"{where}: field {key!r} is missing; {wanted}")
    if not isinstance(row["response"], str):
        raise DataError(f"{where}: field 'response' must be text, not {type(row['response']).__name__}")
    renamed = {"gold" if key == name else key: value for key, value in row.items()}
    if not all(isinstance(gold, str) for gold in golds_of(renamed)):
        raise DataError(f"{where}: field {name!r} must be text, a number, or a list of them")
    return renamed


def write_verdicts(path: Path, rows: Sequence[dict[str, Any]], verdicts: Sequence[Verdict]) -> None:
    """One line a row: its fields without the response, and the verdict."""
    with path.open("w", encoding="utf-8") as file:
        for row, verdict in zip(rows, verdicts, strict=True):
            kept = {key: value for key, value in row.items() if key != "response"}
            said = {"reward": verdict.reward, "rule": verdict.rule, "answer": verdict.answer, "error": verdict.error}
            file.write(json.dumps(kept | said, default=str) + "\n")


def summary(verdicts: Sequence[Verdict], seconds: float) -> Table:
    """What came out, as a table: right, wrong, errors by kind, the rules that decided, throughput."""
    table = Table("what", "answers", "share", title="verdicts")
    total = len(verdicts)

    def add(name: str, count: int) -> None:
        table.add_row(name, str(count), f"{count / total:.1%}")

    right = sum(v.right for v in verdicts)
    errors = Counter(v.error for v in verdicts if v.error)
    add("right", right)
    add("wrong", total - right - sum(errors.values()))
    for kind, count in sorted(errors.items()):
        add(f"error: {kind}", count)
    table.add_section()
    for rule, count in Counter(v.rule for v in verdicts).most_common():
        add(f"by rule: {rule}", count)
    table.add_section()
    table.add_row("answers a second", f"{total / seconds:.0f}", "")
    return table


def main(argv: list[str]) -> None:
    options, overrides = read_flags(VerifyFlags, argv, str(__doc__), short=SHORT, words="file")
    config = load_config("", overrides)
    check_used(config, "attnrl verify", set(SHORT.values()))
    limits = config.verify
    check_folder("output", options.output)
    check_folder("disagreements", options.disagreements)
    rows, without_gold = read_rows(options.file)
    output = options.output or options.file.with_name(f"{options.file.name}.verdicts.jsonl")
    if output.exists() and output.samefile(options.file):
        raise ConfigError(f"--output {output} is the input itself; name another file")
    started = time.perf_counter()
    with Verifier(limits.workers, limits.timeout_s, limits.memory_mb, disagreements=options.disagreements) as verifier:
        verdicts = verifier.grade([(row["response"], golds_of(row)) for row in rows], progress=len(rows) > 1000)
    seconds = time.perf_counter() - started
    write_verdicts(output, rows, verdicts)
    console = Console()
    for where in without_gold:
        console.print(
            f"{where}: the gold is null; an error, neither right nor wrong",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    console.print(summary(verdicts, seconds))
    console.print(f"verdicts in {output}", highlight=False, soft_wrap=True)
