"""attnrl compare RUN_DIR ... [--at AXIS] [--baseline METHOD] [--format latex]

Compares runs at an equal budget. Runs whose configs are the same but for the
seed are one method; numbers are means over its seeds, differences are paired by
seed, intervals come from a bootstrap over seeds (none for one seed). Prints
tables in the form of the paper's Tables 1 to 3: accuracy by benchmark, cost,
and final and best accuracy, area under the curve, tokens and time to a target.

Examples:
  attnrl compare runs/grpo_s* runs/attnrl_s*
  attnrl compare runs/* --at tokens --baseline grpo --target 0.8
  attnrl compare runs/* --format latex --output tables.tex
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from attnrl.analysis.comparison import Axis, compare_runs
from attnrl.analysis.records import read_run
from attnrl.analysis.report import named_runs
from attnrl.analysis.tables import tables
from attnrl.cli.files import check_folder
from attnrl.cli.flags import read_flags
from attnrl.config import Section


class CompareFlags(Section):
    """The flags of `attnrl compare`."""

    run_dirs: tuple[Path, ...]
    """run directories of `attnrl train` with held-out evaluations."""
    at: Axis = "iterations"
    """What is equal: the least at which a run was last evaluated is the budget of all."""
    target: float | None = Field(None, ge=0, le=1)
    """Accuracy, from 0 to 1, whose cost is asked for; by default the worst final one of a method."""
    baseline: str | None = None
    """The method that differences are against; by default the first."""
    format: Literal["markdown", "latex"] = "markdown"
    """Of the tables."""
    output: Path | None = None
    """Where to write them; by default the terminal."""


def main(argv: list[str]) -> None:
    options, _ = read_flags(CompareFlags, argv, str(__doc__), words="run_dirs")
    check_folder("output", options.output)
    records = [read_run(path, name) for path, name in named_runs(options.run_dirs)]
    found = compare_runs(records, axis=options.at, target=options.target, baseline=options.baseline)
    text = tables(found, options.format)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)
        print(options.output)
