"""The report: one HTML file with the curves of run directories and a chosen part of their trees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnrl.analysis.curves import POINTS
from attnrl.analysis.index import Entry, index_file, pick_entries, read_entry
from attnrl.analysis.page import render, run_page, shell
from attnrl.analysis.pages import clip_page, forest_page, page_texts
from attnrl.analysis.positions import fci_by_position
from attnrl.analysis.records import RunRecord, distinct_names, read_run
from attnrl.checkpoint import write_whole
from attnrl.errors import ConfigError, MissingFileError

FORESTS = (12, 4)  # shown in one report, over all runs: of short responses, and of long ones
TEXT_BUDGET = 450_000  # characters of model output in a report of that many


def build_report(run_dirs: Sequence[Path], *, iterations: Sequence[int] = (), forests: int | None = None) -> str:
    """The report of one run, or of several to compare, as a self-contained HTML page.

    Its trees are the most telling ones of the first and the last iteration on record, or of `iterations`; `forests` of
    them over all runs.
    """
    records = [read_run(path, name) for path, name in named_runs(run_dirs)]
    limit = min(400, POINTS // len(records))
    runs = [run_page(record, limit, fci_by_position(record.forest_files)) for record in records]
    entries, pages = report_forests(records, iterations, forests)
    payload = shell(runs, forests=entries, pages=pages)
    return render("report", " · ".join(record.name for record in records), payload)


def write_report(
    run_dirs: Sequence[Path], output: Path, *, iterations: Sequence[int] = (), forests: int | None = None
) -> Path:
    """The file the report was written to, whole or not at all."""
    if output.is_dir():
        raise ConfigError(f"--output {output} is a directory; name a file, for example {output / 'report.html'}")
    return write_whole(output, build_report(run_dirs, iterations=iterations, forests=forests))


def named_runs(run_dirs: Sequence[Path]) -> list[tuple[Path, str]]:
    """The run directories with names that tell them apart."""
    paths = [Path(path) for path in run_dirs]
    if not paths:
        raise MissingFileError("name at least one run directory")
    for path in paths:
        inside = sorted(file.parent for file in path.glob("*/metrics.jsonl"))
        if inside and not (path / "config.json").exists():
            raise MissingFileError(f"{path} is no run directory, but holds some; give {' '.join(map(str, inside[:5]))}")
    return list(zip(paths, distinct_names(paths), strict=True))


def report_forests(
    records: Sequence[RunRecord], iterations: Sequence[int], forests: int | None
) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """The chosen forests as rows of the table and as pages, in the same order.

    Where responses are long and nobody asked for a number, fewer forests, so that what is left of each text after
    clipping can still be read.
    """
    pages: list[dict[str, Any]] = []
    chosen: list[tuple[int, Entry]] = []
    counts = FORESTS if forests is None else (forests,)
    indexed = [[e for file in chosen_files(record, iterations) for e in index_file(file)] for record in records]
    for count in counts:
        share = max(2, count // len(records))
        chosen = [(run, e) for run, entries in enumerate(indexed) for e in pick_entries(entries, share)]
        pages = [forest_page(read_entry(entry), records[run]) for run, entry in chosen]
        if sum(len(text) for page in pages for text in page_texts(page)) <= 2 * TEXT_BUDGET:
            break
    budget = TEXT_BUDGET * max(1, len(pages) // FORESTS[0]) // max(len(pages), 1)
    return [[run, *entry.row()] for run, entry in chosen], [clip_page(page, budget) for page in pages]


def chosen_files(record: RunRecord, iterations: Sequence[int]) -> list[Path]:
    """The forest files of these iterations; of the first and the last on record where none is named."""
    files = record.forest_files
    if not iterations:
        return list(dict.fromkeys([files[0], files[-1]])) if files else []
    by_iteration = {int(file.stem): file for file in files}
    missing = [i for i in iterations if i not in by_iteration]
    if missing:
        raise ConfigError(
            f"--iterations {missing[0]}: {record.name} has no forests of that iteration "
            f"({len(files)} on record{f', {min(by_iteration)} to {max(by_iteration)}' if files else ''})"
        )
    return [by_iteration[i] for i in sorted(set(iterations))]
