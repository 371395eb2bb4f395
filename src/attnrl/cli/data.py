"""attnrl data FILE ... [--against NAME,NAME] [--clean FILE.jsonl]

Reports on data files before training on them: rows, layout, empty answers,
duplicates, conflicting and leaked answers, and benchmark problems among them,
each with its rows (counted from 1).

A FILE is parquet, json, jsonl (also .gz), a directory, or a hub data set such
as openai/gsm8k or hf:openai/gsm8k/main:test.

Examples:
  attnrl data train.parquet --against aime24,math500
  attnrl data train.parquet --against all --clean clean.jsonl
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.console import Console

from attnrl.cli.files import check_folder
from attnrl.cli.flags import read_flags
from attnrl.config import Names, Section
from attnrl.data.audit import Duplicate, Overlap, clean, contamination, decontaminate, duplicates, leaks
from attnrl.data.benchmarks import BENCHMARKS, load_benchmark
from attnrl.data.records import Record, Records, load_records
from attnrl.types import counted


class DataFlags(Section):
    """The flags of `attnrl data`."""

    files: Names
    """at least one file or hub data set; `attnrl data --help` shows how."""
    against: Names = ()
    """Benchmarks (aime24, aime25, amc23, math500, minerva, olympiad, gsm8k; or all) or files that no row may repeat."""
    split: str = "train"
    """Split to take of a directory or hub data set."""
    columns: dict[Literal["problem", "answer"], str] = Field(default_factory=dict)
    """Your names of the columns: '{problem = "question", answer = "key"}'."""
    clean: Path | None = None
    """Write the rows worth training on here: no contamination, no leaked or conflicting answers, one copy of each."""
    json_file: Path | None = None
    """Write the report here as JSON, with every row number."""
    rows: int = Field(12, ge=0)
    """Row numbers to show for each finding; 0 shows all."""


def main(argv: list[str]) -> None:
    """Print the report; with --clean write the rows worth keeping."""
    options, _ = read_flags(DataFlags, argv, str(__doc__), words="files")
    check_folder("clean", options.clean)
    check_folder("json-file", options.json_file)
    evals: list[Record] = []
    for name in (one for given in options.against for one in (BENCHMARKS if given == "all" else [given])):
        evals += load_benchmark(name) if name in BENCHMARKS else load_records(name, split=options.split)
    reports: list[dict[str, Any]] = []
    kept: list[Record] = []
    console = Console(stderr=True)
    for file in options.files:
        with console.status(f"reading {file} and comparing its rows"):
            records = load_records(file, split=options.split, columns=options.columns)
            report = _report(records, evals, bool(options.against))
        _show(report, options.rows)
        reports.append(report)
        kept.extend(records)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(reports, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.clean is not None:
        _write_clean(options.clean, kept, evals)


def _report(records: Records, evals: list[Record], checked: bool) -> dict[str, Any]:
    groups = duplicates(records)
    report: dict[str, Any] = {
        "source": records.source,
        "rows": records.rows,
        "layout": records.layout,
        "skipped": {
            reason: [_row(s.where) for s in records.skipped if s.reason == reason]
            for reason in Counter(s.reason for s in records.skipped)
        },
        "duplicate_copies": sum(len(group.records) - 1 for group in groups),
        "duplicates": [_group(group) for group in groups],
        "conflicting": [_group(group) for group in groups if group.conflicting],
        "conflicting_value": sum(group.disagree() for group in groups),
        "leaked_answers": [record.row for record in leaks(records)],
    }
    if checked:
        report["contamination"] = [_overlap(overlap) for overlap in contamination(records, evals)]
    return report


def _row(where: str) -> int:
    return int(where.rpartition(":")[2])


def _group(group: Duplicate) -> dict[str, Any]:
    return {"rows": [record.row for record in group.records], "answers": list(group.answers)}


def _overlap(overlap: Overlap) -> dict[str, Any]:
    return {
        "row": overlap.record.row,
        "benchmark": overlap.benchmark.where,
        "kind": overlap.kind,
        "share": round(overlap.share, 3),
        "same_answer": overlap.same_answer,
    }


def _show(report: dict[str, Any], limit: int) -> None:
    def some(items: list[Any]) -> str:
        shown = items if limit == 0 else items[:limit]
        more = f" and {len(items) - len(shown)} more" if len(items) > len(shown) else ""
        return ", ".join(str(item) for item in shown) + more

    def groups(key: str) -> str:
        return some(["=".join(map(str, group["rows"])) for group in report[key]])

    print(f"{report['source']}\n  {counted(report['rows'], 'row')}, layout {report['layout']}")
    for reason, rows in report["skipped"].items():
        print(f"  {reason}: {counted(len(rows), 'row')} left out: {some(rows)}")
    if report["duplicates"]:
        copies = counted(report["duplicate_copies"], "further copy")
        print(f"  duplicates: {copies} in {counted(len(report['duplicates']), 'group')}: {groups('duplicates')}")
    if report["conflicting"]:
        print(
            f"  conflicting answers: {len(report['conflicting'])} of these groups as written, "
            f"{report['conflicting_value']} beyond spelling: {groups('conflicting')}"
        )
    if report["leaked_answers"]:
        rows = report["leaked_answers"]
        print(f"  answer shown in the problem: {counted(len(rows), 'row')}: {some(rows)}")
    for kind, meaning in (("repeat", "the same problem"), ("near", "same wording, other number or question")):
        found = [hit for hit in report.get("contamination", []) if hit["kind"] == kind]
        if found:
            pairs = some([f"{hit['row']} ({hit['benchmark']})" for hit in found])
            print(f"  benchmark problems, {kind} ({meaning}): {counted(len(found), 'row')}: {pairs}")
    if report.get("contamination") == []:
        print("  benchmark problems: none")


def _write_clean(path: Path, records: list[Record], evals: list[Record]) -> None:
    from attnrl.verify import is_correct  # here: a report alone needs no worker processes

    def same(answer: str, other: str) -> bool:
        return is_correct(f"\\boxed{{{answer}}}", other)

    without = decontaminate(records, evals)
    cleaned = clean(without.records, same)
    with path.open("w", encoding="utf-8") as out:
        for record in cleaned.records:
            row = {**record.info, "problem": record.problem, "answer": list(record.answers), "from": record.where}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(
        f"{path}: {len(cleaned.records)} of {counted(len(records), 'row')} kept; left out: "
        f"{counted(len(without.overlaps), 'benchmark problem')}, {counted(cleaned.leaked, 'leaked answer')}, "
        f"{cleaned.conflicting} in {counted(cleaned.conflicts, 'group')} with conflicting answers, "
        f"{counted(cleaned.repeated, 'further copy')}"
        + (f" ({counted(cleaned.spelled, 'group')} conflicting as written but not in value)" if cleaned.spelled else "")
    )
